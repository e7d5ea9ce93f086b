"""Wrong inputs to `convert`, `doctor` and `bench`: one sentence on stderr, a status other than 0, and no file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from superadam.cli.bench import command
from superadam.cli.main import main

FILES = {
    "empty.json": "",
    "list.json": "[1]",
    "text.json": '"zero"',
    "half.json": '{"bf16": {"enabled": true}',
    "comma.json": '{"bf16": {"enabled": true},\n}',
    "twice.json": '{"gradient_clipping": 1.0, "gradient_clipping": 2.0}',
    "deep.json": "[" * 100_000,
    "section.json": '{"optimizer": 5}',
    "params.json": '{"optimizer": {"type": "AdamW", "params": [1]}}',
    "zero.json": '{"zero_optimization": true}',
    "stage.json": '{"zero_optimization": {"stage": "three"}}',
    "scheduler.json": '{"scheduler": ["WarmupLR"]}',
    "clipping.json": '{"gradient_clipping": "much"}',
    "batch.json": '{"train_batch_size": {"a": 1}}',
    "half_batch.json": '{"train_micro_batch_size_per_gpu": 2.5}',
    "no_batch.json": '{"gradient_accumulation_steps": 0}',
}
"""Of DeepSpeed's configuration, by mistake."""

WRONG = [
    *(["convert", name] for name in FILES),
    ["convert"],
    ["convert", "none.json"],
    ["convert", "folder"],
    ["convert", "bytes.json"],
    ["convert", "list.json", "more"],
    ["convert", "list.json", "--fast"],
    ["doctor", "--fast"],
    ["doctor", "all"],
    ["doctor", "--json=yes"],
    ["bench", "--threads", "0"],
    ["bench", "--threads", "-1"],
    ["bench", "--threads", "many"],
    ["bench", "--threads", "1.5"],
    ["bench", "--threads"],
    ["bench", "--isa", "sse9"],
    ["bench", "--isa", ""],
    ["bench", "--moments", "4bit"],
    ["bench", "--master", "bf16"],
    ["bench", "--json"],
    ["bench", "--json", "none/out.json"],
    ["bench", "--json", "folder"],
    ["bench", "--json", "list.json/out"],
    ["bench", "quickly"],
    ["bench", "--thread", "1"],
]


def _measured(*_: object) -> Iterator[object]:
    raise AssertionError("it measures what it cannot write")
    yield


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_wrong_input_is_one_sentence(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "measure", _measured)
    for name, content in FILES.items():
        Path(name).write_text(content)
    Path("bytes.json").write_bytes(b"\xff\xfe")
    Path("folder").mkdir()
    before = {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}
    try:
        status = main(words)
    except SystemExit as stop:  # of argparse
        status = stop.code if isinstance(stop.code, int) else 1
    assert status == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert re.fullmatch(r"superadam[^\n]*: [^\n]+; [^\n]+\n|superadam[^\n]*, expected [^\n]+\n", captured.err)
    assert {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")} == before


@pytest.mark.parametrize(("name", "value"), [("SUPERADAM_ISA", "sse9"), ("SUPERADAM_THREADS", "many")])
def test_a_wrong_word_in_the_environment_of_a_benchmark_is_one_sentence(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from superadam.kernels import native

    monkeypatch.setattr(native, "_active", None)
    monkeypatch.setattr(native, "_num_threads", None)
    monkeypatch.setenv(name, value)
    assert main(["bench"]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.count("\n") == 1
    assert value in captured.err
