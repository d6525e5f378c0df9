/* Attention with every option, for every type and width: one warp a row (or, where keys are split, a row of
 * one split). Slow, and right: what no other kernel takes comes here, and the others are held to it. */
#include "careful.cuh"

extern "C" __global__ void __launch_bounds__(128) pf_generic(const __grid_constant__ pf_call call) {
    const pf_item item = pf_get_item(call, call.num_heads, call.max_splits);
    const pf_sequence s = pf_get_sequence(call, item.sequence);
    if (!pf_is_mine(call, s))
        return;
    const int64_t head = item.head, split = item.split;
    const int64_t warps = blockDim.x / 32, step = call.row_blocks * warps;
    const int64_t first = item.row_block * warps + threadIdx.x / 32;
    const bool bad = pf_find_bad(call, s);
    const int lane = threadIdx.x % 32;
    for (int64_t i = first; i < s.num_queries; i += step) {
        if (!call.partial) {
            if (bad)
                pf_store_bad_row(call, s, head, i);
            else
                pf_careful_row(call, s, head, i);
            continue;
        }
        if (split >= pf_num_splits(call, s))
            continue;
        const int64_t row = pf_state_row(call, s, head, i);
        const pf_query q = pf_get_query(call, s, head, i);
        const int64_t lo = pf_split_lo(call, s, split), hi = pf_split_lo(call, s, split + 1);
        for (int64_t first_dim = 0; first_dim < call.head_dim_v; first_dim += PF_CAREFUL_DIMS) {
            pf_row_state state;
            pf_careful_fold(call, s, q, bad ? 0 : lo, bad ? 0 : hi, first_dim, 1, &state);
#pragma unroll
            for (int r = 0; r < PF_CAREFUL_REGISTERS; r++) {
                const int64_t d = first_dim + lane + 32 * r;
                if (d < call.head_dim_v)
                    pf_partial_o(call, split, row)[d] = state.o[r];
            }
            if (lane == 0 && first_dim == 0) {
                *pf_partial_m(call, split, row) = state.m;
                *pf_partial_l(call, split, row) = state.l;
            }
        }
    }
}
