"""Moments in bf16 as a user meets them: what is stored, what is loaded from where, and what never changes."""

import math
from typing import Any

import pytest
import torch
from support.optimizers import EACH_DTYPE, make, train_alike, trained
from support.visible import bits, parameters_of, train
from torch import Tensor, nn

from superadam import SpeculativeCPUAdam, SpeculativeCPUAdamW
from superadam.testing import round_by_thresholds

MOMENTS = ("exp_avg", "exp_avg_sq")


def entries(optimizer: Any) -> list[dict[str, Tensor]]:
    """Return the state of each parameter."""
    return list(optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("value", ["bfloat16", "BF16", "", None, 16, torch.bfloat16, ["bf16"]])
def test_other_values_are_refused_in_one_sentence(value: Any) -> None:
    for cls in (SpeculativeCPUAdam, SpeculativeCPUAdamW):
        with pytest.raises(ValueError, match=r"^moments is .*, expected 'fp32' or 'bf16'") as caught:
            cls([nn.Parameter(torch.ones(3))], moments=value)
        assert "\n" not in str(caught.value)


@EACH_DTYPE
@pytest.mark.parametrize("amsgrad", [False, True])
def test_moments_are_bf16_tensors_of_the_parameters_shape(dtype: torch.dtype, amsgrad: bool) -> None:
    optimizer = trained(make(dtype, moments="bf16", amsgrad=amsgrad))
    assert optimizer.moments == "bf16"
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for parameter in parameters_of(optimizer):
        entry = optimizer.state[parameter]
        kinds = {key: value.dtype for key, value in entry.items() if key not in ("step", "master")}
        expected = torch.float64 if dtype == torch.float64 else torch.bfloat16
        assert kinds == dict.fromkeys((*MOMENTS, "max_exp_avg_sq")[: 2 + amsgrad], expected)
        assert all(value.shape == parameter.shape for key, value in entry.items() if key != "step")
        assert entry.get("master", parameter).dtype == wide


@pytest.mark.parametrize("amsgrad", [False, True])
def test_fp64_parameters_have_the_bits_of_fp64_moments(amsgrad: bool) -> None:
    plain, ours = (make(torch.float64, moments=moments, amsgrad=amsgrad) for moments in ("fp32", "bf16"))
    train_alike(ours, plain, 0, 1, 2)


def mean_after(steps: int, gradient: float, **options: Any) -> tuple[float, float]:
    """Return the means of both moments after steps with one gradient everywhere, without what they lack at first."""
    parameter = nn.Parameter(torch.zeros(640))
    optimizer = SpeculativeCPUAdam([parameter], lr=0.0, moments="bf16", **options)
    for _ in range(steps):
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    means = [optimizer.state[parameter][key].double().mean().item() for key in MOMENTS]
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    return means[0] / (1 - beta1**steps), means[1] / (1 - beta2**steps)


@pytest.mark.parametrize("gradient", [1.0, -3e-9, 1e-12, 1e-39], ids=str)
def test_moments_follow_gradients_of_any_size(gradient: float) -> None:
    """To nearest, a moment stops where what a step adds is less than half of its last bit."""
    first, second = mean_after(300, gradient)
    assert first == pytest.approx(gradient, rel=0.01)
    if abs(gradient) > 1e-16:  # its square is a normal number
        assert second == pytest.approx(gradient**2, rel=0.02)


@pytest.mark.parametrize("key", MOMENTS)
@pytest.mark.parametrize("bits_of_nan", [0x7FFFFFFF, 0x7F810000, -1])
@pytest.mark.parametrize("storage", [("bf16", "fp32"), ("fp32", "24bit"), ("bf16", "24bit")], ids=str)
def test_nan_of_any_bits_and_infinity_stay(storage: tuple[str, str], bits_of_nan: int, key: str) -> None:
    """A threshold that is added to the largest of them would make a number of it."""
    parameter = nn.Parameter(torch.zeros(2, 64).bfloat16())
    optimizer = SpeculativeCPUAdam([parameter], moments=storage[0], master=storage[1])
    for _ in range(3):
        parameter.grad = torch.ones(2, 64).bfloat16()
        optimizer.step()
        if optimizer.state[parameter]["step"] == 1:
            moment = optimizer.state[parameter][key]
            width = torch.int32 if moment.dtype == torch.float32 else torch.int16
            moment[1].view(width).fill_(bits_of_nan if width == torch.int32 else bits_of_nan >> 16)
            optimizer.state[parameter]["exp_avg_sq"][0, 5] = math.inf
            del moment
    state = optimizer.state[parameter]
    for values in (parameter, state[key], state["master"]):
        assert values.isnan().tolist() == [[False] * 64, [True] * 64]
    assert state["exp_avg_sq"].isinf().nonzero().tolist() == [[0, 5]]


@pytest.mark.parametrize("begin", [1, 2**24 - 1, 2**24 + 1, 2**32 - 1, 2**40])
def test_every_step_has_its_own_thresholds(begin: int) -> None:
    optimizers = [SpeculativeCPUAdam([nn.Parameter(torch.ones(130))], moments=how) for how in ("fp32", "bf16")]
    for optimizer in optimizers:
        train(optimizer, 0)
        saved = optimizer.state_dict()
        saved["state"][0]["step"] = torch.tensor(float(begin), dtype=torch.float64)
        optimizer.load_state_dict(saved)
    plain, ours = optimizers
    for step in range(begin + 1, begin + 4):
        saved = plain.state_dict()
        saved["state"][0] |= {key: entries(ours)[0][key] for key in MOMENTS}  # bf16 is widened
        plain.load_state_dict(saved)
        for optimizer in optimizers:
            train(optimizer, step)
        for wide, narrow in [(entries(plain)[0][key], entries(ours)[0][key]) for key in MOMENTS]:
            assert bits(narrow.float()) == bits(round_by_thresholds(wide, step, 16))
            assert bits(narrow.float()) != bits(round_by_thresholds(wide, step + 1, 16))
        assert entries(ours)[0]["step"] == step
