"""Kernels for GPUs, in Triton: packing gradients, scattering working copies, and Adam on state that is kept there.

They know tensors as arrays and the coefficients of a step, and nothing of optimizers. Their results have the bits of
the kernels of the CPU.
"""

from .adam import update
from .choice import Backend, backend
from .pack import pack_gradients
from .scatter import scatter_values

__all__ = ["Backend", "backend", "pack_gradients", "scatter_values", "update"]
