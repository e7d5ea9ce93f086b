"""Forked processes and the optimizer: DataLoader workers, and a child that trains on by itself."""

import threading
from collections.abc import Iterator

import pytest
import torch
from support.children import exit_code_of_child
from support.visible import give_gradients, parameter, shown, speculate, state_bits, train

import superadam
from superadam import SpeculativeCPUAdamW

LENGTH = 5 * 4096  # several chunks, so that the pool's threads have work


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = superadam.get_num_threads()
    superadam.set_num_threads(3)
    yield
    superadam.set_num_threads(before)


def make() -> SpeculativeCPUAdamW:
    return SpeculativeCPUAdamW([parameter(LENGTH, dtype=torch.bfloat16), parameter(LENGTH, seed=1)], max_grad_norm=50.0)


def train_all(optimizer: SpeculativeCPUAdamW, seeds: range) -> None:
    for seed in seeds:
        train(optimizer, seed, speculative=bool(seed % 2))


@pytest.mark.parametrize("phase", ["clean", "speculated", "accepted"])
def test_child_goes_on_where_its_parent_was(phase: str) -> None:
    optimizer, twin = make(), make()
    train_all(optimizer, range(3))
    if phase != "clean":
        speculate(optimizer, 3)
    if phase == "accepted":
        optimizer.resolve()
    train_all(twin, range(4))
    after_three = shown(twin)
    train_all(twin, range(4, 6))
    expected = state_bits(twin)

    def go_on() -> None:
        if phase == "clean":
            give_gradients(optimizer, 3)
        if phase != "accepted":
            optimizer.step()
            optimizer.zero_grad()
        assert shown(optimizer) == after_three
        train_all(optimizer, range(4, 6))
        assert state_bits(optimizer) == expected

    assert exit_code_of_child(go_on) == 0
    go_on()  # the child changed nothing here


def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    """One that was inside a call of the optimizer: nothing reads what may be half a step."""
    optimizer = SpeculativeCPUAdamW([parameter(3)])
    train(optimizer, 0)
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay_inside() -> None:
        with optimizer._binding._lock(), optimizer._binding._transaction.lock:
            is_inside.set()
            may_leave.wait(60)

    def use() -> None:
        optimizer.zero_grad()
        for call in (optimizer.step, optimizer.state_dict):
            with pytest.raises(RuntimeError, match="forked while another thread was inside a step of the optimizer"):
                call()

    thread = threading.Thread(target=stay_inside)
    thread.start()
    assert is_inside.wait(60)
    try:
        assert exit_code_of_child(use) == 0
    finally:
        may_leave.set()
        thread.join()
