"""`examples/finetune.py`: what it saves loads and has learned, and a run that was killed ends as one that was not."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import support.frameworks  # noqa: F401 - nothing is looked up in a network
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config

pytestmark = [pytest.mark.slow, pytest.mark.subprocess, pytest.mark.timeout(280)]

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "finetune.py"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
)
STEPS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a configuration, a tokenizer of bytes, and conversations."""
    made = tmp_path_factory.mktemp("finetune")
    special = ["<|im_start|>", "<|im_end|>", "<pad>"]
    vocabulary = {word: index for index, word in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bytes_of = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_of.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_of.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_of, eos_token=special[1], pad_token=special[2])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made / "model")
    Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(made / "model")
    lines = [
        {"messages": [{"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": f"is {i + 1}."}]}
        for i in range(64)
    ]
    (made / "data").mkdir()
    for split in ("train", "test"):
        (made / "data" / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def command(folder: Path, out: Path, *words: str) -> list[str]:
    fixed = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "data",
        "output_dir": out,
        "random_weights": True,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "assistant_only_loss": True,
        "max_length": 48,
        "use_cpu": True,
        "report_to": "none",
        "save_steps": 5,
        "logging_steps": 1,
    }
    return [sys.executable, str(SCRIPT), *(f"--{name}={value}" for name, value in fixed.items()), *words]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
"""One core computes, so that the other one is idle and the optimizer's work overlaps."""


def run(folder: Path, out: Path, *words: str) -> str:
    done = subprocess.run(command(folder, out, *words), capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def digests(out: Path) -> dict[str, str]:
    """Return the digests of the model, and of the last checkpoint's optimizer."""
    state = torch.load(out / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)["state"]
    values = [value for entry in state.values() for value in entry.values()]
    flat = b"".join(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for value in values)
    return {
        "model": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
        "optimizer": hashlib.sha256(flat).hexdigest(),
    }


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, str]:
    """Return what a run that nobody stopped wrote, and printed."""
    return folder / "whole", run(folder, folder / "whole", "--eval_strategy=steps", "--eval_steps=8")


def test_the_loss_falls_and_the_costs_are_told(whole: tuple[Path, str]) -> None:
    out, printed = whole
    history = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    assert sum("eval_loss" in entry for entry in history) == 2
    assert re.search(r"peak memory: host \d+\.\d\d GB; [\d,]+ tokens/s\n", printed)
    assert re.search(r"steps: \d+ committed, \d+ clipped, 0 skipped; hidden: \d+% of the optimizer's work", printed)
    if len(os.sched_getaffinity(0)) > 1:
        assert sum(entry.get("superadam_accepted", 0) for entry in history) > 0


def test_the_saved_model_loads_and_goes_on_as_it_was(whole: tuple[Path, str]) -> None:
    out, _ = whole
    saved, again = (AutoModelForCausalLM.from_pretrained(one) for one in (out, out / f"checkpoint-{STEPS}"))
    tokens = AutoTokenizer.from_pretrained(out)("1 + 1", return_tensors="pt")["input_ids"]
    assert saved.dtype == torch.bfloat16
    assert torch.equal(saved(tokens).logits, again(tokens).logits)


def test_a_run_that_was_killed_ends_as_one_that_was_not(folder: Path, whole: tuple[Path, str]) -> None:
    out = folder / "killed"
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command(folder, out), env=ENVIRONMENT, **silent) as killed:
        while not (out / "checkpoint-5" / "trainer_state.json").is_file():
            assert killed.poll() is None
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
    assert not (out / f"checkpoint-{STEPS}").exists()
    run(folder, out, f"--resume_from_checkpoint={out / 'checkpoint-5'}")
    assert digests(out) == digests(whole[0])


if os.environ.get("SUPERADAM_DEEP") == "1":

    def test_a_preset_for_two_ranks_shards_and_saves_the_whole_model(folder: Path) -> None:
        out, torchrun = folder / "ranks", [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        script = str(SCRIPT.parents[1] / "tests" / "support" / "finetune_on_ranks.py")
        preset = ["--config", str(SCRIPT.parent / "presets" / "seed-oss-36b.yaml")]
        done = subprocess.run([*torchrun, script, *preset, *command(folder, out)[2:]], check=False, env=ENVIRONMENT)
        assert done.returncode == 0
        checkpoint = out / f"checkpoint-{STEPS}"
        assert len([*(checkpoint / "optimizer_0").glob("*.distcp")]) == 2
        history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
        assert history[-1]["loss"] < 0.7 * history[0]["loss"]
        assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16

    def test_torch_s_adamw_is_one_word_away(folder: Path) -> None:
        assert "steps:" not in run(folder, folder / "adamw", "--optimizer=adamw", "--max_steps=2")
