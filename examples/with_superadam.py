"""Runs a training program of others, with `OverlappedAdamW` wherever it makes `torch.optim.AdamW`.

    python examples/with_superadam.py scripts/train.py --config-path config.json

For trainers that take no optimizer class of others: OneTrainer with ADAMW, diffusion-pipe with `type = 'adamw'`. Their
learning rate, schedule, weight decay and clipping count as ever. State is kept in fp32 on the host, and the norm that
they clip by is that of all gradients, so leave their fused backward pass and stochastic rounding off.
SUPERADAM_MOMENTS=bf16 and SUPERADAM_MASTER=24bit keep smaller state.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from own_scheduler import OverlappedAdamW

FORMATS = {"moments": "SUPERADAM_MOMENTS", "master": "SUPERADAM_MASTER"}


class AdamW(OverlappedAdamW):
    """`OverlappedAdamW` whose state is stored as the environment says."""

    def __init__(self, params: Any, *values: Any, **options: Any) -> None:
        stored = {name: os.environ[variable] for name, variable in FORMATS.items() if variable in os.environ}
        named = dict(zip(("lr", "betas", "eps", "weight_decay", "amsgrad"), values, strict=False))
        super().__init__(params, **{**named, **options, **stored})


def main() -> None:
    """Run the program that the first word names, with the words that follow."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit("with_superadam.py: name a program to run, expected python examples/with_superadam.py PROGRAM ...")
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent.resolve()))
    torch.optim.AdamW = AdamW  # type: ignore[misc]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
