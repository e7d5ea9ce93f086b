"""The list of planted faults (`make test-mutants`) is true of the present sources."""

from __future__ import annotations

import collections
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIST = tomllib.loads((ROOT / "tests" / "mutants" / "mutants.toml").read_text())
FAULTS: list[dict[str, Any]] = LIST["faults"]
FILES = sorted({fault["file"] for fault in FAULTS})


@pytest.mark.parametrize("name", FILES)
def test_each_fault_can_be_planted(name: str) -> None:
    source = (ROOT / name).read_text()
    for fault in (one for one in FAULTS if one["file"] == name):
        old, new = fault["old"], fault["new"]
        assert set(fault) <= {"file", "old", "new", "tests", "equivalent"}, fault
        assert source.count(old) == 1, f"{name} has {old!r} {source.count(old)} times, expected once; mend the list"
        assert old != new, fault
        if name.endswith(".py"):
            compile(source.replace(old, new), name, "exec")


def test_there_are_many_faults_everywhere_and_none_twice() -> None:
    assert len({(fault["file"], fault["old"], fault["new"]) for fault in FAULTS}) == len(FAULTS)
    folders = collections.Counter(str(Path(fault["file"]).parent) for fault in FAULTS if "equivalent" not in fault)
    assert folders.total() >= 200
    layers = ("handles", "step", "state", "offload", "devices", "distributed", "optim", "kernels")
    for folder in (*(f"superadam/{layer}" for layer in layers), "cpu", "gpu"):
        assert folders[folder] >= 5, folder


def test_tests_of_faults_exist() -> None:
    assert set(LIST["tests"]) == set(FILES)
    for test in {one for tests in (*LIST["tests"].values(), *(f.get("tests", ()) for f in FAULTS)) for one in tests}:
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(), test
