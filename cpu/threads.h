/* A small thread pool that runs one job at a time, and the clock that it waits by. */
#ifndef SUPERADAM_THREADS_H
#define SUPERADAM_THREADS_H

#include <stdint.h>

/* Calls work(context, first, last) until the units 0 .. count - 1 are all covered, on the calling thread and at most
 * threads - 1 others. Returns when all are done. Jobs of several callers run one after another. When a thread cannot be
 * started, the others do its share. `is_followed`: the caller begins another job within microseconds, for which the
 * threads stay awake. */
void threads_run(int threads, int is_followed, int64_t count, void (*work)(void *context, int64_t first, int64_t last),
                 void *context);

double seconds_now(void); /* of a clock that only goes forward */

#endif
