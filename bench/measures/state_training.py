"""What smaller state does to training: runs of one small language model that differ in the format alone.

All runs of a part read the same windows of text in the same order. Runs from slightly changed initial weights show how
far apart losses lie that mean the same. The first fp32 run of each setting also feeds its gradients to state
in every other format: errors in which the differences between two trainings have no part.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from train import Decoder, Shape

from measures.state_formats import FORMATS, Betas, Side
from superadam.cli.usage import UsageError

FROM_SCRATCH, FINE_TUNING = "from scratch", "fine-tuning"
PERTURBATION = 0.03
"""Standard deviation of the relative change of initial weights, in all seeds but 0."""

BETA1, WEIGHT_DECAY, MAX_GRAD_NORM = 0.9, 0.01, 1.0
FINE_TUNING_BETA2 = 0.999
MARKS = 5
"""Times in a run when losses and errors are measured, at even distances."""

AROUND = 8
"""Steps that the error at a mark is the mean of."""

Mark = tuple[int, float]
"""A step, and what was measured there."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What all runs have in common.

    Attributes:
        width, layers: of the model.
        batch, seq: windows of a step, and bytes of each.
        steps, lr: from scratch.
        beta2s: from scratch, one after the other.
        fine_tuning_steps, fine_tuning_lrs: on the other text, from the weights of the first fp32 run.
        perturbed: further runs of each format of ours, from changed weights, in each setting.
        held_out: windows whose loss is measured.
        formats: names of `FORMATS`.
    """

    width: int = 128
    layers: int = 2
    batch: int = 8
    seq: int = 48
    steps: int = 3000
    lr: float = 2e-3
    beta2s: tuple[float, ...] = (0.95, 0.999)
    fine_tuning_steps: int = 600
    fine_tuning_lrs: tuple[float, ...] = (1e-5, 3e-5)
    perturbed: int = 4
    held_out: int = 512
    formats: tuple[str, ...] = tuple(FORMATS)

    @property
    def shape(self) -> Shape:
        """Return that of the model."""
        heads, wide = max(1, self.width // 32), self.width * 5 // 2
        sizes = (256, self.width, self.layers, heads, heads, self.width // heads, wide)
        return Shape(*sizes, batch=self.batch, seq=self.seq, lr=self.lr)

    @property
    def parameters(self) -> int:
        """Return the number of elements of all parameters."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in Decoder(self.shape, torch.bfloat16).parameters())


@dataclass(frozen=True, slots=True)
class Run:
    """One training; `seed` 0 begins with the weights that all formats begin with."""

    part: str
    format: str
    beta2: float
    lr: float
    seed: int = 0

    def is_led(self) -> bool:
        """Whether state in other formats gets its gradients."""
        return self.format == "fp32" and self.seed == 0


@dataclass(slots=True)
class Result:
    """What a run showed.

    Attributes:
        held_out: step and mean loss in nats per byte of held-out text, in pairs.
        training: mean loss of the last tenth of the steps.
        errors: by format, step and relative error of the update.
        drifts: by format, step and distance of masters from fp32 ones over what those have moved.
        seconds: of the CPU.
        sha256: of the final weights.
    """

    run: Run
    held_out: Sequence[Mark]
    training: float
    errors: Mapping[str, Sequence[Mark]]
    drifts: Mapping[str, Sequence[Mark]]
    seconds: float
    sha256: str


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on, and the last sixteenth, whose loss is measured: uint8, disjoint; `sha256` is of both."""

    name: str
    training: Tensor
    held_out: Tensor
    sha256: str

    @staticmethod
    def of(name: str, content: bytes, seq: int) -> Text:
        """Divide `content`; raises UsageError where a part is too short for a window."""
        if len(content) < 16 * (seq + 1):
            raise UsageError(f"the sources of {name} are not installed; use a Python that has them")
        values, end = torch.frombuffer(bytearray(content), dtype=torch.uint8), len(content) - len(content) // 16
        return Text(name, values[:end], values[end:], hashlib.sha256(content).hexdigest())

    def draw(self, batch: int, seq: int, generator: torch.Generator) -> Tensor:
        """Return int64 (batch, seq + 1): windows to train on, which `generator` draws."""
        starts = torch.randint(len(self.training) - seq, (batch, 1), generator=generator)
        return self.training[starts + torch.arange(seq + 1)].long()

    def held_out_windows(self, batch: int, seq: int) -> Tensor:
        """Return int64 (batch, seq + 1): windows evenly spaced over the held-out part, always the same."""
        starts = torch.linspace(0, len(self.held_out) - seq - 1, batch, dtype=torch.float64)
        return self.held_out[starts.long().unsqueeze(1) + torch.arange(seq + 1)].long()


class UpdateErrors:
    """Moments in each format beside those of a run, fed the same gradients.

    A shadow of the parameters that is 0 before a step with learning rate 1 is minus the update after it. Its error is
    |update - that of fp32 state| / |that of fp32 state|, over all parameters.
    """

    def __init__(
        self, parameters: Sequence[Tensor], betas: Betas, formats: Sequence[str], marks: Sequence[int]
    ) -> None:
        self._parameters, self._marks = parameters, marks
        self._shadows = {name: [torch.zeros(p.shape) for p in parameters] for name in formats}
        self._sides = {
            name: FORMATS[name].make([{"params": shadow, "weight_decay": 0.0}], betas)
            for name, shadow in self._shadows.items()
        }
        self._found: dict[str, dict[int, list[float]]] = {name: {} for name in formats if name != "fp32"}

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Make the step that the parameters are about to make."""
        gradients = [p.grad.float() for p in self._parameters if p.grad is not None]
        for name, shadow in self._shadows.items():
            for parameter, gradient in zip(shadow, gradients, strict=True):
                parameter.zero_()
                parameter.grad = gradient
            self._sides[name].step(1.0)
        mark = next((mark for mark in self._marks if mark - AROUND < step <= mark), None)
        if mark is None:
            return
        exact = _flat(self._shadows["fp32"])
        for name, found in self._found.items():
            error = (_flat(self._shadows[name]) - exact).norm() / exact.norm()
            found.setdefault(mark, []).append(float(error))

    def at_marks(self) -> dict[str, list[Mark]]:
        """Return by format the marks, and the mean of the errors around each."""
        return {
            name: [(mark, statistics.fmean(errors)) for mark, errors in found.items()]
            for name, found in self._found.items()
        }


class Drifts:
    """Masters in each format beside those of a run in fp32, fed the same gradients."""

    def __init__(self, groups: Sequence[dict[str, Any]], betas: Betas, formats: Sequence[str]) -> None:
        self._parameters = [p for group in groups for p in group["params"]]
        self._shadows, self._sides = {}, {}
        for name in formats:
            copies = {p: nn.Parameter(p.detach().clone()) for p in self._parameters}
            own = [{**group, "params": [copies[p] for p in group["params"]]} for group in groups]
            self._shadows[name] = list(copies.values())
            self._sides[name] = FORMATS[name].make(own, betas)
        self._first = _flat(self._parameters)
        self._found: dict[str, list[Mark]] = {name: [] for name in formats}

    def follow(self, lr: float) -> None:
        """Make the step that the parameters are about to make."""
        for name, shadow in self._shadows.items():
            for copy, parameter in zip(shadow, self._parameters, strict=True):
                copy.grad = parameter.grad
            self._sides[name].step(lr)

    def measure(self, step: int, exact: Side) -> None:
        """Note how far masters are from those of the run."""
        masters = _flat(exact.masters())
        moved = (masters - self._first).norm()
        for name, side in self._sides.items():
            self._found[name].append((step, float((_flat(side.masters()) - masters).norm() / moved)))

    def at_marks(self) -> dict[str, list[Mark]]:
        """Return by format the marks, and the drift at each."""
        return self._found


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).double()


@dataclass(slots=True)
class Training:
    """The texts, and the weights with which fine-tuning begins.

    Attributes:
        text: the standard library's sources.
        other: what is fine-tuned on: the sources of its tests.
        trained: bf16 weights of the first fp32 run, once there was one.
    """

    settings: Settings
    text: Text
    other: Text
    trained: list[Tensor] = field(default_factory=list)

    def runs(self) -> list[Run]:
        """Return all runs in their order: first what others need, then what tells most."""
        settings = self.settings
        parts = [(FROM_SCRATCH, beta2, settings.lr) for beta2 in settings.beta2s]
        parts += [(FINE_TUNING, FINE_TUNING_BETA2, lr) for lr in settings.fine_tuning_lrs]
        chosen = [name for name in settings.formats if FORMATS[name].is_installed()]
        of_others = [name for name in chosen if not FORMATS[name].is_ours]
        ours = [name for name in chosen if FORMATS[name].is_ours]
        runs = [Run(part, name, beta2, lr) for part, beta2, lr in parts for name in ours]
        runs += [Run(part, name, beta2, lr) for part, beta2, lr in parts for name in of_others]
        seeds = range(1, settings.perturbed + 1)
        return runs + [Run(part, name, beta2, lr, seed) for seed in seeds for part, beta2, lr in parts for name in ours]

    def carry_out(self, run: Run) -> Result:
        """Train, and return what it showed; fine-tuning begins with the weights that a run from scratch left."""
        first = Run(FROM_SCRATCH, "fp32", self.settings.beta2s[0], self.settings.lr)
        if run.part == FINE_TUNING and not self.trained:
            self._train(first, follows=False)
        return self._train(run, follows=run.is_led())

    def _train(self, run: Run, *, follows: bool) -> Result:
        settings, is_first = self.settings, run.part == FROM_SCRATCH
        began = time.process_time()
        text, steps = (self.text, settings.steps) if is_first else (self.other, settings.fine_tuning_steps)
        marks = [steps * n // MARKS for n in range(1, MARKS + 1)]
        torch.manual_seed(0)
        model = Decoder(settings.shape, torch.bfloat16).to(torch.bfloat16)
        parameters = list(model.parameters())
        if not is_first:
            with torch.no_grad():
                for parameter, value in zip(parameters, self.trained, strict=True):
                    parameter.copy_(value)
        if run.seed:
            _perturb(parameters, run.seed)
        matrices = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY}
        groups = [matrices, {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}]
        betas = (BETA1, run.beta2)
        side = FORMATS[run.format].make(groups, betas)
        formats = [name for name in settings.formats if FORMATS[name].is_installed()] if follows else []
        narrow = [name for name in formats if FORMATS[name].has_narrow_moments and not FORMATS[name].has_narrow_masters]
        errors = UpdateErrors(parameters, betas, ["fp32", *narrow], marks) if narrow and is_first else None
        drifts = Drifts(groups, betas, [n for n in formats if n != "fp32"]) if formats and not is_first else None
        held_out = text.held_out_windows(settings.held_out, settings.seq)
        order = torch.Generator().manual_seed(7)
        losses, evaluated = [], []
        for step in range(1, steps + 1):
            model.zero_grad()
            loss = model(text.draw(settings.batch, settings.seq, order))
            loss.backward()
            losses.append(loss.item())
            nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            lr = run.lr * _schedule(step, steps, falls=is_first)
            if errors:
                errors.follow(step)
            if drifts:
                drifts.follow(lr)
            side.step(lr)
            if step in marks:
                evaluated.append((step, _loss(model, held_out, settings.batch)))
                if drifts:
                    drifts.measure(step, side)
        if is_first and not self.trained and run == Run(FROM_SCRATCH, "fp32", settings.beta2s[0], settings.lr):
            self.trained = [parameter.detach().clone() for parameter in parameters]
        return Result(
            run=run,
            held_out=evaluated,
            training=statistics.fmean(losses[-max(1, steps // 10) :]),
            errors=errors.at_marks() if errors else {},
            drifts=drifts.at_marks() if drifts else {},
            seconds=time.process_time() - began,
            sha256=_digest(parameters),
        )


def _schedule(step: int, steps: int, *, falls: bool) -> float:
    """Return a factor of the learning rate: it rises, then follows a cosine down to a tenth, or stays."""
    warm = min(1.0, step / max(1, min(50, steps // 10)))
    return warm * (0.55 + 0.45 * math.cos(math.pi * step / steps)) if falls else warm


@torch.no_grad()
def _perturb(parameters: Sequence[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.mul_(1 + PERTURBATION * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def _loss(model: nn.Module, windows: Tensor, batch: int) -> float:
    return statistics.fmean(float(model(some)) for some in torch.split(windows, batch))


def _digest(parameters: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().view(torch.int16).numpy().astype("<i2").tobytes())
    return digest.hexdigest()


def read_texts(seq: int) -> tuple[Text, Text]:
    """Return the sources of the standard library and those of its tests, in the order of their paths' digests.

    Raises:
        UsageError: this Python has no sources.
    """
    root, others = Path(sysconfig.get_path("stdlib")), {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    paths.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
    library = [path for path in paths if others.isdisjoint(path.parts[:-1])]
    tests = [path for path in paths if path.parts[0] == "test" and "data" not in path.parts]

    def text(name: str, chosen: Sequence[Path]) -> Text:
        return Text.of(name, b"".join((root / path).read_bytes() for path in chosen), seq)

    return text("Python's standard library", library), text("tests of Python's standard library", tests)


@dataclass(frozen=True, slots=True)
class SpreadOfRuns:
    """fp32 runs of one setting, which differ in their initial weights alone.

    Attributes:
        least, most: of their losses.
        low, high: between which the loss of one more such run lies with a probability of 95 % (Student's t).
    """

    least: float
    most: float
    mean: float
    low: float
    high: float

    @staticmethod
    def of(losses: Sequence[float]) -> SpreadOfRuns:
        """Return that of at least two losses."""
        mean, n = statistics.fmean(losses), len(losses)
        width = _student(n - 1) * statistics.stdev(losses) * math.sqrt(1 + 1 / n)
        return SpreadOfRuns(min(losses), max(losses), mean, mean - width, mean + width)


def _student(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t, that of sqrt(degrees) tan x for x of density cos(x)^(degrees - 1)."""
    x = np.linspace(0.0, math.pi / 2, 200_001)
    mass = np.cumsum(np.cos(x) ** (degrees - 1))
    return math.sqrt(degrees) * math.tan(float(x[np.searchsorted(mass, 0.95 * mass[-1])]))
