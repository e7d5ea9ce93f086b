"""One process's work on a run: the order of steps, measurements, saves and prints, and the exit status.

Of several processes, each does this, and the first one alone writes and prints.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from superadam.cli.console import Console
from superadam.cli.train import checkpoint, display, files, picture
from superadam.cli.train.interruption import SIGNAL_STATUS, Interruption
from superadam.cli.train.loop import Trainer
from superadam.cli.train.report import Report

FAILED_STATUS = 1
"""Exit status when a verified run was found to differ from its reference."""

HELD_OUT_POINTS = 10
"""How often in a run the held-out loss is measured."""


@dataclass(frozen=True, slots=True)
class Session:
    """Steps from where the trainer stands to `last_step`, and the files after them.

    Attributes:
        trainer: new or restored.
        out: folder of the checkpoint and the picture.
        report_path: of the JSON report, or None for no report.
        trace_path: of the trace of the session's last steps, or None for no trace; only for overlapped runs.
        last_step: at most the steps of the run.
        save_every: steps between checkpoints, or None for one at the end.
        is_saved: whether a checkpoint is written at all.
        nan_steps: steps into whose gradients a NaN is put.
        is_verified: whether a reference runs along.
    """

    trainer: Trainer
    out: Path
    report_path: Path | None
    trace_path: Path | None
    last_step: int
    save_every: int | None
    is_saved: bool
    nan_steps: frozenset[int]
    is_verified: bool

    def run(self) -> int:
        """Train, write the files, print the outcome and return the exit status.

        However it ends, the optimizer is left as without a scheduler.

        Raises:
            UsageError: writing a file failed.
            OSError: nothing takes the output; what was trained until then is saved, as after a signal.
        """
        ranks = self.trainer.ranks
        console = Console(quiet=not ranks.is_first)
        reference = self.trainer.verify() if self.is_verified else None
        console.print(display.introduction(self.trainer), highlight=False, soft_wrap=True)
        lost: OSError | None = None
        with Interruption() as interruption, self.trainer:
            with display.StepProgress(
                console, len(self.trainer.history.steps), self.trainer.settings.steps
            ) as progress:
                for number in self._numbers(interruption):
                    record = self.trainer.step(inject_nan=number in self.nan_steps)
                    try:
                        progress.show(number, record)
                    except OSError as error:
                        lost, console.quiet = error, True
                        interruption.signal_number = interruption.signal_number or signal.SIGPIPE
                    if self.save_every is not None and number % self.save_every == 0:
                        checkpoint.save(self.trainer, self.out)
            report = Report.of(self.trainer, None if reference is None else reference.compare())
            written = self._write(report)
        signal_number = ranks.largest(interruption.signal_number or 0)  # returned only once all of them have ended well
        if lost is not None:
            if report.steps < self.trainer.settings.steps:
                lost.add_note(self._stopped(report))
            raise lost
        self._tell(console, report, written, signal_number)
        if report.is_failed:
            return FAILED_STATUS
        return SIGNAL_STATUS + signal_number if signal_number else 0

    def _numbers(self, interruption: Interruption) -> Iterator[int]:
        """Yield the steps to make until the last one or a signal, and measure the held-out loss in between."""
        interval = max(1, self.trainer.settings.steps // HELD_OUT_POINTS)
        done = len(self.trainer.history.steps)
        if not done:
            self.trainer.measure_held_out()
        for number in range(done + 1, self.last_step + 1):
            yield number
            is_over = bool(self.trainer.ranks.largest(interruption.signal_number or 0)) or number == self.last_step
            if is_over or number % interval == 0:
                self.trainer.measure_held_out()
            if is_over:
                return

    def _write(self, report: Report) -> list[Path]:
        written = [checkpoint.save(self.trainer, self.out)] if self.is_saved else []
        if not self.trainer.ranks.is_first:
            return written
        written.append(picture.write(self.trainer.history, report, self.out))
        if self.report_path is not None:
            report.write(self.report_path)
            written.append(self.report_path)
        if self.trace_path is not None:
            assert self.trainer.scheduler is not None
            with files.writing(self.trace_path):
                self.trainer.scheduler.export_trace(self.trace_path)
            written.append(self.trace_path)
        return written

    def _tell(self, console: Console, report: Report, written: list[Path], signal_number: int) -> None:
        console.print(display.outcome_table(report))
        if self.is_verified:
            console.print(display.verdict(report), soft_wrap=True)
        console.print("wrote " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
        if report.steps < self.trainer.settings.steps:
            cause = "" if not signal_number else f" by {signal.Signals(signal_number).name}"
            console.print(self._stopped(report, cause), highlight=False, soft_wrap=True)

    def _stopped(self, report: Report, cause: str = "") -> str:
        words = f"stopped{cause} after step {report.steps} of {self.trainer.settings.steps}"
        if self.is_saved:
            command = "torchrun ... -m superadam" if self.trainer.ranks.are_several else "superadam"
            words += f"; go on with: {command} train --resume {self.out}"
        return words
