"""Executes the PTX that Triton emits for superadam's kernels, with numpy, all threads of a grid at once.

    kernel = parse(text)
    Run(kernel, range(3), threads=256, shared=4096, arguments=[...], memory=Memory([(address, bytes), ...]))

A register is an array with an entry for each thread, of unsigned integers (predicates: of bools). What is not in
`OPERATIONS` raises. Every operation rounds once: numpy's do, and so does `formula.fma`. A NaN that arithmetic makes is
the one that NVIDIA's GPUs make, not the CPU's.

What a debugger would find is found on the way: accesses outside of what `Memory` was given, or not aligned; shared
memory that is read before it is written; two threads at one byte without a barrier between them, of which one writes;
branches, barriers and exchanges in which the threads of a program do not all take part.

Not modelled: time, the order of threads within an instruction, caches, and what ptxas makes of the PTX.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from support import formula

Array = npt.NDArray[Any]

WARP = 32
CANONICAL_NAN = {"f16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0xFFF8000000000000}


class ExecutionError(Exception):
    """What would be undefined on a GPU, or is not known here."""


# ---- the text --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    name: str
    operands: tuple[Any, ...]  # text; a vector in braces is a tuple, an address a pair of text and offset
    guard: str  # a predicate, "" for none
    negated: bool
    line: int
    place: str  # file and line of the source


@dataclass
class Kernel:
    parameters: list[str]
    instructions: list[Instruction]
    labels: dict[str, int]


_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_OPERAND = re.compile(r"\{([^}]*)\}|\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]|([^,\s{}\[\]]+)")


def _operand(match: re.Match[str]) -> Any:
    vector, base, offset, plain = match.groups()
    if plain is not None:
        return plain
    return tuple(part.strip() for part in vector.split(",")) if base is None else (base, int(offset or 0))


def parse(text: str) -> Kernel:
    """Return the only kernel of a PTX module."""
    _, _, rest = text.partition(".entry ")
    _, _, rest = rest.partition("(")
    declared, _, rest = rest.partition(")")
    parameters = [one.split()[-1] for one in declared.split(",")]
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "[^"]*?([^"/]+)"', text, re.M))
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    place, begun = "", False
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("//")[0].strip()
        if line in "{}":
            if line and begun and line == "}":
                break
            begun |= line == "{"
            continue
        if not begun or line.startswith((".reg", ".pragma")):
            continue
        if line.startswith(".loc"):
            _, file, at, *_ = line.split()
            place = f"{files.get(file, file)}:{at}"
            continue
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
            continue
        for statement in filter(None, map(str.strip, line.split(";"))):
            negated, guard, opcode, operands = _STATEMENT.fullmatch(statement).groups()  # type: ignore[union-attr]
            parts = tuple(map(_operand, _OPERAND.finditer(operands)))
            instructions.append(Instruction(opcode, parts, guard or "", bool(negated), number, place))
    return Kernel(parameters, instructions, labels)


# ---- memory ----------------------------------------------------------------------------------------------------------


class Bytes:
    """Bytes that threads share, and who read and wrote each last: what no barrier has ordered is a race."""

    NOBODY, SEVERAL = -1, -2

    def __init__(self, data: Array, threads: int, is_shared: bool, grain: int) -> None:
        self.data = data
        self._threads = threads
        self._is_shared = is_shared
        self._grain = grain  # bytes that are accessed together or not at all
        numel = -(-len(data) // grain)
        self._is_set = np.full(numel, not is_shared)
        # Of each grain: the thread, its program, and how many barriers it had passed.
        self._past = {what: np.full((3, numel), self.NOBODY, np.int32) for what in ("read", "write")}

    def note(self, at: Array, size: int, thread: Array, epoch: int, what: str) -> None:
        count = size // self._grain
        at = ((at // self._grain)[:, None] + np.arange(count)).reshape(-1)
        thread = np.repeat(thread.astype(np.int32), count)
        program = thread // self._threads
        if what == "write":
            self._is_set[at] = True
        elif not self._is_set[at].all():
            raise ExecutionError("memory is read that nothing has written")
        for earlier in ("read", "write") if what == "write" else ("write",):
            who, of, when = self._past[earlier][:, at]
            is_ordered = (of == self.NOBODY) | (of == program) & ((who == thread) | (when < epoch))
            if not is_ordered.all():
                raise ExecutionError(f"a race: a {what} of what another thread {earlier}s")
        past = self._past[what]
        who, of, when = past[:, at]
        is_near = (of == program) | (of == self.NOBODY)
        who = np.where((of == program) & (when == epoch) & (who != thread), self.SEVERAL, thread)
        of = np.where(is_near, program, self.SEVERAL)
        past[:, at] = who, of, np.broadcast_to(epoch, at.shape)
        for row, mine in enumerate((who, of)):
            is_other = past[row, at] != mine  # threads at the same byte in this instruction
            if what == "write" and is_other.any() and not self._is_shared:
                raise ExecutionError("a race: two threads write the same byte at once")
            past[row, at[is_other]] = self.SEVERAL

    def load(self, at: Array, kind: np.dtype[Any]) -> Array:
        return self.data.view(kind)[at // kind.itemsize]

    def store(self, at: Array, values: Array) -> None:
        """Write; several threads may write the same value to shared memory at once, as Triton lets them."""
        data, at = self.data.view(values.dtype), at // values.itemsize
        data[at] = values
        if np.any(data[at] != values):
            raise ExecutionError("a race: two threads write different values at once")


def smallest_access(kernel: Kernel, space: str) -> int:
    """Return how many bytes the elements have that a kernel accesses in a space, the smallest ones."""
    accesses = (re.fullmatch(rf"(?:ld|st)\.{space}\b.*\.[bs](\d+)", one.name) for one in kernel.instructions)
    return min((int(match[1]) // 8 for match in accesses if match), default=1)


class Memory:
    """The parts of this process's memory that a kernel may access, as (address, bytes); overlapping ones are merged."""

    GAP = 64  # also keeps each part's alignment

    def __init__(self, parts: Sequence[tuple[int, int]]) -> None:
        merged: list[list[int]] = []
        for begin, size in sorted(part for part in parts if part[1]):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], begin + size)
            else:
                merged.append([begin, begin + size])
        self.begins, self.ends = np.array(merged or [[0, 0]], np.uint64).T
        self.places = np.zeros(len(self.begins), np.int64)
        end = 0
        for number, (begin, stop) in enumerate(merged):
            self.places[number] = end + self.GAP + (begin - end) % self.GAP
            end = int(self.places[number]) + stop - begin
        self.size = -(-(end + self.GAP) // 8) * 8
        self._parts = [(ctypes.c_uint8 * (stop - begin)).from_address(begin) for begin, stop in merged]

    def read_in(self) -> Array:
        data = np.zeros(self.size, np.uint8)
        for place, part in zip(self.places, self._parts, strict=False):
            data[place : place + len(part)] = part
        return data

    def write_back(self, data: Array) -> None:
        for place, part in zip(self.places, self._parts, strict=False):
            np.frombuffer(memoryview(part), np.uint8)[:] = data[place : place + len(part)]

    def index(self, address: Array, size: int) -> Array:
        if np.any(address % size):
            raise ExecutionError(f"an address is no multiple of {size}: {int(address[address % size != 0][0]):#x}")
        part = np.searchsorted(self.begins, address, "right") - 1
        outside = (part < 0) | (address + np.uint64(size) > self.ends[part])
        if np.any(outside):
            worst = int(address[outside][0])
            near = int(np.argmin(np.abs(self.ends.astype(np.int64) - worst)))
            raise ExecutionError(
                f"{np.count_nonzero(outside)} threads access {size} bytes outside, the first at {worst:#x}, "
                f"{worst - int(self.ends[near])} past the end of part {near}"
            )
        return self.places[part] + (address - self.begins[part]).astype(np.int64)


# ---- types -----------------------------------------------------------------------------------------------------------

_NUMPY = {"b": "u", "u": "u", "s": "i", "f": "f"}


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Return numpy's dtype of b32, s64, f16 ..."""
    return np.dtype(f"{_NUMPY[name[0]]}{int(name[1:]) // 8}")


def typed(value: Array, name: str) -> Array:
    """Return the low bits of registers as this type."""
    kind = dtype_of(name)
    return value.astype(f"u{kind.itemsize}", copy=False).view(kind)


def rounded(value: Array, name: str) -> Array:
    """Return the result of arithmetic, whose NaNs are the GPU's, as bits."""
    kind = dtype_of(name)
    bits = np.asarray(value, kind).view(f"u{kind.itemsize}")
    return np.where(np.isnan(value), bits.dtype.type(CANONICAL_NAN[name]), bits)


# ---- operations ------------------------------------------------------------------------------------------------------

Operation = Callable[..., Any]
OPERATIONS: list[tuple[re.Pattern[str], Operation]] = []
"""What each instruction computes of its sources: called with the groups of its pattern and the sources, as bits."""


def operation(pattern: str) -> Callable[[Operation], Operation]:
    def add(function: Operation) -> Operation:
        OPERATIONS.append((re.compile(pattern), function))
        return function

    return add


FUNCTIONS: dict[str, np.ufunc] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
}


def unsigned(value: Array) -> Array:
    return value.view(f"u{value.itemsize}")


@operation(r"(add|sub|min|max)\.([us](?:16|32|64))")
def _(name: str, kind: str, a: Array, b: Array) -> Array:
    return unsigned(FUNCTIONS[name](typed(a, kind), typed(b, kind)))


@operation(r"((?:add|sub|min|max)\.[us]16|(?:add|sub|mul|fma)\.rn\.f32)x2")
def _(name: str, *sources: Array) -> Array:
    """Two at once, of the low and the high halves."""
    function, groups = find(name)
    wide = sources[0].dtype.type
    size = 4 * sources[0].itemsize
    low, high = (
        function(*groups, *((source >> wide(shift)).astype(f"u{size // 8}") for source in sources)).astype(wide)
        for shift in (0, size)
    )
    return low | high << wide(size)


@operation(r"(and|or|xor)\.(?:b16|b32|b64|pred)")
def _(name: str, a: Array, b: Array) -> Array:
    return FUNCTIONS[name](a, b)


@operation(r"not\.(?:b16|b32|b64|pred)")
def _(a: Array) -> Array:
    return ~a


@operation(r"(mul|mad)\.lo\.([us](?:16|32|64))")
def _(name: str, kind: str, a: Array, b: Array, c: Array | int = 0) -> Array:
    return a * b + (c if name == "mad" else a.dtype.type(0))


@operation(r"(mul|mad)\.wide\.([us])(16|32)")
def _(name: str, sign: str, bits: str, a: Array, b: Array, c: Array | int = 0) -> Array:
    wide = f"{sign}{2 * int(bits)}"
    product = typed(a, sign + bits).astype(dtype_of(wide)) * typed(b, sign + bits).astype(dtype_of(wide))
    return unsigned(product) + (c if name == "mad" else unsigned(product).dtype.type(0))


@operation(r"shl\.b(16|32|64)")
def _(bits: str, a: Array, b: Array) -> Array:
    return np.where(b < int(bits), a << (b % int(bits)).astype(a.dtype), a.dtype.type(0))


@operation(r"shr\.([us])(16|32|64)")
def _(sign: str, bits: str, a: Array, b: Array) -> Array:
    a = typed(a, sign + bits)
    shifted = a >> (b % int(bits)).astype(a.dtype)
    return unsigned(np.where(b < int(bits), shifted, a >> a.dtype.type(int(bits) - 1) if sign == "s" else a * 0))


@operation(r"bfe\.u32")
def _(a: Array, begin: Array, length: Array) -> Array:
    begin, length = (begin & 255).astype(np.uint64), (length & 255).astype(np.uint64)
    if np.any(begin > 31) or np.any(length > 32):
        raise ExecutionError("bits are taken from outside of a word")
    return ((a.astype(np.uint64) >> begin) & ((np.uint64(1) << length) - np.uint64(1))).astype(np.uint32)


@operation(r"prmt\.b32")
def _(a: Array, b: Array, selector: Array) -> Array:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint32)
    for place in range(4):
        choice = selector >> np.uint32(4 * place)
        byte = (both >> (choice & 7).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & 0xFF
        byte = np.where(choice & 8, (byte >> 7) * np.uint32(0xFF), byte)
        result |= byte << np.uint32(8 * place)
    return result


@operation(r"brev\.b32")
def _(a: Array) -> Array:
    result = np.zeros_like(a)
    for bit in range(32):
        result |= ((a >> np.uint32(bit)) & np.uint32(1)) << np.uint32(31 - bit)
    return result


@operation(r"popc\.b32")
def _(a: Array) -> Array:
    return np.bitwise_count(a).astype(np.uint32)


@operation(r"setp\.(eq|ne|lt|le|gt|ge)(u?)\.([busf](?:16|32|64))")
def _(name: str, is_unordered: str, kind: str, a: Array, b: Array) -> Array:
    a, b = typed(a, kind), typed(b, kind)
    result: Array = getattr(operator, name)(a, b)
    unordered = np.isnan(a) | np.isnan(b)
    return result | unordered if is_unordered else result & ~unordered


@operation(r"setp\.(nan|num)\.(f(?:16|32|64))")
def _(name: str, kind: str, a: Array, b: Array) -> Array:
    is_nan: Array = np.isnan(typed(a, kind)) | np.isnan(typed(b, kind))
    return is_nan if name == "nan" else ~is_nan


@operation(r"setp\.(nan|num)\.f16x2")
def _(name: str, a: Array, b: Array) -> tuple[Array, Array]:
    one = find(f"setp.{name}.f16")[0]
    return one(name, "f16", a, b), one(name, "f16", a >> np.uint32(16), b >> np.uint32(16))


@operation(r"selp\.[busf](?:16|32|64)")
def _(a: Array, b: Array, choice: Array) -> Array:
    return np.where(choice, a, b)


@operation(r"cvt\.([us](?:8|16|32|64))\.([us](?:8|16|32|64))")
def _(to: str, source: str, a: Array) -> Array:
    return unsigned(typed(a, source).astype(dtype_of(to)))


@operation(r"cvt\.(?:rn\.)?(f16|f32|f64)\.(f16|f32|f64)")
def _(to: str, source: str, a: Array) -> Array:
    return rounded(typed(a, source).astype(dtype_of(to)), to)


@operation(r"cvt\.rn\.f16x2\.f32")
def _(high: Array, low: Array) -> Array:
    high, low = (rounded(typed(one, "f32").astype(np.float16), "f16").astype(np.uint32) for one in (high, low))
    return high << np.uint32(16) | low


@operation(r"(add|sub|mul|div)\.rn\.(f32|f64)")
def _(name: str, kind: str, a: Array, b: Array) -> Array:
    return rounded(FUNCTIONS[name](typed(a, kind), typed(b, kind)), kind)


@operation(r"sqrt\.rn\.(f32|f64)")
def _(kind: str, a: Array) -> Array:
    return rounded(np.sqrt(typed(a, kind)), kind)


@operation(r"fma\.rn\.(f32|f64)")
def _(kind: str, a: Array, b: Array, c: Array) -> Array:
    return rounded(formula.fma(typed(a, kind), typed(b, kind), typed(c, kind)), kind)


@operation(r"(neg|abs)\.(f32|f64)")
def _(name: str, kind: str, a: Array) -> Array:
    value = typed(a, kind)
    return rounded(-value if name == "neg" else np.abs(value), kind)


@functools.cache
def find(name: str) -> tuple[Operation, tuple[str, ...]]:
    for pattern, function in OPERATIONS:
        match = pattern.fullmatch(name)
        if match:
            return function, match.groups()
    raise ExecutionError(f"{name} is not known")


@functools.cache
def widths(name: str) -> tuple[type[np.generic], ...]:
    """Return the types of immediate sources."""
    match = re.search(r"\.[busf](8|16|32|64)(x2)?$", name)
    size = int(match[1]) // (4 if match[2] else 8) if match else 1
    types = [np.dtype(f"u{size}").type] * 3
    if name.startswith(("shl", "shr")):
        types[1] = np.uint32
    if name.startswith("mad.wide"):
        types[2] = np.dtype(f"u{2 * size}").type
    return tuple(types)


# ---- threads ---------------------------------------------------------------------------------------------------------

_WIDTHS = {"r": np.uint32, "f": np.uint32, "rd": np.uint64, "fd": np.uint64, "rs": np.uint16, "p": np.bool_}


@dataclass
class Group:
    """Whole programs that have come the same way, as places in the list of a run."""

    at: int
    programs: Array
    registers: dict[str, Array] = field(default_factory=dict)
    epoch: int = 0

    def part(self, at: int, keep: Array, threads: int) -> Group:
        lanes = np.repeat(keep, threads)
        registers = {name: value[lanes] for name, value in self.registers.items()}
        return Group(at, self.programs[keep], registers, self.epoch)


class Run:
    """A launch of some programs on this process's memory; `executed` counts what groups of them did, by instruction."""

    def __init__(
        self,
        kernel: Kernel,
        programs: Sequence[int],
        threads: int,
        shared: int,
        arguments: Sequence[int],
        memory: Memory,
    ) -> None:
        if len(arguments) != len(kernel.parameters):
            raise ExecutionError(f"{len(arguments)} arguments for {len(kernel.parameters)} parameters")
        self.kernel, self.threads, self.memory = kernel, threads, memory
        self.arguments = dict(zip(kernel.parameters, arguments, strict=True))
        self.executed: Counter[int] = Counter()
        self.programs = np.array(programs, np.uint32)
        self.shared_size = -(-shared // 16) * 16
        self.globals = Bytes(memory.read_in(), threads, False, smallest_access(kernel, "global"))
        shared_data = np.zeros(self.shared_size * len(programs), np.uint8)
        self.shared = Bytes(shared_data, threads, True, smallest_access(kernel, "shared"))
        groups = [Group(0, np.arange(len(programs)))]
        with np.errstate(all="ignore"):
            while groups:
                groups += self._run(groups.pop())
        memory.write_back(self.globals.data)

    def _run(self, group: Group) -> list[Group]:
        """Execute to the end, or to a branch that some of the programs take."""
        self.group = group
        self.lane = np.tile(np.arange(self.threads), len(group.programs))
        self.thread = np.repeat(group.programs, self.threads) * self.threads + self.lane
        while True:
            instruction = self.kernel.instructions[group.at]
            self.executed[group.at] += 1
            group.at += 1
            try:
                guard = self._guard(instruction)
                if instruction.name == "ret":
                    if guard is not None:
                        raise ExecutionError("some threads return before the others")
                    return []
                if instruction.name in ("bra", "bra.uni"):
                    to = self.kernel.labels[instruction.operands[0]]
                    taken = np.ones(len(self.lane), bool) if guard is None else guard
                    taken = taken.reshape(-1, self.threads)
                    if np.any(taken.any(axis=1) != taken.all(axis=1)):
                        raise ExecutionError("threads of a program part ways")
                    if taken.all():
                        group.at = to
                    elif taken.any():
                        keep = taken[:, 0]
                        return [group.part(to, keep, self.threads), group.part(group.at, ~keep, self.threads)]
                    continue
                self._execute(instruction, guard)
            except (ExecutionError, KeyError, ValueError, TypeError) as error:
                raise ExecutionError(
                    f"{error} (line {instruction.line}, {instruction.place}: {instruction})"
                ) from error

    def _guard(self, instruction: Instruction) -> Array | None:
        if not instruction.guard:
            return None
        return self.group.registers[instruction.guard] ^ instruction.negated

    def value(self, text: str, kind: type[np.generic]) -> Array:
        """Return an operand; an immediate number takes the width of the type."""
        if text in self.group.registers:
            return self.group.registers[text]
        if text == "%tid.x":
            return self.lane.astype(np.uint32)
        if text == "%ctaid.x":
            return np.repeat(self.programs[self.group.programs], self.threads)
        if text == "global_smem":
            return np.zeros(len(self.lane), kind)
        match = re.fullmatch(r"(?:0[fd]([0-9A-F]+)|0x([0-9a-fA-F]+)|(-?\d+))U?", text)
        if match is None:
            raise ExecutionError(f"{text} has no value")
        number = int(match[1] or match[2] or "0", 16) if match[3] is None else int(match[3])
        width = 8 * np.dtype(kind).itemsize
        return np.full(len(self.lane), number % (1 << width), kind)

    def put(self, name: str, value: Array, guard: Array | None) -> None:
        if name == "_":
            return
        kind = _WIDTHS[re.match(r"%([a-z]+)", name)[1]]  # type: ignore[index]
        value = np.asarray(value).astype(kind, copy=False)  # a signed one extends its sign
        if value.shape != self.lane.shape:
            value = np.broadcast_to(value, self.lane.shape)
        if guard is not None:
            of_no_use = np.full(8, 0xA5, np.uint8).view(kind)[:1]  # to what comes later
            value = np.where(guard, value, self.group.registers.get(name, of_no_use))
        self.group.registers[name] = value

    def _execute(self, instruction: Instruction, guard: Array | None) -> None:
        name, operands = instruction.name, instruction.operands
        kind, *_ = name.split(".")
        if kind in ("ld", "st") and not name.startswith("ld.param"):
            self._access(name, operands, guard)
        elif name.startswith("ld.param."):
            self.put(operands[0], np.array(self.arguments[operands[1][0]] % (1 << 64), np.uint64), guard)
        elif kind == "mov":
            self._move(name, operands, guard)
        elif name in ("bar.sync", "bar.warp.sync"):
            if guard is not None or (name == "bar.warp.sync" and (self.threads != WARP or operands != ("-1",))):
                raise ExecutionError("not all threads wait")
            self.group.epoch += 1
        elif re.fullmatch(r"(shfl|redux)\.sync\..*", name):
            if guard is not None:
                raise ExecutionError("not all threads take part")
            self._exchange(name, operands)
        else:
            function, groups = find(name)
            sources = [self.value(text, type_) for text, type_ in zip(operands[1:], widths(name), strict=False)]
            result = function(*groups, *sources)
            if "|" in operands[0]:  # predicates of the low and the high half
                for one, half in zip(operands[0].split("|"), result, strict=True):
                    self.put(one, half, guard)
            else:
                self.put(operands[0], result, guard)

    def _move(self, name: str, operands: tuple[Any, ...], guard: Array | None) -> None:
        bits = int(name[-2:])
        to, source = operands
        if isinstance(to, tuple):
            value, part = self.value(source, np.dtype(f"u{bits // 8}").type), bits // len(to)
            for number, one in enumerate(to):
                self.put(one, value >> value.dtype.type(number * part), guard)
        elif isinstance(source, tuple):
            part = bits // len(source)
            kind = np.dtype(f"u{bits // 8}").type
            parts = [self.value(one, np.dtype(f"u{part // 8}").type).astype(kind) for one in source]
            self.put(to, sum(one << kind(number * part) for number, one in enumerate(parts)), guard)
        else:
            self.put(to, self.value(source, np.dtype(f"u{bits // 8}").type), guard)

    def _access(self, name: str, operands: tuple[Any, ...], guard: Array | None) -> None:
        match = re.fullmatch(r"(ld|st)\.(global|shared)(?:\.v([248]))?\.([bs])(8|16|32|64)", name)
        if match is None:
            raise ExecutionError(f"{name} is not known")
        is_load, space = match[1] == "ld", match[2]
        values, (base, offset) = operands if is_load else operands[::-1]
        values = values if isinstance(values, tuple) else (values,)
        if len(values) != int(match[3] or 1):
            raise ExecutionError("a vector of another size")
        size = int(match[5]) // 8
        lanes = np.arange(len(self.lane)) if guard is None else np.flatnonzero(guard)
        address = self.value(base, np.uint32 if space == "shared" else np.uint64)[lanes].astype(np.uint64)
        address = address + np.uint64(offset % (1 << 64))
        thread = self.thread[lanes]
        if space == "global":
            bytes_, at = self.globals, self.memory.index(address, size * len(values))
        else:
            if np.any(address % (size * len(values))) or np.any(address + size * len(values) > self.shared_size):
                raise ExecutionError("an address in shared memory is out of range or not aligned")
            bytes_, at = self.shared, (thread // self.threads) * self.shared_size + address.astype(np.int64)
        kind = np.dtype(f"u{size}")
        bytes_.note(at, size * len(values), thread, self.group.epoch, "read" if is_load else "write")
        for number, one in enumerate(values):
            if is_load:
                whole = np.zeros(len(self.lane), kind)
                whole[lanes] = bytes_.load(at + number * size, kind)
                self.put(one, typed(whole, match[4] + match[5]), guard)
            else:
                stored = self.value(one, kind.type)[lanes].astype(kind)
                bytes_.store(at + number * size, stored)

    def _exchange(self, name: str, operands: tuple[Any, ...]) -> None:
        to, source, *rest = operands
        values = self.value(source, np.uint32).reshape(-1, WARP)
        lane = np.broadcast_to(np.arange(WARP), values.shape)
        masks = self.value(rest[-1], np.uint32).reshape(-1, WARP)
        members = (masks[:, :, None] >> np.arange(WARP, dtype=np.uint32)) & 1 != 0  # warp, lane, other lane
        if not np.all(members[:, range(WARP), range(WARP)]):
            raise ExecutionError("a thread that is not in its own mask")
        if np.any(members & (masks[:, :, None] != masks[:, None, :])):
            raise ExecutionError("threads of one exchange have different masks")
        if name == "redux.sync.max.s32":
            signed = values.view(np.int32)[:, None, :]
            result = np.where(members, signed, np.iinfo(np.int32).min).max(axis=2).view(np.uint32)
        elif name == "redux.sync.add.s32":
            result = np.where(members, values[:, None, :], np.uint32(0)).sum(axis=2, dtype=np.uint32)
        elif name in ("shfl.sync.bfly.b32", "shfl.sync.idx.b32") and rest[1] == "31":
            other = self.value(rest[0], np.uint32).reshape(-1, WARP).astype(np.int64) & 31
            other = lane ^ other if "bfly" in name else other
            if not np.all(np.take_along_axis(members, other[:, :, None], axis=2)):
                raise ExecutionError("a thread asks one that is not in its mask")
            result = np.take_along_axis(values, other, axis=1)
        else:
            raise ExecutionError(f"{name} is not known")
        self.put(to, result.reshape(-1), None)
