"""Parameters, groups and entries of `state` that change together, between steps."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.optimizers import make, train_alike, trained
from support.visible import bits, give_gradients, parameter, parameters_of, train
from torch import nn

from superadam import OffloadScheduler, SpeculativeCPUAdam

EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.parametrize("is_speculative", [False, True])
@EACH_DTYPE
def test_groups_that_could_not_be_bound_and_are_as_before_go_on(dtype: torch.dtype, is_speculative: bool) -> None:
    optimizer, twin = trained(make(dtype, max_grad_norm=1.0)), trained(make(dtype, max_grad_norm=1.0))
    entry = optimizer.state[parameters_of(optimizer)[1]]
    for one in (optimizer, twin):
        one.add_param_group({"params": [parameter(7, dtype=dtype)]})
    right, entry["exp_avg"] = entry["exp_avg"], "nothing"
    optimizer.param_groups.reverse()
    with pytest.raises(ValueError, match=r"exp_avg of .* is a str"):
        optimizer.step()
    entry["exp_avg"] = right
    optimizer.param_groups.reverse()
    del entry
    train_alike(optimizer, twin, 2, 3, speculative=is_speculative)


EDITS = ["master", "master, moment", "moment, master", "moment, save, master"]
EDITS += ["master, group", "master, open", "open, master, close", "open, master, close, open", "master, group, open"]


@pytest.mark.parametrize("edits", EDITS)
def test_a_master_that_was_written_to_counts_whatever_else_was_replaced(edits: str) -> None:
    weight = nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))
    optimizer = SpeculativeCPUAdam([weight], lr=1e-3)
    give_gradients(optimizer, 0)
    optimizer.step()
    entry = optimizer.state[weight]
    for edit in edits.split(", "):
        if edit == "master":
            entry["master"].add_(1.0)
        elif edit == "moment":
            entry["exp_avg"] = entry["exp_avg"].clone()
        elif edit == "group":
            optimizer.add_param_group({"params": [parameter(3)]})
        elif edit == "open":
            scheduler = OffloadScheduler(optimizer, nn.ParameterList([weight]))
        elif edit == "close":
            scheduler.close()
        else:
            optimizer.state_dict()
    optimizer.step()
    assert ((weight > 0.9) & (weight < 1.1)).all()


@pytest.mark.parametrize("freed", ["lr", "step", "exp_avg", "exp_avg_sq"])
def test_one_element_without_memory_is_refused_and_not_read(freed: str) -> None:
    """Not even for the sentence that refuses it."""
    lr = torch.tensor(0.1)
    optimizer = SpeculativeCPUAdam([parameter(1)], lr=lr)
    give_gradients(optimizer, 0)
    optimizer.step()
    (one,) = parameters_of(optimizer)
    value = lr if freed == "lr" else optimizer.state[one][freed]
    before = bits(one)
    value.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"{freed}.* torch.float32 of shape"):
        optimizer.step()
    assert bits(one) == before


@EACH_DTYPE
@pytest.mark.parametrize("when", ["at first", "in a new group", "before speculation", "for a taken gradient"])
def test_a_parameter_without_memory_is_refused_from_the_first_step_on(when: str, dtype: torch.dtype) -> None:
    freed, other = (nn.Parameter(torch.ones(5, dtype=dtype)) for _ in range(2))
    optimizer = SpeculativeCPUAdam([other] if when == "in a new group" else [freed, other], lr=0.1)
    if when == "in a new group":
        train(optimizer, 0)
        optimizer.add_param_group({"params": [freed]})
    for one in (freed, other):
        one.grad = torch.ones(5, dtype=dtype)
    if when == "for a taken gradient":
        optimizer.speculate()
        freed.data = freed.grad
    else:
        freed.untyped_storage().resize_(0)
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
    optimizer = trained(make(torch.bfloat16), [0])
    held = optimizer.state[parameters_of(optimizer)[0]]
    with ThreadPoolExecutor(1) as threads:
        with optimizer._binding._transaction.lock:
            done = threads.submit(CALLS[call], optimizer)
            with pytest.raises(TimeoutError):
                done.result(0.2)
        done.result(60)
    assert held["step"] == 1


def test_parameters_are_named_as_they_are_listed_now():
    parameters = [parameter(3), parameter(4)]
    optimizer = trained(SpeculativeCPUAdam([{"params": [one]} for one in parameters]))
    optimizer.param_groups.reverse()
    parameters[0].grad = torch.ones(3).to_sparse()
    with pytest.raises(TypeError, match=r"^the gradient of parameter 0 of group 1 is sparse, "):
        optimizer.step()
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"^parameter 0 of group 0 is complex "):
        optimizer.step()


def test_a_write_that_no_sample_shows_counts_where_parameters_are_bound_anew():
    optimizer = trained(SpeculativeCPUAdam([parameter(9000, dtype=torch.bfloat16)], lr=1e-3), [0])
    (weight,) = parameters_of(optimizer)
    with torch.no_grad():
        weight[1234] = 0.5
    optimizer.add_param_group({"params": [parameter(3)]})
    trained(optimizer, [1, 2])
    assert abs(optimizer.state[weight]["master"][1234] - 0.5) < 0.01
    assert abs(weight[1234] - 0.5) < 0.01
