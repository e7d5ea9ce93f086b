#include "../superadam.h"
#include "vec_avx512.h"
#define KERNEL superadam_kernel_avx512
#include "../variants.h"
