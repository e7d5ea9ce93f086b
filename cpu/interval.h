/* The interval test: whether the new value of an element, rounded to the dtype of the working copy, is the same for
 * every gradient factor in an interval. docs/clipping.md has the proof; superadam/kernels/hyperparameters.py computes
 * the scalars, and tests/support/formula.py has the same test. It may call an element uncertain that is not, never
 * the other way round. Included after adam_formula.h by instruction sets in fp32. */

typedef struct {
    real spread, slope, kappa, least, slack;
} interval_scalars;

/* How far a magnitude may move, at least, and still round alike: to where rounding changes next to it, and no further
 * than to the end of the smaller cell below a power of two. Of fp16, nothing below 2^-14, where cells are of one size.
 * Of a master of 24 bits, `a` is the value plus its threshold, before bits are cut. The whole cell moves with that, but
 * for its lower end: a tie, or a threshold's size below a power of two. NaN where `a` is not finite. */
static inline __attribute__((always_inline)) vec interval_room(int out_dtype, vec a, int is_cut)
{
    const int is_bfloat16 = out_dtype == SUPERADAM_BFLOAT16;
    const uint32_t kept = is_bfloat16 ? 0xFFFF0000 : 0xFFFFE000, half = is_bfloat16 ? 0x8000 : 0x1000;
    vec middle = vec_bits(a, kept, half);
    vec room =
        is_cut ? vec_max(vec_sub(middle, a), vec_sub(a, vec_bits(a, kept, half | 0x200))) : vec_abs(vec_sub(a, middle));
    room = vec_min(vec_mul(a, vec_set(is_bfloat16 ? 63 * 0x1p-15f : 7 * 0x1p-15f)), room);
    return is_bfloat16 ? room : vec_min(vec_sub(a, vec_set(0x1p-14f)), room);
}

/* `g` before it is scaled, `v` the second moment before the step, and what the formula made of them with the factor for
 * which the value is published: denominator `d`, update `q`, new value `p`. A NaN is uncertain. */
static inline __attribute__((always_inline)) vec_mask interval_is_certain(int out_dtype, const interval_scalars *k,
                                                                          vec g, vec v, vec d, vec q, vec p, int is_cut)
{
    vec a = vec_abs(p), aq = vec_abs(q), room = interval_room(out_dtype, a, is_cut);
    vec roundings = vec_fma(a, vec_set(0x1p-22f), vec_fma(aq, vec_set(0x1p-19f), vec_set(k->slack)));

    vec t = vec_mul(vec_abs(g), vec_set(k->spread));
    vec d_low = vec_fma(vec_set(-k->kappa), t, d);
    vec change = vec_mul(t, vec_fma(vec_set(k->kappa), aq, vec_set(k->slope))); /* times d_low: without a division */
    vec_mask certain = vec_less(change, vec_mul(vec_sub(room, roundings), d_low));
    certain = vec_and_less(certain, vec_set(k->least), d_low);
    certain = vec_and_less(certain, vec_add(a, d), vec_set(0x1p50f));
    return vec_and_less(certain, vec_set(-0x1p-149f), v);
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

/* Copies the elements of a chunk whose bits are not set, with their state as it is now, to the segment's list. A branch
 * for each vector, while divisions are under way, would cost more than a second loop. */
static void interval_list(const superadam_segment *segment, int64_t begin, const uint16_t *certain)
{
    superadam_uncertain *list = segment->uncertain;
    uint16_t found[SUPERADAM_CHUNK + 2];
    int64_t count = 0;
    for (int i = 0; i < SUPERADAM_CHUNK; i += 64) {
        const uint16_t *four = &certain[i / 16];
        const int64_t left = segment->length - begin - i; /* elements, of which 64 are looked at */
        uint64_t bits = ~(four[0] | (uint64_t)four[1] << 16 | (uint64_t)four[2] << 32 | (uint64_t)four[3] << 48);
        bits &= left >= 64 ? ~0ull : left > 0 ? ~0ull >> (64 - left) : 0;
        int64_t next = count;
        count += __builtin_popcountll(bits);
        do { /* two at a time: there are seldom more, and a branch for each would often be mispredicted */
            for (int k = 0; k < 2; k++, bits &= bits - 1)
                found[next++] = (uint16_t)(i + __builtin_ctzll(bits | 1ull << 63));
        } while (bits);
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
        if (list->max_exp_avg_sq)
            interval_copy(4, &list->max_exp_avg_sq[first], (const float *)segment->max_exp_avg_sq + begin, found,
                          count);
    }
    if (segment->gradient_dtype == SUPERADAM_FLOAT32)
        interval_copy(4, (float *)list->gradient + first, (const float *)segment->gradient + begin, found, count);
    else
        interval_copy(2, (uint16_t *)list->gradient + first, (const uint16_t *)segment->gradient + begin, found, count);
}
