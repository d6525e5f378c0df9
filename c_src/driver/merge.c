/* Merging partial results: each part (out, lse) is the state (m = lse, l = 1, o = out), and the
 * parts go through the same tree as the splits of a call, in the wider of their two types. */
#include "driver.h"
#include "entry.h"
#include "sink.h"

#include "../dispatch/dispatch.h"

#include <stdlib.h>

typedef struct pf_merger {
    const pf_merge_call *call;
    const pf_real_kernels *kernels;
    int64_t elem_bytes;
} pf_merger;

static void merge_one(const void *owner, pf_state into, pf_state from) {
    const pf_merger *merger = owner;
    merger->kernels->state_merge(into.m, into.l, into.o, from.m, from.l, from.o, 1, merger->call->head_dim,
                                 merger->call->head_dim, 1, PF_LOG2_E);
}

static double get_real(const void *x, int64_t elem_bytes) {
    double wide;
    if (elem_bytes != 8) /* a caller's array need not be aligned */
        return pf_float_at(x);
    __builtin_memcpy(&wide, x, sizeof wide);
    return wide;
}

static void set_real(void *x, int64_t elem_bytes, double value) {
    if (elem_bytes == 8)
        *(double *)x = value;
    else
        *(float *)x = (float)value;
}

static void *element(const pf_tensor *t, int64_t b, int64_t token, int64_t head, int64_t part) {
    const int64_t offset = part + b * t->stride_batch + token * t->stride_token + head * t->stride_head;
    return (char *)t->data + offset * pf_dtype_size(t->dtype);
}

/* The merged state of a row, its values multiplied by a factor. Returns whether a part without keys
 * (lse of -inf) holds something else than finite outputs. */
static int fold_parts(const pf_merger *merger, pf_tree *tree, int64_t b, int64_t token, int64_t head,
                      double value_factor) {
    const pf_merge_call *call = merger->call;
    int broken = 0;
    for (int64_t part = 0; part < call->num_parts; part++) {
        const pf_state state = pf_tree_next(tree);
        const double lse =
            get_real(element(&call->part_lse, b, token, head, part * call->part_lse_stride_part),
                     pf_dtype_size(call->part_lse.dtype));
        merger->kernels->load_row(state.o,
                                  element(&call->parts, b, token, head, part * call->parts_stride_part),
                                  call->parts.stride_dim, call->head_dim, call->parts.dtype);
        const int finite = merger->kernels->state_scale(state.o, call->head_dim, value_factor);
        set_real(state.m, merger->elem_bytes, lse);
        set_real(state.l, merger->elem_bytes, 1.0);
        if (lse == -(double)INFINITY) { /* the neutral state */
            merger->kernels->state_reset(state.m, state.l, 1, state.o, call->head_dim);
            broken |= !finite;
        }
        pf_tree_push(tree, (pf_node){part, 0});
    }
    return broken;
}

static void merge_row(const pf_merger *merger, pf_tree *tree, int64_t b, int64_t token, int64_t head) {
    const pf_merge_call *call = merger->call;
    /* Outputs near the largest number may have a sum that is infinite and a mean that is not. */
    const double value_factors[2] = {1.0, 0x1p-40}, none = -(double)INFINITY;
    const double sink = call->sinks ? call->sinks[head] : none;
    int finite = 0;
    for (int attempt = 0; attempt < 2 && !finite; attempt++) {
        const int broken = fold_parts(merger, tree, b, token, head, value_factors[attempt]);
        const pf_state state = pf_tree_close(tree);
        const double m = get_real(state.m, merger->elem_bytes), l = get_real(state.l, merger->elem_bytes);
        /* A part without weight that is not finite did see keys, all of them with scores of -inf. */
        const double factor = pf_output_factor(m, l, sink, broken);
        finite = merger->kernels->state_scale(state.o, call->head_dim, factor / value_factors[attempt]);
        merger->kernels->store_row(element(&call->out, b, token, head, 0), call->out.stride_dim, state.o,
                                   call->head_dim, call->out.dtype);
        set_real(element(&call->lse, b, token, head, 0), pf_dtype_size(call->lse.dtype),
                 pf_log_sum_exp(m, l, call->lse_includes_sinks ? sink : none));
    }
}

int pf_driver_merge(const pf_merge_call *call) {
    const int wide = call->part_lse.dtype == PF_F64 || call->parts.dtype == PF_F64;
    const pf_merger merger = {call, pf_kernels(call->isa, wide), wide ? 8 : 4};
    pf_tree tree = {.end = call->num_parts,
                    .shape = {1, call->head_dim, merger.elem_bytes},
                    .merge = merge_one,
                    .owner = &merger};
    char *memory = malloc((size_t)(pf_tree_nodes(call->num_parts) * pf_state_bytes(&tree.shape)));
    if (!memory)
        return PF_STATUS_OUT_OF_MEMORY;
    tree.states = memory;
    for (int64_t b = 0; b < call->batch; b++)
        for (int64_t token = 0; token < call->seqlen; token++)
            for (int64_t head = 0; head < call->num_heads; head++)
                merge_row(&merger, &tree, b, token, head);
    free(memory);
    return PF_STATUS_OK;
}
