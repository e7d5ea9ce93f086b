"""Groups, published state and kernels stay of one mind, whatever users and frameworks replace, convert or edit."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.optimizers import EACH_DTYPE, copy_weights, make, train_alike, trained
from support.visible import bits, give_gradients, parameter, parameters_of, refused, shown, state_bits, train, visible
from torch import nn

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.optim.published_state import PublishedState


def _views(*parts: slice) -> list[torch.nn.Parameter]:
    buffer = torch.zeros(10)
    return [torch.nn.Parameter(buffer[part]) for part in parts]


SHARED: dict[str, Callable[[], list[torch.nn.Parameter]]] = {
    "the same data": lambda: _views(slice(10), slice(10)),
    "overlapping": lambda: _views(slice(6), slice(5, 10)),
    "one inside the other": lambda: _views(slice(10), slice(3, 4)),
    "across another": lambda: _views(slice(0, 10, 9), slice(2, 4), slice(9, 10)),
    "every third and every fourth": lambda: _views(slice(1, 10, 3), slice(0, 10, 4)),
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


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("shared", [lambda entry: entry, dict])
def test_state_that_parameters_share_is_refused_until_each_has_its_own(shared: Any, moments: str) -> None:
    optimizer = SpeculativeCPUAdam([parameter(2, 64, dtype=torch.bfloat16) for _ in range(2)], moments=moments)
    train(optimizer, 1)
    first, second = parameters_of(optimizer)
    optimizer.state[first]["exp_avg"] = optimizer.state[first]["exp_avg"].clone()  # which is looked at, too
    train(optimizer, 1)
    optimizer.state[second] = shared(optimizer.state[first])
    for use in (optimizer.speculate, optimizer.step, copy.deepcopy(optimizer).step):
        with refused(optimizer, ValueError, r"parameter . of group 0 share memory, expected state of its own for each"):
            use()
    optimizer.state[second] = copy.deepcopy(optimizer.state[first])
    train(optimizer, 2, speculative=True)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_what_lies_in_the_gaps_of_another_shares_no_memory(moments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As columns of one tensor. What a program keeps is compared with other state only once."""
    optimizer, twin = (trained(make(torch.bfloat16, moments=moments)) for _ in range(2))
    entry, wide = optimizer.state[parameters_of(optimizer)[0]], torch.zeros(7, 6).bfloat16()
    entry["exp_avg"], entry["exp_avg_sq"] = torch.stack([entry["exp_avg"], entry["exp_avg_sq"]], -1).unbind(-1)
    for one, parts in ((optimizer, wide.chunk(2, 1)), (twin, wide.clone().chunk(2, 1))):
        one.add_param_group({"params": [nn.Parameter(part if one is optimizer else part.clone()) for part in parts]})
    train_alike(optimizer, twin, 2)
    monkeypatch.delattr(PublishedState, "refuse_shared_memory")
    train_alike(optimizer, twin, 3)


def test_refused_parameters_leave_those_of_before_in_their_places() -> None:
    optimizer, twin = trained(make(), [1]), trained(make(), [1])
    group = optimizer.param_groups[0]
    first, second = group["params"]
    group["params"] = [second, first, torch.nn.Parameter(first.detach())]
    with pytest.raises(ValueError, match="share memory"):
        optimizer.commit()
    group["params"] = [first, second]
    train_alike(optimizer, twin, 2)


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


UNFIT: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], type[Exception], str]] = {
    "shorter": (lambda values: values[:3].clone(), ValueError, r"of shape \(4, 5\), expected floats of shape \(3, 5\)"),
    "double": (torch.Tensor.double, TypeError, "the gradient of parameter 1 of group 0 is .*, expected float64"),
    "complex": (lambda values: values.to(torch.complex64), TypeError, "parameter 1 of group 0 is complex"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("conversion", UNFIT)
def test_conversion_that_does_not_fit_is_refused(dtype: torch.dtype, conversion: str) -> None:
    """With open speculation and without; given back its data, everything goes on."""
    convert, error, sentence = UNFIT[conversion]
    optimizer, twin = trained(make(dtype), [1]), trained(make(dtype), [1])
    for one in (optimizer, twin):
        give_gradients(one, 2, speculative=one is optimizer)
        second = parameters_of(one)[1]
        whole = second.data
        second.data = convert(whole)
        converted = bits(second)
        for use in (one.step, one.resolve, *[one.commit] * (conversion == "shorter")):
            with pytest.raises(error, match=sentence):
                use()
        assert bits(second) == converted
        if conversion == "shorter":
            assert one.state[second]["exp_avg"].shape == whole.shape  # which shows what there is to mend
        second.data = whole
        one.step()
    assert visible(optimizer) == visible(twin)
    if conversion == "shorter":
        assert state_bits(optimizer) == state_bits(trained(make(dtype), [1, 2]))


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
    "taken out and put back": lambda state, p: state.update({p: state.pop(p)}),
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


@EACH_DTYPE
@pytest.mark.parametrize(
    ("when", "edit"),
    [(when, edit) for when in ("read before", "read before and saved", "read in between") for edit in EDITS]
    + [("through a state dict", "in place")],  # which shares its tensors alone
)
def test_what_users_write_into_the_state_while_speculation_is_open_counts(dtype, edit, when):
    """The step is made from the state as it is then, as without speculation."""
    optimizer, twin = make(dtype), make(dtype)
    for one in (optimizer, twin):
        train(one, 1)
        p = parameters_of(one)[1]
        held = one.state if when.startswith("read before") else None
        if when == "read before and saved":
            one.state_dict()
        give_gradients(one, 2, speculative=one is optimizer)
        if when == "through a state dict":
            EDITS[edit]({p: one.state_dict()["state"][1]}, p)
        else:
            EDITS[edit](one.state if held is None else held, p)
        one.step()
        one.zero_grad()
        del held  # of what a program has, dtypes stay as it has put them
    assert visible(optimizer) == visible(twin)
    assert optimizer.statistics.accepted == 0
    train_alike(optimizer, twin, 3)


def _add_group(optimizer: Any, state: Any = None) -> None:
    optimizer.add_param_group({"params": parameter(9, dtype=parameters_of(optimizer)[0].dtype, seed=2)})


def _replace_parameter(optimizer: Any, state: Any) -> None:
    group = optimizer.param_groups[0]
    del state[group["params"][0]]
    group["params"] = [parameter(9, dtype=group["params"][0].dtype, seed=2), *group["params"][1:]]


def _convert_another(optimizer: Any, state: Any) -> None:
    first = parameters_of(optimizer)[0]
    first.data = first.data.bfloat16() if first.dtype == torch.float32 else first.data.clone()


CHANGES = {
    "nothing": lambda optimizer, state: None,
    "group added": _add_group,
    "replaced": _replace_parameter,
    "converted": _convert_another,
    "process group": lambda optimizer, state: setattr(optimizer, "process_group", None),
}


def test_an_adopted_write_is_shown_by_what_stands_for_the_master() -> None:
    """A master of another dtype, or a leaf, that a program has put there has the values that were written."""
    shown = []
    for put in (None, torch.Tensor.double, nn.Parameter):
        optimizer = trained(make(torch.bfloat16))
        one = parameters_of(optimizer)[0]
        held = optimizer.state[one]["master"]
        if put is not None:
            held = optimizer.state[one]["master"] = put(held)
        with torch.no_grad():
            one.mul_(0.5)
        optimizer.commit()
        assert torch.equal(held.bfloat16(), one)
        train(optimizer, 3)
        shown.append([one.detach().clone(), optimizer.state[one]["master"].float()])
    assert all(all(map(torch.equal, shown[0], others)) for others in shown[1:])


def _widen(optimizer: Any) -> None:
    first = parameters_of(optimizer)[0]
    first.data = first.data.float()


def test_what_was_written_in_fp64_before_the_parameter_became_fp64_is_not_rounded() -> None:
    first = parameters_of(optimizer := trained(make(torch.float32)))[0]
    optimizer.state[first]["exp_avg"] = (wide := optimizer.state[first]["exp_avg"].double() / 3).clone()
    first.data = first.data.double()
    assert torch.equal(optimizer.state[first]["exp_avg"], wide)


@pytest.mark.parametrize("change", [_add_group, _widen])
@pytest.mark.parametrize("speculative", [False, True])
def test_state_that_has_moved_is_looked_at_where_parameters_are_bound_anew(change: Any, speculative: bool) -> None:
    optimizer, twin = (trained(make(torch.bfloat16), speculative=speculative) for _ in range(2))
    held, entry = (one.state[parameters_of(one)[1]] for one in (optimizer, twin))
    entry["exp_avg"] = entry["exp_avg"].half()
    for one in (optimizer, twin):
        change(one)
    held["exp_avg"].data = held["exp_avg"].half()  # of half the bytes
    train_alike(optimizer, twin, 3, speculative=speculative)
    _add_group(optimizer)
    held["exp_avg_sq"].untyped_storage().resize_(0)
    give_gradients(optimizer, 4)
    with pytest.raises(ValueError, match=r"^exp_avg_sq of parameter 1 of group 0 .*, expected .* in memory"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_that_has_moved_before_it_shows_a_step_is_the_newer(dtype, monkeypatch):
    optimizer, twin = (trained(make(dtype)) for _ in range(2))
    held = optimizer.state[parameters_of(optimizer)[1]]
    with monkeypatch.context() as patch:
        patch.delattr(PublishedState, "write")
        for one in (optimizer, twin):
            train(one, 2)
    assert held["step"] == 2
    held["exp_avg"].data = held["exp_avg"].clone()
    train_alike(optimizer, twin, 3)
    assert held["step"] == 4
    optimizer.reload_masters()
    held["exp_avg"].data = torch.zeros(3)
    with pytest.raises(ValueError, match=r"^exp_avg of parameter 1 .* of shape \(3,\), .* leave it as it is"):
        optimizer.step()


@EACH_DTYPE
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("speculative", [False, True])
def test_what_users_write_into_a_state_they_hold_survives_binding_anew(dtype, change, edit, speculative):
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
@pytest.mark.parametrize("step", [5, torch.tensor(5.0), torch.tensor(5.0, dtype=torch.float64), torch.tensor([5])])
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
        for key in ("exp_avg", "exp_avg_sq"):
            assert bits(entry[key]) == bits(own[key])
    assert shown(optimizer) == shown(twin)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "master"])
def test_state_has_all_its_bits_when_a_scheduler_comes_or_goes_while_less_is_shown(key: str, moments: Any) -> None:
    optimizer, twin = (trained(make(torch.bfloat16, moments=moments)) for _ in range(2))
    held = {}
    for one in (optimizer, twin):
        entry = one.state[parameters_of(one)[1]]
        held[one] = entry[key] = entry[key].half()
        train(one, 2)
        with OffloadScheduler(one, nn.ParameterList(parameters_of(one))) if one is optimizer else nullcontext():
            train(one, 3)
        train(one, 4)
    assert bits(held[optimizer]) == bits(held[twin])
    del entry, held
    train_alike(optimizer, twin, 5)


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
    twin = trained(make(), [1])
    twin.add_param_group({"params": parameter(3)})
    train_alike(optimizer, twin, 2, speculative=False)


@EACH_DTYPE
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_default_dtype(dtype: torch.dtype, default: torch.dtype) -> None:
    """As in torch, `step` is fp64 where that is the default; nothing else depends on it."""
    optimizer, twin = make(dtype), make(dtype)
    reference = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
    for seed in range(3):
        for one in (optimizer, reference):
            give_gradients(one, seed)
        train(twin, seed)
        torch.set_default_dtype(default)
        try:
            if seed == 1:
                optimizer.speculate()
            for one in (optimizer, reference):
                one.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.clip_grad_norm_(1e9)
            copied = copy.deepcopy(optimizer)
        finally:
            torch.set_default_dtype(torch.float32)
        expected = reference.state_dict()["state"][0]["step"].dtype
        assert {entry["step"].dtype for one in (optimizer, copied) for entry in one.state.values()} == {expected}
        optimizer.zero_grad()
    for ours, theirs in zip(optimizer.state.values(), twin.state.values(), strict=True):
        assert ours["step"] == theirs["step"]
        ours["step"] = theirs["step"].clone()
    assert visible(optimizer) == visible(twin)


@pytest.mark.parametrize("is_speculative", [False, True])
@EACH_DTYPE
def test_groups_that_could_not_be_bound_and_are_as_before_go_on(dtype: torch.dtype, is_speculative: bool) -> None:
    optimizer, twin = trained(make(dtype, max_grad_norm=1.0)), trained(make(dtype, max_grad_norm=1.0))
    entry = optimizer.state[parameters_of(optimizer)[1]]
    for one in (optimizer, twin):
        one.add_param_group({"params": [parameter(7, dtype=dtype)]})
    train_alike(optimizer, twin, 4)
    right, entry["exp_avg"] = entry["exp_avg"], "nothing"
    optimizer.param_groups.reverse()
    with pytest.raises(ValueError, match=r"exp_avg of .* is a str"):
        optimizer.step()
    entry["exp_avg"] = right
    optimizer.param_groups.reverse()
    del entry
    train_alike(optimizer, twin, 2, 3, speculative=is_speculative)


STORIES = ["master", "master, moment", "moment, master", "moment, save, master"]
STORIES += ["master, group", "master, open", "open, master, close", "open, master, close, open", "master, group, open"]


@pytest.mark.parametrize("edits", STORIES)
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


@pytest.mark.parametrize("edits", ["dtype", "shape"])
def test_memory_that_programs_have_replaced_shows_alike_with_speculation_and_without(edits: str) -> None:
    seen: list[Any] = [[], []]
    for speculative in (False, True):
        one = parameter(4, 64, dtype=torch.bfloat16)
        optimizer = trained(SpeculativeCPUAdam([one]), [1])
        if edits == "dtype":
            optimizer.state[one]["exp_avg"].data = optimizer.state[one]["exp_avg"].half()
        else:
            optimizer.state[one]["master"].resize_(3)
        give_gradients(optimizer, 2)
        if speculative:
            optimizer.speculate()  # which looks at it first, when nobody holds it
        for _ in range(2):
            seen[speculative].append(state_bits(optimizer))
            optimizer.step()
    assert seen[0] == seen[1]


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
    assert optimizer.state[parameters[0]]["step"] == 2  # it can be read all the same


def test_a_write_that_no_sample_shows_counts_where_parameters_are_bound_anew():
    optimizer = trained(SpeculativeCPUAdam([parameter(9000, dtype=torch.bfloat16)], lr=1e-3), [0])
    (weight,) = parameters_of(optimizer)
    with torch.no_grad():
        weight[1234] = 0.5
    optimizer.add_param_group({"params": [parameter(3)]})
    trained(optimizer, [1, 2])
    master = optimizer.state[weight]["master"]
    assert abs(master[1234] - 0.5) < 0.01
    master.data = master.index_fill(0, torch.tensor([1234]), 3.0)  # where it does not round to the parameter
    train(optimizer, 3)
    assert abs(weight[1234] - 0.5) < 0.01


def test_what_arrays_may_refer_to_shows_each_step():
    optimizer = trained(make(torch.bfloat16))
    one = parameters_of(optimizer)[1]
    array = optimizer.state[one]["exp_avg"].numpy() + 1.0
    optimizer.state[one]["exp_avg"] = torch.from_numpy(array)
    trained(optimizer, [2, 3], speculative=True)
    seen = array.tolist()
    assert optimizer.state[one]["exp_avg"].tolist() == seen
