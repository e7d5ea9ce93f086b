"""`superadam.integrations.transformers.offload`: one line, and any Trainer trains with the same bits as without it."""

import contextlib
import copy
import ctypes
import gc
import io
import math
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.children import exit_code_of_child, memory_of_process
from support.deep import DEEP
from support.frameworks import MARKS, VOCABULARY, Sentences, assert_same, dtypes
from support.visible import bits, state_bits
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from superadam import OffloadScheduler, SpeculativeCPUAdam, SpeculativeCPUAdamW
from superadam.integrations import transformers as integration
from superadam.integrations.stopping import SavesOnSignal, train_to_last_step
from superadam.integrations.transformers import offload

pytestmark = [pytest.mark.slow, *MARKS]

SCHEDULER = {"num_threads": 1, "bucket_numel": 500}
QUIET = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
PASSING = ("_runtime", "_per_second", "step_time", "train_loss")


class Examples(Dataset[dict[str, Tensor]]):
    """Five batches of two sentences, as language models of transformers take them."""

    def __init__(self, count: int = 10) -> None:
        self.sentences = Sentences(count, 20)

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.sentences[index]
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def llama(dtype: torch.dtype, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**{"num_hidden_layers": 2, **sizes, **heads, **options})).to(dtype)


def trainer_in(folder: Path, dtype: torch.dtype, *, model: dict[str, Any] | None = None, **options: Any) -> Trainer:
    callbacks = options.pop("callbacks", [])
    often = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "logging_steps": 1, "learning_rate": 1e-2}
    arguments = TrainingArguments(str(folder), **{**QUIET, **often, "weight_decay": 0.1, **options})
    data = {"train_dataset": Examples(), "eval_dataset": Examples(4)}
    return Trainer(llama(dtype, **(model or {})), arguments, **data, callbacks=callbacks)


def everything(trainer: Trainer) -> dict[str, Any]:
    """Return what training came to, without our counts, and without what depends on the time or on a resumption."""
    seen = {name: bits(parameter) for name, parameter in trainer.model.named_parameters()}
    for index, entry in enumerate(trainer.state.log_history):
        for name, value in entry.items():
            if not name.startswith("superadam_") and not name.endswith(PASSING):
                seen[f"log {index} {name}"] = repr(value)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if isinstance(optimizer, SpeculativeCPUAdam):
        seen["state"] = repr(state_bits(optimizer)["state"])
    return seen


def without(trainer: Trainer) -> Trainer:
    """Return a Trainer that has the same optimizer, and no scheduler."""
    offload(trainer)
    trainer.callback_handler.callbacks.pop(0)
    return trainer


def without_state(trainer: Trainer) -> dict[str, Any]:
    """Return what ours and the stock Trainer have in common."""
    return {name: value for name, value in everything(trainer).items() if name != "state"}


def train_with(trainer: Trainer, **options: Any) -> None:
    offload(trainer, **SCHEDULER, **options)
    trainer.train()


def compare(make: Callable[[], Trainer], *, plain=True, stock=False, drive=lambda one: one.train()) -> Trainer:
    """Check that `offload` changes no bit of what a Trainer, made anew each time, comes to; return the one with it.

    The others are one with our optimizer and without a scheduler (`plain`), and the stock Trainer (`stock`).
    """
    ours = make()
    offload(ours, **SCHEDULER)
    drive(ours)
    for is_wanted, prepare, seen in ((plain, without, everything), (stock, lambda one: one, without_state)):
        if is_wanted:
            drive(other := prepare(make()))
            assert_same(seen(other), seen(ours))
    return ours


def checkpointing(*, reentrant: bool) -> dict[str, Any]:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}


class Editing(TrainerCallback):
    def __init__(self, edit: Callable[[int, list[nn.Parameter]], None]) -> None:
        self.edit = edit

    def on_pre_optimizer_step(self, _: Any, state: TrainerState, *__: Any, model: nn.Module, **___: Any) -> None:
        self.edit(state.global_step, list(model.parameters()))


def poison(step: int, parameters: list[nn.Parameter]) -> None:
    if step == 3:
        parameters[0].grad.view(-1)[0] = math.nan


def edit_some(step: int, parameters: list[nn.Parameter]) -> None:
    if step % 4 == 2:
        parameters[1].grad *= 3
        parameters[2].grad[0] = 0.5
        parameters[3].grad = None


STEPS = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "a limit that clips some steps": {},
    "a limit that clips every step": {"max_grad_norm": 0.1},
    "no limit": {"max_grad_norm": 0.0},
    "two micro-batches, of which the last step of an epoch has fewer": {"gradient_accumulation_steps": 2},
    "three micro-batches": {"gradient_accumulation_steps": 3, "max_grad_norm": 2.0},
    "tied weights": {"model": {"tie_word_embeddings": True}},
    "checkpointing": checkpointing(reentrant=False),
    "reentrant checkpointing": {"gradient_accumulation_steps": 2, **checkpointing(reentrant=True)},
    "autocast": {"bf16": True},
    "best weights are loaded at the end": {**STEPS, "load_best_model_at_end": True},
    "rare logs": {"logging_steps": 4},
    "NaN": {"callbacks": [Editing(poison)], "max_grad_norm": 0.0},
    "edited gradients": {"callbacks": [Editing(edit_some)], "max_grad_norm": 0.0},
}


def norms(logged: list[dict[str, Any]]) -> list[float]:
    return [entry["grad_norm"] for entry in logged if "grad_norm" in entry]


@dtypes
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_has_the_bits_of_the_same_optimizer_without_a_scheduler(tmp_path, name, dtype):
    trainer = compare(lambda: trainer_in(tmp_path, dtype, **CONFIGURATIONS[name]))
    if name.startswith("a limit"):
        found, size = norms(trainer.state.log_history), CONFIGURATIONS[name].get("max_grad_norm", 1.0)
        assert max(found) > size
        assert (min(found) < size) is ("some" in name)
    if dtype == torch.bfloat16 and name != "a limit that clips every step":
        assert trainer.state.log_history[-1]["superadam_accepted"] > 0
    assert trainer.state.log_history[-1]["superadam_skipped"] == (name == "NaN")


def test_training_whose_every_step_the_default_limit_clips_is_speculated_on(tmp_path):
    """With a learning rate as in fine-tuning, most values are published as they were speculated on."""
    fine_tuning = {"per_device_train_batch_size": 5, "learning_rate": 1e-5, "num_train_epochs": 20}
    trainer = trainer_in(tmp_path, torch.bfloat16, **fine_tuning)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(3.0)
    train_with(trainer)
    assert min(norms(trainer.state.log_history)) > 1.0
    accepted = sum(entry["superadam_accepted"] for entry in trainer.state.log_history[20:-1])
    assert accepted >= 0.8 * 20 * len([*trainer.model.parameters()])


def test_scheduler_that_is_open_around_all_that_the_trainer_does(tmp_path):
    seen = []
    for is_scheduled in (False, True):
        trainer = trainer_in(tmp_path, torch.bfloat16)
        optimizer = trainer.optimizer = SpeculativeCPUAdamW(trainer.model.parameters(), lr=1e-2)
        with OffloadScheduler(optimizer, trainer.model, **SCHEDULER) if is_scheduled else contextlib.nullcontext():
            trainer.train()
            seen.append(everything(trainer))
    assert_same(*seen)
    assert optimizer.statistics.accepted > 0


@pytest.mark.parametrize("name", [*CONFIGURATIONS][4:5] if not DEEP else [*CONFIGURATIONS][:-2])
def test_fp32_has_the_bits_of_the_stock_trainer(tmp_path, name):
    options = {"optim": "adamw_torch_fused", **CONFIGURATIONS[name]}
    compare(lambda: trainer_in(tmp_path, torch.float32, **options), plain=False, stock=True)


class Grouped(Trainer):
    """Makes the optimizer itself, as derived Trainers do, with groups, a class and a hook of its own."""

    seen = 0

    def count(self, *_: Any) -> None:
        self.seen += 1

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            matrices = [one for one in self.model.parameters() if one.dim() > 1]
            others = [one for one in self.model.parameters() if one.dim() == 1]
            groups = [{"params": matrices, "lr": 3e-3}, {"params": others, "amsgrad": True}]
            self.optimizer = torch.optim.Adam(groups, lr=self.args.learning_rate, betas=(0.7, 0.9), fused=True)
            self.optimizer.register_step_post_hook(self.count)
        return self.optimizer


def test_a_trainer_that_makes_its_own_adam_has_its_bits(tmp_path):
    def make():
        trainer = trainer_in(tmp_path, torch.float32)
        trainer.__class__ = Grouped
        return trainer

    trainer = compare(make, plain=False, stock=True)
    assert type(trainer.optimizer.optimizer) is SpeculativeCPUAdam
    assert trainer.seen == trainer.state.global_step


def test_each_new_model_has_the_arguments_of_its_time(tmp_path):
    """As in a search for hyper-parameters, which changes `args` and makes a new model and optimizer."""

    def search(trainer):
        trainer.model_init = lambda: llama(torch.float32)
        for trainer.args.learning_rate, trainer.args.adam_beta1 in ((1e-2, 0.9), (2e-3, 0.8)):
            trainer.train()
            trainer.evaluate()

    others = {"adam_beta2": 0.95, "adam_epsilon": 1e-6, "num_train_epochs": 1}
    trainer = compare(lambda: trainer_in(tmp_path, torch.float32, **others), plain=False, stock=True, drive=search)
    assert type(trainer.optimizer.optimizer) is SpeculativeCPUAdamW
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]


def test_an_optimizer_of_ours_that_was_passed_is_used(tmp_path):
    trainer = trainer_in(tmp_path, torch.bfloat16)
    passed = trainer.optimizer = SpeculativeCPUAdamW(trainer.model.parameters(), lr=1e-2)
    train_with(trainer)
    assert trainer.optimizer.optimizer is passed
    assert trainer.state.log_history[-1]["superadam_accepted"] > 0


def test_moments_are_stored_as_asked_for(tmp_path):
    trainer = trainer_in(tmp_path, torch.bfloat16)
    for name in ("moments", "master"):
        with pytest.raises(ValueError, match=f"{name} is 'half', expected 'fp32' or"):
            offload(trainer, **{name: "half"})
    offload(trainer, moments="bf16", master="24bit")
    made = trainer.create_optimizer()
    assert (made.moments, made.master) == ("bf16", "24bit")
    copied = copy.deepcopy(trainer)
    copied.optimizer = None
    assert copied.create_optimizer().moments == "bf16"


def test_moments_that_contradict_an_optimizer_of_ours_are_refused(tmp_path):
    words = "optimizer has moments='bf16', and offload.* was given moments='fp32'; leave it out"
    trainer = trainer_in(tmp_path, torch.bfloat16)
    trainer.optimizer = SpeculativeCPUAdamW(trainer.model.parameters(), moments="bf16")
    with pytest.raises(ValueError, match=words):
        offload(trainer, moments="fp32")
    offload(trainer, moments="bf16")
    assert trainer.create_optimizer() is trainer.optimizer
    for moments in (None, "bf16", "fp32"):
        trainer = trainer_in(tmp_path, torch.bfloat16)
        trainer.optimizer_cls_and_kwargs = SpeculativeCPUAdamW, {"lr": 1e-3, "moments": "bf16", "max_grad_norm": 0.5}
        offload(trainer, moments=moments)
        with pytest.raises(ValueError, match=words) if moments == "fp32" else contextlib.nullcontext():
            made = trainer.create_optimizer()
            assert (made.moments, made.max_grad_norm) == ("bf16", 0.5)


def test_a_copy_of_a_trainer_trains_its_own_model(tmp_path):
    """One that is made in training has no scheduler."""

    class Copying(TrainerCallback):
        def on_step_end(self, _, state, *__, **___):
            if state.global_step == 3:
                made.append(copy.deepcopy(callback))

    made = []
    original = trainer_in(tmp_path, torch.bfloat16, callbacks=[Copying()], num_train_epochs=1)
    callback = offload(original, **SCHEDULER)
    copied = copy.deepcopy(original)
    copied.train()
    assert copied.state.log_history[-1]["superadam_accepted"] > 0
    assert original.optimizer is None
    original.train()
    assert_same(everything(original), everything(copied))
    assert [one.scheduler for one in made] == [None, None]


def test_reporters_and_the_history_have_the_counts(tmp_path):
    reporter, seen = TrainerCallback(), list[dict[str, Any]]()
    reporter.on_log = lambda *_, logs, **__: seen.append(dict(logs))
    trainer = trainer_in(tmp_path, torch.bfloat16, callbacks=[reporter], logging_steps=2)
    callback = offload(trainer, **SCHEDULER)
    trainer.train()
    assert callback.scheduler is None
    kept = [entry for entry in trainer.state.log_history if "loss" in entry]
    told = [entry for entry in seen if "loss" in entry]
    names = ("committed", "clipped", "skipped")
    for entries in (kept, told):
        assert [sum(entry[f"superadam_{name}"] for name in names) for entry in entries] == [2] * 5
    last = trainer.state.log_history[-1]
    assert sum(last[f"superadam_{name}"] for name in names) == 10
    assert last["superadam_accepted"] == sum(entry["superadam_accepted"] for entry in kept) > 0
    assert 0.0 <= last["superadam_hidden_share"] <= 1.0


class Stop(TrainerCallback):
    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == 3 and self.error is not None:
            error, self.error = self.error, None
            raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("planted")], ids=["ctrl-c", "error"])
def test_an_error_closes_the_scheduler_and_training_can_begin_again(tmp_path, error):
    def train_twice(trainer):
        with pytest.raises(type(error)):
            trainer.train()
        for callback in trainer.callback_handler.callbacks:
            assert getattr(callback, "scheduler", None) is None
        assert not any(one._post_accumulate_grad_hooks for one in trainer.model.parameters())
        trainer.train()

    trainer = compare(lambda: trainer_in(tmp_path, torch.bfloat16, callbacks=[Stop(error)]), drive=train_twice)
    assert trainer.state.log_history[-1]["superadam_accepted"] > 0


def test_a_smaller_batch_after_memory_ran_out(tmp_path):
    full = Stop(RuntimeError("CUDA out of memory. planted"))
    trainer = trainer_in(tmp_path, torch.bfloat16, auto_find_batch_size=True, callbacks=[full])
    train_with(trainer)
    assert trainer.state.train_batch_size < 2
    assert trainer.state.log_history[-1]["superadam_accepted"] > 0


@dtypes
@pytest.mark.covering(1)
@pytest.mark.parametrize("moments", [None, "bf16"])
def test_resumed_training_is_that_which_never_stopped(tmp_path, moments, dtype):
    """With a scheduler or without one."""
    whole = trainer_in(tmp_path, dtype, save_strategy="steps", save_steps=4)
    train_with(whole, moments=moments)
    saved = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"].values()
    assert {entry["exp_avg"].dtype for entry in saved} == {torch.bfloat16 if moments else torch.float32}
    for is_scheduled in (False, True):
        resumed = trainer_in(tmp_path, dtype)
        callback = offload(resumed, moments=moments, **SCHEDULER)
        if not is_scheduled:
            resumed.callback_handler.callbacks.remove(callback)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert_same(everything(whole), everything(resumed))
    if dtype == torch.float32 and moments is None:
        stock = trainer_in(tmp_path, dtype)
        stock.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert_same(everything(stock), without_state(resumed))


def test_files_are_mapped_for_the_checkpoint_alone(tmp_path):
    """What a program loads while training starts may lie in memory, which cannot be mapped."""

    def load():
        memory = io.BytesIO()
        torch.save(torch.zeros(3), memory)
        memory.seek(0)
        torch.load(memory)

    class Loading(Trainer):
        def get_train_dataloader(self):
            load()
            return super().get_train_dataloader()

    for resume in (None, str(tmp_path / "checkpoint-4")):
        trainer = trainer_in(tmp_path, torch.bfloat16, save_strategy="steps", save_steps=4)
        trainer.__class__ = Loading
        offload(trainer, **SCHEDULER)
        trainer.create_optimizer_and_scheduler(num_training_steps=10)  # as some do before they train
        load()
        trainer.train(resume_from_checkpoint=resume)


def refused(kind: type[Exception], told: str, trainer: Trainer, **options: Any) -> None:
    def changeable() -> list[Any]:
        return [*trainer.callback_handler.callbacks, trainer.train, trainer.create_optimizer, trainer.create_scheduler]

    before = changeable()
    with pytest.raises(kind, match=told):
        offload(trainer, **options)
    assert changeable() == before


def test_second_calls_unknown_options_and_other_optimizers_are_refused(tmp_path):
    trainer = trainer_in(tmp_path, torch.bfloat16)
    refused(TypeError, "bucket_size", trainer, bucket_size=3)
    with pytest.raises(TypeError, match=r"^trainer is a Posix.*, expected a Trainer of transformers"):
        offload(tmp_path)
    trainer.create_optimizer()
    told = "^the Trainer has an optimizer already, AdamW, expected none or a SpeculativeCPUAdam; call "
    refused(RuntimeError, told, trainer)
    trainer.optimizer = None
    offload(trainer)
    refused(RuntimeError, "^offload\\(\\) was called for this Trainer already, expected one call; ", trainer)


def test_callbacks_may_be_given_another_model_as_setfit_does(tmp_path, monkeypatch):
    monkeypatch.setattr(CallbackHandler, "model", property(lambda _: None, lambda *_: None), raising=False)
    compare(lambda: trainer_in(tmp_path, torch.bfloat16, max_steps=2))


def test_other_optimizers_are_refused_before_training(tmp_path):
    trainer = trainer_in(tmp_path, torch.bfloat16, optim="adafactor", num_train_epochs=1)
    offload(trainer)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^the Trainer made Adafactor, expected torch\.optim\.Adam or AdamW, "):
            trainer.train()
    trainer.args.optim = "adamw_torch"
    trainer.train()
    assert trainer.state.log_history[-1]["superadam_committed"] > 0


def test_other_ways_to_train_on_several_gpus_are_refused(tmp_path, monkeypatch):
    trainer = trainer_in(tmp_path, torch.bfloat16)
    trainer.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1)))
    deepspeed = "^the Trainer uses DeepSpeed, which .*; train on several GPUs with FSDP2: "
    fsdp1 = "^the Trainer uses FSDP1, whose shards .* fsdp_version: 2 and TRANSFORMER_BASED_WRAP$"
    for name, told in (("is_deepspeed_enabled", deepspeed), ("is_fsdp_enabled", fsdp1)):
        setattr(trainer, name, True)
        refused(RuntimeError, told, trainer)
        setattr(trainer, name, False)
    several = {"parallel_mode": integration.ParallelMode.DISTRIBUTED, "world_size": 2, "device": torch.device("cuda")}
    monkeypatch.setattr(trainer, "args", SimpleNamespace(**vars(trainer.args), **several))
    refused(
        RuntimeError,
        "^the Trainer would use DistributedDataParallel, .* fsdp_version: 2 and TRANSFORMER_BASED_WRAP$",
        trainer,
    )
    trainer.is_distributed_loading_by_transformers = True  # its parameters are shards
    integration._check_way_of_training(trainer)


def test_fp32_weights_on_a_device_are_told_with_what_they_cost(caplog):
    def train(model):
        optimizer = SpeculativeCPUAdamW([nn.Parameter(torch.empty(1))])
        optimizer.param_groups[0]["params"] = [one for one in model.parameters() if one.requires_grad]
        integration._warn_of_float32(optimizer, model)

    wide = nn.Linear(50_000, 20_000, bias=False, device="meta")
    train(nn.Linear(1000, 1000, bias=False))
    train(nn.Sequential(nn.Linear(50_000, 20_001, device="meta").requires_grad_(False), wide))  # as adapters are
    assert not caplog.messages
    train(wide)
    (told,) = caplog.messages
    assert told.startswith("1,000,000,000 parameters are fp32 on the device, where weights and gradients take 4.00 GB")
    assert "dtype=torch.bfloat16" in told
    assert "bf16: false" in told


def test_signals_are_the_program_s_own_after_training_and_where_ranks_cannot_meet(tmp_path, monkeypatch):
    before, trainer = signal.getsignal(signal.SIGTERM), trainer_in(tmp_path, torch.bfloat16)
    with SavesOnSignal(trainer) as saves:
        assert signal.getsignal(signal.SIGTERM) is not before
        assert saves in trainer.callback_handler.callbacks
    assert signal.getsignal(signal.SIGTERM) is before
    assert saves not in trainer.callback_handler.callbacks
    new_group = Mock(side_effect=RuntimeError("planted"))
    for name, value in (("is_initialized", lambda: True), ("get_world_size", lambda: 2), ("new_group", new_group)):
        monkeypatch.setattr(torch.distributed, name, value)
    with pytest.raises(RuntimeError, match="planted"):
        saves.__enter__()
    assert signal.getsignal(signal.SIGTERM) is before
    assert saves not in trainer.callback_handler.callbacks
    late = Mock(side_effect=lambda asked, *_, **__: Mock(wait=lambda: asked.fill_(1)))  # as another rank was asked
    for name, value in (("new_group", Mock()), ("all_reduce", late)):
        monkeypatch.setattr(torch.distributed, name, value)
    with SavesOnSignal(trainer) as saves:
        assert [saves._agreed() for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (5, {**STEPS, "load_best_model_at_end": True, "save_total_limit": 1, "learning_rate": 0.3}),
        (4, {**STEPS, "save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": True}),
        (3, {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}),
        (5, {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}),
    ],
    ids=["the best is kept", "the best is saved", "in an epoch", "at its end"],
)
def test_checkpoint_of_a_run_that_is_stopped_is_saved_once_and_kept(step, options, tmp_path):
    class Stopping(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step - 1:
                signal.raise_signal(signal.SIGTERM)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saved.append(state.global_step)

    saved: list[int] = []
    trainer = trainer_in(tmp_path, torch.bfloat16, callbacks=[Stopping()], **options)
    with SavesOnSignal(trainer) as saves:
        trainer.train()
    assert saves.has_stopped
    assert saved[-1] == trainer.state.global_step == step
    assert len({*saved}) == len(saved)
    assert (tmp_path / f"checkpoint-{step}" / "trainer_state.json").exists()


def test_the_best_checkpoint_is_that_of_the_best_step_where_ranks_make_folders_late(tmp_path, monkeypatch):
    """As under FSDP2, where nothing but shards is saved, after the Trainer has looked for the best checkpoint."""
    monkeypatch.setattr(Trainer, "save_model", Mock())
    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", lambda self, folder: Path(folder).mkdir(parents=True))
    monkeypatch.setattr(Trainer, "_load_best_model", lambda self: loaded.append(self.state.best_model_checkpoint))
    loaded: list[str] = []
    options: dict[str, Any] = {**STEPS, "save_total_limit": 2, "load_best_model_at_end": True}
    trainer = trainer_in(tmp_path, torch.bfloat16, **options)
    train_to_last_step(trainer)
    last = trainer.state.max_steps
    assert trainer.state.best_global_step == last
    again = trainer_in(tmp_path, torch.bfloat16, **options)  # makes no step, and reads what the one before knew
    monkeypatch.setattr(Trainer, "_load_from_checkpoint", Mock())
    train_to_last_step(again, str(tmp_path / f"checkpoint-{last}"))
    assert loaded == [str(tmp_path / f"checkpoint-{last}")] * 2


@pytest.mark.parametrize("gigabytes", [0.001, 24])
def test_a_plan_says_beforehand_what_the_gpu_is_short_of(gigabytes, tmp_path, monkeypatch, caplog):
    """With what to change, and before any state takes memory."""
    trl = pytest.importorskip("trl")
    arguments = trl.SFTConfig(str(tmp_path), loss_type="nll", per_device_train_batch_size=2, max_length=32, **QUIET)
    trainer = Trainer(llama(torch.bfloat16), arguments, train_dataset=Examples())
    monkeypatch.setattr(trl.SFTConfig, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, int(gigabytes * 1e9)))
    offload(trainer)
    told = [record.message for record in caplog.records]
    assert any("GPU's memory" in line and "--max_length" in line for line in told) == (gigabytes < 1)
    assert trainer.optimizer is None


def test_resuming_takes_the_memory_of_training(tmp_path):
    """Peak resident memory, in bytes for each parameter: 2 of the model, 12 of the state, and what comes and goes."""
    sizes = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 20}
    found = {}

    def train(*, is_resumed):
        class Peak(TrainerCallback):
            def on_train_begin(self, *_, model, **__):  # everything is loaded
                libraries = memory_of_process("RssFile")  # as the system maps them
                taken = memory_of_process("VmHWM") - libraries - before
                (tmp_path / str(is_resumed)).write_text(str(taken / sum(one.numel() for one in model.parameters())))

        gc.collect()
        library = ctypes.CDLL(None)
        library.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is measured takes no memory that was there,
        library.malloc_trim(0)  # nor what earlier tests have left with the allocator
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory_of_process("RssAnon")
        once = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
        trainer = trainer_in(tmp_path, torch.bfloat16, model=sizes, callbacks=[Peak()], **once)
        offload(trainer, num_threads=1)
        trainer.train(resume_from_checkpoint=is_resumed or None)

    for is_resumed in (False, True):
        assert exit_code_of_child(lambda: train(is_resumed=is_resumed)) == 0  # noqa: B023
        found[is_resumed] = float((tmp_path / str(is_resumed)).read_text())
    assert 12.0 < found[True] <= 16.0, f"{found[True]:.1f} bytes, {found[False]:.1f} without a checkpoint"
