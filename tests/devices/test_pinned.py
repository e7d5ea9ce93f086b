"""Pinned memory: no two tensors overlap, what is free is found again, and nothing is free while a copy needs it."""

import gc
import math
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.children import exit_code_of_child
from support.optimizers import DTYPES
from torch import Tensor

from superadam.devices import pinned as pinned_module
from superadam.devices.pinned import PAGE_BYTES, Gaps, PinnedMemory, PinningError
from superadam.host import forks

PAGES = 24


@dataclass
class RecordingRegistrar:
    """Remembers what is registered: size by address."""

    limit: int = 1 << 62
    refuses_to_unregister: bool = False
    at_unregister: Callable[[], object] = bool
    registered: dict[int, int] = field(default_factory=dict)
    unregistered: list[int] = field(default_factory=list)

    def register(self, address: int, size: int) -> None:
        if sum(self.registered.values()) + size > self.limit:
            raise PinningError("no more")
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        if self.refuses_to_unregister:
            raise PinningError("not now")
        self.at_unregister()
        del self.registered[address]
        self.unregistered.append(address)


@dataclass
class Point:
    has_passed: bool = False
    waits: int = 0
    at_synchronize: Callable[[], object] = bool

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        self.waits += 1
        self.at_synchronize()
        self.has_passed = True


def pinned(pages: int = PAGES, largest: float = 1, limit: int = 1 << 62) -> tuple[PinnedMemory, RecordingRegistrar]:
    registrar = RecordingRegistrar(limit)
    memory = PinnedMemory(registrar)
    memory.grow(pages * PAGE_BYTES, int(largest * PAGE_BYTES))
    return memory, registrar


def page_of(tensor: Tensor, registrar: RecordingRegistrar) -> int | None:
    """Return the page in which a tensor begins, of all registered ones, or None for pageable memory."""
    before = 0
    for address, size in registrar.registered.items():
        if address <= tensor.data_ptr() < address + size:
            return before + (tensor.data_ptr() - address) // PAGE_BYTES
        before += size // PAGE_BYTES
    return None


def take(memory: PinnedMemory, pages: int) -> Tensor:
    return memory.empty(pages * PAGE_BYTES, torch.uint8)


class Traffic(RuleBasedStateMachine):
    """Tensors come and go, some live on in a view, some are kept for events that pass late."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.registrar = pinned()
        self.live: list[tuple[int, int, Tensor]] = []  # first page, pages, the tensor or a view of it
        self.kept: dict[str, list[tuple[int, int, Point]]] = {"one": [], "other": []}

    @property
    def occupied(self) -> set[int]:
        ranges = [(first, pages) for first, pages, _ in self.live]
        for queue in self.kept.values():
            passed = [event.has_passed for _, _, event in queue]
            waiting = passed.index(False) if False in passed else len(queue)
            ranges += [(first, pages) for first, pages, _ in queue[waiting:]]
        return {page for first, pages in ranges for page in range(first, first + pages)}

    @rule(pages=st.integers(1, 9), odd=st.integers(0, PAGE_BYTES - 1))
    def ask(self, pages: int, odd: int) -> None:
        occupied = self.occupied
        fits = [p for p in range(PAGES - pages + 1) if not occupied & set(range(p, p + pages))]
        before = self.memory.pageable_bytes
        tensor = self.memory.empty(pages * PAGE_BYTES - odd, torch.uint8)
        page = page_of(tensor, self.registrar)
        assert page == (fits[0] if fits else None)
        assert self.memory.pageable_bytes - before == (0 if fits else tensor.numel())
        if page is not None:
            tensor.fill_(page)
            self.live.append((page, pages, tensor))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), as_view=st.booleans())
    def drop(self, which: int, as_view: bool) -> None:
        page, pages, tensor = self.live.pop(which % len(self.live))
        if as_view:
            self.live.append((page, pages, tensor[-1:].view(torch.int8)))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), queue=st.sampled_from(["one", "other"]))
    def keep(self, which: int, queue: str) -> None:
        page, pages, tensor = self.live[which % len(self.live)]
        event = Point()
        self.memory.hold_until(tensor, event, queue)
        self.kept[queue].append((page, pages, event))

    @rule(queue=st.sampled_from(["one", "other"]))
    def let_pass(self, queue: str) -> None:
        waiting = [event for _, _, event in self.kept[queue] if not event.has_passed]
        if waiting:
            waiting[0].has_passed = True

    @invariant()
    def tensors_hold_what_was_written(self) -> None:
        for page, _, tensor in self.live:
            assert (tensor.view(torch.uint8) == page).all()

    def teardown(self) -> None:
        self.live.clear()
        for queue in self.kept.values():
            for _, _, event in queue:
                event.has_passed = True
        assert page_of(take(self.memory, PAGES), self.registrar) == 0  # everything is one gap again


def test_traffic():
    run_state_machine_as_test(Traffic, settings=settings(stateful_step_count=40))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_begin_at_pages_and_have_the_length_that_was_asked_for(dtype):
    memory, registrar = pinned(7)
    held = []
    for numel in (0, 1, 63, PAGE_BYTES // dtype.itemsize, 0, PAGE_BYTES // dtype.itemsize + 1):
        tensor = memory.empty(numel, dtype)
        assert (tensor.shape, tensor.dtype) == ((numel,), dtype)
        assert tensor.data_ptr() % PAGE_BYTES == 0
        assert tensor.fill_(1.0).sum() == numel
        held.append(tensor)
    assert page_of(take(memory, 2), registrar) == 5  # those without elements take nothing


def test_memory_in_a_cycle_comes_back_while_memory_is_asked_for(monkeypatch):
    """The collector runs whenever it likes: also between the lines that hold the lock."""
    memory, registrar = pinned(2)
    cycle = [take(memory, 1)]
    cycle.append(cycle)
    before_allocating(monkeypatch, gc.collect)
    gc.disable()  # or it might run before
    try:
        del cycle
        assert page_of(take(memory, 1), registrar) == 1
    finally:
        gc.enable()
    assert page_of(take(memory, 2), registrar) == 0


def test_threads_ask_for_memory_one_at_a_time(monkeypatch):
    memory, _ = pinned()
    meeting, met = threading.Barrier(2), []

    def meet():
        with suppress(threading.BrokenBarrierError):
            met.append(meeting.wait(timeout=0.2))

    before_allocating(monkeypatch, meet)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(take, [memory] * 2, [1] * 2))
    assert met == []


def before_allocating(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    monkeypatch.setattr(Gaps, "allocate", lambda gaps, size, allocate=Gaps.allocate: (call(), allocate(gaps, size))[1])


# ---- what does not fit -----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_pageable_counted_and_told_once(caplog):
    memory, registrar = pinned(4)
    held = take(memory, 3)
    for _ in range(3):
        assert page_of(take(memory, 3), registrar) is None
    assert memory.pageable_bytes == 9 * PAGE_BYTES
    (record,) = caplog.records
    assert record.args == tuple(f"{pages * PAGE_BYTES / 1e9:.2f} GB" for pages in (3, 4))
    del held
    assert page_of(take(memory, 3), registrar) == 0


def test_pageable_memory_is_kept_as_well():
    """Its copy may be under way, too: some devices reach pageable memory by themselves."""
    memory = PinnedMemory(RecordingRegistrar())
    tensor, event = take(memory, 1), Point()
    memory.hold_until(tensor, event, "queue")
    alive = weakref.ref(tensor)
    del tensor
    take(memory, 1)
    assert alive() is not None
    event.has_passed = True
    take(memory, 1)
    assert alive() is None


def test_as_much_as_the_driver_allows_is_pinned(caplog):
    memory, registrar = pinned(16, largest=2, limit=11 * PAGE_BYTES)
    assert sorted(registrar.registered.values()) == [2 * PAGE_BYTES, 8 * PAGE_BYTES]
    assert memory.size == 10 * PAGE_BYTES
    (record,) = caplog.records
    assert "no more" in record.getMessage()
    assert tuple(record.args)[:3] == tuple(f"{n * PAGE_BYTES / 1e9:.2f} GB" for n in (10, 16, 6))


@pytest.mark.parametrize(
    ("slab", "pages", "largest", "expected"),
    [
        (4, 9, 3, [4, 4, 4, 3]),  # as much more as ends are too short for the largest, so that all buffers find room
        (1.5, 3, 1 / PAGE_BYTES, [2, 2]),  # slabs count as the whole pages that they are
        (1 << 20, 1, 5, [5]),  # at least one buffer
    ],
)
def test_much_memory_is_pinned_in_several_slabs(slab, pages, largest, expected, monkeypatch):
    monkeypatch.setattr(pinned_module, "SLAB_BYTES", int(slab * PAGE_BYTES))
    memory, registrar = pinned(pages, largest)
    assert sorted(registrar.registered.values(), reverse=True) == [count * PAGE_BYTES for count in expected]
    buffers = [take(memory, math.ceil(largest)) for _ in range(max(1, pages // math.ceil(largest)))]
    assert memory.pageable_bytes == 0
    del buffers


# ---- the end of a slab -----------------------------------------------------------------------------------------------


def test_closing_unpins_when_the_last_view_is_gone():
    memory, registrar = pinned()
    view = take(memory, 2)[5:]
    (address,) = registrar.registered
    memory.close()
    assert registrar.unregistered == []
    assert page_of(take(memory, 1), registrar) is None
    view.fill_(3)
    del view
    assert registrar.unregistered == [address]


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
def test_the_end_waits_for_copies_under_way(closes):
    memory, registrar = pinned()
    event = Point(at_synchronize=lambda: registrar.registered)  # raises where memory is gone already
    memory.hold_until(take(memory, 1), event, "queue")
    if closes:
        memory.close()
    del memory
    gc.collect()
    assert event.waits == 1
    assert registrar.registered == {}


def test_a_driver_that_does_not_unpin_leaves_the_memory_mapped(caplog):
    memory, registrar = pinned()
    (address,) = registrar.registered
    registrar.refuses_to_unregister = True
    memory.close()
    assert "could not unpin" in caplog.text
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    assert any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_ctrl_c_interrupts_no_unpinning():
    memory, registrar = pinned()
    registrar.at_unregister = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        memory.close()
    assert registrar.registered == {}


def test_a_forked_child_leaves_the_parents_memory_alone():
    memory, registrar = pinned()
    tensors = [take(memory, 1).fill_(7)]

    def end_everything():
        memory.close()
        tensors.clear()
        gc.collect()
        assert registrar.unregistered == []
        assert not forks._left_to_parent[-1][0].closed

    assert exit_code_of_child(end_everything) == 0
    assert (tensors[0] == 7).all()


@pytest.mark.parametrize(("size", "told"), [(1 << 32, "no more"), (1 << 60, "could not be mapped")])
def test_a_refusal_of_driver_or_system_is_told_and_leaves_no_mapping_behind(size, told, caplog):
    def mapped():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0])

    memory, before = PinnedMemory(RecordingRegistrar(limit=0)), mapped()
    memory.grow(size, size)
    assert told in caplog.text
    assert memory.size == 0
    assert mapped() - before < (1 << 32) // PAGE_BYTES
