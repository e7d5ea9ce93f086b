/* AVX2 with FMA and F16C (Haswell, Zen and later): 8 elements, 16 for the sums in four registers of 4 doubles.
 * sqrt and div take about 6 and 5 cycles per 8 elements (Skylake), less than moving 28 bytes for each of them takes. */

#include <immintrin.h>
#include <stdint.h>

typedef float real;
typedef __m256 vec;
typedef __m256 vec_mask;
enum { VEC_WIDTH = 8, VEC_UNROLL = 2, VEC_DIVIDES = 0 };

static inline vec vec_set(float value) { return _mm256_set1_ps(value); }
static inline vec vec_add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec vec_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec vec_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec vec_div(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec vec_sqrt(vec a) { return _mm256_sqrt_ps(a); }
static inline vec vec_neg(vec a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }

static inline vec vec_max(vec a, vec b)
{
    vec take_b = _mm256_or_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ), _mm256_cmp_ps(b, b, _CMP_UNORD_Q));
    return _mm256_blendv_ps(a, b, take_b);
}

static inline vec vec_min(vec a, vec b) { return _mm256_min_ps(a, b); } /* b where a comparison is unordered */
static inline vec vec_abs(vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline vec vec_bits(vec a, uint32_t kept, uint32_t set)
{
    const vec mask = _mm256_castsi256_ps(_mm256_set1_epi32((int)kept));
    return _mm256_or_ps(_mm256_and_ps(a, mask), _mm256_castsi256_ps(_mm256_set1_epi32((int)set)));
}
static inline vec_mask vec_less(vec a, vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline vec_mask vec_and_less(vec_mask mask, vec a, vec b) { return _mm256_and_ps(mask, vec_less(a, b)); }
static inline unsigned vec_lanes(vec_mask mask) { return (unsigned)_mm256_movemask_ps(mask); }

static inline vec vec_load_float32(const void *from) { return _mm256_loadu_ps((const float *)from); }

static inline void vec_store_float32(void *to, vec value, int stream)
{
    if (stream)
        _mm256_stream_ps((float *)to, value);
    else
        _mm256_storeu_ps((float *)to, value);
}

static inline void store_halves(void *to, __m128i halves, int stream)
{
    if (stream)
        _mm_stream_si128((__m128i *)to, halves);
    else
        _mm_storeu_si128((__m128i *)to, halves);
}

static inline vec vec_load_bfloat16(const void *from)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* Each in the low half of its 32 bits. */
static inline __m256i to_bfloat16(vec value)
{
    __m256i bits = _mm256_castps_si256(value), high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, quiet, is_nan);
}

static inline vec vec_round_bfloat16(vec value)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(to_bfloat16(value), 16));
}

static inline void vec_store_bfloat16(void *to, vec value, int stream)
{
    __m256i words = to_bfloat16(value);
    store_halves(to, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)), stream);
}

static inline vec vec_load_float16(const void *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }

static inline void vec_store_float16(void *to, vec value, int stream)
{
    store_halves(to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), stream);
}

static inline void vec_stream_fence(void) { _mm_sfence(); }

typedef struct {
    __m256d lane[4];
} squares;

static inline void squares_zero(squares *sums)
{
    for (int i = 0; i < 4; i++)
        sums->lane[i] = _mm256_setzero_pd();
}

static inline __attribute__((always_inline)) void squares_add(squares *sums, int lane, vec g)
{
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(g)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(g, 1));
    sums->lane[lane / 4] = _mm256_fmadd_pd(low, low, sums->lane[lane / 4]);
    sums->lane[lane / 4 + 1] = _mm256_fmadd_pd(high, high, sums->lane[lane / 4 + 1]);
}

static inline void squares_lanes(const squares *sums, double *lanes)
{
    for (int i = 0; i < 4; i++)
        _mm256_storeu_pd(lanes + 4 * i, sums->lane[i]);
}

#include "vec_dtypes.h"
