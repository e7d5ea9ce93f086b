"""Buckets: gradients leave a handle in `.grad` and come out in buckets, in order, once each."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from superadam.devices import PlainDevice
from superadam.handles.gradient_handle import taken_of
from superadam.handles.taken_gradient import GradientHolder, TakenGradient
from superadam.offload.accumulation import PAUSE_STEPS
from superadam.offload.buckets import Bucket, Bucketer
from superadam.state.parameter import ParameterState


class Holder(GradientHolder):
    """Passes on to the bucketer what a scheduler passes on."""

    bucketer: Bucketer

    def _nonfinite_of(self, taken: TakenGradient) -> None:
        return None

    def _norm_was_asked(self, taken: TakenGradient) -> None: ...

    def _was_given_back(self, taken: TakenGradient) -> None:
        self.given.append(self.bucketer.forget(taken))

    def __init__(self) -> None:
        self.given: list[bool] = []


class DistantDevice(PlainDevice):
    """Counts all memory as its own."""

    has_link = True

    def is_host(self, tensor: torch.Tensor) -> bool:
        return False


class Line:
    """Parameters of given sizes, a bucketer over them, and what came out of it.

    Args:
        holds: whether buckets stay, as those that wait for the worker do.
    """

    def __init__(
        self, sizes: list[int], bucket_numel: int, device: PlainDevice | None = None, *, holds: bool = True
    ) -> None:
        self.sent: list[Bucket] = []
        self.rows: list[list[int]] = []
        self.holds = holds
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        self.states = [ParameterState(p, row, f"p{row}") for row, p in enumerate(self.parameters)]
        self.holder = Holder()
        self.bucketer = self.holder.bucketer = Bucketer(device or PlainDevice(), self.holder, bucket_numel)
        self.bucketer.take_from(self.states)

    def arrive(self, row: int, value: float = 1.0) -> int:
        """Let autograd accumulate a gradient, and return its address."""
        parameter = self.parameters[row]
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, value, requires_grad=False)
            address = parameter.grad.untyped_storage()._cdata
        else:
            parameter.grad += torch.full_like(parameter, value, requires_grad=False)
            address = 0
        self.note(self.bucketer.add(parameter))
        return address

    def note(self, buckets: list[Bucket]) -> None:
        self.rows += [[piece.state.row for piece in bucket.pieces] for bucket in buckets]
        if self.holds:
            self.sent += buckets

    def flush(self) -> None:
        self.note(self.bucketer.rest())

    def is_taken(self, row: int) -> bool:
        return taken_of(self.parameters[row].grad) is not None

    def end_step(self) -> None:
        self.flush()
        self.bucketer.end_step()
        for parameter in self.parameters:
            parameter.grad = None


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 100))
def test_every_gradient_is_sent_once_in_order_and_no_bucket_but_the_last_is_short(
    sizes: list[int], bucket_numel: int
) -> None:
    line = Line(sizes, bucket_numel)
    addresses = [line.arrive(row, row) for row in range(len(sizes))]
    before = len(line.sent)
    line.flush()
    assert [row for rows in line.rows for row in rows] == list(range(len(sizes)))
    sent = [taken for bucket in line.sent for taken in bucket.gradients]
    assert [taken.pending.untyped_storage()._cdata for taken in sent] == addresses
    assert [taken_of(parameter.grad) for parameter in line.parameters] == sent
    assert all(bucket.numel >= bucket_numel for bucket in line.sent[:-1])
    assert [bucket.numel for bucket in line.sent] == [sum(sizes[row] for row in rows) for rows in line.rows]
    assert before >= len(line.sent) - 1
    count = len(line.sent)
    line.flush()
    assert len(line.sent) == count


def test_second_gradient_gives_the_first_back_and_goes_into_a_bucket_again() -> None:
    line = Line([3], 1, holds=False)
    line.arrive(0)
    line.arrive(0)
    assert line.rows == [[0], [0]]
    taken = taken_of(line.parameters[0].grad)
    assert taken is not None
    assert taken.pending.tolist() == [2.0] * 3
    assert line.holder.given == [True]


def test_sum_with_a_gradient_that_is_under_way_is_left_to_the_step() -> None:
    line = Line([3], 1)
    line.arrive(0)
    line.arrive(0)
    assert line.rows == [[0]]
    assert line.sent[0].gradients[0].is_given
    gradient = line.parameters[0].grad
    assert type(gradient) is torch.Tensor
    assert gradient.tolist() == [2.0] * 3


def test_parameters_of_nobody_keep_their_gradients() -> None:
    line = Line([3, 3], 1)
    line.bucketer.take_from(line.states[:1])
    line.arrive(1)
    assert not line.sent
    assert not line.is_taken(1)


def test_gradient_that_others_hold_is_left_alone() -> None:
    line = Line([3], 1)
    line.parameters[0].grad = held = torch.ones(3)
    assert not line.bucketer.add(line.parameters[0])
    assert line.parameters[0].grad is held
    assert not line.bucketer.rest()


@pytest.mark.parametrize("gradient", ["sparse", "dtype"])
def test_gradient_that_does_not_fit_is_left_to_the_step(gradient: str) -> None:
    line = Line([3], 1)
    if gradient == "sparse":
        line.parameters[0].grad = torch.ones(3).to_sparse()
    else:
        line.parameters[0].data = torch.zeros(3, dtype=torch.float64)
        line.parameters[0].grad = torch.ones(3, dtype=torch.float64)
    assert not line.bucketer.add(line.parameters[0])
    assert not line.is_taken(0)
    assert not line.bucketer.rest()


def test_backward_that_runs_again_over_the_same_handle_adds_nothing() -> None:
    """The hook may be called without a new gradient."""
    line = Line([3], 10)
    line.arrive(0)
    assert not line.bucketer.add(line.parameters[0])
    line.flush()
    assert line.rows == [[0]]


# ---- sums on the host ------------------------------------------------------------------------------------------------


def test_sums_take_in_every_gradient_up_to_the_last() -> None:
    line = Line([2, 2], 100)
    for _ in range(2):
        with line.bucketer.accumulation.accumulate(torch.float32):
            for row in range(2):
                line.arrive(row, 1.0)
    assert not line.bucketer.rest()
    line.arrive(0, 2.0)  # the last micro-batch reaches only the first
    line.flush()
    assert line.rows == [[0]]
    (sum_of_first,) = line.sent[0].gradients
    assert sum_of_first.is_unrounded
    assert sum_of_first.pending.tolist() == [4.0, 4.0]
    left = taken_of(line.parameters[1].grad)
    assert left is not None
    assert left.is_unrounded
    assert left.pending.tolist() == [2.0, 2.0]


def test_sum_is_a_copy_in_the_dtype_of_the_master() -> None:
    line = Line([2], 100)
    parameter = line.parameters[0] = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    line.bucketer.take_from([ParameterState(parameter, 0, "p0")])
    with line.bucketer.accumulation.accumulate(torch.float32):
        address = line.arrive(0, 1.0)
        for _ in range(3):
            line.arrive(0, 2.0**-9)
    taken = taken_of(parameter.grad)
    assert taken is not None
    assert (taken.dtype, taken.pending.dtype) == (torch.bfloat16, torch.float32)
    assert taken.pending.untyped_storage()._cdata != address
    assert taken.pending.tolist() == [1.0 + 3 * 2.0**-9] * 2
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0 + 2.0**-7] * 2  # rounded once


def test_sum_that_is_being_read_is_not_sent_twice() -> None:
    line = Line([2], 1)
    with line.bucketer.accumulation.accumulate(torch.float32):
        line.arrive(0, 1.0)
    line.arrive(0, 1.0)
    (bucket,) = line.sent
    taken = bucket.gradients[0]
    taken.in_use = True  # as Transfers.download notes
    assert not line.bucketer.add(line.parameters[0])
    before = taken.pending
    line.arrive(0, 1.0)  # another backward adds, and leaves what is read as it is
    assert before.tolist() == [2.0, 2.0]
    assert taken.pending.tolist() == [3.0, 3.0]
    assert len(line.sent) == 2
    assert line.sent[1].gradients == (taken,)


# ---- how many backwards make a step ----------------------------------------------------------------------------------


def test_gradients_are_taken_at_the_last_backward_once_that_is_known() -> None:
    line = Line([3, 3], 1, holds=False)
    for step in range(4):
        for micro in range(3):
            line.arrive(0)
            assert line.is_taken(0) == (micro == 2 or step == 0)
            if micro == 1:
                line.arrive(1)  # comes in one of them only
                assert line.is_taken(1)
        line.end_step()
    assert line.rows == [[0], [0], [1], [0], *[[1], [0]] * 3]
    assert line.holder.given == [True, True]


def test_fewer_backwards_leave_one_step_alone_and_are_learned() -> None:
    line = Line([3], 1, holds=False)
    for _ in range(2):
        for _ in range(3):
            line.arrive(0)
        line.end_step()
    for step in range(3):
        line.arrive(0)
        assert line.is_taken(0) == (step > 0)
        line.end_step()


def test_gradient_that_is_set_anew_begins_a_step() -> None:
    """As after `zero_grad()` without a step."""
    line = Line([3], 1)
    line.arrive(0)
    line.parameters[0].grad = None
    line.arrive(0)
    line.end_step()
    line.arrive(0)
    assert line.is_taken(0)


def test_edited_gradients_are_left_alone_for_a_while() -> None:
    line = Line([6, 3], 1)

    def step(*edited: int) -> list[bool]:
        taken = []
        for row in range(2):
            line.arrive(row)
            taken.append(line.is_taken(row))
            if row in edited:
                gradient = line.parameters[row].grad
                assert gradient is not None
                gradient.clamp_(-1.0, 1.0)
        line.end_step()
        return taken

    assert step() == [True, True]
    assert step(1) == [True, True]
    assert step(0) == [True, True]  # most elements
    for _ in range(PAUSE_STEPS):
        assert step(0) == [False, False]
    assert step(0) == [True, True]
    for _ in range(PAUSE_STEPS):
        assert step() == [False, False]
    assert step() == step() == [True, True]


def test_sums_with_gradients_that_are_under_way_are_no_edits() -> None:
    """The next step takes at its last backward, and no step is left out."""
    line = Line([3], 100)
    for step in range(3):
        for micro in range(2):
            line.arrive(0)
            assert line.is_taken(0) == (micro == min(step, 1))
        line.end_step()


def test_gradient_given_back_after_the_step_is_none_of_the_next_one() -> None:
    line = Line([3], 1)
    line.arrive(0)
    line.flush()
    line.bucketer.end_step()
    gradient = line.parameters[0].grad
    assert gradient is not None
    gradient.add_(1.0)
    assert line.holder.given == [False]
    line.parameters[0].grad = None
    line.arrive(0)
    assert line.is_taken(0)


def test_gradient_that_was_given_back_is_held_by_nobody_else() -> None:
    line = Line([3], 1)
    line.arrive(0)
    taken = weakref.ref(line.sent.pop().gradients[0])
    line.parameters[0].grad = None
    gc.collect()
    assert taken() is None


# ---- buckets that stay -----------------------------------------------------------------------------------------------


def test_kept_parameters_fill_buckets_of_their_own() -> None:
    device = DistantDevice()
    line = Line([2] * 6, 4, device)
    line.bucketer.bucket_numel = 4
    line.bucketer.resident = frozenset(line.states[row] for row in (1, 3, 4))
    for row in range(6):
        line.arrive(row)
    line.flush()
    assert [(rows, bucket.is_resident) for rows, bucket in zip(line.rows, line.sent, strict=True)] == [
        ([0, 2], False),
        ([1, 3], True),
        ([5], False),
        ([4], True),
    ]


def test_gradients_on_the_host_never_stay() -> None:
    line = Line([2, 2], 1)
    line.bucketer.bucket_numel, line.bucketer.resident = 1, frozenset(line.states)
    line.arrive(0)
    assert not line.sent[0].is_resident


def test_another_size_counts_from_the_next_gradient_on() -> None:
    line = Line([2] * 4, 100)
    line.arrive(0)
    line.bucketer.bucket_numel, line.bucketer.resident = 4, frozenset()
    line.arrive(1)
    line.arrive(2)
    line.arrive(3)
    assert line.rows == [[0, 1], [2, 3]]


def test_backward_may_run_in_several_threads() -> None:
    line = Line([1] * 300, 7)

    def run(rows: range) -> None:
        for row in rows:
            line.arrive(row)

    threads = [threading.Thread(target=run, args=(range(i, 300, 3),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    line.flush()
    assert sorted(row for rows in line.rows for row in rows) == list(range(300))
    assert all(len(rows) == 7 for rows in line.rows[:-1])


def test_last_bucket_that_travels_does_not_wait_for_more() -> None:
    """What comes after it is kept."""
    line = Line([2] * 6, 100, DistantDevice())
    line.bucketer.resident = frozenset(line.states[4:])
    line.bucketer.last = line.states[3]
    for row in range(6):
        line.arrive(row)
        assert line.rows == ([[0, 1, 2, 3]] if row >= 3 else [])
    line.flush()
    assert [(rows, bucket.is_resident) for rows, bucket in zip(line.rows, line.sent, strict=True)] == [
        ([0, 1, 2, 3], False),
        ([4, 5], True),
    ]


def test_what_was_begun_is_not_sent_once_others_are_followed() -> None:
    line = Line([3, 3], 100)
    line.arrive(0)
    line.bucketer.take_from(line.states[1:])
    assert line.bucketer.rest() == []
