"""The tensors of a checkpoint on their way to DCP: copied before training goes on, made when they are written.

A copy is what a tensor is stored as. State that is encoded is decoded when its turn comes, and a working copy is
written as its rounded master: so neither takes memory beside the copies, and nothing is copied from a device twice.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from superadam.distributed import shards
from superadam.integrations.checkpoint_folder import CheckpointError
from superadam.kernels.copies import copy_beside, is_plain
from superadam.kernels.memory import has_memory
from superadam.kernels.torch_private import storage_key
from superadam.optim.entry import Encoded

_ALIGNMENT = 64  # bytes


class CopyMemory:
    """Memory of the copies of one save, kept for the next: to get it from the system takes longer than to fill it."""

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None

    def take(self, size: int) -> mmap.mmap:
        """Return so many bytes, at least 1, in which anything may stand; raises MemoryError where there are none."""
        if self._block is None or len(self._block) != size:
            self._block = None  # before there is another one
            try:
                self._block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise MemoryError("which the system does not give") from error
        return self._block

    def rest(self) -> None:
        """Let the system take back what is kept where it is short of memory, until it is taken again."""
        if self._block is not None:
            self._block.madvise(mmap.MADV_FREE)


Value = Tensor | Encoded
"""This rank's part of a tensor, or what it is decoded from."""


def values_to_copy(
    tensors: Mapping[str, Value], masters: Mapping[str, Tensor], names: Collection[str]
) -> dict[str, Value]:
    """Return what these names of a checkpoint are copied as: working copies as their masters, in the masters' dtype.

    Raises CheckpointError where one has no memory.

    Args:
        tensors: all of the checkpoint, as users see them.
        masters: the parameter of each name in `tensors` that is a master's.
    """
    of_working_copy = {_memory(shards.local_of(parameter)): tensors[name] for name, parameter in masters.items()}
    values: dict[str, Value] = {}
    for name in names:
        value = shards.local_of(tensors[name])
        if name.startswith("model.") and is_plain(value) and value.numel():
            value = shards.local_of(of_working_copy.get(_memory(value), value))
        if isinstance(value, Tensor):
            _require_memory(name, value)
        values[name] = value
    return values


def _require_memory(name: str, tensor: Tensor) -> None:
    if is_plain(tensor) and not has_memory(tensor):
        raise CheckpointError(
            f"{name.partition('.')[2]} has no data, because its storage was freed or it is on the meta device, "
            "expected its values in memory; bring them back before saving"
        )


def bytes_of_copies(values: Mapping[str, Value]) -> int:
    """Return how much memory the copies of these values take."""
    return sum(map(_aligned_bytes, _plain_arrays(values).values()))


def copies_of(values: Mapping[str, Value], memory: CopyMemory) -> dict[str, Value]:
    """Return copies on the CPU, which share memory where the values do; what is no plain tensor is copied by torch.

    Raises MemoryError or RuntimeError where there is no memory.
    """
    arrays = _plain_arrays(values)
    block, begin = memory.take(max(1, bytes_of_copies(values))), 0
    copies: dict[object, Tensor] = {}
    for key, array in arrays.items():
        like = torch.empty_like(array, device="meta")
        whole = torch.frombuffer(block, dtype=torch.uint8, count=like.nbytes, offset=begin)  # a storage of its own
        copies[key] = whole.view(like.dtype).as_strided(like.shape, like.stride())
        begin += _aligned_bytes(array)
    copy_beside([*copies.values()], [*arrays.values()])

    def copy_of(array: Tensor) -> Tensor:
        copy = copies.get(_memory(array)) if is_plain(array) else None
        return array.detach().to("cpu", copy=True) if copy is None else copy

    def copied(value: Value) -> Value:
        if isinstance(value, Tensor):
            return copy_of(value)
        first, second = map(copy_of, value.arrays)
        return dataclasses.replace(value, arrays=(first, second), parameter=None)

    return {name: copied(value) for name, value in values.items()}


def _plain_arrays(values: Mapping[str, Value]) -> dict[object, Tensor]:
    """Return the plain tensors in memory that values consist of, each once, by what stands for its memory."""
    arrays = (array for value in values.values() for array in (value.arrays if isinstance(value, Encoded) else [value]))
    return {_memory(array): array.detach() for array in arrays if is_plain(array) and array.numel()}


def _memory(plain: Tensor) -> object:
    place = storage_key(plain.untyped_storage()), int(plain.storage_offset())
    return *place, plain.dtype, plain.shape, plain.stride()


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


class Planner(DefaultSavePlanner):
    """Gives DCP the tensors of a checkpoint; of those that are decoded or rounded for it, one is in memory at a time.

    DCP refers to each until its file is whole. But it writes one after the other, so that a tensor's memory can be
    given back when the next one is asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: Mapping[str, Value] = {}  # which it gives instead of what DCP has planned
        self._made: Tensor | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Plan the tensors of a checkpoint, of which DCP sees those that are encoded without memory."""
        encoded = {name: value for name, value in state_dict.items() if isinstance(value, Encoded)}
        described = {name: value.whole(value.like) for name, value in encoded.items()}
        self._values = encoded
        super().set_up_planner({**state_dict, **described}, storage_meta, is_coordinator)

    def read_from(self, copies: Mapping[str, Value]) -> None:
        """Give these, and refer to nothing else."""
        self._values, self.state_dict = copies, {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the tensor for an item of the plan, until the next call.

        Raises CheckpointError where it has no memory.
        """
        if self._made is not None:
            self._made.untyped_storage().resize_(0)
            self._made = None
        value = self._values.get(write_item.index.fqn)
        if value is None or write_item.tensor_data is None:
            tensor = super().resolve_data(write_item)
            if isinstance(tensor, Tensor):
                _require_memory(write_item.index.fqn, tensor)
            return tensor
        dtype = write_item.tensor_data.properties.dtype
        if isinstance(value, Encoded):
            self._made = torch.empty_like(value.like, dtype=dtype, device="cpu")
            value.decode(self._made)
        elif value.dtype != dtype:
            self._made = value.to(dtype)
        return value if self._made is None else self._made


def require_whole(plan: SavePlan, results: Iterable[WriteResult]) -> None:
    """Raise CheckpointError unless DCP has written as many bytes of each item of a plan as it has, or more."""
    written = {result.index: result.size_in_bytes for result in results}
    for item in plan.items:
        data = item.tensor_data
        if data and written.get(item.index, -1) < math.prod(data.chunk.sizes) * data.properties.dtype.itemsize:
            raise CheckpointError(
                f"torch {torch.__version__} asks for a tensor before it has written the one before, expected one after "
                "the other; use a torch that superadam was tested with"
            )
