"""How long `save(..., wait=False)` keeps training, and how much longer steps take while a checkpoint is written.

Each pair times a step by itself, `save`, which copies all state, and the step right after it. The first save gets its
memory from the system, the others use it again. `--folder` names a disk.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from superadam import SpeculativeCPUAdamW
from superadam.integrations.distributed_checkpoint import save, wait


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(tensors: int, numel: int, pairs: int, folder: Path) -> str:
    """Return lines of the first save, and of the medians over so many pairs after it."""
    model = nn.ParameterList([nn.Parameter(torch.randn(numel).bfloat16()) for _ in range(tensors)])
    optimizer = SpeculativeCPUAdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.randn(numel).bfloat16()
    optimizer.step()
    rows: list[list[float]] = []
    for _ in range(pairs + 1):
        alone = _seconds(optimizer.step)
        begin = time.perf_counter()
        saving = _seconds(lambda: save(folder, model, optimizer, wait=False, keep=1))
        step = _seconds(optimizer.step)
        wait()
        whole = time.perf_counter() - begin
        blocking = _seconds(lambda: save(folder, model, optimizer, keep=1))
        rows.append([alone, saving, saving / alone, step / alone, whole, blocking])
    columns = [*zip(*rows[1:], strict=True)]
    lines = [("first", rows[0]), ("median", [*map(statistics.median, columns)])]
    lines += [("least", [*map(min, columns)]), ("most", [*map(max, columns)])]
    return "\n".join(f"{name:8}" + "".join(f"{value:15.3f}" for value in values) for name, values in lines)


def main() -> int:
    """Print the first save's times, and those of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--numel", type=int, default=1 << 22, help="elements of each (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="default: a temporary one")
    options = parser.parse_args()
    heads = ("step (s)", "save() (s)", "save() / step", "next / step", "whole after (s)", "wait=True (s)")
    sys.stdout.write(" " * 8 + "".join(f"{head:>15}" for head in heads) + "\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sys.stdout.write(f"{measure(options.tensors, options.numel, options.pairs, Path(folder))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
