#include "../superadam.h"
#include "vec_avx512.h"
#include "../adam_formula.h"
#include "../compact.h"
#include "../interval.h"
#include "../adam_loop.h"
#define KERNEL superadam_kernel_avx512
#include "../variants.h"
