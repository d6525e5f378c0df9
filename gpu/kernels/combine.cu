/* The states of all splits of a row, merged along the fixed binary tree of their indices ((0, 1), (2, 3),
 * then pairs of pairs; an odd one passes up), and the row finished. One block a row: short calls wait for
 * this, and what it takes is the way to memory and back, so that many states are asked for at a time. */
#include "careful.cuh"

/* States that are merged in registers, a power of two, and how many such results may wait for their partners:
 * enough for 2^36 splits. */
enum { PF_AT_ONCE = 16, PF_TREE_DEPTH = 33 };

/* One output of a state. */
struct pf_part {
    pf_real m, l, o;
};

PF_DEVICE pf_part pf_merged(const pf_part &a, const pf_part &b) {
    const pf_real top = pf_max_of(a.m, b.m);
    const pf_real alpha = pf_rescaling(a.m, top), beta = pf_rescaling(b.m, top);
    return {top, a.l * alpha + b.l * beta, a.o * alpha + b.o * beta};
}

/* Where one output of all splits lies: what counts here is latency, so that addresses are sums. */
struct pf_parts {
    const pf_real *m, *l, *o;
    int64_t step, o_step; /* from split to split */
};

PF_DEVICE pf_parts pf_get_parts(const pf_call &call, int64_t row, int64_t d) {
    const int64_t rows = pf_num_state_rows(call);
    return {pf_partial_m(call, 0, row), pf_partial_l(call, 0, row), pf_partial_o(call, 0, row) + d, rows,
            rows * call.head_dim_v};
}

/* The next `left` splits, at most PF_AT_ONCE. What is past the end is empty, which changes nothing: an odd
 * one passes up. */
PF_DEVICE pf_part pf_merged_at_once(pf_parts &from, int64_t left) {
    const int here = (int)pf_min(left, PF_AT_ONCE);
    pf_part parts[PF_AT_ONCE];
#pragma unroll
    for (int i = 0; i < PF_AT_ONCE; i++) {
        const bool there = i < here;
        parts[i].m = there ? *from.m : -(pf_real)pf_infinity();
        parts[i].l = there ? *from.l : (pf_real)0;
        parts[i].o = there ? *from.o : (pf_real)0;
        from.m += from.step;
        from.l += from.step;
        from.o += from.o_step;
    }
#pragma unroll
    for (int width = 1; width < PF_AT_ONCE; width *= 2)
#pragma unroll
        for (int i = 0; i < PF_AT_ONCE; i += 2 * width)
            parts[i] = pf_merged(parts[i], parts[i + width]);
    return parts[0];
}

PF_DEVICE pf_part pf_merged_splits(pf_parts from, int64_t num_splits) {
    pf_part waiting[PF_TREE_DEPTH];
    int depth = 0;
    for (int64_t number = 0, left = num_splits;; number++, left -= PF_AT_ONCE) {
        pf_part part = pf_merged_at_once(from, left);
        const bool last = left <= PF_AT_ONCE;
        /* Like the carries of a binary counter; at the end everything that waits is merged. */
        for (int64_t carry = number; depth > 0 && ((carry & 1) || last); carry >>= 1)
            part = pf_merged(waiting[--depth], part);
        if (last)
            return part;
        waiting[depth++] = part;
    }
}

PF_DEVICE void pf_combine_row(const pf_call &call, const pf_sequence &s, int64_t head, int64_t i) {
    const int64_t row = pf_state_row(call, s, head, i), num_splits = pf_num_splits(call, s);
    const double sink = pf_sink_of(call, head);
    char *out = pf_place(call.out, pf_query_offset(call.out, s, head, i));
    bool finite = true;
    for (int64_t d = threadIdx.x; d < call.head_dim_v; d += blockDim.x) {
        const pf_part all = pf_merged_splits(pf_get_parts(call, row, d), num_splits);
        const double factor = pf_output_factor((double)all.m, (double)all.l, sink);
        const pf_real x = pf_finished(all.o, (pf_real)factor);
        finite &= pf_is_finite(x);
        pf_store_out(call, out, d, x);
        if (d == 0)
            pf_store_lse(call, s, head, i, (double)all.m, (double)all.l);
    }
    if (__syncthreads_or(!finite) && threadIdx.x < 32)
        pf_careful_row(call, s, head, i);
}

extern "C" __global__ void __launch_bounds__(128) pf_combine(const __grid_constant__ pf_call call) {
    const pf_item item = pf_get_item(call, call.num_heads, 1);
    const pf_sequence s = pf_get_sequence(call, item.sequence);
    if (!pf_is_mine(call, s))
        return;
    const bool bad = pf_find_bad(call, s);
    for (int64_t i = item.row_block; i < s.num_queries; i += call.row_blocks)
        if (!bad)
            pf_combine_row(call, s, item.head, i);
        else if (threadIdx.x < 32)
            pf_store_bad_row(call, s, item.head, i);
}
