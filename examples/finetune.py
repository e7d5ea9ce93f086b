"""Full fine-tuning of a causal language model on JSON lines, with TRL's SFTTrainer and superadam.

    pip install "superadam[finetune]"
    python examples/finetune.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name data.jsonl --output_dir out

A line has `messages`, `prompt` and `completion`, or `text`. Everything else is an option of TRL's SFTConfig,
ModelConfig and ScriptArguments, on the command line or in a YAML file (--config): assistant-only loss, packing,
evaluation, schedules, report_to, checkpoints, and --resume_from_checkpoint. `--optimizer adamw` trains with torch's
AdamW instead.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

try:
    import transformers
    from datasets import DatasetDict, load_dataset
    from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser
except ImportError as error:
    sys.exit(f'finetune.py cannot be run ({error}); pip install "superadam[finetune]"')

from superadam.integrations.transformers import offload


@dataclass
class FineTuning:
    """What is not TRL's own."""

    optimizer: str = field(default="superadam", metadata={"choices": ["superadam", "adamw"], "help": "which AdamW"})
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
    if not arguments.random_weights:
        return transformers.AutoModelForCausalLM.from_pretrained(model.model_name_or_path, **options)
    transformers.set_seed(training.seed)
    config = transformers.AutoConfig.from_pretrained(model.model_name_or_path)
    return transformers.AutoModelForCausalLM.from_config(config, **options)


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
    arguments, script, training, model = parser.parse_args_and_config()
    if not script.dataset_name or not model.model_name_or_path:
        parser.error("say what to train and on what: --model_name_or_path and --dataset_name")
    dataset = examples_of(script, evaluates=training.eval_strategy != "no")
    trainer = SFTTrainer(
        model_of(model, arguments, training),
        training,
        train_dataset=dataset[script.dataset_train_split],
        eval_dataset=dataset.get(script.dataset_test_split) if training.eval_strategy != "no" else None,
        processing_class=transformers.AutoTokenizer.from_pretrained(model.model_name_or_path),
    )
    if arguments.optimizer == "superadam":
        offload(trainer)
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    if trainer.is_fsdp_enabled:  # of shards nothing would be saved
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    if trainer.is_world_process_zero():
        report(trainer)


if __name__ == "__main__":
    main()
