#include "../superadam.h"
#include "vec_avx2.h"
#include "../adam_formula.h"
#include "../compact.h"
#include "../interval.h"
#include "../adam_loop.h"
#define KERNEL superadam_kernel_avx2
#include "../variants.h"
