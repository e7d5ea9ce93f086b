"""The events of a step agree with what the scheduler was measured to take, and go the way that rates do."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from superadam.cli.plan.rates import seconds_of
from superadam.cli.plan.schedule import buckets_of, parts_of
from superadam.offload.placement import Placement
from superadam.plan import machines
from superadam.plan.events import Bucket, Clipping, Passes, Rates, Work, simulate


def rows_of(pattern: str) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, float]]]:
    """Yield rows and sides of stored results of bench/pace.py that use all threads."""
    for path in sorted((Path(__file__).resolve().parents[2] / "bench" / "results").glob(pattern)):
        found = json.loads(path.read_text())
        for row in found["rows"]:
            for side in [*row["placements"], row["auto"]]:
                if int(side["placement"].split()[2]) == found["environment"]["threads"]:
                    yield row, side, found["rates"]


def passes_by_bytes(row: dict[str, Any]) -> Passes:
    """Return the times that a plan takes from bandwidth and arithmetic; the latter is 0 where the row has none.

    The bandwidth is that of Adam by itself, and the arithmetic that of the pass with the fewest bytes.
    """
    assumed = machines.read("h100")
    bandwidth = 34 * row["parameters"] / row["adam_seconds"]  # of 30 bytes in the fused pass, and 4 in copies
    rates = {"cpu_bandwidth": bandwidth, "cpu_cores": 1.0, "cpu_clock": 1.0}
    rates["cpu_cycles"] = row.get("passes", {}).get("speculate", 0.0)
    here = {name: replace(assumed.rates[name], value=value) for name, value in rates.items()}
    return seconds_of(replace(assumed, **here))


def predicted(row: dict[str, Any], side: dict[str, Any], rates: dict[str, float], passes: Passes) -> float:
    """Return the seconds of an iteration by events.

    Passes use all cores, so that the Python of the training thread takes one of them from a pass.
    """
    total, layers = row["parameters"], row["layers"]
    kept, size, threads = side["placement"].split()
    numel = int(float(size.removesuffix("Mi")) * (1 << 20))
    parameters = [(torch.empty(total // layers, dtype=torch.bfloat16, device="meta"), 1 / layers)] * layers
    buckets = buckets_of(parts_of(parameters, numel), Placement(int(kept), numel, None, int(threads)))
    clipping = Clipping()
    if row.get("clipped_share", 0.0) > 0.5:
        clipping = Clipping(1.0, is_predicted=side["accepted"] > 0.1, missed=side["redone"])
    work = Work(buckets, row["forward_seconds"], row["backward_seconds"], bucket_numel=numel, clipping=clipping)
    python = 3e-4 + (side.get("bucket_seconds") or 0.0) / int(threads)
    return simulate(Rates(rates["memory"], rates["download"], rates["upload"], passes, python, 9e-5), work).seconds


def median_error(pattern: str, least: float, most: float = 1e9, *, is_measured: bool = False) -> float:
    errors = []
    for row, side, rates in rows_of(pattern):
        if least <= row["ratio"] < most and (not is_measured or "passes" in row):
            passes = Passes(**row["passes"]) if is_measured else passes_by_bytes(row)
            is_clipped = row.get("clipped_share", 0.0) > 0.5 or not side["seconds"]
            seconds = side["typical_seconds"] if is_clipped else side["seconds"]["median"]
            errors.append(abs(predicted(row, side, rates, passes) / seconds - 1))
    assert len(errors) >= 9
    return statistics.median(errors)


def test_events_agree_with_the_scheduler() -> None:
    """On each machine whose results are stored; nothing is fitted."""
    for machine in ("epyc-2", "xeon-2", "xeon-cascade-lake", "xeon-ice-lake"):
        assert median_error(f"{machine}*-pace.json", 1.0) < 0.03, machine
        assert median_error(f"{machine}*-pace.json", 0.0, 1.0) < 0.12, machine
        assert median_error(f"{machine}*pace-clipped*.json", 0.0) < 0.06, machine
    for machine in ("xeon-2", "xeon-cascade-lake", "xeon-ice-lake"):  # whose passes were measured
        assert median_error(f"{machine}*-pace.json", 1.0, is_measured=True) < 0.03, machine
        assert median_error(f"{machine}*-pace.json", 0.0, 1.0, is_measured=True) < 0.06, machine


RATES = Rates(3e12, 50e9, 50e9, Passes(2e-11, 2e-10, 3e-10, 4e-10, 3.8e-10), 3e-4, 9e-5, 1e11)


@st.composite
def works(draw: st.DrawFn) -> Work:
    count, numel = draw(st.integers(2, 40)), draw(st.sampled_from([1 << 20, 1 << 24]))
    resident = draw(st.integers(0, count - 1))
    buckets = [Bucket(numel, (index + 1) / count, index >= count - resident) for index in range(count)]
    backward = draw(st.floats(0.05, 4.0)) * 4e-10 * numel * count
    room = draw(st.sampled_from([None, 0.0, float(numel * count)])) if resident == 0 else None
    clipping = Clipping(draw(st.sampled_from([0.0, 0.3, 1.0])), is_predicted=draw(st.booleans()))
    sizes = {"micro_batches": draw(st.integers(1, 3)), "bucket_numel": numel}
    return Work(buckets, backward / 3, backward, **sizes, room=room, clipping=clipping)


def a_bucket(rates: Rates, work: Work) -> float:
    """Return the work of one bucket: an early commit may hold up one that arrives just then."""
    each = max(rates.passes.fused, rates.passes.commit) * work.clipping.test * 2 + 2 / rates.download + 2 / rates.upload
    return each * work.bucket_numel + 2 * rates.worker_per_bucket


@given(work=works(), name=st.sampled_from(["memory", "download", "upload", "passes"]), factor=st.floats(1.01, 3.0))
def test_faster_rates_make_no_step_longer(work: Work, name: str, factor: float) -> None:
    if name == "passes":
        faster = replace(RATES, passes=Passes(*(value / factor for value in astuple(RATES.passes))))
    else:
        faster = replace(RATES, **{name: factor * getattr(RATES, name)})
    assert simulate(faster, work).seconds <= simulate(RATES, work).seconds + a_bucket(RATES, work)


def test_each_share_of_clipped_steps_costs_something() -> None:
    work = Work([Bucket(1 << 24, 1.0)] * 4, 0.02, 0.02)
    clippings = map(Clipping, (0, 0.02, 0.2, 0.25, 0.97, 1))
    seconds = [simulate(RATES, replace(work, clipping=clipping)).seconds for clipping in clippings]
    assert seconds == sorted({*seconds})


@given(work=works(), factor=st.floats(0.1, 0.95))
def test_fewer_tokens_never_raise_tokens_per_second(work: Work, factor: float) -> None:
    fewer = replace(work, forward=factor * work.forward, backward=factor * work.backward)
    assert factor / (simulate(RATES, fewer).seconds + a_bucket(RATES, work)) <= 1 / simulate(RATES, work).seconds


@given(work=works())
def test_no_step_is_shorter_than_the_model_or_its_copies(work: Work) -> None:
    step = simulate(RATES, work)
    leaving = sum(one.numel for one in work.buckets if not one.is_resident)
    assert step.seconds >= step.clock * (1 - 1e-9)
    assert step.seconds >= work.size * leaving / RATES.download * (1 - 1e-9)
    assert step.hidden == pytest.approx(max(0.0, 1 - (step.seconds - step.clock) / step.adam), abs=1e-9)
    assert min(step.waited, step.python, step.updated, step.published, step.stalled) >= 0


def test_buckets_are_cut_as_the_scheduler_cuts() -> None:
    """A tensor larger than a bucket sends what has begun; the last pieces stay."""
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((64, 64), (300, 4096), (128,))]
    parts = parts_of([(one, 1 / 3) for one in tensors], 1 << 19)
    each = 409_600
    assert [part.shape.numel() for part in parts] == [4096, each, each, each, 128]
    assert [one.numel for one in buckets_of(parts, Placement(0, 1 << 19, None, 1))] == [4096 + 2 * each, each, 128]
    kept = buckets_of(parts, Placement(1, 1 << 19, None, 1))
    assert [one.numel for one in kept if not one.is_resident] == [4096 + each]
    assert [one.numel for one in kept if one.is_resident] == [2 * each, 128]
