"""`make gpu-check`, rehearsed without a GPU: every stage runs, faults become failures, and lost time is told."""

import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import timeit
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import support.gpu_arrays  # noqa: F401 - kernels are interpreted
import torch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "bench"), str(ROOT / "examples")]

import gpu_check  # noqa: E402
import gpu_wheels  # noqa: E402
import train  # noqa: E402
from gpucheck import checks, models, programs, rates, report, share, sides, throughput, verdicts  # noqa: E402
from gpucheck.findings import Context, Limit, Outcome  # noqa: E402
from gpucheck.programs import MARK, Done  # noqa: E402
from gpucheck.rows import Row  # noqa: E402
from gpucheck.verdicts import Answer  # noqa: E402

STAGES = ["machine", "tests", "verification", "rates", "throughput", "sanitizer"]


def kind_of(command: Sequence[str]) -> str:
    """Return which stage starts this command, and of throughput which program."""
    words = list(command[1:])
    if "pytest" in words:
        return "tests"
    if "--measure" in words:
        what, request = words[-2:]
        return json.loads(request)["program"] if what == "throughput" else what
    return "train" if words[0].endswith("train.py") else words[2]


Program = Callable[[Sequence[str], float], Done]


def runner(program: Program) -> programs.Runner:
    return lambda commands, seconds, environment: [program(command, seconds) for command in commands]


_ENDED: dict[str, tuple[Done, str]] = {
    "tests": (Done(0, "tests/x.py::test_it PASSED [ 50%]\ntests/x.py::test_two[a b] PASSED [100%]\n", 0.1), ""),
    "doctor": (Done(0, '{"findings": []}\n', 0.1), ""),
}
"""How programs have ended, and their reports."""


def remembered(command: Sequence[str], seconds: float) -> Done:
    """Run a program in this process, once in all tests; later it ends as it did then, and leaves the same report."""
    report = Path(command[command.index("--report") + 1]) if "--report" in command else Path(os.devnull)
    kind = kind_of(command)
    if kind not in _ENDED:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            status = (gpu_check if "--measure" in command else train).main(list(command[2:]))
        _ENDED[kind] = Done(status, output.getvalue(), 0.1), report.read_text()
    done, content = _ENDED[kind]
    report.write_text(content)
    return done


def but(kind: str, instead: Callable[[Done], Done]) -> Program:
    """Return what runs programs, of which one ends otherwise."""

    def run(command: Sequence[str], seconds: float) -> Done:
        done = remembered(command, seconds)
        return instead(done) if kind_of(command) == kind else done

    return run


def results_in(folder: Path) -> Any:
    (path,) = (path for path in folder.glob("*.json") if "trace" not in path.name)
    return json.loads(path.read_text())


def check(folder: Path, program: Program) -> tuple[int, Any, dict[str, str]]:
    """Rehearse; return the exit status, the stages, and what each has come to."""
    status = gpu_check.check(folder, 1000.0, rehearses=True, runner=runner(program))
    stages = results_in(folder)["stages"]
    assert list(stages) == STAGES
    return status, stages, {name: stage["outcome"] for name, stage in stages.items()}


@pytest.fixture(autouse=True)
def _no_sanitizer_and_no_rounds(monkeypatch):
    monkeypatch.setattr(checks, "sanitizer_path", lambda: None)
    monkeypatch.setattr(rates, "_median_seconds", lambda action, rounds: timeit.timeit(action, number=1))


def test_rehearsal_runs_every_stage_and_says_that_it_is_one(tmp_path, capsys):
    status, stages, outcomes = check(tmp_path / "new", remembered)
    assert outcomes == {**dict.fromkeys(STAGES, "good"), "sanitizer": "left out"}, stages
    assert status == 0
    assert results_in(tmp_path / "new")["rehearsal"] is True
    assert sorted(path.suffix for path in (tmp_path / "new").iterdir()) == [".json", ".json", ".png"]
    assert all(path.name.startswith("rehearsal-") for path in (tmp_path / "new").iterdir())
    figures = {name: stage["figures"] for name, stage in stages.items()}
    assert figures["tests"]["tests"] == {"passed": 6}
    (run,) = figures["verification"]["runs"]
    assert min(run["committed"], run["clipped"], run["skipped"], run["elements"]) > 0
    assert {*rates.KERNELS, rates.COPY} < {rate["what"] for rate in figures["rates"]["rows"]}
    rows = [Row(**row) for row in figures["throughput"]["rows"]]
    wanted = [(side, batch) for side in sides.SIDES for batch in (1, 2)] + [(side, 1) for side in sides.SWEPT]
    assert sorted((row.side, row.batch) for row in rows) == sorted(wanted)
    for row in rows:
        assert row.outcome == "measured"
        assert row.tokens_per_second == row.batch * row.seq / row.step_seconds
        assert (row.backward_seconds is not None) == (row.adam_seconds is not None) == (row.side == sides.ALONE)
        assert (row.hidden_share is not None) == (row.side in (sides.OVERLAPPED, *sides.SWEPT))
    printed = capsys.readouterr().out
    assert "REHEARSAL" in printed
    for name in (*STAGES, *sides.SIDES, *sides.SWEPT, *rates.KERNELS, "at least 90% of Adam hidden"):
        assert name in printed, name


CUDA_ERROR = """before
Traceback (most recent call last):
  File "a.py", line 1, in <module>

KeyError: 'inner'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    c()
    ^^^
torch.AcceleratorError: CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

nanobind: leaked 4 instances!
"""


@pytest.mark.parametrize(
    ("kind", "instead", "stage", "words"),
    [
        ("tests", lambda _: Done(1, "tests/a.py::b FAILED\nFAILED tests/a.py::b - oh", 1.0), "tests", "tests/a.py::b"),
        ("train", lambda done: Done(1, done.output + "NOT verified: 3", 1.0), "verification", "status 1: NOT verified"),
        ("rates", lambda done: Done(1, done.output + "RuntimeError: lost", 1.0), "rates", "RuntimeError: lost"),
        (sides.OVERLAPPED, lambda _: Done(1, CUDA_ERROR, 1.0), "throughput", "illegal memory access"),
    ],
)
def test_fault_is_a_failure_and_the_rest_goes_on(kind, instead, stage, words, tmp_path):
    status, stages, outcomes = check(tmp_path, but(kind, instead))
    assert status == 1
    assert [name for name, outcome in outcomes.items() if outcome == "failed"] == [stage]
    assert words in stages[stage]["detail"]
    if kind == sides.OVERLAPPED:
        assert stages[stage]["figures"]["outputs"] == [f"{sides.OVERLAPPED} over tiny:\n{CUDA_ERROR}"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"elements_differing": 3}, "elements differing: 3"),
        ({"parameters_differing": 1}, "parameters differing: 1"),
        ({"steps_differing": 1}, "steps differing: 1"),
        ({"clipped": 0}, "the run had no clipped steps"),
        ({"skipped": 0, "committed": 0}, "the run had no committed and no skipped steps"),
        ({"elements": None}, "no elements"),
        ({}, ""),
    ],
)
def test_only_a_run_that_shows_something_is_right(change, words):
    same = dict.fromkeys(("elements_differing", "parameters_differing", "steps_differing"), 0)
    right = {"committed": 5, "clipped": 5, "skipped": 1, "elements": 99, **same}
    found = checks.what_is_wrong(Done(0, "", 1.0), {**right, **change})
    assert words in found
    assert bool(found) is bool(change)


def test_what_is_not_over_in_time_is_said(tmp_path):
    cut = []

    def run(command, seconds):
        assert seconds >= 0.0
        cut.append(kind_of(command))
        return Done(None, DUMPED, seconds)

    status, stages, outcomes = check(tmp_path, run)
    assert status == 0
    assert outcomes == {**dict.fromkeys(STAGES, "shortened"), "verification": "left out", "sanitizer": "left out"}
    assert all(DUMPED in str(stages[name]["figures"]["output"]) for name in ("tests", "verification", "rates"))
    figures = stages["throughput"]["figures"]
    assert all(output.endswith(DUMPED) for output in figures["outputs"])
    assert {row["outcome"] for row in figures["rows"]} == {"not over in time"}
    assert {verdict["answer"] for verdict in figures["verdicts"]} == {"unknown"}
    assert len(cut) == 5 + len(sides.PROGRAMS)


def test_interrupted_check_leaves_what_it_has(tmp_path):
    def run(command, seconds):
        if kind_of(command) == sides.ON_DEVICE:
            raise KeyboardInterrupt
        return remembered(command, seconds)

    with pytest.raises(KeyboardInterrupt):
        gpu_check.check(tmp_path, 1000.0, rehearses=True, runner=runner(run))
    results = results_in(tmp_path)
    assert list(results["stages"]) == STAGES[:5]
    rows = results["stages"]["throughput"]["figures"]["rows"]
    assert [row["side"] for row in rows] == [sides.ALONE] * 2 + [sides.OVERLAPPED] * 2


def test_every_optimizer_makes_the_same_step():
    parameters = []
    overlapped = lambda model: sides.Superadam(model).overlap()  # noqa: E731
    for make in (sides.TorchOnDevice, sides.TorchOnHost, sides.Superadam, overlapped):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
        side = make(model)
        for _ in range(3):
            model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().sum().backward()
            side.update()
            assert model.weight.grad is None
        if isinstance(side, sides.Superadam):
            side.close()
        parameters.append(model.weight.detach())
    for other in parameters[1:]:
        torch.testing.assert_close(other, parameters[0], rtol=2**-8, atol=0.0)  # torch's norm is in bf16 or fp32


def request(program: str, batches: list[int]) -> throughput.ThroughputRequest:
    return throughput.ThroughputRequest(program, "tiny", "cpu", batches, 8, 0.0, 1 << 12)


def rows_of(request: throughput.ThroughputRequest, capsys: pytest.CaptureFixture[str]) -> list[Row]:
    throughput.measure(request)
    return [Row(**line) for line in Done(0, capsys.readouterr().out, 1.0).lines(MARK)]


def test_a_sweep_differs_from_the_placement_that_was_chosen(capsys):
    rows = rows_of(request(sides.SWEEP, [1, 2]), capsys)
    asked = ("gpu_buckets", "bucket_numel", "num_threads")
    placed = {row.side: {name: int(row.placement[name]) for name in asked} for row in rows if row.side in sides.SWEPT}
    chosen = placed.pop(sides.AUTO)
    total = models.elements_of(models.SHAPES["tiny"])
    for name, placement in placed.items():
        wanted = sides.PLACEMENTS[name.partition(", ")[2]](sides.Placement(transfer_dtype=None, **chosen), total)
        assert placement == chosen | wanted
    assert placed[f"{sides.OVERLAPPED}, 1/2 on the GPU"]["gpu_buckets"] > 0
    assert [row.placement for row in rows if row.side == sides.PLAIN] == [{}, {}]


def test_placement_that_cannot_be_met_is_a_row(monkeypatch, capsys):
    monkeypatch.setitem(sides.PLACEMENTS, "half the threads", lambda chosen, total: {"num_threads": 0})
    rows = rows_of(request(sides.SWEEP, [1]), capsys)
    refused = [row for row in rows if row.outcome != "measured"]
    assert [(row.side, row.outcome) for row in refused] == [(f"{sides.OVERLAPPED}, half the threads", "refused")]
    assert "num_threads" in refused[0].detail
    assert len(rows) == len(sides.SWEPT) + 1


def test_memory_that_does_not_suffice_is_a_row(monkeypatch, capsys):
    def refuse(model, side, batch, *arguments, steps=throughput._steps):
        if batch == 2:
            raise RuntimeError("the worker failed") from torch.OutOfMemoryError("full")
        return steps(model, side, batch, *arguments)

    monkeypatch.setattr(throughput, "_steps", refuse)
    both = request(sides.OVERLAPPED, [1, 2])

    def rows(done):
        return {(row.side, row.batch): row.outcome for row in throughput.rows_of(both, done)}

    fits, fits_not = "measured", "does not fit"
    alone, mine = sides.ALONE, sides.OVERLAPPED
    throughput.measure(both)
    output = capsys.readouterr().out
    assert rows(Done(0, output, 1.0)) == {(alone, 1): fits, (alone, 2): fits_not, (mine, 1): fits, (mine, 2): fits_not}
    assert set(rows(Done(-9, "", 1.0)).values()) == {"killed"}
    assert rows(Done(None, output[: output.index("\n") + 1], 1.0))[alone, 1] == fits

    monkeypatch.setattr(throughput, "build_model", Mock(side_effect=torch.OutOfMemoryError("full")))
    throughput.measure(both)
    assert set(rows(Done(0, capsys.readouterr().out, 1.0)).values()) == {fits_not}

    monkeypatch.setattr(throughput, "build_model", Mock(side_effect=RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        throughput.measure(both)

    pinned = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
    monkeypatch.setattr(throughput, "build_model", Mock(side_effect=pinned))
    throughput.measure(both)
    assert set(rows(Done(0, capsys.readouterr().out, 1.0)).values()) == {fits_not}


def measured(side: str, seconds: float, **figures: Any) -> Row:
    return Row("m", 1, 1000, side, step_seconds=seconds, tokens_per_second=1000 / seconds, **figures)


def judged(*rows: Row) -> list[Answer]:
    return [verdict.answer for verdict in verdicts.verdicts(verdicts.with_hidden_shares(rows))]


LONG = {"backward_seconds": 0.61, "adam_seconds": 0.4}
SHORT = {"backward_seconds": 0.5, "adam_seconds": 0.4}
MET, MISSED, NOT_ASKED, UNKNOWN = Answer.MET, Answer.MISSED, Answer.NOT_ASKED, Answer.UNKNOWN


@pytest.mark.parametrize(
    ("alone", "mine", "on_device", "answers"),
    [
        (LONG, 1.039, 1.0, [MET, MET]),
        (LONG, 1.041, 1.0, [MISSED, MET]),
        (LONG, 1.12, 1.0, [MISSED, MISSED]),
        (LONG, 1.03, 0.92, [MET, MISSED]),
        (SHORT, 1.02, 1.0, [NOT_ASKED, NOT_ASKED]),
        (SHORT, 1.3, 1.0, [NOT_ASKED, NOT_ASKED]),
        (LONG, 1.03, None, [MET, UNKNOWN]),
        (LONG, None, 1.0, [UNKNOWN, UNKNOWN]),
        (None, 1.03, 1.0, [UNKNOWN, UNKNOWN]),
    ],
)
def test_a_step_is_judged_by_its_bound(alone, mine, on_device, answers):
    times = {sides.ALONE: alone and 1.0, sides.OVERLAPPED: mine, sides.ON_DEVICE: on_device}
    figures = {sides.ALONE: alone}
    rows = [measured(side, seconds, **figures.get(side, {})) for side, seconds in times.items() if seconds is not None]
    assert judged(*rows) == answers
    assert judged(*rows, *(Row("m", 1, 1000, side, "does not fit") for side in times if times[side] is None)) == answers


@pytest.mark.parametrize(
    ("times", "answer"), [((1.0, 0.95), MET), ((1.0, 0.9), MISSED), ((1.0, 2.0), MET), ((1.0,), UNKNOWN)]
)
def test_auto_is_judged_by_the_best_placement(times, answer):
    assert judged(*[measured(side, seconds) for side, seconds in zip(sides.SWEPT, times, strict=False)])[2:] == [answer]


def test_hidden_share_is_of_the_passes_alone_however_slow_a_plain_step_is():
    """The copies of a plain step are pageable: no share may be of a time with them."""
    own = [measured(sides.ALONE, 2.0, adam_seconds=1.0), measured(sides.OVERLAPPED, 2.25)]
    for plain in (2.5, 30.0):
        rows = verdicts.with_hidden_shares([*own, measured(sides.PLAIN, plain), measured(sides.ON_HOST, plain)])
        assert [row.hidden_share for row in rows] == [None, 0.75, None, None]


def test_kernels_move_what_a_copy_moves(monkeypatch):
    seconds = iter((0.5, 1.0, 2.0, 4.0))
    monkeypatch.setattr(rates, "_median_seconds", lambda action, rounds: action() or next(seconds))
    size = 28 << 10
    found = list(rates.kernel_rates(torch.device("cpu"), size, 2, 1))
    assert [rate.what for rate in found] == [rates.COPY, *rates.KERNELS]
    assert [rate.gigabytes_per_second for rate in found] == [size / each / 1e9 for each in (0.5, 1.0, 2.0, 4.0)]
    assert [rate.share_of_copy for rate in found] == pytest.approx([1.0, 0.5, 0.25, 0.125])
    assert found[-1].elements_per_second == size / rates.ADAM_BYTES_PER_ELEMENT / 4.0


def test_results_do_not_overwrite_one_another(tmp_path, monkeypatch):
    monkeypatch.setattr(report.platform, "node", lambda: "Node 7.local")
    monkeypatch.setattr(report, "commit", lambda: "1234567")
    assert [report.slug(one) for one in ("NVIDIA GeForce RTX 4090", "GH200 480GB")] == ["rtx-4090", "gh200-480gb"]
    names = [report.new_file(tmp_path, "NVIDIA H200", "2026-11-22T10:00:00+00:00").name for _ in range(3)]
    assert names == [f"h200-node-7-local-2026-11-22-1234567{end}.json" for end in ("", "-2", "-3")]
    for _ in range(2):
        gpu_check.check(tmp_path, 0.0, rehearses=True, runner=runner(remembered), only=["machine"])
    assert len(list(tmp_path.iterdir())) == 5


def test_commit_is_that_of_the_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert report.commit() == ""  # a copy without history
    monkeypatch.setenv("PATH", "")
    assert report.commit() == ""  # no git


def test_gpu_tests_are_found_and_this_is_none_of_them():
    found = checks.kernel_tests() + checks.device_tests()
    assert {"tests/gpu/test_gpu_adam.py", "tests/gpu/test_gpu_pack.py", "tests/gpu/test_gpu_scatter.py"} <= set(found)
    assert "tests/devices/test_cuda.py" in found
    assert not [name for name in found if name.endswith("test_gpu_check.py")]
    path, _, name = checks.REHEARSED_TEST.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()
    for name in checks.SANITIZED.split(" or "):
        assert any(f"def {name}" in (ROOT / path).read_text() for path in found), name


def test_every_test_that_looks_for_a_gpu_is_run():
    looking = [path for path in (ROOT / "tests").rglob("test_*.py") if "torch.cuda.is_available()" in path.read_text()]
    found = {*checks.kernel_tests(), *checks.device_tests(), *checks.OF_SEVERAL_DEVICES}
    assert {str(path.relative_to(ROOT)) for path in looking} <= found | {str(Path(__file__).relative_to(ROOT))}
    commands = itertools.chain(*checks.selections(Context(Mock(), "cuda", rehearses=False, trace="")))
    assert found == {word for command in commands for word in command if word.startswith("tests/")}
    assert all((ROOT / path).exists() for path in found)


@pytest.mark.subprocess
def test_device_tests_that_need_no_gpu_pass_where_there_is_one():
    """What they compute on the CPU takes no kernel that is compiled for the GPU."""
    path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    words = [*checks._PYTEST, "-p", "support.pretended_gpu", *checks.device_tests(), "-k", "not cuda:0"]
    (done,) = programs.run([programs.python(*words)], 250.0, {"PYTHONPATH": path})
    assert done.status == 0, done.output
    assert done.output.count(" PASSED") > 30


@pytest.mark.parametrize(("tests", "count"), [(0, 2), (1, 3), (7, 3), (9, 3)])
def test_shares_are_all_tests_and_none_twice(tests, count):
    ran = []
    for number in range(count):
        config, items = Mock(getoption=Mock(return_value=f"{number}/{count}")), list(range(tests))
        share.pytest_collection_modifyitems(config, items)
        assert sorted(items + config.hook.pytest_deselected.call_args.kwargs["items"]) == list(range(tests))
        ran += items
    assert sorted(ran) == list(range(tests))


EMPTY = Done(checks.NO_TESTS, "1 deselected", 0.1)
DUMPED = "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File x\n\nExtension modules: y\n"


@pytest.mark.parametrize(
    ("instead", "outcome", "words"),
    [
        (lambda share, done: EMPTY if share == "1/2" else done, Outcome.GOOD, "4 passed"),
        (lambda share, done: Done(4, "ERROR: not found", 1.0), Outcome.FAILED, "none ran"),
        (lambda share, done: Done(None, "tests/a::b FAILED\ntests/a::c PASSED", 1.0), Outcome.FAILED, "2 failed"),
        (
            lambda share, done: Done(None, f"tests/a::b PASSED\ntests/a::c[d e] {DUMPED}", 1.0),
            Outcome.SHORTENED,
            "2 passed when time was over, in tests/a::c[d e], tests/a::c[d e]",
        ),
        (lambda share, done: Done(0, "tests/a.py::b SKIPPED [100%]", 1.0), Outcome.FAILED, "3 skipped"),
    ],
)
def test_what_shares_of_the_tests_end_with_is_told(instead, outcome, words):
    """A share without tests is no failure."""
    run = runner(lambda command, seconds: instead(command[-1], remembered(command, seconds)))
    *_, last = checks.tests(Context(run, "cpu", rehearses=True, trace=""), Limit(time.monotonic() + 1000.0))
    assert last.outcome is outcome
    assert words in last.detail
    assert outcome is Outcome.FAILED or last.detail == words


def test_later_tests_run_although_earlier_ones_have_failed():
    ran = []

    def run(command, seconds):
        ran.append(command)
        if "--share" not in command:
            return Done(0, "tests/b.py::c PASSED", 1.0)
        return Done(1, "tests/a.py::b FAILED\nFAILED tests/a.py::b - oh", 1.0)

    *_, last = checks.tests(Context(runner(run), "cpu", rehearses=True, trace=""), Limit(time.monotonic() + 1000.0))
    assert len(ran) == 3
    assert (last.outcome, last.detail) == (Outcome.FAILED, "2 failed, 1 passed; tests/a.py::b, tests/a.py::b")
    assert "oh" in last.figures["output"]


def test_sanitizer_that_has_seen_no_kernel_has_failed(monkeypatch):
    monkeypatch.setattr(checks, "sanitizer_path", lambda: "compute-sanitizer")
    for word, outcome in (("SKIPPED", Outcome.FAILED), ("PASSED", Outcome.GOOD)):
        run = runner(lambda command, seconds, word=word: Done(0, f"tests/a.py::b {word}\n", 1.0))
        *_, last = checks.sanitized(Context(run, "cpu", rehearses=True, trace=""), Limit(time.monotonic() + 1000.0))
        assert last.outcome is outcome


def test_line_in_which_a_program_was_killed_is_left_out():
    for end in ("", DUMPED):
        assert Done(None, f"{MARK}{{}}\n{MARK}{{{end}", 1.0).lines(MARK) == [{}]


@pytest.mark.parametrize(
    ("done", "line"),
    [
        (Done(1, CUDA_ERROR, 1.0), "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
        (Done(1, "one\n two \n\n", 1.0), "two"),
        (Done(None, f"one\ntwo\n{DUMPED}", 1.0), "two"),
        (Done(-6, f"one\n{DUMPED}", 1.0), "Extension modules: y"),
        (Done(0, "", 1.0), "no output"),
    ],
)
def test_line_that_says_what_went_wrong(done, line):
    assert done.last_line == line


def test_both_ends_of_an_output_are_kept():
    most = programs.MOST_OUTPUT
    assert Done(1, "a" * 2 * most, 1.0).ends == "a" * 2 * most
    ends = Done(1, f"first{'b' * 3 * most}last", 1.0).ends
    assert ends.startswith("firstb")
    assert ends.endswith("blast")
    assert f"b\n[{most + 9:,} characters]\nb" in ends


def test_bad_input_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, sentence in (
        ([], "finds no GPU; run it on a machine that has one, or with --rehearse"),
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
def test_program_and_what_it_started_end_with_their_time(tmp_path):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code = f"import subprocess, time; subprocess.Popen(['sleep', '60'], stdout=open({pipe!r}, 'w')); "
    code += "print('first line', flush=True); time.sleep(60)"
    begin = time.monotonic()
    (done,) = programs.run([[sys.executable, "-c", code]], 6.0, {})
    assert time.monotonic() - begin < 30.0
    assert (done.status, done.last_line) == (None, "first line")
    assert 'File "<string>", line 1 in <module>' in done.output  # where it waited
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # nobody has it open any more
    assert time.monotonic() - begin < 36.0
    os.close(reader)


@pytest.mark.subprocess
def test_programs_end_with_the_check(monkeypatch):
    started, wait = [], subprocess.Popen.wait

    def interrupted(process, timeout=None):
        if timeout is not None:
            raise KeyboardInterrupt
        started.append(process)
        return wait(process)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        programs.run([[sys.executable, "-c", "import time; time.sleep(60)"]] * 2, 60.0, {})
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


@pytest.mark.subprocess
def test_programs_run_at_once_and_see_the_wheel_not_the_sources(monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH")
    with tempfile.TemporaryDirectory() as folder:
        one, other = (os.path.join(folder, name) for name in "ab")
        os.mkfifo(one)
        os.mkfifo(other)
        first = f"open({one!r}, 'w').close(); open({other!r}).close()"
        second = f"open({one!r}).close(); open({other!r}, 'w').close()"
        shown = "import sys; print(sys.flags.safe_path, '.' in sys.path or '' in sys.path)"
        ended = programs.run([[sys.executable, "-c", f"{code}; {shown}"] for code in (first, second)], 60.0, {})
    assert [(done.status, done.output.strip()) for done in ended] == [(0, "True False")] * 2


@pytest.mark.subprocess
def test_measuring_process_is_this_script():
    request = rates.RatesRequest("cpu", 1 << 12, 1 << 12, 2, 1 << 12, 1)
    (done,) = programs.run([programs.measuring("rates", asdict(request))], 120.0, {"OMP_NUM_THREADS": "1"})
    assert done.status == 0, done.output
    assert len(done.lines(MARK)) == 3 + 1 + len(rates.KERNELS) + 2
    assert os.path.samefile(programs.SCRIPT, gpu_check.__file__)


def test_report_of_the_doctor_is_found_among_warnings():
    report = {"findings": [{"name": "{"}], "broken": False}
    output = "warning: {odd}\n" + json.dumps(report, indent=1) + "\nnanobind: leaked {2} types!\n"
    (finding,) = checks.machine(Context(lambda *_: [Done(0, output, 1.0)], "cpu", True, "trace.json"), Limit(10.0))
    assert (finding.outcome, finding.figures) == (Outcome.GOOD, {"doctor": report})


def wheel(folder: Path, name: str, *needs: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        lines = [f"Name: {name}", *(f"Requires-Dist: {need}" for need in needs), "", "text"]
        file.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines))


def test_wheels_that_others_need_are_missed(tmp_path):
    wheel(tmp_path, "markdown_it_py", "mdurl~=0.1", "numpy>=2", 'tomli; python_version < "3.11"', 'docs; extra == "x"')
    others = ["Markdown.It-py", 'typing-extensions; python_version < "3.12"', 'x; sys_platform == "win32"']
    wheel(tmp_path, "rich", *others)
    assert gpu_wheels.missing(tmp_path) == {"mdurl", "typing-extensions"}


def test_wheels_are_for_every_python_and_superadam_is_built_only_for_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_wheels.platform, "machine", lambda: "x86_64")
    ran = []

    def run(command, check):
        ran.append(command)
        wheel(tmp_path, f"w{len(ran)}")

    monkeypatch.setattr(gpu_wheels.subprocess, "run", run)
    (tmp_path / "old-1.0-py3-none-any.whl").write_text("")
    (tmp_path / "other").write_text("")
    assert gpu_wheels.main(["--out", str(tmp_path), "--arch", "aarch64"]) == 0
    assert (tmp_path / "other").exists()
    assert not (tmp_path / "old-1.0-py3-none-any.whl").exists()
    assert len(ran) == 2 * len(gpu_wheels.PYTHONS)
    assert not [word for command in ran for word in command if "x86_64" in word]
    assert gpu_wheels.main(["--out", str(tmp_path)]) == 0
    assert ran[-1][1:4] == ["-m", "pip", "wheel"]
    ran.clear()
    assert gpu_wheels.main(["--out", str(tmp_path), "--python", "3.12"]) == 0
    assert [command[command.index("--python-version") + 1] for command in ran[:-1]] == ["3.12", "3.12"]
    monkeypatch.setattr(gpu_wheels, "MOST_BYTES", 10)
    wheel(tmp_path, "small", "large")
    assert gpu_wheels.main(["--out", str(tmp_path)]) == 1
    assert "expected at most 0 MiB" in capsys.readouterr().err


def test_what_the_check_needs_is_fetched():
    fetched = {*gpu_wheels.COMPILED, *gpu_wheels.PLAIN, *gpu_wheels.THERE, "superadam"}
    assert set(gpu_check.NEEDED) | {"pytest", "pytest-timeout", "hypothesis", "cffi"} <= fetched
