"""Settings of a run: the plain values that a checkpoint carries to continue the same run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from superadam.cli.train.presets import PRESETS, Preset
from superadam.cli.usage import UsageError

CHANGEABLE = frozenset({"text", "steps", "device", "threads", "overlap"})
"""Settings that `--resume` may change: how long, where, when the optimizer works (which changes no bit), and the path
of the text, whose digest is compared."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The values that shape a run.

    Attributes:
        model: name of the preset that is trained.
        text: path of the text to learn, or None for the sources of Python's standard library.
        dtype: "bf16" (parameters are bf16 working copies of fp32 masters) or "fp32".
        moments, master: how the optimizer stores them, as `superadam.SpeculativeCPUAdam` takes it.
        steps: step at which the run is complete; also where the learning rate's cosine ends.
        batch, seq: sequences in a step, and bytes in a sequence that are predicted.
        lr: peak learning rate.
        warmup: updates over which the learning rate rises linearly to `lr`.
        max_grad_norm: limit on the global gradient norm; infinity for none.
        seed: of the initial weights and the batches.
        device: where the model computes, "cpu" or "cuda" with an optional index.
        threads: of torch and of superadam, or None for one per CPU that this process may use.
        overlap: whether the optimizer works while backward runs, or in a step of its own after it.
    """

    model: str
    batch: int
    seq: int
    lr: float
    text: str | None = None
    dtype: str = "bf16"
    moments: str = "fp32"
    master: str = "fp32"
    steps: int = 300
    warmup: int = 50
    max_grad_norm: float = 1.0
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    overlap: bool = True

    @staticmethod
    def new(explicit: dict[str, Any]) -> Settings:
        """Return the settings of a new run: the explicit ones, those of its preset, and defaults."""
        preset = PRESETS[explicit.get("model", "bytes")]
        of_preset = {name: getattr(preset, name) for name in ("batch", "seq", "lr")}
        return Settings(**({"model": preset.shape.name} | of_preset | explicit))

    def continued(self, explicit: dict[str, Any]) -> Settings:
        """Return these settings with the explicit ones given for the continued run.

        Raises:
            UsageError: a setting would make it another run.
        """
        for name, value in explicit.items():
            if name not in CHANGEABLE and value != getattr(self, name):
                option = "--" + name.replace("_", "-")
                raise UsageError(
                    f"the run to resume has {option} {getattr(self, name)}, not {value}; leave {option} out, "
                    "or start a new run without --resume"
                )
        return dataclasses.replace(self, **explicit)

    @property
    def preset(self) -> Preset:
        """What is trained."""
        return PRESETS[self.model]

    def lr_of(self, updates: int) -> float:
        """Return the learning rate after `updates` updates: linear warm-up, then a cosine down to a tenth."""
        if updates < self.warmup:
            return self.lr * (updates + 1) / (self.warmup + 1)
        progress = min(1.0, (updates - self.warmup) / max(1, self.steps - self.warmup))
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * progress))
