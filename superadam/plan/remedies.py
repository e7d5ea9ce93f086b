"""Changes of a setting with which it fits, or is faster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from superadam.offload.needs import bytes_of_state
from superadam.plan.machines import Machine
from superadam.plan.memory import Memory, Setting, Subject, memory_of


@dataclass(frozen=True, slots=True)
class Remedy:
    """The smallest change of one kind with which training fits."""

    words: str
    setting: Setting
    memory: Memory = field(repr=False)


SMALLER = (("bf16", "24bit"), ("8bit", "24bit"))
"""Formats of state that are tried, in this order."""


def remedies(subject: Subject, setting: Setting, machine: Machine) -> list[Remedy]:
    """Return changes with which training fits, each by itself; where none does, two or three together."""

    def tried(changed: Setting, words: str) -> Remedy | None:
        memory = memory_of(subject, changed, machine)
        return Remedy(words, changed, memory) if memory.trains else None

    def each(base: Setting, before: str = "") -> list[Remedy]:
        size = bytes_of_state(base.storage)
        smaller = [replace(base, moments=moments, master=master) for moments, master in SMALLER]
        fewer = [base.sequences >> shift for shift in range(1, base.sequences.bit_length())]
        more = [base.ranks << shift for shift in range(1, 5)]
        kinds = [
            [(replace(base, loss="chunked"), "--loss chunked")],
            [(replace(base, checkpointing=True), "--checkpointing")],
            [
                (one, f"--moments {one.moments} --master {one.master}")
                for one in smaller
                if bytes_of_state(one.storage) < size
            ],
            [(replace(base, sequences=count), f"--batch {count}") for count in fewer],
            [(replace(base, ranks=count), f"--ranks {count}") for count in more],
            [(replace(base, flows=True), "--flow")],
        ]
        tries = [(tried(changed, before + words) for changed, words in kind if changed != base) for kind in kinds]
        return [fit for kind in tries if (fit := next(filter(None, kind), None)) is not None]

    if fits := each(setting):
        return fits
    small = replace(setting, loss="chunked", checkpointing=True, moments="bf16", master="24bit")
    words = "--loss chunked --checkpointing --moments bf16 --master 24bit"
    alone = tried(small, words)
    return [alone] if alone else each(small, words + " ")
