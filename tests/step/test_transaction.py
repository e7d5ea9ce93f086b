"""Speculation, verdicts, rollbacks, commits and saves in any order give the bits of the synchronous run.

And whatever is done to gradients and parameters in between does what it does with torch's tensors.
"""

import copy
import math
import operator
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.deep import DEEP, TIMES
from support.optimizers import DTYPES
from support.reference import Synchronous, flat, same_bits
from support.strategies import Magnitudes, random_array
from support.visible import are_taken, bits, parameters_of

import superadam
from superadam import SpeculativeCPUAdam, StepKind
from superadam.devices import PlainDevice
from superadam.handles.gradient_handle import taken_of
from superadam.kernels import native
from superadam.kernels.hyperparameters import Hyperparameters

SHAPES = [(0,), (), (1,), (5, 7), (64,), (4097,), (33, 130), (65, 64)]
LAYOUTS = ["contiguous", "transposed", "sliced"]


def make_parameter(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int) -> torch.nn.Parameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if len(shape) == 2 and layout == "transposed":
        values = values.t().contiguous().t()
    if len(shape) == 2 and layout == "sliced":
        values = torch.stack([values, torch.zeros_like(values)], dim=-1)[..., 0]
    return torch.nn.Parameter(values)


def make_gradient(parameter: torch.Tensor, kind: Magnitudes, seed: int, size: float) -> torch.Tensor:
    values = random_array(np.random.default_rng(seed), parameter.numel(), kind, np.float32) * np.float32(size)
    return torch.from_numpy(values).reshape(parameter.shape).to(parameter.dtype)


GROUPS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-3, 0.1]),
        "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.3, 0.0)]),
        "eps": st.sampled_from([1e-8, 0.0, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
        "decoupled_weight_decay": st.booleans(),
    }
)
SHORT_SHAPES = [shape for shape in SHAPES if math.prod(shape) < 100]  # the oracle takes long for doubles
FORMS = [(shape, dtype) for dtype in DTYPES for shape in (SHORT_SHAPES if dtype == torch.float64 else SHAPES)]
PARAMETERS = st.lists(
    st.tuples(st.sampled_from(FORMS), st.sampled_from(LAYOUTS)).map(lambda one: (*one[0], one[1])),
    min_size=1,
    max_size=3,
)
KINDS = st.sampled_from(
    [Magnitudes.ORDINARY, Magnitudes.ORDINARY, Magnitudes.TINY, Magnitudes.HUGE, Magnitudes.SPECIAL]
)
SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.sampled_from([1.0, 1e-3])
EDITS = st.sampled_from(
    [
        *2 * [lambda gradient: gradient.mul_(0.5)],
        lambda gradient: gradient.div_(3),
        lambda gradient: operator.imul(gradient, 2),
        lambda gradient: gradient.mul_(torch.tensor(0.3)),
        lambda gradient: gradient.clamp_(-0.5, 0.5),
        lambda gradient: (gradient[:1] if gradient.dim() else gradient.unsqueeze(0)).add_(1.0),
    ]
)


class SpeculativeRun(RuleBasedStateMachine):
    """A speculative optimizer, the synchronous oracle, and parameters whose `.grad` torch alone fills."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(
        groups=st.lists(st.tuples(GROUPS, PARAMETERS), min_size=1, max_size=2),
        limit=st.sampled_from([None, None, 1.0, 30.0, math.inf]),
        moments=st.sampled_from(["fp32", "bf16", "8bit"]),
        master=st.sampled_from(["fp32", "24bit"]),
        is_staged=st.sampled_from([False, False, False, True]),
        steps=st.integers(0, 2),
    )
    def start(self, groups, limit, moments, master, is_staged, steps):
        """With `is_staged`, as if parameters were on another device: working copies behind staging tensors."""
        if is_staged:
            self.patch.setattr(PlainDevice, "is_host", lambda device, parameter: False)
        made = [one for _, parameters in groups for one in parameters]
        seeds = iter(range(100))
        made_groups = [
            {**options, "params": [make_parameter(*one, next(seeds)) for one in parameters]}
            for options, parameters in groups
        ]
        for group in made_groups if moments == "8bit" else ():
            group["amsgrad"] = False
        self.storage = {"moments": moments, "master": master}
        self.optimizer = SpeculativeCPUAdam(made_groups, max_grad_norm=limit, **self.storage)
        self.reference = Synchronous(self.parameters, **self.storage)
        self.plain = [make_parameter(*one, seed) for seed, one in enumerate(made)]
        self.held: list[torch.Tensor] = []
        for seed in range(steps):  # the first of which makes the state that speculation needs
            self.train(Magnitudes.ORDINARY, seed, 1.0, 0, is_stepped=True)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return parameters_of(self.optimizer)

    @property
    def hyper(self) -> list[Hyperparameters]:
        return [Hyperparameters.of_group(group) for group in self.optimizer.param_groups for _ in group["params"]]

    def adopt(self) -> None:
        """What reads the state adopts what was written to parameters."""
        for one in self.reference.parameters:
            one.adopt()

    def adopt_anew(self) -> None:
        """What puts other masters in the place of the state's forgets what these were before writes."""
        self.adopt()
        for one in self.reference.parameters:
            one.former = None

    # -- gradients -----------------------------------------------------------------------------------------------------

    @rule(kind=KINDS, seed=SEEDS, size=SIZES, absent=st.integers(0, 7), is_held=st.booleans())
    def set_gradients(self, kind: Magnitudes, seed: int, size: float, absent: int, is_held: bool) -> None:
        """Where `absent` has no bit."""
        self.held.clear()
        for i, (parameter, plain) in enumerate(zip(self.parameters, self.plain, strict=True)):
            if not absent >> i & 1:
                plain.grad = make_gradient(parameter, kind, seed + i, size)
                parameter.grad = plain.grad.clone()
                if is_held:
                    self.held.append(parameter.grad)

    @rule(seed=SEEDS, which=st.integers(0, 5))
    def accumulate(self, seed: int, which: int) -> None:
        """As a backward pass does."""
        i = which % len(self.parameters)
        factors = make_gradient(self.parameters[i], Magnitudes.ORDINARY, seed, 1.0)
        for one in (self.parameters[i], self.plain[i]):
            (one * factors).sum().backward()

    @rule(which=st.integers(0, 5), edit=EDITS)
    def edit_one_gradient(self, which: int, edit: Callable[[torch.Tensor], object]) -> None:
        i = which % len(self.parameters)
        for one in (self.parameters[i], self.plain[i]):
            if one.grad is not None:
                edit(one.grad)

    @rule(edit=EDITS)
    def edit_every_gradient(self, edit: Callable[[torch.Tensor], object]) -> None:
        for one in (*self.parameters, *self.plain):
            if one.grad is not None:
                edit(one.grad)

    @rule(limit=st.sampled_from([0.5, 20.0]), foreach=st.sampled_from([None, False, True]))
    def clip_with_torch(self, limit: float, foreach: bool | None) -> None:
        norms = [
            torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=foreach)
            for parameters in (self.parameters, self.plain)
        ]
        assert bits(norms[0]) == bits(norms[1])

    @rule(which=st.integers(0, 5))
    def drop_one_gradient(self, which: int) -> None:
        for one in (self.parameters[which % len(self.parameters)], self.plain[which % len(self.parameters)]):
            one.grad = None

    @rule(set_to_none=st.booleans(), through_optimizer=st.booleans())
    def zero_gradients(self, set_to_none: bool, through_optimizer: bool) -> None:
        if through_optimizer:
            self.optimizer.zero_grad(set_to_none)
        for one in self.plain if through_optimizer else [*self.plain, *self.parameters]:
            if set_to_none:
                one.grad = None
            elif one.grad is not None:
                one.grad.zero_()

    # -- steps ---------------------------------------------------------------------------------------------------------

    @rule(chosen=st.integers(0, 31), backwards=st.booleans())
    def speculate(self, chosen: int, backwards: bool) -> None:
        """On all parameters where `chosen` is 0, else on those that have a bit, one by one."""
        before = [taken_of(parameter.grad) for parameter in self.parameters]
        if chosen == 0:
            self.optimizer.speculate()
        for i in sorted(range(len(self.parameters)), reverse=backwards):
            if chosen >> i & 1:
                self.optimizer.speculate([self.parameters[i]])
        if chosen == 0 and not self.held and not any(before):
            assert all(are_taken(self.optimizer))

    @rule(kind=KINDS, seed=SEEDS, size=SIZES, chosen=st.integers(0, 31), is_stepped=st.booleans())
    def train(self, kind: Magnitudes, seed: int, size: float, chosen: int, is_stepped: bool) -> None:
        """New gradients, speculation and perhaps a step: programs of rules drawn one by one have few such rows."""
        self.set_gradients(kind, seed, size, absent=0, is_held=False)
        self.speculate(chosen, backwards=False)
        if is_stepped:
            self.step(through_step=True, twice=False)

    @rule(through_step=st.booleans(), twice=st.booleans())
    def step(self, through_step: bool, twice: bool) -> None:
        """Twice with the same gradients, as without speculation."""
        for _ in range(1 + twice):
            taken = [taken_of(parameter.grad) for parameter in self.parameters]
            are_scaled = any(one is not None and one.factors for one in taken)
            (self.optimizer.step if through_step else self.optimizer.resolve)()
            gradients = {i: flat(one.grad, one) for i, one in enumerate(self.plain) if one.grad is not None}
            kind, norm = self.reference.step(gradients, self.hyper, self.optimizer.max_grad_norm)
            outcome = self.optimizer.last_outcome
            assert (outcome.kind is StepKind.SKIPPED) is (kind is StepKind.SKIPPED)
            if not are_scaled:  # else the outcome tells of those factors as well
                assert outcome.kind is kind
                assert outcome.grad_norm == norm or (math.isnan(outcome.grad_norm) and math.isnan(norm))

    @rule()
    def roll_back(self) -> None:
        self.optimizer.rollback()
        assert not any(are_taken(self.optimizer))

    @rule()
    def commit(self) -> None:
        self.optimizer.commit()
        if self.optimizer._binding.has_state:
            self.adopt()

    @rule(
        group=st.integers(0, 1), change=st.sampled_from(["lr", "weight_decay", "amsgrad", "maximize", "max_grad_norm"])
    )
    def change_hyperparameter(self, group: int, change: str) -> None:
        chosen = self.optimizer.param_groups[group % len(self.optimizer.param_groups)]
        if change == "amsgrad" and self.storage["moments"] == "8bit":
            return  # refused
        if change == "max_grad_norm":
            self.optimizer.max_grad_norm = 0.25 if self.optimizer.max_grad_norm is None else None
        elif change in ("amsgrad", "maximize"):
            chosen[change] = not chosen[change]
        else:
            chosen[change] = 0.01

    # -- parameters and state ------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 5), seed=SEEDS, in_new_storage=st.booleans())
    def write_outside(self, which: int, seed: int, in_new_storage: bool) -> None:
        """An edit of some elements; over open speculation it counts as if it had come before."""
        i = which % len(self.parameters)
        parameter = self.parameters[i]
        rng = np.random.default_rng(seed)
        where = torch.from_numpy(np.asarray(rng.random(parameter.shape) < 0.3))
        values = torch.from_numpy(np.asarray(rng.standard_normal(parameter.shape))).to(parameter.dtype)
        with torch.no_grad():
            if in_new_storage:
                moved = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
                parameter.data = moved.copy_(torch.where(where, values, parameter))
            else:
                parameter.copy_(torch.where(where, values, parameter))
        self.reference.parameters[i].write(flat(where.float(), parameter) != 0, flat(values, parameter))

    @rule(which=st.integers(0, 5))
    def write_and_restore(self, which: int) -> None:
        """As BinaryConnect does around a backward pass."""
        parameter = self.parameters[which % len(self.parameters)]
        with torch.no_grad():
            kept = parameter.detach().clone()
            parameter.copy_(parameter.sign())
            parameter.copy_(kept)

    @rule()
    def copy_everything(self) -> None:
        """Continue in a copy, without the gradients."""
        self.optimizer = copy.deepcopy(self.optimizer)
        self.adopt_anew()
        for one in self.plain:
            one.grad = None

    @rule()
    def load_own_state(self) -> None:
        """Gradients stay, with what was recorded on them."""
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.adopt_anew()

    @rule(seed=SEEDS, dtype=st.sampled_from(DTYPES))
    def add_group(self, seed: int, dtype: torch.dtype) -> None:
        if len(self.optimizer.param_groups) < 3:
            added = make_parameter((7,), dtype, "contiguous", seed)
            self.plain.append(make_parameter((7,), dtype, "contiguous", seed))
            self.reference.parameters += Synchronous([added], **self.storage).parameters
            self.optimizer.add_param_group({"params": [added], "lr": 0.1})

    @rule(threads=st.integers(1, 3), isa=st.sampled_from(superadam.available_isas()))
    def change_machine(self, threads: int, isa: str) -> None:
        superadam.set_num_threads(threads)
        native._active = isa

    @rule()
    def read_state(self) -> None:
        """The state is that of the last accepted step, also while speculation is open."""
        state = self.optimizer.state
        self.adopt()
        for parameter, one in zip(self.parameters, self.reference.parameters, strict=True):
            entry = state.get(parameter)
            if not one.step:
                assert not entry
                continue
            assert entry["step"].item() == one.step
            assert same_bits(flat(entry["exp_avg"], parameter), one.m)
            assert same_bits(flat(entry["exp_avg_sq"], parameter), one.v)
            if "max_exp_avg_sq" in entry:
                assert same_bits(flat(entry["max_exp_avg_sq"], parameter), one.vmax)
            if "master" in entry:
                assert same_bits(flat(entry["master"], parameter), one.p)

    # -- what holds after every one of them ----------------------------------------------------------------------------

    @invariant()
    def parameters_are_those_of_the_synchronous_run(self) -> None:
        for i, (parameter, one) in enumerate(zip(self.parameters, self.reference.parameters, strict=True)):
            assert same_bits(flat(parameter, parameter), one.shown), i

    @invariant()
    def gradients_are_those_of_torch(self) -> None:
        before = are_taken(self.optimizer)
        for i, (parameter, plain) in enumerate(zip(self.parameters, self.plain, strict=True)):
            assert (parameter.grad is None) is (plain.grad is None), i
            if plain.grad is not None:
                assert bits(parameter.grad) == bits(plain.grad), i
        assert are_taken(self.optimizer) == before  # looking gives nothing back

    def teardown(self) -> None:
        if hasattr(self, "optimizer"):
            self.read_state()
            self.parameters_are_those_of_the_synchronous_run()
        self.patch.undo()


TestSpeculativeRun = SpeculativeRun.TestCase
TestSpeculativeRun.settings = settings(
    max_examples=150 * TIMES,
    stateful_step_count=30 if DEEP else 15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
