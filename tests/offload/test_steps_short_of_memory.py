"""Where memory runs out in a step, the step is made wholly or not at all, and can be made by calling it again."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.deep import DEEP

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or shutil.which("cc") is None, reason="needs glibc and a C compiler"
)
def test_step_whose_memory_runs_out_is_made_wholly_or_not_at_all(tmp_path: Path) -> None:
    library = tmp_path / "failing_allocations.so"
    source = TESTS / "support" / "failing_allocations.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(TESTS)}
    program = [sys.executable, "-m", "support.steps_short_of_memory", *(["--all"] if DEEP else [])]
    made = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    reports = [json.loads(line) for line in made.stdout.splitlines()]
    for report in reports:
        assert report["tried"] >= report["raised"]
        if DEEP:  # a sample of all allocations need not meet every case
            assert report["tried"] > 0
            assert report["patched"] > 0 or not report["name"].startswith("patched")
    assert sum(report["tried"] for report in reports) >= len(reports)
