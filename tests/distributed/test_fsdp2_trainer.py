"""The stock `Trainer` under Accelerate's FSDP2 has the bits of a `fully_shard` loop, with a scheduler and without."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.language_models import VOCABULARY, llama
from support.ranks import on_ranks
from support.shards import assert_same, parts_of, wrap
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import Dataset

from superadam import SpeculativeCPUAdamW

pytestmark = pytest.mark.slow

UPDATES, MICRO_BATCHES = 5, 2
LR, DECAY = 1e-3, 0.1
LIMIT = 0.8
BFLOAT16 = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), torch.bfloat16)  # as Accelerate has it


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(VOCABULARY, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(rank: int, folder: Path, **options: Any) -> Any:
    """Return a Trainer that shards on CPUs, for which Accelerate has no name of its own."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainingArguments

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=UPDATES,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=MICRO_BATCHES,
        learning_rate=LR,
        weight_decay=DECAY,
        lr_scheduler_type="constant",
        max_grad_norm=LIMIT,
        bf16=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    assert arguments.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    return Trainer(llama(tie_word_embeddings=False), arguments, train_dataset=Tokens(), **options)


@pytest.mark.parametrize("overlaps", [False, True])
@on_ranks(2)
def test_trainer(rank: int, overlaps: bool) -> None:
    from transformers import TrainerCallback

    from superadam.integrations.transformers import offload

    inputs: list[dict[str, Any]] = []

    class Watch(TrainerCallback):
        """Records what the model gets."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **present: Any) -> None:
            present["model"].register_forward_pre_hook(
                lambda module, args, kwargs: inputs.append(kwargs), with_kwargs=True
            )

    with tempfile.TemporaryDirectory() as folder:
        options = {} if overlaps else {"optimizer_cls_and_kwargs": (SpeculativeCPUAdamW, {"lr": LR})}
        stock = trainer(rank, Path(folder), callbacks=[Watch()], **options)
        if overlaps:
            offload(stock, num_threads=1, bucket_numel=2000)
        stock.train()
    counts = stock.state.log_history[-1]
    assert ("superadam_committed" in counts) is overlaps
    if overlaps:
        assert counts["superadam_committed"] + counts["superadam_clipped"] == UPDATES
    assert len(inputs) == UPDATES * MICRO_BATCHES
    trained = stock.optimizer.optimizer

    model = llama(tie_word_embeddings=False)
    layers = [model.model.embed_tokens, *model.model.layers]
    wrap([*layers, [model.model.norm, model.lm_head], model], mp_policy=MixedPrecisionPolicy(**BFLOAT16))
    groups = [
        {
            "params": [parameter for parameter in model.parameters() if (parameter.dim() > 1) is is_matrix],
            "weight_decay": decay,
        }
        for is_matrix, decay in ((True, DECAY), (False, 0.0))
    ]
    optimizer = SpeculativeCPUAdamW(groups, lr=LR)
    for number, kwargs in enumerate(inputs):
        is_last = number % MICRO_BATCHES == MICRO_BATCHES - 1
        model.set_requires_gradient_sync(is_last)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**kwargs).loss * 2
        loss.backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(parts_of(stock.model, trained), parts_of(model, optimizer))
