"""A pytest plugin: of all tests that were chosen, run one of several equal shares.

Owns the option `--share I/N`, which takes every N-th test from the I-th one on.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the option."""
    parser.addoption("--share", required=True, metavar="I/N", help="run every N-th test, from the I-th on, I < N")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what others run."""
    first, count = map(int, config.getoption("--share").split("/"))
    chosen = items[first::count]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
