"""Jobs for the kernels: arrays at any byte offset between canary bytes, and what the oracle expects of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from support import compact, formula
from support.strategies import Magnitudes, coefficients, lengths, random_array

from superadam.kernels import native
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.native import Dtype, Flag, Format, Pass

Array = npt.NDArray[np.generic]

STORAGE = {Dtype.FLOAT32: np.float32, Dtype.BFLOAT16: np.uint16, Dtype.FLOAT16: np.uint16, Dtype.FLOAT64: np.float64}
STATE = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
READS_STATE = tuple(which for which in Pass if which is not Pass.NORM)
HALVES_AND_FLOAT32 = (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16)

FORMATS = tuple(
    moments | master
    for moments in (Format.PLAIN, Format.MOMENTS_BFLOAT16, Format.MOMENTS_8BIT)
    for master in (Format.PLAIN, Format.MASTER_24BIT)
)
"""Every way to store fp32 state."""

_OUTS = {
    Pass.SPECULATE: HALVES_AND_FLOAT32,
    Pass.COMMIT_AND_SPECULATE: HALVES_AND_FLOAT32,
    Pass.UPDATE: (Dtype.NONE, *HALVES_AND_FLOAT32),
}


def variants(which: Pass) -> list[tuple[Dtype, Dtype]]:
    """Return every pair of gradient and out dtype that a pass takes."""
    outs = _OUTS.get(which, (Dtype.NONE,))
    double = (Dtype.FLOAT64, Dtype.NONE if Dtype.NONE in outs else Dtype.FLOAT64)
    pairs = [(gradient, out) for gradient in HALVES_AND_FLOAT32 for out in outs] + [double]
    return [*pairs, (Dtype.FLOAT64, Dtype.FLOAT64)] if which is Pass.UPDATE else pairs


def narrow(values: Array, dtype: Dtype) -> Array:
    """Return fp32 or fp64 values rounded to `dtype`, as they are stored."""
    if dtype is Dtype.BFLOAT16:
        return formula.narrow_bfloat16(values)
    return formula.narrow_float16(values) if dtype is Dtype.FLOAT16 else values


def widen(stored: Array, dtype: Dtype) -> Array:
    """Return stored values as fp32, or fp64 as they are."""
    if dtype is Dtype.BFLOAT16:
        return formula.widen_bfloat16(stored)
    return formula.widen_float16(stored) if dtype is Dtype.FLOAT16 else stored


def differing(actual: Array, expected: Array) -> int:
    """Return how many elements differ in any bit; NaN equals NaN whatever its payload, +0 and -0 differ."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    unsigned = np.dtype(f"u{actual.dtype.itemsize}")
    same = actual.view(unsigned) == expected.view(unsigned)
    if actual.dtype.kind == "f":
        same |= np.isnan(actual) & np.isnan(expected)
    return int(np.count_nonzero(~same))


def differing_stored(actual: Array, expected: Array, dtype: Dtype) -> int:
    return differing(widen(actual, dtype), widen(expected, dtype))


class Placed:
    """An array that begins `offset` bytes after a multiple of 64, between canary bytes."""

    MARGIN = 128

    def __init__(self, values: Array, offset: int = 0) -> None:
        memory = np.full(values.nbytes + offset + 2 * self.MARGIN + 64, 0xA5, dtype=np.uint8)
        self._buffer = memory[-memory.ctypes.data % 64 :]
        self._inside = slice(self.MARGIN + offset, self.MARGIN + offset + values.nbytes)
        self.address = self._buffer.ctypes.data + self._inside.start
        self.view = self._buffer[self._inside].view(values.dtype)
        self.view[:] = values
        self._before = self._buffer.copy()

    def _now(self) -> Array:
        return self._buffer

    def outside_is_unchanged(self) -> bool:
        changed = self._now() != self._before
        changed[self._inside] = False
        return not changed.any()

    def is_unchanged(self) -> bool:
        return np.array_equal(self._now(), self._before)

    def reset(self) -> None:
        self._buffer[:] = self._before


@dataclass
class Segment:
    """One row of the table with the arrays that it points to; arrays that are absent are null."""

    gradient_dtype: Dtype
    out_dtype: Dtype
    length: int
    arrays: dict[str, Placed]
    coefficients: int = 0
    accepted_coefficients: int = 0
    uncertain: int = 0
    format: Format = Format.PLAIN
    first_threshold: int = 0

    def row(self) -> tuple[int, ...]:
        return tuple(
            self.arrays[name].address if name in self.arrays else getattr(self, name, 0)
            for name in native.SEGMENT.names or ()
        )

    def expected(self, which: Pass, sets: Sequence[Coefficients]) -> dict[str, Array]:
        """Return what the oracle says the arrays that `which` writes hold afterwards."""
        # Contiguous aligned copies: numpy must not depend on where the kernel's arrays lie.
        now = {name: placed.view.copy() for name, placed in self.arrays.items()}
        result: dict[str, Array] = {}
        gradient = widen(now["gradient"], self.gradient_dtype)
        if "sums" in now:
            result = {"sums": formula.chunk_sums(gradient), "nonfinite": formula.chunk_nonfinite(gradient)}
        if which is Pass.NORM:
            return result

        state = compact.decode(now, self.format)
        if which is Pass.COMMIT_AND_SPECULATE:
            older = widen(now["accepted_gradient"], self.gradient_dtype)
            stored = self._stepped(sets[self.accepted_coefficients], older, state)
            result |= stored
            state |= compact.decode(stored, self.format)
        stored = self._stepped(sets[self.coefficients], gradient, state)
        if which in (Pass.COMMIT, Pass.UPDATE):
            result |= stored
        if which is not Pass.COMMIT and self.out_dtype is not Dtype.NONE:
            result["out"] = narrow(compact.decode(stored, self.format)["master"], self.out_dtype)
        return result

    def _stepped(self, k: Coefficients, g: Array, state: dict[str, Array]) -> dict[str, Array]:
        """Return the arrays that store what one step makes of fp32 or fp64 state."""
        vmax = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        stepped = formula.adam_formula(k, g, state["exp_avg"], state["exp_avg_sq"], vmax, state["master"])
        kept = len(STATE) if Flag.AMSGRAD in k.flags else len(STATE) - 1
        return compact.encode(dict(zip(STATE[:kept], stepped, strict=False)), k.turn, self.format, self.first_threshold)

    def check(self, expected: Mapping[str, Array], where: str = "") -> None:
        """Assert that the arrays hold `expected`, and that not one other byte has changed."""
        actual = {name: placed.view.copy() for name, placed in self.arrays.items()}
        for name, placed in self.arrays.items():
            assert placed.outside_is_unchanged(), f"bytes around {name} were changed{where}"
            assert name in expected or placed.is_unchanged(), f"{name} was changed{where}"
        self.compare(actual, {**actual, **expected}, where)

    def compare(self, actual: Mapping[str, Array], wanted: Mapping[str, Array], where: str = "") -> None:
        """Assert that two sets of this segment's arrays are equal; state as values, because a NaN has any payload."""
        if "master" in wanted and self.format:
            actual, wanted = ({**one, **compact.decode(one, self.format)} for one in (actual, wanted))
        for name in wanted.keys() - {"master_low"}:
            dtype = {"out": self.out_dtype, "gradient": self.gradient_dtype}.get(name, Dtype.FLOAT32)
            count = differing_stored(actual[name], wanted[name], dtype)
            assert count == 0, f"{count} of {self.length} elements of {name} differ{where}"


def coefficient_table(sets: Sequence[Coefficients]) -> npt.NDArray[np.void]:
    return np.array([k.row() for k in sets], dtype=native.COEFFICIENTS)


@dataclass
class Job:
    which: Pass
    segments: list[Segment]
    sets: list[Coefficients] = field(default_factory=list)

    def add(self, segment: Segment, chosen: Sequence[Coefficients]) -> None:
        """Append a segment; the coefficients of its gradient and of the accepted one count if the pass has steps."""
        self.segments.append(segment)
        if self.which in READS_STATE:
            if Format.MOMENTS_8BIT in segment.format:
                chosen = [replace(k, flags=k.flags & ~Flag.AMSGRAD) for k in chosen]
            segment.coefficients, segment.accepted_coefficients = len(self.sets), len(self.sets) + 1
            self.sets.extend(chosen)
            if not any(Flag.AMSGRAD in k.flags for k in chosen):
                segment.arrays.pop("max_exp_avg_sq", None)

    def expected(self) -> list[dict[str, Array]]:
        return [segment.expected(self.which, self.sets) for segment in self.segments]

    def table(self) -> npt.NDArray[np.void]:
        return np.array([segment.row() for segment in self.segments], dtype=native.SEGMENT)

    def run(self, isa: str, threads: int = 1) -> None:
        native.run(self.which, self.table(), coefficient_table(self.sets), isa=isa, threads=threads)

    def check(self, expected: Sequence[Mapping[str, Array]], where: str = "") -> None:
        for segment, wanted in zip(self.segments, expected, strict=True):
            segment.check(wanted, where)

    def reset(self) -> None:
        for segment in self.segments:
            for placed in segment.arrays.values():
                placed.reset()

    def check_everywhere(self, threads: int = 1) -> None:
        expected = self.expected()
        for isa in native.available_isas():
            self.reset()
            self.run(isa, threads)
            self.check(expected, f" with {isa}")


def make_segment(
    seed: int,
    length: int,
    gradient_dtype: Dtype,
    out_dtype: Dtype = Dtype.NONE,
    *,
    kinds: Sequence[Magnitudes] = (Magnitudes.ORDINARY,),  # of the arrays, in turn
    offsets: Sequence[int] = (0,),  # in turn, bytes past a multiple of 64 where they begin
    norm: bool = False,  # with `sums` and `nonfinite`
    sprinkle: bool = False,  # put an Inf or NaN into a few elements of the gradients
    form: Format = Format.PLAIN,
) -> Segment:
    """Return a segment with every array, filled from `seed`.

    With 8-bit moments it is cut to whole blocks, and has no max_exp_avg_sq. Gradients of fp64 make the state fp64, too.
    """
    rng = np.random.default_rng(seed)
    length -= length % compact.BLOCK if Format.MOMENTS_8BIT in form else 0
    real = np.float64 if gradient_dtype is Dtype.FLOAT64 else np.float32
    values: dict[str, Array] = {}
    for index, name in enumerate(("gradient", "accepted_gradient", *STATE)):
        array = random_array(rng, length, kinds[index % len(kinds)], real)
        if name in ("exp_avg_sq", "max_exp_avg_sq") and Magnitudes.BITS not in kinds:
            array = np.abs(array)
        if "gradient" in name:
            if sprinkle and length:
                array[rng.integers(0, length, 3)] = rng.choice([np.inf, -np.inf, np.nan], 3)
            array = narrow(array, gradient_dtype)
        values[name] = array
    if form:
        if Format.MOMENTS_8BIT in form:
            del values["max_exp_avg_sq"]
        state = {name: values.pop(name) for name in STATE if name in values}
        values |= compact.encode(state, int(rng.integers(2**32)), form)
    if out_dtype is not Dtype.NONE:
        values["out"] = np.zeros(length, STORAGE[out_dtype])
    arrays = {name: Placed(array, offsets[i % len(offsets)]) for i, (name, array) in enumerate(values.items())}
    if norm:  # double and int64 entries, which C aligns
        arrays["sums"] = Placed(np.full(native.chunk_count(length), -1.0))
        arrays["nonfinite"] = Placed(np.full(native.chunk_count(length), -1, np.int64))
    first = int(rng.integers(64)) if form and rng.integers(2) else 0
    return Segment(gradient_dtype, out_dtype, length, arrays, format=form, first_threshold=first)


@st.composite
def jobs(draw: st.DrawFn, which: Pass, forms: Sequence[Format] = FORMATS) -> Job:
    """Jobs of one to three segments of any length, dtype and alignment, each with coefficient sets of its own."""
    job = Job(which, [])
    for _ in range(draw(st.integers(1, 3))):
        gradient_dtype, out_dtype = draw(st.sampled_from(variants(which)))
        double = gradient_dtype is Dtype.FLOAT64
        form = Format.PLAIN if double else draw(st.sampled_from(forms))
        length = draw(lengths())
        segment = make_segment(
            draw(st.integers(0, 2**32 - 1)),
            length,
            gradient_dtype,
            out_dtype,
            kinds=draw(st.lists(st.sampled_from(Magnitudes), min_size=1, max_size=6)),
            offsets=draw(st.lists(st.one_of(st.just(0), st.integers(0, 63)), min_size=1, max_size=7)),
            norm=which is Pass.NORM or draw(st.booleans()),
            sprinkle=draw(st.booleans()),
            form=form,
        )
        job.add(segment, [draw(coefficients(double=double)) for _ in range(2)])
    return job
