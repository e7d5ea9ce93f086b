"""The list of equivalent mutants is true of the sources, and a run finds the faults that no test notices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from check_wheel import MODULES
from mutants.run import EXTENSIONS, equivalents, mutants_in

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENTS = equivalents(ROOT)


@pytest.mark.parametrize("file", sorted({key[0] for key in EQUIVALENTS}))
def test_each_entry_of_the_list_has_a_mutant(file: str) -> None:
    keys = {mutant.key for mutant in mutants_in(file, (ROOT / file).read_bytes())}
    assert [key for key in EQUIVALENTS if key[0] == file and key not in keys] == []  # else the entry is to be deleted


def test_a_copy_has_every_module_in_c() -> None:
    assert sorted(EXTENSIONS) == sorted(name.removesuffix(".abi3.so").replace("/", ".") for name in MODULES)


SOURCE = """
def larger(one, two):
    return one if one > two else two

def wait(clock):
    while not clock.is_late():
        clock.tick()
    clock.report()
"""
TESTS = """
from unittest.mock import Mock
from superadam.step.waiting import larger, wait
def test_larger(): assert [larger(1, two) for two in (0, 1, 2)] == [1, 1, 2]
def test_wait():
    clock = Mock()
    clock.is_late = lambda: clock.tick.call_count == 3
    wait(clock)
    assert clock.tick.call_count == 3
def test_that_fails(): assert False
"""
LIST = 'equivalent = [{file = "%s", function = "%s", rule = "%s", hash = "%s", reason = "equal numbers are the same"}]'


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.subprocess
def test_a_run_tells_what_survives(tmp_path: Path) -> None:
    file = "superadam/step/waiting.py"
    [listed] = (mutant for mutant in mutants_in(file, SOURCE.encode()) if mutant.rule == "swap-comparison")
    texts = {file: SOURCE, "superadam/__init__.py": "", "tests/step/test_waiting.py": TESTS}
    for name, text in {**texts, "tests/mutants/mutants.toml": LIST % listed.key}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    variables = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "SAMPLE": "100", "SPARE": "15"}
    command = [sys.executable, "-m", "mutants.run", "superadam/step"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, check=False, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 1, done.stderr
    assert "left out, as it fails without a fault: tests/step/test_waiting.py::test_that_fails" in done.stdout
    assert [line for line in lines if line[-1:] == ["hang"]] == [
        ["killed", "drop-call", f"{file}:7", "wait:", "a", "hang"]
    ]
    assert "-    clock.report()\n+    pass\n" in done.stdout
    assert ["all", "5", "1", "1", "0"] in lines
    assert (tmp_path / file).read_text() == SOURCE
