"""Memory of parameters and state that is moved, freed, reshaped and shared: the bits of the run without a scheduler.

`support/moved_memory.py` draws the programs. `make sanitize` tries many of them with kernels that notice each access to
memory that is not there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import moved_memory
from support.moved_memory import ACTIONS, MOMENTS, SETTINGS, difference

PROGRAMS = 20_000 if os.environ.get("SUPERADAM_DEEP") == "1" else 240
PART = PROGRAMS // 12

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("part", range(PROGRAMS // PART))
def test_programs_end_in_the_bits_of_the_plain_run(part: int) -> None:
    seeds = range(part * PART, (part + 1) * PART)
    assert [found for seed in seeds if (found := difference(seed, SETTINGS[seed % len(SETTINGS)]))] == []


@pytest.mark.parametrize("action", [action.name for action in ACTIONS])
def test_each_action_alone(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each moment, on a parameter of each shape."""
    monkeypatch.setattr(moved_memory, "ACTIONS", [one for one in ACTIONS if one.name == action])
    seeds = range(2 * len(MOMENTS))
    assert [found for seed in seeds if (found := difference(seed, SETTINGS[seed % 2]))] == []


def test_a_program_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the second run, alone, trains with another learning rate."""
    made = []
    whole = moved_memory.Run.__init__

    def other(run: moved_memory.Run, seed: int, setting: str) -> None:
        whole(run, seed, setting)
        made.append(run)
        run.optimizer.param_groups[0]["lr"] /= len(made)

    monkeypatch.setattr(moved_memory.Run, "__init__", other)
    assert "differ after step 0" in str(difference(0, "host"))


TORCH = r"""
import sys, warnings
import torch
from superadam import SpeculativeCPUAdamW
from support.moved_memory import ACTIONS, has_memory
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

class Program:
    held = []
    def tensor(self, parameter, key):
        value = self.optimizer.state[parameter].get(key) if parameter in self.optimizer.state else None
        return value if isinstance(value, torch.Tensor) and has_memory(value) else None

def run(cls, action, key, **options):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(64, 64))
    program = Program()
    program.held = []
    program.optimizer = cls([parameter], lr=1e-2, **options)
    for step in range(6):
        parameter.grad = torch.randn(64, 64)
        program.optimizer.step()
        if step in (1, 3):
            with torch.no_grad():
                action.do(program, parameter, key)
    entry = program.optimizer.state[parameter]
    return [parameter.detach(), entry["exp_avg"], entry["exp_avg_sq"]]

name = sys.argv[1]
action = next(one for one in ACTIONS if one.name == name)
for key in ("exp_avg", "exp_avg_sq"):
    theirs = run(torch.optim.AdamW, action, key, fused=True)
    ours = run(SpeculativeCPUAdamW, action, key)
    assert all(map(torch.equal, theirs, ours)), key
"""

AS_TORCH = [
    *("read", "assign", ".data = clone", ".data = zeros", "set_", "swap_tensors", "freed and filled again"),
    *("freed and replaced", "storage grows", "share_memory_", "write", "write through .data", "write through numpy"),
    *("put and hold", "put rows of more and hold", "hold", "hold an alias", "hold a state dict", "exchange", "pickled"),
    *("write the count", "load", "parameter: .data = clone", "parameter: freed and replaced", "both: transposed"),
    *("parameter: freed and filled again", "parameter: share_memory_"),
]


@pytest.mark.parametrize("action", AS_TORCH)
def test_as_torch(action: str) -> None:
    """In a process of its own, which would die where kernels used memory that was freed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(moved_memory.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", TORCH, action], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_gradient_without_memory_is_refused() -> None:
    from superadam import SpeculativeCPUAdamW

    parameter = torch.nn.Parameter(torch.ones(64))
    optimizer = SpeculativeCPUAdamW([parameter])
    parameter.grad = torch.ones(64)
    parameter.grad.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="the gradient of parameter 0 of group 0 has no data"):
        optimizer.step()
    assert not optimizer.state
