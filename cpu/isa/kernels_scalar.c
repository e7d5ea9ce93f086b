#include "../superadam.h"
#include "vec_scalar.h"
#define KERNEL superadam_kernel_scalar
#include "../variants.h"
