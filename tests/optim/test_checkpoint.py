"""State dicts: to disk, to torch's Adam and AdamW and back, into a fresh process; and every damaged or foreign one."""

import copy
import math
import pickle
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.optimizers import EACH_DTYPE, EACH_PAIR, copy_weights, through_disk, train_alike, trained
from support.visible import (
    are_taken,
    bits,
    entry_bits,
    give_gradients,
    parameter,
    parameters_of,
    plain,
    refused,
    shown,
    speculate,
    state_bits,
    visible,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from superadam import OffloadScheduler, SpeculativeCPUAdamW

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def make(
    dtype: torch.dtype = torch.float32, cls: type[torch.optim.Optimizer] = SpeculativeCPUAdamW, **options: Any
) -> Any:
    return cls([parameter(64, dtype=dtype), parameter(2, 64, dtype=dtype, seed=1)], **{"lr": 0.1, **options})


SPOILED_ENTRIES: list[Callable[[dict], Any]] = []


def _entry(**changes: Any) -> Callable[[dict], Any]:
    """Change the entry of the second parameter; None takes a key away."""

    def spoil(saved: dict) -> dict:
        return _changed(saved, saved["state"][1], changes)

    SPOILED_ENTRIES.append(spoil)
    return spoil


def _group(**changes: Any) -> Callable[[dict], Any]:
    """Change the first group; None takes a key away."""
    return lambda saved: _changed(saved, saved["param_groups"][0], changes)


def _changed(saved: dict, part: dict, changes: dict[str, Any]) -> dict:
    part.update(changes)
    for key in [key for key, value in changes.items() if value is None]:
        del part[key]
    return saved


def _freed() -> torch.Tensor:
    freed = torch.ones(2, 64)
    freed.untyped_storage().resize_(0)
    return freed


def _of(cls: type[torch.optim.Optimizer], **options: Any) -> Callable[[dict], Any]:
    return lambda saved: trained(make(cls=cls, **options)).state_dict()


LACKS = "lacks .*load what optimizer.state_dict"
DAMAGED: dict[str, tuple[Callable[[dict], Any], str]] = {
    "None": (lambda saved: None, "is a NoneType, expected a dict"),
    "a list": (lambda saved: [saved], "is a list, expected a dict"),
    "empty": (lambda saved: {}, LACKS),
    "of a model": (lambda saved: torch.nn.Linear(2, 2).state_dict(), LACKS),
    "groups alone": (lambda saved: {"param_groups": saved["param_groups"]}, LACKS),
    "state alone": (lambda saved: {"state": saved["state"]}, LACKS),
    "wrapped": (lambda saved: {"optimizer": saved}, LACKS),
    "SGD": (_of(torch.optim.SGD, momentum=0.9), "group 0 of the state dict lacks betas, eps"),
    "RMSprop": (_of(torch.optim.RMSprop), "group 0 of the state dict lacks betas"),
    "Adamax": (_of(torch.optim.Adamax), "lacks exp_avg_sq, expected"),
    "groups as dict": (lambda saved: {**saved, "param_groups": {}}, "param_groups .* is no list of dicts with params"),
    "group of numbers": (lambda saved: {**saved, "param_groups": [3]}, "is no list of dicts with params"),
    "group without params": (_group(params=None), "is no list of dicts with params"),
    "no group": (lambda saved: {**saved, "param_groups": []}, "has 0 parameter groups, expected 1"),
    "one group too many": (
        lambda saved: {**saved, "param_groups": saved["param_groups"] * 2},
        "has 2 parameter groups, expected 1",
    ),
    "one parameter too many": (_group(params=[0, 1, 2]), "has 3 parameters in group 0, expected 2"),
    "group without lr": (_group(lr=None), "group 0 of the state dict lacks lr"),
    "NaN in lr": (_group(lr=math.nan), "Invalid learning rate: nan"),
    "lr of several lines": (_group(lr=np.ones((2, 1))), "Invalid lr: a ndarray; expected"),
    "beta of 1": (_group(betas=(0.9, 1.0)), "Invalid beta parameter at index 1"),
    "state as list": (lambda saved: {**saved, "state": [3]}, "state of the state dict is a list, expected a dict"),
    "entry as list": (lambda saved: {**saved, "state": {1: [3]}}, "the state of parameter 1 of group 0 is a list"),
    "id twice": (_group(params=[1, 1]), "lists a parameter twice"),
    "ids as tensors": (
        _group(params=[torch.tensor(0), torch.tensor(1)]),
        "is no list of dicts with params, a list of ids",
    ),
    "ids as lists": (_group(params=[[0], [1]]), "is no list of dicts with params, a list of ids"),
    "numbers for keys": (
        lambda saved: {**saved, "param_groups": [{1: 2, **saved["param_groups"][0]}]},
        "is no list of",
    ),
    "foreign tensor without memory": (
        lambda saved: _changed(saved, saved["state"][1], {"slow": _freed()}),
        "a tensor without memory",
    ),
    "what cannot be copied": (_group(extra=(one for one in "ab")), r"holds what cannot be copied \(TypeError\)"),
    "flag in words": (_group(amsgrad="no"), "Invalid amsgrad: 'no'; expected True or False"),
    "entry of nobody": (lambda saved: {**saved, "state": {7: saved["state"][0]}}, "state for parameter 7, which none"),
    "swapped": (lambda saved: {**saved, "state": {0: saved["state"][1]}}, r"shape \(2, 64\), expected .*\(64,\)"),
    "no exp_avg": (_entry(exp_avg=None), "lacks exp_avg, expected"),
    "no step": (_entry(step=None), "lacks step, expected"),
    "foreign key alone": (_entry(exp_avg=None, exp_avg_sq=None, slow=torch.ones(2, 64)), "lacks exp_avg, exp_avg_sq"),
    "flat exp_avg_sq": (_entry(exp_avg_sq=torch.ones(128)), r"exp_avg_sq .* of shape \(128,\), expected .*\(2, 64\)"),
    "integer exp_avg": (_entry(exp_avg=torch.ones(2, 64).int()), "exp_avg .* is torch.int32 .*, expected floats"),
    "complex exp_avg": (_entry(exp_avg=torch.ones(2, 64) * 1j), "exp_avg .* is torch.complex64 .*, expected floats"),
    "number for exp_avg": (_entry(exp_avg=0.5), "exp_avg .* is a float, expected floats of shape"),
    "sparse exp_avg": (_entry(exp_avg=torch.ones(2, 64).to_sparse()), "exp_avg .*, dense and in memory"),
    "meta exp_avg": (_entry(exp_avg=torch.ones(2, 64, device="meta")), "exp_avg .*, dense and in memory"),
    "nested exp_avg": (_entry(exp_avg=torch.nested.nested_tensor([torch.ones(8)])), "exp_avg .* is a Tensor, expected"),
    "freed exp_avg": (_entry(exp_avg=_freed()), "exp_avg .*, dense and in memory"),
    "fp8 exp_avg": (_entry(exp_avg=torch.ones(2, 64).to(torch.float8_e4m3fn)), "exp_avg .* is torch.float8_e4m3fn"),
    "flat maximum": (_entry(max_exp_avg_sq=torch.ones(3)), r"max_exp_avg_sq .* of shape \(3,\)"),
    "flat master": (_entry(master=torch.ones(3)), r"master .* of shape \(3,\)"),
    "NaN step": (_entry(step=torch.tensor(math.nan)), "step tensor.nan.*expected a whole number"),
    "Inf step": (_entry(step=math.inf), "step inf, expected a whole number"),
    "negative step": (_entry(step=-1), "step -1, expected a whole number"),
    "half a step": (_entry(step=1.5), "step 1.5, expected a whole number"),
    "step beyond counting": (_entry(step=torch.tensor(1e30)), "step .*1.0000e.30.*, expected a whole number"),
    "two steps": (_entry(step=torch.ones(2)), "step .*, expected a whole number"),
    "step that no float holds": (_entry(step=10**400), "step 1000.*, expected a whole number"),
    "meta step": (_entry(step=torch.ones((), device="meta")), "step .*, expected a whole number"),
    "complex step": (_entry(step=torch.tensor(1j)), "step tensor.*, expected a whole number"),
    "step in words": (_entry(step="two"), "step 'two', expected a whole number"),
}


def test_an_alarm_while_a_state_dict_is_read_is_no_damage() -> None:
    class Late:
        def __deepcopy__(self, memo: object) -> None:
            raise TimeoutError("of the program")

    optimizer = trained(make())
    with pytest.raises(TimeoutError, match="of the program"):
        optimizer.load_state_dict(_group(extra=Late())(optimizer.state_dict()))


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_or_foreign_state_dict_is_refused(damage: str) -> None:
    spoil, sentence = DAMAGED[damage]
    saved = copy.deepcopy(trained(make()).state_dict())
    of_some_steps = trained(make(torch.bfloat16, moments="bf16", master="24bit"), range(5, 7))
    for optimizer, is_open in ((make(), False), (of_some_steps, True)):
        if is_open:
            speculate(optimizer, 9)
        with refused(optimizer, ValueError, sentence):
            optimizer.load_state_dict(spoil(copy.deepcopy(saved)))
        assert are_taken(optimizer) == [True, True] * is_open
        assert optimizer.statistics.dropped == 0
        optimizer.rollback()
        trained(optimizer, range(9, 10))


EDITS = {key: damage for key, damage in DAMAGED.items() if damage[0] in SPOILED_ENTRIES and key != "flat master"}
EDITS |= {
    "entry as number": (lambda saved: saved["state"].update({1: 5}), "the state of parameter 1 of group 0 is a int"),
    "text for exp_avg": (_entry(exp_avg="zeros"), "exp_avg of parameter 1 of group 0 is a str, expected floats"),
    "array for exp_avg": (_entry(exp_avg=np.ones((2, 64))), "exp_avg of parameter 1 of group 0 is a ndarray"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("storage", [{}, {"moments": "8bit", "master": "24bit"}], ids=["fp32", "8 bits"])
def test_what_is_refused_of_a_state_dict_is_refused_of_the_state_itself(edit: str, storage: dict[str, str]) -> None:
    """By whatever needs it next, until it is mended."""
    spoil, sentence = EDITS[edit]
    optimizer, twin = (trained(make(torch.bfloat16, **storage)) for _ in range(2))
    p = parameters_of(optimizer)[1]
    if edit == "flat maximum" and storage:
        sentence = "max_exp_avg_sq .*, expected none, as moments are '8bit'"
    good = {key: value.clone() for key, value in optimizer.state[p].items()}
    changed = {"state": {1: dict(optimizer.state[p])}}
    spoil(changed)
    optimizer.state[p] = changed["state"][1]
    give_gradients(optimizer, 2)
    before = shown(optimizer)
    for use in (optimizer.step, optimizer.speculate, optimizer.commit):
        with pytest.raises(ValueError, match=sentence):
            use()
    assert shown(optimizer) == before
    optimizer.state[p] = good
    optimizer.step()
    optimizer.zero_grad()
    trained(twin, range(2, 3))
    assert visible(optimizer) == visible(twin)


WITHOUT_MEANING = [(key, value) for key in ("capturable", "differentiable") for value in (True, "junk")]
WITHOUT_MEANING += [("param_names", names) for names in (None, "ab", ["a"], [1, 2], torch.ones(2), {"a": 1, "b": 2}, 5)]


@pytest.mark.parametrize(("key", "value"), WITHOUT_MEANING)
def test_how_steps_were_computed_and_names_that_do_not_fit_change_nothing(key: str, value: Any) -> None:
    """As on a GPU: torch loads on the CPU what is saved then. Names are carried along."""
    saved = copy.deepcopy(trained(make(cls=torch.optim.AdamW)).state_dict())
    optimizer, twin = make(), make()
    twin.load_state_dict(saved)
    saved["param_groups"][0][key] = value
    optimizer.load_state_dict(saved)
    assert state_bits(trained(optimizer)) == state_bits(trained(twin))
    if key == "param_names":
        give_gradients(optimizer, 3)
        parameters_of(optimizer)[1].grad.data = torch.ones(3)
        with pytest.raises(ValueError, match="the gradient of parameter 1 of group 0 has shape"):
            optimizer.step()
    else:
        assert visible(optimizer)["groups"] == visible(twin)["groups"]
        reference = make(cls=torch.optim.AdamW)
        reference.load_state_dict(optimizer.torch_state_dict())
        trained(reference)


def test_state_is_loaded_while_parameters_have_no_memory() -> None:
    source, optimizer = trained(make(torch.bfloat16)), trained(make(torch.bfloat16), range(5, 7))
    second = parameters_of(optimizer)[1]
    size = second.untyped_storage().nbytes()
    second.untyped_storage().resize_(0)
    optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    assert optimizer.state[second]["step"] == source.state_dict()["state"][1]["step"]
    second.untyped_storage().resize_(size)
    copy_weights(optimizer, source)
    train_alike(optimizer, source, *range(2, 4), speculative=False)


def test_hook_that_returns_no_state_dict() -> None:
    optimizer = trained(make())
    saved = optimizer.state_dict()
    handle = optimizer.register_load_state_dict_pre_hook(lambda optimizer, saved: {"nothing": 0})
    with refused(optimizer, ValueError, LACKS):
        optimizer.load_state_dict(saved)
    handle.remove()
    optimizer.load_state_dict(saved)


def _with_scheduler(optimizer: Any, saved: Any) -> None:
    with OffloadScheduler(optimizer, torch.nn.ParameterList(parameters_of(optimizer)), num_threads=1):
        pass
    optimizer.rollback()


def _with_frozen(optimizer: Any, saved: Any = None) -> None:
    optimizer.add_param_group({"params": parameter(5, dtype=torch.bfloat16).requires_grad_(False)})
    optimizer.speculate()


BETWEEN: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda optimizer, saved: None,
    "a scheduler": _with_scheduler,
    "a group": _with_frozen,
    "a conversion and back": lambda optimizer, saved: (
        torch.nn.ParameterList(parameters_of(optimizer)).half().bfloat16()  # in place
    ),
    "a step of none": lambda optimizer, saved: (optimizer.zero_grad(), optimizer.step()),
    "the same once more": lambda optimizer, saved: optimizer.load_state_dict(saved),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_weights_that_are_loaded_late_meet_the_loaded_masters(between: str, steps_before: int) -> None:
    """Only a step, or a read of the state, needs the masters. With a learning rate that bf16 mostly cannot show."""
    source, fresh = trained(make(torch.bfloat16, lr=1e-4), range(4)), make(torch.bfloat16, lr=1e-4)
    for one in (source, fresh):
        one.add_param_group({"params": parameter(3, dtype=torch.bfloat16).requires_grad_(False)})
    trained(fresh, range(7, 7 + steps_before))
    saved = through_disk(source.state_dict())
    fresh.load_state_dict(saved)
    BETWEEN[between](fresh, saved)
    if between == "a group":
        _with_frozen(source)
    copy_weights(fresh, source)
    train_alike(source, fresh, *range(4, 6), speculative=False)


OTHERS = ("slow", "mean", "history", "name")


def _with_foreign_state(optimizer: Any) -> Any:
    """Keep tensors and other things in the state of each parameter, as wrappers of optimizers do."""
    for p in parameters_of(optimizer):
        one = torch.ones(2, dtype=p.dtype)
        history = [one, {"best": one + 1}, 3.0]
        optimizer.state[p] |= {"slow": p.detach() + 1, "mean": one[0] / 10, "history": history, "name": "text"}
    optimizer.state["of the wrapper"] = {"k": 5, "master": "text"}
    return optimizer


def _foreign_state(optimizer: Any) -> list[Any]:
    """Return what others keep, for the two parameters and in all."""
    entries = [optimizer.state[p] for p in parameters_of(optimizer)[:2]]
    return plain([*({key: entry[key] for key in OTHERS} for entry in entries), optimizer.state["of the wrapper"]])


def _grown(optimizer: Any) -> Any:
    optimizer.add_param_group({"params": parameter(3).requires_grad_(False)})
    return optimizer


def _loaded(optimizer: Any) -> Any:
    fresh = make(parameters_of(optimizer)[0].dtype)
    copy_weights(fresh, optimizer)
    fresh.load_state_dict(through_disk(optimizer.state_dict()))
    return fresh


TRAVELS: dict[str, Callable[[Any], Any]] = {
    "deep copy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "loading": _loaded,
    "binding anew": _grown,
}


@EACH_DTYPE
@pytest.mark.parametrize("travels", TRAVELS)
@pytest.mark.parametrize("steps", [0, 2])
def test_what_others_keep_in_the_state_travels_along(dtype: torch.dtype, travels: str, steps: int) -> None:
    optimizer, twin = trained(make(dtype), range(steps)), trained(make(dtype), range(steps))
    other = TRAVELS[travels](_with_foreign_state(optimizer))
    expected = _foreign_state(optimizer)
    assert _foreign_state(other) == expected
    assert other.torch_state_dict()["state"]["of the wrapper"] == optimizer.state["of the wrapper"]
    for one in (other, twin):
        trained(one, range(2, 4))
    assert shown(other)[:2] == shown(twin)
    assert _foreign_state(other) == expected


@EACH_DTYPE
@pytest.mark.parametrize("cls", [SpeculativeCPUAdamW, torch.optim.AdamW])
def test_what_others_keep_is_cast_as_by_torch(dtype: torch.dtype, cls: type) -> None:
    source = _with_foreign_state(trained(make(cls=cls)))
    source.state[parameters_of(source)[0]]["mean"] = torch.tensor(3)
    ours, theirs = (make(dtype, one) for one in (SpeculativeCPUAdamW, torch.optim.AdamW))
    for one in (ours, theirs):
        one.load_state_dict(through_disk(source.state_dict()))
    for p in parameters_of(theirs):
        theirs.state[p]["name"] = "text"  # of which torch makes another
    expected = _foreign_state(theirs)
    assert _foreign_state(ours) == expected
    assert _foreign_state(trained(ours, range(2, 4))) == expected


@EACH_DTYPE
@pytest.mark.parametrize("what", ["its own", "an older one", "torch's", "no state"])
def test_loading_while_speculation_is_open(dtype: torch.dtype, what: str) -> None:
    """The gradients stay in `.grad` and count; the step is made from what was loaded."""
    optimizer, twin = trained(make(dtype)), trained(make(dtype))
    older = copy.deepcopy(optimizer.state_dict())
    for one in (optimizer, twin):
        trained(one, range(2, 4))
        give_gradients(one, 4, speculative=one is optimizer)
        given = {
            "its own": one.state_dict,
            "an older one": lambda: older,
            "torch's": trained(make(dtype, torch.optim.AdamW)).state_dict,
            "no state": lambda one=one: {**one.state_dict(), "state": {}},
        }
        one.load_state_dict(given[what]())
        assert visible(optimizer)["gradients"] == visible(one)["gradients"]
    assert are_taken(optimizer) == [True, True]  # and none is gone
    assert visible(optimizer) == visible(twin)
    for first, _ in map(parameters_of, (optimizer, twin)):
        first.grad.add_(1)
        assert type(first.grad) is torch.Tensor  # given back as it would be without the load
    for one in (optimizer, twin):
        one.step()
        trained(one, range(5, 7))
    assert visible(optimizer) == visible(twin)


def test_a_good_state_dict_replaces_a_state_that_is_refused() -> None:
    good = trained(make(), [1])
    for damage in ({}, {"exp_avg": torch.zeros(1, 64).expand(2, 64)}, {"step": "damaged"}):
        optimizer = trained(SpeculativeCPUAdamW([parameter(64), parameter(1, 64, seed=1)], lr=0.1), [1])
        grown = parameters_of(optimizer)[1]
        optimizer.state[grown].update(damage)
        grown.grad, grown.data = None, torch.ones(2, 64)  # as in the model of the state dict
        optimizer.load_state_dict(good.state_dict())
        copy_weights(good, optimizer)
        assert state_bits(optimizer) == state_bits(good)


def test_groups_share_a_learning_rate_after_loading_too_and_one_without_parameters_has_its_own() -> None:
    groups: list[dict[str, Any]] = [{"params": [parameter(3)]}, {"params": [parameter(4)]}, {"params": [], "lr": 0.5}]
    optimizer = SpeculativeCPUAdamW(groups, lr=torch.tensor(0.1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][2] = {"params": []}  # as torch.distributed.checkpoint leaves it
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    assert optimizer.param_groups[2]["lr"] == 0.5


def test_a_hook_that_is_called_after_loading_may_load() -> None:
    optimizer, saved = (trained(make(), [1]) for _ in range(2))
    others = [trained(make(), [1, 2]).state_dict()]
    optimizer.register_load_state_dict_post_hook(lambda one: one.load_state_dict(others.pop()) if others else None)
    optimizer.load_state_dict(saved.state_dict())
    assert [entry["step"] for entry in optimizer.state.values()] == [2, 2]


def test_a_hook_that_is_called_before_loading_may_load_and_go() -> None:
    """Of torch's optimizers the last one may, behind which torch looks for no other."""

    def first(one: Any, saved: Any) -> None:
        handle.remove()
        one.load_state_dict(other.state_dict())
        seen.append(one.state_dict()["state"][0]["step"].item())

    for cls in (torch.optim.AdamW, SpeculativeCPUAdamW):
        optimizer, saved, other, seen = make(cls=cls), trained(make(cls=cls), [1]), trained(make(cls=cls), [1, 2]), []
        handle = optimizer.register_load_state_dict_pre_hook(first)
        for _ in range(2):
            optimizer.load_state_dict(saved.state_dict())
        assert [entry["step"].item() for entry in optimizer.state.values()] == [1, 1]
        assert seen == [2]


def test_loading_copies() -> None:
    saved = copy.deepcopy(trained(make(torch.bfloat16)).state_dict())
    before = {index: entry_bits(entry) for index, entry in saved["state"].items()}
    other = make(torch.bfloat16)
    other.load_state_dict(saved)
    trained(other, range(2, 4))
    assert {index: entry_bits(entry) for index, entry in saved["state"].items()} == before


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_entries_of_state_dicts_are_those_of_the_state_as_in_torch(moments: str) -> None:
    optimizer = trained(make(torch.bfloat16, moments=moments))
    assert [*map(id, optimizer.state_dict()["state"].values())] == [*map(id, optimizer.state.values())]
    before = visible(optimizer)
    optimizer.state_dict()["param_groups"].clear()
    optimizer.torch_state_dict()["state"][0].clear()
    assert visible(optimizer) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_between_dtypes_of_the_model(dtype: torch.dtype) -> None:
    """A parameter that is its own master ignores a loaded one; a narrow one reads its master from itself."""
    narrow = trained(make(dtype, amsgrad=True))
    wide = make()
    wide.load_state_dict(narrow.state_dict())
    assert shown(wide) == shown(make())
    assert state_bits(wide)["state"] == state_bits(narrow, without=["master"])["state"]
    again = make(dtype)
    again.load_state_dict(wide.state_dict())
    assert shown(again) == shown(make(dtype))
    assert state_bits(again) == {"parameters": shown(make(dtype)), "state": state_bits(wide)["state"]}
    give_gradients(again, 3)
    again.step()
    entry, before = (one.state_dict()["state"][0] for one in (again, wide))
    assert entry["master"].dtype == torch.float32
    assert (entry["max_exp_avg_sq"] >= before["max_exp_avg_sq"]).all()


OPTIONS = {"weight_decay": 0.1, "amsgrad": True, "maximize": True}


if platform.machine() == "x86_64":  # elsewhere torch's fused kernel rounds differently from itself here

    @EACH_PAIR
    @pytest.mark.parametrize("is_weights_only", [False, True])
    def test_there_and_back_with_torch(ours: type, theirs: type, is_weights_only: bool) -> None:
        reference = trained(make(cls=theirs, fused=True, **OPTIONS), range(6))
        carry = through_disk if is_weights_only else copy.deepcopy
        optimizer: Any = trained(make(cls=ours, fused=True, **OPTIONS))
        for first, cls in ((2, theirs), (4, ours)):
            saved = optimizer.torch_state_dict() if cls is theirs else optimizer.state_dict()
            other = make(cls=cls)
            copy_weights(other, optimizer)
            other.load_state_dict(carry(saved))
            optimizer = trained(other, range(first, first + 2))
        assert visible(optimizer) == visible(reference)


@EACH_PAIR
@EACH_DTYPE
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_torch_loads_ours(ours: type, theirs: type, dtype: torch.dtype, moments: str) -> None:
    optimizer = trained(make(dtype, ours, moments=moments, **OPTIONS))
    saved = optimizer.torch_state_dict()
    assert all("master" not in entry for entry in saved["state"].values())
    other = make(dtype, theirs)
    other.load_state_dict(saved)
    for entry, mine in zip(other.state_dict()["state"].values(), saved["state"].values(), strict=True):
        assert entry_bits(entry) == entry_bits(
            {key: mine[key] if key == "step" else mine[key].to(dtype) for key in mine}
        )
    theirs_groups = [{**group, "params": None} for group in other.param_groups]
    assert theirs_groups == [{**group, "params": None} for group in optimizer.param_groups]
    trained(other, range(2, 3))


@EACH_PAIR
@EACH_DTYPE
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("is_of_torch", [False, True])
def test_ours_loads_torch_and_moments_of_more_bits(ours, theirs, dtype, moments, is_of_torch):
    """Which are widened, or rounded to nearest."""
    other = trained(make(dtype, theirs if is_of_torch else ours, **OPTIONS))
    optimizer = make(dtype, ours, moments=moments)
    copy_weights(optimizer, other)
    optimizer.load_state_dict(through_disk(other.state_dict()))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    stored = torch.bfloat16 if moments == "bf16" and wide == torch.float32 else wide
    for p, q in zip(parameters_of(optimizer), parameters_of(other), strict=True):
        expected = {k: v if k in ("step", "master") else v.to(stored) for k, v in other.state[q].items()}
        assert entry_bits(optimizer.state[p]) == entry_bits(expected)
        assert bits(p) == bits(q)
    trained(optimizer, range(2, 3))
    entry = optimizer.state[parameters_of(optimizer)[0]]
    assert (entry["step"], entry["exp_avg"].dtype, entry["exp_avg_sq"].dtype) == (3, stored, stored)
    assert optimizer.moments == moments


def test_decay_of_adamw_stays_decoupled_whatever_is_loaded() -> None:
    saved = trained(make(cls=torch.optim.Adam)).state_dict()
    assert saved["param_groups"][0]["decoupled_weight_decay"] is False
    for cls in (SpeculativeCPUAdamW, torch.optim.AdamW):
        optimizer = make(cls=cls)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


@pytest.mark.parametrize("amsgrad", [False, True])
@EACH_DTYPE
def test_flattened_checkpoint_of_torch_loads(dtype: torch.dtype, amsgrad: bool) -> None:
    """torch gives an empty dict for each key that it lacks; masters and maxima come with the next step."""
    model = torch.nn.Linear(64, 2).to(dtype)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.1)
    ours = SpeculativeCPUAdamW(model.parameters(), lr=0.1, amsgrad=amsgrad)
    model(torch.ones(1, 64, dtype=dtype)).sum().backward()
    theirs.step()
    theirs.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, ours, get_optimizer_state_dict(model, theirs, options=options), options=options)
    for parameter_ in model.parameters():
        found = ours.state[parameter_]["exp_avg"]
        assert torch.equal(found, theirs.state[parameter_]["exp_avg"].to(found.dtype))


def test_limits_are_no_group_keys_and_survive_foreign_checkpoints() -> None:
    optimizer = make(max_grad_norm=2.0, on_nonfinite="raise")
    assert not {"max_grad_norm", "on_nonfinite"} & set(optimizer.param_groups[0])
    optimizer.load_state_dict(trained(make(cls=torch.optim.AdamW)).state_dict())
    assert (optimizer.max_grad_norm, optimizer.on_nonfinite) == (2.0, "raise")
