"""The report of a run, which is written as JSON and shown as a table."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

import superadam
from superadam import StepKind
from superadam.cli.train.files import replace_file
from superadam.cli.train.loop import Trainer
from superadam.cli.train.verification import NORM_TOLERANCE, Verification
from superadam.offload.placement import Placement


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a run, over all sessions that worked on it.

    Attributes:
        steps: steps of all kinds; `committed`, `clipped` and `skipped` add up to it.
        accepted, respeculated, dropped: parameters, see `superadam.Statistics`; 0 where nothing was overlapped.
        overlap: whether the session that wrote this overlapped the optimizer with backward.
        placement: where and how it made steps in the end, see `superadam.Placement`; None without overlap.
        shares_cores: whether the model computes on every core, so that what is hidden slows it down.
        buckets, resident_buckets, speculated_buckets, waiting_buckets, given_back_gradients, shadow_bytes,
            downloaded_bytes, uploaded_bytes: see `superadam.OverlapStatistics`.
        elements, elements_differing, parameters_differing, verdicts_differing, norm_max_relative_difference: see
            `superadam.cli.train.verification.Verification`; None without --verify.
        final_loss: mean training loss of the last tenth of the steps, in nats per byte.
        held_out_loss: last loss on held-out text; `held_out_loss_before` that of the initial model.
        seconds: wall time of the steps, `optimizer_seconds` the part that the optimizer took: its `step()`, and the
            scheduler's hooks in backward.
        hidden_seconds: time in which the scheduler's worker worked and training did not wait for it; `hidden_share` is
            its part of the optimizer's whole work, `hidden_seconds + optimizer_seconds`.
        ranks: processes that the model was sharded over in the end. Of several, the findings of --verify are added up;
            counts of buckets and parameters, bytes, times and memory are those of the first.
        model: name of what was trained.
        checkpointing: whether backward recomputed each block.
        batch, seq: sequences in a step, and bytes in a sequence.
        peak_host_bytes, peak_device_bytes: see `superadam.cli.train.history.History`.
        losses, grad_norms: of every step.
    """

    steps: int
    committed: int
    clipped: int
    skipped: int
    accepted: int
    respeculated: int
    dropped: int
    overlap: bool
    placement: dict[str, int | str | None] | None
    shares_cores: bool
    buckets: int
    resident_buckets: int
    speculated_buckets: int
    waiting_buckets: int
    given_back_gradients: int
    shadow_bytes: int
    downloaded_bytes: int
    uploaded_bytes: int
    elements: int | None
    elements_differing: int | None
    parameters_differing: int | None
    verdicts_differing: int | None
    norm_max_relative_difference: float | None
    final_loss: float
    held_out_loss_before: float | None
    held_out_loss: float | None
    seconds: float
    optimizer_seconds: float
    hidden_seconds: float
    hidden_share: float
    tokens_per_second: float
    peak_host_bytes: int
    peak_device_bytes: int | None
    sessions: int
    ranks: int
    model: str
    parameters: int
    checkpointing: bool
    batch: int
    seq: int
    dtype: str
    device: str
    max_grad_norm: float
    isa: str
    threads: int
    text: str
    versions: dict[str, str]
    losses: list[float]
    grad_norms: list[float]

    @property
    def is_failed(self) -> bool:
        """Whether the run was verified and found to differ from the reference in anything."""
        if self.elements is None:
            return False
        differing = (self.elements_differing, self.parameters_differing, self.verdicts_differing)
        norm = self.norm_max_relative_difference
        return any(differing) or norm is None or not norm <= NORM_TOLERANCE

    @staticmethod
    def of(trainer: Trainer, verification: Verification | None) -> Report:
        """Return the report of a run with at least one step."""
        history, settings = trainer.history, trainer.settings
        losses = [record.loss for record in history.steps]
        last = losses[-max(1, len(losses) // 10) :]
        held_out = [history.held_out[step] for step in sorted(history.held_out)]
        found = dataclasses.asdict(verification) if verification is not None else {}
        return Report(
            steps=len(history.steps),
            committed=history.count(StepKind.COMMITTED),
            clipped=history.count(StepKind.CLIPPED),
            skipped=history.count(StepKind.SKIPPED),
            accepted=history.accepted,
            respeculated=history.respeculated,
            dropped=history.dropped,
            overlap=settings.overlap,
            placement=_plain(trainer.placement) if settings.overlap else None,
            shares_cores=trainer.shares_cores,
            buckets=history.overlap.buckets,
            resident_buckets=history.overlap.resident_buckets,
            speculated_buckets=history.overlap.speculated_buckets,
            waiting_buckets=history.overlap.waiting_buckets,
            given_back_gradients=history.overlap.given_back_gradients,
            shadow_bytes=history.overlap.shadow_bytes,
            downloaded_bytes=history.overlap.downloaded_bytes,
            uploaded_bytes=history.overlap.uploaded_bytes,
            **{f.name: found.get(f.name) for f in dataclasses.fields(Verification)},
            final_loss=math.fsum(last) / len(last),
            held_out_loss_before=held_out[0] if held_out else None,
            held_out_loss=held_out[-1] if held_out else None,
            seconds=history.seconds,
            optimizer_seconds=history.optimizer_seconds,
            hidden_seconds=history.hidden_seconds,
            hidden_share=history.hidden_share,
            tokens_per_second=len(losses) * settings.batch * settings.seq / history.seconds,
            peak_host_bytes=history.peak_host_bytes,
            peak_device_bytes=history.peak_device_bytes,
            sessions=history.sessions,
            ranks=trainer.ranks.count,
            model=settings.model,
            parameters=trainer.parameters,
            checkpointing=settings.checkpointing,
            batch=settings.batch,
            seq=settings.seq,
            dtype=settings.dtype,
            device=settings.device,
            max_grad_norm=settings.max_grad_norm,
            isa=superadam.active_isa(),
            threads=superadam.get_num_threads(),
            text=trainer.text.name,
            versions={
                "superadam": version("superadam"),
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            losses=losses,
            grad_norms=[record.grad_norm for record in history.steps],
        )

    def write(self, path: Path) -> None:
        """Write the report as JSON; numbers that JSON lacks (NaN, infinities) become null.

        Raises:
            UsageError: writing failed.
        """
        text = json.dumps(_json_value(dataclasses.asdict(self)), indent=2, allow_nan=False)
        replace_file(path, lambda file: file.write(text.encode() + b"\n"))


def _json_value(value: object) -> object:
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(placement: Placement | None) -> dict[str, int | str | None] | None:
    """Return a placement as JSON can hold it."""
    if placement is None:
        return None
    plain = dataclasses.asdict(placement)
    return plain | {"transfer_dtype": None if placement.transfer_dtype is None else str(placement.transfer_dtype)}
