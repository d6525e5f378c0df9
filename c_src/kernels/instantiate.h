/* All kernels of one instruction set. Expects its simd header and PF_TABLE, the name of the table
 * to define; includes every kernel source twice, for float and for double. */
#include "exp2.h"
#include "real.h"
#include "table.h"

#include "storage.h"

#define PF_REAL f32
#include "state.h"
#include "rows.h"
#include "prefill.h"
#include "decode.h"
#include "entries.h"
#undef PF_REAL

#define PF_REAL f64
#include "state.h"
#include "rows.h"
#include "prefill.h"
#include "decode.h"
#include "entries.h"
#undef PF_REAL

static void f32_decode_block(const pf_decode_block *block) {
    switch (block->dtype) {
    case PF_F16:
        f32_decode_body(PF_F16, block);
        return;
    case PF_BF16:
        f32_decode_body(PF_BF16, block);
        return;
    default:
        f32_decode_body(PF_F32, block);
    }
}

static void f64_decode_block(const pf_decode_block *block) {
    f64_decode_body(PF_F64, block);
}

#define PF_KERNELS(real)                                                                                     \
    {                                                                                                        \
        .lanes = real##_LANES,                                                                               \
        .panel_vectors = real##_PANEL_VECTORS,                                                               \
        .prefill_tile_keys = PF_PREFILL_TILE_KEYS,                                                           \
        .prefill_tile = real##_prefill_tile,                                                                 \
        .decode_block = real##_decode_block,                                                                 \
        .state_reset = real##_state_reset,                                                                   \
        .state_merge = real##_state_merge,                                                                   \
        .state_scale = real##_state_scale,                                                                   \
        .pack_queries = real##_pack_queries,                                                                 \
        .unpack_rows = real##_unpack_rows,                                                                   \
        .load_row = real##_load_row,                                                                         \
        .store_row = real##_store_row,                                                                       \
        .exp2_array = real##_exp2_array,                                                                     \
        .transpose = real##_transpose_square,                                                                \
        .reduce = real##_reduce,                                                                             \
    }

const pf_kernel_table PF_TABLE = {{PF_KERNELS(f32), PF_KERNELS(f64)}};
