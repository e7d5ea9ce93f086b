"""State on the device: where a step fails, parameters were moved, or threads have other streams, no bit changes.

`tests/offload/test_resident_buckets.py` has the usual ways there and back.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.overlap import PlantedError, fail_at
from support.strategies import USUAL
from support.visible import bits
from torch import Tensor, nn

from superadam.devices import Stream
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters, Scale
from superadam.state.parameter import ARRAYS, ParameterState
from superadam.state.resident import ResidentStates
from superadam.state.table import CoefficientTable
from superadam.testing import SimulatedDevice

SHAPES = [(), (0, 3), (1,), (5, 7), (4097,), (2, 3, 4, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
AMSGRAD = replace(USUAL, amsgrad=True)
Job = tuple[list[ParameterState], list[Tensor], list[int], list[Coefficients]]


class Household:
    """Some parameters whose state may be on a device, and how many steps they have made."""

    def __init__(self, eagerness: float = 0.5) -> None:
        self.device, self.steps = SimulatedDevice(3, eagerness), 0
        self.resident = ResidentStates(self.device)
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES for dtype in DTYPES]
        self.states = [
            ParameterState(nn.Parameter(one), row, f"p{row}", is_on_host=False) for row, one in enumerate(tensors)
        ]

    def job(self, rows: Sequence[int], hyper: Hyperparameters) -> Job:
        """Return the arguments of a step of these parameters, whose state is made where it is missing."""
        self.steps += 1
        states, table, generator = [self.states[row] for row in rows], CoefficientTable(), torch.Generator()
        for state in states:
            if hyper.amsgrad and state.max_exp_avg_sq is None:  # as `ParameterTable.create_state`
                self.resident.bring_home([state])
            state.create_state(with_max=hyper.amsgrad)
        gradients = [
            torch.randn(state.shape, generator=generator.manual_seed(self.steps)).to(state.parameter_dtype)
            for state in states
        ]
        indices = [table.index(hyper, self.steps, Scale(), state.is_double) for state in states]
        return states, gradients, indices, table.sets

    def step(self, hyper: Hyperparameters = USUAL, rows: Sequence[int] = range(len(SHAPES) * len(DTYPES))) -> None:
        self.resident.step(*self.job(rows, hyper))

    def at_home(self) -> list[ParameterState]:
        return [state for state in self.states if not self.resident.arrays_of(state)]

    def seen(self, states: Sequence[ParameterState]) -> list[object]:
        """Return all parameters, and the state of these on the host."""
        tensors = [state.parameter for state in self.states]
        tensors += [one for state in states for name in ARRAYS if (one := getattr(state, name)) is not None]
        return [bits(one) for one in tensors]

    def seen_at_home(self) -> list[object]:
        self.resident.bring_home(self.states)
        return self.seen(self.states)


@pytest.mark.parametrize("eagerness", [0.0, 0.8])
@pytest.mark.parametrize("begins", ["at home", "on the device", "on the device, without amsgrad", "some"])
@pytest.mark.parametrize("fails", ["empty", "copy", "update"])
def test_step_that_fails_changes_nothing(eagerness, fails, begins, monkeypatch):
    """Wherever it fails: it can be made again. The twin's state comes home before each step."""
    house, twin = Household(eagerness), Household(eagerness)
    for one in (house, twin) if begins != "at home" else ():
        one.step(USUAL if "without" in begins else AMSGRAD, range(9 if begins == "some" else len(one.states)))
    twin.resident.bring_home(twin.states)
    job, its_job = (one.job(range(len(one.states)), AMSGRAD) for one in (house, twin))
    were_at_home = house.at_home()
    for at in (1, 2, 4, 9):
        with monkeypatch.context() as patch, suppress(PlantedError):
            fail_at(patch, house.device, fails, at, PlantedError())
            house.resident.step(*job)
            break
        home = house.at_home()
        assert set(home) >= set(were_at_home)
        assert house.seen(home) == twin.seen([twin.states[state.row] for state in home])
    else:
        house.resident.step(*job)
    assert not house.at_home()
    twin.resident.step(*its_job)
    assert house.seen_at_home() == twin.seen_at_home()
    assert not house.device.has_memory_in_use


def test_parameters_whose_data_was_replaced() -> None:
    """By what is not dense any more: nothing between is written, and no version counts it."""
    house, twin = Household(), Household()
    for one in (house, twin):
        one.step()
    twin.resident.bring_home(twin.states)
    storages = []
    for state in house.states:
        values = state.parameter.data
        state.parameter.data = torch.stack([values, torch.full_like(values, torch.nan)], dim=-1)[..., 0]
        storages.append(torch.empty(0, dtype=values.dtype).set_(state.parameter.data.untyped_storage()))
    versions = [state.parameter._version for state in house.states]
    for one in (house, twin):
        one.step()
    assert [state.parameter._version for state in house.states] == versions
    assert [int(one.isnan().sum()) for one in storages] == [state.shape.numel() for state in house.states]
    assert house.seen_at_home() == twin.seen_at_home()


def test_streams_wait_for_one_another_and_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that reads the state has a current stream of its own, which has to wait for that of the step.

    State goes up on the stream whose memory it takes, and is recorded for the one that steps.
    """
    house = Household(0.0)
    calls = {name: list[Any]() for name in ("copy", "empty", "record", "record_stream", "wait")}

    def noted(name: str) -> None:
        call = getattr(house.device, name)

        def note(*arguments: object) -> object:
            result = call(*arguments)
            calls[name].append(result if name == "record" else arguments)
            return result

        monkeypatch.setattr(house.device, name, note)

    for name in calls:
        noted(name)
    house.step()
    last, held = calls["record"][-1], [house.resident.arrays_of(state).values() for state in house.states]
    assert {stream for _, _, stream in calls["copy"] + calls["empty"]} == {Stream.UPLOAD}
    assert (Stream.CURRENT, calls["record"][0]) in calls["wait"]
    recorded = {id(tensor) for tensor, stream in calls["record_stream"] if stream is Stream.CURRENT}
    assert {id(tensor) for arrays in held for tensor in arrays} == recorded
    house.resident.bring_home(house.states)
    assert (Stream.CURRENT, last) in calls["wait"]
