"""`superadam convert` prints arguments that exist, tells what serves instead of other keys, and refuses the rest."""

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import superadam
from superadam.cli.convert import translation
from superadam.cli.main import main

USUAL: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "ratio": 1},
        "stage3_max_live_parameters": 1,
    },
    "bf16": {"enabled": True, "bf16_optimizer_states": True},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "wandb": {"enabled": True, "project": "x"},
}


def calls_of(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the arguments of each call that is printed, those that are literals as values."""
    calls: dict[str, dict[str, Any]] = {}
    for node in ast.walk(ast.parse(translation.translated(config))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            calls[node.func.id] = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
    return calls


def test_a_usual_configuration_becomes_arguments() -> None:
    calls = calls_of(USUAL)
    options = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0}
    assert calls["SpeculativeCPUAdamW"] == {**options, "moments": "bf16"}
    assert calls["fully_shard"] == {"reshard_after_forward": True}
    assert calls["offload"] == {"moments": "bf16"}
    adam = {"learning_rate": 1e-5, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "weight_decay": 0.1}
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_grad_norm": 1.0}
    schedule = {"lr_scheduler_type": "linear", "warmup_steps": 10, "max_steps": 100}
    assert calls["TrainingArguments"] == adam | batch | schedule


def test_the_arguments_exist(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    calls = calls_of(USUAL)
    inspect.signature(superadam.SpeculativeCPUAdamW).bind([], **calls["SpeculativeCPUAdamW"])
    transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **calls["TrainingArguments"])


@pytest.mark.parametrize("config", [{}, {"gradient_clipping": 0.5}, {"gradient_clipping": 0}])
def test_clipping_is_that_of_deepspeed_also_by_default(config: dict[str, Any]) -> None:
    calls, expected = calls_of(config), config.get("gradient_clipping", 1.0)
    assert calls["SpeculativeCPUAdamW"].get("max_grad_norm") == (expected or None)
    assert calls["TrainingArguments"]["max_grad_norm"] == expected


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize("torchs", [False, True])
@pytest.mark.parametrize("mode", [0, False, True])
def test_what_is_not_given_is_as_in_deepspeed(kind: str, torchs: bool, mode: bool) -> None:
    """Whose AdamW does not decay unless it is torch's, and whose schedules warm up."""
    name = "SpeculativeCPUAdamW" if mode or kind == "AdamW" else "SpeculativeCPUAdam"
    decay = 0.01 if torchs and name == "SpeculativeCPUAdamW" else 0.0
    for schedule in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        options = {"type": kind, "params": {"torch_adam": torchs, "adam_w_mode": mode}}
        config = {"optimizer": options, "scheduler": {"type": schedule}}
        calls = calls_of(config)
        assert calls[name] == {"lr": 1e-3, "weight_decay": decay, "max_grad_norm": 1.0}
        arguments = calls["TrainingArguments"]
        assert (arguments["learning_rate"], arguments["weight_decay"], arguments["warmup_steps"]) == (1e-3, decay, 1000)
        notes = translation.translated(config)
        assert ("warmup_max_lr: 0.001 there unless given" in notes) is (schedule == "WarmupDecayLR")
    assert calls_of({"train_batch_size": None})["SpeculativeCPUAdamW"] == {"max_grad_norm": 1.0}  # of the program


def test_fp16_keeps_fp32_weights_because_torch_unscales_no_gradients_in_fp16() -> None:
    for enabled in (True, "auto"):
        config = {"fp16": {"enabled": enabled}, "zero_optimization": {"stage": 2}}
        text = translation.translated(config)
        assert "model.to(" not in text
        assert ("fp16" in calls_of(config)["TrainingArguments"]) is (enabled is True)
        assert f"# fp16.enabled: {enabled}: fp32 weights, torch.autocast to fp16 and torch.amp.GradScaler" in text
    assert "model.to(torch.bfloat16)" in translation.translated({"bf16": {"enabled": True}})


def test_the_older_name_of_bf16_counts_where_the_newer_one_says_nothing() -> None:
    on, off = {"enabled": True}, {"enabled": False}
    for config in ({"bfloat16": on}, {"bf16": None, "bfloat16": on}, {"bf16": on, "bfloat16": off}):
        text = translation.translated(config)
        assert "model.to(torch.bfloat16)" in text
        assert ("# bfloat16: bf16 counts" in text) is (config.get("bf16") == on)
    assert "model.to(" not in translation.translated({"bf16": off, "bfloat16": on})


def listed() -> dict[str, str]:
    """Return what has no counterpart; of a key that holds others, one that is not listed itself."""
    keys = translation.NO_COUNTERPART
    holds = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    return {f"{key}.another" if key in holds else key: instead for key, instead in keys.items()}


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def test_each_key_without_counterpart_has_a_line() -> None:
    for key, instead in listed().items():
        text = translation.translated(nested(key, "auto"))
        assert f"# {key}: 'auto': {instead}" in text.splitlines()
        assert "not known" not in text
    assert "# zero_optimisation.stage: 3: not known" in translation.translated(nested("zero_optimisation.stage", 3))
    assert "# a b: 1: not known here" in translation.translated({"a\nb": 1})
    assert "# scheduler.type: [1]: a learning-rate" in translation.translated(nested("scheduler.type", [1]))
    assert "# scheduler.params.warmup_type: 9: a" in translation.translated(nested("scheduler.params.warmup_type", 9))


def test_auto_is_left_to_the_trainer() -> None:
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    schedule = {"type": "WarmupLR", "params": {f"warmup_{name}": "auto" for name in ("num_steps", "min_lr", "max_lr")}}
    config = {"optimizer": {"params": params}, "scheduler": schedule, "bf16": {"enabled": "auto"}}
    config |= dict.fromkeys(("gradient_clipping", "train_micro_batch_size_per_gpu", "train_batch_size"), "auto")
    calls = calls_of(config)
    assert calls["SpeculativeCPUAdamW"] == {}
    assert calls["TrainingArguments"] == {"lr_scheduler_type": "constant_with_warmup"}
    notes = translation.translated(config)
    for name in ("learning_rate", "adam_beta1 and adam_beta2", "max_grad_norm", "per_device_train_batch_size"):
        assert f"auto, which {'are' if ' ' in name else 'is'} {name} of the Trainer" in notes
    assert "warmup_min_lr: 'auto': transformers warms up linearly, from 0 to lr" in notes


def test_older_forms_and_those_of_accelerate() -> None:
    first = {"zero_optimization": True, "scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 1e3, "x": 1}}}
    assert calls_of(first)["fully_shard"] == {"reshard_after_forward": False}
    assert calls_of(first)["TrainingArguments"]["max_steps"] == 1000
    assert "# scheduler.params.x: 1: a learning-rate scheduler of torch" in translation.translated(first)
    assert "fp16=" not in translation.translated({"zero_optimization": False, "fp16": {"enabled": "false"}})
    assert "none there" not in translation.translated({"zero_optimization": {"stage": 2, "cpu_offload": True}})
    text = translation.translated({"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}})
    assert text.count("of Accelerate") == 2
    text = translation.translated({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    shard = "reshard_after_forward=True, offload_policy=CPUOffloadPolicy())"
    assert "gradients of bf16 shards arrive rounded" in text
    assert "for layer in model.model.layers:" in text
    assert text.count(shard) == 2
    assert "TRANSFORMER_BASED_WRAP --fsdp_reshard_after_forward true --fsdp_offload_params true PROGRAM" in text
    for stage in (0, 2, "auto"):  # where DeepSpeed leaves parameters on the device
        text = translation.translated({"zero_optimization": {"stage": stage, "offload_param": {"device": "cpu"}}})
        assert "offload_param.device: 'cpu': CPUOffloadPolicy of FSDP2" in text
        assert "offload_policy=" not in text


def test_the_translation_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**USUAL, "url": 'a"//#, }'}
    lines = json.dumps(config, indent=1).splitlines()
    (tmp_path / "ds.json").write_text("\ufeff/* {\n*/" + " // ,\n".join(lines[:-1]) + ", # }\n}")  # as DeepSpeed reads
    assert main(["convert", str(tmp_path / "ds.json")]) == 0
    assert capsys.readouterr().out == translation.translated(config)
