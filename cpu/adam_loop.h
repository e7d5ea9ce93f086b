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
 *   squares, squares_zero(sums), squares_add(sums, lane, value), squares_lanes(sums, double[16])
 *
 * `count` is at most VEC_WIDTH, and equals it everywhere but in a segment's tail. */
/* clang-format on */

/* Elements between the one that is computed and the one that is prefetched: 2 KiB of fp32. */
enum { PREFETCH_AHEAD = 512 };
enum { LATER = BLOCK / SUPERADAM_LANES - 1 };

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

static inline __attribute__((always_inline)) void interval_keep(interval_terms *terms, int at, vec g, vec v, vec d,
                                                                vec q, vec p)
{
    vec_store(REAL_DTYPE, terms->gradient, at, g, VEC_WIDTH, 0);
    vec_store(REAL_DTYPE, terms->before, at, v, VEC_WIDTH, 0);
    vec_store(REAL_DTYPE, terms->denominator, at, d, VEC_WIDTH, 0);
    vec_store(REAL_DTYPE, terms->update, at, q, VEC_WIDTH, 0);
    vec_store(REAL_DTYPE, terms->value, at, p, VEC_WIDTH, 0);
}

/* `terms`, null if there is no interval test, get what that reads, from `at` on. */
static inline __attribute__((always_inline)) void run_vector(int pass, int gradient_dtype, int out_dtype,
                                                             const superadam_segment *segment,
                                                             const adam_scalars *accepted, const adam_scalars *current,
                                                             int64_t i, int count, int stream, int with_norm, int lane,
                                                             squares *sums, interval_terms *terms, uint64_t at)
{
    const int writes_state = pass == SUPERADAM_COMMIT || pass == SUPERADAM_UPDATE;
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
        p = adam_formula(accepted, older, &m, &v, &vmax, p, &d, &q);
        vec_store(REAL_DTYPE, segment->master, i, p, count, 0);
        vec_store(REAL_DTYPE, segment->exp_avg, i, m, count, 0);
        vec_store(REAL_DTYPE, segment->exp_avg_sq, i, v, count, 0);
        if (accepted->flags & SUPERADAM_AMSGRAD)
            vec_store(REAL_DTYPE, segment->max_exp_avg_sq, i, vmax, count, 0);
    }
    vec v_before = v;
    p = adam_formula(current, g, &m, &v, &vmax, p, &d, &q);
    if (writes_state) {
        vec_store(REAL_DTYPE, segment->master, i, p, count, 0);
        vec_store(REAL_DTYPE, segment->exp_avg, i, m, count, 0);
        vec_store(REAL_DTYPE, segment->exp_avg_sq, i, v, count, 0);
        if (current->flags & SUPERADAM_AMSGRAD)
            vec_store(REAL_DTYPE, segment->max_exp_avg_sq, i, vmax, count, 0);
    }
    if (out_dtype != SUPERADAM_NONE)
        vec_store(out_dtype, segment->out, i, p, count, stream);
    if (terms)
        interval_keep(terms, at, g, v_before, d, q, p);
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

/* Elements begin to end - 1 of a chunk. The interval test comes LATER groups of SUPERADAM_LANES after what it reads:
 * then it fills the time of their divisions, instead of waiting for its own. */
static inline __attribute__((always_inline)) void
run_vectors(int pass, int gradient_dtype, int out_dtype, const superadam_segment *segment, const adam_scalars *accepted,
            const adam_scalars *current, const interval_scalars *interval, int64_t begin, int64_t end, int stream,
            int with_norm, squares *sums, uint16_t *uncertain)
{
    const int64_t whole = end - (end - begin) % SUPERADAM_LANES;
    const int tests = uncertain != 0;
    interval_terms terms = {0};
    uint64_t at = 0; /* of the terms, which are as a ring */
    for (int64_t i = begin; i < whole; i += SUPERADAM_LANES) {
        run_prefetch(pass, gradient_dtype, segment, accepted, current, i + PREFETCH_AHEAD);
#pragma GCC unroll VEC_UNROLL
        for (int lane = 0; lane < SUPERADAM_LANES; lane += VEC_WIDTH)
            run_vector(pass, gradient_dtype, out_dtype, segment, accepted, current, i + lane, VEC_WIDTH, stream,
                       with_norm, lane, sums, tests ? &terms : 0, at + lane);
        at = (at + SUPERADAM_LANES) % BLOCK;
        if (tests)
            *(uncertain++ - LATER) = interval_uncertain(out_dtype, interval, &terms, at, 0);
    }
    for (int later = LATER; tests && later > 0; later--) {
        at = (at + SUPERADAM_LANES) % BLOCK;
        *(uncertain - later) = interval_uncertain(out_dtype, interval, &terms, at, 0);
    }
#pragma GCC unroll VEC_UNROLL
    for (int lane = 0; lane < SUPERADAM_LANES; lane += VEC_WIDTH) {
        const int64_t left = end - whole - lane;
        if (left > 0)
            run_vector(pass, gradient_dtype, out_dtype, segment, accepted, current, whole + lane,
                       left < VEC_WIDTH ? (int)left : VEC_WIDTH, 0, with_norm, lane, sums, tests ? &terms : 0, lane);
    }
    if (tests && whole < end)
        *uncertain = interval_uncertain(out_dtype, interval, &terms, 0, 0);
}

/* Widens a gradient to the terms of a block. */
static inline __attribute__((always_inline)) void block_gradient(int dtype, const void *gradient, int64_t i,
                                                                 compact_block *b)
{
    for (int j = 0; j < BLOCK; j += VEC_WIDTH)
        vec_store(REAL_DTYPE, b->terms.gradient, j, vec_load(dtype, gradient, i + j, VEC_WIDTH), VEC_WIDTH, 0);
}

/* One step of a block, with the gradient's squares where there are `sums`. Leaves what the interval test reads. */
SHARED void block_step(const adam_scalars *k, int with_max, int lists, compact_block *b, squares *sums)
{
    for (int group = 0; group < BLOCK; group += SUPERADAM_LANES) {
#pragma GCC unroll VEC_UNROLL
        for (int lane = 0; lane < SUPERADAM_LANES; lane += VEC_WIDTH) {
            const int j = group + lane;
            vec d, q, g = vec_load(REAL_DTYPE, b->terms.gradient, j, VEC_WIDTH);
            vec m = vec_load(REAL_DTYPE, b->exp_avg, j, VEC_WIDTH),
                v = vec_load(REAL_DTYPE, b->exp_avg_sq, j, VEC_WIDTH), v_before = v;
            vec vmax = with_max ? vec_load(REAL_DTYPE, b->max_exp_avg_sq, j, VEC_WIDTH) : vec_set(0);
            if (sums)
                squares_add(sums, lane, g);
            vec p = adam_formula(k, g, &m, &v, &vmax, vec_load(REAL_DTYPE, b->master, j, VEC_WIDTH), &d, &q);
            vec_store(REAL_DTYPE, b->master, j, p, VEC_WIDTH, 0);
            vec_store(REAL_DTYPE, b->exp_avg, j, m, VEC_WIDTH, 0);
            vec_store(REAL_DTYPE, b->exp_avg_sq, j, v, VEC_WIDTH, 0);
            if (with_max)
                vec_store(REAL_DTYPE, b->max_exp_avg_sq, j, vmax, VEC_WIDTH, 0);
            if (lists)
                interval_keep(&b->terms, j, g, v_before, d, q, p);
        }
    }
}

/* As run_vector, for a whole block of state in fewer bits. `uncertain` has bits for each SUPERADAM_LANES elements. */
static inline __attribute__((always_inline)) void run_block(int pass, int gradient_dtype, int out_dtype,
                                                            const superadam_segment *segment,
                                                            const adam_scalars *accepted, const adam_scalars *current,
                                                            const interval_scalars *interval, int64_t i, int stream,
                                                            squares *sums, uint16_t *uncertain)
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
    block_step(current, with_max, uncertain != 0, &b, sums);
    if (pass == SUPERADAM_COMMIT || pass == SUPERADAM_UPDATE)
        compact_store(segment, i, current->flags & SUPERADAM_AMSGRAD, current->turn, 0, &b);
    else
        compact_round(segment, i, current->turn, &b);
    if (out_dtype == SUPERADAM_NONE)
        return;
    for (int group = 0; group < BLOCK; group += SUPERADAM_LANES) {
#pragma GCC unroll VEC_UNROLL
        for (int j = group; j < group + SUPERADAM_LANES; j += VEC_WIDTH)
            vec_store(out_dtype, segment->out, i + j, vec_load(REAL_DTYPE, b.master, j, VEC_WIDTH), VEC_WIDTH, stream);
        if (uncertain)
            uncertain[group / SUPERADAM_LANES] = interval_uncertain(out_dtype, interval, &b.terms, group, is_cut);
    }
}

/* As run_vectors, of state in fewer bits. */
static inline __attribute__((always_inline)) void
run_blocks(int pass, int gradient_dtype, int out_dtype, const superadam_segment *segment, const adam_scalars *accepted,
           const adam_scalars *current, const interval_scalars *interval, int64_t begin, int64_t end, int stream,
           squares *sums, uint16_t *uncertain)
{
    tail t;
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int is_tail = end - i < BLOCK;
        uint16_t *bits = uncertain ? &uncertain[(i - begin) / SUPERADAM_LANES] : 0;
        if (is_tail)
            tail_read(&t, segment, pass, out_dtype, i, end - i);
        else
            compact_prefetch(segment, pass == SUPERADAM_COMMIT_AND_SPECULATE, i + PREFETCH_AHEAD);
        run_block(pass, gradient_dtype, out_dtype, is_tail ? &t.segment : segment, accepted, current, interval,
                  is_tail ? 0 : i, is_tail ? 0 : stream, sums, bits);
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
    uint16_t bits[LATER + SUPERADAM_CHUNK / SUPERADAM_LANES] = {0},
                                            *uncertain = bits + LATER; /* one for each element */
    squares sums;
    squares_zero(&sums);

    if (compact)
        run_blocks(pass, gradient_dtype, out_dtype, segment, accepted, current, interval, begin, end, stream,
                   with_norm ? &sums : 0, lists ? uncertain : 0);
    else
        run_vectors(pass, gradient_dtype, out_dtype, segment, accepted, current, interval, begin, end, stream,
                    with_norm, &sums, lists ? uncertain : 0);
    if (lists)
        interval_list(segment, begin, uncertain);
    if (with_norm) {
        double lanes[SUPERADAM_LANES];
        squares_lanes(&sums, lanes);
        const double total = lanes_total(lanes);
        segment->sums[chunk] = total;
        segment->nonfinite[chunk] =
            total - total == 0 ? 0 : count_nonfinite(gradient_dtype, segment->gradient, begin, end);
    }
}
