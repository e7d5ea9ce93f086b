"""What the model calls, and what comes of it: each gradient is reported once, and goes into a bucket."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.handles import NotingHolder
from support.overlap import KeepingDevice, ThreadDevice, adam, loss_of, mlp
from torch import Tensor, nn

from superadam import OffloadScheduler
from superadam.devices import PlainDevice, Stream
from superadam.handles.gradient_handle import taken_of
from superadam.offload.buckets import Bucket, Bucketer, GradientReady, Hooks
from superadam.state.parameter import ParameterState


class Line:
    """Parameters of given sizes, a bucketer over them, and what came out of it."""

    def __init__(self, sizes: list[int], bucket_numel: int, device: PlainDevice | None = None) -> None:
        self.sent: list[Bucket] = []
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        self.states = [ParameterState(p, row, f"p{row}") for row, p in enumerate(self.parameters)]
        self.holder = NotingHolder()
        self.bucketer = Bucketer(device or PlainDevice(), self.holder, bucket_numel)
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
def test_every_gradient_is_sent_once_in_order_and_no_bucket_but_the_last_is_short(sizes, bucket_numel):
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


def test_memory_of_a_gradient_on_a_device_is_kept_for_the_stream_on_which_it_was_taken(monkeypatch: Any) -> None:
    kept = []
    monkeypatch.setattr(KeepingDevice, "record_stream", lambda _, *memory: kept.append(memory))
    address = Line([3], 9, KeepingDevice()).arrive(0)
    assert [(buffer.untyped_storage()._cdata, stream) for buffer, stream in kept] == [(address, Stream.CURRENT)]


def test_backward_may_run_in_several_threads() -> None:
    line = Line([1] * 300, 7)

    def run(first: int) -> None:
        for row in range(first, 300, 3):
            line.arrive(row)

    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(run, range(3))] == [None] * 3
    line.flush()
    assert sorted(row for rows in line.rows for row in rows) == list(range(300))
    assert all(len(rows) == 7 for rows in line.rows[:-1])


def test_last_bucket_that_travels_does_not_wait_for_more() -> None:
    """What comes after it is kept."""
    line = Line([2] * 6, 100, KeepingDevice())
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


class Recorder:
    """Notes parameters whose gradients are ready."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def note(self, parameter: Tensor) -> None:
        self.seen.append(parameter)


def test_parameters_that_are_no_leaves_are_waited_for() -> None:
    product = nn.Parameter(torch.ones(3)) * 2
    recorder = Recorder()
    hooks = Hooks(recorder.note)
    hooks.watch([product])
    hooks.look_for_unfrozen()
    product.sum().backward()
    assert not recorder.seen


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_copies_report_to_nobody(how: Any) -> None:
    recorder = Recorder()
    inert = how(how(GradientReady(recorder.note)))
    assert type(inert) is GradientReady
    inert(nn.Parameter(torch.ones(2)))
    assert not recorder.seen


class UnwillingTensor(Tensor):
    """Raises whatever it is asked."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise TypeError("of the program")


def test_backward_asks_nothing_of_gradients_of_other_classes() -> None:
    model = mlp()
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", one.grad.as_subclass(UnwillingTensor)))
    with OffloadScheduler(adam(model), model, device=ThreadDevice()):
        loss_of(model, 0).backward()
        assert [one for one in model.parameters() if taken_of(one.grad) is None] == [first]
        first.grad = None


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
