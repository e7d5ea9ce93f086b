"""What all tests share: the Hypothesis profiles and the fixture over every runnable instruction set."""

from __future__ import annotations

import os

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


@pytest.fixture(scope="session", params=superadam.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Return each instruction set that this machine can run, in turn."""
    name: str = request.param
    return name
