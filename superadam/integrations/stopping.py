"""How a run of a Trainer ends: after its last step, or on SIGTERM with a checkpoint, after the same step on all ranks.

The Trainer's own `enable_jit_checkpoint` lets each rank decide by itself: ranks that save after different steps wait
for each other forever.
"""

from __future__ import annotations

import os
import signal
from typing import Any, Self

import torch
from torch import distributed as dist

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import SaveStrategy
except ImportError as error:
    raise ImportError(
        f"superadam.integrations.stopping needs transformers ({error}); install superadam with its extra finetune"
    ) from error


def train_to_last_step(trainer: Trainer, checkpoint: str | None = None) -> None:
    """Train, from a checkpoint if one is given, make no step after the last one, and load one best checkpoint, if any.

    The Trainer alone makes one where it resumes the checkpoint of its last step within an epoch, and its ranks may load
    different ones, or wait for each other, where checkpoints hold shards.
    """
    batches_of_step = trainer.get_batch_samples

    def get_batch_samples(*arguments: Any, **named: Any) -> Any:
        if trainer.state.global_step < trainer.state.max_steps:
            return batches_of_step(*arguments, **named)
        trainer.control.should_training_stop = True
        return [], None

    trainer.get_batch_samples = get_batch_samples  # type: ignore[method-assign]
    trainer.callback_handler.callbacks.insert(0, _KnowsBest())  # others may forget it again
    trainer.train(resume_from_checkpoint=checkpoint)


class _KnowsBest(TrainerCallback):
    """Looks for the best checkpoint once it is there: the Trainer does before, when other ranks may have made it."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Name the checkpoint of the best step, if that was saved."""
        folder = os.path.join(str(args.output_dir), f"checkpoint-{state.best_global_step}")
        if state.best_global_step and os.path.isdir(folder):
            state.best_model_checkpoint = folder

    on_train_begin = on_save  # of a run that goes on


class SavesOnSignal(TrainerCallback):
    """Lets a Trainer save and stop at the end of a step after SIGTERM has come to any of its ranks.

    A context manager around `trainer.train()`, in the main thread. Ranks agree through a group of gloo of their own,
    whose answer is awaited a step later, so that no device waits: they stop after the step that follows the signal.

    Args:
        trainer: of transformers, or derived from it.

    Attributes:
        has_stopped: whether training was ended before its last step; the checkpoint is there then.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.has_stopped = False
        self._trainer = trainer
        self._is_asked = False
        self._group: dist.ProcessGroup | None = None
        self._answer: tuple[torch.Tensor, Any] | None = None

    def __enter__(self) -> Self:
        if dist.is_initialized() and dist.get_world_size() > 1:  # which may raise, before anything is changed
            self._group = dist.new_group(backend="gloo")
        self._before: Any = signal.signal(signal.SIGTERM, self._ask)
        self._trainer.add_callback(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._trainer.remove_callback(self)
        signal.signal(signal.SIGTERM, self._before)

    def _ask(self, *_: object) -> None:
        self._is_asked = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save and stop, if a rank was asked to; not after the last step, which ends training anyway."""
        if self._agreed() and state.global_step < state.max_steps:
            self.has_stopped = control.should_training_stop = True
            saves_at_end = args.save_strategy == SaveStrategy.EPOCH and not state.epoch % 1  # of this epoch
            control.should_save = not saves_at_end
            control.should_evaluate &= args.save_strategy != SaveStrategy.BEST  # else it decides whether to save

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the checkpoint of a run that stops: the Trainer would load the best one, and might delete this."""
        if self.has_stopped:
            state.best_model_checkpoint = None

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Neither evaluate nor save once more where training stops within an epoch."""
        if self.has_stopped and state.epoch % 1:
            control.should_save = control.should_evaluate = False

    def _agreed(self) -> bool:
        """Whether some rank had been asked one step ago; of one rank, whether it is asked now."""
        if self._group is None:
            return self._is_asked
        answer, asked = self._answer, torch.tensor([int(self._is_asked)], device="cpu")
        self._answer = asked, dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group, async_op=True)
        if answer is None:
            return False
        value, work = answer
        work.wait()
        return bool(value.item())
