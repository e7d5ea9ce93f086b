"""State on the device: it goes there, is stepped there and comes back, bit for bit, and nothing stays behind."""

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import formula
from support.overlap import PlantedError
from support.reference import Synchronous, flat, same_bits
from support.strategies import USUAL, Magnitudes, hyperparameters, random_array
from torch import Tensor, nn

from superadam.devices import Device, PlainDevice, Stream
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters, Scale
from superadam.state.parameter import ParameterState
from superadam.state.resident import ResidentStates
from superadam.state.table import CoefficientTable
from superadam.testing import SimulatedDevice, stand_in

SHAPES = [(), (0,), (0, 3), (1,), (5, 7), (4097,), (2, 3, 4, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAYOUTS = ["contiguous", "permuted", "part of a larger one", "not dense"]


class PromptDevice(PlainDevice):
    """Does everything at once, with memory other than the host's."""

    can_update = True
    update = staticmethod(stand_in.update)

    def is_host(self, tensor: Tensor) -> bool:
        return False


DEVICES = {
    "prompt": PromptDevice,
    "lazy": lambda: SimulatedDevice(3, 0.0),
    "hasty": lambda: SimulatedDevice(4, 0.8),
}


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Return the values in a tensor that lies so."""
    match layout:
        case "permuted":
            order = tuple(range(values.ndim)[::-1])
            return values.permute(order).contiguous().permute(order)
        case "part of a larger one":
            return torch.cat([torch.full((3,), torch.nan, dtype=values.dtype), values.reshape(-1)])[3:].view(
                values.shape
            )
        case "not dense" if values.ndim:
            return torch.stack([values, torch.full_like(values, torch.nan)], dim=-1)[..., 0]
    return values


class Household:
    """Some parameters whose state may be on a device, and the oracle that makes the same steps."""

    def __init__(self, tensors: Sequence[Tensor], device: Device | None = None) -> None:
        self.device = device or SimulatedDevice(1, 0.5)
        self.resident = ResidentStates(self.device)
        self.memory: list[weakref.ref[Tensor]] = []
        self._watch_memory()
        self.states = [
            ParameterState(nn.Parameter(tensor), row, f"p{row}", is_on_host=False) for row, tensor in enumerate(tensors)
        ]
        self.reference = Synchronous([state.parameter for state in self.states])
        self.made = 0

    def _watch_memory(self) -> None:
        empty = self.device.empty

        def watched(numel: int, dtype: torch.dtype, stream: Stream) -> Tensor:
            tensor = empty(numel, dtype, stream)
            self.memory.append(weakref.ref(tensor))
            return tensor

        self.device.empty = watched

    @property
    def on_device(self) -> list[Tensor]:
        """What is alive there."""
        return [tensor for one in self.memory if (tensor := one()) is not None]

    def job(
        self, rows: Sequence[int], hyper: Hyperparameters, kind: Magnitudes = Magnitudes.ORDINARY
    ) -> tuple[list[ParameterState], list[Tensor], list[int], list[Coefficients]]:
        """Return the arguments of a step of these parameters, whose state is made where it is missing."""
        states, table, gradients = [self.states[row] for row in rows], CoefficientTable(), []
        indices = []
        for row, state in zip(rows, states, strict=True):
            state.create_state(with_max=hyper.amsgrad)
            random = random_array(np.random.default_rng([self.made, row]), state.shape.numel(), kind, np.float64)
            gradients.append(torch.empty_strided(state.shape, state.strides, dtype=state.parameter_dtype))
            gradients[-1].copy_(torch.from_numpy(random).reshape(state.shape))
            step = self.reference.parameters[row].step + 1
            indices.append(table.index(hyper, step, Scale(), state.is_double))
        self.made += 1
        return states, gradients, indices, table.sets

    def expect(self, rows: Sequence[int], gradients: Sequence[Tensor], hyper: Hyperparameters) -> None:
        """Make the step with the oracle."""
        for row, gradient in zip(rows, gradients, strict=True):
            one, state = self.reference.parameters[row], self.states[row]
            one.step += 1
            k = Coefficients.at_step(hyper, one.step, 1.0, double=state.dtype == torch.float64)
            args = flat(gradient, gradient), one.m, one.v, one.vmax, one.p
            one.p, one.m, one.v, one.vmax = _adam(k, *args)

    def step(
        self,
        rows: Sequence[int] | None = None,
        hyper: Hyperparameters = USUAL,
        kind: Magnitudes = Magnitudes.ORDINARY,
    ) -> None:
        rows = range(len(self.states)) if rows is None else rows
        states, gradients, indices, sets = self.job(rows, hyper, kind)
        self.resident.step(states, gradients, indices, sets)
        self.expect(rows, gradients, hyper)
        assert all(self.resident.holds(state) for state in states)

    def check_parameters(self) -> None:
        for state, one in zip(self.states, self.reference.parameters, strict=True):
            assert same_bits(flat(state.parameter, state.parameter), one.shown), state.name

    def check_home(self) -> None:
        """Check the state of parameters that are at home."""
        self.check_parameters()
        for state, one in zip(self.states, self.reference.parameters, strict=True):
            if self.resident.holds(state) or state.exp_avg is None:
                continue
            for tensor, expected in ((state.master, one.p), (state.exp_avg, one.m), (state.exp_avg_sq, one.v)):
                assert same_bits(flat(tensor, state.parameter), expected), state.name
            if state.max_exp_avg_sq is not None:
                assert same_bits(flat(state.max_exp_avg_sq, state.parameter), one.vmax), state.name


def _adam(k: Coefficients, *arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):
        return formula.adam_formula(k, *arrays)


def tensors(seed: int = 0) -> list[Tensor]:
    """Return one tensor of each shape, dtype and layout, more or less."""
    generator = torch.Generator().manual_seed(seed)
    return [
        laid_out(torch.randn(shape, generator=generator).to(DTYPES[i % 4]), LAYOUTS[(i // 2) % 4])
        for i, shape in enumerate(SHAPES * 2)
    ]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    """Return a device that does everything at once, one that does nothing before it is waited for, and one between."""
    make: Callable[[], Device] = DEVICES[request.param]
    return make()


# ---- there and back --------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS)), min_size=1, max_size=4
    ),
    st.lists(
        st.one_of(
            st.tuples(
                st.just("step"),
                st.sets(st.integers(0, 3)),
                hyperparameters(1e3),
                st.sampled_from([Magnitudes.ORDINARY, Magnitudes.ORDINARY, Magnitudes.SPECIAL, Magnitudes.TINY]),
            ),
            st.tuples(st.just("bring home"), st.sets(st.integers(0, 3))),
            st.tuples(st.just("bring all home")),
            st.tuples(st.just("write"), st.integers(0, 3)),
        ),
        max_size=8,
    ),
    st.integers(0, 2**32 - 1),
)
def test_any_steps_and_journeys_give_the_bits_of_the_oracle(kinds, story, seed):
    generator = torch.Generator().manual_seed(seed)
    made = [laid_out(torch.randn(shape, generator=generator).to(dtype), layout) for shape, dtype, layout in kinds]
    house = Household(made, SimulatedDevice(seed, 0.3))
    count = len(kinds)
    for what, *details in story:
        if what == "step":
            rows, hyper, kind = details
            house.step(sorted(row for row in rows if row < count), hyper, kind)
        elif what == "bring home":
            chosen = [house.states[row] for row in details[0] if row < count]
            house.resident.bring_home(chosen)
            assert not any(house.resident.holds(state) for state in chosen)
        elif what == "bring all home":
            house.resident.bring_home(house.states)
            assert not any(map(house.resident.holds, house.states))
        else:
            state = house.states[min(details[0], count - 1)]
            house.resident.bring_home([state])
            if state.exp_avg is not None:  # the host's tensors count, no matter who writes them
                state.exp_avg.fill_(0.25)
                house.reference.parameters[state.row].m[:] = 0.25
        house.check_home()
    house.resident.bring_home(house.states)
    house.check_home()
    assert not house.on_device


def test_tensors_on_the_host_stay_the_same_and_are_not_written_before_state_comes_home(device: Device) -> None:
    """Others hold them, and kernels have their addresses. Versions are the table's, which bumps them once."""
    house = Household(tensors(), device)
    house.step()
    house.resident.bring_home(house.states[:3])
    own = [(state.master, state.exp_avg, state.exp_avg_sq) for state in house.states]
    values = [moment.clone() for _, moment, _ in own if moment is not None]
    versions = [state.parameter._version for state in house.states]
    house.step(range(3, len(house.states)))
    assert [state.parameter._version for state in house.states] == versions
    assert all(map(torch.equal, values, [moment for _, moment, _ in own if moment is not None]))
    house.resident.bring_home(house.states)
    now = [(state.master, state.exp_avg, state.exp_avg_sq) for state in house.states]
    assert all(map(operator.is_, itertools.chain(*own), itertools.chain(*now)))
    house.check_home()


def test_state_comes_home_after_a_step_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that reads the state has a current stream of its own, which has to wait for that of the step."""
    device = SimulatedDevice(3, 0.0)
    house = Household(tensors(), device)
    recorded, waited = [], []
    record, wait = device.record, device.wait
    monkeypatch.setattr(device, "record", lambda stream: [recorded.append(record(stream)), recorded[-1]][1])
    monkeypatch.setattr(device, "wait", lambda stream, event: [waited.append((stream, event)), wait(stream, event)][1])
    house.step()
    last = recorded[-1]
    house.resident.bring_home(house.states)
    assert (Stream.CURRENT, last) in waited
    house.check_home()


def test_moments_that_came_without_a_master(device: Device) -> None:
    """As after loading what torch saved."""
    house = Household(tensors(), device)
    house.step()
    house.resident.bring_home(house.states)
    for state, one in zip(house.states, house.reference.parameters, strict=True):
        state.master = None
        state.create_state(with_max=False)
        one.p = flat(state.parameter, state.parameter)
    house.step()
    house.resident.bring_home(house.states)
    house.check_home()


def test_parameters_whose_data_was_replaced(device: Device) -> None:
    """By what lies elsewhere, or is not dense any more."""
    house = Household([torch.randn(4, 6), torch.randn(4, 6), torch.randn(6).bfloat16()], device)
    house.step()
    for state, layout in zip(house.states, ["not dense", "part of a larger one", "not dense"], strict=True):
        state.parameter.data = laid_out(state.parameter.data, layout)
    bases = [state.parameter.data.untyped_storage() for state in house.states]
    house.step()
    house.check_parameters()
    for storage, state in zip(bases, house.states, strict=True):
        everything = torch.empty(0, dtype=state.parameter_dtype).set_(storage)
        assert int(everything.isnan().sum()) == everything.numel() - state.shape.numel()  # nothing between was written
    house.resident.bring_home(house.states)
    house.check_home()


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begins", ["at home", "on the device", "on the device, without amsgrad", "some"])
@pytest.mark.parametrize("fails", ["empty", "copy", "update"])
def test_step_that_fails_changes_nothing(device: Device, fails: str, begins: str) -> None:
    """Wherever it fails: it can be made again, or dropped together with a state that was made for it."""
    house = Household(tensors(), device)
    later = replace(USUAL, amsgrad=True)
    if begins != "at home":
        house.step(range(4) if begins == "some" else None, USUAL if "without" in begins else later)
    held, alive = list(house.resident._held), len(house.on_device)
    states, gradients, indices, sets = house.job(range(len(house.states)), later)
    working, calls = getattr(device, fails), 0

    def failing(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == at:
            raise PlantedError
        return working(*arguments)

    for at in (1, 2, 4, 9):
        calls = 0
        setattr(device, fails, failing)
        with suppress(PlantedError):
            house.resident.step(states, gradients, indices, sets)
        setattr(device, fails, working)
        if calls < at:
            break
        house.check_home()
        assert set(house.resident._held) <= set(held)
        assert len(house.on_device) <= alive
    else:
        house.resident.step(states, gradients, indices, sets)
    house.expect(range(len(house.states)), gradients, later)
    house.resident.bring_home(house.states)
    house.check_home()


def test_state_goes_up_on_the_stream_whose_memory_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is recorded for the one that steps, so that an allocator with streams keeps it."""
    house, streams, recorded = Household(tensors()[:3]), [], []
    copy, record_stream = house.device.copy, house.device.record_stream
    monkeypatch.setattr(house.device, "copy", lambda *args: (streams.append(args[2]), copy(*args)))
    monkeypatch.setattr(house.device, "record_stream", lambda *args: (recorded.append(args), record_stream(*args)))
    house.step()
    assert set(streams) == {Stream.UPLOAD}
    assert {id(tensor) for tensor, stream in recorded if stream is Stream.CURRENT} == set(map(id, house.on_device))
