/* Every combination of pass and dtypes as a function of its own, and the kernel that picks one. Included once per
 * instruction set, after adam_loop.h, with KERNEL naming the function to define. */

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
                      (int)c->flags};
    return k;
}

static inline __attribute__((always_inline)) void run_chunks(int pass, int gradient_dtype, int out_dtype,
                                                             const superadam_segment *segment,
                                                             const superadam_coefficients *coefficients, int64_t first,
                                                             int64_t last, int stream)
{
    /* Local copies whose address does not escape: the compiler can keep them in registers across the stores. */
    const superadam_segment here = *segment;
    adam_scalars current = {0}, accepted = {0};
    if (pass != SUPERADAM_NORM)
        current = adam_scalars_of(&coefficients[here.coefficients]);
    if (pass == SUPERADAM_COMMIT_AND_SPECULATE)
        accepted = adam_scalars_of(&coefficients[here.accepted_coefficients]);
    for (int64_t chunk = first; chunk < last; chunk++)
        run_chunk(pass, gradient_dtype, out_dtype, &here, &accepted, &current, chunk, stream);
    if (stream)
        vec_stream_fence();
}

#define VARIANT(PASS, GRADIENT, OUT)                                                                                  \
    static __attribute__((noinline)) void run_##PASS##_##GRADIENT##_##OUT(const superadam_segment *segment,           \
                                                                          const superadam_coefficients *coefficients, \
                                                                          int64_t first, int64_t last, int stream)    \
    {                                                                                                                 \
        run_chunks(SUPERADAM_##PASS, SUPERADAM_##GRADIENT, SUPERADAM_##OUT, segment, coefficients, first, last,       \
                   stream);                                                                                           \
    }
#define CASE(PASS, GRADIENT, OUT)                                                    \
    case SUPERADAM_##PASS * 64 + SUPERADAM_##GRADIENT * 8 + SUPERADAM_##OUT:         \
        run_##PASS##_##GRADIENT##_##OUT(segment, coefficients, first, last, stream); \
        break;

#define EACH_OUT(X, PASS, GRADIENT) X(PASS, GRADIENT, FLOAT32) X(PASS, GRADIENT, BFLOAT16) X(PASS, GRADIENT, FLOAT16)
#define EACH_GRADIENT(X) EACH_OF_GRADIENT(X, FLOAT32) EACH_OF_GRADIENT(X, BFLOAT16) EACH_OF_GRADIENT(X, FLOAT16)
#define EACH_OF_GRADIENT(X, GRADIENT) \
    X(NORM, GRADIENT, NONE)           \
    X(COMMIT, GRADIENT, NONE)         \
    X(UPDATE, GRADIENT, NONE)         \
    EACH_OUT(X, SPECULATE, GRADIENT) EACH_OUT(X, COMMIT_AND_SPECULATE, GRADIENT) EACH_OUT(X, UPDATE, GRADIENT)
#define EACH_DOUBLE(X)                        \
    X(NORM, FLOAT64, NONE)                    \
    X(COMMIT, FLOAT64, NONE)                  \
    X(UPDATE, FLOAT64, NONE)                  \
    X(SPECULATE, FLOAT64, FLOAT64)            \
    X(COMMIT_AND_SPECULATE, FLOAT64, FLOAT64) \
    X(UPDATE, FLOAT64, FLOAT64)

#if REAL_DTYPE == SUPERADAM_FLOAT64
EACH_DOUBLE(VARIANT)
#else
EACH_GRADIENT(VARIANT)
#endif

void KERNEL(int pass, const superadam_segment *segment, const superadam_coefficients *coefficients, int64_t first,
            int64_t last, int stream)
{
    const int out = pass == SUPERADAM_NORM || pass == SUPERADAM_COMMIT ? SUPERADAM_NONE : segment->out_dtype;
    switch (pass * 64 + segment->gradient_dtype * 8 + out) {
#if REAL_DTYPE == SUPERADAM_FLOAT64
        EACH_DOUBLE(CASE)
#else
        EACH_GRADIENT(CASE)
#endif
    }
}
