"""`offload(trainer)`: the one line with which a `transformers.Trainer` trains with superadam."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import sys
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.serialization import config as serialization

from superadam.host.memory import gigabytes
from superadam.host.signals import THIS_THREAD
from superadam.integrations.rehearsal import fsdp_version
from superadam.offload.scheduler import OffloadScheduler
from superadam.optim.adam import SpeculativeCPUAdam, SpeculativeCPUAdamW
from superadam.optim.arguments import checked_storage, parameters_of, without_wrapper

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.training_args import ParallelMode
except ImportError as error:
    raise ImportError(
        f"superadam.integrations.transformers needs transformers ({error}); install superadam with its extra finetune"
    ) from error

LOGGED = ("committed", "clipped", "skipped", "accepted")
"""Counts of `superadam.Statistics` that are added to the Trainer's log."""

_logger = logging.getLogger("superadam")


def offload(
    trainer: Trainer, *, moments: str | None = None, master: str | None = None, **scheduler_options: Any
) -> OffloadCallback:
    """Let a Trainer, of transformers or derived from it as TRL's are, train with superadam during backward.

    Call it after the Trainer was made and before `train()`. The Adam or AdamW that the Trainer makes is replaced by
    ours, with the same groups: a `create_optimizer` of a subclass counts, and so do `trainer.args` at that time. The
    Trainer clips, schedules, logs and saves as ever. Its log gets `superadam_committed`, `_clipped`, `_skipped` (steps
    since the last log), `_accepted` (parameters whose speculation was published) and `superadam_hidden_share`.

    With TRL's `SFTConfig`, which says how long sequences are, it warns where the GPU's memory will not suffice, by the
    sums of `superadam plan`, and says what to change.

    Args:
        trainer: whose optimizer was not made yet, or is a `SpeculativeCPUAdam`.
        moments, master: of `superadam.SpeculativeCPUAdam`, for the optimizer that takes the place of the Trainer's;
            None for the default, or for what an optimizer of ours has.
        scheduler_options: of `superadam.OffloadScheduler`.

    Returns:
        The callback, which has the scheduler while `train()` runs.

    Raises:
        RuntimeError: the Trainer has another optimizer already, trains with superadam already, or trains with
            DeepSpeed, DistributedDataParallel or FSDP1.
        TypeError: this is no Trainer, or the scheduler has no such option; or, from `train()`, the Trainer made another
            optimizer.
        ValueError: `moments` or `master` names no format, or, perhaps from `train()`, an optimizer of ours has another;
            or, from `train()`, an option of the scheduler is out of range.

    Whatever this raises, the Trainer was not changed.

    How Trainers are used: https://github.com/superadam/superadam/blob/main/docs/frameworks.md
    """
    inspect.signature(OffloadScheduler).bind(None, None, **scheduler_options)
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"trainer is a {type(trainer).__name__}, expected a Trainer of transformers or one derived from it; pass "
            "the one that it has"
        )
    if any(isinstance(callback, OffloadCallback) for callback in trainer.callback_handler.callbacks):
        raise RuntimeError("offload() was called for this Trainer already, expected one call; leave out this one")
    made = without_wrapper(trainer.optimizer)
    if made is not None and not isinstance(made, SpeculativeCPUAdam):
        raise RuntimeError(
            f"the Trainer has an optimizer already, {type(made).__name__}, expected none or a SpeculativeCPUAdam; "
            "call offload() before train(), or pass optimizers=(SpeculativeCPUAdamW(...), None)"
        )
    storage = {name: value for name, value in (("moments", moments), ("master", master)) if value is not None}
    checked_storage(**{"moments": "fp32", "master": "fp32", **storage})
    if made is not None:
        _replacement(made, storage)
    _check_way_of_training(trainer)
    _warn_of_memory(trainer, storage)
    callback = OffloadCallback(trainer, scheduler_options, storage)
    trainer.callback_handler.callbacks.insert(0, callback)  # before those that report what it logs
    trainer.train = callback._train_and_close  # type: ignore[method-assign]
    trainer.create_optimizer = callback._create_and_replace  # type: ignore[method-assign]
    return callback


def _check_way_of_training(trainer: Trainer) -> None:
    """Raise RuntimeError where something else owns gradients or optimizer."""
    instead = "train on several GPUs with FSDP2: accelerate launch with fsdp_version: 2 and TRANSFORMER_BASED_WRAP"
    if trainer.is_deepspeed_enabled:
        raise RuntimeError(f"the Trainer uses DeepSpeed, which has its own optimizer and offload; {instead}")
    if trainer.is_fsdp_enabled:
        version = getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1)
        if version != 2:
            raise RuntimeError(f"the Trainer uses FSDP{version}, whose shards a scheduler cannot follow; {instead}")
    elif getattr(trainer, "is_distributed_loading_by_transformers", False):
        return  # sharded when it was loaded, by fully_shard; else the scheduler refuses it
    elif trainer.args.parallel_mode == ParallelMode.DISTRIBUTED and trainer.args.world_size > 1:
        if trainer.args.device.type == "cpu" and fsdp_version(trainer.args) == "2":
            raise RuntimeError(
                "Accelerate shards no model on CPUs, although FSDP2 was asked for; call shard_on_cpus() of "
                "superadam.integrations.rehearsal between TrainingArguments and Trainer, or train on GPUs"
            )
        raise RuntimeError(
            "the Trainer would use DistributedDataParallel, which reduces gradients after a scheduler has taken them; "
            f"{instead}"
        )


def _warn_of_memory(trainer: Trainer, storage: dict[str, str]) -> None:
    """Warn where training does not fit by the sums of `superadam plan`, if TRL's arguments say how long sequences are.

    Of what the host is short, the scheduler refuses.
    """
    arguments, trl = trainer.args, sys.modules.get("trl")
    model: Any = trainer.model
    if trl is None or not isinstance(arguments, trl.SFTConfig) or arguments.device.type != "cuda":
        return
    if not all(parameter.requires_grad for parameter in model.parameters()):
        return  # an adapter
    from superadam.integrations.planned_memory import check_memory, setting_of  # with a plan's modules

    setting = setting_of(arguments, **{"moments": "fp32", "master": "fp32", **storage})
    with THIS_THREAD.without_handlers:
        try:
            check_memory(model.config, setting, torch.cuda.mem_get_info(arguments.device)[1])
        except MemoryError as error:
            _logger.warning("%s", error)


class OffloadCallback(TrainerCallback):
    """Opens a scheduler when training begins, and tells the Trainer's log what it did.

    Attributes:
        scheduler: while `train()` runs; None otherwise.
    """

    def __init__(self, trainer: Trainer, scheduler_options: dict[str, Any], storage: dict[str, str]) -> None:
        self.scheduler: OffloadScheduler | None = None
        self._trainer = trainer
        # Bound methods, no closures: a copy or pickle of the Trainer has its own.
        self._train, self._create = trainer.train, trainer.create_optimizer
        self._is_training = False
        self._options = scheduler_options
        self._storage = storage
        self._mapping = contextlib.ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of the Trainer has, which opens a scheduler of its own when it trains."""
        return {**self.__dict__, "scheduler": None, "_is_training": False}

    def _train_and_close(self, *arguments: Any, **named: Any) -> Any:
        self._is_training = True
        try:
            return self._train(*arguments, **named)
        finally:  # an error or Ctrl-C calls no callback
            self._is_training = False
            self.close()

    def _create_and_replace(self, *arguments: Any, **named: Any) -> Optimizer:
        """Replace the Trainer's optimizer; until training begins, `torch.load` maps files, copied tensor by tensor."""
        trainer = self._trainer
        if trainer.optimizer is None:
            self._create(*arguments, **named)
            made, trainer.optimizer = trainer.optimizer, None
            trainer.optimizer = _replacement(made, self._storage)
        if self._is_training and not trainer.is_fsdp_enabled:  # it loads `optimizer.pt` next; of shards, buffers
            self._mapping.enter_context(serialization.patch("load.mmap", True))  # type: ignore[attr-defined]
        return trainer.optimizer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the scheduler: model and optimizer are prepared by now, and a checkpoint is loaded."""
        self.close()  # that of an attempt with another batch size
        model: Any = self._trainer.model  # SetFit gives callbacks another
        self.scheduler = OffloadScheduler(kwargs["optimizer"], model, **self._options)
        self._began = self._logged = copy.copy(self.scheduler.optimizer.statistics)
        _warn_of_float32(self.scheduler.optimizer, model)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add what was counted since the last log, or in all at the end, to what reporters see and what is kept."""
        scheduler, logs = self.scheduler, kwargs["logs"]
        if scheduler is None or not ("loss" in logs or "train_loss" in logs):
            return
        now, before = scheduler.optimizer.statistics, self._logged if "loss" in logs else self._began
        counts: dict[str, float] = {f"superadam_{name}": getattr(now, name) - getattr(before, name) for name in LOGGED}
        counts["superadam_hidden_share"] = round(scheduler.statistics.hidden_share, 4)
        logs.update(counts)
        if state.log_history:
            state.log_history[-1].update(counts)
        self._logged = copy.copy(now)

    def close(self) -> None:
        """Close the scheduler, if one is open, and map no more files."""
        self._mapping.close()
        scheduler, self.scheduler = self.scheduler, None
        if scheduler is not None:
            scheduler.close()


def _replacement(optimizer: Optimizer | None, storage: dict[str, str]) -> SpeculativeCPUAdam:
    """Return ours with the groups of an Adam that has made no step; one that is ours stays, if it is stored so."""
    if isinstance(optimizer, SpeculativeCPUAdam):
        for name, value in storage.items():
            if (present := getattr(optimizer, name)) != value:
                raise ValueError(
                    f"the Trainer's optimizer has {name}={present!r}, and offload() was given {name}={value!r}; "
                    "leave it out of offload()"
                )
        return optimizer
    if optimizer is None or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise TypeError(
            f"the Trainer made {type(optimizer).__name__}, expected torch.optim.Adam or AdamW, which superadam "
            "replaces; turn off what makes another one, or train without offload()"
        )
    defaults = {name: value for name, value in optimizer.defaults.items() if name != "decoupled_weight_decay"}
    kind = SpeculativeCPUAdamW if type(optimizer) is torch.optim.AdamW else SpeculativeCPUAdam
    made = kind(optimizer.param_groups, **(defaults | storage))
    hooks = {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")}
    vars(made).update(hooks)  # these objects themselves, so that handles remove them
    return made


def _warn_of_float32(optimizer: SpeculativeCPUAdam, model: nn.Module) -> None:
    """Warn of most weights being fp32 on a device, where they and gradients take twice the memory of bf16."""
    trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
    wide = sum(p.numel() for p in trained if p.dtype == torch.float32 and p.device.type != "cpu")
    if 2 * wide > sum(parameter.numel() for parameter in model.parameters()):
        _logger.warning(
            "%s parameters are fp32 on the device, where weights and gradients take %s more than in bf16, although the "
            "optimizer keeps fp32 masters; load the model with dtype=torch.bfloat16 (TRL: --dtype bfloat16), and under "
            "FSDP2 set bf16: false, because Accelerate makes fp32 shards of a bf16 model otherwise",
            f"{wide:,}",
            gigabytes(4 * wide),
        )
