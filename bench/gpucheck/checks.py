"""The stages that find out where this runs and whether everything is right: tests, verified runs, compute-sanitizer.

Owns which tests and runs these are. A difference or a failed test is a failure of the check.
"""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpucheck.findings import Context, Finding, Limit, Outcome
from gpucheck.programs import ROOT, Done, python

_RESULT = re.compile(r"^tests/\S+.* (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
_PYTEST = ("-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider")

REHEARSED_TEST = "tests/gpu/test_gpu_scatter.py::test_many_tensors_take_one_launch"
_SHARED = ("-p", "gpucheck.share", "-m", "not subprocess")
"""Left out are those that look at what the compiler made, which needs no GPU."""

NO_TESTS = 5
"""Status of pytest where a share holds no test."""

MOST_SHARES = 8
"""Processes that compile kernels at once; each has a context of its own on the GPU."""

OF_SEVERAL_DEVICES = [
    "tests/integrations/test_train.py",
    "tests/distributed/test_one_rank.py",
    "tests/devices/test_conformance.py",
]
"""Test modules that take every device there is as a parameter."""

SANITIZED = "test_many_tensors_take_one_launch or test_many_small_tensors_take_one_launch or test_every_configuration"
"""Tests with a launch of each kernel, small enough for a tool that slows them down a hundredfold."""


def machine(context: Context, limit: Limit) -> Iterator[Finding]:
    """Ask `superadam doctor` about versions, driver, GPU, link and memory; what it calls broken is no failure here."""
    done = context.run(python("-m", "superadam", "doctor", "--json"), limit.left)
    begin = max(0, done.output.find('{\n "findings"'))  # its stderr may be before and after
    try:
        report, _ = json.JSONDecoder().raw_decode(done.output, begin)
    except ValueError:
        yield Finding(Outcome.SHORTENED, f"superadam doctor gave no report: {done.last_line}")
        return
    yield Finding(Outcome.GOOD, f"superadam doctor's report, status {done.status}", {"doctor": report})


def kernel_tests() -> list[str]:
    """Return the files of tests of the GPU's kernels; they compile much, and time nothing."""
    return _files("tests/gpu/*.py")


def device_tests() -> list[str]:
    """Return the files of tests of CUDA devices."""
    return _files("tests/devices/test_cuda*.py")


def _files(pattern: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(pattern))]


def selections(context: Context) -> list[list[list[str]]]:
    """Return the options of the pytest processes that run all tests which need a GPU: those of each list run at once.

    First those of the kernels, shared out, so that many compile at once on a cold cache, and with them the modules that
    take every device; then, with that cache and the machine to themselves, those that look at time and memory.
    """
    if context.rehearses:
        return [[[REHEARSED_TEST, *_SHARED, "--share", f"{number}/2"] for number in range(2)], [[REHEARSED_TEST]]]
    shares = max(1, min(MOST_SHARES, len(os.sched_getaffinity(0)) // 2))
    return [
        [
            [*OF_SEVERAL_DEVICES, "-k", "cuda"],
            *([*kernel_tests(), *_SHARED, "--share", f"{number}/{shares}"] for number in range(shares)),
        ],
        [device_tests()],
    ]


def tests(context: Context, limit: Limit) -> Iterator[Finding]:
    """Run every test that needs a GPU, kernels compiled."""
    missing = [module for module in ("pytest", "pytest_timeout", "hypothesis") if find_spec(module) is None]
    if missing:
        yield Finding(Outcome.LEFT_OUT, f"{', '.join(missing)} cannot be imported; install {' '.join(missing)}")
        return
    path = os.pathsep.join(filter(None, (str(ROOT / "bench"), os.environ.get("PYTHONPATH"))))  # of `gpucheck.share`
    environment = {"TRITON_INTERPRET": "1" if context.rehearses else "0", "PYTHONPATH": path}
    counts: collections.Counter[str] = collections.Counter()
    failed, faults = list[str](), list[Done]()
    for selection in selections(context):  # also behind a failed test: the others say where the fault is
        threads = {"OMP_NUM_THREADS": "2"} if len(selection) > 1 else {}  # else each would take all cores
        commands = [python(*_PYTEST, *options) for options in selection]
        ended = context.runner(commands, limit.left, environment | threads)
        for done in ended:
            counts.update(word.lower() for word in _RESULT.findall(done.output))
            failed += re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", done.output, re.MULTILINE)
        figures: dict[str, Any] = {"tests": dict(counts), "failed": failed}
        words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items())) or "none ran"
        faults += [done for done in ended if done.status not in (0, None, NO_TESTS)]
        if faults:
            words += f"; {', '.join(failed[:3]) or faults[0].last_line}"
        late = [done for done in ended if done.status is None]
        is_wrong = bool(faults) or counts["failed"] + counts["error"] > 0 or not (counts["passed"] or late)
        if faults or late:
            figures["output"] = [*faults, *late][0].ends
        if late:
            lines = [done.last_line for done in late]
            under_way = [line for line in lines if line.startswith("tests/") and not _RESULT.match(line)]
            words += " when time was over" + bool(under_way) * f", in {', '.join(under_way)}"
        good = Outcome.SHORTENED if late else Outcome.GOOD
        yield Finding(Outcome.FAILED if is_wrong else good, words, figures)
        if late:
            return


def verified_runs(context: Context) -> list[list[str]]:
    """Return the options of the runs that are verified against torch, bit by bit."""
    if context.rehearses:
        tiny = "--model tiny --steps 8 --max-grad-norm 2 --inject-nan 3"
        return [[*tiny.split(), "--text", str(ROOT / "LICENSE")]]
    common = "--model 10m --inject-nan 5 --inject-nan 6 --max-grad-norm 4"
    return [f"{common} --steps 40".split(), f"{common} --steps 20 --dtype fp32 --no-overlap".split()]


def verification(context: Context, limit: Limit) -> Iterator[Finding]:
    """Train, and step torch's AdamW as well, with clipped and skipped steps, and compare every bit."""
    figures: dict[str, Any] = {"runs": []}
    details: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for options in verified_runs(context):
            report = Path(folder, f"{len(details)}.json")
            words = [str(ROOT / "examples" / "train.py"), "--verify", "--device", context.device, *options]
            words += ["--out", str(report.with_suffix("")), "--report", str(report)]
            if "--no-overlap" not in options:
                words += ["--trace", context.trace]
            done = context.run(python(*words), limit.left)
            if done.status is None:
                outcome, figures["output"] = Outcome.SHORTENED if details else Outcome.LEFT_OUT, done.ends
                yield Finding(outcome, "; ".join([*details, "a run was not over in time"]), figures)
                return
            found = json.loads(report.read_text()) if report.exists() else {}
            figures["runs"].append({"command": words, "status": done.status, **found})
            wrong = what_is_wrong(done, found)
            details.append(wrong or _praise(found))
            if wrong:
                figures["output"] = done.ends
                yield Finding(Outcome.FAILED, "; ".join(details), figures)
                return
            yield Finding(Outcome.GOOD, "; ".join(details), figures)


def what_is_wrong(done: Done, report: dict[str, Any]) -> str:
    """Return what is wrong with a verified run, in words; nothing if it is right."""
    if not report:
        return f"train.py ended with status {done.status}: {done.last_line}"
    for name in ("elements_differing", "parameters_differing", "steps_differing"):
        if report[name] != 0:
            return f"{name.replace('_', ' ')}: {report[name]:,}"
    if done.status != 0:
        return f"train.py ended with status {done.status}: {done.last_line}"
    missing = [kind for kind in ("committed", "clipped", "skipped") if not report[kind]]
    if missing or not report["elements"]:
        return f"the run had no {' and no '.join(missing) or 'elements'} steps, and so shows too little"
    return ""


def _praise(report: dict[str, Any]) -> str:
    kinds = ", ".join(f"{report[kind]} {kind}" for kind in ("committed", "clipped", "skipped"))
    how = "overlapped" if report["overlap"] else "not overlapped"
    return f"0 of {report['elements']:,} elements differ in {report['dtype']}, {how} ({kinds} steps)"


def sanitizer_path() -> str | None:
    """Return where compute-sanitizer is, on PATH or in CUDA's folder."""
    folders = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [os.path.join(folder, "bin") for folder in (*folders, "/usr/local/cuda")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def sanitized(context: Context, limit: Limit) -> Iterator[Finding]:
    """Run one test of each kernel under memcheck and racecheck."""
    sanitizer = sanitizer_path()
    if sanitizer is None or find_spec("pytest") is None:
        what = "compute-sanitizer" if sanitizer is None else "pytest"
        yield Finding(Outcome.LEFT_OUT, f"{what} is not installed")
        return
    files = kernel_tests()
    results: dict[str, str] = {}
    for tool in ("memcheck", "racecheck"):
        command: Sequence[str] = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
        # Without torch's cache every tensor is an allocation of its own, whose edges the tool sees.
        done = context.run(
            [*command, *python(*_PYTEST, *files, "-k", SANITIZED)], limit.left, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        )
        summary = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", done.output, re.MULTILINE)
        results[tool] = "not over in time" if done.status is None else (summary or [done.last_line])[-1]
        words = "; ".join(f"{name}: {result}" for name, result in results.items())
        if done.status is None:
            yield Finding(Outcome.SHORTENED, words, {"tools": results, "output": done.ends})
            return
        if done.status or "PASSED" not in done.output:  # or all were skipped
            yield Finding(Outcome.FAILED, words, {"tools": results, "output": done.ends})
            return
        yield Finding(Outcome.GOOD, words, {"tools": results})
