"""What is done after an accepted step, before its state follows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from offload.test_clipped_speculation import DEVICES, PATCHED, RECIPES, Training, state_of
from support.visible import bits

from superadam.state.parameter import Phase
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.timeout(240)


def trained_on(device: str) -> Training:
    made = DEVICES[device]()
    options = {"gpu_buckets": 0} if isinstance(made, SimulatedDevice) else {}
    return Training(RECIPES["always"], made, bucket_numel=1000, **options)


Look = Callable[[Training], object]


def state_dict(ours: Training) -> object:
    return ours.optimizer.state_dict()


def gradients_edited(ours: Training) -> None:
    """Which no longer matter."""
    for parameter in ours.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(7.0)
        parameter.grad.add_(1.0)


def gradients_read_bare(ours: Training) -> None:
    for parameter in ours.model.parameters():
        assert parameter.grad is not None
        parameter.grad.data_ptr()


def parameter_written(ours: Training) -> None:
    with torch.no_grad():
        ours.model.dense.mul_(1.5)


def master_written(ours: Training) -> None:
    state_of(ours)["master"].mul_(1.001)


def loaded(ours: Training) -> None:
    ours.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))


def group_changed(ours: Training) -> None:
    for group in ours.optimizer.param_groups:
        group.update(lr=3e-5, betas=(0.5, 0.7), amsgrad=True)


def step_skipped(ours: Training) -> None:
    ours.optimizer.zero_grad()
    ours.backward(40)
    assert ours.model.other.grad is not None
    ours.model.other.grad[3] = math.nan
    ours.optimizer.step()


def another_parameter(ours: Training) -> None:
    extra = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    extra.grad = torch.ones_like(extra)
    ours.optimizer.add_param_group({"params": [extra]})


def model_moved(ours: Training) -> None:
    for parameter in ours.model.parameters():
        parameter.data = parameter.data.clone()


LOOKS: list[Look] = [
    state_dict,
    gradients_edited,
    gradients_read_bare,
    parameter_written,
    master_written,
    loaded,
    group_changed,
    step_skipped,
    another_parameter,
    model_moved,
]


@pytest.mark.parametrize("look", LOOKS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("device", ["immediate", "thread", "usual"])
def test_what_is_done_before_the_state_follows(device: str, look: Look) -> None:
    """It and three more steps have the bits of the plain run."""
    seen = []
    for ours in (Training(RECIPES["always"], None), trained_on(device)):
        ours.run(range(2))
        ours.backward(2)
        ours.step()
        look(ours)
        ours.optimizer.zero_grad()
        ours.run(range(4, 7))
        seen.append(ours.seen())
        if ours.scheduler is not None:
            ours.scheduler.close()
            assert ours.optimizer.statistics.accepted > 0
    assert seen[0] == seen[1]


@pytest.mark.parametrize("device", ["immediate", "usual"])
def test_the_state_follows_when_the_worker_is_idle(device: str) -> None:
    ours = trained_on(device)
    with ours.scheduler or torch.no_grad():
        pipeline = ours.scheduler._pipeline  # type: ignore[union-attr]
        ours.run(range(2))
        transaction = ours.optimizer._binding._transaction
        assert transaction is not None
        assert pipeline is not None
        pipeline.wake = lambda: None  # type: ignore[method-assign]
        ours.backward(2)
        ours.step()
        accepted = transaction.in_phase(Phase.ACCEPTED)
        assert len(accepted) == PATCHED
        before = [bits(state.exp_avg) for state in accepted]
        while pipeline._idle():
            pass
        assert transaction.in_phase(Phase.ACCEPTED) == []
        now = [bits(state.exp_avg) for state in accepted]
        assert sum(one != other for one, other in zip(before, now, strict=True)) == PATCHED - 1  # one is empty
