"""The report of a run: its figures as JSON."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

import torch

import superadam
from superadam import StepKind
from superadam.cli.train.loop import Trainer
from superadam.cli.train.verification import Verification
from superadam.host.files import replace_file

_OF_HISTORY = (
    *("accepted", "respeculated", "dropped", "final_loss", "seconds", "optimizer_seconds", "peak_host_bytes"),
    *("peak_device_bytes", "sessions"),
)
_OF_OVERLAP = ("speculated_buckets", "hidden_seconds", "work_seconds", "hidden_share")


def write(trainer: Trainer, found: Verification | None, path: Path) -> None:
    """Write the figures of a run, over all sessions that worked on it; numbers that JSON lacks become null.

    They are those of `Settings`, `History`, `superadam.OverlapStatistics`, `superadam.Placement` and, where the run was
    verified, `Verification`, by the same names. Raises OSError.
    """
    history, settings, placement = trainer.history, trainer.settings, None
    if trainer.scheduler is not None:
        of_scheduler = trainer.scheduler.placement
        placement = asdict(of_scheduler) | {
            "transfer_dtype": None if of_scheduler.transfer_dtype is None else str(of_scheduler.transfer_dtype)
        }
    losses = [record.loss for record in history.steps]
    held_out = [history.held_out[step] for step in sorted(history.held_out)]
    figures = {
        **asdict(settings),
        "steps": len(losses),
        **{kind.value: history.count(kind) for kind in StepKind},
        **{name: getattr(history, name) for name in _OF_HISTORY},
        **asdict(history.overlap),
        **{name: getattr(history.overlap, name) for name in _OF_OVERLAP},
        "placement": placement,
        "shares_cores": trainer.shares_cores,
        **(dict.fromkeys(one.name for one in fields(Verification)) if found is None else asdict(found)),
        "held_out_loss_before": held_out[0] if held_out else None,
        "held_out_loss": held_out[-1] if held_out else None,
        "tokens_per_second": len(losses) * settings.batch * settings.seq / history.seconds,
        "parameters": trainer.parameters,
        "checkpointing": settings.preset.checkpointing,
        "isa": superadam.active_isa(),
        "threads": superadam.get_num_threads(),
        "text": trainer.text.name,
        "versions": {
            "superadam": version("superadam"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "losses": losses,
        "grad_norms": [record.grad_norm for record in history.steps],
    }
    text = json.dumps(_json_value(figures), indent=2, allow_nan=False)
    replace_file(path, lambda file: file.write(text.encode() + b"\n"))


def _json_value(value: object) -> object:
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
