"""`superadam.training.model`: causal, of the stated size, and computing alike in whatever dtype its weights are."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from training_runs import TINY

from superadam.training.model import build_model, next_byte_loss, parameter_groups
from superadam.training.settings import Settings


def test_default_model_has_a_few_million_parameters_in_bf16() -> None:
    parameters = list(build_model(Settings()).parameters())
    assert 2_000_000 < sum(p.numel() for p in parameters) < 5_000_000
    assert {p.dtype for p in parameters} == {torch.bfloat16}


def test_initial_loss_is_that_of_a_guess() -> None:
    loss = next_byte_loss(build_model(TINY), torch.randint(0, 256, (2, 9)))
    assert loss.item() == pytest.approx(math.log(256), rel=1e-6)  # fp32 has 24 bits


@pytest.mark.parametrize("position", [1, 5, 11])
def test_no_byte_sees_a_later_one(position: int) -> None:
    model = build_model(TINY)
    with torch.no_grad():
        model.head.weight.normal_()
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, position] ^= 1
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :position], after[:, :position])
    assert not torch.equal(before[:, position:], after[:, position:])


def test_order_of_bytes_matters() -> None:
    model = build_model(TINY)
    with torch.no_grad():
        model.head.weight.normal_()
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert not torch.equal(model(tokens)[0, -1], model(tokens[:, [1, 0, 2, 3]])[0, -1])


def test_cpu_computes_in_fp32_from_bf16_weights() -> None:
    narrow = build_model(TINY)
    wide = build_model(dataclasses.replace(TINY, dtype="fp32"))
    wide.load_state_dict(narrow.state_dict())
    tokens = torch.randint(0, 256, (2, 9))
    assert torch.equal(next_byte_loss(narrow, tokens), next_byte_loss(wide, tokens))


def test_only_matrices_decay() -> None:
    model = build_model(TINY)
    decayed, kept = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}  # type: ignore[attr-defined]
    assert {p.dim() for p in kept["params"]} == {1}  # type: ignore[attr-defined]
    grouped = [id(p) for group in (decayed, kept) for p in group["params"]]  # type: ignore[attr-defined]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
