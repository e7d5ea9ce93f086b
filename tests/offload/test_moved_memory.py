"""Memory of parameters and state that is moved, freed, reshaped and shared: the bits of the run without a scheduler.

`support/moved_memory.py` draws the programs. `make sanitize` tries many of them with kernels that notice each access to
memory that is not there.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import moved_memory
from support.children import exit_code_of_child
from support.deep import TIMES
from support.moved_memory import ACTIONS, SETTINGS, difference
from support.overlap import KeepingDevice
from support.visible import bits, visible
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW

PARTS, PROGRAMS = 4, 20 * TIMES  # in each part

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("part", range(PARTS))
def test_programs_end_in_the_bits_of_the_plain_run(part: int) -> None:
    seeds = range(part * PROGRAMS, (part + 1) * PROGRAMS)
    assert [found for seed in seeds if (found := difference(seed, SETTINGS[seed % len(SETTINGS)]))] == []


@pytest.mark.parametrize("part", range(4))
def test_each_action_alone(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under both devices, once or more."""
    for seed, action in enumerate(ACTIONS):
        if seed % 4 == part:
            monkeypatch.setattr(moved_memory, "ACTIONS", [action])
            assert difference(seed, *SETTINGS[:2]) is None, action.name


AS_TORCH = [
    *("read", "assign", ".data = clone", ".data = zeros", "set_", "swap_tensors", "freed and filled again"),
    *("freed and replaced", "storage grows", "share_memory_", "write", "write through .data", "write through numpy"),
    *("put and hold", "put rows of more and hold", "hold", "hold an alias", "hold .data", "hold a state dict"),
    *("exchange", "pickled", "write the count", "load", "parameter: .data = clone", "both: transposed"),
    *("parameter: freed and replaced", "parameter: freed and filled again", "parameter: share_memory_"),
]


class Alone:
    """A program of one parameter without a scheduler, with any optimizer."""

    def __init__(self, cls: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.parameter = nn.Parameter(torch.randn(64, 64))
        self.optimizer, self.held = cls([self.parameter], lr=1e-2, **options), []

    tensor = moved_memory.Run.tensor

    def train(self, action: moved_memory.Action, key: str) -> list[Tensor]:
        for step in range(6):
            self.parameter.grad = torch.randn(64, 64)
            self.optimizer.step()
            if step in (1, 3):
                with torch.no_grad():
                    action.do(self, self.parameter, key)
        entry = self.optimizer.state[self.parameter]
        held = [one for one in self.held if isinstance(one, Tensor)]
        return [self.parameter.detach(), entry["exp_avg"], entry["exp_avg_sq"], *held]


def test_as_torch() -> None:
    """In a process of its own, which would die where kernels used memory that was freed."""

    def compare() -> None:
        for action, key in itertools.product(ACTIONS, ("exp_avg", "exp_avg_sq")):
            if action.name in AS_TORCH:
                theirs = Alone(torch.optim.AdamW, fused=True).train(action, key)
                assert all(map(torch.equal, theirs, Alone(SpeculativeCPUAdamW).train(action, key))), (action.name, key)

    assert {*AS_TORCH} <= {action.name for action in ACTIONS}
    assert exit_code_of_child(compare) == 0


def test_a_gradient_without_memory_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(64))
    optimizer = SpeculativeCPUAdamW([parameter])
    parameter.grad = torch.ones(64)
    parameter.grad.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="the gradient of parameter 0 of group 0 has no data"):
        optimizer.step()
    assert not optimizer.state


# ---- what programs hold ----------------------------------------------------------------------------------------------


class Twins:
    """A model of two bf16 layers that trains under a scheduler, and the same one without."""

    def __init__(self, **options: Any) -> None:
        self.models = [nn.ParameterList([torch.ones(9, 64), torch.ones(70)]).bfloat16() for _ in range(2)]
        self.optimizers = [SpeculativeCPUAdamW(model.parameters(), lr=1e-3, **options) for model in self.models]
        self.scheduler = OffloadScheduler(self.optimizers[0], self.models[0], num_threads=1, bucket_numel=500)
        self.generator = torch.Generator().manual_seed(0)

    def train(self, steps: int, before_step: Callable[[Any, Tensor], object] | None = None) -> int:
        """Make steps; return how many parameters' speculation was accepted meanwhile."""
        accepted = self.optimizers[0].statistics.accepted
        for _ in range(steps):
            values = [torch.randn(p.shape, generator=self.generator).bfloat16() for p in self.models[0]]
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                sum((p * value).sum() for p, value in zip(model, values, strict=True)).backward()
                if optimizer is self.optimizers[0]:
                    self.scheduler.synchronize()
                if before_step is not None:
                    before_step(optimizer, model[0])
                optimizer.step()
                optimizer.zero_grad()
        return self.optimizers[0].statistics.accepted - accepted


TENSOR: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda tensor: tensor,
    "an alias": torch.Tensor.detach,
    ".data": lambda tensor: tensor.data,
    "a view": lambda tensor: tensor[1:],
    "its storage": torch.Tensor.untyped_storage,
    "an array": lambda tensor: tensor.numpy(),
    "a capsule": torch.utils.dlpack.to_dlpack,
    "a graph": lambda tensor: (tensor * torch.ones_like(tensor).requires_grad_()).grad_fn,
}


def base_of_a_view(optimizer: Any, parameter: Tensor) -> Tensor:
    """Let a view stand for a moment, which may be written to through the tensor that it is a view of."""
    entry, base = optimizer.state[parameter], torch.zeros(2, *parameter.shape)
    entry["exp_avg"] = base[1].copy_(entry["exp_avg"])
    return base


def put_in(dtype: torch.dtype) -> Callable[[Any, Tensor], Tensor]:
    """Return what lets a tensor of another dtype stand for a moment, as PartialFC does."""

    def put(optimizer: Any, parameter: Tensor) -> Tensor:
        stand_in: Tensor = optimizer.state[parameter]["exp_avg"].to(dtype)
        optimizer.state[parameter]["exp_avg"] = stand_in
        return stand_in

    return put


WRITTEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a base": base_of_a_view,
    "a moment in bf16": put_in(torch.bfloat16),
    "a moment in fp64": put_in(torch.float64),
}
"""What is held, and written to."""
HOLDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "the dict": lambda optimizer, p: optimizer.state,
    "a state dict": lambda optimizer, p: optimizer.state_dict(),
    "an entry": lambda optimizer, p: optimizer.state[p],
    "its count": lambda optimizer, p: optimizer.state[p]["step"],
    **WRITTEN,
    **{
        f"{name}: {key}": lambda optimizer, p, hold=hold, key=key: hold(optimizer.state[p][key])
        for (name, hold), key in zip(TENSOR.items(), itertools.cycle(["exp_avg", "master", "exp_avg_sq"]), strict=False)
    },
}


@pytest.fixture
def twins() -> Iterator[Twins]:
    twins = Twins()
    twins.train(2)
    yield twins
    twins.scheduler.close()


@pytest.mark.parametrize("hold", HOLDS)
def test_state_that_is_held_is_stepped_in_step_alone(hold: str, twins: Twins) -> None:
    """So that no other thread reads memory that a program may free at any time."""
    assert twins.train(2) == 4
    held = [HOLDS[hold](*pair) for pair in zip(twins.optimizers, [m[0] for m in twins.models], strict=True)]
    assert twins.train(3) == (0 if hold in ("the dict", "a state dict") else 3)
    if hold in WRITTEN:
        assert bits(held[0]) == bits(held[1])
        for one in held:
            one.mul_(0.5)
        del one
        assert twins.train(1) == 1
        assert bits(held[0]) == bits(held[1])
    assert visible(twins.optimizers[0]) == visible(twins.optimizers[1])
    del held
    twins.train(1)
    assert twins.train(2) == 4
    assert visible(twins.optimizers[0]) == visible(twins.optimizers[1])


def test_state_that_another_library_may_write_to_is_stepped_in_step_alone(twins: Twins) -> None:
    """Nobody counts that it has the memory."""
    buffers = []
    for optimizer, model in zip(twins.optimizers, twins.models, strict=True):
        buffers.append(optimizer.state[model[0]]["exp_avg"].clone())
        optimizer.state[model[0]]["exp_avg"] = torch.from_dlpack(buffers[-1])
    twins.train(1)
    assert twins.train(3, lambda optimizer, _: buffers[twins.optimizers.index(optimizer)].mul_(0.5)) == 3
    assert bits(buffers[0]) == bits(buffers[1])
    assert visible(twins.optimizers[0]) == visible(twins.optimizers[1])
    for optimizer, model, buffer in zip(twins.optimizers, twins.models, buffers, strict=True):
        optimizer.state[model[0]]["exp_avg"] = buffer.clone()
    twins.train(1)
    assert twins.train(2) == 4
    assert visible(twins.optimizers[0]) == visible(twins.optimizers[1])


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_a_state_dict_that_is_kept_is_live_as_a_whole(moments: str) -> None:
    twins = Twins(moments=moments)
    twins.train(2)
    kept = [optimizer.state_dict()["state"] for optimizer in twins.optimizers]
    for step in range(3, 6):
        twins.train(1)
        for one in kept:
            now = twins.optimizers[0].state_dict()["state"]
            assert {key: bits(value) for key, value in one[0].items()} == {k: bits(v) for k, v in now[0].items()}
            assert one[0]["step"] == step
    twins.scheduler.close()


# ---- memory that is gone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, KeepingDevice()], ids=["host", "elsewhere"])
def test_a_freed_parameter_that_is_cut_is_not_sampled_until_it_has_memory(device: KeepingDevice | None) -> None:
    model = nn.ParameterList([torch.ones(100, 100), torch.ones(64)]).bfloat16()
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-3)
    with OffloadScheduler(optimizer, model, num_threads=1, bucket_numel=4096, device=device):
        for parameters in ([*model], [model[1]]):
            sum(parameter.float().sum() for parameter in parameters).backward()
            if len(parameters) == 1:
                kept = model[0].detach().clone()
                model[0].untyped_storage().resize_(0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer._adopt_sampled_writes()
        model[0].data = kept * 2
        model[0].float().sum().backward()
        optimizer.step()
        assert optimizer.state[model[0]]["master"].min() > 1.5


CALLS: dict[str, Callable[[SpeculativeCPUAdamW], object]] = {
    "state": lambda optimizer: optimizer.state,
    "state_dict": SpeculativeCPUAdamW.state_dict,
    "commit": SpeculativeCPUAdamW.commit,
    "reload_masters": SpeculativeCPUAdamW.reload_masters,
    "step": SpeculativeCPUAdamW.step,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("key", ["master", "exp_avg"])
@pytest.mark.parametrize("formats", [{}, {"moments": "8bit", "master": "24bit"}], ids=["fp32", "small"])
def test_freed_state_is_refused_until_it_is_replaced(call: str, key: str, formats: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.ones(64, 64).bfloat16())
    optimizer = SpeculativeCPUAdamW([parameter], lr=0.1, **formats)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    freed = optimizer.state[parameter][key]
    kept = freed.clone()
    freed.untyped_storage().resize_(0)
    with torch.no_grad():
        parameter.mul_(2)
    told = f"{key} of parameter 0 of group 0 .* expected .* in memory"
    can_be_put_right = call.startswith("state")
    with nullcontext() if can_be_put_right else pytest.raises(ValueError, match=told):
        CALLS[call](optimizer)
    before = bits(parameter)
    with pytest.raises(ValueError, match=told):
        optimizer.step()
    assert bits(parameter) == before
    optimizer.state[parameter][key] = kept
    optimizer.step()
    assert bits(parameter) != before
    assert optimizer.state[parameter]["step"] == 3


# ---- stand-ins -------------------------------------------------------------------------------------------------------


def test_a_stand_in_stays_while_the_dict_is_held_that_has_it() -> None:
    parameter = nn.Parameter(torch.ones(64))
    optimizer = SpeculativeCPUAdamW([parameter])
    parameter.grad = torch.ones(64)
    optimizer.step()
    held = optimizer.state
    held[parameter]["exp_avg"] = held[parameter]["exp_avg"].double()
    for _ in range(2):
        before = bits(held[parameter]["exp_avg"])
        optimizer.step()
        assert held[parameter]["exp_avg"].dtype == torch.float64
        assert bits(held[parameter]["exp_avg"]) != before
    del held
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_a_stand_in_gets_its_values_whatever_autograd_knows_of_it(in_inference_mode: bool) -> None:
    parameters = [nn.Parameter(torch.ones(64)) for _ in range(2)]
    optimizers = [SpeculativeCPUAdamW([one]) for one in parameters]
    stand_ins = []
    for optimizer, parameter in zip(optimizers, parameters, strict=True):
        parameter.grad = torch.ones(64)
        optimizer.step()
        with torch.inference_mode(in_inference_mode):
            stand_ins.append(optimizer.state[parameter]["exp_avg"].double())
    if not in_inference_mode:
        stand_ins[0].requires_grad_()
    optimizers[0].state[parameters[0]]["exp_avg"] = stand_ins[0]
    for optimizer in optimizers:
        optimizer.step()
    assert bits(stand_ins[0]) == bits(optimizers[1].state[parameters[1]]["exp_avg"].double())
    assert stand_ins[0].grad_fn is None
