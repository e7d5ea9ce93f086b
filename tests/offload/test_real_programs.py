"""Programs of the kinds found in public repositories: with a scheduler they end in the bits of the run without one.

Each program is a whole run with loops, models and wrappers of its own; those of test_programs.py are one iteration.
"""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import programs
from support.optimizers import through_disk
from support.programs import Program, Setting, differences, frozen, in_settings, state_of
from support.visible import parameters_of
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

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
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape or (8, 16), generator=generator).to(self.dtype)

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
    """Add a program to the table."""

    def add(train: Callable[[Run], None]) -> Callable[[Run], None]:
        PROGRAMS.append(
            Program(train.__name__, lambda run: train(Run(run.setting, run.limit, run.seen, run.optimizers)), **facts)
        )
        return train

    return add


# ---- adversarial networks -------------------------------------------------------------------------------------------


@program()
def gan_whose_critic_is_frozen_for_the_generator(run: Run) -> None:
    """The critic's step is made of two backwards; its parameters ask for no gradients while the generator learns."""
    generator, critic = run.mlp(16, 64, 16), run.mlp(16, 64, 1)
    of_generator, of_critic = run.adamw(generator.parameters()), run.adamw(critic.parameters())
    real, fake = torch.ones(8, 1), torch.zeros(8, 1)
    with run.overlap(of_generator, generator), run.overlap(of_critic, critic):
        for step in range(4):
            made = generator(run.data(step))
            critic.requires_grad_(True)
            critic.zero_grad()
            binary_cross_entropy_with_logits(critic(run.data(500 + step)).float(), real).backward()
            binary_cross_entropy_with_logits(critic(made.detach()).float(), fake).backward()
            of_critic.step()
            critic.requires_grad_(False)
            generator.zero_grad()
            loss = binary_cross_entropy_with_logits(critic(made).float(), real)
            loss.backward()
            of_generator.step()
            run.see(loss)


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
    sizes = torch.zeros(128)
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
                replace(
                    points,
                    optimizer,
                    lambda key, p: torch.cat([p, p[top]]),  # noqa: B023
                    lambda value: torch.cat([value, torch.zeros_like(value[:64])]),
                )
                sizes = torch.zeros(192)
            elif step == 4:  # the 64 points that are the most transparent go
                kept = points["opacities"].detach().squeeze(-1).argsort(descending=True, stable=True)[:-64]
                replace(points, optimizer, lambda key, p: p[kept], lambda value: value[kept])  # noqa: B023
                sizes = torch.zeros(128)
            elif step == 5:  # all points become rather transparent, and forget how they came to be otherwise
                replace(
                    points,
                    optimizer,
                    lambda key, p: p.clamp(max=-1.0) if key == "opacities" else p + 0,
                    torch.zeros_like,
                )
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
                    handle = parameter.register_post_accumulate_grad_hook(step_at_once)
                    stack.callback(handle.remove)
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


# ---- reinforcement learning -----------------------------------------------------------------------------------------


@program()
def proximal_policy_optimization(run: Run) -> None:
    """Several epochs over what an older policy has done; an epoch ends between backward and step if it went too far."""
    policy, value = run.mlp(16, 64, 64), run.mlp(16, 64, 1)
    target = copy.deepcopy(value).requires_grad_(False)
    optimizer = run.adamw([*policy.parameters(), *value.parameters()])
    stops = 0
    with run.overlap(optimizer, nn.ModuleList([policy, value])):
        for rollout in range(3):
            old_policy = copy.deepcopy(policy)  # with the gradients of an epoch that ended early
            with torch.no_grad():
                states = run.data(rollout, 16, 16)
                chances = old_policy(states).float().log_softmax(-1)
                actions = (chances + run.data(50 + rollout, 16, 64).float()).argmax(-1, keepdim=True)
                old = chances.gather(-1, actions).squeeze(-1)
                rewards = actions.squeeze(-1).float() / 32 - 1
                advantages = rewards - target(states).float().squeeze(-1)
            for epoch in range(3):
                order = torch.randperm(16, generator=torch.Generator().manual_seed(10 * rollout + epoch))
                for batch in order.split(8):
                    new = policy(states[batch]).float().log_softmax(-1).gather(-1, actions[batch]).squeeze(-1)
                    ratio = (new - old[batch]).exp()
                    gain = torch.minimum(ratio * advantages[batch], ratio.clamp(0.8, 1.2) * advantages[batch]).mean()
                    error = (value(states[batch]).float().squeeze(-1) - rewards[batch]).square().mean()
                    optimizer.zero_grad()
                    (0.5 * error - gain).backward()
                    norm = nn.utils.clip_grad_norm_(parameters_of(optimizer), 0.5 if rollout else 1e3)
                    run.see(gain, error, norm)
                    if (old[batch] - new).mean() > 0.1:
                        stops += 1
                        break
                    optimizer.step()
                else:
                    with torch.no_grad():
                        for slow, fast in zip(target.parameters(), value.parameters(), strict=True):
                            slow.mul_(0.9).add_(fast, alpha=0.1)
                    continue
                break
            run.see([p.detach() for p in (*target.parameters(), *old_policy.parameters())])
    assert stops, "no epoch has ended early"


# ---- averaged weights -----------------------------------------------------------------------------------------------


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


# ---- gradients between backward and step ----------------------------------------------------------------------------


@program(speculates=False)
def accumulation_weighted_by_tokens(run: Run) -> None:
    """Sums of losses are divided by the number of tokens of all micro-batches, which is known after the last one."""
    model = run.mlp(16, 64, 64)
    for step in run.steps(model, 5):
        tokens = 0
        lengths = [(3, 8, 5), (8,), (2, 6)][step % 3]
        for micro, length in enumerate(lengths):
            logits = model(run.data(10 * step + micro, length, 16)).float()
            cross_entropy(logits, torch.arange(length) * 7 % 64, reduction="sum").backward()
            tokens += length
        for parameter in model.parameters():
            parameter.grad.div_(tokens)
        run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.3))


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


# ---- gradients made by the program ----------------------------------------------------------------------------------


@program(speculates=False)
def gradients_of_torch_func(run: Run) -> None:
    """No backward at all: gradients come from `grad` and `vmap`, and are put where the optimizer looks for them."""
    model = run.mlp(16, 64, 16)

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(model, values, (x.unsqueeze(0),)).squeeze(0).float() - y.float()).square().mean()

    for step in run.steps(model):
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        each = vmap(grad(loss), in_dims=(None, 0, 0))(values, run.data(step), run.data(step + 1000))
        for name, parameter in model.named_parameters():
            parameter.grad = each[name].mean(0)
        run.see({name: value.float().flatten(1).norm(dim=1) for name, value in each.items()})


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


# ---- language models ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A decoder's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """A language model whose blocks are computed again in backward; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(7)
        self.embedding, self.blocks = nn.Embedding(64, 64), nn.ModuleList([Block()])
        self.norm = nn.LayerNorm(64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return linear(self.norm(x), self.embedding.weight)


class Pretraining:
    """A loop in the manner of nanoGPT and LitGPT, which can be saved and resumed after any step."""

    def __init__(self, run: Run) -> None:
        self.run, self.step = run, 0
        self.model = Decoder().to(run.dtype)
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (0.0, 0.1)]
        for parameter in self.model.parameters():
            groups[parameter.dim() > 1]["params"].append(parameter)
        self.optimizer = run.adamw(groups, lr=0.0, betas=(0.9, 0.95))
        self.generator = torch.Generator().manual_seed(5)

    def loss(self) -> Tensor:
        tokens = torch.randint(64, (2, 9), generator=self.generator)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(tokens[:, :-1])
        return cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def train(self, until: int) -> None:
        while self.step < until:
            rate = 0.01 * min((self.step + 1) / 2, 0.55 + 0.45 * math.cos(math.pi * self.step / 8))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            for _ in range(2):
                (self.loss() / 2).backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 15.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.run.see(norm)
            if self.step % 2 == 0:
                self.evaluate()

    @torch.no_grad()
    def evaluate(self) -> None:
        kept = self.generator.get_state()
        self.model.eval()
        self.run.see([self.loss() for _ in range(2)])
        self.model.train()
        self.generator.set_state(kept)

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer")}
        return {**parts, "step": self.step, "generator": self.generator.get_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name in ("model", "optimizer"):
            getattr(self, name).load_state_dict(saved[name])
        self.step = saved["step"]
        self.generator.set_state(saved["generator"])


@program()
def pretraining_saved_and_resumed(run: Run) -> None:
    first = Pretraining(run)
    with run.overlap(first.optimizer, first.model):
        first.train(2)
        saved = through_disk(first.state_dict())
        first.train(4)
    second = Pretraining(run)
    with run.overlap(second.optimizer, second.model):
        second.load_state_dict(saved)
        second.train(4)
    assert frozen(second.model.state_dict()) == frozen(first.model.state_dict())
    assert frozen(state_of(second.optimizer)) == frozen(state_of(first.optimizer))


# ---- the test -------------------------------------------------------------------------------------------------------


@in_settings(PROGRAMS)
def test_program_has_the_bits_of_the_plain_run_and_of_torch(program: Program, settings: list[Setting]) -> None:
    assert differences(program, settings) == []
