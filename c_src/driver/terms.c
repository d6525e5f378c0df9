/* What changes scores or hides single keys, between the call and the kernels: which terms there are,
 * rows of what is added, and which keys a row sees at all. */
#include "driver.h"

void pf_make_terms(pf_context *context) {
    const pf_attention_call *call = context->call;
    const pf_scale scale = pf_split_scale(call->scale, context->elem_bytes == 8);
    context->scale = scale;
    context->terms = (pf_terms){.scale = 1.0, .softcap = call->softcap, .score_mod = call->score_mod};
    context->hides = call->bias.data || call->mask.data || call->tree || call->mask_mod;
    context->changes = call->softcap > 0 || call->score_mod || call->alibi_slopes || call->bias.data;
    if (context->changes) {
        /* Such terms need scores in natural units. */
        context->terms.scale = scale.score_factor;
        context->scale = (pf_scale){scale.query_factor, 1.0, PF_LOG2_E};
    }
}

void pf_carve_terms(const pf_context *context, char **at, int64_t num_rows, int64_t row_stride,
                    pf_terms_scratch *scratch) {
    const pf_attention_call *call = context->call;
    const int64_t e = context->elem_bytes;
    scratch->head = pf_carve(at, call->score_mod ? num_rows * 8 : 0);
    scratch->position = pf_carve(at, call->score_mod ? num_rows * 8 : 0);
    scratch->slopes = pf_carve(at, call->alibi_slopes ? num_rows * e : 0);
    scratch->distance = pf_carve(at, call->alibi_slopes ? num_rows * e : 0);
    scratch->added = pf_carve(at, context->hides ? num_rows * row_stride * e : 0);
    scratch->added_rows = pf_carve(at, context->hides ? num_rows * (int64_t)sizeof(void *) : 0);
    scratch->row_stride = row_stride;
}

void pf_fill_terms(const pf_context *context, const pf_terms_scratch *scratch, const pf_sequence *s,
                   int64_t kv_head, int64_t first, int64_t num_rows, int64_t first_key, pf_terms *terms) {
    const pf_attention_call *call = context->call;
    *terms = context->terms;
    terms->batch = s->index;
    terms->first_key = first_key;
    if (call->score_mod) {
        terms->head = scratch->head;
        terms->position = scratch->position;
    }
    if (call->alibi_slopes) {
        terms->slopes = scratch->slopes;
        terms->distance = scratch->distance;
    }
    for (int64_t r = 0; r < num_rows; r++) {
        /* Lanes behind the last row repeat it. */
        const int64_t row = pf_min(first + r, s->num_rows - 1), head = pf_query_head(call, kv_head, row);
        const int64_t position = row / pf_group(call) + s->mask.offset;
        if (call->score_mod) {
            scratch->head[r] = head;
            scratch->position[r] = position;
        }
        if (call->alibi_slopes) {
            pf_set_real(context, scratch->slopes, r, call->alibi_slopes[s->index * call->num_heads + head]);
            pf_set_real(context, scratch->distance, r, (double)(position - first_key));
        }
    }
}

static const char *bias_row(const pf_context *context, const pf_tensor *t, int64_t item_bytes,
                            const pf_sequence *s, int64_t kv_head, int64_t row) {
    const pf_attention_call *call = context->call;
    const int64_t offset = s->index * t->stride_batch + row / pf_group(call) * t->stride_token +
                           pf_query_head(call, kv_head, row) * t->stride_head;
    return (const char *)t->data + offset * item_bytes;
}

/* The row of the tree of a query that is a draft token, or null. */
static const uint8_t *tree_row(const pf_context *context, const pf_sequence *s, int64_t row) {
    const pf_attention_call *call = context->call;
    const int64_t n = call->num_draft;
    const int64_t draft = row / pf_group(call) + s->mask.offset - (s->mask.num_keys - n);
    return call->tree && draft >= 0 && draft < n ? call->tree + (s->index * n + draft) * n : 0;
}

/* What is added to the scores of one row against keys [lo, hi): the bias, -inf where a key is hidden. */
static void fill_row(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t row,
                     pf_span keys, char *out) {
    const pf_attention_call *call = context->call;
    const pf_real_kernels *kernels = context->kernels;
    const int64_t n = keys.hi - keys.lo, e = context->elem_bytes;
    if (call->bias.data) {
        const int64_t size = pf_dtype_size(call->bias.dtype), step = call->bias.stride_dim;
        kernels->load_row(out, bias_row(context, &call->bias, size, s, kv_head, row) + keys.lo * step * size,
                          step, n, call->bias.dtype);
    } else {
        kernels->state_reset(0, 0, 0, out, n);
    }
    if (call->mask.data) {
        const char *seen = bias_row(context, &call->mask, 1, s, kv_head, row);
        kernels->hide(out, (const uint8_t *)seen + keys.lo * call->mask.stride_dim, call->mask.stride_dim, n);
    }
    const uint8_t *tree = tree_row(context, s, row);
    if (tree) {
        const int64_t first = s->mask.num_keys - call->num_draft;
        const pf_span drafts = pf_clip((pf_span){first, s->mask.num_keys}, keys.lo, keys.hi);
        kernels->hide(out + (drafts.lo - keys.lo) * e, tree + (drafts.lo - first), 1, drafts.hi - drafts.lo);
    }
    if (call->mask_mod) {
        const int64_t head = pf_query_head(call, kv_head, row);
        const int64_t position = row / pf_group(call) + s->mask.offset;
        for (int64_t j = 0; j < n; j++) {
            const uint8_t seen = call->mask_mod(s->index, head, position, keys.lo + j) != 0;
            kernels->hide(out + j * e, &seen, 1, 1);
        }
    }
}

/* Whether two rows surely have the same added rows: zero strides, and no draft tokens. */
static int same_row(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t a, int64_t b) {
    const pf_attention_call *call = context->call;
    return !call->mask_mod && tree_row(context, s, a) == tree_row(context, s, b) &&
           bias_row(context, &call->bias, 1, s, kv_head, a) ==
               bias_row(context, &call->bias, 1, s, kv_head, b) &&
           bias_row(context, &call->mask, 1, s, kv_head, a) ==
               bias_row(context, &call->mask, 1, s, kv_head, b);
}

int pf_fill_added(const pf_context *context, const pf_terms_scratch *scratch, const pf_sequence *s,
                  int64_t kv_head, int64_t first, int64_t num_rows, pf_span keys, int *alike) {
    const int64_t n = keys.hi - keys.lo, e = context->elem_bytes;
    int64_t hidden = 0, hidden_in_row = 0;
    *alike = 1;
    for (int64_t r = 0; r < num_rows; r++) {
        char *out = (char *)scratch->added + r * scratch->row_stride * e;
        if (r > 0 && same_row(context, s, kv_head, first + r, first + r - 1)) {
            scratch->added_rows[r] = scratch->added_rows[r - 1];
        } else {
            fill_row(context, s, kv_head, first + r, keys, out);
            hidden_in_row = context->kernels->count_hidden(out, n);
            *alike = r == 0;
            scratch->added_rows[r] = out;
        }
        hidden += hidden_in_row;
    }
    if (hidden == num_rows * n)
        return PF_ALL_HIDDEN;
    return hidden == 0 && !context->call->bias.data ? PF_NOTHING_ADDED : PF_SOMETHING_ADDED;
}

int pf_sees_any_of(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t row,
                   pf_span keys) {
    enum { CHUNK = 64 };
    double chunk[CHUNK];
    if (!context->hides)
        return keys.lo < keys.hi;
    for (int64_t lo = keys.lo; lo < keys.hi; lo += CHUNK) {
        const pf_span part = {lo, pf_min(lo + CHUNK, keys.hi)};
        fill_row(context, s, kv_head, row, part, (char *)chunk);
        if (context->kernels->count_hidden(chunk, part.hi - lo) < part.hi - lo)
            return 1;
    }
    return 0;
}

int pf_sees_any(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t row) {
    for (int side = 0; side < PF_NUM_SIDES; side++)
        if (pf_sees_any_of(context, s, kv_head, row, pf_row_span(context->call, s, row, side)))
            return 1;
    return 0;
}

int pf_may_touch_hidden(const pf_context *context, const pf_sequence *s, int64_t row,
                        const pf_span touched[PF_NUM_SIDES]) {
    for (int side = 0; side < PF_NUM_SIDES; side++) {
        const pf_span own = pf_row_span(context->call, s, row, side);
        if (own.lo != touched[side].lo || own.hi != touched[side].hi)
            return 1;
    }
    return context->hides;
}

int pf_is_hidden(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t row, int64_t key) {
    double added;
    if (!context->hides)
        return 0;
    fill_row(context, s, kv_head, row, (pf_span){key, key + 1}, (char *)&added);
    return context->kernels->count_hidden(&added, 1) != 0;
}

void pf_replace_hidden(const pf_context *context, const char *added, int64_t num_keys,
                       const void *replacement, const void **rows) {
    for (int64_t j = 0; j < num_keys; j++)
        if (context->kernels->count_hidden(added + j * context->elem_bytes, 1))
            rows[j] = replacement;
}
