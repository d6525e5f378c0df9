/* The functions of pyflash_abi.h: hand-over to the driver, and the words of a status. */
#include "pyflash_abi.h"

#include "../dispatch/dispatch.h"
#include "../driver/entry.h"
#include "../driver/parallel.h"

int pf_attention(const pf_attention_call *call) {
    return pf_driver_attention(call);
}

int pf_attention_again(const pf_known_call *known, void *q, void *k, void *v, void *out, void *lse,
                       const void *const *index) {
    pf_attention_call call = known->call;
    call.q.data = q;
    call.k.data = k;
    call.v.data = v;
    call.out.data = out;
    call.lse.data = lse;
    if (index) {
        call.cu_seqlens_q.data = index[0];
        call.cu_seqlens_kv.data = index[1];
        call.seq_lens.data = index[2];
        call.block_table.data = index[3];
    }
    return pf_driver_attention_again(known, &call);
}

int pf_attention_plan(const pf_attention_call *call, pf_plan *plan) {
    return pf_driver_plan(call, plan);
}

int pf_merge_states(const pf_merge_call *call) {
    return pf_driver_merge(call);
}

int pf_append_kv(const pf_append_call *call) {
    return pf_driver_append(call);
}

int pf_attention_stats(const pf_stats_call *call) {
    return pf_driver_stats(call);
}

const char *pf_status_text(int status) {
    switch (status) {
#define PF_STATUS(name, code, text)                                                                          \
    case code:                                                                                               \
        return text;
#include "status.def"
#undef PF_STATUS
    default:
        return "an unknown status";
    }
}

int pf_num_isas(void) {
    return pf_dispatch_num_isas();
}

const char *pf_isa_name(int isa) {
    return pf_dispatch_name(isa);
}

int pf_isa_supported(int isa) {
    return pf_dispatch_supported(isa);
}

int pf_openmp_version(void) {
    return pf_openmp_date();
}

int pf_max_threads(void) {
    return pf_default_threads();
}

int pf_primitive_exp2(int isa, int wide, const void *x, double factor, void *out, int64_t count) {
    pf_kernels(isa, wide)->exp2_array(out, x, factor, count);
    return PF_STATUS_OK;
}

int pf_primitive_tanh(int isa, int wide, const void *x, void *out, int64_t count) {
    pf_kernels(isa, wide)->tanh_array(out, x, count);
    return PF_STATUS_OK;
}

int pf_primitive_load(int isa, int wide, int dtype, const void *x, int64_t stride, void *out, int64_t count) {
    pf_kernels(isa, wide)->load_row(out, x, stride, count, dtype);
    return PF_STATUS_OK;
}

int pf_primitive_store(int isa, int wide, int dtype, const void *x, void *out, int64_t stride,
                       int64_t count) {
    pf_kernels(isa, wide)->store_row(out, stride, x, count, dtype);
    return PF_STATUS_OK;
}

int pf_primitive_lanes(int isa, int wide) {
    return pf_kernels(isa, wide)->lanes;
}

int pf_primitive_transpose(int isa, int wide, const void *x, void *out) {
    pf_kernels(isa, wide)->transpose(out, x);
    return PF_STATUS_OK;
}

int pf_primitive_reduce(int isa, int wide, const void *x, void *sums, void *maximum) {
    pf_kernels(isa, wide)->reduce(sums, maximum, x);
    return PF_STATUS_OK;
}

double pf_limit_operations(int isa, int kind, int64_t rounds) {
    const pf_matrix_kernels *matrix = pf_matrix(isa);
    double sink;
    if (kind < 2)
        return pf_kernels(isa, kind)->peak(rounds, 1.0, 1e-9, &sink);
    return matrix ? matrix->peak(rounds, &sink) : 0.0;
}

double pf_limit_read(int isa, const float *data, int64_t count) {
    double sink;
    return pf_kernels(isa, 0)->read(data, count, &sink);
}
