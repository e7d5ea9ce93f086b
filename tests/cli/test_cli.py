"""`superadam.cli.main`: the commands are found, and every error is one sentence with a fitting exit status."""

import argparse
import os
import re
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


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"], ["bench"], ["plan", "phi-4"]])
def test_missing_extra_is_one_sentence(words, tmp_path, monkeypatch, capsys):
    package, extra = ("transformers", "plan") if words[0] == "plan" else ("rich", "cli")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    needs = f"superadam: 'superadam {words[0]}' needs {package}; in the clone: pip install '.[{extra}]'\n"
    assert capsys.readouterr() == ("", needs)
    assert os.listdir(tmp_path) == []


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import superadam.cli.main
try:
    from superadam import OffloadScheduler
except ImportError as error:
    print(error)
print([superadam.cli.main.main([word]) for word in ("doctor", "--help")])
"""


@pytest.mark.subprocess
def test_a_torch_that_is_missing_is_one_sentence_of_a_command_and_at_the_first_use_of_the_package():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"superadam needs torch \(.+\n\[2, 2\]\n", done.stdout)
    sentence = r"superadam: torch cannot be imported \(.+\), expected 2\.10 or later; pip install torch\n"
    assert re.fullmatch(sentence * 2, done.stderr)


def test_version_is_told(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("superadam ")
