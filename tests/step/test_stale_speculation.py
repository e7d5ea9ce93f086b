"""Speculation on state that was written to in place before the verdict is not published."""

from __future__ import annotations

import pytest
import torch
from visible import give_gradients, parameter, parameters_of, train, visible

from superadam import SpeculativeCPUAdam


@pytest.mark.parametrize("counts_versions", [True, False], ids=["counts versions", "of inference mode"])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"])
def test_a_write_in_place_after_speculation_counts(key: str, counts_versions: bool) -> None:
    shown = []
    for is_speculative in (False, True):
        optimizer = SpeculativeCPUAdam([parameter(70, dtype=torch.bfloat16)], amsgrad=True)
        train(optimizer, 1)
        entry = optimizer.state[parameters_of(optimizer)[0]]
        if not counts_versions:
            with torch.inference_mode():
                entry[key] = entry[key].clone()
        train(optimizer, 3)
        give_gradients(optimizer, 3)
        if is_speculative:
            optimizer.speculate()
        with torch.inference_mode():
            entry[key].mul_(0.25)
        optimizer.step()
        shown.append(visible(optimizer))
        assert optimizer.statistics.accepted == 0
        assert optimizer.statistics.respeculated == is_speculative
    assert shown[0] == shown[1]
