#include "../superadam.h"
#include "vec_scalar.h"
#include "../adam_formula.h"
#include "../compact.h"
#include "../interval.h"
#include "../adam_loop.h"
#define KERNEL superadam_kernel_scalar
#include "../variants.h"
