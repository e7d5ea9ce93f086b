"""Terminal output of a run, with rich: the progress bar and the final table.

Where the output is not a terminal, a line now and then replaces the bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import superadam
from superadam import StepKind
from superadam.cli.train.history import History, StepRecord
from superadam.cli.train.loop import Trainer
from superadam.cli.train.settings import Settings
from superadam.cli.train.verification import Verification

_COLOURS = {StepKind.COMMITTED: "green", StepKind.CLIPPED: "yellow", StepKind.SKIPPED: "red"}

LINES = 20
"""Number of lines that replace the bar where the output is not a terminal."""


@contextmanager
def step_progress(console: Console, done: int, steps: int) -> Iterator[Callable[[int, StepRecord], None]]:
    """Show a progress bar over the run's `steps`, `done` of which are; give what shows a further step by its number."""
    text = "loss {task.fields[loss]}  norm {task.fields[norm]}  {task.fields[outcome]}"
    columns = (SpinnerColumn(), "step", MofNCompleteColumn(), BarColumn(), text, TimeRemainingColumn())

    def show(number: int, record: StepRecord) -> None:
        loss, norm = f"{record.loss:6.3f}", f"{record.grad_norm:7.3f}"
        outcome = f"[{_COLOURS[record.kind]}]{record.kind.value:<9}[/]"
        bar.update(task, completed=number, loss=loss, norm=norm, outcome=outcome)
        is_due = number % max(1, steps // LINES) == 0 or number == steps
        if not console.is_terminal and (is_due or record.kind is StepKind.SKIPPED):
            console.print(f"step {number:>6} of {steps}   loss {loss}   norm {norm}   {outcome}", highlight=False)

    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("train", total=steps, completed=done, loss="-", norm="-", outcome="")
        console.show_cursor()  # a second Ctrl-C ends the process without a word
        yield show


def introduction(trainer: Trainer) -> str:
    """Return one line on what is about to be trained, on what and how."""
    settings = trainer.settings
    way = "overlapped" if settings.overlap else "not overlapped"
    if settings.overlap and isinstance(trainer.bucket_numel, int):
        way += f" in buckets of {trainer.bucket_numel:,} elements"
    stored = _stored(settings)
    smaller = f" with {stored}" if stored else ""
    kept = ", blocks computed again in backward" if settings.preset.checkpointing else ""
    return (
        f"{settings.model}: {trainer.parameters / 1e6:,.1f} M parameters in {settings.dtype}{smaller} "
        f"on {settings.device}{kept}, "
        f"{settings.batch} x {settings.seq} bytes a step of {trainer.text.name} "
        f"({len(trainer.text.training) / 1e6:.1f} MB), {way}, "
        f"{superadam.active_isa()} kernels, {superadam.get_num_threads()} threads"
    )


def _stored(settings: Settings) -> str:
    """Return how state is stored in fewer bits, in words; "" where it is not."""
    kinds = ((settings.moments, "moments"), (settings.master, "masters"))
    return " and ".join(f"{kind} {what}" for kind, what in kinds if kind != "fp32")


Row = tuple[str, str, str]
"""Name, value and meaning, as the table shows them."""


def outcome_table(trainer: Trainer, found: Verification | None) -> Table:
    """Return the table of the outcomes of steps and buckets, and of the run's cost."""
    history, limit = trainer.history, f"{trainer.settings.max_grad_norm:g}"
    table = Table(
        title="Outcomes of the steps", title_justify="left", title_style="bold", show_edge=False, pad_edge=False
    )
    table.add_column("outcome")
    table.add_column("count", justify="right")
    table.add_column("meaning", style="dim")
    for kind, meaning in (
        (StepKind.COMMITTED, "steps applied with their gradients as they were"),
        (StepKind.CLIPPED, f"steps with a gradient norm above {limit}, scaled down to it"),
        (StepKind.SKIPPED, "steps with an Inf or NaN gradient: nothing changed"),
    ):
        count = history.count(kind)
        table.add_row(Text(kind.value, style=_COLOURS[kind] if count else "dim"), f"{count:,}", meaning)
    for rows in (_overlap(history, trainer.shares_cores), _costs(trainer, found)):
        table.add_section()
        for row in rows:
            table.add_row(*row)
    return table


def _overlap(history: History, shares_cores: bool) -> list[Row]:
    """Return the rows on buckets and on the hidden share of the optimizer's work; none without overlap."""
    overlap = history.overlap
    if not overlap.buckets:
        return []
    counts = [
        ("buckets", overlap.buckets, "of gradients, handed to the worker thread during backward:"),
        ("speculated", overlap.speculated_buckets, "on which the worker made the step during backward"),
        ("waiting", overlap.waiting_buckets, "only summed, and stepped in step(): the first, or clipping was likely"),
        ("resident", overlap.resident_buckets, "never handed over: their state is on the GPU, and so was the step"),
        ("accepted", history.accepted, "tensors whose speculation was published"),
        ("respeculated", history.respeculated, "tensors that were stepped again in step(): it was clipped"),
        ("dropped", history.dropped, "tensors whose step was skipped, or whose gradient changed after it was taken"),
    ]
    where = ", on cores that the model uses, too" if shares_cores else ""
    down, up = overlap.downloaded_bytes / 1e9, overlap.uploaded_bytes / 1e9
    moved = f"between host and device: {down:,.2f} of gradients down, {up:,.2f} of parameters up"
    return [
        *((name, f"{count:,}", meaning) for name, count, meaning in counts if count or name != "resident"),
        (
            "hidden",
            f"{overlap.hidden_share:.0%}",
            f"of {overlap.work_seconds:.2f} s of optimizer work: the worker did {overlap.hidden_seconds:.2f} s of it "
            f"during training{where}{_why(history)}",
        ),
        (
            "moved, GB",
            f"{down + up:,.2f}",
            moved if down + up else "the model is in host memory, where gradients and parameters are used in place",
        ),
        ("shadows, MB", f"{overlap.shadow_bytes / 1e6:,.2f}", "most memory that new values took until their verdict"),
    ]


def _why(history: History) -> str:
    """Return why little of the optimizer's work was hidden, where it was little."""
    if history.overlap.hidden_share >= 0.5:
        return ""
    if 2 * history.overlap.waiting_buckets > history.overlap.buckets:
        return "; most buckets waited for the verdict"
    if history.respeculated > history.accepted:
        return "; most tensors were stepped again, because steps were clipped"
    return "; first steps, and what backward is too short for, are left to step()"


def _costs(trainer: Trainer, found: Verification | None) -> list[Row]:
    history, settings = trainer.history, trainer.settings
    share = history.optimizer_seconds / history.seconds
    first, held_out = history.steps[0].loss, history.held_out[max(history.held_out)]
    trained = len(history.steps) * settings.batch * settings.seq
    included = "" if found is None else ", the reference included"
    rows = [
        (
            "final loss",
            f"{history.final_loss:.3f}",
            f"nats per byte, mean of the last tenth; {first:.3f} at the first step",
        ),
        ("held-out loss", f"{held_out:.3f}", "nats per byte on text that was never trained on"),
        (
            "seconds",
            f"{history.seconds:.1f}",
            f"in steps, {history.optimizer_seconds:.2f} of them ({share:.1%}) in the optimizer",
        ),
        ("tokens/s", f"{trained / history.seconds:,.0f}", "bytes trained on in a second"),
        ("host GB", f"{history.peak_host_bytes / 1e9:.2f}", f"held by the process at most{included}"),
    ]
    if history.peak_device_bytes is not None:
        rows.append(("device GB", f"{history.peak_device_bytes / 1e9:.2f}", "held by tensors on the device at most"))
    return [
        *rows,
        ("isa", superadam.active_isa(), "instruction set of the kernels"),
        ("threads", str(superadam.get_num_threads()), "of torch and of the kernels"),
    ]


def verdict(found: Verification, settings: Settings) -> Text:
    """Return the result of the comparison with torch, in words."""
    stored = _stored(settings)
    rounded = f", rounded after each step to {stored}," if stored else ""
    elements = f"{found.elements:,} elements" if stored else f"{found.elements:,} fp32 elements"
    words = (
        f"{found.elements_differing:,} of {elements} of p, m and v differ "
        f"from torch.optim.AdamW(fused=True){rounded} in any bit; norms differ by at most "
        f"{found.norm_max_relative_difference:.1g} relative to fp64 torch"
    )
    if found.parameters_differing:
        words += f"; {found.parameters_differing:,} elements of the model's parameters differed after a step"
    if found.verdicts_differing:
        words += f"; {found.verdicts_differing:,} steps ended otherwise than in torch"
    if found.is_failed and (capability := torch.backends.cpu.get_cpu_capability()) not in ("AVX2", "AVX512"):
        words += f"; note that torch runs its {capability} kernels here, and only those for AVX2 and AVX512 round alike"
    mark, colour = ("NOT verified: ", "bold red") if found.is_failed else ("verified: ", "bold green")
    return Text.assemble((mark, colour), words)
