"""The models of examples/presets as they were published: their configurations, and the number of their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from superadam.offload.needs import needs_of

GIGABYTE = 10**9


@dataclass(frozen=True)
class Preset:
    """A published model, and how its preset trains it.

    Attributes:
        parameters: as the safetensors files on the model's page count them; for GPT-OSS, before its weights were
            packed into 4 bits.
        source: that gives the dimensions, as does `config.json` on the model's page.
        dimensions: options of the configuration that differ from transformers' own.
        gpus: on which it is trained.
        sequence: tokens.
    """

    parameters: int
    source: str
    config: type[transformers.PreTrainedConfig]
    dimensions: dict[str, Any]
    gpus: int = 1
    sequence: int = 4096

    def model(self) -> nn.Module:
        """Return it in bf16, without memory."""
        config = self.config(**self.dimensions)
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return model

    def row(self, name: str) -> str:
        """Return the preset's row of the table in docs/presets.md."""
        needs = [needs_of(parameter, is_on_host=False) for parameter in self.model().parameters()]
        state = sum(each.state for each in needs) / GIGABYTE
        host = sum(each.state + each.pending for each in needs) / GIGABYTE
        gpu = 2 * torch.bfloat16.itemsize * self.parameters / self.gpus / GIGABYTE
        link = f"[`{name}`](../examples/presets/{name}.yaml)"
        return (
            f"| {link} | {self.gpus} | {self.sequence} | {self.parameters:,} | {state:.0f} | {host:.0f} | {gpu:.0f} |"
        )


PRESETS = {
    "llama-3.1-8b": Preset(
        8_030_261_248,
        "The Llama 3 Herd of Models (arXiv 2407.21783), table 3",
        transformers.LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "phi-4": Preset(
        14_659_507_200,
        "the model's page; Phi-4 Technical Report (arXiv 2412.08905), section 3",
        transformers.Phi3Config,
        {
            "vocab_size": 100352,
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
        },
    ),
    "qwen3-14b": Preset(
        14_768_307_200,
        "the model's page; Qwen3 Technical Report (arXiv 2505.09388), table 1",
        transformers.Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "gpt-oss-20b": Preset(
        20_914_757_184,
        "gpt-oss-120b & gpt-oss-20b Model Card (arXiv 2508.10925), section 2; the rest is transformers' own default",
        transformers.GptOssConfig,
        {"num_hidden_layers": 24, "num_local_experts": 32},
        sequence=8192,
    ),
    "qwen3-30b-a3b": Preset(
        30_532_122_624,
        "the model's page; Qwen3 Technical Report (arXiv 2505.09388), table 2",
        transformers.Qwen3MoeConfig,
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        gpus=2,
    ),
    "seed-oss-36b": Preset(
        36_151_104_512,
        "the model's page; the README of ByteDance-Seed/seed-oss",
        transformers.SeedOssConfig,
        {
            "vocab_size": 155136,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        gpus=2,
    ),
    "llama-3.1-70b": Preset(
        70_553_706_496,
        "The Llama 3 Herd of Models (arXiv 2407.21783), table 3",
        transformers.LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
        gpus=4,
    ),
}
