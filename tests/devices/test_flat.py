"""Tensors that were cut from a flat buffer: one set of them for all threads, and nothing else is kept.

That they lie apart, aligned and as their parameters do is seen wherever gradients are packed.
"""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from superadam.devices.flat import ALIGNMENT, FlatLayout
from superadam.state.parameter import ParameterState


def states_of(count: int) -> list[ParameterState]:
    return [ParameterState(nn.Parameter(torch.zeros(3)), row, f"p{row}") for row in range(count)]


def test_tensors_begin_where_kernels_are_fastest() -> None:
    shapes = [(2 * ALIGNMENT,), (2 * ALIGNMENT + 1,), (), (0, 3), (5, 7)]
    states = [ParameterState(nn.Parameter(torch.zeros(shape)), row, "p") for row, shape in enumerate(shapes)]
    layout = FlatLayout(states)
    assert [offset / ALIGNMENT for offset in (*layout.offsets, layout.numel)] == [0, 2, 5, 6, 6, 7]


def test_all_threads_find_the_same_tensors() -> None:
    """In place of a gradient: what one thread has multiplied another must not take for the original."""
    layout = FlatLayout(states_of(200))
    for _ in range(20):
        flat, together = layout.cut(torch.zeros(layout.numel)), threading.Barrier(4)
        with ThreadPoolExecutor(4) as threads:
            found = [*threads.map(lambda _, flat=flat, together=together: (together.wait(), flat.tensors)[1], range(4))]
        assert all(one is found[0] for one in (*found, flat.tensors))


def test_what_is_cut_keeps_memory_but_no_states() -> None:
    (state,) = states_of(1)
    gone, flat = weakref.ref(state), FlatLayout([state]).cut(torch.full((ALIGNMENT,), 2.0))
    del state
    assert gone() is None
    assert flat.tensors[0].tolist() == [2.0] * 3
