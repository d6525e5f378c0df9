/* Partial results (out, lse) of disjoint sets of keys, merged along the fixed binary tree of their indices:
 * each is the state (m = lse, l = 1, o = out). One warp a row. The twin of c_src/driver/merge.c. */
#include "merge.cuh"
#include "careful.cuh"
#include "tree.cuh"

/* Types of the parts and of their log-sum-exps: constants, since many are asked for at a time. */
#ifndef PF_PARTS
#define PF_PARTS PF_F32
#define PF_PART_LSE PF_F32
#endif
enum { PF_OUTPUTS = 4 };

struct pf_merge_row {
    int64_t b, token, head;
};

PF_DEVICE int64_t pf_row_offset(const pf_tensor &t, const pf_merge_row &row) {
    return row.b * t.stride_batch + row.token * t.stride_token + row.head * t.stride_head;
}

PF_DEVICE double pf_part_lse(const pf_merge_call &call, const pf_merge_row &row, int64_t part) {
    const int64_t at = pf_row_offset(call.part_lse, row) + part * call.part_lse_stride_part;
    return PF_PART_LSE == PF_F64 ? ((const double *)call.part_lse.data)[at]
                                 : (double)((const float *)call.part_lse.data)[at];
}

PF_DEVICE pf_real pf_part_output(const pf_merge_call &call, const pf_merge_row &row, int64_t part,
                                 int64_t d) {
    const int64_t offset = pf_row_offset(call.parts, row) + part * call.parts_stride_part;
    return pf_element((const char *)call.parts.data + offset * pf_dtype_size(PF_PARTS), PF_PARTS,
                      call.parts.stride_dim, d);
}

/* Outputs d, d + 32, ... of a part as a state: a warp reads neighbours, a thread finds the weights of a row
 * once for all that it has of it. */
PF_DEVICE pf_part<PF_OUTPUTS> pf_part_state(const pf_merge_call &call, const pf_merge_row &row, int64_t part,
                                            int64_t d, pf_real value_factor) {
    const double lse = pf_part_lse(call, row, part);
    if (lse == -(double)pf_infinity()) /* no keys: neutral, whatever the values are */
        return pf_no_part<PF_OUTPUTS>();
    const bool broken = lse != lse; /* a maximum would leave it out */
    pf_part<PF_OUTPUTS> state;
    state.m = broken ? pf_lowest<pf_real>() : pf_narrow(lse);
    state.l = broken ? (pf_real)pf_nan() : (pf_real)1;
#pragma unroll
    for (int n = 0; n < PF_OUTPUTS; n++) {
        const int64_t at = d + 32 * n;
        const pf_real value = at < call.head_dim ? pf_part_output(call, row, part, at) * value_factor : 0;
        state.o[n] = broken ? (pf_real)pf_nan() : value;
    }
    return state;
}

/* The factor of the output of a row all of whose parts have an lse of -inf. A part whose output is not finite
 * did see keys, all with scores of -inf: softmax of these is not a number, unless a sink takes all the
 * weight. */
PF_DEVICE double pf_factor_without_weight(const pf_merge_call &call, const pf_merge_row &row, double sink) {
    bool broken = false;
    for (int64_t part = 0; part < call.num_parts; part++)
        for (int64_t d = threadIdx.x % 32; d < call.head_dim; d += 32)
            broken |= !pf_is_finite(pf_part_output(call, row, part, d));
    if (!__any_sync(PF_WARP_ALL, broken))
        return 0;
    return sink == -(double)pf_infinity() ? (double)pf_nan() : sink != sink ? sink : 0;
}

PF_DEVICE void pf_merge_one(const pf_merge_call &call, const pf_merge_row &row) {
    const double none = -(double)pf_infinity();
    const double sink = call.sinks.data ? pf_number_at(call.sinks, row.head * call.sinks.stride_head) : none;
    bool any = false;
    for (int64_t part = 0; part < call.num_parts; part++)
        any |= pf_part_lse(call, row, part) != none;
    const double without_weight = any ? 0 : pf_factor_without_weight(call, row, sink);
    char *out = pf_place(call.out, pf_row_offset(call.out, row));
    for (int64_t d = threadIdx.x % 32; d < call.head_dim; d += 32 * PF_OUTPUTS) {
        pf_part<PF_OUTPUTS> all;
        pf_real x[PF_OUTPUTS] = {0};
        /* Outputs near the largest number may have a sum that is infinite and a mean that is not. */
        unsigned wanted = ~0u;
        for (int attempt = 0; attempt < 2 && wanted; attempt++) {
            const pf_real value_factor = attempt ? PF_SMALLER_VALUES : (pf_real)1;
            const auto load = [&](int64_t part) { return pf_part_state(call, row, part, d, value_factor); };
            all = pf_merged_all<PF_OUTPUTS>(load, call.num_parts);
            const double factor = any ? pf_output_factor((double)all.m, (double)all.l, sink) : without_weight;
            unsigned broken = 0;
#pragma unroll
            for (int n = 0; n < PF_OUTPUTS; n++) {
                if (wanted >> n & 1)
                    x[n] = pf_finished(all.o[n], (pf_real)(factor / (double)value_factor));
                broken |= (unsigned)!pf_is_finite(x[n]) << n;
            }
            wanted = broken;
        }
#pragma unroll
        for (int n = 0; n < PF_OUTPUTS; n++)
            if (d + 32 * n < call.head_dim)
                pf_set_element(out, call.out.dtype, (d + 32 * n) * call.out.stride_dim, x[n]);
        if (d == 0)
            pf_set_lse(pf_place(call.lse, pf_row_offset(call.lse, row)), call.lse.dtype,
                       pf_log_sum_exp((double)all.m, (double)all.l, call.lse_includes_sinks ? sink : none));
    }
}

extern "C" __global__ void __launch_bounds__(128) pf_merge(const __grid_constant__ pf_merge_call call) {
    const int64_t warps = blockDim.x / 32, num_rows = call.batch * call.seqlen * call.num_heads;
    for (int64_t i = blockIdx.x * warps + threadIdx.x / 32; i < num_rows; i += gridDim.x * warps) {
        const int64_t token = pf_quotient(i, call.num_heads), b = pf_quotient(token, call.seqlen);
        const pf_merge_row row = {b, token - b * call.seqlen, i - token * call.num_heads};
        pf_merge_one(call, row);
    }
}
