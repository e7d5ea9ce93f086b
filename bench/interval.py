"""What the interval test costs: passes that list uncertain elements against those that do not, and patches.

`test` is the pass with the test and its lists, `patch` the pass over the lists with the verdict's factor, which comes
after backward and puts values into a working copy on the host; each is the ratio to the plain SPECULATE, or
COMMIT_AND_SPECULATE, of the same arrays, in pairs as in `bench/compare.py`. Weights, moments and gradients are as in
fine-tuning; factors are up to 1.5 times larger or smaller than the published one.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import numpy as np
import numpy.typing as npt

from superadam.cli.bench.arrays import HYPERPARAMETERS, STEP
from superadam.cli.bench.pairs import Action, compare
from superadam.kernels import native
from superadam.kernels.hyperparameters import Coefficients, Interval
from superadam.kernels.native import Dtype, Pass
from superadam.state.uncertain import empty_lists

LEARNING_RATES = (1e-6, 1e-5, 1e-4)
FACTOR, WIDTH = 0.3, 1.5
ISAS = [isa for isa in native.available_isas() if isa != "scalar"]


class Arrays:
    """One segment of a bf16 parameter and its list; its address holds as long as this lives."""

    def __init__(self, numel: int) -> None:
        rng = np.random.default_rng(0)
        scale = np.exp(rng.normal(0, 1.2, numel)) * 1e-6
        gradient = (scale * rng.standard_t(4, numel) / np.sqrt(2) / FACTOR).astype(np.float32)
        self.arrays: dict[str, npt.NDArray[np.generic]] = {
            "gradient": (gradient.view(np.uint32) >> 16).astype(np.uint16),
            "master": rng.normal(0, 0.02, numel).astype(np.float32),
            "exp_avg": (scale * rng.normal(0, 0.3, numel)).astype(np.float32),
            "exp_avg_sq": (scale**2 * np.exp(rng.normal(0, 0.4, numel))).astype(np.float32),
            "out": np.zeros(numel, np.uint16),
            "sums": np.zeros(native.chunk_count(numel)),
            "nonfinite": np.zeros(native.chunk_count(numel), np.int64),
        }
        self.arrays["accepted_gradient"] = self.arrays["gradient"].copy()
        (self.listed,) = empty_lists([numel], [False])
        self.plain = np.zeros(1, native.SEGMENT)
        for name, array in self.arrays.items():
            self.plain[name] = array.ctypes.data
        self.plain["length"], self.plain["accepted_coefficients"] = numel, 1
        self.plain["gradient_dtype"] = self.plain["out_dtype"] = Dtype.BFLOAT16
        self.testing = self.plain.copy()
        self.testing["uncertain"] = self.listed.address
        self.values = np.zeros(int(self.listed.record["capacity"]), np.uint16)

    def patch(self) -> npt.NDArray[np.void]:
        """Return the segment over what is listed."""
        row = np.zeros(1, native.SEGMENT)
        for name in ("gradient", "master", "exp_avg", "exp_avg_sq", "index"):
            row[name] = self.listed.record[name]
        row["out"], row["target"] = self.values.ctypes.data, self.arrays["out"].ctypes.data
        row["length"] = min(self.listed.count, len(self.values))
        row["gradient_dtype"] = row["out_dtype"] = Dtype.BFLOAT16
        return row


def table(lr: float) -> npt.NDArray[np.void]:
    """Return the coefficients with the interval's, and those of a commit that changes nothing much."""
    low, high = (float(np.float32(one)) for one in (FACTOR / WIDTH, FACTOR * WIDTH))
    current = Coefficients.at_step(dataclasses.replace(HYPERPARAMETERS, lr=lr), STEP, (low + high) / 2)
    over = current.over(Interval(low, high))
    assert over is not None
    older = Coefficients.at_step(dataclasses.replace(HYPERPARAMETERS, lr=0.0, beta1=0.999, beta2=0.99999), STEP, 1.0)
    return np.array([over.row(), older.row()], native.COEFFICIENTS)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=1 << 24)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--threads", type=int, default=native.get_num_threads())
    parser.add_argument("--isa", nargs="*", choices=native.available_isas(), default=ISAS)
    arguments = parser.parse_args()
    arrays = Arrays(arguments.numel)
    sys.stdout.write(f"{arguments.threads} threads, {arguments.numel} elements, {arguments.pairs} pairs\n")

    def action(which: Pass, segments: npt.NDArray[np.void], coefficients: npt.NDArray[np.void], isa: str) -> Action:
        def run() -> None:
            arrays.listed.record["count"] = 0
            native.run(which, segments, coefficients, isa=isa, threads=arguments.threads)

        return run

    for lr in LEARNING_RATES:
        coefficients = table(lr)
        for isa in arguments.isa:
            for which in (Pass.SPECULATE, Pass.COMMIT_AND_SPECULATE):
                plain, testing = (action(which, one, coefficients, isa) for one in (arrays.plain, arrays.testing))
                tested = compare(testing, plain, arguments.pairs)
                testing()
                share, patch = arrays.listed.count / arguments.numel, arrays.patch()
                patched = compare(action(Pass.SPECULATE, patch, coefficients, isa), plain, arguments.pairs)
                line = f"lr {lr:g}  {100 * share:5.2f} % uncertain  {isa:7} {which.name:21}"
                for name, found in (("test", tested.ratio), ("patch", patched.ratio)):
                    line += f"  {name} {found.median:.3f} ({found.lower:.3f} {found.upper:.3f})"
                sys.stdout.write(f"{line}  plain {1e3 * tested.second.median:.1f} ms\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
