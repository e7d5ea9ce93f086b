"""Models that compute late on the simulated accelerator: host, worker and streams run apart, as with a GPU."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from support.deep import TIMES
from support.visible import state_bits
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.devices import Stream
from superadam.handles.gradient_handle import taken_of
from superadam.kernels.torch_private import ordinary_tensors
from superadam.state.samples import Samples
from superadam.testing import SimulatedDevice


class Model(nn.Module):
    """Has an embedding, a weight that lies in another order, one that takes whole blocks, and one that is cut."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.default_generator.manual_seed(5)
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8), nn.Linear(8, 600))
        self.turned = nn.Parameter(torch.randn(8, 4).t())
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.layers(hidden + hidden @ self.turned.t() @ self.turned)  # type: ignore[no-any-return]


class Elsewhere:
    """Makes gradients on other streams, as FSDP2 does; the hooks of a scheduler that is made afterwards run there."""

    def __init__(self, device: SimulatedDevice, model: nn.Module, seed: float) -> None:
        self.device, self.model, self.choices = device, model, random.Random(seed)
        self.first = device.accelerator.current_stream()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.depart)

    def come_back(self) -> None:
        """Let the model go on on its own stream, once the scheduler's hooks have run."""
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.device.switch(0))

    def depart(self, parameter: Tensor) -> None:
        gradient: Any = parameter.grad
        self.device.switch(self.choices.randrange(3))
        stream = self.device.accelerator.current_stream()
        stream.wait_stream(self.first)
        for _ in range(self.choices.choice([0, 50])):  # of other work, so that some gradients are much later
            stream.enqueue(bool)
        parameter.grad = gradient * 1
        self.device._keep([gradient], Stream.CURRENT)

    def settle(self) -> None:
        """Let the model's stream wait for them, as FSDP2 does at the end of backward."""
        for stream in self.device._models:
            self.first.wait_stream(stream)


def memory_of(parameter: Tensor, device: SimulatedDevice | None) -> Tensor:
    """Return a copy of what the memory of a parameter holds now, whatever is still to be written to it, as bits."""
    with ordinary_tensors():
        here = parameter.detach() if device is None else device.accelerator.alias(parameter.detach())
        return here.clone().view(torch.int32 if here.dtype == torch.float32 else torch.int16)


def train(choices: random.Random, device: SimulatedDevice | None) -> list[Any]:
    """Train as drawn; return what the program sees, as bits."""
    dtype = choices.choice([torch.bfloat16, torch.float32, torch.float16])
    options = {
        "lr": choices.choice([0.05, 1e-4]),  # with the smaller one, values are patched
        "max_grad_norm": choices.choice([None, 0.05, 5.0]),
        "moments": choices.choice(["fp32", "bf16", "8bit"]),
        "master": choices.choice(["fp32", "24bit"]),
    }
    hidden = ["master"] if dtype == torch.float32 else []  # on the host the parameter is its own
    micro_batches, announces = choices.choice([1, 1, 1, 2, 3]), choices.choice([False, True])
    sum_dtype = choices.choice([None, torch.float32]) if announces else None
    every = ["", "", "clip", "edit", "read", "inf", "place", "look", "drop", "roll back"]
    actions = [choices.choice(every) for _ in range(6)]
    has_streams, seed = micro_batches == 1 and choices.random() < 0.9, choices.random()
    reads_losses, losses = choices.random() < 0.5, list[Tensor]()  # reading one waits for the model's stream
    scheduled = {
        "bucket_numel": choices.choice([1, 100, 700, 700, 10**6]),
        "gpu_buckets": choices.choice([0, 0, 1, 2, 100]),
    }
    if device is not None and scheduled["gpu_buckets"] == 0 and "place" not in actions:
        free = choices.choice([None, 0, 3000])
        device.free_bytes = lambda: free  # type: ignore[method-assign]
    there: Callable[[Tensor], Tensor] = Tensor.clone if device is None else device.there
    seen: list[Any] = []
    with nullcontext() if device is None else device.computing():
        model = Model(dtype)
        for parameter in model.parameters():
            parameter.data = there(parameter)
        optimizer = SpeculativeCPUAdamW(model.parameters(), **options)
        overlap = elsewhere = None
        if device is None and sum_dtype is not None:  # what is summed in another dtype needs a scheduler
            overlap = OffloadScheduler(optimizer, model, num_threads=1)
        elif device is not None:
            elsewhere = Elsewhere(device, model, seed) if has_streams else None
            overlap = OffloadScheduler(optimizer, model, device=device, num_threads=1, **scheduled)
            if elsewhere is not None:
                elsewhere.come_back()
        with overlap or nullcontext():
            for step, action in enumerate(actions):
                for micro in range(micro_batches):
                    tokens = torch.randint(11, (2, 3), generator=torch.Generator().manual_seed(10 * step + micro))
                    is_told = announces and micro < micro_batches - 1 and overlap is not None
                    with overlap.accumulate(sum_dtype) if is_told else nullcontext():
                        loss = model(there(tokens)).float().square().mean()
                        loss.backward()
                if elsewhere is not None:
                    elsewhere.settle()
                gradients = [one.grad for one in model.parameters() if one.grad is not None]
                if action == "clip":
                    seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
                elif action == "edit":
                    gradients[0].clamp_(-1e-3, 1e-3)
                elif action == "read":
                    seen += [bool(one.isfinite().all()) for one in gradients]
                elif action == "inf":
                    gradients[1].fill_(torch.inf)
                elif action == "place" and overlap is not None and device is not None:
                    overlap.place(gpu_buckets=choices.choice([0, 1, 3]))
                elif action == "roll back":
                    optimizer.rollback()
                if action != "drop":
                    optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                if reads_losses:
                    seen.append(loss.item())
                if action == "look":
                    if overlap is not None and device is not None:
                        device.switch(int(elsewhere is not None))  # another one than new values are published on
                        overlap.synchronize()
                        device.switch(0)
                    seen.append([memory_of(parameter, device).tolist() for parameter in model.parameters()])
                    seen.append(state_bits(optimizer, without=hidden))
        seen.append([loss.item() for loss in losses])
        seen.append(state_bits(optimizer, without=hidden))
        if device is not None:
            device.finish()
            assert overlap is not None
            assert overlap.statistics.buckets > 0
    return seen


def trained_late(seed: int) -> list[Any]:
    """Return what a program sees on the device."""
    return train(random.Random(seed), SimulatedDevice(seed, random.Random(seed).choice([0.0, 0.0, 0.1, 0.5])))


@pytest.mark.slow
def test_training_has_the_bits_of_the_host() -> None:
    assert [seed for seed in range(24 * TIMES) if trained_late(seed) != train(random.Random(seed), None)] == []


@contextmanager
def one_parameter(device: SimulatedDevice, values: Tensor, **options: Any) -> Iterator[tuple[Any, ...]]:
    """Yield a late parameter, a function that makes a step of gradients of one, and the scheduler."""
    with device.computing():
        parameter = nn.Parameter(device.there(values))
        optimizer = SpeculativeCPUAdamW([parameter], lr=0.25, weight_decay=0.0)
        model = nn.ParameterList([parameter])

        def step() -> None:
            (parameter * device.there(torch.ones_like(values))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        with OffloadScheduler(optimizer, model, device=device, num_threads=1, **options) as overlap:
            yield parameter, step, overlap


def test_samples_wait_for_what_another_stream_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on another stream takes no parameter for written to that is being written."""
    looked: list[Any] = []
    monkeypatch.setattr(Samples, "_written", lambda _, pieces: looked.append(pieces) or [])
    for seed in range(12):  # without the wait, one in three shows it
        device = SimulatedDevice(seed, 0.0)
        with one_parameter(device, torch.ones(600, dtype=torch.bfloat16)) as (_, step, _):
            for number in range(4):
                device.switch(number % 2)
                step()
    assert looked == []


@pytest.mark.parametrize("gpu_buckets", [0, 1])
def test_synchronize_waits_for_what_was_published_on_another_stream(gpu_buckets: int) -> None:
    for seed in range(6):
        device = SimulatedDevice(seed, 0.0)
        with one_parameter(device, torch.ones(600), gpu_buckets=gpu_buckets) as (parameter, step, overlap):
            step()
            step()
            device.switch(1)
            overlap.synchronize()
            assert memory_of(parameter, device).view(torch.float32).unique().tolist() == pytest.approx([0.5], abs=1e-6)


def test_backward_waits_for_no_micro_batch_that_is_summed_on_the_host() -> None:
    device = SimulatedDevice(0, 0.0)
    with device.computing():
        model = nn.Linear(4, 3, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.data = device.there(parameter)
        optimizer = SpeculativeCPUAdamW(model.parameters())
        with OffloadScheduler(optimizer, model, device=device, num_threads=1) as overlap:
            first = model(device.there(torch.ones(2, 4, dtype=torch.bfloat16))).sum()
            queued = len(device.accelerator.first.operations)
            with overlap.accumulate(torch.float32):
                first.backward()
                model(device.there(torch.ones(2, 4, dtype=torch.bfloat16))).sum().backward()
            assert len(device.accelerator.first.operations) > queued > 0
            sums: list[Any] = [taken_of(parameter.grad) for parameter in model.parameters()]
            overlap._pipeline.worker.drain()
            assert not any(one.arrived._parts for one in sums)  # where the memory of each micro-batch would pile up
            assert all(bool((parameter.grad == 4).all()) for parameter in model.parameters())
