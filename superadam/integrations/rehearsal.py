"""A run of several GPUs, tried on CPUs before machines are rented: a small model of the same kind, with all ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "sliding_window": 8,
}
"""What a configuration has of these becomes that small."""


def words(given: Sequence[str], in_file: Sequence[str] = ()) -> list[str]:
    """Return the words of a file and of a command line, between them those that make a rehearsal small if one is due.

    It is where the last word about it asks for one. What the command line gives counts more than what the file does.
    """
    every = [*in_file, *given]
    at = [number for number, word in enumerate(every) if word.partition("=")[0] == "--rehearse"]
    after = [every[number].partition("=")[2] or (*every[number + 1 :], "true")[0] for number in at]
    if not after or after[-1].lower() in ("false", "no", "0"):
        return every
    usual = {"use_cpu": "true", "max_steps": 4, "max_length": SIZES["max_position_embeddings"], "logging_steps": 1}
    return [*in_file, *(word for name, value in usual.items() for word in (f"--{name}", str(value))), *given]


def small(config: Any, vocabulary: int) -> Any:
    """Return a model's configuration with few and narrow layers of the same kind, for a tokenizer of so many words."""
    values = config.to_dict()
    for name in ("layer_types", "rope_parameters", "rope_scaling", "quantization_config"):
        values.pop(name, None)  # they follow from sizes
    sizes = {name: value for name, value in SIZES.items() if isinstance(values.get(name), int)}
    return type(config)(**{**values, **sizes, "vocab_size": vocabulary, "pad_token_id": None})


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
