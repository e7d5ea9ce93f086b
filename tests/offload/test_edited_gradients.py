"""Gradients that are held, edited, replaced and exchanged between backward and step: the bits of the plain run."""

import pytest
from support.deep import TIMES
from support.edited_gradients import ACTIONS, Run, assert_unnoticed
from support.visible import bits

PARTS, PROGRAMS = 4, 40 * TIMES  # in each part

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("part", range(PARTS))
def test_programs_see_and_end_in_what_the_plain_run_does(part: int) -> None:
    for seed in range(part * PROGRAMS, (part + 1) * PROGRAMS):
        assert_unnoticed(Run, seed)


@pytest.mark.parametrize("replace", ["set_", "data = new"])
def test_an_alias_in_grad_counts_as_it_is_whatever_became_of_the_gradient(replace: str) -> None:
    ends = []
    for setting in ("plain", "speculate()"):
        run = Run(0, setting)
        first, second, _ = run.parameters
        run.backward()
        alias, other = (second.grad.data for _ in range(2))  # type: ignore[union-attr]
        second.grad.add_(1)  # type: ignore[union-attr]
        other.set_(0 * other)
        ACTIONS[replace](run, second, second.grad)
        second.grad.zero_()  # type: ignore[union-attr]
        first.grad = alias
        run.optimizer.step()
        ends.append([bits(first), bits(second), bits(alias)])
    assert ends[0] == ends[1]
