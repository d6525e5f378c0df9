/* All kernels of one instruction set. Expects its simd header and PF_TABLE, the name of the table
 * to define; includes every kernel source twice, for float and for double. */
#include "real.h"
#include "exp2.h"
#include "table.h"

#include "storage.h"

#define PF_REAL f32
#include "state.h"
#include "rows.h"
#include "score.h"
#include "stats.h"
#include "prefill.h"
#include "decode.h"
#include "entries.h"
#include "limits.h"
#undef PF_REAL

#define PF_REAL f64
#include "state.h"
#include "rows.h"
#include "score.h"
#include "stats.h"
#include "prefill.h"
#include "decode.h"
#include "entries.h"
#include "limits.h"
#undef PF_REAL

static void f32_decode_block(const pf_decode_block *block) {
    switch (block->dtype) {
    case PF_F16:
        f32_decode_body(PF_F16, block);
        return;
    case PF_BF16:
        f32_decode_body(PF_BF16, block);
        return;
    case PF_F8E4M3:
        f32_decode_body(PF_F8E4M3, block);
        return;
    case PF_F8E5M2:
        f32_decode_body(PF_F8E5M2, block);
        return;
    case PF_I8:
        f32_decode_body(PF_I8, block);
        return;
    case PF_I4:
        f32_decode_body(PF_I4, block);
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
        .score_tile = real##_score_tile,                                                                     \
        .probabilities = real##_probabilities,                                                               \
        .decode_block = real##_decode_block,                                                                 \
        .state_reset = real##_state_reset,                                                                   \
        .state_merge = real##_state_merge,                                                                   \
        .state_scale = real##_state_scale,                                                                   \
        .pack_queries = real##_pack_queries,                                                                 \
        .finish_rows = real##_finish_rows,                                                                   \
        .unpack_rows = real##_unpack_rows,                                                                   \
        .load_row = real##_load_row,                                                                         \
        .store_row = real##_store_row,                                                                       \
        .count_unseen = real##_count_unseen,                                                                 \
        .hide = real##_hide,                                                                                 \
        .count_hidden = real##_count_hidden,                                                                 \
        .exp2_array = real##_exp2_array,                                                                     \
        .tanh_array = real##_tanh_array,                                                                     \
        .transpose = real##_transpose_square,                                                                \
        .reduce = real##_reduce,                                                                             \
        .peak = real##_peak,                                                                                 \
        .read = real##_read,                                                                                 \
    }

#ifndef PF_MATRIX
#define PF_MATRIX 0
#else
#include "amx.h"
#endif

const pf_kernel_table PF_TABLE = {{PF_KERNELS(f32), PF_KERNELS(f64)}, PF_MATRIX};
