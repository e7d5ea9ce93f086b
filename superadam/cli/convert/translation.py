"""What each key of DeepSpeed 0.19.8's configuration is called here.

Keys are those of `runtime/constants.py`, `precision_config.py`, `zero/config.py` and `zero/offload_config.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from superadam.cli.usage import UsageError

AUTO = "auto"
"""What a Trainer replaces with its own arguments."""

_NVME = "state has to fit into host memory"
_LOGGED = "a Trainer reports by report_to; in a loop, log scheduler.statistics"

_NOTHING = """
compression_training data_efficiency curriculum_learning sparse_attention hybrid_engine
vocabulary_size use_data_before_expert_parallelism zero_optimization.legacy_stage1
sequence_parallel_size expert_parallel weight_quantization
zero_optimization.pipeline_loading_checkpoint zero_optimization.log_trace_cache_warnings
zero_optimization.enable_sanity_checks bf16.ddp_bf16 zero_optimization.zero_quantized_weights
zero_optimization.zero_quantized_gradients zero_optimization.zero_quantized_nontrainable_weights
fp16.hysteresis fp16.min_loss_scale fp16.consecutive_hysteresis
"""
"""Keys for which there is nothing here."""

NO_COUNTERPART = {
    "train_batch_size": "the product of batch size, accumulation and ranks",
    **dict.fromkeys(("steps_per_print", "tensorboard", "wandb", "comet", "csv_monitor"), _LOGGED),
    "wall_clock_breakdown": "scheduler.statistics and scheduler.export_trace(path) tell it",
    "timers": "scheduler.statistics has its own",
    "memory_breakdown": "superadam doctor tells of memory",
    "dump_state": "there is no engine to describe",
    "prescale_gradients": "FSDP2 averages gradients",
    "gradient_predivide_factor": "FSDP2 averages gradients",
    "sparse_gradients": "sparse gradients are refused",
    "communication_data_type": "reduce_dtype of FSDP2's MixedPrecisionPolicy",
    "data_types": "scheduler.accumulate(dtype=torch.float32) adds gradients up in fp32",
    **dict.fromkeys(("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), "there is one optimizer"),
    **dict.fromkeys(("torch_autocast", "amp"), "torch.autocast in the loop, or bf16=True of a Trainer"),
    "activation_checkpointing": "torch.utils.checkpoint, or activation_checkpointing=True of a Trainer",
    "aio": _NVME,
    "comms_logger": "torch.profiler shows collectives",
    "flops_profiler": "torch.profiler shows them",
    "autotuning": "OffloadScheduler measures and places by itself",
    "elasticity": "distributed_checkpoint loads on any number of ranks",
    "checkpoint": "distributed_checkpoint.save has its own options",
    **dict.fromkeys(
        ("nebula", "datastates_ckpt"), "distributed_checkpoint.save(..., wait=False) saves in the background"
    ),
    "pipeline": "torch.distributed.pipelining, with process_group of the optimizer",
    "tensor_parallel": "parallelize_module of torch, with process_group of the optimizer",
    "autotp_size": "parallelize_module of torch",
    "compile": "torch.compile, or torch_compile=True of a Trainer",
    "seed": "torch.manual_seed, or seed of a Trainer",
    "managed_gradient_accumulation": "the loop accumulates, or the Trainer",
    "seq_parallel_communication_data_type": "the loop decides",
    "gradient_allreduce_op": "FSDP2 averages gradients",
    "disable_allgather": "FSDP2 gathers",
    "disable_python_gc": "gc.disable() of Python",
    "dataloader_drop_last": "drop_last of the DataLoader, or dataloader_drop_last=True of a Trainer",
    "log_level": 'logging.getLogger("superadam").setLevel(...)',
    "zero_optimization": "if DeepSpeed has this key: decided by which modules are given to fully_shard",
    "zero_optimization.offload_optimizer": _NVME,
    "zero_optimization.compute_grad_norm": "each step needs the norm, to see Inf and NaN",
    "zero_optimization.cpu_offload": "deprecated there; state is in host memory",
    "zero_optimization.cpu_offload_param": "CPUOffloadPolicy of FSDP2",
    "zero_optimization.cpu_offload_use_pin_memory": "gradients travel through pinned buffers by themselves",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "only Adam and AdamW",
    "bf16.check_overflow": 'on: an Inf or NaN skips the step; on_nonfinite="raise" raises',
    "zero_optimization.offload_param": "CPUOffloadPolicy of FSDP2",
    "zero_optimization.sub_group_size": 'bucket_numel="auto" of OffloadScheduler; no choice changes a bit',
    "zero_optimization.overlap_comm": "FSDP2 overlaps",
    "zero_optimization.stage3_prefetch_bucket_size": "set_modules_to_forward_prefetch of an FSDP2 module",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "a full state dict of torch",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "a full state dict of torch",
    "zero_optimization.zero_hpz_partition_size": "a mesh of two dimensions for fully_shard",
    "zero_optimization.mics_shard_size": "a mesh of two dimensions for fully_shard",
    "zero_optimization.zenflow": "it changes the algorithm; OffloadScheduler hides the same stall with the same bits",
    "zero_optimization.load_from_fp32_weights": "superadam.integrations.deepspeed.load reads masters",
    "zero_optimization.elastic_checkpoint": "distributed_checkpoint loads on any number of ranks",
    "zero_optimization.ignore_unused_parameters": "parameters without gradients are passed over",
    "zero_optimization.offload_optimizer.pin_memory": "gradients travel through pinned buffers by themselves",
    "zero_optimization.offload_optimizer.super_offload": "OffloadScheduler, which overlaps clipped steps as well",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": 'num_threads="auto" of OffloadScheduler',
    "zero_optimization.offload_optimizer.ratio": 'gpu_buckets="auto" of OffloadScheduler',
    **dict.fromkeys(("optimizer.params.torch_adam", "optimizer.legacy_fusion"), "there is one implementation"),
    "optimizer.params.max_grad_norm": "DeepSpeed refuses it; gradient_clipping is what clips",
    "optimizer.params.fp32_optimizer_states": 'moments are fp32, or bf16 with moments="bf16"',
    "optimizer.params.bias_correction": "always on, as in torch",
    "optimizer.params.fused": "accepted by the optimizer; there is one implementation",
    "optimizer.params.foreach": "accepted by the optimizer; there is one implementation",
    **dict.fromkeys(("scheduler.type", "scheduler.params"), "a learning-rate scheduler of torch"),
    "bf16.check_grad_overflow": 'on: an Inf or NaN skips the step; on_nonfinite="raise" raises',
    "bf16.bf16_master_weights_and_grads": 'masters are fp32, or 24 bits with master="24bit"',
    "bf16.immediate_grad_update": "gradients are taken as they arrive",
    "fp16.auto_cast": "torch.autocast in the loop",
    "fp16.loss_scale": "GradScaler of torch has its own scale",
    "fp16.initial_scale_power": "GradScaler(init_scale=2**n)",
    "fp16.loss_scale_window": "GradScaler(growth_interval=n)",
    "fp16.fp16_master_weights_and_grads": "masters are fp32",
    **dict.fromkeys(_NOTHING.split(), "none"),
}
"""Keys that become no argument, with what serves instead; of one that holds others, all that are not listed."""

SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""Of DeepSpeed, and what a Trainer and transformers.get_scheduler call them."""


@dataclass
class _Settings:
    """What was found so far.

    Attributes:
        optimizer, trainer, offload: arguments by name, as Python source.
        notes: of keys that have no counterpart, in their order.
    """

    optimizer: dict[str, str] = field(default_factory=dict)
    trainer: dict[str, str] = field(default_factory=dict)
    offload: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def translated(config: dict[str, Any]) -> str:
    """Return the text that the command prints.

    Raises:
        UsageError: a value is none that DeepSpeed accepts.
    """
    found = _Settings()
    if "bfloat16" in config:  # the older name, which counts where the newer one says nothing
        idle = "bf16" if config.get("bf16") is None else "bfloat16"
        if idle == "bfloat16":
            found.notes.append("bfloat16: bf16 counts, its newer name")
        config = {"bf16" if key == "bfloat16" else key: value for key, value in config.items() if key != idle}
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if config.get(key) not in (None, AUTO):
            config = config | {key: _count(key, config[key], 1)}
    if isinstance(config.get("zero_optimization"), bool):  # as in its first version
        config = config | {"zero_optimization": {"stage": int(config["zero_optimization"])}}
    unread = _flat(config, "")
    kind, stage = _optimizer(found, unread), unread.pop("zero_optimization.stage", 0)
    if stage == AUTO:
        found.notes.append("zero_optimization.stage: auto, which is zero_stage of Accelerate: fully_shard is stage 3")
        stage = 0
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise UsageError(f"zero_optimization.stage is {stage!r}, expected 0, 1, 2 or 3; correct it")
    limit = _number("gradient_clipping", unread.pop("gradient_clipping", 1.0))
    if limit == AUTO:
        found.notes.append("gradient_clipping: auto, which is max_grad_norm of the Trainer")
    else:
        found.optimizer |= {"max_grad_norm": repr(limit)} if limit else {}
        found.trainer["max_grad_norm"] = repr(limit)
    batches = {"train_micro_batch_size_per_gpu": "per_device_train_batch_size"}
    for key, name in (batches | {"gradient_accumulation_steps": "gradient_accumulation_steps"}).items():
        value = unread.pop(key, None)
        if value == AUTO:
            found.notes.append(f"{key}: auto, which is {name} of the Trainer")
        elif value is not None:
            found.trainer[name] = repr(value)
    dtype = _dtype(found, unread)
    _schedule(found, unread)
    older = "cpu" if unread.get("zero_optimization.cpu_offload") is True else "none"
    device = unread.pop("zero_optimization.offload_optimizer.device", older)
    if device not in ("none", "cpu", "nvme", AUTO):
        raise UsageError(f'offload_optimizer.device is {device!r}, expected "none", "cpu" or "nvme"; correct it')
    if device in ("nvme", AUTO):
        instead = _NVME if device == "nvme" else "offload_optimizer_device of Accelerate; here state is in host memory"
        found.notes.append(f"zero_optimization.offload_optimizer.device: {device}: {instead}")
    if device == "none":
        found.notes.append("zero_optimization.offload_optimizer: none there; here state is in host memory")
    shard = {"reshard_after_forward": repr(stage == 3)} if stage else {}
    if stage == 3 and unread.get("zero_optimization.offload_param.device") == "cpu":
        shard["offload_policy"] = "CPUOffloadPolicy()"
        del unread["zero_optimization.offload_param.device"]
        found.notes.append("zero_optimization.offload_param.device: 'cpu': gradients of bf16 shards arrive rounded")
    for key, value in unread.items():
        known = key  # or what holds it
        while known and known not in NO_COUNTERPART:
            known = known.rpartition(".")[0]
        reason = NO_COUNTERPART.get(known, "not known here")
        found.notes.append(f"{key}: {_shown(value)}: {reason}")
    return _text(found, kind, shard, dtype)


def _optimizer(found: _Settings, unread: dict[str, Any]) -> str:
    is_made = str(unread.get("optimizer.type")).lower() in ("adam", "adamw")  # there, with defaults of its own
    kind = unread.pop("optimizer.type", "AdamW")
    decoupled = unread.pop("optimizer.params.adam_w_mode", True)
    is_decoupled = str(kind).lower() != "adam" or bool(decoupled)
    decays = is_decoupled and unread.get("optimizer.params.torch_adam") is True
    usual = {"lr": 1e-3, "weight_decay": 0.01 if decays else 0.0} if is_made else {}
    names = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
    for name, theirs in names.items():
        value = _number(f"optimizer.params.{name}", unread.pop(f"optimizer.params.{name}", usual.get(name)))
        if value == AUTO:
            loop = "; pass it in a loop, whose default is 1e-3" if name == "lr" else ""
            found.notes.append(f"optimizer.params.{name}: auto, which is {theirs} of the Trainer{loop}")
        elif value is not None:
            found.optimizer[name] = found.trainer[theirs] = repr(value)
    betas = unread.pop("optimizer.params.betas", None)
    if betas == AUTO:
        found.notes.append("optimizer.params.betas: auto, which are adam_beta1 and adam_beta2 of the Trainer")
    elif betas is not None:
        if not isinstance(betas, list) or len(betas) != 2 or None in betas or AUTO in betas:
            raise UsageError(f"optimizer.params.betas is {_shown(betas)}, expected two numbers; correct it")
        first, second = (_number("optimizer.params.betas", value) for value in betas)
        if max(first, second) >= 1:
            raise UsageError(f"optimizer.params.betas is {_shown(betas)}, expected numbers below 1; correct it")
        found.optimizer["betas"] = f"({first!r}, {second!r})"
        found.trainer |= {"adam_beta1": repr(first), "adam_beta2": repr(second)}
    if unread.pop("optimizer.params.amsgrad", False):
        found.optimizer["amsgrad"] = "True"
    if str(kind).lower() not in ("adam", "adamw"):
        found.notes.append(f"optimizer.type: {_shown(kind)}: only Adam and AdamW; AdamW stands above")
    return "SpeculativeCPUAdamW" if is_decoupled else "SpeculativeCPUAdam"


def _dtype(found: _Settings, unread: dict[str, Any]) -> str | None:
    enabled = _switch(unread.pop("bf16.enabled", False))
    if enabled == AUTO:
        found.notes.append("bf16.enabled: auto: load the model in that dtype, with fp32 masters here")
    scaled = _switch(unread.pop("fp16.enabled", False))
    if enabled and scaled and AUTO not in (enabled, scaled):
        raise UsageError("bf16 and fp16 are both enabled, which DeepSpeed refuses; disable one of them")
    if scaled:  # there with weights in fp16
        found.trainer |= {} if scaled == AUTO else {"fp16": "True"}
        found.notes.append(
            f"fp16.enabled: {scaled}: fp32 weights, torch.autocast to fp16 and torch.amp.GradScaler, which takes no "
            "gradients in fp16, or fp16=True of a Trainer; weights in bf16 need neither"
        )
    if unread.pop("bf16.bf16_optimizer_states", False):
        found.optimizer["moments"] = found.offload["moments"] = '"bf16"'
    return "torch.bfloat16" if enabled and enabled != AUTO else None


def _schedule(found: _Settings, unread: dict[str, Any]) -> None:
    kind = unread.get("scheduler.type")
    if kind not in [*SCHEDULES]:  # a list: a wrong type may have no hash
        return
    found.trainer["lr_scheduler_type"] = f'"{SCHEDULES[unread.pop("scheduler.type")]}"'
    names = {"warmup_num_steps": "warmup_steps", "total_num_steps": "max_steps", "warmup_max_lr": "learning_rate"}
    usual = {"warmup_type": "log there unless given; transformers warms up linearly"}
    if kind == "WarmupDecayLR":
        usual["warmup_max_lr"] = "0.001 there unless given; transformers warms up to lr"
    for word in (*names, "warmup_min_lr", "warmup_type"):
        key = f"scheduler.params.{word}"
        value = unread.pop(key, None)
        if word == "warmup_num_steps" and value is None:
            value = 1000  # as there
        if value == AUTO and word in names:
            found.notes.append(f"{key}: auto, which is {names[word]} of the Trainer")
        elif value is not None and word.endswith("num_steps"):
            found.trainer[names[word]] = repr(_count(key, value, 0))
        elif value is not None:
            found.notes.append(f"{key}: {_shown(value)}: transformers warms up linearly, from 0 to lr")
        elif word in usual:
            found.notes.append(f"{key}: {usual[word]}")


def _text(found: _Settings, kind: str, shard: dict[str, str], dtype: str | None) -> str:
    def call(name: str, first: list[str], named: dict[str, str]) -> str:
        return f"{name}({', '.join([*first, *(f'{key}={value}' for key, value in named.items())])})"

    lines = ["# a loop"]
    lines += [f"model.to({dtype})"] if dtype else []
    if shard:
        lines += [
            "for layer in model.model.layers:  # on several ranks; without this loop nothing overlaps",
            f"    {call('fully_shard', ['layer'], shard)}",
            call("fully_shard", ["model"], shard),
        ]
    lines += [
        f"optimizer = {call(kind, ['model.parameters()'], found.optimizer)}",
        "scheduler = OffloadScheduler(optimizer, model)",
        "",
        f"# a Trainer of transformers or TRL{', whose model is loaded in that dtype' if dtype else ''}",
        f"arguments = {call('TrainingArguments', [], found.trainer)}",
        call("offload", ["trainer"], found.offload),
    ]
    if kind == "SpeculativeCPUAdam":
        lines.append("# its optimizer is AdamW: pass optimizers=(SpeculativeCPUAdam(...), None) for L2 decay")
    if shard:
        lines += [
            "",
            "# a Trainer on several GPUs",
            "# accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
            f"--fsdp_reshard_after_forward {shard['reshard_after_forward'].lower()}"
            f"{' --fsdp_offload_params true' * ('offload_policy' in shard)} PROGRAM",
        ]
    notes = [f"# {' '.join(note.splitlines())}" for note in found.notes]
    return "\n".join([*lines, *(["", "# what is none of these arguments", *notes] if notes else []), ""])


def _flat(value: Any, name: str) -> dict[str, Any]:
    """Return the values of nested objects by their dotted names."""
    if not isinstance(value, dict):
        if name in ("optimizer", "optimizer.params", "scheduler", "zero_optimization", "bf16", "fp16"):
            raise UsageError(f"{name} is {_shown(value)}, expected an object; correct it")
        return {name: value}
    return {
        key: each for word, inner in value.items() for key, each in _flat(inner, f"{name}.{word}".strip(".")).items()
    }


def _switch(value: Any) -> Any:
    return value.lower() not in ("false", "no", "off", "0") if isinstance(value, str) and value != AUTO else value


def _count(key: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0 or value < least:
        expected = f'a whole number of at least {least}, or "auto"'
        raise UsageError(f"{key} is {_shown(value)}, expected {expected}; correct it")
    return int(value)


def _number(key: str, value: Any) -> Any:
    if value is None or value == AUTO:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise UsageError(f'{key} is {_shown(value)}, expected a number of at least 0, or "auto"; correct it')
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
