"""Fine-tuning with TRL and PEFT, in their own loops and with `offload`: a scheduler changes no bit."""

from __future__ import annotations

import itertools
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from integrations.test_offload_trainer import SCHEDULER, everything, without
from peft import LoraConfig, get_peft_model
from support.frameworks import Run, Training, adamw, assert_same, compare, dtypes, history
from support.presets import PRESETS
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser

from superadam.integrations.transformers import offload

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("one_torch_thread", "no_network"),
]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FineTuning = runpy.run_path(str(EXAMPLES / "finetune.py"), run_name="finetune")["FineTuning"]

WORDS = 60
ADAPTERS = ["q_proj", "v_proj", "down_proj"]


class Opening(TrainerCallback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_begin(self, *_: Any, model: nn.Module, optimizer: Any, **__: Any) -> None:
        self.run.open(optimizer.optimizer, model)


def llama(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes, **heads)).to(dtype)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(WORDS)} | {"<unk>": WORDS, "<pad>": WORDS + 1, "<eos>": WORDS + 2}
    words_alone = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    words_alone.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words_alone, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def texts() -> list[str]:
    return [" ".join(f"w{(7 * i + 3 * j) % WORDS}" for j in range(10)) for i in range(14)]


def adapted(base: torch.dtype, adapters: torch.dtype) -> nn.Module:
    """Return a frozen model with adapters; their second factors are not zero, so that all gradients are not."""
    config = LoraConfig(r=4, target_modules=ADAPTERS, task_type="CAUSAL_LM", init_lora_weights=False)
    model: nn.Module = get_peft_model(llama(base), config, autocast_adapter_dtype=adapters != base)
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {adapters}
    return model


def trained(trainer: Trainer, run: Run) -> None:
    """Train with a scheduler that is opened when training begins."""
    trainer.add_callback(Opening(run))
    trainer.train()
    run.logged += history(trainer.state.log_history)


QUIET = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
OFTEN = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "logging_steps": 1}


def fine_tuned(folder: Path, make: Any, **arguments: Any) -> Training:
    """Return supervised fine-tuning as TRL does it, of what `make` returns."""
    from datasets import Dataset  # it looks at the environment, which `frameworks` prepares

    def train(run: Run) -> None:
        model = make()
        chosen = SFTConfig(str(folder), **{"bf16": False, "max_grad_norm": 2.5, **QUIET, **OFTEN, **arguments})
        data = Dataset.from_dict({"text": texts()})
        optimizers = (adamw(model), None)
        trained(SFTTrainer(model, chosen, None, data, processing_class=tokenizer(), optimizers=optimizers), run)

    return train


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize("accumulation", [1, 2])
def test_sft(tmp_path: Path, dtype: torch.dtype, accumulation: int) -> None:
    compare(fine_tuned(tmp_path, lambda: llama(dtype), gradient_accumulation_steps=accumulation), dtype)


def test_sft_as_configured_by_default(tmp_path: Path) -> None:
    """With autocast to bf16 and checkpointing."""
    compare(fine_tuned(tmp_path, lambda: llama(torch.float32), bf16=True), torch.float32)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "pad_token_id": None,
}

ARCHITECTURES = {  # of examples/presets, which tie no weights
    transformers.LlamaConfig: {"tie_word_embeddings": True},
    transformers.Phi3Config: {},
    transformers.Qwen3Config: {},
    transformers.Qwen3MoeConfig: {},
    transformers.GptOssConfig: {},
    transformers.SeedOssConfig: {},
}


def spoiled(config: type[transformers.PreTrainedConfig]) -> nn.Module:
    """Return a small model whose first layer's norms are frozen, which has no logits, and NaN in the fourth step."""
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config(**SIZES | ARCHITECTURES[config]), dtype=torch.bfloat16
    )
    for norm in (model.model.layers[0].input_layernorm, model.model.layers[0].post_attention_layernorm):
        norm.requires_grad_(False)
    model.lm_head.forward = None  # a loss that does without whole logits does not call it
    calls = itertools.count(1)
    model.model.norm.weight.register_hook(lambda gradient: gradient * (math.nan if next(calls) == 4 else 1))
    return model


@pytest.mark.parametrize("config", ARCHITECTURES)
def test_architectures_of_presets(tmp_path: Path, config: type[transformers.PreTrainedConfig]) -> None:
    """With frozen parameters, experts in one tensor, dropout and losses of routers; some steps clipped, one skipped."""
    seen = compare(fine_tuned(tmp_path, lambda: spoiled(config), max_grad_norm=2.2, num_train_epochs=1))
    norms = [float(value) for name, value in seen.items() if name.endswith("grad_norm")]
    assert min(norms) < 2.2 < max(norms), norms
    assert [math.isnan(norm) for norm in norms] == [i == 3 for i in range(len(norms))]


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    """They are what finetune.py reads, and the models that they name are those that were published."""
    preset = PRESETS[name]
    parser = TrlParser((FineTuning, ScriptArguments, SFTConfig, ModelConfig))
    path = EXAMPLES / "presets" / f"{name}.yaml"
    _, script, training, model = parser.parse_args_and_config(["--config", str(path), "--use_cpu"])
    assert sum(parameter.numel() for parameter in preset.model().parameters()) == preset.parameters
    assert name in model.model_name_or_path.lower()
    assert script.dataset_name is None
    assert training.per_device_train_batch_size * training.gradient_accumulation_steps * preset.gpus == 4
    assert (training.max_length, training.gradient_checkpointing, training.loss_type) == (preset.sequence, True, "nll")
    assert (model.dtype, training.bf16, training.optim) == ("bfloat16", False, "adamw_torch_fused")
    assert preset.row(name) in (EXAMPLES.parent / "docs" / "presets.md").read_text()
    needs_launch = f"--config_file examples/presets/fsdp2.yaml --num_processes {preset.gpus} " in path.read_text()
    assert needs_launch is (preset.gpus > 1)


def test_presets_are_launched_with_fsdp2() -> None:
    launched = load_config_from_file(str(EXAMPLES / "presets" / "fsdp2.yaml"))
    assert (launched.distributed_type, launched.mixed_precision) == (DistributedType.FSDP, "no")
    assert launched.fsdp_config["fsdp_version"] == 2
    assert {path.stem for path in (EXAMPLES / "presets").iterdir()} == {*PRESETS, "fsdp2"}


PAIRS = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)]
pairs = pytest.mark.parametrize(("base", "adapters"), PAIRS, ids=["bf16", "bf16-fp32", "fp32"])


@pairs
def test_sft_of_adapters(tmp_path: Path, base: torch.dtype, adapters: torch.dtype) -> None:
    compare(fine_tuned(tmp_path, lambda: adapted(base, adapters)), adapters)


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.tokens = torch.tensor([tokenizer()(text)["input_ids"] for text in texts()])

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


@pairs
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_with_adapters(
    tmp_path: Path, base: torch.dtype, adapters: torch.dtype, accumulation: int, checkpointing: bool
) -> None:
    def train(run: Run) -> None:
        model = adapted(base, adapters)
        steps = {"gradient_accumulation_steps": accumulation, "gradient_checkpointing": checkpointing}
        arguments = TrainingArguments(str(tmp_path), **{**QUIET, **OFTEN, **steps})
        trained(Trainer(model, arguments, train_dataset=Examples(), optimizers=(adamw(model), None)), run)

    compare(train, adapters)


# ---- with one line -----------------------------------------------------------------------------------------------


def chosen(folder: Path, **options: Any) -> dict[str, Any]:
    """Return arguments; limits are such that some steps are clipped, but for adapters."""
    fixed = {"output_dir": str(folder), "bf16": False, "learning_rate": 1e-2}
    return {**fixed, **QUIET, **OFTEN, "num_train_epochs": 1, **options}


def pieces(first: int, last: int) -> list[str]:
    return [" ".join(text.split()[first:last]) for text in texts()]


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} <eos>"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %} {% endfor %}"
)


def sft_trainer_with_adapters(dtype: torch.dtype, folder: Path) -> Trainer:
    from datasets import Dataset

    arguments = SFTConfig(**chosen(folder))
    data = Dataset.from_dict({"text": texts()})
    return SFTTrainer(adapted(dtype, dtype), arguments, None, data, processing_class=tokenizer())


def sft_trainer_that_packs(dtype: torch.dtype, folder: Path) -> Trainer:
    """Several conversations to a sequence, and a loss over what the assistant says."""
    from datasets import Dataset

    talks = zip(pieces(0, 4), pieces(4, 9), strict=True)
    messages = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in talks]
    words = tokenizer()
    words.chat_template = TEMPLATE
    arguments = SFTConfig(**chosen(folder, packing=True, max_length=24, assistant_only_loss=True, max_grad_norm=1.88))
    return SFTTrainer(llama(dtype), arguments, None, Dataset.from_dict({"messages": messages}), processing_class=words)


def dpo_trainer(dtype: torch.dtype, folder: Path) -> Trainer:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = {"prompt": pieces(0, 4), "chosen": pieces(4, 10), "rejected": pieces(0, 5)}
    return DPOTrainer(
        llama(dtype),
        llama(dtype),
        DPOConfig(**chosen(folder, max_length=24, max_grad_norm=0.95)),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer(),
    )


def grpo_trainer(dtype: torch.dtype, folder: Path) -> Trainer:
    """Generates between steps, with the weights of that time."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(words.split()))) for words in completions]

    llama(dtype).save_pretrained(folder / "model")
    sampled = {"num_generations": 2, "max_completion_length": 5, "num_iterations": 2, "max_steps": 6}
    return GRPOTrainer(
        LlamaForCausalLM.from_pretrained(folder / "model", dtype=dtype),
        reward_funcs=reward,
        args=GRPOConfig(**chosen(folder, **sampled, beta=0.1, max_grad_norm=1.8)),
        train_dataset=Dataset.from_dict({"prompt": texts()}),
        processing_class=tokenizer(),
    )


@dtypes
@pytest.mark.parametrize("make", [sft_trainer_with_adapters, sft_trainer_that_packs, dpo_trainer, grpo_trainer])
def test_offload(tmp_path: Path, make: Any, dtype: torch.dtype) -> None:
    """The bits are those of the same optimizer without a scheduler; in fp32 also those of torch's."""
    seen, accepted = [], 0
    for is_scheduled, is_stock in ((False, False), (True, False), (False, True))[: 3 if dtype == torch.float32 else 2]:
        trainer = make(dtype, tmp_path)
        if is_scheduled:
            offload(trainer, **SCHEDULER)
        elif not is_stock:
            without(trainer)
        trainer.train()
        seen.append(everything(trainer))
        accepted += trainer.state.log_history[-1].get("superadam_accepted", 0)
    assert_same(*seen[:2])
    if dtype == torch.float32:
        assert_same(seen[2], {name: value for name, value in seen[1].items() if name != "state"})
    else:
        assert accepted > 0
