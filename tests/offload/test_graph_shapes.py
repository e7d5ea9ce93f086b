"""Every way in which a graph may need a parameter after its gradient is there, trained to the bits of the plain run.

Each shape trains with and without a scheduler that speculates on every gradient the moment it is complete. Parameters
keep their values until `step()`, so nothing that reads them in backward, in any way, may see a difference.
"""

import contextlib
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.overlap import batch, mlp
from support.programs import Program, Run, Setting, differences, in_settings
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.timeout(240),  # a hang fails with the stack of every thread; compiling alone takes seconds
    pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
]


class Graph(Run):
    """A run of one model, whose optimizer has a learning rate so large that a parameter of the wrong step is seen."""

    model: Any
    optimizer: Any
    seed = 0

    def inputs(self, offset: int = 0) -> Tensor:
        """Return a batch; another one in each step."""
        return batch(10 * self.seed + offset, self.dtype)

    def hint(self) -> contextlib.AbstractContextManager[None]:
        """Enter `accumulate()` for a backward that is not the last, in some settings: it is only a hint."""
        return contextlib.nullcontext() if self.setting.bucket_numel == 1 else self.accumulate()


Backward = Callable[[Graph], None]
"""Everything between `zero_grad()` and `optimizer.step()`."""

SHAPES: list[Program] = []


def shape(make: Callable[[], nn.Module], name: str = "", *, steps_itself: bool = False, **facts: Any) -> Any:
    """Add a graph: its model, and one iteration of it, which may make the step as well."""

    def add(backward: Backward) -> Backward:
        def train(run: Run) -> None:
            torch.default_generator.manual_seed(3)
            graph = Graph(run.setting, run.limit, run.seen, run.optimizers)
            graph.model = make().to(run.dtype)
            graph.optimizer = graph.adamw(graph.model.parameters(), lr=0.05, weight_decay=0.0)
            with graph.overlap(graph.optimizer, graph.model):
                for graph.seed in range(3):
                    torch.default_generator.manual_seed(graph.seed)  # dropout
                    graph.optimizer.zero_grad()
                    backward(graph)
                    if not steps_itself:
                        graph.optimizer.step()
                    graph.see(parameters=list(graph.model.parameters()))
            graph.see(products=graph.kept.get("products"), buffers=dict(graph.model.named_buffers()))

        SHAPES.append(Program(name or backward.__name__, train, torch=False, limit=20.0, **facts))
        return backward

    return add


def loss(y: Tensor) -> Tensor:
    return 30 * (y.float() - 1).square().mean()


# ---- modules --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(1)
        self.embedding, self.middle, self.head = nn.Embedding(8, 8), mlp(), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(x.argmax(-1))))


def adversaries() -> nn.ModuleDict:
    return nn.ModuleDict({"generator": mlp(), "discriminator": mlp()})


# ---- one forward, one backward --------------------------------------------------------------------------------------


@shape(Tied, "tied_weights")
def plain(run: Graph) -> None:
    loss(run.model(run.inputs())).backward()


@shape(lambda: nn.LSTM(8, 8, batch_first=True))
def lstm_one_step_at_a_time(run: Graph) -> None:
    """Truncated backpropagation: the hidden state goes on, detached."""
    hidden = None
    for offset in range(2):
        with run.hint() if offset == 0 else contextlib.nullcontext():
            y, hidden = run.model(run.inputs(offset).reshape(2, 2, 8), hidden)
            loss(y).backward()
        hidden = tuple(one.detach() for one in hidden)


@shape(lambda: nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 1, 3, stride=2)))
def convolution_and_batch_norm(run: Graph) -> None:
    loss(run.model(run.inputs().unsqueeze(1))).backward()


@shape(lambda: nn.Sequential(nn.Embedding(8, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 8)))
def embedding_layer_norm_dropout(run: Graph) -> None:
    loss(run.model(run.inputs().argmax(-1))).backward()


shape(
    lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "attention_whose_projection_is_never_called",
)(plain)


@shape(lambda: nn.ParameterList([torch.randn(8, 8) for _ in range(3)]))  # which no module's forward owns
def parameters_outside_any_forward(run: Graph) -> None:
    x = run.inputs()
    for weight in run.model:
        x = F.linear(x, weight).tanh()
    loss(x).backward()


@shape(lambda: nn.Sequential(weight_norm(nn.Linear(8, 8)), spectral_norm(nn.Linear(8, 8))))
def weight_norm_and_spectral_norm(run: Graph) -> None:
    loss(run.model(run.inputs())).backward()


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@shape(mlp)
def checkpoint_reentrant(run: Graph) -> None:
    x = run.inputs().requires_grad_()
    for layer in run.model.children():
        x = checkpoint(layer, x, use_reentrant=True)
    loss(x).backward()


@shape(mlp)
def checkpoint_reentrant_with_shared_weights(run: Graph) -> None:
    """The gradients are complete twice: each reentrant backward is one of its own."""
    x = checkpoint(run.model, run.inputs().requires_grad_(), use_reentrant=True)
    loss(checkpoint(run.model, x, use_reentrant=True)).backward()


@shape(mlp)
def no_grad_reuse_inside_a_checkpoint(run: Graph) -> None:
    def target_and_loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = run.model[4:](x)
        return (x * target).square()

    x = checkpoint(target_and_loss, run.model[:4](run.inputs()), use_reentrant=False)
    loss(run.model[4:](x)).backward()


# ---- values read past autograd --------------------------------------------------------------------------------------


@shape(mlp)
def detached_weight_in_the_graph(run: Graph) -> None:
    first, last = run.model[0], run.model[4]
    loss(last(F.linear(first(run.inputs()), last.weight.detach()))).backward()


@shape(mlp)
def saved_by_hooks_that_do_nothing_and_on_cpu(run: Graph) -> None:
    with saved_tensors_hooks(Tensor.detach, Tensor.detach):  # of which nobody checks the version any more
        y = run.model(run.inputs())
    with save_on_cpu():
        y = run.model(y)
    loss(y).backward()


# ---- hooks ----------------------------------------------------------------------------------------------------------


@shape(mlp)
def hooks_that_read_weights(run: Graph) -> None:
    """Those of later layers on the way back, and each gradient its own, as L2 regularisation does."""
    later = run.model[4].weight

    def scale(module: nn.Module, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(gradient * later.data.abs().mean() for gradient in gradients)

    if run.once():
        run.model[0].register_full_backward_pre_hook(scale)
        run.model[2].register_full_backward_pre_hook(scale)
        for parameter in run.model.parameters():
            parameter.register_hook(lambda gradient, parameter=parameter: gradient + 0.1 * parameter.detach())
    loss(run.model(run.inputs())).backward()


@shape(mlp, speculates=False)
def later_hooks_that_scale_gradients_and_read_weights_into_them(run: Graph) -> None:
    """Registered after the scheduler's, so that they find a gradient that was taken."""

    def scale(parameter: Tensor) -> None:
        parameter.grad.mul_(0.3)

    def add(parameter: Tensor) -> None:
        parameter.grad.add_(run.model[4].weight.detach().mean())

    if run.once():
        for parameter in run.model.parameters():
            parameter.register_post_accumulate_grad_hook(scale)
        run.model[0].weight.register_post_accumulate_grad_hook(add)
        run.model[4].weight.register_post_accumulate_grad_hook(add)
    loss(run.model(run.inputs())).backward()


# ---- graphs of gradients --------------------------------------------------------------------------------------------


@shape(mlp)
def gradient_penalty(run: Graph) -> None:
    x = run.inputs().requires_grad_()
    y = run.model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (loss(y) + gradient.square().sum()).backward()


@shape(mlp, speculates=False)
def create_graph_and_penalty_on_the_gradients(run: Graph) -> None:
    loss(run.model(run.inputs())).backward(create_graph=True)
    gradients = [parameter.grad for parameter in run.model.parameters()]
    torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().backward()


@shape(mlp)
def hessian_vector_product_after_backward(run: Graph) -> None:
    """As for AdaHessian or Sophia: the curvature is read between backward and step."""
    parameters = list(run.model.parameters())
    loss(run.model(run.inputs())).backward()
    gradients = torch.autograd.grad(loss(run.model(run.inputs(1))), parameters, create_graph=True)
    products = torch.autograd.grad(gradients, parameters, [torch.ones_like(one) for one in gradients])
    run.kept.setdefault("products", []).append([product.float().sum().item() for product in products])
    parameters[0].grad = parameters[0].grad + 0.01 * products[0]


@shape(mlp, speculates=False)
def graph_on_the_gradients(run: Graph) -> None:
    """Learned scales, whose own gradients are those of a loss on the gradients that they have scaled."""
    parameters = list(run.model.parameters())
    scales = [torch.full_like(parameter, 0.5, requires_grad=True) for parameter in parameters]
    loss(run.model(run.inputs())).backward()
    for parameter, scale in zip(parameters, scales, strict=True):
        parameter.grad.mul_(scale)  # type: ignore[union-attr]
        parameter.grad *= scale.sum()
    products = torch.autograd.grad(sum(parameter.grad.square().sum() for parameter in parameters), scales)  # type: ignore[union-attr,arg-type]
    run.kept.setdefault("products", []).append([product.float().sum().item() for product in products])


# ---- several backwards ----------------------------------------------------------------------------------------------


@shape(mlp)
def backward_twice(run: Graph) -> None:
    one = loss(run.model(run.inputs()))
    with run.hint():
        one.backward(retain_graph=True)
    one.backward()


@shape(mlp)
def half_of_the_inputs_at_a_time(run: Graph) -> None:
    parameters = list(run.model.parameters())
    one = loss(run.model(run.inputs()))
    with run.hint():
        one.backward(retain_graph=True, inputs=parameters[3:])
    one.backward(inputs=parameters[:3])


@shape(mlp)
def inputs_of_one_layer(run: Graph) -> None:
    loss(run.model(run.inputs())).backward(inputs=list(run.model[2 * (run.seed % 2)].parameters()))


@shape(adversaries)
def adversaries_one_after_the_other(run: Graph) -> None:
    """The discriminator's gradients of the generator's turn are thrown away, as in the usual example."""
    fake = run.model.generator(run.inputs())
    with run.hint():
        (loss(run.model.discriminator(run.inputs(1))) + loss(run.model.discriminator(fake.detach()))).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    loss(run.model.discriminator(fake)).backward()
    run.optimizer.zero_grad()
    loss(run.model.discriminator(run.inputs(2))).backward()


@shape(adversaries)
def adversaries_with_a_frozen_discriminator(run: Graph) -> None:
    fake = run.model.generator(run.inputs())
    loss(-run.model.discriminator(fake.detach())).backward()
    run.model.discriminator.requires_grad_(False)
    loss(run.model.discriminator(fake)).backward()
    run.model.discriminator.requires_grad_(True)


@shape(mlp)
def backward_inside_backward(run: Graph) -> None:
    """A hook of the outer graph runs a whole other backward."""
    x = run.model[4:](run.inputs())
    inner = loss(run.model[2:4](run.inputs(1)))
    x.register_hook(lambda gradient: inner.backward())
    loss(x).backward()


@shape(mlp)
def two_threads_with_a_layer_each(run: Graph) -> None:
    losses = [loss(layer(run.inputs())) for layer in (run.model[0], run.model[2])]
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(torch.Tensor.backward, losses)] == [None] * 2


# ---- compiled -------------------------------------------------------------------------------------------------------


def compiled(run: Graph, function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    """Return a function compiled once in a run."""
    if run.once():
        torch.compiler.reset()
        run.kept["compiled"] = torch.compile(function, backend=backend, **options)
    return run.kept["compiled"]


@shape(mlp, settings=())
def compiled_whole(run: Graph) -> None:
    loss(compiled(run, run.model, "aot_eager", fullgraph=True)(run.inputs())).backward()


def step_of(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    one = loss(model(x))
    one.backward()
    optimizer.step()
    return one.detach()


@shape(mlp, settings=(), steps_itself=True)
def compiled_over_backward_and_step(run: Graph) -> None:
    compiled(run, step_of, "aot_eager")(run.model, run.optimizer, run.inputs())


@shape(mlp, settings=(), speculates=False)
def compiled_between_backward_and_step(run: Graph) -> None:
    """Clipping by value, compiled: it writes to gradients that were taken."""

    def clamp(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.1, 0.1)

    loss(run.model(run.inputs())).backward()
    with warnings.catch_warnings(action="error"):  # as where the compiler looks into what it does not know
        compiled(run, clamp, "eager")(run.model)


@pytest.mark.slow
@in_settings(SHAPES)
def test_trains_as_without_scheduler(program: Program, settings: list[Setting]) -> None:
    assert differences(program, settings) == []
