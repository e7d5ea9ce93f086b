#include "../superadam.h"
#include "vec_float64.h"
#define KERNEL superadam_kernel_float64
#include "../variants.h"
