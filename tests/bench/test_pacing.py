"""`bench/pace.py`: norms, gradients, what counts as hidden, and the whole run at a tiny size; never how fast it is."""

import dataclasses
import json

import numpy as np
import pace
import pytest
import torch
from measures import gradient_norms, paced_device, pacing
from measures.timed_model import Gradients, TimedModel
from support.actions_on_a_clock import Clock

from superadam.cli.bench.arrays import HYPERPARAMETERS
from superadam.devices import Stream
from superadam.kernels import native
from superadam.offload.placement import Placement
from superadam.plan.events import Passes


@pytest.mark.slow
def test_pace_prints_every_side_and_writes_json(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(pacing, "CLIP_EVERY", 4)  # no more iterations than one of each kind needs
    monkeypatch.setattr(pacing.timeit, "timeit", lambda action, number: (action(), 2e-3)[1])  # Adam in a row's turns
    monkeypatch.setenv("COLUMNS", "80")
    target = tmp_path / "pacing.json"
    before = torch.get_num_threads(), native.get_num_threads()
    words = ["--parameters", "4096", "--layers", "4", "--rounds", "1", "--threads", "2", "--ratios", "1", "4"]
    assert pace.main([*words, "--json", str(target)]) == 0
    assert (torch.get_num_threads(), native.get_num_threads()) == before
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed  # nothing was cut off
    for word in ("clock", "auto", "best fixed", "no overlap", "torch", "an H200", "cannot show"):
        assert word in printed
    read = json.loads(target.read_text())
    assert read["rates"] == dataclasses.asdict(paced_device.H200)
    assert read["threads"] == 2
    for row in read["rows"]:
        assert (row["parameters"], row["layers"]) == (4096, 4)
        assert (row["adam_seconds"], row["ratio"]) == (2e-3, row["backward_seconds"] / 2e-3)
        assert set(row["passes"]) == {field.name for field in dataclasses.fields(Passes)}
        clock = row["clock"]["seconds"]["median"]
        assert clock >= 0.999 * (row["forward_seconds"] + row["backward_seconds"])  # sums of differences of times
        assert row["clock"]["over_clock"] == 1.0
        assert row["best"] in {side["placement"] for side in row["placements"]}
        assert (row["lowest_norm"], row["highest_norm"]) == pytest.approx((0.9, 1.1))
        assert (row["clipped_share"], row["lr"]) == (0.25, HYPERPARAMETERS.lr)
        overlapped = (row["auto"], *row["placements"])
        for side in (*overlapped, row["after_backward"], row["torch"]):
            assert side["over_clock"] == side["seconds"]["median"] / clock
            assert 0.0 <= side["hidden_share"] <= 1.0
            assert side["accepted"] + side["redone"] <= 1.0
        assert min(side["clipped_seconds"] for side in overlapped if side["clipped_seconds"] is not None) > 0.0


def test_norms_are_those_of_fine_tuning():
    """Medians of the last eight predict the next about as well as in public logs: 35, 60, 85, 95 %, very roughly."""
    logs = np.log(gradient_norms.gradient_norms(1.0, 20_000, 0))
    assert np.exp(np.quantile(logs, [0.001, 0.5, 0.999])) == pytest.approx([3.8, 20.0, 150.0], rel=0.3)
    expected = np.median(np.lib.stride_tricks.sliding_window_view(logs, 8), axis=1)[:-1]
    missed = np.abs(logs[8:] - expected)
    within = [float(np.mean(missed < np.log(factor))) for factor in (1.1, 1.25, 1.5, 2.0)]
    assert within == pytest.approx([0.35, 0.6, 0.85, 0.95], abs=0.08)  # "roughly"


@pytest.mark.parametrize("share", [0.0, 0.07, 0.5, 0.9, 1.0])
def test_the_wanted_share_of_norms_exceeds_the_limit(share):
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
def test_the_timed_steps_have_the_wanted_share_too(share):
    turns = pacing.norms_of_turns(share, 2)
    assert [len(turn) for turn in turns] == [pacing.WARM_UPS + pacing.TIMED] * (pacing.SETTLING + 2)
    timed = pacing.timed_norms(turns)
    assert timed == turns[-2][pacing.WARM_UPS :] + turns[-1][pacing.WARM_UPS :]
    assert np.mean([norm > gradient_norms.MAX_NORM for norm in timed]) == share


def test_gradients_have_the_wanted_norms_and_a_state_that_fits_them():
    """Tolerances: rounding to bf16 leaves 2**-9 of an element, at random; the state is of 64,000 random elements."""
    gradients = Gradients([64_000] * 2, 2)
    gradients.scale_to([0.3, 40.0])
    for one, norm, wanted in zip(gradients.sets, gradients.norms, (0.3, 40.0), strict=True):
        assert norm == pytest.approx(wanted, rel=1e-3)
        assert norm == pytest.approx(float(one.double().norm()), rel=1e-12)  # summed in another order
    assert not torch.equal(gradients.sets[0] > 0, gradients.sets[1] > 0)
    state = gradients.steady_state(0.5, 64_000)
    mean_square = (gradients.sets[0].double() * 0.5 / 0.3).square().mean()
    assert float(state["exp_avg_sq"].double().mean() / mean_square) == pytest.approx(1.08, abs=0.15)  # exp(0.4**2 / 2)
    ratio = (gradients.sets[0][:64_000].double() * 0.5 / 0.3) / state["exp_avg_sq"].double().sqrt()
    assert 0.01 < float((ratio.abs() > 3.0).double().mean()) < 0.05  # of normal elements 0.003
    assert float(state["master"].std()) == pytest.approx(0.02, rel=0.02)
    assert not torch.equal(state["master"].bfloat16().float(), state["master"])
    assert float((state["exp_avg"] / state["exp_avg_sq"].sqrt()).std()) == pytest.approx(0.3, rel=0.3)


def test_a_sweep_varies_one_thing_at_a_time_within_what_the_device_can_hold():
    default = Placement(gpu_buckets=0, bucket_numel=100, transfer_dtype=None, num_threads=4)
    placements = pacing.sweep(default, 1000, 0.5)
    assert placements[0] == default
    assert len(set(placements)) == len(placements)
    assert max(placement.gpu_buckets for placement in placements) == 5
    for placement in placements[1:]:
        names = ("gpu_buckets", "bucket_numel", "num_threads")
        assert sum(getattr(placement, name) != getattr(default, name) for name in names) == 1
    assert pacing.sweep(dataclasses.replace(default, num_threads=1), 1000, 0.0)[0].gpu_buckets == 0


def clock_and_side(tensors: int) -> tuple[pacing.Side, pacing.Side]:
    model = TimedModel(Gradients([64] * tensors))
    clock, side = (pacing.Side(name, model, lambda: False) for name in ("clock", ""))
    clock.seconds[False], clock.python, side.python = [10.0], [1.0], [1.0]
    return clock, side


def test_what_is_hidden_is_what_an_iteration_does_not_take_longer_than_the_clock():
    clock, side = clock_and_side(1)
    for seconds, expected in ((9.0, 1.0), (10.0, 1.0), (11.0, 0.75), (14.0, 0.0), (20.0, 0.0)):
        side.seconds[False], side.seconds[True] = [seconds, 1.0, 99.0], [77.0]
        result = pacing._result(side, clock, adam=4.0, counts_clipped=False)
        assert (result.hidden_share, result.over_clock) == (expected, seconds / 10.0)


def test_clipped_steps_count_by_their_number_where_a_share_was_asked_for():
    clock, side = clock_and_side(2)
    side.seconds[False], side.seconds[True] = [10.0, 11.0, 99.0], [14.0, 15.0, 10.0, 16.0, 14.0]
    side.accepted, side.redone = 4, 8
    result = pacing._result(side, clock, adam=16.0, counts_clipped=True)
    assert result.typical_seconds == (3 * 11.0 + 5 * 14.0) / 8
    assert result.hidden_share == pytest.approx(1.0 - (result.typical_seconds - 10.0) / 16.0)
    assert (result.accepted, result.redone) == (4 / 16, 8 / 16)  # of two tensors in each of eight steps
    side.seconds[False] = []
    result = pacing._result(side, clock, adam=16.0, counts_clipped=True)
    assert (result.typical_seconds, result.seconds) == (14.0, None)


def test_steps_after_backward_hide_nothing():
    """The whole step, and both ways, come after the device's work, and before its next."""
    clock = Clock()
    device = paced_device.PacedDevice(paced_device.Rates(64.0, 128.0, 1.0), now=clock, sleep=clock.sleep)
    model = TimedModel(Gradients([64] * 2))
    model.device, model.forward_seconds, model.backward_seconds = device, 3.0, 5.0
    action = clock.action("step", iter([7.0]))
    model().backward()
    assert not pacing._step_after_backward(action, model)
    assert device.record(Stream.CURRENT).passed_at() == 100.0 + 3.0 + 5.0 + 256 / 64.0 + 7.0 + 256 / 128.0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ratios", "1", "0"], "argument --ratios: 0 is not above 0"),
        (["--clipped", "1.5"], "argument --clipped: 1.5 is no share, expected 0 to 1"),
        (["--clipped", "nan"], "argument --clipped: nan is no share, expected 0 to 1"),
        (["--lr", "inf"], "argument --lr: inf is no finite number of at least 0"),
        (["--layers", "0"], "argument --layers: 0 is no number from 1"),
        (["--json", "/nowhere/at/all.json"], "is in a directory that does not exist"),
    ],
)
def test_what_cannot_be_paced_is_a_sentence(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        pace.main(words)
    assert message in capsys.readouterr().err.splitlines()[-1]
