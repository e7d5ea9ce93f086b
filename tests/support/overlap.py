"""A scheduler at its worst timing, small models, and the same training with and without overlap."""

import contextlib
import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support.visible import state_bits
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices import Device, PlainDevice, Stream
from superadam.devices.flat import FlatLayout
from superadam.devices.interface import ChunkSums
from superadam.devices.worker import Job, Work, Worker
from superadam.state.parameter import ParameterState
from superadam.testing import SimulatedDevice, stand_in


class ImmediateWorker(Worker):
    """Runs each job when it is submitted, inside backward: new values are computed as early as is possible at all.

    Idle work waits for `idle_now`, so that steps stay accepted and uncommitted as long as is possible.
    """

    def __init__(self, idle: Work) -> None:
        super().__init__(idle)
        self.idle_now = idle

    def _start(self) -> None: ...

    def submit(self, job: Job) -> None:
        if self._error is None:
            try:
                job(lambda: False)
            except Exception as error:
                self._error = error

    @property
    def is_idle(self) -> bool:
        return True

    def drain(self) -> None:
        self._raise_error()

    def wake(self) -> None: ...

    def close(self) -> None: ...


class ThreadDevice(PlainDevice):
    """Host memory, and cores to spare: jobs run in a thread while the model computes."""

    def idle_cores(self) -> int:
        return 2


class DeferredDevice(PlainDevice):
    """Host memory, and no core to spare: everything is left to the step."""

    def idle_cores(self) -> int:
        return 0


class ImmediateDevice(ThreadDevice):
    """Host memory and an `ImmediateWorker`."""

    def start_worker(self, idle: Work) -> ImmediateWorker:
        return ImmediateWorker(idle)


class KeepingDevice(ThreadDevice):
    """Does everything when it is asked, with memory other than the host's, and with a real thread."""

    has_link = can_update = True
    update = staticmethod(stand_in.update)

    def is_host(self, tensor: Tensor) -> bool:
        return False

    def pack(
        self, gradients: Sequence[Tensor], layout: FlatLayout, dtype: torch.dtype, norm: ChunkSums | None = None
    ) -> Tensor:
        packed = super().pack(gradients, layout, dtype)
        if norm is not None:
            stand_in.take_norm(layout.views(packed), norm)
        return packed


class EagerSimulatedDevice(SimulatedDevice):
    """Its worker runs every job in the middle of backward."""

    start_worker = ImmediateDevice.start_worker  # type: ignore[assignment]


DEVICES: dict[str, Callable[[int], Device]] = {
    "immediate": lambda seed: ImmediateDevice(),
    "thread": lambda seed: ThreadDevice(),
    "deferred": lambda seed: DeferredDevice(),
    "simulated": SimulatedDevice,
}
"""By their seed, which the simulated one has."""


def layout_of(*tensors: Tensor, is_on_host: bool = True) -> FlatLayout[Any]:
    parameters = enumerate(map(nn.Parameter, tensors))
    return FlatLayout([ParameterState(one, row, f"p{row}", is_on_host=is_on_host) for row, one in parameters])


def devices_in_turn(name: str, *others: Callable[[], Device]) -> Any:
    """Return a fixture of this name: each of these devices, and two simulated ones that do things late and soon."""
    lazy = pytest.param(lambda: SimulatedDevice(1, 0.0), id="lazy")
    hasty = pytest.param(lambda: SimulatedDevice(2, 0.6), id="hasty")
    return pytest.fixture(params=[*others, lazy, hasty], name=name)(lambda request: request.param())


def end_thread(worker: Worker, *, with_job: bool = False) -> None:
    """Let a worker's thread end without a word, now or at its next job, which it takes along."""
    if with_job:
        worker._run = lambda work: sys.exit()  # type: ignore[method-assign]
        return
    worker._calls.put(sys.exit)
    worker._thread.join(60)
    assert not worker._thread.is_alive()


class FullDevice(SimulatedDevice):
    """A device that has no memory left when it is told so."""

    is_full = False  # for anything
    has_no_room = False  # for new values and state, but gradients can still be packed

    def empty(self, numel: int, dtype: torch.dtype, stream: Stream) -> Tensor:
        if self.is_full or self.has_no_room:
            raise torch.OutOfMemoryError("planted")
        return super().empty(numel, dtype, stream)

    def pack(self, *arguments: Any, **options: Any) -> Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("planted")
        return super().pack(*arguments, **options)


class PlantedError(RuntimeError):
    """What planted faults raise."""


def fail_at(
    patch: pytest.MonkeyPatch, owner: Any, name: str, at: int, error: BaseException, *, after: bool = False
) -> None:
    """Let the so-manyth call of a function raise, before it does anything or after it has done its work."""
    original, calls = getattr(owner, name), itertools.count(1)

    def failing(*arguments: Any, **options: Any) -> Any:
        is_the_one = next(calls) == at
        if is_the_one and not after:
            raise copy.copy(error)  # whose traceback would keep the arguments alive
        result = original(*arguments, **options)
        if is_the_one:
            raise copy.copy(error)
        return result

    patch.setattr(owner, name, failing)


def slow_down(patch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float) -> None:
    """Let each call of a function sleep first."""
    original = getattr(owner, name)

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return original(*arguments, **options)

    patch.setattr(owner, name, slow)


class RaiseInBackward(torch.autograd.Function):
    """The identity, whose backward raises an error like the one that it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        raise type(ctx.error)(*ctx.error.args)  # not itself: its traceback holds the graph, which holds it


def mlp(dtype: torch.dtype = torch.float32, width: int = 8, layers: int = 3) -> nn.Sequential:
    """Return the same small model at every call."""
    torch.default_generator.manual_seed(5)
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*blocks).to(dtype)


def batch(seed: int, dtype: torch.dtype = torch.float32, width: int = 8, rows: int = 4) -> Tensor:
    """Return inputs; those of one seed are always the same."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """Return a loss large enough that `max_grad_norm=1` clips some steps."""
    return 30 * (model(batch(seed, next(model.parameters()).dtype)) - 1).float().square().mean()


def adam(model: nn.Module, **options: Any) -> SpeculativeCPUAdam:
    """Return an optimizer with a learning rate so large that a parameter of the wrong step is seen at once."""
    return SpeculativeCPUAdam(model.parameters(), **{"lr": 0.05, "max_grad_norm": 20.0, **options})


def twins(make: Callable[[], nn.Module] = mlp, **options: Any) -> tuple[Any, Any, Any, Any]:
    model, twin = make(), make()
    return model, adam(model, **options), twin, adam(twin, **options)


def eager(optimizer: SpeculativeCPUAdam, model: nn.Module, **options: Any) -> OffloadScheduler:
    """Return a scheduler that speculates on every gradient alone, at once."""
    return OffloadScheduler(optimizer, model, **{"bucket_numel": 1, "device": ImmediateDevice(), **options})


def everything(model: nn.Module, optimizer: SpeculativeCPUAdam) -> dict[str, Any]:
    return {**state_bits(optimizer), "buffers": {name: buffer.tolist() for name, buffer in model.named_buffers()}}


def train(
    model: nn.Module, optimizer: SpeculativeCPUAdam, steps: range, loss: Callable[[nn.Module, int], Tensor] = loss_of
) -> None:
    for seed in steps:
        optimizer.zero_grad()
        loss(model, seed).backward()
        optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def overlapped(
    dtype: torch.dtype = torch.float32, *, steps: int = 0, max_grad_norm: float | None = 20.0, **options: Any
) -> Iterator[tuple[nn.Sequential, SpeculativeCPUAdam, OffloadScheduler]]:
    """Yield a small model, its optimizer, and a scheduler with these options, as `eager` makes it, after some steps."""
    optimizer = adam(model := mlp(dtype), max_grad_norm=max_grad_norm)
    with eager(optimizer, model, **options) as scheduler:
        train(model, optimizer, range(steps))
        yield model, optimizer, scheduler
