/* The table of instruction sets, best first, and once, when the module is loaded, which of them this CPU can run: CPUID
 * takes microseconds in a virtual machine. SUPERADAM_SIMD comes from the build: the vector kernels are compiled. */

#include "superadam.h"

#include <stddef.h>

#if defined(__x86_64__)
#include <cpuid.h>

/* Registers whose contents the operating system keeps (XCR0): those of SSE and AVX; and the masks and upper halves. */
enum { KEEPS_AVX = 0x06, KEEPS_AVX512 = 0xE6 };

static unsigned kept_registers(void)
{
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* By CPUID itself: what compilers offer for it answers no to everything where their own start-up code does not run. */
static int cpu_has_avx2(void)
{
    const unsigned needed = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & needed) != needed || (kept_registers() & KEEPS_AVX) != KEEPS_AVX)
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

static int cpu_has_avx512(void)
{
    const unsigned needed = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    unsigned a, b, c, d;
    return cpu_has_avx2() && (kept_registers() & KEEPS_AVX512) == KEEPS_AVX512 &&
           __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & needed) == needed;
}
#elif defined(__aarch64__)

#include <sys/auxv.h>

/* HWCAP_SVE and HWCAP2_SVEBF16 of the kernel's asm/hwcap.h, which older systems have without the latter. */
enum { HAS_SVE = 1 << 22, HAS_SVE_BF16 = 1 << 12 };

static int cpu_has_sve(void) { return (getauxval(AT_HWCAP) & HAS_SVE) != 0; }
static int cpu_has_sve_bf16(void) { return cpu_has_sve() && (getauxval(AT_HWCAP2) & HAS_SVE_BF16); }
#endif

static int always(void) { return 1; }

#ifdef SUPERADAM_SIMD
#define VECTOR_KERNEL(isa) superadam_kernel_##isa
#else
#define VECTOR_KERNEL(isa) NULL
#endif

static const struct {
    const char *name;
    superadam_kernel *kernel; /* null: not compiled */
    int (*cpu_supports)(void);
} rows[] = {
#if defined(__x86_64__)
    {"avx512", VECTOR_KERNEL(avx512), cpu_has_avx512},
    {"avx2", VECTOR_KERNEL(avx2), cpu_has_avx2},
#elif defined(__aarch64__)
    {"sve_bf16", VECTOR_KERNEL(sve_bf16), cpu_has_sve_bf16},
    {"sve", VECTOR_KERNEL(sve), cpu_has_sve},
    {"neon", VECTOR_KERNEL(neon), always},
#endif
    {"scalar", superadam_kernel_scalar, always},
};

static int supported[sizeof rows / sizeof *rows];

static __attribute__((constructor)) void ask_the_cpu(void)
{
    for (size_t isa = 0; isa < sizeof rows / sizeof *rows; isa++)
        supported[isa] = rows[isa].cpu_supports();
}

int superadam_isa_count(void) { return (int)(sizeof rows / sizeof *rows); }

const char *superadam_isa_name(int isa) { return isa >= 0 && isa < superadam_isa_count() ? rows[isa].name : NULL; }

int superadam_isa_status(int isa)
{
    if (!superadam_isa_name(isa) || !rows[isa].kernel)
        return SUPERADAM_NOT_COMPILED;
    return supported[isa] ? SUPERADAM_RUNNABLE : SUPERADAM_NOT_SUPPORTED;
}

superadam_kernel *dispatch_kernel(int isa)
{
    return superadam_isa_status(isa) == SUPERADAM_RUNNABLE ? rows[isa].kernel : NULL;
}
