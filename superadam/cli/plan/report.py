"""An answer in words and as JSON; every number says how far it can be trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from superadam.cli.console import new_table
from superadam.cli.plan.answer import Answer, Timing
from superadam.host.memory import gigabytes
from superadam.plan.machines import Kind
from superadam.plan.memory import MAPPED, RESUMING, SAVING, TRAINING, total

WIDTH = 36  # characters of the picture
LEAST_BAR = 1e-4  # of all: less may be the rounding of a sum
LETTERS = {Kind.EXACT: "", Kind.MEASURED: "m", Kind.PUBLISHED: "p", Kind.ASSUMED: "a"}
CAUSES = {
    "packed": "packing gradients",
    "waited": "waiting for the CPU",
    "stalled": "waiting for the link",
    "python": "Python in step()",
    "updated": "clipped steps",
    "published": "publication",
}


def title(answer: Answer) -> str:
    """Return the first line."""
    s, subject = answer.setting, answer.subject
    words = f"{answer.name}: {subject.parameters:,} parameters (exact) on {answer.machine.title}"
    words += f", {s.ranks} ranks" if s.ranks > 1 else ""
    words += f"; {s.micro_batches} x {s.sequences} x {s.tokens} tokens a rank, loss {s.loss}, state {s.moments} moments"
    words += f" and {s.master} masters, checkpointing {'on' if s.checkpointing else 'off'}"
    return words + f"{', weights flow' * s.flows}, {s.clipped:.0%} of the steps clipped"


def memory_table(answer: Answer) -> Table:
    """Return categories by stage: rows of categories, GB."""
    table = new_table("GB of a rank", "at its peak", "of", gap=2)
    table.add_column("made of", overflow="fold")
    memory, machine = answer.memory, answer.machine
    for place, stages, limit in (("GPU", memory.gpu, machine.gpu_memory), ("host", memory.host, machine.host_memory)):
        for stage, categories in stages.items():
            size = total(categories)
            parts = ", ".join(
                f"{name} {each / 1e9:.1f}{LETTERS[_kind(answer, name)]}" for name, each in categories.items() if each
            )
            kind = max((_kind(answer, name) for name, each in categories.items() if each), key=list(Kind).index)
            style = "" if size <= limit.value else "bold red"
            of = f"{limit.value / 1e9:.1f}{LETTERS[limit.kind]}"
            table.add_row(f"{place}, {stage}", f"{size / 1e9:.1f}{LETTERS[kind]}", of, parts, style=style)
    return table


def _kind(answer: Answer, category: str) -> Kind:
    kinds = {
        "context and fragments": answer.machine.gpu_reserved.kind,
        "process": answer.machine.host_reserved.kind,
        "activations": Kind.ASSUMED,  # without the kernels' workspaces
        "gathered weights": Kind.ASSUMED,
        "gradients that are reduced": Kind.ASSUMED,
    }
    return kinds.get(category, Kind.EXACT)


def verdict(answer: Answer) -> Iterator[str]:
    """Yield what fits, what does not, and what would."""
    memory = answer.memory
    if memory.trains:
        yield "training fits"
    for place, stage, size, limit in memory.problems:
        what = {RESUMING: "resuming", MAPPED: "resuming", SAVING: "saving in the background"}.get(stage, "training")
        where = "" if stage in (RESUMING, MAPPED, SAVING, TRAINING) else f" at {stage}"
        yield f"{what} does not fit: the {place} needs {gigabytes(size)}{where}, and has {gigabytes(limit)}"
        if stage == RESUMING and MAPPED in memory.host and total(memory.host[MAPPED]) <= limit:
            yield (
                "with a file that is mapped, torch.load(..., mmap=True), as with offload(trainer), resuming needs "
                f"{gigabytes(total(memory.host[MAPPED]))}"
            )
        if stage == SAVING:
            yield "saving that waits (wait=True) takes no copy of the state"
    for remedy in answer.remedies:
        peaks = (max(map(total, remedy.memory.gpu.values())), total(remedy.memory.host[TRAINING]))
        yield f"it fits with {remedy.words}: {gigabytes(peaks[0])} on the GPU, {gigabytes(peaks[1])} on the host"
    if not memory.trains and not answer.remedies:
        yield (
            "no change that was tried would make it fit: chunked loss, checkpointing, smaller state, fewer sequences, "
            "up to 16 times the ranks, and weights that flow"
        )
    if memory.waiting:
        seconds = memory.waiting / answer.machine.upload.value
        yield (
            f"{gigabytes(memory.waiting)} of new values have no room on the GPU: they wait on the host, and their "
            f"publication over the link takes {seconds:.3f}{LETTERS[answer.machine.upload.kind]} s of each step"
        )
    if memory.cut:
        names = ", ".join(memory.cut[:3]) + (f" and {len(memory.cut) - 3} more" if len(memory.cut) > 3 else "")
        yield f"larger than a bucket, and cut: {names}"


def time_table(answer: Answer) -> Table:
    """Return a column for each efficiency of the GPU."""
    kind = LETTERS[Kind.ASSUMED]  # as is the GPU's efficiency
    efficiencies = (f"{timing.efficiency:.2f}{kind}" for timing in answer.timings)
    table = new_table("the GPU reaches, of its peak", *efficiencies, gap=2)
    columns = [*map(_cells, answer.timings)]
    for words in columns[0]:
        table.add_row(words, *(cells[words] + kind * cells[words][0].isdigit() for cells in columns))
    return table


def _cells(timing: Timing) -> dict[str, str]:
    step, on_gpu = timing.step, timing.on_gpu
    return {
        "seconds of a step": f"{step.seconds:.3f}",
        "of forward and backward": f"{step.clock:.3f}",
        "of Adam on the CPU, by itself": f"{step.adam:.3f}",
        "hidden share of Adam": f"{step.hidden:.2f}",
        "tokens/s": f"{timing.tokens_per_second:,.0f}",
        "TFLOP/s of a GPU, the model's": f"{timing.model_rate / 1e12:.0f}",
        "TFLOP/s of a GPU, the hardware's": f"{timing.hardware_rate / 1e12:.0f}",
        "resident buckets": f"{timing.resident} of {timing.buckets}",
        **{f"exposed: {words}": f"{getattr(step, name):.3f}" for name, words in CAUSES.items()},
        "seconds without overlap": f"{timing.synchronous:.3f}",
        "seconds with all state on the GPU": "no room" if on_gpu is None else f"{on_gpu:.3f}",
        "tokens from which on Adam is hidden": f"{timing.hides_from:,.0f}",
    }


def picture(timing: Timing) -> list[str]:
    """Return a step as bars: what the GPU computes, and what the step is longer by."""
    step = timing.step
    bars = {"forward, backward": step.clock, **{words: getattr(step, name) for name, words in CAUSES.items()}}
    longest = max(step.seconds, step.clock)
    lines, begin = [], 0.0
    for words, seconds in bars.items():
        first, last = round(WIDTH * begin / longest), round(WIDTH * min(longest, begin + seconds) / longest)
        begin += seconds
        if seconds > LEAST_BAR * longest:
            lines.append(f"{words:>31} {' ' * first}{'█' * max(1, last - first):<{WIDTH - first}} {seconds:.3f} s")
    return lines


def notes(answer: Answer) -> Iterator[str]:
    """Yield what a reader needs to know."""
    yield "No mark: exact, from shapes. m, p, a: from the machine's file or this command, measured, published, assumed."
    if answer.timings:
        yield "Times are the machine's by its file; --gpu-efficiency replaces the range, once you have measured it."
    for words, factor in answer.gains.items():
        yield f"{words} would make {factor:.2f} times the tokens per second"


def to_json(answer: Answer) -> dict[str, Any]:
    """Return everything as plain values: bytes and seconds, each number with its kind."""
    weak, machine, memory = Kind.ASSUMED, answer.machine, answer.memory

    def marked(value: Any, kind: Kind) -> dict[str, Any]:
        return {"value": value, "kind": kind.value}

    def by_stage(found: Any) -> dict[str, Any]:
        return {
            stage: {name: marked(size, _kind(answer, name)) for name, size in categories.items()}
            for stage, categories in found.items()
        }

    def times(timing: Timing) -> dict[str, Any]:
        flat = dataclasses.asdict(timing)
        values = {**{f"step_{name}": value for name, value in flat.pop("step").items()}, **flat}
        return {name: marked(value, weak) for name, value in (values | {"hidden_share": timing.step.hidden}).items()}

    return {
        "model": answer.name,
        "parameters": marked(answer.subject.parameters, Kind.EXACT),
        "setting": dataclasses.asdict(answer.setting),
        "machine": {
            name: marked(rate.value, rate.kind) | {"source": rate.source} for name, rate in machine.rates.items()
        },
        "gpu_bytes": by_stage(memory.gpu),
        "gpu_limit": marked(memory.gpu_limit, machine.gpu_memory.kind),
        "host_bytes": by_stage(memory.host),
        "host_limit": marked(memory.host_limit, machine.host_memory.kind),
        "new_values_on_host": marked(memory.waiting, Kind.ASSUMED),
        "trains": memory.trains,
        "resumes": memory.resumes,
        "verdict": list(verdict(answer)),
        "remedies": [remedy.words for remedy in answer.remedies],
        "times": [*map(times, answer.timings)],
        "gains": [{"words": words, "factor": marked(factor, weak)} for words, factor in answer.gains.items()],
    }
