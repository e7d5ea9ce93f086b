"""Iterations of training, as people write them: under a scheduler they end in the bits of the plain run.

An iteration may do anything between backward and `step()` that a program may do with torch.optim: drop, edit and read
gradients, write and read weights, change hyper-parameters, replace storage, fail and go on.
"""

import collections
import contextlib
import copy
import functools
import gc
import math
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import programs
from support.optimizers import through_disk
from support.overlap import PlantedError, RaiseInBackward, ThreadDevice, batch, slow_down
from support.programs import OTHERS, PATCHED, Program, Run, Setting, differences
from support.visible import parameters_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import clip_grad_norm_

from superadam import SpeculativeCPUAdam
from superadam.step.transaction import Transaction

pytestmark = [
    pytest.mark.timeout(240),  # a hang fails with the stack of every thread
    pytest.mark.usefixtures("one_torch_thread"),
]

# ---- what a program is ----------------------------------------------------------------------------------------------

STEPS = 4
WIDTH = 64
LIMIT = 24.0
"""Norm over which some steps of the model are clipped."""


class Net(nn.Module):
    """Every parameter has a multiple of 64 elements, and there are two of most shapes; a block's is cut into pieces."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(7)
        self.first = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)])
        self.last = nn.Linear(WIDTH, 16, bias=False)
        self.uses = (0, 1)
        self.fails_after: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for i in self.uses:
            x = x + sum(self.blocks[i](x).tanh().chunk(2, -1))
            if self.fails_after == i:
                x = RaiseInBackward.apply(x, PlantedError())
        return self.last(x)


Iteration = Callable[[Any, Any, int, Run], Any]
"""What each step does, with model, optimizer, number of the step and run; returns what it read, to be shown."""

PROGRAMS: list[Program] = []
ACTIONS: dict[str, Iteration] = {}
"""What is done between backward and step in programs that are the plainest otherwise."""


def program(
    name: str = "",
    make: Callable[[], nn.Module] = Net,
    prepare: Callable[[Any, Run], None] = lambda model, run: None,
    given: Callable[[Any], nn.Module] = lambda model: model,
    steps: int = STEPS,
    **facts: Any,
) -> Callable[[Iteration], Iteration]:
    """Add an iteration to the programs.

    Args:
        make: returns the model.
        prepare: called with model and run before the scheduler is made.
        given: returns the module that the scheduler is given.
    """

    def add(iteration: Iteration) -> Iteration:
        def train(run: Run) -> None:
            model = make().to(run.dtype)
            prepare(model, run)
            optimizer = run.adamw(model.parameters())
            with run.overlap(optimizer, given(model)):
                for step in range(steps):
                    value = iteration(model, optimizer, step, run)
                    show(run, model, optimizer, value, looks=run.setting.looks or step == steps - 1)
            run.see(gradients=[parameter.grad for parameter in model.parameters()])

        PROGRAMS.append(Program(name or iteration.__name__, train, limit=LIMIT, **facts))
        return iteration

    return add


def before_the_step(name: str = "", **facts: Any) -> Callable[[Iteration], Iteration]:
    """Add an iteration that zeroes gradients, makes its own in any way, and steps."""

    def add(body: Iteration) -> Iteration:
        def iteration(model: Any, optimizer: Any, step: int, run: Run) -> Any:
            optimizer.zero_grad()
            value = body(model, optimizer, step, run)
            optimizer.step()
            return value

        program(name or body.__name__, **facts)(iteration)
        return body

    return add


def between(**facts: Any) -> Callable[[Iteration], Iteration]:
    """Add the plainest iteration with something done between backward and step."""

    def add(action: Iteration) -> Iteration:
        ACTIONS[action.__name__] = action
        before_the_step(action.__name__, **{"settings": PATCHED, **facts})(
            lambda model, optimizer, step, run: (backward(model, step), action(model, optimizer, step, run))
        )
        return action

    return add


def after(name: str = "", **facts: Any) -> Callable[[Iteration], Iteration]:
    """Add the plainest iteration with something done after the step."""

    def add(action: Iteration) -> Iteration:
        def iteration(model: Any, optimizer: Any, step: int, run: Run) -> Any:
            plainest(model, optimizer, step, run)
            return action(model, optimizer, step, run)

        program(name or action.__name__, **facts)(iteration)
        return action

    return add


def plainest(model: Any, optimizer: Any, step: int, run: Run) -> None:
    optimizer.zero_grad()
    backward(model, step)
    optimizer.step()


def hooked(hook: Callable[[Any, Run], None], of: Callable[[Any], Any] = nn.Module.parameters) -> Callable[..., None]:
    """Return what registers a hook on parameters of a model; called before the scheduler is made, it runs earlier."""

    def prepare(model: Any, run: Run) -> None:
        for parameter in of(model):
            parameter.register_post_accumulate_grad_hook(lambda parameter: hook(parameter, run))

    return prepare


def show(run: Run, model: nn.Module, optimizer: Any, value: Any, *, looks: bool) -> None:
    """Show what can be seen after a step, with state and gradients if it `looks` at them."""
    outcome = getattr(optimizer, "last_outcome", None)
    norm = outcome and outcome.grad_norm
    if norm and optimizer.max_grad_norm is None:
        # Nothing is judged by it then: the norm of products that were recorded is computed from the norm before them,
        # without reading the gradients again, and torch rounds each product by at most this share of itself.
        norm = programs.Near(norm, torch.finfo(dtype_of(model)).eps / 2)
    seen = {"value": value, "outcome": outcome and [outcome.kind.value, norm, outcome.clip_coefficient]}
    if looks:
        seen["state"] = programs.state_of(optimizer)
        seen["gradients"] = [parameter.grad for parameter in model.parameters()]
    run.see(parameters=list(model.parameters()), **seen)


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def loss_of(model: nn.Module, step: int, micro: int = 0) -> Tensor:
    return 10 * (model(batch(100 * step + micro, dtype_of(model), width=16)).float() - 1).square().mean()


def backward(model: nn.Module, step: int, micro: int = 0) -> Tensor:
    """Make a forward and a backward; return the loss."""
    loss = loss_of(model, step, micro)
    loss.backward()
    return loss.detach()


def micro_batches(model: nn.Module, step: int, run: Run, announced: Iterable[bool]) -> list[Tensor]:
    """Make a backward for each; of those that are announced, `accumulate()` says that more follow. Return losses."""
    losses = []
    for micro, is_announced in enumerate(announced):
        with run.accumulate() if is_announced else contextlib.nullcontext():
            losses.append(backward(model, step, micro))
    return losses


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def noise(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


def reload(optimizer: Any) -> None:
    """Tell the optimizer of writes through `.data`; torch's need not be told."""
    if isinstance(optimizer, SpeculativeCPUAdam):
        optimizer.reload_masters()


# ---- gradients are dropped ------------------------------------------------------------------------------------------


@between()
def nothing(model: Any, optimizer: Any, step: int, run: Run) -> None: ...


@between()
def gradients_dropped(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """Those of one layer, or all of them, which may be zero instead."""
    if step % 2:
        optimizer.zero_grad(set_to_none=step == 1)
    else:
        model.blocks[step // 2].weight.grad = None
        del model.blocks[step // 2].bias.grad


@between()
def gradients_dropped_and_made_again(model: Any, optimizer: Any, step: int, run: Run) -> Tensor:
    model.zero_grad()
    return backward(model, step, 1)


@between()
def gradients_taken_away_and_put_back(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """The very objects that `.grad` held count again, also where others were made and dropped in between."""
    kept = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    if step % 2:
        backward(model, step, 1)
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient


@between()
def gradient_of_the_last_step_put_back(model: Any, optimizer: Any, step: int, run: Run) -> None:
    last = run.kept.get("last")
    run.kept["last"] = model.blocks[0].weight.grad
    if step % 2:
        model.blocks[0].weight.grad = last


@between()
def gradients_exchanged_or_shared(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """Both have the same gradient in the end, which is then written to once."""
    one, other = model.blocks[0].weight, model.blocks[1].weight
    if step % 2:
        model.zero_grad()
        backward(model, step)
        other.grad = one.grad
        one.grad.mul_(0.3)
    else:
        one.grad, other.grad = other.grad, one.grad


# ---- gradients are edited -------------------------------------------------------------------------------------------


@between(speculates=False)
def gradients_replaced(model: Any, optimizer: Any, step: int, run: Run) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5 + 0.01


@between()
def elements_and_views_of_gradients_written(model: Any, optimizer: Any, step: int, run: Run) -> None:
    model.last.weight.grad += 0.1 * model.last.weight.detach()
    model.blocks[0].weight.grad[3] = 0.5
    model.blocks[0].weight.grad.view(-1)[3:99].zero_()
    model.blocks[0].bias.grad[step] += 1
    model.blocks[1].weight.grad.t()[0].mul_(2)
    model.first.weight.grad[model.first.weight.grad.abs() < 0.1] = 0
    model.first.bias.grad.chunk(2)[1].neg_()
    for row in model.last.weight.grad:
        row.div_(row.norm())


@between(speculates=False)
def gradients_written_through_data(model: Any, optimizer: Any, step: int, run: Run) -> None:
    model.blocks[0].weight.grad.data.mul_(0.3)
    model.blocks[1].weight.grad.detach().mul_(0.3)
    model.first.weight.grad.data.clamp_(-0.1, 0.1)
    model.first.bias.grad.data = torch.ones_like(model.first.bias)


@between(speculates=False)
def gradients_scaled_twice_and_divided(model: Any, optimizer: Any, step: int, run: Run) -> None:
    model.blocks[0].weight.grad.mul_(0.7).mul_(1.3)
    model.blocks[1].weight.grad.div_(3)
    model.first.weight.grad.mul_(2).div_(8)
    model.first.bias.grad /= 7
    factor = torch.tensor(0.3)
    model.blocks[0].bias.grad *= factor
    factor.fill_(100)
    model.blocks[1].bias.grad.neg_()
    model.last.weight.grad.mul_(model.last.weight.grad)


@between()
def faces_of_gradients_put_in_their_place(model: Any, optimizer: Any, step: int, run: Run) -> None:
    model.blocks[0].weight.grad = model.blocks[0].weight.grad.detach()
    model.blocks[1].weight.grad = model.blocks[1].weight.grad.view_as(model.blocks[1].weight)
    model.first.weight.grad = model.first.weight.grad.data


@between()
def gradient_of_ones_own_written_after_another_backward(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """What a backward adds to is held, and written to afterwards."""
    weight = model.blocks[0].weight
    held = weight.grad = noise(weight, step)
    (weight * noise(weight, step + 1)).sum().backward()
    held.mul_(0.5)


@between(torch=False, speculates=False)
def gradients_made_finite(model: Any, optimizer: Any, step: int, run: Run) -> None:
    if step == 2:
        (loss_of(model, step) * math.inf).backward()
    for parameter in model.parameters():
        torch.nan_to_num_(parameter.grad, 0.01, 1.0, -1.0)


@between(torch=False)
def gradients_made_infinite(model: Any, optimizer: Any, step: int, run: Run) -> None:
    if step == 1:
        model.blocks[0].weight.grad[0, 0] = math.inf
    elif step == 3:
        model.blocks[0].weight.grad.mul_(math.nan)


@between(torch=False)
def step_that_raises_where_gradients_are_not_finite(model: Any, optimizer: Any, step: int, run: Run) -> str:
    if step % 2:
        model.blocks[0].weight.grad[0, 0] = math.inf
    optimizer.on_nonfinite = "raise"
    try:
        optimizer.step()
    except FloatingPointError:
        return "raised"
    finally:
        optimizer.on_nonfinite = "skip"
    return "stepped"


@before_the_step(torch=False)
def loss_that_is_not_finite(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """Alone, and after one that is."""
    for micro in range(1 + step // 2):
        with run.accumulate() if micro < step // 2 else contextlib.nullcontext():
            (loss_of(model, step, micro) * [math.nan, 1.0, [1.0, math.inf][micro], 1.0][step]).backward()


# ---- gradients are read ---------------------------------------------------------------------------------------------


@between()
def gradients_read_for_logging_and_model_evaluated(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    read: list[Any] = []
    for parameter in model.parameters():
        g = parameter.grad
        read += [g.norm(), g.abs().max(), g.mean(), torch.isnan(g).any(), (g * 2).sum(), g.float().std(), g.clone()]
        read += [g.shape, g.stride(), g.dtype, g.is_contiguous(), g.requires_grad, g.is_leaf, g.device, str(g)]
    with torch.inference_mode():
        read.append(loss_of(model.eval(), 99).item())
    return [*read, loss_of(model.train(), 98).detach()]


@between()
def copies_of_gradients_written(model: Any, optimizer: Any, step: int, run: Run) -> None:
    for parameter in model.parameters():
        g = parameter.grad
        copies = [copy.deepcopy(g), g.clone(), g.double(), g + 0, torch.stack([g, g]), torch.empty_like(g).copy_(g)]
        copies += [pickle.loads(pickle.dumps(g)), torch.tensor(g.tolist()), g.to(g.dtype, copy=True), g.half()]
        for one in copies:
            one.fill_(math.nan)


@between()
def gradients_read_and_addressed_in_transforms_and_modes(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    """Of torch.func and of fake tensors, whose tensors do not outlive them."""
    read: list[Any] = []

    def look(x: Tensor) -> Tensor:
        for gradient in gradients(model):
            read.append((gradient.tolist(), copy.deepcopy(gradient).shape))
            pickle.dumps(gradient)
        model.blocks[0].weight.grad.data_ptr()
        model.last.weight.grad.untyped_storage()
        return x.sum()

    for transform in (torch.func.grad, torch.func.functionalize, torch.vmap):
        transform(look)(torch.ones(2, 2))
    with FakeTensorMode() as mode:
        read += [gradient.tolist() for gradient in gradients(model)]
        read += [type(mode.from_tensor(gradient)) for gradient in gradients(model)[:1]]
        model.blocks[1].weight.grad.data_ptr()
    return read


@between(speculates=False)
def addresses_of_gradients_read(model: Any, optimizer: Any, step: int, run: Run) -> bool:
    return all(gradient.data_ptr() for gradient in gradients(model))


@between()
def gradients_that_are_kept_show_what_they_were(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    """`g = p.grad` outlives zero_grad() and the next backward, as any tensor does."""
    kept = run.kept.setdefault("kept", [])
    read = [[gradient.clone() for gradient in grads] for grads in kept]
    kept.append(gradients(model))
    return read


@between()
def gradients_that_are_kept_are_written_later(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """Which is nothing to the gradients of today, nor to a step that was made."""
    for gradient in run.kept.get("last", []):
        gradient.fill_(math.nan)
    run.kept["last"] = gradients(model)


@after()
def gradients_read_and_written_after_the_step(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    norms = [gradient.norm() for gradient in gradients(model)], torch.nn.utils.get_total_norm(gradients(model))
    for gradient in gradients(model):
        gradient.mul_(3)
    return norms, [gradient.sum() for gradient in gradients(model)]


# ---- torch's own clipping and scaling -------------------------------------------------------------------------------


@between(ignores=("outcome",), speculates=False)
def clipped_by_torch(model: Any, optimizer: Any, step: int, run: Run) -> Tensor:
    return clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=step % 2 == 1)


@between(ignores=("outcome",))
def clipped_by_torch_rarely(model: Any, optimizer: Any, step: int, run: Run) -> Tensor:
    return clip_grad_norm_(model.parameters(), 0.5 if step == 2 else 1e6)


@between(ignores=("outcome",), speculates=False)
def clipped_by_torch_twice_or_per_layer(model: Any, optimizer: Any, step: int, run: Run) -> list[Tensor]:
    if step % 2:
        return [clip_grad_norm_(layer.parameters(), 0.3) for layer in (model.first, *model.blocks, model.last)]
    return [clip_grad_norm_(model.parameters(), limit) for limit in (2.0, 0.7)]


@between(ignores=("outcome",), speculates=False)
def clipped_by_torch_in_other_ways(model: Any, optimizer: Any, step: int, run: Run) -> Tensor:
    if step < 3:
        limit, options = [(1.0, {"foreach": False}), (0.1, {"norm_type": math.inf}), (10.0, {"norm_type": 1})][step]
        return clip_grad_norm_(model.parameters(), limit, **options)
    norm = torch.nn.utils.get_total_norm(gradients(model))
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    return norm


@between(ignores=("outcome",), speculates=False)
def clipped_by_hand(model: Any, optimizer: Any, step: int, run: Run) -> Tensor:
    norm = torch.stack([gradient.detach().float().norm() for gradient in gradients(model)]).norm()
    for gradient in gradients(model):
        gradient.mul_(torch.clamp(1.0 / (norm + 1e-6), max=1.0))
    return norm


@between(torch=False)
def clipped_by_the_optimizer_for_one_step(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    """Torch has the same norm, and the last of several limits counts."""
    norm = torch.nn.utils.get_total_norm(gradients(model))
    return norm, optimizer.clip_grad_norm_(1e-3), optimizer.clip_grad_norm_([math.inf, 1.0, 1e6][step % 3])


def scaled_step(model: Any, optimizer: Any, step: int, run: Run, *, unscales: Any, clips: bool, micro: int = 1) -> Any:
    """Make a step with loss scaling that overflows in the third and is too large in the fourth."""
    scaler = run.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
    optimizer.zero_grad()
    for number in range(micro):
        loss = loss_of(model, step, number) * (math.inf if step == 2 else 1.0)
        with run.accumulate() if number < micro - 1 else contextlib.nullcontext():
            scaler.scale(loss).backward()
    norm, is_unscaled = None, unscales(step)
    if is_unscaled:
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0) if clips else gradients(model)[0].norm()
    scaler.step(optimizer)
    scaler.update()
    return norm if step != 2 else None, scaler.get_scale(), None if is_unscaled else loss.detach()


for _name, _unscales, _clips, _micro in (
    ("grad_scaler_at_times_unscaled", lambda step: step % 2 == 1, False, 1),
    ("grad_scaler_unscaled_and_clipped", lambda step: True, True, 1),
    ("grad_scaler_over_micro_batches", lambda step: step % 2 == 0, False, 2),
):
    _iteration = functools.partial(scaled_step, unscales=_unscales, clips=_clips, micro=_micro)
    program(_name, speculates=False, ignores=("outcome",) * _clips)(_iteration)


@program(speculates=False)
def grad_scaler_with_a_scale_that_is_no_power_of_two(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    if run.once():
        run.kept["scaler"] = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_factor=1.7, growth_interval=1)
    return scaled_step(model, optimizer, step, run, unscales=lambda step: True, clips=False)


# ---- weights are written --------------------------------------------------------------------------------------------


@program(speculates=False)
def binary_connect(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    """Weights are replaced by their signs for forward and backward, restored for the step, and clipped after it."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.sign() * 0.1)
    optimizer.zero_grad()
    loss = backward(model, step)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)
    optimizer.step()
    with torch.no_grad():
        for parameter in model.blocks[0].parameters():
            parameter.clamp_(-0.1, 0.1)
    return loss


@between(speculates=False)
def sharpness_aware_through_data(model: Any, optimizer: Any, step: int, run: Run) -> Tensor:
    """Backward is made again at the worst point nearby."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    norm = torch.stack([gradient.float().norm() for gradient in gradients(model)]).norm()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=0.5 / float(norm))
    model.zero_grad()
    loss = backward(model, step)
    for parameter, value in zip(model.parameters(), kept, strict=True):
        parameter.data = value
    return loss


@between(speculates=False)
def weights_decayed_by_hand(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """In some steps through `.data`."""
    for parameter in model.parameters():
        (parameter.data if step % 2 else parameter.detach()).mul_(0.9)
    if step % 2:
        reload(optimizer)


@between()
def one_element_written(model: Any, optimizer: Any, step: int, run: Run) -> None:
    with torch.no_grad():
        model.blocks[0].weight[1, step] = 7.0
        model.first.bias[:] = -model.first.bias


@between(torch=False, steps=5)
def one_element_written_in_a_step_that_comes_to_nothing(model: Any, optimizer: Any, step: int, run: Run) -> None:
    with torch.no_grad():
        model.blocks[0].weight[1, step] = 7.0
    match step:
        case 1:
            optimizer.zero_grad()
        case 2:
            optimizer.rollback()
            optimizer.zero_grad()
        case 3:
            model.first.weight.grad[0, 0] = math.inf


@between(speculates=False)
def weights_written_and_written_back(model: Any, optimizer: Any, step: int, run: Run) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
            parameter.neg_()


@between()
def weights_loaded(model: Any, optimizer: Any, step: int, run: Run) -> None:
    match step:
        case 1:
            run.kept["weights"] = copy.deepcopy(model.state_dict())
        case 2:
            model.load_state_dict(run.kept["weights"])
        case 3:
            for number, parameter in enumerate(model.parameters()):
                parameter.data = 0.1 * noise(parameter, number)
            reload(optimizer)


@between()
def weights_stepped_by_somebody_else_too(model: Any, optimizer: Any, step: int, run: Run) -> None:
    if run.once():
        run.kept["sgd"] = torch.optim.SGD(model.blocks[0].parameters(), lr=0.01, momentum=0.9)
    run.kept["sgd"].step()


@between(torch=False, steps=5)
def checkpoints_loaded(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """The optimizer's alone, without masters, which would be the old weights again; then both."""
    if step == 1:
        run.kept["saved"] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    elif step in (2, 3):
        weights, state = copy.deepcopy(run.kept["saved"])
        if step == 2:
            for i, entry in state["state"].items():
                if parameters_of(optimizer)[i].dtype in (torch.float32, torch.float64):  # others have one everywhere
                    entry.pop("master", None)
        else:
            model.load_state_dict(weights)
        optimizer.load_state_dict(state)


# ---- weights are read -----------------------------------------------------------------------------------------------


@between(speculates=False)
def averaged_weights_swapped_in_for_evaluation(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    average = run.kept.setdefault("average", [parameter.detach().clone() for parameter in model.parameters()])
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(average, own, 0.1)
        torch._foreach_copy_(list(model.parameters()), average)
        value = loss_of(model, 99)
        if step % 2:
            optimizer.state_dict()
        torch._foreach_copy_(list(model.parameters()), own)
    return value


@between()
def model_copied(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    """A copy has the old weights and the gradients, and trains on its own."""
    twin = pickle.loads(pickle.dumps(model)) if step % 2 else copy.deepcopy(model)
    read = [parameter.detach().clone() for parameter in twin.parameters()], [g.clone() for g in gradients(twin)]
    sgd = torch.optim.SGD(twin.parameters(), lr=0.1)
    sgd.step()
    sgd.zero_grad()
    backward(twin, step)
    sgd.step()
    return read, [parameter.detach().clone() for parameter in twin.parameters()]


@between(torch=False, speculates=False)
def model_and_optimizer_copied(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    """Both copies together go on as the originals would."""
    pair = (model, optimizer)
    twin, twins_optimizer = pickle.loads(pickle.dumps(pair)) if step % 2 else copy.deepcopy(pair)
    twins_optimizer.step()
    twins_optimizer.zero_grad()
    backward(twin, step, 1)
    twins_optimizer.step()
    return [parameter.detach() for parameter in twin.parameters()], twins_optimizer.state_dict()["state"][0]["exp_avg"]


@between(speculates=False)
def checkpoint_saved(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    weights, state = through_disk([model.state_dict(), optimizer.state_dict()])
    return weights, {i: (entry["step"], entry["exp_avg"]) for i, entry in state["state"].items()}


@before_the_step(settings=[programs.EAGER], speculates=False)
def gradients_lie_where_a_library_reduces_them(model, optimizer, step, run):
    buffers = [torch.zeros_like(parameter).detach() for parameter in model.parameters()]
    for parameter, buffer in zip(model.parameters(), buffers, strict=True):
        parameter.grad = torch.from_dlpack(buffer)  # a storage of its own in the same memory
    backward(model, step)
    for buffer in buffers:
        buffer.mul_(0.5)


@between(settings=OTHERS, given=lambda model: model.blocks[0])
def scheduler_given_one_block(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    return loss_of(model, 99).detach()


@between(speculates=False)
def state_read(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    """Which is still that of the last step."""
    state = optimizer.state
    return [state[p]["exp_avg"].clone() for p in model.parameters() if p in state], len(state)


@between(speculates=False)
def moments_written(model: Any, optimizer: Any, step: int, run: Run) -> None:
    state = optimizer.state
    if model.last.weight in state:
        state[model.last.weight]["exp_avg_sq"].add_(0.01)
        state[model.first.weight]["exp_avg"].mul_(0.5)
        state[model.blocks[0].weight]["step"].add_(3)


@between(torch=False, speculates=False, settings=[one for one in OTHERS if one.gpu_buckets == 1])
def moments_replaced_in_inference_mode(model: Any, optimizer: Any, step: int, run: Run) -> None:
    with torch.inference_mode():
        for entry in optimizer.state.values():
            entry["exp_avg"] = entry["exp_avg"] * 0.5


@between(speculates=False)
def state_assigned(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """A copy of it, or the very one that it is."""
    state = optimizer.state
    copies = {parameter: copy.deepcopy(entry) for parameter, entry in state.items()}
    optimizer.state = collections.defaultdict(dict, copies) if step % 2 else state


@between()
def state_dropped(model: Any, optimizer: Any, step: int, run: Run) -> None:
    if step == 2:
        del optimizer.state[model.first.weight]
    if step == 3:
        optimizer.state.clear()


@before_the_step(torch=False, speculates=False)
def state_cleared_in_a_hook_where_a_master_was_deleted(model: Any, optimizer: Any, step: int, run: Run) -> None:
    if step == 2:
        optimizer.state[model.first.weight].pop("master", None)
        optimizer.state_dict()
        model.last.weight.register_post_accumulate_grad_hook(lambda _: optimizer.state.clear())
    backward(model, step)


# ---- hyper-parameters are changed -----------------------------------------------------------------------------------


@between(steps=10)
def hyper_parameters_changed(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """Another one in every other step, and in others one there and back."""
    group = optimizer.param_groups[0]
    if step % 2:
        number = run.kept["number"] = run.kept.get("number", -1) + 1
        changes = [{"lr": 0.003 * step}, {"betas": (0.5 + 0.04 * step, 0.99)}, {"weight_decay": 0.2 * step}]
        changes += [{"eps": 1e-3 * step}, {"maximize": not group["maximize"]}]
        group.update(changes[number % 5])
    else:
        before, group["lr"] = group["lr"], 0.5
        group["lr"] = before


@between(torch=False, admits_8bit=False)
def amsgrad_changed(model: Any, optimizer: Any, step: int, run: Run) -> None:
    if step % 2:
        optimizer.param_groups[0]["amsgrad"] = not optimizer.param_groups[0]["amsgrad"]


@between(torch=False)
def order_changed(model: Any, optimizer: Any, step: int, run: Run) -> None:
    if step % 2:
        optimizer.param_groups[0]["params"].reverse()


@before_the_step(torch=False, speculates=False)
def amsgrad_switched_on_for_backward_only(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """Nothing is made for it."""
    optimizer.param_groups[0]["amsgrad"] = True
    backward(model, step)
    if run.scheduler is not None:
        run.scheduler.synchronize()
    optimizer.param_groups[0]["amsgrad"] = False


@between(torch=False, speculates=False)
def lr_filled_in_place(model: Any, optimizer: Any, step: int, run: Run) -> None:
    group = optimizer.param_groups[0]
    if run.once():
        group["lr"] = torch.tensor(0.01)
    group["lr"].fill_(0.002 * (step + 1))


@between(torch=False, speculates=False)
def limit_changed(model: Any, optimizer: Any, step: int, run: Run) -> None:
    optimizer.max_grad_norm = [None, 1.0, math.inf, 3.0][step]


@between(torch=False)
def parameters_moved_to_another_group(model: Any, optimizer: Any, step: int, run: Run) -> None:
    if step == 2:
        first, *others = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = others
        optimizer.add_param_group({"params": [first], "lr": 0.001})


@between(settings=OTHERS, speculates=False)
def group_added_between_backward_and_step(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """Its parameter has a gradient, and what was taken of the others still counts."""
    extra = nn.Parameter(torch.linspace(-1, 1, 64, dtype=dtype_of(model)))
    model.register_parameter(f"extra{step}", extra)
    (extra * extra.sin()).sum().backward()
    optimizer.add_param_group({"params": [extra], "lr": 0.001 * (step + 1)})


@between()
def layer_frozen_and_thawed(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """A gradient that is there counts, frozen or not."""
    model.blocks[0].requires_grad_(step % 2 == 1)


@between()
def layer_taken_out_of_the_optimizer(model: Any, optimizer: Any, step: int, run: Run) -> None:
    group = optimizer.param_groups[0]
    if step == 1:
        group["params"] = [p for p in group["params"] if p is not model.last.weight]
        del optimizer.state[model.last.weight]
    elif step == 3 and all(p is not model.last.weight for p in group["params"]):
        group["params"].append(model.last.weight)


# ---- zero_grad, accumulation, repeated steps ------------------------------------------------------------------------


@program()
def gradients_zeroed_in_place_or_not_at_all(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """A layer that is not used in an iteration is stepped with zeros."""
    if step < 3:
        optimizer.zero_grad(set_to_none=False)
    model.uses = [(0, 1), (0,), (1,)][step % 3]
    backward(model, step)
    optimizer.step()


@after()
def stepped_again_with_the_same_and_with_edited_gradients(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    read = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    if step % 2:
        model.blocks[0].weight.grad.mul_(0.5)
        optimizer.param_groups[0]["lr"] = 0.005
        optimizer.step()
        model.blocks[1].weight.grad = None
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01
    return read


@program()
def stepped_without_gradients(model: Any, optimizer: Any, step: int, run: Run) -> None:
    optimizer.zero_grad()
    optimizer.step()
    backward(model, step)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


@program()
def stepped_in_a_closure(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(model, step)

    return optimizer.step(closure)


@program(settings=[setting for setting in OTHERS if setting.name == "bf16-simulated"])
def stepped_in_autocast_to_another_dtype(model: Any, optimizer: Any, step: int, run: Run) -> None:
    backward(model, step)
    with torch.autocast("cpu", torch.float16):
        optimizer.step()


@program()
def stepped_in_another_thread(model: Any, optimizer: Any, step: int, run: Run) -> None:
    def work() -> None:
        optimizer.zero_grad()
        backward(model, step)
        if step % 2:
            optimizer.step()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()
    if step % 2 == 0:
        optimizer.step()


for _name, _counts, _is_announced in (
    ("micro_batches", [3] * STEPS, False),
    ("micro_batches_of_changing_number", [2, 1, 3, 2], False),
    ("micro_batches_of_changing_number_with_accumulate", [2, 1, 3, 2], True),
):
    before_the_step(_name)(
        lambda model, optimizer, step, run, counts=_counts, more=_is_announced: micro_batches(
            model, step, run, [more] * (counts[step] - 1) + [False]
        )
    )


@before_the_step()
def micro_batches_that_use_other_layers(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """In some steps all within `accumulate()`: a wrong hint costs time, and nothing else."""
    with run.accumulate() if step % 2 else contextlib.nullcontext():
        for micro, uses in enumerate([(0, 1), (0,), (1,)]):
            model.uses = uses if step > 1 else (0, 1)
            backward(model, step, micro)


@before_the_step(ignores=("outcome",), speculates=False)
def micro_batches_clipped_by_torch(model: Any, optimizer: Any, step: int, run: Run) -> Tensor:
    """The last one leaves out a layer."""
    for micro, model.uses in enumerate([(0, 1), (0, 1), (1,)]):
        with run.accumulate() if micro < 2 else contextlib.nullcontext():
            backward(model, step, micro)
    return clip_grad_norm_(model.parameters(), 2.0, foreach=[None, False][step % 2])


@before_the_step(speculates=False)
def micro_batches_of_which_the_last_but_one_is_not_announced(model: Any, optimizer: Any, step: int, run: Run) -> None:
    micro_batches(model, step, run, announced=(True, False, True))


@before_the_step()
def micro_batches_of_which_the_last_reaches_the_first_layer_alone(model: Any, _: Any, step: int, run: Run) -> None:
    micro_batches(model, step, run, announced=(True,))
    (10 * model.first(batch(step, dtype_of(model), width=16)).float().square().mean()).backward()


CALLS: list[Callable[[Any, Any, Any], object]] = [
    lambda model, optimizer, _: optimizer.commit(),
    lambda model, optimizer, _: optimizer.rollback(),
    lambda model, optimizer, _: optimizer.reload_masters(),
    lambda model, optimizer, _: optimizer.load_state_dict(optimizer.state_dict()),
    lambda model, optimizer, _: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    lambda model, optimizer, _: copy.deepcopy((model, optimizer)),
    lambda model, optimizer, _: optimizer.param_groups[0].update(lr=0.03),
    lambda model, optimizer, _: optimizer.clip_grad_norm_(3.0),
    lambda model, optimizer, scheduler: scheduler and (scheduler.synchronize(), scheduler.place(bucket_numel=100)),
]


@before_the_step(torch=False, steps=len(CALLS))
def micro_batches_with_a_call_in_between(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """Another one in each step."""
    for micro in range(3):
        with run.accumulate() if micro < 2 else contextlib.nullcontext():
            backward(model, step, micro)
        CALLS[step](model, optimizer, run.scheduler)


@before_the_step(speculates=False, ignores=("outcome",))
def micro_batches_with_a_look_in_between(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    read = []
    for micro in range(3):
        with run.accumulate() if micro < step else contextlib.nullcontext():
            backward(model, step, micro)
        read.append([gradient.norm() for gradient in gradients(model)])
    for gradient in gradients(model):
        gradient.div_(3)
    return read


@before_the_step(steps=6)
def last_micro_batch_retried(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """Its backward fails half way, and is made again."""
    with run.accumulate() if step > 1 else contextlib.nullcontext():
        backward(model, step)
    if step % 2:
        model.fails_after = step // 2 % 2
        with pytest.raises(PlantedError), run.accumulate() if step > 3 else contextlib.nullcontext():
            backward(model, step, 1)
        model.fails_after = None
    backward(model, step, 1)


# ---- exceptions -----------------------------------------------------------------------------------------------------


def _fail_at_times(parameter: Tensor, run: Run) -> None:
    if run.kept.get("fails"):
        raise PlantedError


def _failure(where: str) -> None:
    """Add a program whose forward, backward or hook fails in every other step, and which goes on in different ways."""
    hook = hooked(_fail_at_times, lambda model: [model.blocks[0].weight])

    def body(model: Any, optimizer: Any, step: int, run: Run) -> Any:
        if where == "a_later_hook" and run.once():
            hook(model, run)
        optimizer.zero_grad()
        ending = ["goes on", "steps", "retries", "zeroes and retries"][step // 2] if step % 2 else "retries"
        if step % 2:
            model.uses = (0, 2) if where == "forward" else (0, 1)  # there is no third block
            model.fails_after = 0 if where == "backward" else None
            run.kept["fails"] = True
            with pytest.raises((PlantedError, IndexError)):
                backward(model, step)
            model.uses, model.fails_after, run.kept["fails"] = (0, 1), None, False
        if ending == "zeroes and retries":
            optimizer.zero_grad()
        if ending.endswith("retries"):
            backward(model, step)
        if ending != "goes on":
            optimizer.step()

    prepares = {"prepare": hook} if where == "an_earlier_hook" else {}
    program(f"failure_in_{where}", steps=8, **prepares)(body)


for _where in ("forward", "backward", "an_earlier_hook", "a_later_hook"):
    _failure(_where)


@between()
def exception_while_gradients_are_edited(model: Any, optimizer: Any, step: int, run: Run) -> None:
    with contextlib.suppress(RuntimeError):
        model.blocks[0].weight.grad.add_(torch.ones(3, 5, dtype=torch.float32))
    with contextlib.suppress(RuntimeError):
        model.blocks[0].weight.grad.mul_(torch.tensor(1j))


@between(settings=OTHERS, torch=False)
def exception_in_step(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """A hyper-parameter that is out of range raises, or a hook before the step; it is made once that was mended."""

    def fail(*_: Any) -> None:
        raise PlantedError

    if step % 2:
        optimizer.param_groups[0]["lr"] = math.nan
        with pytest.raises(ValueError, match="learning rate"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01
    else:
        with optimizer.register_step_pre_hook(fail), pytest.raises(PlantedError):
            optimizer.step()


# ---- gradients in memory that others hold ---------------------------------------------------------------------------


def _flat_buffer(model: Any, run: Run) -> None:
    total = sum(parameter.numel() for parameter in model.parameters())
    run.kept["flat"] = flat = torch.zeros(total, dtype=dtype_of(model))
    offset = 0
    for parameter in model.parameters():
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()


@program(prepare=_flat_buffer, speculates=False)
def gradients_in_one_flat_buffer(model: Any, optimizer: Any, step: int, run: Run) -> Any:
    """As Megatron and apex do: zeroed, reduced and clipped as one tensor."""
    flat = run.kept["flat"]
    flat.zero_()
    backward(model, step)
    flat.mul_(0.5)
    norm = flat.float().norm()
    optimizer.step()
    return norm, flat.clone()


def _keep_a_view(parameter: Any, run: Run) -> None:
    views = run.kept.setdefault("views", [])
    ways: list[Callable[[Tensor], Tensor]] = [lambda g: g.view(-1), lambda g: g.detach()]
    ways += [lambda g: g.data[1:], lambda g: torch.empty(0, dtype=g.dtype).set_(g.untyped_storage())]
    views.append(ways[len(views) % 4](parameter.grad))


@before_the_step(prepare=hooked(_keep_a_view, lambda model: [*model.first.parameters(), *model.blocks.parameters()]))
def views_of_gradients_kept_by_an_earlier_hook_and_edited(model: Any, optimizer: Any, step: int, run: Run) -> None:
    run.kept["views"] = []
    backward(model, step)
    for view in run.kept["views"]:
        view.add_(0.01)


def _reduce(parameter: Any, run: Run) -> None:
    parameter.grad.div_(2)
    parameter.grad = parameter.grad + parameter.grad


program("gradients_reduced_by_an_earlier_hook", prepare=hooked(_reduce))(plainest)


def _turn(parameter: Any, run: Run) -> None:
    turned = torch.empty_like(parameter.grad.t(), memory_format=torch.contiguous_format).t()
    parameter.grad = turned.copy_(parameter.grad)


@program(prepare=hooked(_turn, lambda model: [layer.weight for layer in model.blocks]), torch=False)
def gradients_in_another_order_of_memory(model: Any, optimizer: Any, step: int, run: Run) -> None:
    plainest(model, optimizer, step, run)
    assert run.scheduler is None or run.scheduler.statistics.given_back_gradients == 0


def _turn_a_weight(model: Any, run: Run) -> None:
    weight = model.blocks[1].weight
    weight.data = weight.data.t().contiguous().t()


@before_the_step(prepare=_turn_a_weight, torch=False, speculates=False)
def gradient_of_two_weights_in_different_orders_of_memory(model: Any, optimizer: Any, step: int, run: Run) -> None:
    first, second = (layer.weight for layer in model.blocks)
    assert first.stride() != second.stride()
    micro_batches(model, step, run, announced=(True,))
    second.grad = first.grad


def _step_at_once(parameter: Any, run: Run) -> None:
    parameter.data.add_(parameter.grad, alpha=-0.01)
    parameter.grad = None


_step_last_at_once = hooked(_step_at_once, lambda model: [model.last.weight])
program("layer_stepped_in_an_earlier_hook", prepare=_step_last_at_once)(plainest)


@program()
def layer_stepped_in_a_later_hook(model: Any, optimizer: Any, step: int, run: Run) -> None:
    if run.once():
        _step_last_at_once(model, run)
    plainest(model, optimizer, step, run)


# ---- storage is replaced --------------------------------------------------------------------------------------------


def is_alone(tensor: Tensor) -> bool:
    """Whether a tensor's storage holds nothing else, so that it may be freed; torch cannot resize shared memory."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes and not tensor.is_shared()


@between(speculates=False)
def storage_replaced(model: Any, optimizer: Any, step: int, run: Run) -> None:
    for parameter in model.parameters():
        old = parameter.data
        parameter.data = old.clone()
        if step % 2 and is_alone(old):
            old.untyped_storage().resize_(0)
    gc.collect(1)


@between(settings=[one for one in OTHERS if one.gpu_buckets == 1], torch=False)
def weight_spread_out(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """It has gaps in its memory from then on."""
    if step == 1:
        values = model.blocks[0].weight.data
        model.blocks[0].weight.data = torch.stack([values, torch.full_like(values, math.nan)], dim=-1)[..., 0]


@between(speculates=False)
def storage_replaced_in_turns(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """Two storages that take turns, as double buffering does."""
    for name, parameter in model.named_parameters():
        key = f"{name} in {parameter.dtype}"
        other = run.kept.setdefault(key, torch.empty_like(parameter.data))
        other.copy_(parameter.data)
        run.kept[key], parameter.data = parameter.data, other


@between(speculates=False)
def storage_taken_away_and_given_back(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """As offloading does: the parameter is empty for a while."""
    kept = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    gc.collect(1)
    run.kept["waste"] = [torch.full_like(one, math.nan) for one in kept]
    for parameter, value in zip(model.parameters(), kept, strict=True):
        parameter.data = value


@between(speculates=False)
def storage_freed_and_filled_again(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """As FSDP1 and DeepSpeed do with gathered weights."""
    for parameter in filter(is_alone, model.parameters()):
        storage, kept = parameter.untyped_storage(), parameter.data.clone()
        size = storage.nbytes()
        storage.resize_(0)
        run.kept["waste"] = torch.full_like(kept, math.nan)
        storage.resize_(size)
        parameter.data.copy_(kept)


@between(speculates=False)
def storage_freed_during_backward_and_filled_again(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """A later hook frees each weight as soon as its gradient is there; it is back before the step."""

    def free(parameter: Tensor) -> None:
        kept[parameter] = parameter.data.clone()
        parameter.untyped_storage().resize_(0)

    optimizer.zero_grad()
    kept: dict[Tensor, Tensor] = {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and is_alone(parameter)]
    try:
        with contextlib.ExitStack() as hooks:
            for parameter in trained:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(free))
            backward(model, step, 1)
    finally:
        for parameter, value in kept.items():
            parameter.untyped_storage().resize_(value.untyped_storage().nbytes())
            parameter.data.copy_(value)


@between(speculates=False)
def converted_and_back(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """The gradients are converted too, and rounded where the model is fp32."""
    for layer in model.children():
        own = dtype_of(layer)
        layer.to(torch.bfloat16 if own == torch.float32 else torch.float32)
        layer.to(own)
    reload(optimizer)


@between()
def layer_converted_and_back(model: Any, optimizer: Any, step: int, run: Run) -> None:
    own = dtype_of(model)
    model.blocks[0].to(torch.float64)
    gc.collect(1)
    model.blocks[0].to(own)


@between(torch=False)
def converted_for_good(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """To fp32 only: an fp32 parameter is rounded when it is converted, but a master that it had elsewhere is not."""
    if step == 2:
        model.to(torch.float32)


@between()
def converted_to_what_it_is(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """Nothing is converted; torch sets `.grad.data` to itself all the same."""
    gc.collect(1)
    for layer in model.children():
        layer.to(dtype_of(layer))
    model.to("cpu")
    model.requires_grad_(True)


@between(speculates=False)
def blocks_exchanged(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """Their memory, or the modules."""
    one, other = model.blocks
    if step % 2:
        model.blocks[0], model.blocks[1] = other, one
    else:
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            mine.data, theirs.data = theirs.data, mine.data


@between(speculates=False)
def storage_moved_to_shared_memory(model: Any, optimizer: Any, step: int, run: Run) -> None:
    if step in (1, 3):
        model.share_memory()


@between(torch=False)
def parameters_replaced(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """As 3D Gaussian splatting does: a new parameter takes over the gradient and half of the state of an old one."""
    if step in (2, 3):
        old, params = model.blocks[0].weight, optimizer.param_groups[0]["params"]
        place = next(i for i, p in enumerate(params) if p is old)
        new = nn.Parameter(old.detach() * 0.5)
        new.grad = old.grad
        entry = dict(optimizer.state.pop(old))
        entry.pop("master", None)
        entry["exp_avg"] = entry["exp_avg"] * 0.5
        optimizer.state[new] = entry
        params[place] = new
        model.blocks[0].weight = new


# ---- the scheduler itself -------------------------------------------------------------------------------------------


@between()
def scheduler_closed(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """In the middle of a step: the gradients are in `.grad` still."""
    if run.scheduler is not None and step == 2:
        run.scheduler.close()
        assert all(type(gradient) is Tensor for gradient in gradients(model))


@program(torch=False)
def stepped_by_hand(model: Any, optimizer: Any, step: int, run: Run) -> None:
    optimizer.zero_grad()
    backward(model, step)
    if run.scheduler is None:
        optimizer.step()
    else:
        optimizer.speculate()
        optimizer.resolve()


@between()
def scheduler_placed_otherwise(model: Any, optimizer: Any, step: int, run: Run) -> None:
    if run.scheduler is not None:
        gpu_buckets, bucket_numel = [(0, 1), (1, 100), (10**6, 100), (10**6, 10**6)][step % 4]
        can_keep = run.scheduler._resident is not None
        run.scheduler.place(gpu_buckets=gpu_buckets if can_keep else None, bucket_numel=bucket_numel)


@before_the_step()
def scheduler_placed_otherwise_during_backward(model: Any, optimizer: Any, step: int, run: Run) -> None:
    def place(gradient: Tensor) -> None:
        if run.scheduler is not None:
            threads = {} if run.scheduler.placement.num_threads == 0 else {"num_threads": 1 + step // 2}
            run.scheduler.place(bucket_numel=[1, 10**6, 100, 100][step], **threads)

    with model.blocks[0].weight.register_hook(place):
        backward(model, step)


@between()
def speculated_by_hand(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """In some steps once the scheduler has nothing left to do."""
    if run.scheduler is not None:
        if step > 1:
            run.scheduler.synchronize()
        optimizer.speculate([model.blocks[0].weight] if step % 2 else None)


@between(torch=False)
def committed_or_rolled_back_by_hand(model: Any, optimizer: Any, step: int, run: Run) -> None:
    if step % 2:
        optimizer.rollback()
    else:
        optimizer.commit()


@between(torch=False, speculates=False)
def rolled_back_and_speculated_again_by_hand(model: Any, optimizer: Any, step: int, run: Run) -> None:
    optimizer.rollback()
    optimizer.speculate()


@between(torch=False, speculates=False)
def optimizer_used_in_a_transform(model: Any, optimizer: Any, step: int, run: Run) -> None:
    """Of torch.func, first where there is no state."""

    def use(x: Tensor) -> Tensor:
        optimizer.step()
        copy.deepcopy(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        return x.sum()

    (torch.func.functionalize if step % 2 else torch.func.grad)(use)(torch.ones(2))


# ---- after a step, before its state follows --------------------------------------------------------------------------

for _name in (
    "checkpoint_saved",
    "addresses_of_gradients_read",
    "weights_decayed_by_hand",
    "moments_written",
    "checkpoints_loaded",
    "hyper_parameters_changed",
    "step_that_raises_where_gradients_are_not_finite",
    "storage_replaced",
    "rolled_back_and_speculated_again_by_hand",
):
    after(f"{_name}_after_the_step", torch=False)(ACTIONS[_name])


# Passes that fold an accepted step into the state need its largest second moments where the new one does not.
after("amsgrad_changed_after_the_step", torch=False, admits_8bit=False, steps=6, settings=PATCHED[:1])(
    ACTIONS["amsgrad_changed"]
)


# ---- the tests ------------------------------------------------------------------------------------------------------


@programs.in_settings(PROGRAMS)
def test_program_has_the_bits_of_the_plain_run_and_of_torch(program: Program, settings: list[Setting]) -> None:
    assert differences(program, settings) == []


@programs.in_turn(PROGRAMS, programs.SUMS)
def test_program_has_the_bits_of_the_plain_run_with_sums_on_the_host(program, settings):
    assert differences(program, settings) == []


WHILE_THE_WORKER_WORKS = [
    one for one in PROGRAMS if one.name.startswith("storage") or one.name == "gradients_dropped_and_made_again"
]
"""Programs that take memory away, after which what the worker reads and writes must still be its own."""


@pytest.mark.parametrize("program", WHILE_THE_WORKER_WORKS, ids=str)
def test_program_has_the_bits_of_the_plain_run_with_a_slow_worker(program, monkeypatch):
    slow_down(monkeypatch, Transaction, "speculate", 0.002)
    threads = [one for one in OTHERS if one.device is ThreadDevice and one.dtype is torch.bfloat16]
    assert differences(replace(program, torch=False), threads[:1]) == []


def test_settings_do_what_they_are_for() -> None:
    """Some steps are clipped where there is a limit, and all and patched where that is asked for."""
    plainest = PROGRAMS[0]
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        shown = programs.run_in(plainest, Setting("plain", dtype, clips=True, looks=True))
        assert {one["outcome"][0] for one in shown[:STEPS]} == {"committed", "clipped"}
    for setting in PATCHED:
        run = Run(setting)
        plainest.train(run)
        assert run.optimizers[0].statistics.patched > STEPS, setting
