"""`CudaDevice`: what it asks of torch, and that training over it has the bits of the synchronous optimizer.

Everything that does not look at a made-up torch.cuda also runs on every GPU that is there.
"""

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support.fake_cuda import FakeDevice, FakeStream, fake_cuda
from support.gpu_arrays import BACKENDS, asked_for
from support.machines import machine
from support.overlap import layout_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.devices import CudaDevice, PlainDevice, Stream
from superadam.devices.pinned import CudaRegistrar, PinningError, Slab
from superadam.gpu import language
from superadam.host.memory import HostNeeds
from superadam.kernels.resident_step import ResidentStep
from superadam.testing import DEVICE_CHECKS

GPUS = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
ROOM = 1 << 22


def on_each_gpu(test: Callable[..., None]) -> Callable[..., None] | None:
    """Return a test of each GPU, or nothing that pytest could collect where there is none."""
    return pytest.mark.parametrize("gpu", GPUS)(test) if GPUS else None


@pytest.fixture
def cuda():
    with fake_cuda() as fake:
        yield fake


@pytest.fixture(params=["made-up", *GPUS])
def device(request):
    with fake_cuda() if request.param == "made-up" else nullcontext() as fake:
        one = CudaDevice(request.param) if fake is None else FakeDevice(fake)
        one.reserve(HostNeeds(pending=ROOM, largest=1 << 16))
        yield one
        one.close()


# ---- what arrives ----------------------------------------------------------------------------------------------------

OF_REAL_ONES = ("events pass in the order of their stream", "norm of packed gradients has the bits of the host")


@pytest.mark.parametrize("check", [check for check in DEVICE_CHECKS if not check.startswith(OF_REAL_ONES)])
def test_it_does_what_the_interface_promises(check, device):
    """But for the made-up events, which pass at once, and norms, which need Triton: `test_conformance.py` has GPUs."""
    DEVICE_CHECKS[check](device)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_gradients_may_lie_otherwise_than_their_parameters_or_be_negated(implementation, device):
    where = device.device
    layout = layout_of(torch.zeros(6, 4, device=where).t(), torch.zeros(3, device=where), is_on_host=False)
    gradients = torch.arange(24.0, device=where).view(4, 6), torch._neg_view(torch.ones(3, device=where))
    is_reached = where.type == "cuda" or language.IS_INTERPRETED  # compiled kernels reach no memory of the host
    with asked_for(implementation if is_reached else "torch"):
        packed = device.pack(gradients, layout, torch.float32)
    assert all(map(torch.equal, layout.views(packed), gradients))
    assert device.can_update is (where.type == "cuda")


def test_free_memory_counts_what_torch_holds_and_has_not_handed_out(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100)
    assert FakeDevice(cuda).free_bytes() == 1200


def test_free_memory_is_what_the_process_may_take(cuda, monkeypatch):
    """Behind `torch.cuda.set_per_process_memory_fraction(0.25)`, as where processes share a GPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4000, 5000))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.25)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100)
    assert FakeDevice(cuda).free_bytes() == 1250 - 300 + 200


# ---- what is asked of torch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [50, ROOM])
def test_sources_may_lie_in_memory_of_the_host(device, numel):
    """Pinned as far as it was reserved, and pageable beyond; the parameter may lie on the host as well."""
    host = device.host_empty(numel, torch.float32)
    host.copy_(torch.arange(float(numel)))
    where = device.device
    there = torch.arange(3.0, device=where)
    targets = [torch.zeros(30, device=where), torch.zeros(20), torch.zeros(3), torch.zeros(3, device=where)]
    versions = [target._version for target in targets]
    device.scatter([host[:30], host[-20:], there, there], targets)
    device.record(Stream.CURRENT).synchronize()
    assert [target._version for target in targets] == versions
    for target, first in zip(targets, (0, numel - 20, 0, 0), strict=True):
        assert target.tolist() == list(range(first, first + len(target)))


def test_kernels_are_given_no_memory_of_the_host(cuda, monkeypatch):
    """A device may have it elsewhere, also where it is pinned; copies read it."""
    given = []
    monkeypatch.setattr("superadam.gpu.scatter_values", lambda sources, targets: given.extend(sources))
    device = FakeDevice(cuda)
    device.reserve(HostNeeds(pending=1 << 12, largest=1 << 12))
    sources = device.host_empty(3, torch.float32).fill_(1.0), torch.ones(3)
    targets = torch.zeros(2, 3)
    device.scatter(sources, [*targets])
    assert [*map(id, given)] == [id(sources[1])]
    assert targets.tolist() == [[1.0] * 3, [0.0] * 3]


def test_memory_is_asked_to_be_pinned_for_every_device(cuda, monkeypatch):
    asked = []
    monkeypatch.setattr(cuda, "cudaHostRegister", lambda *arguments: asked.append(arguments) or 0)
    CudaRegistrar(torch.device("cuda:0")).register(4096, 8192)
    assert asked == [(4096, 8192, 1)]


def test_an_error_of_the_driver_is_cleared_by_a_kernel(cuda, monkeypatch):
    """Its launch raises what is pending; memory that is set to zero, as `zero_` may do, raises nothing of it."""
    pending = []

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if pending and operation.overloadpacket not in (aten.empty, aten.zeros, aten.zero_):
                raise RuntimeError(f"CUDA error {pending.pop()}")
            return operation(*args, **kwargs or {})

    aten = torch.ops.aten
    monkeypatch.setattr(cuda, "cudaHostRegister", lambda *arguments: pending.append(801) or 801)
    monkeypatch.setattr(cuda, "cudaGetErrorString", lambda code: "operation not supported", raising=False)
    with Launches(), pytest.raises(PinningError, match=r"operation not supported, code 801"):
        CudaRegistrar(torch.device("cpu")).register(4096, 8192)
    assert not pending


def test_only_cuda_devices_are_taken():
    with pytest.raises(ValueError, match="CudaDevice got meta, expected a CUDA or HIP device; use PlainDevice"):
        CudaDevice("meta")


def test_gradient_on_the_host_has_an_event_of_its_own_which_sleeping_threads_wait_for(cuda):
    """Its copy may be under way on the stream that its hook runs on."""
    device = FakeDevice(cuda)
    device.reserve(HostNeeds(pending=1 << 12, largest=1 << 12))
    parameter = nn.Parameter(device.host_empty(9, torch.float32))
    with cuda.device(0), cuda.stream(FakeStream(cuda, "branch")):
        first, _ = (device.mark_ready(parameter) for _ in range(2))
    first.synchronize()
    assert cuda.log == [("record", "branch"), ("record", "branch"), ("synchronize", "branch")]


def test_gradients_on_another_device_are_refused(cuda):
    layout = layout_of(torch.zeros(9), is_on_host=False)
    with pytest.raises(ValueError, match="a gradient is on meta, expected cpu as the scheduler's device; pass"):
        FakeDevice(cuda).pack([torch.empty(9, device="meta")], layout, torch.float32)


def test_gradients_that_were_packed_on_another_stream_are_kept_until_they_are_stepped(cuda, monkeypatch):
    device = FakeDevice(cuda)
    kept = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda gradient, stream: kept.append(gradient))
    monkeypatch.setattr(
        "superadam.gpu.update", lambda *given: cuda.log.append((cuda.current_stream("cuda").name, *given))
    )
    step = ResidentStep(*[torch.ones(3)] * 3, None, torch.ones(3), torch.ones(3), 0)
    device.update([step], [])
    assert cuda.log == [("current", [step], [])]
    assert [id(one) for one in kept] == [id(step.gradient)]


# ---- reserving -------------------------------------------------------------------------------------------------------


def meminfo(available: int) -> dict[str, str]:
    return {"/proc/meminfo": f"MemTotal: {available >> 9} kB\nMemAvailable: {available >> 10} kB\n"}


def test_gradients_of_a_step_and_two_buckets_each_way_are_pinned_once(cuda, tmp_path):
    device = FakeDevice(cuda, machine(tmp_path, meminfo(3 << 20)))
    for pending in (1 << 20, 1 << 20, (1 << 20) + 4096):  # more than before: no less than one bucket more
        device.reserve(HostNeeds(pending=pending, largest=1 << 16))
    assert list(cuda.registered.values()) == [(1 << 20) + 4 * (1 << 16), 1 << 16]
    for numel, pageable in ((1 << 18, 0), (1 << 20, 4 << 20)):
        device.host_empty(numel, torch.float32)
        assert device.pinned.pageable_bytes == pageable
    device.close()
    assert cuda.registered == {}


@pytest.mark.parametrize(
    ("available", "needs", "pinned"),
    [
        (1 << 30, HostNeeds(pending=1 << 20, largest=1 << 16), (2 << 20) + 4 * (1 << 16)),  # those of the step before
        (1 << 30, HostNeeds(state=1 << 30, pending=1 << 20), 1 << 20),  # unless state is to take their room
        (4 << 20, HostNeeds(pending=1 << 20), 2 << 20),  # twice as much of them is left besides
        ((4 << 20) - 1024, HostNeeds(pending=1 << 20), 1 << 20),
        (None, HostNeeds(pending=1 << 16, largest=1 << 12), (1 << 16) + (4 << 12)),  # a machine that does not say
        (None, HostNeeds(shadows=1 << 20), 1 << 20),  # new values that wait on the host
    ],
)
def test_as_much_is_pinned_as_there_is_use_and_room_for(cuda, tmp_path, available, needs, pinned):
    device = FakeDevice(cuda, machine(tmp_path, {} if available is None else meminfo(available)))
    device.reserve(needs)
    assert list(cuda.registered.values()) == [pinned]


def test_what_the_host_can_never_hold_is_refused_before_anything_is_pinned(cuda, tmp_path):
    """The sum counts, with state that is to come and shadows."""
    device = FakeDevice(cuda, machine(tmp_path, meminfo(1 << 20)))  # of 2 MiB
    device.reserve(HostNeeds(state=1 << 20, pending=1 << 19, largest=1 << 10, shadows=1 << 10))
    pinned = dict(cuda.registered)
    with pytest.raises(MemoryError, match=r"^training \(.*\) needs about 0\.00 GB .* can have 0\.00 GB at most; allow"):
        device.reserve(HostNeeds(state=1 << 20, pending=1 << 20, shadows=1))
    assert cuda.registered == pinned


def test_memory_that_cannot_be_pinned_is_pageable_with_a_warning(cuda, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr("superadam.devices.pinned.lockable_bytes", lambda: 8 << 20)
    device = FakeDevice(cuda, machine(tmp_path, meminfo(4 << 30)))
    device.pinned._registrar._device = torch.device("cpu")
    cuda.refuses = True
    device.reserve(HostNeeds(pending=1 << 30, largest=1 << 28))
    (message,) = caplog.messages
    for part in (
        "pinned 0.00 GB of the 2.42 GB of host memory",
        "refused to pin 0.27 GB of host memory (MEMORY_ALLOCATION, code 2)",
        "lock at most 0.01 GB (RLIMIT_MEMLOCK); run `ulimit -l unlimited`",
    ):
        assert part in message
    device.host_empty(10, torch.float32).fill_(1.0)
    assert device.pinned.pageable_bytes == 40


def test_refusal_is_forgotten_before_torch_meets_it(cuda):
    """The runtime keeps it, and torch raises it after its next kernel."""
    cuda.refuses = True
    kept = ["out of memory"]

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if kept:
                raise RuntimeError(kept.pop())
            return function(*args, **(kwargs or {}))

    with Kernels(), pytest.raises(PinningError, match="the driver refused to pin"):
        CudaRegistrar(torch.device("meta")).register(0, 1 << 16)
    assert kept == []


# ---- cores -----------------------------------------------------------------------------------------------------------

TWO_NODES = {
    "/sys/bus/pci/devices/0000:1b:00.0/numa_node": "1",
    "/sys/devices/system/node/node0/cpulist": "0-1",
    "/sys/devices/system/node/node1/cpulist": "2-7",
}


def test_cores_near_the_device_but_two_are_idle_and_ranks_divide_them(cuda, tmp_path):
    """Of these, all but two CPUs lie near this one's, so that most of the ranks are likely to be here."""
    assert FakeDevice(cuda, machine(tmp_path, TWO_NODES)).idle_cores() == 4
    device = FakeDevice(cuda, machine(tmp_path, TWO_NODES, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}))
    assert device._cpus == {2, 3, 4}
    assert device.idle_cores() == 1


def test_worker_stays_near_the_device(cuda, tmp_path, monkeypatch):
    """The affinity of the training thread is left alone; contexts are made on no other device."""
    bound = {}
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.update({threading.current_thread().name: cpus}))
    device = FakeDevice(cuda, machine(tmp_path, TWO_NODES))
    worker = device.start_worker(lambda: False)
    worker.drain()
    worker.close()
    assert bound == {"superadam-worker": frozenset(range(2, 8))}
    assert cuda.log == [("set_device", device.device, "superadam-worker")]


def test_torch_may_not_tell_where_the_device_is_and_offloading_within_one_memory_is_told(cuda, monkeypatch, caplog):
    for properties in (SimpleNamespace(), SimpleNamespace(is_integrated=0), SimpleNamespace(is_integrated=1)):
        assert not caplog.records
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        assert FakeDevice(cuda)._cpus == frozenset(os.sched_getaffinity(0))
    assert "computes in the host's memory, where offloading saves none" in caplog.text


# ---- on GPUs ---------------------------------------------------------------------------------------------------------


@on_each_gpu
def test_reserved_memory_is_pinned_for_torch(gpu):
    device = CudaDevice(gpu)
    device.reserve(HostNeeds(pending=1 << 20, largest=1 << 16))
    assert device.host_empty(1000, torch.float32).is_pinned()
    assert device.pinned.pageable_bytes == 0
    assert not device.host_empty(1 << 22, torch.float32).is_pinned()
    device.close()


@on_each_gpu
def test_a_refusal_of_the_driver_is_forgotten(gpu):
    registrar = CudaRegistrar(torch.device(gpu))
    slab = Slab(1 << 16, registrar)
    with pytest.raises(PinningError, match="the driver refused to pin"):
        registrar.register(slab._address, slab.size)  # a second time
    assert torch.ones(8, device=gpu).sum().item() == 8


def keep_busy() -> None:
    """Let the current stream be late."""
    torch.cuda._sleep(1)  # the first launch of a kernel loads it, for which the driver waits for what runs
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)


@on_each_gpu
def test_waiting_sleeps_until_the_device_is_there(gpu):
    device = CudaDevice(gpu)
    device.reserve(HostNeeds(pending=1 << 26, largest=1 << 20))
    source = torch.ones(1 << 24, device=gpu)
    host = device.host_empty(1 << 24, torch.float32)
    host.zero_()
    source.add_(0)
    with torch.cuda.device(gpu):
        keep_busy()
    source.add_(1)
    device.wait(Stream.DOWNLOAD, device.record(Stream.CURRENT))
    device.copy(host, source, Stream.DOWNLOAD)
    arrived = device.record(Stream.DOWNLOAD)
    assert not arrived.query()
    arrived.synchronize()
    assert (host == 2).all()
    device.close()


@on_each_gpu
def test_a_captured_backward_is_replayed_under_a_scheduler(gpu):
    def trained(*, overlaps: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(64, 64).to(gpu, torch.bfloat16)
        optimizer, x = SpeculativeCPUAdamW(model.parameters(), lr=1e-2), torch.ones_like(model.weight)
        with OffloadScheduler(optimizer, model) if overlaps else nullcontext(), torch.cuda.device(gpu):
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.stream(side):  # loads what must not be loaded while a graph is captured
                model(x).float().square().sum().backward()
                optimizer.zero_grad()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                model(x).float().square().sum().backward()
            for _ in range(3):
                graph.replay()
                optimizer.step()
        return model.weight.detach().cpu()

    assert torch.equal(trained(overlaps=True), trained(overlaps=False))


@on_each_gpu
def test_gradients_of_another_stream_are_packed_once_they_are_there_and_kept_until_then(gpu):
    device, side = CudaDevice(gpu), torch.cuda.Stream(gpu)
    parameter = nn.Parameter(torch.zeros(1 << 20, device=gpu))
    layout = layout_of(parameter.data, is_on_host=False)
    device.pack([parameter.data], layout, torch.float32)  # loads the kernels
    with torch.cuda.device(gpu), torch.cuda.stream(side):
        gradient = torch.zeros_like(parameter.data)
        keep_busy()
        gradient.add_(1)
        made = device.mark_ready(parameter)
    device.wait(Stream.CURRENT, made)
    packed = device.pack([gradient], layout, torch.float32)
    del gradient
    with torch.cuda.device(gpu), torch.cuda.stream(side):
        torch.full_like(parameter.data, 7.0)  # in the memory of the gradient, if that is free
    assert (packed == 1).all()


@on_each_gpu
@pytest.mark.parametrize("kind", [PlainDevice, CudaDevice])
def test_gradient_that_is_copied_to_the_host_is_there_once_it_was_waited_for(kind, gpu):
    """As FSDP2 copies it before torch 2.13, whatever hooks there are."""
    device = CudaDevice(gpu) if kind is CudaDevice else PlainDevice()
    source, parameter = torch.ones(1 << 24, device=gpu), nn.Parameter(torch.zeros(1 << 24).pin_memory())
    with torch.cuda.device(gpu), torch.cuda.stream(torch.cuda.Stream(gpu)):
        gradient = torch.zeros(1 << 24).pin_memory()
        keep_busy()
        gradient.copy_(source, non_blocking=True)
        made = device.mark_ready(parameter)
    assert not made.query()
    made.synchronize()
    assert (gradient == 1).all()
