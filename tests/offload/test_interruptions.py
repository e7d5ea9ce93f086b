"""Signals at random moments: a step is made wholly or not at all, nothing hangs, and training goes on as before."""

import contextlib
import copy
import dis
import functools
import gc
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.deep import DEEP, TIMES
from support.overlap import DEVICES, PlantedError, ThreadDevice, adam, batch, mlp, train
from support.programs import frozen
from support.visible import bits, state_bits
from torch import Tensor, nn

import superadam
from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices import CudaDevice, Stream
from superadam.distributed import agreement
from superadam.gpu import language
from superadam.host import _signals, cores
from superadam.host.machine import Host
from superadam.host.memory import Claim, HostNeeds
from superadam.integrations import checkpoint_contents, checkpoint_folder, deepspeed
from superadam.integrations.reduced_gradients import ReducedGradients
from superadam.optim import adam as adam_module
from superadam.optim import binding, entry, published_state
from superadam.state import places
from superadam.step import gradients

STEPS = 40
LATEST_SECONDS = 0.004
"""After the beginning of an iteration, which takes about as long; decides where interruptions fall, and no result."""

TIMERS = {
    signal.SIGALRM: signal.ITIMER_REAL,
    signal.SIGVTALRM: signal.ITIMER_VIRTUAL,
    signal.SIGPROF: signal.ITIMER_PROF,
}

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Interrupted(BaseException):
    """What handlers raise, as that of Ctrl-C does."""


class Interruptions:
    """Handlers of Ctrl-C and timers that raise where the training is, and often bring the next signal along."""

    def __init__(self) -> None:
        self.chance = random.Random(0)
        self.count = self.left = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        while self.left and frame is not None and frame.f_code is not Training.attempt.__code__:
            frame = frame.f_back
        if not self.left or frame is None:
            return
        self.left -= 1
        self.count += 1
        if self.left:
            if self.chance.random() < 0.5:
                self.start()  # another one soon
            else:
                signal.raise_signal(signal.SIGINT)  # another one now
        raise Interrupted

    def start(self) -> None:
        signal.setitimer(TIMERS[self.chance.choice(list(TIMERS))], self.chance.uniform(1e-5, LATEST_SECONDS))

    def stop(self) -> None:
        self.left = 0
        for timer in TIMERS.values():
            signal.setitimer(timer, 0)


@pytest.fixture
def interruptions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interruptions]:
    monkeypatch.setattr(sys, "unraisablehook", bool)  # a signal may meet a finalizer, and another one pytest's hook
    one = Interruptions()
    handle = one.handle
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, *TIMERS)}
    yield one
    assert all(signal.getsignal(number) is handle for number in before)
    one.stop()
    for number, handler in before.items():
        signal.signal(number, handler)


class Training:
    """Steps that may be tried again until they are made."""

    def __init__(self, dtype: torch.dtype, how: str, *, is_patched: bool = False) -> None:
        self._own = ["master"] if dtype == torch.float32 else []  # which has masters on the simulated device only
        self.model = mlp(dtype, width=16, layers=4)
        options = {"lr": 1e-6, "max_grad_norm": 1e-3} if is_patched else {}
        self.optimizer: SpeculativeCPUAdam = adam(self.model, **options)
        self._schedulers: list[OffloadScheduler] = []
        if how in DEVICES:
            device = DEVICES[how](5)
            self._schedulers.append(OffloadScheduler(self.optimizer, self.model, device=device, bucket_numel=300))

    def backward(self, number: int) -> None:
        self.optimizer.zero_grad()
        dtype = next(self.model.parameters()).dtype
        (30 * (self.model(batch(number, dtype, 16)) - 1).float().square().mean()).backward()

    def step(self, number: int) -> None:
        """Make a step after what changes nothing."""
        optimizer = self.optimizer
        self.backward(number)
        if number % 4 == 1:
            optimizer.speculate()
        elif number % 4 == 2:
            optimizer.speculate()
            optimizer.rollback()
        elif number % 4 == 3:
            optimizer.load_state_dict(optimizer.state_dict())
            self.backward(number)
        (optimizer.resolve if number % 2 else optimizer.step)()

    def after(self, *numbers: int) -> "Training":
        """Make these steps, and return itself."""
        for number in numbers:
            self.step(number)
        return self

    def attempt(self, number: int) -> None:
        if number < STEPS:
            self.step(number)
        else:
            self.close()

    def is_interrupted(self, number: int, interruptions: Interruptions, depth: int = 4) -> bool:
        """Try to make a step; return whether it was interrupted."""
        try:
            if depth:
                return self.is_interrupted(number, interruptions, depth - 1)
            interruptions.left = interruptions.chance.randint(1, 3)
            interruptions.start()
            self.attempt(number)
        except Interrupted:
            return True
        finally:
            interruptions.stop()
        return False

    def seen(self) -> dict[str, Any]:
        self.optimizer.zero_grad()
        return state_bits(self.optimizer, without=self._own)

    def close(self) -> None:
        for scheduler in self._schedulers:
            scheduler.close()


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["plain", *DEVICES])
def test_a_step_is_made_wholly_or_not_at_all(how: str, dtype: torch.dtype, interruptions: Interruptions) -> None:
    plain = Training(dtype, "plain")
    expected = [plain.seen()]
    for number in range(STEPS):
        plain.step(number)
        expected.append(plain.seen())
    number = STEPS
    training = plain
    while interruptions.count < 12 * TIMES:
        if number == STEPS:
            training.is_interrupted(number, interruptions)
            training.close()
            assert training.seen() == expected[number]
            training, number = Training(dtype, how), 0
        interrupted = training.is_interrupted(number, interruptions)
        assert torch.is_grad_enabled()
        seen = training.seen()
        number += seen == expected[number + 1]
        assert seen == expected[number], (interruptions.count, number, interrupted)
    training.close()


PACKAGE = os.path.dirname(superadam.__file__), torch.autograd.grad_mode.__file__


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupt() -> None:
    raise Interrupted


@functools.cache
def after_calls(code: CodeType) -> set[int]:
    """Return the offsets of the opcodes before which Python has looked for signals, but for those after a jump back."""
    pairs = itertools.pairwise(dis.get_instructions(code))
    return {later.offset for earlier, later in pairs if earlier.opname.startswith(("CALL", "RESUME"))}


def struck(work: Callable[[], object], at: int | None, strike: Callable[[], None], files=PACKAGE, unit="line") -> int:
    """Call, and strike before the n-th line of these files, or "opcode" after a call; return how many were run.

    Lines of the worker and of the simulated device are left out, which on real machines other threads run.
    """
    count = 0

    def line(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == unit and (unit == "line" or frame.f_lasti in after_calls(frame.f_code))
        if count == at:
            sys.settrace(None)
            strike()
        return line

    def call(frame: FrameType, event: str, argument: object) -> Any:
        outer: FrameType | None = frame
        while outer is not None and not outer.f_code.co_filename.endswith("simulated.py"):
            outer = outer.f_back
        frame.f_trace_opcodes = unit == "opcode"
        return line if outer is None and frame.f_code.co_filename.startswith(files) else None

    before = sys.gettrace()
    gc.disable()  # else it may strike the finalizer of what another test has left, from which Python raises nothing
    sys.settrace(call)
    try:  # noqa: SIM105 (contextlib may be struck)
        work()
    except (KeyboardInterrupt, Interrupted):
        pass
    sys.settrace(before)
    gc.enable()
    return count


def made_plainly(dtype: torch.dtype, made: int, *, is_patched: bool) -> list[Any]:
    """Return what is seen if a step was made so often with the same gradients, and after one more step."""
    training = Training(dtype, "plain", is_patched=is_patched).after(0, 1)
    training.backward(4)
    for _ in range(made):
        training.optimizer.step()
    after = training.seen()
    training.step(5)
    return [after, training.seen()]


POINTS = 6 * TIMES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "how"),
    [
        *(("step", "plain"), ("step", "thread"), ("step", "simulated")),
        *(("step with patches", "immediate"), ("step with patches", "simulated")),
        *(("backward", "thread"), ("backward", "simulated")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ctrl_c_at_any_line_leaves_a_whole_step_or_none(dtype: torch.dtype, phase: str, how: str) -> None:
    """Also where nobody looks afterwards, and the step is made again with the same gradients."""
    is_patched = phase == "step with patches"
    whole = [made_plainly(dtype, made, is_patched=is_patched) for made in range(1 if phase == "backward" else 3)]
    lines = 0
    for number in range(-1, POINTS):
        training = Training(dtype, how, is_patched=is_patched).after(0, 1)
        at = None if number < 0 else 1 + number * (lines - 1) // (POINTS - 1)
        looks, again = number % 4 > 1, phase != "backward" and number % 2
        if phase == "backward":
            lines = max(lines, struck(lambda training=training: training.backward(4), at, ctrl_c))
            training.optimizer.zero_grad()
        else:
            training.backward(4)
            lines = max(lines, struck(training.optimizer.step, at, ctrl_c))
            assert at or not is_patched or dtype != torch.bfloat16 or training.optimizer.statistics.patched
        if again:
            training.optimizer.step()
        seen = [training.seen() if looks else None]
        training.step(5)
        seen.append(training.seen())
        training.close()
        possible = whole[again : again + 2]
        assert seen in (possible if looks else [[None, last] for _, last in possible]), f"at line {at} of {lines}"
    assert lines > POINTS


@pytest.mark.slow
def test_ctrl_c_once_a_copy_was_begun_leaves_its_memory_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step then made of the gradients that are there has their bits."""
    copy_of_device, at, count = CudaDevice.copy, 0, 0

    def copy_until_struck(*arguments: Any) -> None:
        nonlocal count
        copy_of_device(*arguments)
        count += 1
        if count == at:
            ctrl_c()

    while at <= count:
        at, count = at + 1, 0
        one, plain = (Training(torch.bfloat16, how).after(0, 1) for how in ("simulated", "plain"))
        for training in (one, plain):
            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(CudaDevice, "copy", copy_until_struck)
                training.backward(4)
        for parameter, other in zip(one.model.parameters(), plain.model.parameters(), strict=True):
            other.grad = None if parameter.grad is None else other.grad
        one.optimizer.step()
        plain.optimizer.step()
        assert one.seen() == plain.seen(), at
        one.close()
    assert at > 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thread", "simulated"])
def test_ctrl_c_while_a_scheduler_is_made_attaches_nothing(how: str) -> None:
    whole, threads = made_plainly(torch.bfloat16, 0, is_patched=False)[1], {*threading.enumerate()}
    at, lines = 0, 1
    while at <= lines:
        training = Training(torch.bfloat16, "plain").after(0, 1)

        def make(training: Training = training) -> None:
            training._schedulers.append(OffloadScheduler(training.optimizer, training.model, device=DEVICES[how](5)))

        ran = struck(make, at, ctrl_c)
        training.close()
        training._schedulers.clear()
        assert {*threading.enumerate()} <= threads, at
        make()
        training.step(5)
        assert training.seen() == whole, at
        training.close()
        at, lines = at + (10 if DEEP else 400), ran if not at else lines
    assert lines > 400


@pytest.mark.slow
def test_handler_that_looks_sees_a_whole_step_at_any_line_of_a_look() -> None:
    """And changes nothing for the call that it interrupts."""
    expected = made_plainly(torch.bfloat16, 1, is_patched=False)[0]
    at, lines = 0, 1
    while at <= lines:
        training, seen = Training(torch.bfloat16, "simulated").after(0, 1, 4), list[Any]()
        training.optimizer.zero_grad()
        read, look = training.optimizer.state_dict, lambda seen=seen, of=training: seen.append(of.seen())
        ran = struck(read, at, look, (published_state.__file__, entry.__file__))
        assert [*seen, training.seen()] == [expected] * (1 + bool(at)), at
        training.close()
        at, lines = at + (1 if DEEP or not at else 16), ran if not at else lines
    assert lines > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["step", "clip_grad_norm_", "reload_masters", "state_dict", "load_state_dict", "speculate", "rollback", "commit"],
)
def test_handler_that_closes_the_scheduler_changes_no_bit_at_any_line_of_a_call(name: str) -> None:
    """The call that it interrupts goes on, and a step follows."""

    def seen(at: int) -> tuple[dict[str, Any], int]:
        training = Training(torch.bfloat16, "simulated").after(0)
        saved = copy.deepcopy(training.optimizer.state_dict())
        training.step(1)
        training.backward(4)
        arguments = {"clip_grad_norm_": [0.5], "load_state_dict": [saved]}.get(name, [])
        method, files = getattr(training.optimizer, name), (adam_module.__file__, binding.__file__, gradients.__file__)
        before = signal.signal(signal.SIGUSR1, lambda *_: training.close())
        try:
            ran = struck(lambda: method(*arguments), at, lambda: signal.raise_signal(signal.SIGUSR1), files)
        finally:
            signal.signal(signal.SIGUSR1, before)
        training.optimizer.step()
        training.close()
        return training.seen(), ran

    expected, lines = seen(0)
    for at in range(1, 1 + lines, 1 if DEEP else 3):
        assert seen(at)[0] == expected, at
    assert lines > 30


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("name", ["rollback", "give back"])
def test_modes_are_as_before_whichever_line_raises(name: str, enabled: bool) -> None:
    """Also after what the exception held is gone."""
    at, was_there = 1, True
    while was_there:
        optimizer = adam(model := mlp(torch.bfloat16))
        model(batch(1, torch.bfloat16)).float().sum().backward()
        optimizer.speculate()
        handle = next(model.parameters()).grad
        work: Callable[[], object] = optimizer.rollback if name == "rollback" else handle.data_ptr
        with torch.set_grad_enabled(enabled):
            was_there = struck(work, at, interrupt) == at
            _signals.forget()  # what is raised here comes also where no signal does: before the end of a section
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (enabled, False), at
            del handle, work, model, optimizer
            gc.collect(0)
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (enabled, False), at
        at += 1 if DEEP else 4
    assert at > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["read", "save"])
def test_modes_are_as_before_wherever_python_enters_and_leaves_a_manager(name: str) -> None:
    """Python looks for signals in the middle of a line, too: between a manager's beginning and what it is for."""
    optimizer = adam(model := mlp(torch.bfloat16, width=64, layers=1), moments="8bit", master="24bit")
    model(batch(1, torch.bfloat16, 64)).float().sum().backward()
    optimizer.step()

    def work() -> None:
        try:
            if name == "save":
                optimizer.torch_state_dict()
            else:
                for entry in optimizer.state.values():
                    entry.copy()
        except KeyboardInterrupt:  # whose traceback holds what was interrupted
            assert torch.is_grad_enabled(), at
            raise

    expected = state_bits(optimizer)
    at, files = 1, (contextlib.__file__,)
    count = struck(work, None, ctrl_c, files, "opcode")
    while at <= count:
        struck(work, at, ctrl_c, files, "opcode")
        gc.collect(0)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (True, False), at
        at += 1
    assert at > 50
    assert state_bits(optimizer) == expected


@pytest.mark.parametrize(("dtype", "strike"), [(torch.float32, ctrl_c), (torch.bfloat16, interrupt)])
def test_load_that_is_interrupted_loads_groups_and_state_or_neither(dtype: Any, strike: Callable[[], None]) -> None:
    """And loads as a whole when it is called again, whatever line raised. Decay stays decoupled, as Adam's is not."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = superadam.SpeculativeCPUAdamW([weight])
    saved = []
    for lr in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        saved.append((weight.detach().clone(), copy.deepcopy(optimizer.state_dict())))

    def load(number: int, at: int | None = None) -> int:
        values, state = saved[number]
        state = {**state, "param_groups": [state["param_groups"][0] | {"decoupled_weight_decay": False}]}
        weight.data.copy_(values)
        try:
            return struck(lambda: optimizer.load_state_dict(state), at, strike, (adam_module.__file__,))
        finally:
            if strike is interrupt:
                _signals.forget()  # a section that was left at its very end, as no signal leaves it

    lines = load(1)
    assert lines > 20
    for at in range(1, lines + 1):
        load(1)
        load(0, at)
        assert strike is interrupt or frozen(optimizer.state_dict()) in [frozen(state) for _, state in saved], at
        load(0)
        assert frozen(optimizer.state_dict()) == frozen(saved[0][1]), at


class AnyError(FileNotFoundError, ValueError, TypeError, NotImplementedError, MemoryError, KeyError):
    """What a handler raises: an error of any kind that some code expects."""


def backward_of(how: str) -> Callable[[], object]:
    training = Training(torch.bfloat16, how).after(0, 1)
    return lambda: training.backward(4)


def speculate() -> Callable[[], object]:
    training = Training(torch.bfloat16, "plain").after(0)
    training.backward(1)
    return training.optimizer.speculate


def give_back() -> Callable[[], object]:
    training = Training(torch.bfloat16, "thread").after(0)
    training.backward(1)
    return next(training.model.parameters()).grad.data_ptr


def make_optimizer() -> Callable[[], object]:
    return lambda: SpeculativeCPUAdam([nn.Parameter(torch.ones(3))], lr=torch.tensor(0.5))


def look_at_folder() -> Callable[[], object]:
    folder, stack = tempfile.TemporaryDirectory(), contextlib.ExitStack()
    path = Path(folder.name)
    part = checkpoint_folder.begin(path, stack, [None])
    (part / "some").write_bytes(b"bytes")
    made, _ = checkpoint_folder.publish(part, {"some": (5, checkpoint_folder.sha256(part / "some"))}, 1, set())
    stack.close()

    def look() -> None:
        checkpoint_folder.look(Path(folder.name, "none"))
        there = checkpoint_folder.look(path)
        checkpoint_folder.verify(made, there.digest, 0, 1)
        checkpoint_folder.sight(made)

    return look


EXPECTING: dict[str, Callable[[], Callable[[], object]]] = {
    "backward, by a thread": lambda: backward_of("thread"),
    "backward, over a link": lambda: backward_of("simulated"),
    "speculating": speculate,
    "giving back": give_back,
    "an optimizer": make_optimizer,
    "the host's memory": lambda: lambda: (HostNeeds(1).check(Host()), Claim.of(Host(), 1), cores.share(Host())),
    "a folder of checkpoints": look_at_folder,
}
"""What prepares work that expects errors, and returns it."""


@pytest.mark.parametrize("name", EXPECTING)
def test_what_a_handler_raises_is_not_taken_for_an_error_that_is_expected(name: str) -> None:
    """At whichever place Python looks for signals."""
    raised, caught = list[BaseException](), list[BaseException]()

    def handle(*_: object) -> None:
        raised.append(AnyError("of the program"))
        raise raised[-1]

    def work(inner: Callable[[], object]) -> None:
        try:
            inner()
        except AnyError as error:
            caught.append(error)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        places = struck(functools.partial(work, EXPECTING[name]()), None, bool, unit="opcode")
        for at in range(1, places + 1, 1 if DEEP else max(1, places // 40)):
            inner = EXPECTING[name]()
            struck(functools.partial(work, inner), at, lambda: signal.raise_signal(signal.SIGUSR1), unit="opcode")
            assert caught == raised, at
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(raised) >= 40


ON_CPU = torch.device("cpu")
AROUND: dict[str, tuple[Any, str, Callable[[], object]]] = {
    "trying Triton": (language, "on", lambda: language._obstacle_on.__wrapped__(ON_CPU)),
    "an event of a GPU": (torch.cuda, "Event", lambda: CudaDevice.record(Mock(_cuda=torch.cuda), Stream.CURRENT)),
    "a thread near a GPU": (ThreadPoolExecutor, "submit", lambda: cores.call_near({0}, list)),
    "telling other ranks": (
        agreement.Ranks,
        "_exchange",
        lambda: agreement.Ranks([0], None).tell_failure(agreement.Question.STEP),
    ),
    "where tensors lie": (places, "storage_key", lambda: places.places_of([torch.ones(1)])),
    "values of a checkpoint": (torch, "save", lambda: checkpoint_contents.bytes_of_values({})),
    "a checkpoint of DeepSpeed": (
        deepspeed,
        "ZeroCheckpoint",
        lambda: deepspeed._opened(Path(), nn.Linear(1, 1), Mock()),
    ),
    "reduced gradients": (
        ReducedGradients,
        "_unrounded",
        lambda: ReducedGradients(adam(mlp()))._take(Mock(grad=torch.ones(1))),
    ),
}
"""What is replaced by a signal in work that expects errors, and the work."""


@pytest.mark.parametrize("name", AROUND)
def test_what_a_handler_raises_in_a_call_is_not_taken_for_its_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, replaced, work = AROUND[name]
    monkeypatch.setattr(places, "_looks", None)
    monkeypatch.setattr(owner, replaced, lambda *_, **__: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, Mock(side_effect=AnyError))
    try:
        with pytest.raises(AnyError):
            work()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_a_handler_raises_while_a_scheduler_is_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not taken for that of a forked process."""
    model = mlp()
    scheduler = OffloadScheduler(adam(model), model, device=ThreadDevice())
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", Mock(side_effect=AnyError))
        with pytest.raises(AnyError):
            scheduler.__exit__(PlantedError)
    scheduler.close()


# -- finalizers, which the garbage collector runs anywhere in any thread -----------------------------------------------

FINALIZERS: dict[str, Callable[[Any, Any, Any], object]] = {
    "norm": lambda gradients, optimizer, scheduler: [float(one.norm()) for one in gradients()],
    "state": lambda gradients, optimizer, scheduler: optimizer.state_dict(),
    "commit": lambda gradients, optimizer, scheduler: optimizer.commit(),
    "synchronize": lambda gradients, optimizer, scheduler: scheduler and scheduler.synchronize(),
    "close": lambda gradients, optimizer, scheduler: scheduler and scheduler.close(),
}


def _gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@contextlib.contextmanager
def collecting(work: Callable[[], object], *, is_here: bool) -> Iterator[list[str]]:
    """Run work as a finalizer, wherever an object is allocated, in this thread or in others; yield its errors."""
    errors, here, turn, is_busy = list[str](), threading.get_ident(), itertools.count(), set[bool]()

    def collected(phase: str, information: object) -> None:
        if phase == "start" and not is_busy and (threading.get_ident() == here) == is_here and next(turn) % 3 == 0:
            is_busy.add(True)
            try:
                work()
            except RuntimeError as error:
                errors.append(str(error))
            finally:
                is_busy.clear()

    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1, 1, 1)
    try:
        yield errors
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)


@pytest.mark.parametrize("where", ["none", "training", "worker"])
@pytest.mark.parametrize("name", FINALIZERS)
def test_finalizers_change_no_bit_and_do_not_hang(name: str, where: str) -> None:
    """In the worker, for which they would wait, they are refused."""
    runs = []
    for is_looked_at in (False, True):
        model = mlp(torch.bfloat16, width=8, layers=2)
        optimizer: Any = adam(model)
        scheduler: Any = None
        if where != "none":
            scheduler = OffloadScheduler(optimizer, model, device=ThreadDevice(), bucket_numel=1)
        all_of = functools.partial(_gradients_of, model)
        last: list[Tensor] = []  # of the step before: torch crashes where another thread reads `.grad` in backward
        optimizer.register_step_post_hook(lambda *_, last=last, all_of=all_of: last.__setitem__(slice(None), all_of()))
        gradients = last.copy if where == "worker" else all_of
        work = functools.partial(FINALIZERS[name], gradients, optimizer, scheduler) if is_looked_at else bool
        with collecting(work, is_here=where != "worker") as errors:
            train(model, optimizer, range(3))
        if where == "worker" and is_looked_at:
            assert errors
        assert all("in the thread of the scheduler's worker" in error for error in errors)
        if scheduler is not None:
            scheduler.close()
        runs.append([[*map(bits, model.parameters())], [bits(v) for e in optimizer.state.values() for v in e.values()]])
    assert gc.isenabled()
    assert runs[0] == runs[1]
