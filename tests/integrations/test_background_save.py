"""`distributed_checkpoint.save(wait=False)` in one process: the content of its step, and the same bits of training."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import io
import operator
import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from integrations.test_distributed_checkpoint import Model, make, stepped, told_of_failure, train
from support.children import exit_code_of_child, memory_of_process
from support.machines import machine
from support.ranks import Ending, run_apart
from support.visible import content
from torch import Tensor, distributed
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.integrations import background_save, checkpoint_folder, checkpoint_tensors, distributed_checkpoint
from superadam.integrations.distributed_checkpoint import CheckpointError, load, save, wait
from superadam.testing import SimulatedDevice

OPTIMIZERS = [torch.optim.AdamW, SpeculativeCPUAdamW]


class Gate:
    """Lets the writer take so many tensors; it waits before each further one until `open`, or the end of the test."""

    made: ClassVar[list[Gate]] = []

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 0) -> None:
        self.made.append(self)
        self._left, self._is_open = threading.Semaphore(count), False
        take = checkpoint_tensors.Planner.resolve_data

        def resolve_data(planner: Any, item: Any) -> Any:
            return (self._is_open or self._left.acquire()) and take(planner, item)

        monkeypatch.setattr(checkpoint_tensors.Planner, "resolve_data", resolve_data)

    def open(self) -> None:
        self._is_open = True
        self._left.release()


@pytest.fixture(autouse=True)
def gates_end_open():
    yield
    while Gate.made:
        Gate.made.pop().open()


SCHEDULERS: dict[str, Callable[[], dict[str, Any]]] = {
    "overlap": dict,
    "resident": lambda: {"device": SimulatedDevice(5), "bucket_numel": 40, "gpu_buckets": 1000},
}
"""Options of schedulers; resident state comes to the host for a save, goes back, and comes home again over it."""

WAYS = [(torch.optim.AdamW, "plain"), *((SpeculativeCPUAdamW, way) for way in ("plain", "speculate", *SCHEDULERS))]


def assert_saved(path, expected, kind, dtype=torch.float32, extra=None, **options) -> None:
    """Check what a new model and optimizer are once they were loaded."""
    other = make(kind, dtype, seed=9, **options)
    assert load(path, *other) == extra
    assert content(*other) == expected


@pytest.mark.parametrize(("kind", "way"), WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 7])
@pytest.mark.parametrize("steps", [0, 2])
def test_content_is_that_of_its_step_and_training_has_the_same_bits(
    kind, dtype, way, count, steps, tmp_path, monkeypatch
):
    """After any number of tensors was written when training goes on."""
    gate = Gate(monkeypatch, count)
    dtype = torch.bfloat16 if way == "resident" else dtype  # fp32 has masters there
    (model, optimizer), plain = pairs = make(kind, dtype), make(kind, dtype)
    scheduler = None
    if way in SCHEDULERS:
        scheduler = OffloadScheduler(optimizer, model, num_threads=1, **SCHEDULERS[way]())
    for pair in pairs:
        train(*pair, steps, speculates=way == "speculate")
    before = content(*plain)
    extra = {"losses": [1.0]}
    path = save(tmp_path, model, optimizer, extra=extra, wait=False)
    extra["losses"].append(2.0)
    for pair in pairs:
        train(*pair, seed=4, speculates=way == "speculate")
    assert steps == 0 or not path.exists()  # without state there may be fewer tensors
    gate.open()
    wait()
    assert path.exists()
    assert content(model, optimizer) == content(*plain)
    assert_saved(tmp_path, before, kind, dtype, extra={"losses": [1.0]})
    if scheduler is not None:
        assert (scheduler.statistics.resident_buckets > 0) is (way == "resident")
        scheduler.close()


@pytest.mark.parametrize("names", [("second.weight",), ("first.bias", "scalar")])
def test_what_hooks_make_of_the_models_state_is_saved(names, tmp_path):
    """Other values, or other names."""

    def exchange(module: Any, state: dict[str, Tensor], *_: object) -> None:
        state |= zip(names, [-state[name] if len(names) == 1 else state[name] for name in reversed(names)], strict=True)

    pairs = [make(SpeculativeCPUAdamW, torch.bfloat16, seed=seed) for seed in (0, 9)]
    for model, _ in pairs:
        model.register_state_dict_post_hook(exchange)
        model.register_load_state_dict_pre_hook(exchange)
    train(*pairs[0])
    save(tmp_path, *pairs[0], wait=False)
    load(tmp_path, *pairs[1])
    assert content(*pairs[1]) == content(*pairs[0])


def tensors_of_state(optimizer: Any) -> list[Tensor]:
    return [value for entry in optimizer.state.values() for key, value in entry.items() if key != "step"]


def resize(tensors: Iterable[Tensor], factor: int) -> Callable[[], None]:
    """Change the size of tensors' memory; return what takes that back."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.numel()]
    sizes = [storage.nbytes() for storage in storages]

    def change(factor: int) -> None:
        for storage, size in zip(storages, sizes, strict=True):
            storage.resize_(factor * size)

    change(factor)
    return lambda: change(1)


def write(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.data.fill_(7)


def load_another(model: Model, optimizer: Any) -> None:
    other, other_optimizer = stepped(type(optimizer), model.scalar.dtype, seed=3)
    optimizer.load_state_dict(other_optimizer.state_dict())
    model.load_state_dict(other.state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


REACHES: dict[str, Callable[[Model, Any], object]] = {
    "write to state": lambda model, optimizer: write(tensors_of_state(optimizer)),
    "write to step counts": lambda model, optimizer: write(entry["step"] for entry in optimizer.state.values()),
    "free state": lambda model, optimizer: resize(tensors_of_state(optimizer), 0),
    "grow state": lambda model, optimizer: resize(tensors_of_state(optimizer), 3),
    "clear state": lambda model, optimizer: optimizer.state.clear(),
    "write to parameters": lambda model, optimizer: write(model.parameters()),
    "write to buffers": lambda model, optimizer: write(model.buffers()),
    "free parameters": lambda model, optimizer: resize(model.parameters(), 0),
    "grow parameters": lambda model, optimizer: resize(model.parameters(), 3),
    "replace parameters": lambda model, _: [setattr(p, "data", torch.full_like(p, 7)) for p in model.parameters()],
    "convert parameters": lambda model, optimizer: model.double() and None,
    "load": load_another,
}
"""What a program may do while it is saved; each may return what takes that back."""


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "way", "options"),
    [(torch.optim.AdamW, "plain", {}), (SpeculativeCPUAdamW, "overlap", {"moments": "8bit", "master": "24bit"})],
)
def test_nothing_reaches_what_is_being_saved(kind, way, options, dtype, reach, tmp_path, monkeypatch):
    gate = Gate(monkeypatch, 3)
    model, optimizer = make(kind, dtype, **options)
    with OffloadScheduler(optimizer, model, num_threads=1) if way == "overlap" else contextlib.nullcontext():
        train(model, optimizer)
        before = content(model, optimizer)
        save(tmp_path, model, optimizer, wait=False)
        take_back = REACHES[reach](model, optimizer)
        gate.open()
        wait()
        assert_saved(tmp_path, before, kind, dtype, **options)
        if callable(take_back):
            take_back()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_memory_that_was_freed_before_is_refused(kind, waits, tmp_path):
    model = torch.nn.Linear(300, 300)
    model.weight.requires_grad_(False)
    optimizer = kind([model.bias])
    save(tmp_path, model, optimizer)
    files = sorted(tmp_path.rglob("*"))
    take_back = resize([model.weight], 0)
    with pytest.raises(CheckpointError, match="weight has no data, because its storage was freed"):
        save(tmp_path, model, optimizer, wait=waits)
    assert sorted(tmp_path.rglob("*")) == files
    take_back()
    save(tmp_path, model, optimizer, wait=waits)
    wait()


def stepped_list(tensors: int = 1, numel: int = 4096, **options: Any) -> tuple[Any, Any]:
    parameters = [torch.nn.Parameter(torch.ones(numel // 64, 64).bfloat16()) for _ in range(tensors)]
    optimizer = SpeculativeCPUAdamW(parameters, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return torch.nn.ParameterList(parameters), optimizer


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("smaller", [{}, {"moments": "8bit"}, {"master": "24bit"}], ids=str)
def test_write_past_version_counters_before_the_save_is_saved(smaller, waits, tmp_path):
    """Although a working copy is saved as its rounded master, and only samples tell of the write."""
    model, optimizer = stepped_list(**smaller)
    model[0].data.zero_()
    save(tmp_path, model, optimizer, wait=waits)
    other, other_optimizer = stepped_list(**smaller)
    load(tmp_path, other, other_optimizer)
    assert not other[0].any()


@pytest.mark.parametrize("smaller", [{}, {"moments": "8bit"}, {"master": "24bit"}], ids=str)
def test_working_copy_whose_master_was_written_to_is_saved_as_it_is(smaller, tmp_path):
    """It shows that master from the next step on."""
    model, optimizer = stepped_list(**smaller)
    optimizer.state[model[0]]["master"].mul_(0.5)
    for waits in (True, False):
        save(tmp_path / str(waits), model, optimizer, wait=waits)
        wait()
        other, other_optimizer = stepped_list(**smaller)
        load(tmp_path / str(waits), other, other_optimizer)
        assert content(other, other_optimizer)["model"] == content(model, optimizer)["model"]


class Tagged(Tensor):
    """Copies of it are made by torch."""


class Odd(torch.nn.Module):
    """Tensors that share memory, do not lie densely in it, or are not what lies in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 4).bfloat16())
        self.across = torch.nn.Parameter(torch.randn(4, 6).bfloat16().t())
        self.wide = torch.nn.Parameter(torch.randn(4, 4))
        self.same, self.wide_same = (torch.nn.Parameter(one.data) for one in (self.weight, self.wide))
        values, complex_values = torch.randn(4, 6), torch.randn(3, 5, dtype=torch.complex64)
        with torch.inference_mode():
            inferred = torch.randn(5)
        buffers = {
            "bits": self.weight.detach().view(torch.int16),
            "transposed": self.wide.detach().t(),
            "part": values[1:, ::2],
            "other_part": values[:3, ::2],
            "expanded": values[:1].expand(3, 6),
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "flags": values > 0,
            "complex": complex_values,
            "conjugated": complex_values.conj(),
            "negated": complex_values.conj().imag,
            "scalar": torch.tensor(3.0),
            "empty": torch.empty(0, 3),
            "tagged": torch.randn(3).as_subclass(Tagged),
            "inferred": inferred,
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def tensors_in(path: Path) -> dict[str, Tensor]:
    metadata = FileSystemReader(path).read_metadata()
    found = {}
    for index, place in metadata.storage_data.items():
        with (path / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            found[index.fqn] = torch.load(io.BytesIO(file.read(place.length)), weights_only=False)
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (SpeculativeCPUAdamW, {}), (SpeculativeCPUAdamW, {"moments": "bf16", "master": "24bit"})],
)
def test_content_is_that_of_a_save_that_waits(kind, options, tmp_path, monkeypatch):
    """Also where parameters that are not trained, and buffers, lie on the memory of those that are."""
    model = Odd()
    trained = [model.weight, model.across, model.wide]
    optimizer = kind(trained, **options)

    def step():
        for parameter in trained:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    for _ in range(2):
        step()
        paths = [save(tmp_path / "waits", model, optimizer)]
        with monkeypatch.context() as context:
            gate = Gate(context)
            paths.append(save(tmp_path / "does not", model, optimizer, wait=False))
            step()
            write(buffer for name, buffer in model.named_buffers() if name not in ("expanded", "inferred"))
            gate.open()
            wait()
        expected, found = map(tensors_in, paths)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert found[name].stride() == tensor.stride(), name
            assert torch.equal(found[name].resolve_conj().resolve_neg(), tensor.resolve_conj().resolve_neg()), name


@pytest.mark.parametrize("waits", [True, False])
def test_torch_that_does_not_write_one_tensor_after_the_other_is_refused(waits, tmp_path, monkeypatch):
    """A tensor that was decoded has no memory any more when the next one is asked for."""
    model, optimizer = stepped_list(2, moments="8bit", master="24bit")
    values = filesystem._SerialCpuLoader.values
    monkeypatch.setattr(filesystem._SerialCpuLoader, "values", lambda loader: iter([*values(loader)]))
    with pytest.raises(CheckpointError, match=r"asks for a tensor before it has written the one before"):  # noqa: PT012
        save(tmp_path, model, optimizer, wait=waits)
        wait()
    assert not list(tmp_path.glob("*save-*"))


def test_forked_process_saves_beside_a_save(tmp_path, monkeypatch):
    """It waits for no writer, and what it copies goes to memory of its own."""
    gate = Gate(monkeypatch)
    model, optimizer = stepped(SpeculativeCPUAdamW)
    before = content(model, optimizer)
    path = save(tmp_path / "run", model, optimizer, wait=False)

    def save_again():
        gate.open()
        write(model.parameters())
        save(tmp_path / "forked", model, optimizer, wait=False)
        wait()

    assert exit_code_of_child(save_again) == 0
    gate.open()
    wait()
    assert_saved(path, before, SpeculativeCPUAdamW)
    load(tmp_path / "forked", model, optimizer)
    assert all(parameter.eq(7).all() for parameter in model.parameters())


def test_threads_begin_their_saves_one_after_the_other(tmp_path):
    with ThreadPoolExecutor(4) as threads:
        saves = threads.map(lambda n: save(tmp_path / str(n), *make(SpeculativeCPUAdamW, seed=n), wait=False), range(4))
    wait()
    assert [path.exists() for path in saves] == [True] * 4


@pytest.mark.parametrize(
    ("kind", "smaller"),
    [(torch.optim.AdamW, {}), *((SpeculativeCPUAdamW, one) for one in ({}, {"moments": "8bit", "master": "24bit"}))],
)
@pytest.mark.parametrize(
    ("waits", "moment"), [(True, (FileSystemWriter, "write_data")), (False, (checkpoint_tensors, "Copies"))]
)
def test_step_of_another_thread_fails_a_save_whose_tensors_are_being_read(
    kind, smaller, waits, moment, tmp_path, monkeypatch
):
    """Or it would hold tensors of two steps."""
    pair = stepped(kind, torch.bfloat16, **smaller)
    save(tmp_path, *pair)
    reach, trainers = getattr(*moment), list[None]()

    def step_before(*arguments):
        if not trainers:
            with ThreadPoolExecutor(1) as threads:
                trainers.append(threads.submit(train, *pair).result())
        return reach(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(*moment, step_before)
        with pytest.raises(CheckpointError, match="another thread has made a step"):
            save(tmp_path, *pair, wait=waits)
    save(tmp_path, *pair)
    load(tmp_path, *pair)


def test_signal_handler_that_saves_during_a_save_is_refused(tmp_path, monkeypatch):
    """As one that waited for the save that it interrupts would wait for ever."""
    monkeypatch.setattr(checkpoint_folder, "LOCK_SECONDS", 0.1)
    pair = make(SpeculativeCPUAdamW)
    save(tmp_path, *pair)
    words = list[str]()

    def begin(*given, begin=checkpoint_folder.begin):
        begun = begin(*given)
        signal.raise_signal(signal.SIGALRM)
        return begun

    def save_again(*_):
        words.append(told_of_failure(tmp_path, lambda: save(tmp_path, *pair, wait=False)))

    before = signal.signal(signal.SIGALRM, save_again)
    monkeypatch.setattr(checkpoint_folder, "begin", begin)
    path = save(tmp_path, *pair, wait=False)
    signal.signal(signal.SIGALRM, before)
    wait()
    assert ["another process has been saving there for 0.1 seconds" in one for one in words] == [True]
    assert path.exists()


def in_a_while(work: Callable[[], object], seconds: float = 0.05) -> None:
    """Check that Ctrl-C ends something that waits."""
    has_begun, has_ended = threading.Event(), threading.Event()

    def interrupt() -> None:
        """Do it again where Python has lost it, as in a callback of the collector."""
        has_begun.wait()
        if not has_ended.wait(seconds):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while not has_ended.wait(30):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        has_begun.set()
        work()
    has_ended.set()
    interrupting.join()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("waiting", ["wait", "save"])
def test_interrupt_of_what_waits_for_the_writer(kind, waiting, tmp_path, monkeypatch):
    """It changes nothing, and the save goes on."""
    gate = Gate(monkeypatch)
    pair = stepped(kind)
    before = content(*pair)
    path = save(tmp_path, *pair, wait=False)
    in_a_while(wait if waiting == "wait" else lambda: save(tmp_path, *pair))
    threading.Timer(0.05, gate.open).start()
    wait()
    assert content(*pair) == before
    assert_saved(path, before, kind)


@pytest.mark.filterwarnings(  # Ctrl-C in a callback of the collector or of a weak reference, where Python loses it
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)
def test_interrupt_of_a_save_at_random_moments(tmp_path):
    """No step waits afterwards for a writer that is not there, and the next save is made."""
    generator = torch.Generator().manual_seed(0)
    pair, plain = stepped(SpeculativeCPUAdamW), stepped(SpeculativeCPUAdamW)
    interrupted = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    for seed in range(1000):
        if seed >= 24 and interrupted > 1:  # after few, where the machine is quick
            break
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 0.02 * float(torch.rand((), generator=generator)))
                save(tmp_path, *pair, wait=False)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
        for one in (pair, plain):
            train(*one, 1, seed=seed)
        wait()
    signal.signal(signal.SIGALRM, before)
    assert interrupted > 1
    path = save(tmp_path, *pair, wait=False)
    wait()
    assert content(*pair) == content(*plain)
    assert_saved(path, content(*plain), SpeculativeCPUAdamW)


def test_interrupt_before_the_thread_starts_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    start = background_save.start
    monkeypatch.setattr(background_save, "start", lambda *work: signal.raise_signal(signal.SIGINT) or start(*work))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, *stepped(SpeculativeCPUAdamW), wait=False)
    wait()
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "save-00000001"]


def test_save_is_made_at_once_where_no_thread_can_start(tmp_path, monkeypatch):
    pair = stepped(SpeculativeCPUAdamW)
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start")))
        assert save(tmp_path, *pair, wait=False).exists()
    wait()
    load(tmp_path, *pair)


@pytest.mark.parametrize(
    ("options", "each"),
    [({}, 12), ({"moments": "8bit", "master": "24bit"}, 3 + 2 * (1 + 1 / 64))],
    ids=["fp32", "8bit and 24bit"],
)
def test_copies_take_what_the_state_takes_and_the_next_save_uses_them_again(options, each, tmp_path):
    """And one tensor more, which is decoded or rounded."""
    tensors, numel = 8, 1 << 19
    largest = 4 * numel

    def measure():
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what was freed does not stay with the allocator
        model, optimizer = stepped_list(tensors, numel, **options)
        save(tmp_path / "first", model, optimizer)  # imports
        for copies in (each * tensors * numel, 0, 0):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = memory_of_process("VmHWM")
            save(tmp_path / "run", model, optimizer, wait=False, keep=1)
            optimizer.step()
            wait()
            taken = memory_of_process("VmHWM") - before
            assert taken <= copies + 2 * largest + (6 << 20), taken / 2**20

    assert exit_code_of_child(measure) == 0


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_save_refers_to_nothing_of_training(kind, tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    model, optimizer = stepped(kind, torch.bfloat16)
    gone = [weakref.ref(one) for one in (optimizer, *model.parameters(), *tensors_of_state(optimizer))]
    save(tmp_path, model, optimizer, wait=False)
    assert not optimizer._optimizer_step_pre_hooks
    del model, optimizer
    gc.collect()
    assert not [one for one in gone if one() is not None]
    gate.open()
    wait()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("lack", ["the machine's", "the system's", "torch's"])
def test_no_memory_for_the_copies_is_one_sentence(kind, lack, tmp_path, monkeypatch):
    pair = stepped(kind)
    before = content(*pair)
    folder = tmp_path / "run"
    save(folder, *pair)
    files = sorted(folder.rglob("*"))
    of_torch = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    with monkeypatch.context() as context:
        if lack == "the machine's":
            host = machine(tmp_path / "machine", {"/proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 1 kB\n"})
            context.setattr(distributed_checkpoint, "Host", lambda: host)
        elif lack == "the system's":
            context.setattr(checkpoint_tensors, "_block", b"of another size, and given back first")
            context.setattr(checkpoint_tensors.mmap, "mmap", Mock(side_effect=OSError(12, "Cannot allocate memory")))
        else:
            context.setattr(checkpoint_tensors, "copy_on_kernel_threads", Mock(side_effect=of_torch))
        with pytest.raises(CheckpointError) as error:
            save(folder, *pair, wait=False)
        words = "of which 0.00 GB are left" if lack == "the machine's" else "which the system does not give"
        assert str(error.value) == (
            f"cannot save a checkpoint to {folder}: copies of what it writes take 0.00 GB of host memory, {words}: "
            "pass wait=True, which makes none, or free some memory; earlier ones are as they were"
        )
        wait()
        assert sorted(folder.rglob("*")) == files
        save(folder, *pair)  # as the sentence says
    save(folder, *pair, wait=False)
    wait()
    assert content(*pair) == before


def test_failure_is_raised_at_the_next_call_and_training_goes_on(tmp_path):
    pair, plain = stepped(SpeculativeCPUAdamW), stepped(SpeculativeCPUAdamW)
    save(tmp_path, *pair, extra="older")
    files = sorted(tmp_path.rglob("*"))

    def fail():
        for call in (wait, lambda: save(tmp_path, *pair), lambda: load(tmp_path, *pair)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
            save(tmp_path, *pair, wait=False)
            for one in (pair, plain):
                train(*one, 1)
            told_of_failure(tmp_path, call)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert sorted(tmp_path.rglob("*")) == files
        assert content(*pair) == content(*plain)

    assert exit_code_of_child(fail) == 0
    assert load(tmp_path, *pair) == "older"


def end_during_a_save(rank: int, folder: Path, calls: Callable[..., object] = operator.call) -> None:
    distributed.destroy_process_group()
    model, optimizer = make(SpeculativeCPUAdamW, torch.bfloat16)
    load(folder, model, optimizer)
    train(model, optimizer, 1)
    calls(functools.partial(save, folder, model, optimizer, extra=f"the last, by {calls.__name__}", wait=False))


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.01, *(pytest.param(ms / 1000, marks=pytest.mark.deep) for ms in range(0, 50, 3))])
def test_save_that_is_killed_leaves_a_whole_one_and_the_interpreter_ends_when_the_save_has(delay, tmp_path):
    pair = make(SpeculativeCPUAdamW, torch.bfloat16)
    folder, begun = tmp_path / "run", tmp_path / "begun"

    def save_until_killed():
        for step in range(100):
            train(*pair, 1, seed=step)
            save(folder, *pair, extra=step, wait=False)
            begun.write_text(str(step))
            if step == 3:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

    assert exit_code_of_child(save_until_killed) == -signal.SIGKILL
    loaded = make(SpeculativeCPUAdamW, torch.bfloat16, seed=4)
    step = load(folder, *loaded)
    assert step >= int(begun.read_text() or 0) - 1  # which was whole before the next save began
    for seed in range(step + 1):
        train(*pair, 1, seed=seed)
    assert content(*loaded) == content(*pair)
    for calls in (operator.call, atexit.register):
        assert run_apart(end_during_a_save, 1, [{"folder": folder, "calls": calls}]) == [[Ending(None, 0)]]
        assert load(folder, *loaded) == f"the last, by {calls.__name__}"
