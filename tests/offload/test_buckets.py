"""Buckets: gradients leave a handle in `.grad` and come out in buckets, in order, once each."""

from __future__ import annotations

import threading

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.handles import NotingHolder
from torch import nn

from superadam.devices import PlainDevice
from superadam.handles.gradient_handle import taken_of
from superadam.offload.buckets import Bucket, Bucketer
from superadam.state.parameter import ParameterState


class DistantDevice(PlainDevice):
    """Counts all memory as its own."""

    has_link = True

    def is_host(self, tensor: torch.Tensor) -> bool:
        return False


class Line:
    """Parameters of given sizes, a bucketer over them, and what came out of it."""

    def __init__(self, sizes: list[int], bucket_numel: int, device: PlainDevice | None = None) -> None:
        self.sent: list[Bucket] = []
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        self.states = [ParameterState(p, row, f"p{row}") for row, p in enumerate(self.parameters)]
        self.bucketer = Bucketer(device or PlainDevice(), NotingHolder(), bucket_numel)
        self.bucketer.take_from(self.states)

    @property
    def rows(self) -> list[list[int]]:
        """Of the gradients in each bucket."""
        return [[piece.state.row for piece in bucket.gradients] for bucket in self.sent]

    def arrive(self, row: int) -> int:
        """Let autograd accumulate a gradient, and return its address."""
        parameter = self.parameters[row]
        parameter.grad = torch.full_like(parameter, row, requires_grad=False)
        address = parameter.grad.untyped_storage()._cdata
        self.sent += self.bucketer.add(parameter)
        return address

    def flush(self) -> None:
        self.sent += self.bucketer.rest()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 100))
def test_every_gradient_is_sent_once_in_order_and_no_bucket_but_the_last_is_short(
    sizes: list[int], bucket_numel: int
) -> None:
    line = Line(sizes, bucket_numel)
    addresses = [line.arrive(row) for row in range(len(sizes))]
    before = len(line.sent)
    line.flush()
    assert [row for rows in line.rows for row in rows] == list(range(len(sizes)))
    sent = [taken for bucket in line.sent for taken in bucket.gradients.values()]
    assert [taken.pending.untyped_storage()._cdata for taken in sent] == addresses
    assert [taken_of(parameter.grad) for parameter in line.parameters] == sent
    assert all(bucket.numel >= bucket_numel for bucket in line.sent[:-1])
    assert [bucket.numel for bucket in line.sent] == [sum(sizes[row] for row in rows) for rows in line.rows]
    assert before >= len(line.sent) - 1
    count = len(line.sent)
    line.flush()
    assert len(line.sent) == count


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
