"""What is told of a step: its outcome, judged by the norm of its gradients, what it did to them, and statistics.

Listeners of what is done already, as statistics, traces and what learns from steps, can neither fail it nor change it.
"""

from __future__ import annotations

import ctypes
import enum
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from superadam.distributed.agreement import RanksNorm
from superadam.host.signals import THIS_THREAD
from superadam.state.table import GradientNorm

_EPSILON = 1e-6  # which clip_grad_norm_ adds to the norm before it divides

_logger = logging.getLogger("superadam")
_failed: set[str] = set()  # whose errors were logged


class StepKind(enum.StrEnum):
    """How a step ended."""

    COMMITTED = "committed"
    """The update was applied with unchanged gradients."""
    CLIPPED = "clipped"
    """The update was applied with gradients times `clip_coefficient`: scaled down to `max_grad_norm`, or by others."""
    SKIPPED = "skipped"
    """Nothing was changed and `step` did not advance, because a gradient was Inf or NaN."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The verdict over one step.

    Attributes:
        kind: committed, clipped or skipped.
        grad_norm: global 2-norm of all (unscaled) gradients before clipping, summed in fp64; Inf or NaN when skipped.
            Where others multiplied gradients by several factors, or on several ranks, it is that of the products,
            without a limit before they are rounded.
        clip_coefficient: factor on the gradients, 1.0 when not clipped: that of `max_grad_norm`, an fp32 value of at
            most 1 (as in `torch.nn.utils.clip_grad_norm_`), times the factor by which others scaled all gradients
            down, for whatever reason, where the optimizer knows it because it had taken them, on one rank. Unscaling by
            a `GradScaler` is no such factor.
        nonfinite: number of gradient elements that are Inf or NaN; each replica counts.

    Where parameters are DTensors, it is the same on all ranks.
    """

    kind: StepKind
    grad_norm: float
    clip_coefficient: float
    nonfinite: int = 0


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return min(1, max_norm / (norm + 1e-6)), as clip_grad_norm_: computed in fp64, rounded once to fp32."""
    if max_norm is None:
        return 1.0
    return ctypes.c_float(min(1.0, max_norm / (norm + _EPSILON))).value


def outcome_of(total: float, nonfinite: int, clip: float) -> StepOutcome:
    """Return the outcome of a step with this norm, number of Inf and NaN, and factor of the limit."""
    if nonfinite:
        return StepOutcome(StepKind.SKIPPED, total, 1.0, nonfinite)
    return StepOutcome(StepKind.COMMITTED if clip == 1.0 else StepKind.CLIPPED, total, clip)


def judge(norm: GradientNorm | RanksNorm, max_norm: float | None) -> StepOutcome:
    """Return the outcome of a step whose gradients have this norm; a `max_norm` of None or inf is no limit."""
    total = norm.total
    return outcome_of(total, norm.count, clip_coefficient(total, max_norm))


class Applied(NamedTuple):
    """What a step did to the gradients that were taken.

    Attributes:
        norm: of them on this rank, as they arrived.
        factor: by which most were multiplied; None where that was not one number, and `unscaling` where they differ.
        unscaling: what `factor` is without clipping.
        is_own: whether the optimizer clipped, by its own limit that lasts.
    """

    norm: float
    factor: float | None
    unscaling: float
    is_own: bool = False


@dataclass(slots=True)
class Statistics:
    """Counts and times since the optimizer was made.

    Each speculation on a parameter ends in one way: it is accepted, respeculated or dropped. A parameter that is cut
    into pieces may end in several ways, and counts once in each.

    Attributes:
        committed, clipped, skipped: steps by kind; their sum is `steps`.
        accepted: parameters whose speculated value was published.
        patched: of these, parameters whose uncertain elements were computed again with the verdict's factor.
        patched_elements: how many elements that were.
        respeculated: parameters that were speculated on but updated again with the verdict, because the step was
            clipped by another factor, a hyper-parameter had changed, or the parameter had been written to.
        dropped: parameters whose speculation was discarded, because the step was skipped or rolled back, or because
            their gradient was dropped or edited.
        displaced: parameters of `gpu_buckets` that were updated on the host, because the device had no memory for their
            state.
        norm_seconds: wall time of verdicts, with the norms of gradients that were not summed before, and of
            `clip_grad_norm_`; over several ranks also of waiting for the others.
        update_seconds: of updates in steps of which no gradient was taken.
        speculate_seconds: of speculation, with the commits and norms that share its passes.
        resolve_seconds: of what follows the verdict where gradients were taken: patches, publishing, updates; and of
            dropping speculation.
        commit_seconds: of other commits, and of looking for outside writes and adopting them.
    """

    committed: int = 0
    clipped: int = 0
    skipped: int = 0
    accepted: int = 0
    patched: int = 0
    patched_elements: int = 0
    respeculated: int = 0
    dropped: int = 0
    displaced: int = 0
    norm_seconds: float = 0.0
    speculate_seconds: float = 0.0
    resolve_seconds: float = 0.0
    commit_seconds: float = 0.0
    update_seconds: float = 0.0

    def count(self, kind: StepKind) -> None:
        """Count a step of this kind."""
        setattr(self, kind.value, getattr(self, kind.value) + 1)

    @property
    def steps(self) -> int:
        """Steps of all kinds."""
        return self.committed + self.clipped + self.skipped


def tell(what: str, listener: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a listener of what is done already; return what it returns, None where it raised an `Exception`.

    Such an error is logged under the name of `what`, once in a process.
    """
    with THIS_THREAD.without_handlers:  # what a signal's handler raises is the program's
        try:
            return listener(*arguments, **options)
        except Exception:
            with suppress(Exception):  # of a handler of the log's
                if what not in _failed:
                    _failed.add(what)
                    _logger.error("%s failed, which changes no step; training goes on without", what, exc_info=True)
            return None
