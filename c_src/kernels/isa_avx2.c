/* The kernels of instruction set avx2. */
#include "../simd/avx2.h"

#define PF_TABLE pf_kernels_avx2
#define PF_PREFILL_TILE_KEYS 192 /* scores of a panel and half a tile of keys fit the first cache */
#include "instantiate.h"
