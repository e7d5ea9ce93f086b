"""Public calls from two threads: each is made wholly before or after the other, so that no step is lost or halved."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deep import TIMES
from support.overlap import DEVICES, adam, batch, mlp
from support.visible import bits, parameters_of

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.offload import trace
from superadam.offload.trace import Span

REPEATS = 2  # calls of each thread in one interleaving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.usefixtures("one_torch_thread")]


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Run:
    """A model after one step and one more backward; its seed decides on which device, or without a scheduler."""

    def __init__(self, seed: int = 0) -> None:
        self.model = mlp(torch.bfloat16, width=8, layers=2)
        self.optimizer: SpeculativeCPUAdam = adam(self.model)
        self.scheduler: OffloadScheduler | None = None
        where = ["none", *DEVICES][seed % (1 + len(DEVICES))]
        if where != "none":
            self.scheduler = OffloadScheduler(self.optimizer, self.model, device=DEVICES[where](seed), bucket_numel=70)
        self.backward()
        self.optimizer.step()
        self.backward()

    def backward(self, number: int = 0) -> None:
        self.optimizer.zero_grad()
        self.model(batch(number, torch.bfloat16, 8)).float().square().mean().backward()

    def train(self, steps: int) -> None:
        for number in range(steps):
            self.backward(number)
            self.optimizer.step()

    def seen(self) -> list[Any]:
        """Return step count, parameter and state of each parameter."""
        every = [(p, self.optimizer.state[p]) for p in parameters_of(self.optimizer)]
        return [(int(entry["step"]), bits(p), *map(bits, entry.values())) for p, entry in every]


def _read(run: Run, path: Path) -> None:
    for entry in list(run.optimizer.state.values()):
        assert entry["exp_avg"].isfinite().all()


def _look(run: Run, path: Path) -> None:
    assert run.optimizer.statistics.steps >= 1
    if run.scheduler is not None:
        assert 0 <= copy.copy(run.scheduler.statistics).hidden_share <= 1
        dataclasses.asdict(run.scheduler.statistics)
        assert all(span.end >= span.begin for span in run.scheduler.trace.spans)
        assert run.scheduler.placement.bucket_numel


def with_scheduler(call: Callable[[OffloadScheduler, Path], object]) -> Callable[[Run, Path], object]:
    return lambda run, path: None if run.scheduler is None else call(run.scheduler, path)


def _place(scheduler: OffloadScheduler, path: Path) -> None:
    try:
        scheduler.place(bucket_numel=random.randrange(30, 200))
    except RuntimeError:
        if not scheduler._closed:
            raise


CALLS: dict[str, Callable[[Run, Path], object]] = {
    "step": lambda run, path: run.optimizer.step(),
    "resolve": lambda run, path: run.optimizer.resolve(),
    "speculate": lambda run, path: run.optimizer.speculate(),
    "rollback": lambda run, path: run.optimizer.rollback(),
    "commit": lambda run, path: run.optimizer.commit(),
    "zero_grad": lambda run, path: run.optimizer.zero_grad(),
    "norm": lambda run, path: run.optimizer.clip_grad_norm_(1e9),
    "state": _read,
    "state_dict": lambda run, path: run.optimizer.state_dict(),
    "load_state_dict": lambda run, path: run.optimizer.load_state_dict(run.optimizer.state_dict()),
    "deepcopy": lambda run, path: copy.deepcopy(run.optimizer),
    "reload_masters": lambda run, path: run.optimizer.reload_masters(),
    "place": with_scheduler(_place),
    "synchronize": with_scheduler(lambda scheduler, path: scheduler.synchronize()),
    "statistics": _look,
    "trace": with_scheduler(lambda scheduler, path: scheduler.export_trace(path / f"{threading.get_ident()}.json")),
    "close": with_scheduler(lambda scheduler, path: scheduler.close()),
}
STEPS = {"step", "resolve"}


@pytest.fixture(scope="module")
def after() -> list[list[Any]]:
    """What is seen after that many steps with one and the same gradient, the first of which every run has made."""
    run = Run()
    seen = [[]]
    for _ in range(2 * REPEATS + 1):
        seen.append(run.seen())
        run.optimizer.step()
    return seen


def in_two_threads(first: Callable[[], object], second: Callable[[], object], seed: int) -> None:
    """Call both, each again and again, beginning at moments that the seed draws; raise what either has raised."""
    chance, begin, threads = random.Random(seed), threading.Barrier(2), ThreadPoolExecutor(2)

    def repeat(call: Callable[[], object], delay: float) -> None:
        begin.wait()
        for _ in range(REPEATS):
            time.sleep(delay)
            call()

    for ended in [threads.submit(repeat, call, chance.uniform(0, 3e-4)) for call in (first, second)]:
        ended.result(30)  # or the two wait for each other
    threads.shutdown()


@pytest.mark.parametrize("first", CALLS)
def test_every_pair_of_calls(first: str, after: list[list[Any]], tmp_path: Path) -> None:
    for (number, second), seed in itertools.product(enumerate([*CALLS][[*CALLS].index(first) :]), range(TIMES)):
        pair, seed = (first, second), number + seed  # other devices for the next pair
        run = Run(seed)
        in_two_threads(*(functools.partial(CALLS[name], run, tmp_path) for name in pair), seed)
        CALLS["close"](run, tmp_path)
        if "load_state_dict" in pair:  # of a state that may be older than the parameters by now
            continue
        seen = run.seen()
        steps = {entry[0] for entry in seen}
        assert len(steps) == 1, f"half a step, {pair} with seed {seed}"
        made = 1 + REPEATS * sum(name in STEPS for name in pair)
        assert steps == {made} or ("zero_grad" in pair and steps <= set(range(1, made))), f"{pair} with seed {seed}"
        assert seen == after[steps.pop()], f"{pair} with seed {seed}"


@pytest.mark.parametrize("call", [name for name in CALLS if name not in {*STEPS, "zero_grad", "load_state_dict"}])
def test_training_while_another_thread_calls(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a logger, a checkpointer or a tuner does; traces are full, so that each span drops another."""
    monkeypatch.setattr(trace, "SPANS_KEPT", 2000)
    plain = Run()
    plain.train(6)
    for seed in range(2, 3 + TIMES):  # a thread, and none, of a scheduler
        run = Run(seed)
        for number in range(2000 if run.scheduler is not None else 0):
            run.scheduler.trace.add(Span("before", "model", number, number + 1))
        threads, ended = ThreadPoolExecutor(1), threading.Event()

        def repeat(run: Run = run, ended: threading.Event = ended) -> None:
            while not ended.is_set():
                CALLS[call](run, tmp_path)

        other = threads.submit(repeat)
        try:
            run.train(6)
        finally:
            ended.set()
        other.result(30)
        threads.shutdown()
        CALLS["close"](run, tmp_path)
        assert run.seen() == plain.seen(), f"with seed {seed}"


def _scale_later(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    time.sleep(1e-5)
    gradient.mul_(0.5)


USES: dict[str, Callable[[Any], object]] = {
    "scale": lambda parameter: parameter.grad.mul_(0.5),
    "scale a list": lambda parameter: torch._foreach_mul_([parameter.grad], 0.5),
    "scale later": _scale_later,
    "write": lambda parameter: parameter.grad.view(-1)[:2].add_(1),
    "read": lambda parameter: parameter.grad.clone().tolist(),
    "alias": lambda parameter: parameter.grad.data_ptr(),
    "drop": lambda parameter: setattr(parameter, "grad", None),
    "replace": lambda parameter: setattr(parameter, "grad", None if parameter.grad is None else parameter.grad * 0.25),
}

SETS = {"drop", "replace"}
"""Uses that set `.grad`. Where another thread reads it at that moment, as a scheduler's hook may, torch crashes."""


@pytest.mark.parametrize(
    ("use", "comes_first"), [(use, first) for use in USES for first in (False, True) if not (first and use in SETS)]
)
def test_gradients_that_another_thread_uses_during_backward(use: str, comes_first: bool) -> None:
    """As a thread does that reduces gradients while backward goes on: hooks tell it which are ready."""

    def train(device: Callable[[int], Any] | None, seed: int) -> list[Any]:
        model, ready, seen = mlp(torch.bfloat16, width=8, layers=6), queue.SimpleQueue[Any](), list[Any]()
        optimizer = adam(model)
        with contextlib.ExitStack() as stack:
            for enters in (comes_first, not comes_first):
                for parameter in model.parameters() if enters else ():
                    parameter.register_post_accumulate_grad_hook(ready.put)
                if device is not None and not enters:
                    stack.enter_context(OffloadScheduler(optimizer, model, device=device(seed), bucket_numel=70))
            for number in range(4):
                with ThreadPoolExecutor(1) as threads:
                    other = threads.submit(lambda: [*map(USES[use], iter(ready.get, None))])
                    try:
                        model(batch(number, torch.bfloat16, 8)).float().square().mean().backward()
                    finally:
                        ready.put(None)
                    other.result(30)
                seen.append([None if p.grad is None else bits(p.grad) for p in model.parameters()])
                optimizer.step()
                seen.append([*map(bits, model.parameters())])
                optimizer.zero_grad()
            return [seen, [bits(entry["exp_avg"]) for entry in optimizer.state.values()]]

    expected = train(None, 0)
    for (name, device), seed in itertools.product(DEVICES.items(), range(4 + TIMES)):
        assert train(device, seed) == expected, f"{name} with seed {seed}"


@pytest.mark.parametrize("use", sorted(USES.keys() - SETS - {"scale later"}))
def test_what_uses_a_taken_gradient_waits_for_calls_of_the_optimizer(use: str) -> None:
    optimizer = adam(model := mlp(torch.bfloat16, layers=1))
    model(batch(0, torch.bfloat16)).float().sum().backward()
    optimizer.speculate()
    other = threading.Thread(target=USES[use], args=(next(model.parameters()),), daemon=True)
    with optimizer._binding._lock():
        other.start()
        other.join(0.2)
        assert other.is_alive()
    other.join(60)
    assert not other.is_alive()


def test_a_hook_that_waits_for_close_takes_nothing() -> None:
    run = Run(2)
    run.optimizer.zero_grad()
    with ThreadPoolExecutor(1) as threads, run.optimizer._binding._lock():
        threads.submit(run.model(batch(0, torch.bfloat16, 8)).float().sum().backward)
        time.sleep(0.2)
        run.scheduler.close()
    assert {type(parameter.grad) for parameter in run.model.parameters()} == {torch.Tensor}
