/* The states of all splits of a row, merged along the fixed binary tree of their indices, and the row
 * finished. One block a row: short calls wait for this. */
#include "careful.cuh"
#include "tree.cuh"

/* The states of a row: m and l of a split lie `step` further, o `o_step`. */
struct pf_states {
    const pf_real *m, *l, *o;
    int64_t step, o_step;
};

/* `count` states, at most PF_AT_ONCE, for one output of each lane that is `active`. What the weights of
 * outputs are says m, so that each of them is one lane's to work out. Called by whole warps. */
PF_DEVICE pf_part pf_merged_by_warp(const pf_states &states, int64_t count, bool active) {
    const int lane = threadIdx.x % 32;
    pf_real m = -(pf_real)pf_infinity(), l = 0, o[PF_AT_ONCE];
    if (lane < PF_AT_ONCE && lane < count) {
        m = states.m[lane * states.step];
        l = states.l[lane * states.step];
    }
    const pf_real *from = states.o;
#pragma unroll
    for (int i = 0; i < PF_AT_ONCE; i++) {
        o[i] = active && i < count ? *from : 0;
        from += states.o_step;
    }
#pragma unroll
    for (int width = 1; width < PF_AT_ONCE; width *= 2) {
        const pf_real other_m = __shfl_down_sync(PF_WARP_ALL, m, width);
        const pf_real other_l = __shfl_down_sync(PF_WARP_ALL, l, width);
        const pf_real top = pf_max_of(m, other_m);
        const pf_real alpha = pf_rescaling(m, top), beta = pf_rescaling(other_m, top);
        if (lane + width < count) {
            m = top;
            l = l * alpha + other_l * beta;
        }
#pragma unroll
        for (int i = 0; i < PF_AT_ONCE; i += 2 * width) {
            const pf_real a = __shfl_sync(PF_WARP_ALL, alpha, i), b = __shfl_sync(PF_WARP_ALL, beta, i);
            if (i + width < count)
                o[i] = o[i] * a + o[i + width] * b;
        }
    }
    return {__shfl_sync(PF_WARP_ALL, m, 0), __shfl_sync(PF_WARP_ALL, l, 0), o[0]};
}

/* Where a row's states lie and what is made of them. Addresses are sums: this is code that runs once, and
 * each line of it comes from memory. */
struct pf_row {
    pf_states states;
    double sink;
    char *out;
};

PF_DEVICE pf_row pf_get_row(const pf_call &call, const pf_sequence &s, int64_t head, int64_t i) {
    const int64_t row = pf_state_row(call, s, head, i), step = pf_num_state_rows(call);
    return {{pf_partial_m(call, 0, row), pf_partial_l(call, 0, row), pf_partial_o(call, 0, row), step,
             step * call.head_dim_v},
            pf_sink_of(call, head),
            pf_place(call.out, pf_query_offset(call.out, s, head, i))};
}

PF_DEVICE void pf_combine_row(const pf_call &call, const pf_sequence &s, int64_t num_splits,
                              const pf_row &row, int64_t head, int64_t i) {
    const pf_states &all = row.states;
    bool finite = true;
    for (int64_t first_dim = threadIdx.x / 32 * 32; first_dim < call.head_dim_v; first_dim += blockDim.x) {
        const int64_t d = first_dim + threadIdx.x % 32;
        const bool active = d < call.head_dim_v;
        const auto at_once = [&](int64_t first) {
            const pf_states some = {all.m + first * all.step, all.l + first * all.step,
                                    all.o + first * all.o_step + d, all.step, all.o_step};
            return pf_merged_by_warp(some, num_splits - first, active);
        };
        const pf_part merged = pf_merged_in_order(at_once, num_splits);
        if (!active)
            continue;
        const pf_real x = pf_finished(merged.o, pf_finishing_factor(merged.m, merged.l, row.sink));
        finite &= pf_is_finite(x);
        pf_store_out(call, row.out, d, x);
        if (d == 0)
            pf_store_lse(call, s, head, i, (double)merged.m, (double)merged.l);
    }
    if (__syncthreads_or(!finite) && threadIdx.x < 32)
        pf_careful_row_of(call, s.index, head, i);
}

extern "C" __global__ void __launch_bounds__(128) pf_combine(const __grid_constant__ pf_call call) {
    const pf_item item = pf_get_item(call, call.num_heads, 1);
    const pf_sequence s = pf_get_sequence(call, item.sequence);
    const bool bad = pf_find_bad(call, s);
    const int64_t num_splits = pf_num_splits(call, s), num_rows = pf_is_mine(call, s) ? s.num_queries : 0;
    pf_row row = pf_get_row(call, s, item.head, item.row_block);
    /* Until here nothing has been read that the kernel before writes, and what is known by now is not waited
     * for after its end. */
    pf_wait_for_previous();
    for (int64_t i = item.row_block; i < num_rows; i += call.row_blocks) {
        if (i > item.row_block)
            row = pf_get_row(call, s, item.head, i);
        if (!bad)
            pf_combine_row(call, s, num_splits, row, item.head, i);
        else if (threadIdx.x < 32)
            pf_store_bad_row(call, s, item.head, i);
    }
}
