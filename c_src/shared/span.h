/* A mask is a span: the keys that one query row may see are [lo, hi), and neither end falls when
 * the row's index grows. Tile skipping, "this tile needs no test", split borders and the limits of
 * single elements are all derived from here. Valid C11 and CUDA C++. */
#ifndef PF_SHARED_SPAN_H
#define PF_SHARED_SPAN_H

#include "integers.h"

typedef struct pf_span {
    int64_t lo, hi;
} pf_span;

/* What decides the spans of one sequence. Window sides below 0 are without limit. */
typedef struct pf_mask {
    int64_t num_keys;
    int64_t offset; /* query row i sits at position i + offset */
    int64_t window_left, window_right;
    int32_t causal;
} pf_mask;

/* The keys that row i sees. An empty span has lo == hi. */
PF_SHARED_INLINE pf_span pf_visible(const pf_mask *mask, int64_t i) {
    const int64_t position = i + mask->offset;
    pf_span span = {0, mask->num_keys};
    if (mask->causal)
        span.hi = pf_min(span.hi, position + 1);
    if (mask->window_right >= 0)
        span.hi = pf_min(span.hi, position + mask->window_right + 1);
    if (mask->window_left >= 0)
        span.lo = pf_max(span.lo, position - mask->window_left);
    span.hi = pf_max(span.hi, 0);
    span.lo = pf_min(span.lo, span.hi); /* keeps both ends monotonic where the span is empty */
    return span;
}

/* The part of a span that lies in keys [lo, hi). */
PF_SHARED_INLINE pf_span pf_clip(pf_span span, int64_t lo, int64_t hi) {
    span.lo = pf_min(pf_max(span.lo, lo), hi);
    span.hi = pf_max(pf_min(span.hi, hi), span.lo);
    return span;
}

/* The keys that at least one of the rows [first, last] sees, as one span: it may hold keys that
 * none of them sees where windows leave gaps. */
PF_SHARED_INLINE pf_span pf_visible_to_any(const pf_mask *mask, int64_t first, int64_t last) {
    pf_span span = {pf_visible(mask, first).lo, pf_visible(mask, last).hi};
    span.hi = pf_max(span.lo, span.hi);
    return span;
}

/* The keys that every one of the rows [first, last] sees. */
PF_SHARED_INLINE pf_span pf_visible_to_all(const pf_mask *mask, int64_t first, int64_t last) {
    pf_span span = {pf_visible(mask, last).lo, pf_visible(mask, first).hi};
    span.hi = pf_max(span.lo, span.hi);
    return span;
}

#endif
