"""The rules of the placement: the size of buckets, and which parameters are in the last ones."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from superadam.offload.buckets import DEFAULT_NUMEL
from superadam.offload.placement import (
    LEAST_BUCKETS,
    LEAST_NUMEL,
    Placement,
    last_parameters,
    numel_of_buckets,
)

# ---- bucket size --------------------------------------------------------------------------------------------


@given(st.integers(0, 10**12))
def test_size_of_buckets_is_an_eighth_of_the_model_within_bounds(total: int) -> None:
    numel = numel_of_buckets(total)
    assert LEAST_NUMEL <= numel <= DEFAULT_NUMEL
    assert numel in (LEAST_NUMEL, DEFAULT_NUMEL, total // LEAST_BUCKETS)
    assert numel <= max(LEAST_NUMEL, total // LEAST_BUCKETS)


# ---- which parameters ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 10), st.integers(1, 60))
def test_last_parameters_are_the_shortest_end_that_fills_the_buckets(
    sizes: list[int], gpu_buckets: int, bucket_numel: int
) -> None:
    order: list[Tensor] = [torch.empty(size) for size in sizes]
    chosen = last_parameters(order, Placement(gpu_buckets, bucket_numel, None, 1))
    assert all(one is other for one, other in zip(chosen, reversed(order), strict=False))
    wanted, elements = gpu_buckets * bucket_numel, sum(one.numel() for one in chosen)
    assert elements >= min(wanted, sum(sizes))
    if chosen:
        assert elements - chosen[-1].numel() < wanted
