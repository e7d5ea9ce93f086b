"""Buckets that stay on the device: the bits of the synchronous run, whatever stays, and whatever users do meanwhile."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import math
import os
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.overlap import ImmediateWorker, PlantedError, ThreadDevice, adam, everything, loss_of, mlp, train
from support.reference import Synchronous, flat, same_bits
from support.visible import bits, parameters_of, shown, state_bits
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam, StepKind
from superadam.devices import Device, Stream
from superadam.devices.flat import FlatLayout
from superadam.devices.interface import ChunkSums
from superadam.devices.worker import WorkerError
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.offload.pipeline import Pipeline
from superadam.state.parameter import ParameterState
from superadam.state.resident import ResidentStates
from superadam.step.transaction import Transaction
from superadam.testing.simulated import SimulatedDevice, _take_norm

DEEP = os.environ.get("SUPERADAM_DEEP") == "1"
pytestmark = pytest.mark.timeout(240)  # a hang fails with the stack of every thread

ALL = 10**9
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(), (0,), (1,), (7, 9), (64,), (4097,), (3, 4, 5)]
SEEDS = st.integers(0, 2**32 - 1)


# ---- a device whose host sums are the host's -------------------------------------------------------------------------


class HostSums(SimulatedDevice):
    """A device that knows sums of gradients on the host for what they are, and may have no core to spare."""

    on_host: frozenset[int] | set[int] = frozenset()

    def __init__(self, seed: int, eagerness: float = 0.3, num_threads: int = 2) -> None:
        super().__init__(seed, eagerness)
        self._cores = num_threads

    def idle_cores(self) -> int:
        return self._cores

    def is_host(self, tensor: Tensor) -> bool:
        return super().is_host(tensor) or tensor.untyped_storage().data_ptr() in self.on_host


@pytest.fixture(autouse=True)
def host_copies_are_on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Note where `host_copy` puts what it returns."""
    addresses: set[int] = set()
    host_copy = ParameterState.host_copy

    def noting(state: ParameterState, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        copied = host_copy(state, tensor, dtype)
        address = copied.untyped_storage().data_ptr()
        if address:  # memory without elements has none
            addresses.add(address)
            weakref.finalize(copied, addresses.discard, address)
        return copied

    monkeypatch.setattr(ParameterState, "host_copy", noting)
    monkeypatch.setattr(HostSums, "on_host", addresses)
    return iter(())


# ---- a ragged model --------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Parameters of any shape and dtype."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(f"p{number}", parameter)

    def forward(self, seed: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(seed + number)
            inputs = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            total = total + (parameter * inputs).sin().double().sum()
        return total


class Ragged(nn.Module):
    """Layers that may be left out, the last of which uses the first parameter of the first again."""

    def __init__(self, kinds: list[list[tuple[tuple[int, ...], torch.dtype]]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        layers = [
            [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in one] for one in kinds
        ]
        layers[-1].append(layers[0][0])
        self.blocks = nn.ModuleList([Layer(one) for one in layers])

    def forward(self, seed: int, used: set[int]) -> Tensor:
        return sum((self.blocks[i](seed + 10 * i) for i in sorted(used)), torch.zeros((), dtype=torch.float64))


KINDS = st.lists(
    st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=3),
    min_size=2,
    max_size=4,
)
BETWEEN = [
    *["nothing"] * 4,
    *["lr", "limit", "amsgrad", "read state", "model state", "norm", "copy", "place", "group", "write"],
    *["zero_grad", "rollback", "forward", "edit", "clip by torch", "close"],
]
AFTER = [
    *["nothing"] * 2,
    *["place"] * 3,
    *["write", "replace data", "replace data by what is not dense", "write past autograd", "reload"],
    *["read state", "load model", "load optimizer", "deepcopy", "pickle", "freeze", "grow", "reopen", "lr", "amsgrad"],
]
STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "seed": SEEDS,
            "scale": st.sampled_from([1e-3, 1.0, 1.0, 30.0]),
            "is_bad": st.sampled_from([False] * 6 + [True]),
            "used": st.one_of(st.just({0, 1, 2, 3}), st.sets(st.integers(0, 3))),
            "micro_batches": st.integers(1, 2),
            "sums_on_host": st.booleans(),
            "between": st.sampled_from(BETWEEN),
            "after": st.sampled_from(AFTER),
            "gpu_buckets": st.sampled_from([0, 1, 3, ALL]),
            "bucket_numel": st.sampled_from([1, 100, 5000]),
        }
    ),
    min_size=2,
    max_size=7,
)
OPTIONS = st.fixed_dictionaries(
    {
        "gpu_buckets": st.sampled_from([0, 1, 2, ALL, ALL]),
        "bucket_numel": st.sampled_from([1, 100, 5000, 10**6]),
        "transfer_dtype": st.sampled_from(["auto", "auto", torch.float32, torch.bfloat16, torch.float16]),
    }
)
STORAGE = st.fixed_dictionaries(
    {"moments": st.sampled_from(["fp32", "fp32", "bf16"]), "master": st.sampled_from(["fp32", "fp32", "24bit"])}
)
"""Of state; not 8-bit moments, with which amsgrad is refused."""
GROUP = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.1]),
        "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
        "decoupled_weight_decay": st.booleans(),
    }
)


class Twins:
    """A run with kept buckets, and a synchronous one."""

    def __init__(
        self,
        kinds: list[list[tuple[tuple[int, ...], torch.dtype]]],
        groups: list[dict[str, Any]],
        limit: float,
        options: dict[str, Any],
        device: HostSums,
        scales: bool,
        storage: Mapping[str, Any] | None = None,
    ) -> None:
        self.device, self.options, self.link = device, options, options["transfer_dtype"]
        self.narrows = self.link not in ("auto", torch.float32)
        self.is_wide = all(dtype in (torch.float32, torch.float64) for one in kinds for _, dtype in one)
        self.models = [Ragged(kinds), Ragged(kinds)]
        self.optimizers = []
        for model in self.models:
            parameters = list(model.parameters())
            parts = [{**one, "params": parameters[i :: len(groups)]} for i, one in enumerate(groups)]
            trained = [one for one in parts if one["params"]]
            self.optimizers.append(SpeculativeCPUAdam(trained, max_grad_norm=limit, **(storage or {})))
        init = {"init_scale": 64.0, "growth_interval": 2}
        is_half = any(dtype == torch.float16 for one in kinds for _, dtype in one)  # torch refuses to unscale it
        self.scalers = [torch.amp.GradScaler("cpu", **init) for _ in range(2)] if scales and not is_half else []
        self.open()

    def open(self) -> None:
        self.scheduler = OffloadScheduler(self.ours, self.model, device=self.device, **self.options)

    @property
    def ours(self) -> SpeculativeCPUAdam:
        return self.optimizers[1]

    @property
    def plain(self) -> SpeculativeCPUAdam:
        return self.optimizers[0]

    @property
    def model(self) -> Ragged:
        return self.models[1]

    def trained(self, layers: set[int]) -> set[int]:
        """Return those layers that are trained."""
        each = enumerate(self.model.blocks)
        return {i for i, layer in each if i in layers and any(p.requires_grad for p in layer.parameters())}

    def backward(self, step: dict[str, Any]) -> None:
        count = step["micro_batches"]
        sums_on_host = step["sums_on_host"] and self.is_wide and not self.narrows  # they would not be rounded
        sum_dtype = torch.float32 if sums_on_host else None
        used = self.trained(step["used"])
        assert used
        rest = self.trained(used - {min(used)})
        for is_ours, model in enumerate(self.models):
            for micro in range(count):
                # the last micro-batch leaves out a layer, whose sum is left for the step
                chosen = rest if micro > 0 and rest else used
                loss = model(step["seed"] + micro, chosen) * step["scale"] * (math.nan if step["is_bad"] else 1.0)
                if self.scalers:
                    loss = self.scalers[is_ours].scale(loss)
                adds_up = is_ours and micro < count - 1
                with self.scheduler.accumulate(sum_dtype) if adds_up else nullcontext():
                    loss.backward()
        for parameter in self.models[0].parameters():
            if parameter.grad is not None and self.narrows and parameter.dtype != torch.float64:
                parameter.grad = parameter.grad.to(self.link).to(parameter.dtype)

    def step(self, step: dict[str, Any]) -> None:
        """Make a step, if it has any gradients, and do something afterwards."""
        if not self.trained(step["used"]):
            self.after(step)
            return
        before = state_bits(self.ours) if step["between"] == "read state" else None
        self.backward(step)
        if self.between(step, before):
            for is_ours, optimizer in enumerate(self.optimizers):
                if self.scalers:
                    self.scalers[is_ours].step(optimizer)
                    self.scalers[is_ours].update()
                else:
                    optimizer.step()
            one, other = self.plain.last_outcome, self.ours.last_outcome
            assert one is not None
            assert other is not None
            if step["between"] != "clip by torch" and not self.scalers:  # which a plain step cannot know of
                assert repr(one) == repr(other)  # NaN equals nothing
            assert (one.kind is StepKind.SKIPPED) == (other.kind is StepKind.SKIPPED)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.check_parameters()
        self.after(step)
        self.check_parameters()

    def between(self, step: dict[str, Any], before: dict[str, Any] | None) -> bool:
        """Do something while the step is open; return whether it is still worth a verdict."""
        match step["between"]:
            case "lr" | "amsgrad":
                self.change(step["between"], step["seed"])
            case "limit":
                for optimizer in self.optimizers:
                    optimizer.max_grad_norm = [0.5, 5.0, math.inf][step["seed"] % 3]
            case "read state":
                assert before is not None
                present = state_bits(self.ours)["state"]  # masters may have been made meanwhile
                made = {i: set(entry) - set(before["state"].get(i, {})) for i, entry in present.items()}
                assert all(names <= {"master"} for names in made.values())
                assert {i: {k: present[i][k] for k in e} for i, e in before["state"].items()} == before["state"]
            case "model state":
                self.check_models()
            case "norm":
                norms = [float(optimizer.clip_grad_norm_(2.0)) for optimizer in self.optimizers]
                assert norms[0] == norms[1] or (math.isnan(norms[0]) and math.isnan(norms[1]))
            case "copy":
                copy.deepcopy((self.model, self.ours))
            case "place":
                if self.scheduler.placement.num_threads:
                    self.scheduler.place(gpu_buckets=step["gpu_buckets"], bucket_numel=step["bucket_numel"])
            case "group" | "write":
                for model, optimizer in zip(self.models, self.optimizers, strict=True):
                    self.meddle("grow" if step["between"] == "group" else "write only", step["seed"], model, optimizer)
            case "edit" | "clip by torch" if not self.narrows:  # what is edited is rounded before or afterwards
                for model in self.models:
                    gradients = [one.grad for one in model.parameters() if one.grad is not None]
                    if step["between"] == "edit":
                        gradients[step["seed"] % len(gradients)].mul_(0.3).add_(0.125)
                    else:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            case "close":
                self.scheduler.close()
                self.open()
            case "zero_grad":
                return False
            case "rollback":
                self.ours.rollback()
            case "forward":
                self.model(0, set(range(len(self.model.blocks))))
        return True

    def change(self, what: str, seed: int) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if what == "lr":
                    group["lr"] = 1e-3 * (1 + seed % 7)
                else:
                    group["amsgrad"] = not group["amsgrad"]

    def after(self, step: dict[str, Any]) -> None:
        """Do something between two steps."""
        what, seed = step["after"], step["seed"]
        if what == "place":
            self.scheduler.place(gpu_buckets=step["gpu_buckets"], bucket_numel=step["bucket_numel"])
        elif what == "reopen":
            self.scheduler.close()
            self.check_closed()
            self.open()
        elif what in ("lr", "amsgrad"):
            self.change(what, seed)
        elif what == "read state":
            self.check_states()
        elif what != "nothing":
            self.scheduler.synchronize()
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                self.meddle(what, seed, model, optimizer)

    def meddle(self, what: str, seed: int, model: Ragged, optimizer: SpeculativeCPUAdam) -> None:
        parameters = list(model.parameters())
        chosen = parameters[seed % len(parameters)]
        values = torch.randn(chosen.shape, generator=torch.Generator().manual_seed(seed)).to(chosen.dtype)
        values = torch.where(values > 0, values, chosen.detach())
        match what:
            case "write" | "write only":
                with torch.no_grad():
                    chosen.copy_(values)
                if what == "write":
                    optimizer.commit()
            case "replace data":
                chosen.data = values.clone()
                optimizer.commit()
            case "replace data by what is not dense":
                if values.numel() > 1:
                    chosen.data = torch.stack([values, values], dim=-1)[..., 0]
                    optimizer.commit()
            case "write past autograd":
                chosen.data.copy_(values)
                optimizer.reload_masters([chosen])
            case "reload":
                optimizer.reload_masters()
            case "load model":
                model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
            case "load optimizer":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            case "deepcopy":
                assert visible(copy.deepcopy(optimizer)) == visible(optimizer)
            case "pickle":
                assert visible(pickle.loads(pickle.dumps(optimizer))) == visible(optimizer)
            case "freeze":
                chosen.requires_grad_(not chosen.requires_grad)
            case "grow":
                layer = Layer([nn.Parameter(torch.linspace(-1, 1, 30)) for _ in range(2)])
                model.blocks.append(layer)
                optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.01})

    def check_parameters(self) -> None:
        assert shown(self.plain) == shown(self.ours)

    def check_models(self) -> None:
        one, other = (model.state_dict() for model in self.models)
        assert {name: bits(value) for name, value in one.items()} == {n: bits(v) for n, v in other.items()}

    def check_states(self) -> None:
        assert visible(self.plain) == visible(self.ours)

    def close(self) -> None:
        """Check that nothing is left, and that every bucket is counted once."""
        self.scheduler.close()
        self.check_closed()

    def check_closed(self) -> None:
        self.check_states()
        self.check_models()
        check_statistics(self.scheduler)
        assert not held(self.scheduler)
        assert not self.device._blocks


def visible(optimizer: SpeculativeCPUAdam) -> dict[str, Any]:
    """Return parameters and state, with the master of every parameter, also where that is the parameter itself."""
    seen = state_bits(optimizer)
    for i, parameter in enumerate(parameters_of(optimizer)):
        if i in seen["state"] and parameter.dtype in (torch.float32, torch.float64):
            seen["state"][i].setdefault("master", bits(parameter))
    return seen


def check_statistics(scheduler: OffloadScheduler, *, has_failed: bool = False) -> None:
    """Check that what was speculated on has a fate; a worker that failed leaves buckets that it never looked at."""
    counts, fates = scheduler.statistics, scheduler.optimizer.statistics
    assert counts.speculated_buckets >= 0
    assert has_failed or fates.accepted + fates.respeculated + fates.dropped >= counts.speculated_buckets


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 2)
@given(
    KINDS,
    st.lists(GROUP, min_size=1, max_size=2),
    st.sampled_from([0.5, 5.0, math.inf]),
    OPTIONS,
    STEPS,
    st.booleans(),
    STORAGE,
    SEEDS,
)
def test_whatever_stays_the_bits_are_those_of_the_synchronous_run(
    kinds: list[list[tuple[tuple[int, ...], torch.dtype]]],
    groups: list[dict[str, Any]],
    limit: float,
    options: dict[str, Any],
    steps: list[dict[str, Any]],
    scales: bool,
    storage: dict[str, str],
    seed: int,
) -> None:
    device = HostSums(seed, [0.0, 0.3, 0.9][seed % 3], 2 * (seed % 5 > 0))
    twins = Twins(kinds, groups, limit, options, device, scales, storage)
    for step in steps:
        twins.step(step)
    twins.close()


# ---- one story at a time ---------------------------------------------------------------------------------------------


class AtOnce(HostSums):
    """Its worker runs every job in the middle of backward."""

    def start_worker(self, idle: Any) -> ImmediateWorker:  # type: ignore[override]
        return ImmediateWorker(idle)


class Threaded(ThreadDevice):
    """Does everything when it is asked, with memory other than the host's, and with a real thread."""

    has_link = can_update = True
    update = SimulatedDevice.update

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in HostSums.on_host

    def pack(
        self, gradients: Sequence[Tensor], layout: FlatLayout, dtype: torch.dtype, norm: ChunkSums | None = None
    ) -> Tensor:
        packed = super().pack(gradients, layout, dtype)
        if norm is not None:
            _take_norm(layout.views(packed), norm.sums, norm.nonfinite)
        return packed


SIMULATED: dict[str, Callable[[], HostSums]] = {
    "at once": lambda: AtOnce(1, 1.0),
    "lazy": lambda: HostSums(2, 0.0),
    "hasty": lambda: HostSums(3, 0.8),
}
DEVICES: dict[str, Callable[[], Device]] = {**SIMULATED, "thread": Threaded}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    """Return devices on which things happen at different times."""
    return DEVICES[request.param]()


@pytest.fixture(params=SIMULATED)
def simulated(request: pytest.FixtureRequest) -> HostSums:
    """Return those of them that know what memory is in use."""
    return SIMULATED[request.param]()


def has_memory_in_use(device: Device) -> bool:
    """Whether anything is alive on a simulated device; others do not know."""
    return isinstance(device, SimulatedDevice) and bool(device._blocks)


def kept(
    optimizer: SpeculativeCPUAdam, model: nn.Module, device: Device | None = None, **options: Any
) -> OffloadScheduler:
    """Return a scheduler that keeps everything, from the second step on."""
    everywhere = {"bucket_numel": 70, "gpu_buckets": ALL, "device": device or HostSums(5)}
    return OffloadScheduler(optimizer, model, **{**everywhere, **options})


def pair(
    story: Callable[[nn.Module, SpeculativeCPUAdam, OffloadScheduler | None], None],
    device: Device,
    make: Callable[[], nn.Module] = mlp,
    scheduled: dict[str, Any] | None = None,
    *,
    keeps: bool = True,
    **options: Any,
) -> OffloadScheduler:
    """Run a story with kept buckets and without a scheduler; check that bits and outcomes agree."""
    model, twin = make(), make()
    optimizer, plain = adam(model, **options), adam(twin, **options)
    with kept(optimizer, model, device, **(scheduled or {})) as scheduler:
        story(model, optimizer, scheduler)
        optimizer.zero_grad()
        assert (scheduler.statistics.resident_buckets > 0) == keeps
    story(twin, plain, None)
    plain.zero_grad()
    assert everything(model, optimizer) == everything(twin, plain)
    one, other = optimizer.last_outcome, plain.last_outcome
    assert one == other or (one is not None and other is not None and one.kind is other.kind is StepKind.SKIPPED)
    assert optimizer.statistics.steps == plain.statistics.steps
    check_statistics(scheduler)
    assert not has_memory_in_use(device)
    return scheduler


def held(scheduler: OffloadScheduler) -> list[ParameterState]:
    """Return whose state is on the device."""
    assert isinstance(scheduler._resident, ResidentStates)
    return list(scheduler._resident._held)


def resident(scheduler: OffloadScheduler) -> int:
    """Return how many parameters have their state on the device."""
    return len(held(scheduler))


@pytest.mark.parametrize("gpu_buckets", [1, 2, 3, ALL])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_buckets_on_the_device_have_the_bits_of_none(dtype: torch.dtype, gpu_buckets: int, device: Device) -> None:
    scheduler = pair(
        lambda model, optimizer, _: train(model, optimizer, range(6)),
        device,
        lambda: mlp(dtype),
        {"gpu_buckets": gpu_buckets},
    )
    counts = scheduler.optimizer.statistics
    assert counts.committed
    assert counts.clipped
    assert scheduler.statistics.resident_buckets == 5 * min(gpu_buckets, 3)


def test_last_parameters_stay_from_the_second_step_on(device: Device) -> None:
    model = mlp()
    optimizer = adam(model, max_grad_norm=math.inf)
    with kept(optimizer, model, device, gpu_buckets=1) as scheduler:
        train(model, optimizer, range(1))
        assert resident(scheduler) == 0
        train(model, optimizer, range(1, 2))
        assert set(map(id, (one.parameter for one in held(scheduler)))) == set(map(id, model[0].parameters()))
        moved = scheduler.statistics.downloaded_bytes, scheduler.statistics.uploaded_bytes
        scheduler.place(gpu_buckets=ALL)
        train(model, optimizer, range(2, 4))
        assert resident(scheduler) == 6
        down, up = scheduler.statistics.downloaded_bytes - moved[0], scheduler.statistics.uploaded_bytes - moved[1]
        assert (down, up) == (2 * 6 * 16, 0)  # nothing travels but a sum and a count for each gradient
        scheduler.place(gpu_buckets=0)
        assert resident(scheduler) == 0


def test_reading_state_brings_it_home_and_the_next_step_takes_it_back(device: Device) -> None:
    def reading(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        seen = []
        for seed in range(5):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            if scheduler is not None and seed > 1:
                assert resident(scheduler) == (6 if seed in (2, 4) else 0)
            seen.append([bits(optimizer.state[p]["exp_avg"]) for p in model.parameters()] if seed > 1 else [])
            optimizer.step()
            if seed % 2 == 0:
                seen.append([bits(optimizer.state[p]["exp_avg_sq"]) for p in model.parameters()])
        results.append(seen)

    results: list[list[Any]] = []
    pair(reading, device)
    assert results[0] == results[1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_bad_element_in_a_kept_gradient_skips_the_step(value: float, device: Device) -> None:
    def poisoned(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(6):
            optimizer.zero_grad()
            hook = model[0].weight.register_hook(lambda g: g.index_put((torch.tensor(7),), torch.tensor(value)))
            if seed not in (0, 3, 5):
                hook.remove()
            loss_of(model, seed).backward()
            hook.remove()
            optimizer.step()
            assert optimizer.last_outcome is not None
            assert (optimizer.last_outcome.kind is StepKind.SKIPPED) == (seed in (0, 3, 5))
            assert optimizer.last_outcome.nonfinite == (8 if seed in (0, 3, 5) else 0)

    pair(poisoned, device)


def test_first_kept_step_that_is_dropped_leaves_no_state(device: Device) -> None:
    model = mlp(torch.bfloat16)
    optimizer = adam(model)
    with kept(optimizer, model, device) as scheduler:
        (loss_of(model, 0) * math.nan).backward()
        optimizer.step()
        for ending in ("nan", "zero_grad", "rollback"):
            (loss_of(model, 1) * (math.nan if ending == "nan" else 1.0)).backward()
            getattr(optimizer, "step" if ending == "nan" else ending)()
            optimizer.zero_grad()
            optimizer.step()  # without any gradient
            assert not optimizer.state
            assert not has_memory_in_use(device)
        assert scheduler.statistics.resident_buckets == 9
        check_statistics(scheduler)


def test_gradients_are_given_back_with_the_verdict(simulated: HostSums) -> None:
    model = mlp()
    optimizer = adam(model)
    with kept(optimizer, model, simulated) as scheduler:
        train(model, optimizer, range(3))
        scheduler.synchronize()
        on_device = 3 * 6
        assert len(simulated._blocks) == on_device
        loss_of(model, 3).backward()
        scheduler._catch_up()
        assert len(simulated._blocks) > on_device
        optimizer.zero_grad()
        optimizer.step()
        assert len(simulated._blocks) == on_device


@pytest.mark.covering(1)
@pytest.mark.parametrize("link", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kept_gradients_are_rounded_as_those_that_travel(dtype: torch.dtype, link: torch.dtype) -> None:
    def rounding(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(4):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            for parameter in model.parameters() if scheduler is None and dtype != torch.float64 else ():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.to(link).to(dtype)
            optimizer.step()

    pair(rounding, HostSums(7), lambda: mlp(dtype), {"transfer_dtype": link, "gpu_buckets": 2})


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_on_the_host_bring_kept_state_home(dtype: torch.dtype, device: Device) -> None:
    """They are there already, so the step is made there; the next one may be made on the device again."""
    model, twin = mlp(dtype), mlp(dtype)
    optimizer = adam(model, max_grad_norm=30.0)
    parameters = list(model.parameters())
    reference = Synchronous(parameters)
    hyper = [Hyperparameters.of_group(optimizer.param_groups[0])] * len(parameters)
    with kept(optimizer, model, device) as scheduler:
        for step in range(6):
            twin.load_state_dict(model.state_dict())
            sums: dict[int, np.ndarray[Any, Any]] = {}
            for micro in range(2 if step % 2 else 1):
                used = slice(2 * micro, None)  # the sum of the first layer is left for the step
                twin.zero_grad()
                loss_of(twin[used], 10 * step + micro).backward()
                for i, parameter in enumerate(twin.parameters()):
                    if parameter.grad is not None:
                        one = flat(parameter.grad, parameter)
                        sums[i] = sums[i] + one if i in sums else one
                with scheduler.accumulate(torch.float32) if micro == 0 and step % 2 else nullcontext():
                    loss_of(model[used], 10 * step + micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            kind, norm = reference.step(sums, hyper, 30.0)
            assert optimizer.last_outcome is not None
            assert (optimizer.last_outcome.kind, optimizer.last_outcome.grad_norm) == (kind, norm)
            for parameter, one in zip(parameters, reference.parameters, strict=True):
                assert same_bits(flat(parameter, parameter), one.shown)
            assert resident(scheduler) == (6 if step in (2, 4) else 0)


@pytest.mark.parametrize("layout", ["elsewhere", "not dense"])
def test_data_of_kept_parameters_replaced_between_backward_and_step(layout: str, device: Device) -> None:
    def replacing(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        for seed in range(5):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            if seed == 2:
                values = model[2].weight.data
                wide = torch.stack([values, torch.full_like(values, math.nan)], dim=-1)
                model[2].weight.data = values.clone() if layout == "elsewhere" else wide[..., 0]
            optimizer.step()
            if seed == 2 and layout == "not dense":
                assert bool(wide[..., 1].isnan().all())
                assert torch.equal(wide[..., 0], model[2].weight)

    pair(replacing, device)


def test_parameters_replaced_by_new_ones_are_kept_again(device: Device) -> None:
    model = mlp()
    optimizer = adam(model)
    with kept(optimizer, model, device) as scheduler:
        train(model, optimizer, range(3))
        old = [weakref.ref(parameter) for parameter in model.parameters()]
        for layer in model[::2]:
            layer.weight = nn.Parameter(layer.weight.detach().clone())
            layer.bias = nn.Parameter(layer.bias.detach().clone())
        optimizer.param_groups[0]["params"] = list(model.parameters())
        train(model, optimizer, range(3, 7))
        assert {id(state.parameter) for state in held(scheduler)} == set(map(id, model.parameters()))
        optimizer.state.clear()
        train(model, optimizer, range(1))
        gc.collect()
        assert not any(one() is not None for one in old)


def test_group_that_joins_is_kept_too(device: Device) -> None:
    def growing(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        train(model, optimizer, range(3))
        torch.manual_seed(0)
        model.insert(0, nn.Linear(8, 8))
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01, "amsgrad": True})
        train(model, optimizer, range(3, 6))
        if scheduler is not None:
            assert resident(scheduler) == 8

    pair(growing, device)


def test_frequent_clipping_leaves_kept_buckets_alone(device: Device) -> None:
    def clipped(model: nn.Module, optimizer: SpeculativeCPUAdam, scheduler: OffloadScheduler | None) -> None:
        train(model, optimizer, range(12))

    scheduler = pair(clipped, device, scheduled={"gpu_buckets": 1}, max_grad_norm=1e-3)
    assert scheduler.statistics.waiting_buckets
    assert scheduler.statistics.resident_buckets == 11


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu_buckets", [1, ALL])
@pytest.mark.parametrize("first", [False, True])
def test_device_without_any_memory(
    first: bool, gpu_buckets: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host makes the step, and values go straight into the parameters; then there is memory again."""
    device = HostSums(6)
    model, twin = mlp(torch.bfloat16), mlp(torch.bfloat16)
    optimizer, plain = adam(model), adam(twin)
    with kept(optimizer, model, device, gpu_buckets=gpu_buckets) as scheduler:
        for one, its in ((model, optimizer), (twin, plain)):
            if first:  # its order becomes known, but there is no state yet
                (loss_of(one, 0) * math.nan).backward()
                its.step()
                its.zero_grad()
            else:
                train(one, its, range(3))
        if not first:
            scheduler.place(gpu_buckets=0)  # so that all has to move again
            scheduler.place(gpu_buckets=gpu_buckets)
        loss_of(model, 5).backward()
        scheduler._catch_up()

        def full(*_: object) -> Tensor:
            raise torch.OutOfMemoryError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(device, "empty", full)
            optimizer.step()
        assert resident(scheduler) == 0
        assert scheduler.placement.gpu_buckets == gpu_buckets // 2
        assert "no memory left for the state" in caplog.text
        optimizer.zero_grad()
        loss_of(twin, 5).backward()
        plain.step()
        plain.zero_grad()
        assert visible(optimizer) == visible(plain)
        for one, its in ((model, optimizer), (twin, plain)):
            train(one, its, range(6, 8))
    assert everything(model, optimizer) == everything(twin, plain)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("what", ["_add_resident", "speculate"])
def test_worker_that_fails_with_a_kept_bucket(
    what: str, at: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    train(twin, plain, range(5))
    owner: type = Pipeline if what == "_add_resident" else Transaction
    working, calls = getattr(owner, what), itertools.count(1)

    def failing(*arguments: Any, **options: Any) -> Any:
        result = working(*arguments, **options)
        if next(calls) == at:
            raise PlantedError("the worker stumbled")
        return result

    with kept(optimizer, model, device) as scheduler:
        train(model, optimizer, range(3))
        before = shown(optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(owner, what, failing)
            loss_of(model, 3).backward()
            with pytest.raises(WorkerError, match="the worker stumbled"):
                optimizer.step()
        assert shown(optimizer) == before
        optimizer.step()  # without the worker
        optimizer.zero_grad()
        check_statistics(scheduler, has_failed=True)
        train(model, optimizer, range(4, 5))
    assert everything(model, optimizer) == everything(twin, plain)
    assert not has_memory_in_use(device)


def test_scheduler_that_is_closed_with_an_open_step(device: Device) -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    train(twin, plain, range(3))
    scheduler = kept(optimizer, model, device)
    train(model, optimizer, range(3))
    loss_of(model, 3).backward()
    scheduler.close()
    assert everything(model, optimizer) == everything(twin, plain)
    check_statistics(scheduler, has_failed=True)
    assert not held(scheduler)
    assert not has_memory_in_use(device)
    for one, its in ((model, optimizer), (twin, plain)):
        train(one, its, range(3, 5))
    assert everything(model, optimizer) == everything(twin, plain)


def test_what_cannot_be_kept_is_told_and_changes_nothing(device: Device) -> None:
    model = mlp()
    optimizer = adam(model)
    with kept(optimizer, model, device) as scheduler:
        train(model, optimizer, range(2))
        before = scheduler.placement
        for wrong in (
            {"gpu_buckets": -1},
            {"bucket_numel": 0},
            {"num_threads": 0},
            {"gpu_buckets": 1, "bucket_numel": 1.5},
        ):
            with pytest.raises(ValueError, match="expected"):
                scheduler.place(**wrong)  # type: ignore[arg-type]
            assert scheduler.placement == before
            assert resident(scheduler) == 6


# ---- room ------------------------------------------------------------------------------------------------------------


class Tight(SimulatedDevice):
    """Has memory for a number of tensors of fp32 state, ever."""

    room = 7

    def empty(self, numel: int, dtype: torch.dtype, stream: Stream) -> Tensor:
        if stream is Stream.UPLOAD and dtype == torch.float32:
            if self.room == 0:
                raise torch.OutOfMemoryError("planted")
            self.room -= 1
        return super().empty(numel, dtype, stream)


def test_a_step_that_the_device_has_no_room_for_is_made_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    model, twin = mlp(torch.bfloat16), mlp(torch.bfloat16)
    optimizer, plain = adam(model, max_grad_norm=1.0), adam(twin, max_grad_norm=1.0)
    device = Tight(2)
    with (
        caplog.at_level(logging.WARNING, "superadam"),
        OffloadScheduler(optimizer, model, device=device, gpu_buckets=5, bucket_numel=1, num_threads=1) as scheduler,
    ):
        for seed in range(6):
            for one, other in ((model, optimizer), (twin, plain)):
                loss_of(one, seed).backward()
                other.step()
                other.zero_grad()
            if seed % 2:
                assert everything(model, optimizer) == everything(twin, plain)
        assert scheduler.placement.gpu_buckets < 5
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith("the device has no memory left for the state of 5 buckets, so their step was made on")
    assert everything(model, optimizer) == everything(twin, plain)


# ---- choosing --------------------------------------------------------------------------------------------------------


class Roomy(ThreadDevice):
    """Says that it can keep everything, and cannot: only for what is chosen."""

    can_update = True
    update = SimulatedDevice.update

    def free_bytes(self) -> int:
        return 10**12


def test_a_worker_that_is_far_behind_backward_leaves_all_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    speculate = Transaction.speculate

    def slow(*arguments: Any, **options: Any) -> None:
        time.sleep(0.01)
        speculate(*arguments, **options)

    monkeypatch.setattr(Transaction, "speculate", slow)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)]).to(torch.bfloat16)
    model[2].weight.register_hook(lambda gradient: time.sleep(0.01))  # so that the worker begins during backward
    optimizer = adam(model, max_grad_norm=math.inf)
    with OffloadScheduler(optimizer, model, device=Roomy(), bucket_numel=64) as scheduler:
        for seed in range(8):
            loss_of(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert scheduler.placement.gpu_buckets == 6


def test_place_takes_numbers() -> None:
    model = mlp()
    optimizer = adam(model)
    with OffloadScheduler(optimizer, model, device=SimulatedDevice(1), gpu_buckets=1, bucket_numel=1) as scheduler:
        before = scheduler.placement
        for name in ("gpu_buckets", "bucket_numel", "num_threads"):
            with pytest.raises(ValueError, match=f"{name} is 'auto', expected an integer of at least "):
                scheduler.place(**{name: "auto"})  # type: ignore[arg-type]
            assert scheduler.placement == before


def test_gradients_of_a_group_that_joined_are_narrowed() -> None:
    models = [mlp(), mlp()]
    optimizers = [adam(model, max_grad_norm=math.inf) for model in models]
    with OffloadScheduler(optimizers[0], models[0], device=SimulatedDevice(1), transfer_dtype=torch.bfloat16):
        for optimizer in optimizers:
            extra = nn.Parameter(torch.linspace(-1, 1, 30))
            optimizer.add_param_group({"params": [extra]})
            (extra * torch.linspace(1, 2, 30)).sin().sum().backward()  # type: ignore[no-untyped-call]
            assert extra.grad is not None
            if optimizer is optimizers[1]:
                extra.grad = extra.grad.to(torch.bfloat16).float()
            optimizer.step()
    assert optimizers[0].last_outcome == optimizers[1].last_outcome
