"""`examples/long_sequences.py`: ranks that hold slices of sequences have the gradients of whole ones."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from support.sequence_ranks import CASES, REFUSALS, ROWS, SEQUENCE, Case, Tensors, example, report_of_ranks
from torch import nn
from transformers import masking_utils

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TOLERANCE = 2 * ROWS * SEQUENCE * 2**-24
"""Relative error of a parameter's gradient, which is a sum over at most this number of tokens.

Slices add up the same fp32 terms in another order, and an addition rounds to 24 bits. 4e-7 was seen, twentieth of this;
without positions, 0.3.
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return report_of_ranks(tmp_path_factory.mktemp("ranks"))


def errors(case: Case, gradients: Tensors) -> list[float]:
    """Return how far each parameter's gradient is from that of whole sequences, relative to it."""
    whole = case.whole_gradients()
    assert gradients.keys() == whole.keys()
    return [float((gradients[name] - whole[name]).norm() / whole[name].norm()) for name in whole]


def same(ours: Tensors, theirs: Tensors) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_start_without_torchrun_ends_in_one_sentence(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["long_sequences.py"])
    with pytest.raises(SystemExit, match=r"^long_sequences.py needs several ranks: start it with torchrun [^\n]*$"):
        example.main()


def test_ranks_that_cannot_meet_are_told_once(monkeypatch):
    def fails():
        raise dist.DistNetworkError("no answer\nand more")

    monkeypatch.setattr(dist, "init_process_group", fails)
    monkeypatch.setattr("sys.argv", ["long_sequences.py"])
    monkeypatch.setenv("RANK", "2")
    told_by_first = r"^long_sequences.py: the ranks could not meet \(no answer\); [^\n]*$"
    for local_rank, told in (("0", told_by_first), ("1", "^1$")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit, match=told):
            example.main()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_those_of_whole_sequences(case, reports):
    first, *others = (report[case.name] for report in reports[math.prod(case.shape)])
    assert all(same(first, other) for other in others)
    assert max(errors(case, first)) < TOLERANCE


def test_the_tolerance_catches_positions_that_start_again_in_every_slice():
    positions = torch.arange(SEQUENCE).expand(ROWS, -1) % (SEQUENCE // 2)
    assert min(errors(CASES[0], CASES[0].whole_gradients(position_ids=positions))) > 1000 * TOLERANCE


def test_what_would_be_different_is_refused_on_all_ranks(reports):
    said = [(name, report["refusals"][name] or "") for name in REFUSALS for report in reports[2]]
    assert [(name, words) for name, words in said if REFUSALS[name].words not in words] == []


def test_the_example_learns_the_same_on_all_ranks(reports):
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
def test_masks_are_refused(name, one_rank):
    given = {"device": torch.device("cpu"), "group": dist.group.WORLD, "q_length": 8}
    with pytest.raises(ValueError, match="no masks"):
        example.check_mask(mask_function=MASKS[name], **given)
    causal = masking_utils.causal_mask_function
    with pytest.raises(ValueError, match="no masks"):
        example.check_mask(mask_function=causal, attention_mask=torch.ones(1, 8), **given)
    assert example.check_mask(mask_function=causal, attention_mask=None, **given) is None


def test_cross_attention_is_refused():
    module, query, key = nn.Module(), torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 8, 8)
    with pytest.raises(ValueError, match="asked for no causality, no position_ids, keys of other tokens;"):
        example.ulysses_attention(module, query, key, key, None, group=None)
    module.is_causal = True
    with pytest.raises(ValueError, match="asked for no position_ids, keys of other tokens;"):
        example.ulysses_attention(module, query, key, key, None, group=None)
    with pytest.raises(ValueError, match="asked for no causality;"):
        example.ulysses_attention(
            module, query, query, query, None, group=None, is_causal=False, position_ids=torch.arange(4)
        )
