"""How fast this machine moves gradients and parameters, and how fast its CPU does Adam: what bounds any overlap.

Owns what is measured in this stage. The CPU's passes are those of `superadam.cli.bench`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gpucheck.findings import Context, Finding, Limit, Outcome
from gpucheck.programs import MARK, measuring, tell


@dataclass(frozen=True, slots=True)
class RatesRequest:
    """What is measured.

    Attributes:
        device: "cuda" or "cpu".
        link_bytes: of each copy between host and device.
        numel: elements of the passes.
        rounds: timed runs of each thing.
    """

    device: str
    link_bytes: int
    numel: int
    rounds: int


def _request(context: Context) -> RatesRequest:
    if context.rehearses:
        return RatesRequest(context.device, 1 << 16, 1 << 12, 3)
    return RatesRequest(context.device, 256 << 20, 64 << 20, 9)


def rates(context: Context, limit: Limit) -> Iterator[Finding]:
    """Measure links and passes in a process of their own."""
    done = context.run(measuring("rates", asdict(_request(context))), limit.left, {})
    figures: dict[str, Any] = {}
    for line in done.lines(MARK):
        figures |= line
    words = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in figures.items())
    if done.status is None:
        yield Finding(Outcome.SHORTENED, f"{words or 'nothing'} when time was over", figures)
    elif done.status:
        yield Finding(
            Outcome.FAILED, f"status {done.status}: {done.last_line}", figures | {"output": done.output[-20_000:]}
        )
    else:
        yield Finding(Outcome.GOOD, words, figures)


def measure(request: RatesRequest) -> None:
    """Measure and tell, the links first."""
    tell(link_rates(torch.device(request.device), request.link_bytes, request.rounds))
    tell(pass_rates(request.numel, request.rounds))


def link_rates(device: torch.device, size: int, rounds: int) -> dict[str, float]:
    """Return GB/s of pinned host memory to the device, back, and of both at once together."""
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

    return {
        "host_to_device_gigabytes_per_second": size / _median_seconds(copies(up), rounds) / 1e9,
        "device_to_host_gigabytes_per_second": size / _median_seconds(copies(down), rounds) / 1e9,
        "both_directions_gigabytes_per_second": 2 * size / _median_seconds(copies(up, down), rounds) / 1e9,
    }


def _median_seconds(action: Callable[[], None], rounds: int) -> float:
    seconds = []
    for turn in range(rounds + 2):
        begin = time.perf_counter()
        action()
        if turn >= 2:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def pass_rates(numel: int, rounds: int) -> dict[str, float]:
    """Return elements that the CPU's passes do in a second, with bf16 gradients and parameters, and their GB/s."""
    from superadam.cli.bench import passes
    from superadam.cli.bench.arrays import PassArrays, bytes_per_element
    from superadam.cli.bench.pairs import compare
    from superadam.kernels import native
    from superadam.kernels.native import Dtype, Pass

    setting = passes.Setting(native.active_isa(), native.get_num_threads(), Dtype.BFLOAT16, Dtype.BFLOAT16)
    arrays = PassArrays(numel, setting.gradient_dtype, setting.out_dtype)
    fused, plain = Pass.COMMIT_AND_SPECULATE, Pass.UPDATE
    compared = compare(
        *(passes.action(arrays, which, setting, with_norm=which is fused) for which in (fused, plain)), rounds
    )
    figures: dict[str, float] = {"threads": setting.threads}
    for which, spread in ((fused, compared.first), (plain, compared.second)):
        rate, name = numel / spread.median, which.name.lower()
        moved = bytes_per_element(which, setting.gradient_dtype, setting.out_dtype)
        figures[f"{name}_elements_per_second"] = rate
        figures[f"{name}_gigabytes_per_second"] = rate * moved / 1e9
    return figures
