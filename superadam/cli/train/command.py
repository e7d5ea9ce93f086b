"""`superadam train`: its options, and the run that they ask for.

Everything that can be refused is refused before the first file is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import superadam
from superadam.cli.train import checkpoint, files
from superadam.cli.train.loop import Trainer
from superadam.cli.train.memory import needed_bytes, require_memory
from superadam.cli.train.presets import PRESETS
from superadam.cli.train.ranks import LONGEST_TIMEOUT, TIMEOUT, Ranks, joined
from superadam.cli.train.settings import BYTE_MODEL, Settings
from superadam.cli.train.text import Text
from superadam.cli.usage import UsageError, require_modules
from superadam.devices.worker import WorkerError

DEFAULT_OUT = Path("superadam-run")

_DEFAULTS = Settings()
_SETTING_NAMES = [field.name for field in dataclasses.fields(Settings) if field.name != "shape"]
_OF_PRESETS = ("batch", "seq", "lr")
"""Settings whose default a preset sets."""


def add_parser(subparsers: Any) -> None:
    """Add `train` to the subcommands."""
    parser = subparsers.add_parser(
        "train",
        help="train a small transformer and, with --verify, check every bit against torch",
        description="Train a transformer with SpeculativeCPUAdamW, which works while backward runs. Without options it "
        "learns the sources of Python's standard library byte by byte. The folder given by --out receives a checkpoint "
        "and a picture. Started by torchrun, as in 'torchrun --nproc-per-node 2 -m superadam train', it shards the "
        "model over the processes with fully_shard.",
    )
    what = parser.add_argument_group("what is trained")
    what.add_argument("--text", metavar="FILE", help="text to learn (default: Python's standard library)")
    what.add_argument("--model", choices=(BYTE_MODEL, *PRESETS), metavar="NAME", help=_models())
    _add_setting(what, "dtype", str, "bf16 parameters with fp32 masters, or fp32 parameters", choices=("bf16", "fp32"))
    _add_setting(what, "layers", int, "blocks of the byte transformer", metavar="N")
    _add_setting(what, "width", int, "features in its residual stream", metavar="N")
    _add_setting(what, "heads", int, "its attention heads", metavar="N")
    how = parser.add_argument_group("how it is trained")
    _add_setting(how, "steps", int, "steps of the whole run", metavar="N")
    _add_setting(how, "batch", int, "sequences in a step, of all processes together", metavar="N")
    _add_setting(how, "seq", int, "bytes in a sequence", metavar="N")
    _add_setting(how, "lr", float, "peak learning rate", metavar="RATE")
    _add_setting(how, "warmup", int, "updates over which the learning rate rises", metavar="N")
    _add_setting(how, "weight_decay", float, "decoupled decay of matrices", metavar="RATE")
    _add_setting(how, "max_grad_norm", float, "clip gradients to this global norm; inf for never", metavar="NORM")
    _add_setting(how, "seed", int, "of initial weights and batches", metavar="N")
    _add_setting(
        how,
        "device",
        str,
        "where the model computes: cpu or cuda, of which each process takes its own",
        metavar="DEVICE",
    )
    how.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        help="let backward compute each block again instead of keeping its inside: less memory for the same bits "
        "(default: --no-checkpointing, and of a preset --checkpointing)",
    )
    how.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of torch and of superadam in each process (default: one per CPU, divided among processes)",
    )
    how.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="run the optimizer while backward does, or after it; the bits are the same (default: --overlap)",
    )
    _add_setting(
        how,
        "bucket_numel",
        _auto_or_int,
        "elements that the optimizer works on together when overlapped; auto: an eighth of the model, within limits",
        metavar="N",
    )
    _add_setting(
        how,
        "gpu_buckets",
        _auto_or_int,
        "buckets whose state stays on the GPU when overlapped, the last of backward; auto: by the times of steps",
        metavar="N",
    )
    _add_setting(
        how,
        "num_threads",
        _auto_or_int,
        "threads of the optimizer while the model computes, when overlapped; auto: cores that the model leaves idle, "
        "and one where it leaves none",
        metavar="N",
    )
    how.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help="of several processes: end with an error once one has not answered for this time (default: %(default)g)",
    )
    check = parser.add_argument_group("what is checked")
    check.add_argument(
        "--verify",
        action="store_true",
        help="make every step with torch's AdamW(fused=True) too and compare every bit",
    )
    check.add_argument(
        "--inject-nan",
        type=int,
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
        help=f"folder for the run's files (default: {DEFAULT_OUT}, or DIR of --resume)",
    )
    where.add_argument("--report", type=Path, metavar="FILE", help="write the figures of the run as JSON")
    where.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write what ran when in the last steps, for chrome://tracing or ui.perfetto.dev",
    )
    where.add_argument(
        "--resume", type=Path, metavar="DIR", help="continue the run in this folder, as if it had never stopped"
    )
    where.add_argument(
        "--stop-at", type=int, metavar="STEP", help="stop after this step, to continue later with --resume"
    )
    where.add_argument("--save-every", type=int, metavar="N", help="also write the checkpoint every N steps")
    where.add_argument(
        "--no-save", action="store_true", help="write no checkpoint: it takes 14 bytes per bf16 parameter"
    )
    parser.set_defaults(run=run)


def _add_setting(group: Any, name: str, kind: Callable[[str], object], meaning: str, **options: Any) -> None:
    option = "--" + name.replace("_", "-")
    default = f"{getattr(_DEFAULTS, name)}, or the preset's" if name in _OF_PRESETS else getattr(_DEFAULTS, name)
    group.add_argument(option, type=kind, help=f"{meaning} (default: {default})", **options)


def _models() -> str:
    presets = "; ".join(
        f"{name} ({preset.shape.parameters / 1e6:,.0f} M parameters, like {preset.resembles})"
        for name, preset in PRESETS.items()
    )
    return (
        f"what is trained: {BYTE_MODEL}, the byte transformer of --layers, --width and --heads (default), or a decoder "
        f"with random weights: {presets}. All of them learn bytes: a larger vocabulary has ids that never come"
    )


def _auto_or_int(word: str) -> int | str:
    try:
        return word if word == "auto" else int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is neither auto nor an integer") from None


def run(arguments: argparse.Namespace) -> int:
    """Train as the arguments say, with the processes that torchrun started, and return the exit status.

    Raises:
        UsageError: the arguments, or what they name, have to be corrected; nothing was written.
    """
    if not 1 <= arguments.timeout <= LONGEST_TIMEOUT:
        raise UsageError(f"--timeout is {arguments.timeout}; expected seconds from 1 to {LONGEST_TIMEOUT:g}")
    with joined(arguments.timeout) as ranks:
        return _run(arguments, ranks)


def _run(arguments: argparse.Namespace, ranks: Ranks) -> int:
    require_modules("train", "rich", "matplotlib")
    out = arguments.out or arguments.resume or DEFAULT_OUT
    _check_places(arguments, out)
    trainer = _prepare(arguments, ranks)
    done, last = len(trainer.history.steps), trainer.settings.steps
    if done >= last:
        raise UsageError(f"the run in {arguments.resume} is complete at step {done}; give a larger --steps to go on")
    if arguments.stop_at is not None and not done < arguments.stop_at:
        raise UsageError(f"--stop-at is {arguments.stop_at}; expected a step after {done}, where the run stands")
    for step in arguments.inject_nan:
        if not done < step <= last:
            raise UsageError(f"--inject-nan is {step}; expected a step from {done + 1} to {last}")
    from superadam.cli.train.session import Session  # it needs rich and matplotlib, which are optional until here

    session = Session(
        trainer,
        out,
        report_path=arguments.report,
        trace_path=arguments.trace,
        last_step=min(last, arguments.stop_at or last),
        save_every=arguments.save_every,
        is_saved=not arguments.no_save,
        nan_steps=frozenset(arguments.inject_nan),
        is_verified=arguments.verify,
    )
    with _memory_in_words(trainer.settings):
        return session.run()


def _check_places(arguments: argparse.Namespace, out: Path) -> None:
    files.require_writable_folder(out, "--out")
    for option, path in (("--report", arguments.report), ("--trace", arguments.trace)):
        if path is not None:
            files.require_writable_folder(path.parent, option)
            if path.exists() and not path.is_file():
                raise UsageError(f"{option} {path} is no regular file; give the name of a file")
    if arguments.save_every is not None and arguments.save_every < 1:
        raise UsageError(f"--save-every is {arguments.save_every}; expected an integer of at least 1")
    if arguments.no_save and arguments.save_every is not None:
        raise UsageError("--save-every and --no-save were both given; leave one of them out")


def _prepare(arguments: argparse.Namespace, ranks: Ranks) -> Trainer:
    """Return the trainer, new or restored from the run to resume."""
    explicit = {name: getattr(arguments, name) for name in _SETTING_NAMES if getattr(arguments, name) is not None}
    preset = PRESETS.get(arguments.model)
    if arguments.model is not None:
        explicit["shape"] = None if preset is None else preset.shape
    if arguments.resume is None:
        of_preset: dict[str, Any] = {}
        if preset is not None:
            of_preset = {"checkpointing": True, **{name: getattr(preset, name) for name in _OF_PRESETS}}
        settings, content = Settings(**(of_preset | explicit)), None
    else:
        content = checkpoint.read(arguments.resume, ranks)
        settings = checkpoint.settings_of(content, arguments.resume).continued(explicit)
    for name in ("layers", "width", "heads"):
        if settings.shape is not None and name in explicit:
            raise UsageError(
                f"--{name} shapes the byte transformer, and this run has --model {settings.model}; leave --{name} out"
            )
    if not settings.overlap:
        of_overlap = {
            "--trace": arguments.trace,
            "--bucket-numel": arguments.bucket_numel,
            "--gpu-buckets": arguments.gpu_buckets,
            "--num-threads": arguments.num_threads,
        }
        for option, value in of_overlap.items():
            if value is not None:
                raise UsageError(
                    f"{option} needs an overlapped run, and this one is --no-overlap; "
                    f"leave {option} out, or give --overlap"
                )
    if settings.batch % ranks.count:
        raise UsageError(
            f"--batch is {settings.batch}, expected a multiple of {ranks.count}: as many sequences for each process"
        )
    device = _checked_device(settings.device, ranks)
    if torch.device(settings.device).type == "cpu" and settings.gpu_buckets not in ("auto", 0):
        raise UsageError(f"--gpu-buckets is {settings.gpu_buckets}; expected auto or 0 where --device is cpu")
    threads = settings.threads
    if threads is None and ranks.are_several:
        threads = max(1, len(os.sched_getaffinity(0)) // ranks.on_machine)
    if threads is not None:
        torch.set_num_threads(threads)
        superadam.set_num_threads(threads)
    try:
        superadam.active_isa(), superadam.get_num_threads()
    except ValueError as error:
        raise UsageError(str(error)) from error
    text = Text.read(settings.text, settings.seq)
    _check_memory(settings, arguments, ranks, device)
    with _memory_in_words(settings):
        trainer = Trainer(settings, text, ranks)
    if content is not None:
        checkpoint.restore(trainer, content, arguments.resume)
    return trainer


@contextmanager
def _memory_in_words(settings: Settings) -> Iterator[None]:
    """Turn an out-of-memory error into a UsageError."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, WorkerError) as error:
        if isinstance(error, WorkerError) and not isinstance(error.__cause__, torch.OutOfMemoryError | MemoryError):
            raise
        subject, remedy = _size_in_words(settings)
        raise UsageError(f"{subject} does not fit in the memory of {settings.device}; choose {remedy}") from error


def _check_memory(settings: Settings, arguments: argparse.Namespace, ranks: Ranks, device: torch.device) -> None:
    subject, remedy = _size_in_words(settings)
    host, on_device = needed_bytes(settings, is_verified=arguments.verify, processes=ranks.count)
    loaded = 0
    if arguments.resume is not None and not ranks.are_several:  # in memory now, and not once it is restored
        loaded = os.path.getsize(arguments.resume / checkpoint.FILE_NAME)
    fewer = f"choose {'no --verify, ' if arguments.verify else ''}{remedy}"
    of_all = f" in {ranks.on_machine} processes" if ranks.are_several else ""
    require_memory(torch.device("cpu"), ranks.on_machine * host, subject + of_all, fewer, present=loaded)
    require_memory(device, on_device, subject, f"choose {remedy}")


def _size_in_words(settings: Settings) -> tuple[str, str]:
    """Return what determines a run's memory, and what would reduce it."""
    checkpointing = "" if settings.checkpointing else "--checkpointing, "
    return (
        f"--model {settings.model} with --batch {settings.batch} and --seq {settings.seq}",
        f"{checkpointing}a smaller --batch, a shorter --seq or a smaller --model",
    )


def _checked_device(name: str, ranks: Ranks) -> torch.device:
    with suppress(RuntimeError, AssertionError):
        device = ranks.device(name)
        if device.type in ("cpu", "cuda"):
            torch.empty(1, device=device)
            return device
    raise UsageError(f"--device {name} is not available here; use cpu, or cuda where torch.cuda.is_available()")
