"""What programs cannot show of a scheduler: arguments, errors, threads, memory, lives, and what is told of a step.

That no program sees a difference is in test_programs.py.
"""

import copy
import gc
import json
import math
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import overlap
from support.children import exit_code_of_child
from support.overlap import adam, batch, devices_in_turn, eager, everything, fail_at, loss_of, mlp, overlapped, train
from support.programs import both, frozen
from support.visible import bits, refused, shown
from support.waiting import wait_until
from torch import Tensor, nn
from torch.utils.data import DataLoader

import superadam
from superadam import OffloadScheduler, SpeculativeCPUAdam, StepKind
from superadam.devices import Device, Stream
from superadam.devices.worker import Worker, WorkerError
from superadam.handles.gradient_handle import taken_of
from superadam.handles.taken_gradient import TakenGradient
from superadam.kernels import native, torch_private
from superadam.offload.buckets import PAUSE_STEPS, Hooks
from superadam.offload.pipeline import Pipeline
from superadam.optim.binding import Binding
from superadam.optim.published_state import PublishedState
from superadam.state.parameter import Phase
from superadam.step.transaction import Transaction
from superadam.testing import SimulatedDevice
from superadam.testing.simulated import SeededWorker

pytestmark = pytest.mark.timeout(240)  # a hang fails with the stack of every thread

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
asynchronous = devices_in_turn("asynchronous")
anywhere = devices_in_turn("anywhere", overlap.ImmediateDevice, overlap.DeferredDevice)
working = devices_in_turn("working", overlap.ImmediateDevice, overlap.ThreadDevice)


def options_of(device: Device, *, kept: int) -> dict[str, Any]:
    """Return options of a scheduler that keeps buckets where that is possible."""
    return {"device": device, "gpu_buckets": kept if device.can_update else 0}


# ---- what torch does to gradients -----------------------------------------------------------------------------------


def test_edited_gradients_are_not_taken_for_a_while() -> None:
    """What would be given back each time is left alone for some steps; then it is tried again."""
    taken = []

    def steps(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(2 * PAUSE_STEPS + 6):
            before = scheduler and scheduler.statistics.buckets
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            if seed < PAUSE_STEPS + 3:
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            if scheduler is not None:
                taken.append(scheduler.statistics.buckets > before)

    scheduler = both(steps, {}, lambda: mlp(torch.bfloat16))
    assert taken == [True, *[False] * PAUSE_STEPS, True, *[False] * PAUSE_STEPS, *[True] * 4]
    assert scheduler.statistics.given_back_gradients == 2 * 6


def test_the_worker_commits_while_a_copy_is_under_way() -> None:
    """A host that runs ahead of its GPU enqueues buckets early; without this, commits would be left to the step."""
    with overlapped(torch.bfloat16, steps=3, max_grad_norm=None) as (_, _, scheduler):
        pipeline, left = scheduler._pipeline, list[int]()
        accepted = len(pipeline.transaction.in_phase(Phase.ACCEPTED))

        class PassesAfterTwoCommits:
            def query(self) -> bool:
                left.append(len(pipeline.transaction.in_phase(Phase.ACCEPTED)))
                return len(left) == 3

            def synchronize(self) -> None: ...

        pipeline._wait_for(PassesAfterTwoCommits(), lambda: True)  # what the training thread waits for comes first
        assert left == []
        pipeline._wait_for(PassesAfterTwoCommits(), lambda: False)
        assert left == [accepted, accepted - 1, accepted - 2]


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 10**9])
@pytest.mark.parametrize("then", ["step", "zero_grad", "read", "close"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_worker_that_fails(dtype, at, after, then, kept, working, monkeypatch):
    """It is told in step(); nothing has changed, and the gradients are in `.grad`, for a step without the worker."""
    told = r"worker failed with PlantedError: the worker stumbled; nothing was changed, .* call step\(\) again"

    def story(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> list[Any]:
        train(model, optimizer, range(2))
        before = shown(optimizer)
        with monkeypatch.context() as patch:
            if scheduler is not None:
                fail_at(patch, Transaction, "speculate", at, overlap.PlantedError("the worker stumbled"), after=after)
            loss_of(model, 2).backward()
            if scheduler is not None:
                with pytest.raises(WorkerError, match=told) as caught:
                    optimizer.state_dict() if then == "read" else optimizer.step()
                assert isinstance(caught.value.__cause__, overlap.PlantedError)
        assert shown(optimizer) == before
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        if then == "zero_grad":
            optimizer.zero_grad()
        if then == "close" and scheduler is not None:
            scheduler.close()
        optimizer.step()
        train(model, optimizer, range(3, 5))
        return gradients

    both(story, options_of(working, kept=kept), lambda: mlp(dtype))


@pytest.mark.parametrize("sum_dtype", [None, torch.float32], ids=str)
def test_sparse_gradients_are_refused_by_the_step(sum_dtype: torch.dtype | None, working: Device) -> None:
    model = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
    optimizer = adam(model)
    with eager(optimizer, model, device=working) as scheduler:
        with scheduler.accumulate(sum_dtype) if sum_dtype else nullcontext():
            model(batch(0).argmax(-1)).sum().backward()
        before = shown(optimizer)
        for _ in range(2):
            with pytest.raises(TypeError, match="is sparse, expected a dense one"):
                optimizer.step()
        assert shown(optimizer) == before
        assert model[0].weight.grad is not None
        optimizer.zero_grad()
        optimizer.step()
        assert not optimizer.state
        model[0].weight.requires_grad_(False)
        model(batch(0).argmax(-1)).sum().backward()
        optimizer.step()
        assert optimizer.last_outcome.kind is not StepKind.SKIPPED


# ---- arguments ------------------------------------------------------------------------------------------------------


def assert_nothing_is_attached(model: nn.Module, optimizer: SpeculativeCPUAdam, **options: Any) -> None:
    """Check that a scheduler that was refused left neither hooks nor itself."""
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    twin = copy.deepcopy(model)
    plain = adam(twin)
    for begin in (0, 2):
        with eager(optimizer, model, **options) if begin else nullcontext():  # it may have one
            train(model, optimizer, range(begin, begin + 2))
        train(twin, plain, range(begin, begin + 2))
        assert everything(model, optimizer) == everything(twin, plain)


def test_gradients_of_a_backward_that_is_captured_stay_in_grad() -> None:
    """A replay of the graph writes to their memory, and calls no hook."""
    device = SimulatedDevice(0)
    device.is_capturing = lambda: True
    scheduler = both(lambda model, optimizer, _: train(model, optimizer, range(2)), {"device": device})
    assert scheduler.statistics.buckets == 0


@pytest.mark.parametrize("make_device", [overlap.ThreadDevice, lambda: SimulatedDevice(0)], ids=["host", "link"])
@pytest.mark.parametrize(
    ("owner", "method", "num_threads"),
    [
        *((Binding, "attach", 1), (Binding, "_bind", 1), (Hooks, "watch", 1), (Pipeline, "__init__", 1)),
        *((overlap.ThreadDevice, "reserve", 1), (overlap.ThreadDevice, "reserve", 0)),
    ],
)
def test_scheduler_that_cannot_be_made_leaves_nothing(owner, method, num_threads, make_device, monkeypatch):
    model, device = mlp(), make_device()
    owner = type(device) if owner is overlap.ThreadDevice else owner
    optimizer = adam(model)
    threads, usual = {*threading.enumerate()}, getattr(owner, method)

    def fail(self: Any, *arguments: object, **options: object) -> None:
        if method == "_bind" and self.overlap is None:  # without the scheduler
            return usual(self, *arguments, **options)
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fail)
        patch.setattr(type(device), "idle_cores", lambda device: num_threads)
        with pytest.raises(MemoryError, match="planted"):
            OffloadScheduler(optimizer, model, device=device)
    assert {*threading.enumerate()} <= threads
    assert_nothing_is_attached(model, optimizer)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["drop", "detach", "entries", "close"])
def test_closing_that_has_failed_is_finished_by_the_next_call(method, after, monkeypatch):
    threads, model, device = {*threading.enumerate()}, mlp(), overlap.ThreadDevice()
    monkeypatch.setattr("superadam.offload.scheduler.device_for", lambda _: device)
    monkeypatch.setattr(device, "close", Mock())
    scheduler = eager(optimizer := adam(model), model, device=None)
    with monkeypatch.context() as patch:
        fail_at(patch, Worker if method == "close" else Binding, method, 1, MemoryError("planted"), after=after)
        with pytest.raises(MemoryError, match="planted"):
            scheduler.close()
    scheduler.close()
    device.close.assert_called_once()
    assert {*threading.enumerate()} <= threads
    assert_nothing_is_attached(model, optimizer)


@pytest.mark.parametrize("how", ["speculate", "rollback"])
def test_closing_that_tells_of_the_worker_or_meets_ctrl_c_gives_gradients_back(how, monkeypatch):
    told, error = (WorkerError, overlap.PlantedError) if how == "speculate" else (KeyboardInterrupt, KeyboardInterrupt)

    def story(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        train(model, optimizer, range(2))
        with monkeypatch.context() as patch, nullcontext() if scheduler is None else pytest.raises(told):
            if scheduler is not None:
                at = (Transaction, how, 2) if how == "speculate" else (SpeculativeCPUAdam, how, 1)
                fail_at(patch, *at, error("planted"))
            loss_of(model, 2).backward()
            if scheduler is not None:
                scheduler.close()
        assert all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())
        optimizer.step()
        train(model, optimizer, range(3, 5))

    both(story, {"device": overlap.ThreadDevice()}, lambda: mlp(torch.bfloat16))


@pytest.mark.parametrize("method", ["let_go", "look"])
def test_binding_anew_that_has_failed_is_made_by_the_next_call(method, monkeypatch):
    found = []
    for fails in (False, True):
        model = mlp(torch.bfloat16)
        weight, optimizer = next(model.parameters()), adam(model)
        with eager(optimizer, model, device=overlap.ThreadDevice()), monkeypatch.context() as patch:
            train(model, optimizer, range(2))
            weight.data = weight.data.t().contiguous().t()
            if fails:
                fail_at(patch, PublishedState, method, 1, MemoryError("planted"))
                with pytest.raises(MemoryError, match="planted"):
                    optimizer.commit()
            train(model, optimizer, range(2, 4))
        found.append(everything(model, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("use", [lambda *_: None, lambda one, _: one.state_dict(), lambda _, it: it.close()])
def test_what_atexit_calls_after_the_worker_ended_is_done_without_it(use):
    def story(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            if scheduler is not None and seed:
                scheduler._pipeline.worker._end_with_interpreter()
                use(optimizer, scheduler)
            optimizer.step()

    both(story, {"device": overlap.ThreadDevice(), "bucket_numel": "auto"})


@pytest.mark.parametrize(("num_threads", "expected"), [("auto", 2), (3, 3)])
def test_cores_limit_what_runs_beside_backward(num_threads, expected, monkeypatch):
    """The worker uses a number of threads until it is waited for, and others use theirs meanwhile."""
    used: list[tuple[bool, int | None]] = []
    run, before, model = native.run, superadam.get_num_threads(), mlp()

    def noting(*arguments: Any, threads: int | None = None, **options: Any) -> None:
        used.append((threading.current_thread() is threading.main_thread(), threads))
        run(*arguments, threads=threads, **options)

    monkeypatch.setattr(native, "run", noting)
    superadam.set_num_threads(8)
    try:
        with eager(optimizer := adam(model), model, num_threads=num_threads, device=overlap.ThreadDevice()):
            loss_of(model, 0).backward()
            wait_until(lambda: used)
            during_backward = list(used)
            optimizer.step()
    finally:
        superadam.set_num_threads(before)
    assert during_backward
    assert all(thread == (False, expected) for thread in during_backward)
    assert (True, None) in used  # all of them


@pytest.mark.covering(1)
@pytest.mark.parametrize("has_link", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_idle_cores_everything_is_left_to_the_step(dtype: torch.dtype, has_link: bool) -> None:
    device, threads = overlap.DeferredDevice(), {*threading.enumerate()}
    device.has_link = has_link

    def story(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        assert {*threading.enumerate()} <= threads
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            assert all(type(parameter.grad) is Tensor for parameter in model.parameters())
            optimizer.step()

    scheduler = both(story, {"device": device}, lambda: mlp(dtype))
    assert scheduler.placement.num_threads == 0
    assert scheduler.statistics.buckets == 0
    assert scheduler.statistics.hidden_share == 0.0
    assert scheduler.optimizer.statistics.speculate_seconds == 0.0


def test_scheduler_without_a_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = adam(model := mlp())
    with monkeypatch.context() as patch, refused(optimizer, RuntimeError, "has no thread .no more., expected one more"):
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no more")))
        OffloadScheduler(optimizer, model, num_threads=1, device=overlap.ThreadDevice())
    assert_nothing_is_attached(model, optimizer, device=overlap.ThreadDevice())


def test_second_scheduler_on_one_optimizer_is_refused() -> None:
    """And leaves the first one's worker the lock, for which a finalizer there that uses the optimizer would wait."""
    with overlapped(device=overlap.ThreadDevice()) as (model, optimizer, scheduler):
        threads = {*threading.enumerate()}
        for device in (None, overlap.ThreadDevice()):
            with pytest.raises(RuntimeError, match=r"has a scheduler already; close\(\) it"):
                OffloadScheduler(optimizer, model, device=device)
        scheduler._pipeline.worker.submit(lambda is_awaited: optimizer.zero_grad())
        with pytest.raises(WorkerError, match="has used an optimizer"):
            scheduler._pipeline.worker.drain()
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled, because its worker"):
                copied(scheduler)
        assert {*threading.enumerate()} <= threads
        train(model, optimizer, range(2))
    OffloadScheduler(optimizer, model).close()


def test_a_closed_scheduler_leaves_no_hook_and_is_not_used_again() -> None:
    """Also where state was loaded before."""
    with overlapped(steps=1, num_threads=1, device=overlap.ThreadDevice()) as (model, optimizer, scheduler):
        optimizer.load_state_dict(optimizer.state_dict())
        assert "hidden, Placement(" in repr(scheduler)
        with pytest.raises(ValueError, match="num_threads is 0, expected an integer of at least 1"):
            scheduler.place(num_threads=0)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert repr(scheduler).startswith("OffloadScheduler(closed, ")
    before = scheduler.placement
    for use in (scheduler.__enter__, scheduler.accumulate().__enter__, lambda: scheduler.place(bucket_numel=7)):
        with pytest.raises(RuntimeError, match="the scheduler was closed, expected an open one; make another"):
            use()
    assert scheduler.placement == before


# ---- life and death -------------------------------------------------------------------------------------------------


def test_step_returns_before_the_commits_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(self: Transaction, *arguments: int, commit: Callable[..., int] = Transaction.commit) -> int:
        began.set()
        assert may_go_on.wait(60)
        ended.set()
        return commit(self, *arguments)

    options = {"device": overlap.ThreadDevice(), "num_threads": 1, "max_grad_norm": math.inf}
    with overlapped(torch.bfloat16, steps=1, **options) as (model, optimizer, _):  # there is state from then on
        monkeypatch.setattr(Transaction, "commit", slow)
        loss_of(model, 0).backward()
        optimizer.step()
        assert began.wait(60)
        loss_of(model, 1)  # the next forward runs during the commit
        assert not ended.is_set()
        may_go_on.set()
        assert ended.wait(60)


def test_data_loader_workers_are_forked_beside_the_worker() -> None:
    def loaded(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        data = [batch(seed, rows=1)[0] for seed in range(12)]
        workers = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 60} if scheduler else {}
        for _ in range(2):
            for x in DataLoader(data, batch_size=3, **workers):
                optimizer.zero_grad()
                (30 * (model(x) - 1).square().mean()).backward()
                optimizer.step()

    both(loaded, {"device": overlap.ThreadDevice()})


@pytest.mark.parametrize("closes", [False, True])
def test_forked_child_leaves_a_device_alone_whose_scheduler_it_drops_or_closes(*, closes: bool) -> None:
    """What is under way there copies from and to pinned memory, which a child has not."""
    model = mlp()
    scheduler = eager(optimizer := adam(model), model, device=SimulatedDevice(0, eagerness=0))
    train(model, optimizer, range(1))
    loss_of(model, 1).backward()

    def in_child() -> None:
        nonlocal scheduler, optimizer, model
        SeededWorker.close = lambda self: os._exit(2)  # type: ignore[method-assign]
        if closes:
            with pytest.raises(RuntimeError, match="belongs to the process that this one was forked from"):
                scheduler.close()
        del scheduler, optimizer, model
        gc.collect()

    assert exit_code_of_child(in_child) == 0
    optimizer.step()
    dropped = weakref.ref(scheduler)
    del scheduler, optimizer, model
    gc.collect()
    assert dropped() is None


@pytest.mark.parametrize("make_device", [overlap.ThreadDevice, lambda: SimulatedDevice(0, eagerness=0)])
def test_forked_child_is_told_instead_of_hanging(make_device: Any) -> None:
    """Before anything is copied, or awaited from a thread that may hold a lock; it may train another model."""
    model = mlp()
    scheduler = eager(optimizer := adam(model), model, device=make_device())
    train(model, optimizer, range(1))
    loss_of(model, 1).backward()

    def in_child() -> None:
        for parameter in model.parameters():
            with suppress(RuntimeError):  # where it was still under way
                assert parameter.grad.isfinite().all()
        for call in (loss_of(model, 2).backward, optimizer.step, lambda: scheduler.export_trace("/dev/null")):
            with pytest.raises(RuntimeError, match="belongs to the process that this one was forked from"):
                call()
        other = mlp()
        train(other, fresh := adam(other), range(2))
        with eager(fresh, other, device=overlap.ThreadDevice()):
            train(other, fresh, range(2))
        with pytest.raises(RuntimeError, match="belongs to the process"), scheduler:
            pass
        with pytest.raises(SystemExit), scheduler:
            sys.exit()

    with scheduler:
        assert exit_code_of_child(in_child) == 0
        optimizer.step()


@pytest.mark.slow
@pytest.mark.subprocess
def test_interpreter_ends_without_close() -> None:
    """With commits under way: a thread that the interpreter has to kill would abort the process."""
    program = """
        import os, sys, torch, torch._dynamo, superadam  # which optimizers import when they are first called
        torch.set_num_threads(1)  # OpenMP waits for threads that were not forked
        for ending in ("loss(1).backward()", "raise KeyError('the end')", "os.kill(os.getpid(), 2)"):
            child = os.fork()
            if not child:
                break
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        else:
            sys.exit()
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)])
        optimizer = superadam.SpeculativeCPUAdam(model.parameters(), max_grad_norm=1.0)
        scheduler = superadam.OffloadScheduler(optimizer, model, bucket_numel=100, num_threads=1)
        loss = lambda seed: model(torch.randn(8, 64)).square().mean()
        for seed in range(3):
            loss(seed).backward()
            optimizer.step()
        exec(ending)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=240, check=True
    )
    assert run.stdout.split() == ["0", "1", "-2"], run.stderr
    assert "KeyError: 'the end'" in run.stderr


def test_exported_trace(tmp_path: Path) -> None:
    options = {"device": overlap.ThreadDevice(), "bucket_numel": 70, "num_threads": 1}
    with overlapped(torch.bfloat16, steps=3, **options) as (model, optimizer, scheduler):
        (loss_of(model, 3) * math.nan).backward()
        optimizer.step()
        scheduler.synchronize()
        scheduler.export_trace(tmp_path / "trace.json")
        with pytest.raises(OSError, match="is no regular file"):
            scheduler.export_trace(tmp_path)
        with pytest.raises(OSError, match="No such file or directory: '/no/such/trace'"):
            scheduler.export_trace("/no/such/trace")
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"adam", "backward and step", "gradients to host", "verdict: skipped"} <= names
    assert names & {"verdict: committed", "verdict: clipped"}


# ---- an asynchronous device, and gradients in other dtypes on the link ----------------------------------------------


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize(
    "how", ["taken", "held", "given back", "by hand", "half by hand", "too large", "of a new group", "norm asked for"]
)
@pytest.mark.parametrize("link", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrow_link_is_a_step_with_rounded_gradients(dtype, link, how, kept, anywhere):
    """Whether gradients travel or not, and no matter what takes them."""
    norms: dict[bool, list[float]] = {False: [], True: []}

    def steps(model: nn.Module, optimizer: SpeculativeCPUAdam, *, rounds: bool) -> None:
        for seed in range(6):
            optimizer.zero_grad()
            if how == "held":
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                held = [parameter.grad for parameter in model.parameters()]
            loss = loss_of(model, seed) * (1e6 if how == "too large" and seed == 3 else 1.0)
            if how == "of a new group":
                extra = nn.Parameter(torch.linspace(-1, 1, 30, dtype=dtype))
                model.register_parameter(f"extra{seed}", extra)
                optimizer.add_param_group({"params": [extra]})
                loss = loss + (extra.float() * torch.linspace(1, 2, 30)).sin().sum()
            loss.backward()
            if how == "given back":
                model[2].weight.grad.view(-1)[0] = 0.75
            if rounds and dtype != torch.float64:
                for parameter in (one for one in model.parameters() if one.grad is not None):
                    parameter.grad = parameter.grad.to(link).to(dtype)
            if how == "by hand":
                optimizer.speculate()
            if how == "half by hand":
                optimizer.speculate([model[2].weight])
            if how == "norm asked for" and anywhere.idle_cores():  # else nothing is taken, and torch sees what is there
                norms[rounds].append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
            optimizer.step()
            norms[rounds].append(optimizer.last_outcome.grad_norm)
            held = None  # noqa: F841 until then

    both(
        lambda model, optimizer, _: steps(model, optimizer, rounds=False),
        {"transfer_dtype": link, **options_of(anywhere, kept=kept)},
        lambda: mlp(dtype),
        lambda model, optimizer, _: steps(model, optimizer, rounds=True),
    )
    assert frozen(norms[False]) == frozen(norms[True])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_only_a_gradient_that_is_rounded_has_values_later(dtype: torch.dtype) -> None:
    options = {"device": SimulatedDevice(1), "bucket_numel": 10**6, "transfer_dtype": torch.bfloat16}
    with overlapped(dtype, steps=1, **options) as (model, _, scheduler):
        loss_of(model, 1).backward()
        (bucket,) = scheduler._bucketer.rest()
        for taken in bucket.gradients.values():
            assert taken.pending.dtype is torch.bfloat16
            assert taken.arrived in (bucket.made if dtype is torch.float32 else [None])


def test_no_norm_that_is_asked_for_lets_backward_wait_for_what_is_rounded(monkeypatch) -> None:
    waited, ready = [], TakenGradient.ready
    monkeypatch.setattr(TakenGradient, "ready", lambda self: waited.append(self.arrived) or ready(self))
    options = {"device": SimulatedDevice(1), "bucket_numel": 64, "transfer_dtype": torch.bfloat16}
    with overlapped(steps=1, **options) as (model, optimizer, _):
        for step in range(3):
            waited.clear()
            loss_of(model, step).backward()
            assert not any(waited)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def test_gradient_that_a_device_refuses_as_one_of_another_is_rounded_on_the_host(monkeypatch) -> None:
    found, pack = [], SimulatedDevice.pack
    for number in (0, 8):
        fail = Mock(side_effect=ValueError("a gradient is on another device"))

        def chosen(device: Device, gradients: list[Tensor], *rest: Any, number=number, fail=fail) -> Tensor:
            return (fail if gradients[0].numel() == number else pack)(device, gradients, *rest)

        monkeypatch.setattr(SimulatedDevice, "pack", chosen)
        options = {"device": SimulatedDevice(1), "bucket_numel": 10**6, "transfer_dtype": torch.bfloat16}
        with overlapped(steps=3, **options) as (model, optimizer, _):
            found.append(everything(model, optimizer))
        assert fail.called == (number > 0)
    assert found[0] == found[1]


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_gradients_are_freed_once_they_are_committed_and_dropped(working: Device) -> None:
    with overlapped(torch.bfloat16, steps=2, max_grad_norm=math.inf, device=working) as (model, optimizer, scheduler):
        loss_of(model, 2).backward()
        scheduler._catch_up()
        pending = [weakref.ref(taken_of(parameter.grad).pending) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.synchronize()
        gc.collect()
        assert not any(one() is not None for one in pending)
        if isinstance(working, SimulatedDevice):
            assert not working.has_memory_in_use


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_threads", [0, 2])
def test_memory_for_new_values_does_not_grow_with_the_model(num_threads, asynchronous, monkeypatch):
    """Nor does it in steps that are clipped or skipped, which write every parameter at once."""
    sizes: list[int] = []

    def measuring(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def measured(numel: int, dtype: torch.dtype, *stream: Stream) -> Tensor:
            sizes.append(numel * dtype.itemsize // torch.float32.itemsize)
            return empty(numel, dtype, *stream)

        return measured

    def steps(model: nn.Module, optimizer: SpeculativeCPUAdam, _: OffloadScheduler | None) -> None:
        for seed in range(6):
            optimizer.zero_grad()
            (loss_of(model, seed) * (math.inf if seed == 4 else 1.0)).backward()
            optimizer.step()

    for name in ("empty", "host_empty"):
        monkeypatch.setattr(asynchronous, name, measuring(getattr(asynchronous, name)))
    monkeypatch.setattr(asynchronous, "idle_cores", lambda: num_threads)
    scheduler = both(steps, {"device": asynchronous, "bucket_numel": 200}, lambda: mlp(layers=12), max_grad_norm=0.1)
    assert scheduler.optimizer.statistics.clipped
    assert scheduler.optimizer.statistics.skipped
    assert max(sizes) < 200 + 2 * 64 * 5 < 12 * 72


# ---- norms ----------------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_that_others_ask_for_are_taken_before_gradients_travel(dtype: torch.dtype, asynchronous: Device) -> None:
    """From the second step on, and they are torch's own, on the device, once."""

    def story(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> list[Any]:
        seen = []
        for seed in range(5):
            loss_of(model, seed).backward()
            taken = [taken_of(parameter.grad) for parameter in model.parameters()]
            if scheduler is not None:
                assert [one.norm is not None for one in taken] == [seed > 1] * 6
            if seed:
                norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
                seen.append(norm)
            seen.append(frozen([p.grad for p in model.parameters()]))
            assert scheduler is None or scheduler._transfers.computes_norms == (seed > 0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(shown(optimizer))
        return seen

    both(story, {"device": asynchronous}, lambda: mlp(dtype), max_grad_norm=math.inf)


def test_norms_of_a_mixed_model_are_those_of_lists_of_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `clip_grad_norm_` makes them: a GPU sums a list of several dtypes in another order."""

    def rounds_otherwise(tensors: list[Tensor], order: float, of: Any = torch_private.foreach_norm) -> list[Tensor]:
        is_mixed = len({tensor.dtype for tensor in tensors}) > 1
        return [norm * (0.5 if is_mixed else 1.0) for norm in of(tensors, order)]

    monkeypatch.setattr(torch_private, "foreach_norm", rounds_otherwise)
    models = [mlp(), mlp()]
    for model in models:
        model[0].bfloat16()
    optimizers = [adam(model, max_grad_norm=None) for model in models]
    with eager(optimizers[0], models[0], device=SimulatedDevice(0), bucket_numel=200):
        for seed in range(3):
            for model in models:
                model[1:](model[0](batch(seed).bfloat16()).float()).square().sum().backward()
            norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) for model in models]
            assert bits(norms[0]) == bits(norms[1])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize(("link", "width"), [("auto", 1), (torch.float32, 2)], ids=str)
def test_new_values_go_up_before_the_verdict(link: Any, width: int) -> None:
    options = {"device": SimulatedDevice(1), "bucket_numel": 64, "num_threads": 1, "transfer_dtype": link}
    with overlapped(torch.bfloat16, steps=2, max_grad_norm=None, **options) as (model, _, scheduler):
        before = scheduler.statistics.uploaded_bytes
        loss_of(model, 2).backward()
        scheduler._catch_up()
        padded = sum(2 * 64 * -(-one.numel() // 64) for one in model.parameters())
        assert scheduler.statistics.uploaded_bytes - before == padded
        assert scheduler._transfers._reused.size == width * padded  # of the gradients' memory, until they are published


def test_a_parameter_may_leave_its_group_while_its_gradient_waits_in_a_bucket() -> None:
    with overlapped(torch.bfloat16, steps=2, bucket_numel=10**6) as (model, optimizer, _):
        loss_of(model, 1).backward()
        group = optimizer.param_groups[0]
        first, *group["params"] = group["params"]
        before = first.detach().clone()
        optimizer.step()
        assert optimizer.statistics.steps == 3
        assert torch.equal(first, before)
