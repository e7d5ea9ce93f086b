/* NEON at the armv8-a baseline, which every aarch64 CPU has: 4 elements; the sums in eight registers of 2 doubles.
 * div and sqrt occupy one of two pipelines for 10 and 9 cycles (Neoverse V2). bf16 is rounded with integers (BFCVTN
 * needs armv8.6-a), fp16 is converted by FCVTL and FCVTN. Stores are ordinary ones: Arm cores notice that a loop writes
 * whole cache lines and do not read them first, and STNP needs two registers. */

#include <arm_neon.h>
#include <stdint.h>

typedef float real;
typedef float32x4_t vec;
typedef uint32x4_t vec_mask;
enum { VEC_WIDTH = 4, VEC_UNROLL = 4, VEC_DIVIDES = 1 };

static inline vec vec_set(float value) { return vdupq_n_f32(value); }
static inline vec vec_add(vec a, vec b) { return vaddq_f32(a, b); }
static inline vec vec_sub(vec a, vec b) { return vsubq_f32(a, b); }
static inline vec vec_mul(vec a, vec b) { return vmulq_f32(a, b); }
static inline vec vec_div(vec a, vec b) { return vdivq_f32(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
static inline vec vec_sqrt(vec a) { return vsqrtq_f32(a); }
static inline vec vec_neg(vec a) { return vnegq_f32(a); }

/* Not FMAX: that prefers +0 to -0, and a NaN on either side. */
static inline vec vec_max(vec a, vec b)
{
    uint32x4_t take_a = vbicq_u32(vceqq_f32(b, b), vcltq_f32(a, b));
    return vbslq_f32(take_a, a, b);
}

static inline vec vec_min(vec a, vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline vec vec_abs(vec a) { return vabsq_f32(a); }
static inline vec vec_bits(vec a, uint32_t kept, uint32_t set)
{
    return vreinterpretq_f32_u32(vorrq_u32(vandq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(kept)), vdupq_n_u32(set)));
}
static inline vec_mask vec_less(vec a, vec b) { return vcltq_f32(a, b); }
static inline vec_mask vec_and_less(vec_mask mask, vec a, vec b) { return vandq_u32(mask, vcltq_f32(a, b)); }
static inline unsigned vec_lanes(vec_mask mask)
{
    const uint32x4_t bits = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(mask, bits));
}

static inline vec vec_load_float32(const void *from) { return vld1q_f32((const float *)from); }

static inline void vec_store_float32(void *to, vec value, int stream)
{
    (void)stream;
    vst1q_f32((float *)to, value);
}

static inline vec vec_load_bfloat16(const void *from)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)from), 16));
}

static inline uint16x4_t to_bfloat16(vec value)
{
    uint32x4_t bits = vreinterpretq_u32_f32(value), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint16x4_t rounded = vaddhn_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF))); /* the high halves of the sums */
    uint16x4_t quiet = vorr_u16(vshrn_n_u32(bits, 16), vdup_n_u16(0x40));
    uint16x4_t is_number = vmovn_u32(vceqq_f32(value, value));
    return vbsl_u16(is_number, rounded, quiet);
}

static inline vec vec_round_bfloat16(vec value) { return vreinterpretq_f32_u32(vshll_n_u16(to_bfloat16(value), 16)); }

static inline void vec_store_bfloat16(void *to, vec value, int stream)
{
    (void)stream;
    vst1_u16((uint16_t *)to, to_bfloat16(value));
}

static inline vec vec_load_float16(const void *from)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)from)));
}

static inline void vec_store_float16(void *to, vec value, int stream)
{
    (void)stream;
    vst1_u16((uint16_t *)to, vreinterpret_u16_f16(vcvt_f16_f32(value)));
}

static inline void vec_stream_fence(void) {}

typedef struct {
    float64x2_t lane[8];
} squares;

static inline void squares_zero(squares *sums)
{
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        sums->lane[i] = vdupq_n_f64(0);
}

static inline __attribute__((always_inline)) void squares_add(squares *sums, int lane, vec g)
{
    float64x2_t low = vcvt_f64_f32(vget_low_f32(g)), high = vcvt_high_f64_f32(g);
    sums->lane[lane / 2] = vfmaq_f64(sums->lane[lane / 2], low, low);
    sums->lane[lane / 2 + 1] = vfmaq_f64(sums->lane[lane / 2 + 1], high, high);
}

static inline void squares_lanes(const squares *sums, double *lanes)
{
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        vst1q_f64(lanes + 2 * i, sums->lane[i]);
}

#include "vec_dtypes.h"
