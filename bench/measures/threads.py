"""How many threads torch and the kernels compute with while something is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from superadam.kernels import native


@contextmanager
def computing_threads(count: int) -> Iterator[None]:
    """Let both use so many inside, and as many as before afterwards."""
    before = torch.get_num_threads(), native.get_num_threads()
    torch.set_num_threads(count)
    native.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        native.set_num_threads(before[1])
