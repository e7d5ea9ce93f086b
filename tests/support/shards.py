"""Small models under `fully_shard`, and the parts of DTensors on this rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


@torch.no_grad()
def local(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, in the same memory; an ordinary tensor itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def wrap(modules: Iterable[nn.Module], **options: Any) -> None:
    """Shard each of these modules, from the inside outwards."""
    for module in modules:
        fully_shard(module, **options)
