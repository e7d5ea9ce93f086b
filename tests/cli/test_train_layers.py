"""`cli.train.layers`: positions turn what they stand at, and a block that is computed again gives the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from superadam.cli.train.layers import Linear, Norm, rotated, rotations, through_block


@given(
    half=st.integers(1, 8),
    first=st.integers(0, 20),
    distance=st.integers(0, 20),
    shift=st.integers(0, 20),
    base=st.sampled_from([10_000.0, 500_000.0]),
)
def test_products_of_turned_vectors_depend_on_their_distance_alone(
    half: int, first: int, distance: int, shift: int, base: float
) -> None:
    generator = torch.Generator().manual_seed(half)
    query, key = torch.randn(2, 2 * half, dtype=torch.float64, generator=generator)
    turn = rotations(64, 2 * half, like=query, base=base)

    def product(at: int) -> Tensor:
        queries, keys = (rotated(vector.expand(1, 1, 64, -1), turn)[0, 0] for vector in (query, key))
        return queries[at] @ keys[at + distance]

    torch.testing.assert_close(product(first), product(first + shift), rtol=0.0, atol=1e-4)  # angles are fp32


def test_base_sets_the_slowest_turn() -> None:
    like = torch.zeros(1)
    fast, slow = (rotations(2, 8, like, base)[1, 1, -1].item() for base in (10.0, 1000.0))
    assert fast == pytest.approx(torch.sin(torch.tensor(10.0 ** (-3 / 4))).item(), rel=1e-6)
    assert slow < fast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_compute_in_the_dtype_of_their_input(dtype: torch.dtype) -> None:
    for layer in (Linear(4, 4), Norm(4)):
        layer.to(torch.bfloat16)
        assert layer(torch.ones(2, 4, dtype=dtype)).dtype == dtype


class Counting(nn.Module):
    """A block that counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.forwards = 0

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        self.forwards += 1
        return torch.tanh(x * self.weight) + rotation


@pytest.mark.parametrize(("recomputes", "forwards"), [(True, 2), (False, 1)])
def test_block_is_computed_again_only_if_asked(recomputes: bool, forwards: int) -> None:
    block = Counting()
    x = torch.ones(3, requires_grad=True)
    through_block(block, x, torch.zeros(3), recomputes=recomputes).sum().backward()  # type: ignore[no-untyped-call]
    assert block.forwards == forwards
    with torch.no_grad():
        through_block(block, x, torch.zeros(3), recomputes=recomputes)
    assert block.forwards == forwards + 1
