"""A `StateTier` of one's own: whatever holds the state of `gpu_buckets`, the bits are those without it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.overlap import adam, everything, loss_of, mlp
from torch import Tensor

from superadam import OffloadScheduler, StepKind
from superadam.devices import Device, Stream
from superadam.kernels import formula
from superadam.kernels.hyperparameters import Coefficients
from superadam.state import ParameterState, StateTier
from superadam.testing import SimulatedDevice

NAMES = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class FileTier(StateTier):
    """Keeps state in files, and makes steps with the formula in numpy: slow, and exact."""

    def __init__(self, folder: Path, device: Device) -> None:
        self.folder, self.device = folder, device
        self.held: dict[ParameterState, dict[str, npt.NDArray[Any]]] = {}
        self.is_full = False
        self.steps = 0

    def holds(self, state: ParameterState) -> bool:
        return state in self.held

    def bring_home(self, states: Iterable[ParameterState]) -> None:
        for state in states:
            for name, values in self.held.pop(state, {}).items():
                in_memory_order(getattr(state, name)).copy_(torch.from_numpy(np.array(values)))

    def update(
        self,
        states: Sequence[ParameterState],
        gradients: Sequence[Tensor],
        indices: Sequence[int],
        sets: Sequence[Coefficients],
    ) -> None:
        if self.is_full:
            raise torch.OutOfMemoryError("the disk is full")
        for state, gradient, index in zip(states, gradients, indices, strict=True):
            tensors = {name: tensor for name in NAMES if (tensor := getattr(state, name)) is not None}
            if self.held.get(state, {}).keys() != tensors.keys():
                self.bring_home([state])
                self.held[state] = {name: self.moved(state, name, tensor) for name, tensor in tensors.items()}
            held = self.held[state]
            arrived = self.device.host_empty(gradient.numel(), gradient.dtype)
            self.device.copy(arrived, in_memory_order(gradient), Stream.CURRENT)
            self.device.record(Stream.CURRENT).synchronize()
            wide = arrived.to(state.dtype).numpy()
            vmax = held.get("max_exp_avg_sq", np.zeros_like(wide))
            p, m, v, vmax = formula.adam_formula(
                sets[index], wide, held["exp_avg"], held["exp_avg_sq"], vmax, held["master"]
            )
            for name, values in zip(NAMES, (p, m, v, vmax), strict=True):
                if name in held:
                    held[name][:] = values
            shown = torch.from_numpy(np.array(p)).to(state.parameter_dtype)
            state.parameter.data.copy_(shown.as_strided(state.shape, state.strides))
            self.steps += 1

    def moved(self, state: ParameterState, name: str, tensor: Tensor) -> npt.NDArray[Any]:
        """Return the values in a file."""
        values = in_memory_order(tensor).numpy()
        path = self.folder / f"{state.row}.{name}"
        there = np.memmap(path, values.dtype, "w+", shape=values.shape)
        there[:] = values
        return there


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor."""
    return tensor.as_strided((tensor.numel(),), (1,))


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_in_files_has_the_bits_of_state_in_memory(tmp_path: Path, dtype: torch.dtype, amsgrad: bool) -> None:
    models = mlp(dtype), mlp(dtype)
    plain, ours = (adam(model, amsgrad=amsgrad) for model in models)
    device = SimulatedDevice(1, 0.5)
    tier, kinds = FileTier(tmp_path, device), set()
    with OffloadScheduler(ours, models[1], device=device, tier=tier, gpu_buckets=2, bucket_numel=70) as scheduler:
        for seed in range(12):
            for model, optimizer in zip(models, (plain, ours), strict=True):
                loss_of(model, seed).backward()
                if seed == 4:
                    next(model.parameters()).grad[0, 0] = torch.inf
                optimizer.step()
                optimizer.zero_grad()
            kinds.add(ours.last_outcome.kind)
            if seed % 4 == 3:  # reading brings it home
                for one, other in zip(plain.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
                    assert all(
                        torch.equal(plain.state[one][name], ours.state[other][name]) for name in plain.state[one]
                    )
                assert not tier.held
        assert scheduler.statistics.resident_buckets > 5
    assert tier.steps > 10
    assert kinds == set(StepKind)
    assert everything(models[1], ours) == everything(models[0], plain)
    assert not tier.held


def test_tier_that_is_full_leaves_the_step_to_the_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = mlp(torch.bfloat16), mlp(torch.bfloat16)
    plain, ours = map(adam, models)
    device = SimulatedDevice(2, 0.5)
    tier = FileTier(tmp_path, device)
    with OffloadScheduler(ours, models[1], device=device, tier=tier, gpu_buckets=2, bucket_numel=70) as scheduler:
        for seed in range(6):
            tier.is_full = seed == 3
            for model, optimizer in zip(models, (plain, ours), strict=True):
                loss_of(model, seed).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert scheduler.placement.gpu_buckets == 1
        assert ours.statistics.displaced > 0
    assert "no memory left for the state of 2 buckets" in caplog.text
    assert everything(models[1], ours) == everything(models[0], plain)
