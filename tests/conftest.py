"""What all tests share: the Hypothesis profiles, the rule for skips, the fixture over runnable instruction sets."""

from __future__ import annotations

import os
from collections.abc import Generator

import hypothesis
import pytest

import superadam

# "default" finds the same examples on every machine and leaves nothing behind; "deep" (`make test-deep`) draws others.
hypothesis.settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=40,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "deep", hypothesis.settings.get_profile("default"), derandomize=False, max_examples=800, print_blob=True
)
hypothesis.settings.load_profile("deep" if os.environ.get("SUPERADAM_DEEP") == "1" else "default")


DEEPER = 20
"""How many times as long a test may take with the "deep" profile, which draws so many more examples."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let deep tests take their time, also those that have a limit of their own."""
    if os.environ.get("SUPERADAM_DEEP") == "1":
        for item in items:
            marker = item.get_closest_marker("timeout")
            if marker is not None:
                item.add_marker(pytest.mark.timeout(DEEPER * marker.args[0]), append=False)


LISTED_SKIPS = {
    "test_the_document_holds_what_the_script_prints"
}  # needs the very compiler that docs/grace.md was made with
"""Tests that may be skipped in CI; any other skip there is a failure, because it would hide what was never run."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make a skip that is not listed a failure where the environment says CI."""
    report = yield
    if report.skipped and os.environ.get("CI") and item.name.split("[")[0] not in LISTED_SKIPS:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where this must run: {report.longrepr}"
    return report


@pytest.fixture(scope="session", params=superadam.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Return each instruction set that this machine can run, in turn."""
    name: str = request.param
    return name
