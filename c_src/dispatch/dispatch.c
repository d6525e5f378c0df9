/* The rows of isa.def that fit this target, slowest first. Compiled for the baseline: a test of what
 * the CPU can do must not itself need it. */
#define _DEFAULT_SOURCE /* syscall() */
#include "dispatch.h"

#include "cpu.h"

#if defined(__x86_64__) && defined(__AVX__)
#error "the dispatcher must be compiled for the baseline: keep -march and -mavx out of CFLAGS"
#endif

#define PF_ARCH_any(row) row
#if defined(__x86_64__)
#define PF_ARCH_x86_64(row) row
#else
#define PF_ARCH_x86_64(row)
#endif
#if defined(__aarch64__)
#define PF_ARCH_aarch64(row) row
#else
#define PF_ARCH_aarch64(row)
#endif
#define PF_ROW(...) {__VA_ARGS__},

static const struct {
    const char *name;
    int (*supported)(void);
    const pf_kernel_table *table;
} isas[] = {
#define PF_ISA(name, arch, flags)                                                                            \
    PF_ARCH_##arch(PF_ROW(#name PF_COMMA pf_cpu_##name PF_COMMA &pf_kernels_##name))
#define PF_COMMA ,
#include "../isa.def"
#undef PF_ISA
};

int pf_dispatch_num_isas(void) {
    return (int)(sizeof isas / sizeof *isas);
}

const char *pf_dispatch_name(int isa) {
    return isas[isa].name;
}

int pf_dispatch_supported(int isa) {
    return isas[isa].supported();
}

const pf_real_kernels *pf_kernels(int isa, int wide) {
    return &isas[isa].table->real[wide];
}

const pf_matrix_kernels *pf_matrix(int isa) {
    return isas[isa].table->matrix;
}
