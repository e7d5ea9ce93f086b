/* superadam_differing: compares working copies with their masters, rounded as the kernels round. */

#include <stdatomic.h>
#include <string.h>

#include "superadam.h"

#include "float_control.h"
#include "isa/vec_scalar.h"
#include "threads.h"

enum { ROWS_AHEAD = 8 }; /* of which the first samples are fetched into the cache, where nothing else would do it */

typedef struct {
    const superadam_segment *segment;
    const uint16_t *parameter;
    _Atomic int differs;
} comparison;

static inline __attribute__((always_inline)) uint16_t rounded(int dtype, float value)
{
    uint16_t half;
    vec_store_whole(dtype, &half, value, 0);
    return half;
}

static inline __attribute__((always_inline)) int is_nan(int dtype, uint16_t half)
{
    const float value = vec_load_whole(dtype, &half);
    return value != value;
}

static inline __attribute__((always_inline)) int block_differs_of(int dtype, const uint16_t *parameter,
                                                                  const float *master, int64_t count)
{
    int differs = 0;
    for (int64_t i = 0; i < count; i++)
        differs |= parameter[i] ^ rounded(dtype, master[i]);
    if (!differs)
        return 0; /* as a rule, found without the test for NaN in the loop */
    for (int64_t i = 0; i < count; i++)
        if (parameter[i] != rounded(dtype, master[i]) && !(is_nan(dtype, parameter[i]) && master[i] != master[i]))
            return 1;
    return 0;
}

/* Of at most SUPERADAM_CHUNK elements. */
static int block_differs(const superadam_segment *segment, const uint16_t *parameter, int64_t begin, int64_t count)
{
    const int dtype = segment->out_dtype;
    const float *master = (const float *)segment->master + begin;
    float decoded[SUPERADAM_CHUNK];
    parameter += begin;
    if (segment->format & SUPERADAM_MASTER_24BIT) {
        const uint16_t *high = (const uint16_t *)segment->master + begin;
        for (int64_t i = 0; i < count; i++) {
            const uint32_t bits = (uint32_t)high[i] << 16 | (uint32_t)segment->master_low[begin + i] << 8;
            memcpy(&decoded[i], &bits, sizeof bits);
        }
        master = decoded;
    }
    if (dtype == SUPERADAM_FLOAT16)
        return block_differs_of(SUPERADAM_FLOAT16, parameter, master, count);
    return count == SUPERADAM_SAMPLE_WIDTH
               ? block_differs_of(SUPERADAM_BFLOAT16, parameter, master, SUPERADAM_SAMPLE_WIDTH)
               : block_differs_of(SUPERADAM_BFLOAT16, parameter, master, count);
}

static inline void prefetch_ends(const superadam_segment *segment)
{
    const int64_t last = segment->length > SUPERADAM_SAMPLE_WIDTH ? segment->length - SUPERADAM_SAMPLE_WIDTH : 0;
    const uintptr_t copy = (uintptr_t)segment->out, master = (uintptr_t)segment->master; /* either may be null */
    __builtin_prefetch((const void *)copy);
    __builtin_prefetch((const void *)(copy + 2 * (uintptr_t)last));
    __builtin_prefetch((const void *)master);
    __builtin_prefetch((const void *)(master + 4 * (uintptr_t)last));
}

static int samples_differ(const superadam_segment *segment, const uint16_t *parameter)
{
    const int64_t length = segment->length, width = SUPERADAM_SAMPLE_WIDTH;
    if (length <= width)
        return block_differs(segment, parameter, 0, length);
    int64_t blocks = (length + SUPERADAM_CHUNK - 1) / SUPERADAM_CHUNK;
    blocks = blocks < 2 ? 2 : blocks < SUPERADAM_SAMPLE_BLOCKS ? blocks : SUPERADAM_SAMPLE_BLOCKS;
    const int64_t distance = (length - width) / (blocks - 1);
    for (int64_t block = 0; block < blocks; block++)
        if (block_differs(segment, parameter, block * distance, width))
            return 1;
    return 0;
}

static void compare_chunks(void *context, int64_t first, int64_t last)
{
    comparison *c = context;
    for (int64_t chunk = first; chunk < last && !atomic_load_explicit(&c->differs, memory_order_relaxed); chunk++) {
        const int64_t begin = chunk * SUPERADAM_CHUNK, rest = c->segment->length - begin;
        if (block_differs(c->segment, c->parameter, begin, rest < SUPERADAM_CHUNK ? rest : SUPERADAM_CHUNK))
            atomic_store_explicit(&c->differs, 1, memory_order_relaxed);
    }
}

static int elements_differ(const superadam_segment *segment, const uint16_t *parameter, int threads)
{
    const int64_t chunks = (segment->length + SUPERADAM_CHUNK - 1) / SUPERADAM_CHUNK;
    comparison c = {.segment = segment, .parameter = parameter};
    threads_run(chunks < 64 ? 1 : threads, 0, chunks, compare_chunks, &c);
    return c.differs;
}

int64_t superadam_differing(const superadam_segment *segments, const int64_t *rows, int64_t count, int everything,
                            int threads, int64_t *found)
{
    const uint64_t saved = float_control_enter();
    int64_t number = 0;
    for (int64_t i = 0; i < count; i++) {
        if (i + ROWS_AHEAD < count)
            prefetch_ends(&segments[rows[i + ROWS_AHEAD]]);
        const superadam_segment *segment = &segments[rows[i]];
        const uint16_t *parameter = segment->out;
        if (!parameter || !segment->master || segment->length <= 0 ||
            (segment->out_dtype != SUPERADAM_BFLOAT16 && segment->out_dtype != SUPERADAM_FLOAT16))
            continue;
        if (everything ? elements_differ(segment, parameter, threads) : samples_differ(segment, parameter))
            found[number++] = rows[i];
    }
    float_control_leave(saved);
    return number;
}
