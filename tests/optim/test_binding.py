"""Parameters, groups and entries of `state` that change together, between steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.visible import bits
from torch import nn

from superadam import SpeculativeCPUAdam


def give_gradients(parameters: list[nn.Parameter], number: int) -> None:
    for row, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(10 * number + row)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("is_speculative", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_that_could_not_be_bound_and_are_as_before_go_on(dtype: torch.dtype, is_speculative: bool) -> None:
    def train(*, is_spoiled: bool) -> list[bytes]:
        parameters = [nn.Parameter(torch.linspace(-1, 1, length).to(dtype)) for length in (3, 5, 7)]
        optimizer = SpeculativeCPUAdam([{"params": [one]} for one in parameters], lr=0.1, max_grad_norm=1.0)
        for number in range(6):
            if number == 3 and is_spoiled:
                entry = optimizer.state[parameters[1]]
                right, entry["exp_avg"] = entry["exp_avg"], "nothing"
                optimizer.param_groups.reverse()
                with pytest.raises(ValueError, match=r"exp_avg of .* is a str"):
                    optimizer.step()
                entry["exp_avg"] = right
                optimizer.param_groups.reverse()
            give_gradients(parameters, number)
            if is_speculative:
                optimizer.speculate()
            optimizer.step()
        return [bits(one) for one in parameters]

    assert train(is_spoiled=True) == train(is_spoiled=False)


@pytest.mark.parametrize("edits", ["master", "master, moment", "moment, master", "moment, save, master"])
def test_a_master_that_was_written_to_counts_whatever_else_was_replaced(edits: str) -> None:
    parameter = nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))
    optimizer = SpeculativeCPUAdam([parameter], lr=1e-3)
    give_gradients([parameter], 0)
    optimizer.step()
    entry = optimizer.state[parameter]
    for edit in edits.split(", "):
        if edit == "master":
            entry["master"].add_(1.0)
        elif edit == "moment":
            entry["exp_avg"] = entry["exp_avg"].clone()
        else:
            optimizer.state_dict()
    optimizer.step()
    assert ((parameter > 0.9) & (parameter < 1.1)).all()


@pytest.mark.parametrize("freed", ["lr", "step", "exp_avg", "exp_avg_sq"])
def test_one_element_without_memory_is_refused_and_not_read(freed: str) -> None:
    """Not even for the sentence that refuses it."""
    parameter, lr = nn.Parameter(torch.zeros(1)), torch.tensor(0.1)
    optimizer = SpeculativeCPUAdam([parameter], lr=lr)
    give_gradients([parameter], 0)
    optimizer.step()
    value = lr if freed == "lr" else optimizer.state[parameter][freed]
    before = bits(parameter)
    value.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"{freed}.* torch.float32 of shape"):
        optimizer.step()
    assert bits(parameter) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("when", ["at first", "in a new group", "before speculation"])
def test_a_parameter_without_memory_is_refused_from_the_first_step_on(when: str, dtype: torch.dtype) -> None:
    freed, other = (nn.Parameter(torch.ones(5, dtype=dtype)) for _ in range(2))
    optimizer = SpeculativeCPUAdam([other] if when == "in a new group" else [freed, other], lr=0.1)
    if when == "in a new group":
        give_gradients([other], 0)
        optimizer.step()
        optimizer.add_param_group({"params": [freed]})
    freed.untyped_storage().resize_(0)
    for parameter in (freed, other):
        parameter.grad = torch.ones(5, dtype=dtype)
    before = bits(other)
    if when == "before speculation":
        optimizer.speculate()
    with pytest.raises(ValueError, match="has no data, because its storage was freed"):
        optimizer.step()
    assert bits(other) == before
    freed.grad = None
    optimizer.step()
    assert bits(other) != before


CALLS = {
    "reading what programs hold": lambda optimizer: optimizer._binding.bound(optimizer.param_groups),
    "adopting what they wrote": lambda optimizer: optimizer._binding._transaction.adopt_outside_writes(),
}


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_read_while_a_pass_of_the_worker_runs(call):
    """Which writes state, and reads where parameters lie."""
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    optimizer = SpeculativeCPUAdam([weight])
    give_gradients([weight], 1)
    optimizer.step()
    held = optimizer.state[weight]
    with ThreadPoolExecutor(1) as threads:
        with optimizer._binding._transaction.lock:
            done = threads.submit(CALLS[call], optimizer)
            with pytest.raises(TimeoutError):
                done.result(0.2)
        done.result(60)
    assert held["step"] == 1


def test_parameters_are_named_as_they_are_listed_now():
    parameters = [nn.Parameter(torch.ones(length)) for length in (3, 4)]
    optimizer = SpeculativeCPUAdam([{"params": [one]} for one in parameters])
    give_gradients(parameters, 1)
    optimizer.step()
    optimizer.param_groups.reverse()
    parameters[0].grad = torch.ones(3).to_sparse()
    with pytest.raises(TypeError, match=r"^the gradient of parameter 0 of group 1 is sparse, "):
        optimizer.step()
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"^parameter 0 of group 0 is complex "):
        optimizer.step()


def test_a_write_that_no_sample_shows_counts_where_parameters_are_bound_anew():
    def train(optimizer, weight):
        for number in range(3):
            if number == 1:
                with torch.no_grad():
                    weight[1234] = 0.5
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
            give_gradients([weight], number)
            optimizer.step()

    weight = nn.Parameter(torch.linspace(-1, 1, 9000, dtype=torch.bfloat16))
    optimizer = SpeculativeCPUAdam([weight], lr=1e-3)
    train(optimizer, weight)
    assert abs(optimizer.state[weight]["master"][1234] - 0.5) < 0.01
    assert abs(weight[1234] - 0.5) < 0.01
