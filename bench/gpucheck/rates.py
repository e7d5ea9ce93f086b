"""How fast this machine moves gradients and parameters, and how fast CPU and GPU do Adam: what bounds any overlap.

Owns what is measured in this stage. The CPU's passes are those of `superadam.cli.bench`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gpucheck.findings import Context, Finding, Limit, Outcome
from gpucheck.programs import MARK, measuring, tell
from superadam.cli.bench import passes
from superadam.cli.bench.arrays import HYPERPARAMETERS, STEP, PassArrays
from superadam.cli.bench.pairs import compare, times_of
from superadam.cli.traffic import bytes_per_element
from superadam.kernels import native
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.native import Pass
from superadam.kernels.resident_step import ResidentStep


@dataclass(frozen=True, slots=True)
class RatesRequest:
    """What is measured.

    Attributes:
        device: "cuda" or "cpu".
        link_bytes: of each copy between host and device.
        memory_bytes: that each kernel of the device reads and writes, together; less where less is free.
        tensors: into how many parameters its elements are split.
        numel: elements of the CPU's passes.
        rounds: timed runs of each thing.
    """

    device: str
    link_bytes: int
    memory_bytes: int
    tensors: int
    numel: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one thing is.

    Attributes:
        what: in words.
        gigabytes_per_second: that it reads and writes, or that cross the link.
        share_of_copy: of what the device's memory does when it copies, in the same run.
        elements_per_second: of an Adam.
    """

    what: str
    gigabytes_per_second: float
    share_of_copy: float | None = None
    elements_per_second: float | None = None


ADAM_BYTES_PER_ELEMENT = 2 * 3 * 4 + 2 + 2
"""Of master and moments, read and written, of a bf16 gradient, and of a bf16 parameter."""

COPY = "copy in GPU memory"
KERNELS = ("pack", "scatter", "adam")
"""Kernels of the GPU, as the rates call them."""


def _request(context: Context) -> RatesRequest:
    if context.rehearses:
        return RatesRequest(context.device, 1 << 16, 1 << 14, 2, 1 << 12, 3)
    return RatesRequest(context.device, 256 << 20, 4 << 30, 16, 64 << 20, 9)


def rates(context: Context, limit: Limit) -> Iterator[Finding]:
    """Measure links, kernels and passes in a process of their own."""
    # Without a GPU its kernels run in Triton's interpreter.
    environment = {"TRITON_INTERPRET": "1"} if context.rehearses else {}
    done = context.run(measuring("rates", asdict(_request(context))), limit.left, environment)
    found = [Rate(**line) for line in done.lines(MARK)]
    figures: dict[str, Any] = {"rows": found}
    shares = {rate.what: rate.share_of_copy for rate in found if rate.share_of_copy is not None and rate.what != COPY}
    words = ", ".join(f"{what} at {share:.0%} of a copy" for what, share in shares.items())
    missing = [kernel for kernel in KERNELS if kernel not in shares]
    if missing:
        words = f"{words or 'no kernel measured'}; not {', '.join(missing)}"
    if done.status is None:
        yield Finding(Outcome.SHORTENED, f"{words} when time was over", figures | {"output": done.ends})
    elif done.status:
        yield Finding(Outcome.FAILED, f"status {done.status}: {done.last_line}", figures | {"output": done.ends})
    else:
        yield Finding(Outcome.SHORTENED if missing else Outcome.GOOD, words, figures)


def measure(request: RatesRequest) -> None:
    """Measure and tell: the links, the kernels of the device, the passes of the CPU."""
    device, size = torch.device(request.device), request.memory_bytes
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4 >> 20 << 20)
    for measured in (
        link_rates(device, request.link_bytes, request.rounds),
        kernel_rates(device, size, request.tensors, request.rounds),
        pass_rates(request.numel, request.rounds),
    ):
        for rate in measured:
            tell(asdict(rate))


def link_rates(device: torch.device, size: int, rounds: int) -> Iterator[Rate]:
    """Yield the rates of pinned host memory to the device, back, and of both at once together."""
    pinned = device.type == "cuda"
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    distant = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    for host in hosts:
        host.zero_()
    down = (hosts[0], distant[0])
    up = (distant[1], hosts[1])
    streams = [torch.cuda.Stream(device) for _ in range(2)] if pinned else []

    def copies(*pairs: tuple[Tensor, Tensor]) -> Callable[[], None]:
        def run() -> None:
            for index, (destination, source) in enumerate(pairs):
                if streams:
                    with torch.cuda.stream(streams[index]):
                        destination.copy_(source, non_blocking=True)
                else:
                    destination.copy_(source)
            if streams:
                torch.cuda.synchronize(device)

        return run

    for what, pairs in (("host to device", [up]), ("device to host", [down]), ("both at once", [up, down])):
        seconds = _median_seconds(copies(*pairs), rounds)
        yield Rate(f"link, {what}", len(pairs) * size / seconds / 1e9)


def _median_seconds(action: Callable[[], object], rounds: int) -> float:
    return statistics.median(times_of(action, rounds))


def kernel_rates(device: torch.device, size: int, tensors: int, rounds: int) -> Iterator[Rate]:
    """Yield the rates of a copy and of our kernels over bf16 parameters, all with the same traffic.

    Args:
        device: CUDA, or the CPU for a rehearsal in Triton's interpreter.
        size: bytes that each reads and writes, together.
        tensors: into which the elements are split.
        rounds: timed runs of each.
    """
    from superadam import gpu

    filler = torch.empty(size // 2, dtype=torch.uint8, device=device)
    copied = torch.empty_like(filler)

    def copy() -> None:
        copied.copy_(filler)

    def split(tensor: Tensor) -> list[Tensor]:
        return list(tensor.chunk(tensors))

    def device_seconds(action: Callable[[], object]) -> float:
        if device.type != "cuda":
            return _median_seconds(action, rounds)
        seconds = []
        for turn in range(rounds + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(4):  # keeps the device busy until the launch behind it is ready, so that no gap is timed
                copy()
            begin.record()
            action()
            end.record()
            end.synchronize()
            if turn >= 2:
                seconds.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(seconds)

    of_copy = 2 * len(filler) / device_seconds(copy) / 1e9
    yield Rate(COPY, of_copy, 1.0)

    def rate(what: str, moved: int, action: Callable[[], object], elements: int | None = None) -> Rate:
        seconds = device_seconds(action)
        each = moved / seconds / 1e9
        return Rate(what, each, each / of_copy, elements and elements / seconds)

    packed, gradients = (torch.zeros(size // 4, dtype=torch.bfloat16, device=device) for _ in range(2))
    parts = split(gradients)
    offsets = [sum(part.numel() for part in parts[:index]) for index in range(len(parts))]
    has_triton = gpu.obstacle(device) is None
    norm: list[Tensor] = []
    if has_triton:
        chunks = sum(-(-part.numel() // native.CHUNK) for part in parts)
        norm = [torch.empty(chunks, dtype=dtype, device=device) for dtype in (torch.float64, torch.int64)]
    yield rate("pack", 4 * len(packed), lambda: gpu.pack_gradients(parts, offsets, packed, *norm))
    yield rate("scatter", 4 * len(packed), lambda: gpu.scatter_values(split(packed), parts))
    if not has_triton:
        return
    numel = size // (ADAM_BYTES_PER_ELEMENT * 64 * tensors) * 64 * tensors  # so that vectors are aligned
    state = [split(torch.zeros(numel, device=device)) for _ in range(3)]
    halves = [split(tensor[:numel]) for tensor in (gradients, packed)]
    steps = [
        ResidentStep(*arrays, None, gradient, out, 0) for *arrays, gradient, out in zip(*state, *halves, strict=True)
    ]
    sets = [Coefficients.at_step(HYPERPARAMETERS, STEP)]
    yield rate("adam", ADAM_BYTES_PER_ELEMENT * numel, lambda: gpu.update(steps, sets), numel)


def pass_rates(numel: int, rounds: int) -> Iterator[Rate]:
    """Yield the rates of the CPU's passes, with bf16 gradients and parameters."""
    setting = passes.Setting(native.active_isa(), native.get_num_threads())
    arrays = PassArrays(numel, *passes.DTYPES)
    chosen = (Pass.COMMIT_AND_SPECULATE, Pass.UPDATE)
    compared = compare(
        *(passes.action(arrays, which, setting, with_norm=which is not Pass.UPDATE) for which in chosen), rounds
    )
    for which, spread in zip(chosen, (compared.seconds, compared.against_seconds), strict=True):
        moved = numel * bytes_per_element(which, *passes.DTYPES)
        words = f"CPU, {which.name.lower().replace('_', ' ')}, {setting.threads} threads"
        yield Rate(words, moved / spread.median / 1e9, elements_per_second=numel / spread.median)


def adam_elements_per_second(numel: int, rounds: int) -> float:
    """Return how many elements of a step the CPU's Adam does in a second: the pass that commits one, and speculates."""
    first = next(pass_rates(numel, rounds))
    assert first.elements_per_second is not None
    return first.elements_per_second
