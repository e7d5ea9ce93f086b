"""Machines' files: each number has a source, and what is wrong is one sentence."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from superadam.cli.bench import passes
from superadam.cli.bench.floor import Variant
from superadam.cli.bench.pairs import Comparison, Spread
from superadam.cli.plan.rates import PASSES, measured, seconds_of, to_toml
from superadam.plan import UnplannableError, machines
from superadam.plan.machines import Kind
from superadam.state.storage import Master, Storage


def read_back(machine: machines.Machine, folder: Path) -> machines.Machine:
    file = folder / "machine.toml"
    file.write_text(to_toml(machine))
    return machines.read(str(file))


@pytest.mark.parametrize("name", machines.names())
def test_numbers_of_a_machine_have_sources(name: str, tmp_path: Path) -> None:
    machine = machines.read(name)
    assert all(one.source and one.kind is not Kind.EXACT for one in machine.rates.values())
    assert read_back(machine, tmp_path) == machine


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("download", "uploads", "lacks download, expected title"),
        ("title", "more = 1\ntitle", "has more, expected none but title"),
        ('kind = "published"', 'kind = "guessed"', "expected a table with value, kind"),
        ("value = 96e9", "value = -1", "gpu_memory of .* is"),
        ("value = 96e9", "value = 0", "gpu_memory of .* is"),
        ("value = 96e9", "value = nan", "gpu_memory of .* is"),
        ("value = 96e9", "value = true", "gpu_memory of .* is"),
        *(("value = 96e9", f"value = {size}", "gpu_memory of .* is") for size in ("1e-300", "1" + "0" * 400)),
        *(("title", f"{x} title", "cannot be read as TOML") for x in ("=", "x=" + "1" * 5000, "x=" + "[" * 999)),
        ("title", "\udcff", "cannot be read as TOML"),
        ("title = ", "title = 1 # ", "title of .* is 1, expected a str"),
        ("one_memory = false", 'one_memory = "no"', "one_memory of .* is 'no', expected a bool"),
        ("title", "passes = 1\ntitle", "passes of .* is 1, expected a dict"),
    ],
)
def test_files_that_are_wrong_are_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = to_toml(machines.read("gh200")).replace("9.6e+10", "96e9").replace("96000000000.0", "96e9")
    file = tmp_path / "reserved.toml"  # as no rate is called that may be 0
    assert old in text
    file.write_text(text.replace(old, new, 1), errors="surrogateescape")
    with pytest.raises(UnplannableError, match=words):
        machines.read(str(file))


def test_bytes_and_arithmetic_decide_on_passes() -> None:
    machine = machines.read("gh200")
    fast = seconds_of(machine)
    assert fast.speculate < fast.commit < fast.fused
    assert fast.fused == pytest.approx((30 + 4) / machine.cpu_bandwidth.value)
    assert seconds_of(machine, Storage(master=Master.TWENTY_FOUR_BIT)).fused < fast.fused


@given(
    name=st.sampled_from(["cpu_bandwidth", "cpu_cores", "cpu_clock"]),
    factor=st.floats(0.01, 0.99),
    machine=st.sampled_from(machines.names()),
)
def test_less_of_a_cpu_makes_no_pass_quicker(name: str, factor: float, machine: str) -> None:
    before = machines.read(machine)
    rate = getattr(before, name)
    after = replace(before, **{name: replace(rate, value=factor * rate.value)})
    for each in PASSES:
        assert getattr(seconds_of(after), each) >= getattr(seconds_of(before), each)


def test_measured_passes_replace_bandwidth(tmp_path: Path) -> None:
    setting = passes.Setting("scalar", 1)
    rows = []
    for cost, which in enumerate(PASSES.values(), 1):
        compared = Comparison(1, Spread.of([1.0]), *[Spread.of([1e-6 * cost])] * 2)
        rows += [passes.PassResult(which, norm, setting, 1000, 0.0, Variant(32, 0), compared) for norm in (True, False)]
    machine = measured(replace(machines.read("gh200"), title='"GH200"\\'), rows, 10**9, "here")
    assert seconds_of(machine).fused == pytest.approx(4e-9)
    assert machine.host_memory.value == 1e9
    assert read_back(machine, tmp_path) == machine
