"""What all tests share: Hypothesis profiles, `slow`, `deep`, `covering`, the rule for skips, the instruction sets."""

import collections
import gc
import itertools
import os
import platform
import signal
import socket
import sys
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis.internal.conjecture import providers
from support.deep import DEEP, TIMES
from support.slow_files import is_slow

import superadam

pytest.register_assert_rewrite("superadam.testing.conformance")

# It finds the same examples on every machine, unless it is deep, and leaves nothing behind.
hypothesis.settings.register_profile(
    "default",
    derandomize=not DEEP,
    print_blob=DEEP,
    deadline=None,
    database=None,
    max_examples=40 * TIMES,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("default")
# Else it draws numbers that modules hold which other tests have imported: what is drawn would depend on their order.
providers._get_local_constants = providers.Constants

# A shell's background jobs ignore Ctrl-C and let all that they start ignore it, but tests send it to both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of slow tests before they are imported, as frameworks and compilers take seconds."""
    is_quick = config.option.markexpr == "not slow" and collection_path.suffix == ".py"
    return (is_quick and is_slow(collection_path)) or None


MOST_QUICK_CASES = 20
"""Of one parametrized test; it draws from the many programs and operations that the whole tests go through."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Let deep tests take their time, also those that have a limit of their own; thin the products of the others.

    Before options choose among the tests: of each product, as few cases are left as hold every pair of values. All of
    those are slow but as few as hold every value, and of these all but about `MOST_QUICK_CASES`. Slow files come first,
    so that of those that run in parallel none is left over.
    """
    slow = {path: is_slow(path) for path in {item.path for item in items}}
    items.sort(key=lambda item: not slow[item.path])
    for product in products_of(items):
        quick = covering(product, strength=1)
        for item in set(product) - set(quick[:: 1 + len(quick) // MOST_QUICK_CASES]):
            item.add_marker("slow")
    yield
    for item in items:
        if DEEP:
            limit = item.get_closest_marker("timeout")
            seconds = float(item.config.getini("timeout") if limit is None else limit.args[0])
            item.add_marker(pytest.mark.timeout(TIMES * seconds), append=False)
    elsewhere = platform.machine() != "x86_64"
    left_out = {item for item in items if elsewhere and item.get_closest_marker("x86_64")}
    left_out |= {item for item in items if not DEEP and item.get_closest_marker("deep")}
    for product in products_of([item for item in items if item not in left_out]):
        marker = product[0].get_closest_marker("covering")
        strength = marker.args[0] if marker is not None and marker.args else 2
        if not DEEP:
            left_out |= set(product) - set(covering(product, strength))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def products_of(items: list[pytest.Item]) -> list[list[pytest.Function]]:
    """Return the cases of each test that has parameters."""
    products: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            products.setdefault(item.nodeid.split("[")[0], []).append(item)
    return list(products.values())


def covering(product: list[pytest.Function], strength: int) -> list[pytest.Function]:
    """Return cases of a test, so few that every combination of `strength` values occurs in one.

    Greedily: always the case with the most new combinations, of which the first.
    """
    left: dict[pytest.Function, set[Any]] = {}
    for case in product:
        values = [(name, id(value)) for name, value in case.callspec.params.items()]
        left[case] = set(itertools.combinations(values, min(strength, len(values))))
    chosen = []
    while left:
        best = max(left, key=lambda case: len(left[case]))
        seen = left.pop(best)
        chosen.append(best)
        left = {case: rest for case, combinations in left.items() if (rest := combinations - seen)}
    return chosen


def pytest_collection_finish() -> None:
    """Let `gc.collect()` pass over what all modules made when they were imported."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the processes of a file's ranks with its last test."""
    ranks = sys.modules.get("support.ranks")
    if ranks is not None and (nextitem is None or nextitem.path != item.path):
        ranks.end_workers()


SLOWEST = 10


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which files took the longest."""
    seconds: collections.Counter[str] = collections.Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > SLOWEST:
        terminalreporter.section(f"{SLOWEST} slowest files, of {seconds.total():.0f} seconds in all")
        for file, taken in seconds.most_common(SLOWEST):
            terminalreporter.write_line(f"{taken:7.1f} s  {file}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make a skip a failure where the environment says CI: it would hide what was never run."""
    report = yield
    if report.skipped and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where this must run: {report.longrepr}"
    return report


@pytest.fixture(scope="session", params=superadam.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Return each instruction set that this machine can run, in turn."""
    return request.param


@pytest.fixture
def fresh_native(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let instruction set and threads be chosen anew, as in a new process without environment variables."""
    for name in ("_active", "_num_threads"):
        monkeypatch.setattr(f"superadam.kernels.native.{name}", None)
    for variable in ("SUPERADAM_ISA", "SUPERADAM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


@pytest.fixture(autouse=True)
def _no_section_stays_open() -> Iterator[None]:
    """A test that leaves one open would let finalizers run inside those of later tests."""
    yield
    assert getattr(signal.getsignal(signal.SIGINT), "__name__", "") != "note"


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_an_earlier_file() -> None:
    """Free what earlier files have left, which would else go in the middle of a test that counts, or in its child.

    Nor is a file that one of them has left open an error of a test that makes warnings errors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def one_torch_thread() -> Generator[None]:
    """Let torch compute with one thread: its fused Adam rounds the end of each thread's part in another way."""
    of_torch, of_superadam = torch.get_num_threads(), superadam.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(of_torch)
    superadam.set_num_threads(of_superadam)


@pytest.fixture(scope="module")
def no_network() -> Generator[None]:
    """Make every attempt to reach a network an error."""

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            raise AssertionError(f"a test tried to reach {address!r}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        yield


@pytest.fixture(scope="module")
def one_rank() -> Generator[None]:
    """Make a process group of this process alone."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
