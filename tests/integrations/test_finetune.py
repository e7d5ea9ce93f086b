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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import support.frameworks  # noqa: F401 - nothing is looked up in a network
import torch
from support.presets import PRESETS
from support.ranks import ENDED, preload, run
from support.visible import bits
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

preload("transformers.models.qwen3.modeling_qwen3")

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
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = Qwen3Config(vocab_size=len(vocabulary), **sizes, **heads, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(made / "model")
    talks = [[("user", f"{i} + 1"), ("assistant", f"is {i + 1}.")] for i in range(64)]
    lines = [{"messages": [{"role": role, "content": said} for role, said in talk]} for talk in talks]
    (made / "data").mkdir()
    for split in ("train", "test"):
        (made / "data" / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def words_of(folder: Path, out: Path) -> list[str]:
    """Return the command's options: one core computes, so that the optimizer's work overlaps on another one."""
    words = f"--max_steps={STEPS} --save_steps={SAVED} --logging_steps=1 --max_length=48 --assistant_only_loss=True"
    words += " --learning_rate=0.01 --max_grad_norm=8.0 --random_weights=True --use_cpu=True --report_to=none"
    paths = {"model_name_or_path": folder / "model", "dataset_name": folder / "data", "output_dir": out}
    return [*words.split(), *(f"--{name}={path}" for name, path in paths.items())]


def finetune(folder: Path, out: Path, *words: str) -> str:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [str(SCRIPT), *words_of(folder, out), *words])
        runpy.run_path(str(SCRIPT))["main"]()
    return printed.getvalue()


def digests(out: Path) -> dict[str, str]:
    last = out / f"checkpoint-{STEPS}"
    if (last / "optimizer.pt").exists():
        state = torch.load(last / "optimizer.pt", weights_only=True)["state"]
        optimizer = repr([bits(value) for entry in state.values() for value in entry.values()]).encode()
    else:
        optimizer = b"".join(shard.read_bytes() for shard in sorted(last.glob("optimizer_0/*.distcp")))
    content = {"model": (out / "model.safetensors").read_bytes(), "optimizer": optimizer}
    return {name: hashlib.sha256(found).hexdigest() for name, found in content.items()}


def logged(out: Path) -> Any:
    return json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]


def accepted_in(out: Path) -> int:
    """Return how many parameters' speculation was published, all steps together."""
    return sum(entry.get("superadam_accepted", 0) for entry in logged(out))


@pytest.fixture(scope="module")
def whole(folder, one_torch_thread):
    return folder / "whole", finetune(folder, folder / "whole", "--eval_strategy=steps", "--eval_steps=3")


def test_the_loss_falls_and_the_costs_are_told(whole):
    out, printed = whole
    losses = [entry["loss"] for entry in logged(out) if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert sum("eval_loss" in entry for entry in logged(out)) == 2
    assert re.search(r"peak memory: host \d+\.\d\d GB; [\d,]+ tokens/s\n", printed)
    applied = rf"steps: {STEPS} applied, (\d+ of them clipped, )?0 skipped"
    assert re.search(rf"{applied}; hidden: \d+% of the optimizer's work", printed)
    if CAN_OVERLAP:
        assert accepted_in(out) > 0


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    return model(torch.arange(20)[None]).logits


def test_the_saved_model_loads_and_goes_on_as_it_was(whole):
    out, _ = whole
    assert torch.equal(logits_of(out), logits_of(out / f"checkpoint-{STEPS}"))
    assert AutoTokenizer.from_pretrained(out)("1 + 1")["input_ids"]


def test_torch_s_adamw_is_one_word_away(folder):
    assert "steps:" not in finetune(folder, folder / "adamw", "--optimizer=adamw", "--max_steps=2")


@contextlib.contextmanager
def as_of_torchrun(rank: int, ranks: int, **environment: str) -> Iterator[pytest.MonkeyPatch]:
    """Let Accelerate look again at what this process is."""
    from accelerate.state import AcceleratorState

    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**places, "OMP_NUM_THREADS": 1, **environment}.items():
            patch.setenv(name, str(value))
        yield patch
    AcceleratorState._reset_state(reset_partial_state=True)


def at_step(step: int, act: Callable[[], object]) -> Callable[..., None]:
    """Return a method of callbacks that acts at the end of a step."""

    def on_step_end(self: OffloadCallback, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            act()

    return on_step_end


@contextlib.contextmanager
def preempted(*, is_told: bool = True) -> Iterator[None]:
    """Send SIGTERM to a run, whose ranks all end with its status."""
    with pytest.MonkeyPatch.context() as patch:
        if is_told:
            terminate = at_step(SAVED + 1, lambda: signal.raise_signal(signal.SIGTERM))
            patch.setattr(OffloadCallback, "on_step_end", terminate)
        with pytest.raises(SystemExit) as ended:
            yield
    assert ended.value.code == 128 + signal.SIGTERM


def train_shards(rank: int, folder: Path, runs: list[tuple[str, list[str]]]) -> None:
    """Train into folders, one after another: without a scheduler into "plain"; "stopped" is preempted at first."""
    for name, words in runs:
        out, way = folder / "ranks" / name, contextlib.nullcontext()
        if name == "plain":
            way = mock.patch.object(OffloadCallback, "on_train_begin", return_value=None)
        elif name == "stopped" and "--resume_from_checkpoint=auto" not in words:
            way = preempted(is_told=rank == 1)
        with as_of_torchrun(rank, 2), way:
            finetune(folder, out, "--rehearse", *words)


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

    words = ["--config_file", f"{SCRIPT.parent}/presets/fsdp2.yaml", "--num_processes", str(ranks), str(SCRIPT)]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    made: dict[str, str] = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in made.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def rehearse(rank: int, folder: Path, names: list[str], ranks: int, environment: dict[str, str]) -> None:
    for name in names:
        words = ["--rehearse", "--dataset_name", folder / "data", "--output_dir", folder / "rehearsed" / name]
        words += ["--config", SCRIPT.parent / "presets" / f"{name}.yaml", "--model_name_or_path", folder / name]
        with as_of_torchrun(rank, ranks, **environment) as patch:
            patch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
            runpy.run_path(str(SCRIPT))["main"]()


@pytest.mark.parametrize(("ranks", "names"), [(2, ["qwen3-30b-a3b", "seed-oss-36b"]), (4, ["llama-3.1-70b"])])
def test_presets_for_several_gpus_are_rehearsed_without_any(folder, ranks, names):
    """With the published configuration, from which a small model of the same kind is made."""
    for name in names:
        assert PRESETS[name].setting.ranks == ranks
        shutil.copytree(folder / "model", folder / name)
        PRESETS[name].config.save_pretrained(folder / name)
    run(rehearse, ranks, folder=folder, names=names, ranks=ranks, environment=environment_of(ranks))
    for name in names:
        out = folder / "rehearsed" / name
        assert len([*out.glob("checkpoint-*/optimizer_0/*.distcp")]) == ranks
        assert type(AutoModelForCausalLM.from_pretrained(out).config) is type(PRESETS[name].config)


def kill_at_step(rank: int, folder: Path, out: Path, step: int) -> None:
    torch.distributed.destroy_process_group()
    OffloadCallback.on_step_end = at_step(step, lambda: os.kill(os.getpid(), signal.SIGKILL))
    finetune(folder, out)


def test_a_run_that_was_killed_ends_as_one_that_was_not(folder, whole):
    out = folder / "killed"
    assert run(kill_at_step, 1, folder=folder, out=out, step=SAVED + 2) == [ENDED]
    for name in (f"checkpoint-{SAVED + 1}", f"checkpoint-{SAVED + 2}", "checkpoint-best"):
        (out / name).mkdir()  # saves that were killed, and a copy
    (out / f"checkpoint-{SAVED + 2}" / "trainer_state.json").touch()
    (out / "checkpoint-best" / "trainer_state.json").write_text("{}")
    told = f"{out / f'checkpoint-{SAVED}'} is of another run; continue it with --resume_from_checkpoint auto"
    with pytest.raises(SystemExit, match=re.escape(told)):
        finetune(folder, out)
    finetune(folder, out, "--resume_from_checkpoint=auto")
    assert digests(out) == digests(whole[0])


def test_a_run_that_is_preempted_saves_and_ends_as_one_that_was_not(folder, whole):
    out = folder / "preempted"
    with preempted():
        finetune(folder, out)
    assert not (out / "model.safetensors").exists()
    finetune(folder, out, f"--resume_from_checkpoint={out / f'checkpoint-{SAVED + 1}'}")
    assert digests(out) == digests(whole[0])


def test_a_run_that_was_killed_after_its_last_step_makes_no_other(folder, whole):
    out = folder / "ended"
    shutil.copytree(whole[0], out)
    (out / "model.safetensors").unlink()
    assert "steps: 0 applied" in finetune(folder, out, "--resume_from_checkpoint=auto")
    assert {path.name for path in out.glob("checkpoint-*")} == {path.name for path in whole[0].glob("checkpoint-*")}
    assert digests(out) == digests(whole[0])


def test_a_run_that_was_resumed_tells_its_own_rate(capsys):
    """Its last count may be that of an evaluation."""
    history = [{"num_tokens": 900.0}, {"num_tokens": 60.0}, {"eval_num_tokens": 100.0}, {"train_runtime": 2.0}]
    runpy.run_path(str(SCRIPT))["report"](mock.Mock(**{"state.log_history": history}))
    assert capsys.readouterr().out.endswith("; 50 tokens/s\n")


def test_a_model_alone_is_no_run_to_go_on_with(folder):
    out, words = folder / "alone", ["--save_only_model=true"]
    with preempted():
        finetune(folder, out, *words)
    for start in ("auto", out / f"checkpoint-{SAVED + 1}"):
        with pytest.raises(SystemExit, match=r"checkpoint-. holds a model alone, with which no run goes on as it was;"):
            finetune(folder, out, *words, f"--resume_from_checkpoint={start}")


@pytest.mark.parametrize("local_rank", [0, 1])
def test_ranks_that_cannot_meet_are_told_once(local_rank, folder, tmp_path, monkeypatch):
    fails = mock.Mock(side_effect=torch.distributed.DistNetworkError("no answer\nand more"))
    monkeypatch.setattr(torch.distributed, "init_process_group", fails)
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *words_of(folder, tmp_path)])
    told = "^1$" if local_rank else r"^finetune.py: the ranks could not meet \(no answer\); [^\n]*$"
    for name, value in {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    from accelerate.state import PartialState

    monkeypatch.setattr(PartialState, "_shared_state", {})
    with pytest.raises(SystemExit, match=told):
        runpy.run_path(str(SCRIPT), run_name="__main__")
