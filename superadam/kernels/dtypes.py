"""The torch dtypes of parameters and gradients that the kernels take, with the kernels' names for them."""

from __future__ import annotations

import torch

from superadam.kernels.native import Dtype

DTYPES = {
    torch.float32: Dtype.FLOAT32,
    torch.bfloat16: Dtype.BFLOAT16,
    torch.float16: Dtype.FLOAT16,
    torch.float64: Dtype.FLOAT64,
}
