"""Trainers that make the optimizer themselves train with ours: in their loop, with the bits of our own class."""

import sys
from pathlib import Path
from typing import Any

import own_scheduler
import pytest
import torch
import with_superadam
from support.overlap import ThreadDevice
from torch import nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROGRAM = """
import sys
import torch

def fit(model, limit, steps=8):
    # OneTrainer's arguments; diffusion-pipe's are fewer
    groups = [{"params": list(model.parameters()), "lr": 1e-2, "initial_lr": 1e-2}]
    optimizer = torch.optim.AdamW(
        params=groups, lr=1e-2, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8, amsgrad=False, foreach=False,
        maximize=False, capturable=False, differentiable=False, fused=False,
    )
    norms = []
    for step in range(steps):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        (model(x).float() - x.float().square().mean(-1, keepdim=True)).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return optimizer, norms

if __name__ == "__main__":
    torch.ran = sys.argv, fit(torch.made, 0.5)
"""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(torch.bfloat16)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a program that makes torch's AdamW; schedulers have a thread on every machine."""
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.AdamW)  # and back
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(own_scheduler, "OffloadScheduler", lambda o, m: OffloadScheduler(o, m, device=ThreadDevice()))
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(program: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[nn.Module, Any, list[float]]:
    made = model()
    monkeypatch.setattr(torch, "made", made, raising=False)
    monkeypatch.setattr(torch, "ran", None, raising=False)
    monkeypatch.setattr(sys, "argv", ["with_superadam.py", str(program), *words])
    with_superadam.main()
    argv, (optimizer, norms) = torch.ran
    assert argv == [str(program), *words]
    return made, optimizer, norms


def test_a_program_trains_with_ours_and_one_limit_for_all_gradients(program, monkeypatch):
    made, optimizer, norms = run(program, monkeypatch, "--config-path", "config.json")
    assert isinstance(optimizer, SpeculativeCPUAdamW)
    assert optimizer.statistics.accepted > 0
    optimizer.close()
    assert max(norms) > 0.5
    twin = model()
    monkeypatch.setattr(torch.optim, "AdamW", SpeculativeCPUAdamW)
    names: dict[str, Any] = {"__name__": "program"}
    exec(PROGRAM, names)
    plain, theirs = names["fit"](twin, 0.5)
    assert norms == theirs
    assert all(map(torch.equal, made.parameters(), twin.parameters()))
    states = zip(optimizer.state.values(), plain.state.values(), strict=True)
    assert all(torch.equal(ours[name], others[name]) for ours, others in states for name in ours)


def test_the_environment_says_how_state_is_stored(program, monkeypatch):
    monkeypatch.setenv("SUPERADAM_MOMENTS", "bf16")
    monkeypatch.setenv("SUPERADAM_MASTER", "24bit")
    _, optimizer, _ = run(program, monkeypatch)
    optimizer.close()
    assert (optimizer.moments, optimizer.master) == ("bf16", "24bit")


def test_arguments_by_position_are_those_of_torch():
    given = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3, "amsgrad": True}
    assert with_superadam.AdamW(model().parameters(), *given.values()).param_groups[0].items() >= given.items()


@pytest.mark.parametrize("words", [[], ["none.py"]])
def test_without_a_program_there_is_a_sentence(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["with_superadam.py", *words])
    with pytest.raises(SystemExit, match=r"^with_superadam.py: name a program to run, expected [^\n]*$"):
        with_superadam.main()
