"""What tests share. Without a GPU, Triton's kernels are interpreted, which counts from when they are first imported."""

import os

import torch

if hasattr(torch, "cuda") and not torch.cuda.is_available():  # a stub has none
    os.environ.setdefault("TRITON_INTERPRET", "1")
