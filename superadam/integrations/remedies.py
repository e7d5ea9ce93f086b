"""Changes of a setting with which it fits, or is faster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from superadam.plan.activations import Activations
from superadam.plan.machines import Machine
from superadam.plan.memory import Memory, Setting, Subject, activations_for, memory_of


@dataclass(frozen=True, slots=True)
class Remedy:
    """The smallest change of one kind with which training fits."""

    words: str
    setting: Setting
    memory: Memory = field(repr=False)


SMALLER = (("bf16", "24bit"), ("8bit", "24bit"))
"""Formats of state that are tried, in this order."""


def remedies(subject: Subject, setting: Setting, machine: Machine, found: Activations) -> list[Remedy]:
    """Return changes with which training fits, each by itself; where none does, two or three together."""

    def tried(changed: Setting, words: str) -> Remedy | None:
        same = ("sequences", "tokens", "loss", "checkpointing")
        is_same = all(getattr(changed, name) == getattr(setting, name) for name in same)
        memory = memory_of(subject, changed, machine, found if is_same else activations_for(subject, changed))
        return Remedy(words, changed, memory) if memory.trains else None

    def single(base: Setting) -> list[list[tuple[Setting, str]]]:
        kinds: list[list[tuple[Setting, str]]] = []
        if base.loss == "full":
            kinds.append([(replace(base, loss="chunked"), "--loss chunked")])
        if not base.checkpointing:
            kinds.append([(replace(base, checkpointing=True), "--checkpointing")])
        if (base.moments, base.master) == ("fp32", "fp32"):
            pairs = [(replace(base, moments=a, master=b), f"--moments {a} --master {b}") for a, b in SMALLER]
            kinds.append(pairs)
        fewer = [base.sequences >> shift for shift in range(1, base.sequences.bit_length())]
        kinds.append([(replace(base, sequences=count), f"--batch {count}") for count in fewer])
        more = [base.ranks << shift for shift in range(1, 5)]
        kinds.append([(replace(base, ranks=count), f"--ranks {count}") for count in more])
        if not base.flows:
            kinds.append([(replace(base, flows=True), "--flow")])
        return kinds

    def first_of(kinds: list[list[tuple[Setting, str]]], before: str = "") -> list[Remedy]:
        each = (next(filter(None, (tried(changed, before + words) for changed, words in kind)), None) for kind in kinds)
        return [remedy for remedy in each if remedy is not None]

    if fits := first_of(single(setting)):
        return fits
    small = replace(setting, loss="chunked", checkpointing=True, moments="bf16", master="24bit")
    words = "--loss chunked --checkpointing --moments bf16 --master 24bit"
    alone = tried(small, words)
    return [alone] if alone else first_of(single(small), words + " ")
