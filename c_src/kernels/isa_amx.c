/* The kernels of instruction set amx: those of avx512, and bfloat16 products on tiles. */
#include "../simd/amx.h"

#define PF_TABLE pf_kernels_amx
#define PF_PREFILL_TILE_KEYS 128
#define PF_MATRIX &amx_kernels
#include "instantiate.h"
