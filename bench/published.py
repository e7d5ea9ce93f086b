"""Published figures side by side with what the plan's model says, and the presets' table of docs/plan.md.

    python bench/published.py figures    all rows of bench/published/figures.csv, and the assumption that decides each
    python bench/published.py gains      the gain of overlap by tokens of a step, on one GH200
    python bench/published.py presets    what `superadam plan` says of each preset on its machine

Nothing is tuned: where a row does not say on which GPU efficiency or CPU it was measured, the stated assumption stands.
"""

from __future__ import annotations

import argparse
import csv
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from superadam.cli.plan.answer import answer_for
from superadam.cli.plan.presets import presets
from superadam.cli.plan.rates import rates_of
from superadam.cli.plan.schedule import Part, buckets_of, parts_of, placed, synchronous
from superadam.offload.placement import Placement, numel_of_buckets
from superadam.plan import machines
from superadam.plan.events import Rates, Work, simulate
from superadam.plan.machines import Machine
from superadam.plan.memory import RESUMING, TRAINING, Setting, Subject, total

FIGURES = Path(__file__).parent / "published" / "figures.csv"
EFFICIENCY = 0.55  # of the GPU's peak, assumed where a row has no time without offload
GIGA = 1e9

CPU_ADAM = 28.0
"""Bytes that a fused AdamW with fp32 gradients and state moves for an element."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was published and what the model says, in the same unit, and what decides between them."""

    published: str
    predicted: str
    decided_by: str


def rows() -> list[dict[str, str]]:
    """Return all published rows; of one that is not predicted, `not_predicted` says what it does not say."""
    with FIGURES.open(newline="") as file:
        return list(csv.DictReader(file))


def dense(numel: float, forward: float, backward: float, layers: int = 40) -> tuple[Work, list[Part], Placement]:
    """Return the step of a dense model with four equal tensors in each layer."""
    each = torch.empty(int(numel / layers / 4), dtype=torch.bfloat16, device="meta")
    placement = Placement(0, numel_of_buckets(int(numel)), None, 1)
    parts = parts_of([(each, 1 / (4 * layers))] * (4 * layers), placement.bucket_numel)
    work = Work(buckets_of(parts, placement), forward, backward, bucket_numel=placement.bucket_numel)
    return work, parts, placement


def _with_cpu(machine: Machine, bandwidth: float) -> Machine:
    return replace(machine, cpu_bandwidth=replace(machine.cpu_bandwidth, value=bandwidth))


def _alone(machine: Machine, moved: float) -> float:
    """Return the seconds of an element of an optimizer by itself."""
    return moved / machine.cpu_bandwidth.value


def _optimizer(published: str, machine: str, numel: float, decided_by: str) -> Prediction:
    seconds = numel * _alone(machines.read(machine), CPU_ADAM)
    return Prediction(f"{published} s", f"{seconds:.3f} s", decided_by)


def _after(published: str, machine: Machine, numel: float, clock: float, moved: float, decided_by: str) -> Prediction:
    """Predict an optimizer that begins after backward, with a clock that was published."""
    work, _, _ = dense(numel, clock / 4, 0.75 * clock)
    found: Rates = rates_of(machine)
    passes = replace(found.passes, update=_alone(machine, moved))
    return Prediction(f"{published} s", f"{synchronous(replace(found, passes=passes), work):.2f} s", decided_by)


def _overlapped(published: str, machine: Machine, numel: float, clock: float, decided_by: str) -> Prediction:
    """Predict this scheduler, with a clock that was published."""
    work, _, _ = dense(numel, clock / 4, 0.75 * clock)
    step = simulate(rates_of(machine), work)
    return Prediction(f"{published} s", f"{step.seconds:.2f} s ({step.hidden:.2f} hidden)", decided_by)


def _clock(machine: Machine, active: float, tokens: float, *, recomputes: bool = True) -> tuple[float, float]:
    """Return the seconds of forward and backward of a dense model by 6 or 8 operations, without scores."""
    forward = 2 * active * tokens / (EFFICIENCY * machine.gpu_operations.value)
    return forward, (3 if recomputes else 2) * forward


def _streamed(published: str, machine: str, numel: float, tokens: float, unit: str) -> Prediction:
    """Predict a model whose weights flow and whose optimizer begins after backward."""
    found = machines.read(machine)
    forward, backward = _clock(found, numel, tokens)
    work, _, _ = dense(numel, forward, backward)
    seconds = simulate(rates_of(found), replace(work, flows=True)).clock + numel * _alone(found, CPU_ADAM)
    words = f"{seconds:.2f} s" if unit == "s" else f"{6 * numel * tokens / seconds / 1e12:.0f} TFLOP/s"
    return Prediction(
        f"{published} {unit}", words, f"the GPU's efficiency, {EFFICIENCY} assumed; the CPU is not stated"
    )


def _rate_of(name: str, tokens: int) -> float:
    """Return the hardware's TFLOP/s of a preset with 4 sequences on one GH200."""
    preset = presets()[name]
    answer = answer_for(
        name, Subject.of(preset.config), Setting(4, tokens), machines.read("gh200"), EFFICIENCY, looks_for_gains=False
    )
    return answer.timings[0].hardware_rate / 1e12


def _superoffload() -> Prediction:
    found = {name: _rate_of(name, 4096) for name in ("qwen3-14b", "phi-4", "gpt-oss-20b")}
    machine = machines.read("gh200")
    numel = presets()["gpt-oss-20b"].parameters
    floor = numel * _alone(machine, CPU_ADAM)
    words = ", ".join(f"{name} {rate:.0f}" for name, rate in found.items())
    return Prediction(
        "about 500 to 600 TFLOP/s",
        words,
        "what is counted, and the efficiency. 600 for GPT-OSS-20B contradicts a bound: its Adam takes "
        f"{floor:.1f} s of memory traffic, and a step at 600 TFLOP/s of active parameters would be shorter",
    )


def _largest() -> Prediction:
    machine = machines.read("gh200")
    by_host = {
        words: machine.host_memory.value / each / GIGA
        for words, each in {"fp32 state": 16.6, "bf16 moments and 24-bit masters": 11.6}.items()
    }
    return Prediction(
        "25 B on one GH200",
        ", ".join(f"{size:.0f} B with {words}" for words, size in by_host.items()),
        "host memory, at 16.6 and 11.6 bytes per parameter where new values wait on the host; not HBM",
    )


def _long() -> Prediction:
    width, layers, numel, tokens = 5120, 40, 13e9, float(1 << 20)
    linear, scores = 6 * numel * tokens, 6 * tokens * tokens * width * layers
    seconds = (linear + scores) / (EFFICIENCY * 8 * 989e12)
    adam = numel / 8 * _alone(machines.read("gh200"), CPU_ADAM)
    return Prediction(
        "55 % MFU",
        f"{scores / (linear + scores):.0%} of the operations are attention; {seconds:.0f} s a step, Adam {adam:.2f} s",
        "whether layers are recomputed and what of causal attention is counted; offload plays no part",
    )


def _trained(published: str, machine: str, active: float, tokens: float) -> Prediction:
    found = machines.read(machine)
    seconds = sum(_clock(found, active, tokens))
    words = f"{tokens / seconds:,.0f} tokens/s a GPU"
    return Prediction(
        published, words, f"the GPU's efficiency, {EFFICIENCY} assumed; the row measures it: nothing is offloaded"
    )


def _alps(published: str, *, overlaps: bool) -> Prediction:
    clock, machine = 4 * 2048 / 14_600, machines.read("gh200")
    work, parts, placement = dense(7.7e9 / 4, clock / 3, 2 * clock / 3)
    rates = rates_of(machine)
    seconds = placed(rates, work, parts, placement, 40e9, 12.0)[2].seconds if overlaps else synchronous(rates, work)
    decided_by = "what DeepSpeed loses in addition to Adam; the clock is its ZeRO-3, 14,600 tokens/s"
    return Prediction(f"{published} tokens/s", f"{4 * 2048 / seconds:,.0f} tokens/s", decided_by)


def _slow_cpu() -> Prediction:
    seconds = 1.35e9 * CPU_ADAM / (0.75 * 115.2e9)
    return Prediction(
        "22.88 s", f"{seconds:.2f} s", "a fault there: six channels of DDR4-2400 move the state in this time"
    )


H200_CPU = "GB/s of the CPU for each rank, 57 assumed; the clock is the row without offload"


@functools.cache
def predictions() -> Mapping[str, Callable[[], Prediction]]:
    """Return how each row that says enough is predicted, by its id."""
    quarter = 30.53e9 / 8
    ryzen = _with_cpu(machines.read("rtx4090-desktop"), 0.75 * 51.2e9)
    h200, workstation = machines.read("h200"), machines.read("rtx4090-workstation")
    a100 = _with_cpu(machines.read("h100"), 0.75 * 410e9 / 4)
    grace = "486 GB/s by STREAM: the floor of memory; the published times are 341 to 368"
    ddr4 = "DDR4 with two channels, 38 GB/s assumed; the clock is the row without offload"
    return {
        "graceadam-1b": lambda: _optimizer("0.082", "gh200", 1e9, grace),
        "graceadam-4b": lambda: _optimizer("0.316", "gh200", 4e9, grace),
        "graceadam-8b": lambda: _optimizer("0.608", "gh200", 8e9, grace),
        "ds-sve-1b": lambda: _optimizer("0.125", "gh200", 1e9, "a Grace assumed; the row names no processor"),
        "ds-sve-2b": lambda: _optimizer("0.215", "gh200", 2e9, "a Grace assumed; the row names no processor"),
        "prime-30b-full-16384": lambda: _overlapped("5.73", h200, quarter, 5.17, H200_CPU),
        "prime-30b-full-32768": lambda: _overlapped("15.4-16.7", h200, quarter, 18.5, f"{H200_CPU}, its middle"),
        "ao-1.1b-1": lambda: _after("3.13", ryzen, 1.1e9, 1.27, CPU_ADAM, ddr4),
        "ao-1.1b-3": lambda: _after("1.53", ryzen, 1.1e9, 1.27, 14.0, ddr4),
        "prime-4b-master": lambda: _after(
            "5.629", workstation, 4.02e9, 1.566, CPU_ADAM, "the CPU, which is not stated: 230 GB/s assumed"
        ),
        "ds-z3-4090-8b-b8": lambda: _streamed("8.9672", "rtx4090-workstation", 8.03e9, 8 * 1024, "s"),
        "ds-z3-4090-8b-b16": lambda: _streamed("11.934", "rtx4090-workstation", 8.03e9, 16 * 1024, "s"),
        "ds-z3-4090-8b-b32": lambda: _streamed("18.2987", "rtx4090-workstation", 8.03e9, 32 * 1024, "s"),
        "mega-h100-7b": lambda: _streamed("272", "h100-alone", 7.6e9, 148 * 1024, "TFLOP/s"),
        "horizon-h100-32b": lambda: _streamed("259", "h100-alone", 32.8e9, 96 * 1024, "TFLOP/s"),
        "so-gh200": _superoffload,
        "so-ablation": _largest,
        "so-13b-1m": _long,
        "prime-sft-0": lambda: _trained("26,005 tokens/s", "h100", 0.6e9, 2 * 8192),
        "prime-sft-2": lambda: _trained("49,717 tokens/s, 6,215 a GPU", "h100", 4.02e9, 2 * 16384),
        "prime-sft-3": lambda: _trained("53,142 tokens/s, 6,643 a GPU", "h200", 4.02e9, 2 * 16384),
        "prime-sft-4": lambda: _trained("68,356 tokens/s, 8,545 a GPU", "gb200", 4.02e9, 2 * 16384),
        "prime-sft-5": lambda: _trained("35,026 tokens/s, 4,378 a GPU", "h200", 3.3e9, 2 * 16384),
        "zf-7b": lambda: _after(
            ">7", a100, 6.74e9 / 4, 0.5, CPU_ADAM, "the CPU, which is not stated: 77 GB/s a rank assumed"
        ),
        "ds1635-1.35b": _slow_cpu,
        "eth-zero-offload": lambda: _alps("8,030", overlaps=False),
        "eth-superoffload": lambda: _alps("11,700", overlaps=True),
    }


def figures_table() -> list[str]:
    """Return the rows of the file that can be predicted, in Markdown."""
    lines = ["| published | figure | by the model | decided by |", "|---|---|---|---|"]
    for row in rows():
        name = f"{row['system']}, {row['model']}, {row['gpus'] or '?'} x {row['gpu'] or '?'}".replace("1 x ?", "CPU")
        if (found := predictions().get(row["id"])) is not None:
            predicted = found()
            lines.append(f"| {name} | {predicted.published} | {predicted.predicted} | {predicted.decided_by} |")
    return lines


def gain_table(numel: float = 13e9) -> list[str]:
    """Return the gain over an optimizer after backward by tokens of a step, for a dense model on one GH200."""
    machine = machines.read("gh200")
    lines = [
        "| tokens of a step | forward and backward | without overlap | with | gain |",
        "|---:|---:|---:|---:|---:|",
    ]
    for tokens in (1024, 2048, 4096, 8192, 16384, 32768, 65536):
        work, parts, placement = dense(numel, *_clock(machine, numel, tokens))
        rates = rates_of(machine)
        _, work, step = placed(rates, work, parts, placement, 20e9, 12.0)
        after = synchronous(rates, work)
        lines.append(
            f"| {tokens:,} | {step.clock:.2f} s | {after:.2f} s | {step.seconds:.2f} s | {after / step.seconds:.2f} |"
        )
    return lines


def expectation(name: str) -> tuple[str, str]:
    """Return a preset's row of the table, and the line in its file that says what it expects."""
    preset = presets()[name]
    answer = answer_for(
        name,
        Subject.of(preset.config),
        preset.setting,
        machines.read(preset.machine),
        EFFICIENCY,
        looks_for_gains=False,
    )
    (timing,), memory = answer.timings, answer.memory
    gpu, host = max(map(total, memory.gpu.values())) / GIGA, total(memory.host[TRAINING]) / GIGA
    resuming = total(memory.host[RESUMING]) / GIGA
    setting = preset.setting
    state = "fp32" if setting.moments == setting.master == "fp32" else f"{setting.moments}, {setting.master}"
    shape = f"{setting.ranks} x {setting.sequences} x {setting.tokens}"
    row = (
        f"| `{name}` | {preset.machine} | {shape} | {state} | {gpu:.0f} of {memory.gpu_limit / GIGA:.0f} "
        f"| {host:.0f} of {memory.host_limit / GIGA:.0f} | {resuming:.0f} "
        f"| {timing.step.seconds:.2f} | {timing.step.hidden:.2f} | {timing.tokens_per_second:,.0f} |"
    )
    line = (
        f"# By `superadam plan {name}`, on {preset.machine} at {EFFICIENCY} of the GPU's peak, which is assumed: "
        f"{timing.tokens_per_second:,.0f} tokens/s,\n# {timing.step.hidden:.0%} of Adam hidden, {gpu:.0f} GB on each "
        f"GPU, {host:.0f} GB of host memory for each rank."
    )
    return row, line


def presets_table() -> list[str]:
    """Return what a plan says of each preset, in Markdown, without the head of the table."""
    return [expectation(name)[0] for name in presets()]


def main(words: Sequence[str] | None = None) -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["figures", "gains", "presets"])
    asked = parser.parse_args(words)
    tables = {"figures": figures_table, "gains": gain_table, "presets": presets_table}
    lines = tables[asked.what]()
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
