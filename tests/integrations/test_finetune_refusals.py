"""`examples/finetune.py` refuses what it cannot do in one sentence, before a model or data are loaded."""

from __future__ import annotations

import runpy
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import support.frameworks  # noqa: F401 - nothing is looked up in a network

trl = pytest.importorskip("trl")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "finetune.py"
FOREIGN = {
    "use_peft": "true",
    "use_dora": "true",
    "use_rslora": "true",
    "load_in_4bit": "true",
    "load_in_8bit": "true",
    "use_bnb_nested_quant": "true",
    "bnb_4bit_quant_type": "fp4",
    "bnb_4bit_quant_storage": "uint8",
    "lora_r": "4",
    "lora_alpha": "4",
    "lora_dropout": "0.5",
    "lora_target_modules": "q_proj",
    "lora_target_parameters": "q_proj",
    "lora_modules_to_save": "lm_head",
    "lora_task_type": "SEQ_CLS",
    "dataset_streaming": "true",
    "ignore_bias_buffers": "true",
    "model_init_kwargs": '{"dtype": "float16"}',
}
"""Options that TRL parses and this program does not obey, and another value than the default."""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the program's names; it works in a folder with a model's configuration, and loads nothing."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("data.jsonl").write_text('{"text": "a"}\n\n{"prompt": "a", "completion": "b"}\n{"messages": []}\n')
    return runpy.run_path(str(SCRIPT))


def ended(names: Any, monkeypatch: pytest.MonkeyPatch, **options: str) -> str:
    """Return the sentence with which the program ends."""
    usual = {"model_name_or_path": "model", "dataset_name": "data.jsonl", "output_dir": "out", "use_cpu": "true"}
    words = [word for name, value in (usual | options).items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["finetune.py", *words])
    main = names["main"].__globals__

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("it loads what it should have refused")

    main["load_dataset"] = main["model_of"] = loaded
    with pytest.raises(SystemExit) as caught:
        names["main"]()
    sentence = str(caught.value.code)
    assert "\n" not in sentence
    assert sentence.startswith("finetune.py: ")
    return sentence


@pytest.mark.parametrize("name", FOREIGN)
def test_an_option_that_would_not_be_obeyed_is_refused(names: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert f"--{name} is not obeyed" in ended(names, monkeypatch, **{name: FOREIGN[name]})


def test_each_option_of_the_model_and_the_data_is_obeyed_or_refused(names: Any) -> None:
    of_data = {"dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"}
    every = {one.name for configuration in (trl.ModelConfig, trl.ScriptArguments) for one in fields(configuration)}
    assert every - of_data - names["OBEYED"] == FOREIGN.keys() - {"model_init_kwargs"}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"text": "a"}\n{"text": ', "line 2 of data.jsonl: Expecting value"),
        ('{"text": "a"}\n[1]\n', "line 2 of data.jsonl: expected an object with messages"),
        ('{"question": 1, "answer": 2}\n', "line 1 of data.jsonl: expected an object with messages"),
        (b"\xff\xfe", "data.jsonl: 'utf-8' codec"),
    ],
)
def test_a_bad_line_is_named(names: Any, monkeypatch: pytest.MonkeyPatch, content: str | bytes, sentence: str) -> None:
    Path("data.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
    assert sentence in ended(names, monkeypatch)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dataset_name": "none.jsonl"}, "there is no file none.jsonl; correct --dataset_name"),
        ({"dataset_name": "model"}, "model has no train.jsonl"),
        ({"model_name_or_path": "."}, ". has no config.json; correct --model_name_or_path"),
        ({"output_dir": "data.jsonl/out"}, "data.jsonl/out cannot be written to"),
        ({"resume_from_checkpoint": "checkpoint-9"}, "checkpoint-9 is no whole checkpoint"),
        ({"config": "none.yaml"}, "there is no preset none.yaml"),
        ({"optimizer": "adamw", "moments": "bf16"}, "--moments and --master are superadam's"),
    ],
)
def test_what_is_named_has_to_be_there(
    names: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], sentence: str
) -> None:
    assert sentence in ended(names, monkeypatch, **options)
