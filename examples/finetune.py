"""Full fine-tuning of a causal language model on JSON lines, with TRL's SFTTrainer and superadam.

    pip install "superadam[finetune]"
    python examples/finetune.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name data.jsonl --output_dir out

A line has `messages`, `prompt` and `completion`, or `text`. Everything else is an option of TRL's SFTConfig,
ModelConfig and ScriptArguments, on the command line or in a YAML file (--config): assistant-only loss, packing,
evaluation, schedules, report_to, checkpoints, and --resume_from_checkpoint, also with `auto`: from the newest whole
checkpoint in the output folder, or from the start. `--optimizer adamw` trains with torch's AdamW instead.
examples/presets/ has such files for published models of 8 to 70 billion parameters.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed.fsdp import MixedPrecisionPolicy

try:
    import transformers
    from datasets import DatasetDict, load_dataset
    from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser
except ImportError as error:
    sys.exit(f'finetune.py cannot be run ({error}); pip install "superadam[finetune]"')

from superadam.integrations import distributed_checkpoint
from superadam.integrations.planned_memory import check_memory
from superadam.integrations.transformers import offload
from superadam.plan.memory import Setting


@dataclass
class FineTuning:
    """What is not TRL's own."""

    optimizer: str = field(default="superadam", metadata={"choices": ["superadam", "adamw"], "help": "which AdamW"})
    moments: str = field(default="fp32", metadata={"choices": ["fp32", "bf16", "8bit"], "help": "how they are stored"})
    master: str = field(default="fp32", metadata={"choices": ["fp32", "24bit"], "help": "how masters are stored"})
    random_weights: bool = field(default=False, metadata={"help": "train a configuration from scratch, to try it out"})


def examples_of(script: ScriptArguments, *, evaluates: bool) -> Any:
    """Return the splits: of JSON lines in a file or a folder with train.jsonl (and test.jsonl), or of the hub."""
    path = Path(script.dataset_name or "")
    if path.is_file():
        files = {script.dataset_train_split: str(path)}
    else:
        found = {split: path / f"{split}.jsonl" for split in (script.dataset_train_split, script.dataset_test_split)}
        files = {split: str(one) for split, one in found.items() if one.is_file()}
    if files:
        dataset = load_dataset("json", data_files=files)
    else:
        dataset = load_dataset(script.dataset_name, name=script.dataset_config)
    assert isinstance(dataset, DatasetDict)
    if evaluates and script.dataset_test_split not in dataset:
        sys.exit(f"finetune.py: there is no {script.dataset_test_split}.jsonl to evaluate on; set --eval_strategy no")
    return dataset


def model_of(model: ModelConfig, arguments: FineTuning, training: SFTConfig) -> Any:
    """Return the model, loaded or with random weights, in the dtype that was asked for."""
    dtype = model.dtype if model.dtype in (None, "auto") else getattr(torch, model.dtype)
    options = {"dtype": dtype, "attn_implementation": model.attn_implementation}
    config = transformers.AutoConfig.from_pretrained(model.model_name_or_path)
    if not arguments.random_weights:
        if hasattr(config, "quantization_config"):
            config.quantization_config["dequantize"] = True  # the 4 bits of GPT-OSS cannot be trained
        return transformers.AutoModelForCausalLM.from_pretrained(model.model_name_or_path, config=config, **options)
    transformers.set_seed(training.seed)
    return transformers.AutoModelForCausalLM.from_config(config, **options)


def check(model: ModelConfig, arguments: FineTuning, training: SFTConfig) -> None:
    """End the program where a GPU or the host cannot hold the run, before weights are loaded."""
    if arguments.optimizer != "superadam" or model.use_peft or training.device.type != "cuda":
        return
    setting = Setting(
        sequences=training.per_device_train_batch_size,
        tokens=training.max_length or 1024,
        micro_batches=training.gradient_accumulation_steps,
        ranks=training.world_size,
        loss="chunked" if "nll" in training.loss_type else "full",
        moments=arguments.moments,
        master=arguments.master,
        checkpointing=training.gradient_checkpointing,
    )
    config = transformers.AutoConfig.from_pretrained(model.model_name_or_path)
    try:
        check_memory(config, setting, torch.cuda.mem_get_info(training.device)[1])
    except MemoryError as error:
        sys.exit(f"finetune.py: {error}")


def is_whole(checkpoint: Path) -> bool:
    """Whether a save of the Trainer has ended: the file that it writes last is there and complete."""
    try:
        return bool(json.loads((checkpoint / "trainer_state.json").read_text()))
    except (OSError, ValueError):
        return False


def start_of(training: SFTConfig) -> str | None:
    """Return the checkpoint to continue from, or None to start: of the output folder, for `auto`.

    Ends the program where a start would mix with the checkpoints of another run, or ranks do not share the folder.
    """
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
    if torch.cuda.is_available():
        peaks += f", GPU {torch.cuda.max_memory_allocated() / 1e9:.2f} GB"
    print(f"peak memory: {peaks}; {tokens / max(last['train_runtime'], 1e-9):,.0f} tokens/s")
    if "superadam_committed" in last:
        counts = ", ".join(f"{last[f'superadam_{name}']} {name}" for name in ("committed", "clipped", "skipped"))
        print(f"steps: {counts}; hidden: {last['superadam_hidden_share']:.0%} of the optimizer's work")


def main() -> None:
    """Train, and save the model and its tokenizer."""
    parser = TrlParser((FineTuning, ScriptArguments, SFTConfig, ModelConfig))
    parser.set_defaults(dtype="bfloat16", bf16=False)  # masters are fp32 on the host; autocast would add fp32 copies
    try:
        arguments, script, training, model = parser.parse_args_and_config()
    except DistError as error:  # on every rank, which TRL lets meet here; one of each node tells
        reason = str(error).partition("\n")[0]
        told = f"finetune.py: the ranks could not meet ({reason}); start all of them with one torchrun command"
        sys.exit(told if os.environ.get("LOCAL_RANK", "0") == "0" else 1)
    if not script.dataset_name or not model.model_name_or_path:
        parser.error("say what to train and on what: --model_name_or_path and --dataset_name")
    dataset = examples_of(script, evaluates=training.eval_strategy != "no")
    start = start_of(training)
    check(model, arguments, training)
    trainer = SFTTrainer(
        model_of(model, arguments, training),
        training,
        train_dataset=dataset[script.dataset_train_split],
        eval_dataset=dataset.get(script.dataset_test_split) if training.eval_strategy != "no" else None,
        processing_class=transformers.AutoTokenizer.from_pretrained(model.model_name_or_path),
    )
    if arguments.optimizer == "superadam":
        offload(trainer, moments=arguments.moments, master=arguments.master)
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if plugin and plugin.mixed_precision_policy is None:  # without bf16: true
        plugin.mixed_precision_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    trainer.train(resume_from_checkpoint=start)
    if plugin:
        plugin.set_state_dict_type("FULL_STATE_DICT")  # of shards, save_model() would save nothing
    trainer.save_model()
    if trainer.is_world_process_zero():
        report(trainer)


if __name__ == "__main__":
    main()
