"""Tests run alike where they are started in a shell's background, with SIGINT ignored."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PROGRAM = """
import signal, subprocess, sys
from unittest.mock import MagicMock
sys.modules.update(torch=MagicMock(), superadam=MagicMock())  # which take seconds
import conftest
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    child = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 2)"], stderr=subprocess.DEVNULL)
    print(child.returncode)
"""


@pytest.mark.slow
@pytest.mark.subprocess
def test_ctrl_c_reaches_tests_and_their_children_in_the_background() -> None:
    done = subprocess.run(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "-2"), done.stderr
