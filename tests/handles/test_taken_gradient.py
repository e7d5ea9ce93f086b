"""The record of a taken gradient: its values, its one scale, sums of micro-batches, giving back."""

import gc
import math
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.float_modes import flushed_denormals
from support.handles import NotingHolder, Owner
from support.optimizers import DTYPES, EACH_DTYPE
from support.visible import bits
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from superadam.handles.taken_gradient import Factor, FactorKind, HostSum, TakenGradient
from superadam.kernels import native
from superadam.testing import SimulatedDevice

MULTIPLY, DIVIDE, UNSCALE = FactorKind.MULTIPLY, FactorKind.DIVIDE, FactorKind.UNSCALE


def copying() -> mock.Mock:
    """Return the event of a copy."""
    return mock.Mock(spec=["synchronize"])


def same_bits(first: Tensor, second: Tensor) -> bool:
    return bits(first) == bits(second)


def irregular(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(1, 1 + math.prod(shape), dtype=torch.float64).sin() * 3).view(shape).to(dtype)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


# -- values ------------------------------------------------------------------------------------------------------------

KINDS = st.sampled_from(list(FactorKind))
NUMBERS = st.one_of(
    st.floats(-4, 4), st.sampled_from([0.5, 2.0, 1.0, -0.125, 0.0, math.inf, math.nan, 3, -1, 2**-140, 2.0**127])
)


@given(
    factors=st.lists(st.tuples(KINDS, NUMBERS, st.sampled_from([None, *DTYPES]), st.booleans()), max_size=4),
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(5, 7), (1, 40), ()]),
    elsewhere=st.booleans(),
    is_narrow=st.booleans(),
)
def test_values_are_those_of_torch(factors, dtype, shape, elsewhere, is_narrow):
    """Of a gradient that may have travelled in another dtype."""
    gradient = irregular(*shape, dtype=dtype)
    arrived = gradient.to(torch.bfloat16) if is_narrow else gradient
    expected = arrived.to(dtype).clone()
    pending = transposed(arrived) if elsewhere else arrived.clone()
    taken = TakenGradient(gradient)
    taken.pending = pending
    for kind, number, form, is_of_list in factors:
        value: Any = number if form is None else torch.tensor(number, dtype=form)
        if kind is UNSCALE:
            value = torch.tensor(number, dtype=torch.float32)
            torch._amp_foreach_non_finite_check_and_unscale_([expected], torch.zeros(()), value)
        elif is_of_list:
            (torch._foreach_div_ if kind is DIVIDE else torch._foreach_mul_)([expected], value)
        elif kind is DIVIDE:
            expected.div_(value)
        else:
            expected.mul_(value)
        taken.record(Factor(kind, value, is_of_list))
    assert same_bits(taken.value().nan_to_num(7), expected.nan_to_num(7))
    assert taken.value().stride() == gradient.stride()
    assert same_bits(taken.scaled().nan_to_num(7), expected.nan_to_num(7))
    assert taken.scaled().stride() == pending.stride()
    assert same_bits(pending, arrived)
    scale = taken.scale()
    if scale is not None:
        assert abs(scale) <= 1
        wide = arrived.double() if dtype == torch.float64 else arrived.float()  # as kernels do
        assert same_bits((wide * torch.tensor(scale, dtype=wide.dtype)).to(dtype).nan_to_num(7), expected.nan_to_num(7))


NARROW = torch.tensor(0.3).item()


@pytest.mark.parametrize(
    ("shape", "kind", "value", "dtype", "scale"),
    [
        ((4,), MULTIPLY, 0.3, torch.float32, NARROW),
        ((4,), MULTIPLY, 0.3, torch.float64, None),
        ((4,), MULTIPLY, torch.tensor(0.3), torch.float64, None),
        ((4,), MULTIPLY, torch.tensor(0.3, dtype=torch.float64), torch.float32, NARROW),
        ((4,), UNSCALE, torch.tensor(0.3), torch.float32, NARROW),
        ((4,), MULTIPLY, -1, torch.float32, -1.0),
        ((4,), MULTIPLY, 0, torch.float32, None),  # which may be negative
        ((4,), DIVIDE, 2**60 + 2**36 + 1, torch.float32, None),  # torch rounds an integer once
        ((4,), MULTIPLY, torch.tensor(1.0), torch.bfloat16, 1.0),
        ((4,), MULTIPLY, True, torch.bfloat16, 1.0),
        ((4,), MULTIPLY, 0.3, torch.bfloat16, NARROW),
        ((4,), MULTIPLY, torch.tensor(0.3, dtype=torch.float64), torch.bfloat16, NARROW),
        ((4,), UNSCALE, torch.tensor(0.3), torch.bfloat16, NARROW),
        ((4,), DIVIDE, 2**7, torch.bfloat16, 2**-7),
        ((4,), DIVIDE, 3, torch.bfloat16, None),
        ((4,), MULTIPLY, 0.5, torch.float16, None),
        ((4,), MULTIPLY, 2.0, torch.float32, None),
        ((4,), MULTIPLY, math.nan, torch.float32, None),
        ((4,), MULTIPLY, -math.inf, torch.float32, None),
        ((4,), DIVIDE, 4, torch.float32, 0.25),
        ((4,), DIVIDE, torch.tensor(-2.0), torch.float32, -0.5),
        ((4,), DIVIDE, 0.5, torch.float32, None),
        ((4,), DIVIDE, 2.0**-200, torch.float32, None),  # which fp32 has not
        ((4,), DIVIDE, 0, torch.float32, None),
        ((4,), DIVIDE, math.inf, torch.float32, None),
        ((), MULTIPLY, torch.tensor(0.3, dtype=torch.float64), torch.float32, None),  # in double, and rounded once
        ((), MULTIPLY, 0.3, torch.float32, NARROW),
        ((), MULTIPLY, torch.tensor(0.3), torch.bfloat16, None),  # torch multiplies in the wider dtype
        ((), MULTIPLY, torch.tensor(0.3, dtype=torch.bfloat16), torch.bfloat16, 0.30078125),
        ((), UNSCALE, torch.tensor(0.3), torch.bfloat16, NARROW),
    ],
)
def test_one_product_is_a_scale_where_torch_rounds_once(shape, kind, value, dtype, scale):
    taken = TakenGradient(irregular(*shape, dtype=dtype))
    for factor in (Factor(MULTIPLY, torch.tensor(1.0)), Factor(kind, value), Factor(DIVIDE, 1)):
        taken.record(factor)
    assert taken.scale() == scale
    if scale not in (None, 1.0):
        taken.record(Factor(MULTIPLY, 0.5))
        assert taken.scale() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_torch_rounds_a_scalar_to_the_dtype_of_the_gradient_first(dtype: torch.dtype) -> None:
    """On the CPU numbers for lists, on a GPU scalars in its memory; not the loss scale."""
    exact, narrowed = torch.tensor(0.3).item(), torch.tensor(0.3, dtype=dtype).item()
    there = mock.Mock(spec=Tensor, is_cpu=False, __float__=lambda self: 0.3)
    for value, kind, is_of_list, on_cpu, number in (
        (0.3, MULTIPLY, False, True, exact),
        (0.3, MULTIPLY, True, True, narrowed),
        (0.3, DIVIDE, True, True, exact),
        (torch.tensor(0.3), MULTIPLY, True, True, exact),
        (torch.tensor(0.3), UNSCALE, False, True, exact),
        (0.3, MULTIPLY, False, False, exact),
        (0.3, MULTIPLY, True, False, exact),
        (torch.tensor(0.3), MULTIPLY, True, False, exact),
        (there, MULTIPLY, False, False, narrowed),
        (there, MULTIPLY, True, False, narrowed),
        (there, DIVIDE, False, False, narrowed),
        (there, UNSCALE, False, False, exact),
    ):
        assert Factor(kind, value, is_of_list).number_for(dtype, on_cpu=on_cpu) == number


@EACH_DTYPE
def test_a_gpu_rounds_scalars_of_its_own_memory_first(dtype: torch.dtype) -> None:
    gradient = irregular(40, dtype=dtype)
    for number in (0.3, 3.0, 0.77):
        on_host = gradient.clone()
        Factor(MULTIPLY, number).apply_on_host(on_host)
        assert same_bits(on_host, gradient.clone().mul_(number))
        Factor(MULTIPLY, number, is_of_list=True).apply_on_host(on_host := gradient.clone())
        assert same_bits(on_host, gradient.clone().mul_(number))
        Factor(UNSCALE, torch.tensor(number)).apply_on_host(on_host := gradient.clone())
        assert same_bits(on_host, gradient.clone().mul_(torch.tensor(number).item()))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        Factor(DIVIDE, number).apply_on_host(on_host := gradient.clone())
        assert same_bits(on_host, (gradient.to(wide) * (1 / torch.tensor(number, dtype=wide))).to(dtype))


def test_a_gpu_promotes_a_gradient_without_dimensions() -> None:
    class OnGPU(Tensor):
        is_cpu = property(lambda self: False)

    gradient, value = torch.tensor(0.7578125, dtype=torch.bfloat16), torch.tensor(0.3018)
    for kind, expected in ((MULTIPLY, gradient.clone().mul_(value)), (DIVIDE, gradient.clone().div_(value))):
        Factor(kind, value.as_subclass(OnGPU)).apply_on_host(on_host := gradient.clone())
        assert same_bits(on_host, expected)


def test_no_handler_leaves_another_floating_point_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(mode: Any, *error: Any, leave: Any = native.UsualFloatMode.__exit__) -> None:
        signal.raise_signal(signal.SIGINT)
        leave(mode, *error)

    monkeypatch.setattr(native.UsualFloatMode, "__exit__", interrupted)
    taken = TakenGradient(irregular(4))
    taken.record(Factor(MULTIPLY, 0.5))
    with flushed_denormals():
        for read in (taken.exact, taken.scaled):
            with pytest.raises(KeyboardInterrupt):
                read()
            assert not native.is_float_mode_usual()


def test_gradient_that_was_moved_is_waited_for_once_and_not_before_it_is_needed() -> None:
    gradient, copy = irregular(3), irregular(3) + 1
    taken, arrival = TakenGradient(gradient), copying()
    gone = weakref.ref(gradient)
    del gradient
    taken.move_to(copy, arrival)
    taken.record(Factor(MULTIPLY, 0.3))
    assert gone() is None
    assert taken.scale() is not None
    assert arrival.synchronize.call_count == 0
    assert taken.ready() is taken.pending is copy
    assert same_bits(taken.value(), copy * 0.3)
    assert same_bits(taken.scaled(), copy * 0.3)
    assert arrival.synchronize.call_count == 1
    assert taken.arrived is None


def test_pieces_that_were_moved_are_joined_once_and_not_before_they_are_needed() -> None:
    gradient, pieces, arrivals = irregular(4), (irregular(3) + 1, irregular(1) + 2), (copying(), copying())
    taken, gone = TakenGradient(gradient), weakref.ref(gradient)
    del gradient
    taken.move_piece_to(pieces[1], arrivals[0], begin=3, strides=(1,))
    assert taken.pending is gone()
    taken.move_piece_to(pieces[0], arrivals[1], begin=0, strides=(1,))
    assert gone() is None
    assert arrivals[1].synchronize.call_count == 0
    joined = taken.ready()
    assert same_bits(joined, torch.cat(pieces))
    assert taken.ready() is taken.pending is joined


def test_all_threads_find_the_same_tensor() -> None:
    """In place of a gradient: what one thread has multiplied another must not take for the original."""
    for _ in range(20):
        taken, together = TakenGradient(torch.zeros(200)), threading.Barrier(4)
        for begin in range(200):
            taken.move_piece_to(torch.zeros(1), copying(), begin=begin, strides=(1,))
        with ThreadPoolExecutor(4) as threads:
            wait_and_find = lambda _, taken=taken, together=together: (together.wait(), taken.pending)[1]  # noqa: E731
            found = [*threads.map(wait_and_find, range(4))]
        assert all(one is taken.pending for one in found)


def test_an_error_in_a_property_is_not_taken_for_a_name_that_is_not_there() -> None:
    taken = TakenGradient(torch.ones(3))
    taken._holder = mock.Mock(side_effect=AttributeError("of a signal's handler"))
    with pytest.raises(AttributeError, match="of a signal's handler"):
        _ = taken.holder


@pytest.mark.parametrize("change", ["absorb", "zero", "leave_speculation", "give_back"])
def test_buffer_is_not_kept_once_the_gradient_is_elsewhere(change: str) -> None:
    taken, buffer = TakenGradient(torch.ones(3)), torch.full((3,), 2.0)
    taken.move_to(buffer.view(3), copying())
    taken.is_unrounded = taken.is_reduced = taken.in_use = True
    taken.absorb(torch.ones(3)) if change == "absorb" else getattr(taken, change)()
    gone = StorageWeakRef(buffer.untyped_storage())
    del buffer
    assert gone.expired()
    assert taken.ready().tolist() == {"absorb": [3.0] * 3, "zero": [0.0] * 3}.get(change, [2.0] * 3)


# -- sums --------------------------------------------------------------------------------------------------------------


@given(
    batches=st.lists(st.integers(0, 2**31), min_size=1, max_size=5),
    in_use=st.lists(st.booleans(), min_size=5, max_size=5),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_sum_is_that_in_the_wider_dtype(batches: list[int], in_use: list[bool], dtype: torch.dtype) -> None:
    random = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in batches]
    first = irregular(4, 6, dtype=dtype)
    taken = TakenGradient(first)
    taken.pending, taken.is_unrounded, taken.exact_dtype = transposed(first.float()), True, torch.float32
    expected = first.float()
    for batch, used in zip(random, in_use, strict=False):
        before, values, version = taken.pending, taken.pending.clone(), taken.version
        taken.norm = torch.tensor(1.0)
        taken.in_use = used
        taken.absorb(batch)
        expected += batch.float()
        assert taken.version == version + 1
        assert taken.norm is None
        assert not taken.in_use
        assert (taken.pending is before) is not used
        assert not used or same_bits(before, values)
        assert taken.pending.stride() == (1, 4)
    assert taken.scaled() is taken.pending
    assert same_bits(taken.scaled(), expected)
    assert same_bits(taken.value(), expected.to(dtype))
    taken.record(Factor(MULTIPLY, 0.3))
    assert same_bits(taken.scaled(), expected.mul_(0.3))
    assert same_bits(taken.exact(), expected)
    assert same_bits(taken.value(), expected.to(dtype))
    assert taken.scale() == torch.tensor(0.3).item()


@pytest.mark.parametrize("in_use", [False, True])
def test_a_sum_takes_up_no_graph(in_use: bool) -> None:
    """As backward(create_graph=True) of a later micro-batch would bring one."""
    taken = TakenGradient(torch.ones(3, dtype=torch.bfloat16))
    taken.pending, taken.is_unrounded, taken.in_use = torch.ones(3), True, in_use
    with torch.enable_grad():
        taken.absorb(torch.ones(3, requires_grad=True) * 2)
    assert not taken.pending.requires_grad
    assert taken.pending.tolist() == [3.0] * 3


@pytest.mark.parametrize("in_use", [False, True])
def test_what_arrived_unrounded_stays_so_without_speculation(in_use: bool) -> None:
    """In memory of its own, where a commit may still read the old."""
    taken = TakenGradient(torch.ones(3, dtype=torch.bfloat16))
    taken.pending, taken.is_unrounded, taken.is_reduced, taken.in_use = torch.full((3,), 1.003), True, True, in_use
    before, version = taken.pending, taken.version
    taken.leave_speculation()
    assert taken.given is None
    assert not taken.in_use
    assert (taken.pending is before) is not in_use
    assert (taken.version > version) is in_use
    taken.absorb(torch.ones(3, dtype=torch.bfloat16))
    assert not in_use or before.tolist() == torch.full((3,), 1.003).tolist()
    assert torch.equal(taken.pending, torch.full((3,), 1.003) + 1)


# -- sums on the host, of what arrives late ----------------------------------------------------------------------------


def test_parts_are_added_once_they_have_arrived_and_the_first_one_replaces_what_was_there() -> None:
    device = SimulatedDevice(0, 0.0)
    total = HostSum(torch.full((4,), torch.nan), is_empty=True)
    for values in ([-0.0, 0.0, 0.0], [-0.0, 1e-8, 1e-8], [-0.0, 1.0, 1.0]):
        part = device.late(torch.tensor([*values, 2.0**-130], dtype=torch.bfloat16), on_host=True)
        total.add(part, device.accelerator.current_stream().end())
        assert not total.query()
    added = torch.tensor(1e-8, dtype=torch.bfloat16).item() + 1
    for _ in range(2):  # each part is added once
        with flushed_denormals():  # which another thread that waits may not do
            total.synchronize()
        assert total.query()
        assert bits(total.total) == bits(torch.tensor([-0.0, added, added, 3 * 2.0**-130]))


def test_threads_that_wait_together_add_each_part_once() -> None:
    total = HostSum(torch.zeros(100), is_empty=False)
    passed = mock.Mock(synchronize=lambda: time.sleep(1e-5))  # lets other threads run, as a real event does
    for _ in range(30):
        total.add(torch.ones(100), passed)
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(lambda _: total.synchronize(), range(4))] == [None] * 4
    assert torch.equal(total.total, torch.full((100,), 30.0))


class Sending(NotingHolder):
    can_send = True

    def _adds(self, total: HostSum, taken: TakenGradient, new: Tensor) -> bool:
        if self.can_send:
            total.add(new, copying())
        return self.can_send


def test_a_sum_that_was_zeroed_begins_anew() -> None:
    holder, new = Sending(), torch.full((3,), 2.0)
    taken = TakenGradient(torch.ones(3), None, holder)
    taken.is_unrounded = taken.is_reduced = True
    for change in (taken.absorb, lambda _: taken.zero(), taken.absorb):
        change(new)
    assert torch.equal(taken.ready(), new)


def test_what_is_added_where_nothing_can_be_sent_comes_after_what_was_sent() -> None:
    """And a sum begins with what it is added to, once that has arrived."""
    holder, arrival = Sending(), copying()
    taken = TakenGradient(torch.full((2,), -1e8), None, holder)
    taken.is_unrounded, taken.arrived = True, arrival
    taken.absorb(torch.full((2,), 1e8))
    arrival.synchronize.assert_called_once_with()
    holder.can_send = False
    taken.absorb(torch.ones(2))
    assert torch.equal(taken.ready(), torch.ones(2))


# -- giving back -------------------------------------------------------------------------------------------------------


@EACH_DTYPE
@pytest.mark.parametrize("is_scaled", [False, True])
def test_giving_back_makes_a_copy_with_factors_and_layout_and_tells_the_keeper(dtype, is_scaled):
    keeper = NotingHolder()
    gradient = irregular(3, 5, dtype=dtype)
    taken = TakenGradient(gradient, None, keeper)
    pending = taken.pending = transposed(gradient)
    taken.arrived = arrival = copying()
    if is_scaled:
        taken.record(Factor(MULTIPLY, 0.3))
        taken.record(Factor(DIVIDE, 3))
    given = taken.give_back()
    assert taken.given is not None
    assert taken.given is given is taken.give_back()
    assert given.data_ptr() != pending.data_ptr()
    assert given.stride() == (5, 1)
    assert same_bits(given, gradient.clone().mul_(0.3).div_(3) if is_scaled else gradient)
    assert taken.factors == ()
    assert keeper.given == [taken]
    assert arrival.synchronize.call_count == 1
    assert taken.ready().data_ptr() == given.data_ptr()
    given.mul_(2)
    assert same_bits(pending, gradient)


def test_owner_and_keeper_are_not_kept_alive() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    owner, keeper = Owner(parameter), NotingHolder()
    references = [weakref.ref(owner), weakref.ref(keeper)]
    taken = TakenGradient(irregular(3), owner, keeper)
    assert taken.parameter is parameter
    assert taken.holder is keeper
    del owner, keeper
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert taken.parameter is None
    assert taken.holder._nonfinite_of(taken) is None
    assert same_bits(taken.give_back(), irregular(3))
