"""`make test-quick` runs something of every folder, and `make test` everything."""

import re
from pathlib import Path

import pytest
from support.slow_files import is_slow

TESTS = Path(__file__).resolve().parent
FOLDERS = sorted({path.parent for path in TESTS.glob("*/test_*.py")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_each_folder_has_a_file_that_is_not_slow_as_a_whole(folder: Path) -> None:
    assert any(not is_slow(path) for path in folder.glob("test_*.py"))


def test_only_the_quick_run_leaves_tests_out() -> None:
    makefile = (TESTS.parent / "Makefile").read_text()
    runs = re.findall(r"^([\w-]+):.*\n(?:\t.*\n)*?\t.*-m pytest (.*)$", makefile, re.MULTILINE)
    assert dict(runs).keys() == {"suite", "test-quick", "test-deep"}
    assert [name for name, options in runs if " -m " in options] == ["test-quick"]
    assert re.search(r"^test:.*\n\t.* suite\b", makefile, re.MULTILINE)
