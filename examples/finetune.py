"""Full fine-tuning of a causal language model on JSON lines, with TRL's SFTTrainer and superadam.

    pip install '.[finetune]'
    python examples/finetune.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name data.jsonl --output_dir out

A line has `messages`, `prompt` and `completion`, or `text`. Everything else is an option of TRL's SFTConfig,
ModelConfig and ScriptArguments, on the command line or in a YAML file (--config): assistant-only loss, packing,
evaluation, schedules, report_to, checkpoints, and --resume_from_checkpoint, also with `auto`: from the newest whole
checkpoint in the output folder, or from the start. `--optimizer adamw` trains with torch's AdamW instead. SIGTERM
saves a checkpoint and ends with 143; no final model is written then. What cannot be done is told in a sentence before
anything is loaded. examples/presets/ has such files for published models of 8 to 70 billion parameters; `--rehearse`
tries a run of theirs on CPUs, with a small model of the same kind and all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

try:
    import transformers
    from datasets import load_dataset
    from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer
except ImportError as error:
    sys.exit(f'finetune.py cannot be run ({error}); in the clone: pip install ".[finetune]"')

from superadam.integrations import distributed_checkpoint, rehearsal
from superadam.integrations.planned_memory import check_memory, setting_of
from superadam.integrations.stopping import SavesOnSignal, train_to_last_step
from superadam.integrations.transformers import offload

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
import finetune_options
from finetune_options import RefusedError, attempt


@dataclass
class FineTuning:
    """What is not TRL's own."""

    optimizer: str = field(default="superadam", metadata={"choices": ["superadam", "adamw"], "help": "which AdamW"})
    moments: str = field(default="fp32", metadata={"choices": ["fp32", "bf16", "8bit"], "help": "how they are stored"})
    master: str = field(default="fp32", metadata={"choices": ["fp32", "24bit"], "help": "how masters are stored"})
    random_weights: bool = field(default=False, metadata={"help": "train a configuration from scratch, to try it out"})
    rehearse: bool = field(default=False, metadata={"help": "a few steps of a small such model, on CPUs"})


def check_folders(script: ScriptArguments, training: SFTConfig, model: ModelConfig) -> None:
    """Refuse files and folders that were named and are not there or not usable; make none."""
    path, output = Path(script.dataset_name), Path(training.output_dir).absolute()
    if path.suffix in (".jsonl", ".json") and not path.is_file():
        raise RefusedError(f"there is no file {path}; correct --dataset_name")
    if (weights := Path(model.model_name_or_path)).exists() and not (weights / "config.json").is_file():
        raise RefusedError(f"{weights} has no config.json; correct --model_name_or_path")
    there = next(folder for folder in (output, *output.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RefusedError(f"{training.output_dir} cannot be written to; choose another --output_dir")
    if (resume := training.resume_from_checkpoint) not in (None, "auto") and not is_whole(Path(resume)):
        raise RefusedError(f"{resume} is no whole checkpoint; name one, or --resume_from_checkpoint auto")


def files_of(script: ScriptArguments, *, evaluates: bool) -> dict[str, str]:
    """Return the files of the splits: one of JSON lines, or those of a folder; none for a dataset of the hub."""
    path, train, test = Path(script.dataset_name), script.dataset_train_split, script.dataset_test_split
    if path.is_file():
        files = {train: str(path)}
    else:
        files = {split: str(path / f"{split}.jsonl") for split in (train, test) if (path / f"{split}.jsonl").is_file()}
    if path.is_dir() and train not in files:
        raise RefusedError(f"{path} has no {train}.jsonl; correct --dataset_name")
    if path.exists() and evaluates and test not in files:
        raise RefusedError(f"there is no {test}.jsonl to evaluate on; set --eval_strategy no")
    return files


def model_of(config: Any, place: dict[str, Any], model: ModelConfig, arguments: FineTuning, training: SFTConfig) -> Any:
    """Return the model, loaded or with random weights, in the dtype that was asked for."""
    dtype = model.dtype if model.dtype in (None, "auto") else getattr(torch, model.dtype)
    options = {"dtype": dtype, "attn_implementation": model.attn_implementation}
    if not arguments.random_weights and not arguments.rehearse:
        if hasattr(config, "quantization_config"):
            config.quantization_config["dequantize"] = True  # the 4 bits of GPT-OSS cannot be trained
        return transformers.AutoModelForCausalLM.from_pretrained(**place, config=config, **options)
    transformers.set_seed(training.seed)
    return transformers.AutoModelForCausalLM.from_config(config, **options)


def is_whole(checkpoint: Path) -> bool:
    """Whether a save of the Trainer has ended: the file that it writes last is there and complete."""
    try:
        return bool(json.loads((checkpoint / "trainer_state.json").read_text()))
    except (OSError, ValueError):
        return False


def start_of(training: SFTConfig) -> str | None:
    """Return the checkpoint to continue from, if any; refuse where runs would mix or ranks share no folder."""
    folder, resume = Path(training.output_dir), training.resume_from_checkpoint
    if training.world_size > 1 and not training.save_on_each_node:
        distributed_checkpoint.latest(folder)  # it has none of these, but looks whether ranks share it
    numbered = [path for path in folder.glob("checkpoint-*") if path.name.partition("-")[2].isdecimal()]
    newest = max(filter(is_whole, numbered), key=lambda path: int(path.name.partition("-")[2]), default=None)
    if newest is not None and resume is None:
        advice = "continue it with --resume_from_checkpoint auto, or choose another --output_dir"
        raise RefusedError(f"{newest} is of another run; {advice}")
    start = newest if resume == "auto" or resume is None else Path(resume)
    if start is not None and not (start / "scheduler.pt").is_file():  # --save_only_model
        advice = "name it as --model_name_or_path, and choose another --output_dir"
        raise RefusedError(f"{start} holds a model alone, with which no run goes on as it was; {advice}")
    return None if start is None else str(start)


def report(trainer: SFTTrainer) -> None:
    """Print what the run took, and what the optimizer did."""
    history = trainer.state.log_history
    last = history[-1]
    tokens = next(filter(None, (log.get("num_tokens", log.get("eval_num_tokens")) for log in reversed(history))), 0)
    peaks = f"host {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024e-9:.2f} GB"
    peaks += f", GPU {torch.cuda.max_memory_allocated() / 1e9:.2f} GB" if torch.cuda.is_available() else ""
    rate = f"; {tokens / max(last['train_runtime'], 1e-9):,.0f} tokens/s" if tokens else ""
    print(f"peak memory: {peaks}{rate}")
    if "superadam_committed" in last:
        done, clipped, skipped = (last[f"superadam_{name}"] for name in ("committed", "clipped", "skipped"))
        counts = f"{done + clipped} applied, {f'{clipped} of them clipped, ' * (clipped > 0)}{skipped} skipped"
        print(f"steps: {counts}; hidden: {last['superadam_hidden_share']:.0%} of the optimizer's work")


def train() -> None:
    """Check all that was asked for, train, and save the model and its tokenizer."""
    # Masters are fp32 on the host; autocast would add fp32 copies. SIGTERM, as of a preemption, saves.
    defaults = {"dtype": "bfloat16", "bf16": False, "activation_checkpointing": True, "enable_jit_checkpoint": True}
    classes = (FineTuning, ScriptArguments, SFTConfig, ModelConfig)
    (arguments, script, training, model), given = finetune_options.parse(classes, sys.argv[1:], **defaults)
    is_ours, evaluates = arguments.optimizer == "superadam", training.eval_strategy != "no"
    if not script.dataset_name or not model.model_name_or_path:
        raise RefusedError("say what to train and on what, with --model_name_or_path and --dataset_name")
    finetune_options.check_options((script, training, model), given, superadam=is_ours)
    if not is_ours and {"moments", "master"} & given.keys():
        raise RefusedError("--moments and --master are superadam's; leave them out, or --optimizer adamw")
    finetune_options.check_ranks(training, superadam=is_ours, rehearses=arguments.rehearse)
    finetune_options.check_schedule(training)
    check_folders(script, training, model)
    saves_on_signal, training.enable_jit_checkpoint = training.enable_jit_checkpoint, False  # on all ranks together
    files, column = files_of(script, evaluates=evaluates), training.dataset_text_field
    examples = [finetune_options.check_lines(file, column) for file in files.values()]
    start = start_of(training)
    revision = {"revision": model.model_revision, "trust_remote_code": training.trust_remote_code}
    place = {"pretrained_model_name_or_path": model.model_name_or_path, **revision}
    there = f"{model.model_name_or_path} cannot be used", "correct --model_name_or_path"
    config = attempt(lambda: transformers.AutoConfig.from_pretrained(**place), *there)
    tokenizer = attempt(lambda: transformers.AutoTokenizer.from_pretrained(**place), *there)
    if files:
        finetune_options.check_template(tokenizer, next(filter(None, examples), None), training)
    if arguments.rehearse:
        config = finetune_options.small(config, len(tokenizer))
    if is_ours and training.device.type == "cuda":
        setting = setting_of(training, arguments.moments, arguments.master)
        check_memory(config, setting, torch.cuda.mem_get_info(training.device)[1])
    source: dict[str, Any] = {"path": "json", "data_files": files} if files else {"path": script.dataset_name}
    dataset = attempt(
        lambda: load_dataset(**source, name=None if files else script.dataset_config),
        f"{script.dataset_name} cannot be read as a table",
        "correct it, or --dataset_name",
    )
    if missing := {script.dataset_train_split, *([script.dataset_test_split] if evaluates else [])} - {*dataset}:
        raise RefusedError(f"{script.dataset_name} has no split {min(missing)}, but {', '.join(dataset)}; name another")
    if not files:
        finetune_options.check_template(tokenizer, dataset[script.dataset_train_split][0], training)
    if arguments.rehearse:
        rehearsal.shard_on_cpus()
    loaded = attempt(lambda: model_of(config, place, model, arguments, training), *there)
    trainer = attempt(
        lambda: SFTTrainer(
            loaded,
            training,
            train_dataset=dataset[script.dataset_train_split],
            eval_dataset=dataset[script.dataset_test_split] if evaluates else None,
            processing_class=tokenizer,
        ),
        "TRL cannot train with these options",
        "correct them",
    )
    if is_ours:
        offload(trainer, moments=arguments.moments, master=arguments.master)
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if plugin and plugin.mixed_precision_policy is None:  # without bf16: true
        plugin.mixed_precision_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    with SavesOnSignal(trainer) if saves_on_signal else contextlib.nullcontext() as stop:
        train_to_last_step(trainer, start)
    if stop is not None and stop.has_stopped:
        sys.exit(128 + signal.SIGTERM)  # the checkpoint was saved; the model is not finished
    if plugin:
        plugin.set_state_dict_type("FULL_STATE_DICT")  # of shards, save_model() would save nothing
    trainer.save_model()
    if trainer.is_world_process_zero():
        report(trainer)


def main() -> None:
    """Train; end the program with one sentence where that cannot be done."""
    finetune_options.run(train)


if __name__ == "__main__":
    main()
