"""`distributed_checkpoint.save(wait=False)` in one process: the content of its step, and the same bits of training."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.test_distributed_checkpoint import Model, content, groups_of, make, train
from support.children import exit_code_of_child
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.integrations import background_save, checkpoint_folder
from superadam.integrations.distributed_checkpoint import CheckpointError, load, save, wait
from superadam.state import snapshot
from superadam.testing import SimulatedDevice

OPTIMIZERS = [torch.optim.AdamW, SpeculativeCPUAdamW]


class Gate:
    """Lets the writer take so many tensors; it waits before each further one until `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 0) -> None:
        self.taken = 0
        self._left, self._passed = threading.Semaphore(count), threading.Event()
        take = background_save._SnapshotPlanner.resolve_data

        def resolve_data(planner: Any, item: Any) -> Any:
            self.taken += 1
            if not self._passed.is_set():
                self._left.acquire()
            return take(planner, item)

        monkeypatch.setattr(background_save._SnapshotPlanner, "resolve_data", resolve_data)

    def open(self) -> None:
        self._passed.set()
        self._left.release()


@pytest.fixture
def kept_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the memory of all copies, however small, from one test to the next."""
    monkeypatch.setattr(snapshot, "_MAPPED_BYTES", 1)


def train_so(way: str, model: Model, optimizer: Any, steps: int, *, seed: int = 1) -> None:
    """Train as `train`; where the way is "speculate", so that each commit shares the pass of the next speculation."""
    torch.manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(4, 5, dtype=model.scalar.dtype)).square().mean().backward()
        if way == "speculate":
            optimizer.speculate()
        optimizer.step()
        optimizer.zero_grad()


WAYS = [(torch.optim.AdamW, "plain"), *((SpeculativeCPUAdamW, way) for way in ("plain", "speculate", "overlap"))]


@pytest.mark.parametrize(("kind", "way"), WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 7, 15])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.usefixtures("kept_memory")
def test_content_is_that_of_its_step_and_training_has_the_same_bits(
    kind: Any,
    dtype: torch.dtype,
    way: str,
    count: int,
    steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After any number of tensors was written when training goes on."""
    gate = Gate(monkeypatch, count)
    model, optimizer = make(kind, dtype)
    plain, plain_optimizer = make(kind, dtype)
    scheduler = OffloadScheduler(optimizer, model, num_threads=1) if way == "overlap" else None
    for one in ((model, optimizer), (plain, plain_optimizer)):
        train_so(way, *one, steps)
    before = content(plain, plain_optimizer)
    extra = {"losses": [1.0]}
    path = save(tmp_path, model, optimizer, extra=extra, wait=False)
    extra["losses"].append(2.0)
    for one in ((model, optimizer), (plain, plain_optimizer)):
        train_so(way, *one, 3, seed=4)
    assert steps == 0 or not path.exists()  # without state there may be fewer tensors
    gate.open()
    wait()
    assert path.exists()
    assert content(model, optimizer) == content(plain, plain_optimizer)
    loaded, loaded_optimizer = make(kind, dtype, seed=9)
    assert load(tmp_path, loaded, loaded_optimizer) == {"losses": [1.0]}
    assert content(loaded, loaded_optimizer) == before
    if scheduler is not None:
        scheduler.close()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_copies_take_no_more_than_was_allowed_and_training_waits(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = []
    make_snapshot = background_save.Snapshot
    monkeypatch.setattr(
        background_save, "Snapshot", lambda *given: snapshots.append(make_snapshot(*given)) or snapshots[-1]
    )
    for copy_bytes in (0, 300, 1 << 20):
        model, optimizer = make(kind)
        plain, plain_optimizer = make(kind)
        for one in ((model, optimizer), (plain, plain_optimizer)):
            train(*one)
        with monkeypatch.context() as context:
            gate = Gate(context)
            save(tmp_path, model, optimizer, wait=False, copy_bytes=copy_bytes)
            trained = threading.Thread(target=train, args=(model, optimizer, 1), kwargs={"seed": 4})
            trained.start()
            trained.join(0.3)
            assert trained.is_alive() == (copy_bytes < 1000)  # the state has more
            gate.open()
            trained.join()
            wait()
        largest, copied_at_once = 4 * 5 * 7, 4 * 16
        assert snapshots[-1].peak_bytes <= copy_bytes + largest + copied_at_once
        assert (snapshots[-1].peak_bytes > 900) == (copy_bytes > 1000)
        train(plain, plain_optimizer, 1, seed=4)
        assert content(model, optimizer) == content(plain, plain_optimizer)
        monkeypatch.setattr(background_save, "Snapshot", background_save.Snapshot)
        for path in (tmp_path / "latest", *tmp_path.glob("save-*/*"), *tmp_path.glob("save-*")):
            path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "write",
    [
        lambda model, optimizer: optimizer.state[model.scalar]["exp_avg"].mul_(2),
        lambda model, optimizer: torch.nn.init.ones_(model.second.weight),
        lambda model, optimizer: model.second.weight.data.neg_(),
        lambda model, optimizer: model.second.weight.data.view(-1)[9:11].zero_(),
        lambda model, optimizer: model.scalar.detach().numpy().fill(3.0),
    ],
)
@pytest.mark.parametrize("steps_after", [0, 1])
def test_write_by_others_fails_the_save_and_not_the_training(
    kind: Any, write: Callable[..., object], steps_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    model, optimizer = make(kind)
    train(model, optimizer)
    save(tmp_path, model, optimizer, wait=False)
    write(model, optimizer)
    train(model, optimizer, steps_after)
    gate.open()
    with pytest.raises(CheckpointError, match=r"was written to while it was being saved; pass wait=True"):
        wait()
    wait()
    assert not list(tmp_path.glob("*save-*"))
    assert save(tmp_path, model, optimizer, wait=False).name == "save-00000001"
    wait()


def test_working_copy_may_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is saved as its rounded master."""
    gate = Gate(monkeypatch)
    model, optimizer = make(SpeculativeCPUAdamW, torch.bfloat16)
    train(model, optimizer)
    model.second.weight.data.clamp_(max=0.1)  # before the save, and found by samples
    before = content(*(model, optimizer))["model"]
    save(tmp_path, model, optimizer, wait=False)
    torch.nn.init.ones_(model.second.weight)
    assert optimizer.state[model.second.weight]["master"].eq(1).all()  # reading it adopts the write
    train(model, optimizer)
    gate.open()
    other = make(SpeculativeCPUAdamW, torch.bfloat16, seed=3)
    load(tmp_path, *other)
    assert content(*other)["model"] == before


def test_steps_of_torch_copy_each_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, made = Gate(monkeypatch), list[snapshot.Snapshot]()
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(1 << 18)) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    def snapshot_of(*arguments: Any) -> snapshot.Snapshot:
        made.append(snapshot.Snapshot(*arguments))
        return made[-1]

    monkeypatch.setattr(background_save, "Snapshot", snapshot_of)
    step()
    save(tmp_path, model, optimizer, wait=False)
    step()
    assert made[0].peak_bytes < (6 << 20) + 1024  # values and two moments, and step counts
    gate.open()
    wait()
    assert not background_save._copy_memory._mapped


@pytest.mark.parametrize("kind", [SpeculativeCPUAdamW, torch.optim.AdamW])
def test_memory_given_back_fails_the_save_and_not_the_process(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    model = torch.nn.Linear(300, 300)
    model.weight.requires_grad_(False)
    optimizer = kind([model.bias])
    save(tmp_path, model, optimizer, wait=False)
    model.weight.untyped_storage().resize_(0)
    gate.open()
    with pytest.raises(CheckpointError, match=r"model\.weight was written to"):
        wait()


@pytest.mark.parametrize("kind", [SpeculativeCPUAdamW, torch.optim.AdamW])
def test_forked_process_waits_for_no_writer(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    model, optimizer = make(kind)
    train(model, optimizer)
    save(tmp_path, model, optimizer, wait=False, copy_bytes=0)  # here a step would wait
    try:
        assert exit_code_of_child(lambda: train(model, optimizer), 30) == 0
    finally:
        gate.open()
        wait()


@pytest.mark.parametrize("smaller", [{"moments": "8bit"}, {"master": "24bit"}])
def test_save_of_encoded_state_that_waits_adopts_writes_past_version_counters(smaller: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64).bfloat16()
    optimizer = SpeculativeCPUAdamW(model.parameters(), **smaller)
    model.weight.data.zero_()
    save(tmp_path, model, optimizer)
    other = torch.nn.Linear(64, 64).bfloat16()
    load(tmp_path, other, SpeculativeCPUAdamW(other.parameters(), **smaller))
    assert not other.weight.any()


def test_first_save_that_ended_before_it_was_named_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make(SpeculativeCPUAdamW)
    replace_file = checkpoint_folder.replace_file

    def full(path: Path, write: Callable[[Any], object]) -> None:
        if path.name == "latest":
            raise OSError(28, "No space left on device")
        replace_file(path, write)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "replace_file", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save(tmp_path, model, optimizer)
    assert save(tmp_path, model, optimizer).exists()


def test_threads_begin_their_saves_one_after_the_other(tmp_path: Path) -> None:
    paths = list[Path]()

    def begin(number: int) -> None:
        paths.append(save(tmp_path / str(number), *make(SpeculativeCPUAdamW, seed=number), wait=False))

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait()
    assert [path.exists() for path in paths] == [True] * 4


@pytest.mark.parametrize("smaller", [{}, {"moments": "8bit", "master": "24bit"}], ids=str)
@pytest.mark.parametrize("kind", [SpeculativeCPUAdamW, torch.optim.AdamW])
def test_step_of_another_thread_fails_a_save_that_waits(
    kind: Any, smaller: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would hold tensors of two steps."""
    model, optimizer = make(kind, torch.bfloat16, **(smaller if kind is SpeculativeCPUAdamW else {}))
    train(model, optimizer)
    save(tmp_path, model, optimizer)
    write = FileSystemWriter.write_data

    def write_data(*arguments: Any) -> Any:
        trainer = threading.Thread(target=train, args=(model, optimizer))
        trainer.start()
        trainer.join()
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", write_data)
        with pytest.raises(CheckpointError, match="another thread has made a step"):
            save(tmp_path, model, optimizer)
    save(tmp_path, model, optimizer)
    load(tmp_path, model, optimizer)


class OneMemory(torch.nn.Module):
    """A buffer and a parameter without gradients, on the memory of one that is trained."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.randn(4, 4).to(dtype))
        self.same = torch.nn.Parameter(self.trained.data)
        self.register_buffer("transposed", self.trained.detach().t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [SpeculativeCPUAdamW, torch.optim.AdamW])
def test_tensors_on_one_memory(kind: Any, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    model = OneMemory(dtype)
    optimizer = kind([model.trained], lr=0.1)

    def step() -> None:
        model.trained.grad = torch.ones_like(model.trained)
        optimizer.step()

    step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save(tmp_path, model, optimizer, wait=False)
    step()
    gate.open()
    other = OneMemory(dtype)
    other.same, other.transposed = torch.nn.Parameter(torch.ones(4, 4).to(dtype)), torch.ones(4, 4).to(dtype)
    load(tmp_path, other, kind([other.trained]))
    for name, value in other.state_dict().items():
        assert value.equal(before[name]), name


def test_loading_and_new_groups_leave_the_save_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    model, optimizer = make(SpeculativeCPUAdamW, torch.bfloat16)
    train(model, optimizer)
    before, older = content(model, optimizer), make(SpeculativeCPUAdamW, torch.bfloat16, seed=3)
    train(*older)
    save(tmp_path, model, optimizer, wait=False)
    optimizer.load_state_dict(older[1].state_dict())
    model.load_state_dict(older[0].state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    train(model, optimizer)
    gate.open()
    other = make(SpeculativeCPUAdamW, torch.bfloat16, seed=5)
    load(tmp_path, *other)
    assert content(*other) == before


def in_a_while(work: Callable[[], object], seconds: float = 0.05) -> None:
    """Check that Ctrl-C ends something that waits."""
    main = threading.main_thread().ident
    assert main is not None
    interrupt = threading.Timer(seconds, signal.pthread_kill, [main, signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        work()
    interrupt.join()


@pytest.mark.parametrize(("kind", "way"), [way for way in WAYS if way[1] != "speculate"])
@pytest.mark.parametrize("waiting", ["step", "wait", "save"])
def test_interrupt_of_what_waits_for_the_writer(
    kind: Any, way: str, waiting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes nothing, and the save goes on."""
    gate = Gate(monkeypatch)
    model, optimizer = make(kind)
    plain = make(kind)
    scheduler = OffloadScheduler(optimizer, model, num_threads=1) if way == "overlap" else None
    for one in ((model, optimizer), plain):
        train_so(way, *one, 2)
    before = content(*plain)
    path = save(tmp_path, model, optimizer, wait=False, copy_bytes=0)
    if waiting == "step":
        torch.manual_seed(4)
        model(torch.randn(4, 5)).square().mean().backward()
        in_a_while(optimizer.step)
        assert content(model, optimizer) == before
        gate.open()
        optimizer.step()
        optimizer.zero_grad()
        train_so(way, *plain, 1, seed=4)
    else:
        in_a_while(wait if waiting == "wait" else lambda: save(tmp_path, model, optimizer))
        threading.Timer(0.05, gate.open).start()
    wait()
    assert content(model, optimizer) == content(*plain)
    other = make(kind, seed=9)
    load(path, *other)
    assert content(*other) == before
    if scheduler is not None:
        scheduler.close()


@pytest.mark.filterwarnings(  # Ctrl-C in a callback of the collector or of a weak reference, where Python loses it
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)
def test_interrupt_of_a_save_at_random_moments(tmp_path: Path) -> None:
    """No step waits afterwards for a writer that is not there, and the next save is made."""
    generator = torch.Generator().manual_seed(0)
    model, optimizer = make(SpeculativeCPUAdamW)
    plain = make(SpeculativeCPUAdamW)
    train(model, optimizer)
    train(*plain)
    interrupted = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    for seed in range(24):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 0.02 * float(torch.rand((), generator=generator)))
                save(tmp_path, model, optimizer, wait=False, copy_bytes=0)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
        for one in ((model, optimizer), plain):
            train(*one, 1, seed=seed)
        wait()
    signal.signal(signal.SIGALRM, before)
    assert interrupted > 1
    path = save(tmp_path, model, optimizer, wait=False)
    wait()
    other = make(SpeculativeCPUAdamW, seed=9)
    load(path, *other)
    assert content(*other) == content(model, optimizer) == content(*plain)


def test_thread_that_cannot_start_leaves_training_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make(SpeculativeCPUAdamW)
    train(model, optimizer)
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("can't start")))
        with pytest.raises(CheckpointError, match="can't start; pass wait=True, or end some threads"):
            save(tmp_path, model, optimizer, wait=False, copy_bytes=0)
    train(model, optimizer)  # which waits for nobody
    assert save(tmp_path, model, optimizer).exists()


@pytest.mark.parametrize("copy_bytes", [0, 1 << 20])
def test_state_that_is_resident_on_a_device(copy_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes to the host for the save, goes back, and comes home again over what is being saved."""
    gate = Gate(monkeypatch)
    model, optimizer = make(SpeculativeCPUAdamW, torch.bfloat16)
    plain = make(SpeculativeCPUAdamW, torch.bfloat16)
    scheduler = OffloadScheduler(
        optimizer, model, device=SimulatedDevice(5), bucket_numel=40, gpu_buckets=1000, num_threads=1
    )
    for one in ((model, optimizer), plain):
        train(*one, 3)
    assert scheduler.statistics.resident_buckets > 0
    before = content(*plain)
    path = save(tmp_path, model, optimizer, wait=False, copy_bytes=copy_bytes)
    train(model, optimizer, 2, seed=4)
    reading = threading.Thread(target=lambda: content(model, optimizer))  # brings the state home
    reading.start()
    reading.join(0.2)
    assert reading.is_alive() == (copy_bytes == 0)
    gate.open()
    reading.join()
    wait()
    train(*plain, 2, seed=4)
    assert content(model, optimizer) == content(*plain)
    scheduler.close()
    other = make(SpeculativeCPUAdamW, torch.bfloat16, seed=9)
    load(path, *other)
    assert content(*other) == before


def memory_of_process(name: str) -> int:
    """Return an entry of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


@pytest.mark.parametrize("copy_bytes", [0, 8 << 20])
def test_process_takes_no_more_memory_than_was_allowed(copy_bytes: int, tmp_path: Path) -> None:
    tensors, numel = 8, 1 << 19
    largest = 4 * numel

    def measure() -> None:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(numel).bfloat16()) for _ in range(tensors)])
        optimizer = SpeculativeCPUAdamW(model.parameters())
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        save(tmp_path / "first", model, optimizer)  # imports
        for _ in range(3):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = memory_of_process("VmHWM")
            save(tmp_path / "run", model, optimizer, wait=False, copy_bytes=copy_bytes, keep=1)
            optimizer.step()
            wait()
            taken = memory_of_process("VmHWM") - before
            assert taken <= copy_bytes + 2 * largest + (6 << 20), taken / 2**20  # less than half of the state

    assert exit_code_of_child(measure) == 0


def test_failure_is_raised_at_the_next_call_and_training_goes_on(tmp_path: Path) -> None:
    model, optimizer = make(SpeculativeCPUAdamW)
    plain = make(SpeculativeCPUAdamW)
    train(model, optimizer)
    save(tmp_path, model, optimizer, extra="older")
    files = sorted(tmp_path.rglob("*"))

    def fail() -> None:
        for call in (wait, lambda: save(tmp_path, model, optimizer), lambda: load(tmp_path, model, optimizer)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
            save(tmp_path, model, optimizer, wait=False, copy_bytes=0)
            train(model, optimizer, 1)
            with pytest.raises(CheckpointError) as error:
                call()
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            words = str(error.value)
            assert words.startswith(f"cannot save a checkpoint to {tmp_path}: ")
            assert words.endswith("earlier ones are as they were")
            assert "\n" not in words
            assert sorted(tmp_path.rglob("*")) == files
        train(*plain)
        for _ in range(3):
            train(*plain, 1)
        assert content(model, optimizer) == content(*plain)

    assert exit_code_of_child(fail) == 0
    assert load(tmp_path, model, optimizer) == "older"


PROGRAM = """
import sys, torch
from integrations.test_distributed_checkpoint import make, train
from superadam import SpeculativeCPUAdamW
from superadam.integrations.distributed_checkpoint import load, save
model, optimizer = make(SpeculativeCPUAdamW, torch.bfloat16)
if sys.argv[2] == "resume":
    print(load(sys.argv[1], model, optimizer))
for step in range(int(sys.argv[3])):
    train(model, optimizer, 1, seed=step)
    save(sys.argv[1], model, optimizer, extra=step, wait=False)
    print("saved", step, flush=True)
"""


def program(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": tests, "PYTHONSAFEPATH": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_interpreter_ends_when_the_save_has(tmp_path: Path) -> None:
    with program(tmp_path, "begin", 3) as process:
        process.communicate()
    assert process.returncode == 0
    assert load(tmp_path, *make(SpeculativeCPUAdamW, torch.bfloat16)) == 2


@pytest.mark.slow
def test_save_that_is_killed_at_a_random_moment_leaves_a_whole_one(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = make(SpeculativeCPUAdamW, torch.bfloat16)
    states = []
    for step in range(60):
        train(*plain, 1, seed=step)
        states.append(content(*plain))
    for number in range(4):
        folder = tmp_path / str(number)
        with program(folder, "begin", 60) as process:
            assert process.stdout is not None
            for _ in range(3 + number):
                line = process.stdout.readline()
            time.sleep(0.05 * float(torch.rand((), generator=generator)))
            process.send_signal(signal.SIGKILL)
        least = int(line.split()[1]) - 1  # which was whole before the next save began
        loaded = make(SpeculativeCPUAdamW, torch.bfloat16, seed=4)
        step = load(folder, *loaded)
        assert step >= least
        assert content(*loaded) == states[step]


def test_arguments(tmp_path: Path) -> None:
    pair = make(SpeculativeCPUAdamW)
    for copy_bytes in (-1, 1.5, True, None):
        with pytest.raises(CheckpointError, match=r"copy_bytes is .*, expected a whole number of at least 0"):
            save(tmp_path, *pair, wait=False, copy_bytes=copy_bytes)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="extra or a parameter group holds an object"):
        save(tmp_path, *pair, wait=False, extra=threading.Lock())
    model = Model()
    with pytest.raises(CheckpointError, match="the optimizer has parameters that the model lacks"):
        save(tmp_path, pair[0], SpeculativeCPUAdamW(groups_of(model)), wait=False)
    assert not list(tmp_path.glob("*save-*"))
