"""`superadam.cli.train.model`: causal, of the stated size, and computing alike in whatever dtype its weights are."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support.training_runs import DEVICES, TINY, TINY_SHAPE, are_same
from torch.utils._python_dispatch import TorchDispatchMode

from superadam.cli.train.llama import Decoder
from superadam.cli.train.model import ByteTransformer, build_model, next_byte_loss, parameter_groups
from superadam.cli.train.presets import Shape
from superadam.cli.train.settings import Settings


def test_default_model_has_a_few_million_parameters_in_bf16() -> None:
    parameters = list(build_model(Settings()).parameters())
    assert 2_000_000 < sum(p.numel() for p in parameters) < 5_000_000
    assert {p.dtype for p in parameters} == {torch.bfloat16}


MODELS = pytest.mark.parametrize("shape", [None, TINY_SHAPE])


@pytest.mark.parametrize(
    ("shape", "vocabulary", "within"),
    [
        (None, 256, 1e-6),  # logits are zeros at first
        (TINY_SHAPE, TINY_SHAPE.vocabulary, 0.1),  # random logits, small compared with 1
        (dataclasses.replace(TINY_SHAPE, tied=False), TINY_SHAPE.vocabulary, 0.1),
    ],
)
def test_initial_loss_is_that_of_a_guess(shape: Shape | None, vocabulary: int, within: float) -> None:
    model = build_model(dataclasses.replace(TINY, shape=shape))
    loss = next_byte_loss(model, torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(1)))
    assert loss.item() == pytest.approx(math.log(vocabulary), abs=within)


@MODELS
@pytest.mark.parametrize("position", [1, 5, 11])
def test_no_token_sees_a_later_one(shape: Shape | None, position: int) -> None:
    model = model_of_random_logits(shape)
    tokens = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, position] ^= 1
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :position], after[:, :position])
    assert not torch.equal(before[:, position:], after[:, position:])


@MODELS
def test_order_of_tokens_matters(shape: Shape | None) -> None:
    model = model_of_random_logits(shape)
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert not torch.equal(model(tokens)[0, -1], model(tokens[:, [1, 0, 2, 3]])[0, -1])


def model_of_random_logits(shape: Shape | None) -> ByteTransformer | Decoder:
    """Return a model in fp32 whose last matrix is no matrix of zeros."""
    model = build_model(dataclasses.replace(TINY, shape=shape, dtype="fp32"))
    if isinstance(model, ByteTransformer):
        with torch.no_grad():
            model.head.weight.normal_()
    return model


@MODELS
def test_cpu_computes_in_fp32_from_bf16_weights(shape: Shape | None) -> None:
    narrow, wide = (build_model(dataclasses.replace(TINY, shape=shape, dtype=dtype)) for dtype in ("bf16", "fp32"))
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_decoder_is_drawn_on_its_device_in_its_dtype(dtype: str, device: str) -> None:
    settings = dataclasses.replace(TINY, shape=TINY_SHAPE, dtype=dtype, device=device)
    before = torch.get_rng_state()
    model = build_model(settings)
    assert {(p.device.type, str(p.dtype)[6:]) for p in model.parameters()} == {
        (device, {"bf16": "bfloat16", "fp32": "float32"}[dtype])
    }
    assert all(p.isfinite().all() for p in model.parameters())
    assert {bool((p == 1.0).all()) for p in model.parameters() if p.dim() == 1} == {True}
    assert are_same(model.state_dict(), build_model(settings).state_dict())
    assert not are_same(model.state_dict(), build_model(dataclasses.replace(settings, seed=1)).state_dict())
    assert torch.equal(before, torch.get_rng_state())


def test_decoder_never_lies_in_host_memory_in_fp32() -> None:
    made: list[tuple[str, torch.dtype, int]] = []

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                made.append((result.device.type, result.dtype, result.numel()))
            return result

    with Recording():
        build_model(dataclasses.replace(TINY, shape=TINY_SHAPE))
    largest = max(numel for device, dtype, numel in made if (device, dtype) == ("cpu", torch.bfloat16))
    assert largest == TINY_SHAPE.vocabulary * TINY_SHAPE.width
    assert not [entry for entry in made if entry[0] == "cpu" and entry[1] == torch.float32 and entry[2] > 1]


def test_byte_model_is_the_same_on_every_device_and_with_checkpoints() -> None:
    models = [
        build_model(dataclasses.replace(TINY, device=device, checkpointing=checkpointing)).cpu()
        for device in DEVICES
        for checkpointing in (False, True)
    ]
    assert all(are_same(models[0].state_dict(), model.state_dict()) for model in models)
