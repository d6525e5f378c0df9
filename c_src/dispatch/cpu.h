/* One predicate per architecture-specific row of isa.def: may its instructions run here? */
#ifndef PF_DISPATCH_CPU_H
#define PF_DISPATCH_CPU_H

static inline int pf_cpu_scalar(void) {
    return 1;
}

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* The register sets that the operating system saves (XCR0); 0 where it saves none. */
static inline unsigned long long pf_saved_state(void) {
    unsigned int a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1))
        return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (unsigned long long)high << 32 | low;
}

static inline int pf_has_bits(unsigned int have, unsigned int want) {
    return (have & want) == want;
}

/* x86-64-v3: AVX2, FMA, F16C, MOVBE, BMI1, BMI2, LZCNT, and the upper halves of ymm saved. */
static inline int pf_cpu_avx2(void) {
    unsigned int a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !pf_has_bits(c, 1u << 12 | 1u << 22 | 1u << 28 | 1u << 29))
        return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !pf_has_bits(b, 1u << 3 | 1u << 5 | 1u << 8))
        return 0;
    if (!__get_cpuid(0x80000001u, &a, &b, &c, &d) || !(c >> 5 & 1))
        return 0;
    return (pf_saved_state() & 0x6) == 0x6;
}

/* x86-64-v4: AVX-512 F, DQ, CD, BW, VL on top, with mask registers and zmm saved. */
static inline int pf_cpu_avx512(void) {
    unsigned int a, b, c, d;
    if (!pf_cpu_avx2() || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    return pf_has_bits(b, 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31) &&
           (pf_saved_state() & 0xe6) == 0xe6;
}

/* AMX tiles and bfloat16 products on top. Linux saves the registers of a process only after being asked,
 * which fails, for good reason, where a thread has a signal stack too small for them. */
static inline int pf_cpu_amx(void) {
#if defined(PF_AMX_EMULATED)
    return pf_cpu_avx512();
#elif defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    unsigned int a, b, c, d;
    if (!pf_cpu_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !pf_has_bits(d, 1u << 22 | 1u << 24))
        return 0;
    return (pf_saved_state() >> 17 & 3) == 3 &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}
#endif

#if defined(__aarch64__)
static inline int pf_cpu_neon(void) {
    return 1; /* part of the architecture's baseline */
}
#endif

#endif
