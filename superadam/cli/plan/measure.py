"""A machine's file with the passes of this machine's CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from superadam.cli.plan.rates import PASSES, WITH_NORM
from superadam.plan import UnplannableError
from superadam.plan.machines import Kind, Machine, Rate


def measured(base: Machine, rows: Iterable[Mapping[str, Any]], host_bytes: int, source: str) -> Machine:
    """Return a machine with the passes that `superadam bench --json` has measured, and this host's memory."""
    seconds = {
        (row["pass"], row["norm"]): row["seconds"]["median"] / row["numel"] for row in rows if row["moments"] == "f32"
    }
    wanted = {name: (which.name.lower(), name in WITH_NORM) for name, which in PASSES.items()}
    if missing := [key for key, row in wanted.items() if row not in seconds]:
        raise UnplannableError(
            f"the results have no {missing[0]} over fp32 state, expected those of all passes; run superadam bench"
        )
    passes = {key: Rate(seconds[row], Kind.MEASURED, source) for key, row in wanted.items()}
    memory = Rate(host_bytes, Kind.MEASURED, source)
    return replace(base, title=f"{base.title}, with this CPU", passes=passes, host_memory=memory)


def to_toml(machine: Machine) -> str:
    """Return the text of a machine's file."""

    def line(name: str, rate: Rate) -> str:
        source = rate.source.replace("\\", "\\\\").replace('"', '\\"')
        return f'{name} = {{ value = {rate.value!r}, kind = "{rate.kind.value}", source = "{source}" }}'

    every = {field.name: getattr(machine, field.name) for field in fields(machine)}
    lines = [f'title = "{machine.title}"', f"one_memory = {str(machine.one_memory).lower()}"]
    lines += [line(name, rate) for name, rate in every.items() if isinstance(rate, Rate)]
    if machine.passes is not None:
        lines += ["", "[passes]", *(line(name, rate) for name, rate in machine.passes.items())]
    return "\n".join(lines) + "\n"
