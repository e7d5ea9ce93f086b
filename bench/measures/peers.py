"""The optimizers that superadam's are compared with: torch's, and those of packages that happen to be installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from superadam.cli.bench.arrays import ADAMW_OPTIONS


@dataclass(frozen=True, slots=True)
class Peer:
    """An AdamW for fp32 tensors on the CPU.

    Attributes:
        name: short, for tables.
        make: returns the optimizer over such tensors; imports its package, and may compile.
        package: what has to be installed.
        moments: how ours, next to it, stores moments.
        is_one_pass: whether it reads and writes each array once a step.
    """

    name: str
    make: Callable[[Sequence[Tensor]], Optimizer]
    package: str = "torch"
    moments: str = "fp32"
    is_one_pass: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What was not measured, and why."""

    what: str
    why: str


def _torch(**how: Any) -> Callable[[Sequence[Tensor]], Optimizer]:
    return lambda parameters: AdamW(parameters, **ADAMW_OPTIONS, **how)


def _of(module: str, name: str) -> Callable[[Sequence[Tensor]], Optimizer]:
    def make(parameters: Sequence[Tensor]) -> Optimizer:
        made: Optimizer = getattr(importlib.import_module(module), name)(parameters, **ADAMW_OPTIONS)
        return made

    return make


@functools.cache
def _deepspeed() -> Any:
    """Return DeepSpeed's class; its processor is looked up once, because that starts processes for each optimizer."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    cpuinfo: Any = importlib.import_module("cpuinfo")
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    return importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam


FUSED = Peer("torch fused", _torch(fused=True), is_one_pass=True)

PEERS = (
    FUSED,
    Peer("torch foreach", _torch(foreach=True)),
    Peer("torch for-loop", _torch(foreach=False)),
    Peer(
        "DeepSpeedCPUAdam", lambda parameters: _deepspeed()(parameters, **ADAMW_OPTIONS), "deepspeed", is_one_pass=True
    ),
    Peer("bitsandbytes AdamW", _of("bitsandbytes.optim", "AdamW"), "bitsandbytes"),
    Peer("bitsandbytes AdamW8bit", _of("bitsandbytes.optim", "AdamW8bit"), "bitsandbytes", "8bit"),
    Peer("torchao AdamW8bit", _of("torchao.optim", "AdamW8bit"), "torchao", "8bit"),
)


def reason_against(peer: Peer) -> str | None:
    """Return in one line why a peer cannot run here, or None where it made a step; the first one may compile."""
    if importlib.util.find_spec(peer.package) is None:
        return f"{peer.package} is not installed"
    tensor = torch.ones(64, requires_grad=True)
    tensor.grad = torch.ones(64)
    try:
        peer.make([tensor]).step()
    except Exception as error:  # whatever another package raises, the others are measured
        causes = [error, *([error.__cause__] if error.__cause__ else [])]
        return "; ".join(" ".join(f"{type(each).__name__}: {each}".split())[:200] for each in causes)
    return None


def choose(peers: Sequence[Peer]) -> tuple[list[Peer], list[LeftOut]]:
    """Return the peers that can run here, and the others."""
    reasons = {peer: reason_against(peer) for peer in peers}
    return [peer for peer in peers if reasons[peer] is None], [
        LeftOut(peer.name, why) for peer, why in reasons.items() if why is not None
    ]


def versions(peers: Sequence[Peer]) -> dict[str, str]:
    """Return the versions of the peers' packages."""
    return {peer.package: version(peer.package) for peer in peers}
