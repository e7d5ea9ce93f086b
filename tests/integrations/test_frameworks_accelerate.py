"""Loops around Accelerate: the bits with a scheduler are those without."""

import math
import shutil
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from support.frameworks import MARKS, Predictor, Run, Sentences, Training, adamw, compare, dtypes
from torch.utils.data import DataLoader

from superadam.integrations import distributed_checkpoint

pytestmark = MARKS


def accelerated(dtype, clip="none", size=math.inf, *, moments="fp32", epochs=2, at_end=None, **options) -> Training:
    """Return a loop as Accelerate documents it, which may call something at the end of each epoch."""

    def train(run: Run) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # else a process has the options of its first one
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, **options)
        optimizer = adamw(plain := Predictor(dtype), moments=moments)
        model, wrapped, batches = accelerator.prepare(plain, optimizer, DataLoader(Sentences(), batch_size=2))
        run.open(wrapped.optimizer, model)
        for epoch in range(epochs):
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = model(batch)
                    accelerator.backward(loss)
                    run.logged.append({"loss": loss.detach()})
                    if accelerator.sync_gradients and clip == "norm":
                        run.logged[-1]["norm"] = accelerator.clip_grad_norm_(model.parameters(), size).item()
                    elif accelerator.sync_gradients and clip == "value":
                        accelerator.clip_grad_value_(model.parameters(), size)
                    wrapped.step()
                    wrapped.zero_grad()
            if at_end is not None:
                at_end(accelerator, epoch)

    return train


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "no limit": {},
    "a limit that clips some steps": {"clip": "norm", "size": 1.2},
    "a limit that clips every step": {"clip": "norm", "size": 0.1},
    "clipped values": {"clip": "value", "size": 0.01},
    "two micro-batches, of which the last step of an epoch has fewer": {"gradient_accumulation_steps": 2},
    "three micro-batches, clipped": {"gradient_accumulation_steps": 3, "clip": "norm", "size": 0.69},
}


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training(dtype, name):
    accepts = {"a limit that clips every step": False, "clipped values": None}.get(name, True)
    seen = compare(accelerated(dtype, **CONFIGURATIONS[name]), dtype, accepts=accepts)
    if name.startswith("a limit"):
        norms = [float(value) for key, value in seen.items() if key.endswith("norm")]
        clipped = sum(norm > CONFIGURATIONS[name]["size"] for norm in norms)
        assert len(norms) == 14
        assert 0 < clipped < 14 if "some" in name else clipped == 14


def test_mixed_precision():
    compare(accelerated(torch.float32, "norm", 0.5, mixed_precision="bf16"), torch.float32)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("is_ours", [False, True])
def test_states_that_are_saved_and_loaded(moments, is_ours, tmp_path):
    """Training goes on from what was saved, while the scheduler stays open."""

    def save_or_load(accelerator, epoch):
        wrapped = accelerator._models[0], accelerator._optimizers[0]
        if epoch == 0:
            shutil.rmtree(tmp_path)  # of the other run
            distributed_checkpoint.save(tmp_path, *wrapped) if is_ours else accelerator.save_state(str(tmp_path))
        if epoch == 1:
            distributed_checkpoint.load(tmp_path, *wrapped) if is_ours else accelerator.load_state(str(tmp_path))

    seen = compare(accelerated(torch.bfloat16, moments=moments, epochs=3, at_end=save_or_load))
    losses = [value for name, value in seen.items() if name.endswith("loss")]
    assert losses[7:14] == losses[14:]
    assert len(losses) == 21
