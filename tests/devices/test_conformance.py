"""What `superadam.devices.Device` promises: every implementation passes this.

One's own: `pytest tests/devices/test_conformance.py --device package.module:factory`, where the factory takes no
arguments, and `device.device` is where torch puts its tensors (default: the CPU).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from overlap import adam, batch, everything, mlp
from torch import Tensor, nn

from superadam import OffloadScheduler
from superadam.devices import Device, PlainDevice, Stream
from superadam.devices.flat import FlatLayout
from superadam.devices.interface import ChunkSums
from superadam.devices.paced import PRESETS, PacedDevice
from superadam.devices.simulated import SimulatedDevice
from superadam.host.memory import HostNeeds
from superadam.kernels import formula, native
from superadam.kernels.kept_step import StepsInPlace
from superadam.state import ParameterState

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def cuda() -> Device:
    from superadam.devices import CudaDevice

    return CudaDevice("cuda")


DEVICES = {
    "plain": PlainDevice,
    "lazy": lambda: SimulatedDevice(0, 0.0),
    "hasty": lambda: SimulatedDevice(1, 0.9),
    "paced": lambda: PacedDevice(PRESETS["h200"]),
    **({"cuda": cuda} if torch.cuda.is_available() else {}),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try the device that is asked for, or all of ours."""
    name = metafunc.config.getoption("--device")
    wanted = metafunc.fixturenames
    if name is None:
        ours = {name: factory for name, factory in DEVICES.items() if name != "plain" or "stepping" not in wanted}
        metafunc.parametrize("factory", ours.values(), ids=ours)
    else:
        module, _, factory = name.partition(":")
        metafunc.parametrize("factory", [getattr(importlib.import_module(module), factory)], ids=[name])


@pytest.fixture
def device(factory: type[Device]) -> Device:
    return factory()


@pytest.fixture
def stepping(device: Device) -> Device:
    """Return a device that makes steps in its own memory, which the plain one does not."""
    if not isinstance(device, StepsInPlace):
        pytest.skip("asked only of a device that makes steps in place")
    return device


def where(device: Device) -> torch.device:
    """Return where torch puts tensors of the model."""
    return getattr(device, "device", torch.device("cpu"))


def layout_of(*tensors: Tensor) -> FlatLayout:
    return FlatLayout([ParameterState(nn.Parameter(tensor), row, f"p{row}") for row, tensor in enumerate(tensors)])


def oddly_laid_out(device: Device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 7), (), (0, 3), (6, 4), (3, 4, 5, 6)]
    tensors = [torch.randn(shape, generator=generator).to(where(device), dtype) for shape in shapes]
    tensors[3] = tensors[3].t()
    tensors[4] = tensors[4].contiguous(memory_format=torch.channels_last)
    return tensors


def finish(device: Device) -> None:
    for stream in Stream:
        device.record(stream).synchronize()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_go_to_the_host_and_values_come_back(device: Device, dtype: torch.dtype) -> None:
    tensors = oddly_laid_out(device, dtype)
    layout = layout_of(*[torch.zeros_like(tensor) for tensor in tensors])
    packed = device.pack(tensors, layout, dtype)
    assert packed.dtype == dtype
    assert packed.shape == (layout.numel,)
    device.wait(Stream.DOWNLOAD, device.record(Stream.CURRENT))
    host = device.host_empty(layout.numel, dtype)
    device.copy(host, packed, Stream.DOWNLOAD)
    device.record_stream(packed, Stream.DOWNLOAD)
    del packed
    arrived = device.record(Stream.DOWNLOAD)
    arrived.synchronize()
    for view, tensor in zip(layout.views(host), tensors, strict=True):
        assert torch.equal(view, tensor.cpu())
    there = device.empty(layout.numel, dtype, Stream.UPLOAD)
    device.copy(there, host, Stream.UPLOAD)
    versions = [state.parameter._version for state in layout.states]
    device.record_stream(host, Stream.UPLOAD)
    del host
    device.wait(Stream.CURRENT, device.record(Stream.UPLOAD))
    device.scatter(layout.views(there), [state.parameter.data for state in layout.states])
    device.record_stream(there, Stream.CURRENT)
    del there
    for state, tensor in zip(layout.states, tensors, strict=True):
        assert torch.equal(state.parameter, tensor)
    assert [state.parameter._version for state in layout.states] == versions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_packing_converts_as_torch_does(device: Device, gradient_dtype: torch.dtype, dtype: torch.dtype) -> None:
    gradients = oddly_laid_out(device, gradient_dtype)
    layout = layout_of(*gradients)
    packed = device.pack(gradients, layout, dtype)
    device.record(Stream.CURRENT).synchronize()
    for view, gradient in zip(layout.views(packed), gradients, strict=True):
        assert view.dtype == dtype
        assert torch.equal(view, gradient.to(dtype))


def test_gradients_may_be_overwritten_after_packing(device: Device) -> None:
    gradient = torch.ones(70, device=where(device))
    layout = layout_of(gradient)
    packed = device.pack([gradient], layout, torch.float32)
    gradient.fill_(-1.0)
    device.record(Stream.CURRENT).synchronize()
    assert torch.equal(layout.views(packed)[0].cpu(), torch.ones(70))


def test_packing_takes_gradients_that_carry_a_graph_or_are_negated_views(device: Device) -> None:
    with_graph = torch.ones(3, requires_grad=True, device=where(device)) * 2
    negated = torch.complex(torch.zeros(4), torch.arange(4.0)).to(where(device)).conj().imag
    assert negated.is_neg()
    layout = layout_of(torch.zeros(3, device=where(device)), torch.zeros(4, device=where(device)))
    packed = device.pack([with_graph, negated], layout, torch.float32)
    device.record(Stream.CURRENT).synchronize()
    first, second = layout.views(packed)
    assert torch.equal(first.cpu(), torch.full((3,), 2.0))
    assert torch.equal(second.cpu(), -torch.arange(4.0))
    assert not packed.requires_grad


def test_scatter_reaches_parameters_of_any_layout_and_leaves_versions_alone(device: Device) -> None:
    on_device = where(device)
    data = torch.zeros(12, device=on_device)[::3], torch.zeros(2, 3, device=on_device).t(), torch.zeros(0).to(on_device)
    parameters = [nn.Parameter(one) for one in data]
    versions = [parameter._version for parameter in parameters]
    sources = [one.to(on_device) for one in (torch.arange(4.0), torch.arange(6.0).view(2, 3).t(), torch.zeros(0))]
    device.scatter(sources, parameters)
    device.scatter([], [])
    for parameter, source in zip(parameters, sources, strict=True):
        assert torch.equal(parameter, source)
    assert [parameter._version for parameter in parameters] == versions


def test_host_memory_does_not_follow_the_default_device(device: Device) -> None:
    gradient = torch.ones(5, device=where(device))
    layout = layout_of(gradient)
    torch.set_default_device("meta")
    try:
        host = device.host_empty(3, torch.float32)
        there = device.empty(3, torch.bfloat16, Stream.UPLOAD)
        packed = device.pack([gradient], layout, torch.float32)
        device.copy(host, gradient[:3], Stream.DOWNLOAD)
        device.record(Stream.CURRENT).synchronize()
        device.record(Stream.DOWNLOAD).synchronize()
    finally:
        torch.set_default_device(None)
    assert host.is_cpu
    assert there.device == packed.device == gradient.device
    assert torch.equal(host, gradient[:3].cpu())
    assert torch.equal(layout.views(packed)[0], gradient)
    del host, there, packed
    finish(device)


def test_memory_of_the_host_is_told_from_the_model_s(device: Device) -> None:
    host = device.host_empty(3, torch.float32)
    assert host.is_cpu
    assert device.is_host(host)
    if device.has_link:
        assert not device.is_host(device.empty(3, torch.float32, Stream.CURRENT))


def test_memory_that_was_recorded_outlives_its_tensor(device: Device) -> None:
    """Whatever is allocated meanwhile."""
    source = torch.arange(3000.0, device=where(device))
    packed = device.pack([source], layout_of(source), torch.float32)
    device.wait(Stream.DOWNLOAD, device.record(Stream.CURRENT))
    host = device.host_empty(packed.numel(), torch.float32)
    device.copy(host, packed, Stream.DOWNLOAD)
    device.record_stream(packed, Stream.DOWNLOAD)
    del packed
    others = [device.empty(3000, torch.float32, Stream.CURRENT) for _ in range(3)]
    for other in others:
        device.copy(other, device.host_empty(3000, torch.float32), Stream.CURRENT)
    finish(device)
    assert torch.equal(host[:3000], source.cpu())


def test_events_pass_in_the_order_of_their_stream(device: Device) -> None:
    events = [device.record(Stream.UPLOAD) for _ in range(3)]
    events[-1].synchronize()
    assert all(event.query() for event in events)
    times = [event.passed_at() for event in events]
    assert times == sorted(times)


def test_worker_runs_jobs_in_order_and_tells_what_failed(device: Device) -> None:
    seen: list[int] = []
    worker = device.start_worker(lambda: False)
    for number in range(20):
        worker.submit(lambda is_awaited, number=number: seen.append(number))
    worker.drain()
    assert seen == list(range(20))
    assert worker.is_idle

    def fail(is_awaited: Callable[[], bool]) -> None:
        raise KeyError("planted")

    worker.submit(fail)
    worker.submit(lambda is_awaited: seen.append(-1))
    with pytest.raises(RuntimeError, match="KeyError"):
        worker.drain()
    worker.close()
    assert -1 not in seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_norm_of_packed_gradients_has_the_bits_of_the_host(stepping: Device, dtype: torch.dtype) -> None:
    device = stepping
    gradients = [tensor for tensor in oddly_laid_out(device, dtype) if tensor.numel()]
    gradients[0][1, 1] = torch.inf
    layout = layout_of(*gradients)
    chunks = sum(native.chunk_count(gradient.numel()) for gradient in gradients)
    norm = device.empty(2 * chunks, torch.float64, Stream.CURRENT)
    device.pack(gradients, layout, dtype, ChunkSums.over(norm))
    device.record(Stream.CURRENT).synchronize()
    wide = np.float64 if dtype == torch.float64 else np.float32
    flat = [torch.empty_strided(g.shape, s.strides).copy_(g) for g, s in zip(gradients, layout.states, strict=True)]
    flat = [one.as_strided((one.numel(),), (1,)).numpy().astype(wide) for one in flat]
    sums = ChunkSums.over(norm.cpu())
    assert sums.sums.tolist() == [float(total) for one in flat for total in formula.chunk_sums(one)]
    assert sums.nonfinite.tolist() == [int(count) for one in flat for count in formula.chunk_nonfinite(one)]


@pytest.mark.parametrize("gpu_buckets", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_has_the_bits_of_training_without_it(device: Device, dtype: torch.dtype, gpu_buckets: int) -> None:
    models = [mlp(dtype).to(where(device)) for _ in range(2)]
    plain, ours = map(adam, models)
    keeps = gpu_buckets if isinstance(device, StepsInPlace) and device.can_update else 0
    with OffloadScheduler(ours, models[1], device=device, gpu_buckets=keeps, bucket_numel=70, num_threads=1):
        for seed in range(8):
            for model, optimizer in zip(models, (plain, ours), strict=True):
                (30 * (model(batch(seed, dtype).to(where(device))) - 1).float().square().mean()).backward()
                if seed == 5:
                    next(model.parameters()).grad[0, 0] = torch.inf
                optimizer.step()
                optimizer.zero_grad()
    assert plain.statistics.steps == ours.statistics.steps == 8
    assert everything(models[1], ours) == everything(models[0], plain)


def test_what_was_reserved_can_be_given_back(device: Device) -> None:
    device.reserve(HostNeeds(pending=1 << 16, largest=1 << 12))
    device.close()
    assert device.host_empty(3, torch.float32).shape == (3,)
