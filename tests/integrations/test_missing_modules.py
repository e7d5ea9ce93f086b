"""What an integration or an example needs, and is not installed, is told in one sentence that says how to get it."""

import importlib
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("integration", "missing", "remedy"),
    [
        ("transformers", "transformers", r"install superadam\[finetune\]"),
        ("lightning", "lightning.pytorch", "pip install lightning"),
    ],
)
def test_integration(monkeypatch, integration, missing, remedy):
    name = f"superadam.integrations.{integration}"
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=f"{name} needs {integration} .*{remedy}"):
        importlib.import_module(name)


@pytest.mark.parametrize("script", ["finetune.py", "long_sequences.py"])
def test_example(monkeypatch, script):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        SystemExit, match=rf'{script} cannot be run \(.*transformers.*\); pip install "superadam\[finetune\]"'
    ):
        runpy.run_path(str(EXAMPLES / script))
