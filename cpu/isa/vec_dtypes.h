/* vec_load and vec_store by dtype, over the whole-vector loads and stores of one fp32 instruction set. A vector that is
 * only partly inside its array goes through a local buffer, or masks where there are some (VEC_HAS_MASKS), so that no
 * byte outside is touched. */

#include <string.h>

#define REAL_DTYPE SUPERADAM_FLOAT32

static inline __attribute__((always_inline)) int64_t vec_element_size(int dtype)
{
    return dtype == SUPERADAM_FLOAT32 ? 4 : 2;
}

static inline __attribute__((always_inline)) vec vec_load_whole(int dtype, const void *from)
{
    switch (dtype) {
    case SUPERADAM_BFLOAT16:
        return vec_load_bfloat16(from);
    case SUPERADAM_FLOAT16:
        return vec_load_float16(from);
    default:
        return vec_load_float32(from);
    }
}

static inline __attribute__((always_inline)) void vec_store_whole(int dtype, void *to, vec value, int stream)
{
    switch (dtype) {
    case SUPERADAM_BFLOAT16:
        vec_store_bfloat16(to, value, stream);
        break;
    case SUPERADAM_FLOAT16:
        vec_store_float16(to, value, stream);
        break;
    default:
        vec_store_float32(to, value, stream);
    }
}

static inline __attribute__((always_inline)) vec vec_load(int dtype, const void *base, int64_t index, int count)
{
    const int64_t size = vec_element_size(dtype);
    const char *from = (const char *)base + index * size;
    if (count == VEC_WIDTH)
        return vec_load_whole(dtype, from);
#ifdef VEC_HAS_MASKS
    return vec_load_part(dtype, from, count);
#else
    char padded[4 * SUPERADAM_LANES] = {0};
    memcpy(padded, from, (size_t)(count * size));
    return vec_load_whole(dtype, padded);
#endif
}

static inline __attribute__((always_inline)) void vec_store(int dtype, void *base, int64_t index, vec value, int count,
                                                            int stream)
{
    const int64_t size = vec_element_size(dtype);
    char *to = (char *)base + index * size;
    if (count == VEC_WIDTH) {
        vec_store_whole(dtype, to, value, stream);
        return;
    }
    char padded[4 * SUPERADAM_LANES];
    vec_store_whole(dtype, padded, value, 0);
#ifdef VEC_HAS_MASKS
    vec_copy_part(dtype, to, padded, count);
#else
    memcpy(to, padded, (size_t)(count * size));
#endif
}

static inline __attribute__((always_inline)) void vec_prefetch(int dtype, const void *base, int64_t index)
{
    __builtin_prefetch((const char *)base + index * vec_element_size(dtype));
}
