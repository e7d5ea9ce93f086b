"""What a scheduler counts adds up, and its trace is a file that Chrome and Perfetto read."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload.test_programs import PROGRAMS
from support import overlap
from support.overlap import adam, batch, eager, fail_at, loss_of, mlp, overlapped, slow_down, train
from support.programs import Program, Run, Setting, first_difference, in_turn, run_in
from torch import nn

from superadam.devices import Device
from superadam.devices.flat import FlatLayout
from superadam.devices.worker import WorkerError
from superadam.offload import trace
from superadam.offload.statistics import OverlapStatistics
from superadam.offload.trace import TRACKS, Span, Trace
from superadam.state.parameter import ParameterState
from superadam.step.transaction import Transaction
from superadam.testing import SimulatedDevice

SECONDS = st.one_of(st.just(0.0), st.floats(0, 1e6))


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_hidden_share_is_that_of_all_work(worker: float, waited: float, hooks: float, steps: float) -> None:
    counts = OverlapStatistics(worker_seconds=worker, waited_seconds=waited, hook_seconds=hooks, step_seconds=steps)
    assert 0.0 <= counts.hidden_share <= 1.0
    assert (counts.hidden_share == 0.0) or worker > waited
    seen = waited + hooks + steps
    assert counts.work_seconds == pytest.approx(max(worker, waited) + hooks + steps)
    assert counts.hidden_share * counts.work_seconds == pytest.approx(counts.work_seconds - seen, abs=1e-9)
    if worker and not seen:
        assert counts.hidden_share == 1.0


@contextmanager
def counted_speculation() -> Iterator[list[int]]:
    """Yield the number of parameters that were speculated on for each call; what is repeated has begun before."""
    begun: list[int] = []
    speculate = Transaction.speculate

    def count(transaction: Transaction, pending: Any, *arguments: Any, **options: Any) -> None:
        repeated = {piece for piece, record in pending.items() if piece.pending is record}
        speculate(transaction, pending, *arguments, **options)
        begun.append(len({one for one, record in pending.items() if record.slot and one not in repeated}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transaction, "speculate", count)
        yield begun


NUMEL = 64 * 128
"""Of buckets in which no parameter is cut."""
WHOLE = [
    Setting("immediate", torch.bfloat16, overlap.ImmediateDevice, 10**6, patches=True),
    Setting("thread", torch.bfloat16, overlap.ThreadDevice, 10**6, clips=True),
    Setting("simulated", torch.bfloat16, lambda: SimulatedDevice(6), NUMEL, gpu_buckets=0, patches=True),
    Setting("kept-immediate", torch.bfloat16, lambda: overlap.EagerSimulatedDevice(1, 1.0), NUMEL, gpu_buckets=10**6),
    Setting("kept-lazy", torch.float32, lambda: SimulatedDevice(2, 0.0), NUMEL, gpu_buckets=2, clips=True),
    Setting("kept-hasty", torch.bfloat16, lambda: SimulatedDevice(3, 0.8), NUMEL, gpu_buckets=1, clips=True),
    Setting("kept-thread", torch.float64, overlap.KeepingDevice, NUMEL, gpu_buckets=10**6, clips=True),
]


@in_turn(PROGRAMS, WHOLE)
def test_every_speculation_ends_in_one_way(program: Program, settings: list[Setting]) -> None:
    """It is accepted, respeculated or dropped, and the bits are those of the plain run."""
    for setting in settings:
        run = Run(setting, program.limit)
        with counted_speculation() as begun:
            seen = run_in(program, setting, run)
        assert first_difference(seen, run_in(program, setting.plain), program.ignores) is None
        counts = [optimizer.statistics for optimizer in run.optimizers]
        assert sum(one.accepted + one.respeculated + one.dropped for one in counts) == sum(begun)
        for one in counts:
            assert one.steps == one.committed + one.clipped + one.skipped
            assert one.patched <= one.accepted
            assert (one.patched_elements > 0) <= (one.patched > 0)
        for ended in [scheduler.statistics for scheduler in run.schedulers]:
            assert sum(begun) >= ended.speculated_buckets
            assert 0.0 <= ended.hidden_share <= 1.0
            assert ended.uncertain_elements <= ended.interval_elements


@pytest.mark.parametrize("device_class", [overlap.ImmediateDevice, overlap.ThreadDevice])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_speculation_before_a_failure_of_the_worker_counts(at: int, device_class: type[Device]) -> None:
    how = {"steps": 2, "max_grad_norm": math.inf, "device": device_class()}
    with overlapped(torch.bfloat16, **how) as (model, optimizer, _):
        counts = optimizer.statistics
        before = counts.accepted
        with pytest.MonkeyPatch.context() as patch:
            fail_at(patch, Transaction, "speculate", at, overlap.PlantedError())
            loss_of(model, 2).backward()
            with pytest.raises(WorkerError):
                optimizer.step()
        optimizer.step()
        assert (counts.accepted - before, counts.dropped) == (at - 1, 0)  # the others were never speculated on


@pytest.mark.parametrize("device_class", [overlap.ThreadDevice, overlap.DeferredDevice])
def test_work_in_the_step_is_not_hidden(device_class: type[Device], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is its own master is updated there."""
    slow_down(monkeypatch, Transaction, "step", 0.02)
    begin = time.perf_counter()
    with overlapped(steps=3, device=device_class()) as (_, _, scheduler):
        counts = scheduler.statistics
        assert 0.06 <= counts.step_seconds <= time.perf_counter() - begin
        assert counts.hidden_share <= counts.worker_seconds / (counts.worker_seconds + 0.06) < 1.0


def flat_bytes(parameters: list[nn.Parameter], dtype: torch.dtype | None = None) -> int:
    """Return what parameters, or gradients of `dtype`, take in one flat buffer for each dtype."""
    by_dtype: dict[torch.dtype, list[ParameterState]] = {}
    for row, parameter in enumerate(parameters):
        by_dtype.setdefault(dtype or parameter.dtype, []).append(ParameterState(parameter, row, ""))
    return sum(FlatLayout(states).numel * one.itemsize for one, states in by_dtype.items())


@pytest.mark.parametrize("link", [None, torch.float32], ids=str)
@pytest.mark.parametrize("bucket_numel", [1, 10**6])
def test_bytes_are_those_of_flat_buffers(bucket_numel: int, link: torch.dtype | None) -> None:
    """Whether values were speculated or made with the verdict, each parameter comes up once in a step."""
    model = mlp()
    model[0].to(torch.bfloat16)
    optimizer = adam(model, max_grad_norm=math.inf, lr=1e-3)
    device = SimulatedDevice(0, 0.5)
    with eager(optimizer, model, device=device, bucket_numel=bucket_numel, transfer_dtype=link or "auto") as scheduler:
        statistics = scheduler.statistics
        parameters = list(model.parameters())
        buckets = [parameters] if bucket_numel > 1 else [[parameter] for parameter in parameters]
        down = sum(flat_bytes(bucket, link) for bucket in buckets)
        up = sum(flat_bytes(bucket) for bucket in buckets)

        def step(seed: int, factor: float = 1.0) -> tuple[int, int]:
            before = statistics.downloaded_bytes, statistics.uploaded_bytes
            shown = model[1:](model[0](batch(seed, torch.bfloat16)).float())
            (30 * factor * (shown - 1).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            return statistics.downloaded_bytes - before[0], statistics.uploaded_bytes - before[1]

        for seed in range(4):
            assert step(seed) == (down, flat_bytes(parameters) if seed == 0 else up)
        optimizer.max_grad_norm = 1e-3
        moved = step(4)
        assert moved[0] == down
        patches = 10 * optimizer.statistics.patched_elements  # values, and where they go
        assert up <= moved[1] <= flat_bytes(parameters) + up + patches
        optimizer.max_grad_norm = math.inf
        assert step(5, math.nan)[0] == down


@given(
    st.lists(
        st.tuples(st.text(), st.sampled_from(TRACKS), st.floats(0, 1e6), st.floats(0, 1e3), st.floats()), max_size=6
    )
)
def test_spans_are_complete_with_times_in_microseconds_from_the_first_and_any_value_is_json(tmp_path_factory, drawn):
    one = Trace()
    for name, track, begin, length, value in drawn:
        one.add(Span(name, track, begin, begin + length, {"value": value}))
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    one.write(path)
    events = json.loads(path.read_text(), parse_constant=pytest.fail)["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(tracks.values()) == list(TRACKS)
    spans = [event for event in events if event["ph"] == "X"]
    first = min((begin for _, _, begin, _, _ in drawn), default=0.0)
    for span, (name, track, begin, length, value) in zip(spans, drawn, strict=True):
        times = {"ts": (begin - first) * 1e6, "dur": ((begin + length) - begin) * 1e6}
        args = {"value": value if math.isfinite(value) else str(value)}
        assert span.items() >= {"name": name, **times, "args": args}.items()
        assert tracks[span["tid"]] == track
        assert "pid" in span


def test_the_oldest_spans_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "SPANS_KEPT", 3)
    one = Trace()
    for i in range(5):
        one.add(Span(str(i), "worker", i, i + 1))
    assert [span.name for span in one.spans] == ["2", "3", "4"]


def test_a_profiler_shows_the_parts_of_the_optimizer() -> None:
    with (
        overlapped(steps=2, max_grad_norm=1.0, device=overlap.ThreadDevice()) as (model, optimizer, _),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
    ):
        train(model, optimizer, range(2, 4))
        optimizer.state_dict()
    assert {"superadam: step", "superadam: commit"} <= {event.name for event in profiler.events()}
