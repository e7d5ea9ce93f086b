/* superadam_copy: copies memory on the pool's threads, which sleep where torch's would spin. */

#include <string.h>

#include "superadam.h"
#include "threads.h"

enum { BLOCK = 1 << 18 }; /* bytes that a thread takes at a time */

typedef struct {
    char *target;
    const char *source;
    int64_t bytes;
} copy;

static void copy_blocks(void *context, int64_t first, int64_t last)
{
    const copy *c = context;
    const int64_t begin = first * BLOCK, end = last * BLOCK < c->bytes ? last * BLOCK : c->bytes;
    memcpy(c->target + begin, c->source + begin, (size_t)(end - begin));
}

void superadam_copy(void *const *targets, const void *const *sources, const int64_t *bytes, int64_t count, int threads)
{
    for (int64_t i = 0; i < count; i++) {
        copy c = {.target = targets[i], .source = sources[i], .bytes = bytes[i]};
        threads_run(threads, 0, (c.bytes + BLOCK - 1) / BLOCK, copy_blocks, &c);
    }
}
