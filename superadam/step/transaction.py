"""The transaction: speculate, validate, then accept, redo or drop; commit later.

Decides which pass runs over which rows. `docs/design.md`, section 2, says why there are these phases.
"""

from __future__ import annotations

import collections
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
from torch import Tensor
from torch.autograd.profiler import record_function

from superadam.distributed.agreement import Question, Ranks, RanksNorm
from superadam.handles.taken_gradient import FactorKind, TakenGradient
from superadam.host.signals import THIS_THREAD
from superadam.kernels import native
from superadam.kernels.hyperparameters import Hyperparameters, Scale
from superadam.kernels.memory import has_memory
from superadam.kernels.torch_private import MayLackMemory, is_profiling
from superadam.state.parameter import ParameterState, Pending, Phase, Piece, Prediction, pieces_of
from superadam.state.samples import Samples
from superadam.state.table import CoefficientTable, GradientNorm, ParameterTable, Rows, Runs, Segments
from superadam.state.uncertain import empty_lists
from superadam.step.gradients import StepGradients, hyper_of_each
from superadam.step.outcome import Applied, Statistics, StepKind, StepOutcome, judge, outcome_of, tell

_NOTHING = nullcontext()
_Products = dict[tuple[TakenGradient, ParameterState], Tensor]
"""Gradients with their factors, in the layout of a parameter's state, whose pieces share them."""


@dataclass(slots=True)
class _Contribution:
    """What one piece of a parameter contributes to a step.

    Attributes:
        gradient: as kernels read it, on the device where `is_resident`; neither scaled nor clipped.
        scale: by which this step multiplies the gradient: recorded on its handle, or the clipping.
        taken: whose gradient it is, if it was taken.
        waits: whether `taken` waits for this verdict, unchanged since its norm was computed.
        pending: its record, while that still describes `gradient`: its norm is known.
    """

    piece: Piece
    hyper: Hyperparameters
    gradient: Tensor
    scale: Scale = field(default_factory=Scale)
    taken: TakenGradient | None = None
    waits: bool = False
    pending: Pending | None = None

    @property
    def is_resident(self) -> bool:
        """Whether the gradient is on the device, where the step is to be made."""
        return self.pending is not None and self.pending.is_resident

    def apply_factors(self, products: _Products) -> None:
        """Take the gradient as it is now: torch's product with its factors, which kernels may round differently."""
        assert self.taken is not None
        key = self.taken, self.piece.state  # several parameters may have one gradient
        if key not in products:
            products[key] = self.piece.state.host_gradient(self.taken.scaled())
        self.gradient = self.piece.elements_of(products[key])
        self.scale, self.pending = Scale(), None


class Transaction:
    """Phases and passes over the parameters of one `ParameterTable`.

    Attributes:
        expected_scale: the factor that speculation multiplies by: that of the last two steps, if they had the same
            number on all gradients, as 1/4 for four micro-batches; else that of the last step's unscaling.
        lock: held by the thread that runs a pass or gives a verdict.
        ranks: those that make each step together; None for this one alone.
    """

    def __init__(self, table: ParameterTable, statistics: Statistics, ranks: Ranks | None) -> None:
        self.table = table
        self.statistics = statistics
        self.expected_scale = 1.0
        self._last_scale: float | None = None
        self.ranks = ranks
        self._samples = Samples(table)
        self.lock: Any = threading.RLock()
        self._members: dict[Phase, dict[Piece, None]] = {phase: {} for phase in Phase}
        for piece in pieces_of(table.states):
            self._members[piece.phase][piece] = None
        _transactions.add(self)

    def in_phase(self, phase: Phase) -> list[Piece]:
        """Return the pieces in this phase, in the order in which they entered it."""
        return list(self._members[phase])

    def _move(self, piece: Piece, phase: Phase, pending: Pending | None) -> None:
        del self._members[piece.phase][piece]
        self._members[phase][piece] = None
        piece.phase, piece.pending = phase, pending

    # ---- before the verdict ------------------------------------------------------------------------------------------

    def able_to_speculate(self, pieces: Iterable[Piece], hyper: Sequence[Hyperparameters]) -> list[Piece]:
        """Return those pieces whose next step can be computed before its verdict; `hyper` is by row of parameters.

        They are of working copies with all their state, of which programs hold nothing. An outside write to the
        parameter counts only from the verdict on, because it may be undone before.
        """
        able = [
            piece
            for piece in pieces
            if (state := piece.state).has_state
            and (state.max_exp_avg_sq is not None or not hyper[state.row].amsgrad)
            and not state.is_own_master
            and not self.table.is_held[state.row]
        ]
        hinted = self.table.fingerprints.are_hinted([piece.state.row for piece in able])
        return [piece for piece, is_hinted in zip(able, hinted, strict=True) if not is_hinted]

    def expose(self) -> None:
        """Read no state any more but in calls that look at it first, because programs are given references to it."""
        with THIS_THREAD.deferred_signals, self.lock:
            for piece in self._members[Phase.SPECULATED]:
                _pending_of(piece).is_stale = True
            self.table.is_held[:] = self.table.is_any_held = self.table.is_exposed = True

    def speculate(
        self,
        pending: Mapping[Piece, Pending],
        num_threads: int | None = None,
        norm: GradientNorm | None = None,
        prediction: Prediction | None = None,
    ) -> None:
        """Let gradients wait for the verdict, with their norm, and new values for those that have a slot for one.

        Earlier speculation on these pieces is dropped. `num_threads` is a maximum; None for all. `norm` is that of
        gradients without a slot, in their order, where it was computed elsewhere. Without a `prediction`, values are
        for `expected_scale`.
        """
        with self._timed("speculate_seconds"):
            self._drop(pending)
            for piece, record in pending.items():
                step, unscaling = int(self.table.steps[piece.state.row]) + 1, self.expected_scale
                record.expect(step, unscaling, prediction or Prediction(unscaling))
            try:
                self._compute(pending, num_threads, norm)
            except BaseException:  # the next verdict is not over what was summed before
                for piece in pending:
                    self.table.norm.clear(self.table.chunks_of(piece.row))
                raise
            for piece, record in pending.items():
                self._move(piece, Phase.SPECULATED, record)

    def _compute(self, pending: Mapping[Piece, Pending], num_threads: int | None, norm: GradientNorm | None) -> None:
        """Sum gradients, or take the `norm` of those without a slot, and compute new values for the others."""
        apart = [piece for piece, new in pending.items() if piece.phase is Phase.ACCEPTED and _cannot_fuse(piece, new)]
        self._commit(apart, num_threads)
        waiting = [piece for piece, record in pending.items() if record.slot is None]
        alone = [piece for piece, record in pending.items() if record.slot and piece.phase is Phase.CLEAN]
        fused = [piece for piece, record in pending.items() if record.slot and piece.phase is Phase.ACCEPTED]
        if norm is not None:
            self.table.put_norm(self.table.rows_of(waiting), norm)
        elif waiting:
            gradients = [pending[piece].gradient for piece in waiting]
            segments = self.table.job(self.table.rows_of(waiting), gradients)
            self.table.compute_norm(segments, num_threads=num_threads)
        for chosen in (alone, fused):
            if chosen:
                self._speculate(chosen, [pending[piece] for piece in chosen], num_threads)

    def _speculate(self, pieces: Sequence[Piece], pending: Sequence[Pending], num_threads: int | None) -> None:
        rows, coefficients = self.table.rows_of(pieces), CoefficientTable()
        indices = self.table.indices_of(rows, pending, coefficients)
        sets = coefficients.sets
        self._make_lists(pieces, pending, [sets[index].interval is not None for index in indices])
        accepted = [piece.pending for piece in pieces if piece.pending is not None]  # of all, or of none
        self.table.run_speculation(rows, pending, coefficients, indices, accepted, num_threads)

    def _make_lists(self, pieces: Sequence[Piece], pending: Sequence[Pending], covered: Sequence[bool]) -> None:
        """Give lists for uncertain elements to the records whose interval the test covers."""
        chosen = []
        for piece, record, is_covered in zip(pieces, pending, covered, strict=True):
            if not is_covered or not piece.is_narrow or not (record.slot and record.slot.shadow.takes_patches):
                record.interval = None
            else:
                chosen.append((piece, record))
        if not chosen:
            return
        numels = [piece.shape.numel() for piece, _ in chosen]
        with MayLackMemory():  # without its list, a value is for one factor
            lists = empty_lists(numels, [piece.state.max_exp_avg_sq is not None for piece, _ in chosen])
            for (_, record), listed in zip(chosen, lists, strict=True):
                record.listed = listed

    def drop(self) -> None:
        """Drop everything that waits for a verdict; the gradients stay where they are."""
        with self._timed("resolve_seconds"):
            self._drop(self.in_phase(Phase.SPECULATED))

    def _drop(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.phase is Phase.SPECULATED:
                record = _pending_of(piece)
                self.table.norm.clear(self.table.chunks_of(piece.row))
                self._move(piece, Phase.CLEAN, None)
                is_last = not any(_is_speculated(other, record.taken) for other in piece.state.pieces)
                self.statistics.dropped += record.slot is not None and is_last

    # ---- the verdict -------------------------------------------------------------------------------------------------

    def step(
        self, gradients: StepGradients, max_norm: float | None, *, is_lasting: bool = True
    ) -> tuple[StepOutcome, Applied | None]:
        """Make a step with these gradients if all are finite; drop everything else that waits for a verdict.

        A `max_norm` of None or inf is no limit; it lasts where it is not that of this step alone. Also returns what was
        done to gradients that were taken; None where none was, or the step was skipped. Signals are deferred, so that
        it is made wholly or not at all.
        """
        with (
            THIS_THREAD.deferred_signals,
            self.lock,
            native.UsualFloatMode(),
            record_function("superadam: step") if is_profiling() else _NOTHING,
        ):
            begin = time.perf_counter()
            self.table.created.clear()
            try:
                if self._members[Phase.ACCEPTED]:
                    self._commit_of(gradients.states)
                if hinted := self.table.fingerprints.seen_hints(gradients.rows):  # bound() has just looked
                    self._adopt([self.table.states[row] for row in hinted], is_final=True)
                if written := self._samples.find_written(gradients.rows):
                    self._adopt([self.table.states[row] for row in written], is_final=True)
                self.table.forget_former_masters(gradients.rows)
                begin = self._spent("commit_seconds", begin)
                if gradients.are_whole:
                    return self._step_in_place(gradients, max_norm, begin), None
                contributions, others = self._contributions(gradients)
                self._drop(others)
                outcome = self._judge(Question.STEP, contributions, self.table.norm.copy(), max_norm)
                reported, arrived = self._reported(contributions, outcome), self.table.norm.total
                begin = self._spent("norm_seconds", begin)
                accepted, applied = list[_Contribution](), None
                if outcome.kind is StepKind.SKIPPED:
                    self._drop(self.in_phase(Phase.SPECULATED))
                else:
                    accepted = self._apply(contributions, outcome.clip_coefficient)
                    is_own = is_lasting and outcome.kind is StepKind.CLIPPED
                    applied = tell(
                        "learning the factor of a step", self._applied, contributions, arrived, is_own=is_own
                    )
                self.table.norm.clear()
                tell("counting what became of speculation", self._count, accepted, begin)
                return reported, applied
            except BaseException:  # nothing was changed but this
                self.table.forget_created()
                raise

    def _step_in_place(self, gradients: StepGradients, max_norm: float | None, begin: float) -> StepOutcome:
        """Make a step of gradients none of which was taken, in one job whatever their number."""
        self._drop(self.in_phase(Phase.SPECULATED))
        table, rows, runs = self.table, gradients.rows, gradients.runs
        segments, coefficients = gradients.job(table), CoefficientTable()
        try:
            if self.ranks is None and table.is_reached(rows) and table.are_ready(rows, runs):
                segments["coefficients"] = table.indices_of_next_step(rows, runs, Scale(), coefficients)
                count = table.prepared_count(rows)
                limit = math.inf if max_norm is None else max_norm
                verdict = native.step(segments, coefficients.array(), table.norm.sums, table.norm.nonfinite, limit)
                outcome = outcome_of(verdict.norm, verdict.nonfinite, verdict.clip)
                self.statistics.norm_seconds += verdict.seconds
                begin += verdict.seconds
            else:
                table.compute_norm(segments)
                outcome = judge(self._over_ranks(Question.STEP, table.norm, max_norm), max_norm)
                begin = self._spent("norm_seconds", begin)
                if outcome.kind is not StepKind.SKIPPED:
                    if self._make_ready(gradients.states, rows, runs):
                        segments = gradients.job(table)
                    indices = table.indices_of_next_step(rows, runs, Scale(outcome.clip_coefficient), coefficients)
                    count = table.prepared_count(rows)
                    table.prepared_update(rows, segments, coefficients, indices)()
        finally:
            table.norm.clear()
        if outcome.kind is not StepKind.SKIPPED:
            count()
            tell("timing a step", self._spent, "update_seconds", begin)
        return outcome

    def _contributions(self, gradients: StepGradients) -> tuple[list[_Contribution], list[Piece]]:
        """Return what each piece contributes, and the pieces whose pending gradient is not among these."""
        contributions, others = list[_Contribution](), dict(self._members[Phase.SPECULATED])
        products, each = _Products(), hyper_of_each(gradients.runs)
        for state, gradient, hyper in zip(gradients.states, gradients.gradients, each, strict=True):
            if isinstance(gradient, Tensor):
                contributions += [_Contribution(piece, hyper, piece.elements_of(gradient)) for piece in state.pieces]
                continue
            scale = gradient.scale()
            for piece in state.pieces:
                pending = piece.pending if piece.waits_with(gradient) else None
                values = gradient.ready() if pending is None else pending.gradient
                contribution = _Contribution(piece, hyper, values, Scale(), gradient, pending is not None, pending)
                if pending is None or scale is None:
                    contribution.apply_factors(products)
                else:
                    contribution.scale = Scale.recorded(scale, gradient.exact_dtype)
                if pending is not None:
                    del others[piece]
                contributions.append(contribution)
        return contributions, list(others)

    def _judge(
        self, question: Question, contributions: Sequence[_Contribution], norm: GradientNorm, max_norm: float | None
    ) -> StepOutcome:
        """Return the verdict over the gradients as they are now in `.grad`.

        `norm` is a copy of that of the gradients that wait, as they arrived; it becomes that of all as they are.
        """
        has_limit = max_norm is not None and not math.isinf(max_norm)
        copied = set[int]() if has_limit or self.ranks is None else self.ranks.copied_rows()
        uncounted = list[_Contribution]()
        if has_limit or copied:
            # Scaling a norm rounds differently from scaling its gradients, but for powers of two.
            products = _Products()
            for contribution in contributions:
                if math.frexp(contribution.scale.factor)[0] != 0.5:
                    if has_limit:
                        contribution.apply_factors(products)
                    elif contribution.piece.state.row in copied:  # as on ranks where it was not taken
                        uncounted.append(replace(contribution))
                        uncounted[-1].apply_factors(products)
        with np.errstate(all="ignore"):
            for contribution in contributions:
                if contribution.scale.factor != 1.0:
                    norm.scale(self.table.chunks_of(contribution.piece.row), contribution.scale.factor)
                if contribution.pending is None:
                    uncounted.append(contribution)
        if uncounted:
            self.table.compute_norm(self._job(uncounted)[1], norm)
        return judge(self._over_ranks(question, norm, max_norm), max_norm)

    def _over_ranks(self, question: Question, norm: GradientNorm, max_norm: float | None) -> GradientNorm | RanksNorm:
        if self.ranks is None:
            return norm

        def sums(classes: Sequence[int]) -> list[float]:
            of_chunks, found = self.table.each_chunk(classes), list[float]()
            for number in range(max(classes, default=0) + 1):
                found.append(native.ordered_sum(norm.sums[of_chunks == number]))
                if number:
                    states = (state for state, own in zip(self.table.states, classes, strict=True) if own == number)
                    found.append(sum(state.local.numel() for state in states if state.parameter.grad is None))
            return found

        return self.ranks.norm(question, max_norm, norm.count, sums)

    def _apply(self, contributions: Sequence[_Contribution], clip: float) -> list[_Contribution]:
        """Publish the speculated values that are right for this clip coefficient, and return which; update the rest."""
        accepted: list[_Contribution] = []
        near: list[_Contribution] = []
        rest: list[_Contribution] = []
        products = _Products()
        for contribution in contributions:
            if clip != 1.0:
                if contribution.scale.factor != 1.0:
                    contribution.apply_factors(products)
                contribution.scale = Scale(clip)
            pending = contribution.pending
            if pending is None or pending.slot is None or pending.is_stale or pending.hyper != contribution.hyper:
                rest.append(contribution)
            elif pending.scale == contribution.scale:
                accepted.append(contribution)
            else:
                (near if pending.can_be_patched(contribution.scale) else rest).append(contribution)
        if near:
            (accepted if self._patch(near) else rest).extend(near)
        redone = set[ParameterState]()
        for contribution in rest:
            if contribution.waits and (record := _pending_of(contribution.piece)).slot is not None:
                redone.add(contribution.piece.state)
                record.slot = None
        self.statistics.respeculated += len(redone)
        count = self.table.prepared_count(self.table.rows_of([contribution.piece for contribution in contributions]))
        if rest:
            self._update(rest)
        if accepted:  # nothing may fail from here on
            self._publish(accepted)
        count()
        return accepted

    def _count(self, accepted: Sequence[_Contribution], begin: float) -> None:
        self._spent("resolve_seconds", begin)
        self.statistics.accepted += len({contribution.piece.state for contribution in accepted})

    def _applied(self, contributions: Sequence[_Contribution], arrived: float, *, is_own: bool) -> Applied | None:
        """Return what a step did to those gradients that waited for it, whose norm was `arrived`; None without any.

        Where less than four fifths of the elements are multiplied alike, some are likely to be left as they are.
        """
        elements: collections.Counter[float | None] = collections.Counter()
        for contribution in contributions:
            if contribution.waits:
                elements[None if contribution.pending is None else contribution.scale.factor] += (
                    contribution.piece.shape.numel()
                )
        if not elements:
            return None
        factor, count = elements.most_common(1)[0]
        if count < 0.8 * elements.total():
            factor = self.expected_scale
        return Applied(arrived, factor, self.expected_scale, is_own)

    def _patch(self, contributions: Sequence[_Contribution]) -> bool:
        """Make speculated values those of this step's factor; return whether there was memory for that."""
        pieces = [contribution.piece for contribution in contributions]
        rows, records = self.table.rows_of(pieces), [*map(_pending_of, pieces)]
        for record in records:
            record.is_stale = True  # until all is done
        with MayLackMemory():
            self.statistics.patched_elements += self.table.run_patch(rows, records, *self._coefficients(contributions))
            self.statistics.patched += len({piece.state for piece in pieces})
            for contribution, record in zip(contributions, records, strict=True):
                record.scale, record.is_stale = contribution.scale, False
            return True
        return False

    def _publish(self, contributions: Sequence[_Contribution]) -> None:
        records = {contribution.piece: _pending_of(contribution.piece) for contribution in contributions}
        self.table.new_values.publish({piece: record.slot for piece, record in records.items() if record.slot})
        for piece, record in records.items():
            record.slot = record.interval = record.listed = None
            self._move(piece, Phase.ACCEPTED, record)

    def _update(self, contributions: Sequence[_Contribution]) -> None:
        """Update parameters in place."""
        states = [contribution.piece.state for contribution in contributions]
        runs = [(contribution.hyper, 1) for contribution in contributions]
        self._make_ready(states, self.table.rows_of(states), runs)
        resident = self.table.resident
        there = [each for each in contributions if each.is_resident] if resident is not None else []
        here = [each for each in contributions if not each.is_resident] if there else contributions
        update_here = self._prepared(here)  # whose memory is there before anything is changed
        if resident is not None and there:
            pieces, displaced = [contribution.piece for contribution in there], there
            with MayLackMemory():  # first: the device works while the host does
                coefficients, indices = self._coefficients(there)
                resident.step(pieces, [contribution.gradient for contribution in there], indices, coefficients.sets)
                self.table.new_values.mark_published()
                displaced = []
            if displaced:  # nothing was changed; the host has room
                for contribution in displaced:
                    contribution.gradient = contribution.piece.host_copy(contribution.gradient)
                update_here = None  # which frees its memory
                update_here = self._prepared([*here, *displaced])
                self.statistics.displaced += len({piece.state for piece in pieces})
        if update_here is not None:
            update_here()
        for contribution in contributions:
            self._move(contribution.piece, Phase.CLEAN, None)

    def _prepared(self, contributions: Sequence[_Contribution]) -> Callable[[], None] | None:
        """Return what updates parameters on the host; None without any."""
        if not contributions:
            return None
        return self.table.prepared_update(*self._job(contributions), *self._coefficients(contributions))

    def _job(self, contributions: Sequence[_Contribution]) -> tuple[Rows, Segments]:
        rows = self.table.rows_of([contribution.piece for contribution in contributions])
        return rows, self.table.job(rows, [contribution.gradient for contribution in contributions])

    def _coefficients(self, contributions: Sequence[_Contribution]) -> tuple[CoefficientTable, list[int]]:
        table, steps = CoefficientTable(), self.table.steps
        return table, [
            table.index(
                contribution.hyper,
                int(steps[contribution.piece.state.row]) + 1,
                contribution.scale,
                contribution.piece.is_double,
            )
            for contribution in contributions
        ]

    def _reported(self, contributions: Sequence[_Contribution], outcome: StepOutcome) -> StepOutcome:
        """Return the outcome with the factors that others applied to all gradients; learn what to expect next.

        Ranks need not all have taken their gradients, so that over several of them the outcome stays as it is.
        """
        distinct, scales = dict[object, TakenGradient](), set[float | None]()
        for contribution in contributions:
            if not contribution.waits or contribution.taken is None:
                return outcome
            distinct[contribution.taken.factors] = contribution.taken
            scales.add(None if contribution.pending is None else contribution.scale.factor)
        factors, may_repeat = {(1.0, 1.0)}, len(scales) == 1
        if distinct.keys() != {()}:
            factors = {(taken.unscale_factor(), _clip_factor(taken)) for taken in distinct.values()}
            may_repeat = may_repeat and not any(map(_may_clip, distinct.values()))
        if len(factors) != 1:
            return outcome
        unscale, clip = factors.pop()
        scale = scales.pop() if may_repeat else None
        self.expected_scale = scale if scale and scale == self._last_scale and scale > 0.0 else unscale
        self._last_scale = scale
        if not 0.0 < clip < 1.0 or outcome.kind is StepKind.SKIPPED or self.ranks is not None:
            return outcome
        norm = self.table.norm.total * unscale  # before any clipping
        return StepOutcome(StepKind.CLIPPED, norm, outcome.clip_coefficient * clip)

    # ---- after the verdict -------------------------------------------------------------------------------------------

    def commit(self, elements: float = math.inf, num_threads: int | None = None) -> int:
        """Fold accepted gradients of at least this many elements, oldest first, into the state; return of how many."""
        with self._timed("commit_seconds"):
            chosen: list[Piece] = []
            count = 0
            for piece in self._members[Phase.ACCEPTED]:
                if count >= elements:
                    break
                chosen.append(piece)
                count += piece.shape.numel()
            self._commit(chosen, num_threads)
            return count

    def _commit_of(self, states: Sequence[ParameterState]) -> None:
        self._commit([piece for piece in pieces_of(states) if piece.phase is Phase.ACCEPTED])

    def _commit(self, pieces: Sequence[Piece], num_threads: int | None = None) -> None:
        if not pieces:
            return
        self.table.run_commit(self.table.rows_of(pieces), [_pending_of(piece) for piece in pieces], num_threads)
        for piece in pieces:
            self._move(piece, Phase.CLEAN, None)

    # ---- questions ---------------------------------------------------------------------------------------------------

    def norm_so_far(self) -> float:
        """Return the norm of the gradients that wait for a verdict, as they arrived."""
        with THIS_THREAD.deferred_signals, self.lock:
            return self.table.norm.total

    def nonfinite_of(self, taken: TakenGradient) -> int | None:
        """Return the number of Inf and NaN in a gradient, where they were counted."""
        with THIS_THREAD.deferred_signals, self.lock:
            state = None if taken.parameter is None else self.table.state_of(taken.parameter)
            if state is None or not state.waits_with(taken):
                return None
            return int(self.table.norm.nonfinite[self.table.chunks_of(state.row)].sum())

    def grad_norm(self, gradients: StepGradients) -> float:
        """Return the norm of these gradients, as a step would judge it."""
        with self._timed("norm_seconds"):
            if not gradients.are_whole:
                contributions, others = self._contributions(gradients)
                norm = self.table.norm.copy()
                for piece in others:
                    norm.clear(self.table.chunks_of(piece.row))
                return self._judge(Question.NORM, contributions, norm, 0.0).grad_norm
            norm = GradientNorm.zeros(len(self.table.norm.sums))
            self.table.compute_norm(gradients.job(self.table), norm)
            return self._over_ranks(Question.NORM, norm, 0.0).total

    # ---- outside writes ----------------------------------------------------------------------------------------------

    def adopt_outside_writes(
        self, states: Sequence[ParameterState] | None = None, *, with_samples: bool = False
    ) -> None:
        """Compare parameters with their masters and adopt what differs; by default where something hints at a write.

        `with_samples`: also writes that left no hint, as far as a step would find them; nothing may be accepted.
        """
        with self._timed("commit_seconds"):
            if states is not None:
                self._adopt(states, is_final=True)
            else:
                rows = self.table.fingerprints.seen_hints(self.table.all_rows)  # bound() has just looked
                self._adopt([state for row in rows if has_memory((state := self.table.states[row]).local)])
            if with_samples:
                self._adopt([self.table.states[row] for row in self._samples.find_written(self.table.all_rows)])

    def _adopt(self, states: Sequence[ParameterState], *, is_final: bool = False) -> None:
        if not states:
            return
        for state in states:
            if not has_memory(state.local):
                raise ValueError(
                    f"{state.name} has no data, because its storage was freed or it is on the meta device, expected "
                    "its values in memory; bring them back before this call, or set its .grad to None"
                )
        self._commit_of(states)
        self.table.bring_home(pieces_of(states))
        self.table.new_values.settle()
        for state in states:
            for piece in state.pieces:  # the verdict updates them in place: what speculation has read was changed
                if piece.phase is Phase.SPECULATED:
                    _pending_of(piece).is_stale = True
            self.table.adopt_outside_write(state, is_final=is_final)

    def _make_ready(self, states: Sequence[ParameterState], rows: Rows, runs: Runs) -> bool:
        """Create the state that a step with these hyper-parameters reads and writes; return whether any was missing."""
        if self.table.are_ready(rows, runs):
            return False
        self.table.create_state(states, hyper_of_each(runs))
        return True

    @contextmanager
    def _timed(self, counter: str) -> Iterator[None]:
        """Hold the lock, measure the time, and defer signals, so that the work inside is done completely.

        Scalars are computed in the floating-point mode that kernels have.
        """
        with THIS_THREAD.deferred_signals, self.lock, native.UsualFloatMode():
            begin = time.perf_counter()
            try:
                with record_function(f"superadam: {counter.partition('_')[0]}") if is_profiling() else _NOTHING:
                    yield
            finally:
                self._spent(counter, begin)

    def _spent(self, counter: str, begin: float) -> float:
        """Add the time since `begin` to one of the statistics; return the present time."""
        now = time.perf_counter()
        setattr(self.statistics, counter, getattr(self.statistics, counter) + now - begin)
        return now


class _HeldElsewhere:
    """Stands, in a forked process, for a lock that another thread held."""

    def acquire(self, *, blocking: bool) -> None: ...

    def __enter__(self) -> NoReturn:
        raise RuntimeError(
            "this process was forked while another thread was inside a step of the optimizer, half of which may be "
            "made here; fork while no other thread calls it, or load what was saved into a new one"
        )

    def __exit__(self, *_: object) -> None: ...


_transactions = weakref.WeakSet[Transaction]()


def _look_after_fork() -> None:
    for transaction in _transactions:
        if transaction.lock.acquire(blocking=False):
            transaction.lock.release()
        else:
            transaction.lock = _HeldElsewhere()


os.register_at_fork(after_in_child=_look_after_fork)


def _may_clip(taken: TakenGradient) -> bool:
    """Whether a factor is a tensor, as coefficients of clipping are: one that repeats says nothing of the next."""
    return any(isinstance(factor.value, Tensor) for factor in taken.factors if factor.kind is not FactorKind.UNSCALE)


def _clip_factor(taken: TakenGradient) -> float:
    factors = ((factor.kind, factor.number) for factor in taken.factors if factor.kind is not FactorKind.UNSCALE)
    return math.prod(
        number if kind is FactorKind.MULTIPLY else 1.0 / number if number else math.inf for kind, number in factors
    )


def _cannot_fuse(piece: Piece, new: Pending) -> bool:
    """Whether an accepted gradient must be committed before the new one: the fused pass takes two of one dtype."""
    return new.slot is None or _pending_of(piece).gradient.dtype != new.gradient.dtype


def _is_speculated(piece: Piece, taken: weakref.ref[TakenGradient]) -> bool:
    """Whether there is a new value of this gradient that waits for its verdict."""
    record = piece.pending if piece.phase is Phase.SPECULATED else None
    return record is not None and record.slot is not None and record.taken is taken


def _pending_of(piece: Piece) -> Pending:
    assert piece.pending is not None
    return piece.pending
