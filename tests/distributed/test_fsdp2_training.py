"""Training under `fully_shard` with a scheduler has the bits of the oracle and of torch's fused AdamW."""

import importlib.util
import math
from typing import Any

import pytest
import torch
from support.overlap import ThreadDevice
from support.ranks import on_ranks, preload
from support.reference import same_bits
from support.shards import ROUNDED, Oracle, local, wrap
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from superadam import OffloadScheduler, SpeculativeCPUAdamW, StepKind

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]

STEPS = 12
MICRO_BATCHES = 2
LIMIT = 0.5

VOCABULARY = 63

preload("transformers.models.llama.modeling_llama")
preload("transformers.models.qwen3_moe.modeling_qwen3_moe")


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 1, "head_dim": 16, "tie_word_embeddings": True}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **sizes, **heads))


def mixture_of_experts() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 128, "moe_intermediate_size": 32, "head_dim": 128, "num_experts": 3}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=VOCABULARY, **sizes, **counts))


MODELS = {"Llama": llama, "Qwen3-MoE": mixture_of_experts}
"""With uneven shards, and of the Llama's feed-forward layers empty ones."""


def backward(model: Any, rank: int, step: int) -> None:
    for micro in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
        tokens = torch.randint(VOCABULARY, (2, 8), generator=generator)
        (model(input_ids=tokens, labels=tokens).loss / MICRO_BATCHES).backward()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_training(rank, name, dtype):
    """Steps clipped by torch, by the optimizer's limit, or not at all; one is not finite."""
    torch.manual_seed(0)
    model: Any = MODELS[name]().to(dtype)
    wrap([*model.model.layers, model], mp_policy=MixedPrecisionPolicy(**ROUNDED))
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-3)
    oracle = Oracle(optimizer)
    fused = torch.optim.AdamW(oracle.twins, lr=1e-3, fused=True)
    with OffloadScheduler(optimizer, model, device=ThreadDevice(), num_threads=1, bucket_numel=10_000) as scheduler:
        for step in range(STEPS):
            backward(model, rank, step)
            if step == 7 and rank == 1:
                local(oracle.tensors[3].grad).view(-1)[5] = math.nan
            oracle.copy_gradients()
            if step % 3 == 2:
                clipped = [nn.utils.clip_grad_norm_(of, LIMIT).full_tensor() for of in (oracle.tensors, oracle.twins)]
                assert torch.equal(*clipped)
                assert clipped[0] > LIMIT
            optimizer.max_grad_norm = limit = LIMIT if step % 3 == 1 else None
            optimizer.step()
            norm, outcome = oracle.step_all(limit), optimizer.last_outcome
            if step == 7:
                assert (outcome.kind, outcome.nonfinite) == (StepKind.SKIPPED, 1)
            else:
                # The norm of products is computed less exactly: each is rounded, or the factor is.
                rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
                assert math.isclose(outcome.grad_norm, norm, rel_tol=rounding if step % 3 == 2 else 0.0)
                assert outcome.kind is (StepKind.COMMITTED if limit is None else StepKind.CLIPPED)
                for twin in oracle.twins:
                    local(twin.grad).mul_(outcome.clip_coefficient)
                fused.step()
            if step in (6, STEPS - 1):
                oracle.check()
            optimizer.zero_grad()
        assert scheduler.statistics.buckets > 2 * STEPS
        # fp32 shards on the CPU are their own masters: only their norms are taken before the verdict.
        assert (optimizer.statistics.accepted > 0) is (dtype == torch.bfloat16)
    if dtype == torch.bfloat16:
        return
    for twin, tensor in zip(oracle.twins, oracle.tensors, strict=True):
        assert local(tensor).numel() % 64 == 0  # torch rounds the tail of others otherwise
        assert same_bits(local(twin).numpy(), local(tensor).numpy())
        for key in ("exp_avg", "exp_avg_sq"):
            assert same_bits(local(fused.state[twin][key]).numpy(), local(optimizer.state[tensor][key]).numpy())
