/* The end of a row: divide by the sum, write the output in its type and the log-sum-exp; and what to
 * do about the rare row that is not finite. */
#include "driver.h"

#include <math.h>

int pf_finish_row(const pf_context *context, const pf_sequence *sequence, int64_t kv_head, int64_t row,
                  void *o, double m, double l, double value_factor) {
    const pf_attention_call *call = context->call;
    double factor = 1.0 / (l * value_factor), lse = m * context->scale.score_factor + log(l);
    if (l == 0) {
        /* No weight: no key was visible, or the data made all scores -inf. The log-sum-exp is -inf
         * in both cases, but softmax of nothing but -inf is not a number. */
        const pf_span span = pf_row_span(call, sequence, row);
        factor = span.lo == span.hi ? 0.0 : (double)NAN;
        lse = -(double)INFINITY;
    }
    const int finite = context->kernels->state_scale(o, call->head_dim_v, factor);
    context->kernels->store_row(pf_row_of(call, &call->out, sequence, kv_head, row), call->out.stride_dim, o,
                                call->head_dim_v, call->out.dtype);
    if (call->lse.data) {
        void *place = pf_row_of(call, &call->lse, sequence, kv_head, row);
        if (call->lse.dtype == PF_F64)
            *(double *)place = lse;
        else
            *(float *)place = (float)lse;
    }
    return finite;
}

/* Sums of values below the largest number cannot overflow before 2^40 keys. */
#define SMALLER_VALUES 0x1p-40

static int values_finite(const pf_context *context, const pf_sequence *sequence, int64_t kv_head,
                         pf_span keys, void *scratch) {
    const pf_attention_call *call = context->call;
    int finite = 1;
    for (int64_t j = keys.lo; finite && j < keys.hi; j++) {
        const void *value = 0;
        pf_key_rows(call, &call->v, sequence, kv_head, j, j + 1, &value);
        context->kernels->load_row(scratch, value, call->v.stride_dim, call->head_dim_v, call->v.dtype);
        finite = context->kernels->state_scale(scratch, call->head_dim_v, 1.0);
    }
    return finite;
}

double pf_retry_factor(const pf_context *context, const pf_sequence *sequence, int64_t kv_head, int64_t row,
                       double l, pf_span touched, double value_factor, void *scratch) {
    if (!isfinite(l)) /* scores of its own keys; those of others never get this far */
        return 0;
    /* A value that one row of a tile may not see has weight 0 there, but 0 * NaN is NaN. Alone, a row
     * touches no key that it does not see, and its bits are the same. */
    const pf_span own = pf_row_span(context->call, sequence, row);
    if (own.lo != touched.lo || own.hi != touched.hi)
        return value_factor;
    /* The mean of finite values is finite, but their sum may be too large. */
    const int overflow = value_factor == 1.0 && values_finite(context, sequence, kv_head, own, scratch);
    return overflow ? SMALLER_VALUES : 0;
}
