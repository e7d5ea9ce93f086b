"""The benchmarks: how they time, what the floor moves, and the whole run at a tiny size; never how fast it is."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from superadam.cli import main as cli
from superadam.cli.bench import command, contests, floor, gradient_norms, overlap, pace, passes
from superadam.cli.bench.arrays import HYPERPARAMETERS, PassArrays, bytes_per_element
from superadam.cli.bench.pairs import WARM_UPS, Spread, compare, fastest
from superadam.cli.bench.timed_model import Gradients, TimedModel
from superadam.cli.usage import UsageError
from superadam.devices import PlainDevice, Stream, paced
from superadam.kernels import native
from superadam.kernels.native import Dtype, Pass
from superadam.offload.placement import Placement

NUMEL = 3 * native.CHUNK
DTYPES = (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT64)
STATE = ("master", "exp_avg", "exp_avg_sq")


class Clock:
    """A clock that only the actions move, and a log of who ran."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def action(self, name: str, durations: Iterator[float]) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now += next(durations)

        return run


# -- pairs -----------------------------------------------------------------------------------------------------------


def test_pairs_alternate_and_both_sides_are_warmed_alike() -> None:
    clock = Clock()
    ours, theirs = (clock.action(name, itertools.repeat(1.0)) for name in "ab")
    compare(ours, theirs, 4, clock=clock)
    assert "".join(clock.log) == "ab" * WARM_UPS + "ab" + "ba" + "ab" + "ba"


def test_a_ratio_is_of_the_same_pair() -> None:
    clock = Clock()
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]  # the machine slows down; the ratio does not move
    ours = clock.action("a", iter([9.0] * WARM_UPS + drift))
    theirs = clock.action("b", iter([9.0] * WARM_UPS + [2 * seconds for seconds in drift]))
    found = compare(ours, theirs, len(drift), clock=clock)
    assert found.ratio == Spread(0.5, 0.5, 0.5)
    assert (found.first.median, found.second.median, found.pairs) == (4.0, 8.0, 5)


def test_at_least_one_pair_is_needed() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        compare(lambda: None, lambda: None, 0)


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=30))
def test_a_spread_is_ordered_and_inside_the_values(values: list[float]) -> None:
    spread = Spread.of(values)
    slack = 1e-12 * max(values)  # the interpolation between two equal values may round
    assert min(values) - slack <= spread.lower <= spread.median + slack
    assert spread.median <= spread.upper + slack <= max(values) + 2 * slack
    assert spread.median == pytest.approx(float(np.median(values)))


def test_the_fastest_is_the_one_with_the_shortest_run() -> None:
    clock = Clock()
    noisy = clock.action("noisy", iter([9.0, 1.0, 9.0]))
    steady = clock.action("steady", itertools.repeat(2.0))
    before = clock.action("before", itertools.repeat(5.0))
    assert fastest([steady, noisy], 2, before, clock=clock) == 1
    assert clock.log == [
        "steady",
        "noisy",
        *["before", "steady", "before", "noisy"],
        *["before", "noisy", "before", "steady"],
    ]


# -- traffic ---------------------------------------------------------------------------------------------------------


def checksum(arrays: PassArrays, *names: str) -> int:
    return sum(int(arrays[name].view(np.uint32).sum(dtype=np.uint64)) for name in names) % 2**32


READ_ONLY = {
    Pass.NORM: ("gradient",),
    Pass.SPECULATE: ("gradient", *STATE),
    Pass.COMMIT: ("gradient",),
    Pass.COMMIT_AND_SPECULATE: ("gradient", "accepted_gradient"),
    Pass.UPDATE: ("gradient",),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", READ_ONLY)
def test_traffic_reads_everything_and_leaves_the_state_alone(which: Pass, dtype: Dtype) -> None:
    arrays = PassArrays(NUMEL, dtype, passes.out_dtype_of(dtype))
    before = {name: arrays[name].copy() for name in (*STATE, "gradient", "accepted_gradient", "out")}
    expected = checksum(arrays, *READ_ONLY[which])
    writes_out = which in (Pass.SPECULATE, Pass.COMMIT_AND_SPECULATE, Pass.UPDATE)
    for variant in floor.variants(which, arrays.out_dtype):
        arrays["out"][:] = before["out"]
        moved = native.move_like(
            which,
            arrays.segments(with_norm=False),
            burst=variant.burst,
            prefetch=variant.prefetch,
            stream_out=variant.stream_out,
            stream_state=variant.stream_state,
            threads=2,
        )
        assert moved == expected, variant
        for name in (*STATE, "gradient", "accepted_gradient"):
            np.testing.assert_array_equal(arrays[name], before[name], err_msg=f"{name} {variant}")
        if writes_out:
            np.testing.assert_array_equal(arrays["out"].view(np.uint16), 0x3F80)
        else:
            np.testing.assert_array_equal(arrays["out"], before["out"])


@pytest.mark.parametrize("threads", [1, 2])
def test_traffic_ends_where_the_arrays_end(threads: int) -> None:
    """Also where their chunks are no multiple of what a thread takes at a time: 4 chunks, or 2 for two threads."""
    chunks = 35
    arrays = PassArrays((chunks + 1) * native.CHUNK, Dtype.FLOAT32, Dtype.BFLOAT16)
    table = arrays.segments(with_norm=False)
    table["length"] = chunks * native.CHUNK
    before = arrays["out"].copy()
    native.move_like(Pass.UPDATE, table, burst=32, prefetch=0, stream_out=False, stream_state=False, threads=threads)
    end = chunks * native.CHUNK * 2
    np.testing.assert_array_equal(arrays["out"][:end].view(np.uint16), 0x3F80)
    np.testing.assert_array_equal(arrays["out"][end:], before[end:])


@pytest.mark.parametrize(
    ("field", "value", "burst", "message"),
    [
        ("length", NUMEL - 1, 32, "multiple of 4096"),
        ("length", NUMEL, 48, "burst that divides"),
        ("length", NUMEL, 16, "burst that divides"),
        ("gradient", 0, 32, "aligned to 64"),
        ("gradient_dtype", 9, 32, "dtypes"),
    ],
)
def test_traffic_that_does_not_fit_is_refused(field: str, value: int, burst: int, message: str) -> None:
    arrays = PassArrays(NUMEL, Dtype.FLOAT32, Dtype.BFLOAT16)
    before = arrays["out"].copy()
    table = arrays.segments(with_norm=False)
    table[field] = value
    with pytest.raises(ValueError, match=message):
        native.move_like(Pass.UPDATE, table, burst=burst, prefetch=0, stream_out=False, stream_state=False)
    np.testing.assert_array_equal(arrays["out"], before)


def test_traffic_of_arrays_that_are_not_aligned_is_refused() -> None:
    arrays = PassArrays(NUMEL, Dtype.FLOAT32, Dtype.BFLOAT16)
    table = arrays.segments(with_norm=False)
    table["gradient"] += 4
    with pytest.raises(ValueError, match="aligned to 64"):
        native.move_like(Pass.NORM, table, burst=32, prefetch=0, stream_out=False, stream_state=False)
    with pytest.raises(ValueError, match="exactly one entry"):
        native.move_like(
            Pass.NORM, np.concatenate([table, table]), burst=32, prefetch=0, stream_out=False, stream_state=False
        )


@pytest.mark.parametrize(
    ("which", "gradient", "out", "expected"),
    [  # the bytes of the design's table, and its fp32 gradients
        (Pass.NORM, Dtype.FLOAT32, Dtype.BFLOAT16, 4),
        (Pass.SPECULATE, Dtype.FLOAT32, Dtype.BFLOAT16, 18),
        (Pass.COMMIT, Dtype.FLOAT32, Dtype.BFLOAT16, 28),
        (Pass.COMMIT_AND_SPECULATE, Dtype.FLOAT32, Dtype.BFLOAT16, 34),
        (Pass.UPDATE, Dtype.FLOAT32, Dtype.BFLOAT16, 30),
        (Pass.UPDATE, Dtype.BFLOAT16, Dtype.NONE, 26),
        (Pass.UPDATE, Dtype.FLOAT64, Dtype.FLOAT64, 64),
    ],
)
def test_bytes_per_element(which: Pass, gradient: Dtype, out: Dtype, expected: int) -> None:
    assert bytes_per_element(which, gradient, out) == expected


def test_variants_differ_in_what_a_pass_does() -> None:
    for which, _ in passes.PASSES:
        variants = floor.variants(which, Dtype.BFLOAT16)
        assert len(set(variants)) == len(variants)
        assert any(variant.stream_out for variant in variants) == (which not in (Pass.NORM, Pass.COMMIT))
        assert any(variant.stream_state for variant in variants) == (which not in (Pass.NORM, Pass.SPECULATE))
    arrays = PassArrays(NUMEL, Dtype.FLOAT32, Dtype.BFLOAT16)
    kernel = passes.action(
        arrays, Pass.UPDATE, passes.Setting("scalar", 1, Dtype.FLOAT32, Dtype.BFLOAT16), with_norm=False
    )
    assert floor.find_floor(arrays, Pass.UPDATE, 1, kernel, rounds=1) in floor.variants(Pass.UPDATE, Dtype.BFLOAT16)


# -- passes ----------------------------------------------------------------------------------------------------------


def test_axes_are_varied_by_themselves_or_crossed() -> None:
    isas, threads, dtypes = ["avx512", "avx2", "scalar"], [8, 1], [Dtype.FLOAT32, Dtype.BFLOAT16]
    star = passes.settings(isas, threads, dtypes)
    crossed = passes.settings(isas, threads, dtypes, crossed=True)
    assert star[0] == passes.Setting("avx512", 8, Dtype.FLOAT32, Dtype.BFLOAT16)
    assert (len(star), len(crossed)) == (1 + 2 + 1 + 1, 3 * 2 * 2)
    assert set(star) <= set(crossed)


def test_fp64_is_measured_once_whatever_the_instruction_set() -> None:
    crossed = passes.settings(["avx512", "avx2"], [2], [Dtype.FLOAT32, Dtype.FLOAT64], crossed=True)
    assert [setting.isa for setting in crossed if setting.gradient_dtype is Dtype.FLOAT64] == ["avx512"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pass_is_measured_in_every_setting(dtype: Dtype, isa: str) -> None:
    (setting,) = passes.settings([isa], [2], [dtype])
    rows = list(passes.measure(2 * native.CHUNK - 5, [setting], 2))
    assert [(row.which, row.with_norm) for row in rows] == list(passes.PASSES)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.setting == setting
        assert row.numel == 2 * native.CHUNK
        assert row.comparison.pairs == 2
        assert row.bytes_per_second * row.comparison.first.median == pytest.approx(row.numel * row.bytes_per_element)
        assert 0 < row.comparison.ratio.lower <= row.comparison.ratio.median <= row.comparison.ratio.upper


def test_the_arrays_hold_ordinary_numbers() -> None:
    for dtype in DTYPES:
        arrays = PassArrays(NUMEL + 7, dtype, passes.out_dtype_of(dtype))
        native.run(Pass.NORM, arrays.segments(with_norm=True))
        assert arrays.nonfinite.sum() == 0
        mean_square = arrays.sums.sum() / arrays.numel
        assert mean_square == pytest.approx(1e-6, rel=0.1)  # a standard normal times 1e-3; 12 288 samples
        assert all(arrays[name].ctypes.data % 64 == 0 for name in (*STATE, "gradient", "out"))


# -- contests --------------------------------------------------------------------------------------------------------


def test_both_sides_of_the_kernels_contest_do_a_step() -> None:
    ours, theirs = contests.prepare_passes(1, NUMEL)
    for action in (ours, ours, theirs, theirs):
        action()
    with pytest.raises(ValueError, match="over one tensor"):
        contests.prepare_passes(2, NUMEL)


@pytest.mark.parametrize(("dtype", "tensors", "numel"), [("float32", 3, 64), ("float32", 1, 4096), ("bfloat16", 3, 64)])
def test_both_sides_reach_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, dtype: str, tensors: int, numel: int
) -> None:
    """In fp32 both sides start from the same masters: after three steps they must hold the same bits."""
    made: list[Any] = []
    for name in ("_our_adamw", "_torch_adamw"):
        build = getattr(contests, name)

        def kept(parameters: Any, build: Callable[[Any], Any] = build) -> Any:
            made.append(list(parameters))
            return build(parameters)

        monkeypatch.setattr(contests, name, kept)
    prepare = {"float32": contests.prepare_float32, "bfloat16": contests.prepare_bfloat16}[dtype]
    ours, theirs = prepare(tensors, numel)
    for _ in range(3):
        ours()
        theirs()
    by_dtype = {parameters[0].dtype: parameters for parameters in made}
    assert len(made) == 2
    if dtype == "float32":
        for one, other in zip(*made, strict=True):
            assert torch.equal(one, other)
    else:  # torch starts from fp32 masters, ours from their bf16 rounding: half a unit of 8 bits, and 3 tiny steps
        for one, other in zip(by_dtype[torch.bfloat16], by_dtype[torch.float32], strict=True):
            torch.testing.assert_close(one.float(), other, rtol=2**-7, atol=1e-4)


def test_contests_use_the_same_threads_and_put_them_back() -> None:
    before = torch.get_num_threads(), native.get_num_threads()
    seen = []

    def prepare(tensors: int, numel: int) -> tuple[Callable[[], None], Callable[[], None]]:
        seen.append((torch.get_num_threads(), native.get_num_threads()))
        return (lambda: None), (lambda: None)

    contest = contests.Contest("none", "nothing", "nothing", 1, 1, prepare)
    (row,) = contests.measure([contest], 1, 1)
    assert seen == [(1, 1)]
    assert (row.threads, row.comparison.pairs) == (1, 1)
    assert (torch.get_num_threads(), native.get_num_threads()) == before


@pytest.mark.slow
def test_iterations_with_and_without_overlap_reach_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    models, build = [], overlap._loop

    def kept(tokens: int) -> Any:
        models.append((made := build(tokens))[0])
        return made

    monkeypatch.setattr(overlap, "_loop", kept)
    before = torch.get_num_threads(), native.get_num_threads()
    row = overlap.measure(1, 1, tokens=1)
    assert (torch.get_num_threads(), native.get_num_threads()) == before
    assert (row.tokens, row.threads, row.comparison.pairs) == (overlap.SEQ, 1, 1)
    ours, theirs = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# -- the command -----------------------------------------------------------------------------------------------------

TINY = ["--numel", "8192", "--pairs", "2", "--small-tensors", "5", "--small-numel", "100", "--tokens", "64"]


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "idle_cores"), [(80, 0), (120, 1)])
def test_the_command_prints_one_table_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, columns: int, idle_cores: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(PlainDevice, "idle_cores", lambda device: idle_cores)
    target = tmp_path / "bench.json"
    before = native.active_isa()
    assert cli.main(["bench", *TINY, "--threads", "2", "1", "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= columns
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed  # nothing was cut off
    assert printed.count("ratio  ") == 1  # one header: one table
    for word in ("commit+speculate, norm", "update", "f32>bf16", "bf16>bf16", "5 x 100 f32", "torch", before):
        assert word in printed
    read = json.loads(target.read_text())
    assert set(read) == {"environment", "passes", "contests", "overlap"}
    (overlapped,) = read["overlap"]
    assert 9.9e6 < overlapped["parameters"] < 10.1e6
    if idle_cores:
        assert overlapped["buckets"] > 4
        assert overlapped["hook_seconds"] > 0
    else:  # all is left to step()
        assert overlapped["buckets"] == overlapped["hook_seconds"] == 0
    assert 0.0 <= overlapped["hidden_share"] <= 1.0
    assert read["environment"]["isa"] == before
    settings = {(row["isa"], row["threads"], row["gradient_dtype"]) for row in read["passes"]}
    assert {isa for isa, _, _ in settings} == set(native.available_isas())
    assert {threads for _, threads, _ in settings} == {1, 2}
    assert len(read["passes"]) == len(settings) * len(passes.PASSES)
    assert len(read["contests"]) == 5
    for row in read["passes"] + read["contests"] + read["overlap"]:
        assert row["pairs"] == 2
        assert row["ratio"]["lower"] <= row["ratio"]["median"] <= row["ratio"]["upper"]
        assert row["seconds"]["median"] > 0
    assert native.active_isa() == before


def test_a_part_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    words = ["bench", "passes", *TINY, "--isa", "scalar", "--threads", "1", "--dtype", "f64", "--json", str(target)]
    assert cli.main(words) == 0
    read = json.loads(target.read_text())
    assert {(row["isa"], row["gradient_dtype"]) for row in read["passes"]} == {("scalar", "float64")}
    assert read["contests"] == read["overlap"] == []
    assert "torch" not in capsys.readouterr().out.partition("\n")[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--isa", "sse9"], "--isa sse9 cannot run on this machine"),
        (["--threads", "0"], "--threads 0 is below 1"),
        (["--pairs", "0"], "--pairs is 0; expected at least 1"),
        (["--numel", "-5"], "--numel is -5; expected at least 1"),
        (["--tokens", "0"], "--tokens is 0; expected at least 1"),
        (["--json", "/nowhere/at/all.json"], "is in a directory that does not exist"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.main(["bench", *words]) == cli.USAGE_STATUS
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# -- pace ------------------------------------------------------------------------------------------------------------

TINY_PACE = ["bench", "pace", "--parameters", "4096", "--layers", "4", "--rounds", "1", "--threads", "2"]


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no more iterations be made than one of each kind needs."""
    monkeypatch.setattr(pace, "CLIP_EVERY", 4)


@pytest.fixture
def one_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sweep have one placement, because clocks run in real time."""
    monkeypatch.setattr(pace, "sweep", lambda default, total, free_share: [default])


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("columns", [80, 140])
def test_pace_prints_every_side_and_writes_json_picture_and_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    target = tmp_path / "pace.json"
    before = torch.get_num_threads(), native.get_num_threads()
    assert cli.main([*TINY_PACE, "--ratios", "1", "4", "--preset", "gh200", "--json", str(target)]) == 0
    assert (torch.get_num_threads(), native.get_num_threads()) == before
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= columns
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed  # nothing was cut off
    for word in ("clock", "auto", "best fixed", "no overlap", "torch", "gh200", "cannot show"):
        assert word in printed
    read = json.loads(target.read_text())
    assert read["rates"] == dataclasses.asdict(paced.PRESETS["gh200"])
    assert [row["ratio"] for row in read["rows"]] == [1.0, 4.0]
    for row in read["rows"]:
        assert (row["parameters"], row["layers"]) == (4096, 4)
        assert row["backward_seconds"] == row["ratio"] * row["adam_seconds"]
        clock = row["clock"]["seconds"]["median"]
        assert clock >= 0.999 * (row["forward_seconds"] + row["backward_seconds"])  # sums of differences of times
        assert row["clock"]["over_clock"] == 1.0
        assert row["best"] in {side["placement"] for side in row["placements"]}
        assert (row["lowest_norm"], row["highest_norm"]) == pytest.approx((0.9, 1.1))
        assert (row["clipped_share"], row["lr"]) == (0.25, HYPERPARAMETERS.lr)
        for side in (row["auto"], *row["placements"], row["after_backward"], row["torch"]):
            assert side["over_clock"] == side["seconds"]["median"] / clock
            assert 0.0 <= side["hidden_share"] <= 1.0
            assert side["accepted"] + side["redone"] <= 1.0
        for side in (row["auto"], *row["placements"]):
            assert side["clipped_seconds"] is None or side["clipped_seconds"] > 0.0
            assert side["deepest_queue"] >= side["queue_depth"] > 0.0
        assert any(side["clipped_seconds"] for side in (row["auto"], *row["placements"]))
    assert target.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    events = json.loads(target.with_suffix(".trace.json").read_text())["traceEvents"]
    assert {"forward", "backward", "adam", "download", "upload"} <= {event["name"] for event in events}


@pytest.mark.slow
@pytest.mark.usefixtures("one_placement")
def test_pace_says_what_became_of_clipped_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    target = tmp_path / "pace.json"
    words = ["--ratios", "1", "--clipped", "1", "--lr", "2e-5", "--json", str(target)]
    assert cli.main([*TINY_PACE, *words]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed  # nothing was cut off
    read = json.loads(target.read_text())
    (row,) = read["rows"]
    assert (read["clipped"], row["clipped_share"], row["lr"]) == (1.0, 1.0, 2e-5)
    assert 1.0 < row["lowest_norm"] < row["highest_norm"]
    norms = f"norms {row['lowest_norm']:.3g} to {row['highest_norm']:.3g}"
    for word in (f"100% of the steps clipped, {norms}", "learning rate 2e-05", "accepted", "redone"):
        assert word in " ".join(printed.split())
    for side in (row["auto"], *row["placements"]):
        assert side["seconds"] is side["python_seconds"] is None
        assert side["typical_seconds"] == side["clipped_seconds"] > 0.0
        assert side["over_clock"] == side["typical_seconds"] / row["clock"]["typical_seconds"]
        assert 0.0 <= side["accepted"] + side["redone"] <= 1.0
    assert max(side["accepted"] for side in row["placements"]) > 0.0


def test_norms_are_those_of_fine_tuning() -> None:
    """Medians of the last eight predict the next about as well as in public logs: 35, 60, 85, 95 %, very roughly."""
    logs = np.log(gradient_norms.gradient_norms(1.0, 20_000, 0))
    assert np.exp(np.quantile(logs, [0.001, 0.5, 0.999])) == pytest.approx([3.8, 20.0, 150.0], rel=0.3)
    expected = np.median(np.lib.stride_tricks.sliding_window_view(logs, 8), axis=1)[:-1]
    missed = np.abs(logs[8:] - expected)
    within = [float(np.mean(missed < np.log(factor))) for factor in (1.1, 1.25, 1.5, 2.0)]
    assert within == pytest.approx([0.35, 0.6, 0.85, 0.95], abs=0.08)  # "roughly"


@pytest.mark.parametrize("share", [0.0, 0.07, 0.5, 0.9, 1.0])
def test_the_wanted_share_of_norms_exceeds_the_limit(share: float) -> None:
    """The level has a memory of 100 steps, so that 40,000 say as much as 200 independent ones, or more.

    Their share has a standard deviation of 0.035 at most; the tolerance is twice that. It is 0 where all or none are
    clipped, because the limit is then five standard deviations away.
    """
    norms = gradient_norms.gradient_norms(share, 40_000, 1)
    assert norms == gradient_norms.gradient_norms(share, 40_000, 1) != gradient_norms.gradient_norms(share, 40_000, 2)
    found = np.mean([norm > gradient_norms.MAX_NORM for norm in norms])
    assert found == pytest.approx(share, abs=0.07 if 0.0 < share < 1.0 else 1e-3)
    early, late = np.log(norms[:20_000]), np.log(norms[20_000:])
    assert early.std() == pytest.approx(late.std(), rel=0.2)  # of 100 independent ones: 7 % each


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_timed_steps_have_the_wanted_share_too(share: float) -> None:
    turns = pace.norms_of_turns(share, 2)
    assert [len(turn) for turn in turns] == [pace.WARM_UPS + pace.TIMED] * (pace.SETTLING + 2)
    timed = pace.timed_norms(turns)
    assert timed == turns[-2][pace.WARM_UPS :] + turns[-1][pace.WARM_UPS :]
    assert np.mean([norm > gradient_norms.MAX_NORM for norm in timed]) == share


def test_without_a_share_one_step_in_ten_is_clipped() -> None:
    norms = list(itertools.chain(*pace.norms_of_turns(None, 6)))
    assert [step for step, norm in enumerate(norms) if norm > 1.0] == list(range(0, 60, 10))
    assert len(set(norms)) == 2


def test_gradients_have_the_wanted_norms_and_a_state_that_fits_them() -> None:
    """Tolerances: rounding to bf16 leaves 2**-9 of an element, at random; the state is of 64,000 random elements."""
    gradients = Gradients(2, 64_000, 2)
    gradients.scale_to([0.3, 40.0])
    for one, norm, wanted in zip(gradients.sets, gradients.norms, (0.3, 40.0), strict=True):
        assert norm == pytest.approx(wanted, rel=1e-3)
        assert norm == pytest.approx(float(one.double().norm()), rel=1e-12)  # summed in another order
    assert not torch.equal(gradients.sets[0] > 0, gradients.sets[1] > 0)
    state = gradients.steady_state(0.5)
    mean_square = (gradients.sets[0].double() * 0.5 / 0.3).square().mean()
    assert float(state["exp_avg_sq"].double().mean() / mean_square) == pytest.approx(1.08, abs=0.15)  # exp(0.4**2 / 2)
    ratio = (gradients.sets[0][:64_000].double() * 0.5 / 0.3) / state["exp_avg_sq"].double().sqrt()
    tail = float((ratio.abs() > 3.0).double().mean())
    assert 0.01 < tail < 0.05  # of normal elements 0.003
    assert float(state["master"].std()) == pytest.approx(0.02, rel=0.02)
    assert not torch.equal(state["master"].bfloat16().float(), state["master"])
    assert float((state["exp_avg"] / state["exp_avg_sq"].sqrt()).std()) == pytest.approx(0.3, rel=0.3)


def test_the_presets_are_those_of_the_device() -> None:
    assert tuple(paced.PRESETS) == command.PRESETS


def test_a_sweep_varies_one_thing_at_a_time_within_what_the_device_can_hold() -> None:
    default = Placement(gpu_buckets=0, bucket_numel=100, transfer_dtype=None, num_threads=4)
    placements = pace.sweep(default, 1000, 0.5)
    assert placements[0] == default
    assert len(set(placements)) == len(placements)
    assert max(placement.gpu_buckets for placement in placements) == 5
    for placement in placements[1:]:
        names = ("gpu_buckets", "bucket_numel", "num_threads")
        assert sum(getattr(placement, name) != getattr(default, name) for name in names) == 1
    assert pace.sweep(dataclasses.replace(default, num_threads=1), 1000, 0.0)[0].gpu_buckets == 0


def test_gradients_lie_in_the_order_of_backward_and_in_other_memory_in_the_next_step() -> None:
    gradients = Gradients(3, 64)
    addresses = [gradients.of(step, layer).data_ptr() for step in (0, 1, 2) for layer in (2, 1, 0)]
    assert addresses[:3] == [addresses[0] + 128 * part for part in range(3)]
    assert addresses[:3] == addresses[6:]
    assert set(addresses[:3]).isdisjoint(addresses[3:6])


def test_what_is_hidden_is_what_an_iteration_does_not_take_longer_than_the_clock() -> None:
    model = TimedModel(Gradients(1, 64))
    clock, side = (pace.Side(name, model, lambda: False) for name in ("clock", ""))
    clock.seconds[False], clock.python, side.python = [10.0], [1.0], [1.0]
    for seconds, expected in ((9.0, 1.0), (10.0, 1.0), (11.0, 0.75), (14.0, 0.0), (20.0, 0.0)):
        side.seconds[False], side.seconds[True] = [seconds, 1.0, 99.0], [77.0]
        result = pace._result(side, clock, adam=4.0, counts_clipped=False)
        assert (result.hidden_share, result.over_clock) == (expected, seconds / 10.0)


def test_clipped_steps_count_by_their_number_where_a_share_was_asked_for() -> None:
    model = TimedModel(Gradients(2, 64))
    clock, side = (pace.Side(name, model, lambda: False) for name in ("clock", ""))
    clock.seconds[False], clock.python, side.python = [10.0], [1.0], [1.0]
    side.seconds[False], side.seconds[True] = [10.0, 11.0, 99.0], [14.0, 15.0, 10.0, 16.0, 14.0]
    side.accepted, side.redone = 4, 8
    result = pace._result(side, clock, adam=16.0, counts_clipped=True)
    assert result.typical_seconds == (3 * 11.0 + 5 * 14.0) / 8
    assert result.hidden_share == pytest.approx(1.0 - (result.typical_seconds - 10.0) / 16.0)
    assert (result.accepted, result.redone) == (4 / 16, 8 / 16)  # of two tensors in each of eight steps
    side.seconds[False], side.python = [], []
    result = pace._result(side, clock, adam=16.0, counts_clipped=True)
    assert (result.typical_seconds, result.seconds, result.python_seconds) == (14.0, None, None)


def test_a_bucket_takes_what_the_training_thread_computes_longer_than_with_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clipped steps do not count: the training thread computes in their kernels as well."""
    cpu = Clock()
    monkeypatch.setattr(pace.time, "thread_time", cpu)
    model = TimedModel(Gradients(1, 64))
    model.device = paced.PacedDevice(paced.Rates(64.0, 128.0, 1.0), now=Clock())
    seconds = iter([1.0] * pace.WARM_UPS + [2.0, 5.0, 90.0, 3.0])

    def step() -> bool:
        before = cpu.now
        cpu.now += next(seconds)
        return cpu.now - before == 90.0

    clock, side = pace.Side("clock", model, lambda: False), pace.Side("", model, step)
    clock.turn(1)
    side.turn(4)
    assert side.python == [2.0, 5.0, 3.0]
    side.buckets, clock.seconds[False], clock.python = 8, [1.0], [1.0]  # two in each iteration
    assert pace._result(side, clock, adam=4.0, counts_clipped=False).bucket_seconds == (3.0 - 1.0) / 2


def test_the_time_of_adam_is_the_shortest_after_warming() -> None:
    clock = Clock()
    durations = [0.5] * pace.WARM_UPS + [4.0, 2.0, 9.0, 3.0, 5.0]
    assert pace._seconds_of(clock.action("adam", iter(durations)), clock) == 2.0


def test_at_the_end_parameters_are_what_their_masters_say(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    build, settings = pace._optimizer, pace.Settings(paced.PRESETS["h200"], 1, 1, 0.5, 1e-5, 0.5)
    monkeypatch.setattr(pace, "_optimizer", lambda *of: made.append(build(*of)) or made[-1])
    monkeypatch.setattr(PlainDevice, "pack", None)  # every gradient comes to the host as it lies
    rows = pace.measure(4096, 4, [2.0], settings)
    with pytest.raises(TypeError):  # but in the last iteration
        next(rows)
    monkeypatch.undo()
    monkeypatch.setattr(pace, "_optimizer", lambda *of: made.append(build(*of)) or made[-1])
    assert len(list(pace.measure(4096, 4, [2.0], settings))) == 1
    for optimizer in made[-2:]:
        for parameter in optimizer.param_groups[0]["params"]:
            assert parameter.any()
            assert torch.equal(parameter, optimizer.state[parameter]["master"].bfloat16())


@pytest.mark.slow
@pytest.mark.usefixtures("one_placement")
def test_gradients_change_between_turns_when_no_step_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    scale_to, run_deferred = Gradients.scale_to, paced.PacedDevice.run_deferred
    monkeypatch.setattr(Gradients, "scale_to", lambda self, norms: log.append(norms) or scale_to(self, norms))
    monkeypatch.setattr(paced.PacedDevice, "run_deferred", lambda self: log.append(id(self)) or run_deferred(self))
    settings = pace.Settings(paced.PRESETS["h200"], 1, 2, 0.5, 1e-5, 0.5)
    assert len(list(pace.measure(4096, 4, [0.01], settings))) == 1
    changes = [index for index, entry in enumerate(log) if isinstance(entry, list)]
    assert [log[index] for index in changes] == pace.norms_of_turns(0.5, 2)
    devices = set(log[:3])
    assert len(devices) == 3
    assert all(set(log[index - 3 : index]) == devices for index in changes)


def test_steps_after_backward_hide_nothing() -> None:
    """The whole step, and both ways, come after the device's work, and before its next."""
    clock = Clock()
    device = paced.PacedDevice(
        paced.Rates(64.0, 128.0, 1.0), now=clock, sleep=lambda seconds: setattr(clock, "now", clock.now + seconds)
    )
    model = TimedModel(Gradients(2, 64))
    model.device, model.forward_seconds, model.backward_seconds = device, 3.0, 5.0
    action = clock.action("step", iter([7.0]))
    model().backward()
    assert not pace._step_after_backward(action, model)
    assert device.record(Stream.CURRENT).passed_at() == 3.0 + 5.0 + 256 / 64.0 + 7.0 + 256 / 128.0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ratios", "1", "0"], "--ratios are [1.0, 0.0]; expected numbers above 0"),
        (["--ratios", "nan"], "expected numbers above 0"),
        (["--free-share", "1.5"], "--free-share is 1.5; expected 0 to 1"),
        (["--clipped", "-0.1"], "--clipped is -0.1; expected 0 to 1"),
        (["--clipped", "nan"], "--clipped is nan; expected 0 to 1"),
        (["--lr", "inf"], "--lr is inf; expected a number of at least 0"),
        (["--rounds", "0"], "--rounds is 0; expected at least 1"),
        (["--layers", "3", "0"], "--layers is 0; expected at least 1"),
        (["--parameters", "-1"], "--parameters is -1; expected at least 1"),
    ],
)
def test_what_cannot_be_paced_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.main(["bench", "pace", *words]) == cli.USAGE_STATUS
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_wrong_isa_in_the_environment_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_active", None)
    monkeypatch.setenv("SUPERADAM_ISA", "sse9")
    with pytest.raises(UsageError, match="sse9"):
        command.chosen_isas(None)
