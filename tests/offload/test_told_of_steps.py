"""What is only told of steps may fail: each step is made once, with the same bits, and the log says so once."""

import logging
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from offload.test_buckets import Recorder
from offload.test_programs import Net, backward, loss_of
from support.overlap import ImmediateDevice, PlantedError, ThreadDevice
from support.programs import PATCHED, Run, Setting, Shown, first_difference, state_of
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW, Statistics, StepKind
from superadam.offload.buckets import Accumulation, Bucketer, Hooks
from superadam.offload.placement import Autotuner
from superadam.offload.prediction import Predictor
from superadam.offload.trace import Trace
from superadam.offload.transfers import Transfers
from superadam.optim.published_state import PublishedState
from superadam.step import outcome as told
from superadam.step.transaction import Transaction
from superadam.testing import SimulatedDevice
from superadam.testing.simulated import SeededWorker

STEPS, UNFROZEN = 8, 4
SIMULATED = replace(PATCHED[1], gpu_buckets=1)
THREAD = replace(PATCHED[0], device=ThreadDevice)


@dataclass
class Failing:
    """Makes methods, or settings of fields, raise while it is armed; counts how often they did."""

    patch: pytest.MonkeyPatch
    is_armed: bool = False
    count: int = 0
    only: Callable[..., bool] = field(default=lambda *_, **__: True)

    def raises(self, *arguments: Any, **options: Any) -> None:
        if self.is_armed and self.only(*arguments, **options):
            self.count += 1
            raise PlantedError("planted")

    def method(self, owner: Any, name: str) -> None:
        if not hasattr(owner, name):  # each object has its own
            self.attribute(owner, name)
            return
        ordinary = getattr(owner, name)

        def method(*arguments: Any, **options: Any) -> Any:
            self.raises(*arguments, **options)
            return ordinary(*arguments, **options)

        self.patch.setattr(owner, name, method)

    def attribute(self, owner: type[Any], name: str) -> None:
        ordinary = owner.__init__

        def made(one: Any, *arguments: Any, **options: Any) -> None:
            ordinary(one, *arguments, **options)
            self.method(one, name)

        self.patch.setattr(owner, "__init__", made)


METHODS: dict[str, tuple[Any, str]] = {
    f"{owner.__name__}.{name}": (owner, name)
    for owner, names in {
        Accumulation: ["end_step"],
        Autotuner: ["add_bucket", "add_work", "choose", "shrink"],
        Bucketer: ["end_step"],
        Hooks: ["look_for_unfrozen"],
        OffloadScheduler: ["_conclude", "_look_for_room", "_trace_step", "_apply_placement"],
        Predictor: ["add_lists", "add_verdict"],
        PublishedState: ["write"],
        SeededWorker: ["wake"],
        SimulatedDevice: ["reserve"],
        Statistics: ["count"],
        Trace: ["add"],
        Transaction: ["_applied", "_count"],
        Transfers: ["bytes_without_room", "trace_arrived", "_count_shadow"],
    }.items()
    for name in names
}


def trained(setting: Setting, failing: Failing | None = None) -> Shown:
    """Train with norms that jump and a parameter that is frozen at first, while something fails in most steps."""
    run, model = Run(setting), Net().to(setting.dtype)
    optimizer = run.adamw(model.parameters())
    exposed = optimizer.state  # so that every step updates it at once
    with run.overlap(optimizer, model):
        for number in range(STEPS):
            if failing is not None:
                failing.is_armed = 0 < number < STEPS - 1
            model.last.requires_grad_(number >= UNFROZEN)
            (loss_of(model, number) * (1.0 if number % 3 else 0.1)).backward()
            if number == 5:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            optimizer.zero_grad()
            run.see(list(model.parameters()))
        run.see(state_of(optimizer), [len(entry) for entry in exposed.values()])
    return run.seen


def check(setting: Setting, failing: Failing, caplog: pytest.LogCaptureFixture) -> None:
    """Train, with or without a scheduler; the bits are those without failures, and one is logged."""
    failing.patch.setattr(told, "_failed", set())
    expected = trained(setting.plain)
    assert first_difference(trained(setting, failing), expected) is None
    assert failing.count >= 2
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(logged) == 1
    assert all(record.name == "superadam" and record.exc_info for record in logged)


def displace(patch: pytest.MonkeyPatch) -> None:
    def count(transaction: Transaction, *arguments: Any, of_step: Callable[..., None] = Transaction._count) -> None:
        transaction.statistics.displaced += 1
        of_step(transaction, *arguments)

    patch.setattr(Transaction, "_count", count)


PREPARED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "SimulatedDevice.reserve": lambda patch: patch.setattr(Transfers, "bytes_without_room", lambda transfers: 1),
    "Autotuner.shrink": displace,
    "OffloadScheduler._apply_placement": displace,
}


@pytest.mark.parametrize("name", METHODS)
def test_no_listener_can_fail_a_step(name, monkeypatch, caplog):
    PREPARED.get(name, lambda patch: None)(monkeypatch)
    failing = Failing(monkeypatch)
    failing.method(*METHODS[name])
    check(SIMULATED, failing, caplog)


@pytest.mark.parametrize(("phase", "setting"), [("resolve_seconds", THREAD), ("update_seconds", THREAD.plain)])
def test_no_time_of_a_step_that_was_made_can_fail_it(phase, setting, monkeypatch, caplog):
    failing = Failing(monkeypatch, only=lambda transaction, name, begin: name == phase)
    failing.method(Transaction, "_spent")
    check(setting, failing, caplog)


def test_a_learner_that_fails_begins_anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it has left of itself."""
    failing = Failing(monkeypatch)
    failing.method(Predictor, "add_verdict")
    learn: Callable[..., None] = Predictor.add_verdict

    def spoil(self: Any, *arguments: Any) -> None:
        before = dict(vars(self))
        vars(self).clear()
        learn(self, *arguments) if failing.is_armed else None
        vars(self).update(before)
        learn(self, *arguments)

    monkeypatch.setattr(Predictor, "add_verdict", spoil)
    check(SIMULATED, failing, caplog)


def test_a_parameter_whose_hook_fails_is_hooked_later_and_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    parameters = [nn.Parameter(torch.zeros(2), requires_grad=False) for _ in range(4)]
    hooks = Hooks(recorder.note)
    hooks.watch(parameters)
    for one in parameters[1:]:
        one.requires_grad_(True)
    failing = Failing(monkeypatch, only=lambda parameter, hook: parameter is parameters[2])
    failing.method(Tensor, "register_post_accumulate_grad_hook")
    failing.is_armed = True
    for _ in range(3):
        with pytest.raises(PlantedError):
            hooks.look_for_unfrozen()
    failing.is_armed = False
    parameters[0].requires_grad_(True)
    hooks.look_for_unfrozen()
    torch.stack(parameters).sum().backward()
    assert sorted(map(id, recorder.seen)) == sorted(map(id, parameters))


def test_a_log_that_raises_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Mock(filter=Mock(side_effect=PlantedError("planted")))
    monkeypatch.setattr(told, "_failed", set())
    told._logger.addFilter(refusing)
    try:
        assert told.tell("this", math.log, 0.0) is None
        assert told.tell("this", math.log, 1.0) == 0.0
    finally:
        told._logger.removeFilter(refusing)
    refusing.filter.assert_called_once()


def test_what_is_no_error_is_not_kept() -> None:
    with pytest.raises(KeyboardInterrupt):
        told.tell("this", Mock(side_effect=KeyboardInterrupt))


def test_what_a_handler_raises_is_the_program_s(monkeypatch, caplog) -> None:
    def expire(*_: Any) -> None:
        raise TimeoutError("of the program")

    monkeypatch.setattr(told, "_failed", set())
    before = signal.signal(signal.SIGALRM, expire)
    try:
        with pytest.raises(TimeoutError, match="of the program"):
            told.tell("this", signal.raise_signal, signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not caplog.records


@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25), 0.0, -1.0, 2.0])
def test_the_outcome_has_the_factor_of_others(factor: float | Tensor) -> None:
    model = Net().bfloat16()
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-5)
    with OffloadScheduler(optimizer, model, device=ImmediateDevice(), bucket_numel=300, num_threads=1):
        for number in range(1, 6):
            backward(model, number)
            torch._foreach_mul_([one.grad for one in model.parameters()], factor)
            optimizer.step()
            optimizer.zero_grad()
    reported = optimizer.last_outcome.kind, optimizer.last_outcome.clip_coefficient
    is_clipped = 0.0 < float(factor) < 1.0  # else as without a scheduler, which sees the products alone
    assert reported == ((StepKind.CLIPPED, factor) if is_clipped else (StepKind.COMMITTED, 1.0))
    is_expected = is_clipped and isinstance(factor, float)  # as a number that stays; a tensor may be a coefficient
    assert is_expected is (optimizer.statistics.accepted > optimizer.statistics.patched)
