/* Instruction sets: what was compiled in, what CPU and operating system allow, and the kernels. */
#ifndef PF_DISPATCH_DISPATCH_H
#define PF_DISPATCH_DISPATCH_H

#include "../kernels/table.h"

int pf_dispatch_num_isas(void);
const char *pf_dispatch_name(int isa);
int pf_dispatch_supported(int isa);

/* The kernels of a row, for float or (wide) double. The row must be a supported one. */
const pf_real_kernels *pf_kernels(int isa, int wide);

/* Those of its matrix unit, null where it has none. */
const pf_matrix_kernels *pf_matrix(int isa);

#endif
