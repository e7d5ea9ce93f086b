"""The pool of threads: the same bits for any count, short jobs alone, concurrent callers, fork, and rest when idle."""

import itertools
import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from support.children import exit_code_of_child, in_child
from support.kernel_arrays import Job, make_segment
from support.strategies import USUAL, Magnitudes
from support.waiting import wait_until

from superadam import SpeculativeCPUAdamW
from superadam.kernels import native
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.native import Dtype, Pass

CHUNKS_PER_THREAD = 16  # of cpu/run.c: shorter jobs do not wake another thread

TRIES = 50
"""Of what a busy machine may not let happen each time, and a fault never."""


def make_job(*lengths: int, which: Pass = Pass.UPDATE) -> Job:
    segments = [
        make_segment(i, length, Dtype.BFLOAT16, Dtype.BFLOAT16, kinds=[Magnitudes.WIDE, Magnitudes.ORDINARY], norm=True)
        for i, length in enumerate(lengths)
    ]
    return Job(which, segments, [Coefficients.at_step(USUAL, 2)])


def lengths_for(threads: int) -> tuple[int, ...]:
    """Return lengths of segments that are together just long enough for a number of threads.

    For seven, the last but one has more chunks than a thread takes at a time.
    """
    total = threads * CHUNKS_PER_THREAD * native.CHUNK
    return (total // 4 + 77, 0, 5, native.CHUNK, 0, total * 3 // 4, 1)


def threads_now() -> set[int]:
    """Return the threads of this process, of which an emulator may have one of its own."""
    return set(map(int, os.listdir("/proc/self/task")))


@pytest.mark.parametrize("which", [Pass.UPDATE, Pass.NORM], ids=lambda which: which.name)
def test_any_number_of_threads_gives_the_same_bits(which):
    job = make_job(*lengths_for(7), which=which)
    expected = job.expected()
    for isa, threads in itertools.product(native.available_isas(), (1, 2, 3, 7)):
        job.reset()
        job.run(isa, threads)
        job.check(expected, f" with {threads} threads and {isa}")


@in_child
def test_as_many_threads_join_as_a_job_is_long():
    """A child begins with one thread and an empty pool."""
    before = len(threads_now())
    make_job(2 * CHUNKS_PER_THREAD * native.CHUNK - native.CHUNK).run("scalar", threads=7)
    assert len(threads_now()) - before == 0
    make_job(2 * CHUNKS_PER_THREAD * native.CHUNK).run("scalar", threads=7)
    assert len(threads_now()) - before == 1
    make_job(*lengths_for(7)).run("scalar", threads=7)
    assert len(threads_now()) - before == 6
    make_job(*lengths_for(7)).run("scalar", threads=3)
    assert len(threads_now()) - before == 6


def processor_nanoseconds(threads: set[int]) -> np.ndarray:
    files = [Path(f"/proc/self/task/{thread}/schedstat") for thread in sorted(threads)]
    return np.array([int(file.read_text().split()[0]) for file in files])


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not tell")
@in_child
def test_as_many_threads_work_as_a_job_was_given():
    """A thread that works takes a 64th of this job at the least; one that wakes in vain takes microseconds."""
    others = threads_now() - {threading.get_native_id()}
    make_job(*lengths_for(7)).run("scalar", threads=7)
    ours = threads_now() - others
    assert len(ours) == 7
    job = make_job(1 << 18, which=Pass.NORM)
    table = np.repeat(job.table(), 256)
    for threads in (2, 5):
        most = 0
        for _ in range(TRIES):
            before = processor_nanoseconds(ours)
            native.run(Pass.NORM, table, isa="scalar", threads=threads)
            ran = processor_nanoseconds(ours) - before
            working = sum(one > ran.sum() / 128 for one in ran)
            assert working <= threads
            most = max(most, working)
            if most >= min(threads, 3):  # a busy machine may let the others come too late
                break
        assert most >= min(threads, 3)


@in_child
def test_idle_threads_use_no_processor_time():
    """One spinning thread alone would use the whole half second; waking and sleeping again uses microseconds.

    Of a whole step, the norm's threads stay awake for the update; a gradient that is not finite has none.
    """
    others = len(threads_now())
    make_job(*lengths_for(7)).run("scalar", threads=7)
    for last in (1.0, math.nan):
        optimizer = SpeculativeCPUAdamW([torch.nn.Parameter(torch.zeros(1 << 20))])
        optimizer.param_groups[0]["params"][0].grad = torch.full((1 << 20,), last)
        native.set_num_threads(7)
        optimizer.step()
    before = time.process_time()
    time.sleep(0.5)
    assert len(threads_now()) - others == 6
    assert time.process_time() - before < 0.1


def blocked_signals(thread: int) -> int:
    """Return the signals that a thread of this process blocks, bit 0 for signal 1."""
    (line,) = [one for one in Path(f"/proc/self/task/{thread}/status").read_text().splitlines() if "SigBlk" in one]
    return int(line.split()[1], 16)


@in_child
def test_signals_stay_with_the_threads_of_the_program():
    """A signal that the program waits for, or that is to interrupt its main thread, is never delivered to the pool."""
    caller = threading.get_native_id()
    before, there = blocked_signals(caller), threads_now()
    make_job(*lengths_for(3)).run("scalar", threads=3)
    assert blocked_signals(caller) == before
    pool = threads_now() - there
    assert len(pool) == 2
    wait_until(lambda: not any(blocked_signals(thread) >> (signal.SIGSEGV - 1) & 1 for thread in pool))  # they run
    # Where these are blocked, a fault ends the process without a handler.
    faults = {signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD, *faults):
        assert {blocked_signals(thread) >> (one - 1) & 1 for thread in pool} == {one not in faults}


def processor_of(thread: int) -> int:
    return int(Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[36])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is no other processor")
@in_child
def test_threads_leave_the_callers_processor_and_the_bounds_of_others_alone():
    """In virtual machines Linux wakes a thread where its waker runs, once the other processors have slept."""
    first, second, *_ = sorted(every := os.sched_getaffinity(0))
    job, there = make_job(1 << 22, which=Pass.NORM), threads_now()
    caller = threading.get_native_id()
    os.sched_setaffinity(caller, {first})
    job.run("scalar", threads=2)
    os.sched_setaffinity(caller, every)
    (alone,) = threads_now() - there
    for _ in range(10):
        job.run("scalar", threads=2)
        assert os.sched_getaffinity(alone) == {first}
    os.sched_setaffinity(alone, every)

    def meetings() -> tuple[int, bool]:
        """Return how many jobs end with the thread where its caller is, and whether it leaves some processor."""
        met, leaves = 0, False
        for _ in range(TRIES):
            time.sleep(0.005)
            job.run("scalar", threads=2)
            (helper,) = threads_now() - there
            met += processor_of(helper) == processor_of(caller)
            leaves |= os.sched_getaffinity(helper) != os.sched_getaffinity(caller)
        return met, leaves

    met, leaves = meetings()
    assert leaves or met < TRIES / 4
    for bound in ({first}, {second}):  # as by `taskset --all-tasks`
        for thread in threads_now():
            os.sched_setaffinity(thread, bound)
        assert meetings() == (TRIES, False)


def test_concurrent_callers_get_right_results():
    jobs = [make_job(*lengths_for(3)) for _ in range(8)]
    expected = jobs[0].expected()
    with ThreadPoolExecutor(4) as callers:
        for isa in native.available_isas():
            for job in jobs:
                job.reset()
            list(callers.map(Job.run, jobs, [isa] * 8, [1, 2, 3, 3, 2, 1, 3, 3]))
            for job in jobs:
                job.check(expected, f" with {isa}")


@in_child
def test_callers_that_wait_for_their_jobs_at_once_all_wake():
    """Short jobs, so that their ends often meet."""
    start = threading.Barrier(3)

    def run_many(_):
        job = make_job(*lengths_for(3), which=Pass.NORM)
        table = job.table()
        for _ in range(300):
            start.wait()
            native.run(Pass.NORM, table, threads=3)

    with ThreadPoolExecutor(3) as callers:
        list(callers.map(run_many, range(3)))


@pytest.mark.slow
def test_fork_while_another_thread_runs_jobs():
    """Children begin with an empty pool, and the parent goes on."""
    lengths = lengths_for(2)
    expected = make_job(*lengths).expected()
    done, stop = [0], threading.Event()

    def keep_running():
        while not stop.is_set():
            job = make_job(*lengths)
            job.run("scalar", threads=2)
            job.check(expected)
            done[0] += 1

    def work():
        before = len(threads_now())
        job = make_job(*lengths)
        job.run("scalar", threads=2)
        assert len(threads_now()) - before == 1
        job.check(expected)

    with ThreadPoolExecutor(1) as other:
        running = other.submit(keep_running)
        try:
            wait_until(lambda: done[0] or running.done())
            assert [exit_code_of_child(work) for _ in range(5)] == [0] * 5
            before = done[0]
            wait_until(lambda: done[0] > before or running.done())
        finally:
            stop.set()
        running.result()


def test_the_interpreter_goes_on_while_a_job_runs():
    """The GIL is released: another Python thread counts while this one is inside a single long call."""
    job = make_job(1 << 18)
    table = np.repeat(job.table(), 128)
    ends, counts = threading.Event(), []

    def count():
        while not ends.wait(0.0005):
            counts.append(time.perf_counter())

    def counts_beside() -> bool:
        begin = time.perf_counter()
        native.run(Pass.NORM, table, isa="scalar", threads=1)
        end = time.perf_counter()
        return sum(begin < at < end for at in counts) >= 3  # if the GIL was held, once before and once after the call

    with ThreadPoolExecutor(1) as counter:
        counter.submit(count)
        try:
            assert any(counts_beside() for _ in range(TRIES))
        finally:
            ends.set()
