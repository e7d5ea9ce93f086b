"""`make test-quick` runs something of every folder, and `make test` everything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
FOLDERS = sorted({path.parent for path in TESTS.glob("*/test_*.py")})
IS_SLOW = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow", re.MULTILINE)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_each_folder_has_a_file_that_is_not_slow_as_a_whole(folder: Path) -> None:
    assert any(IS_SLOW.search(path.read_text()) is None for path in folder.glob("test_*.py"))


def test_only_the_quick_run_leaves_tests_out() -> None:
    makefile = (TESTS.parent / "Makefile").read_text()
    runs = re.findall(r"^([\w-]+):.*\n(?:\t.*\n)*?\t.*-m pytest (.*)$", makefile, re.MULTILINE)
    assert dict(runs).keys() == {"test", "test-quick", "test-deep"}
    assert [name for name, options in runs if " -m " in options] == ["test-quick"]
