/* SVE at any vector length: as many elements as a vector holds, at most the 16 lanes of the sums, chosen by predicates;
 * a length that is not a power of two uses the power of two below it. Tails are loads and stores under a shorter
 * predicate, so vec_dtypes.h and its buffers are not needed. Compiled twice: for CPUs with BF16, bf16 is rounded by
 * BFCVT (which keeps denormals and NaN), for others with integers. */

#include <arm_sve.h>
#include <stdint.h>
#include <string.h>

#define REAL_DTYPE SUPERADAM_FLOAT32

typedef float real;
typedef svfloat32_t vec;
typedef svbool_t vec_mask;
#define VEC_WIDTH vec_width()
enum { VEC_UNROLL = 1, VEC_DIVIDES = 1 };

static inline int vec_width(void)
{
    const uint64_t width = svcntw_pat(SV_POW2);
    return width < SUPERADAM_LANES ? (int)width : SUPERADAM_LANES;
}

static inline svbool_t lanes_below(int count) { return svwhilelt_b32(0, count); }

/* Elements beyond the 16th are computed too: on zeros, and never stored. */
static inline vec vec_set(float value) { return svdup_f32(value); }
static inline vec vec_add(vec a, vec b) { return svadd_x(svptrue_b32(), a, b); }
static inline vec vec_sub(vec a, vec b) { return svsub_x(svptrue_b32(), a, b); }
static inline vec vec_mul(vec a, vec b) { return svmul_x(svptrue_b32(), a, b); }
static inline vec vec_div(vec a, vec b) { return svdiv_x(svptrue_b32(), a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return svmla_x(svptrue_b32(), c, a, b); }
static inline vec vec_sqrt(vec a) { return svsqrt_x(svptrue_b32(), a); }
static inline vec vec_neg(vec a) { return svneg_x(svptrue_b32(), a); }

/* Not FMAX: that prefers +0 to -0, and a NaN on either side. */
static inline vec vec_max(vec a, vec b)
{
    svbool_t all = svptrue_b32(), take_b = svorr_z(all, svcmplt(all, a, b), svcmpuo(all, b, b));
    return svsel(take_b, b, a);
}

static inline vec vec_min(vec a, vec b) { return svsel(svcmplt(svptrue_b32(), a, b), a, b); }
static inline vec vec_abs(vec a) { return svabs_x(svptrue_b32(), a); }
static inline vec vec_bits(vec a, uint32_t kept, uint32_t set)
{
    svbool_t all = svptrue_b32();
    return svreinterpret_f32(svorr_x(all, svand_x(all, svreinterpret_u32(a), kept), set));
}
static inline vec_mask vec_less(vec a, vec b) { return svcmplt(svptrue_b32(), a, b); }
static inline vec_mask vec_and_less(vec_mask mask, vec a, vec b) { return svcmplt(mask, a, b); }
static inline unsigned vec_lanes(vec_mask mask)
{
    svuint32_t bits = svlsl_x(svptrue_b32(), svdup_u32(1), svindex_u32(0, 1));
    return (unsigned)svaddv(svand_z(svptrue_b32(), mask, lanes_below(VEC_WIDTH)), bits);
}

/* Each in the low half of its 32 bits. */
static inline svuint32_t to_bfloat16(vec value)
{
    svbool_t all = svptrue_b32();
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return svreinterpret_u32(svcvt_bf16_x(all, value));
#else
    svuint32_t bits = svreinterpret_u32(value), high = svlsr_x(all, bits, 16);
    svuint32_t odd = svand_x(all, high, 1);
    svuint32_t rounded = svlsr_x(all, svadd_x(all, svadd_x(all, bits, 0x7FFF), odd), 16);
    return svsel(svcmpuo(all, value, value), svorr_x(all, high, 0x40), rounded);
#endif
}

static inline vec vec_round_bfloat16(vec value)
{
    return svreinterpret_f32(svlsl_x(svptrue_b32(), to_bfloat16(value), 16));
}

static inline __attribute__((always_inline)) vec vec_load(int dtype, const void *base, int64_t index, int count)
{
    const uint16_t *halves = (const uint16_t *)base + index;
    switch (dtype) {
    case SUPERADAM_BFLOAT16:
        return svreinterpret_f32(svlsl_x(svptrue_b32(), svld1uh_u32(lanes_below(count), halves), 16));
    case SUPERADAM_FLOAT16:
        return svcvt_f32_x(svptrue_b32(), svreinterpret_f16(svld1uh_u32(lanes_below(count), halves)));
    default:
        return svld1(lanes_below(count), (const float *)base + index);
    }
}

/* Only whole words are stored past the caches: STNT1H would need the halves packed first. */
static inline __attribute__((always_inline)) void vec_store(int dtype, void *base, int64_t index, vec value, int count,
                                                            int stream)
{
    uint16_t *halves = (uint16_t *)base + index;
    float *words = (float *)base + index;
    switch (dtype) {
    case SUPERADAM_BFLOAT16:
        svst1h(lanes_below(count), halves, to_bfloat16(value));
        break;
    case SUPERADAM_FLOAT16:
        svst1h(lanes_below(count), halves, svreinterpret_u32(svcvt_f16_x(svptrue_b32(), value)));
        break;
    default:
        if (stream)
            svstnt1(lanes_below(count), words, value);
        else
            svst1(lanes_below(count), words, value);
    }
}

static inline __attribute__((always_inline)) void vec_prefetch(int dtype, const void *base, int64_t index)
{
    __builtin_prefetch((const char *)base + index * (dtype == SUPERADAM_FLOAT32 ? 4 : 2));
}

/* No fence: STNT1 is ordered like any other store. */
static inline void vec_stream_fence(void) {}

/* In memory, because an SVE vector cannot be a member. FCVT widens the even elements of a vector, so that these come
 * before the odd ones of the same vector. */
typedef struct {
    double lane[SUPERADAM_LANES];
} squares;

static inline void squares_zero(squares *sums) { memset(sums, 0, sizeof *sums); }

static inline __attribute__((always_inline)) void squares_add(squares *sums, int lane, vec g)
{
    const int half = VEC_WIDTH / 2;
    svbool_t all = svwhilelt_b64(0, half);
    double *even = sums->lane + (unsigned)lane, *odd = even + half;
    svuint64_t shifted = svlsr_x(all, svreinterpret_u64(g), 32);
    svfloat64_t g_even = svcvt_f64_x(all, g), g_odd = svcvt_f64_x(all, svreinterpret_f32(shifted));
    svst1(all, even, svmla_x(all, svld1(all, even), g_even, g_even));
    svst1(all, odd, svmla_x(all, svld1(all, odd), g_odd, g_odd));
}

static inline void squares_lanes(const squares *sums, double *lanes)
{
    const int width = VEC_WIDTH;
    for (int i = 0; i < SUPERADAM_LANES; i++)
        lanes[i] = sums->lane[i / width * width + i % 2 * (width / 2) + i % width / 2];
}
