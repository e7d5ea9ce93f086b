"""Programs that hold, edit, replace and exchange gradients between backward and step, on ordinary parameters or shards.

Each draws what it does, and with which of the gradients that it holds, from its seed. What it sees counts as well.
"""

import copy
import itertools
import operator
import pickle
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from support.shards import local
from support.visible import Bits, bits
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.distributed import shards
from superadam.testing import SimulatedDevice

STEPS = 5


def seen_of(tensor: Tensor) -> Bits:
    return bits(local(tensor))


class Run:
    """One program: three parameters, their optimizer, and the tensors that the program holds."""

    def __init__(self, seed: int, setting: str) -> None:
        self.actions = ACTIONS
        self.draw, self.setting = random.Random(seed), setting
        self.generator = torch.Generator().manual_seed(seed)
        self.model = self.model_of(self.draw.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]))
        self.parameters = [*self.model.parameters()]
        max_grad_norm, self.bucket_numel = self.draw.choice([None, 1.0]), self.draw.choice([500, 1000, 10_000])
        self.optimizer = SpeculativeCPUAdamW(self.parameters, lr=1e-2, max_grad_norm=max_grad_norm)
        if self.draw.random() < 0.5:
            self.parameters[0].register_hook(lambda gradient: gradient * 0.5)
        self.held: list[Tensor] = []
        self.seen: list[object] = []
        self.did: list[str] = []

    def model_of(self, dtype: torch.dtype) -> nn.Module:
        return nn.ParameterList(nn.Parameter(self.values(8, 64).to(dtype)) for _ in range(3))

    def values(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def like(self, parameter: Tensor) -> Tensor:
        return self.values(*parameter.shape).to(parameter.dtype)

    def gradients(self) -> list[Any]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def with_gradient(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters if parameter.grad is not None]

    def losses(self, left_out: int) -> list[Tensor]:
        return [(p * self.like(p)).float().sum() for i, p in enumerate(self.parameters) if i != left_out]

    def backward(self, left_out: int | None = None) -> None:
        left_out = self.draw.randrange(6) if left_out is None else left_out
        torch.stack(self.losses(left_out)).sum().backward()  # type: ignore[no-untyped-call]
        if self.setting == "speculate()":
            self.optimizer.speculate()

    def act(self) -> None:
        name, parameter = self.draw.choice(list(self.actions)), self.draw.choice(self.parameters)
        of_held = name.startswith("held: ")
        value: Any = (self.draw.choice(self.held) if self.held else None) if of_held else parameter.grad
        self.did.append(f"{name} of {[one is parameter for one in self.parameters].index(True)}")
        if value is None and not name.startswith("any: "):
            return
        try:
            self.actions[name](self, parameter, value)
        except (RuntimeError, TypeError, ValueError) as error:  # torch's own
            self.seen.append(type(error).__name__)

    def overlap(self) -> AbstractContextManager[object]:
        """Return the scheduler, open until the context ends, where there is one."""
        if self.setting not in ("host", "simulated device"):
            return nullcontext()
        device = {"device": SimulatedDevice(0)} if self.setting == "simulated device" else {}
        return OffloadScheduler(self.optimizer, self.model, num_threads=1, bucket_numel=self.bucket_numel, **device)

    def go(self) -> list[object]:
        """Train; return all that the program sees."""
        with self.overlap():
            for step in range(STEPS):
                for _ in range(self.draw.choice([1, 1, 2])):
                    self.did.append(f"step {step}: backward")
                    self.backward()
                    for _ in range(self.draw.choice([0, 0, 1, 1, 2, 3])):
                        self.act()
                self.optimizer.step()
                if self.draw.random() < 0.8:
                    self.optimizer.zero_grad(set_to_none=self.draw.random() < 0.8)
                self.seen += map(seen_of, [*self.parameters, *self.held, *self.gradients()])
        state = self.optimizer.state_dict()["state"].values()
        moments = [value for entry in state for key, value in entry.items() if key != "master"]  # depends on the device
        return [*self.seen, *map(seen_of, moments)]


def _exchange(run: Run, p: Tensor, g: Any) -> None:
    first, second = run.parameters[:2]
    first.grad, second.grad = second.grad, first.grad


def _put(run: Run, p: Tensor, held: Tensor) -> None:
    if (held.shape, held.dtype, shards.is_distributed(held)) == (p.shape, p.dtype, shards.is_distributed(p)):
        p.grad = held


ACTIONS: dict[str, Callable[[Run, Any, Any], object]] = {
    "multiply": lambda run, p, g: g.mul_(0.3),
    "divide": lambda run, p, g: g.div_(3.0),
    "multiply by a tensor": lambda run, p, g: g.mul_(torch.tensor(0.7)),
    "multiply as C++ does": lambda run, p, g: torch.ops.aten.mul_.Scalar(g, 0.37),
    "multiply into itself": lambda run, p, g: torch.mul(g, 0.5, out=g),
    "add": lambda run, p, g: g.add_(run.like(p)),
    "decay": lambda run, p, g: g.add_(p.detach(), alpha=0.01),
    "double": lambda run, p, g: g.add_(g),
    "zero": lambda run, p, g: g.zero_(),
    "set a row": lambda run, p, g: g.__setitem__(0, 0.5),
    "multiply rows": lambda run, p, g: g[1:3].mul_(2),
    "set_": lambda run, p, g: g.set_(g.clone()),
    "data = half": lambda run, p, g: setattr(g, "data", g.data * 0.5),
    "data = new": lambda run, p, g: setattr(g, "data", run.like(p)),
    "grad = clone": lambda run, p, g: setattr(p, "grad", g.clone()),
    "grad = half": lambda run, p, g: setattr(p, "grad", g * 0.5),
    "grad = itself": lambda run, p, g: setattr(p, "grad", g),
    "grad = pickled": lambda run, p, g: setattr(p, "grad", pickle.loads(pickle.dumps(g))),
    "any: grad = new": lambda run, p, g: setattr(p, "grad", run.like(p)),
    "any: grad = None": lambda run, p, g: setattr(p, "grad", None),
    "any: grad of another": lambda run, p, g: setattr(p, "grad", run.parameters[1].grad),
    "any: exchange": _exchange,
    "any: backward": lambda run, p, g: run.backward(),
    "any: clip": lambda run, p, g: run.seen.append(seen_of(clip_grad_norm_(run.with_gradient(), 1.0))),
    "any: clip one by one": lambda run, p, g: [clip_grad_norm_([one], 0.5) for one in run.with_gradient()],
    "any: clip values": lambda run, p, g: clip_grad_value_(run.with_gradient(), 0.5),
    "any: multiply all": lambda run, p, g: torch._foreach_mul_(run.gradients(), 0.3),
    "any: zero all": lambda run, p, g: torch._foreach_zero_(run.gradients()),
    "any: norms": lambda run, p, g: run.seen.extend(map(seen_of, torch._foreach_norm(run.gradients()))),
    "any: write the parameter": lambda run, p, g: p.data.mul_(0.9),
    "any: read the state": lambda run, p, g: run.seen.append(len(run.optimizer.state_dict()["state"])),
    "look": lambda run, p, g: run.seen.append(seen_of(g)),
    "look for Inf": lambda run, p, g: run.seen.append(bool(torch.isfinite(g).all())),
    "print": lambda run, p, g: run.seen.append(str(g)),
    "hold": lambda run, p, g: run.held.append(g),
    "hold it, detached": lambda run, p, g: run.held.append(g.detach()),
    "hold its data": lambda run, p, g: run.held.append(g.data),
    "hold a view": lambda run, p, g: run.held.append(g.view(-1)),
    "hold a row": lambda run, p, g: run.held.append(g[0]),
    "hold a copy": lambda run, p, g: run.held.append(copy.copy(g)),
    "hold a deep copy": lambda run, p, g: run.held.append(copy.deepcopy(g)),
    "any: let go": lambda run, p, g: run.held.clear(),
    "any: write to what is held": lambda run, p, g: [one.mul_(0.5) for one in run.held],
    "any: write to what is held through .data": lambda run, p, g: [one.data.add_(0.125) for one in run.held],
    "held: write": lambda run, p, held: held.add_(0.25),
    "held: write a row": lambda run, p, held: held[0].mul_(0.5),
    "held: data = new": lambda run, p, held: setattr(held, "data", torch.full_like(held, 0.25)),
    "held: data = half": lambda run, p, held: setattr(held, "data", held.data * 0.5),
    "held: set_": lambda run, p, held: held.set_(held.clone()),
    "held: into .grad": lambda run, p, held: p.grad is not None and p.grad.copy_(held),
    "held: put into .grad": _put,
    "held: hold its data": lambda run, p, held: run.held.append(held.data),
}


def assert_unnoticed(kind: type[Run], seed: int) -> None:
    """Fail if a program sees anything else, or ends otherwise, where gradients are taken."""
    plain = kind(seed, "plain")
    expected = plain.go()
    for setting in ("speculate()", "host", "simulated device"):
        seen = kind(seed, setting).go()
        differing = [*itertools.compress(range(len(expected)), map(operator.ne, seen, expected))]
        assert (len(seen), differing) == (len(expected), []), (seed, setting, plain.did)
