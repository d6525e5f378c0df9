/* The kernels of instruction set neon. */
#include "../simd/neon.h"

#define PF_TABLE pf_kernels_neon
#define PF_PREFILL_TILE_KEYS 192 /* scores of a panel and half a tile of keys fit the first cache */
#include "instantiate.h"
