"""Whole steps of superadam and of torch, side by side in one group each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from measures.contests import Contest, contests
from pytest_benchmark.fixture import BenchmarkFixture

from superadam.cli.bench.pairs import Action
from superadam.kernels import native

ROUNDS, WARM_UPS = 11, 2
CONTESTS = range(len(contests(1)))


@pytest.fixture(scope="module", autouse=True)
def same_threads() -> Iterator[None]:
    """Give torch as many threads as superadam has."""
    before = torch.get_num_threads()
    torch.set_num_threads(native.get_num_threads())
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CONTESTS)
def contest(request: pytest.FixtureRequest, numel: int) -> tuple[Contest, Action, Action]:
    """Return a contest and both its sides, which share nothing but the machine."""
    found = contests(numel)[request.param]
    return (found, *found.prepare(found.tensors, found.numel))


@pytest.mark.parametrize("side", ["superadam", "torch"])
def test_step(benchmark: BenchmarkFixture, contest: tuple[Contest, Action, Action], side: str) -> None:
    found, ours, theirs = contest
    benchmark.group = found.name
    benchmark.extra_info["does"] = found.ours if side == "superadam" else found.theirs
    for action in (ours, theirs):  # both, so that neither side alone finds warm threads and touched memory
        action()
    benchmark.pedantic(ours if side == "superadam" else theirs, rounds=ROUNDS, warmup_rounds=WARM_UPS)
