"""The watch: whoever is about to read an unsettled parameter is stopped, whoever reads one under way is reported."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlap import PlantedError, RaiseInBackward, batch, mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from superadam.watch import REMEDY, ModelWatch


class Recorder:
    """A keeper that takes every gradient and remembers what it heard."""

    def __init__(self, model: nn.Module) -> None:
        self.ready: list[Tensor] = []
        self.awaited: list[frozenset[int]] = []
        self.abandoned = 0
        self.accepted: dict[Tensor, Tensor] = {}
        self.takes = True
        self.watch = ModelWatch(model, self)
        self.watch.follow(model.parameters())

    def gradient_ready(self, parameter: Tensor) -> None:
        self.ready.append(parameter)
        if self.takes:
            self.watch.note_taken(parameter, "a parameter")

    def await_parameters(self, parameters: frozenset[int]) -> None:
        self.awaited.append(parameters)

    def accepted_value(self, parameter: Tensor) -> Tensor | None:
        return self.accepted.get(parameter)

    def catch_up(self) -> None: ...

    def abandon(self) -> None:
        self.abandoned += 1
        self.watch.note_verdict()


def ids(*parameters: Tensor) -> frozenset[int]:
    return frozenset(map(id, parameters))


def loss(model: nn.Module, seed: int = 0) -> Tensor:
    return model(batch(seed)).square().sum()


# ---- unsettled parameters --------------------------------------------------------------------------------------------


def test_parameters_are_unsettled_from_gradient_to_verdict() -> None:
    model = mlp()
    keeper = Recorder(model)
    watch = keeper.watch
    assert not watch.has_unsettled
    loss(model).backward()
    assert watch.has_unsettled
    for parameter in model.parameters():
        with pytest.raises(RuntimeError, match=r"a weight got a second gradient before optimizer.step\(\); "):
            watch.note_taken(parameter, "a weight")
    watch.check_settled(nn.Parameter(torch.ones(2)), "a weight")
    watch.note_verdict()
    assert not watch.has_unsettled
    watch.check_settled(model[0].weight, "a weight")


def test_forward_over_an_unsettled_parameter_is_refused_and_the_step_dropped() -> None:
    model = mlp()
    keeper = Recorder(model)
    loss(model).backward()
    with pytest.raises(RuntimeError, match=r"Linear.forward reads parameters whose step has no verdict yet; ") as told:
        loss(model)
    assert REMEDY in str(told.value)
    assert keeper.abandoned == 1
    loss(model)
    assert keeper.abandoned == 1


def test_forward_over_settled_parts_goes_on() -> None:
    model = mlp()
    keeper = Recorder(model)
    loss(model[2:]).backward()
    model[0](batch(1))
    assert keeper.abandoned == 0
    with pytest.raises(RuntimeError, match="no verdict yet"):
        model[2](batch(1))


def test_gradient_that_is_left_to_accumulate_settles_nothing() -> None:
    model = mlp()
    keeper = Recorder(model)
    keeper.takes = False
    for seed in range(3):
        loss(model, seed).backward()
    assert len(keeper.ready) == 3 * 6
    assert keeper.abandoned == 0


class Reader(nn.Module):
    """Reads a submodule's weight without calling the submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inner.weight)


def test_block_that_is_computed_again_in_backward_may_read_what_is_below_it() -> None:
    """Then its submodules' parameters count as well; outside backward their own forwards tell."""
    model = nn.Sequential(Reader(), nn.Linear(8, 8))
    keeper = Recorder(model)
    hidden = checkpoint(model[0], batch(0).requires_grad_(), use_reentrant=False)
    keeper.watch.note_taken(model[0].inner.weight, "weight")
    with pytest.raises(RuntimeError, match=r"Reader.forward reads parameters whose step has no verdict yet"):
        model[1](hidden).sum().backward()
    assert keeper.abandoned == 1


# ---- backwards that fail ---------------------------------------------------------------------------------------------


def fail(model: nn.Module) -> None:
    x = RaiseInBackward.apply(model[:2](batch(9)), PlantedError("planted"))
    model[2:](x).square().sum().backward()


def test_step_of_a_backward_that_failed_is_dropped_by_the_next_forward() -> None:
    model = mlp()
    keeper = Recorder(model)
    with pytest.raises(PlantedError):
        fail(model)
    assert keeper.watch.is_backward_broken()
    assert keeper.abandoned == 0
    loss(model)
    assert keeper.abandoned == 1
    assert not keeper.watch.is_backward_broken()


def test_backward_that_ended_well_is_not_broken() -> None:
    model = mlp()
    keeper = Recorder(model)
    broken: list[bool] = []
    model[0].weight.register_hook(lambda gradient: broken.append(keeper.watch.is_backward_broken()))
    loss(model).backward()
    assert broken == [False]
    assert not keeper.watch.is_backward_broken()


def test_backward_inside_a_backward_does_not_end_the_outer_one() -> None:
    model, inner = mlp(), mlp()
    keeper = Recorder(model)

    def other(gradient: Tensor) -> None:
        with torch.enable_grad():
            loss(inner).backward()

    model[4].weight.register_hook(other)
    with pytest.raises(PlantedError):
        fail(model)
    assert keeper.watch.is_backward_broken()


# ---- what is reported ------------------------------------------------------------------------------------------------


def test_forwards_report_what_they_are_about_to_read_while_somebody_wants_to_know() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Reader())
    keeper = Recorder(model)
    model(batch(0))
    assert keeper.awaited == []
    keeper.watch.reports_reads = True
    model(batch(0))
    assert keeper.awaited == [frozenset(), ids(*model[0].parameters()), ids(*model[1].parameters())]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluations_report_as_well(context: Callable[[], Any]) -> None:
    model = mlp()
    keeper = Recorder(model)
    keeper.watch.reports_reads = True
    with context():
        model.eval()(batch(0))
    assert frozenset().union(*keeper.awaited) == ids(*model.parameters())


def test_state_dicts_report_what_they_hold() -> None:
    model = mlp()
    keeper = Recorder(model)
    keeper.watch.reports_reads = True
    model[2].state_dict()
    assert keeper.awaited == [ids(*model[2].parameters())]
    model.state_dict()
    assert frozenset().union(*keeper.awaited) == ids(*model.parameters())


def test_state_dict_of_an_open_step_holds_accepted_values() -> None:
    model = mlp()
    keeper = Recorder(model)
    keeper.accepted = {model[2].weight: torch.full((8, 8), 2.0)}
    assert torch.equal(model.state_dict()["2.weight"], model[2].weight)  # nothing is open
    loss(model).backward()
    entries = model.state_dict(prefix="model.")
    assert torch.equal(entries["model.2.weight"], torch.full((8, 8), 2.0))
    assert entries["model.2.weight"].data_ptr() != keeper.accepted[model[2].weight].data_ptr()
    assert not entries["model.2.weight"].requires_grad
    assert entries["model.2.bias"].data_ptr() == model[2].bias.data_ptr()
    assert keeper.abandoned == 0


# ---- hooks -----------------------------------------------------------------------------------------------------------


def test_following_again_replaces_every_hook() -> None:
    model = mlp()
    keeper = Recorder(model)
    for _ in range(2):
        keeper.watch.follow(model.parameters())
    keeper.watch.reports_reads = True
    loss(model).backward()
    assert len(keeper.ready) == 6
    assert len(keeper.awaited) == 4


def test_nothing_is_heard_after_letting_go() -> None:
    model = mlp()
    keeper = Recorder(model)
    keeper.watch.let_go()
    keeper.watch.reports_reads = True
    loss(model).backward()
    model.state_dict()
    loss(model)
    assert not keeper.ready
    assert not keeper.awaited
    assert not any(module._forward_pre_hooks or module._state_dict_hooks for module in model.modules())
    assert not any(module._load_state_dict_pre_hooks for module in model.modules())


def test_copies_of_a_watched_model_are_not_watched() -> None:
    model = mlp()
    keeper = Recorder(model)
    loss(model).backward()
    twin = copy.deepcopy(model)
    loss(twin)
    twin.state_dict()
    twin.load_state_dict(model.state_dict())
    assert keeper.abandoned == 0
    assert len(keeper.ready) == 6


def test_watch_does_not_outlive_its_keeper() -> None:
    model = mlp()
    keeper = Recorder(model)
    gone = weakref.ref(keeper.watch)
    del keeper
    gc.collect()
    assert gone() is None
    loss(model).backward()
    loss(model)


# ---- parameters that are thawed, loaded, or not in the model ---------------------------------------------------------


def test_frozen_parameters_are_watched_for_the_day_they_are_trained() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    keeper = Recorder(model)
    keeper.watch.reports_reads = True
    model[0].requires_grad_(True)
    model(batch(0))
    model[0].state_dict()
    assert keeper.awaited[1] == keeper.awaited[-1] == ids(*model[0].parameters())
    assert keeper.watch.unreported == frozenset()


def test_parameters_that_no_forward_of_the_model_reports() -> None:
    model, extra = mlp(), nn.Parameter(torch.ones(2))
    keeper = Recorder(model)
    keeper.watch.follow([*model[2:].parameters(), extra])
    assert keeper.watch.unreported == ids(extra)


@pytest.mark.parametrize("moment", ["under way", "open"])
def test_loading_waits_for_what_would_arrive_later(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    saved = model.state_dict()
    keeper = Recorder(model)
    order: list[str] = []
    monkeypatch.setattr(keeper, "catch_up", lambda: order.append("caught up"))
    monkeypatch.setattr(keeper, "await_parameters", lambda parameters: order.append(f"awaited {len(parameters)}"))
    model.load_state_dict(saved)
    assert order == []
    if moment == "open":
        loss(model).backward()
    else:
        keeper.watch.reports_reads = True
    model.load_state_dict(saved)
    one = ["caught up", "awaited 2"] if moment == "open" else ["awaited 2"]
    assert order == 3 * one
    assert keeper.abandoned == 0
