/* The end of a state: what turns its weighted sum into the output, and the log-sum-exp, with one more
 * term in the denominator if there is a sink. Scores are in natural units. */
#ifndef PF_DRIVER_SINK_H
#define PF_DRIVER_SINK_H

#include <math.h>

/* A row that saw no key is 0. One whose scores were all -inf by its data is not a number, unless a
 * sink takes all the weight. A sink of -inf is none. */
static inline double pf_output_factor(double m, double l, double sink, int saw_a_key) {
    if (l == 0 && !saw_a_key)
        return 0.0;
    if (isnan(sink))
        return sink;
    if (l == 0)
        return sink == -(double)INFINITY ? (double)NAN : 0.0;
    if (sink == (double)INFINITY)
        return 0.0;
    if (sink == -(double)INFINITY)
        return 1 / l;
    const double top = fmax(m, sink), weight = exp(m - top);
    return weight / (l * weight + exp(sink - top));
}

static inline double pf_log_sum_exp(double m, double l, double sink) {
    if (l == 0 || isnan(sink) || sink == (double)INFINITY)
        return sink;
    if (sink == -(double)INFINITY)
        return m + log(l);
    const double top = fmax(m, sink);
    return top + log(l * exp(m - top) + exp(sink - top));
}

#endif
