"""What all microbenchmarks share: how they are found, and how large they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NUMEL = int(os.environ.get("SUPERADAM_BENCH_NUMEL", 16 << 20))
"""Elements of a large tensor; with all arrays of a pass it should be several times larger than the last cache."""


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect bench_*.py, which pytest takes for tests only when they are named on the command line."""
    named = parent.session.isinitpath(file_path)
    if file_path.match("bench_*.py") and not named:
        return pytest.Module.from_parent(parent, path=file_path)
    return None


@pytest.fixture(scope="session")
def numel() -> int:
    """Return the elements of a large tensor."""
    return NUMEL
