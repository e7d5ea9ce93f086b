/* Runs jobs from a file through superadam_run, for machines without Python: `runner ISA JOBS RESULTS`; `runner` alone
 * prints every instruction set with its status. emulation.py writes the jobs and reads the results.
 *
 * Every array stands flush against an inaccessible page, so that one byte too far ends the program; the bytes between
 * it and the page on its other side must keep their pattern. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "float_control.h"
#include "superadam.h"

enum { FIELDS = 12, LISTED = 6, PATTERN = 0xA5 }; /* arrays of a segment, which stand first in it, and of a list */

typedef struct {
    int64_t pass, threads, stream, at_end, fpcr, coefficient_count, segment_count;
} job_header;

typedef struct {
    char *pages, *data;
    size_t size, room; /* bytes of data; bytes between the two inaccessible pages */
} guarded;

typedef struct {
    superadam_uncertain list;
    guarded fields[FIELDS], listed[LISTED];
} segment_memory;

static void fail(const char *what)
{
    fprintf(stderr, "runner: %s\n", what);
    exit(2);
}

static void read_all(void *to, size_t size, FILE *file)
{
    if (size && fread(to, size, 1, file) != 1)
        fail("the jobs end early");
}

static void write_all(const void *from, size_t size, FILE *file)
{
    if (size && fwrite(from, size, 1, file) != 1)
        fail("the results cannot be written");
}

static guarded guarded_new(size_t size, int at_end)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    guarded g = {.size = size, .room = (size + page - 1) / page * page};
    g.pages = mmap(NULL, g.room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g.pages == MAP_FAILED || (g.room && mprotect(g.pages + page, g.room, PROT_READ | PROT_WRITE)))
        fail("no memory");
    memset(g.pages + page, PATTERN, g.room);
    g.data = g.pages + page + (at_end ? g.room - size : 0);
    return g;
}

/* Writes an array, if there is one, and frees it. */
static void guarded_finish(guarded *g, FILE *results)
{
    if (!g->pages)
        return;
    write_all(g->data, g->size, results);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (const char *at = g->pages + page; at < g->pages + page + g->room; at++)
        if ((at < g->data || at >= g->data + g->size) && (unsigned char)*at != PATTERN)
            fail("bytes outside an array were written");
    munmap(g->pages, g->room + 2 * page);
}

/* Reads the arrays of a segment, whose pointers say in the file only whether there are arrays and a list. */
static void segment_read(superadam_segment *s, segment_memory *memory, int at_end, FILE *jobs)
{
    for (int field = 0; field < FIELDS; field++) {
        void **pointer = (void **)s + field;
        if (!*pointer)
            continue;
        int64_t size;
        read_all(&size, sizeof size, jobs);
        memory->fields[field] = guarded_new((size_t)size, at_end);
        read_all(memory->fields[field].data, (size_t)size, jobs);
        *pointer = memory->fields[field].data;
    }
    if (!s->uncertain)
        return;
    /* Room for every element, in the order of superadam_uncertain, full of zeros. */
    s->uncertain = &memory->list;
    memory->list.capacity = s->length;
    for (int part = 0; part < LISTED; part++) {
        const size_t size =
            part == 1 ? memory->fields[0].size : (size_t)s->length * 4; /* the gradient keeps its dtype */
        memory->listed[part] = guarded_new(size, at_end);
        memset(memory->listed[part].data, 0, size);
        if (part < LISTED - 1 || s->max_exp_avg_sq)
            ((void **)&memory->list.index)[part] = memory->listed[part].data;
    }
}

static uint64_t fpcr_read(void)
{
    uint64_t value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
}

static void fpcr_write(uint64_t value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }

/* With `stream` straight to the kernels: superadam_run streams only jobs that are too large to emulate. */
static int run_job(int isa, const job_header *job, superadam_segment *segments, superadam_coefficients *coefficients)
{
    if (!job->stream)
        return superadam_run(isa, (int)job->pass, segments, job->segment_count, coefficients, job->coefficient_count,
                             (int)job->threads);
    const uint64_t saved = float_control_enter();
    for (int64_t i = 0; i < job->segment_count; i++) {
        const int64_t chunks = (segments[i].length + SUPERADAM_CHUNK - 1) / SUPERADAM_CHUNK;
        const int is_double = segments[i].gradient_dtype == SUPERADAM_FLOAT64;
        superadam_kernel *kernel = is_double ? superadam_kernel_float64 : dispatch_kernel(isa);
        kernel((int)job->pass, &segments[i], coefficients, 0, chunks, 1);
    }
    float_control_leave(saved);
    return SUPERADAM_OK;
}

static void do_job(int isa, FILE *jobs, FILE *results)
{
    job_header job;
    read_all(&job, sizeof job, jobs);
    const size_t count = (size_t)job.segment_count;
    superadam_coefficients *coefficients = calloc((size_t)job.coefficient_count + 1, sizeof *coefficients);
    superadam_segment *segments = calloc(count + 1, sizeof *segments);
    segment_memory *memory = calloc(count + 1, sizeof *memory);
    if (!coefficients || !segments || !memory)
        fail("no memory");
    read_all(coefficients, (size_t)job.coefficient_count * sizeof *coefficients, jobs);
    read_all(segments, count * sizeof *segments, jobs);
    for (size_t i = 0; i < count; i++)
        segment_read(&segments[i], &memory[i], (int)job.at_end, jobs);

    const uint64_t fpcr = fpcr_read();
    fpcr_write((uint64_t)job.fpcr);
    const int64_t code = run_job(isa, &job, segments, coefficients);
    const uint64_t after = fpcr_read();
    fpcr_write(fpcr);
    if (after != (uint64_t)job.fpcr)
        fail("FPCR is not as it was before the call");

    write_all(&code, sizeof code, results);
    for (size_t i = 0; i < count; i++) {
        for (int field = 0; field < FIELDS; field++)
            guarded_finish(&memory[i].fields[field], results);
        if (segments[i].uncertain)
            write_all(&memory[i].list.count, sizeof memory[i].list.count, results);
        for (int part = 0; part < LISTED; part++)
            guarded_finish(&memory[i].listed[part], results);
    }
    free(memory);
    free(segments);
    free(coefficients);
}

/* Ends with SIGSEGV: shows that the guard pages guard. */
static void overrun(int at_end)
{
    guarded g = guarded_new(3, at_end);
    volatile char *byte = at_end ? g.data + g.size : g.data - 1;
    *byte = 0;
}

int main(int count, char **arguments)
{
    if (count == 2) {
        overrun(strcmp(arguments[1], "overrun") == 0);
        return 0;
    }
    int isa = -1;
    for (int row = 0; row < superadam_isa_count(); row++) {
        if (count == 1)
            printf("%s %d\n", superadam_isa_name(row), superadam_isa_status(row));
        else if (strcmp(superadam_isa_name(row), arguments[1]) == 0)
            isa = row;
    }
    if (count != 4)
        return 0;
    FILE *jobs = fopen(arguments[2], "rb"), *results = fopen(arguments[3], "wb");
    if (!jobs || !results)
        fail("the files cannot be opened");
    int64_t left;
    read_all(&left, sizeof left, jobs);
    while (left-- > 0)
        do_job(isa, jobs, results);
    return fclose(results) ? 2 : 0;
}
