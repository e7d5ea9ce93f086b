"""Blocks wait for their own parameters: which those are, and that no model computes with a value that is under way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlap import adam, batch, eager, everything, loss_of, mlp, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.blocks import awaited_parameters
from superadam.devices import Stream
from superadam.devices.simulated import SimulatedDevice


def names(model: nn.Module) -> dict[str, set[str]]:
    """Return, by the name of each module, the names of the parameters that its forward awaits."""
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    awaited = awaited_parameters(model)
    return {name: {of[one] for one in awaited[module]} for name, module in model.named_modules()}


# ---- which parameters ------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A block with a submodule, `out_proj`, whose forward nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[None]
        return self.norm(x + self.attention(rows, rows, rows, need_weights=False)[0][0])


class Residual(nn.Module):
    """A block that is made of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        for block in self.inner:
            hidden = hidden + block(hidden)
        return hidden


class Stack(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, make: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([make() for _ in range(count)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Directly(nn.Sequential):
    """Reads its elements' parameters without calling them."""

    def forward(self, x: Tensor) -> Tensor:
        for one in self:
            x = torch.tanh(nn.functional.linear(x, one.weight, one.bias))
        return x


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(11)
        return make()

    return made


def tied() -> nn.Module:
    model = Stack(lambda: nn.Linear(8, 8))
    model.blocks[2].weight = model.blocks[0].weight
    model.head.weight = model.blocks[1].weight
    return model


class Checkpointed(Stack):
    """Computes its blocks again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_elements_of_lists_and_sequences_wait_for_themselves() -> None:
    awaited = names(Stack(Residual, 1))
    assert awaited[""] == {"embedding.weight", "embedding.bias", "head.weight", "head.bias"}
    assert awaited["blocks"] == set()
    assert awaited["blocks.0"] == {"blocks.0.first.weight", "blocks.0.first.bias"}
    assert awaited["blocks.0.inner.0"] == {"blocks.0.inner.0.weight", "blocks.0.inner.0.bias"}
    assert awaited["blocks.0.inner.1"] == set()
    assert awaited["blocks.0.inner.1.0"] == {"blocks.0.inner.1.0.weight", "blocks.0.inner.1.0.bias"}
    assert names(mlp())[""] == set()


def test_whatever_is_below_a_block_belongs_to_it() -> None:
    awaited = names(Stack(Attention, 2))
    assert awaited["blocks.1"] == {name for name, _ in Stack(Attention, 2).named_parameters() if "blocks.1" in name}
    assert "blocks.1.attention.out_proj.weight" in awaited["blocks.1.attention"]


def test_every_parameter_of_the_model_is_awaited_by_somebody() -> None:
    for make in MODELS.values():
        model = make()
        awaited = awaited_parameters(model)
        assert set(awaited) == set(model.modules())
        assert frozenset().union(*awaited.values()) == set(map(id, model.parameters()))


def test_lists_and_dicts_of_parameters_are_no_blocks() -> None:
    model = nn.Module()
    model.one = nn.ParameterList([torch.ones(2), torch.ones(3)])
    model.two = nn.ParameterDict({"a": torch.ones(2)})
    model.three = nn.ModuleDict({"b": nn.Linear(2, 2)})
    assert names(model)[""] == {"one.0", "one.1", "two.a", "three.b.weight", "three.b.bias"}


def test_tied_weight_is_awaited_by_each_block_that_holds_it() -> None:
    awaited = names(tied())
    assert awaited["blocks.0"] == {"blocks.0.weight", "blocks.0.bias"}
    assert awaited["blocks.2"] == {"blocks.0.weight", "blocks.2.bias"}
    assert "blocks.1.weight" in awaited[""]  # the head's


class Listed(nn.ModuleList):
    """A list that has a forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self[0].weight


class Named(nn.Sequential):
    """A sequence that is run as every other."""


def test_containers_with_a_forward_of_their_own_may_read_what_they_hold() -> None:
    model = nn.Module()
    model.directly = Directly(nn.Linear(2, 2))
    model.listed = Listed([nn.Linear(2, 2)])
    model.named = Named(nn.Linear(2, 2))
    awaited = names(model)
    both = {"directly.0.weight", "directly.0.bias", "listed.0.weight", "listed.0.bias"}
    assert awaited[""] == both
    assert awaited["directly"] | awaited["listed"] == both
    assert awaited["named"] == set()
    model.named.forward = lambda x: x
    assert names(model)["named"] == {"named.0.weight", "named.0.bias"}


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_nothing_inside_a_compiled_module_is_a_block(how: str) -> None:
    model = Stack(lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))))
    shared = model.blocks[1][0]
    model.blocks[0][0] = shared
    if how == "in place":
        model.blocks[0].compile(backend="eager")
        inside = "blocks.0"
    else:
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        inside = "blocks.0._orig_mod"
    awaited = names(model)
    assert len(awaited["blocks.0"]) == 4
    assert awaited[inside] == awaited["blocks.0"]
    assert len(awaited[f"{inside}.1"]) == 2
    assert awaited["blocks.1"] == awaited[""] & set() == set()


# ---- training --------------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], nn.Module]] = {
    "a sequence": mlp,
    "attention": seeded(lambda: Stack(Attention)),
    "blocks in blocks": seeded(lambda: Stack(Residual)),
    "tied weights": seeded(tied),
    "sequences with a forward": seeded(
        lambda: Stack(lambda: Directly(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
    ),
    "checkpoints": seeded(lambda: Checkpointed(Residual)),
}


@pytest.fixture(params=MODELS)
def make(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    return MODELS[request.param]


class SlowUploads(SimulatedDevice):
    """A device that uploads nothing before somebody waits for it."""

    def __init__(self) -> None:
        super().__init__(0, eagerness=0.0)

    def _runnable(self) -> list[Stream]:
        streams = super()._runnable()
        return [stream for stream in streams if stream is not Stream.UPLOAD] or streams


def with_blocks(optimizer: SpeculativeCPUAdam, model: nn.Module, **options: Any) -> OffloadScheduler:
    return eager(optimizer, model, **{"device": SlowUploads(), "overlap_forward": True, **options})


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
@pytest.mark.parametrize("bucket_numel", [1, 100])
def test_training_with_blocks_that_wait_has_the_same_bits(
    make: Callable[[], nn.Module], bucket_numel: int, eagerness: float
) -> None:
    model, twin = make(), make()
    optimizer, plain = adam(model), adam(twin)
    device = SimulatedDevice(1, eagerness)
    with with_blocks(optimizer, model, device=device, bucket_numel=bucket_numel):
        for step in range(4):
            train(model, optimizer, range(step, step + 1))
            train(twin, plain, range(step, step + 1))
            with torch.no_grad():
                assert torch.equal(loss_of(model, 50), loss_of(twin, 50))
    assert everything(model, optimizer) == everything(twin, plain)


def test_without_the_wait_values_would_be_wrong(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadScheduler, "await_parameters", lambda *_: None)
    model, twin = make(), make()
    optimizer, plain = adam(model), adam(twin)
    with with_blocks(optimizer, model):
        train(model, optimizer, range(1))
        train(twin, plain, range(1))
        assert not torch.equal(loss_of(model, 50), loss_of(twin, 50))


def test_blocks_wait_for_themselves_alone() -> None:
    """Uploads come in the order of backward, so that the last block is there first, and the first one last."""
    make = MODELS["blocks in blocks"]
    model, twin = make(), make()
    optimizer, plain = adam(model, max_grad_norm=1e9), adam(twin, max_grad_norm=1e9)
    with with_blocks(optimizer, model) as scheduler:
        train(model, optimizer, range(1))
        train(twin, plain, range(1))

        def arrived(*names: str) -> list[bool]:
            pairs = zip(model.named_parameters(), twin.parameters(), strict=True)
            return [torch.equal(one, other) for (name, one), other in pairs if name.startswith(names)]

        assert not any(arrived(""))
        with torch.no_grad():
            model.blocks[2].inner[1][0](batch(0))
            assert arrived("blocks.2.inner.1") == [True, True]
            assert not any(arrived("blocks.0", "blocks.1", "embedding"))
            model.blocks[1](batch(0))
        assert all(arrived("blocks.1", "blocks.2"))
        assert not any(arrived("blocks.0", "embedding"))
        scheduler.synchronize()
        assert all(arrived(""))


def test_submodule_whose_forward_is_never_called_is_there() -> None:
    make = MODELS["attention"]
    model, twin = make(), make()
    optimizer, plain = adam(model), adam(twin)
    called: list[nn.Module] = []
    for block in model.blocks:
        block.attention.out_proj.register_forward_pre_hook(lambda module, _: called.append(module))
    with with_blocks(optimizer, model):
        train(model, optimizer, range(1))
        train(twin, plain, range(1))
        before = [block.attention.out_proj.weight.clone() for block in model.blocks]
        assert torch.equal(loss_of(model, 1), loss_of(twin, 1))
        for old, one, other in zip(before, model.blocks, twin.blocks, strict=True):
            assert torch.equal(one.attention.out_proj.weight, other.attention.out_proj.weight)
            assert not torch.equal(old, one.attention.out_proj.weight)
    assert not called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_dicts_directly_after_the_step(dtype: torch.dtype) -> None:
    model, twin = mlp(dtype), mlp(dtype)
    optimizer, plain = adam(model), adam(twin)
    with with_blocks(optimizer, model):
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            train(twin, plain, range(step, step + 1))
            for (name, one), other in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
                assert torch.equal(one, other), name
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                ours, theirs = optimizer.state[one], plain.state[other]
                assert torch.equal(ours.pop("master"), theirs.pop("master", other))
                assert ours.keys() == theirs.keys()
                assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
            entries = optimizer.state_dict()["state"].values()
            for one, other in zip(entries, plain.state_dict()["state"].values(), strict=True):
                assert all(torch.equal(one[key], other[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_state_dict_of_one_block_waits_for_that_block() -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model, max_grad_norm=1e9), adam(twin, max_grad_norm=1e9)
    with with_blocks(optimizer, model):
        train(model, optimizer, range(1))
        train(twin, plain, range(1))
        assert torch.equal(model[4].state_dict()["weight"], twin[4].weight)
        assert not torch.equal(model[0].weight, twin[0].weight)
        assert torch.equal(model[0].state_dict()["weight"], twin[0].weight)


def test_block_that_is_not_used_in_some_steps() -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    with with_blocks(optimizer, model):
        for step in range(6):
            for one, its in ((model, optimizer), (twin, plain)):
                its.zero_grad()
                loss_of(one[2 * (step % 3) :], step).backward()
                its.step()
    optimizer.zero_grad()
    plain.zero_grad()
    assert everything(model, optimizer) == everything(twin, plain)


@pytest.mark.parametrize("ending", ["clipped", "skipped", "rolled back", "dropped by zero_grad"])
def test_every_verdict(ending: str) -> None:
    model, twin = mlp(), mlp()
    limit = 1.0 if ending == "clipped" else 1e9
    optimizer, plain = adam(model, max_grad_norm=limit), adam(twin, max_grad_norm=limit)
    with with_blocks(optimizer, model):
        for step in range(4):
            for one, its in ((model, optimizer), (twin, plain)):
                its.zero_grad()
                factor = float("inf") if ending == "skipped" and step == 1 else 1.0
                (loss_of(one, step) * factor).backward()
                if ending == "dropped by zero_grad" and step == 1:
                    continue
                if ending == "rolled back" and step == 1:
                    its.speculate()
                    its.rollback()
                    continue
                its.step()
    optimizer.zero_grad()
    plain.zero_grad()
    assert everything(model, optimizer) == everything(twin, plain)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_compiled_blocks(how: str, backend: str) -> None:
    torch._dynamo.reset()
    make = MODELS["blocks in blocks"]
    model, twin = make(), make()
    for index, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(backend=backend)
        else:
            model.blocks[index] = torch.compile(block, backend=backend)
    optimizer, plain = adam(model), adam(twin)
    with with_blocks(optimizer, model):
        for step in range(4):
            train(model, optimizer, range(step, step + 1))
            train(twin, plain, range(step, step + 1))
            with torch.no_grad():
                assert torch.equal(loss_of(model, 50), loss_of(twin, 50))
    assert everything(model, optimizer) == everything(twin, plain)


def test_compiled_blocks_read_too_early_without_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(OffloadScheduler, "await_parameters", lambda *_: None)
    make = MODELS["blocks in blocks"]
    model, twin = make(), make()
    for block in model.blocks:
        block.compile(backend="eager")
    optimizer, plain = adam(model), adam(twin)
    with with_blocks(optimizer, model):
        train(model, optimizer, range(1))
        train(twin, plain, range(1))
        assert not torch.equal(loss_of(model, 50), loss_of(twin, 50))


# ---- parameters that no forward tells of -----------------------------------------------------------------------------


def test_block_that_is_thawed_waits_for_its_parameters() -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = adam(model), adam(twin)
    for one in (model, twin):
        one[0].requires_grad_(False)
    with with_blocks(optimizer, model):
        train(model, optimizer, range(1))
        train(twin, plain, range(1))
        for one in (model, twin):
            one[0].requires_grad_(True)
        train(model, optimizer, range(1, 4))
        train(twin, plain, range(1, 4))
    assert everything(model, optimizer) == everything(twin, plain)


def test_parameter_outside_of_the_model_is_there_after_the_step() -> None:
    results = []
    for overlaps in (False, True):
        model, extra = mlp(), nn.Parameter(torch.ones(8))
        optimizer = SpeculativeCPUAdam([*model.parameters(), extra], lr=0.05, max_grad_norm=20.0)
        scheduler = with_blocks(optimizer, model) if overlaps else None
        for seed in range(3):
            optimizer.zero_grad()
            (30 * (model(batch(seed) * extra) - 1).square().mean()).backward()
            optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.close()
        results.append(everything(model, optimizer))
    assert results[0] == results[1]


# ---- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", ["model", "optimizer", "both"])
@pytest.mark.parametrize("is_open", [False, True])
def test_what_is_loaded_is_not_overwritten_by_what_is_under_way(what: str, is_open: bool, dtype: torch.dtype) -> None:
    model, twin = mlp(dtype), mlp(dtype)
    optimizer, plain = adam(model, max_grad_norm=1e9), adam(twin, max_grad_norm=1e9)
    saved = copy.deepcopy({"model": mlp(dtype).state_dict(), "optimizer": trained(mlp(dtype)).state_dict()})
    with with_blocks(optimizer, model):
        for one, its in ((model, optimizer), (twin, plain)):
            train(one, its, range(1))
            if is_open:
                loss_of(one, 1).backward()
                if its is plain:
                    plain.speculate()
            if what != "model":
                its.load_state_dict(copy.deepcopy(saved["optimizer"]))
            if what != "optimizer":
                one.load_state_dict(saved["model"])
            its.step()
            its.zero_grad()
            train(one, its, range(2, 4))
    assert everything(model, optimizer) == everything(twin, plain)


def trained(model: nn.Module) -> SpeculativeCPUAdam:
    optimizer = adam(model)
    train(model, optimizer, range(5, 7))
    return optimizer
