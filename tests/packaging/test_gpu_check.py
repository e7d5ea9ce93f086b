"""`make gpu-check`, rehearsed without a GPU: every stage runs, faults become failures, and lost time is told."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import one_torch_thread

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))

import gpu_check  # noqa: E402
from gpucheck import checks, programs, rates, report, sides, throughput  # noqa: E402
from gpucheck.programs import MARK, Done  # noqa: E402

from superadam.cli import main as cli  # noqa: E402

STAGES = ["machine", "tests", "verification", "rates", "throughput", "sanitizer"]


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def kind_of(command: Sequence[str]) -> str:
    """Return which stage starts this command, and of throughput also the optimizer."""
    words = list(command[1:])
    if "pytest" in words:
        return "tests"
    if "--measure" in words:
        what, request = words[-2:]
        return json.loads(request)["side"] if what == "throughput" else what
    return words[2]


def in_this_process(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Done:
    """Run what a stage starts without the seconds that a new Python takes; tests and doctor only seem to run."""
    kind = kind_of(command)
    if kind == "tests":
        return Done(0, "tests/test_x.py::test_it PASSED [ 50%]\ntests/test_x.py::test_two[a b] PASSED [100%]\n", 0.1)
    if kind == "doctor":
        return Done(0, '{"findings": []}\n', 0.1)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        words = list(command[2:] if "--measure" in command else command[3:])
        status = gpu_check.main(words) if "--measure" in command else cli.main(words)
    return Done(status, output.getvalue(), 0.1)


_ENDED: dict[str, tuple[Done, str | None]] = {}


def remembered(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Done:
    """Run a program once in all tests; later it ends as it did then, and leaves the same report."""
    report = Path(command[command.index("--report") + 1]) if "--report" in command else None
    kind = kind_of(command)
    if kind not in _ENDED:
        done = in_this_process(command, seconds, environment)
        _ENDED[kind] = done, report.read_text() if report is not None else None
    done, content = _ENDED[kind]
    if report is not None and content is not None:
        report.write_text(content)
    return done


def but(kind: str, instead: Callable[[Done], Done]) -> programs.Runner:
    """Return a runner in which one program ends otherwise."""

    def run(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Done:
        done = remembered(command, seconds, environment)
        return instead(done) if kind_of(command) == kind else done

    return run


def check(folder: Path, run: programs.Runner = in_this_process, seconds: float = 1000.0) -> tuple[int, dict[str, Any]]:
    """Rehearse into a folder, and return the exit status and the results."""
    status = gpu_check.check(folder, seconds, rehearses=True, run=run)
    (path,) = (path for path in folder.glob("*.json") if "trace" not in path.name)
    results: dict[str, Any] = json.loads(path.read_text())
    assert list(results["stages"]) == STAGES
    return status, results


@pytest.fixture(autouse=True)
def _no_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "sanitizer_path", lambda: None)


def test_rehearsal_runs_every_stage_and_says_that_it_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, results = check(tmp_path / "new")
    outcomes = {name: stage["outcome"] for name, stage in results["stages"].items()}
    assert outcomes == {**dict.fromkeys(STAGES, "good"), "sanitizer": "left out"}, results
    assert status == 0
    assert results["rehearsal"] is True
    assert sorted(path.suffix for path in (tmp_path / "new").iterdir()) == [".json", ".json", ".png"]
    assert all(path.name.startswith("rehearsal-") for path in (tmp_path / "new").iterdir())
    figures = {name: stage["figures"] for name, stage in results["stages"].items()}
    assert figures["tests"]["tests"] == {"passed": 2}
    (run,) = figures["verification"]["runs"]
    assert min(run["committed"], run["clipped"], run["skipped"], run["elements"]) > 0
    assert all(value > 0 for value in figures["rates"].values())
    rows = figures["throughput"]["rows"]
    assert [(row["side"], row["batch"]) for row in rows] == [(side, batch) for side in sides.SIDES for batch in (1, 2)]
    for row in rows:
        assert row["outcome"] == "measured"
        assert row["tokens_per_second"] == row["batch"] * row["seq"] / row["step_seconds"]
        assert row["steps"] >= throughput.FEWEST
    printed = capsys.readouterr().out
    assert "REHEARSAL" in printed
    assert all(name in printed for name in (*STAGES, *sides.SIDES))


def differing(done: Done) -> Done:
    """Return the end of a verified run that found a difference; its report is of a right run, all the same."""
    return Done(1, done.output + "NOT verified: 3 of 99 elements", done.seconds)


@pytest.mark.parametrize(
    ("kind", "instead", "stage", "words"),
    [
        ("tests", lambda _: Done(1, "tests/a.py::b FAILED\nFAILED tests/a.py::b - oh", 1.0), "tests", "tests/a.py::b"),
        ("tests", lambda _: Done(4, "ERROR: not found", 1.0), "tests", "none ran"),
        ("tests", lambda _: Done(None, "tests/a.py::b FAILED\ntests/a.py::c PASSED", 1.0), "tests", "1 failed"),
        ("train", differing, "verification", "status 1: NOT verified"),
        ("rates", lambda done: Done(1, done.output + "RuntimeError: lost", 1.0), "rates", "RuntimeError: lost"),
        (sides.OVERLAPPED, lambda _: Done(1, "RuntimeError: lost", 1.0), "throughput", "RuntimeError: lost"),
    ],
)
def test_fault_is_a_failure_and_the_rest_goes_on(
    kind: str, instead: Callable[[Done], Done], stage: str, words: str, tmp_path: Path
) -> None:
    status, results = check(tmp_path, but(kind, instead))
    assert status == 1
    failed = {name: found for name, found in results["stages"].items() if found["outcome"] == "failed"}
    assert list(failed) == [stage]
    assert words in failed[stage]["detail"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"elements_differing": 3}, "elements differing: 3"),
        ({"parameters_differing": 1}, "parameters differing: 1"),
        ({"verdicts_differing": 1}, "verdicts differing: 1"),
        ({"clipped": 0}, "the run had no clipped steps"),
        ({"skipped": 0, "committed": 0}, "the run had no committed and no skipped steps"),
        ({"elements": None}, "no elements"),
        ({}, ""),
    ],
)
def test_only_a_run_that_shows_something_is_right(change: dict[str, Any], words: str) -> None:
    right = {
        **{"committed": 5, "clipped": 5, "skipped": 1, "elements": 99},
        **dict.fromkeys(("elements_differing", "parameters_differing", "verdicts_differing"), 0),
    }
    found = checks.what_is_wrong(Done(0, "", 1.0), {**right, **change})
    assert words in found
    assert bool(found) is bool(change)


def test_what_is_not_over_in_time_is_said(tmp_path: Path) -> None:
    cut: list[str] = []

    def run(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Done:
        assert seconds >= 0.0
        cut.append(kind_of(command))
        return Done(None, "", seconds)

    status, results = check(tmp_path, run)
    assert status == 0
    outcomes = {name: stage["outcome"] for name, stage in results["stages"].items()}
    assert outcomes == {**dict.fromkeys(STAGES, "shortened"), "verification": "left out", "sanitizer": "left out"}
    assert {row["outcome"] for row in results["stages"]["throughput"]["figures"]["rows"]} == {"not over in time"}
    assert len(cut) == 4 + len(sides.SIDES)


def test_without_time_later_stages_are_left_out(tmp_path: Path) -> None:
    status, results = check(tmp_path, but("train", lambda _: Done(None, "", 0.0)), seconds=0.0)
    assert status == 0
    assert results["stages"]["throughput"]["outcome"] == "left out"
    assert results["stages"]["throughput"]["detail"] == f"0 of {len(sides.SIDES)} processes measured when time was over"


def test_interrupted_check_leaves_what_it_has(tmp_path: Path) -> None:
    def run(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Done:
        if kind_of(command) == "torch on the GPU":
            raise KeyboardInterrupt
        return remembered(command, seconds, environment)

    with pytest.raises(KeyboardInterrupt):
        gpu_check.check(tmp_path, 1000.0, rehearses=True, run=run)
    (path,) = (path for path in tmp_path.glob("*.json") if "trace" not in path.name)
    results = json.loads(path.read_text())
    assert list(results["stages"]) == STAGES[:5]
    rows = results["stages"]["throughput"]["figures"]["rows"]
    assert [row["side"] for row in rows] == [sides.ALONE] * 2 + [sides.OVERLAPPED] * 2


def test_every_optimizer_makes_the_same_step() -> None:
    parameters = []
    for name, make in sides.SIDES.items():
        if name == sides.ALONE:
            continue
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
        side = make(model)
        for _ in range(3):
            model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().sum().backward()
            side.update()
            assert model.weight.grad is None
        side.close()
        parameters.append(model.weight.detach())
    for other in parameters[1:]:
        torch.testing.assert_close(other, parameters[0], rtol=2**-8, atol=0.0)  # torch's norm is in bf16 or fp32


def test_memory_that_does_not_suffice_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = throughput._steps

    def refuse(model: Any, side: Any, batch: int, *arguments: Any) -> dict[str, Any]:
        if batch == 2:
            try:
                raise torch.OutOfMemoryError("full")
            except torch.OutOfMemoryError as error:
                raise RuntimeError("the worker failed") from error
        return steps(model, side, batch, *arguments)

    monkeypatch.setattr(throughput, "_steps", refuse)
    request = throughput.ThroughputRequest(sides.ALONE, asdict(throughput.REHEARSED), "cpu", [1, 2, 3], 8, 0.01)
    throughput.measure(request)
    done = Done(0, capsys.readouterr().out, 1.0)
    assert [row["outcome"] for row in throughput.rows_of(request, done)] == ["measured", "does not fit", "does not fit"]
    assert [row["outcome"] for row in throughput.rows_of(request, Done(-9, "", 1.0))] == ["killed"] * 3


def test_hidden_share_is_of_what_a_plain_step_adds() -> None:
    def rows(**seconds: float) -> list[dict[str, Any]]:
        names = {"alone": sides.ALONE, "plain": sides.PLAIN, "mine": sides.OVERLAPPED}
        return [{"model": "m", "batch": 1, "side": names[name], "step_seconds": s} for name, s in seconds.items()]

    measured = rows(alone=1.0, plain=3.0, mine=1.5)
    throughput.add_hidden_shares(measured)
    assert measured[2]["hidden_share"] == 0.75
    for incomplete in (rows(alone=1.0, mine=1.5), rows(alone=1.0, plain=0.9, mine=1.5)):
        throughput.add_hidden_shares(incomplete)
        assert all("hidden_share" not in row for row in incomplete)


def test_rates_count_both_directions() -> None:
    found = rates.link_rates(torch.device("cpu"), 1 << 16, 3)
    assert len(found) == 3
    assert all(value > 0.0 for value in found.values())


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("GH200 480GB", "gh200-480gb")],
)
def test_files_are_named_after_the_device(device: str, name: str) -> None:
    assert report.slug(device) == name


def test_gpu_tests_are_found_and_this_is_none_of_them() -> None:
    found = checks.gpu_tests()
    assert {"tests/gpu/test_gpu_adam.py", "tests/gpu/test_gpu_pack.py", "tests/gpu/test_gpu_scatter.py"} <= set(found)
    assert not [name for name in found if name.endswith("test_gpu_check.py")]
    assert all((ROOT / name).is_file() for name in found)
    path, _, name = checks.REHEARSED_TEST.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()
    for name in checks.SANITIZED.split(" or "):
        assert any(f"def {name}" in (ROOT / path).read_text() for path in found), name


def test_bad_input_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, sentence in (
        ([], "finds no GPU; run it on a machine that has one, or with --rehearse"),
        (["--rehearse"], "give another folder with --out"),
        (["--rehearse", "--out", str(gpu_check.RESULTS)], "give another folder with --out"),
    ):
        assert gpu_check.main(words) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1
    monkeypatch.setattr(gpu_check, "NEEDED", ("superadam", "no_such_module"))
    assert gpu_check.main([]) == 2
    assert "no_such_module cannot be imported by" in capsys.readouterr().err


@pytest.mark.subprocess
def test_program_and_what_it_started_end_with_their_time(tmp_path: Path) -> None:
    path = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(path)!r}, 'w').write(str(child.pid))\n"
        "print('first line', flush=True)\n"
        "time.sleep(60)\n"
    )
    begin = time.monotonic()
    done = programs.run([sys.executable, "-c", code], 2.0, {})
    assert time.monotonic() - begin < 30.0
    assert (done.status, done.last_line) == (None, "first line")
    deadline = time.monotonic() + 30.0
    while is_running(int(path.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(int(path.read_text()))


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.subprocess
def test_measuring_process_is_this_script() -> None:
    request = rates.RatesRequest("cpu", 1 << 12, 1 << 12, 1)
    done = programs.run(programs.measuring("rates", asdict(request)), 120.0, {"OMP_NUM_THREADS": "1"})
    assert done.status == 0, done.output
    assert len(done.lines(MARK)) == 2
    assert os.path.samefile(programs.SCRIPT, gpu_check.__file__)
