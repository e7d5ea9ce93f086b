/* The table of instruction sets, best first. SUPERADAM_HAVE_<ISA> comes from the build and says what was compiled. */

#include "dispatch.h"

#include <stddef.h>

#if defined(__x86_64__)
#include <cpuid.h>

static int cpu_has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

/* __builtin_cpu_supports also asks the operating system (XGETBV). */
static int cpu_has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c();
}

static int cpu_has_avx512(void)
{
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#elif defined(__aarch64__)

#if defined(__linux__)
#include <sys/auxv.h>

/* HWCAP_SVE and HWCAP2_SVEBF16 of the kernel's asm/hwcap.h, which older systems have without the latter. */
enum { HAS_SVE = 1 << 22, HAS_SVE_BF16 = 1 << 12 };

static int cpu_has_sve(void) { return (getauxval(AT_HWCAP) & HAS_SVE) != 0; }
static int cpu_has_sve_bf16(void) { return cpu_has_sve() && (getauxval(AT_HWCAP2) & HAS_SVE_BF16); }
#else /* cannot be queried: use NEON, which every CPU has */
static int cpu_has_sve(void) { return 0; }
static int cpu_has_sve_bf16(void) { return 0; }
#endif
#endif

static int always(void) { return 1; }

#ifdef SUPERADAM_HAVE_AVX512
#define AVX512_KERNEL superadam_kernel_avx512
#else
#define AVX512_KERNEL NULL
#endif
#ifdef SUPERADAM_HAVE_AVX2
#define AVX2_KERNEL superadam_kernel_avx2
#else
#define AVX2_KERNEL NULL
#endif
#ifdef SUPERADAM_HAVE_SVE_BF16
#define SVE_BF16_KERNEL superadam_kernel_sve_bf16
#else
#define SVE_BF16_KERNEL NULL
#endif
#ifdef SUPERADAM_HAVE_SVE
#define SVE_KERNEL superadam_kernel_sve
#else
#define SVE_KERNEL NULL
#endif
#ifdef SUPERADAM_HAVE_NEON
#define NEON_KERNEL superadam_kernel_neon
#else
#define NEON_KERNEL NULL
#endif

static const struct {
    const char *name;
    superadam_kernel *kernel; /* null: not compiled */
    int (*cpu_supports)(void);
} rows[] = {
#if defined(__x86_64__)
    {"avx512", AVX512_KERNEL, cpu_has_avx512},
    {"avx2", AVX2_KERNEL, cpu_has_avx2},
#elif defined(__aarch64__)
    {"sve_bf16", SVE_BF16_KERNEL, cpu_has_sve_bf16},
    {"sve", SVE_KERNEL, cpu_has_sve},
    {"neon", NEON_KERNEL, always},
#endif
    {"scalar", superadam_kernel_scalar, always},
};

int superadam_isa_count(void) { return (int)(sizeof rows / sizeof *rows); }

const char *superadam_isa_name(int isa) { return isa >= 0 && isa < superadam_isa_count() ? rows[isa].name : NULL; }

int superadam_isa_status(int isa)
{
    if (!superadam_isa_name(isa) || !rows[isa].kernel)
        return SUPERADAM_NOT_COMPILED;
    return rows[isa].cpu_supports() ? SUPERADAM_RUNNABLE : SUPERADAM_NOT_SUPPORTED;
}

superadam_kernel *dispatch_kernel(int isa)
{
    return superadam_isa_status(isa) == SUPERADAM_RUNNABLE ? rows[isa].kernel : NULL;
}
