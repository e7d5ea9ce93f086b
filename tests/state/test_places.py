"""Where tensors lie: in C as by public names, and every change of it."""

import ctypes
import itertools
import sys
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from superadam.kernels import _places
from superadam.kernels.memory import has_memory
from superadam.state import places
from superadam.state.places import BYTES, LAYOUT, VERSION, compare, gradients_of, places_of


def _resize(tensor: Tensor, nbytes: int) -> None:
    tensor.untyped_storage().resize_(nbytes)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "other memory": lambda t: setattr(t, "data", t.data.clone()),
    "a view of itself": lambda t: setattr(t, "data", t.data[:3]),
    "another dtype": lambda t: setattr(t, "data", t.data.view(torch.int32).view(torch.float32).double()),
    "the same bytes as another dtype": lambda t: setattr(t, "data", t.data.view(torch.int32)),
    "other strides": lambda t: setattr(t, "data", t.data.t()),
    "another shape": lambda t: setattr(t, "data", t.data.reshape(2, 18)),
    "set_": lambda t: t.set_(t.detach().clone()),
    "swapped": lambda t: torch.utils.swap_tensors(t, t.detach().clone()),
    "shared": torch.Tensor.share_memory_,
    "freed": lambda t: _resize(t, 0),
    "less memory": lambda t: _resize(t, 8),
    "more memory": lambda t: _resize(t, 4096),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_in_c", [True, False], ids=["C", "Python"])
def test_every_change_of_memory_or_layout_is_seen(change, is_in_c, monkeypatch):
    if not is_in_c:
        monkeypatch.setattr(places, "_looks", None)
    tensors = [torch.ones(6, 6) for _ in range(3)]
    before = places_of(tensors)
    moved, versions, changed = compare(tensors, before)
    assert (moved, versions.tolist(), changed) == ([], before[:, VERSION].tolist(), 0)
    tensors[0].mul_(2)
    with torch.no_grad():
        CHANGES[change](tensors[1])
    moved, present, changed = compare(tensors, before)
    assert moved == [1]
    assert present[0] == versions[0] + 1
    assert present[2] == versions[2]
    assert changed == 1 + (present[1] != versions[1])
    assert places_of(tensors)[2].tolist() == before[2].tolist()


GRADIENTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "plain": lambda t: t,
    "none": lambda t: None,
    "of another dtype": Tensor.bfloat16,
    "of another layout": lambda t: t.t().contiguous().t(),
    "of another shape": lambda t: t[:1],
    "negated": torch._neg_view,
    "without memory": lambda t: t.to("meta"),
    "of a class of its own": nn.Parameter,
    "sparse": Tensor.to_sparse,
    "freed": lambda t: (_resize(t, 0), t)[1],
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_only_an_ordinary_gradient_has_an_address(kind, monkeypatch):
    """Of those that have one, kernels read the values that the tensor has."""
    parameters = [nn.Parameter(torch.ones(2, 3)) for _ in range(3)]
    layouts = np.ascontiguousarray(places_of(parameters)[:, LAYOUT])
    for parameter in parameters:
        parameter.grad_dtype = None
        parameter.grad = torch.ones(2, 3)
    if kind in ("of another shape", "without memory"):  # which torch would not take
        parameters[1] = SimpleNamespace(grad=GRADIENTS[kind](torch.ones(2, 3)))
    else:
        parameters[1].grad = GRADIENTS[kind](torch.ones(2, 3))
    gradients, addresses, present, plain = gradients_of(parameters, layouts)
    assert all(one is parameter.grad for one, parameter in zip(gradients, parameters, strict=True))
    assert present == 3 - (kind == "none")
    assert plain == 2 + (kind == "plain")
    expected = [parameter.grad.data_ptr() for parameter in parameters] if kind == "plain" else None
    assert expected is None or addresses.tolist() == expected
    assert (addresses[1] == 0) == (kind != "plain")
    unreached = gradients_of(parameters, np.zeros(3, np.int64))  # by kernels, whatever the gradients
    monkeypatch.setattr(places, "_looks", None)
    for found, addresses, counted, few in (unreached, gradients_of(parameters, layouts)):
        assert (len(found), counted, few) == (3, present, 0)
        assert addresses.tolist() == [0] * 3


def test_both_ways_find_the_same(monkeypatch):
    """But for the hash of the layout, which is compared with its own kind alone."""
    with torch.inference_mode():
        uncounted = torch.ones(3)
    tensors = [
        *(nn.Parameter(torch.ones(3, 4)), torch.ones(3, 4)[1:], torch.zeros(0), torch.empty(3, device="meta"), None),
        *(torch.ones(3).to_sparse(), torch.ones(4, dtype=torch.float64).t(), uncounted, torch.tensor(1.0)),
    ]
    looks, comparisons = [], []
    for way in (_places, None):
        monkeypatch.setattr(places, "_looks", way)
        known = places_of(tensors)
        looks.append([known[:, np.arange(5) != LAYOUT].tolist(), (known[:, LAYOUT] == 0).tolist()])
        known[2, BYTES] += 1
        known[5, VERSION] += 1
        moved, versions, changed = compare(tensors, known)
        comparisons.append((moved, versions.tolist(), changed))
    assert looks[0] == looks[1]
    assert comparisons[0] == comparisons[1]
    assert comparisons[0] == ([2], [row[3] for row in looks[0][0]], 1)
    known, versions, rows = np.zeros((len(tensors), 5), np.int64), *np.full((2, len(tensors)), -7)
    _places.look(tuple(tensors), known)
    known[2, BYTES] += 1
    assert _places.compare(tuple(tensors), known, versions, rows) == (1, 0)
    assert rows.tolist() == [2, *[-7] * (len(tensors) - 1)]


NAMES = (Tensor, Tensor.untyped_storage, torch.UntypedStorage.nbytes, Tensor.is_neg, "_cdata", "_version", "grad")


def test_an_array_of_another_length_is_refused():
    tensors, few, one, place = (torch.ones(3),), np.zeros(9, np.int64), np.zeros(1, np.int64), np.zeros(5, np.int64)
    calls = [(_places.look, few), (_places.compare, few, one, one), (_places.compare, place, few, one)]
    calls += [(_places.compare, place, one, few), (_places.gradients, few, one), (_places.gradients, one, few)]
    for function, *arrays in calls:
        with pytest.raises(ValueError, match="one place for each tensor"):
            function(tensors, *arrays)


def test_another_version_of_dlpack_is_refused():
    with pytest.raises(ValueError, match="incorrect name"):
        _places.use(torch._C._to_dlpack(torch.ones(3)), NAMES)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    for major, view in ((2, 1), (1, 0)):
        api = (ctypes.c_uint64 * 8)(major, 0, 0, 0, 0, view)
        capsule = new(ctypes.addressof(api), b"dlpack_exchange_api", None)
        with pytest.raises(ValueError, match="not that of DLPack 1"):
            _places.use(capsule, NAMES)
    with pytest.raises(ValueError, match="three names"):
        _places.use(Tensor.__dlpack_c_exchange_api__, NAMES[:-1])


def test_what_torch_calls_itself_is_taken_again(monkeypatch) -> None:
    assert _places.use(Tensor.__dlpack_c_exchange_api__, NAMES) is None
    test_both_ways_find_the_same(monkeypatch)


class Shortening(Tensor):
    """Drops the rest of a list when it is looked at."""

    tensors: list[Tensor]

    @property
    def _version(self) -> int:
        self.tensors.clear()
        return 0


def test_a_list_that_is_shortened_meanwhile_is_looked_at_whole() -> None:
    first = torch.ones(3).as_subclass(Shortening)
    tensors = first.tensors = [first, torch.ones(3)]
    places = places_of(tensors)
    assert (tensors, places[1, BYTES]) == ([], 12)
    tensors += [first, torch.ones(3)]
    assert compare(tensors, places)[0] == [1]
    assert tensors == []


def test_a_parameter_whose_gradient_cannot_be_read_is_told() -> None:
    with pytest.raises(AttributeError, match="grad"):
        gradients_of([nn.Parameter(torch.ones(3)), object()], np.zeros(2, np.int64))


class Refusing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.is_neg:
            raise NotImplementedError("who asks?")
        return function(*args, **(kwargs or {}))


def test_a_gradient_of_which_a_mode_hides_how_it_lies_has_no_address() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    with Refusing():
        _, addresses, *counts = gradients_of([parameter], places_of([parameter])[:, LAYOUT].copy())
    assert (addresses.tolist(), counts) == ([0], [1, 0])


def test_nothing_is_left_of_a_look() -> None:
    """Neither a reference to what was looked at, nor to the numbers that it found, nor to the arrays."""
    tensors = tuple(nn.Parameter(torch.ones(3)) for _ in range(300))
    memory, numbers, layouts = bytearray(12000), bytearray(2400), bytearray(places_of(tensors)[:, LAYOUT].tobytes())
    for tensor in tensors:
        tensor.grad = torch.ones(3)

    def look() -> None:
        _places.look(tensors, memory)
        _places.compare(tensors, memory, numbers, numbers)
        assert _places.gradients(tensors, layouts, numbers)[1:] == (300, 300)
        memory[:] = bytes(12000)  # other places than those of the tensors
        _places.compare(tensors, memory, numbers, numbers)

    look()
    counts = [sys.getrefcount(one) for tensor in tensors for one in (tensor, tensor.grad)]
    falses = sys.getrefcount(False)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(20):
            look()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 2000
    assert [sys.getrefcount(one) for tensor in tensors for one in (tensor, tensor.grad)] == counts
    assert sys.getrefcount(False) < falses + 100
    for array in (memory, numbers, layouts):
        array.append(0)  # which an array that refers to it would refuse


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [((3, 4), (4, 1), 0), ((3, 4), (1, 3), 2), ((2, 2), (5, 1), 1), ((4,), (0,), 3), ((1, 5), (7, 2), 0), ((), (), 6)],
)
def test_memory_suffices_to_the_byte(shape, strides, offset):
    places_of_elements = itertools.product(*map(range, shape))
    last = offset + max(sum(map(int.__mul__, where, strides)) for where in places_of_elements)
    tensor = torch.zeros(100).as_strided(shape, strides, offset)
    tensor.untyped_storage().resize_(4 * (last + 1))
    assert has_memory(tensor)
    tensor.untyped_storage().resize_(4 * (last + 1) - 1)
    assert not has_memory(tensor)


def test_nothing_needs_no_memory():
    assert has_memory(torch.zeros(0, 3))
    assert not has_memory(torch.zeros(1, device="meta"))
