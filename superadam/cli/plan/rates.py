"""The rates that a step's events are made of, from those of a machine."""

from __future__ import annotations

from superadam.cli.traffic import bytes_per_element
from superadam.kernels.native import Dtype, Format, Pass
from superadam.plan.events import Passes, Rates
from superadam.plan.machines import Machine

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


def seconds_of(machine: Machine, format: Format = Format.PLAIN) -> Passes:
    """Return the seconds of an element in each pass over state of a format: of its bytes or of its arithmetic.

    Copies take their bytes from the CPU's bandwidth. Measured passes over fp32 state are scaled by the bytes.
    """
    moved, plain = (
        {name: bytes_per_element(which, Dtype.BFLOAT16, Dtype.BFLOAT16, each) for name, which in PASSES.items()}
        for each in (format, Format.PLAIN)
    )
    if machine.passes is not None:
        return Passes(**{name: machine.passes[name].value * moved[name] / plain[name] for name in PASSES})
    busy = 1 + 4 / moved["fused"]  # with the copies of a gradient and of a new value
    arithmetic = machine.cpu_cycles.value / (machine.cpu_cores.value * machine.cpu_clock.value)
    of = {name: max(busy * each / machine.cpu_bandwidth.value, arithmetic) for name, each in moved.items()}
    return Passes(**of | {"norm": busy * moved["norm"] / machine.cpu_bandwidth.value})


def rates_of(machine: Machine, format: Format = Format.PLAIN) -> Rates:
    """Return the rates that the events of a step are made of."""
    links = (machine.gpu_bandwidth.value, machine.download.value, machine.upload.value)
    step = machine.step_per_bucket.value  # in the training thread, whose core passes lack meanwhile
    worker = machine.worker_per_bucket.value + step / machine.cpu_cores.value
    return Rates(*links, seconds_of(machine, format), worker, step, machine.cpu_bandwidth.value)
