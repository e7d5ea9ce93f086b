/* The floating-point control register of the calling thread: round to nearest, no flushing of denormals, no traps. A
 * process may have set it otherwise (torch.set_flush_denormal, -ffast-math start-up code), per thread. */
#ifndef SUPERADAM_FLOAT_CONTROL_H
#define SUPERADAM_FLOAT_CONTROL_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

static inline uint64_t float_control_enter(void)
{
    const uint64_t saved = _mm_getcsr();
    _mm_setcsr(0x1F80); /* all exceptions masked, everything else 0 */
    return saved;
}

static inline void float_control_leave(uint64_t saved) { _mm_setcsr((unsigned)saved); }

/* Whether results are those of kernels: FTZ, rounding and DAZ count, flags and traps do not. */
static inline int float_control_is_usual(void) { return !(_mm_getcsr() & 0xE040); }

#elif defined(__aarch64__)

static inline void float_control_leave(uint64_t saved) { __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory"); }

static inline uint64_t float_control_enter(void)
{
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved) : : "memory");
    float_control_leave(0);
    return saved;
}

static inline int float_control_is_usual(void)
{
    uint64_t present;
    __asm__ volatile("mrs %0, fpcr" : "=r"(present) : : "memory");
    return !(present & ~UINT64_C(0x9F00)); /* all but the traps */
}

#else
#error "superadam knows the floating-point control register of x86-64 and aarch64 only; add yours here"
#endif

#endif
