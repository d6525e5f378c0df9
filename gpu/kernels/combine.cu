/* The states of all splits of a row, merged along the fixed binary tree of their indices, and the row
 * finished. One block a row: short calls wait for this. */
#include "careful.cuh"
#include "tree.cuh"

PF_DEVICE void pf_combine_row(const pf_call &call, const pf_sequence &s, int64_t head, int64_t i) {
    const int64_t row = pf_state_row(call, s, head, i), num_splits = pf_num_splits(call, s);
    const double sink = pf_sink_of(call, head);
    char *out = pf_place(call.out, pf_query_offset(call.out, s, head, i));
    bool finite = true;
    /* Addresses are sums: this is code that runs once, and each line of it comes from memory. */
    const int64_t step = pf_num_state_rows(call), o_step = step * call.head_dim_v;
    const pf_real *m = pf_partial_m(call, 0, row), *l = pf_partial_l(call, 0, row),
                  *o = pf_partial_o(call, 0, row);
    for (int64_t d = threadIdx.x; d < call.head_dim_v; d += blockDim.x) {
        const auto load = [&](int64_t split) -> pf_part {
            return {m[split * step], l[split * step], o[split * o_step + d]};
        };
        const pf_part all = pf_merged_all(load, num_splits);
        const pf_real x = pf_finished(all.o, pf_finishing_factor(all.m, all.l, sink));
        finite &= pf_is_finite(x);
        pf_store_out(call, out, d, x);
        if (d == 0)
            pf_store_lse(call, s, head, i, (double)all.m, (double)all.l);
    }
    if (__syncthreads_or(!finite) && threadIdx.x < 32)
        pf_careful_row_of(call, s.index, head, i);
}

extern "C" __global__ void __launch_bounds__(128) pf_combine(const __grid_constant__ pf_call call) {
    const pf_item item = pf_get_item(call, call.num_heads, 1);
    const pf_sequence s = pf_get_sequence(call, item.sequence);
    const bool bad = pf_find_bad(call, s);
    /* Until here nothing has been read that the kernel before writes. */
    pf_wait_for_previous();
    if (!pf_is_mine(call, s))
        return;
    for (int64_t i = item.row_block; i < s.num_queries; i += call.row_blocks)
        if (!bad)
            pf_combine_row(call, s, item.head, i);
        else if (threadIdx.x < 32)
            pf_store_bad_row(call, s, item.head, i);
}
