"""How fast models train with each optimizer, and what memory that takes.

Owns the models, batch sizes and the way of timing. Optimizers with state of their own run in processes of their own,
so that peaks of memory are theirs, and one that does not fit takes no other with it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from gpucheck import rates
from gpucheck.findings import Context, Finding, Limit, Outcome
from gpucheck.models import SHAPES, build_model, elements_of, moved, peak_device_bytes, peak_host_bytes, wait_for
from gpucheck.programs import MARK, Done, measuring, tell
from gpucheck.rows import Row
from gpucheck.sides import ALONE, ON_DEVICE, ON_HOST, OVERLAPPED, PROGRAMS, SWEEP, PlacementRefusedError, Side
from gpucheck.verdicts import verdicts, with_hidden_shares
from superadam.kernels.torch_private import is_short_of_memory

FEWEST, MOST = 3, 15
"""Timed steps of each trial; their median counts."""

KILLED = -9
"""Status of a process that the system killed."""

_LEAST_SECONDS = 15.0
"""No process is started with less time left: it would not get to its first step."""


@dataclass(frozen=True, slots=True)
class ThroughputRequest:
    """What one process measures over one model.

    Attributes:
        program: a key of `PROGRAMS`.
        model: a key of `SHAPES`.
        device: "cuda" or "cpu".
        batches: sequences in a step, smallest first.
        seq: tokens in a sequence.
        seconds: to measure each trial for, after warming up.
        pass_numel: elements over which the CPU's Adam is timed.
    """

    program: str
    model: str
    device: str
    batches: list[int]
    seq: int
    seconds: float
    pass_numel: int


def requests(context: Context) -> list[ThroughputRequest]:
    """Return what is to be measured, in the order of its worth."""
    models = [("1b", [4, 16], 2048, 3.0, 64 << 20), ("4b", [2, 8], 2048, 3.0, 64 << 20)]
    if context.rehearses:
        models = [("tiny", [1, 2], 8, 0.05, 1 << 12)]
    return [
        ThroughputRequest(program, model, context.device, batches, seq, seconds, numel)
        for programs in ((OVERLAPPED, ON_DEVICE), (SWEEP,), (ON_HOST,))
        for model, batches, seq, seconds, numel in models
        for program in programs
    ]


def throughput(context: Context, limit: Limit) -> Iterator[Finding]:
    """Measure one program after the other for as long as there is time."""
    rows: list[Row] = []
    failures: list[str] = []
    outputs: list[str] = []  # of processes that failed or were killed
    todo = requests(context)

    def finding(number: int, outcome: Outcome, words: str) -> Finding:
        return Finding(
            Outcome.FAILED if failures else outcome,
            "; ".join([f"{number} of {len(todo)} processes measured{words}", *failures[:1]]),
            {"rows": rows, "verdicts": list(verdicts(rows)), "outputs": outputs},
        )

    for number, request in enumerate(todo):
        if limit.left < (1.0 if context.rehearses else _LEAST_SECONDS):
            yield finding(number, Outcome.SHORTENED if rows else Outcome.LEFT_OUT, " when time was over")
            return
        done = context.run(measuring("throughput", asdict(request)), limit.left)
        rows = with_hidden_shares([*rows, *rows_of(request, done)])
        if done.status != 0:
            outputs.append(f"{request.program} over {request.model}:\n{done.ends}")
        if done.status not in (0, None, KILLED):
            failures.append(f"{request.program} over {request.model} ended with {done.status}: {done.last_line}")
        short = any(row.outcome == "not over in time" for row in rows)
        yield finding(number + 1, Outcome.SHORTENED if short else Outcome.GOOD, "")


def rows_of(request: ThroughputRequest, done: Done) -> list[Row]:
    """Return a row for each trial, with what was measured or why it was not."""
    measured = {(row.side, row.batch): row for row in (Row(**line) for line in done.lines(MARK))}
    if done.status is None:
        why = {"outcome": "not over in time", "detail": f"killed after {done.seconds:.0f} s"}
    elif done.status == KILLED:
        why = {"outcome": "killed", "detail": "killed by the system, which does so when host memory is full"}
    else:
        why = {"outcome": "failed", "detail": f"status {done.status}: {done.last_line}"}
    return [
        measured.get((side, batch)) or Row(request.model, batch, request.seq, side, **why)
        for side, batch, _ in PROGRAMS[request.program](nn.Module(), request.batches)
    ]


def measure(request: ThroughputRequest) -> None:
    """Measure each trial and tell, in this process; one that does not fit is told as such."""
    shape, device = SHAPES[request.model], torch.device(request.device)
    adam_seconds = None
    if request.program == OVERLAPPED:
        adam_seconds = elements_of(shape) / rates.adam_elements_per_second(request.pass_numel, 9)
    model, why = nn.Module(), {}
    try:
        model = build_model(shape, device)
    except Exception as error:
        why = _why_not(error)
    for name, batch, make in PROGRAMS[request.program](model, request.batches):
        row = Row(request.model, batch, request.seq, name, adam_seconds=adam_seconds if name == ALONE else None)
        try:
            figures = why or _steps(model, make(), batch, request, device)
        except Exception as error:
            figures = _why_not(error)
            for parameter in model.parameters():
                parameter.grad = None
        tell(asdict(dataclasses.replace(row, **figures)))


def _why_not(error: BaseException) -> dict[str, Any]:
    """Return what a row has of an error because of the memory of GPU or host, or of a placement that cannot be met.

    Raises:
        BaseException: it is another one.
    """
    cause: BaseException | None = error
    while cause is not None:
        if is_short_of_memory(cause):  # pinned memory, too, of which torch says so in words alone
            return {"outcome": "does not fit", "detail": str(error)}
        if isinstance(cause, PlacementRefusedError):
            return {"outcome": "refused", "detail": str(cause)}
        cause = cause.__cause__
    raise error


def _steps(
    model: nn.Module, side: Side, batch: int, request: ThroughputRequest, device: torch.device
) -> dict[str, Any]:
    """Return what a row has of some steps from batch to new parameters."""
    generator = torch.Generator().manual_seed(batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    backward: list[float] = []
    warm, end = side.warm_ups, 0.0
    while len(seconds) < warm + FEWEST or (len(seconds) < warm + MOST and time.perf_counter() < end):
        if len(seconds) == warm:
            end = time.perf_counter() + request.seconds
        begin = time.perf_counter()
        windows = torch.randint(256, (batch, request.seq + 1), generator=generator)
        loss = model(moved(windows, device))
        if side.times_backward:  # the pause costs a few launches
            wait_for(device)
            since = time.perf_counter()
        loss.backward()
        if side.times_backward:
            wait_for(device)
            backward.append(time.perf_counter() - since)
        side.update()
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
    timed = seconds[warm:]
    median = statistics.median(timed)
    return {
        "steps": len(timed),
        "step_seconds": median,
        "slowest_step_seconds": max(timed),
        "tokens_per_second": batch * request.seq / median,
        "backward_seconds": statistics.median(backward[warm:]) if backward else None,
        "peak_device_bytes": peak_device_bytes(device),
        "peak_host_bytes": peak_host_bytes(),
        **side.figures(),
    }
