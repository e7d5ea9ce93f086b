"""A machine's file with the passes of this machine's CPU."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields, replace

from superadam.cli.bench.passes import PassResult
from superadam.cli.plan.rates import PASSES, WITH_NORM
from superadam.plan.machines import Kind, Machine, Rate


def measured(base: Machine, rows: Iterable[PassResult], host_bytes: int, source: str) -> Machine:
    """Return a machine with measured passes over fp32 state, of which `rows` has all, and this host's memory."""
    seconds = {(row.which, row.with_norm): row.comparison.first.median / row.numel for row in rows}
    passes = {name: Rate(seconds[which, name in WITH_NORM], Kind.MEASURED, source) for name, which in PASSES.items()}
    memory = Rate(host_bytes, Kind.MEASURED, source)
    return replace(base, title=f"{base.title}, with this CPU", passes=passes, host_memory=memory)


def to_toml(machine: Machine) -> str:
    """Return the text of a machine's file."""

    def line(name: str, rate: Rate) -> str:
        source = json.dumps(rate.source, ensure_ascii=False)
        return f'{name} = {{ value = {rate.value!r}, kind = "{rate.kind.value}", source = {source} }}'

    every = {field.name: getattr(machine, field.name) for field in fields(machine)}
    lines = [f'title = "{machine.title}"', f"one_memory = {str(machine.one_memory).lower()}"]
    lines += [line(name, rate) for name, rate in every.items() if isinstance(rate, Rate)]
    if machine.passes is not None:
        lines += ["", "[passes]", *(line(name, rate) for name, rate in machine.passes.items())]
    return "\n".join(lines) + "\n"
