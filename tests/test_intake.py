"""The intake: gradients leave `.grad` and come out in buckets, in order, once each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from superadam.buckets import Bucket
from superadam.devices import PlainDevice
from superadam.intake import Intake
from superadam.journal import Journal
from superadam.parameter import ParameterState
from superadam.transfers import Transfers
from superadam.watch import ModelWatch


class Keeper:
    """A keeper that does nothing: these tests call the intake themselves."""

    def gradient_ready(self, parameter: torch.Tensor) -> None: ...

    def await_parameters(self, parameters: frozenset[int]) -> None: ...

    def catch_up(self) -> None: ...

    def accepted_value(self, parameter: torch.Tensor) -> None: ...

    def abandon(self) -> None: ...


class Line:
    """Parameters of given sizes, an intake over them, and what it has sent."""

    def __init__(
        self, sizes: list[int], bucket_numel: int, *, sends_early: bool = True, link: torch.dtype | None = None
    ) -> None:
        self.sent: list[Bucket] = []
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        self.states = [ParameterState(p, row, f"p{row}") for row, p in enumerate(self.parameters)]
        self.keeper = Keeper()
        self.watch = ModelWatch(nn.Module(), self.keeper)
        transfers = Transfers(PlainDevice(), Journal(), link)
        self.intake = Intake(self.watch, transfers, bucket_numel, self.sent.append, sends_early=sends_early)
        self.intake.follow(self.states)

    def take(self, row: int, value: float = 1.0) -> torch.Tensor:
        parameter = self.parameters[row]
        gradient = torch.full_like(parameter, value, requires_grad=False)
        parameter.grad = gradient
        self.intake.take(parameter, gradient)
        return gradient

    @property
    def rows(self) -> list[list[int]]:
        return [[state.row for state in bucket.states] for bucket in self.sent]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 100), st.booleans())
def test_every_gradient_is_sent_once_in_order_and_no_bucket_but_the_last_is_short(
    sizes: list[int], bucket_numel: int, sends_early: bool
) -> None:
    line = Line(sizes, bucket_numel, sends_early=sends_early)
    gradients = [line.take(row, row) for row in range(len(sizes))]
    before = len(line.sent)
    line.intake.flush()
    assert [row for rows in line.rows for row in rows] == list(range(len(sizes)))
    sent = [gradient for bucket in line.sent for gradient in bucket.gradients]
    assert all(one is other for one, other in zip(sent, gradients, strict=True))
    assert all(parameter.grad is None for parameter in line.parameters)
    assert all(bucket.numel >= bucket_numel for bucket in line.sent[:-1])
    if sends_early:
        assert before >= len(line.sent) - 1
    else:
        assert before == 0
    count = len(line.sent)
    line.intake.flush()
    assert len(line.sent) == count


def test_second_gradient_is_refused_and_stays_where_it_is() -> None:
    line = Line([3], 1)
    line.take(0)
    with pytest.raises(RuntimeError, match=r"p0 got a second gradient before optimizer.step\(\)"):
        line.take(0)
    assert line.parameters[0].grad is not None
    with line.intake.accumulation.during(torch.float32), pytest.raises(RuntimeError, match="p0 got a second gradient"):
        line.take(0)
    assert not line.intake.sums()


def test_parameters_of_nobody_keep_their_gradients() -> None:
    line = Line([3, 3], 1)
    line.intake.follow(line.states[:1])
    line.take(1)
    assert not line.sent
    assert line.parameters[1].grad is not None
    assert line.intake.state_of(line.parameters[0]) is line.states[0]
    assert line.intake.state_of(line.parameters[1]) is None


def test_sums_are_sent_with_what_lies_beside_them() -> None:
    line = Line([2, 2, 2], 100)
    with line.intake.accumulation.during(torch.float32):
        for row in range(3):
            line.take(row, 1.0)
    line.take(0, 2.0)  # the last micro-batch reaches only the first
    line.parameters[1].grad = torch.full((2,), 5.0)
    line.intake.follow(line.states[:2])
    line.intake.take_sums()
    line.intake.flush()
    assert line.rows == [[0, 1]]
    assert [gradient.tolist() for gradient in line.sent[0].gradients] == [[3.0, 3.0], [6.0, 6.0]]
    assert line.parameters[1].grad is None
    assert not line.intake.sums()


def test_what_is_forgotten_is_not_sent() -> None:
    line = Line([2, 2, 2], 3, sends_early=False)
    for row in range(3):
        line.take(row)
    line.intake.forget()
    line.intake.flush()
    assert not line.sent
    with line.intake.accumulation.during(torch.float32):
        line.watch.note_verdict()
        line.take(0)
    line.intake.forget()
    assert not line.intake.sums()


def test_gradients_that_stay_are_rounded_as_those_that_travel() -> None:
    value = 1.0 + 2.0**-12
    line = Line([2, 2], 100, link=torch.bfloat16)
    line.parameters[0].grad = torch.full((2,), value)
    line.intake.narrow_left()
    assert line.parameters[0].grad.tolist() == [1.0, 1.0]
    with line.intake.accumulation.during(torch.float32):
        line.take(1, value)
    assert [total.tolist() for total in line.intake.sums().values()] == [[1.0, 1.0]]
