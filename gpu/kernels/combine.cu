/* The states of all splits of a row, merged along the fixed binary tree of their indices ((0, 1), (2, 3), then
 * pairs of pairs; an odd one passes up), and the row finished. One warp a row. */
#include "careful.cuh"

/* Splits whose states may wait for their partners at a time: enough for 2^32 of them. */
enum { PF_TREE_DEPTH = 33 };

PF_DEVICE void pf_combine_row(const pf_call &call, const pf_sequence &s, int64_t head, int64_t i) {
    const int lane = threadIdx.x % 32;
    const int64_t row = pf_state_row(call, s, head, i), num_splits = pf_num_splits(call, s);
    const double sink = pf_sink_of(call, head);
    char *out = pf_place(call.out, pf_query_offset(call.out, s, head, i));
    bool finite = true;
    for (int64_t d = lane; d < pf_round_up(call.head_dim_v, 32); d += 32) {
        pf_real m[PF_TREE_DEPTH], l[PF_TREE_DEPTH], o[PF_TREE_DEPTH];
        int depth = 0;
        for (int64_t split = 0; split < num_splits; split++) {
            pf_real m_b = *pf_partial_m(call, split, row), l_b = *pf_partial_l(call, split, row);
            pf_real o_b = d < call.head_dim_v ? pf_partial_o(call, split, row)[d] : (pf_real)0;
            /* Like the carries of a binary counter; at the end everything that waits is merged. */
            int64_t carry = split;
            while (depth > 0 && ((carry & 1) || split == num_splits - 1)) {
                depth--;
                const pf_real top = pf_max_of(m[depth], m_b);
                const pf_real alpha = pf_rescaling(m[depth], top), beta = pf_rescaling(m_b, top);
                m_b = top;
                l_b = l[depth] * alpha + l_b * beta;
                o_b = o[depth] * alpha + o_b * beta;
                carry >>= 1;
            }
            m[depth] = m_b;
            l[depth] = l_b;
            o[depth] = o_b;
            depth++;
        }
        const double factor = pf_output_factor((double)m[0], (double)l[0], sink);
        const pf_real x = pf_finished(o[0], (pf_real)factor);
        finite &= pf_is_finite(x);
        if (d < call.head_dim_v)
            pf_store_out(call, out, d, x);
        if (d == 0)
            pf_store_lse(call, s, head, i, (double)m[0], (double)l[0]);
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
