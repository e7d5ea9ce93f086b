"""Random programs over `fully_shard`: with a scheduler they end in the bits of the run without one."""

import contextlib
import itertools
import math
import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.overlap import ThreadDevice
from support.ranks import on_ranks
from support.shards import local, wrap
from support.visible import bits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from superadam import OffloadScheduler, SpeculativeCPUAdam, SpeculativeCPUAdamW
from superadam.integrations.reduced_gradients import take_reduced_gradients
from superadam.testing import SimulatedDevice

pytestmark = [pytest.mark.timeout(300)]

PROGRAMS = 240 if os.environ.get("SUPERADAM_DEEP") else 6
STEPS = 6


class Run:
    """A model, an optimizer, and a scheduler or none, all drawn from one seed; `draws` goes on with it."""

    def __init__(self, rank: int, seed: int, kind: str) -> None:
        self.rank, self.seed, self.micro_batches = rank, seed, 0
        self.draws = draws = random.Random(seed)
        self.seen: list[Any] = []
        self.norms: list[float] = []
        self.are_scaled = False  # gradients, by torch
        widths = [4, *(draws.choice([1, 3, 4, 7, 8, 9, 16]) for _ in range(draws.randint(2, 5)))]
        dtype = draws.choice([torch.float32, torch.bfloat16, torch.bfloat16])
        reduced = draws.choice([torch.float32, None])
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        torch.default_generator.manual_seed(seed)
        layers = [nn.Linear(width, then) for width, then in itertools.pairwise(widths)]
        self.model: Any = nn.Sequential(*layers).to(dtype)
        self.model.unused = nn.Parameter(torch.ones(5, dtype=dtype))
        inner = self.model[:1] if draws.random() < 0.3 else self.model
        stays = {"reshard_after_forward": False} if draws.random() < 0.3 else {}
        wrap([*inner, self.model], mp_policy=mixed if draws.random() < 0.7 else MixedPrecisionPolicy(), **stays)
        lr, parameters = 10 ** draws.uniform(-3, -1), list(self.model.parameters())
        self.parameters: list[Any] = parameters  # the model shows others while it is gathered
        self.optimizer = draws.choice([SpeculativeCPUAdamW, SpeculativeCPUAdam])(
            [{"params": parameters[::2], "lr": 2 * lr}, {"params": parameters[1::2]}],
            lr=lr,
            amsgrad=draws.random() < 0.3,
            weight_decay=draws.choice([0.0, 0.1]),
            maximize=draws.random() < 0.1,
            max_grad_norm=draws.choice([None, 10 ** draws.uniform(-1, 1)]),
        )
        if seed % 2:
            with contextlib.suppress(ValueError):  # nothing of this model is rounded
                take_reduced_gradients(self.optimizer, self.model)
        self.apart = random.Random(-seed)  # for what only a run with a scheduler draws
        self.scheduler: OffloadScheduler | None = None
        if kind != "no scheduler":
            device = ThreadDevice() if kind == "thread" else SimulatedDevice(seed, self.apart.choice([0.0, 0.5, 0.9]))
            self.scheduler = OffloadScheduler(
                self.optimizer,
                self.model,
                device=device,
                num_threads=1,
                bucket_numel=self.apart.choice([1, 8, 50, 1000]),
                gpu_buckets=0 if kind == "thread" else self.apart.choice([0, 0, 1, 3]),
            )

    def look(self, *tensors: Tensor) -> None:
        self.seen.append([bits(local(tensor)) for tensor in tensors])

    def look_at_everything(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        self.seen.append([gradient is None for gradient in gradients])
        entries = [entry for entry in map(self.optimizer.state.get, self.parameters) if entry]
        # Beside a simulated link, fp32 parameters have masters, too.
        state = [entry[key] for entry in entries for key in sorted(entry) if key != "master"]
        self.look(*(gradient for gradient in gradients if gradient is not None), *self.parameters, *state)

    def backward(self, *, is_announced: bool) -> None:
        dtype = self.parameters[0].dtype
        generator = torch.Generator().manual_seed(100_000 * self.rank + 1000 * self.seed + self.micro_batches)
        self.micro_batches += 1
        batch = torch.randn(3, 4, generator=generator).to(dtype)
        scheduler = self.scheduler if is_announced else None
        with contextlib.nullcontext() if scheduler is None else scheduler.accumulate():
            (self.model(batch).float() - 1).square().mean().backward()

    def make_step(self) -> None:
        try:
            self.optimizer.step()
        except Exception as error:
            self.seen.append(repr(error))
        outcome = self.optimizer.last_outcome
        if outcome is not None:
            told = "" if self.are_scaled else f"{outcome.grad_norm:.6g}"
            self.seen.append((outcome.kind, told, outcome.clip_coefficient))
            self.norms.append(outcome.grad_norm)

    def iterate(self) -> None:
        draws, count = self.draws, self.draws.choice([1, 1, 2, 3])
        syncs, is_announced = draws.random() < 0.6, draws.random() < 0.3
        for micro in range(count):
            self.model.set_requires_gradient_sync(syncs or micro == count - 1)
            self.backward(is_announced=is_announced and micro < count - 1)
        for _ in range(draws.choice([0, 0, 1, 2])):
            name, one, factor = draws.choice([*ACTIONS]), draws.choice(self.parameters), draws.choice([0.5, 2.0, 0.3])
            self.seen.append(name)
            self.are_scaled |= name in ("clip", "clip one by one") or name.startswith("multiply")
            with torch.no_grad():
                ACTIONS[name](self, one, factor)
        if draws.random() < 0.35:
            self.look_at_everything()
        for _ in range(1 if draws.random() < 0.9 else 2):
            self.make_step()
        if draws.random() < 0.35:
            self.look_at_everything()
        if draws.random() < 0.9:  # else gradients are added to
            self.optimizer.zero_grad(set_to_none=draws.random() < 0.9)
            self.are_scaled = False


def with_gradient(action: Callable[[Run, Any, float], object]) -> Callable[[Run, Any, float], object]:
    return lambda run, one, factor: None if one.grad is None else action(run, one, factor)


def gradients_of(run: Run) -> list[Any]:
    return [one.grad for one in run.parameters if one.grad is not None]


def spoil(run: Run, one: Any, factor: float) -> None:
    part = local(one.grad)
    if part.numel() and run.rank == (factor > 1):  # on one rank only
        part.view(-1)[0] = math.nan


def edit_state(run: Run, one: Any, factor: float) -> None:
    if run.optimizer.state.get(one):
        local(run.optimizer.state[one]["exp_avg"]).mul_(factor)


def clip(run: Run, one: Any, factor: float, **options: Any) -> None:
    norm: Any = nn.utils.clip_grad_norm_(run.parameters, factor, **options)
    run.look(norm.full_tensor() if gradients_of(run) else norm)


def place(run: Run, one: Any, factor: float) -> None:
    if run.scheduler is not None:
        run.scheduler.place(bucket_numel=run.apart.choice([1, 10, 100]))


def save_sharded(run: Run, one: Any, factor: float) -> None:
    for module in run.model.modules():
        if isinstance(module, FSDPModule):  # torch cannot save what an evaluation has left gathered
            module.reshard()
    if all(parameter.requires_grad for parameter in run.parameters):
        get_optimizer_state_dict(run.model, run.optimizer)


def freeze_or_not(run: Run, one: Any, factor: float) -> None:
    if one is not run.parameters[0]:
        one.requires_grad_(not one.requires_grad)


ACTIONS: dict[str, Callable[[Run, Any, float], object]] = {
    "multiply a part": with_gradient(lambda run, one, factor: local(one.grad).mul_(factor)),
    "multiply a gradient": with_gradient(lambda run, one, factor: one.grad.mul_(factor)),
    "multiply all gradients": lambda run, one, factor: (
        gradients_of(run) and torch._foreach_mul_(gradients_of(run), factor)
    ),
    "add to a gradient": with_gradient(lambda run, one, factor: one.grad.add_(factor)),
    "drop a gradient": lambda run, one, factor: setattr(one, "grad", None),
    "replace a gradient": with_gradient(lambda run, one, factor: setattr(one, "grad", one.grad.clone() * factor)),
    "zero a gradient": with_gradient(lambda run, one, factor: one.grad.zero_()),
    "NaN on one rank": with_gradient(spoil),
    "gather a gradient": with_gradient(lambda run, one, factor: run.look(one.grad.full_tensor())),
    "norms of parts": lambda run, one, factor: run.look(*(local(gradient).norm() for gradient in gradients_of(run))),
    "clip": clip,
    "clip one by one": lambda run, one, factor: clip(run, one, factor, foreach=False),
    "clip by the optimizer": lambda run, one, factor: run.look(run.optimizer.clip_grad_norm_(factor)),
    "change the limit": lambda run, one, factor: setattr(
        run.optimizer, "max_grad_norm", run.draws.choice([None, 0.1, 3.0])
    ),
    "change lr": lambda run, one, factor: run.optimizer.param_groups[0].update(
        lr=factor * run.optimizer.param_groups[0]["lr"]
    ),
    "edit state": edit_state,
    "write a parameter": lambda run, one, factor: one.mul_(0.9),
    "write a part": lambda run, one, factor: local(one).mul_(0.9),
    "freeze or not": freeze_or_not,
    "roll back": lambda run, one, factor: run.optimizer.rollback(),
    "commit": lambda run, one, factor: run.optimizer.commit(),
    "look at everything": lambda run, one, factor: run.look_at_everything(),
    "load what is saved": lambda run, one, factor: run.optimizer.load_state_dict(run.optimizer.state_dict()),
    "save sharded": save_sharded,
    "evaluate": lambda run, one, factor: run.model(torch.ones(2, 4, dtype=one.dtype)),
    "place": place,
}


def trained(rank: int, seed: int, kind: str) -> tuple[list[Any], Any]:
    """Return what a program has seen, and the norms of its steps.

    Of gradients that torch has scaled, a scheduler tells the norm times the factor; without one, it is the norm of
    products that were rounded to bf16, each by up to 2**-9 of it.
    """
    run = Run(rank, seed, kind)
    for _ in range(STEPS):
        run.iterate()
    run.look_at_everything()
    if run.scheduler is not None:
        run.scheduler.close()
    run.look_at_everything()
    return run.seen, pytest.approx(run.norms, rel=2**-9, nan_ok=True) if kind == "no scheduler" else run.norms


@pytest.mark.parametrize("seed", range(PROGRAMS))
@on_ranks(2)
def test_random_program_ends_in_the_bits_of_the_run_without_scheduler(rank, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, norms = trained(rank, seed, "no scheduler")
        for kind in ("simulated", "thread"):
            seen, found = trained(rank, seed, kind)
            assert found == norms
            for place, pair in enumerate(zip(seen, expected, strict=True)):
                assert pair[0] == pair[1], f"{kind}, after {[one for one in expected[:place] if isinstance(one, str)]}"
