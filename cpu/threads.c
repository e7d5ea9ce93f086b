/* Threads are started when first needed and sleep on a condition variable between jobs. They spin for SPIN_US at most:
 * the caller while it waits for the last units, and the others after a job that is followed by another one, because
 * waking takes about as long as a small job. After a fork the child has an empty pool and starts its own threads. */

#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#include "float_control.h"

enum { THREADS_LIMIT = 1024, SPIN_US = 20 };
enum { LARGEST_GRAIN = 64 }; /* units at a time: enough for the prefetcher, few enough to balance the load */

typedef struct {
    void (*work)(void *context, int64_t first, int64_t last);
    void *context;
    int64_t count, grain;
    int is_followed, cpu; /* of the caller */
    pthread_t caller;
    _Atomic int64_t next;
} job;

struct pool {
    pthread_mutex_t one_job; /* held by the caller of the current job */
    pthread_mutex_t lock;    /* guards everything below */
    pthread_cond_t started, finished;
    job *current;
    _Atomic int wanted; /* threads that may still join the job; this and the next are read without the lock, to spin */
    _Atomic int inside; /* threads that are in it */
    int size;           /* threads of the pool */
};

#define EMPTY                              \
    {.one_job = PTHREAD_MUTEX_INITIALIZER, \
     .lock = PTHREAD_MUTEX_INITIALIZER,    \
     .started = PTHREAD_COND_INITIALIZER,  \
     .finished = PTHREAD_COND_INITIALIZER}

static struct pool pool = EMPTY;

static void take_units(job *todo)
{
    const uint64_t saved = float_control_enter();
    for (;;) {
        const int64_t first = atomic_fetch_add(&todo->next, todo->grain);
        if (first >= todo->count)
            break;
        todo->work(todo->context, first, first + todo->grain < todo->count ? first + todo->grain : todo->count);
    }
    float_control_leave(saved);
}

double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Returns when whether `count` is 0 has become `is_zero`, or after SPIN_US. */
static void spin_until(const _Atomic int *count, int is_zero)
{
    const double end = seconds_now() + 1e-6 * SPIN_US;
    while ((*count == 0) != is_zero && seconds_now() < end)
        ;
}

/* Leaves its processor to the caller: Linux takes a virtual machine's sleeping processors for busy ones, and wakes a
 * thread on that of its waker, where both would take turns. `others` is what this has set before, and `all` what the
 * thread may use. Anybody may bind it, or the whole process, at any time: it goes only where its caller may run. */
static void leave_processor(const job *todo, cpu_set_t *all, cpu_set_t *others)
{
    cpu_set_t now, wanted;
    if (sched_getaffinity(0, sizeof now, &now) || pthread_getaffinity_np(todo->caller, sizeof wanted, &wanted))
        return;
    if (!CPU_EQUAL(&now, others))
        *all = now;
    CPU_AND(&wanted, all, &wanted);
    CPU_CLR(todo->cpu, &wanted);
    if (sched_setaffinity(0, sizeof wanted, &wanted) == 0) /* fails where there is no other */
        *others = wanted;
}

static void *thread_main(void *unused)
{
    (void)unused;
    cpu_set_t all = {{0}}, others = {{0}};
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.wanted)
            pthread_cond_wait(&pool.started, &pool.lock);
        job *todo = pool.current;
        pool.wanted--;
        pool.inside++;
        const int is_followed = todo->is_followed;
        pthread_mutex_unlock(&pool.lock);
        if (sched_getcpu() == todo->cpu)
            leave_processor(todo, &all, &others);
        take_units(todo);
        pthread_mutex_lock(&pool.lock);
        if (--pool.inside == 0)
            pthread_cond_signal(&pool.finished);
        if (is_followed) {
            pthread_mutex_unlock(&pool.lock);
            spin_until(&pool.wanted, 0);
            pthread_mutex_lock(&pool.lock);
        }
    }
    return NULL;
}

/* Called with pool.lock held. The new threads block all signals but faults: those are for the program's threads. */
static void grow(int size)
{
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    sigdelset(&all, SIGSEGV);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; pool.size < size && pthread_create(&thread, NULL, thread_main, NULL) == 0; pool.size++)
        pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* In the child only the forking thread exists, and it was not inside a job. */
static void empty_after_fork(void) { pool = (struct pool)EMPTY; }

static void watch_forks(void) { pthread_atfork(NULL, NULL, empty_after_fork); }

void threads_run(int threads, int is_followed, int64_t count, void (*work)(void *context, int64_t first, int64_t last),
                 void *context)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    job todo = {.work = work, .context = context, .count = count, .grain = count, .is_followed = is_followed};
    threads = threads < THREADS_LIMIT ? threads : THREADS_LIMIT;
    const int helpers = (int)(threads < count ? threads : count) - 1;
    if (helpers <= 0) {
        take_units(&todo);
        return;
    }
    const int64_t grain = count / ((int64_t)threads * 8);
    todo.grain = grain < 1 ? 1 : grain > LARGEST_GRAIN ? LARGEST_GRAIN : grain;
    todo.cpu = sched_getcpu();
    todo.caller = pthread_self();

    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&pool.one_job);
    pthread_mutex_lock(&pool.lock);
    grow(helpers);
    pool.current = &todo;
    pool.wanted = helpers < pool.size ? helpers : pool.size;
    pthread_cond_broadcast(&pool.started);
    pthread_mutex_unlock(&pool.lock);
    take_units(&todo);
    spin_until(&pool.inside, 1);
    pthread_mutex_lock(&pool.lock);
    pool.wanted = 0; /* nothing is left for a thread that has not woken yet */
    while (pool.inside)
        pthread_cond_wait(&pool.finished, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.one_job);
}
