/* The kernels of instruction set neon. */

/* With 30 of 32 registers in use, gcc spills in the inner loops of prefill if it first moves loads away from
 * their uses, or gives registers to whatever fits instead of to what is used most. */
#ifndef __clang__
#pragma GCC optimize("no-schedule-insns", "ira-algorithm=priority")
#endif
#include "../simd/neon.h"

#define PF_TABLE pf_kernels_neon
#define PF_PREFILL_TILE_KEYS 192 /* scores of a panel and half a tile of keys fit the first cache */
#include "instantiate.h"
