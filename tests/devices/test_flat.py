"""Tensors in one flat buffer.

That they lie apart, aligned and as their parameters do is seen wherever gradients are packed.
"""

import torch
from support.overlap import layout_of

from superadam.devices.flat import ALIGNMENT


def test_tensors_begin_where_kernels_are_fastest() -> None:
    layout = layout_of(*map(torch.zeros, [(2 * ALIGNMENT,), (2 * ALIGNMENT + 1,), (), (0, 3), (5, 7)]))
    assert [offset / ALIGNMENT for offset in (*layout.offsets, layout.numel)] == [0, 2, 5, 6, 6, 7]
