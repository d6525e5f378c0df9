/* The end of a row: divide by the sum, write the output in its type and the log-sum-exp; and what to
 * do about the rare row that is not finite. */
#include "driver.h"
#include "sink.h"

double pf_output_scale(const pf_context *context, const pf_sequence *sequence, int64_t kv_head, int64_t row,
                       double m, double l, double value_factor) {
    const pf_attention_call *call = context->call;
    const double none = -(double)INFINITY;
    const double sink = call->sinks ? call->sinks[pf_query_head(sequence, kv_head, row)] : none;
    const double natural = m * context->scale.score_factor;
    const int saw_a_key = l != 0 || pf_sees_any(context, sequence, kv_head, row);
    if (call->lse.data) {
        const double lse = pf_log_sum_exp(natural, l, call->lse_includes_sinks ? sink : none);
        void *place = pf_row_of(&call->lse, sequence, kv_head, row);
        if (call->lse.dtype == PF_F64)
            *(double *)place = lse;
        else
            *(float *)place = (float)lse;
    }
    return pf_output_factor(natural, l, sink, saw_a_key) / value_factor;
}

void pf_output_scales(const pf_context *context, const pf_sequence *sequence, int64_t kv_head, int64_t first,
                      int64_t num_rows, const void *m, const void *l, double value_factor, void *factors) {
    const int plain = !context->call->sinks && !context->call->lse.data;
    for (int64_t r = 0; r < num_rows; r++) {
        const double sum = pf_real_at(context, l, r);
        const double factor = plain && sum != 0
                                  ? 1 / sum / value_factor
                                  : pf_output_scale(context, sequence, kv_head, first + r,
                                                    pf_real_at(context, m, r), sum, value_factor);
        pf_set_real(context, factors, r, factor);
    }
    for (int64_t r = num_rows; r < context->kernels->lanes; r++)
        pf_set_real(context, factors, r, 0); /* lanes without a row are multiplied too */
}

int pf_finish_row(const pf_context *context, const pf_sequence *sequence, int64_t kv_head, int64_t row,
                  void *o, double m, double l, double value_factor) {
    const pf_attention_call *call = context->call;
    const double factor = pf_output_scale(context, sequence, kv_head, row, m, l, value_factor);
    const int finite = context->kernels->state_scale(o, call->head_dim_v, factor);
    context->kernels->store_row(pf_row_of(&call->out, sequence, kv_head, row), call->out.stride_dim, o,
                                call->head_dim_v, call->out.dtype);
    return finite;
}

/* Sums of values below the largest number cannot overflow before 2^40 keys. */
#define SMALLER_VALUES 0x1p-40

void pf_carve_retry(const pf_context *context, char **at, pf_retry_scratch *scratch) {
    scratch->column_finite = pf_carve(at, context->call->head_dim_v);
    scratch->value = pf_carve(at, context->call->head_dim_v * context->elem_bytes);
}

void pf_start_retry(const pf_sequence *sequence, int64_t first, int64_t end, int alone,
                    pf_retry_scratch *scratch) {
    scratch->alone = alone;
    scratch->columns_known = 0;
    for (int side = 0; side < PF_NUM_SIDES; side++)
        scratch->touched[side] = pf_rows_any(sequence, first, end, side);
}

static void find_finite_columns(const pf_context *context, const pf_sequence *sequence, int64_t kv_head,
                                int64_t row, pf_retry_scratch *scratch) {
    const pf_attention_call *call = context->call;
    for (int64_t d = 0; d < call->head_dim_v; d++)
        scratch->column_finite[d] = 1;
    for (int side = 0; side < PF_NUM_SIDES; side++)
        for (int64_t j = scratch->touched[side].lo; j < scratch->touched[side].hi; j++) {
            const void *value = 0, *scale = 0;
            if (pf_is_hidden(context, sequence, kv_head, row, j))
                continue;
            pf_key_rows(call, &call->v, sequence, kv_head, j, j + 1, &value);
            context->kernels->load_row(scratch->value, value, call->v.stride_dim, call->head_dim_v,
                                       call->v.dtype);
            if (call->v_scale.data)
                pf_key_rows(call, &call->v_scale, sequence, kv_head, j, j + 1, &scale);
            const double factor = scale ? (double)pf_float_at(scale) : 1.0;
            for (int64_t d = 0; d < call->head_dim_v; d++)
                scratch->column_finite[d] &= isfinite(pf_real_at(context, scratch->value, d) * factor) != 0;
        }
    scratch->columns_known = 1;
}

double pf_retry_factor(const pf_context *context, const pf_sequence *sequence, int64_t kv_head, int64_t row,
                       const void *o, double l, double value_factor, pf_retry_scratch *scratch) {
    if (!isfinite(l)) /* scores of its own keys; those of others never get this far */
        return 0;
    /* A value that a row may not see has weight 0 there, but 0 * NaN is NaN. Alone, a row touches no
     * key that it does not see, and its bits are the same. */
    if (!scratch->alone && pf_may_touch_hidden(context, sequence, row, scratch->touched))
        return value_factor;
    if (value_factor != 1.0)
        return 0;
    /* The mean of finite values is finite, but their sum may be too large. */
    if (!scratch->columns_known)
        find_finite_columns(context, sequence, kv_head, row, scratch);
    for (int64_t d = 0; d < context->call->head_dim_v; d++)
        if (scratch->column_finite[d] && !isfinite(pf_real_at(context, o, d)))
            return SMALLER_VALUES;
    return 0;
}
