"""Fine-tuning with TRL and PEFT, in their own loops and with `offload`: a scheduler changes no bit."""

import itertools
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from integrations.test_offload_trainer import QUIET, Examples, compare, norms
from integrations.test_offload_trainer import llama as small_llama
from peft import LoraConfig, get_peft_model
from support.frameworks import MARKS, dtypes
from support.presets import PRESETS, row
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser

pytestmark = [pytest.mark.slow, *MARKS]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FineTuning = runpy.run_path(str(EXAMPLES / "finetune.py"), run_name="finetune")["FineTuning"]

WORDS = 60
ADAPTERS = ["q_proj", "v_proj", "down_proj"]


def llama(dtype: torch.dtype) -> LlamaForCausalLM:
    return small_llama(dtype, vocab_size=64, hidden_size=32, intermediate_size=48)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(WORDS)} | {"<unk>": WORDS, "<pad>": WORDS + 1, "<eos>": WORDS + 2}
    words_alone = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    words_alone.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{name}_token": f"<{name}>" for name in ("unk", "pad", "eos")}
    return PreTrainedTokenizerFast(tokenizer_object=words_alone, **special)


def texts(first: int = 0, last: int = 10) -> list[str]:
    return [" ".join(f"w{(7 * i + 3 * j) % WORDS}" for j in range(first, last)) for i in range(14)]


def trainer_of(kind: type[Trainer], models: list[nn.Module], arguments: Any, data: Any, **options: Any) -> Trainer:
    from datasets import Dataset  # it looks at the environment, which `frameworks` prepares

    options = {"processing_class": tokenizer(), **options}
    return kind(*models, args=arguments, train_dataset=Dataset.from_dict(data), **options)


def adapted(base: torch.dtype, adapters: torch.dtype) -> nn.Module:
    """Return a frozen model with adapters; their second factors are not zero, so that all gradients are not."""
    config = LoraConfig(r=4, target_modules=ADAPTERS, task_type="CAUSAL_LM", init_lora_weights=False)
    model: nn.Module = get_peft_model(llama(base), config, autocast_adapter_dtype=adapters != base)
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {adapters}
    return model


def chosen(folder: Path, **options: Any) -> dict[str, Any]:
    """Return arguments; limits are such that some steps are clipped, but for adapters."""
    often = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "logging_steps": 1}
    return {"output_dir": str(folder), "bf16": False, "learning_rate": 1e-2, **QUIET, **often, **options}


def check(make: Callable[[], Trainer], dtype: torch.dtype) -> Trainer:
    """Check that `offload` changes no bit, in fp32 none of the stock Trainer either; return a Trainer with it."""
    trainer = compare(make, stock=dtype == torch.float32)
    assert dtype == torch.float32 or trainer.state.log_history[-1]["superadam_accepted"] > 0
    return trainer


def sft_trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    return trainer_of(SFTTrainer, [model], SFTConfig(**chosen(folder, **options)), {"text": texts()})


SIZES = {"vocab_size": 64, "pad_token_id": None, "max_position_embeddings": 32, "sliding_window": 4}
SIZES |= {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
SIZES |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}

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
    model = transformers.AutoModelForCausalLM.from_config(config(**SIZES | ARCHITECTURES[config]), dtype=torch.bfloat16)
    for norm in (model.model.layers[0].input_layernorm, model.model.layers[0].post_attention_layernorm):
        norm.requires_grad_(False)
    model.lm_head.forward = None  # a loss that does without whole logits does not call it
    calls = itertools.count(1)
    model.model.norm.weight.register_hook(lambda gradient: gradient * (math.nan if next(calls) == 4 else 1))
    return model


@pytest.mark.parametrize("config", ARCHITECTURES)
def test_architectures_of_presets(tmp_path, config):
    """With frozen parameters, experts in one tensor, dropout and losses of routers; some steps clipped, one skipped."""
    trainer = check(lambda: sft_trainer(spoiled(config), tmp_path, max_grad_norm=2.2), torch.bfloat16)
    found = norms(trainer.state.log_history)
    assert min(found) < 2.2 < max(found), found
    assert [math.isnan(norm) for norm in found] == [i == 3 for i in range(len(found))]


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    """They are what finetune.py reads, and the models that they name are those that were published."""
    preset = PRESETS[name]
    setting = preset.setting
    parser = TrlParser((FineTuning, ScriptArguments, SFTConfig, ModelConfig))
    path = EXAMPLES / "presets" / f"{name}.yaml"
    arguments, script, training, model = parser.parse_args_and_config(["--config", str(path), "--use_cpu"])
    assert name.removesuffix("-24gb") in model.model_name_or_path.lower()
    assert (arguments.moments, arguments.master) == (setting.moments, setting.master)
    assert script.dataset_name is None
    assert training.per_device_train_batch_size == setting.sequences
    assert training.gradient_accumulation_steps == setting.micro_batches
    assert (training.max_length, training.activation_checkpointing, training.loss_type) == (setting.tokens, True, "nll")
    assert (model.dtype, training.bf16, training.optim) == ("bfloat16", False, "adamw_torch_fused")
    assert row(name, preset) in (EXAMPLES.parent / "docs" / "presets.md").read_text()
    needs_launch = f"--config_file examples/presets/fsdp2.yaml --num_processes {setting.ranks} " in path.read_text()
    assert needs_launch is (setting.ranks > 1)


def test_presets_are_launched_with_fsdp2():
    launched = load_config_from_file(str(EXAMPLES / "presets" / "fsdp2.yaml"))
    assert (launched.distributed_type, launched.mixed_precision) == (DistributedType.FSDP, "no")
    assert launched.fsdp_config["fsdp_version"] == 2
    assert {path.stem for path in (EXAMPLES / "presets").iterdir()} == {*PRESETS, "fsdp2"}


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} <eos>"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %} {% endfor %}"
)


def sft_trainer_as_configured_by_default(dtype: torch.dtype, folder: Path) -> Trainer:
    """With checkpointing; of a model in fp32, with autocast to bf16."""
    return sft_trainer(llama(dtype), folder, bf16=dtype == torch.float32, max_grad_norm=2.5)


def trainer_with_adapters(dtype: torch.dtype, folder: Path) -> Trainer:
    """Adapters in fp32, also of a model in bf16."""
    arguments = TrainingArguments(**chosen(folder, gradient_accumulation_steps=2))
    return Trainer(adapted(dtype, torch.float32), arguments, train_dataset=Examples(14))


def sft_trainer_with_adapters(dtype: torch.dtype, folder: Path) -> Trainer:
    return sft_trainer(adapted(dtype, dtype), folder, gradient_accumulation_steps=2)


def sft_trainer_that_packs(dtype: torch.dtype, folder: Path) -> Trainer:
    """Several conversations to a sequence, and a loss over what the assistant says."""
    talks = zip(texts(0, 4), texts(4, 9), strict=True)
    messages = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in talks]
    words = tokenizer()
    words.chat_template = TEMPLATE
    arguments = SFTConfig(**chosen(folder, packing=True, max_length=24, assistant_only_loss=True, max_grad_norm=1.88))
    return trainer_of(SFTTrainer, [llama(dtype)], arguments, {"messages": messages}, processing_class=words)


def dpo_trainer(dtype: torch.dtype, folder: Path) -> Trainer:
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(**chosen(folder, max_length=24, max_grad_norm=0.95))
    pairs = {"prompt": texts(0, 4), "chosen": texts(4, 10), "rejected": texts(0, 5)}
    return trainer_of(DPOTrainer, [llama(dtype), llama(dtype)], arguments, pairs)


def grpo_trainer(dtype: torch.dtype, folder: Path) -> Trainer:
    """Generates between steps, with the weights of that time."""
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(words.split()))) for words in completions]

    llama(dtype).save_pretrained(folder / "model")
    sampled = {"num_generations": 2, "max_completion_length": 5, "num_iterations": 2, "max_steps": 6}
    arguments = GRPOConfig(**chosen(folder, **sampled, beta=0.1, max_grad_norm=1.8))
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    return trainer_of(GRPOTrainer, [model], arguments, {"prompt": texts()}, reward_funcs=reward)


OF_SFT = [sft_trainer_as_configured_by_default, sft_trainer_with_adapters, sft_trainer_that_packs]


@dtypes
@pytest.mark.parametrize("make", [*OF_SFT, trainer_with_adapters, dpo_trainer, grpo_trainer])
def test_offload(tmp_path, make, dtype):
    """The bits are those of the same optimizer without a scheduler; in fp32 also those of torch's."""
    check(lambda: make(dtype, tmp_path), torch.float32 if make is trainer_with_adapters else dtype)
