"""Tensors for the kernels of superadam.gpu, and what those kernels become when they are compiled for a GPU.

They run compiled where there is a GPU, in Triton's interpreter elsewhere (`support/__init__.py`).
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support import formula

from superadam.gpu import Backend, backend, language
from superadam.kernels.native import Dtype

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

Array = npt.NDArray[np.generic]

IS_READY = backend(DEVICE).backend is not Backend.TORCH
"""Whether Triton's kernels run on DEVICE."""

assert IS_READY or language.MISSING

BACKENDS = ["triton", "torch"] if IS_READY else ["torch"]
"""What packs and scatters here, as `SUPERADAM_GPU` calls it."""

needs_triton = pytest.mark.skipif(not IS_READY, reason="Triton is not installed")


def asked_for(name: str) -> AbstractContextManager[object]:
    """Return a context in which `name` is the implementation that was asked for."""
    return mock.patch.dict(os.environ, SUPERADAM_GPU=name)


class Launches:
    """Stands in for a kernel, and notes the grid of each launch."""

    def __init__(self, kernel: Any) -> None:
        self.grids: list[tuple[int, ...]] = []
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return self._kernel[grid]


def _round_fmas_once() -> None:
    """Mend the interpreter of Triton before 3.9, whose fma multiplies, rounds, and then adds."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    def fma(x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        return TensorHandle(formula.fma(x.data, y.data, z.data), z.dtype.scalar)

    interpreter_builder.create_fma = fma


if language.IS_INTERPRETED and tuple(map(int, language.triton.__version__.split(".")[:2])) < (3, 9):
    _round_fmas_once()

TORCH_DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
    Dtype.FLOAT64: torch.float64,
}


class Placed:
    """A tensor on DEVICE that begins some elements after a multiple of 64 bytes, between canary bytes.

    Args:
        values: 1-D, as stored: halves are uint16.
        dtype: of the tensor.
        offset: elements.
    """

    MARGIN = 128

    def __init__(self, values: Array, dtype: Dtype | torch.dtype, offset: int = 0) -> None:
        torch_dtype = TORCH_DTYPES[dtype] if isinstance(dtype, Dtype) else dtype
        size = torch_dtype.itemsize
        numel = -(-(values.nbytes + 2 * self.MARGIN + 64) // size) + offset
        self._buffer = torch.full((numel * size,), 0xA5, dtype=torch.uint8, device=DEVICE)
        begin = self.MARGIN + -(self._buffer.data_ptr() + self.MARGIN) % 64 + offset * size
        self._inside = slice(begin, begin + values.nbytes)
        self._stored = values.dtype
        self.tensor = self._buffer.view(torch_dtype)[begin // size : begin // size + len(values)]
        self.write(values)

    def write(self, values: Array) -> None:
        """Replace the values."""
        bytes_ = np.frombuffer(values.tobytes(), np.uint8).copy()
        self._buffer[self._inside] = torch.from_numpy(bytes_).to(DEVICE)
        self._before = self._buffer.cpu().numpy().copy()

    def read(self) -> Array:
        """Return the values, as stored."""
        inside: Array = self._buffer[self._inside].cpu().numpy().view(self._stored)
        return inside

    def is_unchanged(self) -> bool:
        return bool(np.array_equal(self._buffer.cpu().numpy(), self._before))

    def outside_is_unchanged(self) -> bool:
        changed = self._buffer.cpu().numpy() != self._before
        changed[self._inside] = False
        return not changed.any()


def offsets_with_gaps(lengths: Sequence[int], gaps: Sequence[int], order: Sequence[int]) -> tuple[list[int], int]:
    """Return where tensors begin in a buffer, in another order and with gaps, and the buffer's length."""
    offsets, end = [0] * len(lengths), 0
    for number, position in enumerate(order):
        end += gaps[number % len(gaps)] if gaps else 0
        offsets[position] = end
        end += lengths[position]
    return offsets, end + 3
