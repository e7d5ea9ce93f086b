"""Groups, published state and kernels stay of one mind, whatever users and frameworks replace, convert or edit."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.optimizers import EACH_DTYPE, copy_weights, make, train_alike, trained
from support.visible import (
    are_taken,
    bits,
    entry_bits,
    give_gradients,
    parameter,
    parameters_of,
    refused,
    shown,
    speculate,
    train,
    visible,
)

from superadam import SpeculativeCPUAdam, SpeculativeCPUAdamW
from superadam.state.parameter import Phase

# -- shared memory -----------------------------------------------------------------------------------------------------


def _two_views(first: slice, second: slice) -> list[torch.nn.Parameter]:
    buffer = torch.zeros(10)
    return [torch.nn.Parameter(buffer[first]), torch.nn.Parameter(buffer[second])]


SHARED: dict[str, Callable[[], list[torch.nn.Parameter]]] = {
    "the same data": lambda: _two_views(slice(10), slice(10)),
    "overlapping": lambda: _two_views(slice(6), slice(5, 10)),
    "one inside the other": lambda: _two_views(slice(10), slice(3, 4)),
    "transposed": lambda: [one := parameter(3, 3), torch.nn.Parameter(one.detach().t())],
}


@pytest.mark.parametrize("kind", SHARED)
def test_parameters_that_share_memory_are_refused(kind: str) -> None:
    optimizer = SpeculativeCPUAdam([parameter(3), *SHARED[kind]()])
    for one in parameters_of(optimizer):
        one.grad = torch.ones_like(one)
    for use in (optimizer.step, optimizer.speculate):
        with refused(optimizer, ValueError, "parameter . of group 0 and parameter . of group 0 share memory"):
            use()


def test_refused_parameters_leave_those_of_before_in_their_places() -> None:
    optimizer, twin = trained(make(), [1]), trained(make(), [1])
    group = optimizer.param_groups[0]
    first, second = group["params"]
    group["params"] = [second, first, torch.nn.Parameter(first.detach())]
    with pytest.raises(ValueError, match="share memory"):
        optimizer.commit()
    group["params"] = [first, second]
    for one in (optimizer, twin):
        train(one, 2, speculative=True)
    assert visible(optimizer) == visible(twin)


def test_parameters_side_by_side_in_one_buffer() -> None:
    flat = SpeculativeCPUAdam(_two_views(slice(6), slice(6, 10)))
    apart = SpeculativeCPUAdam([torch.nn.Parameter(torch.zeros(length)) for length in (6, 4)])
    for seed in range(2):
        for optimizer in (flat, apart):
            train(optimizer, seed, speculative=bool(seed))
    assert visible(flat) == visible(apart)


# -- parameters that change --------------------------------------------------------------------------------------------


@EACH_DTYPE
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("is_exposed", [False, True])
def test_group_added_during_training(dtype: torch.dtype, speculative: bool, is_exposed: bool) -> None:
    """As if it had been there from the start, without gradients."""
    optimizer, twin = make(dtype), make(dtype)
    twin.add_param_group({"params": parameter(9, dtype=dtype, seed=2), "lr": 0.1})
    for seed in range(4):
        if is_exposed:
            assert len(optimizer.state) == [0, 2, 2, 3][seed]
        if seed == 2:
            optimizer.add_param_group({"params": parameter(9, dtype=dtype, seed=2), "lr": 0.1})
        train(optimizer, seed, speculative=speculative)
        give_gradients(twin, seed)
        if seed < 2:
            parameters_of(twin)[2].grad = None
        twin.step()
    optimizer.zero_grad()
    twin.zero_grad()
    assert visible(optimizer) == visible(twin)


@EACH_DTYPE
@pytest.mark.parametrize("has_gradient", [False, True])
def test_group_added_while_speculation_is_open(dtype: torch.dtype, has_gradient: bool) -> None:
    optimizer, twin = trained(make(dtype), [1]), trained(make(dtype), [1])
    speculate(optimizer, 2)
    give_gradients(twin, 2)
    for one in (optimizer, twin):
        late = parameter(9, dtype=dtype, seed=2)
        one.add_param_group({"params": late, "lr": 0.1})
        late.grad = torch.ones_like(late) if has_gradient else None
    optimizer.resolve()
    twin.step()
    assert visible(optimizer) == visible(twin)
    assert optimizer.last_outcome == twin.last_outcome
    train_alike(optimizer, twin, 3)


@pytest.mark.parametrize("when", ["before the first step", "after a step", "accepted"])
def test_framework_replaces_parameters(when: str) -> None:
    """As Accelerate does under FSDP2: `params` of a group are other tensors after construction."""
    optimizer, twin = make(), make()
    if when != "before the first step":
        train(optimizer, 1, speculative=when == "accepted")
    group = optimizer.param_groups[0]
    group["params"] = parameters_of(twin)
    for one in (optimizer, twin):
        train(one, 2)
    assert [bits(optimizer.state[p]["exp_avg"]) for p in group["params"]] == [
        bits(twin.state[p]["exp_avg"]) for p in group["params"]
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_replaced_while_speculation_is_open(dtype: torch.dtype) -> None:
    """Those that are left make their step; those that come back later have theirs to make."""
    optimizer, twin = trained(make(dtype), [1]), trained(make(dtype), [1])
    speculate(optimizer, 2)
    give_gradients(twin, 2)
    for one in (optimizer, twin):
        kept = parameters_of(one)
        one.param_groups[0]["params"] = [kept[0]]
        one.step()
        one.param_groups[0]["params"] = kept[::-1]
        one.step()
    assert visible(optimizer) == visible(twin)
    assert [optimizer.state[p]["step"].item() for p in parameters_of(optimizer)] == [2, 3]


CONVERSIONS: dict[str, tuple[torch.dtype, Callable[[torch.Tensor], torch.Tensor]]] = {
    "to bf16": (torch.float32, torch.Tensor.bfloat16),
    "to fp32": (torch.bfloat16, torch.Tensor.float),
    "to fp16": (torch.bfloat16, torch.Tensor.half),
    "to columns": (torch.float32, lambda values: values.t().contiguous().t()),
    "to every other column": (torch.float32, lambda values: torch.stack([values, values], dim=-1)[..., 0]),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("history", ["loaded", "stepped", "accepted", "exposed"])
@pytest.mark.parametrize("speculative", [False, True])
def test_model_converted_after_published(conversion: str, history: str, speculative: bool) -> None:
    """`.data` of another dtype or layout is bound again, with the moments it had: as if loaded into such a model."""
    dtype, convert = CONVERSIONS[conversion]
    optimizer, source = (SpeculativeCPUAdam([parameter(6, 7, dtype=dtype)], lr=0.1) for _ in range(2))
    train(source, 1)
    if history == "loaded":
        optimizer.load_state_dict(source.state_dict())
    else:
        train(optimizer, 1, speculative=history == "accepted")
    if history == "exposed":
        assert optimizer.state
    (one,) = parameters_of(optimizer)
    one.data = convert(one.data)
    twin = SpeculativeCPUAdam([torch.nn.Parameter(convert(parameters_of(source)[0].detach().clone()))], lr=0.1)
    saved = source.torch_state_dict() if conversion in ("to bf16", "to fp32") else source.state_dict()
    shown_now = shown(twin)
    twin.load_state_dict(saved)
    with torch.no_grad():
        parameters_of(twin)[0].copy_(one)
    if history != "loaded":
        assert shown(optimizer) == shown_now
    train_alike(optimizer, twin, 2, 3, speculative=speculative)


@EACH_DTYPE
def test_conversion_to_another_shape_is_refused(dtype: torch.dtype) -> None:
    optimizer = trained(make(dtype), [1])
    first = parameters_of(optimizer)[0]
    whole = first.data
    first.data = torch.zeros(60, dtype=dtype)
    first.grad = torch.ones(60, dtype=dtype)
    for use in (optimizer.step, optimizer.speculate, optimizer.commit):
        with pytest.raises(ValueError, match=r"of shape \(70,\), expected floats of shape \(60,\)"):
            use()
    assert optimizer.state[first]["exp_avg"].shape == (70,)  # which shows what there is to mend
    assert bits(first) == bits(torch.zeros(60, dtype=dtype))
    first.data = whole
    first.grad = None
    twin = make(dtype)
    for seed, one in ((1, twin), (2, twin), (2, optimizer)):
        train(one, seed)
    assert visible(optimizer) == visible(twin)


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("history", ["new", "stepped", "accepted"])
def test_model_converted_while_speculation_is_open(conversion: str, history: str) -> None:
    """No kernel writes to memory of another size; the gradients in `.grad` count as they are."""
    dtype, convert = CONVERSIONS[conversion]
    optimizer, twin = (SpeculativeCPUAdam([parameter(6, 7, dtype=dtype)], lr=0.1) for _ in range(2))
    for one in (optimizer, twin):
        if history != "new":
            train(one, 1, speculative=one is optimizer and history == "accepted")
    for one in (optimizer, twin):
        give_gradients(one, 2, speculative=one is optimizer)
        for p in parameters_of(one):
            p.data = convert(p.data)
        one.step()
        one.zero_grad()
    assert visible(optimizer) == visible(twin)
    train_alike(optimizer, twin, 3)


@pytest.mark.parametrize("convert", [torch.Tensor.double, lambda values: values[:3].clone()], ids=["double", "shorter"])
def test_conversion_that_does_not_fit_is_refused_while_speculation_is_open(
    convert: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Given back its data, everything goes on."""
    optimizer, twin = trained(make(torch.bfloat16), [1]), trained(make(torch.bfloat16), [1])
    for one in (optimizer, twin):
        give_gradients(one, 2, speculative=one is optimizer)
        first = parameters_of(one)[0]
        whole = first.data
        first.data = convert(whole)
        converted = bits(first)
        for use in (one.resolve, one.step):
            with pytest.raises((TypeError, ValueError), match="parameter 0 of group 0"):
                use()
            assert bits(first) == converted
        first.data = whole
        one.step()
    assert visible(optimizer) == visible(twin)


@EACH_DTYPE
@pytest.mark.parametrize("is_freed", [False, True])
def test_memory_swapped_while_speculation_is_open(dtype: torch.dtype, is_freed: bool) -> None:
    """As block swapping does; also where the first memory is gone and its address used again."""
    optimizer, twin = trained(make(dtype), [1]), trained(make(dtype), [1])
    speculate(optimizer, 2)
    for p in parameters_of(optimizer):
        if is_freed:
            kept = p.detach().clone()
            p.untyped_storage().resize_(0)
            p.data = kept
        else:
            p.data = p.data.clone()
    optimizer.resolve()
    optimizer.zero_grad()
    train(twin, 2)
    assert visible(optimizer) == visible(twin)
    train_alike(optimizer, twin, 3)


def test_conversion_to_what_cannot_be_held_is_refused() -> None:
    optimizer = trained(make(), [1])
    parameters_of(optimizer)[1].data = torch.zeros(4, 5, dtype=torch.complex64)
    with pytest.raises(TypeError, match="parameter 1 of group 0 is complex"):
        optimizer.step()


# -- the published state -----------------------------------------------------------------------------------------------


def test_state_read_between_steps_is_that_of_the_last_one() -> None:
    optimizer, twin = make(torch.bfloat16), make(torch.bfloat16)
    for seed in range(4):
        train(optimizer, seed, speculative=bool(seed % 2))
        train(twin, seed)
        entry = optimizer.state[parameters_of(optimizer)[0]]
        assert entry["step"] == seed + 1
        assert (entry["step"].shape, entry["step"].dtype) == ((), torch.float32)
    assert visible(optimizer) == visible(twin)


def _set_inference_step(state: Any, p: torch.Tensor) -> None:
    with torch.inference_mode():
        state[p]["step"] = torch.tensor(9.0)


EDITS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "in place": lambda state, p: state[p]["exp_avg"].mul_(0.5),
    "replaced": lambda state, p: state[p].update(exp_avg=state[p]["exp_avg"] * 0.5),
    "another entry": lambda state, p: state.update(
        {p: {**state[p], "exp_avg": (state[p]["exp_avg"] * 0.5).double().t().contiguous().t()}}
    ),
    "step": lambda state, p: state[p].update(step=7),
    "negated": lambda state, p: state[p].update(exp_avg=torch._neg_view(state[p]["exp_avg"])),
    "narrow step": lambda state, p: state[p].update(step=torch.tensor(256, dtype=torch.bfloat16)),
    "inference step": _set_inference_step,
    "step in place": lambda state, p: state[p]["step"].fill_(7),
    "deleted": lambda state, p: state.pop(p),
    "cleared": lambda state, p: state[p].clear(),
}


@EACH_DTYPE
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("speculative", [False, True])
def test_what_users_write_into_the_state_counts(dtype: torch.dtype, edit: str, speculative: bool) -> None:
    """As if a checkpoint with that content had been loaded."""
    optimizer, twin = trained(make(dtype), [1]), trained(make(dtype), [1])
    p, q = parameters_of(optimizer)[1], parameters_of(twin)[1]
    EDITS[edit](optimizer.state, p)
    saved = twin.state_dict()
    by_parameter = {q: saved["state"][1]}
    EDITS[edit](by_parameter, q)
    saved["state"] = {0: saved["state"][0], **({1: by_parameter[q]} if by_parameter.get(q) else {})}
    twin.load_state_dict(saved)
    train_alike(optimizer, twin, 2, 3, speculative=speculative)


def _edit_through_state_dict(optimizer: Any, edit: Callable[[Any, torch.Tensor], object], p: torch.Tensor) -> None:
    """Edit tensors alone, which a state dict shares with the optimizer, as torch's does."""
    index = [id(one) for one in parameters_of(optimizer)].index(id(p))
    edit({p: optimizer.state_dict()["state"][index]}, p)


@EACH_DTYPE
@pytest.mark.parametrize(
    ("when", "edit"),
    [(when, edit) for when in ("read before", "read in between") for edit in EDITS]
    + [("through a state dict", "in place")],  # which shares its tensors alone
)
def test_what_users_write_into_the_state_while_speculation_is_open_counts(
    dtype: torch.dtype, edit: str, when: str
) -> None:
    """The step is made from the state as it is then, as without speculation."""
    optimizer, twin = make(dtype), make(dtype)
    for one in (optimizer, twin):
        train(one, 1)
        p = parameters_of(one)[1]
        held = one.state if when == "read before" else None
        give_gradients(one, 2, speculative=one is optimizer)
        if when == "through a state dict":
            _edit_through_state_dict(one, EDITS[edit], p)
        else:
            EDITS[edit](one.state if held is None else held, p)
        one.step()
        one.zero_grad()
        del held  # of what a program has, dtypes stay as it has put them
    assert visible(optimizer) == visible(twin)
    assert optimizer.statistics.accepted == 0
    train_alike(optimizer, twin, 3)


def test_state_of_one_parameter_popped_and_put_back_while_speculation_is_open() -> None:
    optimizer, twin = trained(make(torch.bfloat16), [1]), trained(make(torch.bfloat16), [1])
    speculate(optimizer, 2)
    p = parameters_of(optimizer)[0]
    entry = optimizer.state.pop(p)
    assert len(optimizer.state) == 1
    optimizer.state[p] = entry
    optimizer.step()
    optimizer.zero_grad()
    train(twin, 2)
    assert visible(optimizer) == visible(twin)


@pytest.mark.parametrize("empty", [lambda: defaultdict(dict), dict], ids=["defaultdict", "dict"])
@pytest.mark.parametrize("is_open", [False, True])
def test_an_empty_state_that_is_assigned_starts_anew(empty: Callable[[], Any], is_open: bool) -> None:
    optimizer, twin = trained(make(torch.bfloat16), [1]), trained(make(torch.bfloat16), [1])
    if is_open:
        speculate(optimizer, 2)
    optimizer.state = empty()
    twin.load_state_dict({**twin.state_dict(), "state": {}})
    assert shown(optimizer) == shown(twin)
    if is_open:
        assert all(are_taken(optimizer))
        optimizer.resolve()  # the gradients still count
        optimizer.zero_grad()
    else:
        train(optimizer, 2)
    train(twin, 2)
    assert visible(optimizer) == visible(twin)


def _add_group(optimizer: Any, state: Any) -> None:
    optimizer.add_param_group({"params": parameter(9, dtype=parameters_of(optimizer)[0].dtype, seed=2)})


def _replace_parameter(optimizer: Any, state: Any) -> None:
    group = optimizer.param_groups[0]
    del state[group["params"][0]]
    group["params"] = [parameter(9, dtype=group["params"][0].dtype, seed=2), *group["params"][1:]]


def _convert_another(optimizer: Any, state: Any) -> None:
    first = parameters_of(optimizer)[0]
    first.data = first.data.bfloat16() if first.dtype == torch.float32 else first.data.clone()


CHANGES = {"group added": _add_group, "replaced": _replace_parameter, "converted": _convert_another}


def test_a_write_to_a_parameter_before_another_group_comes_counts() -> None:
    shown = []
    for has_another_group in (False, True):
        parameter = torch.nn.Parameter(torch.ones(9, dtype=torch.bfloat16))
        optimizer = SpeculativeCPUAdam([parameter], lr=0.125)
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            with torch.no_grad():
                parameter.add_(3.0)
            if has_another_group:
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        shown.append([parameter.detach().float(), optimizer.state[parameter]["master"]])
    assert all(map(torch.equal, *shown))


def test_an_adopted_write_is_shown_by_what_stands_for_the_master() -> None:
    """A master of another dtype that a program has put there has the parameter's values, not those of before."""
    shown = []
    for is_put in (False, True):
        optimizer = trained(make(torch.bfloat16))
        one = parameters_of(optimizer)[0]
        if is_put:
            held = optimizer.state[one]["master"].double()
            optimizer.state[one]["master"] = held
        with torch.no_grad():
            one.mul_(0.5)
        optimizer.state_dict()
        assert torch.equal(optimizer.state[one]["master"].bfloat16(), one)
        train(optimizer, 3)
        shown.append([one.detach().clone(), optimizer.state[one]["master"].float()])
    assert all(map(torch.equal, *shown))


def _widen(optimizer: Any, state: Any) -> None:
    first = parameters_of(optimizer)[0]
    first.data = first.data.float()


@pytest.mark.parametrize("change", [_add_group, _widen])
@pytest.mark.parametrize("speculative", [False, True])
def test_state_that_has_moved_is_looked_at_where_parameters_are_bound_anew(change: Any, speculative: bool) -> None:
    optimizer, twin = (trained(make(torch.bfloat16), speculative=speculative) for _ in range(2))
    held, entry = (one.state[parameters_of(one)[1]] for one in (optimizer, twin))
    entry["exp_avg"] = entry["exp_avg"].half()
    for one in (optimizer, twin):
        change(one, None)
    held["exp_avg"].data = held["exp_avg"].half()  # of half the bytes
    train_alike(optimizer, twin, 3, speculative=speculative)
    _add_group(optimizer, None)
    held["exp_avg_sq"].untyped_storage().resize_(0)
    give_gradients(optimizer, 4)
    with pytest.raises(ValueError, match=r"^exp_avg_sq of parameter 1 of group 0 .*, expected .* in memory"):
        optimizer.step()


@EACH_DTYPE
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("speculative", [False, True])
def test_what_users_write_into_a_state_they_hold_survives_binding_anew(
    dtype: torch.dtype, change: str, edit: str, speculative: bool
) -> None:
    """As if it had been written before the step that comes next, with nothing bound in between."""
    optimizer, twin = make(dtype), make(dtype)
    held = {}
    for one in (optimizer, twin):
        held[one] = one.state
        train(one, 1)
        train(one, 2, speculative=speculative and one is optimizer)
    for one in (optimizer, twin):
        if one is twin:
            held[one] = one.state
        EDITS[edit](held[one], parameters_of(one)[1])
        if one is twin:
            assert one.state  # it is read before anything else happens
        CHANGES[change](one, held[one])
    train_alike(optimizer, twin, 3, 4, speculative=speculative)


@EACH_DTYPE
@pytest.mark.parametrize("edit", EDITS)
def test_what_users_write_into_a_state_they_hold_counts_after_every_step(dtype: torch.dtype, edit: str) -> None:
    """A reference to the state, or to something in it, shows accepted steps at once, and edits what they left."""
    optimizer, twin = make(dtype), make(dtype)
    for one in (optimizer, twin):
        train(one, 1)
        held = one.state
        for seed in (2, 3, 4):
            train(one, seed, speculative=one is optimizer)
            assert held[parameters_of(one)[0]]["step"] == seed
        EDITS[edit](held, parameters_of(one)[1])
        del held
        train(one, 5, speculative=one is optimizer)
    assert visible(optimizer) == visible(twin)


@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq", "master"])
def test_one_tensor_of_the_state_that_is_held_follows_speculative_steps(key: str) -> None:
    optimizer, twin = make(torch.bfloat16), make(torch.bfloat16)
    train(optimizer, 1)
    train(twin, 1)
    held = optimizer.state[parameters_of(optimizer)[0]][key]
    for seed in (2, 3):
        train(optimizer, seed, speculative=True)
        train(twin, seed)
        assert bits(held) == bits(twin.state[parameters_of(twin)[0]][key])
    del held
    train(optimizer, 4, speculative=True)
    assert optimizer._binding._transaction.in_phase(Phase.ACCEPTED)


@EACH_DTYPE
@pytest.mark.parametrize("is_read_before", [False, True])
def test_assigned_state_keeps_accepted_steps(dtype: torch.dtype, is_read_before: bool) -> None:
    """What `state` was before holds them: assigned again, it is as if nothing had happened."""
    optimizer, twin = trained(make(dtype), [1]), trained(make(dtype), [1])
    first = optimizer.state if is_read_before else optimizer._binding.published.entries
    for seed in (2, 3):
        train(optimizer, seed, speculative=True)
        train(twin, seed)
    optimizer.state = defaultdict(dict)
    optimizer.state = first
    assert visible(optimizer) == visible(twin)
    train_alike(optimizer, twin, 4)


@EACH_DTYPE
@pytest.mark.parametrize(
    "step", [5, torch.tensor(5.0), torch.tensor(5.0, dtype=torch.float64), torch.tensor([5])], ids=str
)
@pytest.mark.parametrize("speculative", [False, True])
def test_assigned_state_is_advanced_in_place(dtype: torch.dtype, step: Any, speculative: bool) -> None:
    optimizer, twin = make(dtype), make(dtype)
    train(twin, 1)
    saved = twin.state_dict()
    for entry in saved["state"].values():
        entry["step"] = step
    optimizer.load_state_dict(saved)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    given = {
        p: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
        for p, entry in zip(parameters_of(twin), saved["state"].values(), strict=True)
    }
    copy_weights(optimizer, twin)
    moments = [entry["exp_avg"] for entry in given.values()]
    twin.state = given
    for seed in (2, 3):
        for one in (optimizer, twin):
            train(one, seed, speculative=speculative and one is twin)
    for entry, own, moment in zip(given.values(), optimizer.state_dict()["state"].values(), moments, strict=True):
        assert entry["step"] == 7
        assert entry["exp_avg"] is moment
        assert moment.dtype == wide
        assert {key: bits(entry[key]) for key in ("exp_avg", "exp_avg_sq")} == {
            key: bits(own[key]) for key in ("exp_avg", "exp_avg_sq")
        }
    assert shown(optimizer) == shown(twin)


@pytest.mark.x86_64
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("speculative", [False, True])
def test_gaussian_splatting_as_it_is_written(dtype: torch.dtype, speculative: bool) -> None:
    """Its code knows of no masters, and edits the entry before it takes it from the state of the old parameter."""
    optimizer = SpeculativeCPUAdam([parameter(6, 64, dtype=dtype), parameter(64, dtype=dtype, seed=1)], eps=1e-15)
    twin = torch.optim.Adam([torch.nn.Parameter(p.detach().float()) for p in parameters_of(optimizer)], eps=1e-15)
    twin.param_groups[0]["fused"] = True
    for seed in range(6):
        give_gradients(optimizer, seed)
        for p, q in zip(parameters_of(optimizer), parameters_of(twin), strict=True):
            q.grad = p.grad.float()
        if speculative:
            optimizer.speculate()
        for one in (optimizer, twin):
            one.step()
            one.zero_grad()
            group = one.param_groups[0]
            stored = one.state.get(group["params"][0], None)
            if seed % 3 == 0:  # pruned
                stored["exp_avg"] = stored["exp_avg"][1:]
                stored["exp_avg_sq"] = stored["exp_avg_sq"][1:]
                values = group["params"][0][1:]
            elif seed % 3 == 1:  # grown
                more = torch.zeros(2, 64)
                stored["exp_avg"] = torch.cat((stored["exp_avg"], more), dim=0)
                stored["exp_avg_sq"] = torch.cat((stored["exp_avg_sq"], more), dim=0)
                values = torch.cat((group["params"][0], torch.ones_like(more, dtype=group["params"][0].dtype)), dim=0)
            else:  # reset
                values = group["params"][0] * 0.5
                stored["exp_avg"] = torch.zeros_like(stored["exp_avg"])
                stored["exp_avg_sq"] = torch.zeros_like(stored["exp_avg_sq"])
            del one.state[group["params"][0]]
            group["params"][0] = torch.nn.Parameter(values.detach().clone().requires_grad_(True))
            one.state[group["params"][0]] = stored
        with torch.no_grad():  # a master that was not carried along is read from its parameter
            parameters_of(twin)[0].copy_(parameters_of(optimizer)[0])
    for p, q in zip(parameters_of(optimizer), parameters_of(twin), strict=True):
        ours, theirs = optimizer.state[p], twin.state[q]
        assert bits(p) == bits(q.to(dtype))
        assert {key: bits(ours[key]) for key in theirs} == entry_bits(theirs)


def test_state_is_shown_where_parameters_no_longer_fit_it() -> None:
    """So that it can be mended after them."""
    optimizer, twin = make(torch.bfloat16), make(torch.bfloat16)
    for one, cut in ((optimizer, "parameter first"), (twin, "state first")):
        train(one, 1)
        first = parameters_of(one)[0]
        if cut == "parameter first":
            first.data = first.data[:60].clone()
        entry = one.state[first]
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key] = entry[key][:60]
        if cut == "state first":
            first.data = first.data[:60].clone()
        train(one, 2, speculative=one is optimizer)
    assert visible(optimizer) == visible(twin)


def test_parameter_listed_twice_is_saved_as_by_torch() -> None:
    optimizer, reference = make(), make(cls=torch.optim.AdamW)
    for one in (optimizer, reference):
        train(one, 1)
        twice = parameter(3)
        with pytest.warns(UserWarning, match="duplicate parameters"):
            one.add_param_group({"params": [twice, twice]})
    assert optimizer.state_dict()["param_groups"] == reference.state_dict()["param_groups"]
    assert optimizer.state_dict()["state"].keys() == reference.state_dict()["state"].keys()
    assert copy.deepcopy(optimizer).state_dict()["param_groups"] == reference.state_dict()["param_groups"]
    with pytest.raises(ValueError, match="parameter 0 of group 1 and parameter 1 of group 1 are the same parameter"):
        optimizer.step()
    optimizer.param_groups[1]["params"].pop()
    twin = make()
    twin.add_param_group({"params": parameter(3)})
    for seed, one in ((1, twin), (2, twin), (2, optimizer)):
        train(one, seed)
        if seed == 1:
            twin.state.pop(parameters_of(twin)[2])
            with torch.no_grad():
                parameters_of(twin)[2].copy_(parameter(3))
    assert visible(optimizer) == visible(twin)


@EACH_DTYPE
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_default_dtype_and_device(dtype: torch.dtype, default: torch.dtype, where: str) -> None:
    """As in torch, `step` is fp64 where that is the default; nothing else depends on them."""
    optimizer, twin = make(dtype), make(dtype)
    for seed in range(3):
        give_gradients(optimizer, seed)
        train(twin, seed)
        torch.set_default_dtype(default)
        torch.set_default_device(where)
        try:
            if seed == 1:
                optimizer.speculate()
            optimizer.step()
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
            optimizer.clip_grad_norm_(1e9)
            copied = copy.deepcopy(optimizer)
            with torch.device("cpu"):  # torch 2.11 cannot step where the default is another one
                reference = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
                parameters_of(reference)[0].grad = torch.ones(3)
                reference.step()
            (entry,) = reference.state.values()
            for one in (optimizer, copied):
                for state in one.state.values():
                    assert (state["step"].dtype, state["step"].device) == (entry["step"].dtype, entry["step"].device)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        optimizer.zero_grad()
    for ours, theirs in zip(optimizer.state.values(), twin.state.values(), strict=True):
        assert ours["step"] == theirs["step"]
        ours["step"] = theirs["step"].clone()
    assert visible(optimizer) == visible(twin)


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


BAD_EDITS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "a number": (lambda state, p: state.__setitem__(p, 5), "is a int, expected a dict"),
    "no step": (lambda state, p: state[p].pop("step"), "lacks step, expected"),
    "NaN step": (lambda state, p: state[p]["step"].fill_(float("nan")), "step tensor.nan.*, expected a whole number"),
    "no exp_avg": (lambda state, p: state[p].pop("exp_avg"), "lacks exp_avg, expected"),
    "another shape": (lambda state, p: state[p].update(exp_avg=torch.ones(3)), r"shape \(3,\), expected .*\(4, 5\)"),
    "meta": (lambda state, p: state[p].update(exp_avg=torch.ones(4, 5, device="meta")), "dense and in memory"),
    "sparse": (lambda state, p: state[p].update(exp_avg=torch.ones(4, 5).to_sparse()), "dense and in memory"),
    "nested": (lambda state, p: state[p].update(exp_avg=torch.nested.nested_tensor([torch.ones(4)])), "is a Tensor"),
    "freed": (lambda state, p: state[p].update(exp_avg=_freed(torch.ones(4, 5))), "dense and in memory"),
    "fp8": (lambda state, p: state[p].update(exp_avg=torch.ones(4, 5).to(torch.float8_e4m3fn)), "float8_e4m3fn"),
    "huge step": (lambda state, p: state[p].update(step=10**400), "step 1000.*, expected a whole number"),
    "integers": (lambda state, p: state[p].update(exp_avg=torch.ones(4, 5).int()), "torch.int32 .*, expected floats"),
}


@pytest.mark.parametrize("edit", BAD_EDITS)
def test_what_cannot_be_a_state_is_refused(edit: str) -> None:
    spoil, sentence = BAD_EDITS[edit]
    optimizer, twin = trained(make(), [1]), trained(make(), [1])
    p = parameters_of(optimizer)[1]
    good = {key: value.clone() for key, value in optimizer.state[p].items()}
    spoil(optimizer.state, p)
    give_gradients(optimizer, 2)
    before = shown(optimizer)
    for use in (optimizer.step, optimizer.speculate, optimizer.commit):
        with pytest.raises(ValueError, match=f"parameter 1 of group 0 .*{sentence}"):
            use()
    assert shown(optimizer) == before
    optimizer.state[p] = good
    optimizer.step()
    optimizer.zero_grad()
    train(twin, 2)
    assert visible(optimizer) == visible(twin)


def test_names_in_errors() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = SpeculativeCPUAdamW(model.named_parameters())
    model.bias.grad = torch.ones(3)
    model.bias.grad.data = torch.ones(4)
    with refused(optimizer, ValueError, "^the gradient of bias has shape"):
        optimizer.step()
