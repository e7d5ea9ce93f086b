"""The tensors of a checkpoint on their way to DCP: copied before training goes on, made when they are written.

A copy is what a tensor is stored as. State that is encoded is decoded when its turn comes, and a working copy is
written as its rounded master: neither takes memory in addition to the copies, and nothing is copied from a device
twice.
"""

from __future__ import annotations

import dataclasses
import io
import math
import mmap
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from superadam.devices.flat import aligned
from superadam.distributed import shards
from superadam.integrations.checkpoint_folder import CheckpointError
from superadam.kernels.copies import copy_on_kernel_threads, is_plain
from superadam.kernels.memory import has_memory
from superadam.kernels.torch_private import storage_key
from superadam.optim.entry import Encoded

Value = Tensor | Encoded
"""This rank's part of a tensor, or what it is decoded from."""

_block: mmap.mmap | None = None
"""Memory of the copies of one save, kept for the next: to get it from the system takes longer than to fill it."""


class Files(FileSystem):
    """Files to which torch may write when they are closed, as it does to end the archives that Ctrl-C has left open.

    It does so in a destructor, where an error would end the process.
    """

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file, which is closed when the context ends."""
        with _File(io.FileIO(path, mode.removesuffix("b"))) as file:
            yield file


class _File(io.BufferedWriter):
    def write(self, data: Any) -> int:
        return memoryview(data).nbytes if self.closed else super().write(data)


def _memory_of_copies(size: int) -> mmap.mmap:
    """Return memory of this many bytes, at least 1; raises MemoryError where there are none."""
    global _block
    if _block is None or len(_block) != size:
        _block = None  # before there is another one
        try:
            _block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError("which the system does not give") from error
    return _block


def rest() -> None:
    """Let the system take back the memory of copies where it is short of some, until it is used again."""
    if _block is not None:
        _block.madvise(mmap.MADV_FREE)


class Copies:
    """What a save copies: tensors that share memory once, and working copies as their masters, in the masters' dtype.

    Of all tensors of a checkpoint, as users see them, it is given the `names` of those that this rank writes, and
    parameters by name that are working copies where they have a master: the model's state may hold others under their
    names, which its hooks have made. Raises CheckpointError where a tensor has no memory.
    """

    def __init__(self, tensors: Mapping[str, Value], names: Collection[str], parameters: Mapping[str, Tensor]) -> None:
        of_working_copy = {
            _place(shards.local_of(parameter)): tensors[f"optimizer.{name}.master"]
            for name, parameter in parameters.items()
            if f"optimizer.{name}.master" in tensors
        }
        self._values: dict[str, Value] = {}
        self._arrays: dict[object, Tensor] = {}  # the plain tensors in memory that values consist of
        for name in names:
            value = shards.local_of(tensors[name])
            if name.startswith("model.") and is_plain(value) and value.numel():
                value = shards.local_of(of_working_copy.get(_place(value), value))
            if isinstance(value, Tensor):
                _require_memory(name, value)
            self._values[name] = value
            for array in value.arrays if isinstance(value, Encoded) else [value]:
                if is_plain(array) and array.numel():
                    self._arrays[_place(array)] = array.detach()
        self.size = sum(aligned(array.nbytes) for array in self._arrays.values())

    def make(self) -> dict[str, Value]:
        """Return the copies, on the CPU; raises MemoryError or RuntimeError where there is no memory."""
        block, begin = _memory_of_copies(max(1, self.size)), 0
        copies: dict[object, Tensor] = {}
        for place, array in self._arrays.items():
            like = torch.empty_like(array, device="meta")
            whole = torch.frombuffer(block, dtype=torch.uint8, count=like.nbytes, offset=begin)  # a storage of its own
            copies[place] = whole.view(like.dtype).as_strided(like.shape, like.stride())
            begin += aligned(array.nbytes)
        copy_on_kernel_threads([*copies.values()], [*self._arrays.values()])

        def copy_of(array: Tensor) -> Tensor:
            copy = copies.get(_place(array)) if is_plain(array) else None
            return array.detach().to("cpu", copy=True) if copy is None else copy

        made: dict[str, Value] = {}
        for name, value in self._values.items():
            if isinstance(value, Tensor):
                made[name] = copy_of(value)
            else:
                first, second = map(copy_of, value.arrays)
                made[name] = dataclasses.replace(value, arrays=(first, second), parameter=None)
        return made


def _require_memory(name: str, tensor: Tensor) -> None:
    if is_plain(tensor) and not has_memory(tensor):
        raise CheckpointError(
            f"{name.partition('.')[2]} has no data, because its storage was freed or it is on the meta device, "
            "expected its values in memory; bring them back before saving"
        )


def _place(plain: Tensor) -> object:
    return storage_key(plain.untyped_storage()), int(plain.storage_offset()), plain.dtype, plain.shape, plain.stride()


class Planner(DefaultSavePlanner):
    """Gives DCP the tensors of a checkpoint; of those that are decoded or rounded for it, one is in memory at a time.

    DCP refers to each until its file is whole. But it writes one after the other, so that a tensor's memory can be
    given back when the next one is asked for.
    """

    _values: Mapping[str, Value]  # which it gives instead of what DCP has planned
    _made: Tensor | None = None

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
