"""`examples/finetune.py`: what it saves loads and has learned, and however a run goes, it ends in the same bits."""

import contextlib
import hashlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import support.frameworks  # noqa: F401 - nothing is looked up in a network
import torch
from support.presets import PRESETS
from support.ranks import ENDED, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config

from superadam.integrations.transformers import OffloadCallback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.subprocess,
    pytest.mark.timeout(280),
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "finetune.py"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
)
STEPS, SAVED = 6, 3
CAN_OVERLAP = len(os.sched_getaffinity(0)) > 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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


def words_of(folder: Path, out: Path) -> list[str]:
    """Return the command's options: one core computes, so that the optimizer's work overlaps on another one."""
    fixed = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "data",
        "output_dir": out,
        "random_weights": True,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "max_grad_norm": 8.0,
        "assistant_only_loss": True,
        "max_length": 48,
        "use_cpu": True,
        "report_to": "none",
        "save_steps": SAVED,
        "logging_steps": 1,
    }
    return [f"--{name}={value}" for name, value in fixed.items()]


def finetune(folder: Path, out: Path, *words: str) -> str:
    """Run the example, in this process, and return what it printed."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [str(SCRIPT), *words_of(folder, out), *words])
        runpy.run_path(str(SCRIPT))["main"]()
    return printed.getvalue()


def digests(out: Path) -> dict[str, str]:
    """Return the digests of the model, and of the last checkpoint's optimizer."""
    last = out / f"checkpoint-{STEPS}"
    if (last / "optimizer.pt").exists():
        state = torch.load(last / "optimizer.pt", weights_only=True)["state"]
        values = [value for entry in state.values() for value in entry.values()]
        flat = b"".join(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for value in values)
    else:
        flat = b"".join(shard.read_bytes() for shard in sorted(last.glob("optimizer_0/*.distcp")))
    return {
        "model": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
        "optimizer": hashlib.sha256(flat).hexdigest(),
    }


def logged(out: Path) -> list[dict[str, Any]]:
    state = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    history: list[dict[str, Any]] = state["log_history"]
    return history


def accepted_in(out: Path) -> int:
    """Return how many parameters' speculation was published, all steps together."""
    return sum(entry.get("superadam_accepted", 0) for entry in logged(out))


@pytest.fixture(scope="module")
def whole(folder, one_torch_thread):
    """Return what a run that nobody stopped wrote, and printed."""
    return folder / "whole", finetune(folder, folder / "whole", "--eval_strategy=steps", "--eval_steps=3")


def test_the_loss_falls_and_the_costs_are_told(whole):
    out, printed = whole
    losses = [entry["loss"] for entry in logged(out) if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert sum("eval_loss" in entry for entry in logged(out)) == 2
    assert re.search(r"peak memory: host \d+\.\d\d GB; [\d,]+ tokens/s\n", printed)
    assert re.search(
        rf"steps: {STEPS} applied, \d+ of them clipped, 0 skipped; hidden: \d+% of the optimizer's work", printed
    )
    if CAN_OVERLAP:
        assert accepted_in(out) > 0


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    logits: torch.Tensor = model(torch.arange(20)[None]).logits
    return logits


def test_the_saved_model_loads_and_goes_on_as_it_was(whole):
    out, _ = whole
    assert torch.equal(logits_of(out), logits_of(out / f"checkpoint-{STEPS}"))
    assert AutoTokenizer.from_pretrained(out)("1 + 1")["input_ids"]


@contextlib.contextmanager
def without_schedulers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OffloadCallback, "on_train_begin", lambda *_, **__: None)
        yield


def test_torch_s_adamw_is_one_word_away(folder):
    assert "steps:" not in finetune(folder, folder / "adamw", "--optimizer=adamw", "--max_steps=2")


# ---- several processes -------------------------------------------------------------------------------------------


def forget_ranks() -> None:
    """Let Accelerate look again at what this process is."""
    from accelerate.state import AcceleratorState

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    AcceleratorState._reset_state(reset_partial_state=True)


@contextlib.contextmanager
def preempted(name: str, rank: int) -> Iterator[None]:
    """Send SIGTERM to the second rank of the run "stopped", after which all ranks end with its status."""
    with pytest.MonkeyPatch.context() as patch:
        if name != "stopped":
            yield
            return

        def on_step_end(self: OffloadCallback, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == SAVED + 1 and rank == 1:
                signal.raise_signal(signal.SIGTERM)

        patch.setattr(OffloadCallback, "on_step_end", on_step_end)
        with pytest.raises(SystemExit) as ended:
            yield
        assert ended.value.code == 128 + signal.SIGTERM


def train_shards(rank: int, folder: Path, runs: list[tuple[str, list[str]]]) -> None:
    """Train into folders, one after another; without a scheduler into "plain"."""
    for number, (name, words) in enumerate(runs):
        forget_ranks()
        as_torchrun = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", **as_torchrun)
        first = all(name != before for before, _ in runs[:number])
        with without_schedulers() if name == "plain" else preempted(name if first else "", rank):
            finetune(folder, folder / "ranks" / name, "--rehearse", *words)


def test_on_two_ranks_every_run_ends_in_the_same_bits(folder):
    """Checkpoints hold shards; the model that is saved at the end is whole."""
    layers = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
    (folder / "fsdp.json").write_text(json.dumps({**layers, "state_dict_type": "SHARDED_STATE_DICT"}))
    words, out = ["--fsdp", f"--fsdp_config={folder / 'fsdp.json'}"], folder / "ranks"
    auto = [*words, "--resume_from_checkpoint=auto"]  # at first there is none
    run(train_shards, 2, folder=folder, runs=[("whole", auto), ("plain", words), ("stopped", words), ("stopped", auto)])
    assert digests(out / "plain") == digests(out / "whole") == digests(out / "stopped")
    assert (out / "stopped" / f"checkpoint-{SAVED + 2}").is_dir()  # a step after the signal came
    assert torch.equal(logits_of(out / "stopped"), logits_of(out / "whole"))
    assert logged(out / "whole")[-1]["loss"] < 0.8 * logged(out / "whole")[0]["loss"]
    assert accepted_in(out / "plain") == 0
    if CAN_OVERLAP:
        assert accepted_in(out / "whole") > 0


def environment_of(ranks: int) -> dict[str, str]:
    """Return what `accelerate launch` with the file for several GPUs sets for each rank."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = str(SCRIPT.parent / "presets" / "fsdp2.yaml")
    words = ["--config_file", file, "--num_processes", str(ranks), str(SCRIPT)]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    made: dict[str, str] = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in made.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def rehearse(rank: int, folder: Path, names: list[str], ranks: int, environment: dict[str, str]) -> None:
    """Train as a preset says, but for what a rehearsal makes small."""
    forget_ranks()
    as_torchrun = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1", **environment}
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            for key, value in {**as_torchrun, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}.items():
                patch.setenv(key, str(value))
            preset = f"--config={SCRIPT.parent / 'presets' / name}.yaml"
            words = ["--rehearse", "--dataset_name", folder / "data", "--output_dir", folder / "rehearsed" / name]
            patch.setattr(sys, "argv", [str(SCRIPT), preset, *map(str, words), f"--model_name_or_path={folder / name}"])
            runpy.run_path(str(SCRIPT))["main"]()
            forget_ranks()


@pytest.mark.parametrize(("ranks", "names"), [(2, ["qwen3-30b-a3b", "seed-oss-36b"]), (4, ["llama-3.1-70b"])])
def test_presets_for_several_gpus_are_rehearsed_without_any(folder, ranks, names):
    """With the published configuration, from which a small model of the same kind is made."""
    for name in names:
        assert PRESETS[name].ranks == ranks
        shutil.copytree(folder / "model", folder / name)
        PRESETS[name].config.save_pretrained(folder / name)
    run(rehearse, ranks, folder=folder, names=names, ranks=ranks, environment=environment_of(ranks))
    for name in names:
        out = folder / "rehearsed" / name
        assert len([*out.glob("checkpoint-*/optimizer_0/*.distcp")]) == ranks
        assert type(AutoModelForCausalLM.from_pretrained(out).config) is type(PRESETS[name].config)


def kill_at_step(rank: int, folder: Path, out: Path, step: int) -> None:
    """Train, and end this process as `kill -9` does."""
    torch.distributed.destroy_process_group()
    forget_ranks()

    def on_step_end(self: OffloadCallback, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    OffloadCallback.on_step_end = on_step_end
    finetune(folder, out)


def test_a_run_that_was_killed_ends_as_one_that_was_not(folder, whole):
    out = folder / "killed"
    assert run(kill_at_step, 1, folder=folder, out=out, step=SAVED + 2) == [ENDED]
    for name in (f"checkpoint-{SAVED + 1}", f"checkpoint-{SAVED + 2}", "checkpoint-best"):
        (out / name).mkdir()  # saves that were killed, and a copy
    (out / f"checkpoint-{SAVED + 2}" / "trainer_state.json").touch()
    (out / "checkpoint-best" / "trainer_state.json").write_text("{}")
    newest = re.escape(str(out / f"checkpoint-{SAVED}"))
    with pytest.raises(
        SystemExit, match=rf"{newest} is of another run; continue it with --resume_from_checkpoint auto"
    ):
        finetune(folder, out)
    finetune(folder, out, "--resume_from_checkpoint=auto")
    assert digests(out) == digests(whole[0])


def test_a_run_that_is_preempted_saves_and_ends_as_one_that_was_not(folder, whole, monkeypatch):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == SAVED + 1:
            signal.raise_signal(signal.SIGTERM)

    out = folder / "preempted"
    with monkeypatch.context() as patch:
        patch.setattr(OffloadCallback, "on_step_end", on_step_end)
        with pytest.raises(SystemExit) as ended:
            finetune(folder, out)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not (out / "model.safetensors").exists()
    finetune(folder, out, f"--resume_from_checkpoint={out / f'checkpoint-{SAVED + 1}'}")
    assert digests(out) == digests(whole[0])


@pytest.mark.parametrize("local_rank", [0, 1])
def test_ranks_that_cannot_meet_are_told_once(local_rank, folder, tmp_path, monkeypatch):
    fails = Mock(side_effect=torch.distributed.DistNetworkError("no answer\nand more"))
    monkeypatch.setattr(torch.distributed, "init_process_group", fails)
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *words_of(folder, tmp_path)])
    told = "^1$" if local_rank else r"^finetune.py: the ranks could not meet \(no answer\); [^\n]*$"
    variables = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    from accelerate.state import PartialState

    monkeypatch.setattr(PartialState, "_shared_state", {})
    with pytest.raises(SystemExit, match=told):
        runpy.run_path(str(SCRIPT), run_name="__main__")
