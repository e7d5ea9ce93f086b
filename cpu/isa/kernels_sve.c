#include "../superadam.h"
#include "vec_sve.h"
#include "../adam_formula.h"
#include "../compact.h"
#include "../interval.h"
#include "../adam_loop.h"
#define KERNEL superadam_kernel_sve
#include "../variants.h"
