"""Kernels for GPUs, in Triton: packing gradients, scattering working copies, and Adam on state that is kept there.

They know tensors as arrays and the coefficients of a step, and nothing of optimizers. Their results have the bits of
the kernels of the CPU.
"""

from .adam import run
from .choice import Backend, Choice, backend, set_backend
from .pack import pack_gradients
from .scatter import scatter_values
from .segments import Segment

__all__ = [
    "Backend",
    "Choice",
    "Segment",
    "backend",
    "pack_gradients",
    "run",
    "scatter_values",
    "set_backend",
]
