/* The interval test: whether the new value of an element, rounded to the dtype of the working copy, is the same for
 * every gradient factor in an interval. docs/clipping.md has the proof; superadam/kernels/hyperparameters.py computes
 * the scalars, and tests/support/formula.py has the same test. It may call an element uncertain that is not, never
 * the other way round. Included after adam_formula.h by instruction sets in fp32. */

typedef struct {
    real spread, slope, kappa, least, slack;
    int l2;
} interval_scalars;

/* The least and the largest magnitude that round as |p| does, or less apart; NaN for more than the largest. */
static inline __attribute__((always_inline)) void interval_cell(int out_dtype, vec p, vec *low, vec *high)
{
    if (out_dtype == SUPERADAM_BFLOAT16) {
        vec nearest = vec_abs(vec_round_bfloat16(p));
        *low = vec_bits_plus(nearest, -0x8000);
        *high = vec_bits_plus(nearest, 0x8000);
    } else { /* denormals are 2^-24 apart; the cell of zero ends at zero, so that no sign changes */
        vec nearest = vec_abs(vec_round_float16(p)), half = vec_set(0x1p-25f);
        *low = vec_max(vec_set(0), vec_min(vec_bits_plus(nearest, -0x1000), vec_sub(nearest, half)));
        *high = vec_max(vec_add(nearest, half), vec_bits_plus(nearest, 0x1000));
    }
}

/* `g` before it is scaled, `v` the second moment before the step, and what the formula made of them with the factor for
 * which the value is published: denominator `d`, update `q`, new value `p`. A NaN is uncertain. Of a master of 24 bits,
 * `p` is what would be stored, and `moved` the value plus its threshold, before bits are cut; otherwise both are one.
 * With the threshold the whole cell moves, but for its lower end: a tie, or a threshold's size below a power of two. */
static inline __attribute__((always_inline)) vec_mask interval_is_certain(int out_dtype, const interval_scalars *k,
                                                                          vec g, vec v, vec d, vec q, vec p, vec moved,
                                                                          int is_cut)
{
    vec low, high, a = vec_abs(moved), aq = vec_abs(q);
    interval_cell(out_dtype, p, &low, &high);
    if (is_cut)
        low = vec_bits_plus(low, 2 << 8);
    vec room = vec_min(vec_sub(a, low), vec_sub(high, a));
    vec roundings = vec_fma(a, vec_set(0x1p-22f), vec_fma(aq, vec_set(0x1p-19f), vec_set(k->slack)));

    vec t = vec_mul(vec_abs(g), vec_set(k->spread));
    vec d_low = vec_fma(vec_set(-k->kappa), t, d);
    vec change = vec_mul(t, vec_fma(vec_set(k->kappa), aq, vec_set(k->slope))); /* times d_low: without a division */
    vec_mask certain = vec_less(change, vec_mul(vec_sub(room, roundings), d_low));
    certain = vec_both(certain, vec_less(vec_set(k->least), d_low));
    certain = vec_both(certain, vec_less(d_low, vec_set(0x1p60f)));
    certain = vec_both(certain, vec_less(vec_set(-0x1p-149f), v));
    if (k->l2)
        certain = vec_both(certain, vec_less(vec_mul(d, vec_set(0.25f)), d_low));
    return certain;
}

/* Copies from[at[0]], from[at[1]], ..., elements of `size` bytes, 2 or 4. */
static inline __attribute__((always_inline)) void interval_copy(int size, void *restrict to, const void *restrict from,
                                                                const uint16_t *restrict at, int64_t count)
{
    for (int64_t j = 0; j < count; j++)
        if (size == 4)
            ((uint32_t *)to)[j] = ((const uint32_t *)from)[at[j]];
        else
            ((uint16_t *)to)[j] = ((const uint16_t *)from)[at[j]];
}

/* Copies the elements of a chunk whose bits are set, with their state as it is now, to the segment's list. A branch for
 * each vector, while divisions are under way, would cost more than a second loop. */
static void interval_list(const superadam_segment *segment, int64_t begin, const uint16_t *uncertain)
{
    superadam_uncertain *list = segment->uncertain;
    uint16_t found[SUPERADAM_CHUNK];
    int64_t count = 0;
    for (int i = 0; i < SUPERADAM_CHUNK; i += 64) {
        const uint16_t *four = &uncertain[i / 16];
        uint64_t bits = four[0] | (uint64_t)four[1] << 16 | (uint64_t)four[2] << 32 | (uint64_t)four[3] << 48;
        for (; bits; bits &= bits - 1)
            found[count++] = (uint16_t)(i + __builtin_ctzll(bits));
    }
    const int64_t first = __atomic_fetch_add(&list->count, count, __ATOMIC_RELAXED);
    if (first + count > list->capacity)
        return;
    for (int64_t j = 0; j < count; j++)
        list->index[first + j] = (uint32_t)(begin + found[j]);
    if (segment->format) {
        compact_list(segment, begin, found, count, first);
    } else {
        interval_copy(4, &list->master[first], (const float *)segment->master + begin, found, count);
        interval_copy(4, &list->exp_avg[first], (const float *)segment->exp_avg + begin, found, count);
        interval_copy(4, &list->exp_avg_sq[first], (const float *)segment->exp_avg_sq + begin, found, count);
        if (list->max_exp_avg_sq && segment->max_exp_avg_sq)
            interval_copy(4, &list->max_exp_avg_sq[first], (const float *)segment->max_exp_avg_sq + begin, found,
                          count);
    }
    if (segment->gradient_dtype == SUPERADAM_FLOAT32)
        interval_copy(4, (float *)list->gradient + first, (const float *)segment->gradient + begin, found, count);
    else
        interval_copy(2, (uint16_t *)list->gradient + first, (const uint16_t *)segment->gradient + begin, found, count);
}
