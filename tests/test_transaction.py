"""Speculation, verdicts, rollbacks, commits and saves in any order give the bits of the synchronous run."""

from __future__ import annotations

import copy
import io
import math
import os
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference import Synchronous, flat, same_bits
from strategies import Magnitudes, random_array

import superadam
from superadam import SpeculativeCPUAdam
from superadam.hyperparameters import Hyperparameters

SHAPES = [(0,), (), (1,), (5, 7), (64,), (4097,), (33, 130)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAYOUTS = ["contiguous", "transposed", "sliced"]


def make_parameter(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int) -> torch.nn.Parameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if len(shape) == 2 and layout == "transposed":
        values = values.t().contiguous().t()
    if len(shape) == 2 and layout == "sliced":
        values = torch.stack([values, torch.zeros_like(values)], dim=-1)[..., 0]
    return torch.nn.Parameter(values)


def make_gradient(parameter: torch.Tensor, kind: Magnitudes, seed: int, size: float) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    values = random_array(rng, parameter.numel(), kind, np.float32) * np.float32(size)
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
PARAMETERS = st.lists(
    st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS)), min_size=1, max_size=3
)
KINDS = st.sampled_from(
    [Magnitudes.ORDINARY, Magnitudes.ORDINARY, Magnitudes.TINY, Magnitudes.HUGE, Magnitudes.SPECIAL]
)
SEEDS = st.integers(0, 2**32 - 1)


class SpeculativeRun(RuleBasedStateMachine):
    """A speculative optimizer beside the synchronous oracle."""

    @initialize(
        groups=st.lists(st.tuples(GROUPS, PARAMETERS), min_size=1, max_size=2),
        limit=st.sampled_from([None, 1.0, 30.0, math.inf]),
    )
    def start(self, groups: list[tuple[dict[str, Any], list[Any]]], limit: float | None) -> None:
        seeds = iter(range(100))
        self.groups = [
            {**options, "params": [make_parameter(*one, next(seeds)) for one in parameters]}
            for options, parameters in groups
        ]
        self.optimizer = SpeculativeCPUAdam(self.groups, max_grad_norm=limit)
        self.reference = Synchronous(self.parameters)
        self.open: dict[int, np.ndarray] = {}
        self.shown_before: list[np.ndarray] = []

    @property
    def parameters(self) -> list[torch.Tensor]:
        groups = self.optimizer.param_groups if hasattr(self, "optimizer") else self.groups
        return [parameter for group in groups for parameter in group["params"]]

    @property
    def hyper(self) -> list[Hyperparameters]:
        return [Hyperparameters.of_group(group) for group in self.optimizer.param_groups for _ in group["params"]]

    def give_gradients(self, kind: Magnitudes, seed: int, size: float, absent: int) -> dict[int, np.ndarray]:
        """Set `.grad` where no speculation is open and `absent` has no bit; return them flat."""
        given = {}
        for i, parameter in enumerate(self.parameters):
            if i not in self.open and not absent >> i & 1:
                parameter.grad = make_gradient(parameter, kind, seed + i, size)
                given[i] = flat(parameter.grad, parameter)
        return given

    def conclude(self, gradients: dict[int, np.ndarray]) -> None:
        kind, norm = self.reference.step(gradients, self.hyper, self.optimizer.max_grad_norm)
        outcome = self.optimizer.last_outcome
        assert outcome is not None
        assert outcome.kind is kind
        assert outcome.grad_norm == norm or (math.isnan(outcome.grad_norm) and math.isnan(norm))
        self.open = {}

    @precondition(lambda self: not self.open)
    @rule(kind=KINDS, seed=SEEDS, size=st.sampled_from([1.0, 1e-3]), absent=st.integers(0, 7))
    def plain_step(self, kind: Magnitudes, seed: int, size: float, absent: int) -> None:
        gradients = self.give_gradients(kind, seed, size, absent)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.conclude(gradients)

    @rule(kind=KINDS, seed=SEEDS, size=st.sampled_from([1.0, 1e-3]), absent=st.integers(0, 7), backwards=st.booleans())
    def speculate(self, kind: Magnitudes, seed: int, size: float, absent: int, backwards: bool) -> None:
        given = self.give_gradients(kind, seed, size, absent)
        if backwards:
            for i in reversed(list(given)):
                self.optimizer.speculate([self.parameters[i]])
        else:
            self.optimizer.speculate()
        self.open.update(given)
        assert all(parameter.grad is None for parameter in self.parameters)

    @precondition(lambda self: self.open)
    @rule(through_step=st.booleans())
    def resolve(self, through_step: bool) -> None:
        if through_step:
            self.optimizer.step()
        else:
            assert self.optimizer.resolve() == self.optimizer.last_outcome or math.isnan(
                self.optimizer.last_outcome.grad_norm
            )
        self.conclude(self.open)

    @rule(through_zero_grad=st.booleans())
    def roll_back(self, through_zero_grad: bool) -> None:
        (self.optimizer.zero_grad if through_zero_grad else self.optimizer.rollback)()
        self.open = {}

    @rule()
    def commit(self) -> None:
        self.optimizer.commit()

    @rule(
        group=st.integers(0, 1), change=st.sampled_from(["lr", "weight_decay", "amsgrad", "maximize", "max_grad_norm"])
    )
    def change_hyperparameter(self, group: int, change: str) -> None:
        chosen = self.optimizer.param_groups[group % len(self.optimizer.param_groups)]
        if change == "max_grad_norm":
            self.optimizer.max_grad_norm = 0.25
        elif change in ("amsgrad", "maximize"):
            chosen[change] = not chosen[change]
        else:
            chosen[change] = 0.01

    @rule(which=st.integers(0, 5), seed=SEEDS)
    def write_outside(self, which: int, seed: int) -> None:
        """An in-place edit of some elements; over open speculation it counts once the verdict is there."""
        assume(not self.open)
        i = which % len(self.parameters)
        parameter = self.parameters[i]
        rng = np.random.default_rng(seed)
        where = torch.from_numpy(np.asarray(rng.random(parameter.shape) < 0.3))
        values = torch.from_numpy(np.asarray(rng.standard_normal(parameter.shape))).to(parameter.dtype)
        with torch.no_grad():
            parameter.copy_(torch.where(where, values, parameter))
        self.reference.parameters[i].write(flat(where.float(), parameter) != 0, flat(values, parameter))

    @rule(through_disk=st.booleans())
    def copy_everything(self, through_disk: bool) -> None:
        """Continue in a fresh model and optimizer; what is open is lost, as documented."""
        if through_disk:
            file = io.BytesIO()
            self.optimizer.rollback()
            torch.save({"model": [p.detach() for p in self.parameters], "optimizer": self.optimizer.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            groups = [
                {**group, "params": [torch.nn.Parameter(torch.randn_like(p)) for p in group["params"]]}
                for group in self.optimizer.param_groups
            ]
            fresh = SpeculativeCPUAdam(groups, max_grad_norm=self.optimizer.max_grad_norm)
            fresh.load_state_dict(saved["optimizer"])
            with torch.no_grad():
                for group in fresh.param_groups:
                    for parameter in group["params"]:
                        parameter.copy_(saved["model"].pop(0))
            self.optimizer = fresh
        else:
            self.optimizer.rollback()
            self.optimizer = copy.deepcopy(self.optimizer)
        self.open = {}

    @rule(threads=st.integers(1, 3), isa=st.sampled_from(superadam.available_isas()))
    def change_machine(self, threads: int, isa: str) -> None:
        superadam.set_num_threads(threads)
        superadam.native.set_active_isa(isa)

    @rule()
    def read_state(self) -> None:
        """The state is that of the last accepted step, also while speculation is open."""
        if not hasattr(self, "optimizer"):
            return
        for parameter, one in zip(self.parameters, self.reference.parameters, strict=True):
            entry = self.optimizer.state.get(parameter)
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

    @invariant()
    def parameters_are_those_of_the_synchronous_run(self) -> None:
        if hasattr(self, "optimizer"):
            for i, (parameter, one) in enumerate(zip(self.parameters, self.reference.parameters, strict=True)):
                if i not in self.open:
                    assert same_bits(flat(parameter, parameter), one.shown), i

    def teardown(self) -> None:
        if hasattr(self, "optimizer"):
            self.roll_back(False)
            self.parameters_are_those_of_the_synchronous_run()
            self.read_state()


deep = os.environ.get("SUPERADAM_DEEP") == "1"
TestSpeculativeRun = SpeculativeRun.TestCase
TestSpeculativeRun.settings = settings(
    max_examples=3000 if deep else 150,
    stateful_step_count=30 if deep else 15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
