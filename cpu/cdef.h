/* The C interface of the kernels: the one list of declarations, read by the C files (through superadam.h) and by cffi.
 * It holds only what both can parse: no includes, no conditionals, constants as plain integers. */

/* Gradients are summed in chunks of this many consecutive elements of one parameter ... */
#define SUPERADAM_CHUNK 4096
/* ... in this many virtual lanes: lane i takes the elements i, i + 16, i + 32, ... of its chunk. */
#define SUPERADAM_LANES 16
/* Elements that share an exponent in 8-bit moments, and after which thresholds begin again. */
#define SUPERADAM_BLOCK 64

/* Element types. FLOAT64 stands alone: a segment is all FLOAT64 or has none of it. */
#define SUPERADAM_NONE 0
#define SUPERADAM_FLOAT32 1
#define SUPERADAM_BFLOAT16 2
#define SUPERADAM_FLOAT16 3
#define SUPERADAM_FLOAT64 4

/* How a segment's state is stored: 0, as float, or double when gradient_dtype is FLOAT64; or a sum of these. A step
 * computes in float what it makes of the stored values, and stores its results as docs/design.md says. */
#define SUPERADAM_MOMENTS_BFLOAT16 1
#define SUPERADAM_MOMENTS_8BIT 2 /* a byte for each element, and one for each 64; whole 64s, and no AMSGRAD */
#define SUPERADAM_MASTER_24BIT 4 /* the upper 16 bits of a float, and the next 8 */
#define SUPERADAM_LISTED_24BIT 8 /* of SPECULATE: the state is a list of one with MASTER_24BIT, in float */

/* Passes over a segment: what is read -> what is written. */
#define SUPERADAM_NORM 0                 /* gradient -> sums */
#define SUPERADAM_SPECULATE 1            /* master, moments, gradient -> out */
#define SUPERADAM_COMMIT 2               /* master, moments, gradient -> master, moments */
#define SUPERADAM_COMMIT_AND_SPECULATE 3 /* master, moments, accepted gradient, gradient -> master, moments, out */
#define SUPERADAM_UPDATE 4               /* master, moments, gradient -> master, moments, out where there is one */

/* Parts of the formula that a coefficient set switches on. */
#define SUPERADAM_SCALE 1     /* multiply the gradient by `scale` */
#define SUPERADAM_MAXIMIZE 2  /* negate the gradient */
#define SUPERADAM_DECOUPLED 4 /* weight decay on the parameter (AdamW) */
#define SUPERADAM_L2 8        /* weight decay added to the gradient (Adam) */
#define SUPERADAM_AMSGRAD 16  /* divide by the largest second moment so far */
#define SUPERADAM_ROUND 32    /* with SCALE, round that product to bf16; nothing in double */

/* Whether an instruction set can be used. */
#define SUPERADAM_RUNNABLE 0
#define SUPERADAM_NOT_COMPILED 1
#define SUPERADAM_NOT_SUPPORTED 2

/* Return codes of superadam_run; nothing was read or written unless it is SUPERADAM_OK. */
#define SUPERADAM_OK 0
#define SUPERADAM_BAD_ISA 1
#define SUPERADAM_BAD_PASS 2
#define SUPERADAM_BAD_DTYPE 3
#define SUPERADAM_BAD_LENGTH 4
#define SUPERADAM_BAD_POINTER 5
#define SUPERADAM_BAD_COEFFICIENTS 6
#define SUPERADAM_BAD_FORMAT 7

/* Scalars of one step, computed in double and already rounded to the type the formula runs in; names as in
 * adam_formula.h. */
typedef struct {
    double scale;                 /* s: clip coefficient times unscale factor */
    double decay;                 /* 1 - lr * weight_decay */
    double weight_decay;          /* wd of the L2 form */
    double one_minus_beta1;       /* w */
    double beta2;                 /* b2 */
    double one_minus_beta2;       /* c2 */
    double negative_step_size;    /* nss = -(lr / bc1) */
    double sqrt_bias_correction2; /* bc2s */
    double eps;
    double interval_spread; /* of the interval test (interval.h), whose names these are: ... */
    double interval_slope;
    double interval_kappa;
    double interval_least;
    double interval_slack;
    int64_t turn; /* of the thresholds with which a step stores state in fewer bits (compact.h): 32 bits */
    int64_t flags;
} superadam_coefficients;

/* The elements of a segment whose rounded new value may depend on the factor of their gradient, in any order; arrays of
 * `capacity` entries, with the state as it is after the pass. `count` is 0 before the pass. Where it ends above the
 * capacity, the list is not complete, but `count` is right. */
typedef struct {
    int64_t capacity;
    int64_t count;
    uint32_t *index; /* position in the segment */
    void *gradient;  /* of gradient_dtype */
    float *master;
    float *exp_avg;
    float *exp_avg_sq;
    float *max_exp_avg_sq; /* filled where the segment has that array, too */
} superadam_uncertain;

/* One run of elements of one parameter. Arrays must not overlap; one that a pass does not use may be null. `sums` and
 * `nonfinite` have one entry per chunk, ceil(length / 4096). */
typedef struct {
    const void *gradient;
    const void *accepted_gradient; /* the older gradient, of COMMIT_AND_SPECULATE; of gradient_dtype too */
    void *master;                  /* of `format`, as the moments */
    void *exp_avg;
    void *exp_avg_sq;
    void *max_exp_avg_sq;       /* null unless a coefficient set has AMSGRAD */
    uint8_t *master_low;        /* of MASTER_24BIT: bits 8 to 15; `master` has those above, as uint16_t */
    uint8_t *exp_avg_exponents; /* of MOMENTS_8BIT: for each 64 elements */
    uint8_t *exp_avg_sq_exponents;
    void *out;                      /* the working copy, of out_dtype */
    double *sums;                   /* sum of gradient squared per chunk, before any scaling; null: no norm */
    int64_t *nonfinite;             /* count of Inf and NaN gradients per chunk; null exactly when sums is */
    superadam_uncertain *uncertain; /* of SPECULATE and COMMIT_AND_SPECULATE into a narrower out: the pass lists what is
                                     * not certain in the interval of its coefficients; null: it does not look */
    const uint32_t *index;          /* the position of each element of a list, where SPECULATE also copies it if the out
                                     * is narrower ... */
    void *target;                   /* ... in this array of out_dtype; null: nowhere ... */
    int32_t *places;                /* ... and leaves that position plus `begin`; null: nowhere */
    int64_t begin;
    int64_t length;                /* elements */
    int32_t coefficients;          /* index of the coefficient set for gradient */
    int32_t accepted_coefficients; /* ... for accepted_gradient */
    int32_t gradient_dtype;
    int32_t out_dtype;
    int32_t format;          /* of the state */
    int32_t first_threshold; /* from 0 to 63: thresholds are those of position + this */
} superadam_segment;

/* Instruction sets of this architecture, best first. */
int superadam_isa_count(void);
const char *superadam_isa_name(int isa);
int superadam_isa_status(int isa);

/* Runs one pass over all segments as one parallel job on at most `threads` threads, the caller's included. The bits do
 * not depend on isa or threads. Rounds to nearest and keeps denormals whatever the caller's floating-point control
 * register holds, and restores that register. */
int superadam_run(int isa, int pass, const superadam_segment *segments, int64_t segment_count,
                  const superadam_coefficients *coefficients, int64_t coefficient_count, int threads);

/* What a step was found to be: the 2-norm of its gradients, how many of their elements are Inf or NaN, by which factor
 * the gradients were multiplied, and the seconds until that was known. */
typedef struct {
    double norm;
    int64_t nonfinite;
    double clip;
    double seconds;
} superadam_verdict;

/* NORM, then, unless an element is Inf or NaN, UPDATE with the gradients multiplied by min(1, max_norm / (norm +
 * 1e-6)), rounded to fp32. The segments' `sums` and `nonfinite` are all entries of the arrays of `chunk_count` that are
 * passed here; these pointers and the coefficients' scale are overwritten. */
int superadam_step(int isa, superadam_segment *segments, int64_t segment_count, superadam_coefficients *coefficients,
                   int64_t coefficient_count, const double *sums, const int64_t *nonfinite, int64_t chunk_count,
                   double max_norm, int threads, superadam_verdict *verdict);

/* Samples of a working copy are blocks of this many adjacent elements, ... */
#define SUPERADAM_SAMPLE_WIDTH 8
/* ... at even distances from the first elements to the last: one for each chunk, but at least 2, at most this many. */
#define SUPERADAM_SAMPLE_BLOCKS 64

/* Finds working copies in host memory, BFLOAT16 or FLOAT16, that are not the rounded master: NaN equals NaN, +0 and -0
 * differ. Looks at segments[row], of which out, master, length, format and out_dtype count, for each of `rows`; skips
 * rows of other dtypes and those that lack an array. Compares samples, or every element on at most
 * `threads` threads. Writes the rows that differ to `found`, of `count` entries, and returns their number. */
int64_t superadam_differing(const superadam_segment *segments, const int64_t *rows, int64_t count, int everything,
                            int threads, int64_t *found);

/* Copies bytes[i] bytes from sources[i] to targets[i], one after the other, each on at most `threads` threads. */
void superadam_copy(void *const *targets, const void *const *sources, const int64_t *bytes, int64_t count, int threads);

/* values[0] + values[1] + ..., in this order. */
double superadam_sum(const double *values, int64_t count);

/* Gives the calling thread the floating-point mode that superadam_run computes in, and returns what undoes that. */
uint64_t superadam_float_control_enter(void);
void superadam_float_control_leave(uint64_t saved);
/* Whether the calling thread has that mode: it rounds to nearest and keeps denormals. */
int superadam_float_control_is_usual(void);

/* Stores of superadam_traffic that go past the caches. */
#define SUPERADAM_STREAM_OUT 1
#define SUPERADAM_STREAM_STATE 2

/* Moves what `pass` moves for this segment and computes nothing: reads the arrays that the pass reads, stores back what
 * it read where the pass updates in place (those bits do not change), and fills `out` with ones. The length is a
 * multiple of SUPERADAM_CHUNK and the arrays are aligned to 64 bytes. `burst` elements of one array are touched before
 * the next array, a power of two from 32, where state is stored in bytes from 64, to SUPERADAM_CHUNK; `prefetch` is in
 * bytes ahead of each load, 0 for none; `stream` is a sum of SUPERADAM_STREAM_*. `checksum` becomes the sum modulo 2^32
 * of all 32-bit words of the arrays that were only read. Returns a code as superadam_run does. */
int superadam_traffic(int pass, const superadam_segment *segment, int threads, int burst, int64_t prefetch, int stream,
                      uint32_t *checksum);
