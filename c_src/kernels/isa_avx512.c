/* The kernels of instruction set avx512. */
#include "../simd/avx512.h"

#define PF_TABLE pf_kernels_avx512
#define PF_PREFILL_TILE_KEYS 128 /* 24 KiB of scores for a panel of 48 rows */
#include "instantiate.h"
