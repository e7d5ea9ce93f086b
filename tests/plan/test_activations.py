"""Peaks from meta tensors are those that torch's allocator sees."""

from typing import Any

import pytest
import torch

transformers: Any = pytest.importorskip("transformers")

from torch.profiler import ProfilerActivity, profile  # noqa: E402

from superadam.cli.plan.presets import presets  # noqa: E402
from superadam.plan import UnplannableError, attention  # noqa: E402
from superadam.plan.activations import END, LAYERS, peaks_of, recomputing, run  # noqa: E402
from superadam.plan.models import build, on_meta  # noqa: E402

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 8000, "pad_token_id": None}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
SIZES |= {"attention_dropout": 0.0}  # for which CPUs have no fused kernel
EXPERTS = {
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4, "mlp_only_layers": [1]},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256},
}
KINDS = ("llama", "phi3", "qwen3", "qwen3_moe", "gpt_oss", "seed_oss")
SEQUENCES, TOKENS = 2, 256


def small(kind: str, layers: int = 4) -> Any:
    return transformers.AutoConfig.for_model(kind, **SIZES | EXPERTS.get(kind, {}), num_hidden_layers=layers)


def measured(config: Any, loss: str, checkpointing: bool) -> int:
    """Return the bytes that torch's allocator has given out at most in a step's forward and backward."""
    is_own = config.model_type == "gpt_oss"  # sinks need a GPU's kernel: on both sides, the stand-in computes nothing
    attention.register()
    model: Any = build(config, attention.NAME if is_own else "sdpa")
    recomputing(model, is_wanted=checkpointing)
    tokens = torch.randint(0, config.vocab_size, (SEQUENCES, TOKENS))
    run(model, tokens[:, :8], loss)  # which makes what stays
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run(model, tokens, loss)
    now = peak = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.covering(2)
@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpoints", "no checkpoints"])
@pytest.mark.parametrize("loss", ["chunked", "full"])
@pytest.mark.parametrize("layers", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_peaks_are_those_of_the_allocator(kind: str, layers: int, loss: str, checkpointing: bool) -> None:
    """Within half a percent: real kernels have small workspaces."""
    config = small(kind, layers)
    peaks = peaks_of(config, SEQUENCES, TOKENS, loss=loss, checkpointing=checkpointing)
    assert max(peaks.values()) == pytest.approx(measured(config, loss, checkpointing), rel=0.005)


@pytest.mark.parametrize("name", presets())
def test_parameters_of_presets_are_those_published(name: str) -> None:
    preset = presets()[name]
    assert sum(one.numel() for one in on_meta(preset.config).parameters()) == preset.parameters


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "mlp_only_layers" not in EXPERTS.get(kind, {})])
def test_at_the_end_one_layer_is_left(kind: str) -> None:
    """Before, two equal ones take the input of the other more, in bf16."""
    two, eight = (peaks_of(small(kind, layers), SEQUENCES, TOKENS) for layers in (2, 8))
    assert eight[END] == pytest.approx(two[LAYERS] - 2 * SEQUENCES * TOKENS * 256, rel=0.001)


@pytest.mark.parametrize("tokens", [128, 1024])
def test_whole_logits_cost_what_they_weigh(tokens: int) -> None:
    config = small("llama", 2)
    full, chunked = (peaks_of(config, 4, tokens, loss=loss)["head and loss"] for loss in ("full", "chunked"))
    assert full - chunked >= 4 * (4 * tokens - 1024) * config.vocab_size


def test_attention_that_cannot_be_chosen_is_refused() -> None:
    config = transformers.AutoConfig.for_model("bloom", hidden_size=64, num_hidden_layers=2, vocab_size=128)
    with pytest.raises(UnplannableError, match=r"2 layers of a bloom called the attention that can be chosen 0 times"):
        peaks_of(config, 1, 64)


def test_experts_whose_sizes_depend_on_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("superadam.plan.models.EXPERTS", "eager")
    with pytest.raises(UnplannableError, match="cannot be run without values"):
        peaks_of(small("qwen3_moe"), 1, 64)
