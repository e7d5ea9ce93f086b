"""The values that tensors had at one moment, each copied only when something is about to change it.

A writer takes one tensor after the other. What training changes before its turn has come is copied first, into memory
that is bounded: where that is full, training waits for the writer, which never waits for training.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from superadam.distributed import shards
from superadam.kernels.copies import copy_beside
from superadam.kernels.torch_private import is_short_of_memory, version_of

_MAPPED_BYTES = 1 << 20
"""Bytes from which on memory of a copy is kept."""

_WORDS = 1 << 10
"""Sums of 64 bits in the digest of a tensor."""


class ChangedError(RuntimeError):
    """A tensor was written to before it was copied, by others than the optimizer."""


class CopyMemory:
    """Memory of copies, kept from one snapshot to the next: to get it from the system takes longer than to fill it.

    While it `rests`, the system takes it back where it is short of memory.
    """

    def __init__(self) -> None:
        self._free: list[tuple[mmap.mmap, Tensor]] = []
        self._mapped: dict[int, mmap.mmap] = {}  # by address

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept and not in use."""
        return sum(block.nbytes for _, block in self._free)

    def take(self, like: Tensor, dtype: torch.dtype, free_bytes: int) -> Tensor:
        """Return a tensor in memory of its own; at most so many bytes of other memory are kept.

        Raises MemoryError or RuntimeError where there is no memory.
        """
        shape = torch.empty_like(like, dtype=dtype, device="meta")
        if shape.nbytes < _MAPPED_BYTES:
            return torch.empty_like(shape, device="cpu")
        block = next((one for one in self._free if one[1].nbytes == shape.nbytes), None)
        if block is None:
            self.trim(free_bytes)
            try:
                memory = mmap.mmap(-1, shape.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise MemoryError(f"no memory for a copy of {shape.nbytes} bytes") from error
            block = memory, torch.frombuffer(memory, dtype=torch.uint8)
        else:
            self._free = [one for one in self._free if one is not block]
        self._mapped[block[1].data_ptr()] = block[0]
        return block[1].view(dtype).as_strided(shape.shape, shape.stride())

    def put_back(self, tensor: Tensor, free_bytes: int) -> None:
        """Take a tensor back, of which nobody reads the values any more; keep at most so many bytes."""
        memory = self._mapped.pop(tensor.data_ptr(), None)
        if memory is None:
            tensor.untyped_storage().resize_(0)
        else:
            self._free.append((memory, torch.frombuffer(memory, dtype=torch.uint8)))
            self.trim(free_bytes)

    def trim(self, free_bytes: int) -> None:
        """Keep at most so many bytes."""
        while self._free and self.free_bytes > free_bytes:
            memory, _ = self._free.pop(0)
            memory.madvise(mmap.MADV_DONTNEED)  # also where DCP refers to it

    def rest(self) -> None:
        """Let the system take back what is kept, until it is used again."""
        for memory, _ in self._free:
            memory.madvise(mmap.MADV_FREE)


class _Source:
    """A tensor whose values one or two names stand for.

    Attributes:
        tensor: as users see it, and `local`, this rank's part; both share the memory that may change.
        version: of both, when the snapshot was made.
        digest: of the values then, where writes that no version counts are to be expected.
        copy: of `local`, once there is one.
        uses: names that have not been taken.
        is_read: whether the writer copies it now.
        is_open: whether values were read in place, and no call has found since that they had not changed.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.tensor = name, tensor.detach()  # which counts writes with `tensor`, but is no reference to it
        self.local = shards.local_of(self.tensor)
        self.version, self.uses = self.present_version(), 0
        self._memory = self._present_memory()
        self.digest: Tensor | None = None
        self.copy: Tensor | None = None
        self.is_read = self.is_open = False

    @property
    def needs_copy(self) -> bool:
        return self.uses > 0 and self.copy is None

    @property
    def nbytes(self) -> int:
        return self.local.numel() * self.local.element_size()

    def present_version(self) -> int:
        try:
            whole = version_of(self.tensor) if self.tensor is not self.local else 0
            return version_of(self.local) + whole
        except RuntimeError:  # made in inference mode, where writes are not counted
            return -1

    def _present_memory(self) -> tuple[int, int]:
        storage = self.local.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def check(self) -> None:
        """Raise ChangedError if it was written to, or its memory was given back, which may not even be read."""
        if self.present_version() != self.version or self._present_memory() != self._memory:
            self.refuse()

    def check_digest(self, values: Tensor) -> None:
        """Compare with values that were read."""
        if self.digest is not None and not torch.equal(_digest_of(values), self.digest):
            self.refuse()

    def refuse(self) -> NoReturn:
        raise ChangedError(f"{self.name} was written to while it was being saved; pass wait=True, or write later")


class Decodable(Protocol):
    """A tensor that is made of arrays when it is asked for."""

    @property
    def arrays(self) -> Sequence[Tensor]:
        """The arrays, which share the memory that may change."""

    @property
    def like(self) -> Tensor:
        """This rank's part of the tensor, without memory."""

    def decode(self, arrays: Sequence[Tensor], values: Tensor) -> None:
        """Write what copies of the arrays hold into a tensor in the layout of `like`, of this or a narrower dtype."""


def _array_name(name: str, number: int) -> str:
    return f"{name}, array {number}"


class Snapshot:
    """Named tensors as they were when they were added.

    Args:
        copy_bytes: most bytes of copies that wait for the writer. The writer's own copy, of one tensor, adds to that.
        memory: for copies, which no other snapshot uses at the same time.

    Attributes:
        peak_bytes: the most that copies have taken, with the writer's.
    """

    def __init__(self, copy_bytes: int, memory: CopyMemory | None = None) -> None:
        self.peak_bytes = 0
        self._copy_bytes = copy_bytes
        self._memory = memory or CopyMemory()
        self._memory.trim(copy_bytes)
        self._bytes = 0  # of copies that wait
        self._changed = threading.Condition()
        self._sources: dict[str, _Source] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._of_parameter: dict[int, list[_Source]] = {}
        self._parameters: list[Tensor] = []  # alive, so that no id is used again
        self._values: set[int] = set()  # of parameters that are saved themselves
        self._encoded: dict[str, Decodable] = {}
        self._taken: Tensor | None = None  # which the writer reads
        self._error: Exception | None = None

    def add(self, name: str, tensor: Tensor, parameter: Tensor) -> None:
        """Add a tensor of the state of this parameter."""
        source = self._sources[name] = _Source(name, tensor)
        source.uses = 1
        self._of_parameter.setdefault(id(parameter), []).append(source)
        self._parameters.append(parameter)

    def add_encoded(self, name: str, encoded: Decodable, parameter: Tensor) -> None:
        """Add a tensor of the state of this parameter of which only arrays are in memory."""
        for number, array in enumerate(encoded.arrays):
            self.add(_array_name(name, number), array, parameter)
        self._encoded[name] = encoded

    def add_value(self, name: str, tensor: Tensor, parameter: Tensor, *, is_optimized: bool) -> None:
        """Add a tensor with the values of this parameter, to which programs also write past version counters."""
        self.add(name, tensor, parameter)
        self._sources[name].digest = _digest_of(self._sources[name].local)
        if is_optimized:
            self._values.add(id(parameter))

    def add_copy(self, name: str, tensor: Tensor) -> None:
        """Add a small tensor, and copy it at once."""
        source = self._sources[name] = _Source(name, tensor)
        source.uses, source.copy = 1, source.local.to("cpu", copy=True)
        self._count(source.nbytes)

    def add_rounded(self, name: str, other: str, dtype: torch.dtype) -> None:
        """Add what a tensor that was added before is in another dtype."""
        self._dtypes[name] = dtype
        if other in self._encoded:
            self._encoded[name] = self._encoded[other]
            for number, _ in enumerate(self._encoded[other].arrays):
                source = self._sources[_array_name(name, number)] = self._sources[_array_name(other, number)]
                source.uses += 1
            return
        self._sources[name] = self._sources[other]
        self._sources[other].uses += 1

    def preserve(self, parameters: Iterable[Tensor], *, are_only_values: bool = False) -> None:
        """Copy what is saved of parameters that are about to change; return when that is done.

        With `are_only_values` their state stays as it is.
        """
        with self._changed:
            changing = {  # each once, however often a parameter is listed
                source: None
                for parameter in parameters
                if not are_only_values or id(parameter) in self._values
                for source in self._of_parameter.get(id(parameter), ())
            }
            while left := [source for source in changing if source.is_read or source.needs_copy]:
                if not self._copy(left):
                    self._changed.wait()
            for source in changing:
                self._close(source)

    def preserve_all(self) -> None:
        """Copy everything that belongs to parameters."""
        self.preserve(self._parameters)

    def _copy(self, sources: Iterable[_Source]) -> bool:
        """Copy as many as have room, in one call; return whether there was any, or one that was written to."""
        given_up, copies = False, dict[_Source, Tensor]()
        try:
            for source in sources:
                if source.is_read or self._bytes + source.nbytes > self._copy_bytes:
                    continue
                try:
                    source.check()
                    copies[source] = self._new(source.local, source.local.dtype, source.nbytes)
                except ChangedError as error:  # told by the writer
                    self._error, source.uses, given_up = self._error or error, 0, True
                    continue
                except Exception as error:
                    if not is_short_of_memory(error):
                        raise
                    self._copy_bytes = self._bytes  # no more than there is
                    break
                self._count(source.nbytes)
            copy_beside([*copies.values()], [source.local for source in copies])
        except BaseException:  # Ctrl-C, which ends the waiting for a step
            for copy in copies.values():
                self._bytes -= copy.nbytes
                self._memory.put_back(copy, self._copy_bytes - self._bytes)
            raise
        for source, copy in copies.items():
            source.copy = copy
        return given_up or bool(copies)

    def _new(self, like: Tensor, dtype: torch.dtype, nbytes: int) -> Tensor:
        """Return memory for a copy on the CPU; `nbytes` of it are among those of copies that wait."""
        return self._memory.take(like, dtype, self._copy_bytes - self._bytes - nbytes)

    def _close(self, source: _Source) -> None:
        """Find out whether a tensor that was read in place had changed meanwhile; nobody writes to it now."""
        if source.is_open:
            source.is_open = False
            try:
                source.check()
            except ChangedError as error:
                self._error = self._error or error

    def _count(self, nbytes: int) -> None:
        self._bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    # ---- the writer's ------------------------------------------------------------------------------------------------

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all names but these."""
        with self._changed:
            arrays = {_array_name(name, k) for name in self._encoded.keys() & names for k in range(2)}
            for name in self._sources.keys() - names - arrays:
                self._done(self._sources.pop(name))
            self._changed.notify_all()

    def take(self, name: str) -> Tensor:
        """Return a tensor on the CPU with the values of a name, until the next call; each name once.

        Raises:
            ChangedError: this or another tensor was written to by others than the optimizer.
        """
        if name not in self._encoded:
            return self._take(name)
        encoded = self._encoded[name]
        arrays = [self._take(_array_name(name, number)).clone() for number, _ in enumerate(encoded.arrays)]
        with self._changed:
            self._put_back_taken()
            taken = self._taken = self._new(encoded.like, self._dtypes.get(name, encoded.like.dtype), 0)
        encoded.decode(arrays, taken)
        return taken

    def _take(self, name: str) -> Tensor:
        with self._changed:
            if self._error is not None:
                raise self._error
            self._put_back_taken()
            source = self._sources.pop(name)
            origin = source.local if source.copy is None else source.copy
            dtype = self._dtypes.get(name, origin.dtype)
            is_handed_over = source.copy is not None and source.uses == 1 and dtype == origin.dtype
            taken = self._taken = origin if is_handed_over else self._new(origin, dtype, 0)
            if source.copy is None:
                source.check()
            source.is_read = True
        try:
            if taken is not origin:
                copy_beside([taken], [origin], threads=1)
            source.check_digest(taken)
        finally:
            with self._changed:
                source.is_read = False
                self.peak_bytes = max(self.peak_bytes, self._bytes + origin.numel() * origin.element_size())
                if source.copy is None:
                    source.check()
                    source.is_open = True
                self._done(source)
                self._changed.notify_all()
        return taken

    def _put_back_taken(self) -> None:
        if self._taken is not None:
            self._memory.put_back(self._taken, self._copy_bytes - self._bytes)
            self._taken = None

    def _done(self, source: _Source) -> None:
        source.uses -= 1
        if source.uses <= 0 and source.copy is not None:
            self._bytes -= source.nbytes
            if source.copy is not self._taken:
                self._memory.put_back(source.copy, self._copy_bytes - self._bytes)
            source.copy = None

    def finish(self) -> None:
        """Raise ChangedError if anything was written to while it was read in place."""
        with self._changed:
            for sources in self._of_parameter.values():
                for source in sources:
                    self._close(source)
            if self._error is not None:
                raise self._error

    def release(self) -> None:
        """Forget everything; nothing waits any more."""
        with self._changed:
            for source in (*self._sources.values(), *(one for some in self._of_parameter.values() for one in some)):
                source.uses, source.is_read = 0, False
                self._done(source)
            self._put_back_taken()
            self._memory.rest()
            self._sources, self._of_parameter, self._parameters, self._bytes = {}, {}, [], 0
            self._changed.notify_all()


class Snapshots:
    """Holds the snapshot that is under way, if there is one, for all that write to parameters and their state."""

    def __init__(self) -> None:
        self._current: tuple[int, Snapshot | None] = os.getpid(), None

    @property
    def current(self) -> Snapshot | None:
        """None in a forked process, too, where nobody writes what was under way."""
        process, snapshot = self._current
        return snapshot if process == os.getpid() else None

    @current.setter
    def current(self, snapshot: Snapshot | None) -> None:
        self._current = os.getpid(), snapshot


def _digest_of(tensor: Tensor) -> Tensor:
    """Return sums, and the rest, of all bytes of a tensor that is dense in memory, in the order of its memory."""
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        tensor = tensor.clone()
    values = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    if values.storage_offset() % 8:
        values = values.clone()
    end = values.numel() // (8 * _WORDS) * 8 * _WORDS
    sums = values[:end].view(torch.int64).view(-1, _WORDS).sum(0, dtype=torch.int64)
    return torch.cat([sums.view(torch.uint8), values[end:]]).cpu()
