/* The states of all splits of a row, merged along the fixed binary tree of their indices, and the row
 * finished. A thread has PF_OUTPUTS outputs of a row, whose weights it finds once; a block has as many rows
 * as it has threads for. Short calls wait for this, and calls of many rows read all of their states here. */
#include "careful.cuh"
#include "tree.cuh"

#ifndef PF_OUTPUTS
#define PF_OUTPUTS 1
#endif
enum { PF_MOST_THREADS = 128 };

/* Neighbouring numbers of a state; a caller's workspace begins at a multiple of 8 bytes. */
PF_DEVICE void pf_load_outputs(pf_real (&outputs)[PF_OUTPUTS], const pf_real *o) {
#pragma unroll
    for (int i = 0; i < PF_OUTPUTS; i++)
        if (sizeof(pf_real) == 4 && PF_OUTPUTS % 2 == 0) {
            const float2 pair = *(const float2 *)(o + i / 2 * 2);
            outputs[i] = (pf_real)(i % 2 ? pair.y : pair.x);
        } else {
            outputs[i] = o[i];
        }
}

/* Part of a row, by one of `lanes` threads; returns whether its outputs are numbers. */
PF_DEVICE bool pf_combine_row(const pf_call &call, const pf_sequence &s, int64_t head, int64_t i, int lane,
                              int lanes) {
    const int64_t row = pf_state_row(call, s, head, i), num_splits = pf_num_splits(call, s);
    const double sink = pf_sink_of(call, head);
    char *out = pf_place(call.out, pf_query_offset(call.out, s, head, i));
    bool finite = true;
    /* Addresses are sums: this is code that runs once, and each line of it comes from memory. */
    const int64_t step = pf_num_state_rows(call), o_step = step * call.head_dim_v;
    const pf_real *m = pf_partial_m(call, 0, row), *l = pf_partial_l(call, 0, row),
                  *o = pf_partial_o(call, 0, row);
    for (int64_t d = lane * PF_OUTPUTS; d < call.head_dim_v; d += lanes * PF_OUTPUTS) {
        const auto load = [&](int64_t split) {
            pf_part<PF_OUTPUTS> part;
            part.m = m[split * step];
            part.l = l[split * step];
            pf_load_outputs(part.o, o + split * o_step + d);
            return part;
        };
        const pf_part<PF_OUTPUTS> all = pf_merged_all<PF_OUTPUTS>(load, num_splits);
        const pf_real factor = pf_finishing_factor(all.m, all.l, sink);
#pragma unroll
        for (int n = 0; n < PF_OUTPUTS; n++) {
            const pf_real x = pf_finished(all.o[n], factor);
            finite &= pf_is_finite(x);
            pf_store_out(call, out, d + n, x);
        }
        if (d == 0)
            pf_store_lse(call, s, head, i, (double)all.m, (double)all.l);
    }
    return finite;
}

/* The sequence of query `token` of all, -1 if none has it; all threads of a block ask together. Sequences are
 * looked at side by side: that is one way to memory. Where prefix sums fall, more than one may have it. */
PF_DEVICE int64_t pf_sequence_of(const pf_call &call, int64_t token) {
    __shared__ int found;
    if (!PF_MAY_HAVE(CU_SEQLENS_Q) || !call.cu_seqlens_q.data)
        return pf_quotient(token, call.seqlen_q);
    if (threadIdx.x == 0)
        found = -1;
    __syncthreads();
    for (int64_t b = threadIdx.x, lo, hi; b < call.batch; b += blockDim.x) {
        pf_part_of(call.cu_seqlens_q, b, call.seqlen_q, &lo, &hi);
        if (lo <= token && token < hi)
            atomicMax(&found, (int)b);
    }
    __syncthreads();
    const int64_t b = found;
    __syncthreads();
    return b;
}

/* Some heads of one query. Packed sequences may have far fewer queries than the longest: blocks are numbered
 * by queries, not by sequences, so that all of them have something to do. */
PF_DEVICE void pf_combine_heads(const pf_call &call, int64_t token, int64_t first, int rows) {
    __shared__ int again[PF_MOST_THREADS]; /* rows that came out as no numbers */
    const int64_t b = pf_sequence_of(call, token);
    if (b < 0)
        return;
    const pf_sequence s = pf_get_sequence(call, b);
    if (!pf_is_mine(call, s))
        return;
    const int64_t i =
        token - (PF_MAY_HAVE(CU_SEQLENS_Q) && call.cu_seqlens_q.data ? s.q_token : b * call.seqlen_q);
    const bool bad = pf_find_bad(call, s);
    const int lanes = blockDim.x / rows, own = threadIdx.x / lanes;
    const int64_t head = first + own;
    bool finite = true;
    if (!bad && own < rows && head < call.num_heads)
        finite = pf_combine_row(call, s, head, i, threadIdx.x - own * lanes, lanes);
    if (!__syncthreads_or(bad || !finite))
        return;
    again[threadIdx.x] = bad;
    __syncthreads();
    if (!finite)
        again[own] = true;
    __syncthreads();
    for (int r = threadIdx.x / 32; r < rows && first + r < call.num_heads; r += blockDim.x / 32)
        if (bad)
            pf_store_bad_row(call, s, first + r, i);
        else if (again[r])
            pf_careful_row(call, s, first + r, i);
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(PF_MOST_THREADS)
    pf_combine(const __grid_constant__ pf_call call) {
    const int64_t num_tokens =
        (PF_MAY_HAVE(CU_SEQLENS_Q) && call.cu_seqlens_q.data ? 1 : call.batch) * call.seqlen_q;
    const int64_t blocks = call.row_blocks; /* of one query */
    const int rows = (int)pf_ceil_div(call.num_heads, blocks);
    const int64_t step = gridDim.x / (uint32_t)blocks;
    for (int64_t token = blockIdx.x / (uint32_t)blocks; token < num_tokens; token += step)
        pf_combine_heads(call, token, blockIdx.x % (uint32_t)blocks * rows, rows);
}
