"""How fast models train with each optimizer, and what memory that takes.

Owns the models, batch sizes and the way of timing. Each optimizer runs in a process of its own, so that peaks of memory
are its own, and one that does not fit takes no other with it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gpucheck.findings import Context, Finding, Limit, Outcome
from gpucheck.programs import MARK, Done, measuring, tell
from gpucheck.sides import ALONE, OVERLAPPED, PLAIN, SIDES, Side
from superadam.cli.train.device import moved, wait_for
from superadam.cli.train.memory import peak_device_bytes, peak_host_bytes
from superadam.cli.train.model import build_model, next_byte_loss
from superadam.cli.train.presets import BYTE_VALUES, PRESETS, Shape
from superadam.cli.train.settings import Settings

WARM_UPS = 5
"""Untimed steps at each batch size: the first touches memory, two are tried out by superadam, one moves state."""

FEWEST, MOST = 3, 15
"""Timed steps at each batch size; their median counts."""

REHEARSED = dataclasses.replace(
    PRESETS["10m"].shape, name="rehearsal", vocabulary=256, width=16, layers=1, head_width=4, feed_forward=32
)

KILLED = -9
"""Status of a process that the system killed."""

_LEAST_SECONDS = 15.0
"""No process is started with less time left: it would not get to its first step."""


@dataclass(frozen=True, slots=True)
class ThroughputRequest:
    """One optimizer over one model.

    Attributes:
        side: a key of `SIDES`.
        shape: of the model, as plain values.
        device: "cuda" or "cpu".
        batches: sequences in a step, smallest first.
        seq: tokens in a sequence.
        seconds: to measure each batch size for, beside warming up.
    """

    side: str
    shape: dict[str, Any]
    device: str
    batches: list[int]
    seq: int
    seconds: float


def requests(context: Context) -> list[ThroughputRequest]:
    """Return what is to be measured, in the order of its worth."""
    models: list[tuple[Shape, list[int], int, float]] = [
        (PRESETS["1b"].shape, [4, 16], 2048, 4.0),
        (PRESETS["4b"].shape, [2, 8], 2048, 6.0),
    ]
    if context.rehearses:
        models = [(REHEARSED, [1, 2], 8, 0.05)]
    return [
        ThroughputRequest(side, asdict(shape), context.device, batches, seq, seconds)
        for shape, batches, seq, seconds in models
        for side in SIDES
    ]


def throughput(context: Context, limit: Limit) -> Iterator[Finding]:
    """Measure one optimizer after the other for as long as there is time."""
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    todo = requests(context)
    for number, request in enumerate(todo):
        if limit.left < (1.0 if context.rehearses else _LEAST_SECONDS):
            words = f"{number} of {len(todo)} processes measured when time was over"
            outcome = Outcome.FAILED if failures else Outcome.SHORTENED if rows else Outcome.LEFT_OUT
            yield Finding(outcome, "; ".join([words, *failures[:1]]), {"rows": rows})
            return
        done = context.run(measuring("throughput", asdict(request)), limit.left, {})
        rows += rows_of(request, done)
        add_hidden_shares(rows)
        if done.status not in (0, None, KILLED):
            failures.append(f"{request.side} over {request.shape['name']} ended with {done.status}: {done.last_line}")
        words = "; ".join([f"{number + 1} of {len(todo)} processes measured", *failures[:1]])
        short = any(row["outcome"] == "not over in time" for row in rows)
        outcome = Outcome.FAILED if failures else Outcome.SHORTENED if short else Outcome.GOOD
        yield Finding(outcome, words, {"rows": rows})


def rows_of(request: ThroughputRequest, done: Done) -> list[dict[str, Any]]:
    """Return a row for each batch size, with what was measured or why it was not."""
    measured = {line["batch"]: line for line in done.lines(MARK)}
    rows = []
    for batch in request.batches:
        row = {"model": request.shape["name"], "batch": batch, "seq": request.seq, "side": request.side}
        if batch in measured:
            rows.append(row | measured[batch])
        elif done.status is None:
            rows.append(row | {"outcome": "not over in time", "detail": f"killed after {done.seconds:.0f} s"})
        elif done.status == KILLED:
            words = "killed by the system, which does so when host memory is full"
            rows.append(row | {"outcome": "killed", "detail": words})
        else:
            rows.append(row | {"outcome": "failed", "detail": f"status {done.status}: {done.last_line}"})
    return rows


def add_hidden_shares(rows: list[dict[str, Any]]) -> None:
    """Add to the overlapped rows which part is hidden of the time that a plain step adds to forward and backward."""
    steps = {(row["model"], row["batch"], row["side"]): row.get("step_seconds") for row in rows}
    for row in rows:
        if row["side"] != OVERLAPPED:
            continue
        alone, plain = (steps.get((row["model"], row["batch"], side)) for side in (ALONE, PLAIN))
        mine = row.get("step_seconds")
        if alone and plain and mine and plain > alone:
            row["hidden_share"] = (plain - mine) / (plain - alone)


def measure(request: ThroughputRequest) -> None:
    """Measure each batch size and tell, in this process; a batch that does not fit is told as such."""
    settings = Settings(shape=Shape(**request.shape), device=request.device, checkpointing=True, seq=request.seq)
    device = torch.device(request.device)
    todo = list(request.batches)
    try:
        model = build_model(settings)
        side = SIDES[request.side](model)
        while todo:
            tell({"batch": todo[0], "outcome": "measured", **_steps(model, side, todo[0], request, device)})
            todo.pop(0)
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        for batch in todo:  # the larger ones would not fit either
            tell({"batch": batch, "outcome": "does not fit", "detail": str(error)})
        return
    side.close()


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether this is the GPU's memory, or a worker's error because of it."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or _is_out_of_memory(error.__cause__))


def _steps(
    model: torch.nn.Module, side: Side, batch: int, request: ThroughputRequest, device: torch.device
) -> dict[str, Any]:
    """Return the median step's time and rate, and the peaks of memory, over steps from batch to new parameters."""
    generator = torch.Generator().manual_seed(batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    end = time.perf_counter() + request.seconds
    while len(seconds) < WARM_UPS + FEWEST or (len(seconds) < WARM_UPS + MOST and time.perf_counter() < end):
        if len(seconds) == WARM_UPS:
            end = time.perf_counter() + request.seconds
        begin = time.perf_counter()
        windows = torch.randint(BYTE_VALUES, (batch, request.seq + 1), generator=generator)
        next_byte_loss(model, moved(windows, device)).backward()  # type: ignore[no-untyped-call]
        side.update()
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
    timed = seconds[WARM_UPS:]
    median = statistics.median(timed)
    return {
        "steps": len(timed),
        "step_seconds": median,
        "slowest_step_seconds": max(timed),
        "tokens_per_second": batch * request.seq / median,
        "peak_device_bytes": peak_device_bytes(device),
        "peak_host_bytes": peak_host_bytes(),
        **side.figures(),
    }
