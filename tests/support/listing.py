"""A kernel pass that lists uncertain elements, and what the oracle says is in the list."""

import dataclasses
import functools
from functools import partial

import numpy as np
from support import compact, formula
from support.intervals import Case, at_factor
from support.kernel_arrays import Job, Placed, coefficient_table, differing, make_segment, narrow, widen

from superadam.kernels import native
from superadam.kernels.native import Dtype, Flag, Format, Pass

LISTED = ("gradient", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Listing:
    """A pass over one segment that lists its uncertain elements, between canary bytes."""

    def __init__(
        self,
        which: Pass,
        case: Case,
        gradient: Dtype,
        out: Dtype,
        length: int,
        capacity: int,
        form: Format = Format.PLAIN,
    ) -> None:
        self.segment = segment = make_segment(length, length, gradient, out, norm=True, form=form)
        before = ("gradient", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
        values = {name: np.resize(values, length) for name, values in zip(before, case.elements, strict=True)}
        stored = {"gradient": narrow(values.pop("gradient"), gradient)}
        if Flag.AMSGRAD not in case.k.flags:
            del values["max_exp_avg_sq"]
            segment.arrays.pop("max_exp_avg_sq", None)
        for name, array in (stored | compact.encode(values, case.k.turn, form)).items():
            segment.arrays[name] = Placed(array)
        segment.arrays["accepted_gradient"] = Placed(segment.arrays["gradient"].view.copy())
        self.job = Job(which, [segment], [case.k, dataclasses.replace(at_factor(case.k, 0.75), interval=None)])
        segment.accepted_coefficients = 1
        kinds = {"index": np.uint32, "gradient": segment.arrays["gradient"].view.dtype}
        names = ["index", *(name for name in LISTED if name in segment.arrays)]
        self.arrays = {name: Placed(np.zeros(capacity, kinds.get(name, np.float32))) for name in names}
        self.record = np.zeros(1, native.UNCERTAIN)
        self.record["capacity"] = capacity
        for name, placed in self.arrays.items():
            self.record[name] = placed.address

    def run(self, isa: str, threads: int = 1) -> dict[str, np.ndarray]:
        """Check everything but the list against the oracle; return the list that the oracle expects."""
        self.job.reset()
        for placed in self.arrays.values():
            placed.reset()
        self.record["count"] = 0
        expected = self._expected
        native.run(self.job.which, self.table(), coefficient_table(self.job.sets), isa=isa, threads=threads)
        self.job.check(expected, f" with {isa}")
        assert all(placed.outside_is_unchanged() for placed in self.arrays.values())
        return self._list

    def check(self, threads: int = 1) -> None:
        for isa in native.available_isas():
            expected = self.run(isa, threads)
            assert self.count == len(expected["index"]), isa
            for name, actual in self.listed().items():
                assert differing(actual, expected[name]) == 0, f"{name} with {isa}"

    def table(self) -> np.ndarray:
        table = self.job.table()
        table["uncertain"] = self.record.ctypes.data
        return table

    @functools.cached_property
    def _expected(self) -> list[dict[str, np.ndarray]]:
        return self.job.expected()

    @functools.cached_property
    def _list(self) -> dict[str, np.ndarray]:
        """What of the state that the pass leaves, or a speculation reads, is uncertain."""
        now = {name: placed.view.copy() for name, placed in self.segment.arrays.items()}
        now |= compact.decode(now, self.segment.format)
        vmax = now.get("max_exp_avg_sq", now["exp_avg_sq"])
        wide = widen(now["gradient"], self.segment.gradient_dtype)
        state = now["exp_avg"], now["exp_avg_sq"], vmax, now["master"]
        k = self.job.sets[0]
        positions = np.arange(self.segment.length) + self.segment.first_threshold
        is_cut = Format.MASTER_24BIT in self.segment.format
        moved = partial(compact.moved_24bit, turn=k.turn, positions=positions) if is_cut else None
        index = np.flatnonzero(~formula.is_certain(k, self.segment.out_dtype, wide, *state, moved=moved))
        return {"index": index.astype(np.uint32), **{name: now[name][index] for name in LISTED if name in now}}

    @property
    def count(self) -> int:
        return int(self.record["count"][0])

    def listed(self) -> dict[str, np.ndarray]:
        """Return what is listed, in the order of the elements."""
        order = np.argsort(self.arrays["index"].view[: self.count])
        return {name: placed.view[: self.count][order] for name, placed in self.arrays.items()}
