"""The check of a run's memory before its weights are loaded, by the sums of `superadam plan`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from superadam.host.local_ranks import local_rank
from superadam.host.machine import Host
from superadam.host.memory import HostMemory, gigabytes
from superadam.plan import UnplannableError, machines
from superadam.plan.machines import Kind, Rate
from superadam.plan.memory import Setting, Subject, memory_of
from superadam.plan.remedies import remedies


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
    """Check that training all parameters in bf16 fits on this rank's GPU and its share of the host; takes seconds.

    Raises MemoryError, which names the stage, and each smallest change with which it fits. A model whose memory cannot
    be found out, and a host that does not tell its memory, are not refused.
    """
    host = host or Host()
    try:
        share = HostMemory.of(host).limit // local_rank(host).count
        machine = replace(
            machines.read("h100"),
            gpu_memory=Rate(gpu_bytes, Kind.MEASURED, "this GPU"),
            host_memory=Rate(share, Kind.MEASURED, "this host"),
        )
        subject = Subject.of(config)
        memory = memory_of(subject, setting, machine)
    except (UnplannableError, OSError, ValueError):
        return
    if memory.trains:
        return
    place, stage, size, limit = memory.problems[0]
    where = "" if place == "host" else f" at {stage}"
    fits = [fit.setting for fit in remedies(subject, setting, machine) if fit.setting.flows == setting.flows]
    advice = f"choose {' or '.join(_options(changed, setting) for changed in fits)}"
    if not fits:
        advice = "no option of this program suffices: train a smaller model, or shorter sequences (--max_length)"
    raise MemoryError(
        f"training needs about {gigabytes(size)} of the {place}'s memory{where}, but this rank can have "
        f"{gigabytes(limit)} at most; {advice}"
    )


def _options(changed: Setting, setting: Setting) -> str:
    """Return what turns one setting into the other, as options of `examples/finetune.py`."""
    words = {
        "--loss_type nll": changed.loss != setting.loss,
        "--activation_checkpointing true": changed.checkpointing != setting.checkpointing,
        f"--moments {changed.moments} --master {changed.master}": changed.moments != setting.moments,
        f"--per_device_train_batch_size {changed.sequences}": changed.sequences != setting.sequences,
        f"{changed.ranks} ranks, each with as much memory": changed.ranks != setting.ranks,
    }
    return " ".join(option for option, is_changed in words.items() if is_changed)
