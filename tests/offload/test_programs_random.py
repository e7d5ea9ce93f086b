"""What programs do around steps, in sequences drawn at random: they end in the bits of the plain run.

Each action is tried alone in test_programs.py. What remains is what they do to one another, to a model whose gradients
arrive oddly, and where training goes on from a file, with copies, or under another scheduler.
"""

import collections
import copy
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from offload.test_programs import ACTIONS, STEPS, dtype_of, gradients, loss_of
from support.deep import TIMES
from support.optimizers import through_disk
from support.overlap import DeferredDevice, FullDevice, ImmediateDevice, PlantedError, RaiseInBackward, ThreadDevice
from support.programs import EAGER, Run, difference, frozen, state_of
from support.visible import bits, parameters_of
from torch import Tensor, nn

from superadam import SpeculativeCPUAdam, SpeculativeCPUAdamW, StepKind
from superadam.devices import Device
from superadam.handles.gradient_handle import taken_of
from superadam.offload import buckets
from superadam.offload.scheduler import OffloadScheduler
from superadam.testing import SimulatedDevice

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # a hang fails with the stack of every thread
    pytest.mark.usefixtures("one_torch_thread"),
]

MACHINE = settings(max_examples=48 * TIMES, stateful_step_count=8, suppress_health_check=list(HealthCheck))

ERRORS = (
    *(AssertionError, AttributeError, IndexError, KeyError, RuntimeError),
    *(StopIteration, TypeError, ValueError, ZeroDivisionError),
)
"""What an action may raise where another one has taken away what it needs; both runs must raise the same."""


class Model(nn.Module):
    """Small, with everything that makes gradients arrive oddly, and with the names that actions use.

    A tied weight, blocks that are left out, a layer of several chunks, more than one dtype, a layer that the optimizer
    gets later and a frozen one. Those two come last: an action that needs all gradients has then edited the others.
    """

    def __init__(self, dtype: torch.dtype, seed: int, *, is_mixed: bool = False) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)
        self.first = nn.Linear(16, 24)
        self.norm = nn.LayerNorm(24)
        self.blocks = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24)])
        self.last = nn.Linear(24, 16, bias=False)
        self.wide = nn.Linear(24, 200, bias=False)
        self.late = nn.Linear(24, 24, bias=False)
        self.frozen = nn.Linear(24, 24, bias=False).requires_grad_(False)
        self.uses: tuple[int, ...] = (0, 1)
        self.uses_late = False
        self.error: BaseException | None = None
        self.odd, self.image = Odd(), Image()
        self.to(dtype)
        self.odd.spread()
        if is_mixed:
            self.norm.float()
            self.late.float()
            self.image.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = _run(self.norm, torch.tanh(_run(self.first, inputs)))
        for i in self.uses:
            hidden = hidden + _run(self.blocks[i], _run(self.frozen, hidden))
        if self.error is not None:
            hidden = RaiseInBackward.apply(hidden, self.error)
        if self.uses_late:
            hidden = hidden + _run(self.late, hidden)
        tied = nn.functional.linear(hidden.to(self.first.weight.dtype), self.first.weight.t())
        odd = self.odd(hidden) + _run(self.image, hidden[:, :1])
        return _run(self.wide, hidden).sum(-1, keepdim=True) + _run(self.last, hidden) + tied + odd


class Own(nn.Parameter):
    __tensor_flatten__ = None  # of a class of its own, as libraries mark parameters, that has memory of its own


class Odd(nn.Module):
    """Parameters of odd layouts: without dimensions, without elements, transposed, with gaps, in whole blocks of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.zeros(3, 0))
        self.transposed = nn.Parameter(torch.randn(16, 24).t())
        self.gaps = Own(torch.randn(24, 16))
        self.blocks_of_64 = nn.Parameter(torch.randn(70, 64))

    def spread(self) -> None:
        """Put gaps between elements, which a conversion of the dtype closes."""
        wide = torch.zeros(24, 32, dtype=self.gaps.dtype)
        wide[:, ::2] = self.gaps.detach()
        self.gaps.data = wide[:, ::2]

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = hidden.to(self.transposed.dtype) @ self.transposed + hidden.to(self.gaps.dtype) @ self.gaps
        blocks = torch.tanh(hidden.sum().to(self.blocks_of_64.dtype) * self.blocks_of_64).sum()
        return mixed * self.scale + self.none.sum() + blocks


class Image(nn.Module):
    """A parameter whose channels come last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight.tanh().sum()


def _run(layer: nn.Module, inputs: Tensor) -> Tensor:
    return layer(inputs.to(dtype_of(layer)))


class OftenFullDevice(FullDevice):
    """Has no memory left, whenever the seed says so."""

    @property
    def is_full(self) -> bool:  # type: ignore[override]
        return self.accelerator.random.random() < 0.3


@dataclass
class Twin:
    """One of two that are to stay equal.

    Attributes:
        scheduler: None for the plain twin.
        runs: what each action remembers.
        admits_amsgrad: which moments of 8 bits do not.
    """

    model: Any
    optimizer: SpeculativeCPUAdam
    admits_amsgrad: bool
    scheduler: OffloadScheduler | None = None
    runs: dict[str, Run] = field(default_factory=dict)

    def act(self, name: str, step: int) -> Any:
        """Do something; return what it returned, or which error it raised."""
        if "amsgrad" in name and not self.admits_amsgrad:
            return None
        run = self.runs.setdefault(name, Run(EAGER))
        run.scheduler = self.scheduler
        try:
            return frozen(ACTIONS[name](self.model, self.optimizer, step, run))
        except ERRORS as error:
            return type(error).__name__


def has_gradients(optimizer: SpeculativeCPUAdam) -> bool:
    """Whether any parameter has a gradient; a GradScaler raises where none has."""
    return any(parameter.grad is not None for parameter in parameters_of(optimizer))


@dataclass(frozen=True)
class Iteration:
    """One iteration of training.

    Attributes:
        seed: of its batches, and of details of its actions.
        scale: of the loss.
        micro_batches: the blocks that each uses.
        zeroes: how and when gradients are reset.
        hint: what is told of micro-batches that are not the last one.
        bad_batch: the micro-batch whose loss is not finite; None for none.
        fails: which backward fails half-way, and what comes then.
        binarises: whether the weights are others during forward and backward.
        loss_scale: of a GradScaler; None for none.
        unscales: whether it unscales before the actions, as for clipping.
        actions: what is done between backward and step.
        steps: how often the step is made.
        looks: whether gradients and state are compared afterwards.
    """

    seed: int
    scale: float = 1.0
    micro_batches: tuple[tuple[int, ...], ...] = ((0, 1),)
    zeroes: str = "after"
    hint: str = "none"
    bad_batch: int | None = None
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


SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.sampled_from([1e-3, 1.0, 100.0])
NAMES = st.sampled_from([name for name in ACTIONS if name != "scheduler_closed"])  # which has a rule of its own
ITERATIONS = st.builds(
    Iteration,
    seed=SEEDS,
    scale=SCALES,
    micro_batches=st.lists(usually((0, 1), (0,), (1,), (), (0, 0)), min_size=1, max_size=3).map(tuple),
    zeroes=usually("after", "before", "before, with zeros", "by the model", "never"),
    hint=st.sampled_from(["none", "accumulate", "accumulate in fp32"]),
    bad_batch=usually(None, None, 0, 1, 2),
    fails=usually("no", "and is made again", "and its gradients are dropped", "in the last micro-batch"),
    binarises=usually(False, True),
    loss_scale=usually(None, 2.0**12, 1000.0),
    unscales=st.booleans(),
    actions=st.lists(NAMES, max_size=4).map(tuple),
    steps=usually(1, 0, 2),
    looks=st.booleans(),
)

COUNTS: collections.Counter[str] = collections.Counter()


class OverlappedRun(RuleBasedStateMachine):
    """Whatever happens to both twins, they stay bitwise equal."""

    devices: tuple[Callable[[int], Device], ...] = (
        SimulatedDevice,
        SimulatedDevice,
        SimulatedDevice,
        OftenFullDevice,
        lambda seed: ImmediateDevice(),
        lambda seed: ThreadDevice(),
        lambda seed: DeferredDevice(),
    )

    def __init__(self) -> None:
        super().__init__()
        self.outer = sys.exc_info()[1]  # what is being handled around all of this

    @initialize(
        drawn=st.builds(
            SimpleNamespace,
            dtype=st.sampled_from([torch.float32, *4 * [torch.bfloat16], torch.float16, torch.float64]),
            is_mixed=usually(False, True),
            limit=st.sampled_from([math.inf, None, 3e4, 1.0, 1e-4, 1e-4]),
            lr=st.sampled_from([1e-2, 1e-5, 1e-5]),
            bucket_numel=st.sampled_from([1, 100, 1000, 10**6]),
            seed=SEEDS,
            transfer_dtype=st.sampled_from(["auto", torch.float32]),
            gpu_buckets=st.sampled_from([0, 0, 1, 2, 10**6]),
            pause=st.sampled_from([0, 1]),
            kind=st.sampled_from([SpeculativeCPUAdamW, SpeculativeCPUAdam]),
            moments=st.sampled_from(["fp32", "bf16", "8bit"]),
            master=st.sampled_from(["fp32", "24bit"]),
        )
    )
    def start(self, drawn: Any) -> None:
        self.pause, buckets.PAUSE_STEPS = buckets.PAUSE_STEPS, drawn.pause  # schedules are short
        self.drawn, self.dtype, self.seed = drawn, drawn.dtype, drawn.seed
        self.is_mixed = drawn.is_mixed and drawn.dtype != torch.float32
        self.storage = {"moments": drawn.moments, "master": drawn.master}
        self.plain, self.ours = (self.build() for _ in range(2))
        self.open_scheduler()

    def build(self) -> Twin:
        """Return a model and its optimizer, with two groups."""
        drawn, admits_amsgrad = self.drawn, self.drawn.moments != "8bit"
        model = Model(self.dtype, 0, is_mixed=self.is_mixed)
        early = [parameter for name, parameter in model.named_parameters() if not name.startswith("late")]
        groups = [
            {"params": [p for p in early if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in early if p.ndim != 2], "lr": 0.3 * drawn.lr, "amsgrad": admits_amsgrad},
        ]
        optimizer = drawn.kind(groups, lr=drawn.lr, weight_decay=0.0, max_grad_norm=drawn.limit, **self.storage)
        return Twin(model, optimizer, admits_amsgrad)

    @property
    def twins(self) -> tuple[Twin, Twin]:
        return self.plain, self.ours

    def open_scheduler(self) -> None:
        self.seed += 1
        device = self.devices[self.seed % len(self.devices)](self.seed)
        self.ours.scheduler = OffloadScheduler(
            self.ours.optimizer,
            self.ours.model,
            device=device,
            bucket_numel=self.drawn.bucket_numel,
            transfer_dtype=self.drawn.transfer_dtype,
            gpu_buckets=self.drawn.gpu_buckets if device.can_update else "auto",
        )

    def close_scheduler(self) -> None:
        assert self.ours.scheduler is not None
        self.ours.scheduler.close()
        for counted in (self.ours.scheduler.statistics, self.ours.optimizer.statistics):
            COUNTS.update({name: int(count) for name, count in asdict(counted).items()})

    # ---- iterations --------------------------------------------------------------------------------------------------

    @rule(iteration=ITERATIONS, plain_ones_before=st.integers(0, 1))
    def train(self, iteration: Iteration, plain_ones_before: int) -> None:
        """Make iterations, the last of which is special."""
        for number in range(plain_ones_before):
            self.iterate(Iteration(iteration.seed + 10 * number, iteration.scale))
        self.iterate(iteration)

    @rule(iteration=ITERATIONS)
    def train_once(self, iteration: Iteration) -> None:
        """As often as everything else: rules are drawn alike."""
        self.iterate(iteration)

    @rule(seed=SEEDS, scale=SCALES, name=NAMES, is_steady=st.booleans())
    def train_plainly(self, seed: int, scale: float, name: str, is_steady: bool) -> None:
        """What is speculated on in the first iteration is accepted, and meets one action in the second.

        Where that has the same inputs as those before, its norm is theirs, and values are patched if it is clipped.
        """
        for _ in range(1 + is_steady):
            self.iterate(Iteration(seed, scale))
        self.iterate(Iteration(seed + (not is_steady), scale, actions=(name,)))

    def iterate(self, iteration: Iteration) -> None:
        theirs, ours = (self.made(twin, iteration) for twin in self.twins)
        assert_equal(ours, theirs, "read")
        if iteration.steps:
            self.outcomes_are_equal()
        if iteration.looks:
            self.gradients_are_equal()
            self.states_are_equal()

    def made(self, twin: Twin, iteration: Iteration) -> list[Any]:
        """Make one iteration with one of the twins; return what was seen."""
        model, optimizer = twin.model, twin.optimizer
        if iteration.zeroes == "by the model":
            model.zero_grad()
        elif iteration.zeroes.startswith("before"):
            optimizer.zero_grad(set_to_none=iteration.zeroes == "before")
        scaler = None
        if iteration.loss_scale is not None and self.dtype != torch.float16:  # which torch refuses to unscale
            scaler = torch.amp.GradScaler("cpu", init_scale=iteration.loss_scale)
        weights = [parameter.detach().clone() for parameter in model.parameters()] if iteration.binarises else []
        with torch.no_grad():
            for parameter in model.parameters() if weights else ():
                parameter.sign_().mul_(0.1)
        if iteration.fails.startswith("and"):
            self.backward(twin, iteration, 7, fails=True)
            if iteration.fails == "and its gradients are dropped":
                optimizer.zero_grad()
        last = len(iteration.micro_batches) - 1
        for number in range(last + 1):
            with self.told(twin, iteration, number):
                fails = number == last and iteration.fails == "in the last micro-batch"
                self.backward(twin, iteration, number, fails=fails, scaler=scaler)
        model.uses = (0, 1)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), weights, strict=False):
                parameter.copy_(value)
        if scaler is not None and iteration.unscales and has_gradients(optimizer):
            scaler.unscale_(optimizer)
        seen = [twin.act(name, iteration.seed % STEPS) for name in iteration.actions]
        taken = [taken_of(gradient) for gradient in gradients(model)]
        self.is_scaled = scaler is not None or any(one is not None and one.factors for one in taken)
        if scaler is not None and has_gradients(optimizer):
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
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

    def backward(self, twin: Twin, iteration: Iteration, number: int, *, fails=False, scaler: Any = None) -> None:
        twin.model.uses = iteration.micro_batches[number % len(iteration.micro_batches)]
        twin.model.error = PlantedError() if fails else None
        loss = loss_of(twin.model, iteration.seed, number) * iteration.scale
        twin.model.error = None
        if iteration.bad_batch == number:
            loss = (loss + math.inf) * math.nan
        with suppress(PlantedError) if fails else nullcontext():
            (loss if scaler is None else scaler.scale(loss)).backward()

    # ---- between iterations ------------------------------------------------------------------------------------------

    @rule(name=NAMES, step=st.integers(0, STEPS - 1))
    def act(self, name: str, step: int) -> None:
        """Do between iterations what may also be done before a step."""
        theirs, ours = (twin.act(name, step) for twin in self.twins)
        assert_equal(ours, theirs, name)

    @rule(way=st.integers(0, 8), iteration=ITERATIONS)
    def go_on_otherwise(self, way: int, iteration: Iteration) -> None:
        """With another group, or another model, optimizer or scheduler."""
        match way:
            case 0:
                self.add_group()
            case 1:
                for twin in self.twins:
                    twin.model.frozen.requires_grad_(not twin.model.frozen.weight.requires_grad)
            case 2 | 3:
                self.continue_from_disk(before=way == 2)
            case 4 | 5:
                self.continue_with_copies(keeps_scheduler=way == 4)
            case _:
                self.change_scheduler(None if way == 6 else iteration)

    def add_group(self) -> None:
        if self.ours.model.uses_late:
            return
        for twin in self.twins:
            twin.model.uses_late = True
            twin.optimizer.add_param_group({"params": list(twin.model.late.parameters()), "lr": 5e-3})

    def continue_from_disk(self, before: bool) -> None:
        """Load what was saved into a fresh model and optimizer, with a scheduler from before or after the loading."""
        old = self.ours
        if any(name.startswith("extra") for name, _ in old.model.named_parameters()):
            return  # an action has added a parameter that a fresh model would not have
        saved = through_disk({"model": old.model.state_dict(), "optimizer": old.optimizer.state_dict()})
        self.plain.optimizer.state_dict()  # adopts what was written to parameters, as that of the other has
        self.close_scheduler()
        self.plain.optimizer.zero_grad()  # which drops a limit for one step, as no state dict has it
        self.plain.model.zero_grad()  # also of a layer that was taken out of the optimizer
        self.plain.runs.clear()
        model = Model(self.dtype, 1, is_mixed=self.is_mixed)
        model.uses_late = old.model.uses_late
        fresh: dict[Tensor, nn.Parameter] = {}
        for parameter, other in zip(model.parameters(), old.model.parameters(), strict=True):
            # Thresholds follow the order in memory, and torch rounds copies with gaps and without in different ways.
            parameter.data = torch.empty_strided(other.shape, other.stride(), dtype=other.dtype).copy_(parameter.data)
            parameter.requires_grad_(other.requires_grad)
            fresh[other] = parameter
        groups = [{"params": [fresh[one] for one in group["params"]]} for group in old.optimizer.param_groups]
        limit = old.optimizer.max_grad_norm
        optimizer = type(old.optimizer)(groups, lr=self.drawn.lr, weight_decay=0.0, max_grad_norm=limit, **self.storage)
        self.ours = Twin(model, optimizer, self.ours.admits_amsgrad)
        if before:
            self.open_scheduler()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if not before:
            self.open_scheduler()

    def continue_with_copies(self, keeps_scheduler: bool) -> None:
        """Go on with deep copies of model and optimizer; the scheduler is closed before or afterwards."""
        if not keeps_scheduler:
            self.close_scheduler()
        for twin in self.twins:
            twin.runs.clear()
            twin.model, twin.optimizer = copy.deepcopy((twin.model, twin.optimizer))
        if keeps_scheduler:
            self.close_scheduler()
        self.open_scheduler()

    def change_scheduler(self, iteration: Iteration | None) -> None:
        """Open another one, perhaps after an iteration without any."""
        self.close_scheduler()
        self.ours.scheduler = None
        if iteration is not None:
            self.iterate(iteration)
        self.open_scheduler()

    # ---- what must be equal ------------------------------------------------------------------------------------------

    def outcomes_are_equal(self) -> None:
        """What others did to handles is told with the outcome; ordinary gradients do not remember it."""
        ours, theirs = self.ours.optimizer.last_outcome, self.plain.optimizer.last_outcome
        if ours is None or theirs is None:  # a GradScaler made no step yet, perhaps since the optimizer was loaded
            return
        assert ours.nonfinite == theirs.nonfinite
        assert (ours.kind is StepKind.SKIPPED) == (theirs.kind is StepKind.SKIPPED)
        if not self.is_scaled:
            assert ours == theirs or (math.isnan(ours.grad_norm) and math.isnan(theirs.grad_norm)), (ours, theirs)
        elif ours.kind is theirs.kind and ours.clip_coefficient == theirs.clip_coefficient:
            share = max(1e-6, torch.finfo(self.dtype).eps / 2)  # by which torch rounds each product
            assert math.isnan(ours.grad_norm) or math.isclose(ours.grad_norm, theirs.grad_norm, rel_tol=share)

    @rule()
    def everything_is_equal(self) -> None:
        self.states_are_equal()
        self.gradients_are_equal()
        with torch.no_grad():
            theirs, ours = (bits(loss_of(twin.model, 99)) for twin in self.twins)
        assert ours == theirs
        assert frozen(dict(self.ours.model.state_dict())) == frozen(dict(self.plain.model.state_dict()))

    def states_are_equal(self) -> None:
        theirs, ours = (frozen(state_of(twin.optimizer)) for twin in self.twins)
        assert_equal(ours, theirs, "state")

    def gradients_are_equal(self) -> None:
        theirs, ours = ([seen_of(p.grad) for p in twin.model.parameters()] for twin in self.twins)
        assert_equal(ours, theirs, "gradients")

    @invariant()
    def models_are_equal(self) -> None:
        """Always: nothing that was speculated shows before the plain twin has it."""
        if hasattr(self, "ours"):
            theirs, ours = ([bits(p) for p in twin.model.parameters()] for twin in self.twins)
            assert_equal(ours, theirs, "parameters")

    def teardown(self) -> None:
        try:
            if hasattr(self, "ours") and sys.exc_info()[1] is self.outer:  # or it would hide what went wrong
                self.states_are_equal()
                self.gradients_are_equal()
                self.close_scheduler()
                self.states_are_equal()
                self.gradients_are_equal()
                self.models_are_equal()
        finally:
            if hasattr(self, "pause"):
                buckets.PAUSE_STEPS = self.pause


def assert_equal(ours: Any, theirs: Any, what: str) -> None:
    found = difference(ours, theirs, what)
    assert found is None, found


def seen_of(gradient: Tensor | None) -> Any:
    """Return a gradient's strides and bits."""
    return None if gradient is None else [gradient.stride(), bits(gradient)]


def test_any_program_has_the_bits_of_the_plain_run() -> None:
    """And not because nothing was speculated on."""
    COUNTS.clear()
    run_state_machine_as_test(OverlappedRun, settings=MACHINE)
    schedules = MACHINE.max_examples
    for name in ("resident_buckets", "waiting_buckets", "accepted", "respeculated", "dropped"):
        assert COUNTS[name] > schedules // 5, COUNTS
    assert COUNTS["given_back_gradients"] > schedules, COUNTS
    assert COUNTS["patched"] > schedules // 4, COUNTS
