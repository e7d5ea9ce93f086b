"""Faults that would break the promise of equal bits: random programs find each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from offload import test_programs_random
from offload.test_programs import Program, Run
from offload.test_programs_random import BY_NAME, MACHINE, OftenFullDevice, OverlappedRun

from superadam.devices import Stream
from superadam.handles import gradient_handle
from superadam.handles.taken_gradient import TakenGradient
from superadam.kernels import native
from superadam.kernels.hyperparameters import Scale
from superadam.offload.shadow import FlatShadow
from superadam.offload.transfers import Transfers
from superadam.state.norm import GradientNorm
from superadam.state.parameter import ParameterState
from superadam.state.parameter import Phase as Of
from superadam.state.resident import ResidentStates
from superadam.state.table import ParameterTable
from superadam.step import transaction as transaction_module
from superadam.step.outcome import StepOutcome, judge
from superadam.step.transaction import Transaction
from superadam.testing.simulated import SimulatedDevice, SimulatedEvent, _alias

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True"),
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step"),
    pytest.mark.usefixtures("one_torch_thread"),
]

DEEP = os.environ.get("SUPERADAM_DEEP") == "1"
Plant = Callable[[pytest.MonkeyPatch], None]


class WithoutWait(SimulatedDevice):
    """The model's stream does not wait for uploads."""

    def wait(self, stream: Stream, event: SimulatedEvent) -> None:  # type: ignore[override]
        if stream is not Stream.CURRENT:
            super().wait(stream, event)


class WithOldEvents(SimulatedDevice):
    """The event of a stream's first use is recorded again and again, but waiting threads see it passed long ago."""

    def record(self, stream: Stream) -> SimulatedEvent:
        event = super().record(stream)
        return self.__dict__.setdefault("first_events", {}).setdefault(stream, event)


class WithoutKeepingGradients(SimulatedDevice):
    """Staged gradients are freed while their copies are still under way."""

    def record_stream(self, tensor: Any, stream: Stream) -> None:
        if stream is not Stream.DOWNLOAD:
            super().record_stream(tensor, stream)


class WithoutKeepingValues(SimulatedDevice):
    """New values are freed while their copies are still under way."""

    def record_stream(self, tensor: Any, stream: Stream) -> None:
        if stream is not Stream.UPLOAD:
            super().record_stream(tensor, stream)


def on(*devices: type[SimulatedDevice]) -> Plant:
    return lambda monkeypatch: monkeypatch.setattr(OverlappedRun, "devices", devices)


def _is_speculated(part: Any) -> bool:
    return part.pending is not None and part.pending.slot is not None


# Streams and memory


def shadow_is_sent_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the gradients whose memory it takes are still on their way out of it."""
    original = Transfers.download

    def download(self: Transfers, *args: Any, **options: Any) -> Any:
        sent, arrived = original(self, *args, **options)
        for shadow in (one.shadow for one in sent):
            if shadow is not None and shadow._memory is not None:
                assert shadow.values
                early = shadow._memory.view(shadow._dtype)[: shadow._layout.numel]
                self.device.copy(early, shadow._host[0], Stream.UPLOAD)
        return sent, arrived

    monkeypatch.setattr(Transfers, "download", download)


def shadow_is_published_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was in its memory before is published: the gradients."""
    original = FlatShadow.send

    def send(self: FlatShadow) -> None:
        original(self)
        self._arrived = None if self._arrived is None else SimulatedEvent(cast(SimulatedDevice, None))

    monkeypatch.setattr(FlatShadow, "send", send)


def publication_forgets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Transfers.publish
    monkeypatch.setattr(Transfers, "publish", lambda self, states, places: original(self, states[1:], places[1:]))


# Verdicts


def commit_with_another_lr(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Transaction._commit

    def commit(self: Transaction, states: Any, *rest: Any) -> None:
        for state in states:
            state.pending = replace(state.pending, hyper=replace(state.pending.hyper, lr=state.pending.hyper.lr / 2))
        original(self, states, *rest)

    monkeypatch.setattr(Transaction, "_commit", commit)


def sum_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where gradients were taken: the plain twin sums as it should."""
    original = Transaction._judge

    def backwards(self: Transaction, *args: Any) -> Any:
        def judge_backwards(norm: GradientNorm, *rest: Any) -> StepOutcome:
            return judge(GradientNorm(norm.sums[::-1].copy(), norm.nonfinite), *rest)

        with monkeypatch.context() as patch:
            patch.setattr(transaction_module, "judge", judge_backwards)
            return original(self, *args)

    monkeypatch.setattr(Transaction, "_judge", backwards)


def redo_forgets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Transaction._update

    def update(self: Transaction, parts: Sequence[Any]) -> None:
        again = [part for part in parts if part.taken is not None and not part.is_resident]
        original(self, [part for part in parts if not again or part is not again[-1]])

    monkeypatch.setattr(Transaction, "_update", update)


def clipped_step_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Transaction._apply

    def apply(self: Transaction, parts: Sequence[Any], clip: float) -> Any:
        for part in parts:
            if _is_speculated(part):
                part.pending = replace(part.pending, scale=part.scale if clip == 1.0 else Scale(clip))
        return original(self, parts, clip)

    monkeypatch.setattr(Transaction, "_apply", apply)


def _change_parts(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    original = Transaction._contributions

    def parts(self: Transaction, gradients: Any) -> Any:
        made, others = original(self, gradients)
        for part in made:
            change(part)
        ours = {part.piece for part in made if part.pending is not None}
        return made, [state for state in others if state not in ours]

    monkeypatch.setattr(Transaction, "_contributions", parts)


def changed_hyperparameters_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(part: Any) -> None:
        if _is_speculated(part):
            part.hyper = part.pending.hyper

    _change_parts(monkeypatch, change)


def edit_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was speculated on a gradient is published although `.grad` holds another one."""

    def change(part: Any) -> None:
        if part.pending is None and part.piece.phase is Of.SPECULATED and part.piece.pending.slot is not None:
            part.pending, part.waits = part.piece.pending, True

    _change_parts(monkeypatch, change)


def dropped_gradient_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the norm, although there is none in `.grad`."""
    original = Transaction._contributions
    monkeypatch.setattr(Transaction, "_contributions", lambda self, gradients: (original(self, gradients)[0], []))


def another_gradient_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was speculated on one gradient of a parameter counts for whichever handle is in `.grad`."""

    def waits(state: ParameterState, taken: TakenGradient) -> bool:
        return state.phase is Of.SPECULATED

    monkeypatch.setattr(ParameterState, "waits_with", waits)


def stale_speculation_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the state that it has read was changed since."""

    def change(part: Any) -> None:
        if _is_speculated(part) and part.piece.state.has_state:
            part.pending = replace(part.pending, is_stale=False)

    monkeypatch.setattr(Transaction, "distrust", lambda self, state: None)
    _change_parts(monkeypatch, change)


def norm_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ParameterTable.compute_norm

    def compute_norm(self: ParameterTable, segments: Any, into: GradientNorm | None = None, **options: Any) -> None:
        if into is None and len(segments) < len(self.states):
            segments = segments.copy()
            short = segments["length"] <= native.CHUNK  # one entry each
            segments["sums"][short] = segments["sums"][short][::-1]
        original(self, segments, into, **options)

    monkeypatch.setattr(ParameterTable, "compute_norm", compute_norm)


# Handles


def factor_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TakenGradient, "scale", lambda self: 1.0)


def factors_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product in place rounds to the gradient's dtype; one product in fp32 does not."""
    monkeypatch.setattr(Scale, "recorded", lambda factor, dtype: Scale(factor))


def factor_is_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's rounding, and by the kernel once more."""

    def change(part: Any) -> None:
        if part.taken is not None and part.taken.factors and part.pending is None:
            part.scale = Scale.recorded(part.taken.scale() or 1.0, part.taken.exact_dtype)

    _change_parts(monkeypatch, change)


def read_sees_no_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TakenGradient.value

    def value(self: TakenGradient) -> torch.Tensor:
        return original(self) if self.is_given else self._as_it_was(self.ready(), self.dtype)

    monkeypatch.setattr(TakenGradient, "value", value)


def read_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TakenGradient, "ready", lambda self: self.pending)


def write_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient that is given back to `.grad` is not the one that is written to."""
    original = TakenGradient.give_back

    def give_back(self: TakenGradient) -> torch.Tensor:
        was_given = self.is_given
        given = original(self)
        if not was_given:
            self.given = given.clone()
        assert self.given is not None
        return self.given

    monkeypatch.setattr(TakenGradient, "give_back", give_back)


def held_gradient_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although others can write to it."""
    monkeypatch.setattr(gradient_handle, "is_exclusive", lambda parameter: parameter.grad is not None)


def copy_is_the_gradient_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_handle, "_copy", lambda handle: handle.taken.value().detach())


# Kept buckets


def state_is_not_brought_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes on the host read and write what was the state some steps ago."""
    monkeypatch.setattr(ParameterTable, "bring_home", lambda self, states=None: None)


def speculation_leaves_state_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a bucket is speculated on whose state is on the device; readers of state find it."""
    original = ParameterTable.bring_home

    def bring_home(self: ParameterTable, states: Any = None) -> None:
        if states is None:
            original(self)

    monkeypatch.setattr(ParameterTable, "bring_home", bring_home)


def published_state_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ParameterTable.bring_home

    def bring_home(self: ParameterTable, states: Any = None) -> None:
        if states is not None:
            original(self, states)

    monkeypatch.setattr(ParameterTable, "bring_home", bring_home)


def placing_leaves_stale_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was on the device before counts when a parameter is kept again, whatever came in between."""
    left: dict[tuple[int, int], tuple[ResidentStates, torch.Tensor, torch.Tensor]] = {}
    original = ResidentStates._moved

    def moved(self: ResidentStates, tensor: torch.Tensor) -> torch.Tensor:
        return left.setdefault((id(self), id(tensor)), (self, tensor, original(self, tensor)))[2]

    monkeypatch.setattr(ResidentStates, "_moved", moved)


def norm_goes_into_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ParameterTable.put_norm
    monkeypatch.setattr(ParameterTable, "put_norm", lambda self, rows, norm: original(self, rows[::-1], norm))


def _held(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Transfers, Any], Any]) -> None:
    original = Transfers.pack_resident
    monkeypatch.setattr(Transfers, "pack_resident", lambda self, *args: spoil(self, original(self, *args)))


def kept_gradient_is_freed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(transfers: Transfers, held: Any) -> Any:
        for sent in held[0]:
            sent.gradients._buffer = _alias(sent.gradients._buffer)
        return held

    _held(monkeypatch, spoil)


def kept_norm_is_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    _held(
        monkeypatch,
        lambda self, held: (held[0], SimulatedEvent(cast(SimulatedDevice, self.device)), held[2]),
    )


def kept_step_has_another_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had been made with the coefficients of speculation: before it was known that the step is clipped."""
    original = Transaction._coefficients

    def unclipped(self: Transaction, parts: Any) -> Any:
        return original(self, [replace(part, scale=Scale()) if part.is_resident else part for part in parts])

    monkeypatch.setattr(Transaction, "_coefficients", unclipped)


def kept_parameters_hide_outside_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Transaction._adopt

    def adopt(self: Transaction, states: Sequence[ParameterState]) -> None:
        original(self, [state for state in states if self.table.is_home(state)])

    monkeypatch.setattr(Transaction, "_adopt", adopt)


def full_device_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """State that found no room is thought to be on the device all the same."""
    original = ResidentStates.step

    def update(self: ResidentStates, *args: Any) -> None:
        try:
            original(self, *args)
        except torch.OutOfMemoryError:
            return

    monkeypatch.setattr(ResidentStates, "step", update)


OF_KEPT_STATE: dict[str, Plant] = {
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

OF_SPECULATION: dict[str, Plant] = {
    "a shadow sent before the gradient has left its memory": shadow_is_sent_too_early,
    "a shadow published before it has arrived": shadow_is_published_before_it_is_sent,
    "a publication that forgets one": publication_forgets_one,
    "a commit with another lr than the captured one": commit_with_another_lr,
    "a verdict summed in another order": sum_in_another_order,
    "a redo that forgets one": redo_forgets_one,
    "a clipped step that is published": clipped_step_is_published,
    "hyper-parameters changed after the speculation": changed_hyperparameters_are_ignored,
    "a value published although the gradient was edited": edit_is_ignored,
    "a dropped gradient that counts in the norm": dropped_gradient_counts,
    "a speculation that counts for another gradient": another_gradient_counts,
    "a speculation that is stale": stale_speculation_is_trusted,
    "a norm of another row": norm_of_another_row,
    "a factor that is forgotten": factor_is_forgotten,
    "factors that are not rounded": factors_are_not_rounded,
    "a factor that is applied twice": factor_is_applied_twice,
    "a read without its factor": read_sees_no_factor,
    "a read that does not wait": read_does_not_wait,
    "a write that is lost": write_is_lost,
    "a gradient taken although it is held": held_gradient_is_taken,
    "a copy that is the gradient itself": copy_is_the_gradient_itself,
}

FAULTS: dict[str, Plant] = {
    "a missing wait before publishing": on(WithoutWait),
    "a reused event": on(WithOldEvents),
    "a gradient freed early": on(WithoutKeepingGradients),
    "new values freed early": on(WithoutKeepingValues),
    "a full device that is not noticed": full_device_is_ignored,
    **OF_SPECULATION,
    **OF_KEPT_STATE,
}

ONLY_AFTER: dict[Plant, list[str]] = {
    kept_parameters_hide_outside_writes: ["one_element_written"],
    changed_hyperparameters_are_ignored: ["lr_changed"],
    dropped_gradient_counts: ["gradients_of_one_layer_dropped"],
    factor_is_applied_twice: ["gradients_scaled_twice_and_divided", "gradients_taken_away_and_put_back"],
    read_sees_no_factor: ["gradients_scaled_twice_and_divided", "gradients_read_for_logging"],
    stale_speculation_is_trusted: ["weights_decayed_through_data"],
    factors_are_not_rounded: ["clipped_by_torch"],
    another_gradient_counts: ["gradients_exchanged_between_parameters", "gradient_of_the_last_step_put_back"],
    edit_is_ignored: ["gradient_of_one_layer_edited_in_place"],
    held_gradient_is_taken: ["gradient_of_ones_own_written_after_another_backward"],
    copy_is_the_gradient_itself: ["copies_of_gradients_written"],
}
"""What alone shows a fault, which would take hundreds of schedules to be drawn where it matters."""


def all_of(names: Sequence[str]) -> Program:
    """Return an action that is several, one after the other."""

    def body(model: Any, optimizer: Any, step: int, run: Run) -> Any:
        return [BY_NAME[name].body(model, optimizer, step, run) for name in names]

    return Program(" and ".join(names), body)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some only show in rare schedules: the first that shows one ends the search."""
    plant = FAULTS[fault]
    if plant in ONLY_AFTER and not DEEP:
        monkeypatch.setattr(test_programs_random, "BY_NAME", dict.fromkeys(BY_NAME, all_of(ONLY_AFTER[plant])))
    on(OftenFullDevice if plant is full_device_is_ignored else SimulatedDevice)(monkeypatch)
    plant(monkeypatch)
    found = settings(MACHINE, max_examples=1000, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(OverlappedRun, settings=found)
