/* cdef.h for C files, the one function type that the instruction sets implement, and which of them runs. */
#ifndef SUPERADAM_H
#define SUPERADAM_H

#include <stdint.h>

#include "cdef.h"

/* Runs `pass` over the chunks [first, last) of one segment. The caller has checked the segment and set the
 * floating-point control register. With `stream`, `out` may be written past the caches. */
typedef void superadam_kernel(int pass, const superadam_segment *segment, const superadam_coefficients *coefficients,
                              int64_t first, int64_t last, int stream);

superadam_kernel superadam_kernel_scalar, superadam_kernel_float64;
superadam_kernel superadam_kernel_avx2, superadam_kernel_avx512;
superadam_kernel superadam_kernel_neon, superadam_kernel_sve, superadam_kernel_sve_bf16;

superadam_kernel *dispatch_kernel(int isa); /* of row `isa`; null when that does not exist or cannot run here */

#endif
