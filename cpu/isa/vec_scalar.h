/* Plain C, one element at a time: runs everywhere and defines what the other instruction sets must compute. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float real;
typedef float vec;
typedef int vec_mask;
enum { VEC_WIDTH = 1, VEC_UNROLL = 1, VEC_DIVIDES = 1 };

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline vec vec_set(float value) { return value; }
static inline vec vec_add(vec a, vec b) { return a + b; }
static inline vec vec_sub(vec a, vec b) { return a - b; }
static inline vec vec_mul(vec a, vec b) { return a * b; }
static inline vec vec_div(vec a, vec b) { return a / b; }
static inline vec vec_fma(vec a, vec b, vec c) { return fmaf(a, b, c); }
static inline vec vec_sqrt(vec a) { return sqrtf(a); }
static inline vec vec_neg(vec a) { return -a; }
static inline vec vec_max(vec a, vec b) { return a < b || b != b ? b : a; }
static inline vec vec_min(vec a, vec b) { return a < b ? a : b; }
static inline vec vec_abs(vec a) { return fabsf(a); }
static inline vec vec_bits(vec a, uint32_t kept, uint32_t set) { return float_of((bits_of(a) & kept) | set); }
static inline vec_mask vec_less(vec a, vec b) { return a < b; }
static inline vec_mask vec_and_less(vec_mask mask, vec a, vec b) { return mask & (a < b); }
static inline unsigned vec_lanes(vec_mask mask) { return (unsigned)mask; }

static inline vec vec_load_float32(const void *from)
{
    float value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void vec_store_float32(void *to, vec value, int stream)
{
    (void)stream;
    memcpy(to, &value, sizeof value);
}

static inline vec vec_load_bfloat16(const void *from)
{
    uint16_t half;
    memcpy(&half, from, sizeof half);
    return float_of((uint32_t)half << 16);
}

static inline uint16_t to_bfloat16(vec value)
{
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(value != value ? bits >> 16 | 0x40 : rounded);
}

static inline vec vec_round_bfloat16(vec value) { return float_of((uint32_t)to_bfloat16(value) << 16); }

static inline void vec_store_bfloat16(void *to, vec value, int stream)
{
    (void)stream;
    const uint16_t half = to_bfloat16(value);
    memcpy(to, &half, sizeof half);
}

static inline vec vec_load_float16(const void *from)
{
    uint16_t half;
    memcpy(&half, from, sizeof half);
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7FFF;
    if (magnitude >= 0x7C00) /* Inf, NaN (quieted) */
        return float_of(sign | 0x7F800000 | magnitude << 13 | (magnitude > 0x7C00) << 22);
    if (magnitude < 0x0400) /* denormal or zero: magnitude units of 2^-24, exactly */
        return float_of(sign | bits_of((float)magnitude * 0x1p-24f));
    return float_of(sign | ((magnitude << 13) + (112u << 23)));
}

static inline void vec_store_float16(void *to, vec value, int stream)
{
    (void)stream;
    const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    uint32_t half;
    if (magnitude > 0x7F800000)
        half = 0x7E00 | (magnitude >> 13 & 0x3FF);
    else if (magnitude >= 0x477FF000) /* 65520 and above round to Inf */
        half = 0x7C00;
    else if (magnitude < 0x38800000) /* below 2^-14: the addition rounds to units of 2^-24 */
        half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    else
        half = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    const uint16_t result = (uint16_t)(sign | half);
    memcpy(to, &result, sizeof result);
}

static inline void vec_stream_fence(void) {}

typedef struct {
    double lane[16];
} squares;

static inline void squares_zero(squares *sums) { memset(sums, 0, sizeof *sums); }
static inline void squares_add(squares *sums, int lane, vec g)
{
    sums->lane[lane] += (double)g * (double)g; /* exact product */
}
static inline void squares_lanes(const squares *sums, double *lanes) { memcpy(lanes, sums->lane, sizeof sums->lane); }

#include "vec_dtypes.h"
