"""`bench/compare.py`: what is compared does the same work on both sides, and the whole run at a tiny size."""

import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import re
import weakref
from unittest.mock import Mock

import compare
import pytest
import step_cost
import torch
from measures import contests, peers

from superadam.kernels import native

NUMEL = 3 * native.CHUNK


@pytest.fixture
def made(monkeypatch):
    """Return a list that gets the tensors of each optimizer as it is made; steps follow each other without a rest."""
    made = []

    def kept(*arguments, build=contests._parameters):
        made.append(build(*arguments))
        return made[-1]

    monkeypatch.setattr(contests, "_parameters", kept)
    monkeypatch.setattr(contests, "REST", 0.0)
    monkeypatch.setattr(contests, "AWAKE", 0.0)
    return made


def three_steps(*sides):
    for side in sides * 3:
        side.renew()
        side.run()


@pytest.mark.parametrize(("tensors", "numel"), [(3, 64), (1, 4096)])
@pytest.mark.parametrize("task", [contests.Task.CLIP, contests.Task.STEP])
def test_both_sides_reach_the_same_bits_in_fp32(made, task, tensors, numel):
    three_steps(contests.ours(task, tensors, numel), contests.theirs(task, peers.FUSED, tensors, numel))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)
        assert one.detach().ne(contests._tensors(1, numel, 1.0, 0)[0]).any()


INSTALLED = [peer for peer in peers.PEERS if peer.moments == "fp32" and importlib.util.find_spec(peer.package)]


@pytest.mark.parametrize("peer", INSTALLED, ids=lambda peer: peer.name)
@pytest.mark.parametrize("task", list(contests.Task))
def test_every_peer_that_is_installed_does_the_same_work(made, task, peer):
    """In fp32 to about two units of the last place of values near 3; from bf16 weights our masters begin rounded."""
    three_steps(contests.ours(task, 3, 64), contests.theirs(task, peer, 3, 64))
    within = {"rtol": 2**-7, "atol": 1e-4} if task is contests.Task.CAST else {"rtol": 0.0, "atol": 1e-6}
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one.detach().float(), other.detach(), **within)


def test_gradients_are_new_before_each_step(made):
    side = contests.ours(contests.Task.CLIP, 2, 64)
    side.renew()
    before = [parameter.grad for parameter in made[0]]
    side.renew()
    for parameter, gradient in zip(made[0], before, strict=True):
        assert parameter.grad is not gradient
        assert parameter.grad.data_ptr() != gradient.data_ptr()
        assert not torch.equal(parameter.grad, gradient)


def test_the_floor_keeps_its_memory(monkeypatch):
    """Its table has addresses alone, and nothing else refers to the arrays."""
    made = []

    class Kept(contests.PassArrays):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append((self.numel, weakref.ref(self)))

    monkeypatch.setattr(contests, "PassArrays", Kept)
    side = contests.floor_of(contests.Task.CAST, NUMEL - 1, 1)
    gc.collect()
    side.run()
    ((numel, arrays),) = made
    assert numel == NUMEL
    assert arrays() is not None


def test_a_peer_that_cannot_run_is_left_out_with_the_reason():
    def fail(parameters):
        raise RuntimeError("no\ncompiler") from OSError("c++ not found")

    broken, absent = peers.Peer("broken", fail), peers.Peer("absent", fail, "no_such_package")
    found, left_out = peers.choose([peers.FUSED, broken, absent])
    assert found == [peers.FUSED]
    assert left_out == [
        peers.LeftOut("broken", "RuntimeError: no compiler; OSError: c++ not found"),
        peers.LeftOut("absent", "no_such_package is not installed"),
    ]


def test_what_does_not_fit_or_begins_too_late_is_left_out(monkeypatch):
    monkeypatch.setattr(contests, "sides_of", Mock(side_effect=AssertionError("was prepared")))
    large = contests.Contest(contests.Task.CLIP, peers.FUSED, 1, 1 << 50, 1)
    (left,) = contests.measure([large], 1, math.inf)
    assert left.what == f"1 x {1 << 50} against torch fused"
    assert "of memory" in left.why
    (left,) = contests.measure([large, large], 1, 0.0)
    assert left == peers.LeftOut("2 comparisons", "the time was over")


def test_steps_are_measured_at_every_size():
    numel, plain = 1 << 26, [peer for peer in peers.PEERS if peer.moments == "fp32"]
    chosen = contests.contests(numel, [2, 1], peers.PEERS)
    assert len(set(chosen)) == len(chosen)
    cast = {(row.tensors, row.numel, row.against) for row in chosen if row.task is contests.Task.CAST}
    for shape in [(1, 64), (1, 1 << 20), (1, 1 << 24), (10_000, 1_000), (12, 4096), (150, 65_536)]:
        assert {(*shape, peer.name) for peer in plain} <= cast
    assert {name for *shape, name in cast if shape == [1, numel]} == {"torch fused", "DeepSpeedCPUAdam", contests.FLOOR}
    assert {row.moments for row in chosen if "8bit" in row.against} == {"8bit"}
    assert {row.threads for row in chosen} == {1, 2}
    assert max(row.numel for row in contests.contests(1 << 10, [1], peers.PEERS) if row.tensors == 1) == 1 << 10


@pytest.mark.slow
def test_the_whole_run_prints_one_table_and_writes_json(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    tiny = {"SMALL": (64, 100), "MANY": (5, 7), "SMALL_MODELS": ((1, 1 << 16),), "FEW": ((1, 100),), "REST": 0.0}
    for name, value in tiny.items():
        monkeypatch.setattr(contests, name, value)
    target = tmp_path / "bench.json"
    words = ["--numel", "8192", "--pairs", "2", "--threads", "2", "1"]
    words += ["--peers", "torch fused", "torch foreach", "--json", str(target)]
    assert compare.main(words) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed  # nothing was cut off
    assert printed.count("ratio  ") == 1  # one header: one table
    assert all(word in printed for word in ["5 x 1000, torch fused", contests.FLOOR, native.active_isa()])
    read = json.loads(target.read_text())
    assert set(read) == {"environment", "packages", "openmp", "left_out", "contests"}
    assert read["packages"] == {"torch": importlib.metadata.version("torch")}
    compared = [row for row in read["contests"] if (row["task"], row["against"]) == ("cast", "torch foreach")]
    shapes = [(row["tensors"], row["numel"]) for row in compared]
    assert shapes == [(1, 64), (1, 100), (5, 1000), (7, 1000), (1, 1 << 16)]
    assert {row["task"] for row in read["contests"]} == {"cast", "clip", "step"}
    monkeypatch.setattr(step_cost, "PAGE", tmp_path / "page.md")
    _page_of(target, tmp_path)
    for row in read["contests"]:
        assert row["pairs"] == 2
        assert row["ratio"]["lower"] <= row["ratio"]["median"] <= row["ratio"]["upper"]
        assert row["seconds"]["median"] > 0


def _page_of(result, folder):
    """Write the page and the picture of a result, twice, and look at both."""
    page, words = folder / "page.md", ["](page.svg)", "](bench.json)", "| 5 x 1,000 |", "| superadam |", contests.FLOOR]
    page.write_text("# Cost\n\n<!-- figures: python bench/step_cost.py -->\n<!-- end of figures -->\n\nWords.\n")
    for _ in range(2):
        assert step_cost.main([str(result)]) == 0
        text, picture = page.read_text(), (folder / "page.svg").read_text()
        assert text.startswith("# Cost\n")
        assert text.endswith("<!-- end of figures -->\n\nWords.\n")
        assert text.count("![") == 1
        assert all(word in text for word in [*words, "torch foreach", "## bf16, 1 thread"])
        assert hashlib.sha256(result.read_bytes()).hexdigest() in picture


def test_the_page_shows_what_its_result_holds():
    """Tables are those of the file that the page links, and the picture was drawn from that."""
    page = step_cost.PAGE.read_text()
    (link,) = re.findall(r"\[All seconds and quartiles\]\((.*)\)", page)
    costs = step_cost.StepCosts(step_cost.PAGE.parent / link)
    assert step_cost.FIGURES.search(page)[0] == step_cost.page(costs, "step_cost.svg", link)
    assert costs.sha256 in step_cost.PAGE.with_suffix(".svg").read_text()
