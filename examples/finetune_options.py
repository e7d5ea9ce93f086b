"""Options of `finetune.py` and its data, checked before weights are loaded; each error is one sentence.

A field of TRL's configurations is obeyed, or it is in one of the tables below.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import yaml
from torch.distributed import DistError
from transformers import get_scheduler
from trl import TrlParser  # type: ignore[attr-defined]
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from superadam.integrations import distributed_checkpoint, rehearsal

_Result = TypeVar("_Result")

_ADAPTERS = "use_peft use_dora use_rslora lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters "
_ADAPTERS += "lora_modules_to_save lora_task_type"
_BITS = "load_in_4bit load_in_8bit use_bnb_nested_quant bnb_4bit_quant_type bnb_4bit_quant_storage"
_METRICS = "include_for_metrics batch_eval_metrics eval_do_concat_batches eval_use_gather_object prediction_loss_only"

NOT_OBEYED = {
    **dict.fromkeys(_ADAPTERS.split(), "all weights are trained, without adapters"),
    **dict.fromkeys(_BITS.split(), "all weights are trained, in 16 or 32 bits"),
    **dict.fromkeys(_METRICS.split(), "evaluation tells the loss"),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "it trains, and evaluates by --eval_strategy"),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "evaluation computes as training does"),
    "dataset_streaming": "the examples are read before training",
    "ignore_bias_buffers": "there is no such wrapper",
    "model_init_kwargs": "the model is loaded by --dtype and --attn_implementation",
    "parallelism_config": "FSDP2 is what divides the model",
}
"""Fields of TRL's configurations that would be parsed and change nothing, with the reason."""

NOT_WITH_SUPERADAM = {
    **dict.fromkeys(("optim_args", "optim_target_modules"), "they are of other optimizers"),
    "deepspeed": "FSDP2 is what divides the model, and superadam the optimizer; superadam convert translates the file",
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        "DistributedDataParallel is not used",
    ),
}
"""The same, unless torch's AdamW trains."""

DEPRECATED = {
    "gradient_checkpointing": "--activation_checkpointing",
    "gradient_checkpointing_kwargs": "--activation_checkpointing_kwargs",
    "pad_token": "a tokenizer that has one",
    "use_liger_kernel": "the default --loss_type nll, which is fused as well",
    "label_smoothing_factor": "another loss",
    "local_rank": "torchrun",
    "loss_type chunked_nll": "--loss_type nll",
    "truncation_mode keep_end": "--truncation_mode keep_start",
}
"""Fields, or values of one, that TRL or transformers will drop, and what takes their place."""

_COUNTS = "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_length max_steps "
_COUNTS += "eval_accumulation_steps save_total_limit torch_empty_cache_steps dataloader_prefetch_factor ddp_timeout "
_COUNTS += "dataset_num_proc pad_to_multiple_of"
_SIZES = "learning_rate weight_decay adam_epsilon max_grad_norm warmup_steps num_train_epochs seed data_seed "
_SIZES += "eval_delay dataloader_num_workers neftune_noise_alpha router_aux_loss_coef"
_PERIODS = "logging_steps eval_steps save_steps"

RANGES: dict[str, tuple[float, float, str]] = {
    **dict.fromkeys(_COUNTS.split(), (1, math.inf, "at least 1")),
    **dict.fromkeys(_SIZES.split(), (0, math.inf, "at least 0")),
    **dict.fromkeys(_PERIODS.split(), (math.ulp(0.0), math.inf, "more than 0")),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), (0, 1, "at least 0 and less than 1")),
}
"""Least value of a number, what it must be less than, and both in words."""

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "sliding_window": 8,
}
"""What a configuration has of these becomes that small in a rehearsal."""

ADAMS = ("adamw_torch", "adamw_torch_fused")
"""Values of `optim` whose groups superadam takes over."""


class RefusedError(ValueError):
    """A run cannot begin; the message is one sentence: what was wrong, what was expected, what to do."""


class _Parser(TrlParser):
    def error(self, message: str) -> NoReturn:
        raise RefusedError(f"{message}; --help lists all options")


def attempt(call: Callable[[], _Result], subject: str, remedy: str) -> _Result:
    """Return what a call of transformers, TRL or datasets returns; what it raises becomes one sentence.

    Raises RefusedError from that error, whose first line it repeats; not where memory ran out, or ranks were lost.
    """
    try:
        return call()
    except (RefusedError, MemoryError, torch.OutOfMemoryError, DistError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RefusedError(f"{subject} ({lines[0].rstrip('.')}); {remedy}") from error


def run(train: Callable[[], object]) -> None:
    """Train; end the program with one sentence where that cannot be done."""
    try:
        train()
    except DistError as error:  # on every rank, which TRL lets meet; one of each node tells
        first = str(error).partition("\n")[0]
        _end(f"the ranks could not meet ({first}); start all of them with one torchrun command")
    except (RefusedError, MemoryError, distributed_checkpoint.CheckpointError) as error:
        _end(str(error))


def _end(sentence: str) -> NoReturn:
    sys.exit(f"finetune.py: {sentence}" if os.environ.get("LOCAL_RANK", "0") == "0" else 1)


def parse(classes: Iterable[Any], words: Sequence[str], **defaults: Any) -> tuple[list[Any], dict[str, str]]:
    """Return one object of each dataclass, as `trl.TrlParser` does, and the options that were given, as words by name.

    `--config FILE` stands for the words of a YAML file, which come first. Where they ask for a rehearsal, it is small.
    Raises RefusedError where an option does not exist, its value does not fit, or the file cannot be read, and
    DistError where the ranks could not meet.
    """
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    in_file: list[str] = []
    if "--config" in words:
        at = words.index("--config")
        in_file = _words_of_file(Path((words[at + 1 : at + 2] or ["none"])[0]))
        words = [*words[:at], *words[at + 2 :]]
    words = _with_rehearsal(words, in_file)
    parser = _Parser(list(classes), allow_abbrev=False)
    parser.set_defaults(**defaults)
    *found, rest = attempt(
        lambda: parser.parse_args_into_dataclasses(args=words, return_remaining_strings=True),
        "the options do not fit together",
        "correct them",
    )
    if rest:
        known = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(rest[0].partition("=")[0], known, 1)
        meant = f"{near[0]} is one, --help lists all" if near else "--help lists all"
        raise RefusedError(f"there is no option {rest[0]}; {meant}")
    given: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            given[name.replace("-", "_")] = value or ("" if after.startswith("--") else after)
    return found, given


def _with_rehearsal(given: Sequence[str], in_file: Sequence[str] = ()) -> list[str]:
    """Return the words of a file and of a command line, between them those that make a rehearsal small if one is due.

    It is where the last word about it asks for one. What the command line gives counts more than what the file does.
    """
    every = [*in_file, *given]
    at = [number for number, word in enumerate(every) if word.partition("=")[0] == "--rehearse"]
    after = [every[number].partition("=")[2] or (*every[number + 1 :], "true")[0] for number in at]
    if not after or after[-1].lower() in ("false", "no", "0"):
        return every
    length = SIZES["max_position_embeddings"]
    usual = {"use_cpu": "true", "max_steps": 4, "max_length": length, "logging_steps": 1}
    return [*in_file, *(word for name, value in usual.items() for word in (f"--{name}", str(value))), *given]


def _words_of_file(path: Path) -> list[str]:
    """Return the options in a YAML file as words, so that they are checked as those of a command line."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RefusedError(f"there is no preset {path}; examples/presets/ has some") from error
    except Exception as error:  # of any class, where a date or a number makes no sense
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1} of {path}" if mark else str(path)
        other = "it is no text" if isinstance(error, UnicodeDecodeError) else f"{error}".partition("\n")[0]
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or other
        raise RefusedError(f"{where} is no YAML ({reason}); correct it") from error
    if not isinstance(content, dict) or not isinstance(content.get("env", {}), dict):
        raise RefusedError(f"{path} holds no options, expected lines such as max_steps: 100; correct it")

    def words() -> list[str]:
        os.environ.update({str(name): str(value) for name, value in content.pop("env", {}).items()})
        found: list[str] = []
        for name, value in content.items():
            parts = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            found += [f"--{name}", *map(str, parts)] if value is not None else []
        return found

    return attempt(words, f"the options in {path} cannot be used", "correct them")


def small(config: Any, vocabulary: int) -> Any:
    """Return a model's configuration with few and narrow layers of the same kind, for a tokenizer of so many words."""
    values = config.to_dict()
    for name in ("layer_types", "rope_parameters", "rope_scaling", "quantization_config"):
        values.pop(name, None)  # they follow from sizes
    sizes = {name: value for name, value in SIZES.items() if isinstance(values.get(name), int)}
    return type(config)(**{**values, **sizes, "vocab_size": vocabulary, "pad_token_id": None})


def check_options(configurations: Iterable[Any], given: Mapping[str, str], *, superadam: bool) -> None:
    """Refuse options that would be parsed and not obeyed, that are deprecated, or whose number makes no sense.

    `parse` returned the configurations and what was given; `superadam` says that its optimizer trains, and not torch's.
    Raises RefusedError.
    """
    for name, value in given.items():
        if new := DEPRECATED.get(name) or DEPRECATED.get(f"{name} {value}"):
            raise RefusedError(f"--{name} {value} is deprecated, expected {new}; change it")
    if superadam and given.get("optim", ADAMS[0]) not in ADAMS:
        raise RefusedError(
            f"--optim {given['optim']} is not what superadam replaces, expected {ADAMS[0]}; leave it out"
        )
    refused = NOT_OBEYED | (NOT_WITH_SUPERADAM if superadam else {})
    for configuration in configurations:
        fields = type(configuration).__dataclass_fields__
        for name in sorted(fields.keys() & given.keys() & RANGES.keys()):
            (least, end, expected), number = RANGES[name], getattr(configuration, name)
            is_default = number == fields[name].default  # -1 says that there is none, of some
            if isinstance(number, int | float) and not is_default and not least <= number < end:
                raise RefusedError(f"--{name} is {number}, expected a number of {expected}; correct it")
        for name in sorted(fields.keys() & given.keys() & refused.keys()):
            if getattr(configuration, name) != fields[name].default:
                raise RefusedError(f"--{name} is not obeyed, {refused[name]}; leave it out")


def check_schedule(training: Any) -> None:
    """Check that the schedule of TRL's `SFTConfig` can be made; raises RefusedError, as where it lacks arguments."""
    like = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=training.learning_rate)
    arguments = {"num_warmup_steps": 0, "num_training_steps": 1}
    attempt(
        lambda: get_scheduler(
            training.lr_scheduler_type, like, **arguments, scheduler_specific_kwargs=training.lr_scheduler_kwargs
        ),
        f"--lr_scheduler_type {training.lr_scheduler_type.value} cannot be made",
        "correct --lr_scheduler_kwargs",
    )


def check_ranks(training: Any, *, superadam: bool, rehearses: bool) -> None:
    """Check that several ranks train with FSDP2, and that Accelerate would shard the model where they are.

    `training` is TRL's `SFTConfig`. torch's optimizer may do without FSDP2; `rehearses` says that
    `superadam.integrations.rehearsal.shard_on_cpus` will be called. Raises RefusedError.
    """
    is_alone = training.world_size == 1 and "LOCAL_RANK" not in os.environ  # else Accelerate shards for one rank, too
    if is_alone or not superadam:
        return
    launch = "accelerate launch --config_file examples/presets/fsdp2.yaml"
    version = rehearsal.fsdp_version(training)
    if version not in (None, "2"):
        raise RefusedError(f"FSDP{version} was asked for, whose shards cannot be followed; start with {launch}")
    if training.world_size == 1:
        return
    if version is None:
        raise RefusedError(f"{training.world_size} ranks were started without FSDP2; start them with {launch}")
    if training.device.type == "cpu" and not rehearses:
        raise RefusedError(
            "Accelerate shards no model on CPUs, although FSDP2 was asked for; add --rehearse, or use GPUs"
        )


def check_lines(path: str | Path, text: str = "text") -> dict[str, Any] | None:
    """Check that each line of a file is an object with `messages`, `prompt` and `completion`, or text in the column.

    Returns the first one that is a conversation, if any. Raises RefusedError, which names the line; also without lines.
    """
    number, first, found = 0, None, 0
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007 - told below
                if line.strip():
                    value, found = json.loads(line), found + 1
                    if fault := _fault(value, text):
                        raise ValueError(fault)
                    first = value if first is None and _conversation(value) else first
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError(f"line {number} of {path}: {getattr(error, 'msg', error)}; correct it") from error
    if not found:
        raise RefusedError(f"{path} has no lines, expected one for each example; name another file")
    return first


def _fault(example: Any, text: str) -> str:
    """Return what is wrong with an example; nothing for a usable one."""
    for columns in (("messages",), ("prompt", "completion"), (text,)):
        if isinstance(example, dict) and example.keys() >= set(columns):
            for column in columns:
                value, is_messages = example[column], column == "messages"
                takes_text, takes_talk = column == text or not is_messages, column != text or is_messages
                if not (takes_text and isinstance(value, str)) and not (takes_talk and _is_talk(value)):
                    kinds = ["text"] * takes_text + ["a list of objects with role and content"] * is_messages
                    return f"{column} is {type(value).__name__}, expected {' or '.join(kinds)}"
            return ""
    return f"expected an object with messages, with prompt and completion, or with {text}"


def _is_talk(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in value)


def _conversation(example: Mapping[str, Any]) -> list[Any]:
    """Return the messages of an example; none of one that is text."""
    if isinstance(messages := example.get("messages"), list):
        return messages
    parts = [example.get(name) for name in ("prompt", "completion")]
    return [message for part in parts if isinstance(part, list) for message in part]


def check_template(tokenizer: Any, example: Mapping[str, Any] | None, training: Any) -> None:
    """Check that a tokenizer's chat template can say a conversation, and tells an assistant's words where it must.

    `example` is of text or None where none is a conversation; `training` is TRL's `SFTConfig`. Raises RefusedError.
    """
    path, template = training.chat_template_path, tokenizer.chat_template
    if path is not None:
        if not path.endswith((".jinja", ".j2")):
            return  # of another model, whose tokenizer TRL loads
        if not os.path.exists(path):
            raise RefusedError(f"there is no chat template {path}; correct --chat_template_path")
        template = attempt(Path(path).read_text, f"{path} cannot be read", "correct --chat_template_path")
    if example is None or not _conversation(example):
        if training.assistant_only_loss:
            raise RefusedError("--assistant_only_loss needs messages, which no line has; leave it out")
        return
    if template is None:
        raise RefusedError("the tokenizer has no chat template for messages; name one with --chat_template_path")
    attempt(
        lambda: tokenizer.apply_chat_template(_conversation(example), chat_template=template, tokenize=False),
        "the chat template cannot say the first conversation",
        "correct the messages, or name another one with --chat_template_path",
    )
    if training.assistant_only_loss and not has_generation_markers(template):
        attempt(
            lambda: get_training_chat_template(tokenizer),
            "the chat template does not mark what the assistant says, which --assistant_only_loss needs",
            "add {% generation %} to it, or leave the option out",
        )
