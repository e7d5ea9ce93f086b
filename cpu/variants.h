/* Every combination of pass and dtypes, of whether uncertain elements are listed, and whether the state is in fewer
 * bits, as a function of its own, and the kernel that picks one. Included once per instruction set, after its vec_*.h,
 * with KERNEL naming the function to define. */
#include "adam_loop.h"

static adam_scalars adam_scalars_of(const superadam_coefficients *c)
{
    adam_scalars k = {(real)c->scale,
                      (real)c->decay,
                      (real)c->weight_decay,
                      (real)c->one_minus_beta1,
                      (real)c->beta2,
                      (real)c->one_minus_beta2,
                      (real)c->negative_step_size,
                      (real)c->sqrt_bias_correction2,
                      (real)c->eps,
                      1 / (real)c->sqrt_bias_correction2,
                      (uint32_t)c->turn,
                      (int)c->flags};
    return k;
}

static interval_scalars interval_scalars_of(const superadam_coefficients *c)
{
    interval_scalars k = {(real)c->interval_spread, (real)c->interval_slope, (real)c->interval_kappa,
                          (real)c->interval_least, (real)c->interval_slack};
    return k;
}

static inline __attribute__((always_inline)) void run_chunks(int pass, int gradient_dtype, int out_dtype, int lists,
                                                             int compact, const superadam_segment *segment,
                                                             const superadam_coefficients *coefficients, int64_t first,
                                                             int64_t last, int stream)
{
    /* Local copies whose address does not escape: the compiler can keep them in registers across the stores. */
    const superadam_segment here = *segment;
    adam_scalars current = {0}, accepted = {0};
    interval_scalars interval = {0};
    if (pass != SUPERADAM_NORM)
        current = adam_scalars_of(&coefficients[here.coefficients]);
    if (lists)
        interval = interval_scalars_of(&coefficients[here.coefficients]);
    if (pass == SUPERADAM_COMMIT_AND_SPECULATE)
        accepted = adam_scalars_of(&coefficients[here.accepted_coefficients]);
    for (int64_t chunk = first; chunk < last; chunk++)
        run_chunk(pass, gradient_dtype, out_dtype, lists, compact, &here, &accepted, &current, &interval, chunk,
                  stream);
    if (stream)
        vec_stream_fence();
}

#define VARIANT(PASS, GRADIENT, OUT, LISTS, COMPACT)                                                               \
    static __attribute__((noinline)) void run_##PASS##_##GRADIENT##_##OUT##_##LISTS##_##COMPACT(                   \
        const superadam_segment *segment, const superadam_coefficients *coefficients, int64_t first, int64_t last, \
        int stream)                                                                                                \
    {                                                                                                              \
        run_chunks(SUPERADAM_##PASS, SUPERADAM_##GRADIENT, SUPERADAM_##OUT, LISTS, COMPACT, segment, coefficients, \
                   first, last, stream);                                                                           \
    }
#define CASE(PASS, GRADIENT, OUT, LISTS, COMPACT)                                                          \
    case VARIANT_KEY(SUPERADAM_##PASS, SUPERADAM_##GRADIENT, SUPERADAM_##OUT, LISTS, COMPACT):             \
        run_##PASS##_##GRADIENT##_##OUT##_##LISTS##_##COMPACT(segment, coefficients, first, last, stream); \
        break;
#define VARIANT_KEY(pass, gradient, out, lists, compact) \
    ((((compact) * 2 + (lists)) * 8 + (pass)) * 8 + (gradient)) * 8 + (out)

#define EACH_OUT(X, PASS, GRADIENT, COMPACT) \
    X(PASS, GRADIENT, FLOAT32, 0, COMPACT)   \
    X(PASS, GRADIENT, BFLOAT16, 0, COMPACT)  \
    X(PASS, GRADIENT, FLOAT16, 0, COMPACT)
#define EACH_LIST(X, PASS, GRADIENT, COMPACT) \
    X(PASS, GRADIENT, BFLOAT16, 1, COMPACT)   \
    X(PASS, GRADIENT, FLOAT16, 1, COMPACT)
#define EACH_OF_STATE(X, GRADIENT, COMPACT)              \
    X(COMMIT, GRADIENT, NONE, 0, COMPACT)                \
    X(UPDATE, GRADIENT, NONE, 0, COMPACT)                \
    EACH_OUT(X, SPECULATE, GRADIENT, COMPACT)            \
    EACH_OUT(X, COMMIT_AND_SPECULATE, GRADIENT, COMPACT) \
    EACH_OUT(X, UPDATE, GRADIENT, COMPACT)               \
    EACH_LIST(X, SPECULATE, GRADIENT, COMPACT)           \
    EACH_LIST(X, COMMIT_AND_SPECULATE, GRADIENT, COMPACT)
#define EACH_OF_GRADIENT(X, GRADIENT) \
    X(NORM, GRADIENT, NONE, 0, 0)     \
    EACH_OF_STATE(X, GRADIENT, 0)     \
    EACH_OF_STATE(X, GRADIENT, 1)
#define EACH_GRADIENT(X) EACH_OF_GRADIENT(X, FLOAT32) EACH_OF_GRADIENT(X, BFLOAT16) EACH_OF_GRADIENT(X, FLOAT16)
#define EACH_DOUBLE(X)                              \
    X(NORM, FLOAT64, NONE, 0, 0)                    \
    X(COMMIT, FLOAT64, NONE, 0, 0)                  \
    X(UPDATE, FLOAT64, NONE, 0, 0)                  \
    X(SPECULATE, FLOAT64, FLOAT64, 0, 0)            \
    X(COMMIT_AND_SPECULATE, FLOAT64, FLOAT64, 0, 0) \
    X(UPDATE, FLOAT64, FLOAT64, 0, 0)

#if REAL_DTYPE == SUPERADAM_FLOAT64
EACH_DOUBLE(VARIANT)
#else
EACH_GRADIENT(VARIANT)
#endif

void KERNEL(int pass, const superadam_segment *segment, const superadam_coefficients *coefficients, int64_t first,
            int64_t last, int stream)
{
    const int out = pass == SUPERADAM_NORM || pass == SUPERADAM_COMMIT ? SUPERADAM_NONE : segment->out_dtype;
    const int may_list = pass == SUPERADAM_SPECULATE || pass == SUPERADAM_COMMIT_AND_SPECULATE;
    const int lists = may_list && segment->uncertain != 0, compact = pass != SUPERADAM_NORM && segment->format != 0;
    switch (VARIANT_KEY(pass, segment->gradient_dtype, out, lists, compact)) {
#if REAL_DTYPE == SUPERADAM_FLOAT64
        EACH_DOUBLE(CASE)
#else
        EACH_GRADIENT(CASE)
#endif
    }
}
