"""Moments in bf16 as a user meets them: what is stored, what is loaded from where, and what never changes."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from support.optimizers import EACH_DTYPE, EACH_PAIR, copy_weights, make, through_disk, train_alike, trained
from support.visible import bits, give_gradients, parameters_of, refused, state_bits, train
from torch import Tensor, nn
from torch.distributed.checkpoint import load as load_distributed
from torch.distributed.checkpoint import save as save_distributed
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from superadam import OffloadScheduler, SpeculativeCPUAdam, SpeculativeCPUAdamW
from superadam.testing import SimulatedDevice, round_by_thresholds

MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def entries(optimizer: Any) -> list[dict[str, Tensor]]:
    """Return the state of each parameter."""
    return list(optimizer.state_dict()["state"].values())


def stored(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    return [(entry["exp_avg"], entry["exp_avg_sq"]) for entry in entries(optimizer)]


# -- what is stored ----------------------------------------------------------------------------------------------------


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


class Reference:
    """torch's Adam or AdamW over flat fp32 copies, whose moments are rounded after each step."""

    def __init__(self, optimizer: Any, cls: type[torch.optim.Optimizer], **options: Any) -> None:
        self.optimizer = optimizer
        self.copies = [nn.Parameter(one.detach().clone().float().flatten()) for one in parameters_of(optimizer)]
        self.theirs = cls(self.copies, fused=True, **options)  # type: ignore[call-arg]

    def copy_gradients(self) -> None:
        """Take those that the optimizer's parameters have."""
        for one, parameter in zip(self.copies, parameters_of(self.optimizer), strict=True):
            assert parameter.grad is not None
            one.grad = parameter.grad.detach().clone().float().flatten()

    def step(self) -> None:
        """Make a step, and let the next one continue from what is stored."""
        self.theirs.step()
        for state in self.theirs.state.values():
            for key in MOMENTS:
                state[key].copy_(round_by_thresholds(state[key], int(state["step"]), 16))
            if "max_exp_avg_sq" in state:
                state["max_exp_avg_sq"].copy_(state["max_exp_avg_sq"].bfloat16())

    def check(self) -> None:
        """Compare every bit."""
        for copied, parameter in zip(self.copies, parameters_of(self.optimizer), strict=True):
            ours, theirs = self.optimizer.state[parameter], self.theirs.state[copied]
            assert bits(ours.get("master", parameter).flatten()) == bits(copied)
            for key in theirs.keys() - {"step"}:
                assert ours[key].dtype == torch.bfloat16
                assert bits(ours[key].float().flatten()) == bits(theirs[key]), key


@EACH_PAIR
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True, "eps": 0.0}], ids=str)
@pytest.mark.usefixtures("one_torch_thread")
def test_steps_are_those_of_torch_whose_moments_are_rounded(
    ours: type, theirs: type, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((64,), (5, 128), (4, 4, 8))]
    optimizer = ours(parameters, moments="bf16", **{**OPTIONS, **options})
    reference = Reference(optimizer, theirs, **{**OPTIONS, **options})
    for seed in range(12):
        give_gradients(optimizer, seed, 10.0 ** (seed % 4 - 2))
        reference.copy_gradients()
        if seed % 3:
            optimizer.speculate()
        optimizer.step()
        reference.step()
        if seed % 4 == 3:  # otherwise commits come later
            reference.check()


def test_positions_are_those_in_memory() -> None:
    """Of a transposed parameter, the order of memory is not that of its elements."""
    base = torch.randn(6, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
    gradient = torch.randn(6, 70, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = [nn.Parameter(base.clone()), nn.Parameter(base.clone().t())]
    optimizer = SpeculativeCPUAdam(ours, moments="bf16")
    for _ in range(3):
        ours[0].grad, ours[1].grad = gradient.clone(), gradient.clone().t()
        optimizer.step()
    first, second = (optimizer.state[one] for one in ours)
    for key in MOMENTS:
        assert second[key].stride() == (1, 70)
        assert bits(first[key]) == bits(second[key].t())


# -- numbers at the edge -----------------------------------------------------------------------------------------------


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


def test_moments_are_no_longer_followed_when_rounded_to_nearest() -> None:
    """What the test above can notice."""
    v = torch.zeros(64)
    for _ in range(3000):
        v = (v * 0.999 + 0.001).bfloat16().float()
    assert v.tolist() == [0.25] * 64


def test_nan_and_infinity_in_the_state_stay() -> None:
    parameter = nn.Parameter(torch.zeros(70))
    optimizer = SpeculativeCPUAdam([parameter], moments="bf16")
    for _ in range(3):
        parameter.grad = torch.ones(70)
        optimizer.step()
        state = optimizer.state[parameter]
        if state["step"] == 1:
            state["exp_avg"][3] = math.nan
            state["exp_avg_sq"].view(torch.int16)[4] = 0x7F81  # a NaN whose upper bits are few
            state["exp_avg_sq"][5] = math.inf
    state = optimizer.state[parameter]
    assert state["exp_avg"].isnan().nonzero().flatten().tolist() == [3]
    assert state["exp_avg_sq"].isnan().nonzero().flatten().tolist() == [4]
    assert state["exp_avg_sq"].isinf().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("bits_of_nan", [0x7FFFFFFF, 0x7F800001, -1])
@pytest.mark.parametrize(("moments", "master"), [("bf16", "fp32"), ("fp32", "24bit"), ("bf16", "24bit")])
def test_nan_of_any_bits_stays_nan(moments: str, master: str, bits_of_nan: int) -> None:
    """A threshold that is added to the largest of them would make a number of it."""
    parameter = nn.Parameter(torch.zeros(2, 64).bfloat16())
    optimizer = SpeculativeCPUAdam([parameter], moments=moments, master=master)
    for _ in range(3):
        parameter.grad = torch.ones(2, 64).bfloat16()
        optimizer.step()
        if optimizer.state[parameter]["step"] == 1:
            first = optimizer.state[parameter]["exp_avg"]
            width = torch.int32 if first.dtype == torch.float32 else torch.int16
            first[1].view(width).fill_(bits_of_nan if width == torch.int32 else bits_of_nan >> 16 | 0x7F)
            del first
    state = optimizer.state[parameter]
    for values in (parameter, state["exp_avg"], state["master"]):
        assert values.isnan().tolist() == [[False] * 64, [True] * 64]


@pytest.mark.parametrize("begin", [2**24 - 1, 2**24 + 1, 2**32 - 1, 2**40])
def test_steps_that_fp32_does_not_count_have_their_own_thresholds(begin: int) -> None:
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
        for wide, narrow in zip(stored(plain)[0], stored(ours)[0], strict=True):
            assert bits(narrow.float()) == bits(round_by_thresholds(wide, step, 16))
            assert bits(narrow.float()) != bits(round_by_thresholds(wide, step + 1, 16))
        assert entries(ours)[0]["step"] == step


# -- what is loaded ----------------------------------------------------------------------------------------------------


@EACH_PAIR
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fp32_moments_are_rounded_to_nearest_when_loaded(ours: type, theirs: type, dtype: torch.dtype) -> None:
    for cls in (ours, theirs):
        source = trained(make(dtype, cls, amsgrad=True, **OPTIONS))
        optimizer = make(dtype, ours, moments="bf16")
        copy_weights(optimizer, source)
        optimizer.load_state_dict(through_disk(source.state_dict()))
        for mine, entry in zip(entries(optimizer), entries(source), strict=True):
            for key in (*MOMENTS, "max_exp_avg_sq"):
                assert bits(mine[key]) == bits(entry[key].bfloat16())
            assert "master" not in entry or bits(mine["master"]) == bits(entry["master"])
        assert optimizer.moments == "bf16"
        trained(optimizer, [2])
        assert {one.dtype for pair in stored(optimizer) for one in pair} == {torch.bfloat16}


@pytest.mark.parametrize("how", ["fp32", "bf16"])
def test_tensors_of_another_dtype_that_are_put_into_the_state_are_converted(how: str) -> None:
    optimizer, other = (make(torch.bfloat16, moments=moments, **OPTIONS) for moments in (how, "fp32"))
    trained(optimizer)
    trained(other)
    for parameter, theirs in zip(parameters_of(optimizer), parameters_of(other), strict=True):
        for key in MOMENTS:
            value = other.state[theirs][key] * 1.01
            optimizer.state[parameter][key] = value if how == "bf16" else value.bfloat16()
    del value  # what a program has stays in the state as it is
    saved = copy.deepcopy(optimizer.state_dict())
    assert {entry[key].dtype for entry in saved["state"].values() for key in MOMENTS} == {
        torch.bfloat16 if how == "bf16" else torch.float32
    }
    loaded = make(torch.bfloat16, moments=how)
    copy_weights(loaded, optimizer)
    loaded.load_state_dict(saved)
    train_alike(loaded, optimizer, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_bf16_moments_are_widened_and_come_back(dtype: torch.dtype, amsgrad: bool) -> None:
    source = trained(make(dtype, moments="bf16", amsgrad=amsgrad, **OPTIONS))
    wide, back = make(dtype), make(dtype, moments="bf16")
    for optimizer, saved in ((wide, source), (back, wide)):
        copy_weights(optimizer, source)
        optimizer.load_state_dict(saved.state_dict())
    assert wide.moments == "fp32"
    for mine, entry in zip(entries(wide), entries(source), strict=True):
        keys = set(mine) - {"step", "master"}
        assert all(mine[key].dtype == torch.float32 for key in keys)
        assert all(bits(mine[key]) == bits(entry[key].float()) for key in keys)
    assert state_bits(back) == state_bits(source)
    train_alike(back, source, 2, 3)


@EACH_PAIR
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_loads_them(ours: type, theirs: type, dtype: torch.dtype) -> None:
    """And goes on with the moments in the parameter's dtype, which are the same numbers."""
    source = trained(make(dtype, ours, moments="bf16", **OPTIONS))
    other = make(dtype, theirs)
    other.load_state_dict(source.torch_state_dict())
    for entry, mine in zip(entries(other), entries(source), strict=True):
        assert all(bits(entry[key].float()) == bits(mine[key].float()) for key in MOMENTS)
        assert all(entry[key].dtype == dtype for key in MOMENTS)
    trained(other, [2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "state dict"])
def test_copies_train_on_with_the_same_bits(dtype: torch.dtype, way: str) -> None:
    source = trained(make(dtype, moments="bf16", amsgrad=True, **OPTIONS))
    if way == "state dict":
        copied = make(dtype, moments="bf16")
        copy_weights(copied, source)
        copied.load_state_dict(through_disk(source.state_dict()))
    elif way == "torch.save":
        copied = through_disk(source, weights_only=False)
    else:
        copied = copy.deepcopy(source) if way == "deepcopy" else pickle.loads(pickle.dumps(source))
    assert copied.moments == "bf16"
    assert state_bits(copied) == state_bits(source)
    train_alike(copied, source, 2, 3, 4)


def test_pickles_that_say_nothing_of_moments_have_fp32() -> None:
    source = trained(make(torch.bfloat16))
    older_keys = ("defaults", "param_groups", "statistics", "_verdicts", "state")
    state = {key: value for key, value in source.__getstate__().items() if key in older_keys}
    older = SpeculativeCPUAdamW.__new__(SpeculativeCPUAdamW)
    older.__setstate__(pickle.loads(pickle.dumps(state)))
    assert older.moments == "fp32"
    train_alike(older, source, 2)


def test_moments_of_a_wrong_shape_are_refused() -> None:
    optimizer = trained(make(torch.bfloat16, moments="bf16"))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].byte()
    with refused(optimizer, ValueError, "exp_avg of .* is .*, expected floats of shape"):
        optimizer.load_state_dict(saved)


class Model(nn.Sequential):
    """Three layers, whose lengths are no multiples of 64."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 3))
        self.to(dtype)


def steps(model: nn.Module, optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        values = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
        model(values).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_torch_distributed_checkpoint_keeps_the_bits_of_training(
    dtype: torch.dtype, amsgrad: bool, tmp_path: Any
) -> None:
    model, other = Model(dtype, 0), Model(dtype, 1)
    optimizer = SpeculativeCPUAdamW(model.parameters(), amsgrad=amsgrad, moments="bf16")
    steps(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer)
    save_distributed({"model": model.state_dict(), "optimizer": state}, checkpoint_id=tmp_path)
    loaded = SpeculativeCPUAdamW(other.parameters(), amsgrad=amsgrad, moments="bf16")
    template = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, loaded)}
    load_distributed(template, checkpoint_id=tmp_path)
    other.load_state_dict(template["model"])
    set_optimizer_state_dict(other, loaded, template["optimizer"])
    assert state_bits(loaded) == state_bits(optimizer)
    for one, two in ((model, optimizer), (other, loaded)):
        steps(one, two, range(3, 6))
    assert state_bits(loaded) == state_bits(optimizer)


# -- in training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [0, 2])
def test_a_run_that_is_saved_and_resumed_is_the_run_that_never_stopped(resident: int) -> None:
    whole, parts = Model(torch.bfloat16, 0), Model(torch.bfloat16, 0)
    optimizer = SpeculativeCPUAdamW(whole.parameters(), lr=0.01, max_grad_norm=1.0, moments="bf16")
    steps(whole, optimizer, range(8))
    saved: dict[str, Any] = {}
    for seeds in (range(3), range(3, 8)):
        model = Model(torch.bfloat16, 7) if saved else parts
        ours = SpeculativeCPUAdamW(model.parameters(), lr=0.01, max_grad_norm=1.0, moments="bf16")
        if saved:
            model.load_state_dict(saved["model"])
            ours.load_state_dict(saved["optimizer"])
        device = SimulatedDevice(3)
        with OffloadScheduler(ours, model, device=device, bucket_numel=70, gpu_buckets=resident, num_threads=1):
            steps(model, ours, seeds)
            saved = through_disk({"model": model.state_dict(), "optimizer": ours.state_dict()})
    assert state_bits(ours) == state_bits(optimizer)


def test_results_are_others_than_with_fp32_from_the_second_step_on() -> None:
    plain, ours = (make(torch.float32, moments=moments, lr=0.01) for moments in ("fp32", "bf16"))
    for seed in range(2):
        trained(plain, [seed])
        trained(ours, [seed])
        same = [bits(one) == bits(two) for one, two in zip(parameters_of(plain), parameters_of(ours), strict=True)]
        assert same == [seed == 0] * 2


def test_half_of_the_moments_memory_is_saved() -> None:
    sizes = []
    for moments in ("fp32", "bf16"):
        optimizer = trained(make(torch.bfloat16, moments=moments))
        sizes.append(sum(entries(optimizer)[0][key].untyped_storage().nbytes() for key in (*MOMENTS, "master")))
    assert sizes == [70 * 12, 70 * 8]
