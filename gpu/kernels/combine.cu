/* The states of all splits of a row, merged along the fixed binary tree of their indices, and the row
 * finished. One warp a row. */
#include "careful.cuh"
#include "tree.cuh"

PF_DEVICE void pf_combine_row(const pf_call &call, const pf_sequence &s, int64_t head, int64_t i) {
    const int lane = threadIdx.x % 32;
    const int64_t row = pf_state_row(call, s, head, i), num_splits = pf_num_splits(call, s);
    const double sink = pf_sink_of(call, head);
    char *out = pf_place(call.out, pf_query_offset(call.out, s, head, i));
    bool finite = true;
    for (int64_t d = lane; d < pf_round_up(call.head_dim_v, 32); d += 32) {
        pf_tree tree;
        tree.depth = 0;
        for (int64_t split = 0; split < num_splits; split++)
            pf_tree_push(&tree, split, num_splits, *pf_partial_m(call, split, row),
                         *pf_partial_l(call, split, row),
                         d < call.head_dim_v ? pf_partial_o(call, split, row)[d] : (pf_real)0);
        const double factor = pf_output_factor((double)tree.m[0], (double)tree.l[0], sink);
        const pf_real x = pf_finished(tree.o[0], (pf_real)factor);
        finite &= pf_is_finite(x);
        if (d < call.head_dim_v)
            pf_store_out(call, out, d, x);
        if (d == 0)
            pf_store_lse(call, s, head, i, (double)tree.m[0], (double)tree.l[0]);
    }
    if (!__all_sync(PF_WARP_ALL, finite))
        pf_careful_row(call, s, head, i);
}

extern "C" __global__ void __launch_bounds__(128) pf_combine(const __grid_constant__ pf_call call) {
    const pf_item item = pf_get_item(call, call.num_heads, 1);
    const pf_sequence s = pf_get_sequence(call, item.sequence);
    if (!pf_is_mine(call, s))
        return;
    const int64_t warps = blockDim.x / 32, step = call.row_blocks * warps;
    const bool bad = pf_find_bad(call, s);
    for (int64_t i = item.row_block * warps + threadIdx.x / 32; i < s.num_queries; i += step)
        if (bad)
            pf_store_bad_row(call, s, item.head, i);
        else
            pf_combine_row(call, s, item.head, i);
}
