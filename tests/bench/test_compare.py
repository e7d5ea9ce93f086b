"""`bench/compare.py`: what is compared does the same work on both sides, and the whole run at a tiny size."""

import json

import compare
import pytest
import torch
from measures import contests, overlap
from measures.settings import settings

from superadam.cli.bench import passes
from superadam.devices import PlainDevice
from superadam.kernels import native
from superadam.kernels.native import Dtype

NUMEL = 3 * native.CHUNK


@pytest.fixture
def two_layers(monkeypatch):
    """Let the model of iterations be a quarter as deep."""
    monkeypatch.setattr(overlap, "LAYERS", 2)


def test_axes_are_varied_by_themselves():
    chosen = settings(["avx512", "avx2", "scalar"], [8, 1], [Dtype.FLOAT32, Dtype.BFLOAT16])
    assert chosen[0] == passes.Setting("avx512", 8, Dtype.FLOAT32, Dtype.BFLOAT16)
    assert len(set(chosen)) == len(chosen) == 1 + 2 + 1 + 1


def test_both_sides_of_the_kernels_contest_do_a_step():
    ours, theirs = contests.prepare_passes(1, NUMEL)
    for action in (ours, ours, theirs, theirs):
        action()
    with pytest.raises(ValueError, match="over one tensor"):
        contests.prepare_passes(2, NUMEL)


@pytest.mark.parametrize(("dtype", "tensors", "numel"), [("float32", 3, 64), ("float32", 1, 4096), ("bfloat16", 3, 64)])
def test_both_sides_reach_the_same_weights(monkeypatch, dtype, tensors, numel):
    """In fp32 both sides start from the same masters: after three steps they must hold the same bits."""
    made = []
    for name in ("_our_adamw", "_torch_adamw"):
        build = getattr(contests, name)

        def kept(parameters, build=build):
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


@pytest.mark.slow
@pytest.mark.usefixtures("two_layers")
def test_iterations_with_and_without_overlap_reach_the_same_weights(monkeypatch):
    models, build = [], overlap._loop

    def kept(tokens):
        models.append((made := build(tokens))[0])
        return made

    monkeypatch.setattr(overlap, "_loop", kept)
    monkeypatch.setattr(PlainDevice, "idle_cores", lambda device: 0)
    before = torch.get_num_threads(), native.get_num_threads()
    row = overlap.measure(1, 1, tokens=1)
    assert (torch.get_num_threads(), native.get_num_threads()) == before
    assert row.buckets == row.hook_seconds == 0  # all is left to step()
    assert (row.tokens, row.threads, row.comparison.pairs) == (overlap.SEQ, 1, 1)
    ours, theirs = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
@pytest.mark.usefixtures("two_layers")
def test_the_whole_run_prints_one_table_and_writes_json(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(PlainDevice, "idle_cores", lambda device: 1)
    monkeypatch.setattr(contests, "SMALL_TENSORS", 5)
    monkeypatch.setattr(contests, "SMALL_NUMEL", 100)
    monkeypatch.setattr(contests, "SIZES", ((2, 100),))
    target = tmp_path / "bench.json"
    before = native.active_isa()
    words = ["--numel", "8192", "--pairs", "2", "--tokens", "64", "--threads", "2", "1", "--json", str(target)]
    assert compare.main(words) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed  # nothing was cut off
    assert printed.count("ratio  ") == 1  # one header: one table
    for word in ("commit+speculate, norm", "update", "f32>bf16", "bf16>bf16", "5 x 100 f32", "torch's", before):
        assert word in printed
    read = json.loads(target.read_text())
    assert set(read) == {"environment", "passes", "contests", "overlap"}
    (overlapped,) = read["overlap"]
    assert overlapped["buckets"] > 1
    assert overlapped["hook_seconds"] > 0
    assert 0.0 <= overlapped["hidden_share"] <= 1.0
    chosen = {(row["isa"], row["threads"], row["gradient_dtype"]) for row in read["passes"]}
    assert {isa for isa, _, _ in chosen} == set(native.available_isas())
    assert {threads for _, threads, _ in chosen} == {1, 2}
    assert len(read["passes"]) == len(chosen) * len(passes.PASSES)
    assert len(read["contests"]) == 7
    for row in read["passes"] + read["contests"] + read["overlap"]:
        assert row["pairs"] == 2
        assert row["ratio"]["lower"] <= row["ratio"]["median"] <= row["ratio"]["upper"]
        assert row["seconds"]["median"] > 0
    assert native.active_isa() == before


def test_a_part_can_be_asked_for(tmp_path, capsys):
    target = tmp_path / "bench.json"
    one = ["--numel", "8192", "--pairs", "2", "--isa", "scalar", "--threads", "1", "--dtype", "f64"]
    assert compare.main(["passes", *one, "--json", str(target)]) == 0
    read = json.loads(target.read_text())
    assert {(row["isa"], row["gradient_dtype"]) for row in read["passes"]} == {("scalar", "float64")}
    assert read["contests"] == read["overlap"] == []
    assert "torch" not in capsys.readouterr().out.partition("\n")[2]
