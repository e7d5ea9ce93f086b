"""A program for torchrun: it trains from the newest checkpoint in FOLDER to the end, and notes in LOG what it does.

torchrun ... elastic_run.py FOLDER LOG STEPS EVERY
"""

from __future__ import annotations

import hashlib
import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.devices import PlainDevice
from superadam.integrations.distributed_checkpoint import latest, load, save


class ThreadDevice(PlainDevice):
    """Host memory, and cores to spare, so that jobs run in a thread while the model computes."""

    def idle_cores(self) -> int:
        return 2


def train(folder: str, log: str, steps: int, every: int) -> None:
    """Train to the end, with a checkpoint after every so many steps; the last note is a digest of this rank's parts."""
    rank = distributed.get_rank()

    def note(*words: object) -> None:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, " ".join(map(str, (rank, *words))).encode() + b"\n")
        os.close(descriptor)

    note("pid", os.getpid(), os.environ.get("TORCHELASTIC_USE_AGENT_STORE"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 7)).bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mp_policy=policy)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    path = latest(folder)
    done = 0 if path is None else load(path, model, optimizer)["step"]
    note("begin", done)
    with OffloadScheduler(optimizer, model, num_threads=1, bucket_numel=64, device=ThreadDevice()):
        for step in range(done, steps):
            inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(1000 * rank + step)).bfloat16()
            loss = (model(inputs) - 1).float().square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            note("step", step, loss.item().hex())
            if (step + 1) % every == 0:
                save(folder, model, optimizer, extra={"step": step + 1}, keep=1)
                note("saved", step + 1)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        for value in (parameter, *(optimizer.state[parameter][key] for key in sorted(optimizer.state[parameter]))):
            part = value.to_local() if hasattr(value, "to_local") else value
            digest.update(part.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    note("end", digest.hexdigest())


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    distributed.destroy_process_group()
