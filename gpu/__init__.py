"""Triton kernels: packing gradients, scattering parameters, and Adam on state that is resident on the GPU.

They know tensors as arrays, and nothing of optimizers. Their results have the bits of the CPU kernels.
"""

from .adam import update
from .choice import Backend, backend
from .pack import pack_gradients
from .scatter import scatter_values
from .tables import LaunchCache

__all__ = ["Backend", "LaunchCache", "backend", "pack_gradients", "scatter_values", "update"]
