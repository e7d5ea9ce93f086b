"""A session's work on a run: the order of steps, measurements, saves and prints, and the exit status."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from superadam.cli.console import Console
from superadam.cli.train import checkpoint, display, picture, report
from superadam.cli.train.loop import Trainer
from superadam.cli.train.verification import Verification
from superadam.cli.usage import UsageError

FAILED_STATUS = 1
"""Exit status when a verified run was found to differ from its reference."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)

SIGNAL_STATUS = 128
"""Added to a signal's number: the exit status of a run that the signal stopped, as shells count."""

HELD_OUT_POINTS = 10
"""How often in a run the held-out loss is measured."""


def run(trainer: Trainer, out: Path, arguments: argparse.Namespace) -> int:
    """Train to the end of the run, write files, print the outcome and return the exit status.

    Args:
        trainer: new or restored.
        out: folder of the checkpoint and the picture.
        arguments: the options that say what else to write, and into which steps' gradients to put a NaN.

    Raises:
        UsageError: writing a file failed.
        OSError: nothing takes the output; what was trained until then is saved, as after a signal.
    """
    history, steps = trainer.history, trainer.settings.steps
    console = Console()
    lost: OSError | None = None
    console.print(display.introduction(trainer), highlight=False, soft_wrap=True)
    with _signals() as signals, trainer:
        if not history.steps:
            trainer.measure_held_out()
        with display.step_progress(console, len(history.steps), steps) as show:
            for number in range(len(history.steps) + 1, steps + 1):
                record = trainer.step(inject_nan=number in arguments.inject_nan)
                try:
                    show(number, record)
                except OSError as error:
                    lost, console.quiet = error, True
                is_over = bool(signals) or lost is not None or number == steps
                if is_over or number % max(1, steps // HELD_OUT_POINTS) == 0:
                    trainer.measure_held_out()
                if is_over:
                    break
                if arguments.save_every is not None and number % arguments.save_every == 0:
                    _save(trainer, out)
        found = None if trainer.reference is None else trainer.reference.compare()
        written = _write(trainer, found, out, arguments)
    stopped = ""
    if len(history.steps) < steps:
        cause = f" by {signal.Signals(signals[0]).name}" if signals else ""
        again = "" if arguments.no_save else f"; go on with: superadam train --resume {out}"
        stopped = f"stopped{cause} after step {len(history.steps)} of {steps}{again}"
    if lost is not None:
        if stopped:
            lost.add_note(stopped)
        raise lost
    console.print(display.outcome_table(trainer, found))
    if found is not None:
        console.print(display.verdict(found, trainer.settings), soft_wrap=True)
    console.print("wrote " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
    if stopped:
        console.print(stopped, highlight=False, soft_wrap=True)
    if found is not None and found.is_failed:
        return FAILED_STATUS
    return SIGNAL_STATUS + signals[0] if signals else 0


def _save(trainer: Trainer, out: Path) -> Path:
    path = out / checkpoint.FILE_NAME
    with _writing(path):
        checkpoint.save(trainer, path)
    return path


def _write(trainer: Trainer, found: Verification | None, out: Path, arguments: argparse.Namespace) -> list[Path]:
    written = [] if arguments.no_save else [_save(trainer, out)]
    written.append(out / picture.FILE_NAME)
    with _writing(written[-1]):
        picture.write(trainer, found, written[-1])
    if arguments.report is not None:
        with _writing(arguments.report):
            report.write(trainer, found, arguments.report)
        written.append(arguments.report)
    if arguments.trace is not None and trainer.scheduler is not None:
        with _writing(arguments.trace):
            trainer.scheduler.export_trace(arguments.trace)
        written.append(arguments.trace)
    return written


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Make the folder of `path`, and turn an error of the disk into a UsageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        words = f"cannot write {path}: {error.strerror or error}; free some space or choose another place"
        raise UsageError(words) from error


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect a first SIGINT or SIGTERM, for the loop to end after its step; a second one ends the process."""
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        for one in SIGNALS:
            signal.signal(one, signal.SIG_DFL)

    before = {one: signal.signal(one, catch) for one in SIGNALS}
    try:
        yield caught
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
