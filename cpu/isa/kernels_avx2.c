#include "../superadam.h"
#include "vec_avx2.h"
#define KERNEL superadam_kernel_avx2
#include "../variants.h"
