"""Training whose steps are clipped, with values that were speculated for an interval of factors and patched since.

Gradients have any norm that a test asks for: the loss is linear in the parameters.
"""

import contextlib
import copy
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from support.deep import DEEP
from support.overlap import DeferredDevice, FullDevice, ImmediateDevice, ThreadDevice, fail_at
from support.visible import state_bits
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam, SpeculativeCPUAdamW
from superadam.devices import Device
from superadam.kernels.hyperparameters import Interval
from superadam.offload.pipeline import Pipeline
from superadam.offload.prediction import Predictor
from superadam.state import new_values, uncertain
from superadam.state.new_values import Patch
from superadam.state.parameter import Prediction
from superadam.step.outcome import Applied
from superadam.testing import SimulatedDevice

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("one_torch_thread")]

LIMIT = 1.0


class Net(nn.Module):
    """Parameters of every layout: dense, transposed, tied, without dimensions, and empty."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)

        def values(*shape: int) -> nn.Parameter:
            return nn.Parameter((0.1 * torch.randn(shape, generator=generator)).to(dtype))

        self.dense, self.other = values(64, 32), values(700)
        self.transposed = nn.Parameter(values(40, 24).detach().t())
        self.scalar, self.empty = values(), values(0, 3)
        self.tied = self.dense

    def forward(self, seed: int, norm: float) -> Tensor:
        """Return a loss whose gradient has about this norm."""
        generator = torch.Generator().manual_seed(seed)
        numel = sum(one.numel() for one in self.parameters())
        terms = [
            (one.float() * torch.randn(one.shape, generator=generator)).sum() * (norm / math.sqrt(numel))
            for one in (*self.parameters(), self.tied)
        ]
        return torch.stack(terms).sum()


DEVICES: dict[str, Callable[[], Device]] = {
    "immediate": ImmediateDevice,
    "thread": ThreadDevice,
    "deferred": DeferredDevice,
    "lazy": lambda: SimulatedDevice(1, 0.0),
    "usual": lambda: SimulatedDevice(2, 0.5),
    "hasty": lambda: SimulatedDevice(3, 0.9),
    "short of memory": lambda: FullDevice(4, 0.5),
}


@dataclass(frozen=True)
class Recipe:
    """One way of training.

    Attributes:
        share: of the steps that are clipped.
        own, torchs: limits of the norm, by the optimizer and by `clip_grad_norm_`.
        called: what the optimizer's own `clip_grad_norm_` is called with; None for no call.
        loss_scale: of a GradScaler; None for none.
        micro: batches of a step.
        is_hinted: whether all but the last are within `accumulate()`.
        groups: options of each of two groups of parameters, taken in turn.
        is_patched: whether values are patched; None where that is not known.
        storage: of the state, as arguments of the optimizer.
    """

    dtype: torch.dtype = torch.bfloat16
    share: float = 1.0
    own: float | None = LIMIT
    torchs: float | None = None
    called: float | None = None
    loss_scale: float | None = None
    micro: int = 1
    is_hinted: bool = False
    sum_dtype: torch.dtype | None = None
    optimizer: type[SpeculativeCPUAdam] = SpeculativeCPUAdamW
    groups: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))
    is_patched: bool | None = True
    storage: dict[str, Any] = field(default_factory=dict)


def by_torch(**options: Any) -> Recipe:
    return Recipe(**{"own": None, "torchs": LIMIT, **options})


RECIPES = {
    "half of the steps": Recipe(share=0.5, is_patched=None),
    "always": Recipe(),
    "always, fp16": Recipe(torch.float16, groups=({"lr": 1e-6}, {"lr": 1e-6})),
    "always, fp32": Recipe(torch.float32, is_patched=False),
    "by torch, half of the steps": by_torch(share=0.5, is_patched=None),
    "by torch": by_torch(),
    "by torch, fp16, whose products count as torch rounds them": by_torch(dtype=torch.float16, is_patched=False),
    "by torch, fp32": by_torch(dtype=torch.float32, is_patched=False),
    "by both": Recipe(torchs=2.0, is_patched=None),
    "by both, of which torch's is larger": Recipe(torchs=1e6),
    "unscaled by a power of two": Recipe(share=0.5, loss_scale=1024.0, is_patched=None),
    "unscaled": Recipe(own=None, loss_scale=1000.0, is_patched=None),
    "unscaled, then clipped by torch": by_torch(loss_scale=1024.0, is_patched=None),
    "accumulated": Recipe(micro=3),
    "accumulated in fp32": Recipe(micro=2, is_hinted=True, sum_dtype=torch.float32),
    "accumulated in fp32, fp16, by torch": by_torch(
        dtype=torch.float16, micro=2, is_hinted=True, sum_dtype=torch.float32, groups=({"lr": 1e-6}, {"lr": 1e-6})
    ),
    "accumulated, by torch": by_torch(micro=2, is_hinted=True),
    "two rates": Recipe(groups=({"lr": 1e-5, "weight_decay": 0.1}, {"lr": 3e-6, "betas": (0.8, 0.95)})),
    "a rate that the proof leaves out": Recipe(groups=({"lr": 5000.0}, {"lr": 1e-5, "amsgrad": True})),
    "a rate far too large": Recipe(groups=({"lr": 1e-5}, {"lr": 0.1})),
    "amsgrad in one group": Recipe(groups=({"amsgrad": True}, {})),
    "maximize": by_torch(groups=({"maximize": True}, {"maximize": True, "amsgrad": True})),
    "L2 decay": Recipe(optimizer=SpeculativeCPUAdam, groups=({"weight_decay": 0.1}, {"weight_decay": 1e-3})),
    "in 8 bits": Recipe(share=0.5, storage={"moments": "8bit", "master": "24bit"}, is_patched=None),
    "in bf16, by torch": by_torch(storage={"moments": "bf16"}, is_patched=None),
    "masters of 24 bits, accumulated": Recipe(micro=2, storage={"master": "24bit"}, is_patched=None),
    "by the optimizer's method": Recipe(own=None, called=LIMIT),
}


class Training:
    """A model and its optimizer; a scheduler or none."""

    def __init__(self, recipe: Recipe, device: Device | None, **options: Any) -> None:
        self.recipe, self.device = recipe, device
        self.model = Net(recipe.dtype)
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[i::2], **one} for i, one in enumerate(recipe.groups)]
        self.optimizer = recipe.optimizer(groups, lr=1e-5, max_grad_norm=recipe.own, **recipe.storage)
        self.scaler = None if recipe.loss_scale is None else torch.amp.GradScaler("cpu", recipe.loss_scale)
        self.scheduler: OffloadScheduler | None = None
        if device is not None:
            if isinstance(device, SimulatedDevice):
                options["gpu_buckets"] = 0
            self.scheduler = OffloadScheduler(self.optimizer, self.model, device=device, **options)
        self.draws = random.Random(3)

    def backward(self, step: int) -> None:
        recipe = self.recipe
        is_clipped = self.draws.random() < recipe.share
        norm = self.draws.uniform(3.8, 4.2) if is_clipped else self.draws.uniform(0.3, 0.35)
        for micro in range(recipe.micro):
            is_last = micro == recipe.micro - 1
            is_hinted = recipe.is_hinted and not is_last and self.scheduler is not None
            with self.scheduler.accumulate(recipe.sum_dtype) if is_hinted else contextlib.nullcontext():
                loss = self.model(10 * step + micro, norm / math.sqrt(recipe.micro))
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.recipe.torchs is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.torchs)
        if self.recipe.called is not None:
            self.optimizer.clip_grad_norm_(self.recipe.called)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def run(self, steps: range = range(8)) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.backward(step)
            self.step()
        self.optimizer.zero_grad()

    def seen(self) -> Any:
        """Return all bits, and the outcome where gradients of both runs remember what was done to them."""
        own = ["master"] if self.recipe.dtype == torch.float32 else []  # which has masters behind a link only
        is_told = self.recipe.torchs is None and self.scaler is None
        return state_bits(self.optimizer, without=own), repr(self.optimizer.last_outcome) if is_told else None


@functools.cache
def expected_of(name: str) -> Any:
    """Return what the run without a scheduler ends in; sums in fp32 are the scheduler's own, so there is one."""
    recipe = RECIPES[name]
    plain = Training(recipe, None if recipe.sum_dtype is None else DeferredDevice())
    plain.run()
    assert plain.optimizer.statistics.accepted == 0
    if plain.scheduler is not None:
        plain.scheduler.close()
    return plain.seen()


@pytest.mark.parametrize("recipe", RECIPES)
def test_clipped_training(recipe: str) -> None:
    """It has the bits of the run without a scheduler, and where norms are steady, values were patched."""
    chosen, names, number = RECIPES[recipe], [*DEVICES], [*RECIPES].index(recipe)
    for device in names if DEEP else [names[number % len(names)], names[(number + 3) % len(names)]]:
        made = DEVICES[device]()
        ours = Training(chosen, made, bucket_numel=[1, 1000, 10**6][len(recipe) % 3])
        scheduler = ours.scheduler
        with scheduler:
            if isinstance(made, FullDevice):
                made.has_no_room = scheduler._transfers.is_short = True
            ours.run()
            assert ours.seen() == expected_of(recipe), device
        counts = ours.optimizer.statistics
        if chosen.is_patched is False:  # what is speculated on would be in vain
            assert scheduler.statistics.waiting_buckets == scheduler.statistics.buckets
        if chosen.is_patched is not None:
            assert (counts.patched > 0) is (chosen.is_patched and device != "deferred"), (device, counts)


# ---- between speculation and verdict ---------------------------------------------------------------------------------
# That all that programs may do there changes no bit is in test_programs.py, and what becomes of speculation in
# tests/optim/test_adam.py; here is how much of it is patched.

PATCHED, ONE_REDONE = 5, 4
"""Parameters that are patched in a step: all, all but the one that something was done to."""
SPECULATED = 6
"""A step in which values are patched, unless something is done between its backward and its `step()`."""


def skip_a_step(training: Training) -> None:
    training.model.other.grad[5] = math.inf
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.backward(70)


ACTIONS: dict[str, tuple[int, Callable[[Training], object]]] = {
    "a factor near": (PATCHED, lambda training: setattr(training.optimizer, "max_grad_norm", 0.98 * LIMIT)),
    "one gradient edited": (ONE_REDONE, lambda training: training.model.dense.grad[0, 3:4].add_(0.001)),
    "one gradient dropped": (ONE_REDONE, lambda training: setattr(training.model.scalar, "grad", None)),
    "a step that is skipped": (PATCHED, skip_a_step),
    "a parameter written": (ONE_REDONE, lambda training: training.model.dense.detach().mul_(1.5)),
}
"""What may be done between speculation and verdict, with the number of parameters that are patched then."""


def acted(training: Training, name: str) -> Any:
    """Train, do something between a backward and its step, and go on; return all bits at both ends."""
    training.run(range(SPECULATED))
    training.backward(SPECULATED)
    if training.scheduler is not None:
        training.scheduler._catch_up()
    before = training.optimizer.statistics.patched
    ACTIONS[name][1](training)
    if training.scheduler is not None:
        training.scheduler._catch_up()
    training.step()
    training.optimizer.zero_grad()
    if training.scheduler is not None:
        assert before == PATCHED * (SPECULATED - 1)
        assert training.optimizer.statistics.patched - before == ACTIONS[name][0]
    after, _ = training.seen()  # torch's clipping is told where gradients were taken only
    training.run(range(SPECULATED + 1, SPECULATED + 4))
    return after, training.seen()


@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_done_between_speculation_and_verdict(action: str) -> None:
    ours = Training(RECIPES["always"], DEVICES["immediate"](), bucket_numel=1000)
    with ours.scheduler or contextlib.nullcontext():
        assert acted(ours, action) == acted(Training(RECIPES["always"], None), action)


# ---- intervals -------------------------------------------------------------------------------------------------------


def intervals(exact: float) -> dict[str, tuple[Prediction, int, bool]]:
    """Return predictions of a factor that is known: what they are, how many are patched, and whether all are redone."""
    above, below = (float(np.nextafter(np.float32(exact), np.float32(way))) for way in (2.0, 0.0))
    more, less, least = (float(np.float32(exact * factor)) for factor in (1.2, 0.9, 0.8))
    return {
        "exact, and for no others": (Prediction(exact), 0, False),
        "exact": (Prediction(exact, Interval(exact, exact)), 0, False),
        "exact, in an interval": (Prediction(exact, Interval(0.5 * exact, 2 * exact)), 0, False),
        "at the lower end": (Prediction(above, Interval(exact, above)), PATCHED, False),
        "at the upper end": (Prediction(below, Interval(below, exact)), PATCHED, False),
        "at the end of a wide one": (Prediction(more, Interval(exact, more)), PATCHED, False),
        "below": (Prediction(more, Interval(above, more)), 0, True),
        "above": (Prediction(less, Interval(least, below)), 0, True),
        "none of numbers": (Prediction(math.nan, Interval(math.nan, math.nan)), 0, True),
        "of zero": (Prediction(0.0, Interval(0.0, 0.0)), 0, True),
        "upside down": (Prediction(exact, Interval(above, below)), 0, False),
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("which", intervals(0.25))
@pytest.mark.parametrize("device", ["immediate", "usual"])
def test_factors_at_the_ends_of_intervals(device: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Training(RECIPES["always"], None)
    plain.run(range(5))
    prediction, patched, is_redone = intervals(plain.optimizer.last_outcome.clip_coefficient)[which]
    ours = Training(RECIPES["always"], DEVICES[device](), bucket_numel=1000)
    with ours.scheduler or contextlib.nullcontext():
        ours.run(range(4))
        before = copy.copy(ours.optimizer.statistics)
        monkeypatch.setattr(Predictor, "predict", lambda *_: prediction)
        monkeypatch.setattr(Predictor, "add_lists", lambda *_: None)
        ours.run(range(4, 5))
        now = ours.optimizer.statistics
        assert now.patched - before.patched == patched
        assert now.respeculated - before.respeculated == (PATCHED if is_redone else 0)
        assert now.accepted - before.accepted == (0 if is_redone else PATCHED)
        assert ours.seen() == plain.seen()


def test_a_product_that_torch_rounds_is_not_that_of_the_predicted_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the factor is the same number."""
    found, learned = list[float](), list[Applied]()
    learn = Pipeline.learn
    for is_exact in (False, True):
        ours = Training(RECIPES["by torch"], DEVICES["immediate"](), bucket_numel=1000)
        with ours.scheduler or contextlib.nullcontext(), monkeypatch.context() as patch:
            patch.setattr(Pipeline, "learn", lambda self, applied: (learned.append(applied), learn(self, applied)))
            ours.run(range(4))
            if is_exact:
                patch.setattr(Predictor, "predict", lambda *_: Prediction(found[0]))
            accepted = ours.optimizer.statistics.accepted
            ours.run(range(4, 5))
            found.append(learned[-1].factor)
            assert (ours.optimizer.statistics.accepted == accepted) == is_exact
        assert found[0] == found[-1] < 1.0
        assert ours.optimizer.statistics.patched_elements > 0
        plain = Training(RECIPES["by torch"], None)
        plain.run(range(5))
        assert ours.seen() == plain.seen()


@pytest.mark.parametrize(
    ("owner", "limit", "value", "device"),
    [
        (uncertain, "_capacity", lambda numel: 0, "immediate"),
        (uncertain, "_capacity", lambda numel: 1, "usual"),
        (uncertain, "_capacity", lambda numel: 3, "thread"),
        (new_values, "MOST_PLACES", 2000, "usual"),  # as of buffers of 2**31 elements and more
    ],
)
def test_what_lists_and_patches_have_no_room_for_is_updated_again(owner, limit, value, device, monkeypatch):
    """Of parameters with more uncertain elements than their lists hold, or in larger buffers than patches can name."""
    monkeypatch.setattr(owner, limit, value)
    ours = Training(RECIPES["always"], DEVICES[device](), bucket_numel=1000)
    with ours.scheduler or contextlib.nullcontext():
        ours.run()
        assert ours.seen() == expected_of("always")
    assert ours.optimizer.statistics.patched > 0  # those without uncertain elements, or in smaller buffers
    assert ours.optimizer.statistics.respeculated > 0


@pytest.mark.parametrize("device", ["immediate", "usual"])
def test_a_value_whose_patch_failed_is_not_that_of_the_predicted_factor(device, monkeypatch):
    plain, made = Training(RECIPES["always"], None), DEVICES[device]()
    ours = Training(RECIPES["always"], made, bucket_numel=1)
    sent = (Patch, "send") if device == "immediate" else (made, "put")
    with ours.scheduler or contextlib.nullcontext():
        monkeypatch.setattr(Predictor, "predict", lambda *_: Prediction(1.0, Interval(0.75, 1.0)))
        monkeypatch.setattr(Predictor, "add_lists", lambda *_: None)
        for one in (plain, ours):
            one.run(range(3))
            one.backward(3)
        ours.scheduler._catch_up()
        before = ours.optimizer.statistics.respeculated
        ours.optimizer.max_grad_norm = 4.5
        with monkeypatch.context() as patch:
            fail_at(patch, *sent, 2, ValueError("planted"))
            with pytest.raises(ValueError, match="planted"):
                ours.step()
        for one in (plain, ours):
            one.optimizer.max_grad_norm = None
            one.step()
        assert ours.optimizer.statistics.respeculated > before
        assert ours.seen() == plain.seen()
