"""`superadam plan`: its options, and the run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from superadam.cli.usage import UsageError, count, require_modules, share, writable, write
from superadam.plan import UnplannableError, machines
from superadam.state.storage import Master, Moments

UNFIT_STATUS = 1


def _efficiency(word: str) -> float:
    value = share(word)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{word} is no efficiency, expected more than 0 and at most 1")
    return value


def add_parser(subparsers: Any) -> None:
    """Add `plan` to the parser of `superadam`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="say whether a model will fit on a machine, and how fast it will train",
        description="Say whether training a model fits on a machine, what does not, what would, and how long a step "
        "takes there. Needs no GPU and downloads nothing. Exits with 1 where training does not fit.",
        epilog="MODEL is a preset, a folder with a config.json, or a model in the hub's cache. Presets bring --batch, "
        "--seq, --ranks and --machine along.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="preset, folder, or name in the hub's cache")
    parser.add_argument("--machine", metavar="M", help="its name, or a TOML file of that format (gh200)")
    parser.add_argument("--batch", dest="sequences", type=count, metavar="N", help="sequences of a micro-batch (1)")
    parser.add_argument("--seq", dest="tokens", type=count, metavar="N", help="tokens of a sequence (4096)")
    parser.add_argument("--micro-batches", type=count, metavar="N", help="of a step (1)")
    parser.add_argument("--ranks", type=count, metavar="N", help="GPUs among which FSDP2 divides the model (1)")
    parser.add_argument("--loss", choices=["chunked", "full"], default="chunked", help="logits in parts, or whole")
    parser.add_argument("--moments", choices=[way.value for way in Moments], help="how they are stored (fp32)")
    parser.add_argument("--master", choices=[way.value for way in Master], help="how masters are stored (fp32)")
    parser.add_argument(
        "--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="compute layers again (yes)"
    )
    parser.add_argument("--flow", dest="flows", action="store_true", help="weights in host memory (CPUOffloadPolicy)")
    parser.add_argument("--gpu-efficiency", type=_efficiency, metavar="X", help="share of its peak (0.45, 0.55, 0.65)")
    parser.add_argument("--clipped", type=share, default=0.0, metavar="SHARE", help="of steps that are clipped (0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="write a machine with this CPU's passes there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan, and show the answer; return 1 where training does not fit.

    Raises:
        UsageError: a module is not installed, or the model or the machine cannot be planned.
    """
    require_modules("plan", "transformers", "rich", extra="plan")
    try:
        if arguments.measure is not None:
            return _measure(arguments)
        if not arguments.model:
            raise UsageError("no MODEL was given, expected a preset, such as phi-4, or a model's folder; name one")
        from superadam.cli.plan.answer import answer_for
        from superadam.cli.plan.presets import config_of
        from superadam.cli.plan.report import to_json
        from superadam.plan.memory import Subject

        setting, machine_name = setting_of(arguments)
        machine = machines.read(machine_name)
        subject = Subject.of(config_of(arguments.model))
        answer = answer_for(arguments.model, subject, setting, machine, arguments.gpu_efficiency)
    except UnplannableError as error:
        raise UsageError(str(error)) from error
    if arguments.json:
        sys.stdout.write(json.dumps(to_json(answer), indent=1) + "\n")
    else:
        show(answer)
    return 0 if answer.memory.trains else UNFIT_STATUS


def setting_of(arguments: argparse.Namespace) -> tuple[Any, str]:
    """Return how a model is trained and on which machine: as its preset says, but for the options that are given."""
    from superadam.cli.plan.presets import presets
    from superadam.plan.memory import Setting

    preset = presets().get(arguments.model)
    setting, machine = (Setting(), "gh200") if preset is None else (preset.setting, preset.machine)
    names = (field.name for field in fields(Setting))
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return replace(setting, **given), arguments.machine or machine


def show(answer: Any) -> None:
    """Print an answer as tables."""
    from superadam.cli.console import Console
    from superadam.cli.plan import report

    console = Console(least_width=80)  # in less, a column would have a letter or two
    console.print(report.title(answer))
    console.print(report.memory_table(answer))
    for line in report.verdict(answer):
        console.print(line, style="bold")
    if answer.timings:
        console.print(report.time_table(answer))
        for line in report.picture(answer.timings[len(answer.timings) // 2]):
            console.print(line, no_wrap=True)
    for line in report.notes(answer):
        console.print(line, style="dim")


def _measure(arguments: argparse.Namespace) -> int:
    from superadam.cli.bench.command import NUMEL, PAIRS, setting_of
    from superadam.cli.bench.passes import measure
    from superadam.cli.bench.report import environment, line_of
    from superadam.cli.console import Console
    from superadam.cli.plan.rates import measured, to_toml
    from superadam.host.machine import Host
    from superadam.host.memory import HostMemory

    writable("--measure", arguments.measure)
    if arguments.measure.exists():
        raise UsageError(f"--measure {arguments.measure} exists, expected a new file; name another")
    base = machines.read(arguments.machine or "gh200")
    with Console(stderr=True).status("measuring passes"):
        rows = list(measure(NUMEL, setting_of(), PAIRS))
    source = f"superadam bench: {line_of(environment())}"
    machine = measured(base, rows, HostMemory.of(Host()).limit, source)
    write(arguments.measure, to_toml(machine))
    return 0
