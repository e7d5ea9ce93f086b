"""The compiled kernels as Python functions over numpy tables of pointers; chooses instruction set and threads.

The only module that imports the C extension. It knows nothing of PyTorch, and never prints or aborts.
"""

from __future__ import annotations

import enum
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from superadam._kernels import ffi, lib
except ModuleNotFoundError:
    folder = Path(__file__).resolve().parents[2]
    if not (folder / "CMakeLists.txt").exists():
        raise
    raise ImportError(
        f"superadam was imported from its sources in {folder}, which lack the compiled kernels: start Python in "
        "another folder or with PYTHONSAFEPATH=1 to import what is installed, or install the sources in editable mode",
        name="superadam._kernels",
        path=__file__,
    ) from None
from superadam.host import cores
from superadam.host.machine import Host

CHUNK: int = lib.SUPERADAM_CHUNK  # consecutive elements whose squares are summed together
BLOCK: int = lib.SUPERADAM_BLOCK  # elements of 8-bit moments that share an exponent
SAMPLE_WIDTH: int = lib.SUPERADAM_SAMPLE_WIDTH  # adjacent elements that are compared with the master
SAMPLE_BLOCKS: int = lib.SUPERADAM_SAMPLE_BLOCKS  # the most such blocks of one parameter


class Dtype(enum.IntEnum):
    """Element types that the kernels read and write."""

    NONE = lib.SUPERADAM_NONE
    FLOAT32 = lib.SUPERADAM_FLOAT32
    BFLOAT16 = lib.SUPERADAM_BFLOAT16
    FLOAT16 = lib.SUPERADAM_FLOAT16
    FLOAT64 = lib.SUPERADAM_FLOAT64


class Format(enum.IntFlag):
    """How the state of a segment is stored; `cpu/cdef.h` says what each is."""

    PLAIN = 0  # fp32, or fp64 with fp64 gradients
    MOMENTS_BFLOAT16 = lib.SUPERADAM_MOMENTS_BFLOAT16
    MOMENTS_8BIT = lib.SUPERADAM_MOMENTS_8BIT
    MASTER_24BIT = lib.SUPERADAM_MASTER_24BIT
    LISTED_24BIT = lib.SUPERADAM_LISTED_24BIT


class Pass(enum.IntEnum):
    """Passes over the segments; `cpu/cdef.h` says what each reads and writes."""

    NORM = lib.SUPERADAM_NORM
    SPECULATE = lib.SUPERADAM_SPECULATE
    COMMIT = lib.SUPERADAM_COMMIT
    COMMIT_AND_SPECULATE = lib.SUPERADAM_COMMIT_AND_SPECULATE
    UPDATE = lib.SUPERADAM_UPDATE


class Flag(enum.IntFlag):
    """Parts of the formula that a coefficient set switches on."""

    SCALE = lib.SUPERADAM_SCALE
    MAXIMIZE = lib.SUPERADAM_MAXIMIZE
    DECOUPLED = lib.SUPERADAM_DECOUPLED
    L2 = lib.SUPERADAM_L2
    AMSGRAD = lib.SUPERADAM_AMSGRAD
    ROUND = lib.SUPERADAM_ROUND


def _table_dtype(struct: str) -> np.dtype[np.void]:
    """Return the numpy record type of a C struct in `cpu/cdef.h`; pointers become addresses."""
    formats = {"int32_t": "i4", "int64_t": "i8", "double": "f8"}
    names, fields = zip(*ffi.typeof(struct).fields, strict=True)
    return np.dtype(
        {
            "names": names,
            "formats": ["u8" if field.type.kind == "pointer" else formats[field.type.cname] for field in fields],
            "offsets": [field.offset for field in fields],
            "itemsize": ffi.sizeof(struct),
        }
    )


SEGMENT = _table_dtype("superadam_segment")
"""One run of elements; a table of them is a job."""

UNCERTAIN = _table_dtype("superadam_uncertain")
"""A list of elements; `uncertain` of a segment is its address."""

COEFFICIENTS = _table_dtype("superadam_coefficients")
"""The scalars of one step."""

_NO_COEFFICIENTS = np.zeros(0, COEFFICIENTS)

_ERRORS = {
    lib.SUPERADAM_BAD_ISA: "the instruction set cannot run on this machine; choose one of superadam.available_isas()",
    lib.SUPERADAM_BAD_PASS: "there is no such pass; use a member of superadam.kernels.native.Pass",
    lib.SUPERADAM_BAD_DTYPE: "a segment has dtypes that this pass does not take; gradients may be float32, bfloat16 or "
    "float16 with float32 state, or everything float64",
    lib.SUPERADAM_BAD_LENGTH: "a segment has a negative length, or 8-bit moments of part of a block; lengths count "
    "elements from 0",
    lib.SUPERADAM_BAD_POINTER: "a segment lacks an array that this pass uses; see superadam_segment in cpu/cdef.h",
    lib.SUPERADAM_BAD_FORMAT: "a segment stores its state in a format that this pass does not take; see "
    "SUPERADAM_MOMENTS_8BIT and the other formats in cpu/cdef.h",
    lib.SUPERADAM_BAD_COEFFICIENTS: "a segment names a coefficient set outside the table; give every index an entry",
}

_isa_rows: dict[str, int] = {
    ffi.string(lib.superadam_isa_name(i)).decode(): i for i in range(lib.superadam_isa_count())
}
_logger = logging.getLogger("superadam")
_active: str | None = None
_num_threads: int | None = None


def known_isas() -> dict[str, str]:
    """Return this architecture's instruction sets, best first: "runnable", "not compiled" or "not supported" each."""
    words = {
        lib.SUPERADAM_RUNNABLE: "runnable",
        lib.SUPERADAM_NOT_COMPILED: "not compiled",
        lib.SUPERADAM_NOT_SUPPORTED: "not supported",
    }
    return {name: words[lib.superadam_isa_status(row)] for name, row in _isa_rows.items()}


def available_isas() -> list[str]:
    """Return the instruction sets whose kernels this machine can run, best first; the last one is always "scalar"."""
    return [name for name, status in known_isas().items() if status == "runnable"]


def active_isa() -> str:
    """Return the instruction set in use: `SUPERADAM_ISA` if that is set at the first call, else the best runnable one.

    Logs one warning when that leaves only the scalar kernels and `SUPERADAM_ISA` does not request them.

    Raises:
        ValueError: `SUPERADAM_ISA` names an instruction set that is unknown or cannot run here.
    """
    global _active
    if _active is None:
        forced, available = os.environ.get("SUPERADAM_ISA"), available_isas()
        if forced and forced not in available:
            reason = known_isas().get(forced, "not an instruction set of this architecture")
            raise ValueError(f"SUPERADAM_ISA {forced!r} is {reason}; available here: {', '.join(available)}")
        _active = forced or available[0]
        if _active == "scalar" and not forced:
            missing = ", ".join(f"{name} is {status}" for name, status in known_isas().items() if status != "runnable")
            _logger.warning(
                "superadam runs its scalar kernels, which give the same bits but take several times longer: %s; "
                "set SUPERADAM_ISA=scalar to accept this silently",
                missing or "no vector kernels exist for this architecture",
            )
    return _active


def get_num_threads() -> int:
    """Return how many threads a job may use: `SUPERADAM_THREADS`, else one for each CPU of this process.

    Ranks on one node divide its CPUs; how many there are was told by the launcher, as in `LOCAL_WORLD_SIZE`.

    Raises:
        ValueError: `SUPERADAM_THREADS` is not a positive integer, or `LOCAL_RANK` is not one of `LOCAL_WORLD_SIZE`.
    """
    global _num_threads
    if _num_threads is None:
        _num_threads = requested_threads() or len(cores.share(Host()))
    return _num_threads


def requested_threads() -> int | None:
    """Return what `SUPERADAM_THREADS` asks for, None if it is not set; raises ValueError for no positive integer."""
    text = os.environ.get("SUPERADAM_THREADS")
    if text is not None and not (text.isdecimal() and len(text) < 10 and int(text) > 0):
        raise ValueError(
            f"SUPERADAM_THREADS is {text!r}; expected a positive integer of at most 9 digits; unset it for one thread "
            "per CPU"
        )
    return int(text) if text else None


def set_num_threads(count: int) -> None:
    """Let a job use at most `count` threads, the caller's included; results do not change, only speed.

    Raises:
        ValueError: `count` is not a positive integer.
    """
    global _num_threads
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < 10**9:
        raise ValueError(f"the number of threads is {count!r}; expected an integer of at least 1, and at most 9 digits")
    _num_threads = count


def chunk_count(length: int) -> int:
    """Return the number of chunks of `length` elements."""
    return -(-length // CHUNK)


def run(
    which: Pass,
    segments: npt.NDArray[Any],
    coefficients: npt.NDArray[Any] = _NO_COEFFICIENTS,
    *,
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    """Run one pass over a table of segments as one parallel job, with the GIL released.

    The arrays that the table points to must stay alive and be large enough; this cannot be checked here.

    Args:
        which: the pass.
        segments: 1-D C-contiguous array of `SEGMENT`.
        coefficients: 1-D C-contiguous array of `COEFFICIENTS` that the segments index.
        isa: instruction set; default `active_isa()`.
        threads: the most threads; default `get_num_threads()`.

    Raises:
        ValueError: the table does not fit the pass; nothing was read or written.
    """
    if segments.dtype != SEGMENT or coefficients.dtype != COEFFICIENTS:
        raise ValueError("superadam.kernels.native.run takes tables of dtype SEGMENT and COEFFICIENTS")
    code = lib.superadam_run(
        _isa_rows.get(isa or _active or active_isa(), -1),
        int(which),
        ffi.from_buffer("superadam_segment[]", segments),
        len(segments),
        ffi.from_buffer("superadam_coefficients[]", coefficients),
        len(coefficients),
        threads or get_num_threads(),
    )
    if code != lib.SUPERADAM_OK:
        raise ValueError(f"superadam: {_ERRORS[code]}")


def step(
    segments: npt.NDArray[Any],
    coefficients: npt.NDArray[Any],
    sums: npt.NDArray[np.float64],
    nonfinite: npt.NDArray[np.int64],
    max_norm: float,
) -> Any:
    """Take the norm of all gradients, and unless an element is Inf or NaN, clip and update: as `run`, in one call.

    Args:
        segments: as for `run`; the pointers to `sums` and `nonfinite` are overwritten.
        coefficients: as for `run`, without a scale, which is overwritten.
        sums, nonfinite: 1-D C-contiguous arrays with the entries that the segments point to; all others are 0.
        max_norm: limit of the norm, at least 0; inf for none.

    Returns:
        The `superadam_verdict` of `cpu/cdef.h`, with its fields as attributes.

    Raises:
        ValueError: the table does not fit a pass; nothing was changed but `sums` and `nonfinite`.
    """
    if segments.dtype != SEGMENT or coefficients.dtype != COEFFICIENTS:
        raise ValueError("superadam.kernels.native.step takes tables of dtype SEGMENT and COEFFICIENTS")
    verdict = ffi.new("superadam_verdict *")
    code = lib.superadam_step(
        _isa_rows[_active or active_isa()],
        ffi.from_buffer("superadam_segment[]", segments),
        len(segments),
        ffi.from_buffer("superadam_coefficients[]", coefficients),
        len(coefficients),
        ffi.from_buffer("double[]", sums),
        ffi.from_buffer("int64_t[]", nonfinite),
        len(sums),
        max_norm,
        get_num_threads(),
        verdict,
    )
    if code != lib.SUPERADAM_OK:
        raise ValueError(f"superadam: {_ERRORS[code]}")
    return verdict


def move_like(
    which: Pass,
    segments: npt.NDArray[Any],
    *,
    burst: int,
    prefetch: int,
    stream_out: bool,
    stream_state: bool,
    threads: int | None = None,
) -> int:
    """Move what `which` moves, without its arithmetic; `out` is filled with ones, and state keeps its bits.

    `segments` has one entry, of a multiple of `CHUNK` elements in arrays aligned to 64 bytes; the other arguments are
    those of `superadam.cli.bench.floor.Variant`. Returns the sum modulo 2^32 of all 32-bit words that were only read.
    Raises ValueError if the segment does not fit the pass; nothing was read or written.
    """
    if segments.dtype != SEGMENT or segments.shape != (1,):
        raise ValueError("superadam.kernels.native.move_like takes a table of dtype SEGMENT with exactly one entry")
    checksum = ffi.new("uint32_t *")
    code = lib.superadam_traffic(
        int(which),
        ffi.from_buffer("superadam_segment[]", segments),
        threads or get_num_threads(),
        burst,
        prefetch,
        stream_out * lib.SUPERADAM_STREAM_OUT | stream_state * lib.SUPERADAM_STREAM_STATE,
        checksum,
    )
    if code == lib.SUPERADAM_BAD_LENGTH:
        raise ValueError(
            f"superadam: move_like takes a length that is a multiple of {CHUNK} and a burst that divides {CHUNK}"
        )
    if code == lib.SUPERADAM_BAD_POINTER:
        raise ValueError("superadam: move_like needs every array of the pass, aligned to 64 bytes")
    if code != lib.SUPERADAM_OK:
        raise ValueError(f"superadam: {_ERRORS[code]}")
    return int(checksum[0])


def differing(
    segments: npt.NDArray[Any], rows: npt.NDArray[np.int64], *, everything: bool = False
) -> npt.NDArray[np.int64]:
    """Return those of `rows` whose working copy, in host memory, is not the rounded master; see `cpu/cdef.h`.

    Args:
        segments: as for `run`, `out` is the working copy; rows without that or a master are passed over.
        rows: which to look at.
        everything: compare every element, not only samples.
    """
    found = np.empty(len(rows), np.int64)
    number = lib.superadam_differing(
        ffi.from_buffer("superadam_segment[]", segments),
        ffi.from_buffer("int64_t[]", rows),
        len(rows),
        everything,
        get_num_threads(),
        ffi.from_buffer("int64_t[]", found),
    )
    return found[:number]


def copy(targets: npt.NDArray[np.uint64], sources: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64]) -> None:
    """Copy this many bytes from each source address to its target address, with the GIL released.

    As for `run`, the memory must be there; targets overlap nothing.
    """
    lib.superadam_copy(
        ffi.from_buffer("void *[]", targets),
        ffi.from_buffer("void *[]", sources),
        ffi.from_buffer("int64_t[]", sizes),
        len(sizes),
        get_num_threads(),
    )


def is_float_mode_usual() -> bool:
    """Return whether arithmetic in the calling thread rounds to nearest and keeps denormals, as in the kernels.

    It does not after `torch.set_flush_denormal(True)`; threads may differ.
    """
    return bool(lib.superadam_float_control_is_usual())


class UsualFloatMode:
    """A context inside which that holds; to be entered and left by the same thread, with signals deferred."""

    __slots__ = ("_saved",)

    def __enter__(self) -> None:
        self._saved = lib.superadam_float_control_enter()

    def __exit__(self, *error: object) -> None:
        lib.superadam_float_control_leave(self._saved)


def keep_usual_float_mode() -> None:
    """Let the usual floating-point mode hold in the calling thread from now on, without traps."""
    lib.superadam_float_control_enter()


def ordered_sum(values: npt.NDArray[np.float64]) -> float:
    """Return `values[0] + values[1] + ...`, added in this order in fp64."""
    return float(lib.superadam_sum(ffi.from_buffer("double[]", np.ascontiguousarray(values)), len(values)))
