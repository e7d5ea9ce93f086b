"""`superadam.cli.train.settings`: limits, the learning rate's course, and what a continued run may change."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.training_runs import TINY, TINY_SHAPE

from superadam.cli.train.presets import Shape
from superadam.cli.train.settings import Settings
from superadam.cli.usage import UsageError
from superadam.offload.buckets import DEFAULT_NUMEL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, 0) for name in ("steps", "batch", "seq", "layers", "width", "heads", "threads")],
        *[(name, -1) for name in ("steps", "warmup", "seed")],
        *[("lr", value) for value in (math.nan, math.inf, 0.0, -1e-3)],
        *[("max_grad_norm", value) for value in (math.nan, 0.0, -1.0)],
        *[("weight_decay", value) for value in (math.nan, math.inf, -0.1)],
        ("width", 10),
        ("dtype", "int8"),
        *[(name, value) for name in ("bucket_numel", "num_threads") for value in (0, -1, "all", 2.5)],
        *[("gpu_buckets", value) for value in (-1, "all", 2.5)],
    ],
)
def test_values_outside_their_limits_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match="--" + name.replace("_", "-")):
        dataclasses.replace(TINY, **{name: value})


@given(steps=st.integers(1, 500), warmup=st.integers(0, 100))
def test_learning_rate_rises_to_its_peak_and_falls_to_a_tenth(steps: int, warmup: int) -> None:
    settings = Settings(steps=steps, warmup=warmup)
    factors = [settings.lr_factor(updates) for updates in range(max(steps, warmup) + 2)]
    assert all(0.0 < factor <= 1.0 for factor in factors)
    assert factors[warmup] == 1.0
    assert factors[: warmup + 1] == sorted(factors[: warmup + 1])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    if steps > warmup:
        assert factors[-1] == pytest.approx(0.1, abs=1e-12)  # 0.55 - 0.45 is not exact in fp64


def test_continued_run_changes_only_what_leaves_it_the_same_run() -> None:
    changed = TINY.continued({"steps": 20, "threads": 2, "device": "cpu", "text": "moved.txt", "lr": TINY.lr})
    assert changed == dataclasses.replace(TINY, steps=20, threads=2, text="moved.txt")
    assert TINY.continued({"overlap": False, "bucket_numel": "auto"}) == dataclasses.replace(
        TINY, overlap=False, bucket_numel="auto"
    )


@pytest.mark.parametrize(("before", "after"), [(None, TINY_SHAPE), (TINY_SHAPE, None)])
def test_continued_run_keeps_its_model(before: Shape | None, after: Shape | None) -> None:
    settings = dataclasses.replace(TINY, shape=before)
    name, other = settings.model, dataclasses.replace(TINY, shape=after).model
    assert {name, other} == {"bytes", "tiny"}
    with pytest.raises(UsageError, match=f"has --model {name}, not {other}; leave --model out"):
        settings.continued({"shape": after})
    assert settings.continued({"shape": before, "checkpointing": True}).checkpointing


@pytest.mark.parametrize("shape", [None, TINY_SHAPE])
def test_settings_come_back_from_plain_values(shape: Shape | None) -> None:
    settings = dataclasses.replace(TINY, shape=shape, checkpointing=True)
    assert Settings.of_plain(dataclasses.asdict(settings)) == settings


@given(parameters=st.integers(1, 10**12))
def test_automatic_buckets_are_several_and_within_limits(parameters: int) -> None:
    numel = Settings().elements_of_bucket(parameters)
    assert 64 * 1024 <= numel <= DEFAULT_NUMEL
    if 64 * 1024 < numel < DEFAULT_NUMEL:
        assert 8 * numel <= parameters < 8 * (numel + 1)
    assert Settings(bucket_numel=77).elements_of_bucket(parameters) == 77


@pytest.mark.parametrize("name", ["dtype", "max_grad_norm", "lr", "warmup", "batch", "seq", "width", "seed"])
def test_continued_run_refuses_to_become_another(name: str) -> None:
    other = "fp32" if name == "dtype" else getattr(TINY, name) * 2 + 4
    with pytest.raises(UsageError, match="--" + name.replace("_", "-")):
        TINY.continued({name: other})
