/* AVX-512 F, BW, DQ and VL (Skylake-X, Ice Lake, Zen 4 and later): 16 elements, which is also the number of lanes of
 * the sums. bf16 is rounded with integers: VCVTNEPS2BF16 of AVX512_BF16 flushes denormals whatever MXCSR says. */

#include <immintrin.h>
#include <stdint.h>

typedef float real;
typedef __m512 vec;
typedef __mmask16 vec_mask;
enum { VEC_WIDTH = 16, VEC_UNROLL = 1, VEC_DIVIDES = 0 };

static inline vec vec_set(float value) { return _mm512_set1_ps(value); }
static inline vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec vec_sqrt(vec a) { return _mm512_sqrt_ps(a); }
static inline vec vec_neg(vec a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }

static inline vec vec_max(vec a, vec b)
{
    __mmask16 take_b = _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) | _mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q);
    return _mm512_mask_blend_ps(take_b, a, b);
}

static inline vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); } /* b where a comparison is unordered */
static inline vec vec_abs(vec a) { return _mm512_abs_ps(a); }
static inline vec vec_bits(vec a, uint32_t kept, uint32_t set)
{
    const __m512i mask = _mm512_set1_epi32((int)kept), bits = _mm512_set1_epi32((int)set);
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(_mm512_castps_si512(a), mask, bits, 0xEA)); /* a & mask | bits */
}
static inline vec_mask vec_less(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline vec_mask vec_and_less(vec_mask mask, vec a, vec b)
{
    return _mm512_mask_cmp_ps_mask(mask, a, b, _CMP_LT_OQ);
}
static inline unsigned vec_lanes(vec_mask mask) { return mask; }

static inline vec vec_load_float32(const void *from) { return _mm512_loadu_ps(from); }

static inline void vec_store_float32(void *to, vec value, int stream)
{
    if (stream)
        _mm512_stream_ps((float *)to, value);
    else
        _mm512_storeu_ps(to, value);
}

static inline void store_halves(void *to, __m256i halves, int stream)
{
    if (stream)
        _mm256_stream_si256((__m256i *)to, halves);
    else
        _mm256_storeu_si256((__m256i *)to, halves);
}

static inline vec vec_load_bfloat16(const void *from)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* Each in the low half of its 32 bits. */
static inline __m512i to_bfloat16(vec value)
{
    __m512i bits = _mm512_castps_si512(value), high = _mm512_srli_epi32(bits, 16);
    __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd), 16);
    __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
}

static inline vec vec_round_bfloat16(vec value)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(to_bfloat16(value), 16));
}

static inline void vec_store_bfloat16(void *to, vec value, int stream)
{
    store_halves(to, _mm512_cvtepi32_epi16(to_bfloat16(value)), stream);
}

static inline vec vec_load_float16(const void *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

static inline void vec_store_float16(void *to, vec value, int stream)
{
    store_halves(to, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), stream);
}

static inline void vec_stream_fence(void) { _mm_sfence(); }

typedef struct {
    __m512d low, high;
} squares;

static inline void squares_zero(squares *sums) { sums->low = sums->high = _mm512_setzero_pd(); }

static inline void squares_add(squares *sums, int lane, vec g)
{
    (void)lane; /* always 0 */
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(g)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(g, 1));
    sums->low = _mm512_fmadd_pd(low, low, sums->low);
    sums->high = _mm512_fmadd_pd(high, high, sums->high);
}

static inline void squares_lanes(const squares *sums, double *lanes)
{
    _mm512_storeu_pd(lanes, sums->low);
    _mm512_storeu_pd(lanes + 8, sums->high);
}

#define VEC_HAS_MASKS

/* The first `count` elements; nothing beyond them is read or written. */
static inline __attribute__((always_inline)) vec vec_load_part(int dtype, const void *from, int count)
{
    const __mmask16 first = (__mmask16)((1u << count) - 1);
    if (dtype == SUPERADAM_FLOAT32)
        return _mm512_maskz_loadu_ps(first, from);
    const __m256i halves = _mm256_maskz_loadu_epi16(first, from);
    return dtype == SUPERADAM_BFLOAT16 ? vec_load_bfloat16(&halves) : _mm512_cvtph_ps(halves);
}

static inline __attribute__((always_inline)) void vec_copy_part(int dtype, void *to, const void *padded, int count)
{
    const __mmask16 first = (__mmask16)((1u << count) - 1);
    if (dtype == SUPERADAM_FLOAT32)
        _mm512_mask_storeu_ps(to, first, _mm512_loadu_ps(padded));
    else
        _mm256_mask_storeu_epi16(to, first, _mm256_loadu_si256((const __m256i *)padded));
}

#include "vec_dtypes.h"
