"""`superadam train`: its options, and the run that they ask for.

Everything that can be refused is refused before the first file is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

import superadam
from superadam.cli.train import checkpoint
from superadam.cli.train.loop import Trainer
from superadam.cli.train.presets import PRESETS
from superadam.cli.train.settings import Settings
from superadam.cli.train.text import Text
from superadam.cli.usage import UsageError, require_modules
from superadam.devices.worker import WorkerError
from superadam.host.files import locked
from superadam.host.machine import Host
from superadam.host.memory import require_memory
from superadam.offload.needs import needs_of
from superadam.state.compact import BLOCK
from superadam.state.parameter import Master, Moments, Storage

DEFAULT_OUT = Path("superadam-run")

AUTO = "auto"
"""What `--resume` is given to continue the run in the folder of `--out` if there is one, else to start it."""

LOCK_SECONDS = 5.0
"""For which a run waits for the end of another one in its folder, as of one that is being restarted."""

Number = TypeVar("Number", int, float)


def add_parser(subparsers: Any) -> None:
    """Add `train` to the subcommands."""
    parser = subparsers.add_parser(
        "train",
        help="train a small transformer and, with --verify, check every bit against torch",
        description="Train a transformer with SpeculativeCPUAdamW, which works while backward runs. Without options it "
        "learns the sources of Python's standard library byte by byte. The folder given by --out receives a checkpoint "
        "and a picture. It is one process; on several ranks, train with examples/finetune.py.",
    )
    whole, from_zero = (_number(int, n, 2**31 - 1, f"an integer from {n} to {2**31 - 1}") for n in (1, 0))
    rate = _number(float, sys.float_info.min, sys.float_info.max, "a finite number above 0")
    norm = _number(float, sys.float_info.min, math.inf, "a number above 0")
    what = parser.add_argument_group("what is trained")
    what.add_argument("--text", metavar="FILE", help="text to learn (default: Python's standard library)")
    what.add_argument("--model", choices=PRESETS, metavar="NAME", help=_models())
    _add_setting(what, "dtype", "bf16 parameters with fp32 masters, or fp32 parameters", choices=("bf16", "fp32"))
    how = parser.add_argument_group("how it is trained")
    for name, what_for, kinds in (("moments", "moments", Moments), ("master", "masters of bf16 parameters", Master)):
        words = f"how {what_for} are stored, which changes results: {', '.join(kind.value for kind in kinds)}"
        _add_setting(how, name, words, choices=tuple(kind.value for kind in kinds), metavar="FORMAT")
    _add_setting(how, "steps", "steps of the whole run", type=whole, metavar="N")
    _add_setting(how, "batch", "sequences in a step", type=whole, metavar="N")
    _add_setting(how, "seq", "bytes in a sequence", type=whole, metavar="N")
    _add_setting(how, "lr", "peak learning rate", type=rate, metavar="RATE")
    _add_setting(how, "warmup", "updates over which the learning rate rises", type=from_zero, metavar="N")
    _add_setting(how, "max_grad_norm", "clip gradients to this global norm; inf for never", type=norm, metavar="NORM")
    _add_setting(how, "seed", "of initial weights and batches", type=from_zero, metavar="N")
    _add_setting(how, "device", "where the model computes: cpu or cuda", metavar="DEVICE")
    _add_setting(how, "threads", "threads of torch and of superadam, one per CPU if None", type=whole, metavar="N")
    how.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="run the optimizer while backward does, or after it; the bits are the same (default: --overlap)",
    )
    check = parser.add_argument_group("what is checked")
    check.add_argument(
        "--verify", action="store_true", help="make every step with torch's AdamW(fused=True) too and compare every bit"
    )
    check.add_argument(
        "--inject-nan",
        type=whole,
        action="append",
        default=[],
        metavar="STEP",
        help="put a NaN into one gradient at this step; may be repeated",
    )
    where = parser.add_argument_group("what is kept")
    where.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"folder for the run's files, and for no other run's (default: {DEFAULT_OUT}, or DIR of --resume)",
    )
    where.add_argument("--report", type=Path, metavar="FILE", help="write the figures of the run as JSON")
    where.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write what ran when in the last steps, for chrome://tracing or ui.perfetto.dev",
    )
    where.add_argument(
        "--resume",
        type=lambda word: word if word == AUTO else Path(word),  # ./auto is a folder
        metavar="DIR",
        help="continue the run in this folder, as if it had never stopped; 'auto': that of --out, or start it there",
    )
    where.add_argument("--save-every", type=whole, metavar="N", help="also write the checkpoint every N steps")
    where.add_argument(
        "--no-save",
        action="store_true",
        help="write no checkpoint: it takes 14 bytes per bf16 parameter, 10 with smaller moments",
    )
    parser.set_defaults(run=run)


def _number(kind: Callable[[str], Number], least: Number, most: Number, what: str) -> Callable[[str], Number]:
    """Return what converts a word to a number within limits, which are told as `what`."""

    def convert(word: str) -> Number:
        with suppress(ValueError):
            if least <= (number := kind(word)) <= most:
                return number
        raise argparse.ArgumentTypeError(f"{word} is not {what}")

    return convert


def _add_setting(group: Any, name: str, meaning: str, **options: Any) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    default = "the preset's" if defaults[name] is dataclasses.MISSING else defaults[name]
    group.add_argument("--" + name.replace("_", "-"), help=f"{meaning} (default: {default})", **options)


def _models() -> str:
    return "what is trained, with random weights, to predict the next byte (default: bytes): " + "; ".join(
        f"{name} ({preset.shape.parameters:,} parameters, like {preset.resembles})" for name, preset in PRESETS.items()
    )


def run(arguments: argparse.Namespace) -> int:
    """Train as the arguments say, and return the exit status.

    Raises:
        UsageError: the arguments, or what they name, have to be corrected; nothing was written.
    """
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise UsageError(
            f"'superadam train' is one process, and WORLD_SIZE is {ranks}; on several ranks, train with "
            "examples/finetune.py under 'accelerate launch'"
        )
    require_modules("train", "rich", "matplotlib")
    from superadam.cli.train import session  # it needs them

    is_automatic = arguments.resume == AUTO
    out = arguments.out or (None if is_automatic else arguments.resume) or DEFAULT_OUT
    _check_places(arguments, out)
    found = _identity(out)
    if is_automatic:
        arguments.resume = out if found else None
    is_its_own = arguments.resume is not None and arguments.resume.resolve() == out.resolve()
    if found and not is_its_own and not arguments.no_save:
        raise UsageError(f"--out {out} holds another run; continue it with --resume {out}, or choose another folder")
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Settings)}
    explicit = {name: value for name, value in given.items() if value is not None}
    if arguments.resume is None:
        settings, content = Settings.new(explicit), None
    else:
        earlier, content = checkpoint.read(arguments.resume)
        settings = earlier.continued(explicit)
    if arguments.trace is not None and not settings.overlap:
        raise UsageError("--trace needs an overlapped run, and this one is --no-overlap; leave one of them out")
    _check_device(settings.device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
        superadam.set_num_threads(settings.threads)
    try:
        superadam.active_isa(), superadam.get_num_threads()
    except ValueError as error:
        raise UsageError(str(error)) from error
    text = Text.read(settings.text, settings.seq)
    _check_memory(settings, arguments.verify)
    try:
        trainer = Trainer(settings, text, is_verified=arguments.verify)
        if content is not None:
            checkpoint.restore(trainer, content, arguments.resume)
            del content
        done, last = len(trainer.history.steps), settings.steps
        if done >= last:
            raise UsageError(
                f"the run in {arguments.resume} is complete at step {done}; give a larger --steps to go on"
            )
        for step in arguments.inject_nan:
            if not done < step <= last:
                raise UsageError(f"--inject-nan is {step}; expected a step from {done + 1} to {last}")
        with nullcontext() if arguments.no_save else _owned(out, found):
            return session.run(trainer, out, arguments)
    except (torch.OutOfMemoryError, MemoryError, WorkerError) as error:
        cause = error.__cause__ if isinstance(error, WorkerError) else error
        if not isinstance(cause, torch.OutOfMemoryError | MemoryError):
            raise
        words = f"--model {settings.model} with --batch {settings.batch} and --seq {settings.seq}"
        raise UsageError(
            f"{words} does not fit in the memory of {settings.device}; choose a smaller --batch, a shorter --seq or a "
            "smaller --model"
        ) from error


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return what tells one checkpoint in a folder from another that replaced it; None where there is none."""
    try:
        found = (folder / checkpoint.FILE_NAME).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextmanager
def _owned(out: Path, found: tuple[int, int] | None) -> Iterator[None]:
    """Keep other runs out of a folder, in which the checkpoint that was `found` must still be the newest.

    Raises UsageError: another run is at work there, or was meanwhile.
    """
    with ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(out / ".lock", LOCK_SECONDS))
        except BlockingIOError as error:
            raise UsageError(f"another run is at work in --out {out}; end it, or choose another folder") from error
        except OSError as error:
            raise UsageError(f"cannot lock {out / '.lock'}: {error.strerror}; choose another --out") from error
        if _identity(out) != found:
            raise UsageError(f"another run has just saved in --out {out}; continue it with --resume {out}")
        yield


def _check_places(arguments: argparse.Namespace, out: Path) -> None:
    for option, path in (("--out", out / "any"), ("--report", arguments.report), ("--trace", arguments.trace)):
        if path is None:
            continue
        existing = path.parent
        while not os.path.lexists(existing) and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            state = "writable" if existing.is_dir() else "a folder"
            raise UsageError(
                f"{option} needs the folder {path.parent}, but {existing} is not {state}; choose another place"
            )
        if path.exists() and not path.is_file() and option != "--out":
            raise UsageError(f"{option} {path} is no regular file; give the name of a file")
    if arguments.no_save and arguments.save_every is not None:
        raise UsageError("--save-every and --no-save were both given; leave one of them out")


def _check_device(name: str) -> None:
    with suppress(RuntimeError, AssertionError):
        if torch.device(name).type in ("cpu", "cuda"):
            torch.empty(1, device=name)
            return
    raise UsageError(f"--device {name} is not available here; use cpu, or cuda where torch.cuda.is_available()")


def _check_memory(settings: Settings, is_verified: bool) -> None:
    """Refuse what even without activations needs more host memory than this process can have."""
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    weights = torch.empty(-(-settings.preset.shape.parameters // BLOCK), BLOCK, dtype=dtype, device="meta")
    is_on_host = torch.device(settings.device).type == "cpu"
    storage = Storage(Moments(settings.moments), Master(settings.master))
    state = needs_of(weights, is_on_host=is_on_host, storage=storage).state
    needed = state + weights.nbytes * is_on_host + 16 * weights.numel() * is_verified
    others = ("no --verify, or " if is_verified else "") + ("--moments bf16, or " if settings.moments == "fp32" else "")
    remedy = f"choose {others}a smaller --model"
    try:
        require_memory(Host(), needed, f"--model {settings.model}", remedy)
    except MemoryError as error:
        raise UsageError(str(error)) from error
