"""How pytest finds microbenchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect bench_*.py, which pytest takes for tests only when they are named on the command line."""
    named = parent.session.isinitpath(file_path)
    if file_path.match("bench_*.py") and not named:
        return pytest.Module.from_parent(parent, path=file_path)
    return None
