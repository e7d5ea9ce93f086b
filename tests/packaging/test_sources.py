"""Python that is started among the sources, which hide what is installed, says what to do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]


@pytest.fixture
def sources(tmp_path):
    shutil.copytree(ROOT / "superadam", tmp_path / "superadam", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    return tmp_path


def last_line(folder: Path, *arguments: str, packages: Path | None = Path(np.__file__).parents[1]) -> str:
    """Return the end of what Python says in a folder, without the hooks of editable installations."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment["PYTHONPATH"] = str(packages or "")
    command = [sys.executable, "-S", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", [("-c", "import superadam"), ("-m", "superadam")])
def test_sources_without_kernels_are_one_sentence(arguments, sources):
    said = last_line(sources, *arguments)
    began = f"ImportError: superadam was imported from its sources in {sources}, which lack the compiled"
    assert said.startswith(began)
    remedy = "start Python in another folder or with PYTHONSAFEPATH=1 to import what is installed"
    assert said.endswith(f"{remedy}, or install the sources in editable mode")


def test_only_sources_say_so(sources):
    absent = "ModuleNotFoundError: No module named"
    assert last_line(sources, "-c", "import superadam", packages=None).startswith(absent)
    (sources / "CMakeLists.txt").unlink()  # an installation that is damaged
    assert last_line(sources, "-c", "import superadam") == f"{absent} 'superadam._kernels'"
