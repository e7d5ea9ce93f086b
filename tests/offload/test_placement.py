"""The rules of the placement: the size of buckets, which parameters are in the last ones, and how it changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.overlap import adam, loss_of, mlp, train

from superadam import OffloadScheduler
from superadam.offload.buckets import DEFAULT_NUMEL
from superadam.offload.placement import (
    LEAST_BUCKETS,
    LEAST_NUMEL,
    Placement,
    last_pieces,
    numel_of_buckets,
)
from superadam.state.parameter import ParameterState, Piece
from superadam.testing import SimulatedDevice


@given(st.integers(0, 10**12))
def test_size_of_buckets_is_an_eighth_of_the_model_within_bounds(total: int) -> None:
    numel = numel_of_buckets(total)
    assert LEAST_NUMEL <= numel <= DEFAULT_NUMEL
    assert numel in (LEAST_NUMEL, DEFAULT_NUMEL, total // LEAST_BUCKETS)
    assert numel <= max(LEAST_NUMEL, total // LEAST_BUCKETS)


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 10), st.integers(1, 60))
def test_last_pieces_are_the_shortest_end_that_fills_the_buckets(
    sizes: list[int], gpu_buckets: int, bucket_numel: int
) -> None:
    order: list[Piece] = [ParameterState(torch.empty(size), row, "p") for row, size in enumerate(sizes)]
    chosen = last_pieces(order, Placement(gpu_buckets, bucket_numel, None, 1))
    assert all(one is other for one, other in zip(chosen, reversed(order), strict=False))
    wanted, elements = gpu_buckets * bucket_numel, sum(one.shape.numel() for one in chosen)
    assert elements >= min(wanted, sum(sizes))
    if chosen:
        assert elements - chosen[-1].shape.numel() < wanted


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_under_way_where_the_placement_is_changed(seed: int) -> None:
    model = mlp(torch.bfloat16)
    optimizer = adam(model)
    device = SimulatedDevice(seed)
    with OffloadScheduler(optimizer, model, device=device, bucket_numel=64, gpu_buckets=2, num_threads=1) as scheduler:
        train(model, optimizer, range(2))
        loss_of(model, 2).backward()
        scheduler.place(gpu_buckets=1)
        assert scheduler._pipeline._worker.is_idle
        assert scheduler._bucketer.rest() == []
