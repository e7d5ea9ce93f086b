"""The transaction: speculate, validate, then accept, redo or drop; commit later.

Speculation reads the state and writes only working copies, so that rolling back is writing them again from the
masters, exactly. The gradient is kept as *pending*; an accepted pending gradient is folded into the state by a commit,
which may wait until the next gradient of that parameter arrives and share its pass. This module decides which pass
runs over which rows, and owns the phases of all parameters. It knows nothing of torch.optim.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from superadam.arrivals import Arrivals
from superadam.hyperparameters import Hyperparameters
from superadam.outcome import Statistics, StepKind, StepOutcome
from superadam.outside_writes import OutsideWrite, adopt_into_clean
from superadam.parameter import ParameterState, Pending, Phase
from superadam.table import CoefficientTable, ParameterTable, Segments
from superadam.validation import GradientNorm, judge


class Transaction:
    """Phases and passes over the parameters of one `ParameterTable`."""

    def __init__(self, table: ParameterTable, statistics: Statistics) -> None:
        self.table = table
        self.statistics = statistics
        self._lock = threading.RLock()
        self._members: dict[Phase, dict[ParameterState, None]] = {phase: {} for phase in Phase}
        for state in table.states:
            self._members[state.phase][state] = None

    def in_phase(self, phase: Phase) -> list[ParameterState]:
        """Return the states in this phase, in the order in which they came into it."""
        return list(self._members[phase])

    @property
    def is_open(self) -> bool:
        """Whether speculation waits for its verdict."""
        return bool(self._members[Phase.SPECULATED])

    def _move(self, state: ParameterState, phase: Phase, pending: Pending | None) -> None:
        del self._members[state.phase][state]
        self._members[phase][state] = None
        state.phase, state.pending = phase, pending

    def speculate(self, arrivals: Arrivals, unscale: float = 1.0, *, writes: bool = True) -> None:
        """Write working copies as if these gradients were accepted unclipped, and keep the gradients as pending.

        Args:
            arrivals: none of a parameter that is speculated already.
            unscale: factor that undoes loss scaling.
            writes: whether working copies are written now; otherwise only the norm is taken, and they are written once,
                with the verdict.

        Raises:
            RuntimeError: a parameter is speculated already; nothing was changed.
        """
        _refuse_second(arrivals.states)
        with self._timed("speculate_seconds"):
            self._notice_outside_writes(arrivals.states)
            if not self.is_open:
                self.table.clear_sums()
            self._make_ready(arrivals)
            pending = self._records(arrivals, unscale)
            if not writes:
                self._commit([state for state in pending if state.phase is Phase.ACCEPTED])
                self._take_norm(arrivals)
                self._set_pending(pending)
                return
            for state in arrivals.states:
                if state.is_own_master and state.phase is Phase.CLEAN:
                    self.table.refresh_private(state)
            pending = {state: record.at_scale(unscale) for state, record in pending.items()}
            self._commit([state for state, new in pending.items() if _cannot_fuse(state, new)])
            fused = {state: new for state, new in pending.items() if state.phase is Phase.ACCEPTED}
            alone = {state: new for state, new in pending.items() if state.phase is Phase.CLEAN}
            if alone:
                self._write_speculation(alone, with_norm=True)
                self._set_pending(alone)
            if fused:
                self._commit_and_speculate(fused)
                self._set_pending(fused)

    def keep(self, arrivals: Arrivals, norm: GradientNorm, unscale: float = 1.0) -> None:
        """Keep gradients as pending that stayed on the device, for a step there once the verdict is known.

        Args:
            arrivals: none of a parameter that is speculated already; their gradients are on the device.
            norm: of these gradients, in this order.
            unscale: factor that undoes loss scaling.

        Raises:
            RuntimeError: as `speculate`.
        """
        _refuse_second(arrivals.states)
        with self._timed("speculate_seconds"):
            if not self.is_open:
                self.table.clear_sums()
            self._commit([state for state in arrivals.states if state.phase is Phase.ACCEPTED])
            self.table.put_norm(self.table.rows_of(arrivals.states), norm)
            self._set_pending(self._records(arrivals, unscale, is_kept=True))

    def resolve(self, hyper_now: Mapping[ParameterState, Hyperparameters], max_norm: float | None) -> StepOutcome:
        """Validate everything speculated, and accept it, redo it with the right coefficients, or drop it.

        Args:
            hyper_now: the present hyper-parameters of each speculated parameter; where they differ from the captured
                ones, the working copy is speculated again with them.
            max_norm: limit of the global gradient norm; None or inf for no limit.
        """
        with self._timed("resolve_seconds"):
            states = self.in_phase(Phase.SPECULATED)
            unscale = states[0].pending.unscale if states and states[0].pending else 1.0
            outcome = judge(self.table.sums, self.table.nonfinite, unscale, max_norm)
            if outcome.kind is StepKind.SKIPPED:
                self._drop(states)
            else:
                shown, waiting = _split(states)
                writes = self._find_outside_writes(shown)
                self._update(waiting, hyper_now, outcome.clip_coefficient)
                self._redo(shown, hyper_now, outcome.clip_coefficient)
                for state in shown:
                    record = _pending_of(state)
                    self._move(state, Phase.ACCEPTED, record)
                    self.table.steps[state.row] = record.step
                    self._settle_provisional(state, record.hyper)
                self.table.is_published[self.table.rows_of(shown)] = False
                if writes:
                    self._commit([write.state for write in writes])
                    self._adopt_found(writes)
            return outcome

    def roll_back(self) -> None:
        """Drop unresolved speculation: working copies and state are what they were before it, bit for bit."""
        with self._timed("resolve_seconds"):
            self._drop(self.in_phase(Phase.SPECULATED))

    def commit(self) -> None:
        """Fold every accepted gradient into the state, and every outside write into the masters."""
        with self._timed("commit_seconds"):
            self._commit(self.in_phase(Phase.ACCEPTED))
            self._notice_outside_writes(self.in_phase(Phase.CLEAN))

    def commit_some(self, elements: int) -> int:
        """Commit accepted gradients of so many elements, first those that came first; return of how many it was."""
        with self._timed("commit_seconds"):
            chosen: list[ParameterState] = []
            count = 0
            for state in self._members[Phase.ACCEPTED]:
                if count >= elements:
                    break
                chosen.append(state)
                count += state.parameter.numel()
            self._commit(chosen)
            return count

    def norm_so_far(self) -> float:
        """Return the norm of the gradients that were speculated on in the open step, as they arrived."""
        with self._lock:
            return judge(self.table.sums, self.table.nonfinite, 1.0, None).grad_norm if self.is_open else 0.0

    def grad_norm(self, arrivals: Arrivals) -> float:
        """Return the norm of these gradients together with the speculated ones, as they arrived."""
        with self._timed("norm_seconds"):
            if not self.is_open:
                self.table.clear_sums()
            self._take_norm(arrivals)
            return judge(self.table.sums, self.table.nonfinite, 1.0, None).grad_norm

    def adopt_outside_writes(self, states: Sequence[ParameterState]) -> None:
        """Compare parameters with their masters and adopt what differs.

        Raises:
            RuntimeError: one of them has open speculation; nothing was changed.
        """
        for state in states:
            if state.phase is Phase.SPECULATED:
                raise RuntimeError(
                    f"{state.name} has open speculation, so its value is unsettled; call resolve() or rollback() first"
                )
        with self._timed("commit_seconds"):
            self._adopt(states)

    def step(
        self, arrivals: Arrivals, max_norm: float | None, *, unscale: float = 1.0, is_rejected: bool = False
    ) -> StepOutcome:
        """Make one synchronous step: norm, verdict, then an update in place unless a gradient is not finite.

        Args:
            arrivals: the gradients.
            max_norm: limit of the global gradient norm; None or inf for no limit.
            unscale: factor that undoes loss scaling.
            is_rejected: skip this step whatever the gradients are.
        """
        with self._timed("commit_seconds"):
            self._commit(self.in_phase(Phase.ACCEPTED))
        rows = self.table.rows_of(arrivals.states)
        with self._timed("norm_seconds"):
            self._adopt_rows(self.table.fingerprints.seen_hints(rows))  # bound() has just looked
            self.table.clear_sums()
            segments = self._take_norm(arrivals)
            outcome = judge(self.table.sums, self.table.nonfinite, unscale, max_norm, is_rejected=is_rejected)
        if outcome.kind is not StepKind.SKIPPED:
            with self._timed("update_seconds"):
                for state in self._make_ready(arrivals):
                    state.is_provisional = state.is_max_provisional = False
                coefficients, scale = CoefficientTable(), outcome.clip_coefficient * unscale
                indices = self.table.indices_of_next_step(rows, arrivals.runs, scale, coefficients)
                self.table.update(rows, segments, coefficients, indices)
        return outcome

    def _take_norm(self, arrivals: Arrivals) -> Segments:
        segments = arrivals.segments
        if segments is None:
            segments = self.table.segments(self.table.rows_of(arrivals.states), arrivals.gradients)
        self.table.norm(segments)
        return segments

    def _records(self, arrivals: Arrivals, unscale: float, *, is_kept: bool = False) -> dict[ParameterState, Pending]:
        return {
            state: Pending.of(gradient, hyper, int(self.table.steps[state.row]) + 1, unscale, is_kept=is_kept)
            for state, gradient, hyper in zip(arrivals.states, arrivals.gradients, arrivals.hyper, strict=True)
        }

    def _set_pending(self, pending: Mapping[ParameterState, Pending]) -> None:
        for state, record in pending.items():
            self._move(state, Phase.SPECULATED, record)

    def _redo(
        self, states: Sequence[ParameterState], hyper_now: Mapping[ParameterState, Hyperparameters], clip: float
    ) -> None:
        """Speculate again where the captured scale or hyper-parameters are not those of the verdict."""
        changed: dict[ParameterState, Pending] = {}
        for state in states:
            record = _pending_of(state)
            scale = clip * record.unscale
            if scale != record.scale or hyper_now[state] != record.hyper:
                changed[state] = record.at_scale(scale, hyper_now[state])
        if changed:
            runs = [(record.hyper, 1) for record in changed.values()]
            self._make_ready(Arrivals(list(changed), [record.gradient for record in changed.values()], runs))
            self._write_speculation(changed)
            for state, record in changed.items():
                self.statistics.respeculated += 1
                state.pending = record

    def _update(
        self, states: Sequence[ParameterState], hyper_now: Mapping[ParameterState, Hyperparameters], clip: float
    ) -> None:
        """Make the step of parameters that still show the one before, in place: nothing is left to commit.

        What somebody wrote to them meanwhile was written before this step.
        """
        if not states:
            return
        self._notice_outside_writes(states)
        records = [_pending_of(state) for state in states]
        gradients = [record.gradient for record in records]
        self._make_ready(Arrivals(states, gradients, [(hyper_now[state], 1) for state in states]))
        pending = {
            s: record.at_scale(clip * record.unscale, hyper_now[s]) for s, record in zip(states, records, strict=True)
        }
        # The device first: it works beside us, and where its memory is short, nothing was changed yet.
        self._update_kept({state: record for state, record in pending.items() if record.is_kept})
        self._update_here({state: record for state, record in pending.items() if not record.is_kept})

    def _update_here(self, pending: Mapping[ParameterState, Pending]) -> None:
        if pending:
            rows, coefficients = self.table.rows_of(list(pending)), CoefficientTable()
            segments = self.table.segments(rows, [record.gradient for record in pending.values()])
            self.table.update(rows, segments, coefficients, _indices(coefficients, pending))
            self._note_updated(pending)

    def _update_kept(self, pending: Mapping[ParameterState, Pending]) -> None:
        if pending:
            rows, coefficients = self.table.rows_of(list(pending)), CoefficientTable()
            gradients = [record.gradient for record in pending.values()]
            try:
                self.table.update_kept(rows, gradients, coefficients, _indices(coefficients, pending))
            except torch.OutOfMemoryError:  # nothing was changed; the host has room
                self._update_here({s: replace(record, gradient=_host_copy(s)) for s, record in pending.items()})
            else:
                self._note_updated(pending)

    def _note_updated(self, pending: Mapping[ParameterState, Pending]) -> None:
        for state, record in pending.items():
            self._settle_provisional(state, record.hyper)
            self._move(state, Phase.CLEAN, None)

    def _settle_provisional(self, state: ParameterState, hyper: Hyperparameters) -> None:
        """Keep what was made for a step that is accepted with these hyper-parameters."""
        if state.is_max_provisional and not hyper.amsgrad:  # it was switched off after speculating
            state.max_exp_avg_sq = None
            self.table.note_moved(state)
        state.is_provisional = state.is_max_provisional = False

    def _write_speculation(self, pending: Mapping[ParameterState, Pending], *, with_norm: bool = False) -> None:
        coefficients = CoefficientTable()
        indices = _indices(coefficients, pending)
        gradients = [record.gradient for record in pending.values()]
        self.table.speculate(self.table.rows_of(list(pending)), gradients, coefficients, indices, with_norm=with_norm)

    def _commit_and_speculate(self, pending: Mapping[ParameterState, Pending]) -> None:
        coefficients = CoefficientTable()
        accepted = {state: _pending_of(state) for state in pending}
        self.table.commit_and_speculate(
            self.table.rows_of(list(pending)),
            [record.gradient for record in accepted.values()],
            [record.gradient for record in pending.values()],
            coefficients,
            _indices(coefficients, accepted),
            _indices(coefficients, pending),
        )

    def _drop(self, states: Sequence[ParameterState]) -> None:
        if not states:
            return
        shown, waiting = _split(states)
        writes = self._find_outside_writes(shown)
        if shown:
            self.table.restore(self.table.rows_of(shown))
        for state in states:
            self._move(state, Phase.CLEAN, None)
        self._adopt_found(writes)
        self._notice_outside_writes(waiting)
        for state in states:
            if state.is_provisional or state.is_max_provisional:
                state.forget_provisional()
                self.table.note_moved(state)
        self.table.clear_sums()
        self.statistics.dropped += len(shown)

    def _commit(self, states: Sequence[ParameterState]) -> None:
        if not states:
            return
        coefficients = CoefficientTable()
        accepted = {state: _pending_of(state) for state in states}
        gradients = [record.gradient for record in accepted.values()]
        self.table.commit(self.table.rows_of(states), gradients, coefficients, _indices(coefficients, accepted))
        for state in states:
            self._move(state, Phase.CLEAN, None)

    def _make_ready(self, arrivals: Arrivals) -> list[ParameterState]:
        """Create what a step with these hyper-parameters reads and writes; return the states that lacked something."""
        with_max = any(hyper.amsgrad for hyper, _ in arrivals.runs)
        if self.table.are_ready(self.table.rows_of(arrivals.states), with_max=with_max):
            return []
        made = [
            state
            for state, hyper in zip(arrivals.states, arrivals.hyper, strict=True)
            if state.exp_avg is None
            or (state.master is None and not state.is_own_master)
            or (hyper.amsgrad and state.max_exp_avg_sq is None)
        ]
        hyper_of = dict(zip(arrivals.states, arrivals.hyper, strict=True))
        for state in made:
            state.create_state()
            if hyper_of[state].amsgrad and state.max_exp_avg_sq is None:
                state.create_max()
            self.table.note_moved(state)
        return made

    def _notice_outside_writes(self, states: Sequence[ParameterState]) -> None:
        """Adopt what was written to parameters without open speculation, after committing what is accepted."""
        self._adopt_rows(self.table.fingerprints.hints(self.table.rows_of(states)))

    def _adopt_rows(self, rows: Sequence[int]) -> None:
        if rows:
            self._adopt([self.table.states[row] for row in rows])

    def _adopt(self, states: Sequence[ParameterState]) -> None:
        self._commit([state for state in states if state.phase is Phase.ACCEPTED])
        self.table.bring_home(self.table.rows_of(states))
        self.table.settle()
        for state in states:
            adopt_into_clean(state)
            self.table.is_private_fresh[state.row] = False
            self.table.fingerprints.note(state.row)
            self.table.note_moved(state)

    def _adopt_found(self, writes: Sequence[OutsideWrite]) -> None:
        if writes:
            self.table.settle()  # or what is on its way to the parameters would overwrite them afterwards
        for write in writes:
            write.adopt()
            self.table.fingerprints.note(write.state.row)

    def _find_outside_writes(self, states: Sequence[ParameterState]) -> list[OutsideWrite]:
        """Find what was written over speculation that parameters show, by making it once more."""
        fingerprints = self.table.fingerprints
        hinted = [state for state in states if fingerprints.is_hinted(state.row)]
        if not hinted:
            return []
        self.table.settle()
        present = [state.parameter.detach().clone() for state in hinted]
        for state in hinted:
            self.table.note_moved(state)
        self._write_speculation({state: _pending_of(state) for state in hinted})
        self.table.settle()
        writes = []
        for state, values in zip(hinted, present, strict=True):
            speculated = state.parameter.detach().cpu().clone()
            state.parameter.data.copy_(values)
            fingerprints.note(state.row)
            found = OutsideWrite.found_in(state, speculated)
            if found is not None:
                writes.append(found)
        return writes

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Hold the lock, so that a worker and the training thread never run a pass at once, and take the time."""
        with self._lock:
            begin = time.perf_counter()
            try:
                yield
            finally:
                setattr(self.statistics, phase, getattr(self.statistics, phase) + time.perf_counter() - begin)


def _refuse_second(states: Sequence[ParameterState]) -> None:
    twice = [state.name for state in states if state.phase is Phase.SPECULATED]
    if twice:
        raise RuntimeError(
            f"{twice[0]} has a second gradient while speculation on its first one is open; "
            "call resolve() or rollback() first, or accumulate both gradients before speculating"
        )


def _split(states: Sequence[ParameterState]) -> tuple[list[ParameterState], list[ParameterState]]:
    """Return the speculated states whose parameters show the open step, and those that wait for the verdict."""
    shown = [state for state in states if state.shows_open_step]
    return shown, [state for state in states if not state.shows_open_step]


def _cannot_fuse(state: ParameterState, new: Pending) -> bool:
    """Whether an accepted gradient must be committed before the new one: the fused pass takes two of one dtype."""
    return state.phase is Phase.ACCEPTED and _pending_of(state).gradient.dtype != new.gradient.dtype


def _host_copy(state: ParameterState) -> Tensor:
    gradient = _pending_of(state).gradient
    return state.host_copy(gradient, gradient.dtype)


def _pending_of(state: ParameterState) -> Pending:
    assert state.pending is not None
    state.pending.check_unchanged(state.name)
    return state.pending


def _indices(coefficients: CoefficientTable, pending: Mapping[ParameterState, Pending]) -> list[int]:
    return [
        coefficients.index(record.hyper, record.step, record.scale, double=state.dtype == torch.float64)
        for state, record in pending.items()
    ]
