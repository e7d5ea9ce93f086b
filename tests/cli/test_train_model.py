"""`superadam.cli.train.model`: causal, with shared keys and values, drawn on its device, with a loss in parts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training_runs import DEVICES, are_same
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from superadam.cli.train import model as model_module
from superadam.cli.train.model import Decoder, Norm, build_model, next_byte_loss, parameter_groups, rotated, rotations
from superadam.cli.train.presets import PRESETS, Shape

TINY = PRESETS["tiny"].shape
UNTIED = dataclasses.replace(TINY, tied=False, query_key_norm=False, layers=2)
SHAPES = pytest.mark.parametrize("shape", [TINY, UNTIED], ids=["tied", "untied"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def decoder(shape: Shape = TINY, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any) -> Decoder:
    return build_model(shape, dtype, torch.device(device), **options)


def windows(rows: int = 2, seq: int = 12) -> Tensor:
    return torch.randint(0, 256, (rows, seq + 1), generator=torch.Generator().manual_seed(1))


def gradients(model: Decoder, data: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    next_byte_loss(model, data).backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@given(
    half=st.integers(1, 8),
    first=st.integers(0, 20),
    distance=st.integers(0, 20),
    shift=st.integers(0, 20),
    base=st.sampled_from([10_000.0, 500_000.0]),
)
def test_products_of_turned_vectors_depend_on_their_distance_alone(
    half: int, first: int, distance: int, shift: int, base: float
) -> None:
    generator = torch.Generator().manual_seed(half)
    query, key = torch.randn(2, 2 * half, dtype=torch.float64, generator=generator)
    turn = rotations(64, 2 * half, like=query, base=base)

    def product(at: int) -> Tensor:
        queries, keys = (rotated(vector.expand(1, 1, 64, -1), turn)[0, 0] for vector in (query, key))
        return queries[at] @ keys[at + distance]

    torch.testing.assert_close(product(first), product(first + shift), rtol=0.0, atol=1e-4)  # angles are fp32


@settings(max_examples=max(1, settings.default.max_examples // 4))
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    shape=st.sampled_from([TINY, UNTIED]),
    rows=st.integers(1, 3),
    seq=st.integers(1, 20),
)
def test_gradients_through_checkpoints_are_the_same_bits(dtype: torch.dtype, shape: Shape, rows: int, seq: int) -> None:
    data = windows(rows, seq)
    with_, without = (gradients(decoder(shape, dtype, checkpointing=again), data) for again in (True, False))
    assert len(with_) == len(list(decoder(shape).parameters()))
    assert are_same(with_, without)


def test_checkpointing_keeps_less_for_backward() -> None:
    def kept(checkpointing: bool) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        model = decoder(UNTIED, checkpointing=checkpointing)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            next_byte_loss(model, windows())
        return total

    assert kept(True) < kept(False) / 3


@pytest.mark.parametrize("at_once", [1, 260 * 7, 1 << 28])
@SHAPES
def test_loss_in_parts_is_the_loss_of_all_logits(at_once: int, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "LOGITS_AT_ONCE", at_once)
    rows: list[int] = []
    linear = functional.linear

    def counting(x: Tensor, weight: Tensor) -> Tensor:
        if len(weight) == shape.vocabulary:
            rows.append(len(x))
        return linear(x, weight)

    model, data = decoder(shape), windows()
    with monkeypatch.context() as patched:
        patched.setattr(functional, "linear", counting)
        found = gradients(model, data)
    assert max(rows) <= max(1, at_once // shape.vocabulary)
    loss = next_byte_loss(model, data)
    model.zero_grad()
    whole = functional.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
    whole.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0.0)  # fp32, summed in another order
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_shared_keys_and_values_are_those_of_a_group_of_heads() -> None:
    shared, full = decoder(), decoder(dataclasses.replace(TINY, key_value_heads=TINY.heads))
    weights = shared.state_dict()
    group = TINY.heads // TINY.key_value_heads
    for name, weight in weights.items():
        if name.endswith(("key.weight", "value.weight")):
            weights[name] = weight.unflatten(0, (-1, TINY.head_width)).repeat_interleave(group, 0).flatten(0, 1)
    full.load_state_dict(weights)
    torch.testing.assert_close(full(windows()), shared(windows()), rtol=1e-5, atol=1e-6)


@SHAPES
def test_initial_loss_is_that_of_a_guess(shape: Shape) -> None:
    loss = next_byte_loss(decoder(shape), windows(8, 32))
    assert loss.item() == pytest.approx(math.log(shape.vocabulary), abs=0.1)  # random logits, small compared with 1


@SHAPES
def test_no_token_sees_a_later_one_and_their_order_matters(shape: Shape) -> None:
    model, tokens = decoder(shape), windows(1, 11)
    for position in (1, 5, 11):
        changed = tokens.clone()
        changed[0, position] ^= 1
        before, after = model(tokens), model(changed)
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position:], after[:, position:])
    four = torch.tensor([[1, 2, 3, 4]])
    assert not torch.equal(model(four)[0, -1], model(four[:, [1, 0, 2, 3]])[0, -1])


def test_cpu_computes_in_fp32_from_bf16_weights() -> None:
    narrow, wide = decoder(dtype=torch.bfloat16), decoder()
    wide.load_state_dict(narrow.state_dict())
    assert torch.equal(next_byte_loss(narrow, windows()), next_byte_loss(wide, windows()))
    assert Norm(4, dtype=torch.bfloat16)(torch.ones(2, 4)).dtype == torch.float32


def test_only_matrices_decay() -> None:
    model = decoder()
    decayed, kept = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}  # type: ignore[attr-defined]
    assert {p.dim() for p in kept["params"]} == {1}  # type: ignore[attr-defined]
    grouped = [id(p) for group in (decayed, kept) for p in group["params"]]  # type: ignore[attr-defined]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("device", DEVICES)
@DTYPES
def test_model_is_drawn_on_its_device_in_its_dtype(dtype: torch.dtype, device: str) -> None:
    before = torch.get_rng_state()
    model = decoder(TINY, dtype, device)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {(device, dtype)}
    assert all(p.isfinite().all() for p in model.parameters())
    assert {bool((p == 1.0).all()) for p in model.parameters() if p.dim() == 1} == {True}
    assert are_same(model.state_dict(), decoder(TINY, dtype, device).state_dict())
    assert not are_same(model.state_dict(), decoder(TINY, dtype, device, seed=1).state_dict())
    assert torch.equal(before, torch.get_rng_state())


def test_bf16_model_never_lies_in_host_memory_in_fp32() -> None:
    made: list[tuple[str, torch.dtype, int]] = []

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                made.append((result.device.type, result.dtype, result.numel()))
            return result

    with Recording():
        decoder(dtype=torch.bfloat16)
    assert max(numel for device, dtype, numel in made if (device, dtype) == ("cpu", torch.bfloat16)) == 260 * 16
    assert not [entry for entry in made if entry[:2] == ("cpu", torch.float32) and entry[2] > 1]
