"""Small models of transformers with random weights, always the same ones."""

from typing import Any

import torch
from support.ranks import preload

VOCABULARY = 63

preload("transformers.models.llama.modeling_llama")
preload("transformers.models.qwen3_moe.modeling_qwen3_moe")


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 16, "tie_word_embeddings": True}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **{**sizes, **heads, **options}))


def mixture_of_experts() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 32, "head_dim": 128, "num_experts": 3}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=VOCABULARY, **sizes, **counts))
