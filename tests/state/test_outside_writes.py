"""What others write to parameters is kept, and a master is lost only where a value really changed.

test_transaction.py and test_torch_sequences.py mix such writes, there and back, with speculation and all else.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import DTYPES, EACH_DTYPE, train_alike, trained
from support.reference import same_bits
from support.strategies import Magnitudes, random_array
from support.visible import bits, give_gradients, parameter, parameters_of, state_bits, train, visible
from torch import nn

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.state.parameter import differing


def write(optimizer: Any, values: torch.Tensor, elements: slice = slice(None)) -> None:
    with torch.no_grad():
        parameters_of(optimizer)[1].view(-1)[elements] = values.flatten()


LOOKS: dict[str, Callable[[Any], object]] = {
    "commit": SpeculativeCPUAdam.commit,
    "state": lambda optimizer: optimizer.state,
    "state dict": SpeculativeCPUAdam.state_dict,
    "scheduler": lambda one: (one.commit(), OffloadScheduler(one, nn.ParameterList(parameters_of(one))).close()),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("master", ["fp32", "24bit"])
def test_there_and_back_is_no_write_although_state_is_looked_at_meanwhile(dtype, look, master):
    """As averaged weights that are swapped in for a save. What stays for a step counts, as does what was asked for."""
    make_two = lambda: [parameter(3, dtype=dtype), parameter(9, 11, dtype=dtype)]  # noqa: E731
    optimizer, twin = (trained(SpeculativeCPUAdam(make_two(), master=master)) for _ in range(2))
    optimizer.load_state_dict(twin.state_dict())
    for stepped in ([], [0], [0, 1]):  # while others are written
        former = parameters_of(twin)[1].detach().clone()
        for one in (optimizer, twin):
            for written in (former + 1, former * 2, former):
                write(one, written)
                write(one, torch.tensor(7.0), slice(1))
                if one is optimizer:
                    LOOKS[look](one)
                if written is not former:
                    for number in stepped:
                        parameters_of(one)[number].grad = torch.ones_like(parameters_of(one)[number])
                    one.step()
                    one.zero_grad()
        train_alike(optimizer, twin, 3)
    p, add = parameters_of(optimizer)[1], optimizer.add_param_group
    for ask in (
        lambda: (optimizer.state[p], write(optimizer, p.detach() + 1), optimizer.reload_masters()),
        lambda: setattr(optimizer.state[p]["master"], "data", p.float() * 2),
        lambda: (setattr(optimizer.state[p]["master"], "data", p.float() * 2), add({"params": parameter(2)})),
        lambda: optimizer.state[p]["master"].mul_(2),
        lambda: (optimizer.state[p]["master"].mul_(2), optimizer._adopt_sampled_writes()),  # as a save does
        lambda: (optimizer.state[p]["master"].mul_(2), LOOKS["scheduler"](optimizer)),
        lambda: optimizer.state[p].update(master=p.float() * (1 + 2**-13)),
    ):
        train(optimizer, 4)
        former = p.detach().clone()
        write(optimizer, former + 1)
        ask()
        write(optimizer, former)
        assert torch.equal(optimizer.state[p]["master"], p.float())


@EACH_DTYPE
@pytest.mark.parametrize("steps_before", [0, 2])
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
    ones = [parameter(9, 11, dtype=torch.bfloat16) for _ in range(2)]
    optimizer, twin = (trained(SpeculativeCPUAdam([one], lr=0.01, max_grad_norm=100.0), [1]) for one in ones)
    for one in (optimizer, twin):
        (p,) = parameters_of(one)
        with torch.inference_mode(one is optimizer):
            one.state[p] = {key: value.clone() for key, value in one.state[p].items()}
        with torch.no_grad():
            p[::3] = 7.0
        train(one, 2)
    assert state_bits(optimizer) == state_bits(twin)
