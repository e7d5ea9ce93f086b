"""A pytest plugin: a machine without a GPU says that it has one, for which kernels are compiled, but not launched."""

import os

os.environ["TRITON_INTERPRET"] = "0"

import torch

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1

from superadam.gpu import language  # noqa: E402

language._obstacle_on = lambda device: None  # type: ignore[assignment]
