"""How many elements the interval test calls uncertain, by learning rate and by the width of the interval.

State is synthetic, as in fine-tuning: weights N(0, 0.02), second moments log-normal, heavy-tailed bf16 gradients, the
first moment a third of the gradients' size, beta2 0.999, weight decay 0.01, step 500. An interval of width w reaches
from the predicted clip coefficient divided by w to the coefficient times w.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support import formula

from superadam.kernels.hyperparameters import Coefficients, Hyperparameters, Interval
from superadam.kernels.native import Dtype

Array = npt.NDArray[np.float32]
CLIP = 0.3
RATES = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 3e-4, 1e-3)
WIDTHS = (1.1, 1.25, 1.5, 2.0)
WEIGHTS = {"0.02": 0.02, "0.005": 0.005, "0.1": 0.1, "1e-4": 1e-4, "1 (norms)": None, "0 (LoRA)": 0.0}
"""Standard deviations of weights; None for weights around 1."""


def state(count: int) -> tuple[Array, Array, Array, Array]:
    """Return gradients, both moments and weights over their standard deviation."""
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 1, count)
    size = np.exp(rng.normal(0, 1.2, count)) * 1e-6
    g = rng.standard_t(4, count) / np.sqrt(2) * size / CLIP
    v = size**2 * np.exp(rng.normal(0, 0.4, count))
    m = rng.normal(0, 0.3, count) * size
    g, m, v, weights = (one.astype(np.float32) for one in (g, m, v, weights))
    return formula.widen_bfloat16(formula.narrow_bfloat16(g)), m, v, weights


def share(dtype: Dtype, lr: float, width: float, g: Array, m: Array, v: Array, p: Array) -> float:
    """Return the share of uncertain elements."""
    hyper = Hyperparameters(lr, 0.9, 0.999, 1e-8, 0.01, amsgrad=False, maximize=False, decoupled_weight_decay=True)
    low, middle, high = (float(np.float32(CLIP * one)) for one in (1 / width, (1 / width + width) / 2, width))
    k = Coefficients.at_step(hyper, 500, middle).over(Interval(low, high))
    assert k is not None
    return 1.0 - float(np.mean(formula.is_certain(k, dtype, g, m, v, v, p)))


def main() -> None:
    """Count, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=1 << 20)
    arguments = parser.parse_args()
    g, m, v, weights = state(arguments.numel)
    sys.stdout.write("uncertain elements, %\n" + f"{'':24}" + "".join(f"{width:>9}" for width in WIDTHS) + "\n")
    rows = [(dtype, f"lr {lr:g}", lr, 0.02 * weights) for dtype in (Dtype.BFLOAT16, Dtype.FLOAT16) for lr in RATES]
    for name, deviation in WEIGHTS.items():
        p = 1 + np.float32(0.1) * weights if deviation is None else np.float32(deviation) * weights
        rows += [(dtype, f"weights {name}", 1e-5, p) for dtype in (Dtype.BFLOAT16, Dtype.FLOAT16)]
    for dtype, name, lr, p in rows:
        shares = [share(dtype, lr, width, g, m, v, p) for width in WIDTHS]
        sys.stdout.write(f"{dtype.name:9} {name:14}" + "".join(f"{100 * one:9.2f}" for one in shares) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
