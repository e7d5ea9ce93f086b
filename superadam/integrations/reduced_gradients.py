"""Gradients of `fully_shard` as the ranks have reduced them, before FSDP2 rounds them to the dtype of bf16 shards."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from superadam.distributed import shards
from superadam.handles.gradient_handle import take_reduced
from superadam.handles.taken_gradient import GradientHolder
from superadam.host.signals import THIS_THREAD
from superadam.kernels.torch_private import base_of, check_can_take, version_of
from superadam.offload.arguments import unwrapped
from superadam.offload.buckets import Hooks
from superadam.optim.adam import SpeculativeCPUAdam
from superadam.optim.arguments import parameters_of


def take_reduced_gradients(optimizer: SpeculativeCPUAdam, model: nn.Module) -> None:
    """Let an optimizer use the gradients of a sharded model in the dtype in which they were reduced.

    Under `MixedPrecisionPolicy(reduce_dtype=torch.float32)` the gradients of bf16 and fp16 shards are reduced in fp32
    and then rounded for `.grad`. From now on norms and steps see the unrounded gradient, and micro-batches add up in
    fp32; what else reads `.grad` sees it rounded. Products with one scalar, as of clipping and unscaling, apply to the
    unrounded gradient. After any other write `.grad` counts as it is, until it is None. Other gradients stay as they
    are: those of fp32 shards, those reduced in bf16, and those of parameters that are not sharded.

    Call it after `fully_shard`, once for each model. It lasts as long as the optimizer, and takes the place of hooks
    set with `FSDPModule.set_all_reduce_hook`. Copies and pickles have no part in it.

    Args:
        optimizer: of sharded parameters; it may be in a framework's wrapper.
        model: some of whose modules are sharded.

    Raises:
        TypeError: the optimizer is not a `SpeculativeCPUAdam`.
        ValueError: nothing of the model or of the optimizer is sharded, shards lie in host memory and are reduced on a
            device, or FSDP2 has no such hook for a module.
        RuntimeError: torch lacks what taking gradients needs.

    Whatever is raised, gradients arrive as before.
    """
    inner = unwrapped(optimizer)
    groups: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    sharded: list[Any] = [*filter(shards.is_distributed, parameters_of(inner))]
    if not groups or not sharded:
        raise ValueError(
            f"{len(groups)} modules of the model and {len(sharded)} parameters of the optimizer are sharded, expected "
            "some of both; call fully_shard() on the model, then make the optimizer"
        )
    if any(shards.local_of(shard).is_cpu and shard.device_mesh.device_type != "cpu" for shard in sharded):
        raise ValueError(
            "shards lie in host memory (CPUOffloadPolicy) and gradients are reduced on a device, expected both in one "
            "place; keep fp32 shards there, whose gradients arrive unrounded"
        )
    check_can_take(sharded, "take_reduced_gradients() was called")
    source = inner._binding.source
    if not isinstance(source, ReducedGradients):
        source = ReducedGradients(inner)
    for module in groups:
        with THIS_THREAD.without_handlers:
            try:
                module.set_all_reduce_hook(_show)
            except (AttributeError, ValueError) as error:
                raise ValueError(
                    f"{type(module).__name__} cannot show its reduced gradients ({error}), expected one mesh for all "
                    "parameters of a module; keep fp32 shards, whose gradients arrive unrounded"
                ) from error
    _sources.add(source)
    source.watch()
    source.is_lost = False
    inner._binding.source = source


_sources: weakref.WeakSet[ReducedGradients] = weakref.WeakSet()


def _show(buffer: Tensor) -> None:
    """Show a reduced buffer to all sources: an all-reduce hook of each group."""
    for source in list(_sources):
        source.show(buffer)


@dataclass(eq=False)
class _Owner:
    """Has a parameter, so that a gradient need not keep it alive."""

    parameter: Tensor


class ReducedGradients(GradientHolder):
    """Takes gradients of one optimizer's shards from the buffers in which they were reduced.

    FSDP2 shows a group's buffer to its hook, divides it in place, cuts the group's gradients from a rounded copy, and
    calls their hooks. So there the unrounded gradient lies in the buffer where the rounded one lies in the copy.
    """

    def __init__(self, optimizer: SpeculativeCPUAdam) -> None:
        self._optimizer, self._lock = weakref.ref(optimizer), optimizer._binding._lock
        self._hooks = Hooks(self._take, is_first=True)  # what other hooks write to `.grad` counts
        self._owners: dict[int, _Owner] = {}
        self._followed: list[int] = []  # ids of the optimizer's parameters
        self._buffer: Tensor | None = None  # that was shown last
        self._rounded: Tensor | None = None  # its copy, once gradients were found in it
        self._differs: list[Tensor] = []  # whether a copy is that of another buffer
        self.is_lost = False  # until take_reduced_gradients() is called again
        self._error: Exception | None = None

    def watch(self) -> None:
        """Take the gradients of the optimizer's present parameters."""
        parameters = self._parameters()
        self._followed = [*map(id, parameters)]
        narrow = [*filter(self.takes_unrounded, parameters)]
        self._owners = {id(p): self._owners.get(id(p)) or _Owner(p) for p in narrow}
        self._hooks.watch(narrow)

    def takes_unrounded(self, parameter: Tensor) -> bool:
        """Whether this takes gradients of a parameter: of shards that are narrower than fp32."""
        return shards.is_distributed(parameter) and parameter.itemsize < torch.float32.itemsize

    def _parameters(self) -> list[Tensor]:
        optimizer = self._optimizer()
        return [] if optimizer is None else parameters_of(optimizer)

    def show(self, buffer: Tensor) -> None:
        """Note the buffer of the group whose hooks are called next."""
        if len(self._parameters()) != len(self._followed):  # a group was added
            self.watch()
        self._hooks.look_for_unfrozen()
        if buffer.device.type != "cpu":  # it may be freed before the work that is enqueued here has read it
            buffer.record_stream(torch.get_device_module(buffer.device).current_stream(buffer.device))
        self._buffer, self._rounded = buffer, None

    def _take(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        local = shards.local_of(gradient)
        if type(local) is Tensor:  # otherwise it was added to one that had been taken
            with THIS_THREAD.without_handlers:
                try:
                    unrounded = self._unrounded(local)
                    if unrounded is not None:
                        take_reduced(parameter, unrounded, self._owners[id(parameter)], self)
                except Exception as error:
                    self._error = self._error or error

    def _unrounded(self, rounded: Tensor) -> Tensor | None:
        """Return the values from which FSDP2 has rounded a gradient; None for any other gradient."""
        buffer, copy = self._buffer, base_of(rounded)
        if (
            buffer is None
            or copy is None
            or copy.numel() != buffer.numel()
            or buffer.itemsize <= rounded.itemsize
            or buffer.device != rounded.device
        ):
            return None
        found = buffer.as_strided(rounded.size(), rounded.stride(), rounded.storage_offset())
        if copy is not self._rounded and rounded.numel():
            differs = ((found.to(rounded.dtype) != rounded) & ~rounded.isnan()).any()
            if version_of(rounded) and differs:  # an ordinary gradient that FSDP2 has added to
                return None
            self._differs.append(differs)
            self._rounded = copy
        return found.to(torch.float32)

    def unrounded(self, new: Tensor) -> Tensor:
        """Return the values of a gradient that FSDP2 adds to one that was taken, from before it was rounded."""
        try:
            found = self._unrounded(new)
        except Exception as error:
            self._error = self._error or error
            return new
        return new if found is None else found

    def check(self) -> None:
        """Raise what has failed since the last verdict."""
        self._buffer = self._rounded = None
        if [*map(id, self._parameters())] != self._followed:
            self.watch()
        differs, self._differs = self._differs, []
        if differs and torch.stack(differs).any():
            self.is_lost = True
        if self.is_lost:
            raise RuntimeError(
                "gradients in .grad are not those that were reduced last, expected every group of fully_shard to show "
                "its own; call take_reduced_gradients() after everything else that sets all-reduce hooks, and start "
                "again from a checkpoint"
            )
        error, self._error = self._error, None
        if error is not None:
            raise error
