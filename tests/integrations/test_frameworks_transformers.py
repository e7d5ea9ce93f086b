"""The Trainer of transformers with its own loop: the bits with a scheduler are those without."""

from __future__ import annotations

import copy
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from support.frameworks import (
    VOCABULARY,
    Run,
    Sentences,
    Training,
    adamw,
    assert_same,
    compare,
    dtypes,
    everything_in,
    history,
)
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainerState, TrainingArguments

DEEP = os.environ.get("SUPERADAM_DEEP") == "1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("one_torch_thread", "no_network"),
]


class Examples(Dataset[dict[str, Tensor]]):
    """Sentences as language models of transformers take them."""

    def __init__(self, count: int = 14) -> None:
        self.sentences = Sentences(count, 20)

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.sentences[index]
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def llama(dtype: torch.dtype, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes, **heads, **options)).to(dtype)


class Opening(TrainerCallback):
    """Opens the scheduler when training begins: the optimizer is wrapped by then, and a checkpoint is loaded."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_begin(self, *_: Any, model: nn.Module, optimizer: Any, **__: Any) -> None:
        self.run.open(optimizer.optimizer, model)


class Closing(Opening):
    """Closes it again when training ends."""

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.run.close()


class Editing(Opening):
    """Looks at gradients before a step, and edits some of them."""

    def on_pre_optimizer_step(self, _: Any, state: TrainerState, *__: Any, model: nn.Module, **___: Any) -> None:
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        self.run.logged.append({name: gradient.norm() for name, gradient in gradients.items() if gradient is not None})
        if state.global_step % 4 == 2:
            first, second, third = list(model.parameters())[1:4]
            first.grad *= 3  # type: ignore[operator]
            second.grad[0] = 0.5  # type: ignore[index]
            third.grad = None


class Around(TrainerCallback):
    """Leaves it to others to open the scheduler, around all that the Trainer does."""

    def __init__(self, run: Run) -> None: ...


def prepared(
    run: Run,
    folder: Path,
    dtype: torch.dtype,
    *,
    model: dict[str, Any] | None = None,
    callback: type[TrainerCallback] = Opening,
    lr: float = 1e-2,
    size: float = 1.0,
    **arguments: Any,
) -> Trainer:
    """Return a Trainer with a learning rate that declines; `size` multiplies the model's weights."""
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    often = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "logging_steps": 1}
    chosen = TrainingArguments(str(folder), **{"save_strategy": "no", **quiet, **often, **arguments})
    trained = llama(dtype, **(model or {}))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(size)
    optimizer = adamw(trained, lr=lr)
    if callback is Around:
        run.open(optimizer, trained)
    data = {"train_dataset": Examples(), "eval_dataset": Examples(4)}
    return Trainer(trained, chosen, **data, optimizers=(optimizer, None), callbacks=[callback(run)])


def training(folder: Path, dtype: torch.dtype, *, resume: str | None = None, **options: Any) -> Training:
    """Return a run of the Trainer."""

    def train(run: Run) -> None:
        trainer = prepared(run, folder, dtype, **options)
        trainer.train(resume_from_checkpoint=resume)
        run.logged += history(trainer.state.log_history)

    return train


def norms(everything: dict[str, Any]) -> list[float]:
    """Return what the Trainer logged as gradient norms."""
    return [float(value) for name, value in everything.items() if name.endswith("grad_norm")]


@dtypes
def test_limit_that_clips_some_steps(tmp_path: Path, dtype: torch.dtype) -> None:
    seen = norms(compare(training(tmp_path, dtype, max_grad_norm=1.0), dtype))
    assert len(seen) == 14
    assert min(seen) < 1.0 < max(seen)


def test_limit_that_clips_every_step(tmp_path: Path) -> None:
    assert min(norms(compare(training(tmp_path, torch.bfloat16, max_grad_norm=0.1), accepts=False))) > 0.1


class Counting(Opening):
    """Keeps the scheduler's counts after each step."""

    def on_step_end(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        for scheduler in self.run.schedulers:
            self.run.kept[state.global_step] = copy.copy(scheduler.optimizer.statistics)


def test_training_whose_every_step_the_default_limit_clips_is_speculated_on(tmp_path: Path) -> None:
    """With a learning rate as in fine-tuning, most values are published as they were speculated on."""
    seen = []
    for scheduled in (False, True):
        run = Run(scheduled=scheduled)
        fine_tuning = {
            "per_device_train_batch_size": 7,
            "learning_rate": 1e-5,
            "num_train_epochs": 35,
            "lr_scheduler_type": "linear",
        }
        trainer = prepared(run, tmp_path, torch.bfloat16, callback=Counting, lr=1e-5, size=3.0, **fine_tuning)
        trainer.train()
        run.logged += history(trainer.state.log_history)
        seen.append(run.everything())
        run.close()
    assert_same(*seen)
    assert len(norms(seen[0])) == 70
    assert min(norms(seen[0])) > 1.0
    before, after = run.kept[20], run.kept[70]
    counts = {one.name: getattr(after, one.name) - getattr(before, one.name) for one in fields(after)}
    assert counts["accepted"] >= 0.8 * 50 * len([*trainer.model.parameters()]), counts


def test_no_limit(tmp_path: Path) -> None:
    """The Trainer asks for norms all the same, with a limit that is infinite."""
    assert len(norms(compare(training(tmp_path, torch.bfloat16, max_grad_norm=0.0)))) == 14


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize("steps", [2, 3])
def test_accumulation_with_fewer_at_the_end_of_an_epoch(tmp_path: Path, dtype: torch.dtype, steps: int) -> None:
    accumulated = training(tmp_path, dtype, gradient_accumulation_steps=steps, max_grad_norm=2.0)
    assert len(norms(compare(accumulated, dtype))) == {2: 8, 3: 6}[steps]


@pytest.mark.covering(1)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(tmp_path: Path, reentrant: bool, accumulation: int) -> None:
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    compare(training(tmp_path, torch.bfloat16, gradient_accumulation_steps=accumulation, **checkpointing))


def test_tied_weights(tmp_path: Path) -> None:
    compare(training(tmp_path, torch.bfloat16, model={"tie_word_embeddings": True}))


def test_autocast(tmp_path: Path) -> None:
    compare(training(tmp_path, torch.float32, bf16=True), torch.float32)


def test_scheduler_that_was_open_before(tmp_path: Path) -> None:
    compare(training(tmp_path, torch.bfloat16, callback=Around))


def test_gradients_that_a_callback_edits(tmp_path: Path) -> None:
    compare(training(tmp_path, torch.bfloat16, callback=Editing, max_grad_norm=0.0))


@pytest.mark.parametrize(
    "place",
    ["on_pre_optimizer_step", "on_substep_end", *(["on_optimizer_step", "on_step_end"] if DEEP else [])],
)
def test_training_that_goes_on_after_an_interruption(tmp_path: Path, place: str) -> None:
    """The scheduler stays open, and what is left in `.grad` counts as it would without."""

    class Interrupting(TrainerCallback):
        def stop(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
            if state.global_step == 2 and not self.stopped:
                self.stopped = True
                raise KeyboardInterrupt

        stopped = False

    setattr(Interrupting, place, Interrupting.stop)

    def train(run: Run) -> None:
        interrupting = Interrupting()
        accumulating = {"gradient_accumulation_steps": 2, "max_grad_norm": 2.0}
        trainer = prepared(run, tmp_path, torch.bfloat16, callback=Around, **accumulating)
        trainer.add_callback(interrupting)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert interrupting.stopped
        trainer.train()
        run.logged += history(trainer.state.log_history)

    compare(train)


def test_norms_that_are_rarely_logged(tmp_path: Path) -> None:
    """The Trainer asks for them in every step, and for their values now and then."""
    compare(training(tmp_path, torch.bfloat16, logging_steps=4))


def test_evaluation_and_saving_in_the_middle(tmp_path: Path) -> None:
    """At the end the best weights are loaded, over those that were trained."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    seen = compare(training(tmp_path, torch.bfloat16, load_best_model_at_end=True, **evaluation))
    assert sum(name.endswith("eval_loss") for name in seen) == 7


def test_resumption(tmp_path: Path) -> None:
    """A checkpoint is the same, and is continued alike, whether or not a scheduler was at work before or is now."""
    ways = [False, True]
    saving = {"save_strategy": "steps", "save_steps": 5, "callback": Closing}
    folders = {scheduled: tmp_path / str(scheduled) for scheduled in ways}
    whole = [
        everything_in(training(folders[scheduled], torch.bfloat16, **saving), scheduled=scheduled, accepts=True)
        for scheduled in ways
    ]
    assert_same(*whole)
    for saved, scheduled, callback in [(True, False, Opening), (False, True, Opening), (True, True, Around)]:
        checkpoint = str(folders[saved] / "checkpoint-5")
        resumed = training(tmp_path, torch.bfloat16, resume=checkpoint, callback=callback)
        assert_same(whole[0], everything_in(resumed, scheduled=scheduled, accepts=True))
