"""Where the device is short of memory: new values wait on the host, and little is packed ahead of the link."""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.overlap import adam, batch, everything, mlp
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices import Stream
from superadam.devices.flat import FlatLayout
from superadam.devices.worker import Job, Work, Worker
from superadam.offload.transfers import PACKED_UNDER_WAY
from superadam.testing import simulated
from superadam.testing.accelerator import Block
from superadam.testing.simulated import SimulatedDevice

BUCKET = 200
LARGEST = 2 * (BUCKET + 64 + 2 * 64)
"""Bytes of a bucket of bf16 gradients: full with a matrix of 64 elements, and gaps."""

BOUND = (PACKED_UNDER_WAY + 2) * LARGEST
"""With the one that is packed, and one that has left, but whose memory the device has not released yet."""


class LateWorker(simulated.SeededWorker):
    """Begins when it is waited for: until then the training thread runs ahead."""

    def submit(self, job: Job) -> None:
        Worker.submit(self, job)


class CountingDevice(SimulatedDevice):
    """In the first step it keeps up; then it is late.

    Attributes:
        free: what it reports as free.
        limit: of packed gradients, beyond which it is full.
        most: of `packed`, at once.
    """

    def __init__(self, seed: int, free: int | None, limit: int = 1 << 40) -> None:
        super().__init__(seed, eagerness=0.95)
        self.free, self.limit = free, limit
        self.most = self.refused = 0
        self._blocks: list[Block] = []

    def start_worker(self, idle: Work) -> LateWorker:
        return LateWorker(self.accelerator.random, idle)

    def idle_cores(self) -> int:
        return 1

    def free_bytes(self) -> int | None:
        return self.free

    @property
    def packed(self) -> int:
        """Bytes of packed gradients, and of new values in their place, at present."""
        self.accelerator.collect()
        for stream in self.accelerator.streams:  # points that are behind nothing have passed
            while stream.operations and isinstance(stream.operations[0][0], functools.partial):
                stream.operations.popleft()[0]()
        is_used = [block.lease() is not None or not all(end.query() for end in block.ends) for block in self._blocks]
        self._blocks = [block for block, used in zip(self._blocks, is_used, strict=True) if used]
        return sum(block.memory.nbytes for block in self._blocks)

    def pack(self, gradients: Sequence[Tensor], layout: FlatLayout[Any], *rest: Any) -> Tensor:
        if self.packed + 2 * layout.numel > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError("planted")
        return self._counted(super().pack(gradients, layout, *rest))

    def empty(self, numel: int, dtype: torch.dtype, stream: Stream) -> Tensor:
        return self._counted(super().empty(numel, dtype, stream))

    def _counted(self, tensor: Tensor) -> Tensor:
        self._blocks.append(self.accelerator.blocks[tensor.untyped_storage().data_ptr()])
        self.most = max(self.most, self.packed)
        return tensor


STEPS = 7


def trained(device: CountingDevice | None) -> tuple[Any, list[int]]:
    """Return the bits after some steps, two of them clipped and one skipped, and the most bytes packed in each."""
    optimizer = adam(model := mlp(torch.bfloat16, layers=24), max_grad_norm=0.4)
    most: list[int] = []
    with opened(optimizer, model, device) if device is not None else nullcontext() as scheduler:
        for seed in range(STEPS):
            factor = {3: 100.0, 4: torch.inf, 5: 100.0}.get(seed, 0.01)
            optimizer.zero_grad()
            (model(batch(seed, torch.bfloat16)).float().square().mean() * factor).backward()
            optimizer.step()
            if device is not None:
                most.append(device.most)
                device.most, device.accelerator.eagerness = 0, 0.0
        if scheduler is not None:
            assert scheduler.statistics.buckets == 8 * STEPS  # none was left to step()
    assert optimizer.statistics.clipped == 2
    assert optimizer.statistics.skipped == 1
    return everything(model, optimizer), most


def opened(optimizer: SpeculativeCPUAdam, model: nn.Module, device: CountingDevice) -> OffloadScheduler:
    return OffloadScheduler(optimizer, model, device=device, bucket_numel=BUCKET, gpu_buckets=0)


@pytest.fixture(scope="module")
def expected() -> Any:
    return trained(None)[0]


@pytest.fixture(scope="module")
def roomy() -> list[int]:
    """Return what is packed where there is memory for all."""
    return trained(CountingDevice(0, None))[1]


@pytest.mark.parametrize("seed", range(2))
def test_packed_gradients_do_not_pile_up_where_memory_is_short(seed, expected):
    bits, roomy = trained(CountingDevice(seed, None))
    assert bits == expected
    assert min(roomy[1:3]) > BOUND  # the host does run ahead, and values stay there
    bits, short = trained(CountingDevice(seed, 0))
    assert bits == expected
    assert max(short[1:]) <= BOUND


def test_bucket_that_finds_no_memory_is_packed_once_others_have_left(expected):
    """In a first step, whose gradients leave no new values in their place; from then on memory is short."""
    device = CountingDevice(0, None, limit=2 * LARGEST)
    device.accelerator.eagerness = 0.0  # from the first step on
    bits, most = trained(device)
    assert bits == expected
    assert device.refused > 0
    assert max(most) <= 2 * LARGEST


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.5, 0), (0.75, 6), (1.0, 48)])
def test_as_many_new_values_as_there_is_room_for_go_to_the_device_the_last_ones_first(share, count, expected, roomy):
    """The step waits for those of the last buckets; the others are read from the host when it publishes."""
    device = CountingDevice(0, int(share * roomy[1]))
    bits, most = trained(device)
    assert bits == expected
    assert most == roomy if share == 1.0 else max(most[1:]) <= BOUND
    assert values_on_device(device.free, first_eagerness=0.95) == [True] * count + [False] * (48 - count)
    assert values_on_device(device.free, first_eagerness=0.95, limit=2 * LARGEST) == [False] * 48  # after it was full


def test_what_was_packed_at_once_has_room():
    """In the first step no copy has passed when the last bucket is packed."""
    assert values_on_device(-1, first_eagerness=0.0) == [True] * 48


def values_on_device(free: int, first_eagerness: float, limit: int = 1 << 40) -> list[bool]:
    """Return of each new value whether it has left the host before a step that is late."""
    model, device = mlp(torch.bfloat16, layers=24), CountingDevice(0, free)
    optimizer = adam(model, max_grad_norm=0.4)
    with opened(optimizer, model, device) as scheduler:
        for seed in range(4):
            optimizer.step()
            optimizer.zero_grad()
            device.accelerator.eagerness = 0.0 if seed > 1 else first_eagerness
            device.limit = limit if seed == 2 else 1 << 40
            model(batch(seed, torch.bfloat16)).float().square().mean().backward()
        scheduler._catch_up()
        states = scheduler._transaction.table.states
        return [state.pending.slot.shadow.sent is not None for state in states if state.pending.slot]
