"""A program: lets one allocation after another fail while steps are made, and prints what each of them left behind.

It is started with `failing_allocations.c` preloaded, which lets torch, numpy and the kernels find no memory. What is
counted are allocations for tensors, of the kernels, and of numpy from `NUMPY_BYTES` on: numpy does not survive that
some of its smaller ones fail. A simulated device answers with torch's error of a device, and what it runs late counts
as memory-free.
"""

import argparse
import ctypes
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from support.overlap import DeferredDevice, ImmediateDevice, ThreadDevice, batch, mlp
from support.visible import shown, state_bits
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices import Device
from superadam.devices.worker import WorkerError
from superadam.kernels.torch_private import is_short_of_memory
from superadam.offload.pipeline import Pipeline
from superadam.testing import SimulatedDevice

NUMPY_BYTES = 128
LIBRARIES = {"libc10.so": 0, "_multiarray_umath": NUMPY_BYTES, "superadam/_kernels": 0}
"""Parts of paths, and the least bytes that count."""
FOREVER = 1 << 40
LATER = 3
"""Steps before those whose allocations fail."""


class Allocations:
    """The preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.allocations_watch.argtypes = [ctypes.c_size_t] * 3
        self._library.allocations_fail.argtypes = [ctypes.c_long] * 2
        self._library.allocations_seen.restype = ctypes.c_long
        self._is_armed = False
        found = set()
        with open("/proc/self/maps") as file:
            for words in map(str.split, file):
                for name, least in LIBRARIES.items():
                    if "x" in words[1] and len(words) > 5 and name in words[5]:
                        begin, end = (int(word, 16) for word in words[0].split("-"))
                        self._library.allocations_watch(begin, end, least)
                        found.add(name)
        assert found == set(LIBRARIES), found

    def fail(self, first: int, count: int) -> None:
        """Let that many allocations fail, from that one on, of those that are counted from now on."""
        self._library.allocations_fail(first, first + count)

    @property
    def seen(self) -> int:
        return int(self._library.allocations_seen())

    @contextmanager
    def counted(self, armed: bool = True) -> Iterator[None]:
        """Count inside, or not."""
        before, self._is_armed = self._is_armed, armed
        self._library.allocations_arm(armed)
        try:
            yield
        finally:
            self._is_armed = before
            self._library.allocations_arm(before)


allocations = Allocations()


@contextmanager
def _as_of_device() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise torch.OutOfMemoryError("planted: the device has no memory") from error


class FullDevice(SimulatedDevice):
    """A simulated device whose allocations fail as others do."""

    def __init__(self, cores: int = 1) -> None:
        super().__init__(7)
        self.idle_cores = lambda: cores  # type: ignore[method-assign]
        run_one = self.accelerator.run_one

        def uncounted() -> bool:
            with allocations.counted(False):
                return run_one()

        self.accelerator.run_one = uncounted  # type: ignore[method-assign]

    def empty(self, *arguments: Any) -> Tensor:
        with _as_of_device():
            return super().empty(*arguments)

    def pack(self, *arguments: Any) -> Tensor:
        with _as_of_device():
            return super().pack(*arguments)


@dataclass(frozen=True)
class Case:
    """One way of training.

    Attributes:
        device: makes the scheduler's; None for no scheduler.
        is_dense: whether weights are; others are staged everywhere.
        speculates: by hand, without a scheduler.
        micro: batches of a step.
        layers, width: of the model; numpy keeps memory for small arrays, and the kernels need none for few parameters.
        is_patched: whether steps are clipped so steadily, and `lr` is so small, that speculated values are patched.
        holds_state: the program has `optimizer.state`, so that each step is published at once.
        has_first: whether allocations of a first step are tried, too.
    """

    dtype: torch.dtype = torch.bfloat16
    device: Callable[[], Device] | None = None
    is_dense: bool = True
    speculates: bool = False
    amsgrad: bool = False
    micro: int = 1
    layers: int = 6
    width: int = 8
    has_first: bool = True
    is_patched: bool = False
    holds_state: bool = False
    sum_dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)


PATCHED: dict[str, Any] = {"is_patched": True, "has_first": False}
MANY: dict[str, Any] = {"layers": 130, "width": 2, "has_first": False}

CASES = {
    "many": Case(**MANY),
    "many, by hand, not dense": Case(is_dense=False, speculates=True, **MANY),
    "plain fp32": Case(torch.float32),
    "plain bf16": Case(amsgrad=True),
    "plain not dense": Case(is_dense=False),
    "plain, state is held": Case(holds_state=True),
    "simulated, kept, state is held": Case(device=FullDevice, holds_state=True, options={"gpu_buckets": 2}),
    "by hand": Case(speculates=True),
    "by hand, not dense, amsgrad": Case(is_dense=False, speculates=True, amsgrad=True),
    "thread": Case(device=ThreadDevice),
    "immediate, not dense": Case(device=ImmediateDevice, is_dense=False),
    "deferred, fp32": Case(torch.float32, DeferredDevice),
    "simulated": Case(device=FullDevice),
    "simulated, fp32, amsgrad": Case(torch.float32, FullDevice, amsgrad=True),
    "simulated, not dense": Case(device=FullDevice, is_dense=False),
    "simulated, all in step()": Case(device=lambda: FullDevice(0)),
    "simulated, narrow link": Case(torch.float32, FullDevice, options={"transfer_dtype": torch.bfloat16}),
    "simulated, kept": Case(device=FullDevice, options={"gpu_buckets": 2}),
    "simulated, kept, not dense, amsgrad": Case(
        device=FullDevice, is_dense=False, amsgrad=True, options={"gpu_buckets": 2}
    ),
    "simulated, all kept": Case(device=FullDevice, options={"gpu_buckets": 100}),
    "patched, immediate": Case(device=ImmediateDevice, **PATCHED),
    "patched, thread, not dense, amsgrad": Case(device=ThreadDevice, is_dense=False, amsgrad=True, **PATCHED),
    "patched, simulated": Case(device=FullDevice, **PATCHED),
    "patched, simulated, fp16, large": Case(torch.float16, FullDevice, width=40, **PATCHED),
    "patched, simulated, some kept": Case(device=FullDevice, options={"gpu_buckets": 2}, **PATCHED),
    "accumulated": Case(device=FullDevice, micro=2),
    "accumulated in fp32": Case(device=FullDevice, micro=2, sum_dtype=torch.float32),
    "accumulated in fp32, immediate": Case(device=ImmediateDevice, micro=2, sum_dtype=torch.float32),
}


class Training:
    """A small model and its optimizer; every step is made of the same batches for the same number."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = mlp(case.dtype, case.width, case.layers)
        if not case.is_dense:
            for one in self.model:
                if isinstance(one, nn.Linear):
                    one.weight = nn.Parameter(torch.stack([one.weight.detach()] * 2, -1)[..., 0])
        lr, limit = (1e-6, 1e-3) if case.is_patched else (0.05, 20.0)
        self.optimizer = SpeculativeCPUAdam(self.model.parameters(), lr=lr, max_grad_norm=limit, amsgrad=case.amsgrad)
        self.scheduler: OffloadScheduler | None = None
        self._open = ExitStack()
        if case.device is not None:
            options = {"bucket_numel": 200, "gpu_buckets": 0, **case.options}
            self.scheduler = self._open.enter_context(
                OffloadScheduler(self.optimizer, self.model, device=case.device(), **options)
            )
        else:
            self.optimizer._binding.bound(self.optimizer.param_groups).table.new_values.staged_numel = 200
        self.held = self.optimizer.state if case.holds_state else None

    def backward(self, number: int, factor: float) -> None:
        self.optimizer.zero_grad()
        if self.scheduler is None:  # which does not look at where gradients come from
            generator = torch.Generator().manual_seed(number)
            for one in self.model.parameters():
                one.grad = (torch.randn(one.shape, generator=generator) * factor).to(one.dtype)
            return
        if "gpu_buckets" in self.case.options:
            self.scheduler.place(gpu_buckets=self.case.options["gpu_buckets"])  # fewer after a failure
        if number % 2:
            self.scheduler._transfers.is_short = False
        for micro in range(self.case.micro):
            is_last = micro == self.case.micro - 1
            with nullcontext() if is_last else self.scheduler.accumulate(self.case.sum_dtype):
                x = batch(0 if self.case.is_patched else 10 * number + micro, self.case.dtype, self.case.width)
                size = factor * (1 + 0.1 * math.sin(number)) if self.case.is_patched else factor
                ((self.model(x) - 1).float().square().mean() * size).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        if self.case.speculates:
            self.optimizer.speculate()
        self.optimizer.step()

    def step_of(self, number: int, factor: float) -> None:
        self.backward(number, factor)
        self.step()

    def close(self) -> None:
        self._open.close()


_send = Pipeline.send


def _counted_send(pipeline: Pipeline, *arguments: Any) -> None:
    with allocations.counted(bool(_is_disturbed)):
        _send(pipeline, *arguments)


Pipeline.send = _counted_send  # type: ignore[method-assign]
_is_disturbed: list[bool] = []

OFTEN = {"accepted": 0.5, "clipped": 500.0}
STEADY = {"patched": 0.5}
"""Factors on the loss."""


@dataclass
class Report:
    """What was found of one case."""

    name: str
    tried: int = 0
    raised: int = 0
    patched: int = 0


def _shown_and_created(optimizer: SpeculativeCPUAdam) -> Any:
    """Return what `shown` does, and which parameters have state, without a look at it."""
    transaction = optimizer._binding._transaction
    states = [] if transaction is None else transaction.table.states
    return shown(optimizer), [state.row for state in states if state.has_state]


class Twins:
    """A training that is disturbed, and one that is not."""

    def __init__(self, case: Case, report: Report) -> None:
        self.report = report
        self._ours, self._other = Training(case), Training(case)
        self.number = 0

    def calm(self, steps: int, factor: float = OFTEN["accepted"]) -> None:
        for _ in range(steps):
            for one in (self._ours, self._other):
                one.step_of(self.number, factor)
            self.number += 1

    def disturbed(self, first: int, count: int, factor: float) -> None:
        """Make a step in which allocations fail, if there are so many."""
        ours = self._ours
        self._other.step_of(self.number, factor)
        before, patched = _shown_and_created(ours.optimizer), ours.optimizer.statistics.patched
        allocations.fail(first, count)
        _is_disturbed.append(True)
        raised: Exception | None = None
        has_gradients = False
        try:
            ours.backward(self.number, factor)
            has_gradients = True
            with allocations.counted():
                ours.step()
        except Exception as error:
            raised = error
        finally:
            _is_disturbed.clear()
        is_failing = allocations.seen > first
        self.report.patched += ours.optimizer.statistics.patched - patched
        self.report.tried += is_failing
        what = f"{self.report.name}, allocations {first} to {first + count}, factor {factor}, step {self.number}"
        if raised is not None:
            self.report.raised += 1
            cause = raised.__cause__ if isinstance(raised, WorkerError) else raised
            is_planted = cause is not None and is_short_of_memory(cause) and is_failing and has_gradients
            assert is_planted, f"{what}: {raised!r}"
            now = _shown_and_created(ours.optimizer)
            assert now == before, f"{what}: parameters had changed when {raised!r} was raised"
            ours.step()
        self.number += 1

    def check(self, when: str, *, wholly: bool = True) -> None:
        """Check that the bits are those of the undisturbed training: parameters, or everything, which commits it."""
        ours, theirs = ((state_bits if wholly else shown)(one.optimizer) for one in (self._ours, self._other))
        assert ours == theirs, f"{self.report.name}, {when}: other bits than undisturbed"

    def close(self) -> None:
        self._ours.close()
        self._other.close()


def examined(name: str, only: int | None) -> Report:
    """Return what came of every allocation of a first and of later steps, or of one of them in each."""
    report, case = Report(name), CASES[name]
    for count in (1, FOREVER) if only is None else [(1, FOREVER)[only % 2]]:
        for first in _until_none_fails(report, only) if case.has_first else ():
            twins = Twins(case, report)
            twins.disturbed(first, count, OFTEN["accepted"])
            twins.check(f"first step, {first}, {count}")
            twins.calm(1)
            twins.check(f"after first step, {first}, {count}")
            twins.close()
        twins = Twins(case, report)
        twins.calm(LATER)
        for kind, factor in (STEADY if case.is_patched else OFTEN).items():
            for first in _until_none_fails(report, only):
                twins.disturbed(first, count, factor)
                twins.check(f"{kind}, {first}, {count}", wholly=only is not None or twins.number % 5 == 0)
                twins.calm(0 if kind == "accepted" else 2)
        twins.check("at the end")
        twins.close()
    return report


def _until_none_fails(report: Report, only: int | None) -> Iterator[int]:
    """Yield numbers of allocations until a step has fewer, or one."""
    if only is not None:
        yield only
        return
    for first in itertools.count():
        before = report.tried
        yield first
        if report.tried == before:
            return


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for index, name in enumerate(CASES):
        report = examined(name, None if chosen.all else 5 * index % 24)
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
