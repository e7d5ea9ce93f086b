"""Adam for tensors whose state is kept on the GPU: the passes of `cpu/adam_loop.h`, with the same bits.

`adam_formula` is the formula, once for all passes; the same function stands in `cpu/adam_formula.h` and in
`superadam/formula.py`. Everything is launched with `enable_fp_fusion=False`, and divisions and roots are the correctly
rounded ones, so that every operation rounds once and denormals are kept. Without Triton there is no other form of it.

One launch serves all segments that take the same branches of the formula and have the same dtypes. A program takes
1024 elements of one segment; the kernel moves every element once and should be bound by memory; it has not been
measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from superadam.hyperparameters import Coefficients
from superadam.native import Dtype, Flag, Pass

from .casts import FLOAT64, VECTOR_BYTES, narrow, pointer, widen
from .choice import Backend, backend
from .language import constant, jit, on, tl
from .segments import READS, ROWS, Segment, Variant, checked_segment
from .tables import Table, entry, find_tensor, upload

BLOCK = 1024
"""Elements that one program takes, of one segment."""

OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""How the kernel is compiled. A thread has four elements, so that halves and floats are laid out alike over threads."""

SCALE, MAXIMIZE, DECOUPLED, L2, AMSGRAD = (
    constant(int(flag)) for flag in (Flag.SCALE, Flag.MAXIMIZE, Flag.DECOUPLED, Flag.L2, Flag.AMSGRAD)
)
SPECULATE, COMMIT, COMMIT_AND_SPECULATE, UPDATE, ROUND = (
    constant(int(which)) for which in (Pass.SPECULATE, Pass.COMMIT, Pass.COMMIT_AND_SPECULATE, Pass.UPDATE, Pass.ROUND)
)
NONE = constant(int(Dtype.NONE))


@jit()
def sqrt(x):
    """Return the correctly rounded square root."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@jit()
def div(x, y):
    """Return the correctly rounded quotient."""
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@jit()
def adam_formula(k, g, m, v, vmax, p, FLAGS: tl.constexpr):
    """Return the new (p, m, v, vmax) after one step with the gradient `g`, all float32 or all float64.

    Kingma & Ba, "Adam", arXiv 1412.6980, Algorithm 1; AMSGrad: Reddi et al., arXiv 1904.09237; decoupled decay:
    Loshchilov & Hutter, arXiv 1711.05101; the order of operations is that of torch.optim's fused CPU kernel.
    """
    s, decay, wd, w, b2, c2, nss, bc2s, eps = k
    if SCALE & FLAGS:
        g = g * s
    if MAXIMIZE & FLAGS:
        g = g * -1.0  # some versions of Triton make 0 - g of -g, which loses the sign of zero
    if DECOUPLED & FLAGS:
        p = p * decay
    if L2 & FLAGS:
        g = tl.fma(p, wd, g)

    difference = g - m
    m = tl.where(w < 0.5, tl.fma(w, difference, m), tl.fma(w - 1.0, difference, g))
    v = tl.fma(c2 * g, g, v * b2)

    second = v
    if AMSGRAD & FLAGS:
        vmax = tl.where((vmax < v) | (v != v), v, vmax)
        second = vmax
    d = div(sqrt(second), bc2s) + eps
    return p + div(nss * m, d), m, v, vmax


@jit()
def scalar(sets, index, FIELD: tl.constexpr, REAL: tl.constexpr):
    """Return one scalar of coefficient set `index`; sets are rows of float64 that hold values of the type REAL."""
    value = tl.load(sets + index * 9 + FIELD)
    if REAL == FLOAT64:
        return value
    else:
        return value.to(tl.float32)


@jit()
def scalars(sets, index, REAL: tl.constexpr):
    """Return coefficient set `index`, in the order of `Coefficients.row`."""
    return (
        scalar(sets, index, 0, REAL),
        scalar(sets, index, 1, REAL),
        scalar(sets, index, 2, REAL),
        scalar(sets, index, 3, REAL),
        scalar(sets, index, 4, REAL),
        scalar(sets, index, 5, REAL),
        scalar(sets, index, 6, REAL),
        scalar(sets, index, 7, REAL),
        scalar(sets, index, 8, REAL),
    )


@jit()
def elements(table, tensors, ROW: tl.constexpr, tensor, begin, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return a pointer to element `begin` of one of a segment's arrays."""
    return pointer(entry(table, tensors, ROW, tensor), DTYPE, IS_ALIGNED) + begin


@jit()
def run_block(
    table,
    tensors,
    tensor,
    begin,
    rest,
    sets,
    IS_PARTIAL: tl.constexpr,
    PASS: tl.constexpr,
    REAL: tl.constexpr,
    GRADIENT: tl.constexpr,
    OUT: tl.constexpr,
    FLAGS: tl.constexpr,
    ACCEPTED_FLAGS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run a pass over BLOCK elements of a segment, or over the `rest` of it."""
    index = tl.arange(0, BLOCK)
    mask = index < rest if IS_PARTIAL else None
    at_p = elements(table, tensors, 2, tensor, begin, REAL, IS_ALIGNED) + index
    at_m = elements(table, tensors, 3, tensor, begin, REAL, IS_ALIGNED) + index
    at_v = elements(table, tensors, 4, tensor, begin, REAL, IS_ALIGNED) + index
    at_vmax = elements(table, tensors, 5, tensor, begin, REAL, IS_ALIGNED) + index

    p = tl.load(at_p, mask)
    if PASS != ROUND:
        m = tl.load(at_m, mask)
        v = tl.load(at_v, mask)
        vmax = v
        if AMSGRAD & (FLAGS | ACCEPTED_FLAGS):
            vmax = tl.load(at_vmax, mask)
        g = tl.load(elements(table, tensors, 6, tensor, begin, GRADIENT, IS_ALIGNED) + index, mask)
        current = scalars(sets, entry(table, tensors, 9, tensor), REAL)
        if PASS == COMMIT_AND_SPECULATE:
            older = tl.load(elements(table, tensors, 7, tensor, begin, GRADIENT, IS_ALIGNED) + index, mask)
            accepted = scalars(sets, entry(table, tensors, 10, tensor), REAL)
            p, m, v, vmax = adam_formula(accepted, widen(older, GRADIENT), m, v, vmax, p, ACCEPTED_FLAGS)
            tl.store(at_p, p, mask)
            tl.store(at_m, m, mask)
            tl.store(at_v, v, mask)
            if AMSGRAD & ACCEPTED_FLAGS:
                tl.store(at_vmax, vmax, mask)
        p, m, v, vmax = adam_formula(current, widen(g, GRADIENT), m, v, vmax, p, FLAGS)
        if PASS == COMMIT or PASS == UPDATE:
            tl.store(at_p, p, mask)
            tl.store(at_m, m, mask)
            tl.store(at_v, v, mask)
            if AMSGRAD & FLAGS:
                tl.store(at_vmax, vmax, mask)
    if OUT != NONE:
        tl.store(elements(table, tensors, 8, tensor, begin, OUT, IS_ALIGNED) + index, narrow(p, OUT), mask)


@jit(fixed=("tensors", "steps"))
def adam_kernel(
    table,
    tensors,
    steps,
    sets,
    PASS: tl.constexpr,
    REAL: tl.constexpr,
    GRADIENT: tl.constexpr,
    OUT: tl.constexpr,
    FLAGS: tl.constexpr,
    ACCEPTED_FLAGS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run a pass over one block.

    Rows of the table beside first block and length: addresses of master, exp_avg, exp_avg_sq, max_exp_avg_sq,
    gradient, accepted gradient and out; the indices of the coefficient set and the accepted one.
    """
    number = tl.program_id(0).to(tl.int64)
    tensor = find_tensor(table, tensors, steps, number)
    begin = (number - entry(table, tensors, 0, tensor)) * BLOCK
    rest = entry(table, tensors, 1, tensor) - begin
    # Without masks loads can be as wide as the addresses allow. The branches differ in nothing else.
    if rest >= BLOCK:
        run_block(
            table, tensors, tensor, begin, rest, sets, False,
            PASS, REAL, GRADIENT, OUT, FLAGS, ACCEPTED_FLAGS, IS_ALIGNED, BLOCK,
        )  # fmt: skip
    else:
        run_block(
            table, tensors, tensor, begin, rest, sets, True,
            PASS, REAL, GRADIENT, OUT, FLAGS, ACCEPTED_FLAGS, IS_ALIGNED, BLOCK,
        )  # fmt: skip


def run(which: Pass, segments: Sequence[Segment], sets: Sequence[Coefficients] = ()) -> None:
    """Run one pass over the state of many tensors on one GPU.

    Enqueued to the current stream. SPECULATE writes only `out`; COMMIT and UPDATE write the state, and UPDATE `out`
    where there is one; COMMIT_AND_SPECULATE commits the accepted gradient and speculates with the other; ROUND writes
    `out` from the master.

    Args:
        which: SPECULATE, COMMIT, COMMIT_AND_SPECULATE, UPDATE or ROUND.
        segments: the tensors; none may overlap another.
        sets: the scalars that segments index, computed in double precision for float64 segments.

    Raises:
        ValueError: a tensor is missing, not dense, of another length or out of reach, or an index lies outside `sets`;
            nothing was written.
        TypeError: a tensor has a dtype that does not fit; nothing was written.
        RuntimeError: Triton cannot be used on the device; nothing was written.
    """
    if which not in READS:
        names = ", ".join(one.name for one in READS)
        raise ValueError(f"superadam.gpu has no pass {which!r}; expected one of {names}")
    if not segments:
        return
    device = segments[0].master.device
    groups: dict[Variant, list[tuple[int, list[int]]]] = {}
    for position, segment in enumerate(segments):
        variant, row = checked_segment(which, segment, f"segment {position}", sets, device)
        groups.setdefault(variant, []).append((segment.master.numel(), row))
    choice = backend(device)
    if choice.backend is Backend.TORCH:
        raise RuntimeError(
            f"superadam.gpu.run needs Triton, as plain torch has no exact form of the formula, but {choice.reason}; "
            "mend that, or keep this state on the CPU"
        )

    with on(device):
        table_of_sets = upload(np.array([k.row()[:9] for k in sets], np.float64).reshape(-1), device)
        for variant, members in groups.items():
            rows = np.array([row for _, row in members], np.int64).T
            table = Table.of(np.array([length for length, _ in members], np.int64), list(rows), BLOCK, device)
            if table.blocks == 0:
                continue
            adam_kernel[(table.blocks,)](
                table.entries,
                table.tensors,
                table.steps,
                table_of_sets,
                PASS=int(which),
                REAL=int(variant.real),
                GRADIENT=int(variant.gradient),
                OUT=int(variant.out),
                FLAGS=int(variant.flags),
                ACCEPTED_FLAGS=int(variant.accepted_flags),
                IS_ALIGNED=not np.any(rows[: len(ROWS)] % VECTOR_BYTES),
                BLOCK=BLOCK,
                **OPTIONS,
            )
