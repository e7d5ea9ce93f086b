"""Where the shards of an FSDP2 model lie: on the GPU, or in host memory, from where each layer's weights flow to it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from superadam.host.memory import gigabytes

FREE_SHARE = 0.8
"""Of what is free, what shards may take: the allocator's fragments need the rest."""

_logger = logging.getLogger("superadam")


def offload_policy(
    parameters: Iterable[Tensor],
    *,
    device: torch.device | str = "cuda",
    reserved_bytes: int = 0,
    ranks: int | None = None,
    pin_memory: bool = True,
) -> OffloadPolicy:
    """Return the `offload_policy` for `fully_shard`: shards stay on the device if they fit there, else on the host.

    On the device, a rank's shards take their size twice: once as weights, and once as gradients, whose memory then
    takes the new values. On the host they take none there, but all weights travel in each forward and backward, and
    FSDP2 waits for the copy of each gradient where a scheduler has hooks, so that less is hidden. Bits are the same.

    Args:
        parameters: of the model, before `fully_shard`; they may be meta.
        device: of this rank; on a CPU there is nothing to choose.
        reserved_bytes: of the device, for activations and for the layers whose weights are gathered at one time.
        ranks: over which parameters are sharded; all by default.
        pin_memory: as for `CPUOffloadPolicy`.

    Raises:
        ValueError: `ranks` or `reserved_bytes` is out of range.
    """
    device = torch.device(device)
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks < 1 or reserved_bytes < 0:
        raise ValueError(
            f"ranks is {ranks} and reserved_bytes is {reserved_bytes}, expected at least 1 and at least 0; give the "
            "size of the mesh dimension that shards, and what activations take"
        )
    if device.type != "cuda":
        return OffloadPolicy()
    needed = 2 * sum(-(-one.numel() // ranks) * one.element_size() for one in parameters) + reserved_bytes
    free, _ = torch.cuda.mem_get_info(device)
    fits = needed <= FREE_SHARE * free
    _logger.info(
        "shards lie %s: with activations they would take %s of the %s that are free on %s",
        "on the device" if fits else "in host memory",
        gigabytes(needed),
        gigabytes(free),
        device,
    )
    return OffloadPolicy() if fits else CPUOffloadPolicy(pin_memory=pin_memory)
