/* Which instruction sets there are, and which of them this machine can run. */
#ifndef SUPERADAM_DISPATCH_H
#define SUPERADAM_DISPATCH_H

#include "superadam.h"

/* The kernel of row `isa` (superadam_isa_*), or null when the row does not exist or cannot run here. */
superadam_kernel *dispatch_kernel(int isa);

#endif
