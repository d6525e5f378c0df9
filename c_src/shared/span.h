/* A mask is a span: the keys that one query row may see are [lo, hi), and neither end falls when
 * the row's index grows. Keys below sink_tokens are exempt from the window, so a row has one span on
 * each side of that border; tiles do not cross it. Tile skipping, "this tile needs no test", split
 * borders and the limits of single elements are all derived from here. Valid C11 and CUDA C++. */
#ifndef PF_SHARED_SPAN_H
#define PF_SHARED_SPAN_H

#include "integers.h"

typedef struct pf_span {
    int64_t lo, hi;
} pf_span;

/* One end of the spans that a caller gives: an integer per query row, or none (data is null). */
typedef struct pf_ends {
    const void *data;
    int64_t stride;
    int32_t item_bytes;
} pf_ends;

/* What decides the spans of one sequence. Window sides below 0 are without limit. */
typedef struct pf_mask {
    int64_t num_keys;
    int64_t offset; /* query row i sits at position i + offset */
    int64_t window_left, window_right;
    int64_t sink_tokens;
    pf_ends lo, hi;
    int32_t causal;
} pf_mask;

/* The two sides of the border at sink_tokens. */
enum { PF_SINK_KEYS = 0, PF_WINDOW_KEYS = 1, PF_NUM_SIDES = 2 };

/* The keys of one side. */
PF_SHARED_INLINE pf_span pf_side(const pf_mask *mask, int side) {
    const int64_t border = pf_min(mask->sink_tokens, mask->num_keys);
    pf_span keys = {side == PF_SINK_KEYS ? 0 : border, side == PF_SINK_KEYS ? border : mask->num_keys};
    return keys;
}

/* The keys of one side that row i sees. An empty span has lo == hi. */
PF_SHARED_INLINE pf_span pf_visible(const pf_mask *mask, int64_t i, int side) {
    const int64_t position = i + mask->offset;
    const pf_span all = pf_side(mask, side);
    pf_span span = all;
    if (mask->causal)
        span.hi = pf_min(span.hi, position + 1);
    if (mask->hi.data)
        span.hi = pf_min(span.hi, pf_integer_at(mask->hi.data, mask->hi.item_bytes, i * mask->hi.stride));
    if (mask->lo.data)
        span.lo = pf_max(span.lo, pf_integer_at(mask->lo.data, mask->lo.item_bytes, i * mask->lo.stride));
    if (side == PF_WINDOW_KEYS && mask->window_right >= 0)
        span.hi = pf_min(span.hi, position + mask->window_right + 1);
    if (side == PF_WINDOW_KEYS && mask->window_left >= 0)
        span.lo = pf_max(span.lo, position - mask->window_left);
    span.hi = pf_max(span.hi, all.lo);
    span.lo = pf_min(span.lo, span.hi); /* keeps both ends monotonic where the span is empty */
    return span;
}

/* The part of a span that lies in keys [lo, hi). */
PF_SHARED_INLINE pf_span pf_clip(pf_span span, int64_t lo, int64_t hi) {
    span.lo = pf_min(pf_max(span.lo, lo), hi);
    span.hi = pf_max(pf_min(span.hi, hi), span.lo);
    return span;
}

/* The keys of one side that at least one of the rows [first, last] sees, as one span: it may hold
 * keys that none of them sees where windows leave gaps. */
PF_SHARED_INLINE pf_span pf_visible_to_any(const pf_mask *mask, int64_t first, int64_t last, int side) {
    pf_span span = {pf_visible(mask, first, side).lo, pf_visible(mask, last, side).hi};
    span.hi = pf_max(span.lo, span.hi);
    return span;
}

/* The keys of one side that every one of the rows [first, last] sees. */
PF_SHARED_INLINE pf_span pf_visible_to_all(const pf_mask *mask, int64_t first, int64_t last, int side) {
    pf_span span = {pf_visible(mask, last, side).lo, pf_visible(mask, first, side).hi};
    span.hi = pf_max(span.lo, span.hi);
    return span;
}

#endif
