"""A model trained through the scheduler, and its twin that is trained one synchronous step at a time."""

from __future__ import annotations

import copy
import faulthandler
import io
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.overlap import DeferredDevice, ImmediateDevice, PlantedError, RaiseInBackward, ThreadDevice
from support.reference import same_bits
from support.step_actions import ACTIONS, NAMES, ORDINARY_ERRORS, Twin
from torch import Tensor, nn

from superadam import SpeculativeCPUAdamW, StepKind
from superadam.devices import Device, Stream
from superadam.devices.flat import FlatLayout
from superadam.handles.gradient_handle import taken_of
from superadam.offload import accumulation as micro_batches
from superadam.offload.scheduler import OffloadScheduler
from superadam.testing import SimulatedDevice

SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.sampled_from([1e-3, 1.0, 100.0])


HANG_SECONDS = 30
"""A schedule takes a few tenths of a second; one that hangs ends the process with every thread's stack."""


class Model(nn.Module):
    """Small, with everything that makes gradients arrive oddly.

    A tied weight, an optional branch, a frozen layer, a layer that the optimizer gets later, and more than one dtype.
    """

    def __init__(self, dtype: torch.dtype, seed: int, *, is_mixed: bool = False) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)
        self.first = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.blocks = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 200)])
        self.late = nn.Linear(24, 24)
        self.uses_late = False
        self.to(dtype)
        if is_mixed:
            self.norm.float()
            self.late.float()

    @property
    def branch(self) -> nn.Module:
        return self.blocks[0]

    def forward(self, inputs: Tensor, with_branch: bool, error: BaseException | None = None) -> Tensor:
        hidden = _run(self.norm, torch.tanh(_run(self.first, inputs)))
        if with_branch:
            hidden = hidden + _run(self.branch, _run(self.frozen, hidden))
        if error is not None:
            hidden = RaiseInBackward.apply(hidden, error)
        if self.uses_late:
            hidden = hidden + _run(self.late, hidden)
        hidden = hidden.to(self.first.weight.dtype)
        return _run(self.blocks[1], hidden).sum(-1, keepdim=True) + nn.functional.linear(hidden, self.first.weight.t())


def _run(layer: nn.Module, inputs: Tensor) -> Tensor:
    output: Tensor = layer(inputs.to(next(layer.parameters()).dtype))
    return output


def build(
    dtype: torch.dtype, seed: int, limit: float | None, lr: float, *, is_mixed: bool = False
) -> tuple[Model, SpeculativeCPUAdamW]:
    """Return a model and its optimizer, with two groups."""
    model = Model(dtype, seed, is_mixed=is_mixed)
    early = [parameter for name, parameter in model.named_parameters() if not name.startswith("late")]
    matrices = [p for p in early if p.ndim == 2]
    others = [p for p in early if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.3 * lr, "amsgrad": True}]
    return model, SpeculativeCPUAdamW(groups, lr=lr, weight_decay=0.0, max_grad_norm=limit)


class FullDevice(SimulatedDevice):
    """Has no memory left, whenever the seed says so."""

    def empty(self, numel: int, dtype: torch.dtype, stream: Stream) -> Tensor:
        self._perhaps_be_full()
        return super().empty(numel, dtype, stream)

    def pack(self, gradients: Any, layout: FlatLayout, dtype: torch.dtype, norm: Any = None) -> Tensor:
        self._perhaps_be_full()
        return super().pack(gradients, layout, dtype, norm)

    def _perhaps_be_full(self) -> None:
        if self._random.random() < 0.3:
            raise torch.OutOfMemoryError("planted: the device is full")


def bits(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array whose bits can be compared."""
    return tensor.detach().to(torch.float64 if tensor.dtype == torch.float64 else torch.float32).numpy().copy()


def as_it_is_now(value: Any) -> Any:
    """Return a value with copies of the tensors in it: those of the state show a step only once it is committed."""
    if isinstance(value, Tensor | np.ndarray):
        return copy.deepcopy(value)
    if isinstance(value, list | tuple):
        return [as_it_is_now(one) for one in value]
    return {key: as_it_is_now(one) for key, one in value.items()} if isinstance(value, dict) else value


def are_same(one: Any, other: Any) -> bool:
    """Whether two values, with the tensors in them, have the same bits."""
    if isinstance(one, Tensor | np.ndarray | float):
        if type(one) is not type(other) and not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return False
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        if one.dtype != other.dtype or one.stride() != other.stride():
            return False
        return same_bits(bits(one), bits(other)) if one.is_floating_point() else torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(one[key], other[key]) for key in one)
    return bool(one == other)


@dataclass(frozen=True)
class Iteration:
    """One iteration of training.

    Attributes:
        seed: of its batches, and of details of its actions.
        scale: of the loss.
        micro_batches: for each, whether it uses the branch.
        zeroes: how and when gradients are reset.
        hint: what is told of micro-batches that are not the last one.
        is_bad: whether the first micro-batch's loss is not finite.
        fails: whether a backward fails half-way before, and whether its gradients are dropped then.
        binarises: whether the weights are others during forward and backward.
        loss_scale: of a GradScaler; None for none.
        unscales: whether it unscales before the actions, as for clipping.
        actions: what is done between backward and step.
        steps: how often the step is made.
        looks: whether gradients and state are compared afterwards.
    """

    seed: int
    scale: float = 1.0
    micro_batches: tuple[bool, ...] = (True,)
    zeroes: str = "after"
    hint: str = "none"
    is_bad: bool = False
    fails: str = "no"
    binarises: bool = False
    loss_scale: float | None = None
    unscales: bool = False
    actions: tuple[str, ...] = ()
    steps: int = 1
    looks: bool = False


def usually(value: Any, *others: Any) -> st.SearchStrategy[Any]:
    """Draw the usual value more often than all others together."""
    return st.sampled_from([value] * (len(others) + 1) + list(others))


ITERATIONS = st.builds(
    Iteration,
    seed=SEEDS,
    scale=SCALES,
    micro_batches=st.lists(usually(True, False), min_size=1, max_size=3).map(tuple),
    zeroes=usually("after", "before", "before, with zeros", "by the model", "never"),
    hint=st.sampled_from(["none", "accumulate", "accumulate in fp32"]),
    is_bad=usually(False, True),
    fails=usually("no", "and is made again", "and its gradients are dropped"),
    binarises=usually(False, True),
    loss_scale=usually(None, 2.0**12, 1000.0),
    unscales=st.booleans(),
    actions=st.lists(st.sampled_from(NAMES), max_size=3).map(tuple),
    steps=usually(1, 0, 2),
    looks=st.booleans(),
)


class OverlappedRun(RuleBasedStateMachine):
    """Whatever happens to both twins, they stay bitwise equal."""

    devices: tuple[Callable[[int], Device], ...] = (
        SimulatedDevice,
        SimulatedDevice,
        SimulatedDevice,
        FullDevice,
        lambda seed: ImmediateDevice(),
        lambda seed: ThreadDevice(),
        lambda seed: DeferredDevice(),
    )

    @initialize(
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.bfloat16]),
        is_mixed=usually(False, True),
        limit=st.sampled_from([math.inf, math.inf, 3e4, 1.0, 1e-4, 1e-4]),
        lr=st.sampled_from([1e-2, 1e-5, 1e-5]),
        bucket_numel=st.sampled_from([1, 100, 1000, 10**6]),
        seed=SEEDS,
        widens=st.booleans(),
        gpu_buckets=st.sampled_from([0, 0, 1, 2, 10**6]),
    )
    def start(
        self,
        dtype: torch.dtype,
        is_mixed: bool,
        limit: float,
        lr: float,
        bucket_numel: int,
        seed: int,
        widens: bool,
        gpu_buckets: int,
    ) -> None:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        self.pause, micro_batches.PAUSE_STEPS = micro_batches.PAUSE_STEPS, 1  # schedules are short
        self.dtype, self.is_mixed, self.seed = dtype, is_mixed and dtype != torch.float32, seed
        self.gpu_buckets, self.lr = gpu_buckets, lr
        self.options: dict[str, Any] = {
            "bucket_numel": bucket_numel,
            "transfer_dtype": torch.float32 if widens else "auto",
        }
        self.plain = Twin(*build(dtype, 0, limit, lr, is_mixed=self.is_mixed))
        self.ours = Twin(*build(dtype, 0, limit, lr, is_mixed=self.is_mixed))
        self.open_scheduler()

    @property
    def twins(self) -> tuple[Twin, Twin]:
        return self.plain, self.ours

    def open_scheduler(self) -> None:
        self.seed += 1
        device = self.devices[self.seed % len(self.devices)](self.seed)
        gpu_buckets = self.gpu_buckets if device.can_update else "auto"
        self.ours.scheduler = OffloadScheduler(
            self.ours.optimizer, self.ours.model, device=device, gpu_buckets=gpu_buckets, **self.options
        )

    @property
    def scheduler(self) -> OffloadScheduler:
        assert self.ours.scheduler is not None
        return self.ours.scheduler

    # ---- iterations --------------------------------------------------------------------------------------------------

    @rule(iteration=ITERATIONS, plain_ones_before=st.integers(0, 2))
    def train(self, iteration: Iteration, plain_ones_before: int) -> None:
        """Make iterations, the last of which is special."""
        for number in range(plain_ones_before):
            self.iterate(Iteration(iteration.seed + 10 * number, iteration.scale))
        self.iterate(iteration)

    @rule(iteration=ITERATIONS)
    def train_once(self, iteration: Iteration) -> None:
        """As often as everything else: rules are drawn alike."""
        self.iterate(iteration)

    @rule(seed=SEEDS, scale=SCALES, name=st.sampled_from(NAMES), is_steady=st.booleans())
    def train_plainly(self, seed: int, scale: float, name: str, is_steady: bool) -> None:
        """What is speculated on in the first iteration is accepted, and meets one action in the second.

        Where that has the same inputs as those before, its norm is theirs, and values are patched if it is clipped.
        """
        for _ in range(1 + is_steady):
            self.iterate(Iteration(seed, scale))
        self.iterate(Iteration(seed + (not is_steady), scale, actions=(name,)))

    def iterate(self, iteration: Iteration) -> None:
        theirs, ours = (self.made(twin, iteration) for twin in self.twins)
        for (what, one), (_, other) in zip(theirs, ours, strict=True):
            assert are_same(one, other), (what, one, other)
        if iteration.steps:
            self.outcomes_are_equal()
        self.is_scaled = False
        if iteration.looks:
            self.gradients_are_equal()
            self.states_are_equal()

    def made(self, twin: Twin, iteration: Iteration) -> list[tuple[str, Any]]:
        """Make one iteration with one of the twins; return what was done and seen."""
        model, optimizer = twin.model, twin.optimizer
        if iteration.zeroes == "by the model":
            model.zero_grad()
        elif iteration.zeroes.startswith("before"):
            optimizer.zero_grad(set_to_none=iteration.zeroes == "before")
        scaler = None
        if iteration.loss_scale is not None:
            scaler = torch.amp.GradScaler("cpu", init_scale=iteration.loss_scale)
        weights = [parameter.detach().clone() for parameter in model.parameters()] if iteration.binarises else []
        with torch.no_grad():
            for parameter in model.parameters() if weights else ():
                parameter.sign_().mul_(0.1)
        if iteration.fails != "no":
            with suppress(PlantedError):
                self.backward(twin, iteration, 7, PlantedError())
            if iteration.fails == "and its gradients are dropped":
                optimizer.zero_grad()
        for number in range(len(iteration.micro_batches)):
            with self.told(twin, iteration, number):
                self.backward(twin, iteration, number, scaler=scaler)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), weights, strict=False):
                parameter.copy_(value)
        seen: list[tuple[str, Any]] = []
        if scaler is not None and iteration.unscales and twin.gradients:
            scaler.unscale_(optimizer)
        for name in iteration.actions:
            try:
                seen.append((name, as_it_is_now(ACTIONS[name](twin, iteration.seed))))
            except ORDINARY_ERRORS as error:
                seen.append((name, type(error).__name__))
        taken = [taken_of(gradient) for gradient in twin.gradients]
        self.is_scaled = scaler is not None or any(one is not None and one.factors for one in taken)
        if scaler is not None and twin.gradients:
            scaler.step(optimizer)
            scaler.update()
            seen.append(("loss scale", scaler.get_scale()))
        else:
            for _ in range(iteration.steps):
                optimizer.step()
        if iteration.zeroes == "after":
            optimizer.zero_grad()
        return seen

    def told(self, twin: Twin, iteration: Iteration, number: int) -> Any:
        """Enter what is told of a micro-batch; sums in fp32 are those of autograd where gradients are fp32."""
        if twin.scheduler is None or iteration.hint == "none" or number == len(iteration.micro_batches) - 1:
            return nullcontext()
        in_fp32 = iteration.hint == "accumulate in fp32" and self.dtype == torch.float32
        return twin.scheduler.accumulate(torch.float32 if in_fp32 else None)

    def backward(
        self,
        twin: Twin,
        iteration: Iteration,
        number: int,
        error: BaseException | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(iteration.seed + number)
        inputs = torch.randn(4, 8, generator=generator)
        with_branch = iteration.micro_batches[number % len(iteration.micro_batches)]
        loss = twin.model(inputs, with_branch, error).float().pow(2).mean() * iteration.scale
        if iteration.is_bad and number == 0:
            loss = (loss + math.inf) * math.nan
        (loss if scaler is None else scaler.scale(loss)).backward()

    def outcomes_are_equal(self) -> None:
        """What others did to handles is told with the outcome; ordinary gradients do not remember it."""
        ours, theirs = self.ours.optimizer.last_outcome, self.plain.optimizer.last_outcome
        if ours is None or theirs is None:  # a GradScaler made no step yet, perhaps since the optimizer was loaded
            return
        assert ours.nonfinite == theirs.nonfinite
        assert (ours.kind is StepKind.SKIPPED) == (theirs.kind is StepKind.SKIPPED)
        if not self.is_scaled:
            assert ours == theirs or (math.isnan(ours.grad_norm) and math.isnan(theirs.grad_norm))
        elif ours.kind is theirs.kind and ours.clip_coefficient == theirs.clip_coefficient:
            share = max(1e-6, torch.finfo(self.dtype).eps / 2)  # by which torch rounds each product
            assert math.isnan(ours.grad_norm) or math.isclose(ours.grad_norm, theirs.grad_norm, rel_tol=share)

    # ---- between iterations ------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), seed=SEEDS)
    def act(self, name: str, seed: int) -> None:
        """Do between iterations what may also be done before a step."""
        results = []
        for twin in self.twins:
            try:
                results.append(as_it_is_now(ACTIONS[name](twin, seed)))
            except ORDINARY_ERRORS as error:
                results.append(type(error).__name__)
        assert are_same(*results), (name, *results)

    @rule(way=st.integers(0, 7), iteration=ITERATIONS)
    def go_on_otherwise(self, way: int, iteration: Iteration) -> None:
        """With another group, or another model, optimizer or scheduler."""
        if way == 0:
            self.add_group()
        elif way < 3:
            self.continue_from_disk(before=way == 1)
        elif way < 5:
            self.continue_with_copies(keeps_scheduler=way == 3)
        else:
            self.close_scheduler(None if way == 5 else iteration)

    def add_group(self) -> None:
        if self.ours.model.uses_late:
            return
        for twin in self.twins:
            twin.model.uses_late = True
            twin.optimizer.add_param_group({"params": list(twin.model.late.parameters()), "lr": 5e-3})

    def continue_from_disk(self, before: bool) -> None:
        """Load what was saved into a fresh model and optimizer, with a scheduler from before or after the loading."""
        file = io.BytesIO()
        old = self.ours
        torch.save({"model": old.model.state_dict(), "optimizer": old.optimizer.state_dict()}, file)
        file.seek(0)
        saved: dict[str, Any] = torch.load(file, weights_only=True)
        self.scheduler.close()
        self.plain.optimizer.zero_grad()
        for twin in self.twins:
            twin.kept.clear()
        self.ours = Twin(*build(self.dtype, 1, old.optimizer.max_grad_norm, self.lr, is_mixed=self.is_mixed))
        self.ours.model.uses_late = old.model.uses_late
        for parameter, other in zip(self.ours.model.parameters(), old.model.parameters(), strict=True):
            parameter.requires_grad_(other.requires_grad)
        if old.model.uses_late:
            self.ours.optimizer.add_param_group({"params": list(self.ours.model.late.parameters())})
        if before:
            self.open_scheduler()
        self.ours.model.load_state_dict(saved["model"])
        self.ours.optimizer.load_state_dict(saved["optimizer"])
        if not before:
            self.open_scheduler()

    def continue_with_copies(self, keeps_scheduler: bool) -> None:
        """Go on with deep copies of model and optimizer; the scheduler is closed before or afterwards."""
        if not keeps_scheduler:
            self.scheduler.close()
        for twin in self.twins:
            twin.kept.clear()
            twin.model, twin.optimizer = copy.deepcopy((twin.model, twin.optimizer))
        if keeps_scheduler:
            self.scheduler.close()
        self.open_scheduler()

    def close_scheduler(self, iteration: Iteration | None) -> None:
        """Open another one, perhaps after an iteration without any."""
        self.scheduler.close()
        self.ours.scheduler = None
        if iteration is not None:
            self.iterate(iteration)
        self.open_scheduler()

    # ---- what must be equal ------------------------------------------------------------------------------------------

    @rule()
    def everything_is_equal(self) -> None:
        self.states_are_equal()
        self.gradients_are_equal()
        with torch.no_grad():
            assert are_same(*(twin.model(torch.ones(2, 8), True) for twin in self.twins))
        assert are_same(*(dict(twin.model.state_dict()) for twin in self.twins))

    def states_are_equal(self) -> None:
        plain, ours = self.plain.optimizer.state, self.ours.optimizer.state
        for p, q in zip(self.plain.model.parameters(), self.ours.model.parameters(), strict=True):
            one, other = plain.get(p) or {}, ours.get(q) or {}
            assert set(one) - {"master"} == set(other) - {"master"}
            for key in one:
                assert same_bits(bits(one[key]), bits(other.get(key, p if key == "master" else one[key]))), key
            if "master" in other:
                assert same_bits(bits(one.get("master", p)), bits(other["master"]))

    def gradients_are_equal(self) -> None:
        for (name, p), q in zip(self.plain.model.named_parameters(), self.ours.model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or are_same(p.grad, q.grad), name

    @invariant()
    def models_are_equal(self) -> None:
        """Always: nothing that was speculated shows before the plain twin has it."""
        if hasattr(self, "ours"):
            for (name, p), q in zip(self.plain.model.named_parameters(), self.ours.model.parameters(), strict=True):
                assert same_bits(bits(p), bits(q)), name

    def teardown(self) -> None:
        try:
            if hasattr(self, "ours") and sys.exc_info()[0] is None:  # or it would hide what went wrong
                self.states_are_equal()
                self.gradients_are_equal()
                self.scheduler.close()
                self.states_are_equal()
                self.gradients_are_equal()
                self.models_are_equal()
        finally:
            if hasattr(self, "pause"):
                micro_batches.PAUSE_STEPS = self.pause
            faulthandler.cancel_dump_traceback_later()
