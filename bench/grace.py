"""What the Arm kernels cost, as a model: disassembled instructions and published Neoverse V2 throughputs.

    python bench/grace.py            prints the tables of docs/grace.md
    python bench/grace.py --write    puts them into docs/grace.md and draws docs/grace.png

Nothing here is a measurement on Arm hardware. The instructions are those of the objects that the wheel holds; which of
them a block of 16 elements runs through is taken from an emulator's trace of a long array minus that of a shorter one.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / folder) for folder in ("tests", "bench", "tools")]

from arm import emulation  # noqa: E402
from arm.emulation import Cpu, EmulatedJob  # noqa: E402
from elftools.elf.elffile import ELFFile  # noqa: E402
from neoverse_v2 import Kind, bounds, rule_of  # noqa: E402
from support.kernel_arrays import Job, make_segment  # noqa: E402

from superadam.kernels.hyperparameters import Coefficients, Hyperparameters  # noqa: E402
from superadam.kernels.native import Dtype, Pass  # noqa: E402

CORES = 72
CLOCK = 3.0e9
"""Cycles per second: NVIDIA's data sheet of the Grace CPU Superchip, "all-core SIMD frequency"."""
BANDWIDTH = 500e9
"""Bytes per second of one Grace. The same data sheet: 512 GB/s with 120 or 240 GB of memory, 384 GB/s with 480 GB."""
SMALL_BANDWIDTH = 384e9

BLOCK = 16
LONG, SHORT = 1024, 512
MARKERS = ("<!-- bench/grace.py begins -->", "<!-- bench/grace.py ends -->")
DOCUMENT = ROOT / "docs" / "grace.md"
PICTURE = ROOT / "docs" / "grace.png"


@dataclass(frozen=True)
class Case:
    """A pass as superadam runs it: with AdamW's flags, and the norm in the pass that sees the gradient first."""

    which: Pass
    gradient: Dtype
    out: Dtype
    norm: bool
    bytes: int

    @property
    def symbol(self) -> str:
        return f"run_{self.which.name}_{self.gradient.name}_{self.out.name}_0_0"  # without a list, of plain state

    @property
    def label(self) -> str:
        words = {Dtype.NONE: "", Dtype.FLOAT32: "fp32", Dtype.BFLOAT16: "bf16"}
        out = f", {words[self.out]} out" if self.out is not Dtype.NONE else ""
        return (
            f"{self.which.name.lower()}, {words[self.gradient]} gradient{out}"
            f"{' + norm' if self.norm and self.which is not Pass.NORM else ''}"
        )


CASES = (
    Case(Pass.NORM, Dtype.BFLOAT16, Dtype.NONE, True, 2),
    Case(Pass.NORM, Dtype.FLOAT32, Dtype.NONE, True, 4),
    Case(Pass.SPECULATE, Dtype.BFLOAT16, Dtype.BFLOAT16, True, 16),
    Case(Pass.SPECULATE, Dtype.FLOAT32, Dtype.BFLOAT16, True, 18),
    Case(Pass.COMMIT, Dtype.BFLOAT16, Dtype.NONE, False, 26),
    Case(Pass.COMMIT, Dtype.FLOAT32, Dtype.NONE, False, 28),
    Case(Pass.UPDATE, Dtype.FLOAT32, Dtype.BFLOAT16, False, 30),
    Case(Pass.COMMIT_AND_SPECULATE, Dtype.BFLOAT16, Dtype.BFLOAT16, True, 30),
    Case(Pass.COMMIT_AND_SPECULATE, Dtype.FLOAT32, Dtype.BFLOAT16, True, 34),
)


@dataclass(frozen=True)
class Program:
    """The runner: the instruction at each address, and the addresses between which all kernels lie."""

    text: dict[int, str]
    first: int
    last: int

    @classmethod
    def read(cls, path: Path) -> Program:
        """Disassemble `path`."""
        with path.open("rb") as file:
            symbols = list(ELFFile(file).get_section_by_name(".symtab").iter_symbols())
        kernels = [one for one in symbols if re.match("run_[A-Z]", one.name)]
        last = max(one["st_value"] + one["st_size"] for one in kernels)
        return cls(dict(emulation.disassemble(path)), min(one["st_value"] for one in kernels), last)


def trace(program: Program, isa: str, length: int, folder: Path) -> Counter[tuple[str, int]]:
    """Return how often the instruction at each address ran, by function, when each case ran on `length` elements."""
    hyper = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.1, amsgrad=False, maximize=False, decoupled_weight_decay=True)
    sets = [Coefficients.at_step(hyper, 3)]
    jobs = []
    for case in CASES:
        segment = make_segment(1, length, case.gradient, case.out, norm=case.norm)
        del segment.arrays["max_exp_avg_sq"]
        jobs.append(EmulatedJob(Job(case.which, [segment], sets)))
    emulation.write_jobs(folder / "jobs", jobs)
    log = folder / "trace"
    kernels = f"{program.first:#x}..{program.last:#x}"
    options = ("-singlestep", "-d", "exec,nochain", "-dfilter", kernels, "-D", str(log))
    done = emulation.run_jobs(Cpu.SVE_128, isa, folder / "jobs", folder / "results", options)
    if done.returncode != 0:
        raise RuntimeError(f"the runner ended with {done.returncode}: {done.stderr}")
    ran = re.findall(r"\[\w+/(\w+)/\S*\] (run_[A-Z]\w+)", log.read_text())
    return Counter((symbol, int(address, 16)) for address, symbol in ran)


def instructions(program: Program, isa: str) -> dict[Case, Counter[str]]:
    """Return how many of each instruction the main loop of each case runs per 4 elements."""
    with tempfile.TemporaryDirectory() as name:
        more, fewer = (trace(program, isa, length, Path(name)) for length in (LONG, SHORT))
    counts: dict[Case, Counter[str]] = {case: Counter() for case in CASES}
    for (symbol, address), count in more.items():
        case = next(case for case in CASES if case.symbol == symbol)
        counts[case][program.text[address]] += (count - fewer[symbol, address]) * 4 / (LONG - SHORT)
    return counts


@dataclass(frozen=True)
class Cost:
    """What one case costs with one instruction set. Counts are per 4 elements, cycles per element and core."""

    case: Case
    isa: str
    kinds: Counter[Kind]
    cycles: float
    bottleneck: str

    def available(self, bandwidth: float = BANDWIDTH) -> float:
        """Return the cycles per element in which the memory moves the bytes of one element for every core."""
        return self.case.bytes * CORES * CLOCK / bandwidth


def cost(case: Case, isa: str, counts: Counter[str]) -> Cost:
    """Return the largest of the bounds, with the counts by kind."""
    kinds: Counter[Kind] = Counter()
    for instruction, count in counts.items():
        kinds[rule_of(instruction)[0]] += count
    limits = list(bounds(counts))
    if case.norm:
        # Each lane is one chain of FMAs, 4 cycles each; SVE keeps the lanes in memory: load 6, store 2 cycles more.
        limits.append(((4 if isa == "neon" else 12) * 4 / BLOCK, "chain of each sum"))
    cycles, bottleneck = max(limits, key=lambda limit: limit[0])
    return Cost(case, isa, kinds, cycles / 4, bottleneck)


def all_costs() -> list[Cost]:
    """Return the costs of every case with every vector instruction set, on a build of this checkout."""
    program = Program.read(emulation.build())
    by_isa = {isa: instructions(program, isa) for isa in ("neon", "sve_bf16", "sve")}
    return [cost(case, isa, counts[case]) for case in CASES for isa, counts in by_isa.items()]


def milliseconds(costs: Cost, bandwidth: float) -> float:
    """Return how long 1 B elements take when `CORES` cores share the work and the memory moves `bandwidth`."""
    return 1e12 * max(costs.case.bytes / bandwidth, costs.cycles / (CORES * CLOCK))


def tables(costs: list[Cost]) -> str:
    """Return both tables in Markdown, without rows of "sve" that say the same as "sve_bf16"."""
    with_bfcvt = {c.case: c.kinds for c in costs if c.isa == "sve_bf16"}
    rows = [c for c in costs if c.isa != "sve" or c.kinds != with_bfcvt[c.case]]
    lines = [
        f"Compiler: zig {version('ziglang')}.",
        "",
        "Instructions per 4 elements, at a vector length of 128 bits:",
        "",
    ]
    lines += [f"| pass | kernels | {' | '.join(Kind)} | all |", f"|---|---|{'---:|' * (len(Kind) + 1)}"]
    for c in rows:
        counts = " | ".join(f"{c.kinds[kind]:.4g}" for kind in Kind)
        lines.append(f"| {c.case.label} | {c.isa} | {counts} | {c.kinds.total():.4g} |")
    lines += [
        "",
        f"Cycles per element and core; {CORES} cores at {CLOCK / 1e9:g} GHz; the memory moves {BANDWIDTH / 1e9:g} GB/s "
        f"(in the last column {SMALL_BANDWIDTH / 1e9:g} GB/s):",
        "",
        "| pass | bytes | kernels | compute | slowest part | memory | room | cores that fill the memory | 1 B elements "
        f"| at {SMALL_BANDWIDTH / 1e9:g} GB/s |",
        "|---|---:|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for c in rows:
        room = c.available() / c.cycles
        lines.append(
            f"| {c.case.label} | {c.case.bytes} | {c.isa} | {c.cycles:.2f} | {c.bottleneck} | {c.available():.2f} "
            f"| {room:.1f} x | {math.ceil(CORES / room)} | {milliseconds(c, BANDWIDTH):.1f} ms "
            f"| {milliseconds(c, SMALL_BANDWIDTH):.1f} ms |"
        )
    return "\n".join(lines)


def draw(costs: list[Cost], path: Path) -> None:
    """Draw cycles per element against bytes per element, and the lines above which the cores would be too slow."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    ends = (1.5, 60.0)
    for bandwidth, style in ((BANDWIDTH, "-"), (SMALL_BANDWIDTH, "--")):
        line = [end * CORES * CLOCK / bandwidth for end in ends]
        axes.plot(ends, line, style, color="0.3", label=f"memory at {bandwidth / 1e9:g} GB/s")
    axes.fill_between(ends, [end * CORES * CLOCK / BANDWIDTH for end in ends], color="0.93", zorder=0)
    for isa, marker, shift in (("neon", "o", 0.97), ("sve_bf16", "^", 1.0), ("sve", "v", 1.03)):
        chosen = [c for c in costs if c.isa == isa]
        axes.plot([c.case.bytes * shift for c in chosen], [c.cycles for c in chosen], marker, label=f"{isa} kernels")
    for which in dict.fromkeys(case.which for case in CASES):
        group = [c for c in costs if c.case.which is which]
        below = which in (Pass.NORM, Pass.UPDATE)
        height = (min if below else max)(c.cycles for c in group)
        middle = math.exp(sum(math.log(c.case.bytes) for c in group) / len(group))
        spot = (0, -17 if below else 9)
        axes.annotate(which.name.lower(), (middle, height), spot, textcoords="offset points", ha="center", fontsize=9)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=(0.15, 30))
    axes.set_xticks([2, 4, 6, 10, 16, 20, 30, 50])
    axes.set_yticks([0.2, 0.5, 1, 2, 5, 10, 20])
    axes.get_xaxis().set_major_formatter("{x:g}")
    axes.get_yaxis().set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("bytes per element, read and written")
    axes.set_ylabel(f"cycles per element on each of {CORES} cores at {CLOCK / 1e9:g} GHz")
    axes.set_title("Model of one Grace, not a measurement: below a line the memory is the limit")
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print the tables, or write them and the picture into docs/."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="update docs/grace.md and docs/grace.png")
    write = parser.parse_args().write
    reason = emulation.missing_tools()
    if reason:
        raise SystemExit(reason)
    costs = all_costs()
    if not write:
        sys.stdout.write(tables(costs) + "\n")
        return
    before, _, rest = DOCUMENT.read_text().partition(MARKERS[0])
    after = rest.partition(MARKERS[1])[2]
    DOCUMENT.write_text(f"{before}{MARKERS[0]}\n{tables(costs)}\n{MARKERS[1]}{after}")
    draw(costs, PICTURE)


if __name__ == "__main__":
    main()
