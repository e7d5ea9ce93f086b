"""Where tensors lie: in C as by public names, and every change of it."""

from __future__ import annotations

import ctypes
import itertools
import sys
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from superadam.kernels import _places, places
from superadam.kernels.memory import has_memory
from superadam.kernels.places import ADDRESS, BYTES, LAYOUT, STORAGE, VERSION, moved, places_of


def _set_data(tensor: Tensor, new: Tensor) -> None:
    tensor.data = new


def _resize(tensor: Tensor, nbytes: int) -> None:
    tensor.untyped_storage().resize_(nbytes)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "other memory": lambda t: _set_data(t, t.data.clone()),
    "a view of itself": lambda t: _set_data(t, t.data[:3]),
    "another dtype": lambda t: _set_data(t, t.data.view(torch.int32).view(torch.float32).double()),
    "the same bytes as another dtype": lambda t: _set_data(t, t.data.view(torch.int32)),
    "other strides": lambda t: _set_data(t, t.data.t()),
    "another shape": lambda t: _set_data(t, t.data.reshape(2, 18)),
    "set_": lambda t: t.set_(t.detach().clone()),
    "swapped": lambda t: torch.utils.swap_tensors(t, t.detach().clone()),
    "shared": torch.Tensor.share_memory_,
    "freed": lambda t: _resize(t, 0),
    "less memory": lambda t: _resize(t, 8),
    "more memory": lambda t: _resize(t, 4096),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("look", [_places.look, places._look_in_python], ids=["C", "Python"])
def test_every_change_of_memory_or_layout_is_seen(change, look, monkeypatch):
    monkeypatch.setattr(places, "_look", look)
    tensors = [torch.ones(6, 6) for _ in range(3)]
    before = places_of(tensors)
    assert moved(places_of(tensors), before).tolist() == []
    tensors[0].mul_(2)
    with torch.no_grad():
        CHANGES[change](tensors[1])
    present = places_of(tensors)
    assert moved(present, before).tolist() == [1]
    assert present[0, VERSION] == before[0, VERSION] + 1
    assert present[2].tolist() == before[2].tolist()


def test_both_ways_find_the_same():
    """But for the hash of the layout, which is compared with its own kind alone."""
    with torch.inference_mode():
        uncounted = torch.ones(3)
    tensors = [
        *(nn.Parameter(torch.ones(3, 4)), torch.ones(3, 4)[1:], torch.zeros(0), torch.empty(3, device="meta"), None),
        *(torch.ones(3).to_sparse(), torch.ones(4, dtype=torch.float64).t(), uncounted, torch.tensor(1.0)),
    ]
    found, expected = (np.zeros((len(tensors), 5), np.int64) for _ in range(2))
    _places.look(tensors, found)
    places._look_in_python(tensors, expected)
    assert (
        found[:, [ADDRESS, STORAGE, BYTES, VERSION]].tolist()
        == expected[:, [ADDRESS, STORAGE, BYTES, VERSION]].tolist()
    )
    assert ((found[:, LAYOUT] == 0) == (expected[:, LAYOUT] == 0)).all()


def test_an_array_of_another_length_is_refused():
    with pytest.raises(ValueError, match="one place for each tensor"):
        _places.look([torch.ones(3)], np.zeros(9, np.int64))


def test_another_version_of_dlpack_is_refused():
    with pytest.raises(ValueError, match="incorrect name"):
        _places.use(torch._C._to_dlpack(torch.ones(3)), None, None, "", "")
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    for major, view in ((2, 1), (1, 0)):
        api = (ctypes.c_uint64 * 8)(major, 0, 0, 0, 0, view)
        capsule = new(ctypes.addressof(api), b"dlpack_exchange_api", None)
        with pytest.raises(ValueError, match="not that of DLPack 1"):
            _places.use(capsule, None, None, "", "")


def test_what_torch_calls_itself_is_taken_again() -> None:
    names = Tensor.untyped_storage, torch.UntypedStorage.nbytes, "_cdata", "_version"
    assert _places.use(Tensor.__dlpack_c_exchange_api__, *names) is None
    test_both_ways_find_the_same()


class Shortening(Tensor):
    """Drops the rest of a list when it is looked at."""

    tensors: list[Tensor]

    @property
    def _version(self) -> int:
        self.tensors.clear()
        return 0


def test_a_list_that_is_shortened_meanwhile_is_told() -> None:
    first = torch.ones(3).as_subclass(Shortening)
    tensors = first.tensors = [first, torch.ones(3)]
    with pytest.raises(IndexError):
        _places.look(tensors, np.zeros(10, np.int64))


def test_nothing_is_left_of_a_look() -> None:
    """Neither a reference to what was looked at, nor to the numbers that it found, nor to the array."""
    tensors, memory = [torch.ones(3) for _ in range(100)], bytearray(4000)
    _places.look(tensors, memory)
    counts = [*map(sys.getrefcount, tensors)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(20):
            _places.look(tensors, memory)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 2000
    assert [*map(sys.getrefcount, tensors)] == counts
    memory.append(0)  # which an array that refers to it would refuse


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
