"""What the model calls: each gradient is reported once, to a taker that still lives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.overlap import ThreadDevice, adam, batch, loss_of, mlp
from torch import Tensor, nn

from superadam import OffloadScheduler
from superadam.offload.hooks import GradientReady, Hooks


class Recorder:
    """Remembers what it heard."""

    def __init__(self) -> None:
        self.ready: list[Tensor] = []

    def _gradient_ready(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.ready.append(parameter)


def followed(model: nn.Module, parameters: Iterable[Tensor] | None = None) -> tuple[Recorder, Hooks]:
    recorder = Recorder()
    hooks = Hooks(recorder._gradient_ready)
    hooks.watch(model.parameters() if parameters is None else parameters)
    return recorder, hooks


def run(model: nn.Module) -> None:
    model(batch(0)).sum().backward()


def hooks_of(parameter: Tensor) -> int:
    return len(parameter._post_accumulate_grad_hooks or {})


def test_each_gradient_once_in_the_order_of_backward() -> None:
    model = mlp()
    recorder, _ = followed(model)
    model(model(batch(0))).sum().backward()
    assert sorted(map(id, recorder.ready)) == sorted(map(id, model.parameters()))
    assert any(recorder.ready[0] is one for one in model[4].parameters())


def test_parameters_are_hooked_once_they_are_trained() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    recorder, hooks = followed(model)
    run(model)
    assert len(recorder.ready) == 4
    model[0].requires_grad_(True)
    hooks.look_for_unfrozen()
    run(model)
    assert len(recorder.ready) == 4 + 6
    for _ in range(3):
        hooks.look_for_unfrozen()
    assert all(hooks_of(parameter) == 1 for parameter in model.parameters())
    model[2].requires_grad_(False)  # and back: its hook stays
    hooks.look_for_unfrozen()
    model[2].requires_grad_(True)
    hooks.look_for_unfrozen()
    assert all(hooks_of(parameter) == 1 for parameter in model.parameters())
    hooks.remove()
    assert not any(map(hooks_of, model.parameters()))


def test_parameters_that_are_no_leaves_are_waited_for() -> None:
    weight = nn.Parameter(torch.ones(3))
    product = weight * 2
    recorder, hooks = followed(nn.Module(), [product])
    hooks.look_for_unfrozen()
    product.sum().backward()
    assert not recorder.ready


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_copies_report_to_nobody(how: Any) -> None:
    recorder = Recorder()
    inert = how(how(GradientReady(recorder._gradient_ready)))
    assert type(inert) is GradientReady
    inert(nn.Parameter(torch.ones(2)))
    assert not recorder.ready


@pytest.mark.parametrize("keeps", [True, False])
def test_a_program_is_told_once_where_no_gradient_can_be_taken(keeps: bool, caplog: pytest.LogCaptureFixture) -> None:
    """As those of CUDA graphs, to whose memory the graph refers; of steps without gradients nothing is said."""
    model, kept = mlp(), list[Tensor]()
    optimizer = adam(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: kept.append(one.grad) if keeps else None)
    with OffloadScheduler(optimizer, model, device=ThreadDevice()) as scheduler:
        for seed in range(6):
            loss_of(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
            assert len(caplog.records) == (keeps and seed >= 2)
        assert (scheduler.statistics.buckets == 0) == keeps
    assert all("no gradient of 3 steps could be taken" in record.message for record in caplog.records)
