"""Every way in which a graph may need a parameter after its gradient is there: trained right, or refused.

Each shape trains beside its twin without overlap, every parameter overwritten the moment its gradient is complete.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from overlap import adam, batch, eager, everything, mlp
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from superadam import OffloadScheduler, SpeculativeCPUAdam

pytestmark = [
    pytest.mark.timeout(60),  # a hang fails with the stack of every thread; compiling alone takes seconds
    pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
]

STEPS = 4


class Fate(enum.Enum):
    """What becomes of a shape while the scheduler overlaps."""

    TRAINS = "the bits of the run without overlap"
    REFUSED = "an error that names the remedy"
    UNNOTICED = "wrong values; documented as unsupported"


class Remedy(enum.Enum):
    """What the error says to do."""

    ACCUMULATE = "accumulate()"
    NO_OVERLAP = "overlap=False"


@dataclass
class Run:
    """One training run: with a scheduler, or the twin without."""

    model: nn.Module
    optimizer: SpeculativeCPUAdam
    scheduler: OffloadScheduler | None = None
    earlier: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    kept: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def inputs(self, offset: int = 0) -> Tensor:
        return batch(10 * self.seed + offset)


@dataclass(frozen=True)
class Shape:
    """A graph: its model, one iteration of it before `optimizer.step()`, and what becomes of it."""

    name: str
    make: Callable[[], nn.Module]
    backward: Callable[[Run], None]
    fate: Fate
    error: str
    remedy: Remedy

    def __str__(self) -> str:
        return self.name


SHAPES: list[Shape] = []


def shape(
    make: Callable[[], nn.Module], *, refused: str = "", fate: Fate | None = None, remedy: Remedy = Remedy.NO_OVERLAP
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Add a shape to the table; `refused` is what the error says, nothing where the shape just trains."""

    def add(backward: Callable[[Run], None]) -> Callable[[Run], None]:
        becomes = fate or (Fate.REFUSED if refused else Fate.TRAINS)
        SHAPES.append(Shape(backward.__name__, make, backward, becomes, refused, remedy))
        return backward

    return add


def loss(y: Tensor) -> Tensor:
    return 30 * (y.float() - 1).square().mean()


MODIFIED = "modified by an inplace operation"
SECOND = "got a second gradient before optimizer.step"
FORWARD = "forward reads parameters whose step has no verdict yet"


# ---- shapes that train ----------------------------------------------------------------------------------------------


@shape(mlp)
def plain(run: Run) -> None:
    loss(run.model(run.inputs())).backward()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.middle, self.head = nn.Embedding(8, 8), mlp(), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(x.argmax(-1))))


@shape(Tied)
def tied_weights(run: Run) -> None:
    loss(run.model(run.inputs())).backward()


@shape(mlp)
def module_used_twice(run: Run) -> None:
    loss(run.model(run.model(run.inputs()))).backward()


@shape(lambda: nn.LSTM(8, 8, num_layers=2, batch_first=True))
def lstm(run: Run) -> None:
    loss(run.model(run.inputs().reshape(2, 2, 8))[0]).backward()


@shape(lambda: nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 1, 3, stride=2)))
def convolution_and_batch_norm(run: Run) -> None:
    loss(run.model(run.inputs().unsqueeze(1))).backward()


@shape(lambda: nn.Sequential(nn.Embedding(8, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 8)))
def embedding_layer_norm_dropout(run: Run) -> None:
    loss(run.model(run.inputs().argmax(-1))).backward()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x[None], x[None], x[None])[0]
        return y


@shape(Attention)
def attention_whose_projection_is_never_called(run: Run) -> None:
    loss(run.model(run.inputs())).backward()


@shape(mlp)
def checkpoint_non_reentrant(run: Run) -> None:
    loss(checkpoint(run.model, run.inputs(), use_reentrant=False)).backward()


@shape(mlp)
def checkpoint_reentrant(run: Run) -> None:
    x = run.inputs().requires_grad_()
    for layer in run.model.children():
        x = checkpoint(layer, x, use_reentrant=True)
    loss(x).backward()


@shape(mlp)
def checkpoint_non_reentrant_with_shared_weights(run: Run) -> None:
    x = checkpoint(run.model, run.inputs(), use_reentrant=False)
    loss(checkpoint(run.model, x, use_reentrant=False)).backward()


@shape(mlp)
def nested_checkpoints(run: Run) -> None:
    def inner(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(run.model[2:], x, use_reentrant=False)
        return y

    def outer(x: Tensor) -> Tensor:
        y: Tensor = inner(run.model[:2](x)) + x
        return y

    loss(checkpoint(outer, run.inputs(), use_reentrant=False)).backward()


@shape(mlp)
def nested_reentrant_checkpoints(run: Run) -> None:
    def outer(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(run.model[2:], run.model[:2](x), use_reentrant=True)
        return y + x

    loss(checkpoint(outer, run.inputs().requires_grad_(), use_reentrant=True)).backward()


@shape(mlp)
def gradient_penalty(run: Run) -> None:
    x = run.inputs().requires_grad_()
    y = run.model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (loss(y) + gradient.square().sum()).backward()


@shape(mlp)
def norm_of_the_gradients(run: Run) -> None:
    one = loss(run.model(run.inputs()))
    gradients = torch.autograd.grad(one, list(run.model.parameters()), create_graph=True)
    (one + torch.stack([gradient.square().sum() for gradient in gradients]).sum()).backward()


@shape(mlp)
def create_graph(run: Run) -> None:
    loss(run.model(run.inputs())).backward(create_graph=True)


@shape(mlp)
def compiled_per_block(run: Run) -> None:
    if "compiled" not in run.kept:
        for layer in run.model.children():
            layer.compile(backend="aot_eager")
        run.kept["compiled"] = True
    loss(run.model(run.inputs())).backward()


@shape(mlp)
def compiled_whole(run: Run) -> None:
    if "compiled" not in run.kept:
        run.kept["compiled"] = torch.compile(run.model, backend="aot_eager", fullgraph=True)
    loss(run.kept["compiled"](run.inputs())).backward()


@shape(mlp)
def functional(run: Run) -> None:
    loss(functional_call(run.model, dict(run.model.named_parameters()), (run.inputs(),))).backward()


@shape(mlp)
def gradients_from_torch_func(run: Run) -> None:
    parameters = {name: parameter.detach() for name, parameter in run.model.named_parameters()}
    gradients = torch.func.grad(lambda p: loss(functional_call(run.model, p, (run.inputs(),))))(parameters)
    for name, parameter in run.model.named_parameters():
        parameter.grad = gradients[name]


@shape(
    lambda: nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    )
)
def weight_norm_and_spectral_norm(run: Run) -> None:
    loss(run.model(run.inputs())).backward()


class Bare(nn.Module):
    """Parameters in a list, which no module's forward owns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(3)])


@shape(Bare)
def parameters_outside_any_forward(run: Run) -> None:
    x = run.inputs()
    for weight in run.model.weights:
        x = F.linear(x, weight).tanh()
    loss(x).backward()


@shape(mlp)
def several_losses_added(run: Run) -> None:
    x = run.model[:2](run.inputs())
    (loss(run.model[2:4](x)) + loss(run.model[4:](x))).backward()


class Hooked(nn.Module):
    """Gradients changed by hooks from before the scheduler; hooks from later would find no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.layers[0].weight.register_hook(lambda gradient: gradient * 0.5)
        self.layers[2].weight.register_post_accumulate_grad_hook(self.triple)

    @staticmethod
    def triple(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(3.0)


@shape(Hooked)
def hooks_that_change_gradients(run: Run) -> None:
    loss(run.model.layers(run.inputs())).backward()


@shape(mlp)
def unused_branch(run: Run) -> None:
    chosen = run.model[:2] if run.seed % 2 else run.model[2:]
    loss(chosen(run.inputs())).backward()


@shape(mlp)
def expanded_and_transposed_gradients(run: Run) -> None:
    first, second = run.model[0].weight, run.model[2].weight
    (loss(F.linear(run.inputs(), second.t())) + first.sum()).backward()


@shape(mlp)
def saved_by_a_custom_function(run: Run) -> None:
    x = run.inputs()
    for layer in (run.model[0], run.model[2]):
        x = Multiply.apply(x, layer.weight)
    loss(x).backward()


class Multiply(torch.autograd.Function):
    """A linear layer that keeps its weight in the context, past the version checks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0] @ ctx.weight, gradients[0].t() @ ctx.saved_tensors[0]


class Adversaries(nn.Module):
    """A generator and a discriminator; the optimizer at work is the discriminator's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(), mlp()


@shape(Adversaries)
def adversaries_in_one_optimizer(run: Run) -> None:
    """Backward through both, with gradients for one of them: `inputs=` leaves the others alone."""
    fake = run.model.generator(run.inputs())
    which = [run.model.generator, run.model.discriminator][run.seed % 2]
    loss(run.model.discriminator(fake)).backward(inputs=list(which.parameters()))


@shape(Adversaries)
def adversaries_one_after_the_other(run: Run) -> None:
    """The discriminator's gradients of the generator's turn are thrown away, as in the usual example."""
    fake = run.model.generator(run.inputs())
    with run.earlier() if run.scheduler is not None else contextlib.nullcontext():
        (loss(run.model.discriminator(run.inputs(1))) + loss(run.model.discriminator(fake.detach()))).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    loss(run.model.discriminator(fake)).backward()
    run.optimizer.zero_grad()
    loss(run.model.discriminator(run.inputs(2))).backward()


# ---- shapes that are refused ----------------------------------------------------------------------------------------


@shape(mlp, refused=f"{SECOND}|{FORWARD}")
def checkpoint_reentrant_with_shared_weights(run: Run) -> None:
    x = checkpoint(run.model, run.inputs().requires_grad_(), use_reentrant=True)
    loss(checkpoint(run.model, x, use_reentrant=True)).backward()


@shape(Bare, refused=SECOND)
def checkpoint_reentrant_with_shared_bare_weights(run: Run) -> None:
    def layer(x: Tensor) -> Tensor:
        return F.linear(x, run.model.weights[0]).tanh()

    x = checkpoint(layer, run.inputs().requires_grad_(), use_reentrant=True)
    loss(checkpoint(layer, x, use_reentrant=True)).backward()


@shape(mlp, refused=FORWARD)
def no_grad_reuse_inside_a_checkpoint(run: Run) -> None:
    def target_and_loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = run.model[4:](x)
        return (x * target).square()

    x = checkpoint(target_and_loss, run.model[:4](run.inputs()), use_reentrant=False)
    loss(run.model[4:](x)).backward()


class Reuse(nn.Module):
    """A block that reads its layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()[0]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.layer.weight.detach().norm()


@shape(lambda: nn.Sequential(nn.Linear(8, 8), Reuse()), refused=FORWARD)
def bare_reuse_inside_a_checkpointed_block(run: Run) -> None:
    first, reuse = run.model
    loss(reuse.layer(checkpoint(reuse, first(run.inputs()), use_reentrant=False))).backward()


class Detached(nn.Module):
    """A layer scaled by what is computed from another layer's weight, outside the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[4](F.linear(self.layers[0](x), self.layers[4].weight.detach()))
        return y


@shape(Detached, refused=MODIFIED)
def detached_weight_in_the_graph(run: Run) -> None:
    loss(run.model(run.inputs())).backward()


@shape(mlp, refused=f"{SECOND}|{MODIFIED}", remedy=Remedy.ACCUMULATE)
def backward_twice(run: Run) -> None:
    one = loss(run.model(run.inputs()))
    with run.earlier():
        one.backward(retain_graph=True)
    one.backward()


@shape(mlp, refused=f"{SECOND}|{MODIFIED}", remedy=Remedy.ACCUMULATE)
def two_forwards_before_two_backwards(run: Run) -> None:
    first, second = loss(run.model(run.inputs())), loss(run.model(run.inputs(1)))
    with run.earlier():
        first.backward()
    second.backward()


@shape(mlp, refused=FORWARD, remedy=Remedy.ACCUMULATE)
def micro_batches_without_accumulate(run: Run) -> None:
    with run.earlier():
        loss(run.model(run.inputs())).backward()
    loss(run.model(run.inputs(1))).backward()


@shape(mlp, refused=FORWARD, remedy=Remedy.ACCUMULATE)
def compiled_micro_batches_without_accumulate(run: Run) -> None:
    compiled = run.kept.setdefault("compiled", torch.compile(run.model, backend="aot_eager"))
    with run.earlier():
        loss(compiled(run.inputs())).backward()
    loss(compiled(run.inputs(1))).backward()


@shape(mlp, refused=f"{SECOND}|{MODIFIED}", remedy=Remedy.ACCUMULATE)
def losses_one_by_one_over_a_shared_trunk(run: Run) -> None:
    x = run.model[:2](run.inputs())
    with run.earlier():
        loss(run.model[2:4](x)).backward(retain_graph=True)
    loss(run.model[4:](x)).backward()


@shape(mlp, refused=MODIFIED, remedy=Remedy.ACCUMULATE)
def half_of_the_inputs_at_a_time(run: Run) -> None:
    parameters = list(run.model.parameters())
    one = loss(run.model(run.inputs()))
    with run.earlier():
        one.backward(retain_graph=True, inputs=parameters[3:])
    one.backward(inputs=parameters[:3])


@shape(Adversaries, refused=FORWARD, remedy=Remedy.ACCUMULATE)
def adversaries_with_gradients_left_behind(run: Run) -> None:
    with run.earlier():
        loss(run.model.discriminator(run.model.generator(run.inputs()))).backward()
    loss(run.model.discriminator(run.inputs(1))).backward()


# ---- shapes that nobody can notice ----------------------------------------------------------------------------------


@shape(lambda: nn.ModuleDict({"layers": mlp()}), fate=Fate.UNNOTICED)
def value_read_through_data(run: Run) -> None:
    layers = run.model["layers"]
    loss(layers[4](F.linear(layers[0](run.inputs()), layers[4].weight.data))).backward()


@shape(Bare, fate=Fate.UNNOTICED)
def bare_value_read_again_by_a_checkpoint(run: Run) -> None:
    weight = run.model.weights[0]

    def scaled(x: Tensor) -> Tensor:
        return x * weight.detach().norm() * run.model.weights[1].sum()

    loss(F.linear(checkpoint(scaled, run.inputs(), use_reentrant=False), weight)).backward()


# ---- the checks -----------------------------------------------------------------------------------------------------


def start(one: Shape, *, overlap: bool | None) -> Run:
    """Return a run; `overlap` is the scheduler's argument, None for a run without scheduler."""
    torch.compiler.reset()
    torch.manual_seed(3)
    model = one.make()
    optimizer = adam(model)
    if overlap is None:
        return Run(model, optimizer)
    scheduler = eager(optimizer, model, overlap=overlap)
    return Run(model, optimizer, scheduler, scheduler.accumulate)


def go(run: Run, one: Shape, steps: int) -> dict[str, Any]:
    """Train, and return parameters, buffers and state as bits."""
    for run.seed in range(steps):
        torch.manual_seed(run.seed)  # dropout
        run.optimizer.zero_grad()
        one.backward(run)
        run.optimizer.step()
    run.optimizer.zero_grad()
    return everything(run.model, run.optimizer)


def with_fate(fate: Fate) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("one", [one for one in SHAPES if one.fate is fate], ids=str)


@with_fate(Fate.TRAINS)
def test_trains_as_without_overlap(one: Shape) -> None:
    run = start(one, overlap=True)
    assert run.scheduler is not None
    with run.scheduler:
        assert go(run, one, STEPS) == go(start(one, overlap=None), one, STEPS)
    assert run.scheduler.statistics.speculated_buckets > 0 or one.name == "gradients_from_torch_func"


@with_fate(Fate.REFUSED)
def test_is_refused_and_then_trains_with_the_remedy(one: Shape) -> None:
    run = start(one, overlap=True)
    assert run.scheduler is not None
    run.earlier = contextlib.nullcontext
    before = everything(run.model, run.optimizer)
    with pytest.raises(RuntimeError, match=one.error) as caught, run.scheduler:
        go(run, one, 1)
    assert one.remedy.value in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    run.optimizer.zero_grad()
    assert everything(run.model, run.optimizer) == before
    again = start(one, overlap=one.remedy is not Remedy.NO_OVERLAP)
    assert again.scheduler is not None
    with again.scheduler:
        assert go(again, one, STEPS) == go(start(one, overlap=None), one, STEPS)


@with_fate(Fate.UNNOTICED)
def test_is_wrong_as_documented_and_right_without_overlap(one: Shape) -> None:
    expected = go(start(one, overlap=None), one, STEPS)
    assert go(start(one, overlap=True), one, STEPS) != expected
    assert go(start(one, overlap=False), one, STEPS) == expected
    assert "overlap=False" in str(OffloadScheduler.__doc__)
    assert "`p.data`" in str(OffloadScheduler.__doc__)
