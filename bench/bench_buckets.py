"""CPU time of the training thread in backward and step, which it spends in Python: the model alone, and with buckets.

Time in the device's own methods does not count, because a GPU's driver would take another.
"""

from __future__ import annotations

import contextlib
import itertools
import time

import pytest
from measures.paced_device import H200, PacedDevice
from measures.timed_model import Gradients, TimedModel, without_samples
from pytest_benchmark.fixture import BenchmarkFixture

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.devices import Stream

BUCKETS, NUMEL = 64, 64 * 1024
ROUNDS, WARM_UPS = 21, 4
PARTS, BUCKETS_THAT = ("backward", "step"), ("travel", "stay")
SECONDS_OF_BACKWARD = 0.2  # long enough for the worker

devices: list[PacedDevice] = []


def own_time() -> float:
    """Return the CPU seconds of this thread, without those of the devices."""
    return time.thread_time() - sum(device.own_seconds for device in devices)


@pytest.mark.benchmark(timer=own_time)
@pytest.mark.parametrize("tensors", [1, 3, 9])
@pytest.mark.parametrize(("part", "where"), [("backward", "no buckets"), *itertools.product(PARTS, BUCKETS_THAT)])
def test_training_thread(benchmark: BenchmarkFixture, part: str, where: str, tensors: int) -> None:
    gradients = Gradients([NUMEL] * BUCKETS * tensors)
    model = TimedModel(gradients)
    device = model.device = PacedDevice(H200, constants=gradients.sets)
    devices.append(device)
    model.forward_seconds, model.backward_seconds = 0.0, SECONDS_OF_BACKWARD
    optimizer = SpeculativeCPUAdamW(model.parameters(), max_grad_norm=1e9)
    kept = BUCKETS if where == "stay" else 0
    options = {"bucket_numel": tensors * NUMEL, "gpu_buckets": kept, "num_threads": 1, "device": device}
    scheduler = contextlib.nullcontext() if where == "no buckets" else OffloadScheduler(optimizer, model, **options)

    def begin() -> object:
        optimizer.zero_grad()
        device.record(Stream.CURRENT).synchronize()
        return model()

    def to_backward() -> tuple[tuple[object], dict[str, object]]:
        optimizer.step()
        return (begin(),), {}

    def to_step() -> None:
        begin().backward()  # type: ignore[attr-defined]

    benchmark.group = f"{part}, {BUCKETS} buckets of {tensors}"
    with without_samples(), scheduler:
        if part == "backward":
            how = {"target": lambda loss: loss.backward(), "setup": to_backward}
        else:
            how = {"target": optimizer.step, "setup": to_step}
        benchmark.pedantic(**how, rounds=ROUNDS, warmup_rounds=WARM_UPS)
        benchmark.extra_info["us per bucket"] = 1e6 * benchmark.stats["median"] / BUCKETS
        device.constants.clear()
