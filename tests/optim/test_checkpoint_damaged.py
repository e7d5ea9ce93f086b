"""State dicts damaged at random: each is loaded as torch's fused Adam loads it, or refused in one sentence."""

import contextlib
import copy
import decimal
import fractions
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.optimizers import PAIRS
from support.visible import are_taken, bits, give_gradients, parameter, parameters_of, refused, train, visible

from superadam import SpeculativeCPUAdamW
from superadam.optim import checkpoint
from superadam.optim.binding import Binding
from superadam.state.parameter import differing

pytestmark = [
    pytest.mark.x86_64,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of torch, about kinds of tensors that are not usual
    pytest.mark.usefixtures("one_torch_thread"),
]

TORCHS = dict(PAIRS)
"""Torch's class for each of ours."""


class Uncopied:
    """What cannot be copied, compared or hashed, each with an error of its own."""

    def __deepcopy__(self, memo: object) -> None:
        raise AttributeError("many\nlines" * 1000)

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    def __hash__(self) -> int:
        raise IndexError

    def __repr__(self) -> str:
        raise KeyError


NUMBERS = [0, 1, 3, -1, 0.5, 2.0, -0.0, math.inf, math.nan, 1j, 2**60, 10**400, -(10**5000)]
OTHER_NUMBERS = [fractions.Fraction(1, 2), decimal.Decimal("0.5"), np.float32(0.25), np.int64(2), np.bool_(True)]
TEXTS = ["exp_avg", "0.5", "lines\n" * 1000, b"1"]
THINGS = [None, True, False, object(), Uncopied(), torch.Tensor, torch.zeros, torch.device("cpu"), range(3)]

JUNK: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in (*NUMBERS, *OTHER_NUMBERS, *TEXTS, *THINGS)),
    lambda: np.ones((8, 16), np.float32),
    lambda: [0.5, 0.5],
    lambda: [torch.ones(1000)] * 1000,
    lambda: (0.5, torch.tensor(0.25)),
    dict,
    lambda: {1: torch.ones(1000), "lr": None},
    lambda: OrderedDict(params=[0], lr=1),
    lambda: MappingProxyType({"params": [0]}),
    lambda: {0, 1},
    lambda: (one for one in [0, 1]),
    threading.Lock,
    lambda: torch.nn.Linear(2, 2),
    lambda: torch.tensor(0.5),
    lambda: torch.tensor(2.0, dtype=torch.float64),
    lambda: torch.tensor([3]),
    lambda: torch.tensor(True),
    lambda: torch.tensor(float("nan")),
    lambda: torch.tensor(-1.0),
    lambda: torch.tensor(0.5 + 0j),
    lambda: torch.ones(8, 16) * 1j,
    lambda: torch.ones((), device="meta"),
    lambda: torch.ones(8, 16, device="meta"),
    lambda: torch.tensor(1.0).to_sparse(),
    lambda: torch.ones(8, 16).to_sparse(),
    lambda: torch.ones(8, 16).to_sparse_csr(),
    lambda: torch.nested.nested_tensor([torch.ones(8), torch.ones(16)]),
    lambda: torch.nested.nested_tensor([torch.ones(8), torch.ones(16)], layout=torch.jagged),
    lambda: torch.quantize_per_tensor(torch.ones(8, 16), 1.0, 0, torch.qint8),
    lambda: torch.ones(8, 16).to(torch.float8_e4m3fn),
    lambda: torch.ones(8, 16, dtype=torch.float64),
    lambda: torch.ones(8, 16, dtype=torch.bfloat16),
    lambda: torch.ones(8, 16, dtype=torch.int32),
    lambda: -torch.ones(8, 16),
    lambda: torch.full((8, 16), float("inf")),
    lambda: torch.ones(16, 8).t(),
    lambda: torch.ones(1, 1).expand(8, 16),
    lambda: torch.ones(8, 16, requires_grad=True) * 2,
    lambda: torch.ones((), requires_grad=True) * 2,
    lambda: _freed(torch.ones(8, 16)),
    lambda: torch.empty(0),
    lambda: torch.ones(100, 100),
    lambda: torch.ones((1,) * 40),
]


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def _nodes(container: Any, depth: int = 5) -> list[tuple[Any, Any]]:
    """Return every place of a state dict, which may hold itself: the dict or list that holds it, and its key there."""
    found = []
    for key in list(container) if isinstance(container, dict) else range(min(len(container), 10)):
        found.append((container, key))
        if isinstance(container[key], dict | list) and depth:
            found += _nodes(container[key], depth - 1)
    return found


def _groups(saved: dict) -> list[Any]:
    groups = saved.get("param_groups")
    return [one for one in groups if isinstance(one, dict)] if isinstance(groups, list) else []


def _ids(groups: list[Any]) -> list[tuple[Any, Any]]:
    return [(group, one) for group in groups for one in group["params"]]


MUTATIONS = [
    *2 * ["replace", "exchange", "replace", "exchange", "replace", "replace", "remove", "add", "rename", "key", "copy"],
    *["reverse the ids", "rename the ids", "merge the groups", "split the groups"],
]


def mutate(how: str, saved: dict, place: tuple[Any, Any], other: tuple[Any, Any], junk: Any) -> None:
    (container, key), (other_container, other_key), groups = place, other, _groups(saved)
    match how:
        case "replace":
            container[key] = junk
        case "exchange":
            container[key], other_container[other_key] = other_container[other_key], container[key]
        case "remove":
            del container[key]
        case "add" if isinstance(container, list):
            container.insert(key, junk)
        case "add":
            container[junk] = container[key]
        case "rename" if isinstance(container, dict):
            container[junk] = container.pop(key)
        case "key" if isinstance(container, dict):
            container["new key"] = junk
        case "copy":
            container[key] = copy.copy(other_container[other_key])
        case "reverse the ids":
            every = _ids(groups)
            for group in groups:
                group["params"] = [every.pop()[1] for _ in group["params"]]
        case "rename the ids":
            for group in groups:
                group["params"] = [f"name {one}" for one in group["params"]]
            saved["state"] = {f"name {one}": entry for one, entry in saved["state"].items()}
        case "merge the groups":
            saved["param_groups"] = [{**groups[0], "params": [one for _, one in _ids(groups)]}]
        case "split the groups":
            saved["param_groups"] = [{**group, "params": [one]} for group, one in _ids(groups)]


def damaged(saved: dict, mutations: list[tuple[str, int, int, Callable[[], Any]]]) -> dict:
    for how, first, second, junk in mutations:
        places = _nodes(saved)
        # An unhashable key, or what an earlier mutation has spoiled, makes no other one.
        with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
            mutate(how, saved, places[first % len(places)], places[second % len(places)], junk())
    return saved


def make(cls: Any, dtype: torch.dtype, **options: Any) -> Any:
    first, *rest = [parameter(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(64,), (8, 16), (8, 16)])]
    return cls([{"params": [first], "lr": 0.25}, {"params": rest, "weight_decay": 0.5}], lr=0.125, **options)


def told(group: dict) -> dict[str, Any]:
    """Return a group as torch's fused Adam can step it: flags as they were meant, and numbers as floats."""
    flags = {key: bool(group.get(key)) for key in ("amsgrad", "maximize", "decoupled_weight_decay")}
    numbers = {key: float(group[key]) for key in ("lr", "eps", "weight_decay")}
    betas = tuple(map(float, group["betas"]))
    names = {"param_names": group["param_names"]} if "param_names" in group else {}
    how = {"fused": True, "foreach": None, "capturable": False, "differentiable": False}
    return {"params": group["params"], **names, **flags, **numbers, "betas": betas, **how}


def loaded_by_torch(cls: Any, saved: dict, parameters: list[torch.Tensor]) -> Any:
    """Return torch's optimizer over fp32 copies of these parameters, and of the masters that round to them.

    Args:
        cls: of torch.
        saved: a state dict, which is changed.
        parameters: of ours, as they are without this state dict.
    """
    own = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
    entries = {
        # torch.distributed.checkpoint has an empty dict for what a flattened one lacks.
        key: {name: entry[name] for name in own if name in entry and (not isinstance(entry[name], dict) or entry[name])}
        for key, entry in saved["state"].items()
        if isinstance(entry, dict)
    }
    groups = [told(group) for group in saved["param_groups"]]
    masters = []
    for group in groups:
        for identifier in group["params"]:
            entry = entries.get(identifier, {})
            master, most = entry.pop("master", None), entry.get("max_exp_avg_sq")
            weights = parameters[len(masters)].detach()
            judged = weights.float()
            if master is not None and weights.dtype != torch.float32:
                is_shown = ~differing(master.detach().float().to(weights.dtype), weights)
                judged = torch.where(is_shown, master.detach().float(), judged)
            masters.append(torch.nn.Parameter(judged.clone()))
            if entry:
                entry["max_exp_avg_sq"] = torch.zeros_like(weights) if most is None else most
                step = torch.tensor(float(entry.pop("step")))
                entry |= {key: value.contiguous().clone() for key, value in entry.items()}  # torch keeps what it gets
                entry["step"] = step
    rest = iter(masters)
    reference = cls([{"params": [next(rest) for _ in group["params"]]} for group in groups], fused=True)
    reference.load_state_dict({"state": entries, "param_groups": groups})
    return reference


@pytest.mark.slow
@settings(max_examples=3 * settings().max_examples)
@given(
    cls=st.sampled_from(sorted(TORCHS, key=str)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    amsgrad=st.booleans(),
    is_of_torch=st.booleans(),
    is_open=st.booleans(),
    mutations=st.lists(
        st.tuples(st.sampled_from(MUTATIONS), st.integers(0, 99), st.integers(0, 99), st.sampled_from(JUNK)), max_size=3
    ),
)
@example(SpeculativeCPUAdamW, torch.bfloat16, False, False, False, [("replace", 5, 0, dict)])  # of the master
def test_damaged_state_dict_is_loaded_as_by_torch_or_refused(cls, dtype, amsgrad, is_of_torch, is_open, mutations):
    source = make(TORCHS[cls] if is_of_torch else cls, dtype, amsgrad=amsgrad)
    for seed in range(2):
        train(source, seed)
    saved = damaged(copy.deepcopy(source.state_dict()), mutations)
    optimizer, twin = make(cls, dtype), make(cls, dtype)
    for one in (optimizer, twin):
        train(one, 5)
        give_gradients(one, 6)
    if is_open:
        optimizer.speculate()
    own = [one.detach().clone() for one in parameters_of(optimizer)]
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        text = str(error)
        assert len(text) < 400
        assert "\n" not in text
        assert re.search(r"[.!?] ", text) is None  # one sentence
        assert all(a == b for a, b in zip(groups, optimizer.param_groups, strict=True))
        assert are_taken(optimizer) == [is_open] * 3
        assert visible(optimizer) == visible(twin)
        for one in (optimizer, twin):
            one.step()
            train(one, 7, speculative=True)
        assert visible(optimizer) == visible(twin)
        return
    reference = loaded_by_torch(TORCHS[cls], saved, own)
    pairs = list(zip(parameters_of(optimizer), parameters_of(reference), strict=True))
    for p, master in pairs:
        assert bits(p) == bits(master.to(dtype))
    for ours, theirs, given_group in zip(
        optimizer.param_groups, reference.param_groups, saved["param_groups"], strict=True
    ):
        assert set(given_group) <= set(ours)
        assert told(ours) | {"params": 0, "param_names": 0} == told(theirs) | {"params": 0, "param_names": 0}
    for seed in (6, 7):
        give_gradients(optimizer, seed)
        for p, master in pairs:
            master.grad = p.grad.float()
        if seed == 7:
            optimizer.speculate()
        optimizer.step()
        reference.step()
        for p, master in pairs:
            ours, theirs = optimizer.state[p], reference.state[master]
            assert bits(ours.get("master", p)) == bits(master)
            assert bits(p) == bits(master.to(dtype))
            assert float(ours["step"]) == float(theirs["step"])
            for key in {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"} & ours.keys() | {"exp_avg", "exp_avg_sq"}:
                assert bits(ours[key]) == bits(theirs[key])
    optimizer.state_dict()
    known = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"}  # others need not be what can be copied
    if not any(isinstance(key, str) or bool(entry.keys() - known) for key, entry in saved["state"].items()):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize("error", [MemoryError("too little"), torch.OutOfMemoryError("too little")], ids=repr)
@pytest.mark.parametrize(("owner", "name"), [(checkpoint, "copied"), (Binding, "replace")], ids=str)
def test_what_there_is_no_memory_for_is_not_damaged(owner, name, error, monkeypatch):
    optimizer = make(SpeculativeCPUAdamW, torch.float32)
    train(optimizer, 1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    monkeypatch.setattr(owner, name, Mock(side_effect=error))
    with refused(optimizer, type(error), "too little"):
        optimizer.load_state_dict(saved)
