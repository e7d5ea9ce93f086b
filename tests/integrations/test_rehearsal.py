"""A rehearsal trains a small model of the kind that was asked for; ranks that would not be sharded are refused."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import support.frameworks  # noqa: F401 - nothing is looked up in a network
import torch
from support.presets import PRESETS

transformers: Any = pytest.importorskip("transformers")
trl: Any = pytest.importorskip("trl")

import finetune_options  # noqa: E402
from finetune_options import RefusedError, check_ranks, parse  # noqa: E402

from superadam.integrations.transformers import _check_way_of_training  # noqa: E402


@pytest.mark.parametrize("name", PRESETS)
def test_a_small_model_has_the_layers_of_the_large_one(name):
    config = PRESETS[name].config
    before = copy.deepcopy(config.to_dict())
    with torch.device("meta"):
        small = transformers.AutoModelForCausalLM.from_config(finetune_options.small(config, 100))
        large = transformers.AutoModelForCausalLM.from_config(config)
    assert config.to_dict() == before
    assert sum(one.numel() for one in small.parameters()) < 1e6 < sum(one.numel() for one in large.parameters())
    names = {one for one, _ in large.named_parameters()}
    kept = {one for one in names if one.split(".layers.")[-1][:2] in ("0.", "1.") or ".layers." not in one}
    assert {one for one, _ in small.named_parameters()} == kept


@pytest.mark.parametrize("words", ["", "--rehearse false", "--rehearse=False", "--max_steps 9"])
def test_words_stay_where_no_rehearsal_is_asked_for(words):
    assert finetune_options._with_rehearsal(words.split()) == words.split()


@pytest.mark.parametrize("words", ["--rehearse", "--rehearse --use_cpu", "--rehearse=true", "--rehearse 1"])
def test_what_is_given_counts_more_than_what_a_rehearsal_sets(words):
    made = finetune_options._with_rehearsal(["--max_steps", "9", *words.split()])
    assert made.index("4") == made.index("--max_steps") + 1 < made.index("9")


@dataclass
class _Rehearsal:
    rehearse: bool = False


def test_a_file_may_ask_for_a_rehearsal_and_counts_less_than_what_that_sets(tmp_path):
    file = tmp_path / "rehearsal.yaml"
    file.write_text("max_steps: 9\nrehearse: true\nlogging_steps: 7\n")
    for more, steps, logs in (([], 4, 1), (["--max_steps", "5"], 5, 1), (["--rehearse", "no"], 9, 7)):
        words = ["--config", str(file), "--use_cpu", *more]
        (_, made), _ = parse([_Rehearsal, trl.SFTConfig], words, bf16=False)
        assert (made.max_steps, made.logging_steps) == (steps, logs)


def ranks(device: str = "cpu", **fields: Any) -> Any:
    return SimpleNamespace(world_size=2, device=torch.device(device), fsdp=None, **fields)


@pytest.mark.parametrize("variable", ["", "false"])
def test_ranks_without_fsdp2_are_told_how_to_start(variable, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", variable)
    with pytest.raises(RefusedError, match="2 ranks were started without FSDP2; start them with accelerate launch"):
        check_ranks(ranks(), superadam=True, rehearses=True)
    check_ranks(ranks(), superadam=False, rehearses=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_ranks(SimpleNamespace(**{**vars(ranks()), "world_size": 1}), superadam=True, rehearses=False)  # needs none


@pytest.mark.parametrize("count", [1, 2])
def test_fsdp1_is_refused_before_anything_is_loaded(count, monkeypatch):
    """It is what `accelerate launch` takes where no version is named; those of the arguments count more."""
    told = r"FSDP1 was asked for, .*; start with accelerate launch --config_file examples/presets/fsdp2.yaml"
    training = ranks()
    training.world_size = count
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for version in (None, "1"):
        monkeypatch.setenv("FSDP_VERSION", version) if version else monkeypatch.delenv("FSDP_VERSION", raising=False)
        with pytest.raises(RefusedError, match=told):
            check_ranks(training, superadam=True, rehearses=True)
        check_ranks(training, superadam=False, rehearses=True)
    for training.fsdp, training.fsdp_config in ((True, None), (True, {"version": 2})):
        check_ranks(training, superadam=True, rehearses=True)
    monkeypatch.setenv("FSDP_VERSION", "2")
    training.fsdp_config = {"version": 1}
    with pytest.raises(RefusedError, match=told):
        check_ranks(training, superadam=True, rehearses=True)
    monkeypatch.delenv("LOCAL_RANK")
    training.world_size = 1  # not started by a launcher, so that nothing is sharded
    check_ranks(training, superadam=True, rehearses=True)


def test_ranks_that_were_started_so_are_not_told_to_start_so(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(RefusedError, match=r"shards no model on CPUs, .*; add --rehearse, or use GPUs"):
        check_ranks(ranks(), superadam=True, rehearses=False)
    check_ranks(ranks(), superadam=True, rehearses=True)
    check_ranks(ranks("meta"), superadam=True, rehearses=False)
    mode = transformers.training_args.ParallelMode.DISTRIBUTED
    trainer: Any = SimpleNamespace(is_deepspeed_enabled=False, is_fsdp_enabled=False, args=ranks(parallel_mode=mode))
    with pytest.raises(RuntimeError, match=r"shards no model on CPUs, .*; call shard_on_cpus\(\)"):
        _check_way_of_training(trainer)
    for name, value in (("FSDP_VERSION", "1"), ("ACCELERATE_USE_FSDP", "false")):
        monkeypatch.setenv(name, value)
        told = r"would use DistributedDataParallel, .*; train on several GPUs with FSDP2"
        with pytest.raises(RuntimeError, match=told):
            _check_way_of_training(trainer)
