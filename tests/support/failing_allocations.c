/* Preloaded: lets chosen allocations of tensors, of numpy arrays and of the kernels fail, as where memory has run out.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

enum { RANGES = 16 };
static struct {
    uintptr_t begin, end;
    size_t least;
} ranges[RANGES]; /* code whose allocations count */
static int range_count;
static atomic_long seen, first, last; /* numbers of those that fail: from `first` to before `last` */
static atomic_int is_armed;

/* Counts allocations of at least this many bytes that code at these addresses asks for. */
void allocations_watch(uintptr_t begin, uintptr_t end, size_t least)
{
    if (range_count < RANGES) {
        ranges[range_count].begin = begin;
        ranges[range_count].end = end;
        ranges[range_count++].least = least;
    }
}

void allocations_fail(long from, long before)
{
    seen = 0;
    first = from;
    last = before;
}

void allocations_arm(int armed) { is_armed = armed; }

long allocations_seen(void) { return seen; }

static int fails(void *caller, size_t size)
{
    if (!is_armed)
        return 0;
    for (int i = 0; i < range_count; i++)
        if ((uintptr_t)caller >= ranges[i].begin && (uintptr_t)caller < ranges[i].end && size >= ranges[i].least) {
            const long number = seen++;
            return number >= first && number < last;
        }
    return 0;
}

void *malloc(size_t size) { return fails(__builtin_return_address(0), size) ? NULL : __libc_malloc(size); }

void *calloc(size_t count, size_t size)
{
    return fails(__builtin_return_address(0), count * size) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *before, size_t size)
{
    return fails(__builtin_return_address(0), size) ? NULL : __libc_realloc(before, size);
}

int posix_memalign(void **memory, size_t alignment, size_t size)
{
    if (fails(__builtin_return_address(0), size))
        return ENOMEM;
    *memory = __libc_memalign(alignment, size);
    return *memory ? 0 : ENOMEM;
}
