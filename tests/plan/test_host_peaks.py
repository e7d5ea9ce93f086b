"""The host's sums are what a process with a real scheduler takes at its peak."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, re, torch
from torch import nn
from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.devices import PlainDevice
from superadam.offload.needs import needs_of_run

def peak():
    with open("/proc/self/status") as status:  # unlike ru_maxrss, this does not begin with that of the parent
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1])

model = nn.Module()
model.weights = nn.ParameterList([torch.zeros(1024, dtype=torch.bfloat16)])
optimizer = SpeculativeCPUAdamW(model.parameters(), max_grad_norm=1.0)
with OffloadScheduler(optimizer, model, num_threads=1):
    model.weights[0].sum().backward()
    optimizer.step()
base = peak()
model.weights = nn.ParameterList([torch.zeros(16 << 20, dtype=torch.bfloat16) for _ in range(8)])
optimizer = SpeculativeCPUAdamW(model.parameters(), max_grad_norm=1.0)
with OffloadScheduler(optimizer, model, num_threads=1) as scheduler:
    needs = needs_of_run(optimizer, PlainDevice(), scheduler.placement)
    for _ in range(4):
        sum(weight.sum() for weight in model.weights).backward()
        optimizer.step()
        optimizer.zero_grad()
weights = sum(weight.nbytes for weight in model.weights)
print(json.dumps({"measured": peak() - base, "planned": needs.total + weights, "lists": needs.lists}))
"""


@pytest.mark.deep
@pytest.mark.subprocess
def test_sums_are_what_a_process_takes() -> None:
    """Within 5 percent from 100 million parameters on; below, the process's own 80 to 90 MB show."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["planned"] == pytest.approx(found["measured"], rel=0.05), found
