"""What programs do around a step, for twins that are trained alike: each action does the same to both.

An action may read, write and replace gradients, weights, state and hyper-parameters. What it returns is compared.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from superadam import SpeculativeCPUAdamW
from superadam.offload.scheduler import OffloadScheduler


@dataclass
class Twin:
    """One of two that are to stay equal.

    Attributes:
        model: that is trained.
        optimizer: that trains it.
        scheduler: that overlaps it; None for the plain twin.
        kept: what actions remember.
    """

    model: Any
    optimizer: SpeculativeCPUAdamW
    scheduler: OffloadScheduler | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> list[Any]:
        """Parameters that have a gradient."""
        return [parameter for parameter in self.model.parameters() if parameter.grad is not None]

    @property
    def gradients(self) -> list[Tensor]:
        """What is in `.grad`."""
        return [parameter.grad for parameter in self.parameters]

    def one(self, seed: int) -> list[Any]:
        """Return one parameter that has a gradient, or none."""
        return [self.parameters[seed % len(self.parameters)]] if self.parameters else []


Action = Callable[[Twin, int], Any]
"""Gets one of the twins and a number that decides details."""

ACTIONS: dict[str, Action] = {}

ORDINARY_ERRORS = (AssertionError, KeyError, RuntimeError, ValueError)
"""What an action may raise where another one has taken away what it needs: both twins raise the same."""


def action(function: Action) -> Action:
    ACTIONS[function.__name__] = function
    return function


def noise(like: Tensor, seed: int) -> Tensor:
    """Return the same numbers for both twins."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


# -- gradients are read ------------------------------------------------------------------------------------------------


@action
def read_reductions(twin: Twin, seed: int) -> Any:
    return [(g.sum(), g.abs().max(), torch.isfinite(g).all(), g.norm(), g.float().mean()) for g in twin.gradients]


@action
def read_values(twin: Twin, seed: int) -> Any:
    return [(p.grad.tolist(), repr(p.grad), p.grad.reshape(-1)[-1].item()) for p in twin.one(seed)]


@action
def read_copies(twin: Twin, seed: int) -> Any:
    ours = [p.grad for p in twin.one(seed)]
    copies = [(g.clone(), copy.deepcopy(g), g.to(torch.float64), g * 2, torch.stack([g, g]), g == g) for g in ours]
    written = [copy.deepcopy(g) for g in ours]
    for gradient in written:
        gradient.fill_(7.0)  # it is nobody else's
    return copies, pickle.loads(pickle.dumps(ours))


@action
def read_views(twin: Twin, seed: int) -> Any:
    return [(p.grad.detach().view(-1)[:3].clone(), p.grad.t(), p.grad.float().numpy()) for p in twin.one(seed)]


@action
def read_facts(twin: Twin, seed: int) -> Any:
    facts = [(g.shape, g.stride(), str(g.dtype), g.requires_grad, g.is_contiguous()) for g in twin.gradients]
    return facts, [p.grad is None for p in twin.model.parameters()]


@action
def total_norm(twin: Twin, seed: int) -> Any:
    return torch.nn.utils.get_total_norm(twin.gradients, [2.0, math.inf, 1.0][seed % 3])


@action
def keep_gradient(twin: Twin, seed: int) -> None:
    """Hold on to what is in `.grad`, for longer than the step."""
    twin.kept["gradient"] = [parameter.grad for parameter in twin.one(seed)]


@action
def look_at_kept_gradient(twin: Twin, seed: int) -> Any:
    kept = twin.kept.get("gradient", [])
    if seed % 2:
        for gradient in kept:
            gradient.mul_(0.5)
    return [gradient.clone() for gradient in kept]


@action
def put_kept_gradient_back(twin: Twin, seed: int) -> None:
    for gradient in twin.kept.get("gradient", []):
        for parameter in twin.model.parameters():
            if parameter.shape == gradient.shape and parameter.dtype == gradient.dtype:
                parameter.grad = gradient
                break


# -- gradients are edited ----------------------------------------------------------------------------------------------


@action
def edit_one(twin: Twin, seed: int) -> None:
    for p in twin.one(seed):
        [
            lambda g: g.add_(0.01),
            lambda g: g.view(-1)[0].fill_(0.5),
            lambda g: g.data.mul_(0.3),
            lambda g: g.neg_(),
            lambda g: g.mul_(g),
            lambda g: g.zero_(),
            lambda g: g.clamp_(-0.1, 0.1),
            lambda g: torch.mul(g, 0.5, out=g),
        ][seed // 8 % 8](p.grad)


@action
def replace_one(twin: Twin, seed: int) -> None:
    for p in twin.one(seed):
        p.grad = p.grad * 0.5 + 0.25


@action
def add_noise(twin: Twin, seed: int) -> None:
    for number, gradient in enumerate(twin.gradients):
        gradient.add_(noise(gradient, seed + number), alpha=0.01)


@action
def clip_by_value(twin: Twin, seed: int) -> None:
    torch.nn.utils.clip_grad_value_(twin.model.parameters(), 0.1, foreach=bool(seed % 2))


@action
def scale_one(twin: Twin, seed: int) -> None:
    for p in twin.one(seed):
        p.grad.mul_([0.37, 0.5, 3.0, -1.0, 0.0][seed // 8 % 5])


@action
def scale_twice(twin: Twin, seed: int) -> None:
    for p in twin.one(seed):
        p.grad.mul_(torch.tensor(0.7)).div_(3)


@action
def scale_all(twin: Twin, seed: int) -> None:
    torch._foreach_mul_(twin.gradients, [0.37, 0.5, 1.0, 2.0][seed % 4])


@action
def clip_norm(twin: Twin, seed: int) -> Any:
    """Torch's own clipping; the norm that it tells is torch's."""
    options: dict[str, Any] = {"foreach": [None, False, True][seed // 3 % 3]}
    return torch.nn.utils.clip_grad_norm_(twin.model.parameters(), [0.5, 5.0, 1e6][seed % 3], **options)


@action
def limit_norm_of_this_step(twin: Twin, seed: int) -> Any:
    return twin.optimizer.clip_grad_norm_([0.5, 5.0, math.inf][seed % 3])


@action
def write_to_held_gradient(twin: Twin, seed: int) -> None:
    """Hold the tensor that a backward adds to, and write to it afterwards."""
    for p in twin.one(seed):
        held = p.grad = noise(p, seed)
        (p * noise(p, seed + 1)).sum().backward()
        held.mul_(0.5)


# -- gradients are dropped ---------------------------------------------------------------------------------------------


@action
def drop_one(twin: Twin, seed: int) -> None:
    for p in twin.one(seed):
        p.grad = None


@action
def drop_all(twin: Twin, seed: int) -> None:
    twin.optimizer.zero_grad()


@action
def drop_and_put_back(twin: Twin, seed: int) -> None:
    parameters, kept = twin.parameters, twin.gradients
    twin.model.zero_grad()
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient


@action
def exchange(twin: Twin, seed: int) -> None:
    one, other = twin.model.norm.weight, twin.model.norm.bias
    one.grad, other.grad = other.grad, one.grad


@action
def make_zero(twin: Twin, seed: int) -> None:
    twin.optimizer.zero_grad(set_to_none=False)


# -- weights -----------------------------------------------------------------------------------------------------------


@action
def write_weights(twin: Twin, seed: int) -> None:
    """Some elements, as when pruning, or all."""
    weight = twin.model.blocks[seed % 2].weight
    values = noise(weight, seed)
    with torch.no_grad():
        weight.copy_(torch.where(values > seed % 3 - 1, values, weight))


@action
def write_and_restore_weights(twin: Twin, seed: int) -> None:
    kept = [parameter.detach().clone() for parameter in twin.model.parameters()]
    with torch.no_grad():
        for parameter, value in zip(twin.model.parameters(), kept, strict=True):
            parameter.mul_(2.0)
            parameter.copy_(value)


@action
def write_past_the_counter(twin: Twin, seed: int) -> None:
    twin.model.branch.weight.data.mul_(0.5)
    twin.optimizer.reload_masters([twin.model.branch.weight] if seed % 2 else None)


@action
def average_weights(twin: Twin, seed: int) -> Any:
    average = twin.kept.setdefault("average", [p.detach().clone() for p in twin.model.parameters()])
    for mean, parameter in zip(average, twin.model.parameters(), strict=True):
        mean.lerp_(parameter.detach(), 0.5)
    return average


@action
def replace_storage(twin: Twin, seed: int) -> None:
    """With new memory of equal values; the old one may be taken away, as where blocks are shuffled."""
    weight = twin.model.blocks[seed % 2].weight
    old = weight.data
    weight.data = old.clone()
    if seed // 2 % 2:
        old.untyped_storage().resize_(0)


@action
def convert_and_back(twin: Twin, seed: int) -> None:
    layer = [twin.model.first, twin.model.branch, twin.model][seed % 3]
    dtypes = [parameter.dtype for parameter in layer.parameters()]
    layer.to(torch.float64)
    for parameter, dtype in zip(layer.parameters(), dtypes, strict=True):
        gradient = parameter.grad
        parameter.grad = None
        parameter.data = parameter.data.to(dtype)
        parameter.grad = None if gradient is None else gradient.to(dtype)
    twin.optimizer.reload_masters()


@action
def load_weights(twin: Twin, seed: int) -> None:
    """As they were when this was done last."""
    if "weights" in twin.kept:
        twin.model.load_state_dict(twin.kept["weights"])
    twin.kept["weights"] = copy.deepcopy(twin.model.state_dict())


# -- hyper-parameters --------------------------------------------------------------------------------------------------


@action
def change_lr(twin: Twin, seed: int) -> None:
    for group in twin.optimizer.param_groups[seed % 2 :]:
        group["lr"] = 1e-3 * (1 + seed % 7)


@action
def change_hyperparameters(twin: Twin, seed: int) -> None:
    key, values = [
        ("weight_decay", [0.0, 0.1]),
        ("betas", [(0.9, 0.999), (0.5, 0.9)]),
        ("eps", [1e-8, 1e-4]),
        ("amsgrad", [False, True]),
        ("maximize", [False, True]),
    ][seed % 5]
    twin.optimizer.param_groups[seed // 5 % 2][key] = values[seed // 10 % 2]


@action
def change_limit(twin: Twin, seed: int) -> None:
    twin.optimizer.max_grad_norm = [0.5, 5.0, 50.0, math.inf, None][seed % 5]


# -- state -------------------------------------------------------------------------------------------------------------


@action
def read_state(twin: Twin, seed: int) -> Any:
    state = twin.optimizer.state
    return [{key: value for key, value in state[p].items() if key != "master"} for p in twin.parameters if p in state]


@action
def read_state_dict(twin: Twin, seed: int) -> Any:
    entries = twin.optimizer.state_dict()["state"]
    return {row: {key: e[key] for key in ("step", "exp_avg", "exp_avg_sq")} for row, e in entries.items() if e}


@action
def edit_state(twin: Twin, seed: int) -> None:
    state = twin.optimizer.state
    for p in twin.one(seed):
        entry = state.get(p)
        if entry:
            if seed // 8 % 3 == 0:
                entry["exp_avg"] = entry["exp_avg"] * 0.5
            elif seed // 8 % 3 == 1:
                entry["step"].add_(3)
            else:
                entry["exp_avg"].mul_(0.5)


@action
def hold_state(twin: Twin, seed: int) -> None:
    """Hold on to it, for longer than the step, or let go of it."""
    twin.kept["state"] = twin.optimizer.state if seed % 4 else {}


@action
def look_at_held_state(twin: Twin, seed: int) -> Any:
    """And edit it, without reading it again."""
    held = twin.kept.get("state", {})
    for p in twin.one(seed):
        if seed % 2 and held.get(p):
            held[p]["exp_avg"] = held[p]["exp_avg"] * 0.5
            held[p]["step"].add_(1)
    return [{key: value for key, value in held[p].items() if key != "master"} for p in twin.parameters if held.get(p)]


@action
def assign_state(twin: Twin, seed: int) -> None:
    """A copy of it, or the one that was held."""
    state = twin.optimizer.state
    entries = {p: copy.deepcopy(entry) for p, entry in state.items()}
    twin.optimizer.state = (twin.kept.get("state") or state) if seed % 2 else defaultdict(dict, entries)


@action
def drop_state(twin: Twin, seed: int) -> None:
    for p in twin.one(seed):
        twin.optimizer.state.pop(p, None)


@action
def load_checkpoint(twin: Twin, seed: int) -> None:
    """As both were when this was done last: masters are in one twin's state, and in the other's weights."""
    kept = twin.kept.get("checkpoint")
    if kept is not None and len(kept[1]["param_groups"]) == len(twin.optimizer.param_groups):
        twin.model.load_state_dict(kept[0])
        twin.optimizer.load_state_dict(kept[1])
    twin.kept["checkpoint"] = copy.deepcopy((twin.model.state_dict(), twin.optimizer.state_dict()))


@action
def go_on_with_copies(twin: Twin, seed: int) -> Any:
    """Copy model and optimizer together, and make a step with the copies."""
    pair = (twin.model, twin.optimizer)
    if seed % 2:
        file = io.BytesIO()
        torch.save(pair, file)
        file.seek(0)
        model, optimizer = torch.load(file, weights_only=False)
    else:
        model, optimizer = copy.deepcopy(pair)
    optimizer.step()
    return list(model.parameters()), [parameter.grad for parameter in model.parameters()]


# -- by hand -----------------------------------------------------------------------------------------------------------


@action
def roll_back(twin: Twin, seed: int) -> None:
    twin.optimizer.rollback()


@action
def speculate(twin: Twin, seed: int) -> None:
    """Only where that can do harm; the plain twin stays plain."""
    if twin.scheduler is not None:
        twin.optimizer.speculate(twin.one(seed) if seed % 2 else None)


@action
def commit(twin: Twin, seed: int) -> None:
    twin.optimizer.commit()


@action
def synchronize(twin: Twin, seed: int) -> None:
    if twin.scheduler is not None:
        twin.scheduler.synchronize()
    else:
        twin.optimizer.commit()


@action
def place(twin: Twin, seed: int) -> None:
    if twin.scheduler is not None:
        can_keep = twin.scheduler.resident is not None
        gpu_buckets, bucket_numel = [(0, 1), (1, 100), (10**6, 100), (10**6, 10**6)][seed % 4]
        twin.scheduler.place(gpu_buckets=gpu_buckets if can_keep else None, bucket_numel=bucket_numel)


@action
def commit_late_or_not(twin: Twin, seed: int) -> None:
    """From the next step on."""
    if twin.scheduler is not None:
        twin.scheduler._late_commits.is_on = bool(seed % 2)


@action
def freeze_or_thaw(twin: Twin, seed: int) -> None:
    layer: nn.Module = [twin.model.frozen, twin.model.branch][seed % 2]
    layer.requires_grad_(not next(layer.parameters()).requires_grad)


@action
def raise_where_not_finite(twin: Twin, seed: int) -> Any:
    twin.optimizer.on_nonfinite = "raise"
    try:
        with contextlib.suppress(FloatingPointError):
            twin.optimizer.step()
            return "stepped"
        return "raised"
    finally:
        twin.optimizer.on_nonfinite = "skip"


NAMES = [*sorted(ACTIONS), *4 * ["read_copies", "write_to_held_gradient"]]
"""To draw from: what alone shows some fault is in it more than once."""
