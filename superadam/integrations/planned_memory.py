"""The check of a run's memory before its weights are loaded, by the sums of `superadam plan`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from superadam.host.local_ranks import local_rank
from superadam.host.machine import Host
from superadam.host.memory import HostMemory, gigabytes
from superadam.plan import UnplannableError, machines
from superadam.plan.activations import Activations
from superadam.plan.machines import Kind, Machine, Rate
from superadam.plan.memory import Setting, Subject, activations_for, memory_of


def setting_of(training: Any, moments: str, master: str) -> Setting:
    """Return how a run of TRL's `SFTConfig` trains, as far as it counts for memory."""
    return Setting(
        sequences=training.per_device_train_batch_size,
        tokens=training.max_length or 1024,
        micro_batches=training.gradient_accumulation_steps,
        ranks=training.world_size,
        loss="chunked" if "nll" in training.loss_type else "full",
        moments=moments,
        master=master,
        checkpointing=bool(training.activation_checkpointing),
    )


def check_memory(config: PreTrainedConfig, setting: Setting, gpu_bytes: int, host: Host | None = None) -> None:
    """Check that training a model fits on this rank's GPU and its share of the host. Nothing is loaded; takes seconds.

    Args:
        config: of the model, of which all parameters are trained in bf16.
        setting: how; `ranks` is the number of all.
        gpu_bytes: memory of the GPU.
        host: for tests.

    Raises:
        MemoryError: it does not; the message names the stage, and each smallest change with which it does. A model
            whose memory cannot be found out, and a host that does not tell its memory, are not refused.
    """
    host = host or Host()
    try:
        share = HostMemory.of(host).limit // local_rank(host).count
        subject = Subject.of(config)
        found = activations_for(subject, setting)
    except (UnplannableError, OSError, ValueError):
        return
    machine = replace(
        machines.read("h100"),
        gpu_memory=Rate(gpu_bytes, Kind.MEASURED, "this GPU"),
        host_memory=Rate(share, Kind.MEASURED, "this host"),
    )
    memory = memory_of(subject, setting, machine, found)
    if memory.trains:
        return
    place, stage, size, limit = memory.problems[0]
    where = "" if place == "host" else f" at {stage}"
    raise MemoryError(
        f"training needs about {gigabytes(size)} of the {place}'s memory{where}, but this rank can have "
        f"{gigabytes(limit)} at most; {_remedy(subject, setting, machine, found)}"
    )


def _remedy(subject: Subject, setting: Setting, machine: Machine, found: Activations) -> str:
    """Return changes with which training fits, each by itself; where none does, all of them together, or neither."""

    def trains(changed: Setting) -> bool:
        same = ("sequences", "loss", "checkpointing")
        is_same = all(getattr(changed, name) == getattr(setting, name) for name in same)
        return memory_of(subject, changed, machine, found if is_same else activations_for(subject, changed)).trains

    changes: dict[str, dict[str, Any]] = {
        "--loss_type nll": {"loss": "chunked"},
        "--activation_checkpointing true": {"checkpointing": True},
        "--moments bf16 --master 24bit": {"moments": "bf16", "master": "24bit"},
        "--moments 8bit --master 24bit": {"moments": "8bit", "master": "24bit"},
        "--per_device_train_batch_size 1": {"sequences": 1},
    }
    changed = {words: replace(setting, **change) for words, change in changes.items()}
    changed = {words: one for words, one in changed.items() if one != setting}
    more = {
        f"{setting.ranks << n} ranks, each with as much": replace(setting, ranks=setting.ranks << n) for n in (1, 2, 3)
    }
    if alone := [words for words, one in changed.items() if trains(one)]:
        return f"choose {' or '.join(alone)}"
    changed.pop("--moments bf16 --master 24bit", None)
    together = {name: value for words in changed for name, value in changes[words].items()}
    if changed and trains(replace(setting, **together)):
        return f"choose {' '.join(changed)}"
    if enough := [words for words, one in more.items() if trains(one)]:
        return f"start {enough[0]}"
    return "no option of this program suffices: train a smaller model, or shorter sequences (--max_length)"
