/* The state (m, l, o) of the recurrence: maximum score, sum of weights, weighted sum of values, relative to
 * m. The twin of c_src/kernels/state.h.
 *
 * m is -inf for a row that has seen no key, and at least the lowest finite number for any other, also one
 * whose scores are all -inf: so m alone tells who has seen something, and -inf - -inf never arises. */
#ifndef PF_STATE_CUH
#define PF_STATE_CUH

#include "score.cuh"

PF_DEVICE float pf_max_of(float a, float b) {
    return fmaxf(a, b); /* a NaN is left out; it shows in its weight */
}

PF_DEVICE double pf_max_of(double a, double b) {
    return fmax(a, b);
}

/* e^t for t <= 0; -inf gives 0, NaN stays. What rounding takes from t log2(e) is put back: for t far below 0
 * it would show. */
PF_DEVICE float pf_weight(float t) {
    const float factor = (float)PF_LOG2_E, y = t * factor;
    const float lost = t < -150.0f ? 0 : fmaf(t, factor, -y) + t * 1.92596299e-8f;
    const float p = pf_exp2(y);
    return fmaf(p, lost * (float)PF_LN_2, p);
}

PF_DEVICE double pf_weight(double t) {
    return exp(t);
}

/* What a maximum is in subtractions. */
PF_DEVICE pf_real pf_floored(pf_real m) {
    return pf_max_of(m, pf_lowest<pf_real>());
}

/* The factor that turns sums relative to m_old into sums relative to m_new >= m_old. */
PF_DEVICE pf_real pf_rescaling(pf_real m_old, pf_real m_new) {
    return pf_weight(pf_floored(m_old) - pf_floored(m_new));
}

/* The factor of the finished output on o: 1 / l, the sink counted in. */
PF_DEVICE double pf_output_factor(double m, double l, double sink) {
    const double none = -(double)pf_infinity();
    if (m == none) /* saw no key: 0, whatever its sink */
        return 0;
    if (sink == none)
        return 1 / l;
    if (sink != sink)
        return sink;
    const double largest = -pf_lowest<double>(), held = sink > largest ? largest : sink;
    const double top = m > held ? m : held; /* m is never NaN */
    const double share = exp(m - top);
    return share / (l * share + exp(held - top));
}

/* The same as it is used. Without a sink that is one short division: a quotient of two floats has the same
 * bits whether it is rounded to a float at once or by way of a double. */
PF_DEVICE pf_real pf_finishing_factor(pf_real m, pf_real l, double sink) {
    if (sink == -(double)pf_infinity())
        return m == -(pf_real)pf_infinity() ? 0 : 1 / l;
    return (pf_real)pf_output_factor((double)m, (double)l, sink);
}

PF_DEVICE double pf_log_sum_exp(double m, double l, double sink) {
    const double none = -(double)pf_infinity();
    const double keys = m == none || l == 0 ? none : m + log(l);
    if (sink == none || keys != keys)
        return keys;
    if (keys == none || sink != sink)
        return sink;
    const double top = keys > sink ? keys : sink;
    return top > -pf_lowest<double>() ? top : top + log(exp(keys - top) + exp(sink - top));
}

PF_DEVICE double pf_sink_of(const pf_call &call, int64_t head) {
    return call.sinks.data ? pf_number_at(call.sinks, head * call.sinks.stride_head) : -(double)pf_infinity();
}

PF_DEVICE void pf_set_lse(void *place, int64_t dtype, double lse) {
    if (dtype == PF_F64)
        *(double *)place = lse;
    else /* scores as low as a bias can make them are numbers, in the narrower type too */
        *(float *)place = pf_is_finite(lse) && !pf_is_finite((float)lse)
                              ? (lse < 0 ? pf_lowest<float>() : -pf_lowest<float>())
                              : (float)lse;
}

/* Writes the log-sum-exp of a row; one thread does. */
PF_DEVICE void pf_store_lse(const pf_call &call, const pf_sequence &s, int64_t head, int64_t i, double m,
                            double l) {
    if (!call.lse.data)
        return;
    const double sink = call.lse_includes_sinks ? pf_sink_of(call, head) : -(double)pf_infinity();
    pf_set_lse(pf_place(call.lse, pf_query_offset(call.lse, s, head, i)), call.lse.dtype,
               pf_log_sum_exp(m, l, sink));
}

/* One element of a finished row. Adding 0 makes -0 to 0: bits must not depend on keys with weight 0. */
PF_DEVICE float pf_finished(float o, float factor) {
    return fmaf(o, factor, 0.0f);
}

PF_DEVICE double pf_finished(double o, double factor) {
    return fma(o, factor, 0.0);
}

PF_DEVICE void pf_store_out(const pf_call &call, char *row, int64_t d, pf_real x) {
    pf_set_element(row, call.out.dtype, d * call.out.stride_dim, x);
}

#endif
