"""What others write to parameters is kept, and a master is lost only where a value really changed."""

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
from support.visible import bits, give_gradients, parameter, parameters_of, shown, state_bits, train, visible

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


@EACH_DTYPE
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("is_looked_at", [False, True], ids=["", "state read in between"])
def test_write_over_open_speculation(dtype, layout, verdict, steps_before, is_looked_at):
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
    train_alike(optimizer, twin, 6)


def _there_and_back(p: torch.Tensor) -> None:
    backup = p.clone()
    p.copy_(p.sign())
    p.copy_(backup)


def _there_and_back_through_data(p: torch.Tensor) -> None:
    backup = p.data.clone()
    p.data.copy_(p.data.sign())
    p.data.copy_(backup)


REWRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "copy_": lambda p: p.copy_(p.clone()),
    "set .data": lambda p: setattr(p, "data", p.data.clone()),
    "other data in between": lambda p: (
        backup := p.data,
        setattr(p, "data", p.data.sign()),
        setattr(p, "data", backup),
    ),
    "there and back": _there_and_back,
    "there and back through data": _there_and_back_through_data,
}


@WORKING_COPIES
@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("when", ["committed", "accepted", "open"])
def test_the_same_values_written_again_keep_masters(dtype: torch.dtype, rewrite: str, when: str) -> None:
    """As weights that are loaded again, BinaryConnect around a backward pass, averages swapped in for evaluation."""
    optimizer, twin = (trained(make(dtype), [1], speculative=True) for _ in range(2))
    if when == "committed":
        optimizer.commit()
    give_gradients(optimizer, 2, speculative=when == "open")
    with torch.no_grad():
        REWRITES[rewrite](parameters_of(optimizer)[0])
    optimizer.step()
    optimizer.zero_grad()
    train(twin, 2)
    assert visible(optimizer) == visible(twin)
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
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("is_chosen", [False, True])
def test_reload_masters_after_writes_through_data(dtype, steps_before, is_open, is_chosen):
    """As if these had been counted; masters of other parameters stay as they are."""
    optimizer, twin = (SpeculativeCPUAdam([parameter(80, dtype=dtype, seed=i) for i in range(2)]) for _ in range(2))
    for one in (optimizer, twin):
        trained(one, range(steps_before), speculative=one is optimizer)
        give_gradients(one, 5, speculative=is_open and one is optimizer)
        written = parameters_of(one)[1]
        if one is optimizer:
            written.data[1::2] = 7.0
            one.reload_masters([written] if is_chosen else None)
        else:
            with torch.no_grad():
                written[1::2] = 7.0
        one.step()
        one.zero_grad()
        assert (written[1::2].float() - 7.0).abs().max() < 0.1  # one step of lr 0.001 away from 7
    assert visible(optimizer) == visible(twin)


def test_reload_masters_leaves_parameters_alone_that_were_not_chosen() -> None:
    optimizer = trained(SpeculativeCPUAdam([parameter(8, dtype=torch.bfloat16, seed=seed) for seed in range(2)]), [1])
    masters = [entry["master"].clone() for entry in optimizer.state_dict()["state"].values()]
    for one in parameters_of(optimizer):
        one.data.fill_(7.0)
    optimizer.reload_masters(parameters_of(optimizer)[1:])
    now = optimizer.state_dict()["state"]
    assert bits(now[0]["master"]) == bits(masters[0])
    assert bits(now[1]["master"]) == bits(torch.full((8,), 7.0))


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


def test_a_write_is_adopted_in_a_master_that_was_made_in_inference_mode() -> None:
    optimizer, twin = trained(make(), [1]), trained(make(), [1])
    for one in (optimizer, twin):
        (p,) = parameters_of(one)
        with torch.inference_mode(one is optimizer):
            one.state[p] = {key: value.clone() for key, value in one.state[p].items()}
        write(one)
        train(one, 2)
    assert state_bits(optimizer) == state_bits(twin)
