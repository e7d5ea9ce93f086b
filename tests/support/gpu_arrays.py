"""Tensors for the kernels of superadam.gpu, and what those kernels become when they are compiled for a GPU.

They run compiled where there is a GPU, in Triton's interpreter elsewhere (`support/__init__.py`).
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from support import formula, kernel_arrays

from superadam.gpu import language, obstacle
from superadam.kernels.dtypes import DTYPES
from superadam.kernels.native import Dtype

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

Array = kernel_arrays.Array

IS_READY = obstacle(DEVICE) is None
"""Whether Triton's kernels run on DEVICE."""

assert IS_READY or language.MISSING

BACKENDS = ["triton", "torch"] if IS_READY else ["torch"]
"""What packs and scatters here."""

needs_triton = pytest.mark.skipif(not IS_READY, reason="Triton is not installed")


def asked_for(name: str) -> AbstractContextManager[object]:
    """Return a context in which `name` is the implementation that was asked for."""
    return mock.patch.dict(os.environ, SUPERADAM_GPU="torch" if name == "torch" else "")


class Launches:
    """Stands in for a kernel, and notes the grid of each launch."""

    def __init__(self, kernel: Any) -> None:
        self.grids: list[tuple[int, ...]] = []
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return self._kernel[grid]


if language.IS_INTERPRETED and tuple(map(int, language.triton.__version__.split(".")[:2])) < (3, 9):
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    def _fma(x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        return TensorHandle(formula.fma(x.data, y.data, z.data), z.dtype.scalar)

    interpreter_builder.create_fma = _fma  # its own multiplies, rounds, and then adds

TORCH_DTYPES = {ours: dtype for dtype, ours in DTYPES.items()}


class Placed(kernel_arrays.Placed):
    """The same as a tensor of a dtype on DEVICE, with an offset in elements; halves are given as uint16."""

    def __init__(self, values: Array, dtype: Dtype | torch.dtype, offset: int = 0) -> None:
        torch_dtype = TORCH_DTYPES[dtype] if isinstance(dtype, Dtype) else dtype
        super().__init__(values, offset * torch_dtype.itemsize)
        self._there = torch.from_numpy(self._buffer).to(DEVICE)  # not copied, unless to a GPU
        self.tensor = self._there[self._inside].view(torch_dtype)

    def _now(self) -> Array:
        return self._there.cpu().numpy()

    def read(self) -> Array:
        return self._now()[self._inside].view(self.view.dtype)


def offsets_with_gaps(lengths: Sequence[int], gaps: Sequence[int], order: Sequence[int]) -> tuple[list[int], int]:
    """Return where tensors begin in a buffer, in another order and with gaps, and the buffer's length."""
    offsets, end = [0] * len(lengths), 0
    for number, position in enumerate(order):
        end += gaps[number % len(gaps)] if gaps else 0
        offsets[position] = end
        end += lengths[position]
    return offsets, end + 3
