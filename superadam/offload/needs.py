"""What training takes in host memory: master and moments, gradients, and new values until the verdict."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from superadam.devices import Device
from superadam.devices.flat import aligned
from superadam.distributed import shards
from superadam.host.memory import HostNeeds
from superadam.offload.placement import Placement
from superadam.offload.transfers import dtype_on_link
from superadam.optim.adam import SpeculativeCPUAdam
from superadam.optim.entry import Encoded, raw
from superadam.state import compact
from superadam.state.parameter import piece_length
from superadam.state.storage import Master, Moments, Storage
from superadam.state.uncertain import NARROWER, list_bytes


def needs_of(
    parameter: Tensor,
    *,
    is_on_host: bool,
    transfer_dtype: torch.dtype | None = None,
    amsgrad: bool = False,
    piece_numel: int | None = None,
    storage: Storage = Storage(),  # noqa: B008 (immutable)
) -> HostNeeds:
    """Return what one parameter, which may be meta, takes; `shadows` counts new values that wait on the device, too.

    It is cut into pieces of at most `piece_numel` elements; None for one.
    """
    numel, size = parameter.numel(), parameter.element_size()
    is_own_master = is_on_host and size >= torch.float32.itemsize
    moment, master = storage.bytes_of(parameter)
    each = (2 + amsgrad) * moment + (not is_own_master) * master
    on_link = dtype_on_link(parameter, transfer_dtype).itemsize
    return HostNeeds(
        state=math.ceil(each * numel),
        gradients=size * numel if is_on_host else 0,
        pending=0 if is_on_host else on_link * aligned(numel),
        shadows=0 if is_own_master else size * numel,
        lists=list_bytes(numel, with_max=amsgrad) if parameter.dtype in NARROWER else 0,
        largest=0 if is_on_host else max(size, on_link) * aligned(piece_length(parameter, piece_numel)),
    )


def bytes_of_state(storage: Storage = Storage(), *, amsgrad: bool = False) -> float:  # noqa: B008 (immutable)
    """Return how many bytes the state of one element of a working copy takes."""
    weight = torch.empty(1, compact.BLOCK, dtype=torch.bfloat16, device="meta")
    return needs_of(weight, is_on_host=False, amsgrad=amsgrad, storage=storage).state / weight.numel()


SMALLER = {
    "make the optimizer with moments='bf16'": Storage(Moments.BFLOAT16),
    "with moments='bf16' and master='24bit'": Storage(Moments.BFLOAT16, Master.TWENTY_FOUR_BIT),
    "with moments='8bit' and master='24bit'": Storage(Moments.EIGHT_BIT, Master.TWENTY_FOUR_BIT),
}
"""How state may be stored in fewer bytes, in the words of a remedy."""


def needs_of_run(optimizer: SpeculativeCPUAdam, device: Device, placement: Placement) -> HostNeeds:
    """Return what an optimizer with a scheduler takes on the host, for the parameters that are trained at present."""
    now = optimizer._binding.storage
    run = _needs_with(optimizer, device, placement, now)

    def changes() -> dict[str, int]:
        smaller = {words: _needs_with(optimizer, device, placement, one) for words, one in SMALLER.items()}
        narrow = replace(placement, transfer_dtype=torch.bfloat16)
        smaller["let gradients travel in transfer_dtype=torch.bfloat16"] = _needs_with(optimizer, device, narrow, now)
        return {words: one.total for words, one in smaller.items() if one.total < run.total}

    return replace(run, changes=changes)


def _needs_with(optimizer: SpeculativeCPUAdam, device: Device, placement: Placement, storage: Storage) -> HostNeeds:
    binding, groups = optimizer._binding, optimizer.param_groups
    run, entries = HostNeeds(), binding.entries(groups, is_given=False)
    leaving = elements = widest = 0
    for group in groups:
        for parameter in [parameter for parameter in group["params"] if parameter.requires_grad]:
            local, link = shards.local_of(parameter), placement.transfer_dtype
            if binding.source is not None and binding.source.takes_unrounded(parameter):
                link = torch.float32
            is_on_host, amsgrad, most = device.is_host(local), bool(group["amsgrad"]), placement.bucket_numel
            needs = needs_of(
                local, is_on_host=is_on_host, transfer_dtype=link, amsgrad=amsgrad, piece_numel=most, storage=storage
            )
            gradient = parameter.grad if is_on_host else None
            run += replace(needs, present=_bytes_of(entries.get(parameter), gradient))
            elements += local.numel()
            if not is_on_host:
                leaving += needs.shadows
                widest = max(widest, local.element_size(), dtype_on_link(local, link).itemsize)
    if not placement.num_threads:  # nothing is done during backward, so that nothing waits for a verdict
        return replace(run, gradients=run.gradients + run.pending, pending=0, shadows=0, lists=0, largest=0)
    if leaving and device.has_link:
        each = bytes_of_state(storage, amsgrad=any(group["amsgrad"] for group in groups))
        resident = math.ceil(each * min(elements, placement.gpu_buckets * placement.bucket_numel))
        free = device.free_bytes()
        run = replace(run, shadows=run.shadows - (leaving if free is None else min(leaving, max(0, free - resident))))
    total = sum(shards.local_of(parameter).numel() for group in groups for parameter in group["params"])
    return with_bucket(run, widest, placement, total)


def with_bucket(run: HostNeeds, widest: int, placement: Placement, total: int) -> HostNeeds:
    """Return the needs with the largest bucket: it holds less than `bucket_numel` before the piece that fills it.

    `widest` is the most bytes of an element that travels, `total` the number of elements, trained or not.
    """
    return replace(run, largest=run.largest + widest * aligned(min(placement.bucket_numel, total)))


def _bytes_of(entry: Any, gradient: Tensor | None) -> int:
    """Return what a parameter's published state and its gradient take already; users may have put anything there."""
    values = [value for name, value in raw(entry).items() if name != "step"] if isinstance(entry, dict) else []
    values = [each for value in values for each in (value.arrays if isinstance(value, Encoded) else (value,))]
    tensors = [shards.local_of(tensor) for tensor in (*values, gradient) if isinstance(tensor, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
