"""`superadam.cli.train.llama`: causal, with shared keys and values, and a loss that is that of all logits at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training_runs import TINY, TINY_SHAPE, are_same
from torch import Tensor
from torch.nn import functional

from superadam.cli.train import llama
from superadam.cli.train.llama import Decoder
from superadam.cli.train.model import build_model, next_byte_loss


def decoder(dtype: str = "fp32", checkpointing: bool = False, **changes: Any) -> Decoder:
    shape = dataclasses.replace(TINY_SHAPE, **changes)
    model = build_model(dataclasses.replace(TINY, dtype=dtype, shape=shape, checkpointing=checkpointing))
    assert isinstance(model, Decoder)
    return model


def windows(rows: int = 2, seq: int = 12) -> Tensor:
    return torch.randint(0, 256, (rows, seq + 1), generator=torch.Generator().manual_seed(1))


def gradients(model: Decoder, data: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    next_byte_loss(model, data).backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@settings(max_examples=max(1, settings.default.max_examples // 4))
@given(
    dtype=st.sampled_from(["bf16", "fp32"]),
    tied=st.booleans(),
    query_key_norm=st.booleans(),
    rows=st.integers(1, 3),
    seq=st.integers(1, 20),
)
def test_gradients_through_checkpoints_are_the_same_bits(
    dtype: str, tied: bool, query_key_norm: bool, rows: int, seq: int
) -> None:
    data = windows(rows, seq)
    with_, without = (
        gradients(decoder(dtype, checkpointing, tied=tied, query_key_norm=query_key_norm), data)
        for checkpointing in (True, False)
    )
    assert len(with_) == len(list(decoder(tied=tied, query_key_norm=query_key_norm).parameters()))
    assert are_same(with_, without)


def test_checkpointing_keeps_less_for_backward() -> None:
    data = windows()

    def kept(checkpointing: bool) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        model = decoder(checkpointing=checkpointing)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            next_byte_loss(model, data)
        return total

    assert kept(True) < kept(False) / 3


@pytest.mark.parametrize("at_once", [1, 300 * 7, 300 * 24, 1 << 28])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_in_parts_is_the_loss_of_all_logits(at_once: int, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "LOGITS_AT_ONCE", at_once)
    model, data = decoder(tied=tied), windows()
    found = gradients(model, data)
    loss = next_byte_loss(model, data)
    model.zero_grad()
    whole = functional.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
    whole.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0.0)  # fp32, summed in another order
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_loss_never_holds_more_logits_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "LOGITS_AT_ONCE", 5 * TINY_SHAPE.vocabulary)
    rows: list[int] = []
    linear = functional.linear

    def counting(x: Tensor, weight: Tensor) -> Tensor:
        if len(weight) == TINY_SHAPE.vocabulary:
            rows.append(len(x))
        return linear(x, weight)

    monkeypatch.setattr(functional, "linear", counting)
    gradients(decoder(), windows())
    assert rows == [5, 5, 5, 5, 4, *(4, 5, 5, 5, 5)]  # forward, and backward from its end


def test_shared_keys_and_values_are_those_of_a_group_of_heads() -> None:
    shared = decoder()
    full = decoder(key_value_heads=TINY_SHAPE.heads)
    weights = shared.state_dict()
    group, head_width = TINY_SHAPE.heads // TINY_SHAPE.key_value_heads, TINY_SHAPE.head_width
    for name, weight in weights.items():
        if name.endswith(("key.weight", "value.weight")):
            weights[name] = weight.unflatten(0, (-1, head_width)).repeat_interleave(group, 0).flatten(0, 1)
    full.load_state_dict(weights)
    tokens = windows()
    torch.testing.assert_close(full(tokens), shared(tokens), rtol=1e-5, atol=1e-6)
