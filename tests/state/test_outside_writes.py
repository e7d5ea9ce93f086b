"""What others write to parameters is kept, and a master is lost only where a value really changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import DTYPES, EACH_DTYPE, train_alike, trained
from support.reference import same_bits
from support.strategies import Magnitudes, random_array
from support.visible import are_taken, bits, give_gradients, parameter, parameters_of, shown, state_bits, train, visible

from superadam import SpeculativeCPUAdam
from superadam.state.parameter import differing

WORKING_COPIES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda values: values.clone(),
    "transposed": lambda values: values.t().contiguous().t(),
    "sliced": lambda values: torch.stack([values, values], dim=-1)[..., 0],
}


def make(dtype: torch.dtype = torch.bfloat16, layout: str = "contiguous") -> SpeculativeCPUAdam:
    values = LAYOUTS[layout](parameter(9, 11).detach().to(dtype))
    return SpeculativeCPUAdam([torch.nn.Parameter(values)], lr=0.01, max_grad_norm=100.0)


def write(optimizer: SpeculativeCPUAdam) -> None:
    """Write to every third element, in place."""
    (one,) = parameters_of(optimizer)
    where = (torch.arange(one.numel()) % 3 == 0).view(one.shape)
    with torch.no_grad():
        one.copy_(torch.where(where, 7.0, one))


VERDICTS: dict[str, tuple[float, Callable[[SpeculativeCPUAdam], object]]] = {
    "accepted": (1.0, SpeculativeCPUAdam.resolve),
    "accepted by step": (1.0, SpeculativeCPUAdam.step),
    "clipped": (100.0, SpeculativeCPUAdam.resolve),
    "skipped": (math.nan, SpeculativeCPUAdam.resolve),
    "rolled back": (1.0, lambda optimizer: (optimizer.rollback(), optimizer.step())),
    "abandoned": (1.0, SpeculativeCPUAdam.zero_grad),
}


@pytest.mark.covering(3)
@EACH_DTYPE
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("is_looked_at", [False, True], ids=["", "state read in between"])
def test_write_over_open_speculation(
    dtype: torch.dtype, layout: str, verdict: str, steps_before: int, is_looked_at: bool
) -> None:
    """The step is made as if the write had come before, which it did; so with gradients that were not taken."""
    optimizer, twin = make(dtype, layout), make(dtype, layout)
    size, conclude = VERDICTS[verdict]
    for one in (optimizer, twin):
        for seed in range(steps_before):
            train(one, seed)
        give_gradients(one, 5, size, speculative=one is optimizer)
        write(one)
        if is_looked_at:
            assert len(one.state) == bool(steps_before)
        conclude(one)
        one.zero_grad()
    assert shown(optimizer) == shown(twin)
    for one in (optimizer, twin):
        train(one, 6, speculative=one is optimizer)
    assert state_bits(optimizer) == state_bits(twin)


BACKWARDS: dict[str, Callable[[torch.nn.Linear, torch.Tensor], None]] = {
    "in place": lambda model, value: model.weight.copy_(value),
    "through data": lambda model, value: model.weight.data.copy_(value),
    "another storage": lambda model, value: setattr(model.weight, "data", value.clone()),
}


@EACH_DTYPE
@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.parametrize("when", ["before speculation", "around speculation", "after speculation"])
def test_binary_weights_during_backward(dtype: torch.dtype, how: str, when: str) -> None:
    """BinaryConnect computes gradients with the signs of weights; masters keep their low bits."""

    def run(*, speculative: bool) -> tuple[object, object]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8, bias=False, dtype=dtype)
        optimizer = SpeculativeCPUAdam(model.parameters(), lr=1e-4)
        for seed in range(5):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
            optimizer.zero_grad()
            if when == "after speculation":
                model(x).square().sum().backward()
                if speculative:
                    optimizer.speculate()
            kept = model.weight.detach().clone()
            with torch.no_grad():
                BACKWARDS[how](model, kept.sign())
            if when != "after speculation":
                model(x).square().sum().backward()
                if when == "around speculation" and speculative:
                    optimizer.speculate()
            with torch.no_grad():
                BACKWARDS[how](model, kept)
            if when == "before speculation" and speculative:
                optimizer.speculate()
            assert are_taken(optimizer) == [speculative]
            optimizer.step()
        if dtype in (torch.bfloat16, torch.float16):
            assert (optimizer.state[model.weight]["master"] != model.weight).any()
        return visible(optimizer), optimizer.last_outcome

    assert run(speculative=True) == run(speculative=False)


@WORKING_COPIES
@pytest.mark.parametrize("how", BACKWARDS)
def test_write_that_is_taken_back_keeps_masters(dtype: torch.dtype, how: str) -> None:
    """As if it had never been."""
    optimizer, twin = make(dtype), make(dtype)
    for seed in range(4):
        give_gradients(optimizer, seed, speculative=True)
        (p,) = parameters_of(optimizer)
        holder = torch.nn.Linear(1, 1, dtype=dtype)
        holder.weight = p
        kept = p.detach().clone()
        with torch.no_grad():
            BACKWARDS[how](holder, kept.sign())
            BACKWARDS[how](holder, kept)
        optimizer.resolve()
        optimizer.zero_grad()
        train(twin, seed)
        assert visible(optimizer) == visible(twin)
    assert (optimizer.state[p]["master"] != p.float()).any()


@EACH_DTYPE
def test_sharpness_aware_steps(dtype: torch.dtype) -> None:
    """SAM climbs with the first gradient and steps with that of the place it came to."""

    def run(*, speculative: bool) -> dict[str, object]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=dtype), torch.nn.Linear(8, 8, dtype=dtype))
        optimizer = SpeculativeCPUAdam(model.parameters(), lr=1e-3)
        for seed in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
            model(x).square().sum().backward()
            if speculative:
                optimizer.speculate()
            climbs = [0.05 * p.grad / (p.grad.norm() + 1e-6) for p in model.parameters()]
            with torch.no_grad():
                for p, climb in zip(model.parameters(), climbs, strict=True):
                    p.add_(climb)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            if speculative:
                optimizer.speculate()
                assert all(are_taken(optimizer))
            with torch.no_grad():
                for p, climb in zip(model.parameters(), climbs, strict=True):
                    p.sub_(climb)
            optimizer.step()
            optimizer.zero_grad()
        return visible(optimizer)

    assert run(speculative=True) == run(speculative=False)


@EACH_DTYPE
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("is_committed", [False, True])
def test_write_between_steps(dtype: torch.dtype, speculative: bool, is_committed: bool) -> None:
    optimizer, twin = make(dtype), make(dtype)
    for one in (optimizer, twin):
        train(one, 1, speculative=one is optimizer)
    if is_committed:
        optimizer.commit()
    for one in (optimizer, twin):
        write(one)
        train(one, 2, speculative=speculative and one is optimizer)
    assert state_bits(optimizer) == state_bits(twin)
    (p,) = parameters_of(optimizer)
    assert (p.flatten()[::3].float() - 7.0).abs().max() < 0.1  # one step of lr 0.01 away from 7
    assert (p.flatten()[1::3].float() - 7.0).abs().min() > 1.0


def _swapped(p: torch.Tensor) -> None:
    """Evaluate with other weights, from a backup of the rounded ones."""
    backup = p.clone()
    p.fill_(0.5)
    p.copy_(backup)


RELOADS: dict[str, Callable[[torch.Tensor], object]] = {
    "copy_": lambda p: p.copy_(p.clone()),
    "set .data": lambda p: setattr(p, "data", p.data.clone()),
    "there and back": lambda p: (p.neg_(), p.neg_()),
    "averages in and out": _swapped,
}


@WORKING_COPIES
@pytest.mark.parametrize("reload", RELOADS)
@pytest.mark.parametrize("is_committed", [False, True])
def test_loading_the_same_weights_keeps_masters(dtype: torch.dtype, reload: str, is_committed: bool) -> None:
    optimizer, twin = (trained(make(dtype), [1], speculative=True) for _ in range(2))
    if is_committed:
        optimizer.commit()
    with torch.no_grad():
        RELOADS[reload](parameters_of(optimizer)[0])
    train_alike(optimizer, twin, 2)
    (p,) = parameters_of(optimizer)
    assert (optimizer.state[p]["master"] != p.float()).any()  # there is something that could have been lost


@WORKING_COPIES
def test_only_differing_elements_are_adopted(dtype: torch.dtype) -> None:
    optimizer = make(dtype)
    train(optimizer, 1)
    (p,) = parameters_of(optimizer)
    before = optimizer.state_dict()["state"][0]["master"].clone()
    with torch.no_grad():
        p[0, 0], p[0, 1], p[0, 2] = 7.0, math.nan, -p[0, 2]
    master = optimizer.state_dict()["state"][0]["master"]
    assert bits(master.flatten()[3:]) == bits(before.flatten()[3:])
    assert bits(master.flatten()[:3]) == bits(p.flatten()[:3].float())


@WORKING_COPIES
def test_commit_looks_at_parameters_also_after_a_state_was_loaded(dtype: torch.dtype) -> None:
    """There and back with a look in between is a write: the element's master is what was written."""
    optimizer = make(dtype)
    train(optimizer, 1)
    (p,) = parameters_of(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    value = p[0, 0].item()
    assert optimizer.state_dict()["state"][0]["master"][0, 0].item() != value
    optimizer.load_state_dict(optimizer.state_dict())
    for written in (7.0, value):
        with torch.no_grad():
            p[0, 0] = written
        optimizer.commit()
    assert optimizer.state[p]["master"][0, 0].item() == value


@EACH_DTYPE
@pytest.mark.parametrize("speculative", [False, True])
def test_reload_masters_after_writes_through_data(dtype: torch.dtype, speculative: bool) -> None:
    optimizer, twin = make(dtype), make(dtype)
    for one in (optimizer, twin):
        train(one, 1, speculative=speculative)
        (p,) = parameters_of(one)
        if one is optimizer:
            p.data[::2] = 7.0
            one.reload_masters()
        else:
            with torch.no_grad():
                p[::2] = 7.0
        train(one, 2, speculative=speculative)
    assert state_bits(optimizer) == state_bits(twin)


def test_reload_masters_of_chosen_parameters() -> None:
    optimizer = SpeculativeCPUAdam([parameter(8, dtype=torch.bfloat16, seed=seed) for seed in range(2)])
    train(optimizer, 1)
    first, second = parameters_of(optimizer)
    masters = [entry["master"].clone() for entry in optimizer.state_dict()["state"].values()]
    first.data.fill_(7.0)
    second.data.fill_(7.0)
    optimizer.reload_masters([second])
    now = optimizer.state_dict()["state"]
    assert bits(now[0]["master"]) == bits(masters[0])
    assert bits(now[1]["master"]) == bits(torch.full((8,), 7.0))


@EACH_DTYPE
@pytest.mark.parametrize("steps_before", [0, 1])
def test_reload_masters_while_speculation_is_open(dtype: torch.dtype, steps_before: int) -> None:
    optimizer, twin = make(dtype), make(dtype)
    for one in (optimizer, twin):
        for seed in range(steps_before):
            train(one, seed)
        give_gradients(one, 5, speculative=one is optimizer)
        (p,) = parameters_of(one)
        p.data[::2] = 7.0
        one.reload_masters()
        one.step()
        one.zero_grad()
    assert visible(optimizer) == visible(twin)
    assert optimizer.statistics.accepted == 0
    (p,) = parameters_of(optimizer)
    assert (p[::2].float() - 7.0).abs().max() < 0.1  # one step of lr 0.01 away from 7


def test_weights_loaded_after_construction_and_after_published() -> None:
    model, other = (torch.nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(2))
    optimizer = SpeculativeCPUAdam(model.parameters(), lr=0.1)
    model.load_state_dict(other.state_dict())
    train(optimizer, 1)
    twin = SpeculativeCPUAdam(copy.deepcopy(other).parameters(), lr=0.1)
    train(twin, 1)
    assert visible(optimizer) == visible(twin)
    model.load_state_dict(other.state_dict())
    for p, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert bits(optimizer.state[p]["master"]) == bits(theirs.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=st.integers(0, 2**32 - 1), length=st.integers(0, 70))
def test_differing_compares_bits(dtype: torch.dtype, seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = (
        torch.from_numpy(random_array(rng, length, Magnitudes.SPECIAL, np.float64)).to(dtype) for _ in range(2)
    )
    same = ~differing(first, second)
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # every value of the halves is one of these
    for i in range(length):
        assert bool(same[i]) is same_bits(first[i : i + 1].to(wide).numpy(), second[i : i + 1].to(wide).numpy())


def test_state_that_was_made_in_inference_mode_counts_as_it_is_at_the_step() -> None:
    """It counts no versions, so that nobody can tell whether it was written to in an open step."""

    def moments(*, speculative: bool) -> tuple[list[float], int]:
        one = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = SpeculativeCPUAdam([one], lr=0.1)
        one.grad = torch.ones_like(one)
        optimizer.step()
        with torch.inference_mode():
            mine = optimizer.state[one]["exp_avg"] = torch.ones(3)
        one.grad = torch.ones_like(one)
        if speculative:
            optimizer.speculate()
        with torch.inference_mode():
            mine.fill_(-5.0)
        optimizer.step()
        return one.tolist(), optimizer.statistics.accepted

    assert moments(speculative=True) == moments(speculative=False)


def test_a_write_is_adopted_in_a_master_that_was_made_in_inference_mode() -> None:
    optimizer, twin = trained(make(), [1]), trained(make(), [1])
    for one in (optimizer, twin):
        (p,) = parameters_of(one)
        with torch.inference_mode(one is optimizer):
            one.state[p] = {key: value.clone() for key, value in one.state[p].items()}
        write(one)
        train(one, 2)
    assert state_bits(optimizer) == state_bits(twin)
