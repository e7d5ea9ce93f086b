"""A small training run under DeepSpeed, whose checkpoints superadam continues; a program for torchrun.

    torchrun --nproc-per-node 2 deepspeed_run.py FOLDER '{"stage": 3}'

writes checkpoints, and to losses.json the losses of the steps that follow. Without DeepSpeed, only the model is used.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS, LATER_STEPS = 3, 20
BATCH = 8  # over all ranks
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.99)}


class Model(nn.Module):
    """Odd sizes, a frozen layer, a buffer, and parameters of two groups."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed, self.up, self.norm = nn.Embedding(7, 5), nn.Linear(5, 9), nn.LayerNorm(9)
        self.down, self.head = nn.Linear(9, 3, bias=False), nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("shift", torch.empty(3))
        for tensor in [*self.parameters(), self.shift]:
            tensor.data.normal_(generator=generator)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.down(self.norm(self.up(self.embed(words)).relu()))).float() + self.shift


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [one for one in model.parameters() if one.requires_grad]
    kinds = [one for one in trained if one.dim() > 1], [one for one in trained if one.dim() == 1]
    return [{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "weight_decay": 0.0}]


def words_of(step: int, rank: int, ranks: int) -> Tensor:
    words = torch.randint(0, 7, (BATCH,), generator=torch.Generator().manual_seed(step))
    return words.chunk(ranks)[rank]


def loss_of(shown: Tensor) -> Tensor:
    return shown.square().mean()


def main(folder: Path, zero: dict[str, Any]) -> None:
    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Model()
    groups = groups_of(model)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(groups, **OPTIONS)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS + LATER_STEPS):
        if step == STEPS:
            engine.save_checkpoint(folder)
        loss = loss_of(engine(words_of(step, rank, ranks)))
        engine.backward(loss)
        engine.step()
        loss = loss.detach() / ranks
        dist.all_reduce(loss)
        losses.append(loss.item())
    if rank == 0:
        for name in ("zero_to_fp32.py", "zero_to_torch.py"):  # which it puts beside each checkpoint
            (folder / name).unlink(missing_ok=True)
        (folder / "losses.json").write_text(json.dumps(losses[STEPS:]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
