/* State in fewer bits (`format` of a segment): blocks of 64 elements become fp32 before a pass and are stored after it,
 * with integer operations alone, so that every instruction set has the same bits. docs/design.md says what the formats
 * are; tests/support/compact.py has the same functions. Included before adam_loop.h by instruction sets in fp32.
 *
 * To cut k bits off a magnitude, its *threshold* is added first: the upper k bits of a `turn`, which is the step's,
 * plus a phase of the element's position in its block. Over the steps, values are rounded up as often as they are above
 * what is stored, without random numbers. */

#include <stdint.h>
#include <string.h>

enum { BLOCK = SUPERADAM_BLOCK };
enum { MOMENTS_MASK = SUPERADAM_MOMENTS_BFLOAT16 | SUPERADAM_MOMENTS_8BIT };

/* As many 32-bit numbers as a register holds, and what they become in 16 and in 8 bits. */
#if defined(__AVX512F__)
enum { WORDS = 16 };
#elif defined(__AVX2__)
enum { WORDS = 8 };
#else
enum { WORDS = 4 };
#endif
typedef uint32_t words __attribute__((vector_size(4 * WORDS)));
typedef int32_t signed_words __attribute__((vector_size(4 * WORDS)));
typedef uint16_t halves __attribute__((vector_size(2 * WORDS)));
typedef uint8_t bytes __attribute__((vector_size(WORDS)));

/* One block of state in fp32, the gradient, and the terms of the formula that the interval test reads. */
typedef struct {
    float master[BLOCK], exp_avg[BLOCK], exp_avg_sq[BLOCK], max_exp_avg_sq[BLOCK], gradient[BLOCK];
    float before[BLOCK], denominator[BLOCK], update[BLOCK], moved[BLOCK];
} __attribute__((aligned(64))) compact_block;

#define COMPACT static inline __attribute__((always_inline))
/* Once for all variants of a pass: a call costs little against the 64 elements of a block, compiling costs much. */
#define SHARED static __attribute__((noinline))

/* Of each position in a block, a multiple of 1/64 of a full turn: its 6 bits in reverse, to keep neighbours apart. */
#define PHASE_OF(j)                                                                                                  \
    (((uint32_t)(j) & 1) << 31 | ((uint32_t)(j) & 2) << 29 | ((uint32_t)(j) & 4) << 27 | ((uint32_t)(j) & 8) << 25 | \
     ((uint32_t)(j) & 16) << 23 | ((uint32_t)(j) & 32) << 21)
#define PHASES_OF(j) PHASE_OF(j), PHASE_OF((j) + 1), PHASE_OF((j) + 2), PHASE_OF((j) + 3)
#define PHASES_OF_16(j) PHASES_OF(j), PHASES_OF((j) + 4), PHASES_OF((j) + 8), PHASES_OF((j) + 12)
#define PHASES_OF_BLOCK PHASES_OF_16(0), PHASES_OF_16(16), PHASES_OF_16(32), PHASES_OF_16(48)
/* Twice, for segments that begin within a block of thresholds. */
static const uint32_t PHASES[2 * BLOCK] __attribute__((aligned(64))) = {PHASES_OF_BLOCK, PHASES_OF_BLOCK};

/* All bits of the numbers where a condition holds; comparisons of vectors are ~0 or 0. */
COMPACT words words_where(signed_words condition, words a, words b)
{
    return ((words)condition & a) | (~(words)condition & b);
}

COMPACT words words_load(const void *from)
{
    words x;
    memcpy(&x, from, sizeof x);
    return x;
}

COMPACT void words_store(void *to, words x) { memcpy(to, &x, sizeof x); }

/* With stores of the width of later loads, which can then be forwarded. */
COMPACT void words_copy(float *to, const float *from)
{
    for (int j = 0; j < BLOCK; j += WORDS)
        words_store(to + j, words_load(from + j));
}

COMPACT words words_load_halves(const uint16_t *from)
{
    halves x;
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(x, words);
}

COMPACT void words_store_halves(uint16_t *to, words x)
{
    const halves y = __builtin_convertvector(x, halves);
    memcpy(to, &y, sizeof y);
}

COMPACT words words_load_bytes(const uint8_t *from)
{
    bytes x;
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, halves), words); /* gcc 12 would take them one by one */
}

COMPACT void words_store_bytes(uint8_t *to, words x)
{
#if defined(__AVX512F__)
    const bytes y = __builtin_convertvector(x, bytes);
#else
    const bytes y = __builtin_convertvector(__builtin_convertvector(x, halves), bytes);
#endif
    memcpy(to, &y, sizeof y);
}

COMPACT signed_words words_are_nan(words bits) { return (bits & 0x7FFFFFFF) > 0x7F800000; }

/* ---- bf16 ---- */

COMPACT void bfloat16_decode(const uint16_t *from, float *to)
{
    for (int j = 0; j < BLOCK; j += WORDS)
        words_store(to + j, words_load_halves(from + j) << 16);
}

/* Stores the block; with `keeps` leaves in it what was stored. */
COMPACT void bfloat16_encode(uint16_t *to, float *from, uint32_t turn, const uint32_t *phases, int keeps)
{
    for (int j = 0; j < BLOCK; j += WORDS) {
        const words bits = words_load(from + j), more = (words_load(phases + j) + turn) >> 16;
        const words stored = words_where(words_are_nan(bits), bits >> 16 | 0x40, (bits + more) >> 16);
        words_store_halves(to + j, stored);
        if (keeps)
            words_store(from + j, stored << 16);
    }
}

COMPACT void bfloat16_encode_nearest(uint16_t *to, float *from, int keeps)
{
    for (int j = 0; j < BLOCK; j += WORDS) {
        const words bits = words_load(from + j), more = (bits >> 16 & 1) + 0x7FFF;
        const words stored = words_where(words_are_nan(bits), bits >> 16 | 0x40, (bits + more) >> 16);
        words_store_halves(to + j, stored);
        if (keeps)
            words_store(from + j, stored << 16);
    }
}

/* ---- 8 bits: floats whose exponents count down from that of the block's largest ---- */

/* `mantissa` bits of fraction; with a sign 7 bits remain for exponent and fraction, without one 8. */
COMPACT uint32_t code_base(uint32_t exponent, int mantissa, int has_sign)
{
    return ((exponent + 1) << mantissa) - 1 - (has_sign ? 127 : 255); /* may be negative: sums are compared signed */
}

COMPACT words code_value(words codes, uint32_t exponent, int mantissa, int has_sign)
{
    const words magnitude = has_sign ? codes & 127 : codes, sign = has_sign ? (codes & 128) << 24 : codes & 0;
    const signed_words sum = (signed_words)(magnitude + code_base(exponent, mantissa, has_sign));
    const words least = words_where(sum > 1, (words)sum, (magnitude & 0) + 1);
    const words value = words_where(magnitude != 0, least << (uint32_t)(23 - mantissa), magnitude & 0);
    return exponent == 255 ? (magnitude & 0) + 0x7FC00000 : value | sign;
}

COMPACT void codes_decode(const uint8_t *from, uint32_t exponent, float *to, int mantissa, int has_sign)
{
    for (int j = 0; j < BLOCK; j += WORDS)
        words_store(to + j, code_value(words_load_bytes(from + j), exponent, mantissa, has_sign));
}

/* The same; returns the exponent that the elements share. Without a sign, a negative number is stored as NaN. */
COMPACT uint8_t codes_encode(uint8_t *to, float *from, uint32_t turn, const uint32_t *phases, int mantissa,
                             int has_sign, int keeps)
{
    const uint32_t cut = 23 - (uint32_t)mantissa;
    words rounded[BLOCK / WORDS], most = {0};
    for (int j = 0; j < BLOCK; j += WORDS) {
        const words bits = words_load(from + j), positive = bits & 0x7FFFFFFF;
        const words magnitude = has_sign ? positive : words_where(bits > 0x80000000, (bits & 0) + 0x7FC00000, positive);
        const words r = (magnitude + ((words_load(phases + j) + turn) >> (32 - cut))) >> cut;
        rounded[j / WORDS] = r;
        most = words_where(r > most, r, most);
    }
    uint32_t largest = 0;
    for (int k = 0; k < WORDS; k++)
        largest = most[k] > largest ? most[k] : largest;
    const uint32_t found = largest >> mantissa, exponent = found > 255 ? 255 : found;
    for (int j = 0; j < BLOCK; j += WORDS) {
        const words r = rounded[j / WORDS];
        const signed_words count = (signed_words)(r - code_base(exponent, mantissa, has_sign)), least = {0};
        const words code = words_where(count > (least + !has_sign), (words)count, (words)(least + !has_sign));
        const words sign = has_sign ? words_load(from + j) >> 24 & 128 : r & 0;
        const words some = words_where(r != 0, code, r & 0) | sign, stored = exponent == 255 ? r & 0 : some;
        words_store_bytes(to + j, stored);
        if (keeps)
            words_store(from + j, code_value(stored, exponent, mantissa, has_sign));
    }
    return (uint8_t)exponent;
}

/* ---- 24 bits: the upper 16 and the next 8 ---- */

COMPACT void master24_decode(const uint16_t *high, const uint8_t *low, float *to)
{
    for (int j = 0; j < BLOCK; j += WORDS)
        words_store(to + j, words_load_halves(high + j) << 16 | words_load_bytes(low + j) << 8);
}

/* Leaves the sum with the threshold in `moved`, where there is one. */
COMPACT void master24_round(float *values, float *moved, uint32_t turn, const uint32_t *phases)
{
    for (int j = 0; j < BLOCK; j += WORDS) {
        const words bits = words_load(values + j), more = (words_load(phases + j) + turn) >> 24;
        const words sum = words_where(words_are_nan(bits), bits | 0x400000, bits + more);
        if (moved)
            words_store(moved + j, sum);
        words_store(values + j, sum & 0xFFFFFF00);
    }
}

COMPACT void master24_encode(uint16_t *high, uint8_t *low, float *from, uint32_t turn, const uint32_t *phases)
{
    master24_round(from, 0, turn, phases);
    for (int j = 0; j < BLOCK; j += WORDS) {
        words_store_halves(high + j, words_load(from + j) >> 16);
        words_store_bytes(low + j, words_load(from + j) >> 8 & 255);
    }
}

/* ---- blocks of a segment ---- */

enum { EXP_AVG_MANTISSA = 3, EXP_AVG_SQ_MANTISSA = 4 };

/* Reads the whole block that begins at element i. */
SHARED void compact_load(const superadam_segment *s, int64_t i, int with_max, compact_block *b)
{
    if (s->format & SUPERADAM_MOMENTS_BFLOAT16) {
        bfloat16_decode((const uint16_t *)s->exp_avg + i, b->exp_avg);
        bfloat16_decode((const uint16_t *)s->exp_avg_sq + i, b->exp_avg_sq);
        if (with_max)
            bfloat16_decode((const uint16_t *)s->max_exp_avg_sq + i, b->max_exp_avg_sq);
    } else if (s->format & SUPERADAM_MOMENTS_8BIT) {
        const uint32_t first = s->exp_avg_exponents[i / BLOCK], second = s->exp_avg_sq_exponents[i / BLOCK];
        codes_decode((const uint8_t *)s->exp_avg + i, first, b->exp_avg, EXP_AVG_MANTISSA, 1);
        codes_decode((const uint8_t *)s->exp_avg_sq + i, second, b->exp_avg_sq, EXP_AVG_SQ_MANTISSA, 0);
    } else {
        words_copy(b->exp_avg, (const float *)s->exp_avg + i);
        words_copy(b->exp_avg_sq, (const float *)s->exp_avg_sq + i);
        if (with_max)
            words_copy(b->max_exp_avg_sq, (const float *)s->max_exp_avg_sq + i);
    }
    if (s->format & SUPERADAM_MASTER_24BIT)
        master24_decode((const uint16_t *)s->master + i, s->master_low + i, b->master);
    else
        words_copy(b->master, (const float *)s->master + i);
}

/* Stores it, and leaves in it what was stored: always of masters, of moments where a step follows that `keeps` them. */
SHARED void compact_store(const superadam_segment *s, int64_t i, int with_max, uint32_t turn, int keeps,
                          compact_block *b)
{
    const uint32_t *phases = PHASES + s->first_threshold;
    if (s->format & SUPERADAM_MOMENTS_BFLOAT16) {
        bfloat16_encode((uint16_t *)s->exp_avg + i, b->exp_avg, turn, phases, keeps);
        bfloat16_encode((uint16_t *)s->exp_avg_sq + i, b->exp_avg_sq, turn, phases, keeps);
        if (with_max)
            bfloat16_encode_nearest((uint16_t *)s->max_exp_avg_sq + i, b->max_exp_avg_sq, keeps);
    } else if (s->format & SUPERADAM_MOMENTS_8BIT) {
        uint8_t *first = &s->exp_avg_exponents[i / BLOCK], *second = &s->exp_avg_sq_exponents[i / BLOCK];
        *first = codes_encode((uint8_t *)s->exp_avg + i, b->exp_avg, turn, phases, EXP_AVG_MANTISSA, 1, keeps);
        *second =
            codes_encode((uint8_t *)s->exp_avg_sq + i, b->exp_avg_sq, turn, phases, EXP_AVG_SQ_MANTISSA, 0, keeps);
    } else {
        words_copy((float *)s->exp_avg + i, b->exp_avg);
        words_copy((float *)s->exp_avg_sq + i, b->exp_avg_sq);
        if (with_max)
            words_copy((float *)s->max_exp_avg_sq + i, b->max_exp_avg_sq);
    }
    if (s->format & SUPERADAM_MASTER_24BIT)
        master24_encode((uint16_t *)s->master + i, s->master_low + i, b->master, turn, phases);
    else
        words_copy((float *)s->master + i, b->master);
}

/* Rounds new masters that are not stored as if they were: where a segment has a list's elements, at their positions. */
SHARED void compact_round(const superadam_segment *s, int64_t i, uint32_t turn, compact_block *b)
{
    uint32_t phases[BLOCK];
    if (s->format & SUPERADAM_MASTER_24BIT) {
        master24_round(b->master, b->moved, turn, PHASES + s->first_threshold);
    } else if (s->format & SUPERADAM_LISTED_24BIT) {
        for (int j = 0; j < BLOCK; j++)
            phases[j] = PHASES[s->index[i + j] % BLOCK + s->first_threshold];
        master24_round(b->master, b->moved, turn, phases);
    }
}

COMPACT void prefetch_block(const void *array, int64_t size, int64_t i)
{
    for (int64_t at = 0; array && at < size * BLOCK; at += 64)
        __builtin_prefetch((const char *)array + i * size + at);
}

SHARED void compact_prefetch(const superadam_segment *s, int fuses, int64_t i)
{
    const int64_t gradient = s->gradient_dtype == SUPERADAM_FLOAT32 ? 4 : 2;
    const int64_t moment = s->format & SUPERADAM_MOMENTS_BFLOAT16 ? 2 : s->format & SUPERADAM_MOMENTS_8BIT ? 1 : 4;
    prefetch_block(s->gradient, gradient, i);
    if (fuses)
        prefetch_block(s->accepted_gradient, gradient, i);
    prefetch_block(s->master, s->format & SUPERADAM_MASTER_24BIT ? 2 : 4, i);
    prefetch_block(s->master_low, 1, i);
    prefetch_block(s->exp_avg, moment, i);
    prefetch_block(s->exp_avg_sq, moment, i);
    prefetch_block(s->max_exp_avg_sq, moment, i);
}

/* ---- the last block of a segment, which may not be whole ---- */

enum { TAIL_ARRAYS = 9 };

/* An array of a segment from a block on, with the bytes of an element, and whether a pass writes it. */
typedef struct {
    char *at;
    int64_t size;
    int is_written;
} tail_array;

/* Copies of the elements of a block, with zeros behind them, and the segment that consists of these copies. */
typedef struct {
    superadam_segment segment;
    tail_array arrays[TAIL_ARRAYS];
    char copies[TAIL_ARRAYS][4 * BLOCK];
} tail;

static char *tail_add(tail *t, int k, const void *array, int64_t size, int is_written, int64_t i, int64_t count)
{
    char *at = array ? (char *)array + i * size : 0;
    t->arrays[k] = (tail_array){at, size, is_written};
    if (!at)
        return 0;
    memset(t->copies[k], 0, sizeof t->copies[k]);
    memcpy(t->copies[k], at, (size_t)(count * size));
    return t->copies[k];
}

static __attribute__((noinline)) void tail_read(tail *t, const superadam_segment *s, int pass, int out_dtype, int64_t i,
                                                int64_t count)
{
    const int64_t gradient = s->gradient_dtype == SUPERADAM_FLOAT32 ? 4 : 2;
    const int64_t moment = s->format & SUPERADAM_MOMENTS_BFLOAT16 ? 2 : 4;
    const int64_t master = s->format & SUPERADAM_MASTER_24BIT ? 2 : 4;
    const int has_out = out_dtype != SUPERADAM_NONE, writes = pass != SUPERADAM_SPECULATE;
    const void *accepted = pass == SUPERADAM_COMMIT_AND_SPECULATE ? s->accepted_gradient : 0;
    const void *index = s->format & SUPERADAM_LISTED_24BIT ? s->index : 0;
    t->segment = *s;
    t->segment.gradient = tail_add(t, 0, s->gradient, gradient, 0, i, count);
    t->segment.accepted_gradient = tail_add(t, 1, accepted, gradient, 0, i, count);
    t->segment.index = (uint32_t *)tail_add(t, 2, index, 4, 0, i, count);
    t->segment.master = tail_add(t, 3, s->master, master, writes, i, count);
    t->segment.master_low = (uint8_t *)tail_add(t, 4, s->master_low, 1, writes, i, count);
    t->segment.exp_avg = tail_add(t, 5, s->exp_avg, moment, writes, i, count);
    t->segment.exp_avg_sq = tail_add(t, 6, s->exp_avg_sq, moment, writes, i, count);
    t->segment.max_exp_avg_sq = tail_add(t, 7, s->max_exp_avg_sq, moment, writes, i, count);
    t->segment.out = tail_add(t, 8, has_out ? s->out : 0, out_dtype == SUPERADAM_FLOAT32 ? 4 : 2, 1, i, count);
}

static void tail_write(const tail *t, int64_t count)
{
    for (int k = 0; k < TAIL_ARRAYS; k++)
        if (t->arrays[k].at && t->arrays[k].is_written)
            memcpy(t->arrays[k].at, t->copies[k], (size_t)(count * t->arrays[k].size));
}

/* ---- lists ---- */

/* Copies the state of the elements begin + found[j], in ascending order, to a list from entry `first` on. */
static __attribute__((noinline)) void compact_list(const superadam_segment *s, int64_t begin, const uint16_t *found,
                                                   int64_t count, int64_t first)
{
    superadam_uncertain *list = s->uncertain;
    const int with_max = list->max_exp_avg_sq != 0;
    int64_t loaded = -1;
    compact_block b;
    for (int64_t j = 0; j < count; j++) {
        const int64_t i = begin + found[j], block = i / BLOCK * BLOCK, left = s->length - block;
        if (block != loaded && left < BLOCK) {
            tail t;
            tail_read(&t, s, SUPERADAM_SPECULATE, SUPERADAM_NONE, block, left);
            compact_load(&t.segment, 0, with_max, &b);
        } else if (block != loaded) {
            compact_load(s, block, with_max, &b);
        }
        loaded = block;
        list->master[first + j] = b.master[i - block];
        list->exp_avg[first + j] = b.exp_avg[i - block];
        list->exp_avg_sq[first + j] = b.exp_avg_sq[i - block];
        if (with_max)
            list->max_exp_avg_sq[first + j] = b.max_exp_avg_sq[i - block];
    }
}
