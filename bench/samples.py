"""What it costs to look for outside writes: steps that sample working copies, and steps that compare every element.

Each line is the ratio of such a step to one that looks at version counters alone, of the same optimizer, in pairs as in
`bench/compare.py`. Times are those of the CPU in this process, which others on the machine disturb less.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import superadam
from superadam.cli.bench.arrays import ADAMW_OPTIONS
from superadam.cli.bench.pairs import Action, compare
from superadam.devices import PlainDevice
from superadam.kernels import native
from superadam.state.samples import FULL_STEPS, Samples

KINDS: dict[str, tuple[int, int, torch.dtype, bool]] = {
    "10000 x 1000 bf16": (10_000, 1_000, torch.bfloat16, True),
    "10000 x 1000 fp16": (10_000, 1_000, torch.float16, True),
    "8 x 4 Mi bf16": (8, 4 << 20, torch.bfloat16, True),
    "1000 x 1000 bf16 on a device": (1_000, 1_000, torch.bfloat16, False),
}
"""Number of tensors, elements of each, dtype, and whether kernels on the CPU reach them."""


class Distant(PlainDevice):
    """Host memory that kernels are not to write, as that of a device."""

    def is_host(self, tensor: Tensor) -> bool:
        """Return that no tensor is."""
        return False


class _NoSamples(Samples):
    def find_written(self, rows: object) -> list[int]:
        return []


class _AllSamples(Samples):
    def find_written(self, rows: object) -> list[int]:
        self._full_steps = FULL_STEPS
        return super().find_written(rows)  # type: ignore[arg-type]


@contextmanager
def optimizer_of(kind: str) -> Iterator[superadam.SpeculativeCPUAdamW]:
    """Yield an optimizer whose parameters hold gradients."""
    count, numel, dtype, is_on_host = KINDS[kind]
    model = nn.Module()
    model.every = nn.ParameterList([nn.Parameter(torch.randn(numel).to(dtype)) for _ in range(count)])
    for one in model.parameters():
        one.grad = (1e-3 * torch.randn(numel)).to(dtype)
    optimizer = superadam.SpeculativeCPUAdamW(model.parameters(), **ADAMW_OPTIONS, max_grad_norm=1e6)
    if is_on_host:
        yield optimizer
        return
    with superadam.OffloadScheduler(optimizer, model, device=Distant()):
        yield optimizer


def step_with(optimizer: superadam.SpeculativeCPUAdamW, kind: Callable[..., Samples]) -> Action:
    """Return a step that looks for writes in one way."""
    transaction = optimizer._binding.bound(optimizer.param_groups)
    samples = kind(transaction.table)

    def step() -> None:
        transaction._samples = samples
        optimizer.step()

    return step


def main() -> None:
    """Measure, and print a line for each kind of parameters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--threads", type=int, default=native.get_num_threads())
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    native.set_num_threads(arguments.threads)
    sys.stdout.write(f"{arguments.threads} threads, {arguments.pairs} pairs\n")
    for kind in arguments.kinds:
        with optimizer_of(kind) as optimizer:
            plain = step_with(optimizer, _NoSamples)
            for name, other in (("samples", Samples), ("everything", _AllSamples), ("itself", _NoSamples)):
                found = compare(step_with(optimizer, other), plain, arguments.pairs, clock=time.process_time)
                ratio = found.ratio
                first, second = (f"{1e3 * one.median:8.2f} ms" for one in (found.first, found.second))
                quartiles = f"{ratio.lower:.3f} {ratio.upper:.3f}"
                sys.stdout.write(f"{kind:30}{name:10}{first} / {second}  {ratio.median:.3f}  quartiles {quartiles}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
