"""Tensors of many parameters in one flat buffer: aligned, apart from each other, dense in the layout of the state."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from superadam.devices.flat import ALIGNMENT, FlatLayout
from superadam.state.parameter import ParameterState


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


SHAPES = st.one_of(st.lists(st.integers(0, 7), max_size=4), st.sampled_from([[2 * ALIGNMENT], [2 * ALIGNMENT + 1]]))


@given(st.lists(st.tuples(SHAPES, st.randoms(use_true_random=False), st.booleans()), max_size=6))
def test_tensors_of_any_layout_lie_apart_and_aligned_and_come_back(drawn):
    """Dense in any order of their dimensions, or not dense."""
    tensors = []
    for shape, choices, is_sliced in drawn:
        order = list(range(len(shape)))
        choices.shuffle(order)
        dense = torch.randn(shape).permute(order)
        tensors.append(torch.stack([dense, dense], -1)[..., 0] if is_sliced else dense)
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
