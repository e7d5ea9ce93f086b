"""A step for which memory runs out while state is created can be made afterwards, also with other hyper-parameters."""

from __future__ import annotations

import pytest
import torch
from support.visible import give_gradients, parameter, state_bits
from torch import Tensor

from superadam import SpeculativeCPUAdam
from superadam.devices import PlainDevice
from superadam.state.parameter import ParameterState


@pytest.mark.parametrize("failing", range(6))
def test_state_that_was_created_in_part_serves_the_next_step(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = (
        SpeculativeCPUAdam([parameter(3, 5, dtype=torch.bfloat16), parameter(4, dtype=torch.bfloat16)], amsgrad=amsgrad)
        for amsgrad in (True, False)
    )
    created = 0
    zeros = ParameterState.zeros

    def short(state: ParameterState, key: str) -> dict[str, Tensor]:
        nonlocal created
        created += 1
        if created == failing + 1:
            raise MemoryError("planted")
        return zeros(state, key)

    for one in (ours, plain):
        give_gradients(one, 1)
    with monkeypatch.context() as patch:
        patch.setattr(ParameterState, "zeros", short)
        with pytest.raises(MemoryError, match="planted"):
            ours.step()
    ours.param_groups[0]["amsgrad"] = False
    for one in (ours, plain):
        one.step()
    assert state_bits(ours, without=["max_exp_avg_sq"]) == state_bits(plain)


def fails(*arguments: object) -> Tensor:
    raise MemoryError("planted")


def test_gradients_whose_speculation_failed_count_in_no_later_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are dropped: one of them was summed before memory for new values of the other ran out."""
    without_state, other = (parameter(64, dtype=torch.bfloat16) for _ in range(2))
    optimizer = SpeculativeCPUAdam([without_state, other], lr=0.1, max_grad_norm=1.0)
    other.grad = torch.full_like(other, 0.01)
    optimizer.step()
    without_state.grad, other.grad = torch.full_like(other, 100.0), torch.full_like(other, 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(PlainDevice, "host_empty", fails)
        with pytest.raises(MemoryError, match="planted"):
            optimizer.speculate()
    without_state.grad = None
    optimizer.step()
    assert optimizer.last_outcome.grad_norm == pytest.approx(0.08, rel=0.01)
