"""The rates that a step's events are made of, from those of a machine; and machines whose CPU was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from superadam.cli.bench.passes import PassResult
from superadam.cli.traffic import PLAIN, bytes_per_element
from superadam.kernels.native import Dtype, Pass
from superadam.plan.events import Passes, Rates
from superadam.plan.machines import Kind, Machine, Rate
from superadam.state.storage import Storage

PASSES = {
    "norm": Pass.NORM,
    "speculate": Pass.SPECULATE,
    "commit": Pass.COMMIT,
    "fused": Pass.COMMIT_AND_SPECULATE,
    "update": Pass.UPDATE,
}
"""The kernels' pass of each field of `Passes`."""

WITH_NORM = ("norm", "speculate", "fused")
"""Those that sum the norm of gradients that have just arrived."""


def seconds_of(machine: Machine, storage: Storage = PLAIN) -> Passes:
    """Return the seconds of an element in each pass over state that is stored so: of its bytes or of its arithmetic.

    Copies take their bytes from the CPU's bandwidth. Measured passes over fp32 state are scaled by the bytes.
    """
    moved, plain = (
        {name: bytes_per_element(which, Dtype.BFLOAT16, Dtype.BFLOAT16, each) for name, which in PASSES.items()}
        for each in (storage, PLAIN)
    )
    if machine.passes is not None:
        return Passes(**{name: machine.passes[name].value * moved[name] / plain[name] for name in PASSES})
    busy = 1 + 4 / moved["fused"]  # with the copies of a gradient and of a new value
    arithmetic = machine.cpu_cycles.value / (machine.cpu_cores.value * machine.cpu_clock.value)
    of = {name: max(busy * each / machine.cpu_bandwidth.value, arithmetic) for name, each in moved.items()}
    return Passes(**of | {"norm": busy * moved["norm"] / machine.cpu_bandwidth.value})


def rates_of(machine: Machine, storage: Storage = PLAIN) -> Rates:
    """Return the rates that the events of a step are made of."""
    links = (machine.gpu_bandwidth.value, machine.download.value, machine.upload.value)
    step = machine.step_per_bucket.value  # in the training thread, whose core passes lack meanwhile
    worker = machine.worker_per_bucket.value + step / machine.cpu_cores.value
    return Rates(*links, seconds_of(machine, storage), worker, step, machine.cpu_bandwidth.value)


def measured(base: Machine, rows: Iterable[PassResult], host_bytes: int, source: str) -> Machine:
    """Return a machine with measured passes over fp32 state, of which `rows` has all, and this host's memory."""
    seconds = {(row.which, row.with_norm): row.comparison.seconds.median / row.numel for row in rows}
    passes = {name: Rate(seconds[which, name in WITH_NORM], Kind.MEASURED, source) for name, which in PASSES.items()}
    memory = Rate(host_bytes, Kind.MEASURED, source)
    return replace(base, title=f"{base.title}, with this CPU", passes=passes, host_memory=memory)


def to_toml(machine: Machine) -> str:
    """Return the text of a machine's file."""

    def line(name: str, rate: Rate) -> str:
        source = json.dumps(rate.source, ensure_ascii=False)
        return f'{name} = {{ value = {rate.value!r}, kind = "{rate.kind.value}", source = {source} }}'

    passes = machine.passes or {}
    lines = [
        f"title = {json.dumps(machine.title, ensure_ascii=False)}",
        f"one_memory = {str(machine.one_memory).lower()}",
    ]
    lines += [line(name, rate) for name, rate in machine.rates.items() if name not in passes]
    lines += ["", "[passes]", *(line(name, rate) for name, rate in passes.items())] if passes else []
    return "\n".join(lines) + "\n"
