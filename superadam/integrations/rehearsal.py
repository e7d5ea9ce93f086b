"""FSDP2 on CPUs, where a run of several GPUs is tried before machines are rented."""

from __future__ import annotations

import os
from typing import Any


def fsdp_version(training: Any) -> str | None:
    """Return the version of FSDP that a Trainer's arguments ask for, or `accelerate launch` does; None for none."""
    if training.fsdp:
        return str((training.fsdp_config or {}).get("version", 2))
    is_asked_for = os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes")
    return os.environ.get("FSDP_VERSION", "1") if is_asked_for else None


def shard_on_cpus() -> None:
    """Let Accelerate shard with FSDP2 on CPUs, for which it has no name of its own.

    Call it when the `TrainingArguments` are made, which begin anew there, and before the Trainer is.
    Its process group, of gloo, exists already, so that the name of another device changes nothing else.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if PartialState().distributed_type == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
