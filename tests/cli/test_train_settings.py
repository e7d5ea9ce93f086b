"""`superadam.cli.train.settings`: the learning rate's course, and what a continued run may change."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.training_runs import TINY

from superadam.cli.train.settings import CHANGEABLE, Settings
from superadam.cli.usage import UsageError


@given(steps=st.integers(1, 500), warmup=st.integers(0, 100))
def test_learning_rate_rises_to_its_peak_and_falls_to_a_tenth(steps: int, warmup: int) -> None:
    settings = dataclasses.replace(TINY, lr=1.0, steps=steps, warmup=warmup)
    rates = [settings.lr_of(updates) for updates in range(max(steps, warmup) + 2)]
    assert all(0.0 < rate <= 1.0 for rate in rates)
    assert rates[warmup] == 1.0
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if steps > warmup:
        assert rates[-1] == pytest.approx(0.1, abs=1e-12)  # 0.55 - 0.45 is not exact in fp64


def test_a_preset_has_defaults_and_explicit_values_go_before() -> None:
    assert Settings.new({}).model == "bytes"
    one = Settings.new({"model": "10m", "batch": 3})
    assert (one.model, one.batch, one.seq, one.lr) == ("10m", 3, 512, 1e-3)


def test_continued_run_changes_only_what_leaves_it_the_same_run() -> None:
    changed = TINY.continued({"steps": 20, "threads": 2, "device": "cpu", "text": "moved.txt", "lr": TINY.lr})
    assert changed == dataclasses.replace(TINY, steps=20, threads=2, text="moved.txt")
    assert TINY.continued({"overlap": False}) == dataclasses.replace(TINY, overlap=False)


@pytest.mark.parametrize("name", sorted({field.name for field in dataclasses.fields(Settings)} - CHANGEABLE))
def test_continued_run_refuses_to_become_another(name: str) -> None:
    other = {"dtype": "fp32", "moments": "bf16", "master": "24bit", "model": "10m"}.get(name) or getattr(
        TINY, name
    ) * 2 + 4
    option = "--" + name.replace("_", "-")
    with pytest.raises(UsageError, match=f"has {option} .*, not .*; leave {option} out"):
        TINY.continued({name: other})
