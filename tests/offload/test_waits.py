"""Every wait of the sources is needed: without it, programs on the simulated device see other values.

`support.taken_away` finds the waits by a rule, so that new ones are among them. One that no program notices is noticed
by a test of its own, or there is a reason why nobody could.
"""

import functools
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from offload.test_late_models import train, trained_late
from support.taken_away import Wait, all_waits, taken_away

RUNS, PROGRAMS = 2, 24
"""Runs without each wait, and the programs of each, of which one is to notice: as many as the ordinary tests train."""

REASONS = {
    "devices.flat JoinedTensor.tensor: self.arrived.synchronize()": (
        "readers have waited in TakenGradient.ready; this is for those of `pending` itself"
    ),
    "offload.buckets Bucketer.add: self._device.wait(Stream.CURRENT, made)": (
        "hooks run on the stream that made the gradient; only those of groups of FSDP2 are taken later, on another"
    ),
    "offload.pipeline Pipeline.drain: self._device.record(Stream.CURRENT).synchronize()": (
        "the worker waits for each copy itself; this only tells hidden from awaited time in the statistics"
    ),
    "state.resident ResidentStates.step: self._device.record(Stream.CURRENT)": (
        "steps of these programs run on the stream on which state comes home; another thread's would need it"
    ),
    "state.new_values NewValues.upload: device.record_stream(distant, Stream.UPLOAD)": (
        "publishing keeps the memory for a stream that has waited for the upload; this is for values that are dropped"
    ),
}
"""Why programs do not notice that a wait is missing."""

TRANSFERS, CUDA = "tests/offload/test_transfers.py", "tests/devices/test_cuda.py"
SIMULATED = "tests/devices/test_simulated.py"
RESIDENT, BUCKETS = "tests/state/test_resident_states.py", "tests/offload/test_buckets.py"
SHORT = "tests/offload/test_short_memory.py"
SAMPLES = "tests/offload/test_late_models.py::test_samples_wait_for_what_another_stream_publishes"
NOTICED_BY = {
    "state.new_values NewValues.follow: self.device.wait(Stream.CURRENT, self._published)": SAMPLES,
    "state.samples Samples._differing: table.new_values.follow()": SAMPLES,
    "offload.transfers Transfers._send_to_host: device.record_stream(host, Stream.DOWNLOAD)": TRANSFERS,
    "state.resident ResidentStates.bring_home: self._device.wait(Stream.CURRENT, self._updated)": RESIDENT,
    **dict.fromkeys(
        (
            "state.resident ResidentStates.bring_home: self._device.record(Stream.CURRENT).synchronize()",
            "state.resident ResidentStates.step: self._device.wait(Stream.CURRENT, self._device.record(Stream.UPLOAD))",
            "state.resident ResidentStates.step: self._device.record(Stream.UPLOAD)",
            "state.resident ResidentStates.step: self._device.record_stream(tensor, Stream.CURRENT)",
        ),
        RESIDENT,
    ),
    "offload.transfers Transfers._let_leave: arrived.synchronize()": SHORT,
    "offload.transfers Transfers._pack: self._let_leave(PACKED_UNDER_WAY)": SHORT,
    "offload.transfers Transfers._pack: self._let_leave(0)": SHORT,
    "offload.buckets Bucketer.add: self._device.record_stream(taken.pending, Stream.CURRENT)": BUCKETS,
    "devices.cuda CudaDevice._keep: tensor.record_stream(used_by)": CUDA,
    "devices.cuda CudaDevice.mark_ready: self.record(Stream.CURRENT)": CUDA,
    "devices.cuda CudaDevice.update: self._keep((step.gradient for step in steps), Stream.CURRENT)": CUDA,
    "devices.cuda CudaDevice.record: self._stream(stream).synchronize()": SIMULATED,
    "devices.cuda CudaDevice.wait: event.synchronize()": SIMULATED,
    "devices.pinned _settle: event.synchronize()": "tests/devices/test_pinned.py",
    "offload.transfers Transfers.round_taken: device.wait(Stream.CURRENT, made)": TRANSFERS,
    "offload.transfers Transfers.round_taken: device.record(Stream.CURRENT)": TRANSFERS,
    "offload.transfers Transfers.round_taken: made.synchronize()": TRANSFERS,
    "state.new_values NewValues.settle: self.device.record(Stream.CURRENT).synchronize()": TRANSFERS,
    "state.new_values NewValues.stage: self._staged.synchronize()": TRANSFERS,
    "state.new_values Shadow.sources: device.wait(Stream.UPLOAD, device.record(Stream.CURRENT))": TRANSFERS,
    "state.new_values Shadow.sources: device.record(Stream.CURRENT)": TRANSFERS,
    "state.new_values Shadow.put: self.new_values.device.wait(Stream.CURRENT, arrived)": TRANSFERS,
    "state.new_values Patch.send: device.wait(Stream.UPLOAD, device.record(Stream.CURRENT))": TRANSFERS,
    "state.new_values Patch.send: device.record(Stream.CURRENT)": TRANSFERS,
}
"""Tests that notice it, or their files, of waits that programs here seldom come by, or not in such a way."""

WAITS = {str(wait): wait for wait in all_waits()}
ROOT = Path(__file__).parents[2]


@functools.cache
def expected(seed: int) -> list[Any]:
    """Return what a program sees on the host."""
    return train(random.Random(seed), None)


def is_noticed(wait: Wait, seeds: Iterable[int]) -> bool:
    """Whether one of the programs sees something else, or fails."""
    for seed in seeds:
        wanted = expected(seed)
        with taken_away(wait):
            try:
                seen = trained_late(seed)
            except Exception:  # whatever a program runs into
                return True
        if seen != wanted:
            return True
    return False


def test_the_rule_finds_waits_events_and_memory_that_is_kept():
    assert {name for name in (*REASONS, *NOTICED_BY) if name not in WAITS} == set()
    assert {wait.module for wait in WAITS.values()} > {"superadam.devices.cuda", "superadam.offload.transfers"}
    kinds = (".wait(", ".record(", "record_stream(", ".synchronize()", "hold_until(", "wait_event(", "_keep(")
    assert all(any(kind in name for name in WAITS) for kind in kinds)


@pytest.mark.parametrize(
    "name",
    [
        "devices.cuda CudaDevice.record_stream: self._keep([buffer], stream)",
        "offload.transfers Transfers._send_to_host: device.record(Stream.DOWNLOAD)",
        "offload.transfers Transfers._send_to_host: device.wait(Stream.DOWNLOAD, device.record(Stream.CURRENT))",
    ],
)
def test_a_sample_of_the_waits_is_noticed_by_a_few_programs(name):
    assert is_noticed(WAITS[name], range(3))


@pytest.mark.deep
@pytest.mark.parametrize("name", [name for name in WAITS if name not in REASONS and name not in NOTICED_BY])
def test_each_wait_is_noticed_in_at_least_half_of_the_runs(name):
    runs = [is_noticed(WAITS[name], range(run * PROGRAMS, (run + 1) * PROGRAMS)) for run in range(RUNS)]
    assert sum(runs) >= RUNS / 2


@pytest.mark.deep
@pytest.mark.subprocess
@pytest.mark.parametrize("name", NOTICED_BY)
def test_the_others_are_noticed_by_tests_of_their_own(name):
    program = (
        "import pytest, sys\n"
        "from support.taken_away import all_waits, taken_away\n"
        f"(wait,) = [one for one in all_waits() if str(one) == {name!r}]\n"
        f"with taken_away(wait): sys.exit(pytest.main(['-x', '-p', 'no:xdist', {NOTICED_BY[name]!r}]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": "tests"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout.decode()
