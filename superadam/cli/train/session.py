"""A session's work on a run: the order of steps, measurements, saves and prints, and the exit status."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Session:
    """Steps from where the trainer stands to the end of the run, and the files after them.

    Attributes:
        trainer: new or restored.
        out: folder of the checkpoint and the picture.
        report_path: of the JSON report, or None for no report.
        trace_path: of the trace of the session's last steps, or None for no trace; only for overlapped runs.
        save_every: steps between checkpoints, or None for one at the end.
        is_saved: whether a checkpoint is written at all.
        nan_steps: steps into whose gradients a NaN is put.
    """

    trainer: Trainer
    out: Path
    report_path: Path | None
    trace_path: Path | None
    save_every: int | None
    is_saved: bool
    nan_steps: frozenset[int]

    def run(self) -> int:
        """Train, write the files, print the outcome and return the exit status.

        Raises:
            UsageError: writing a file failed.
            OSError: nothing takes the output; what was trained until then is saved, as after a signal.
        """
        trainer, history, steps = self.trainer, self.trainer.history, self.trainer.settings.steps
        console = Console()
        lost: OSError | None = None
        console.print(display.introduction(trainer), highlight=False, soft_wrap=True)
        with _signals() as signals, trainer:
            if not history.steps:
                trainer.measure_held_out()
            with display.StepProgress(console, len(history.steps), steps) as progress:
                for number in range(len(history.steps) + 1, steps + 1):
                    record = trainer.step(inject_nan=number in self.nan_steps)
                    try:
                        progress.show(number, record)
                    except OSError as error:
                        lost, console.quiet = error, True
                    is_over = bool(signals) or lost is not None or number == steps
                    if is_over or number % max(1, steps // HELD_OUT_POINTS) == 0:
                        trainer.measure_held_out()
                    if is_over:
                        break
                    if self.save_every is not None and number % self.save_every == 0:
                        self._save()
            found = None if trainer.reference is None else trainer.reference.compare()
            written = self._write(found)
        cause = f" by {signal.Signals(signals[0]).name}" if signals else ""
        stopped = f"stopped{cause} after step {len(history.steps)} of {steps}"
        if self.is_saved:
            stopped += f"; go on with: superadam train --resume {self.out}"
        is_complete = len(history.steps) == steps
        if lost is not None:
            if not is_complete:
                lost.add_note(stopped)
            raise lost
        console.print(display.outcome_table(trainer, found))
        if found is not None:
            console.print(display.verdict(found), soft_wrap=True)
        console.print("wrote " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
        if not is_complete:
            console.print(stopped, highlight=False, soft_wrap=True)
        if found is not None and found.is_failed:
            return FAILED_STATUS
        return SIGNAL_STATUS + signals[0] if signals else 0

    def _save(self) -> Path:
        path = self.out / checkpoint.FILE_NAME
        with _writing(path):
            checkpoint.save(self.trainer, path)
        return path

    def _write(self, found: Verification | None) -> list[Path]:
        written = [self._save()] if self.is_saved else []
        written.append(self.out / picture.FILE_NAME)
        with _writing(written[-1]):
            picture.write(self.trainer, found, written[-1])
        if self.report_path is not None:
            with _writing(self.report_path):
                report.write(self.trainer, found, self.report_path)
            written.append(self.report_path)
        if self.trace_path is not None and self.trainer.scheduler is not None:
            with _writing(self.trace_path):
                self.trainer.scheduler.export_trace(self.trace_path)
            written.append(self.trace_path)
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
