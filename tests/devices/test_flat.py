"""Tensors of many parameters in one flat buffer: aligned, apart from each other, dense in the layout of the state."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from superadam.devices.flat import ALIGNMENT, FlatLayout
from superadam.state.parameter import ParameterState

PARAMETERS = {
    "matrix": lambda: torch.randn(5, 7),
    "0-dim": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "transposed": lambda: torch.randn(6, 4).t(),
    "permuted": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "channels last": lambda: torch.randn(3, 4, 5, 6).contiguous(memory_format=torch.channels_last),
    "sliced": lambda: torch.randn(6, 8)[:, ::2],
    "exactly aligned": lambda: torch.randn(2 * ALIGNMENT),
    "one more": lambda: torch.randn(2 * ALIGNMENT + 1),
}


def states_of(*tensors: Tensor) -> list[ParameterState]:
    return [ParameterState(nn.Parameter(tensor), row, f"parameter {row}") for row, tensor in enumerate(tensors)]


def elements(view: Tensor) -> range:
    """Return where the elements of a dense view lie in its buffer."""
    return range(view.storage_offset() - 10, view.storage_offset() - 10 + view.numel())


def check(layout: FlatLayout) -> None:
    buffer = torch.full((10 + layout.numel,), -1.0)[10:]  # which begins inside its storage
    views = layout.views(buffer)
    taken = [element for view in views for element in elements(view)]
    assert len(taken) == len(set(taken))
    for state, view, offset in zip(layout.states, views, layout.offsets, strict=True):
        assert offset % ALIGNMENT == 0
        assert view.storage_offset() == 10 + offset
        assert view.shape == state.shape
        assert view.stride() == state.strides
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        view.copy_(state.parameter.detach())
    for state, view in zip(layout.states, views, strict=True):
        assert torch.equal(view, state.parameter)
        dense = buffer[elements(view)]
        assert torch.equal(dense, state.host_copy(state.parameter, torch.float32).as_strided(dense.shape, (1,)))
    gaps = sorted(set(range(layout.numel)) - set(taken))
    assert torch.equal(buffer[gaps], torch.full((len(gaps),), -1.0))


@pytest.mark.parametrize("kinds", [[], *([kind] for kind in PARAMETERS), [*PARAMETERS]], ids=", ".join)
def test_tensors_of_any_layout_come_back(kinds):
    check(FlatLayout(states_of(*(PARAMETERS[kind]() for kind in kinds))))


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 7), max_size=4), st.randoms(use_true_random=False)), min_size=1, max_size=6
    )
)
def test_tensors_lie_apart_and_aligned(drawn):
    tensors = []
    for shape, choices in drawn:
        order = list(range(len(shape)))
        choices.shuffle(order)
        tensors.append(torch.randn(shape).permute(order))
    layout = FlatLayout(states_of(*tensors))
    check(layout)
    assert layout.numel == sum(-(-tensor.numel() // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def test_all_threads_find_the_same_tensors():
    """In place of a gradient: what one thread has multiplied another must not take for the original."""
    layout = FlatLayout(states_of(*(torch.randn(3) for _ in range(200))))
    for _ in range(20):
        flat, together = layout.cut(torch.zeros(layout.numel)), threading.Barrier(4)
        with ThreadPoolExecutor(4) as threads:
            found = [*threads.map(lambda _, flat=flat, together=together: (together.wait(), flat.tensors)[1], range(4))]
        assert all(one is found[0] for one in found)
        assert flat.tensors is found[0]


def test_what_is_cut_keeps_memory_but_no_states():
    (state,) = states_of(torch.randn(3))
    gone, flat = weakref.ref(state), FlatLayout([state]).cut(torch.full((ALIGNMENT,), 2.0))
    del state
    assert gone() is None
    assert flat.tensors[0].tolist() == [2.0] * 3
