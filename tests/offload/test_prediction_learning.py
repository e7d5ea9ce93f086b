"""What predictions learn from verdicts and lists, and what they do not."""

from __future__ import annotations

import math
from typing import Any

from superadam.offload.prediction import Prediction, Predictor
from superadam.step.outcome import Applied


def step(predictor: Predictor, norm: float, limit: float | None = 1.0, *, is_known: bool = True) -> Prediction | None:
    """Let a bucket with this norm arrive, and clip; return what was predicted."""
    prediction = predictor.predict(100, 0.0, 1.0, (math.inf if limit is None else limit) if is_known else None)
    predictor.add_verdict(Applied(norm, 1.0 if limit is None else min(1.0, limit / norm), 1.0))
    return prediction


def trained(norms: list[float], **options: Any) -> Predictor:
    predictor = Predictor()
    for norm in norms:
        step(predictor, norm, **options)
    return predictor


def width(prediction: Prediction | None) -> float:
    """Return how far an interval reaches."""
    return prediction.interval.high / prediction.interval.low


def test_the_norm_is_no_less_than_what_has_arrived() -> None:
    predictor = trained([10.0] * 12)
    for _ in range(8):
        predictor.predict(100, 0.0, 1.0, 1.0)
        predictor.predict(900, 3.0, 1.0, 1.0)
        predictor.predict(100, 9.0, 1.0, 1.0)
        predictor.add_verdict(Applied(10.0, 0.1, 1.0))
    predictor.predict(10, 0.0, 1.0, 1.0)
    prediction = predictor.predict(900, 50.0, 1.0, 1.0)  # too few elements for another prediction
    assert prediction.factor <= 1.0 / 50.0


def test_steps_whose_factors_differ_are_wrong_predictions() -> None:
    predictor = trained([10.0] * 12, limit=None)
    for _ in range(3):
        predictor.predict(100, 0.0, 1.0, None)
        predictor.add_verdict(Applied(10.0, None, 1.0))
    assert predictor.predict(100, 0.0, 1.0, 1.0) is None


def test_rare_jumps_are_not_worth_a_wide_interval() -> None:
    """One step in 10 is missed; holding for that as well would make several times as many elements uncertain."""
    predictor = trained([16.0 if number % 10 == 9 else 10.0 for number in range(60)])
    assert width(step(predictor, 10.0)) < 1.25


def test_a_step_of_which_nothing_was_predicted_teaches_nothing() -> None:
    predictor, other = trained([10.0] * 12), trained([10.0] * 12)
    for _ in range(12):
        predictor.add_verdict(Applied(500.0, 0.002, 1.0))
    assert step(predictor, 10.0) == step(other, 10.0)


def arrived(predictor: Predictor, *seen: float) -> None:
    """Let buckets of 100 elements arrive, with the norm of what was there before each."""
    for norm in seen:
        predictor.predict(100, norm, 1.0, 1.0)
