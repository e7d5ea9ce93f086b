"""Hints at writes of somebody else: none is missed, and our own writes are none."""

from __future__ import annotations

import numpy as np
import torch

from superadam.fingerprints import Fingerprints


def make(count: int = 4) -> tuple[list[torch.Tensor], Fingerprints]:
    parameters = [torch.zeros(3) for _ in range(count)]
    return parameters, Fingerprints(parameters)


def rows(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def test_which_tensors_are_listed() -> None:
    parameters, fingerprints = make()
    assert fingerprints.are_of(list(parameters))
    assert not fingerprints.are_of(parameters[::-1])
    assert not fingerprints.are_of(parameters[:3])
    assert not fingerprints.are_of([*parameters[:3], torch.zeros(3)])


def test_a_write_is_hinted_until_it_is_noted() -> None:
    parameters, fingerprints = make()
    parameters[1].add_(1)
    for asked in (rows(0, 1, 2, 3), rows(3, 2, 1, 0), rows(2, 1)):
        assert fingerprints.hints(asked) == [1]
    assert fingerprints.hints(rows(0, 2)) == []
    assert fingerprints.is_hinted(1)
    fingerprints.note(1)
    assert not fingerprints.is_hinted(1)
    assert fingerprints.hints(rows(0, 1, 2, 3)) == []


def test_hints_seen_are_those_of_the_last_look() -> None:
    parameters, fingerprints = make()
    parameters[2].add_(1)
    assert fingerprints.seen_hints(rows(1, 2)) == []
    assert fingerprints.look() == []
    assert fingerprints.seen_hints(rows(1, 2)) == [2]
    assert fingerprints.seen_hints(rows(1, 3)) == []


def test_distrust_is_seen_without_another_look() -> None:
    for looks in (False, True):
        _, fingerprints = make()
        if looks:
            fingerprints.look()
        fingerprints.distrust(3)
        assert fingerprints.seen_hints(rows(3, 0)) == [3]
        assert fingerprints.hints(rows(3, 0)) == [3]


def test_other_data_is_moved_until_it_is_noted() -> None:
    parameters, fingerprints = make()
    parameters[0].data = torch.ones(3)
    assert fingerprints.look() == [0]
    assert fingerprints.is_moved(0)
    assert fingerprints.is_hinted(0)
    fingerprints.note(0)
    assert fingerprints.look() == []
    fingerprints.forget_address(0)
    assert fingerprints.look() == [0]


def test_our_own_write_is_no_hint_but_hides_none() -> None:
    parameters, fingerprints = make()
    parameters[1].add_(1)
    before = [parameter._version for parameter in parameters]
    fingerprints.bump(rows(3, 1))
    assert [parameter._version for parameter in parameters] == [before[0], before[1] + 1, before[2], before[3] + 1]
    assert fingerprints.hints(rows(0, 1, 2, 3)) == [1]
    fingerprints.bump(rows(2, 0, 3, 1))
    assert fingerprints.hints(rows(0, 1, 2, 3)) == [1]
