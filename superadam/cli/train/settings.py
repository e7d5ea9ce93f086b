"""Settings of a run: the plain values that a checkpoint carries to continue the same run, their defaults and limits."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from superadam.cli.train.plain import record_of_plain
from superadam.cli.train.presets import Shape
from superadam.cli.usage import UsageError
from superadam.offload.placement import numel_of_buckets

BYTE_MODEL = "bytes"
"""Name of the model that `layers`, `width` and `heads` shape."""

CHANGEABLE = frozenset(
    {"text", "steps", "device", "threads", "checkpointing", "overlap", "bucket_numel", "gpu_buckets", "num_threads"}
)
"""Settings that `--resume` may change: how long, where, what is kept for backward and when the optimizer works (which
change no bit), and the path of the text, whose digest is compared."""

_OPTIONS = {"shape": "--model"}
"""Options whose name is not that of their setting."""

_LEAST = dict.fromkeys(("steps", "batch", "seq", "layers", "width", "heads", "threads"), 1) | {"warmup": 0, "seed": 0}
_LEAST_OR_AUTO = {"bucket_numel": 1, "gpu_buckets": 0, "num_threads": 1}
_MOST = 2**31 - 1

_LEAST_AUTO_NUMEL = 64 * 1024
"""Minimum of "auto": a smaller bucket would take less time than handing it over."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The values that shape a run.

    Attributes:
        text: path of the text to learn, or None for the sources of Python's standard library.
        steps: step at which the run is complete; also where the learning rate's cosine ends.
        dtype: "bf16" (parameters are bf16 working copies of fp32 masters) or "fp32".
        max_grad_norm: limit on the global gradient norm; infinity for none.
        lr: peak learning rate.
        warmup: updates over which the learning rate rises linearly to `lr`.
        weight_decay: decoupled decay of matrices; vectors are never decayed.
        batch, seq: sequences in a step, and bytes in a sequence that are predicted.
        shape: of the decoder that is trained, or None for the byte transformer of `layers`, `width` and `heads`.
        layers, width, heads: shape of the byte transformer; without effect if `shape` is given.
        checkpointing: whether backward recomputes each block instead of keeping its activations.
        seed: of the initial weights and the batches.
        device: where the model computes, "cpu" or "cuda" with an optional index.
        threads: of torch and of superadam, or None for one per CPU that this process may use.
        overlap: whether the optimizer works while backward runs, or in a step of its own after it.
        bucket_numel: elements that it works on together when overlapped; "auto" for an eighth of the model.
        gpu_buckets: buckets whose state stays on a GPU when overlapped; "auto" for what measured times and free memory
            suggest.
        num_threads: that it uses while the model computes; "auto" for the cores that the model leaves idle, or else
            one.
    """

    text: str | None = None
    steps: int = 300
    dtype: str = "bf16"
    max_grad_norm: float = 1.0
    lr: float = 1.5e-3
    warmup: int = 50
    weight_decay: float = 0.1
    batch: int = 16
    seq: int = 128
    shape: Shape | None = None
    layers: int = 4
    width: int = 256
    heads: int = 4
    checkpointing: bool = False
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    overlap: bool = True
    bucket_numel: int | str = "auto"
    gpu_buckets: int | str = "auto"
    num_threads: int | str = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "fp32"):
            raise UsageError(f"--dtype is {self.dtype!r}; expected bf16 or fp32")
        for name, least in (_LEAST | _LEAST_OR_AUTO).items():
            value = getattr(self, name)
            is_automatic = (name in _LEAST_OR_AUTO and value == "auto") or (name == "threads" and value is None)
            if not is_automatic and not (isinstance(value, int) and least <= value <= _MOST):
                option, auto = "--" + name.replace("_", "-"), "auto or " if name in _LEAST_OR_AUTO else ""
                raise UsageError(f"{option} is {value}; expected {auto}an integer from {least} to {_MOST}")
        if not 0.0 < self.lr < math.inf:
            raise UsageError(f"--lr is {self.lr}; expected a finite number above 0")
        if not 0.0 <= self.weight_decay < math.inf:
            raise UsageError(f"--weight-decay is {self.weight_decay}; expected a finite number of at least 0")
        if not self.max_grad_norm > 0.0:
            raise UsageError(f"--max-grad-norm is {self.max_grad_norm}; expected a number above 0, or inf for no limit")
        if self.shape is None and self.width % (2 * self.heads):
            raise UsageError(f"--width is {self.width}; expected a multiple of twice --heads, which is {self.heads}")

    @property
    def model(self) -> str:
        """Name of what is trained, as in the `--model` option."""
        return BYTE_MODEL if self.shape is None else self.shape.name

    def lr_factor(self, updates: int) -> float:
        """Return what `lr` is multiplied by after `updates` updates: linear warm-up, then a cosine down to a tenth."""
        if updates < self.warmup:
            return (updates + 1) / (self.warmup + 1)
        progress = min(1.0, (updates - self.warmup) / max(1, self.steps - self.warmup))
        return 0.55 + 0.45 * math.cos(math.pi * progress)

    def elements_of_bucket(self, parameters: int) -> int:
        """Return the elements of a bucket in a model of this number of `parameters`."""
        if isinstance(self.bucket_numel, int):
            return self.bucket_numel
        return numel_of_buckets(parameters, _LEAST_AUTO_NUMEL)

    def continued(self, explicit: dict[str, Any]) -> Settings:
        """Return these settings with the `explicit` ones given for the continued run.

        Raises:
            UsageError: a setting would make it another run.
        """
        for name, value in explicit.items():
            if name not in CHANGEABLE and value != getattr(self, name):
                option = _OPTIONS.get(name, "--" + name.replace("_", "-"))
                before, after = (BYTE_MODEL if shown is None else shown for shown in (getattr(self, name), value))
                raise UsageError(
                    f"the run to resume has {option} {before}, not {after}; leave {option} out, "
                    "or start a new run without --resume"
                )
        return dataclasses.replace(self, **explicit)

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> Settings:
        """Return what `dataclasses.asdict` was given.

        Raises:
            TypeError, KeyError, ValueError, UsageError: it was something else.
        """
        plain = {**plain}  # whatever is none raises
        shape = plain["shape"]
        return record_of_plain(Settings, {**plain, "shape": None if shape is None else record_of_plain(Shape, shape)})
