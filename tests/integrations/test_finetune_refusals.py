"""`examples/finetune.py` refuses what it cannot do in one sentence, before a model or data are loaded."""

import math
import re
import runpy
import sys
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import get_type_hints
from unittest.mock import Mock

import pytest
import support.frameworks  # noqa: F401 - nothing is looked up in a network
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config

trl = pytest.importorskip("trl")

import finetune_options  # noqa: E402
from finetune_options import RefusedError  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "finetune.py"

SWITCHES = {
    *("use_peft", "use_dora", "use_rslora", "load_in_4bit", "load_in_8bit", "use_bnb_nested_quant"),
    *("dataset_streaming", "do_train", "do_eval", "do_predict", "prediction_loss_only", "batch_eval_metrics"),
    *("eval_use_gather_object", "bf16_full_eval", "fp16_full_eval", "ignore_bias_buffers"),
    *("ddp_find_unused_parameters", "ddp_broadcast_buffers", "ddp_static_graph"),
}
FOREIGN = dict.fromkeys(sorted(SWITCHES), "true") | {
    "bnb_4bit_quant_type": "fp4",
    "bnb_4bit_quant_storage": "uint8",
    "lora_r": "4",
    "lora_alpha": "4",
    "lora_dropout": "0.5",
    "lora_target_modules": "q_proj",
    "lora_target_parameters": "q_proj",
    "lora_modules_to_save": "lm_head",
    "lora_task_type": "SEQ_CLS",
    "model_init_kwargs": '{"dtype": "float16"}',
    "include_for_metrics": "loss",
    "eval_do_concat_batches": "false",
    "optim_args": "a=1",
    "optim_target_modules": "all-linear",
    "ddp_bucket_cap_mb": "1",
}
"""Options that TRL parses and this program does not obey, and another value than the default."""

OLD = {
    "gradient_checkpointing": "false",
    "gradient_checkpointing_kwargs": '{"use_reentrant": true}',
    "pad_token": "<pad>",
    "use_liger_kernel": "true",
    "label_smoothing_factor": "0.1",
    "local_rank": "0",
    "loss_type": "chunked_nll",
    "truncation_mode": "keep_end",
}
"""Options, or values of one, that TRL or transformers will drop."""

NO_WORDS = {"deepspeed", "parallelism_config"}  # a file that has to exist, and what no command line can say
CLASSES = [trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig]
FILES = {
    "list.yaml": "- 1\n",
    "bad.yaml": "a: 1\nb: [\n",
    "many.yaml": "max_steps: many\n",
    "date.yaml": "warmup_steps: 2020-99-99\n",
    "deep.yaml": f"a: {'[' * 5000}\n",
    "dates.yaml": "lr_scheduler_kwargs: {a: 2020-01-01}\n",
    "name.yaml": "env: {a=b: 1}\n",
    "unknown.yaml": "max_stepz: 3\n",
    "raises.jinja": "{{ raise_exception('no turn of a user') }}",
    "plain.jinja": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "folder.jinja/file": "",
    "broken/config.json": '{"model_type": "unheard-of"}',
}
"""What wrong inputs name."""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Return the program's names; it works in a folder with a model's configuration, and loads nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("refusals"))
        Qwen3Config(vocab_size=2, hidden_size=8, num_hidden_layers=1).save_pretrained("model")
        words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, "a")))
        words.save_pretrained("model")
        Path("data.jsonl").write_text('{"text": "a"}\n\n{"prompt": "a", "completion": "b"}\n')
        Path("talk.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
        for name, content in FILES.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(content)
        yield runpy.run_path(str(SCRIPT))


@pytest.fixture
def sentence_of(program, monkeypatch):
    """Return what says how the program ends, which writes nothing, and loads neither model nor data."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["finetune.py", *words])
        loaded = Mock(side_effect=AssertionError("it loads what it should have refused"))
        for name in ("load_dataset", "model_of"):
            monkeypatch.setitem(program["main"].__globals__, name, loaded)
        before = sorted(Path().rglob("*"))
        with pytest.raises(SystemExit) as caught:
            program["main"]()
        assert sorted(Path().rglob("*")) == before
        sentence = str(caught.value.code)
        assert "\n" not in sentence
        assert sentence.startswith("finetune.py: ")
        return sentence

    return run


def words_of(**options: str) -> list[str]:
    usual = {"model_name_or_path": "model", "dataset_name": "data.jsonl", "output_dir": "out", "use_cpu": "true"}
    return [word for name, value in (usual | options).items() for word in (f"--{name}", value) if word != "(nothing)"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", FOREIGN)
def test_an_option_that_would_not_be_obeyed_is_refused(program, name):
    """Without the rest of the program, which is in one place for all of them."""
    found, given = finetune_options.parse(CLASSES, [f"--{name}", FOREIGN[name], "--use_cpu"], bf16=False)
    with pytest.raises(RefusedError, match=f"^--{name} is not obeyed, .*; leave it out$"):
        finetune_options.check_options(found, given, superadam=True)
    if name in finetune_options.NOT_WITH_SUPERADAM:
        finetune_options.check_options(found, given, superadam=False)


@pytest.mark.parametrize("name", OLD)
def test_a_deprecated_option_is_refused_with_what_takes_its_place(program, name):
    with pytest.raises(RefusedError, match=f"^--{name} .* is deprecated, expected .*; change it$"):
        finetune_options.check_options([], {name: OLD[name]}, superadam=True)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_no_deprecated_option_is_used_without_being_asked_for(program):
    finetune_options.parse([trl.SFTConfig], ["--use_cpu"], bf16=False, activation_checkpointing=True)


def test_each_number_has_a_range_which_is_held_to():
    """Below it, transformers divides by zero late, or takes the number for another one without a word."""
    refused = finetune_options.NOT_OBEYED | finetune_options.NOT_WITH_SUPERADAM | finetune_options.DEPRECATED
    types = {name: str(kind) for configuration in CLASSES for name, kind in get_type_hints(configuration).items()}
    numbers = {name for name, kind in types.items() if re.search(r"\b(int|float)\b", kind)}
    assert numbers - refused.keys() == finetune_options.RANGES.keys()
    for name, (least, end, expected) in finetune_options.RANGES.items():
        for number in ["0" if least > 0 else "-1", "-3", *([] if end == math.inf else [str(end)])]:
            found = make_dataclass("Configuration", [(name, float, None)])(float(number))
            with pytest.raises(RefusedError, match=f"^--{name} is {number}.*, expected .* {expected};"):
                finetune_options.check_options([found], {name: number}, superadam=True)


def test_each_field_of_trl_is_read_by_somebody_or_refused():
    """A field that no line of Trainers, their callbacks or this program reads is one that nobody obeys."""
    package = Path(transformers.__file__).parents[1]
    readers = ("transformers/trainer.py", "transformers/training_args.py", "trl/trainer/sft_trainer.py")
    texts = [(package / name).read_text() for name in readers]
    texts += [path.read_text() for path in (package / "transformers").glob("trainer_*.py")]
    texts += [(package / "transformers/integrations/integration_utils.py").read_text(), SCRIPT.read_text()]
    texts.append((ROOT / "examples/finetune_options.py").read_text())
    read = set(re.findall(r"\b(?:args|self|training|model|script|arguments)(?=\.(\w+))", "\n".join(texts)))
    every = {one.name for configuration in CLASSES for one in fields(configuration)}
    refused = finetune_options.NOT_OBEYED | finetune_options.NOT_WITH_SUPERADAM
    assert every - read - refused.keys() - finetune_options.DEPRECATED.keys() == set()
    assert refused.keys() == FOREIGN.keys() | NO_WORDS
    assert {one.partition(" ")[0] for one in finetune_options.DEPRECATED} == OLD.keys()
    assert refused.keys() <= every
    assert OLD.keys() <= every


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"text": "a"}\n{"text": ', "line 2 of bad.jsonl: Expecting value"),
        (b'{"text": "a"}\n[1]\n', "line 2 of bad.jsonl: expected an object with messages"),
        (b'{"question": 1, "answer": 2}\n', "line 1 of bad.jsonl: expected an object with messages"),
        (b"\xff\xfe", "bad.jsonl: 'utf-8' codec"),
        (b"", "bad.jsonl has no lines"),
        (b'{"text": 5}', "line 1 of bad.jsonl: text is int, expected text"),
        (b'{"messages": "a"}', "line 1 of bad.jsonl: messages is str, expected a list of objects"),
        (b'{"messages": [{"content": "a"}]}', "line 1 of bad.jsonl: messages is list, expected a list of objects"),
        (b'{"prompt": 1, "completion": "b"}', "line 1 of bad.jsonl: prompt is int, expected text"),
        pytest.param(b"[" * 100_000, "line 1 of bad.jsonl: ", id="deep"),
    ],
)
def test_a_bad_line_is_named(sentence_of, content, sentence):
    Path("bad.jsonl").write_bytes(content)
    assert sentence in sentence_of(*words_of(dataset_name="bad.jsonl"))


def test_a_column_of_another_name_is_read(program):
    Path("named.jsonl").write_text('{"content": "a"}\n')
    assert finetune_options.check_lines("named.jsonl", "content") is None


def test_a_column_called_messages_holds_what_trl_takes_there(program):
    """Text, if it is the column of text; else conversations."""
    Path("both.jsonl").write_text('{"messages": "a"}\n{"messages": [{"role": "user", "content": "a"}]}\n')
    Path("number.jsonl").write_text('{"messages": 5}\n')
    assert finetune_options.check_lines("both.jsonl", "messages") is not None
    with pytest.raises(RefusedError, match="messages is str, expected a list of objects with role and"):
        finetune_options.check_lines("both.jsonl")
    with pytest.raises(RefusedError, match="messages is int, expected text or a list of objects with role"):
        finetune_options.check_lines("number.jsonl", "messages")


TALK, PLAIN = {"dataset_name": "talk.jsonl"}, {"chat_template_path": "plain.jinja", "assistant_only_loss": "true"}
WRONG = [
    ({"dataset_name": "none.jsonl"}, "there is no file none.jsonl; correct --dataset_name"),
    ({"dataset_name": "model"}, "model has no train.jsonl"),
    ({"dataset_name": ""}, "say what to train and on what"),
    ({"eval_strategy": "epoch"}, "there is no test.jsonl to evaluate on; set --eval_strategy no"),
    ({"model_name_or_path": "."}, ". has no config.json; correct --model_name_or_path"),
    ({"model_name_or_path": "no/such-model"}, "no/such-model cannot be used ("),
    ({"model_name_or_path": "broken"}, "broken cannot be used ("),
    ({"output_dir": "data.jsonl/out"}, "data.jsonl/out cannot be written to"),
    ({"output_dir": "data.jsonl"}, "data.jsonl cannot be written to"),
    ({"resume_from_checkpoint": "checkpoint-9"}, "checkpoint-9 is no whole checkpoint"),
    ({"config": "none.yaml"}, "there is no preset none.yaml"),
    ({"config": "(nothing)"}, "there is no preset"),
    ({"config": "list.yaml"}, "list.yaml holds no options"),
    ({"config": "bad.yaml"}, "line 3 of bad.yaml is no YAML ("),
    ({"config": "date.yaml"}, "date.yaml is no YAML (month must be in 1..12"),
    ({"config": "deep.yaml"}, "deep.yaml is no YAML (maximum recursion depth"),
    ({"config": "dates.yaml"}, "the options in dates.yaml cannot be used (Object of type date is not JSON"),
    ({"config": "name.yaml"}, "the options in name.yaml cannot be used (illegal environment variable name)"),
    ({"config": "many.yaml"}, "argument --max_steps/--max-steps: invalid int value: 'many'"),
    ({"config": "unknown.yaml"}, "there is no option --max_stepz; --max_steps is one"),
    ({"optimizer": "adamw", "moments": "bf16"}, "--moments and --master are superadam's"),
    ({"optimizer": "sgd"}, "argument --optimizer: invalid choice: 'sgd'"),
    ({"optim": "sgd"}, "--optim sgd is not what superadam replaces"),
    ({"wings": "true"}, "there is no option --wings"),
    ({"max_step": "3"}, "there is no option --max_step; --max_steps is one"),
    ({"max_steps": "many"}, "invalid int value: 'many'"),
    ({"learning_rate": "nan"}, "--learning_rate is nan, expected a number of at least 0"),
    ({"adam_beta2": "1.5"}, "--adam_beta2 is 1.5, expected a number of at least 0 and less than 1"),
    ({"gradient_accumulation_steps": "0"}, "gradient_accumulation_steps"),
    ({"lr_scheduler_type": "cosine_with_min_lr"}, "--lr_scheduler_type cosine_with_min_lr cannot be made (One of"),
    ({"dtype": "int8"}, "argument --dtype: invalid choice: 'int8'"),
    ({"moments": "4bit"}, "argument --moments: invalid choice: '4bit'"),
    ({"load_best_model_at_end": "true"}, "the options do not fit together ("),
    ({"fsdp": "true", "fsdp_config": "none.json"}, "the options do not fit together ("),
    ({"lr_scheduler_kwargs": "{1"}, "the options do not fit together ("),
    ({"use_cpu": "perhaps"}, "perhaps"),
    (TALK, "the tokenizer has no chat template for messages"),
    ({"chat_template_path": "none.jinja"}, "there is no chat template none.jinja"),
    ({"chat_template_path": "folder.jinja"}, "folder.jinja cannot be read ("),
    (TALK | {"chat_template_path": "raises.jinja"}, "cannot say the first conversation (no turn"),
    ({"assistant_only_loss": "true"}, "--assistant_only_loss needs messages"),
    (TALK | PLAIN, "the chat template does not mark what the assistant says"),
]


@pytest.mark.parametrize("words", [[], ["--use_cpu"], ["--max_steps", "-1", "--use_cpu"]])
def test_a_run_of_nothing_is_told_what_is_missing(words, sentence_of):
    assert "say what to train and on what" in sentence_of(*words)


@pytest.mark.parametrize(("options", "sentence"), WRONG, ids=lambda one: one if isinstance(one, str) else "")
def test_a_wrong_input_is_told_in_a_sentence(sentence_of, options, sentence):
    assert sentence in sentence_of(*words_of(**options))
