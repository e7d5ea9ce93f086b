"""Adam for parameters whose state is resident on the GPU: the UPDATE pass of `cpu/adam_loop.h`, with the same bits.

State may be stored in fewer bits, as in `cpu/compact.h`; each format has kernels of its own.

The formula is `adam_formula`, as in `cpu/adam_formula.h` and `tests/support/formula.py`. `AS_WRITTEN`
and correctly rounded divisions and roots make every operation round once and keep denormals; plain torch cannot.

One launch updates all parameters with the same dtypes and branches of the formula; a program takes 1024 elements of one
of them. Every element is moved once, so that the kernel should be bound by memory; it has not been measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from superadam.kernels.dtypes import DTYPES
from superadam.kernels.hyperparameters import Coefficients
from superadam.kernels.native import Dtype, Flag, Format
from superadam.kernels.resident_step import ResidentStep

from .casts import (
    BFLOAT16,
    BYTES,
    FLOAT64,
    STATE_BLOCK,
    VECTOR_BYTES,
    decode_8bit,
    encode_8bit,
    join_24bit,
    narrow,
    narrow_by_threshold,
    pointer,
    round_24bit,
    split_24bit,
    widen,
)
from .language import AS_WRITTEN, at_most_registers, constant, jit, on, tl, warp_size
from .tables import addresses_of, entry, find_tensor, make_table, upload

SCALARS = constant(10)
"""Numbers of a coefficient set: those of the formula, and the turn, an integer."""

BLOCK = 1024
"""Elements of one step that a program takes."""

THREADS = BLOCK // 4
"""Threads of a program. Each has four elements, so that halves and floats are laid out alike over threads."""

REGISTERS = 128
"""Of a thread, at most: no variant needs so many."""

SCALE, MAXIMIZE, DECOUPLED, L2, AMSGRAD, ROUND = (
    constant(int(flag)) for flag in (Flag.SCALE, Flag.MAXIMIZE, Flag.DECOUPLED, Flag.L2, Flag.AMSGRAD, Flag.ROUND)
)

MOMENTS_BFLOAT16, MOMENTS_8BIT, MASTER_24BIT = (
    constant(int(form)) for form in (Format.MOMENTS_BFLOAT16, Format.MOMENTS_8BIT, Format.MASTER_24BIT)
)

EXP_AVG_MANTISSA, EXP_AVG_SQ_MANTISSA = constant(3), constant(4)
"""Bits of fraction of 8-bit moments; those of the first one have a sign."""


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

    Sources and order of operations: see `cpu/adam_formula.h`.
    """
    s, decay, wd, w, b2, c2, nss, bc2s, eps = k
    if SCALE & FLAGS:
        g = g * s
        if ROUND & FLAGS and g.dtype == tl.float32:
            g = widen(narrow(g, BFLOAT16), BFLOAT16)
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
def scalars(sets, index, REAL: tl.constexpr):
    """Return coefficient set `index`, in the order of `Coefficients.row`; sets are rows of float64 that hold REAL."""
    found = ()
    for field in tl.static_range(SCALARS - 1):
        value = tl.load(sets + index * SCALARS + field)
        found += (value if REAL == FLOAT64 else value.to(tl.float32),)  # type: ignore[assignment]
    return found


@jit()
def elements(table, tensors, ROW: tl.constexpr, tensor, begin, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return a pointer to element `begin` of one of a step's arrays."""
    return pointer(entry(table, tensors, ROW, tensor), DTYPE, IS_ALIGNED) + begin


@jit()
def update_block(
    table,
    tensors,
    tensor,
    begin,
    rest,
    sets,
    IS_PARTIAL: tl.constexpr,
    REAL: tl.constexpr,
    FORMAT: tl.constexpr,
    GRADIENT: tl.constexpr,
    OUT: tl.constexpr,
    FLAGS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update BLOCK elements of a step's arrays, or the `rest` of them."""
    index = tl.arange(0, BLOCK)
    mask = index < rest if IS_PARTIAL else None
    master: tl.constexpr = BFLOAT16 if MASTER_24BIT & FORMAT else REAL
    moments: tl.constexpr = BFLOAT16 if MOMENTS_BFLOAT16 & FORMAT else BYTES if MOMENTS_8BIT & FORMAT else REAL
    at_p = elements(table, tensors, 2, tensor, begin, master, IS_ALIGNED) + index
    at_m = elements(table, tensors, 3, tensor, begin, moments, IS_ALIGNED) + index
    at_v = elements(table, tensors, 4, tensor, begin, moments, IS_ALIGNED) + index
    at_vmax = elements(table, tensors, 5, tensor, begin, moments, IS_ALIGNED) + index

    p = tl.load(at_p, mask)
    m = widen(tl.load(at_m, mask), moments)
    v = widen(tl.load(at_v, mask), moments)
    if MASTER_24BIT & FORMAT:
        at_low = elements(table, tensors, 8, tensor, begin, BYTES, IS_ALIGNED) + index
        p = join_24bit(p, tl.load(at_low, mask))
    if MOMENTS_8BIT & FORMAT:
        block = tl.arange(0, BLOCK // STATE_BLOCK)
        has_block = block < rest // STATE_BLOCK if IS_PARTIAL else None
        first = begin // STATE_BLOCK
        at_m_exponents = elements(table, tensors, 9, tensor, first, BYTES, IS_ALIGNED) + block
        at_v_exponents = elements(table, tensors, 10, tensor, first, BYTES, IS_ALIGNED) + block
        m = decode_8bit(m, tl.load(at_m_exponents, has_block), EXP_AVG_MANTISSA, True)
        v = decode_8bit(v, tl.load(at_v_exponents, has_block), EXP_AVG_SQ_MANTISSA, False)
    vmax = v
    if AMSGRAD & FLAGS:
        vmax = widen(tl.load(at_vmax, mask), moments)
    g = tl.load(elements(table, tensors, 6, tensor, begin, GRADIENT, IS_ALIGNED) + index, mask)
    number = entry(table, tensors, 11, tensor)
    k = scalars(sets, number, REAL)
    p, m, v, vmax = adam_formula(k, widen(g, GRADIENT), m, v, vmax, p, FLAGS)
    if FORMAT:
        turn = tl.load(sets + number * SCALARS + SCALARS - 1).to(tl.int64, bitcast=True).to(tl.uint32)
        position = index + entry(table, tensors, 12, tensor).to(tl.int32)  # more or less a multiple of 64
    if MASTER_24BIT & FORMAT:
        p = round_24bit(p, turn, position)  # the working copy follows what is stored
        high, low = split_24bit(p)
        tl.store(at_p, high, mask)
        tl.store(at_low, low, mask)
    else:
        tl.store(at_p, p, mask)
    if MOMENTS_BFLOAT16 & FORMAT:
        tl.store(at_m, narrow_by_threshold(m, turn, position), mask)
        tl.store(at_v, narrow_by_threshold(v, turn, position), mask)
    elif MOMENTS_8BIT & FORMAT:
        m, m_exponents = encode_8bit(m, turn, position, EXP_AVG_MANTISSA, True)
        v, v_exponents = encode_8bit(v, turn, position, EXP_AVG_SQ_MANTISSA, False)
        tl.store(at_m, m, mask)
        tl.store(at_v, v, mask)
        tl.store(at_m_exponents, m_exponents, has_block)
        tl.store(at_v_exponents, v_exponents, has_block)
    else:
        tl.store(at_m, m, mask)
        tl.store(at_v, v, mask)
    if AMSGRAD & FLAGS:
        tl.store(at_vmax, narrow(vmax, moments), mask)
    tl.store(elements(table, tensors, 7, tensor, begin, OUT, IS_ALIGNED) + index, narrow(p, OUT), mask)


@jit(fixed=("tensors", "steps"))
def adam_kernel(
    table,
    tensors,
    steps,
    sets,
    REAL: tl.constexpr,
    FORMAT: tl.constexpr,
    GRADIENT: tl.constexpr,
    OUT: tl.constexpr,
    FLAGS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block.

    Further rows of the table: addresses in the order of `_arrays_of`, the index of the coefficient set, and the first
    threshold.
    """
    number = tl.program_id(0).to(tl.int64)
    tensor = find_tensor(table, tensors, steps, number)
    begin = (number - entry(table, tensors, 0, tensor)) * BLOCK
    rest = entry(table, tensors, 1, tensor) - begin
    # Without masks loads can be as wide as the addresses allow. The branches differ in nothing else.
    if rest >= BLOCK:
        update_block(
            table, tensors, tensor, begin, rest, sets, False, REAL, FORMAT, GRADIENT, OUT, FLAGS, IS_ALIGNED, BLOCK
        )  # fmt: skip
    else:
        update_block(
            table, tensors, tensor, begin, rest, sets, True, REAL, FORMAT, GRADIENT, OUT, FLAGS, IS_ALIGNED, BLOCK
        )  # fmt: skip


def update(steps: Sequence[ResidentStep], sets: Sequence[Coefficients]) -> None:
    """Run the steps of many parameters on one GPU, on the current stream: write their state and their working copies.

    Needs Triton, as plain torch has no exact form of the formula. Steps with the same dtypes, formats and flags take
    one launch. Nothing is written if it raises.

    Args:
        steps: of distinct parameters; float32 state, perhaps in fewer bits, with gradients and parameters of float32,
            bfloat16 and float16, or everything float64; 8-bit moments are of whole blocks, without amsgrad.
        sets: the scalars that steps index, computed in double precision for float64 state.
    """
    if not steps:
        return
    device = steps[0].master.device
    alike: dict[tuple[Dtype, Format, Dtype, Dtype, Flag], list[ResidentStep]] = {}
    for step in steps:
        real = Dtype.FLOAT64 if step.master.dtype == torch.float64 else Dtype.FLOAT32
        form, flags = step.format, sets[step.coefficients].flags
        variant = (real, form, DTYPES[step.gradient.dtype], DTYPES[step.parameter.dtype], flags)
        alike.setdefault(variant, []).append(step)
    with on(device):
        table_of_sets = upload(_table_of(sets), device)
        launches = []
        for variant, some in alike.items():  # memory for all tables, before anything is written
            addresses = np.stack([addresses_of(arrays) for arrays in zip(*map(_arrays_of, some), strict=True)])
            numbers = [[step.coefficients for step in some], [step.first_threshold for step in some]]
            rows = np.concatenate([addresses, numbers])
            blocks, table = make_table([step.master for step in some], BLOCK, rows, device)
            launches.append((variant, blocks, table, not np.any(addresses % VECTOR_BYTES)))
        for (real, form, gradient, out, flags), blocks, table, is_aligned in launches:
            if blocks == 0:
                continue
            adam_kernel[(blocks,)](
                *table,
                table_of_sets,
                REAL=int(real),
                FORMAT=int(form),
                GRADIENT=int(gradient),
                OUT=int(out),
                FLAGS=int(flags),
                IS_ALIGNED=is_aligned,
                BLOCK=BLOCK,
                num_warps=THREADS // warp_size(),
                **at_most_registers(REGISTERS),
                **AS_WRITTEN,
            )


def _table_of(sets: Sequence[Coefficients]) -> npt.NDArray[np.float64]:
    """Return the numbers of coefficient sets, one after the other; turns as the bits of an integer."""
    table = np.array([(*k.row()[:9], 0.0) for k in sets], np.float64)
    table[:, 9].view(np.int64)[:] = [k.turn for k in sets]
    return table.reshape(-1)


def _arrays_of(step: ResidentStep) -> tuple[Tensor | None, ...]:
    """Return a step's tensors in the order of the table."""
    plain = (step.master, step.exp_avg, step.exp_avg_sq, step.max_exp_avg_sq, step.gradient, step.parameter)
    return (*plain, step.master_low, step.exp_avg_exponents, step.exp_avg_sq_exponents)
