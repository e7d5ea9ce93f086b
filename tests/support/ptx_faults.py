"""Faults that are planted in PTX by rule: in operators, operands, roundings, predicates and addresses."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.ptx import Instruction, Kernel

from superadam import gpu

SWAPS = {"add": "sub", "sub": "add", "and": "or", "or": "and", "xor": "and", "shl": "shr", "shr": "shl", "min": "max"}
SWAPS |= {"max": "min", "neg": "abs", "abs": "neg", "mul": "add", "div": "mul", "fma": "mul", "sqrt": "neg"}
COMPARISONS = {"eq": "ne", "ne": "eq", "lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "ltu": "leu", "gtu": "geu"}
COMPARISONS |= {"neu": "equ", "equ": "neu", "leu": "ltu", "geu": "gtu", "nan": "num", "num": "nan"}

COMMUTATIVE = {"add", "mul", "mad", "fma", "and", "or", "xor", "min", "max"}
"""In their first two sources."""

Change = tuple[int, Instruction]


def operators(kernel: Kernel) -> Iterator[Change]:
    """Another operation of the same operands."""
    for at, one in enumerate(kernel.instructions):
        kind, *rest = one.name.split(".")
        if kind in SWAPS:
            dropped = 1 if kind == "fma" else 0
            rest = [part for part in rest if part != "rn" or "f" in rest[-1]]
            rest = [rest[0].replace(*("bu" if kind == "shl" else "ub"))] if kind in ("shl", "shr") else rest
            yield at, replace(one, name=".".join([SWAPS[kind], *rest]), operands=one.operands[: -dropped or None])


def operands(kernel: Kernel) -> Iterator[Change]:
    """Sources the other way round, another register of the same kind, or a number that is larger by one."""
    registers = {str(part) for one in kernel.instructions for part in one.operands if str(part).startswith("%")}
    for at, one in enumerate(kernel.instructions):
        kind = one.name.split(".")[0]
        if kind in ("ld", "st", "bra", "bar", "ret"):
            continue
        target, *sources = one.operands
        commutes = kind in COMMUTATIVE or one.name.startswith(("setp.eq", "setp.ne"))
        if len(sources) > 1 and sources[0] != sources[1] and not commutes:
            yield at, replace(one, operands=(target, sources[1], sources[0], *sources[2:]))
        for number, source in enumerate(sources):
            if not isinstance(source, str):
                continue
            others = sorted(name for name in registers if re.sub(r"\d", "", name) == re.sub(r"\d", "", source))
            if source.startswith("%") and len(others) > 1:
                other = others[(others.index(source) + 1) % len(others)] if source in others else others[0]
            elif re.fullmatch(r"-?\d+", source):
                other = str(int(source) + 1)
            elif re.fullmatch(r"0[fd][0-9A-F]+", source):
                other = f"{source[:2]}{int(source[2:], 16) + 1:0{len(source) - 2}X}"
            else:
                continue
            changed = [other if at_ == number else old for at_, old in enumerate(sources)]
            yield at, replace(one, operands=(target, *changed))


def roundings(kernel: Kernel) -> Iterator[Change]:
    """Another direction, denormals that are flushed, or what may be contracted."""
    for at, one in enumerate(kernel.instructions):
        if ".rn" in one.name:
            for other in (".rz", ".rm", ".rp", ".rn.ftz")[: 3 if one.name.endswith("rn.f64") else 4]:
                yield at, replace(one, name=one.name.replace(".rn", other))
            if one.name.startswith(("add", "mul", "sub")):
                yield at, replace(one, name=one.name.replace(".rn", ""))
        if one.name.startswith("fma.rn.f32") and one.operands[1] != one.operands[3]:  # two roundings, not one
            yield at, replace(one, name="mul.rn.f32", operands=one.operands[:3])


def predicates(kernel: Kernel) -> Iterator[Change]:
    """The other threads, all of them, or another comparison."""
    for at, one in enumerate(kernel.instructions):
        if one.guard:
            yield at, replace(one, negated=not one.negated)
            yield at, replace(one, guard="", negated=False)
        kind, *rest = one.name.split(".")
        if kind == "setp" and rest[0] in COMPARISONS:
            yield at, replace(one, name=".".join([kind, COMPARISONS[rest[0]], *rest[1:]]))
        if kind == "selp":
            target, first, second, predicate = one.operands
            yield at, replace(one, operands=(target, second, first, predicate))


def addresses(kernel: Kernel) -> Iterator[Change]:
    """The element before or behind, or another one of the registers that addresses are in."""
    bases = sorted(
        {part[0] for one in kernel.instructions for part in one.operands if _is_address(part) and part[0][0] == "%"}
    )
    for at, one in enumerate(kernel.instructions):
        for number, part in enumerate(one.operands):
            if not _is_address(part) or one.name.startswith("ld.param"):
                continue
            size = int(re.search(r"\d+$", one.name)[0]) // 8  # type: ignore[index]
            base, offset = part
            alike = [name for name in bases if re.sub(r"\d", "", name) == re.sub(r"\d", "", base)]
            others = [(base, offset + size), (base, offset - size)]
            others += [(alike[(alike.index(base) + 1) % len(alike)], offset)] if len(alike) > 1 else []
            for other in others:
                yield at, replace(one, operands=(*one.operands[:number], other, *one.operands[number + 1 :]))


def _is_address(part: Any) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and isinstance(part[1], int)


RULES: tuple[Callable[[Kernel], Iterator[Change]], ...] = (operators, operands, roundings, predicates, addresses)


def described(kernel: str, rule: Callable[..., object], one: Instruction, other: Instruction) -> str:
    """Return what stays the same from one variant of a kernel, and from one version of Triton, to many others.

    That is the rule, the line of the source, and what became of the instruction there, without names of registers.
    """
    changes = [f"{one.name} becomes {other.name}"] if one.name != other.name else [one.name]
    registers = [part for part in other.operands if isinstance(part, str) and part.startswith("%")]
    changes += ["of another register"] * any(part not in one.operands for part in registers)
    if (one.guard, one.negated) != (other.guard, other.negated):
        changes.append("for other threads" if other.guard else "for all threads")
    return f"{kernel} `{source_line(one.place)}` {rule.__name__}: {', '.join(changes)}"


def source_line(place: str) -> str:
    """Return the line of superadam.gpu that an instruction is made from, or of Triton's own functions its file."""
    file, _, number = place.partition(":")
    path = Path(gpu.__file__).parent / file
    lines = path.read_text().splitlines() if path.is_file() else []
    return lines[int(number) - 1].strip() if 0 < int(number or 0) <= len(lines) else file
