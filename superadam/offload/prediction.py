"""Which factor the next verdict will put on the gradients, and for how wide an interval around it to speculate.

Gradient norms drift from step to step: the next one is predicted from the last eight, and from those gradients of this
step that have arrived. Everything here decides when work is done, never the result.
"""

from __future__ import annotations

import collections
import ctypes
import math
import statistics
import weakref
from collections.abc import Mapping

from superadam.kernels.hyperparameters import Interval
from superadam.state.parameter import Piece, Prediction
from superadam.state.uncertain import LISTED_SHARE, Listed
from superadam.step.outcome import Applied

REMEMBERED_STEPS = 8  # whose norms predict the next one
JUDGED_PREDICTIONS = 64  # whose errors choose the width
WIDTHS = (1.1, 1.25, 1.5, 2.0)  # an interval holds factors from the predicted one divided by this, to it times this
LEAST_SEEN = 0.12  # share of the elements that must have arrived before their norm corrects the prediction
LEAST_HITS = 0.5  # share of predictions that must hold: a miss costs a pass over the state after backward
PATCH_COST = 6.0  # of one element, in passes over one element: it is found, copied, and computed again
FIRST_UNCERTAIN = 0.05  # uncertain share of the elements for a spread as large as the factor, before it is measured
FADING = 0.02  # weight of that at the end of each step in which nothing was listed
FIRST_LEFT_OUT, MOST_LEFT_OUT = 8, 128  # steps in which a parameter that has too many uncertain elements is left out


class Predictor:
    """Predicts the factor of each step, bucket by bucket. Any number may be a norm, a factor or a limit.

    Attributes:
        total: elements of all parameters; once as many have arrived, the next ones begin another backward.
    """

    total = math.inf

    def __init__(self) -> None:
        # Of earlier steps, the norm, and norms of what had arrived at its predictions, by the number of elements.
        self._past: collections.deque[tuple[float, dict[int, float]]] = collections.deque(maxlen=REMEMBERED_STEPS)
        # Limits of the norm as they were applied; 0.0 for what is not clipping by one factor, as a product with 0 or -1
        # is not, and inf where none was.
        self._limits: collections.deque[float] = collections.deque(maxlen=REMEMBERED_STEPS)
        self._is_own = False  # whether it was the optimizer's
        self._errors: collections.deque[float] = collections.deque(maxlen=JUDGED_PREDICTIONS)
        self._predicted: list[float] = []  # factors, in this step
        self._seen: dict[int, float] = {}  # norms of what had arrived, in this step
        self._arrived = 0  # elements, in this step
        self._elements = 0  # of a whole step
        self._uncertain = FIRST_UNCERTAIN
        self._listed, self._found = 0.0, 0  # in this step: elements times spread, and how many were uncertain
        self._steps = 0
        # Until which step, and for how many; of pieces whose parameter is bound again by another, nothing is kept.
        self._left_out: weakref.WeakKeyDictionary[Piece, tuple[int, int]] = weakref.WeakKeyDictionary()

    def add_verdict(self, applied: Applied | None) -> None:
        """Learn from the end of a step; None where nothing was speculated on, or it was skipped."""
        predicted, self._predicted = self._predicted, []
        seen, self._seen = self._seen, {}
        if self._listed:
            self._uncertain += 0.5 * (self._found / self._listed - self._uncertain)
            self._listed, self._found = 0.0, 0
        else:  # without any list, less and less trust in what was learned: lr may have changed
            self._uncertain += FADING * (min(self._uncertain, FIRST_UNCERTAIN) - self._uncertain)
        if applied is None:
            return
        norm, factor, unscaling, self._is_own = applied
        self._steps += 1
        if not predicted or not norm < math.inf:
            return
        is_clipped = factor is None or not factor >= unscaling
        usual = self._usual_limit
        if is_clipped:
            self._limits.append(factor * norm if factor is not None and factor > 0.0 else 0.0)
        else:
            self._limits.append(usual if norm * unscaling < usual else math.inf)
        if is_clipped and self._past:  # where nothing is clipped, predictions cost nothing and need not hold
            self._errors += [_error(prediction, factor) for prediction in predicted]
        self._past.append((norm, seen))
        self._elements = self._arrived

    def add_lists(self, listed: Mapping[Piece, Listed], prediction: Prediction) -> None:
        """Learn how many elements are uncertain in an interval."""
        if prediction.interval is None or not listed:
            return
        spread, narrowest = _spread(prediction.factor, *prediction.interval), _spread_of(WIDTHS[0])
        elements = uncertain = 0
        for piece, its_list in listed.items():
            numel = piece.shape.numel()
            if its_list.is_complete:
                self._left_out.pop(piece, None)
            elif its_list.count * narrowest * LISTED_SHARE > numel * spread:  # so would be its narrowest list
                steps = min(MOST_LEFT_OUT, 2 * self._left_out.get(piece, (0, FIRST_LEFT_OUT // 2))[1])
                self._left_out[piece] = self._steps + steps, steps
                continue
            elements, uncertain = elements + numel, uncertain + its_list.count
        if elements:
            self._listed, self._found = self._listed + elements * spread, self._found + uncertain

    def leaves_out(self, piece: Piece, prediction: Prediction, unscaling: float) -> bool:
        """Whether speculation on a piece would be in vain, if the verdict's factor is not the predicted one.

        Its dtype is as wide as its master's, so that rounding hides no difference, or nearly all of its elements are
        uncertain, because they are near zero or its updates are large. `unscaling`, the factor without clipping, is
        often met exactly.
        """
        if prediction.interval is None:
            return False
        if not piece.is_narrow:
            return prediction.factor != unscaling
        return self._left_out.get(piece, (0, 0))[0] > self._steps

    def add_arrived(self, elements: int, seen: float) -> int:
        """Count elements that have arrived in this step; return how many there were before, whose norm is `seen`."""
        if seen == 0.0 or self._arrived >= self.total:  # the first ones
            self._predicted, self._seen, self._arrived = [], {}, 0
        self._arrived += elements
        return self._arrived - elements

    def predict(self, elements: int, seen: float, unscaling: float, limit: float | None) -> Prediction | None:
        """Return what to speculate for; None for no speculation.

        Args:
            elements: number of those that have now arrived, whose norm is not known.
            seen: norm of those that arrived in this step before them.
            unscaling: factor without clipping.
            limit: the optimizer's, inf for none; None where it applies to more than these gradients.
        """
        before = self.add_arrived(elements, seen)
        if not math.isfinite(seen):
            return None
        norm = self._norm(before, seen)
        if limit is None or (math.isinf(limit) and not self._is_own):
            limit = self._usual_limit  # as far as it was seen to be applied
        self._predicted.append(min(unscaling, _ratio(limit, norm)))
        self._seen[before] = seen
        return self._prediction(norm, seen, unscaling, limit)

    def _prediction(self, norm: float, seen: float, unscaling: float, limit: float) -> Prediction | None:
        """Return for what to speculate where a norm is likely, of which `seen` has arrived; None for not at all."""
        if not 0.0 < unscaling < math.inf:
            return None
        centre, width = _ratio(limit, norm), self._width()
        if norm * (width or WIDTHS[-1]) * unscaling <= limit:
            return Prediction(unscaling)  # clipping is unlikely
        if width is None or limit == 0.0:
            return None if norm * unscaling > limit else Prediction(unscaling)
        low, high = _float32(centre / width), _float32(min(unscaling, centre * width))
        if seen > 0.0:
            high = max(_float32(min(unscaling, centre)), _float32(min(high, limit / seen)))
        factor = _float32(unscaling) if centre >= unscaling else _float32((low + high) / 2)
        if not 0.0 < low <= high < math.inf:
            return None
        return Prediction(factor, Interval(low, high))

    def _norm(self, elements: int, seen: float) -> float:
        """Return the norm that this step is likely to have, not less than that of the elements that have arrived."""
        if not self._past:
            return seen
        usual = max(seen, statistics.median(norm for norm, _ in self._past))
        if elements < LEAST_SEEN * self._elements:
            return usual
        shares = [norm / past[elements] for norm, past in self._past if past.get(elements, 0.0) > 0.0]
        return seen * max(1.0, statistics.median(shares)) if shares else usual

    @property
    def _usual_limit(self) -> float:
        return statistics.median_high(self._limits) if self._limits else math.inf

    def _width(self) -> float | None:
        """Return the width of the least expected cost; None where too few predictions hold."""
        if not self._errors:
            return WIDTHS[1]
        costs: dict[float, float] = {}
        for width in WIDTHS:
            hits = sum(error <= math.log(width) for error in self._errors) / len(self._errors)
            uncertain = self._uncertain * _spread_of(width)
            if hits >= LEAST_HITS and uncertain * LISTED_SHARE <= 1.0:
                costs[width] = hits * (uncertain * PATCH_COST - 1.0)
        return min(costs, key=costs.__getitem__, default=None)


def _ratio(limit: float, norm: float) -> float:
    return limit / norm if norm > 0.0 else math.inf


def _error(predicted: float, factor: float | None) -> float:
    ratio = predicted / factor if factor else 0.0
    return abs(math.log(ratio)) if 0.0 < ratio < math.inf else math.inf


def _spread(factor: float, low: float, high: float) -> float:
    """Return how far an interval reaches from its factor, in units of that."""
    return max(high - factor, factor - low) / factor + 2.0**-8


def _spread_of(width: float) -> float:
    return _spread((1.0 / width + width) / 2, 1.0 / width, width)


def _float32(value: float) -> float:
    return ctypes.c_float(value).value  # without numpy's warnings
