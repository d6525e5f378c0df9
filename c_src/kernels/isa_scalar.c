/* The kernels of instruction set scalar. */
#include "../simd/scalar.h"

#define PF_TABLE pf_kernels_scalar
#define PF_PREFILL_TILE_KEYS 192 /* scores of a panel and half a tile of keys fit the first cache */
#include "instantiate.h"
