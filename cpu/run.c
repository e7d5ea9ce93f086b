/* superadam_run: checks a list of segments, cuts it into chunks and runs them as one job. */

#include <math.h>
#include <stdlib.h>

#include "float_control.h"
#include "superadam.h"
#include "threads.h"

/* A thread is woken only for at least this many chunks: 64 Ki elements, which take about 50 us. */
enum { CHUNKS_PER_THREAD = 16 };
/* From this many elements on, `out` is written past the caches, which could not hold it anyway. */
enum { STREAM_FROM = 1 << 22 };
/* Values between the one that is scattered and the one whose place is prefetched. */
enum { SCATTERED_AHEAD = 32 };
/* Segments of one job where memory for a table of all of them is missing: a pass never fails for that. */
enum { SEGMENTS_WITHOUT_MEMORY = 255 };

typedef struct {
    superadam_kernel *kernel;
    int pass, stream, is_followed;
    const superadam_segment *segments;
    const superadam_coefficients *coefficients;
    const int64_t *first_chunk; /* of each segment, counted over all of them; one more entry than segments */
    int64_t segment_count;
} run;

static int64_t chunk_count(int64_t length) { return (length + SUPERADAM_CHUNK - 1) / SUPERADAM_CHUNK; }

/* The last segment that begins at or before `chunk`: empty segments before it begin there too. */
static int64_t find_segment(const run *r, int64_t chunk)
{
    int64_t low = 0, high = r->segment_count;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (r->first_chunk[middle] <= chunk)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Copies the values of the chunks [first, last) to their places in the target, and leaves these places. */
static void scatter(const superadam_segment *segment, int64_t first, int64_t last)
{
    const uint16_t *values = segment->out;
    uint16_t *target = segment->target;
    const int64_t end = last * SUPERADAM_CHUNK < segment->length ? last * SUPERADAM_CHUNK : segment->length;
    for (int64_t i = first * SUPERADAM_CHUNK; segment->places && i < end; i++)
        segment->places[i] = (int32_t)(segment->begin + segment->index[i]);
    for (int64_t i = first * SUPERADAM_CHUNK; target && i < end; i++) {
        if (i + SCATTERED_AHEAD < end)
            __builtin_prefetch(&target[segment->index[i + SCATTERED_AHEAD]], 1);
        target[segment->index[i]] = values[i];
    }
}

static void run_units(void *context, int64_t first, int64_t last)
{
    const run *r = context;
    for (int64_t at = find_segment(r, first); at < r->segment_count && r->first_chunk[at] < last; at++) {
        const superadam_segment *segment = &r->segments[at];
        const int64_t offset = r->first_chunk[at], end = r->first_chunk[at + 1] < last ? r->first_chunk[at + 1] : last;
        const int64_t begin = offset > first ? offset : first;
        superadam_kernel *kernel = segment->gradient_dtype == SUPERADAM_FLOAT64 ? superadam_kernel_float64 : r->kernel;
        kernel(r->pass, segment, r->coefficients, begin - offset, end - offset,
               r->stream && (uintptr_t)segment->out % 64 == 0);
        if (r->pass == SUPERADAM_SPECULATE && (segment->target || segment->places))
            scatter(segment, begin - offset, end - offset);
    }
}

static int is_dtype(int dtype) { return dtype >= SUPERADAM_FLOAT32 && dtype <= SUPERADAM_FLOAT64; }

static int is_narrower(const superadam_segment *s)
{
    return s->out_dtype == SUPERADAM_BFLOAT16 || s->out_dtype == SUPERADAM_FLOAT16;
}

/* Whether state can be read, and written, in the format that a segment says. */
static int check_format(int pass, const superadam_segment *s, int amsgrad)
{
    const int moments = s->format & (SUPERADAM_MOMENTS_BFLOAT16 | SUPERADAM_MOMENTS_8BIT);
    const int masters = s->format & (SUPERADAM_MASTER_24BIT | SUPERADAM_LISTED_24BIT);
    if ((s->format & ~(moments | masters)) || s->gradient_dtype == SUPERADAM_FLOAT64 || (moments & (moments - 1)) ||
        (masters & (masters - 1)) || (moments == SUPERADAM_MOMENTS_8BIT && amsgrad) || s->first_threshold < 0 ||
        s->first_threshold >= SUPERADAM_BLOCK)
        return SUPERADAM_BAD_FORMAT;
    if (masters == SUPERADAM_LISTED_24BIT && (pass != SUPERADAM_SPECULATE || s->uncertain))
        return SUPERADAM_BAD_FORMAT;
    if (moments == SUPERADAM_MOMENTS_8BIT && s->length % SUPERADAM_BLOCK)
        return SUPERADAM_BAD_LENGTH;
    if (s->length &&
        ((masters == SUPERADAM_MASTER_24BIT && !s->master_low) || (masters == SUPERADAM_LISTED_24BIT && !s->index) ||
         (moments == SUPERADAM_MOMENTS_8BIT && (!s->exp_avg_exponents || !s->exp_avg_sq_exponents))))
        return SUPERADAM_BAD_POINTER;
    return SUPERADAM_OK;
}

/* Whether a segment's list of uncertain elements can be filled. */
static int check_list(const superadam_segment *s, int amsgrad)
{
    const superadam_uncertain *list = s->uncertain;
    if (!is_narrower(s))
        return SUPERADAM_BAD_DTYPE;
    if (list->capacity < 0 || s->length > UINT32_MAX)
        return SUPERADAM_BAD_LENGTH;
    if (list->capacity && (!list->index || !list->gradient || !list->master || !list->exp_avg || !list->exp_avg_sq ||
                           (amsgrad && !list->max_exp_avg_sq) || (list->max_exp_avg_sq && !s->max_exp_avg_sq)))
        return SUPERADAM_BAD_POINTER;
    return SUPERADAM_OK;
}

static int check_segment(int pass, const superadam_segment *s, const superadam_coefficients *coefficients,
                         int64_t coefficient_count)
{
    const int reads_state = pass != SUPERADAM_NORM;
    const int fuses = pass == SUPERADAM_COMMIT_AND_SPECULATE;
    const int speculates = pass == SUPERADAM_SPECULATE || fuses;
    int amsgrad = 0;

    if (s->length < 0)
        return SUPERADAM_BAD_LENGTH;
    if (!is_dtype(s->gradient_dtype))
        return SUPERADAM_BAD_DTYPE;
    if (speculates || (pass == SUPERADAM_UPDATE && s->out_dtype != SUPERADAM_NONE)) {
        if (!is_dtype(s->out_dtype) || (s->out_dtype == SUPERADAM_FLOAT64) != (s->gradient_dtype == SUPERADAM_FLOAT64))
            return SUPERADAM_BAD_DTYPE;
        if (s->length && !s->out)
            return SUPERADAM_BAD_POINTER;
    }
    if (reads_state) {
        if (s->coefficients < 0 || s->coefficients >= coefficient_count)
            return SUPERADAM_BAD_COEFFICIENTS;
        if (fuses && (s->accepted_coefficients < 0 || s->accepted_coefficients >= coefficient_count))
            return SUPERADAM_BAD_COEFFICIENTS;
        amsgrad = coefficients[s->coefficients].flags & SUPERADAM_AMSGRAD;
        if (fuses)
            amsgrad |= coefficients[s->accepted_coefficients].flags & SUPERADAM_AMSGRAD;
    }
    if (!s->sums != !s->nonfinite || (!reads_state && s->length && !s->sums))
        return SUPERADAM_BAD_POINTER;
    if (s->length && (!s->gradient || (fuses && !s->accepted_gradient) || (amsgrad && !s->max_exp_avg_sq) ||
                      (reads_state && (!s->master || !s->exp_avg || !s->exp_avg_sq))))
        return SUPERADAM_BAD_POINTER;
    if (reads_state && s->format) {
        const int code = check_format(pass, s, amsgrad);
        if (code != SUPERADAM_OK)
            return code;
    }
    if (pass == SUPERADAM_SPECULATE && (s->target || s->places)) {
        if (s->target && !is_narrower(s))
            return SUPERADAM_BAD_DTYPE;
        if (s->length && !s->index)
            return SUPERADAM_BAD_POINTER;
    }
    return speculates && s->uncertain ? check_list(s, amsgrad) : SUPERADAM_OK;
}

/* Runs the segments as one parallel job; `first_chunk` has room for one entry more than there are. */
static void run_segments(run *r, int64_t *first_chunk, int threads)
{
    int64_t chunks = 0;
    for (int64_t i = 0; i < r->segment_count; i++) {
        first_chunk[i] = chunks;
        chunks += chunk_count(r->segments[i].length);
    }
    first_chunk[r->segment_count] = chunks;
    r->first_chunk = first_chunk;

    if (threads > chunks / CHUNKS_PER_THREAD)
        threads = (int)(chunks / CHUNKS_PER_THREAD);
    threads_run(threads, r->is_followed, chunks, run_units, r);
}

/* As superadam_run. `is_followed`: as of threads_run. */
static int run_pass(int isa, int pass, const superadam_segment *segments, int64_t segment_count,
                    const superadam_coefficients *coefficients, int64_t coefficient_count, int threads, int is_followed)
{
    run r = {.kernel = dispatch_kernel(isa), .pass = pass, .coefficients = coefficients, .is_followed = is_followed};
    if (!r.kernel)
        return SUPERADAM_BAD_ISA;
    if (pass < SUPERADAM_NORM || pass > SUPERADAM_UPDATE)
        return SUPERADAM_BAD_PASS;
    if (segment_count < 0)
        return SUPERADAM_BAD_LENGTH;

    int64_t elements = 0;
    for (int64_t i = 0; i < segment_count; i++) {
        const int code = check_segment(pass, &segments[i], coefficients, coefficient_count);
        if (code != SUPERADAM_OK)
            return code;
        elements += segments[i].length;
    }
    r.stream = elements >= STREAM_FROM;

    int64_t few[SEGMENTS_WITHOUT_MEMORY + 1];
    int64_t *all = segment_count > SEGMENTS_WITHOUT_MEMORY ? malloc(((size_t)segment_count + 1) * sizeof *all) : NULL;
    const int64_t most = all ? segment_count : SEGMENTS_WITHOUT_MEMORY;
    for (int64_t begin = 0; begin < segment_count; begin += most) {
        r.segments = &segments[begin];
        r.segment_count = segment_count - begin < most ? segment_count - begin : most;
        run_segments(&r, all ? all : few, threads);
    }
    free(all);
    return SUPERADAM_OK;
}

int superadam_run(int isa, int pass, const superadam_segment *segments, int64_t segment_count,
                  const superadam_coefficients *coefficients, int64_t coefficient_count, int threads)
{
    return run_pass(isa, pass, segments, segment_count, coefficients, coefficient_count, threads, 0);
}

double superadam_sum(const double *values, int64_t count)
{
    const uint64_t saved = float_control_enter();
    double total = 0;
    for (int64_t i = 0; i < count; i++)
        total += values[i];
    float_control_leave(saved);
    return total;
}

int superadam_step(int isa, superadam_segment *segments, int64_t segment_count, superadam_coefficients *coefficients,
                   int64_t coefficient_count, const double *sums, const int64_t *nonfinite, int64_t chunk_count,
                   double max_norm, int threads, superadam_verdict *verdict)
{
    const double begin = seconds_now();
    const int code = run_pass(isa, SUPERADAM_NORM, segments, segment_count, NULL, 0, threads, 1);
    if (code != SUPERADAM_OK)
        return code;
    const uint64_t saved = float_control_enter();
    const double norm = sqrt(superadam_sum(sums, chunk_count)), factor = max_norm / (norm + 1e-6);
    *verdict = (superadam_verdict){.norm = norm, .clip = factor < 1 ? (float)factor : 1};
    for (int64_t i = 0; i < chunk_count; i++)
        verdict->nonfinite += nonfinite[i];
    float_control_leave(saved);
    verdict->seconds = seconds_now() - begin;
    if (verdict->nonfinite)
        return SUPERADAM_OK;
    for (int64_t i = 0; i < coefficient_count && verdict->clip != 1; i++) {
        coefficients[i].scale = verdict->clip;
        coefficients[i].flags |= SUPERADAM_SCALE;
    }
    for (int64_t i = 0; i < segment_count; i++) {
        segments[i].sums = NULL;
        segments[i].nonfinite = NULL;
    }
    return superadam_run(isa, SUPERADAM_UPDATE, segments, segment_count, coefficients, coefficient_count, threads);
}

uint64_t superadam_float_control_enter(void) { return float_control_enter(); }

void superadam_float_control_leave(uint64_t saved) { float_control_leave(saved); }

int superadam_float_control_is_usual(void) { return float_control_is_usual(); }
