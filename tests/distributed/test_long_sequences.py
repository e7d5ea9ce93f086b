"""Ranks that hold slices of sequences have the gradients of whole ones, and superadam takes the same steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sequence_ranks import (
    CASES,
    MISSING,
    REFUSALS,
    ROWS,
    SEQUENCE,
    UNSHARDED,
    Case,
    Tensors,
    example,
    report_of_ranks,
    steps_with,
)
from torch import nn
from transformers import masking_utils

pytestmark = pytest.mark.timeout(240)

TOLERANCE = 2 * ROWS * SEQUENCE * 2**-24
"""Relative error of a parameter's gradient, which is a sum over at most this number of tokens.

Slices add up the same fp32 terms in another order, and an addition rounds to 24 bits. 4e-7 was seen, twentieth of this;
without positions, 0.3.
"""


Reports = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return report_of_ranks(tmp_path_factory.mktemp("ranks"))


def errors(case: Case, gradients: Tensors) -> list[float]:
    """Return how far each parameter's gradient is from that of whole sequences, relative to it."""
    whole = case.whole_gradients()
    assert gradients.keys() == whole.keys()
    return [float((gradients[name] - whole[name]).norm() / whole[name].norm()) for name in whole]


def same(ours: Tensors, theirs: Tensors) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_those_of_whole_sequences(case: Case, reports: Reports) -> None:
    first, *others = (report[case.name] for report in reports[math.prod(case.shape)])
    assert all(same(first, other) for other in others)
    assert max(errors(case, first)) < TOLERANCE


@pytest.mark.slow
def test_the_tolerance_catches_missing_positions(reports: Reports) -> None:
    assert min(errors(MISSING, reports[2][0][MISSING.name])) > 1000 * TOLERANCE


@pytest.mark.slow
def test_steps_have_the_bits_of_one_process_with_the_same_gradients(reports: Reports) -> None:
    gradients = [step[0] for step in reports[2][0][UNSHARDED.name]]
    for i, expected in enumerate(steps_with(gradients)):
        for report in reports[2]:
            assert same(report[UNSHARDED.name][i][0], gradients[i])
            assert same(report[UNSHARDED.name][i][1], expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSALS)
def test_what_would_be_different_is_refused_on_all_ranks(name: str, reports: Reports) -> None:
    for report in reports[2]:
        assert REFUSALS[name].words in (report["refusals"][name] or "")


@pytest.mark.slow
def test_the_example_learns_the_same_on_all_ranks(reports: Reports) -> None:
    losses = [report["example"] for report in reports[2]]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] == pytest.approx(math.log(256), rel=0.05)


MASKS = {
    "window": masking_utils.sliding_window_causal_mask_function(8),
    "chunks": masking_utils.chunked_causal_mask_function(8, torch.zeros(1)),
    "packed": masking_utils.packed_sequence_mask_function(torch.zeros(1, 8)),
    "bidirectional": masking_utils.bidirectional_mask_function,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no masks"):
        example.no_mask(mask_function=MASKS[name], q_length=8)
    with pytest.raises(ValueError, match="no masks"):
        example.no_mask(mask_function=masking_utils.causal_mask_function, attention_mask=torch.ones(1, 8))
    assert example.no_mask(mask_function=masking_utils.causal_mask_function, attention_mask=None) is None


@pytest.mark.parametrize(
    ("is_causal", "keys", "words"), [(True, 8, "keys of other tokens"), (False, 4, "no causality")]
)
def test_cross_attention_is_refused(is_causal: bool, keys: int, words: str) -> None:
    module = nn.Module()
    if is_causal:
        module.is_causal = True
    query, key = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, keys, 8)
    with pytest.raises(ValueError, match=words):
        example.ulysses_attention(module, query, key, key, None, group=None)
