/* The loop around the formula: load, formula, store, and the sums of squares, for one chunk of one segment. Included
 * once per instruction set, after its vec_*.h. `pass` and the dtypes are constants in every caller (variants.h), so
 * that inlining leaves one straight loop for each combination. */

/* clang-format off */
/* What an instruction set provides (isa/vec_*.h), all on `vec`, a vector of VEC_WIDTH elements of type `real`, where
 * VEC_WIDTH divides SUPERADAM_LANES and may be known only at run time. Loops over SUPERADAM_LANES elements are unrolled
 * VEC_UNROLL times.
 *
 *   vec_set, vec_add, vec_sub, vec_mul, vec_fma, vec_div, vec_sqrt, vec_neg
 *   vec_max(a, b)                                   b where it is larger or NaN, else a
 *   vec_round_bfloat16(a)                           rounded to the nearest bf16, ties to even; a itself in double
 *   vec_load(dtype, base, index, count)             elements index .. index + count - 1, widened; zeros above count
 *   vec_store(dtype, base, index, value, count, stream)    rounded to nearest even; not one byte above count
 *   vec_prefetch(dtype, base, index), vec_stream_fence()
 *   for interval.h, in fp32: vec_abs, vec_min(a, b): a where it is smaller, else b; vec_bits(a, kept, set): the number
 *   with these bits of a, and those set; vec_less(a, b), a vec_mask; vec_and_less(mask, a, b), of lanes of the mask;
 *   vec_lanes(mask), a number whose bit i is lane i
 *   VEC_DIVIDES: whether a pass takes less time with a vec_div than with two vec_fma, a vec_mul and a vec_min
 *   squares, squares_zero(sums), squares_add(sums, lane, value), squares_lanes(sums, double[16])
 *
 * `count` is at most VEC_WIDTH, and equals it everywhere but in a segment's tail. */
/* clang-format on */

#include "adam_formula.h"
#include "compact.h"
#include "interval.h"

/* Elements between the one that is computed and the one that is prefetched: 2 KiB of fp32. */
enum { PREFETCH_AHEAD = 512 };

/* Pairwise: lane i and i + 8, then i and i + 4, ... */
static double lanes_total(double *lanes)
{
    for (int width = SUPERADAM_LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    return lanes[0];
}

/* x - x is 0 for finite x and NaN otherwise. Called only for chunks whose sum is not finite. */
static int64_t count_nonfinite(int dtype, const void *gradient, int64_t begin, int64_t end)
{
    int64_t found = 0;
    for (int64_t i = begin; i < end; i += VEC_WIDTH) {
        int count = end - i < VEC_WIDTH ? (int)(end - i) : VEC_WIDTH;
        vec g = vec_load(dtype, gradient, i, count);
        real difference[SUPERADAM_LANES];
        vec_store(REAL_DTYPE, difference, 0, vec_sub(g, g), count, 0);
        for (int k = 0; k < count; k++)
            found += difference[k] != 0;
    }
    return found;
}

/* The lanes that the interval test calls certain are added to `certain`, from `lane` on; null: there is no test. */
static inline __attribute__((always_inline)) void
run_vector(int pass, int gradient_dtype, int out_dtype, const superadam_segment *segment, const adam_scalars *accepted,
           const adam_scalars *current, const interval_scalars *interval, int64_t i, int count, int stream,
           int with_norm, int lane, squares *sums, uint16_t *certain)
{
    const int writes_state = pass == SUPERADAM_COMMIT || pass == SUPERADAM_UPDATE;
    const int divides = VEC_DIVIDES || certain; /* the interval test takes longer than divisions meanwhile */
    vec g, m, v, p, d, q, vmax = vec_set(0);

    g = vec_load(gradient_dtype, segment->gradient, i, count);
    if (with_norm)
        squares_add(sums, lane, g);
    if (pass == SUPERADAM_NORM)
        return;

    p = vec_load(REAL_DTYPE, segment->master, i, count);
    m = vec_load(REAL_DTYPE, segment->exp_avg, i, count);
    v = vec_load(REAL_DTYPE, segment->exp_avg_sq, i, count);
    if ((accepted->flags | current->flags) & SUPERADAM_AMSGRAD)
        vmax = vec_load(REAL_DTYPE, segment->max_exp_avg_sq, i, count);

    if (pass == SUPERADAM_COMMIT_AND_SPECULATE) {
        vec older = vec_load(gradient_dtype, segment->accepted_gradient, i, count);
        p = adam_formula(accepted, older, &m, &v, &vmax, p, &d, &q, divides);
        vec_store(REAL_DTYPE, segment->master, i, p, count, 0);
        vec_store(REAL_DTYPE, segment->exp_avg, i, m, count, 0);
        vec_store(REAL_DTYPE, segment->exp_avg_sq, i, v, count, 0);
        if (accepted->flags & SUPERADAM_AMSGRAD)
            vec_store(REAL_DTYPE, segment->max_exp_avg_sq, i, vmax, count, 0);
    }
    vec v_before = v;
    p = adam_formula(current, g, &m, &v, &vmax, p, &d, &q, divides);
    if (writes_state) {
        vec_store(REAL_DTYPE, segment->master, i, p, count, 0);
        vec_store(REAL_DTYPE, segment->exp_avg, i, m, count, 0);
        vec_store(REAL_DTYPE, segment->exp_avg_sq, i, v, count, 0);
        if (current->flags & SUPERADAM_AMSGRAD)
            vec_store(REAL_DTYPE, segment->max_exp_avg_sq, i, vmax, count, 0);
    }
    if (out_dtype != SUPERADAM_NONE)
        vec_store(out_dtype, segment->out, i, p, count, stream);
    if (certain)
        *certain |= (uint16_t)(vec_lanes(interval_is_certain(out_dtype, interval, g, v_before, d, q, p, 0)) << lane);
}

static inline __attribute__((always_inline)) void run_prefetch(int pass, int gradient_dtype,
                                                               const superadam_segment *segment,
                                                               const adam_scalars *accepted,
                                                               const adam_scalars *current, int64_t i)
{
    vec_prefetch(gradient_dtype, segment->gradient, i);
    if (pass == SUPERADAM_NORM)
        return;
    if (pass == SUPERADAM_COMMIT_AND_SPECULATE)
        vec_prefetch(gradient_dtype, segment->accepted_gradient, i);
    vec_prefetch(REAL_DTYPE, segment->master, i);
    vec_prefetch(REAL_DTYPE, segment->exp_avg, i);
    vec_prefetch(REAL_DTYPE, segment->exp_avg_sq, i);
    if ((accepted->flags | current->flags) & SUPERADAM_AMSGRAD)
        vec_prefetch(REAL_DTYPE, segment->max_exp_avg_sq, i);
}

/* Elements begin to end - 1 of a chunk. */
static inline __attribute__((always_inline)) void
run_vectors(int pass, int gradient_dtype, int out_dtype, const superadam_segment *segment, const adam_scalars *accepted,
            const adam_scalars *current, const interval_scalars *interval, int64_t begin, int64_t end, int stream,
            int with_norm, squares *sums, uint16_t *certain)
{
    const int64_t whole = end - (end - begin) % SUPERADAM_LANES;
    for (int64_t i = begin; i < whole; i += SUPERADAM_LANES) {
        run_prefetch(pass, gradient_dtype, segment, accepted, current, i + PREFETCH_AHEAD);
#pragma GCC unroll VEC_UNROLL
        for (int lane = 0; lane < SUPERADAM_LANES; lane += VEC_WIDTH)
            run_vector(pass, gradient_dtype, out_dtype, segment, accepted, current, interval, i + lane, VEC_WIDTH,
                       stream, with_norm, lane, sums, certain ? &certain[(i - begin) / SUPERADAM_LANES] : 0);
    }
#pragma GCC unroll VEC_UNROLL
    for (int lane = 0; lane < SUPERADAM_LANES; lane += VEC_WIDTH) {
        const int64_t left = end - whole - lane;
        if (left > 0)
            run_vector(pass, gradient_dtype, out_dtype, segment, accepted, current, interval, whole + lane,
                       left < VEC_WIDTH ? (int)left : VEC_WIDTH, 0, with_norm, lane, sums,
                       certain ? &certain[(whole - begin) / SUPERADAM_LANES] : 0);
    }
}

static inline __attribute__((always_inline)) void block_gradient(int dtype, const void *gradient, int64_t i,
                                                                 compact_block *b)
{
    for (int j = 0; j < BLOCK; j += VEC_WIDTH)
        vec_store(REAL_DTYPE, b->gradient, j, vec_load(dtype, gradient, i + j, VEC_WIDTH), VEC_WIDTH, 0);
}

/* One step of a block; with the gradient's squares where there are `sums`. Leaves what the interval test reads. */
SHARED void block_step(const adam_scalars *k, int with_max, int lists, compact_block *b, squares *sums)
{
    for (int group = 0; group < BLOCK; group += SUPERADAM_LANES) {
#pragma GCC unroll VEC_UNROLL
        for (int lane = 0; lane < SUPERADAM_LANES; lane += VEC_WIDTH) {
            const int j = group + lane;
            vec d, q, g = vec_load(REAL_DTYPE, b->gradient, j, VEC_WIDTH);
            vec m = vec_load(REAL_DTYPE, b->exp_avg, j, VEC_WIDTH),
                v = vec_load(REAL_DTYPE, b->exp_avg_sq, j, VEC_WIDTH);
            vec vmax = with_max ? vec_load(REAL_DTYPE, b->max_exp_avg_sq, j, VEC_WIDTH) : vec_set(0);
            if (sums)
                squares_add(sums, lane, g);
            if (lists)
                vec_store(REAL_DTYPE, b->before, j, v, VEC_WIDTH, 0);
            vec p =
                adam_formula(k, g, &m, &v, &vmax, vec_load(REAL_DTYPE, b->master, j, VEC_WIDTH), &d, &q, VEC_DIVIDES);
            vec_store(REAL_DTYPE, b->master, j, p, VEC_WIDTH, 0);
            vec_store(REAL_DTYPE, b->exp_avg, j, m, VEC_WIDTH, 0);
            vec_store(REAL_DTYPE, b->exp_avg_sq, j, v, VEC_WIDTH, 0);
            if (with_max)
                vec_store(REAL_DTYPE, b->max_exp_avg_sq, j, vmax, VEC_WIDTH, 0);
            if (lists) {
                vec_store(REAL_DTYPE, b->denominator, j, d, VEC_WIDTH, 0);
                vec_store(REAL_DTYPE, b->update, j, q, VEC_WIDTH, 0);
            }
        }
    }
}

/* As run_vector, for a whole block of state in fewer bits. `certain` has bits for each SUPERADAM_LANES elements. */
static inline __attribute__((always_inline)) void run_block(int pass, int gradient_dtype, int out_dtype,
                                                            const superadam_segment *segment,
                                                            const adam_scalars *accepted, const adam_scalars *current,
                                                            const interval_scalars *interval, int64_t i, int stream,
                                                            squares *sums, uint16_t *certain)
{
    const int with_max = (accepted->flags | current->flags) & SUPERADAM_AMSGRAD;
    const int is_cut = segment->format & (SUPERADAM_MASTER_24BIT | SUPERADAM_LISTED_24BIT);
    compact_block b;
    compact_load(segment, i, with_max, &b);
    if (pass == SUPERADAM_COMMIT_AND_SPECULATE) {
        block_gradient(gradient_dtype, segment->accepted_gradient, i, &b);
        block_step(accepted, with_max, 0, &b, 0);
        compact_store(segment, i, accepted->flags & SUPERADAM_AMSGRAD, accepted->turn, 1, &b);
    }
    block_gradient(gradient_dtype, segment->gradient, i, &b);
    block_step(current, with_max, certain != 0, &b, sums);
    if (pass == SUPERADAM_COMMIT || pass == SUPERADAM_UPDATE)
        compact_store(segment, i, current->flags & SUPERADAM_AMSGRAD, current->turn, 0, &b);
    else
        compact_round(segment, i, current->turn, &b);
    if (out_dtype == SUPERADAM_NONE)
        return;
    for (int group = 0; group < BLOCK; group += SUPERADAM_LANES) {
#pragma GCC unroll VEC_UNROLL
        for (int lane = 0; lane < SUPERADAM_LANES; lane += VEC_WIDTH) {
            const int j = group + lane;
            vec p = vec_load(REAL_DTYPE, b.master, j, VEC_WIDTH);
            vec_store(out_dtype, segment->out, i + j, p, VEC_WIDTH, stream);
            if (!certain)
                continue;
            p = is_cut ? vec_load(REAL_DTYPE, b.moved, j, VEC_WIDTH) : p;
            vec_mask mask = interval_is_certain(out_dtype, interval, vec_load(REAL_DTYPE, b.gradient, j, VEC_WIDTH),
                                                vec_load(REAL_DTYPE, b.before, j, VEC_WIDTH),
                                                vec_load(REAL_DTYPE, b.denominator, j, VEC_WIDTH),
                                                vec_load(REAL_DTYPE, b.update, j, VEC_WIDTH), p, is_cut);
            certain[group / SUPERADAM_LANES] |= (uint16_t)(vec_lanes(mask) << lane);
        }
    }
}

/* As run_vectors, of state in fewer bits. */
static inline __attribute__((always_inline)) void run_blocks(int pass, int gradient_dtype, int out_dtype,
                                                             const superadam_segment *segment,
                                                             const adam_scalars *accepted, const adam_scalars *current,
                                                             const interval_scalars *interval, int64_t begin,
                                                             int64_t end, int stream, squares *sums, uint16_t *certain)
{
    tail t;
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int is_tail = end - i < BLOCK;
        if (is_tail)
            tail_read(&t, segment, pass, out_dtype, i, end - i);
        else
            compact_prefetch(segment, pass == SUPERADAM_COMMIT_AND_SPECULATE, i + PREFETCH_AHEAD);
        run_block(pass, gradient_dtype, out_dtype, is_tail ? &t.segment : segment, accepted, current, interval,
                  is_tail ? 0 : i, is_tail ? 0 : stream, sums, certain ? &certain[(i - begin) / SUPERADAM_LANES] : 0);
        if (is_tail)
            tail_write(&t, end - i);
    }
}

static inline __attribute__((always_inline)) void run_chunk(int pass, int gradient_dtype, int out_dtype, int lists,
                                                            int compact, const superadam_segment *segment,
                                                            const adam_scalars *accepted, const adam_scalars *current,
                                                            const interval_scalars *interval, int64_t chunk, int stream)
{
    const int64_t begin = chunk * SUPERADAM_CHUNK;
    const int64_t rest = segment->length - begin;
    const int64_t end = begin + (rest < SUPERADAM_CHUNK ? rest : SUPERADAM_CHUNK);
    const int with_norm = segment->sums != 0;
    uint16_t certain[SUPERADAM_CHUNK / SUPERADAM_LANES] = {0}; /* a bit for each element */
    squares sums;
    squares_zero(&sums);

    if (compact)
        run_blocks(pass, gradient_dtype, out_dtype, segment, accepted, current, interval, begin, end, stream,
                   with_norm ? &sums : 0, lists ? certain : 0);
    else
        run_vectors(pass, gradient_dtype, out_dtype, segment, accepted, current, interval, begin, end, stream,
                    with_norm, &sums, lists ? certain : 0);
    if (lists)
        interval_list(segment, begin, certain);
    if (with_norm) {
        double lanes[SUPERADAM_LANES];
        squares_lanes(&sums, lanes);
        const double total = lanes_total(lanes);
        segment->sums[chunk] = total;
        segment->nonfinite[chunk] =
            total - total == 0 ? 0 : count_nonfinite(gradient_dtype, segment->gradient, begin, end);
    }
}
