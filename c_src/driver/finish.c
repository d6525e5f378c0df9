/* The end of a row: divide by the sum, write the output in its type and the log-sum-exp. */
#include "driver.h"

#include <math.h>

int pf_finish_row(const pf_context *context, const pf_sequence *sequence, int64_t kv_head, int64_t row, void *o,
                  double m, double l) {
    const pf_attention_call *call = context->call;
    double factor = 1.0 / l, lse = m * context->scale.score_factor + log(l);
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
