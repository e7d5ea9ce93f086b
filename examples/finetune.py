"""Full fine-tuning of a causal language model on JSON lines, with TRL's SFTTrainer and superadam.

    pip install "superadam[finetune]"
    python examples/finetune.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name data.jsonl --output_dir out

A line has `messages`, `prompt` and `completion`, or `text`. Everything else is an option of TRL's SFTConfig,
ModelConfig and ScriptArguments, on the command line or in a YAML file (--config): assistant-only loss, packing,
evaluation, schedules, report_to, checkpoints, and --resume_from_checkpoint, also with `auto`: from the newest whole
checkpoint in the output folder, or from the start. `--optimizer adamw` trains with torch's AdamW instead. SIGTERM
saves a checkpoint and ends with 143; no final model is written then.
examples/presets/ has such files for published models of 8 to 70 billion parameters.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed.fsdp import MixedPrecisionPolicy

try:
    import transformers
    from datasets import load_dataset
    from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser
except ImportError as error:
    sys.exit(f'finetune.py cannot be run ({error}); pip install "superadam[finetune]"')

from superadam.integrations import distributed_checkpoint
from superadam.integrations.planned_memory import check_memory, setting_of
from superadam.integrations.transformers import offload


@dataclass
class FineTuning:
    """What is not TRL's own."""

    optimizer: str = field(default="superadam", metadata={"choices": ["superadam", "adamw"], "help": "which AdamW"})
    moments: str = field(default="fp32", metadata={"choices": ["fp32", "bf16", "8bit"], "help": "how they are stored"})
    master: str = field(default="fp32", metadata={"choices": ["fp32", "24bit"], "help": "how masters are stored"})
    random_weights: bool = field(default=False, metadata={"help": "train a configuration from scratch, to try it out"})


OBEYED = {"model_name_or_path", "model_revision", "dtype", "attn_implementation"}  # of TRL's ModelConfig


def refuse(arguments: FineTuning, script: ScriptArguments, training: SFTConfig, model: ModelConfig) -> None:
    """End the program where an option was given that would be parsed and not be obeyed."""
    given = {one.name for one in fields(model) if getattr(model, one.name) != one.default} - OBEYED
    given |= {name for name in ("dataset_streaming", "ignore_bias_buffers") if getattr(script, name)}
    given |= {"model_init_kwargs"} if training.model_init_kwargs else set()
    if given:
        sys.exit(f"finetune.py: --{min(given)} is not obeyed, all weights are trained as they are; leave it out")
    if arguments.optimizer == "adamw" and (arguments.moments, arguments.master) != ("fp32", "fp32"):
        sys.exit("finetune.py: --moments and --master are superadam's; leave them out, or --optimizer adamw")


def check_lines(path: str) -> None:
    """End the program where a line is none of the three kinds, before the model is loaded."""
    kinds, number = ({"messages"}, {"prompt", "completion"}, {"text"}), 0
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007 - told below
                value = json.loads(line) if line.strip() else {"text": ""}
                if not (isinstance(value, dict) and any(kind <= value.keys() for kind in kinds)):
                    raise ValueError("expected an object with messages, with prompt and completion, or with text")
    except (OSError, ValueError) as error:
        sys.exit(f"finetune.py: line {number} of {path}: {getattr(error, 'msg', error)}; correct it")


def check_folders(script: ScriptArguments, training: SFTConfig, model: ModelConfig) -> None:
    """End the program where a file or folder that was named is not there or not usable."""
    path, output = Path(script.dataset_name), Path(training.output_dir)
    if path.suffix in (".jsonl", ".json") and not path.is_file():
        sys.exit(f"finetune.py: there is no file {path}; correct --dataset_name")
    if (weights := Path(model.model_name_or_path)).exists() and not (weights / "config.json").is_file():
        sys.exit(f"finetune.py: {weights} has no config.json; correct --model_name_or_path")
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not os.access(output, os.W_OK):
            raise PermissionError("it is read-only")
    except OSError as error:
        sys.exit(f"finetune.py: {output} cannot be written to ({error}); choose another --output_dir")
    if (resume := training.resume_from_checkpoint) not in (None, "auto") and not is_whole(Path(resume)):
        sys.exit(f"finetune.py: {resume} is no whole checkpoint; name one, or --resume_from_checkpoint auto")


def examples_of(script: ScriptArguments, *, evaluates: bool) -> Any:
    """Return the splits: of JSON lines in a file or a folder with train.jsonl (and test.jsonl), or of the hub."""
    path = Path(script.dataset_name or "")
    if path.is_file():
        files = {script.dataset_train_split: str(path)}
    else:
        found = {split: path / f"{split}.jsonl" for split in (script.dataset_train_split, script.dataset_test_split)}
        files = {split: str(one) for split, one in found.items() if one.is_file()}
    if files:
        for file in files.values():
            check_lines(file)
        dataset = load_dataset("json", data_files=files)
    elif path.is_dir():
        sys.exit(f"finetune.py: {path} has no {script.dataset_train_split}.jsonl; correct --dataset_name")
    else:
        dataset = load_dataset(script.dataset_name, name=script.dataset_config)
    if evaluates and script.dataset_test_split not in dataset:
        sys.exit(f"finetune.py: there is no {script.dataset_test_split}.jsonl to evaluate on; set --eval_strategy no")
    return dataset


def model_of(config: Any, place: dict[str, Any], model: ModelConfig, arguments: FineTuning, training: SFTConfig) -> Any:
    """Return the model, loaded or with random weights, in the dtype that was asked for."""
    dtype = model.dtype if model.dtype in (None, "auto") else getattr(torch, model.dtype)
    options = {"dtype": dtype, "attn_implementation": model.attn_implementation}
    if not arguments.random_weights:
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
    """Return the checkpoint to continue from, if any; end the program where runs would mix or ranks share no folder."""
    folder, resume = Path(training.output_dir), training.resume_from_checkpoint
    if training.world_size > 1 and not training.save_on_each_node:
        try:
            distributed_checkpoint.latest(folder)  # it has none of these, but looks whether ranks share it
        except distributed_checkpoint.CheckpointError as error:
            sys.exit(f"finetune.py: {error}")
    numbered = [path for path in folder.glob("checkpoint-*") if path.name.partition("-")[2].isdecimal()]
    newest = max(filter(is_whole, numbered), key=lambda path: int(path.name.partition("-")[2]), default=None)
    if resume == "auto":
        return None if newest is None else str(newest)
    if newest is not None and resume is None:
        advice = "continue it with --resume_from_checkpoint auto, or choose another --output_dir"
        sys.exit(f"finetune.py: {newest} is of another run; {advice}")
    return str(resume) if resume is not None else None


def report(trainer: SFTTrainer) -> None:
    """Print what the run took, and what the optimizer did."""
    history = trainer.state.log_history
    last = history[-1]
    tokens = max((entry.get("num_tokens", 0) for entry in history), default=0)
    peaks = f"host {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB"
    peaks += f", GPU {torch.cuda.max_memory_allocated() / 1e9:.2f} GB" if torch.cuda.is_available() else ""
    print(f"peak memory: {peaks}; {tokens / max(last['train_runtime'], 1e-9):,.0f} tokens/s")
    if "superadam_committed" in last:
        done, clipped, skipped = (last[f"superadam_{name}"] for name in ("committed", "clipped", "skipped"))
        counts = f"{done + clipped} applied, {clipped} of them clipped, {skipped} skipped"
        print(f"steps: {counts}; hidden: {last['superadam_hidden_share']:.0%} of the optimizer's work")


def main() -> None:
    """Train, and save the model and its tokenizer."""
    parser = TrlParser((FineTuning, ScriptArguments, SFTConfig, ModelConfig))
    # Masters are fp32 on the host; autocast would add fp32 copies. SIGTERM, as of a preemption, saves.
    parser.set_defaults(dtype="bfloat16", bf16=False, enable_jit_checkpoint=True)
    for word, name in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        if word == "--config" and not Path(name).is_file():
            sys.exit(f"finetune.py: there is no preset {name or 'named'}; examples/presets/ has some")
    try:
        arguments, script, training, model = parser.parse_args_and_config()
    except DistError as error:  # on every rank, which TRL lets meet here; one of each node tells
        reason = str(error).partition("\n")[0]
        told = f"finetune.py: the ranks could not meet ({reason}); start all of them with one torchrun command"
        sys.exit(told if os.environ.get("LOCAL_RANK", "0") == "0" else 1)
    if not script.dataset_name or not model.model_name_or_path:
        sys.exit("finetune.py: say what to train and on what, with --model_name_or_path and --dataset_name")
    refuse(arguments, script, training, model)
    check_folders(script, training, model)
    dataset = examples_of(script, evaluates=training.eval_strategy != "no")
    start = start_of(training)
    revision = {"revision": model.model_revision, "trust_remote_code": training.trust_remote_code}
    place = {"pretrained_model_name_or_path": model.model_name_or_path, **revision}
    config = transformers.AutoConfig.from_pretrained(**place)
    if arguments.optimizer == "superadam" and training.device.type == "cuda":
        setting = setting_of(training, arguments.moments, arguments.master)
        try:
            check_memory(config, setting, torch.cuda.mem_get_info(training.device)[1])
        except MemoryError as error:
            sys.exit(f"finetune.py: {error}")
    trainer = SFTTrainer(
        model_of(config, place, model, arguments, training),
        training,
        train_dataset=dataset[script.dataset_train_split],
        eval_dataset=dataset.get(script.dataset_test_split) if training.eval_strategy != "no" else None,
        processing_class=transformers.AutoTokenizer.from_pretrained(**place),
    )
    if arguments.optimizer == "superadam":
        offload(trainer, moments=arguments.moments, master=arguments.master)
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if plugin and plugin.mixed_precision_policy is None:  # without bf16: true
        plugin.mixed_precision_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    trainer.train(resume_from_checkpoint=start)
    if trainer.control.should_training_stop and trainer.state.global_step < trainer.state.max_steps:
        sys.exit(128 + signal.SIGTERM)  # the checkpoint was saved; the model is not finished
    if plugin:
        plugin.set_state_dict_type("FULL_STATE_DICT")  # of shards, save_model() would save nothing
    trainer.save_model()
    if trainer.is_world_process_zero():
        report(trainer)


if __name__ == "__main__":
    main()
