"""Trains a small transformer with superadam and checks every bit of it: the program behind `make demo`.

    pip install '.[cli]'
    python examples/train.py --steps 200 --verify --inject-nan 70 --out run

It learns the sources of Python's standard library byte by byte. The optimizer works while backward runs. At the end a
table tells what became of the steps, and `training.png` shows it. `--verify` repeats the run with torch's AdamW, after
backward, and compares every bit of parameters, masters and moments: the exit status is then 0, or 1 where one differs.
It is one process and saves no checkpoint: examples/finetune.py trains published models, on several GPUs, and resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

try:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    sys.exit(f'train.py cannot be run ({error}); in the clone: pip install ".[cli]"')

import superadam
from superadam import OffloadScheduler, OverlapStatistics, SpeculativeCPUAdamW, Statistics, StepKind, StepOutcome

OPTIONS = {"betas": (0.9, 0.95), "weight_decay": 0.1}  # what language models are usually trained with
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main(words: Sequence[str] | None = None) -> int:
    """Train as the command line says, tell what happened, and return the exit status."""
    options = (parser := make_parser()).parse_args(words)
    try:
        text = set_up(options)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"cannot use {error.filename}: {error.strerror}; give another place")
    console, found = Console(highlight=False), None
    run = train(options, text, SpeculativeCPUAdamW, console)
    if options.verify:
        console.print("the same run once more, without speculation and scheduler", style="dim")
        found = compare(run, train(options, text, PLAIN))
    console.print(table(options, run))
    picture(options, run, found).savefig(options.out / "training.png", dpi=150)
    if options.report is not None:
        options.report.write_text(json.dumps(report(options, run, found), indent=2) + "\n")
    console.print("wrote " + ", ".join(map(str, files_of(options))), soft_wrap=True)
    if found is None:
        return 0
    console.print(verdict(found), style="bold green" if found["verified"] else "bold red", soft_wrap=True)
    return 0 if found["verified"] else 1


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """Exit with `message` on stderr."""
        self.exit(2, f"{self.prog}: {message}\n")


def make_parser() -> Parser:
    """Return the parser of all options."""
    parser = Parser(prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=MODELS, default="bytes", help="54 thousand, 3 or 11 million parameters (default: bytes)")
    add("--text", type=Path, metavar="FILE", help="what is learnt (default: the sources of Python's standard library)")
    add("--dtype", choices=DTYPES, default="bf16", help="of parameters; masters are fp32 (default: bf16)")
    add("--steps", type=int, default=300, metavar="N", help="how many there are (default: 300)")
    add("--lr", type=float, metavar="RATE", help="peak learning rate (default: the model's)")
    add("--max-grad-norm", type=float, default=1.0, metavar="NORM", help="clip to it; inf for never (default: 1.0)")
    add("--seed", type=int, default=0, metavar="N", help="of initial weights and batches (default: 0)")
    add("--device", default="cpu", help="where the model computes: cpu, cuda or cuda:N (default: cpu)")
    add("--no-overlap", dest="overlap", action="store_false", help="step after backward; the bits are the same")
    add("--inject-nan", type=int, action="append", default=[], metavar="STEP", help="mar a gradient; may be repeated")
    add("--verify", action="store_true", help="repeat the run with torch's AdamW, and compare every bit")
    add("--out", type=Path, default="superadam-run", metavar="DIR", help="of the picture (default: %(default)s)")
    add("--report", type=Path, metavar="FILE", help="write the figures of the run as JSON")
    add("--trace", type=Path, metavar="FILE", help="write what ran when in the last steps, for ui.perfetto.dev")
    return parser


def set_up(options: argparse.Namespace) -> Tensor:
    """Return the text and make the folders; before, raise ValueError or OSError for what cannot be done."""
    for name in ("steps", "lr", "max_grad_norm"):
        if (value := getattr(options, name)) is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give a number above 0")
    for step in options.inject_nan:
        if not 0 < step <= options.steps:
            raise ValueError(f"--inject-nan is {step}; give a step from 1 to {options.steps}")
    if options.trace is not None and not options.overlap:
        raise ValueError("--trace needs a run that overlaps; leave out --trace or --no-overlap")
    try:
        torch.empty(1, device={"cpu": "cpu", "cuda": options.device}[options.device.partition(":")[0]])
    except (KeyError, RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {options.device} is not available here; give cpu, or cuda with a GPU") from error
    text = read_text(options.text, MODELS[options.model].seq + 1)
    files = files_of(options)
    for path in files:
        if path.exists() or files.count(path) > 1:
            raise ValueError(f"{path} would be overwritten; move it away, or give another name")
    superadam.active_isa(), superadam.get_num_threads()  # raise where environment variables are wrong
    if options.verify and options.device != "cpu":  # else a GPU adds up in another order each time
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission to write", str(path.parent))
    return text


def files_of(options: argparse.Namespace) -> list[Path]:
    """Return the files that a run writes."""
    return [path for path in (options.out / "training.png", options.report, options.trace) if path is not None]


def read_text(path: Path | None, needed: int) -> Tensor:
    """Return the bytes of a file, or of Python's standard library without its tests, as uint8."""
    root, others = Path(sysconfig.get_path("stdlib")), {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    sources = (source for source in root.rglob("*.py") if others.isdisjoint(source.relative_to(root).parts))
    content = b"".join(source.read_bytes() for source in sorted(sources)) if path is None else path.read_bytes()
    if len(content) < needed:
        raise ValueError(f"the text has {len(content)} bytes, but a sequence {needed}; give a longer one with --text")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


# ---- a run ----
@dataclass
class Run:
    """What a training leaves: each step's loss (nats per byte) and outcome, then parameters, masters and moments."""

    losses: list[float] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    seconds: float = 0.0
    parameters: list[Tensor] = field(default_factory=list)
    state: list[Tensor] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    overlap: OverlapStatistics = field(default_factory=OverlapStatistics)


def train(options: argparse.Namespace, text: Tensor, make_optimizer: Any, console: Console | None = None) -> Run:
    """Train from the start; a run for the console may overlap and be traced, one to compare with is plain."""
    shape, dtype, device, run = MODELS[options.model], DTYPES[options.dtype], torch.device(options.device), Run()
    with device:  # not every CPU multiplies bf16 fast
        torch.manual_seed(options.seed)
        model = Decoder(shape, torch.float32 if device.type == "cpu" else dtype).to(dtype)
    peak, number = options.lr or shape.lr, 0
    optimizer = make_optimizer(model.parameters(), lr=peak, max_grad_norm=options.max_grad_norm, **OPTIONS)
    # Into the last gradient of backward: the others are speculated on by then.
    mar: Any = model.tokens.weight.register_hook
    mar(lambda gradient: gradient * math.nan if number in options.inject_nan else None)
    # Where the model computes on all cores, "auto" would overlap nothing; and make few buckets of so little.
    numel = -(-sum(parameter.numel() for parameter in model.parameters()) // 8)
    choice: Any = {"num_threads": 1, "bucket_numel": numel} if device.type == "cpu" else {}
    with OffloadScheduler(optimizer, model, **choice) if console and options.overlap else nullcontext() as scheduler:
        for number in range(1, options.steps + 1):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1.0, 4 * number / options.steps)  # it rises for a quarter of the steps
            starts = torch.randint(len(text) - shape.seq, (shape.batch, 1))
            loss = model(text[starts + torch.arange(shape.seq + 1)].long().to(device))
            loss.backward()
            optimizer.step()
            model.zero_grad()
            run.losses.append(loss.item())
            run.outcomes.append(outcome := optimizer.last_outcome)
            run.seconds += time.perf_counter() - began
            if console and (number % max(1, options.steps // 20) == 0 or number in options.inject_nan):
                words = f"loss {run.losses[-1]:6.3f}   norm {outcome.grad_norm:7.3f}   {outcome.kind.value}"
                console.print(f"step {number:>4} of {options.steps}   {words}")
        if scheduler is not None and options.trace is not None:
            scheduler.export_trace(options.trace)
    entries = optimizer.state_dict()["state"]
    for index, parameter in enumerate(model.parameters()):
        entry = {"master": parameter.detach(), **entries.get(index, {})}  # in fp32, a parameter is its own
        run.parameters.append(parameter.detach().cpu())
        run.state += [entry[key].cpu() for key in ("master", "exp_avg", "exp_avg_sq") if key in entry]
    run.statistics = getattr(optimizer, "statistics", run.statistics)
    run.overlap = run.overlap if scheduler is None else scheduler.statistics
    return run


# ---- the same run without superadam ----
class TorchAdamW:
    """What superadam agrees with: torch's AdamW on fp32 masters, after backward, clipped by the norm of all."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, max_grad_norm: float, **options: Any) -> None:
        self.parameters: list[Any] = list(parameters)
        self.masters = [nn.Parameter(p.detach().to("cpu", torch.float32, copy=True)) for p in self.parameters]
        self.adamw = torch.optim.AdamW(self.masters, fused=True, **options)
        self.param_groups, self.max_grad_norm = self.adamw.param_groups, max_grad_norm

    @torch.no_grad()
    def step(self) -> None:
        """Make the step, or none where a gradient holds Inf or NaN."""
        gradients = [p.grad.to("cpu", torch.float32, copy=True) for p in self.parameters]
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        self.last_outcome = StepOutcome(StepKind.SKIPPED, norm, 1.0)
        if not math.isfinite(norm):
            return
        factor = torch.tensor(min(1.0, self.max_grad_norm / (norm + 1e-6))).item()  # rounded to fp32
        self.last_outcome = StepOutcome(StepKind.COMMITTED if factor == 1.0 else StepKind.CLIPPED, norm, factor)
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.mul_(factor)
        self.adamw.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Return masters and moments by the names that superadam gives them."""
        entries = [{"master": master.detach(), **self.adamw.state[master]} for master in self.masters]
        return {"state": dict(enumerate(entries))}


# Other kernels of torch do not round each element alike; there, superadam without a scheduler is compared with.
PLAIN: Any = TorchAdamW if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else SpeculativeCPUAdamW


def compare(run: Run, other: Run) -> dict[str, int]:
    """Return how many elements of masters and moments there are, and how many of all have other bits."""

    def differing(ours: list[Tensor], theirs: list[Tensor]) -> int:
        integers = {2: torch.int16, 4: torch.int32}
        pairs = zip(ours, theirs, strict=True)
        return sum(int((a.view(integers[a.itemsize]) != b.view(integers[b.itemsize])).sum()) for a, b in pairs)

    steps = 0
    for ours, theirs, *losses in zip(run.outcomes, other.outcomes, run.losses, other.losses, strict=True):
        # Norms may differ in their last digits, because sums in another order do.
        is_near = ours.kind is StepKind.SKIPPED or math.isclose(ours.grad_norm, theirs.grad_norm, rel_tol=1e-10)
        steps += ours.kind is not theirs.kind or not is_near or len(set(map(repr, losses))) > 1  # NaN is like NaN
    elements, parameters = differing(run.state, other.state), differing(run.parameters, other.parameters)
    found = {"elements_differing": elements, "parameters_differing": parameters, "steps_differing": steps}
    return {"verified": not any(found.values()), "elements": sum(one.numel() for one in run.state), **found}


def verdict(found: dict[str, int]) -> str:
    """Return in words what differs between two runs."""
    other = "torch.optim.AdamW(fused=True)" if PLAIN is TorchAdamW else "plain steps"
    words = "{elements_differing:,} of {elements:,} elements of p, m and v differ from " + f"{other} in any bit"
    more = "; so do {parameters_differing:,} of the parameters, and {steps_differing:,} steps"
    return (f"verified: {words}" if found["verified"] else f"NOT verified: {words}{more}").format(**found)


# ---- what is told ----
def table(options: argparse.Namespace, run: Run) -> Table:
    """Return what became of steps and of speculation, and what the run took."""
    made, work = run.statistics, run.overlap
    rows = [
        ("committed", f"{made.committed:,}", "steps with their gradients as they were"),
        ("clipped", f"{made.clipped:,}", f"steps with a gradient norm above {options.max_grad_norm:g}, scaled down"),
        ("skipped", f"{made.skipped:,}", "steps with an Inf or NaN gradient: nothing changed"),
        ("speculated", f"{work.speculated_buckets:,}", f"of {work.buckets:,} buckets of gradients; others in step()"),
        ("accepted", f"{made.accepted:,}", "parameters whose speculation was published"),
        ("respeculated", f"{made.respeculated:,}", "parameters that were stepped again, because of clipping"),
        ("dropped", f"{made.dropped:,}", "parameters whose step was skipped"),
        ("hidden", f"{work.hidden_share:.0%}", f"of {work.work_seconds:.2f} s of the optimizer's work"),
        ("loss", f"{run.losses[-1]:.3f}", f"nats per byte at the end; {run.losses[0]:.3f} at first"),
        ("seconds", f"{run.seconds:.1f}", f"in {len(run.losses)} steps"),
    ]
    shown = Table("outcome", "count", "meaning", title="Outcomes of the steps", title_justify="left", show_edge=False)
    shown.columns[1].justify, shown.columns[2].style = "right", "dim"
    for row in rows if work.buckets else [*rows[:3], *rows[-2:]]:
        shown.add_row(*row)
    return shown


def picture(options: argparse.Namespace, run: Run, found: dict[str, int] | None) -> Figure:
    """Return loss and gradient norm by step, with a mark for each step that was clipped or skipped."""
    figure, numbers = Figure(figsize=(10, 6), layout="constrained"), range(1, len(run.losses) + 1)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    top.plot(numbers, run.losses, color="#0072B2")
    bottom.plot(numbers, [outcome.grad_norm for outcome in run.outcomes], color="#0072B2")
    for kind, mark, colour in ((StepKind.CLIPPED, "v", "#E69F00"), (StepKind.SKIPPED, "X", "#D55E00")):
        at = [number for number, outcome in zip(numbers, run.outcomes, strict=True) if outcome.kind is kind]
        top.plot(at, [run.losses[number - 1] for number in at], mark, color=colour, label=f"{kind.value} ({len(at)})")
    if math.isfinite(options.max_grad_norm):
        bottom.axhline(options.max_grad_norm, color="#E69F00", linestyle="--", label="clipped above")
        bottom.legend(loc="upper right")
    top.legend(loc="upper right")
    differ = "" if found is None else ": {elements_differing:,} of {elements:,} elements differ".format(**found)
    top.set(title=f"{options.model}, {len(run.losses)} steps in {options.dtype}{differ}", ylabel="loss (nats per byte)")
    bottom.set(ylabel="gradient norm", xlabel="step")
    return figure


def report(options: argparse.Namespace, run: Run, found: dict[str, int] | None) -> dict[str, Any]:
    """Return the figures of the run by the names of options and statistics; null where there is no finite number."""
    figures = {
        **vars(options),
        **asdict(run.statistics),
        **asdict(run.overlap),
        **{name: getattr(run.overlap, name) for name in ("hidden_seconds", "work_seconds", "hidden_share")},
        **(found or {}),
        "seconds": run.seconds,
        "parameters": sum(parameter.numel() for parameter in run.parameters),
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "isa": superadam.active_isa(),
        "threads": superadam.get_num_threads(),
        "losses": [loss if math.isfinite(loss) else None for loss in run.losses],
        "grad_norms": [one.grad_norm if math.isfinite(one.grad_norm) else None for one in run.outcomes],
    }
    plain = (list, int, float, type(None))
    return {
        name: value if isinstance(value, plain) and value != math.inf else str(value) for name, value in figures.items()
    }


# ---- the model ----
class Shape(NamedTuple):
    """What determines a decoder, whose heads share keys and values in groups, and how it is trained."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_value_heads: int
    head_width: int
    feed_forward: int
    batch: int
    seq: int
    lr: float


MODELS = {
    "tiny": Shape(256, 64, 1, 4, 2, 16, 128, batch=2, seq=16, lr=1e-2),
    "bytes": Shape(256, 256, 4, 4, 4, 64, 688, batch=16, seq=128, lr=1.5e-3),
    "10m": Shape(4096, 384, 6, 6, 2, 64, 1024, batch=8, seq=512, lr=1e-3),
}


class Block(nn.Module):
    """Causal attention and a gated feed-forward layer (SwiGLU), which compute in the dtype of their input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width, width, wide = shape.head_width, shape.width, shape.feed_forward
        inside, shared = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
        sizes = {"attention_norm": (width,), "query": (inside, width), "key": (shared, width), "value": (shared, width)}
        sizes |= {"attention_output": (width, inside), "feed_forward_norm": (width,)}
        sizes |= {"gate": (wide, width), "expand": (wide, width), "contract": (width, wide)}
        self.weights = nn.ParameterDict({name: torch.ones(size) for name, size in sizes.items()})

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream `x`, (batch, seq, width), after this block."""
        weights = {name: weight.to(x.dtype) for name, weight in self.weights.items()}
        seen = functional.rms_norm(x, x.shape[-1:], weights["attention_norm"])
        parts = (functional.linear(seen, weights[name]) for name in ("query", "key", "value"))
        query, key, value = (part.view(*x.shape[:2], -1, self.head_width).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + functional.linear(attended.transpose(1, 2).flatten(2), weights["attention_output"])
        seen = functional.rms_norm(x, x.shape[-1:], weights["feed_forward_norm"])
        gated = functional.silu(functional.linear(seen, weights["gate"])) * functional.linear(seen, weights["expand"])
        return x + functional.linear(gated, weights["contract"])


class Decoder(nn.Module):
    """A transformer that predicts the next byte, with activations of `compute_dtype`."""

    def __init__(self, shape: Shape, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.tokens, self.positions = (nn.Embedding(n, shape.width) for n in (shape.vocabulary, shape.seq))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of predicting each byte of (batch, seq + 1) from those before it."""
        places = torch.arange(windows.shape[1] - 1, device=windows.device)
        x = (self.tokens(windows[:, :-1]) + self.positions(places)).to(self.compute_dtype)
        for block in self.blocks:
            x = block(x)
        x = functional.rms_norm(x, x.shape[-1:], self.norm.to(x.dtype))
        logits = functional.linear(x, self.tokens.weight.to(x.dtype)).float()
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


if __name__ == "__main__":
    sys.exit(main())
