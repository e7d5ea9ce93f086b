"""On each rank of torchrun, what `accelerate launch --config_file examples/presets/fsdp2.yaml` starts, but on CPUs."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import yaml
from accelerate.state import PartialState
from accelerate.utils import DistributedType

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

launched = yaml.safe_load((EXAMPLES / "presets" / "fsdp2.yaml").read_text())
os.environ.update({name.upper(): str(value) for name, value in launched["fsdp_config"].items()})
os.environ.update(ACCELERATE_USE_FSDP="true", ACCELERATE_USE_CPU="true")
os.environ.update(ACCELERATE_MIXED_PRECISION=launched["mixed_precision"])

make_state = PartialState.__init__


def make_state_that_shards(self: PartialState, *arguments: Any, **named: Any) -> None:
    """Accelerate shards on CPUs only if it takes them for something else."""
    is_first = not PartialState._shared_state
    make_state(self, *arguments, **named)
    if is_first:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


PartialState.__init__ = make_state_that_shards
runpy.run_path(str(EXAMPLES / "finetune.py"), run_name="__main__")
