#include "../superadam.h"
#include "vec_sve.h"
#define KERNEL superadam_kernel_sve
#include "../variants.h"
