"""What an integration or an example needs, and is not installed, is told in one sentence that says how to get it."""

import importlib
import runpy
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("integration", "missing", "remedy"),
    [
        ("transformers", "transformers", "install superadam with its extra finetune"),
        ("lightning", "lightning.pytorch", "pip install lightning"),
    ],
)
def test_integration(monkeypatch, integration, missing, remedy):
    name = f"superadam.integrations.{integration}"
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=f"{name} needs {integration} .*{remedy}"):
        importlib.import_module(name)


@pytest.mark.parametrize(
    ("script", "missing", "extra"),
    [
        ("finetune.py", "transformers", "finetune"),
        ("long_sequences.py", "transformers", "finetune"),
        ("train.py", "rich.console", "cli"),
    ],
)
def test_example(monkeypatch, script, missing, extra):
    monkeypatch.setitem(sys.modules, missing, None)
    told = rf'{script} cannot be run \(.*{missing.partition(".")[0]}.*\); in the clone: pip install "\.\[{extra}\]"'
    with pytest.raises(SystemExit, match=told):
        runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / script))
