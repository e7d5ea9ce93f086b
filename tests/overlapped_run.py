"""A model trained through the scheduler beside its twin that is trained one synchronous step at a time."""

from __future__ import annotations

import faulthandler
import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from overlap import DeferredDevice, ThreadDevice
from reference import same_bits
from torch import Tensor, nn

from superadam import SpeculativeCPUAdamW
from superadam.devices import Device
from superadam.devices.simulated import SimulatedDevice
from superadam.scheduler import OffloadScheduler

SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.sampled_from([1e-3, 1.0, 100.0])


HANG_SECONDS = 30
"""A schedule takes a few hundredths of a second; one that hangs ends the process with every thread's stack."""


class Model(nn.Module):
    """Small, with everything that makes gradients arrive oddly: a tied weight, an optional branch, a frozen layer.

    The branch and the wide layer are blocks, which wait for their parameters themselves.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.blocks = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 200)])
        self.to(dtype)

    @property
    def branch(self) -> nn.Module:
        return self.blocks[0]

    def forward(self, inputs: Tensor, with_branch: bool) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(inputs)))
        if with_branch:
            hidden = hidden + self.branch(self.frozen(hidden))
        return self.blocks[1](hidden).sum(-1, keepdim=True) + nn.functional.linear(hidden, self.first.weight.t())


def build(dtype: torch.dtype, seed: int, limit: float) -> tuple[Model, SpeculativeCPUAdamW]:
    """Return a model and its optimizer, with two groups."""
    model = Model(dtype, seed)
    matrices = [p for p in model.parameters() if p.ndim == 2 and p.requires_grad]
    others = [p for p in model.parameters() if p.ndim != 2 and p.requires_grad]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3, "amsgrad": True}]
    return model, SpeculativeCPUAdamW(groups, lr=1e-2, weight_decay=0.0, max_grad_norm=limit)


def bits(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array whose bits can be compared."""
    return tensor.detach().to(torch.float64 if tensor.dtype == torch.float64 else torch.float32).numpy().copy()


class OverlappedRun(RuleBasedStateMachine):
    """Whatever happens to both twins, they stay bitwise equal."""

    make_device: Callable[[int], Device] = staticmethod(
        lambda seed: SimulatedDevice(seed) if seed % 4 else ThreadDevice() if seed % 8 else DeferredDevice()
    )

    @initialize(
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        limit=st.sampled_from([1.0, 30.0, math.inf]),
        bucket_numel=st.sampled_from([1, 100, 1000, 10**6]),
        seed=SEEDS,
        overlap_forward=st.booleans(),
        widens=st.booleans(),
        gpu_buckets=st.sampled_from([0, 1, 2, 10**6]),
    )
    def start(
        self,
        dtype: torch.dtype,
        limit: float,
        bucket_numel: int,
        seed: int,
        overlap_forward: bool,
        widens: bool,
        gpu_buckets: int,
    ) -> None:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        self.dtype, self.seed = dtype, seed
        self.gpu_buckets = gpu_buckets
        self.options: dict[str, Any] = {
            "bucket_numel": bucket_numel,
            "overlap_forward": overlap_forward,
            "link_dtype": torch.float32 if widens else "auto",
        }
        self.plain, self.plain_optimizer = build(dtype, 0, limit)
        self.model, self.optimizer = build(dtype, 0, limit)
        self.open_scheduler()

    def open_scheduler(self) -> None:
        self.seed += 1
        device = type(self).make_device(self.seed)
        gpu_buckets = self.gpu_buckets if device.can_update else "auto"
        self.scheduler = OffloadScheduler(
            self.optimizer, self.model, device=device, gpu_buckets=gpu_buckets, **self.options
        )

    def backward(self, model: Model, seed: int, scale: float, with_branch: bool, bad: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(4, 8, generator=generator).to(self.dtype)
        loss = (model(inputs, with_branch).float().pow(2).mean() * scale) + (math.inf if bad else 0.0)
        (loss * (math.nan if bad else 1.0)).backward()

    @rule(
        seed=SEEDS,
        scale=SCALES,
        micro_batches=st.integers(1, 3),
        with_branch=st.booleans(),
        bad=st.sampled_from([False, False, False, True]),
        before_step=st.sampled_from(["nothing", "lr", "limit", "read state", "save", "zero_grad"]),
        sums_on_host=st.booleans(),
        looks_between=st.booleans(),
        steps=st.integers(1, 3),
        placement=st.sampled_from([None, None, (0, 1), (1, 100), (10**6, 100), (10**6, 10**6)]),
    )
    def train(
        self,
        seed: int,
        scale: float,
        micro_batches: int,
        with_branch: bool,
        bad: bool,
        before_step: str,
        sums_on_host: bool,
        looks_between: bool,
        steps: int,
        placement: tuple[int, int] | None,
    ) -> None:
        """Make steps, the last of which is special; perhaps with another placement from then on."""
        if placement is not None:
            self.place(*placement)
        for number in range(steps - 1):
            self.make_step(seed + 10 * number, scale, 1, with_branch, False, "nothing", False, False)
        self.make_step(seed, scale, micro_batches, with_branch, bad, before_step, sums_on_host, looks_between)

    def make_step(
        self,
        seed: int,
        scale: float,
        micro_batches: int,
        with_branch: bool,
        bad: bool,
        before_step: str,
        sums_on_host: bool,
        looks_between: bool,
    ) -> None:
        """Make one step; sums on the host are those of autograd where gradients are fp32."""
        sum_dtype = torch.float32 if sums_on_host and self.dtype == torch.float32 else None
        accepted = self.last_accepted() if before_step == "read state" else {}
        twins = ((self.plain, self.plain_optimizer), (self.model, self.optimizer))
        for model, optimizer in twins:
            is_overlapped = optimizer is self.optimizer
            for micro_batch in range(micro_batches):
                accumulates = is_overlapped and micro_batch < micro_batches - 1
                with self.scheduler.accumulate(sum_dtype) if accumulates else nullcontext():
                    self.backward(model, seed + micro_batch, scale, with_branch, bad and micro_batch == 0)
                if accumulates and looks_between:
                    optimizer.state_dict()
            if before_step == "lr":
                optimizer.param_groups[0]["lr"] = 1e-3 * (1 + seed % 7)
            elif before_step == "limit":
                optimizer.max_grad_norm = [0.5, 5.0, math.inf][seed % 3]
            elif before_step == "read state" and is_overlapped:
                present = self.last_accepted()  # whatever is open now; masters may have been made meanwhile
                assert {key: present[key] for key in accepted} == accepted
                assert all(name == "master" for _, name in set(present) - set(accepted))
            elif before_step == "save" and is_overlapped:
                self.optimizer.state_dict()
            elif before_step == "zero_grad":
                optimizer.zero_grad()
                continue
            optimizer.step()
            if optimizer.param_groups[0]["lr"] > 1e-2:
                optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.zero_grad()
        if before_step != "zero_grad":
            ours, theirs = self.optimizer.last_outcome, self.plain_optimizer.last_outcome
            assert ours is not None
            assert theirs is not None
            assert ours == theirs or (math.isnan(ours.grad_norm) and ours.kind is theirs.kind)

    def last_accepted(self) -> dict[tuple[int, str], bytes]:
        """Return every tensor of the overlapped optimizer's state."""
        entries = [self.optimizer.state.get(parameter) or {} for parameter in self.model.parameters()]
        return {(i, key): bits(value).tobytes() for i, entry in enumerate(entries) for key, value in entry.items()}

    @rule(lr=st.sampled_from([1e-3, 1e-2, 0.1]))
    def change_lr(self, lr: float) -> None:
        """Between a verdict and its commit: the commit must not see it."""
        for optimizer in (self.plain_optimizer, self.optimizer):
            for group in optimizer.param_groups:
                group["lr"] = lr

    @rule(seed=SEEDS, then_trains=st.booleans())
    def write_outside(self, seed: int, then_trains: bool) -> None:
        """What was written counts by its value when somebody looks, so both twins look at once."""
        self.scheduler.synchronize()
        for model, optimizer in ((self.plain, self.plain_optimizer), (self.model, self.optimizer)):
            values = torch.randn(24, 24, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
            with torch.no_grad():
                model.branch.weight.copy_(torch.where(values > 1, values, model.branch.weight))
            optimizer.commit()
        if then_trains:
            self.make_step(seed, 1.0, 1, True, False, "nothing", False, False)

    @rule()
    def states_are_equal(self) -> None:
        plain, ours = self.plain_optimizer.state, self.optimizer.state
        for p, q in zip(self.plain.parameters(), self.model.parameters(), strict=True):
            one, other = plain.get(p) or {}, ours.get(q) or {}
            assert set(one) - {"master"} == set(other) - {"master"}
            for key in one:
                assert same_bits(bits(one[key]), bits(other.get(key, p if key == "master" else one[key]))), key
            if "master" in other:
                assert same_bits(bits(one.get("master", p)), bits(other["master"]))

    @rule()
    def evaluate(self) -> None:
        inputs = torch.ones(2, 8, dtype=self.dtype)
        with torch.no_grad():
            assert same_bits(bits(self.plain(inputs, True)), bits(self.model(inputs, True)))

    @rule(before=st.booleans())
    def continue_from_disk(self, before: bool) -> None:
        """Load what was saved into a fresh model and optimizer, with a scheduler from before or after the loading."""
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        file.seek(0)
        saved: dict[str, Any] = torch.load(file, weights_only=True)
        self.scheduler.close()
        self.model, optimizer = build(self.dtype, 1, 1.0)
        optimizer.max_grad_norm = self.optimizer.max_grad_norm
        self.optimizer = optimizer
        if before:
            self.open_scheduler()
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if not before:
            self.open_scheduler()

    @rule(reopens_at_once=st.booleans())
    def close_scheduler(self, reopens_at_once: bool) -> None:
        self.scheduler.close()
        if not reopens_at_once:
            for model, optimizer in ((self.plain, self.plain_optimizer), (self.model, self.optimizer)):
                self.backward(model, 5, 1.0, True, False)
                optimizer.step()
                optimizer.zero_grad()
        self.open_scheduler()

    @rule(gpu_buckets=st.sampled_from([0, 1, 3, 10**6]), bucket_numel=st.sampled_from([1, 100, 10**6]))
    def place(self, gpu_buckets: int, bucket_numel: int) -> None:
        """Move state between host and device."""
        can_keep = self.scheduler._device.can_update
        self.scheduler.place(gpu_buckets=gpu_buckets if can_keep else None, bucket_numel=bucket_numel)

    @rule()
    def synchronize(self) -> None:
        self.scheduler.synchronize()
        self.models_are_equal()

    @rule()
    def state_dicts_are_equal(self) -> None:
        one, other = self.plain.state_dict(), self.model.state_dict()
        assert all(same_bits(bits(one[name]), bits(other[name])) for name in one)

    @invariant()
    def parameters_can_be_read(self) -> None:
        if hasattr(self, "model") and not self.options["overlap_forward"]:
            self.models_are_equal()

    def models_are_equal(self) -> None:
        for (name, p), q in zip(self.plain.named_parameters(), self.model.parameters(), strict=True):
            assert same_bits(bits(p), bits(q)), name

    def teardown(self) -> None:
        try:
            if hasattr(self, "scheduler"):
                self.states_are_equal()
                self.scheduler.close()
                self.states_are_equal()
                self.models_are_equal()
        finally:
            faulthandler.cancel_dump_traceback_later()
