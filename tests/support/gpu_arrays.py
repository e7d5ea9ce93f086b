"""Tensors for the kernels of superadam.gpu, and what those kernels become when they are compiled for a GPU.

Importing this module first decides how the kernels run: compiled where there is a GPU, in Triton's interpreter
elsewhere. The interpreter is chosen by the environment when superadam.gpu is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    os.environ["TRITON_INTERPRET"] = "1"
    # torch has imported Triton already: its own functions in Triton's language (tl.sum and the like) are to be
    # interpreted, too.
    with contextlib.suppress(ImportError):
        import triton.language

        importlib.reload(triton.language.standard)
        importlib.reload(triton.language)

from superadam.gpu import Backend, backend, language  # noqa: E402
from superadam.kernels import formula  # noqa: E402
from superadam.kernels.native import Dtype  # noqa: E402

Array = npt.NDArray[np.generic]

IS_READY = backend(DEVICE).backend is not Backend.TORCH
"""Whether Triton's kernels run on DEVICE. False without Triton, or if superadam.gpu was imported before this module."""

assert IS_READY or language.MISSING, "superadam.gpu was imported before TRITON_INTERPRET was set; set it in conftest.py"

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


@dataclass(frozen=True)
class Request:
    """A kernel to compile: a launch's constants, and a type for each other parameter."""

    kernel: str
    types: Mapping[str, str]
    constants: Mapping[str, int | bool]


_COMPILER = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module = importlib.import_module(sys.argv[1])
texts = []
for kernel, types, constants in json.load(sys.stdin):
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=getattr(module, kernel), signature=signature, constexprs=constants)
    texts.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=module.OPTIONS).asm["ptx"])
json.dump(texts, sys.stdout)
"""


def can_compile() -> bool:
    """Whether this Triton brings a compiler for NVIDIA's GPUs."""
    if language.MISSING is not None:
        return False
    from triton.backends import backends

    return "nvidia" in backends


def compiled(module: str, requests: Sequence[Request], cache: str) -> list[Counter[str]]:
    """Return how often each instruction occurs in the PTX of kernels that are compiled, and assembled, for sm_90.

    Needs no GPU. Runs in a process of its own, because this one's kernels may be interpreted.

    Args:
        module: where the kernels are.
        requests: what to compile.
        cache: an empty folder for Triton's files.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILER, module],
        input=json.dumps([(one.kernel, dict(one.types), dict(one.constants)) for one in requests]),
        env=clean | {"TRITON_CACHE_DIR": cache},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [
        Counter(re.findall(r"^\s+(?:@!?%\w+\s+)?([a-z]\w*(?:\.\w+)+)\s", ptx, re.M)) for ptx in json.loads(done.stdout)
    ]


def count(instructions: Counter[str], pattern: str) -> int:
    """Return how many instructions match a regular expression from their beginning to their end."""
    return sum(number for name, number in instructions.items() if re.fullmatch(pattern, name))
