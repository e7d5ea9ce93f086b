#include "../superadam.h"
#include "vec_float64.h"
#include "../adam_formula.h"
#include "../compact.h"
#include "../interval.h"
#include "../adam_loop.h"
#define KERNEL superadam_kernel_float64
#include "../variants.h"
