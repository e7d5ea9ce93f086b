"""Programs of the kinds found in public repositories: with a scheduler they end in the bits of the run without one.

Each program is a whole run with loops, models and wrappers of its own; those of test_programs.py are one iteration.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import programs
from support.optimizers import through_disk
from support.overlap import loss_of, mlp
from support.programs import OTHERS, Program, Setting, differences, frozen, in_settings
from torch import Tensor, nn

pytestmark = [
    pytest.mark.timeout(240),  # a hang fails with the stack of every thread
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.usefixtures("one_torch_thread"),
]


# ---- what a program is ----------------------------------------------------------------------------------------------


class Run(programs.Run):
    """A run, with small models and data for them."""

    def mlp(self, *widths: int) -> Any:
        """Return the same small model at every call; every parameter has a multiple of 64 elements."""
        torch.default_generator.manual_seed(7)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after, bias=after % 64 == 0), nn.Tanh()]
        return nn.Sequential(*layers[:-1]).to(self.dtype)

    def data(self, seed: int, *shape: int) -> Tensor:
        """Return inputs; those of one seed are always the same."""
        return torch.randn(shape or (8, 16), generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def loss(self, model: nn.Module, seed: int) -> Tensor:
        """Return the loss of a model with 16 inputs and outputs."""
        return 10 * (model(self.data(seed)).float() - self.data(seed + 1000).float()).square().mean()

    def steps(self, model: nn.Module, count: int = 4) -> Iterator[int]:
        """Yield numbers of steps of a new optimizer, which are made after what is done with each."""
        optimizer = self.adamw(model.parameters())
        with self.overlap(optimizer, model):
            for step in range(count):
                optimizer.zero_grad()
                yield step
                optimizer.step()


PROGRAMS: list[Program] = []


def program(**facts: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    def add(train: Callable[[Run], None]) -> Callable[[Run], None]:
        PROGRAMS.append(
            Program(train.__name__, lambda run: train(Run(run.setting, run.limit, run.seen, run.optimizers)), **facts)
        )
        return train

    return add


@program()
def quantized_weights_beside_those_that_are_trained(run: Run) -> None:
    """As with QLoRA, where the optimizer is given all parameters."""
    model = run.mlp(16, 64, 16)
    model.quantized = nn.Parameter((10 * run.data(5, 16, 16)).to(torch.int8), requires_grad=False)
    for step in run.steps(model):
        inputs = run.data(step)
        (model(inputs) + inputs @ model.quantized.to(run.dtype)).float().square().mean().backward()
        model.quantized.data.neg_()


# ---- parameters that grow and shrink --------------------------------------------------------------------------------


def replace(
    points: Any, optimizer: Any, change: Callable[[str, Tensor], Tensor], state: Callable[[Tensor], Tensor]
) -> None:
    """Give the optimizer changed parameters, with the state of the old ones changed likewise."""
    for group in optimizer.param_groups:
        key, (old,) = group["name"], group["params"]
        new = nn.Parameter(change(key, old.detach()))
        entry = optimizer.state[old]
        del optimizer.state[old]
        for name in entry.keys() - {"step"}:
            entry[name] = state(entry[name])
        group["params"] = [new]
        optimizer.state[new] = entry
        points[key] = new


@program()
def gaussian_splatting(run: Run) -> None:
    """Points are duplicated, dropped and reset on the way."""
    shapes = {"means": (128, 4), "colors": (128, 2), "opacities": (128, 1)}
    points: Any = nn.ParameterDict({key: run.data(seed, *shape) for seed, (key, shape) in enumerate(shapes.items())})
    groups = [{"params": [p], "lr": 0.01 * (n + 1), "name": key} for n, (key, p) in enumerate(points.items())]
    optimizer = run.adamw(groups, eps=1e-15)
    replace_all, sizes = functools.partial(replace, points, optimizer), torch.zeros(128)
    with run.overlap(optimizer, points):
        for step in range(8):
            where = run.data(900 + step, 8, 4)  # of pixels, to each of which every point contributes
            weights = (where @ points["means"].t()).softmax(-1) * points["opacities"].squeeze(-1).sigmoid()
            loss = (weights @ points["colors"]).float().sub(1).square().mean() * 100
            loss.backward()
            sizes += points["means"].grad.float().norm(dim=-1)
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:  # the 64 points with the largest gradients get copies without a history
                top = sizes.argsort(descending=True, stable=True)[:64]
                replace_all(
                    lambda key, p: torch.cat([p, p[top]]),  # noqa: B023
                    lambda value: torch.cat([value, torch.zeros_like(value[:64])]),
                )
                sizes = torch.zeros(192)
            elif step == 4:  # the 64 points that are the most transparent go
                kept = points["opacities"].detach().squeeze(-1).argsort(descending=True, stable=True)[:-64]
                replace_all(lambda key, p: p[kept], lambda value: value[kept])  # noqa: B023
                sizes = torch.zeros(128)
            elif step == 5:  # all points become rather transparent, and forget how they came to be otherwise
                replace_all(lambda key, p: p.clamp(max=-1.0) if key == "opacities" else p + 0, torch.zeros_like)
            for p in points.values():  # masters, which the program knows nothing of, are those of the new parameters
                assert frozen(optimizer.state[p].get("master", p).to(p.dtype)) == frozen(p.detach())
            run.see(loss)


# ---- steps within backward ------------------------------------------------------------------------------------------


def step_in_backward(run: Run, model: nn.Module, *, hooks_are_first: bool) -> None:
    """Make one optimizer for each parameter, which a hook steps as soon as the gradient is there."""
    optimizers = {parameter: run.adamw([parameter]) for parameter in model.parameters()}

    def step_at_once(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    with contextlib.ExitStack() as stack:
        for when in (True, False):
            for parameter, optimizer in optimizers.items():
                if when is hooks_are_first:
                    stack.callback(parameter.register_post_accumulate_grad_hook(step_at_once).remove)
                else:
                    stack.enter_context(run.overlap(optimizer, model))
        for step in range(4):
            loss = run.loss(model, step)
            loss.backward()
            run.see(loss)


@program(speculates=False)
def optimizers_in_backward(run: Run) -> None:
    """Hooks of the program run before those of the schedulers, which find no gradients."""
    step_in_backward(run, run.mlp(16, 64, 16), hooks_are_first=True)


@program()
def optimizers_in_backward_after_their_schedulers(run: Run) -> None:
    step_in_backward(run, run.mlp(16, 64, 16), hooks_are_first=False)


@program()
def graphs_that_survive_a_step(run: Run) -> None:
    """Two backwards a step apart, of losses of the same parameters: torch copies what the later one has saved."""
    model = run.mlp(16, 64, 64, 16)
    optimizer = run.adamw(model.parameters())
    with run.overlap(optimizer, model):
        for step in range(3):
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                for loss in [run.loss(model, step), run.loss(model, 500 + step)]:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            run.see(loss)


@program()
def averages_saved_between_schedulers(run: Run) -> None:
    """Swapped in through `.data`, and out again: masters keep what a bf16 weight cannot hold."""
    model = run.mlp(16, 64, 16)
    optimizer = run.adamw(model.parameters())
    for phase in range(3):
        with run.overlap(optimizer, model):
            for step in range(2):
                run.loss(model, 2 * phase + step).backward()
                optimizer.step()
                optimizer.zero_grad()
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
        through_disk(optimizer.state_dict())
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(value)


@program()
def gradients_centralized_by_hooks(run: Run) -> None:
    """Of the second layer by a hook that was registered before the scheduler's, of others by later ones."""

    def subtract(parameter: Any) -> None:
        parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))

    model = run.mlp(16, 64, 64, 16)
    model[2].weight.register_post_accumulate_grad_hook(subtract)
    for step in run.steps(model):
        for layer in (model[0], model[4]) if step == 0 else ():
            layer.weight.register_post_accumulate_grad_hook(subtract)
        run.loss(model, step).backward()
        run.see([parameter.grad.float().mean(-1) for parameter in model.parameters()])


# ---- learning to learn ----------------------------------------------------------------------------------------------


@program()
def meta_learning_on_copies(run: Run) -> None:
    """First-order MAML: a copy learns each task with an optimizer of its own; its last gradients are the outer ones."""
    model = run.mlp(16, 64, 16)
    for step in run.steps(model, 3):
        for task in range(2):
            learner = copy.deepcopy(model)
            learner.zero_grad()
            inner = run.adamw(learner.parameters(), lr=0.05)
            with run.overlap(inner, learner):
                for turn in range(3):
                    inner.zero_grad()
                    run.loss(learner, 10 * task + turn).backward()
                    inner.step()
                inner.zero_grad()
                loss = run.loss(learner, 100 * step + task)
                loss.backward()
                for parameter, copied in zip(model.parameters(), learner.parameters(), strict=True):
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    parameter.grad.add_(copied.grad, alpha=0.5)
            run.see(loss)


@program()
def reptile(run: Run) -> None:
    """Every task has a new network, with the meta weights and the moments that the last task's optimizer had.

    What the weights have moved by is the meta gradient (Nichol et al., https://arxiv.org/abs/1803.02999).
    """
    meta = run.mlp(16, 64, 16)
    optimizer = run.adamw(meta.parameters(), lr=0.1, weight_decay=0.0)
    state: dict[str, Any] | None = None
    with run.overlap(optimizer, meta):
        for task in range(4):
            network = run.mlp(16, 64, 16)
            network.load_state_dict(meta.state_dict())
            inner = run.adamw(network.parameters(), betas=(0.0, 0.999))
            if state is not None:
                inner.load_state_dict(state)
            assert frozen(network.state_dict()) == frozen(meta.state_dict()), "loading moments has changed weights"
            with run.overlap(inner, network):
                for step in range(3):
                    inner.zero_grad()
                    run.loss(network, 10 * task + step).backward()
                    inner.step()
                state = copy.deepcopy(inner.state_dict())
            for parameter, moved in zip(meta.parameters(), network.parameters(), strict=True):
                parameter.grad = parameter.detach() - moved.detach()
            optimizer.step()
            optimizer.zero_grad()


# ---- optimizers that share parameters -------------------------------------------------------------------------------


def step_together(run: Run, *, takes_turns: bool) -> None:
    model = mlp(run.dtype)
    every, some = list(model.parameters()), list(model.parameters())[2:]
    optimizers = [run.adamw(every, lr=0.05), run.adamw(some, lr=0.02)]
    with run.overlap(optimizers[0], model) as first, run.overlap(optimizers[1], model) as second:
        for seed in range(12):
            loss_of(model, seed).backward()
            for optimizer in optimizers[seed % 2 :][:1] if takes_turns else optimizers:
                optimizer.step()
            model.zero_grad()
            run.see(parameters=every)
        assert first is None or first.statistics.buckets + second.statistics.buckets > 0


@program(settings=[one for one in OTHERS if one.name == "fp32-simulated"])
def two_optimizers_with_schedulers_over_the_same_parameters(run: Run) -> None:
    step_together(run, takes_turns=False)


@program(settings=[one for one in OTHERS if one.name == "bf16-simulated"], limit=20.0)
def two_optimizers_with_schedulers_that_take_turns(run: Run) -> None:
    step_together(run, takes_turns=True)


@in_settings(PROGRAMS)
def test_program_has_the_bits_of_the_plain_run_and_of_torch(program: Program, settings: list[Setting]) -> None:
    assert differences(program, settings) == []
