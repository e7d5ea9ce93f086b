"""Wrong inputs to `superadam`, `convert`, `doctor`, `bench` and `plan`: one sentence on stderr, status 2, no file."""

import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import support.frameworks  # noqa: F401 - nothing is looked up in a network

from superadam.cli.bench import command
from superadam.cli.main import main

FILES = {
    "": "is no JSON: line 1",
    '{"bf16": {"enabled": true}': "is no JSON: line 1",
    '{"bf16": {},\n"fp16" {}}': "is no JSON: line 2",
    "[" * 100_000: "is nested too deeply, expected a configuration",
    '{"a": ' * 700 + "1" + "}" * 700: "is nested too deeply, expected a configuration",
    f'{{"steps_per_print": {"1" * 5000}}}': "has a number of thousands of digits, expected one that DeepSpeed has",
    "[1]": "holds a list, expected an object",
    '"zero"': "holds a str, expected an object",
    '{"bf16": {}, "bf16": {}}': "bf16 stands in it twice",
    '{"gradient_clipping": "big"}': "gradient_clipping is 'big', expected a number of at least 0",
    '{"gradient_clipping": -1}': "gradient_clipping is -1, expected a number",
    '{"gradient_clipping": NaN}': "gradient_clipping is nan, expected a number",
    '{"optimizer": "Adam"}': "optimizer is 'Adam', expected an object",
    '{"optimizer": {"params": [1]}}': "optimizer.params is [1], expected an object",
    '{"optimizer": {"params": {"lr": "1e-5"}}}': "optimizer.params.lr is '1e-5', expected a number",
    '{"optimizer": {"params": {"betas": [0.9]}}}': "betas is [0.9], expected two numbers",
    '{"optimizer": {"params": {"betas": [0.9, "x"]}}}': "betas is 'x', expected a number",
    '{"optimizer": {"params": {"betas": [0.9, null]}}}': "betas is [0.9, None], expected two numbers",
    '{"optimizer": {"params": {"betas": ["auto", 0.9]}}}': "betas is ['auto', 0.9], expected two numbers",
    '{"optimizer": {"params": {"betas": [0.9, 1]}}}': "betas is [0.9, 1], expected numbers below 1",
    f'{{"optimizer": {{"params": {{"eps": 1{"0" * 309}}}}}}}': "expected a number of at least 0",
    **{f'{{"zero_optimization": {{"stage": {stage}}}}}': f"stage is {stage}, expected 0, 1, 2" for stage in (4, [1])},
    '{"zero_optimization": 1}': "zero_optimization is 1, expected an object",
    '{"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}': "offload_optimizer.device is 'gpu', expected",
    '{"bf16": true}': "bf16 is True, expected an object",
    '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}': "bf16 and fp16 are both enabled, which DeepSpeed refuses",
    '{"scheduler": "WarmupLR"}': "scheduler is 'WarmupLR', expected an object",
    **{
        f'{{"scheduler": {{"type": "WarmupLR", "params": {{"warmup_num_steps": {value}}}}}}}': "scheduler.params."
        f"warmup_num_steps is {shown}, expected a whole number of at least 0"
        for value, shown in {'"9"': "'9'", "-1": "-1", "9.5": "9.5", "true": "True"}.items()
    },
    '{"train_batch_size": {"a": 1}}': "train_batch_size is {'a': 1}",
    '{"train_micro_batch_size_per_gpu": 2.5}': "train_micro_batch_size_per_gpu is 2.5",
    '{"gradient_accumulation_steps": 0}': "gradient_accumulation_steps is 0",
}
"""Contents of files that are no configuration of DeepSpeed, and what is said of them."""

MODELS = {
    "heads": ('{"model_type": "llama", "num_attention_heads": 0}', "modulo by zero"),
    "words": ('{"model_type": "llama", "vocab_size": -1}', "Trying to create tensor with negative dimension -1: "),
    "experts": ('{"model_type": "llama", "num_experts": "many"}', "num_experts of ./experts is 'many', expected"),
    "count": ('{"model_type": "llama", "num_experts": [1]}', "num_experts of ./count is [1], expected"),
    "turns": ('{"model_type": "llama", "rope_scaling": {"type": "spiral"}}', "cannot be planned (KeyError: 'spiral')"),
    "nested": ('{"model_type": "gemma3"}', "a gemma3, has 0 layers, expected 1 to 1000; correct"),
    "once": ('{"model_type": "ctrl"}', "a ctrl cannot be run without values"),
    "window": ('{"model_type": "llama", "sliding_window": "8"}', "sliding_window of ./window is '8', expected"),
    "values": ('{"model_type": "neomme"}', "a neomme cannot be planned"),
    "layers": ('{"model_type": "llama", "num_hidden_layers": 100000}', "has 100000 layers, expected 1 to 1000"),
}
"""Folders' config.json that describe no model, and what is said of them."""

ANY_SENTENCE = (
    "convert|convert 0.json more|convert 0.json --fast|doctor --fast|doctor all|doctor --json=yes|bench --threads -1|"
    "bench --threads 1.5|bench --threads|bench --isa |bench --moments 4bit|bench --master bf16|bench --json|"
    "bench --json folder|bench --json 0.json/out|bench quickly|bench --thread 1|plan phi-4 --clipped 2|"
    "plan phi-4 --batch 0|plan phi-4 --gpu-efficiency 0|plan phi-4 --seq x"
)

WRONG = {
    **dict.fromkeys(ANY_SENTENCE.split("|"), ""),
    **dict.fromkeys(("fly", "bench --threads many", "bench --wings"), "--help"),
    "train --verify": "invalid choice: 'train'",
    "convert none.json": "cannot read none.json: ",
    "convert folder": "cannot read folder: ",
    "convert bytes.json": "is no text",
    "convert 0.json two\nlines": "unrecognized arguments: two lines",
    "bench --threads 0": "argument --threads: 0 is no number from 1 to 2147483647",
    "bench --threads 2147483648": "2147483648 is no number from 1 to 2147483647",
    f"plan phi-4 --ranks {'1' * 400}": "is no number from 1 to 2147483647",
    "SUPERADAM_ISA=sse9 bench --isa scalar --threads 1": "sse9",
    "bench --isa sse9": "--isa sse9 cannot run on this machine",
    "SUPERADAM_ISA=sse9 bench": "sse9",
    "SUPERADAM_THREADS=many bench": "many",
    "bench --json none/out.json": "expected a file in a folder that exists",
    "plan ": "no MODEL was given",
    "plan": "no MODEL was given, expected a preset, such as phi-4, or a model's folder; name one",
    **{f"plan ./{name}": words for name, (_, words) in MODELS.items()},
    "plan nobody/nothing-here": "and not a model of the hub's cache; name one of these",
    "plan phi-4 --clipped x": "argument --clipped: x is no share, expected 0 to 1",
    "plan phi-4 --gpu-efficiency x": "argument --gpu-efficiency: x is no share, expected 0 to 1",
    "plan phi-4 --batch x": "x is no number from 1",
    "plan phi-4 --machine abacus": "there is no machine abacus, expected a file or one of gb200, gh200",
    "plan phi-4 --machine two\nlines": "there is no machine two lines, expected a file",
    "plan phi-4 --batch 1000000000": "a micro-batch has 4096000000000 tokens, expected 1048576 at most",
    **{f"convert {number}.json": sentence for number, sentence in enumerate(FILES.values())},
}
"""What is said of words, at least; a first one may be of the environment."""


@pytest.mark.usefixtures("fresh_native")
@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_input_is_one_sentence(words, tmp_path, monkeypatch, capsys):
    if words.startswith("plan"):
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "measure", Mock(side_effect=AssertionError("it measures what it cannot write")))
    for number, content in enumerate(FILES):
        Path(f"{number}.json").write_text(content)
    Path("bytes.json").write_bytes(b"\xff\xfe")
    Path("folder").mkdir()
    for name, (content, _) in MODELS.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(content)
    before = {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}
    arguments = words.split(" ")
    if words.startswith("SUPERADAM_"):
        monkeypatch.setenv(*arguments.pop(0).split("="))
    with pytest.raises(SystemExit, match=r"^2$"):  # as argparse ends
        sys.exit(main(arguments))
    captured = capsys.readouterr()
    assert not captured.out
    assert re.fullmatch(r"superadam[^\n]*: [^\n]+; [^\n]+\n|superadam[^\n]*, expected [^\n]+\n", captured.err)
    assert WRONG[words] in captured.err
    assert {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")} == before
