"""Tensors that were cut from a flat buffer: one set of them for all threads, and nothing else is kept.

That they lie apart, aligned and as their parameters do is seen wherever gradients are packed.
"""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from support.overlap import layout_of

from superadam.devices.flat import ALIGNMENT


def test_tensors_begin_where_kernels_are_fastest() -> None:
    layout = layout_of(*map(torch.zeros, [(2 * ALIGNMENT,), (2 * ALIGNMENT + 1,), (), (0, 3), (5, 7)]))
    assert [offset / ALIGNMENT for offset in (*layout.offsets, layout.numel)] == [0, 2, 5, 6, 6, 7]


def test_all_threads_find_the_same_tensors() -> None:
    """In place of a gradient: what one thread has multiplied another must not take for the original."""
    layout = layout_of(*[torch.zeros(3)] * 200)
    for _ in range(20):
        flat, together = layout.cut(torch.zeros(layout.numel)), threading.Barrier(4)
        with ThreadPoolExecutor(4) as threads:
            found = [*threads.map(lambda _, flat=flat, together=together: (together.wait(), flat.tensors)[1], range(4))]
        assert all(one is found[0] for one in (*found, flat.tensors))


def test_what_is_cut_keeps_memory_but_no_states() -> None:
    layout = layout_of(torch.zeros(3))
    gone, flat = weakref.ref(layout.states[0]), layout.cut(torch.full((ALIGNMENT,), 2.0))
    del layout
    assert gone() is None
    assert flat.tensors[0].tolist() == [2.0] * 3
