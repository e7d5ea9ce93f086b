/* superadam_traffic: the loads and stores of a pass without its arithmetic, for benchmarks. Their time is the lower
 * bound that a pass is measured against, and their bandwidth is what this machine offers to superadam. */

#include <stdatomic.h>
#include <stddef.h>

#include "superadam.h"
#include "threads.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum { LINE = 64 };           /* bytes of a cache line */
enum { SHORTEST_BURST = 32 }; /* elements: one line of 2-byte elements; of bytes it is LINE */
enum { ARRAYS_LIMIT = 9 };    /* arrays that one pass touches */
enum { MARK = 0x3F803F80 };   /* what is written to `out`: not zero, which some processors store faster; 1.0 in bf16 */

/* 16 bytes, which every supported architecture loads and stores without special flags. Wider registers move memory no
 * faster, as a core waits for lines; from a cache they may. */
typedef uint32_t quarter __attribute__((vector_size(16), may_alias));

typedef enum { READ, UPDATED, WRITTEN } access;

typedef struct {
    char *base;
    int element_size; /* in bytes; 0: the array has one line for each chunk */
    access access;
} array;

typedef struct {
    array arrays[ARRAYS_LIMIT];
    int count, burst, stream;
    int64_t prefetch;
    quarter zero; /* added to what is updated; the compiler does not know its value */
    _Atomic uint32_t checksum;
} traffic;

static inline __attribute__((always_inline)) void store_line(quarter *to, const quarter *line, int past_caches)
{
    if (past_caches) {
#if defined(__x86_64__)
        for (int i = 0; i < 4; i++)
            _mm_stream_si128((__m128i *)(to + i), (__m128i)line[i]);
        return;
#elif defined(__aarch64__)
        __asm__ volatile("stnp %q1, %q2, [%0]\n\tstnp %q3, %q4, [%0, #32]"
                         :
                         : "r"(to), "w"(line[0]), "w"(line[1]), "w"(line[2]), "w"(line[3])
                         : "memory");
        return;
#endif
    }
    for (int i = 0; i < 4; i++)
        to[i] = line[i];
}

/* One line of an array, whose words are added to `sums` if they are only read. */
static inline __attribute__((always_inline)) void move_line(const traffic *t, const array *a, char *at, quarter sums[4])
{
    const quarter zero = t->zero, mark = zero + MARK, marks[4] = {mark, mark, mark, mark};
    quarter *line = (quarter *)at;

    if (a->access == WRITTEN) {
        store_line(line, marks, t->stream & SUPERADAM_STREAM_OUT);
        return;
    }
    if (t->prefetch)
        __builtin_prefetch(at + t->prefetch);
    if (a->access == READ) {
        for (int i = 0; i < 4; i++)
            sums[i] += line[i];
    } else {
        const quarter same[4] = {line[0] + zero, line[1] + zero, line[2] + zero, line[3] + zero};
        store_line(line, same, t->stream & SUPERADAM_STREAM_STATE);
    }
}

static void move_chunks(void *context, int64_t first, int64_t last)
{
    traffic *shared = context;
    const traffic t = {.count = shared->count,
                       .burst = shared->burst,
                       .stream = shared->stream,
                       .prefetch = shared->prefetch,
                       .zero = shared->zero};
    quarter sums[4] = {t.zero, t.zero, t.zero, t.zero};

    for (int64_t chunk = first; chunk < last; chunk++) {
        for (int k = 0; k < t.count; k++)
            if (!shared->arrays[k].element_size)
                move_line(&t, &shared->arrays[k], shared->arrays[k].base + chunk * LINE, sums);
        for (int64_t element = chunk * SUPERADAM_CHUNK; element < (chunk + 1) * SUPERADAM_CHUNK; element += t.burst)
            for (int k = 0; k < t.count; k++) {
                const array *a = &shared->arrays[k];
                char *at = a->base + element * a->element_size, *end = at + t.burst * a->element_size;
                for (; at < end; at += LINE)
                    move_line(&t, a, at, sums);
            }
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
    const quarter total = sums[0] + sums[1] + sums[2] + sums[3];
    atomic_fetch_add(&shared->checksum, total[0] + total[1] + total[2] + total[3]);
}

static void add_array(traffic *t, const void *base, int element_size, access access)
{
    t->arrays[t->count++] = (array){(char *)base, element_size, access};
}

/* A moment: numbers of this size, or codes of one byte and a line of exponents for each chunk. */
static void add_moment(traffic *t, const void *base, const uint8_t *exponents, int element_size, access access)
{
    add_array(t, base, element_size, access);
    if (element_size == 1)
        add_array(t, exponents, 0, access);
}

static int size_of(int dtype)
{
    static const int bytes[] = {0, 4, 2, 2, 8};
    return dtype >= SUPERADAM_FLOAT32 && dtype <= SUPERADAM_FLOAT64 ? bytes[dtype] : 0;
}

int superadam_traffic(int pass, const superadam_segment *s, int threads, int burst, int64_t prefetch, int stream,
                      uint32_t *checksum)
{
    static volatile uint32_t zero;
    const uint32_t nothing = zero;
    const int gradient = size_of(s->gradient_dtype), out = size_of(s->out_dtype), real = gradient == 8 ? 8 : 4;
    const int has_planes = s->format & SUPERADAM_MASTER_24BIT, has_codes = s->format & SUPERADAM_MOMENTS_8BIT;
    const int moment = has_codes ? 1 : s->format & SUPERADAM_MOMENTS_BFLOAT16 ? 2 : real;
    traffic t = {.burst = burst, .prefetch = prefetch, .stream = stream, .zero = {nothing, nothing, nothing, nothing}};

    if (pass < SUPERADAM_NORM || pass > SUPERADAM_UPDATE)
        return SUPERADAM_BAD_PASS;
    const int shortest = has_planes || has_codes ? LINE : SHORTEST_BURST;
    if (s->length < 0 || s->length % SUPERADAM_CHUNK || burst < shortest || SUPERADAM_CHUNK % burst)
        return SUPERADAM_BAD_LENGTH;
    if (!gradient)
        return SUPERADAM_BAD_DTYPE;
    if (s->format & ~(SUPERADAM_MOMENTS_BFLOAT16 | SUPERADAM_MOMENTS_8BIT | SUPERADAM_MASTER_24BIT) ||
        (has_codes && s->format & SUPERADAM_MOMENTS_BFLOAT16) || (s->format && real == 8))
        return SUPERADAM_BAD_FORMAT;
    add_array(&t, s->gradient, gradient, READ);
    if (pass == SUPERADAM_COMMIT_AND_SPECULATE)
        add_array(&t, s->accepted_gradient, gradient, READ);
    if (pass != SUPERADAM_NORM) {
        const access access = pass == SUPERADAM_SPECULATE ? READ : UPDATED;
        add_array(&t, s->master, has_planes ? 2 : real, access);
        if (has_planes)
            add_array(&t, s->master_low, 1, access);
        add_moment(&t, s->exp_avg, s->exp_avg_exponents, moment, access);
        add_moment(&t, s->exp_avg_sq, s->exp_avg_sq_exponents, moment, access);
    }
    if (out && pass != SUPERADAM_NORM && pass != SUPERADAM_COMMIT)
        add_array(&t, s->out, out, WRITTEN);
    for (int k = 0; k < t.count; k++)
        if (s->length && (!t.arrays[k].base || (uintptr_t)t.arrays[k].base % LINE))
            return SUPERADAM_BAD_POINTER;

    threads_run(threads, 0, s->length / SUPERADAM_CHUNK, move_chunks, &t);
    *checksum = atomic_load(&t.checksum);
    return SUPERADAM_OK;
}
