"""Triton kernels: packing gradients, scattering parameters, and Adam on state that is resident on the GPU.

They know tensors as arrays, and nothing of optimizers. Their results have the bits of the CPU kernels. Nothing here
checks its arguments: `CudaDevice`, the caller, passes only what has been checked.
"""

from .adam import update
from .language import obstacle
from .pack import pack_gradients
from .scatter import scatter_values

__all__ = ["obstacle", "pack_gradients", "scatter_values", "update"]
