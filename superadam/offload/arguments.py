"""Checks of the scheduler's arguments, before it changes anything."""

from __future__ import annotations

import sys

import torch
from torch import nn

from superadam.devices import Device
from superadam.distributed.shards import is_distributed
from superadam.optim.adam import SpeculativeCPUAdam
from superadam.optim.arguments import parameters_of

TRANSFER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unwrapped(optimizer: SpeculativeCPUAdam) -> SpeculativeCPUAdam:
    """Return the optimizer, without the wrapper that Accelerate or Lightning may have put around it.

    Raises TypeError unless it is a `SpeculativeCPUAdam`.
    """
    held = getattr(optimizer, "optimizer", optimizer)
    inner = held if isinstance(held, SpeculativeCPUAdam) else optimizer  # ours may have an attribute of that name
    if not isinstance(inner, SpeculativeCPUAdam):
        raise TypeError(
            f"optimizer is a {type(held).__name__}, expected a SpeculativeCPUAdam; make one first, or pass the one "
            "that a wrapper holds"
        )
    return inner


def check_model(optimizer: SpeculativeCPUAdam, model: nn.Module) -> SpeculativeCPUAdam:
    """Return the optimizer without its wrapper.

    Raises TypeError unless it is a `SpeculativeCPUAdam` and the model an `nn.Module`; ValueError if that has none of
    its parameters; RuntimeError if a wrapper or another rank would have to reduce gradients first.
    """
    inner = unwrapped(optimizer)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected the nn.Module whose parameters are optimized")
    optimized = {*map(id, parameters_of(inner))}
    trained = {*map(id, model.parameters())}
    if optimized and trained and optimized.isdisjoint(trained):
        raise ValueError(
            "the model has none of the optimizer's parameters, expected the model that it trains; pass that one, or "
            "make the optimizer after the model's parameters were replaced, or call reshard() of FSDP2's modules, in "
            "which an evaluation may have left others"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported, so not used; importing takes a second
    wrappers = (nn.parallel.DistributedDataParallel, *([fsdp.FullyShardedDataParallel] if fsdp else []))
    for wrapper in wrappers:
        if any(isinstance(module, wrapper) for module in model.modules()):
            raise RuntimeError(
                f"the model is wrapped in {wrapper.__name__}, whose gradients are not reduced yet when a scheduler "
                "takes them, expected a model on one rank; train this one without an OffloadScheduler"
            )
    is_distributed_run = torch.distributed.is_available() and torch.distributed.is_initialized()
    world_size = torch.distributed.get_world_size() if is_distributed_run and inner.process_group is None else 1
    if world_size > 1 and not any(map(is_distributed, parameters_of(inner))):
        raise RuntimeError(
            f"this is one of {world_size} ranks, and a scheduler takes gradients before they are reduced over ranks, "
            "expected one rank, or the DTensor parameters of fully_shard; shard the model, pass the optimizer a "
            "process_group if no gradient has to be reduced, as in a pipeline, or train without an OffloadScheduler"
        )
    return inner


def is_one_group(model: nn.Module) -> bool:
    """Return whether FSDP2 reduces all gradients of a model together, after backward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and sum(isinstance(module, fsdp.FSDPModule) for module in model.modules()) == 1


def check_count(name: str, value: int | str, *, least: int = 1, may_be_auto: bool = True) -> None:
    """Raise ValueError if an argument is neither an integer of at least `least` nor, where that is allowed, "auto"."""
    if may_be_auto and value == "auto":
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        expected = "'auto' or an integer" if may_be_auto else "an integer"
        raise ValueError(f"{name} is {value!r}, expected {expected} of at least {least}")


def check_device(device: Device | None) -> None:
    """Raise TypeError for what is no device of this package, as the name of one of torch's."""
    if device is not None and not isinstance(device, Device):
        raise TypeError(
            f"device is {device!r}, expected a superadam.devices.Device; leave it out, and the model's own is taken"
        )


def check_transfer_dtype(value: torch.dtype | str) -> None:
    """Raise ValueError if gradients cannot travel in this dtype."""
    if value != "auto" and value not in TRANSFER_DTYPES:
        expected = ", ".join(str(dtype) for dtype in TRANSFER_DTYPES)
        raise ValueError(f"transfer_dtype is {value!r}, expected 'auto' or one of {expected}")
