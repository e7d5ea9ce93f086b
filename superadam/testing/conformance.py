"""What `superadam.devices.Device` promises, as checks for any implementation: see `DEVICE_CHECKS`.

A check raises AssertionError where a device breaks a promise. No test framework is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices import Device, Event, Stream
from superadam.devices.flat import FlatLayout
from superadam.devices.interface import ChunkSums
from superadam.host.memory import HostNeeds
from superadam.kernels import native
from superadam.kernels.torch_private import version_of
from superadam.state.parameter import ParameterState
from superadam.testing.stand_in import take_norm

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _layout_of(*tensors: Tensor) -> FlatLayout[Any]:
    return FlatLayout([ParameterState(nn.Parameter(tensor), row, f"p{row}") for row, tensor in enumerate(tensors)])


def _oddly_laid_out(device: Device, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of random values: a scalar, an empty, a transposed and a channels-last one among them."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 7), (), (0, 3), (6, 4), (3, 4, 5, 6)]
    tensors = [
        torch.randn(shape, generator=generator, device="cpu").to(dtype=dtype, device=device.device) for shape in shapes
    ]
    tensors[3] = tensors[3].t()
    tensors[4] = tensors[4].contiguous(memory_format=torch.channels_last)
    return tensors


def _finish(device: Device, *streams: Stream) -> None:
    for stream in streams or Stream:
        device.record(stream).synchronize()


def _download(device: Device, packed: Tensor, made: Event | None = None) -> Tensor:
    """Start the copy of packed gradients to the host, where they have arrived once the stream has passed."""
    device.wait(Stream.DOWNLOAD, device.record(Stream.CURRENT) if made is None else made)
    host = device.host_empty(packed.numel(), packed.dtype)
    device.copy(host, packed, Stream.DOWNLOAD)
    device.record_stream(packed, Stream.DOWNLOAD)
    return host


def assertions_are_made(device: Device) -> None:
    """Without them, as under `python -O`, no other check would find anything."""
    if not __debug__:
        raise AssertionError("python leaves assertions out, by which a device is checked; run it without -O")


def gradients_go_to_the_host_and_values_come_back(device: Device) -> None:
    """Packing rounds as `Tensor.to` does; copies and scattering keep every bit and leave version counters alone."""
    for gradient_dtype, dtype in (*itertools.product(_DTYPES[:3], repeat=2), (torch.float64, torch.float64)):
        gradients = _oddly_laid_out(device, gradient_dtype)
        tensors = [gradient.to(dtype) for gradient in gradients]
        layout = _layout_of(*map(torch.zeros_like, tensors))
        packed = device.pack(gradients, layout, dtype)
        assert packed.dtype == dtype
        assert packed.shape == (layout.numel,)
        host = _download(device, packed)
        del packed
        _finish(device, Stream.DOWNLOAD)
        for view, tensor in zip(layout.views(host), tensors, strict=True):
            assert torch.equal(view, tensor.cpu())
        there = device.empty(layout.numel, dtype, Stream.UPLOAD)
        device.copy(there, host, Stream.UPLOAD)
        versions = [version_of(state.parameter) for state in layout.states]
        device.record_stream(host, Stream.UPLOAD)
        del host
        device.wait(Stream.CURRENT, device.record(Stream.UPLOAD))
        device.scatter(layout.views(there), [state.parameter.data for state in layout.states])
        device.record_stream(there, Stream.CURRENT)
        del there
        for state, tensor in zip(layout.states, tensors, strict=True):
            assert torch.equal(state.parameter, tensor)
        assert [version_of(state.parameter) for state in layout.states] == versions


def what_makes_a_gradient_can_be_waited_for(device: Device) -> None:
    """The event of `mark_ready` holds up streams that read the gradient, and a thread that reads one on the host."""
    values = torch.arange(70.0, device="cpu")
    for where in (device.device, torch.device("cpu")):
        parameter, made_by_device = nn.Parameter(torch.zeros(70, device=where)), where == device.device
        gradient = values.to(where)
        if made_by_device:  # late, where its work is
            gradient = device.pack([gradient], _layout_of(gradient), torch.float32)[:70]
        parameter.grad = gradient
        made = device.mark_ready(parameter)
        if made is None:
            continue
        if made_by_device:
            host = _download(device, gradient, *{made})  # it can be hashed
            _finish(device, Stream.DOWNLOAD)
            assert torch.equal(host, values)
        made.synchronize()
        assert made.query()


def packing_takes_the_present_values_of_any_gradient(device: Device) -> None:
    """One is overwritten afterwards, one carries a graph, and one is a negated view; the result has no graph."""
    where = device.device
    overwritten, with_graph = torch.ones(70, device=where), torch.ones(3, requires_grad=True, device=where) * 2
    negated = torch.complex(torch.zeros(4, device=where), torch.arange(4.0, device=where)).conj().imag
    assert negated.is_neg()
    gradients = [overwritten, with_graph, negated]
    layout = _layout_of(*[torch.zeros(gradient.shape, device=where) for gradient in gradients])
    packed = device.pack(gradients, layout, torch.float32)
    overwritten.fill_(-1.0)
    _finish(device, Stream.CURRENT)
    assert [view.tolist() for view in layout.views(packed)] == [[1.0] * 70, [2.0] * 3, [0.0, -1.0, -2.0, -3.0]]
    assert not packed.requires_grad


def scatter_reaches_parameters_of_any_layout_and_leaves_versions_alone(device: Device) -> None:
    """Parameters with steps, transposed, and without elements; and no parameters at all."""
    where = device.device
    spaced = torch.zeros(12, device=where)[::3]
    data = spaced, torch.zeros(4, device=where)[::2], torch.zeros(2, 3, device=where).t(), spaced[:0]
    parameters = [nn.Parameter(values) for values in data]
    versions = [version_of(parameter) for parameter in parameters]
    numbers = torch.arange(6.0, device=where)
    sources = [numbers[:4], numbers[4:], numbers.view(2, 3).t(), numbers[:0]]
    device.scatter(sources, parameters)
    device.scatter([], [])
    for parameter, source in zip(parameters, sources, strict=True):
        assert torch.equal(parameter, source)
    assert [version_of(parameter) for parameter in parameters] == versions


def memory_is_where_it_was_asked_for(device: Device) -> None:
    """`is_host` tells where, and torch's default device moves nothing."""
    gradient = torch.ones(5, device=device.device)
    layout = _layout_of(gradient)
    with torch.device("meta"):
        host = device.host_empty(3, torch.float32)
        there = device.empty(3, torch.bfloat16, Stream.UPLOAD)
        packed = device.pack([gradient], layout, torch.float32)
        device.copy(host, gradient[:3], Stream.DOWNLOAD)
        _finish(device, Stream.CURRENT, Stream.DOWNLOAD)
    assert host.is_cpu
    assert device.is_host(host)
    assert not device.has_link or not device.is_host(there)
    assert there.device == packed.device == gradient.device
    assert torch.equal(host, gradient[:3].cpu())
    assert torch.equal(layout.views(packed)[0], gradient)
    del host, there, packed
    _finish(device)


def memory_that_was_recorded_outlives_its_tensor(device: Device) -> None:
    """Other allocations do not overwrite it."""
    source = torch.arange(3000.0, device=device.device)
    packed = device.pack([source], _layout_of(source), torch.float32)
    host = _download(device, packed)
    del packed
    for other in [device.empty(3000, torch.float32, Stream.CURRENT) for _ in range(3)]:
        device.copy(other, device.host_empty(3000, torch.float32), Stream.CURRENT)
    _finish(device)
    assert torch.equal(host[:3000], source.cpu())


def values_are_put_behind_what_their_stream_did_before(device: Device) -> None:
    """`put` replaces single values of what was packed before it."""
    gradient, index = (torch.tensor(values, device=device.device) for values in ([1.0] * 70, [69, 3]))
    packed = device.pack([gradient], _layout_of(gradient), torch.float32)
    device.put(packed, index, torch.tensor([5.0, 7.0], device=device.device))
    _finish(device, Stream.CURRENT)
    assert packed[:70].tolist() == [1.0] * 3 + [7.0] + [1.0] * 65 + [5.0]


def events_pass_in_the_order_of_their_stream(device: Device) -> None:
    """Once the last has passed, so have all."""
    events = [device.record(Stream.UPLOAD) for _ in range(3)]
    events[-1].synchronize()
    assert all(event.query() for event in events)


def worker_runs_jobs_in_order_and_tells_what_failed(device: Device) -> None:
    """After a failure no job runs, and `drain` raises RuntimeError with its cause."""
    seen: list[int] = []
    worker = device.start_worker(lambda: False)
    for number in range(20):
        worker.submit(lambda is_awaited, number=number: seen.append(number))  # type: ignore[misc]
    worker.drain()
    assert seen == list(range(20))
    assert worker.is_idle

    def fail(is_awaited: Callable[[], bool]) -> None:
        raise KeyError("planted")

    worker.submit(fail)
    worker.submit(lambda is_awaited: seen.append(-1))
    told = ""
    try:
        worker.drain()
    except RuntimeError as error:
        told = str(error)
    assert "KeyError" in told
    worker.close()
    assert -1 not in seen


def norm_of_packed_gradients_has_the_bits_of_the_host(device: Device) -> None:
    """Asked only of a device that makes steps in its own memory."""
    for dtype in _DTYPES if device.can_update else ():
        gradients = [tensor for tensor in _oddly_laid_out(device, dtype) if tensor.numel()]
        gradients[0][1, 1] = torch.inf
        layout = _layout_of(*gradients)
        chunks = sum(native.chunk_count(gradient.numel()) for gradient in gradients)
        norm = device.empty(2 * chunks, torch.float64, Stream.CURRENT)
        device.pack(gradients, layout, dtype, ChunkSums.over(norm))
        _finish(device, Stream.CURRENT)
        expected = torch.zeros_like(norm, device="cpu")
        packed = [state.host_copy(gradient, dtype) for gradient, state in zip(gradients, layout.states, strict=True)]
        take_norm(packed, ChunkSums.over(expected))
        assert torch.equal(norm.cpu().view(torch.int64), expected.view(torch.int64))


def training_has_the_bits_of_training_without_it(device: Device) -> None:
    """Eight steps, some clipped and one with an infinite gradient; also where buckets stay where the device steps."""
    for keeps, dtype, moments in itertools.product((0, 2 * device.can_update), _DTYPES[:2], ("fp32", "bf16")):
        models = [_model(dtype).to(device.device) for _ in range(2)]
        options: dict[str, Any] = {"lr": 0.05, "max_grad_norm": 20.0, "moments": moments}
        plain, ours = (SpeculativeCPUAdam(model.parameters(), **options) for model in models)
        with OffloadScheduler(ours, models[1], device=device, gpu_buckets=keeps, bucket_numel=70, num_threads=1):
            for seed in range(8):
                inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), device="cpu").to(dtype)
                for model, optimizer in zip(models, (plain, ours), strict=True):
                    (30 * (model(inputs.to(device.device)) - 1).float().square().mean()).backward()
                    if seed == 5:
                        first = next(model.parameters()).grad
                        assert first is not None
                        first[0, 0] = torch.inf
                    optimizer.step()
                    optimizer.zero_grad()
        assert plain.statistics.steps == ours.statistics.steps == 8
        assert _bits(ours) == _bits(plain)


def _model(dtype: torch.dtype) -> nn.Sequential:
    torch.default_generator.manual_seed(5)
    blocks = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*blocks).to(dtype)


def _bits(optimizer: torch.optim.Optimizer) -> list[bytes]:
    parameters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    states = optimizer.state_dict()["state"].values()
    state = [value for entry in states for value in entry.values() if isinstance(value, Tensor)]
    flat = [tensor.cpu().reshape(-1).contiguous() for tensor in (*parameters, *state)]
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in flat]


def what_was_reserved_can_be_given_back(device: Device) -> None:
    """After `close`, a device still allocates."""
    device.reserve(HostNeeds(pending=1 << 16, largest=1 << 12))
    device.close()
    assert device.host_empty(3, torch.float32).shape == (3,)


def what_the_host_can_never_hold_is_refused(device: Device) -> None:
    """`reserve` raises MemoryError, as that of `Device` does."""
    try:
        device.reserve(HostNeeds(state=1 << 60))
    except MemoryError:
        return
    raise AssertionError("reserve() accepted 2**60 bytes; call super().reserve(needs) in it")


DEVICE_CHECKS: dict[str, Callable[[Device], None]] = {
    name.replace("_", " "): check
    for name, check in [*globals().items()]
    if isinstance(check, FunctionType) and check.__module__ == __name__ and not name.startswith("_")
}
"""Every check above, by what it holds; each is called with a fresh device."""
