/* Double precision for fp64 parameters: plain C on every machine (such parameters are rare and small). */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define REAL_DTYPE SUPERADAM_FLOAT64

typedef double real;
typedef double vec;
typedef int vec_mask;
enum { VEC_WIDTH = 1, VEC_UNROLL = 1, VEC_DIVIDES = 1 };

static inline vec vec_set(double value) { return value; }
static inline vec vec_add(vec a, vec b) { return a + b; }
static inline vec vec_sub(vec a, vec b) { return a - b; }
static inline vec vec_mul(vec a, vec b) { return a * b; }
static inline vec vec_div(vec a, vec b) { return a / b; }
static inline vec vec_fma(vec a, vec b, vec c) { return fma(a, b, c); }
static inline vec vec_sqrt(vec a) { return sqrt(a); }
static inline vec vec_neg(vec a) { return -a; }
static inline vec vec_max(vec a, vec b) { return a < b || b != b ? b : a; }
static inline vec vec_round_bfloat16(vec value) { return value; } /* no gradient here is bf16 */

/* For interval.h, which is compiled with the loop and never reached: nothing is narrower than its state here. */
static inline vec vec_min(vec a, vec b) { return a < b ? a : b; }
static inline vec vec_abs(vec a) { return fabs(a); }
static inline vec vec_bits(vec a, uint32_t kept, uint32_t set) { return a + kept + set; }
static inline vec_mask vec_less(vec a, vec b) { return a < b; }
static inline vec_mask vec_and_less(vec_mask mask, vec a, vec b) { return mask & (a < b); }
static inline unsigned vec_lanes(vec_mask mask) { return (unsigned)mask; }

static inline vec vec_load(int dtype, const void *base, int64_t index, int count)
{
    double value;
    (void)dtype, (void)count; /* one element is always a whole vector */
    memcpy(&value, (const char *)base + index * 8, sizeof value);
    return value;
}

static inline void vec_store(int dtype, void *base, int64_t index, vec value, int count, int stream)
{
    (void)dtype, (void)count, (void)stream;
    memcpy((char *)base + index * 8, &value, sizeof value);
}

static inline void vec_prefetch(int dtype, const void *base, int64_t index)
{
    (void)dtype;
    __builtin_prefetch((const char *)base + index * 8);
}

static inline void vec_stream_fence(void) {}

typedef struct {
    double lane[16];
} squares;

static inline void squares_zero(squares *sums) { memset(sums, 0, sizeof *sums); }
static inline void squares_add(squares *sums, int lane, vec g) { sums->lane[lane] = fma(g, g, sums->lane[lane]); }
static inline void squares_lanes(const squares *sums, double *lanes) { memcpy(lanes, sums->lane, sizeof sums->lane); }
