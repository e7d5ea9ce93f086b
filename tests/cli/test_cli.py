"""`superadam.cli.main`: the commands are found, and every error is one sentence with a fitting exit status."""

import argparse
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

import superadam.cli.main
from superadam.cli.main import main
from superadam.cli.usage import UsageError


def test_help_lists_the_commands_also_where_none_is_named(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr()
    assert {"doctor", "bench", "plan", "convert"} <= set(printed.out.split())
    assert main([]) == 0
    assert capsys.readouterr() == printed


def test_errors_for_people_are_one_sentence_and_others_keep_their_traceback(monkeypatch, capsys):
    parser = argparse.ArgumentParser(prog="superadam")
    errors = [UsageError("there is no such thing; give another"), KeyboardInterrupt(), ValueError("a fault")]
    parser.set_defaults(run=Mock(side_effect=errors))
    monkeypatch.setattr(superadam.cli.main, "build_parser", lambda: parser)
    for status, sentence in ((2, "there is no such thing; give another"), (130, "interrupted")):
        assert main([]) == status
        assert capsys.readouterr().err == f"superadam: {sentence}\n"
    with pytest.raises(ValueError, match="a fault"):
        main([])


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"], ["bench"]])
def test_missing_extra_is_one_sentence(words, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    needs = f"superadam: 'superadam {words[0]}' needs rich; install it with: pip install 'superadam[cli]'\n"
    assert capsys.readouterr() == ("", needs)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("words", [["doctor"], ["--help"]])
def test_a_torch_that_is_missing_is_one_sentence(words, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("superadam: torch cannot be imported (")
    assert captured.err.endswith("), expected 2.10 or later; pip install torch\n")
    assert not captured.out


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import superadam.cli.main
try:
    from superadam import OffloadScheduler
except ImportError as error:
    print(error)
sys.exit(superadam.cli.main.main(["doctor"]))
"""


@pytest.mark.subprocess
def test_the_package_without_torch_says_so_at_first_use():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.startswith("superadam needs torch (")
    assert done.stderr.count("\n") == 1


def test_version_is_told(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("superadam ")
