#include "../superadam.h"
#include "vec_neon.h"
#define KERNEL superadam_kernel_neon
#include "../variants.h"
