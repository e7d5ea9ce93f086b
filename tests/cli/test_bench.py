"""`superadam bench`: how it times, what the floor moves, and the whole run at a tiny size; never how fast it is."""

import errno
import itertools
import json
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.actions_on_a_clock import Clock

from superadam.cli import main as cli
from superadam.cli.bench import command, floor, passes
from superadam.cli.bench.arrays import PassArrays
from superadam.cli.bench.pairs import WARM_UPS, Spread, compare, fastest, times_of
from superadam.cli.bench.passes import Setting
from superadam.cli.console import Console
from superadam.cli.traffic import bytes_per_element
from superadam.host import files
from superadam.kernels import native
from superadam.kernels.native import Dtype, Format, Pass
from superadam.state.storage import Master, Moments, Storage

NUMEL = 3 * native.CHUNK
SETTINGS = {  # dtypes of gradients, and of the usual working copy
    Dtype.FLOAT32: Dtype.BFLOAT16,
    Dtype.BFLOAT16: Dtype.BFLOAT16,
    Dtype.FLOAT16: Dtype.FLOAT16,
    Dtype.FLOAT64: Dtype.FLOAT64,
}
STATE = ("master", "exp_avg", "exp_avg_sq")
PLANES = ("master_low", "exp_avg_exponents", "exp_avg_sq_exponents")


def test_pairs_alternate_both_sides_are_warmed_alike_and_what_goes_before_a_run_is_not_timed():
    clock = Clock()
    ours, theirs, renew, other = (clock.action(name, itertools.repeat(1.0)) for name in "abxy")
    found = compare(ours, theirs, 4, before=(renew, other), clock=clock)
    assert "".join(clock.log) == "xayb" * WARM_UPS + ("xayb" + "ybxa") * 2
    assert (found.seconds.median, found.against_seconds.median) == (1.0, 1.0)


def test_a_ratio_is_of_the_same_pair():
    clock = Clock()
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]  # the machine slows down; the ratio does not move
    ours = clock.action("a", iter([9.0] * WARM_UPS + drift))
    theirs = clock.action("b", iter([9.0] * WARM_UPS + [2 * seconds for seconds in drift]))
    found = compare(ours, theirs, len(drift), clock=clock)
    assert found.ratio == Spread(0.5, 0.5, 0.5)
    assert (found.seconds.median, found.against_seconds.median, found.pairs) == (4.0, 8.0, 5)


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=30))
def test_a_spread_is_ordered_and_inside_the_values(values):
    spread = Spread.of(values)
    slack = 1e-12 * max(values)  # the interpolation between two equal values may round
    assert min(values) - slack <= spread.lower <= spread.median + slack
    assert spread.median <= spread.upper + slack <= max(values) + 2 * slack
    assert spread.median == pytest.approx(float(np.median(values)))


def test_the_fastest_is_the_one_with_the_shortest_run():
    clock = Clock()
    noisy = clock.action("n", iter([9.0, 1.0, 9.0]))
    steady = clock.action("s", itertools.repeat(2.0))
    assert fastest([steady, noisy], 2, clock.action("b", itertools.repeat(5.0)), clock=clock) == 1
    assert "".join(clock.log) == "sn" + "bsbn" + "bnbs"


def test_runs_by_themselves_are_timed_after_warm_ups():
    runs = []
    seconds = times_of(lambda: runs.append(None), 3)
    assert (len(runs), len(seconds)) == (WARM_UPS + 3, 3)
    assert min(seconds) >= 0.0


READ_ONLY = {
    Pass.NORM: ("gradient",),
    Pass.SPECULATE: ("gradient", *STATE, *PLANES),
    Pass.COMMIT: ("gradient",),
    Pass.COMMIT_AND_SPECULATE: ("gradient", "accepted_gradient"),
    Pass.UPDATE: ("gradient",),
}

STORED = [Storage(moments, master) for moments in Moments for master in Master]
KINDS = [*((dtype, Format.PLAIN) for dtype in SETTINGS), *((Dtype.BFLOAT16, way.format) for way in STORED[1:])]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "form"), KINDS)
@pytest.mark.parametrize("which", READ_ONLY)
def test_traffic_reads_everything_and_leaves_the_state_alone(which, dtype, form):
    arrays = PassArrays(NUMEL, dtype, SETTINGS[dtype], form)
    before = {name: array.copy() for name, array in arrays.by_name.items()}
    read = [before[name].view(np.uint32) for name in READ_ONLY[which] if name in before]
    expected = sum(int(array.sum(dtype=np.uint64)) for array in read) % 2**32
    writes_out = which in (Pass.SPECULATE, Pass.COMMIT_AND_SPECULATE, Pass.UPDATE)
    for variant in floor.variants(which, arrays.out_dtype, form):
        arrays.by_name["out"][:] = before["out"]
        assert floor.action(arrays, which, variant, 2)() == expected, variant
        for name in before.keys() - {"out"}:
            np.testing.assert_array_equal(arrays.by_name[name], before[name], err_msg=f"{name} {variant}")
        written = 0x3F80 if writes_out else before["out"].view(np.uint16)
        np.testing.assert_array_equal(arrays.by_name["out"].view(np.uint16), written)


@pytest.mark.parametrize("threads", [1, 2])
def test_traffic_ends_where_the_arrays_end(threads):
    """Also where their chunks are no multiple of what a thread takes at a time: 4 chunks, or 2 for two threads."""
    chunks = 35
    arrays = PassArrays((chunks + 1) * native.CHUNK, Dtype.FLOAT32, Dtype.BFLOAT16)
    table = arrays.segments(with_norm=False)
    table["length"] = chunks * native.CHUNK
    before = arrays.by_name["out"].copy()
    native.move_like(Pass.UPDATE, table, burst=32, prefetch=0, stream_out=False, stream_state=False, threads=threads)
    end = chunks * native.CHUNK * 2
    np.testing.assert_array_equal(arrays.by_name["out"][:end].view(np.uint16), 0x3F80)
    np.testing.assert_array_equal(arrays.by_name["out"][end:], before[end:])


def test_traffic_that_does_not_fit_is_refused():
    arrays = PassArrays(NUMEL, Dtype.FLOAT32, Dtype.BFLOAT16)
    before = arrays.by_name["out"].copy()
    how = {"prefetch": 0, "stream_out": False, "stream_state": False}
    for field, value, burst, message in (
        ("length", NUMEL - 1, 32, "multiple of 4096"),
        ("length", NUMEL, 48, "burst that divides"),
        ("length", NUMEL, 16, "burst that divides"),
        ("gradient", 0, 32, "aligned to 64"),
        ("gradient", 68, 32, "aligned to 64"),
        ("gradient_dtype", 9, 32, "dtypes"),
        ("format", int(Format.MOMENTS_8BIT), 32, "burst that divides"),
        ("format", int(Format.MASTER_24BIT), 32, "burst that divides"),
        ("format", int(Format.MOMENTS_8BIT), 64, "aligned to 64"),
        ("format", int(Format.MASTER_24BIT), 64, "aligned to 64"),
        ("format", int(Format.MOMENTS_8BIT | Format.MOMENTS_BFLOAT16), 64, "format"),
        ("format", int(Format.LISTED_24BIT), 64, "format"),
        ("format", -1, 64, "format"),
    ):
        table = arrays.segments(with_norm=False)
        table[field] = value
        with pytest.raises(ValueError, match=message):
            native.move_like(Pass.UPDATE, table, burst=burst, **how)
        np.testing.assert_array_equal(arrays.by_name["out"], before)
    with pytest.raises(ValueError, match="exactly one entry"):
        native.move_like(Pass.NORM, arrays.segments(with_norm=False).repeat(2), burst=32, **how)


def test_bytes_per_element():
    of_the_design = {Pass.NORM: 4, Pass.SPECULATE: 18, Pass.COMMIT: 28, Pass.COMMIT_AND_SPECULATE: 34, Pass.UPDATE: 30}
    for which, size in of_the_design.items():
        assert bytes_per_element(which, Dtype.FLOAT32, Dtype.BFLOAT16) == size
    assert bytes_per_element(Pass.UPDATE, Dtype.BFLOAT16, Dtype.NONE) == 26
    assert bytes_per_element(Pass.UPDATE, Dtype.FLOAT64, Dtype.FLOAT64) == 64
    others = (2, 4, 2, 6, 4)  # than the state
    times = (0, 1, 2, 2, 2)  # the state is read or written
    for way in STORED:
        arrays = PassArrays(NUMEL, Dtype.BFLOAT16, Dtype.BFLOAT16, way.format)
        state = sum(array.nbytes / NUMEL for name, array in arrays.by_name.items() if name in (*STATE, *PLANES))
        for which, other, count in zip(of_the_design, others, times, strict=True):
            assert bytes_per_element(which, Dtype.BFLOAT16, Dtype.BFLOAT16, way) == other + count * state
        assert arrays.coefficients["turn"] != 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", STORED)
def test_every_pass_is_measured_in_every_setting(way, isa):
    setting = Setting(isa, 2, way)
    rows = list(passes.measure(2 * native.CHUNK - 5, setting, 2))
    assert [(row.which, row.with_norm) for row in rows] == list(passes.PASSES)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.setting == setting
        assert row.numel == 2 * native.CHUNK
        assert row.comparison.pairs == 2
        assert row.bytes_per_second * row.comparison.seconds.median == pytest.approx(row.numel * row.bytes_per_element)
        assert 0 < row.comparison.ratio.lower <= row.comparison.ratio.median <= row.comparison.ratio.upper


@pytest.fixture
def tiny(monkeypatch, capsys, tmp_path):
    """Return what runs the command, and returns what it printed and its JSON."""
    monkeypatch.setattr(command, "NUMEL", 8192)
    monkeypatch.setattr(command, "PAIRS", 2)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        target = tmp_path / "bench.json"
        assert cli.main(["bench", "--isa", "scalar", "--threads", "2", *words, "--json", str(target)]) == 0
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 80
        assert "\N{HORIZONTAL ELLIPSIS}" not in printed  # nothing was cut off
        return printed, json.loads(target.read_text())

    return run


def test_the_command_prints_one_table_and_writes_json(tiny):
    printed, read = tiny()
    assert printed.count("ratio  ") == 1  # one header: one table
    for word in ("commit+speculate, norm", "update", "scalar, 2 thr., bf16>bf16"):
        assert word in printed
    assert set(read) == {"environment", "passes"}
    assert read["environment"]["isa"] == native.active_isa()
    names = [(which.name.lower(), with_norm) for which, with_norm in passes.PASSES]
    assert [(row["pass"], row["norm"]) for row in read["passes"]] == names
    for row in read["passes"]:
        assert (row["isa"], row["threads"], row["pairs"], row["numel"]) == ("scalar", 2, 2, 8192)
        assert row["ratio"]["lower"] <= row["ratio"]["median"] <= row["ratio"]["upper"]
        assert row["seconds"]["median"] > 0


@pytest.mark.parametrize(
    ("moments", "master", "commit_bytes", "update_bytes"),
    [("bf16", "fp32", 18, 20), ("8bit", "24bit", 12.0625, 14.0625), ("fp32", "24bit", 24, 26)],
)
def test_the_command_says_how_state_is_stored(moments, master, commit_bytes, update_bytes, tiny):
    printed, read = tiny("--moments", moments, "--master", master)
    names = [name.replace("fp", "f") for name in (master, moments)]
    assert f"bf16>bf16, {'+'.join(names)} " in printed
    assert all([row["master"], row["moments"]] == names for row in read["passes"])
    found = {(row["pass"], row["bytes_per_element"]) for row in read["passes"]}
    assert found > {("commit", commit_bytes), ("update", update_bytes)}


@pytest.mark.usefixtures("tiny")
def test_json_that_cannot_be_written_is_a_sentence(capsys):
    assert cli.main(["bench", "--threads", "1", "--json", "/dev/full"]) == cli.USAGE_STATUS
    sentence = "cannot write the output: No space left on device; free some space or choose another place"
    assert capsys.readouterr().err == f"superadam: {sentence}\n"


@pytest.mark.usefixtures("tiny")
def test_json_that_cannot_be_finished_leaves_the_older_file(monkeypatch, tmp_path, capsys):
    target = tmp_path / "found.json"
    target.write_text("older")
    monkeypatch.setattr(files.os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert cli.main(["bench", "--threads", "1", "--json", str(target)]) == cli.USAGE_STATUS
    assert capsys.readouterr().err.startswith(f"superadam: cannot use {target}: No space left on device; ")
    assert [(path, path.read_text()) for path in tmp_path.iterdir()] == [(target, "older")]


@pytest.mark.usefixtures("tiny")
def test_json_is_there_where_nobody_reads_the_table(monkeypatch, tmp_path):
    monkeypatch.setattr(Console, "print", Mock(side_effect=BrokenPipeError))
    assert cli.main(["bench", "--threads", "1", "--json", str(tmp_path / "found.json")])
    assert json.loads((tmp_path / "found.json").read_text())["passes"]


def test_defaults_are_those_of_training():
    setting = command.setting_of(None, None)
    assert (setting.isa, setting.threads) == (native.active_isa(), native.get_num_threads())
