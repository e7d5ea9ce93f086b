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

#include "dispatch.h"
#include "float_control.h"

enum { FIELDS = 12, LISTED = 6, PATTERN = 0xA5 };

/* Field order of superadam_segment and of the data in a job. */
enum {
    GRADIENT,
    ACCEPTED_GRADIENT,
    MASTER,
    EXP_AVG,
    EXP_AVG_SQ,
    MAX_EXP_AVG_SQ,
    MASTER_LOW,
    EXP_AVG_EXPONENTS,
    EXP_AVG_SQ_EXPONENTS,
    OUT,
    SUMS,
    NONFINITE
};

typedef struct {
    int64_t pass, threads, stream, at_end, fpcr, coefficient_count, segment_count;
} job_header;

typedef struct {
    char *pages, *data;
    size_t size, room; /* bytes of data; bytes between the two inaccessible pages */
} guarded;

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

static void guarded_free(guarded *g)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (const char *at = g->pages + page; at < g->pages + page + g->room; at++)
        if ((at < g->data || at >= g->data + g->size) && (unsigned char)*at != PATTERN)
            fail("bytes outside an array were written");
    munmap(g->pages, g->room + 2 * page);
}

static size_t element_size(int dtype)
{
    static const size_t sizes[] = {0, 4, 2, 2, 8};
    return sizes[dtype];
}

static size_t field_size(int field, const superadam_segment *s)
{
    const size_t chunks = (size_t)((s->length + SUPERADAM_CHUNK - 1) / SUPERADAM_CHUNK), length = (size_t)s->length;
    if (field == SUMS || field == NONFINITE)
        return chunks * 8;
    if (field == OUT)
        return length * element_size(s->out_dtype);
    if (field == GRADIENT || field == ACCEPTED_GRADIENT)
        return length * element_size(s->gradient_dtype);
    if (field == EXP_AVG_EXPONENTS || field == EXP_AVG_SQ_EXPONENTS)
        return length / 64;
    if (field == MASTER_LOW)
        return length;
    if (field == MASTER && (s->format & SUPERADAM_MASTER_24BIT))
        return length * 2;
    if (field != MASTER && (s->format & SUPERADAM_MOMENTS_BFLOAT16))
        return length * 2;
    if (field != MASTER && (s->format & SUPERADAM_MOMENTS_8BIT))
        return length;
    return length * (s->gradient_dtype == SUPERADAM_FLOAT64 ? 8 : 4);
}

/* A list with room for every element, its arrays in the order of superadam_uncertain, full of zeros. */
static superadam_uncertain *list_new(superadam_uncertain *list, const superadam_segment *s, guarded *arrays, int at_end)
{
    list->capacity = s->length;
    void **pointers = (void **)&list->index;
    for (int part = 0; part < LISTED; part++) {
        arrays[part] = guarded_new((size_t)s->length * (part == 1 ? element_size(s->gradient_dtype) : 4), at_end);
        memset(arrays[part].data, 0, arrays[part].size);
        pointers[part] = part == LISTED - 1 && !s->max_exp_avg_sq ? NULL : arrays[part].data;
    }
    return list;
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
    guarded *arrays = calloc(count * FIELDS + 1, sizeof *arrays);
    guarded *listed = calloc(count * LISTED + 1, sizeof *listed);
    superadam_uncertain *lists = calloc(count + 1, sizeof *lists);
    if (!coefficients || !segments || !arrays || !listed || !lists)
        fail("no memory");
    read_all(coefficients, (size_t)job.coefficient_count * sizeof *coefficients, jobs);
    read_all(segments, count * sizeof *segments, jobs);

    /* The pointers to arrays stand first in a segment; in the file they say only whether there is an array. */
    for (size_t i = 0; i < count; i++)
        for (int field = 0; field < FIELDS; field++) {
            void **pointer = (void **)&segments[i] + field;
            if (!*pointer)
                continue;
            guarded *array = &arrays[i * FIELDS + (size_t)field];
            *array = guarded_new(field_size(field, &segments[i]), (int)job.at_end);
            read_all(array->data, array->size, jobs);
            *pointer = array->data;
        }
    for (size_t i = 0; i < count; i++)
        if (segments[i].uncertain) /* which says only whether there is a list */
            segments[i].uncertain = list_new(&lists[i], &segments[i], &listed[i * LISTED], (int)job.at_end);

    const uint64_t fpcr = fpcr_read();
    fpcr_write((uint64_t)job.fpcr);
    const int64_t code = run_job(isa, &job, segments, coefficients);
    const uint64_t after = fpcr_read();
    fpcr_write(fpcr);
    if (after != (uint64_t)job.fpcr)
        fail("FPCR is not as it was before the call");

    write_all(&code, sizeof code, results);
    for (size_t i = 0; i < count; i++)
        for (int field = 0; field < FIELDS; field++) {
            guarded *array = &arrays[i * FIELDS + (size_t)field];
            if (!array->pages)
                continue;
            write_all(array->data, array->size, results);
            guarded_free(array);
        }
    for (size_t i = 0; i < count; i++) {
        if (!segments[i].uncertain)
            continue;
        write_all(&lists[i].count, sizeof lists[i].count, results);
        for (size_t part = 0; part < LISTED; part++) {
            write_all(listed[i * LISTED + part].data, listed[i * LISTED + part].size, results);
            guarded_free(&listed[i * LISTED + part]);
        }
    }
    free(lists);
    free(listed);
    free(arrays);
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
