"""Overlapped = synchronous on every seeded schedule; and the faults that would break it are found."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from overlapped_run import OverlappedRun

from superadam import transaction as transaction_module
from superadam.devices import Stream
from superadam.devices.simulated import SimulatedDevice, SimulatedEvent, _alias
from superadam.parameter import ParameterState
from superadam.residence import Residence
from superadam.scheduler import OffloadScheduler
from superadam.table import ParameterTable
from superadam.transaction import Transaction
from superadam.transfers import Held, Transfers
from superadam.validation import judge

DEEP = os.environ.get("SUPERADAM_DEEP") == "1"
MACHINE = settings(
    max_examples=10_000 if DEEP else 300,
    stateful_step_count=12,
    suppress_health_check=list(HealthCheck),
)

TestOverlappedRun = OverlappedRun.TestCase
TestOverlappedRun.settings = MACHINE


# -- planted faults ----------------------------------------------------------------------------------------------------


class WithoutWait(SimulatedDevice):
    """The model's stream does not wait for uploads."""

    def wait(self, stream: Stream, event: SimulatedEvent) -> None:  # type: ignore[override]
        if stream is not Stream.CURRENT:
            super().wait(stream, event)


class WithOldEvents(SimulatedDevice):
    """The event of a stream's first use is recorded again and again, but whoever waits sees that it passed long ago."""

    def record(self, stream: Stream) -> SimulatedEvent:
        event = super().record(stream)
        return self.__dict__.setdefault("first_events", {}).setdefault(stream, event)


class WithoutKeeping(SimulatedDevice):
    """Staged gradients are freed while their copies are still under way."""

    def keep(self, tensor: Any, stream: Stream) -> None:
        pass


def commit_with_another_lr(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Transaction._commit

    def commit(self: Transaction, states: Any) -> None:
        for state in states:
            state.pending = replace(state.pending, hyper=replace(state.pending.hyper, lr=state.pending.hyper.lr / 2))
        original(self, states)

    monkeypatch.setattr(Transaction, "_commit", commit)


def sum_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a step was speculated: the plain twin sums as it should."""
    resolve = Transaction.resolve

    def backwards(self: Transaction, *args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(transaction_module, "judge", lambda sums, *rest: judge(sums[::-1].copy(), *rest))
            return resolve(self, *args, **kwargs)

    monkeypatch.setattr(Transaction, "resolve", backwards)


def redo_forgets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Transaction._redo
    monkeypatch.setattr(Transaction, "_redo", lambda self, states, *rest: original(self, states[:-1], *rest))


def drop_forgets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ParameterTable.restore
    monkeypatch.setattr(ParameterTable, "restore", lambda self, rows: original(self, rows[:-1]))


def on(device: type[SimulatedDevice]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(OverlappedRun, "make_device", staticmethod(device))


def state_is_not_brought_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes on the host read and write what was the state some steps ago."""
    monkeypatch.setattr(ParameterTable, "bring_home", lambda self, rows=None: None)


def speculation_leaves_state_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a bucket is speculated on whose state is on the device; whoever reads state finds it."""
    original = ParameterTable.bring_home

    def bring_home(self: ParameterTable, rows: Any = None) -> None:
        if rows is None:
            original(self)

    monkeypatch.setattr(ParameterTable, "bring_home", bring_home)


def published_state_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ParameterTable.bring_home

    def bring_home(self: ParameterTable, rows: Any = None) -> None:
        if rows is not None:
            original(self, rows)

    monkeypatch.setattr(ParameterTable, "bring_home", bring_home)


def placing_leaves_stale_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was on the device before counts when a parameter is kept again, whatever came in between."""
    left: dict[int, tuple[ParameterState, Any]] = {}
    original = Residence._moved

    def moved(self: Residence, state: ParameterState) -> Any:
        return left.setdefault(id(state), (state, original(self, state)))[1]

    monkeypatch.setattr(Residence, "_moved", moved)


def norm_goes_into_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ParameterTable.put_norm
    monkeypatch.setattr(ParameterTable, "put_norm", lambda self, rows, norm: original(self, rows[::-1], norm))


def held(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Transfers, Held], Held]) -> None:
    original = Transfers.hold
    monkeypatch.setattr(Transfers, "hold", lambda self, *args: spoil(self, original(self, *args)))


def kept_gradient_is_freed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    held(monkeypatch, lambda _, one: replace(one, gradients=[_alias(gradient) for gradient in one.gradients]))


def kept_norm_is_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    held(monkeypatch, lambda self, one: replace(one, arrived=SimulatedEvent(cast(SimulatedDevice, self.device))))


def kept_step_has_another_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had been made with the coefficients of speculation: before it was known that the step is clipped."""
    original = Transaction._update_kept

    def unclipped(self: Transaction, pending: Any) -> None:
        original(self, {state: record.at_scale(record.unscale) for state, record in pending.items()})

    monkeypatch.setattr(Transaction, "_update_kept", unclipped)


def kept_parameters_hide_outside_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Transaction._notice_outside_writes

    def notice(self: Transaction, states: Any) -> None:
        original(self, [state for state in states if self.table.is_home(state)])

    monkeypatch.setattr(Transaction, "_notice_outside_writes", notice)


def forward_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadScheduler, "await_parameters", lambda self, parameters=None: None)


OF_KEPT_STATE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "state that is not brought home": state_is_not_brought_home,
    "speculation over state that is on the device": speculation_leaves_state_away,
    "state that is published while it is on the device": published_state_is_stale,
    "stale state on the device": placing_leaves_stale_state,
    "a kept norm in other rows": norm_goes_into_other_rows,
    "a kept gradient freed early": kept_gradient_is_freed_early,
    "a kept norm read early": kept_norm_is_read_early,
    "a kept step that is not clipped": kept_step_has_another_scale,
    "an outside write to a kept parameter that is missed": kept_parameters_hide_outside_writes,
}

FAULTS = {
    "a missing wait": on(WithoutWait),
    "a forward that does not wait": forward_does_not_wait,
    "a reused event": on(WithOldEvents),
    "a gradient freed early": on(WithoutKeeping),
    "a commit with another lr than the captured one": commit_with_another_lr,
    "a verdict summed in another order": sum_in_another_order,
    "a redo that forgets one": redo_forgets_one,
    "a drop that forgets one": drop_forgets_one,
    **OF_KEPT_STATE,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some only show in rare schedules: the first that shows one ends the search."""
    if fault in OF_KEPT_STATE:
        on(SimulatedDevice)(monkeypatch)
    FAULTS[fault](monkeypatch)
    found = settings(MACHINE, max_examples=1000, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(OverlappedRun, settings=found)
