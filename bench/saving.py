"""How much longer a step takes while a checkpoint is written beside training, and how long `save` itself takes.

Each pair times a step by itself, then the step right after `save(..., wait=False)`, which has to preserve the whole
state. The disk decides where copies find no room: `--folder` names one.
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


def measure(tensors: int, numel: int, pairs: int, copy_bytes: int, folder: Path) -> str:
    """Return one line of the medians over so many pairs."""
    model = nn.ParameterList([nn.Parameter(torch.randn(numel).bfloat16()) for _ in range(tensors)])
    optimizer = SpeculativeCPUAdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.randn(numel).bfloat16()
    optimizer.step()
    ratios, saving, whole, blocking = [], [], [], []
    for _ in range(pairs):
        alone = _seconds(optimizer.step)
        begin = time.perf_counter()
        saving.append(_seconds(lambda: save(folder, model, optimizer, wait=False, copy_bytes=copy_bytes, keep=1)))
        ratios.append(_seconds(optimizer.step) / alone)
        wait()
        whole.append(time.perf_counter() - begin)
        blocking.append(_seconds(lambda: save(folder, model, optimizer, keep=1)))
    medians = [statistics.median(values) for values in (ratios, saving, whole, blocking)]
    return (
        f"{copy_bytes / 2**20:12.0f} {medians[0]:18.2f} {medians[1]:12.3f} {medians[2]:16.2f} {medians[3]:18.2f}"
        f"   step from {min(ratios):.2f} to {max(ratios):.2f}"
    )


def main() -> int:
    """Print a line for copies without room, for half of the state, and for all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--numel", type=int, default=1 << 22, help="elements of each (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="default: a temporary one")
    options = parser.parse_args()
    state = 12 * options.tensors * options.numel
    sys.stdout.write("copies (MiB) | step / step alone | save() (s) | until whole (s) | save that waits (s)\n")
    for copy_bytes in (0, state // 2, 2 * state):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            line = measure(options.tensors, options.numel, options.pairs, copy_bytes, Path(folder))
            sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
