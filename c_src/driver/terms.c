/* What changes scores or hides single keys, between the call and the kernels: which terms there are,
 * rows of what is added, and which keys a row sees at all. */
#include "driver.h"

#include <math.h>

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

/* A finite slope times any distance stays finite; one that has to be held shows only the nearest key. */
static double held_slope(const pf_context *context, double slope) {
    const double largest = context->elem_bytes == 8 ? 1e290 : 1e23;
    if (isinf(slope) || fabs(slope) <= largest)
        return slope;
    return slope > largest ? largest : slope < -largest ? -largest : slope;
}

/* A row, and where what is added to its scores lies. */
typedef struct pf_row {
    int64_t query, head, position;
    const char *bias, *mask;
    const uint8_t *tree; /* null: the query is no draft token */
} pf_row;

static const char *term_row(const pf_tensor *t, int64_t item_bytes, const pf_sequence *s, const pf_row *row) {
    const int64_t offset =
        s->index * t->stride_batch + row->query * t->stride_token + row->head * t->stride_head;
    return (const char *)t->data + offset * item_bytes;
}

static void find_terms(const pf_context *context, const pf_sequence *s, pf_row *row) {
    const pf_attention_call *call = context->call;
    const int64_t n = call->num_draft, draft = row->position - (s->mask.num_keys - n);
    row->bias = term_row(&call->bias, pf_dtype_size(call->bias.dtype), s, row);
    row->mask = term_row(&call->mask, 1, s, row);
    row->tree = call->tree && draft >= 0 && draft < n ? call->tree + (s->index * n + draft) * n : 0;
}

static pf_row get_row(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t number) {
    pf_row row = {.query = number / s->group, .head = kv_head * s->group + number % s->group};
    row.position = row.query + s->mask.offset;
    find_terms(context, s, &row);
    return row;
}

/* The row behind, without a division; the last row of all comes again and again. */
static void next_row(const pf_context *context, const pf_sequence *s, int64_t kv_head, pf_row *row) {
    if (row->head + 1 < (kv_head + 1) * s->group) {
        row->head++;
    } else if (row->query + 1 < s->num_queries) {
        row->query++;
        row->position++;
        row->head = kv_head * s->group;
    }
    find_terms(context, s, row);
}

void pf_fill_terms(const pf_context *context, const pf_terms_scratch *scratch, const pf_sequence *s,
                   int64_t kv_head, int64_t first, int64_t num_rows, int64_t border, int64_t first_key,
                   pf_terms *terms) {
    const pf_attention_call *call = context->call;
    *terms = context->terms;
    terms->batch = s->index;
    terms->first_key = first_key;
    terms->tile_key = first_key - border;
    if (call->score_mod) {
        terms->head = scratch->head;
        terms->position = scratch->position;
    }
    if (call->alibi_slopes) {
        terms->slopes = scratch->slopes;
        terms->distance = scratch->distance;
    }
    if (!call->score_mod && !call->alibi_slopes)
        return;
    pf_row row = get_row(context, s, kv_head, first);
    for (int64_t r = 0; r < num_rows; r++, next_row(context, s, kv_head, &row)) {
        if (call->score_mod) {
            scratch->head[r] = row.head;
            scratch->position[r] = row.position;
        }
        if (call->alibi_slopes) {
            pf_set_real(context, scratch->slopes, r,
                        held_slope(context, call->alibi_slopes[s->index * call->num_heads + row.head]));
            pf_set_real(context, scratch->distance, r, (double)(row.position - border));
        }
    }
}

/* What is added to the scores of one row against some keys: the bias, -inf where a key is hidden. */
static void fill_row(const pf_context *context, const pf_sequence *s, const pf_row *row, pf_span keys,
                     char *out) {
    const pf_attention_call *call = context->call;
    const pf_real_kernels *kernels = context->kernels;
    const int64_t n = keys.hi - keys.lo, e = context->elem_bytes;
    if (call->bias.data) {
        const int64_t step = call->bias.stride_dim;
        kernels->load_row(out, row->bias + keys.lo * step * pf_dtype_size(call->bias.dtype), step, n,
                          call->bias.dtype);
    } else {
        kernels->state_reset(0, 0, 0, out, n);
    }
    if (call->mask.data) {
        const int64_t step = call->mask.stride_dim;
        kernels->hide(out, (const uint8_t *)row->mask + keys.lo * step, step, n);
    }
    if (row->tree) {
        const int64_t first = s->mask.num_keys - call->num_draft;
        const pf_span drafts = pf_clip((pf_span){first, s->mask.num_keys}, keys.lo, keys.hi);
        kernels->hide(out + (drafts.lo - keys.lo) * e, row->tree + (drafts.lo - first), 1,
                      drafts.hi - drafts.lo);
    }
    if (call->mask_mod)
        for (int64_t j = 0; j < n; j++) {
            const uint8_t seen = call->mask_mod(s->index, row->head, row->position, keys.lo + j) != 0;
            kernels->hide(out + j * e, &seen, 1, 1);
        }
}

/* A bool mask alone is first looked at as it is: most tiles of most masks show all or nothing. */
static int mask_summary(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t first,
                        int64_t num_rows, pf_span keys) {
    const int64_t n = keys.hi - keys.lo, step = context->call->mask.stride_dim;
    int64_t unseen = 0, unseen_in_row = 0;
    pf_row row = get_row(context, s, kv_head, first), before = row;
    for (int64_t r = 0; r < num_rows; r++, before = row, next_row(context, s, kv_head, &row)) {
        if (r == 0 || row.mask != before.mask)
            unseen_in_row =
                context->kernels->count_unseen((const uint8_t *)row.mask + keys.lo * step, step, n);
        unseen += unseen_in_row;
    }
    return unseen == 0 ? PF_NOTHING_ADDED : unseen == num_rows * n ? PF_ALL_HIDDEN : PF_SOMETHING_ADDED;
}

int pf_fill_added(const pf_context *context, const pf_terms_scratch *scratch, const pf_sequence *s,
                  int64_t kv_head, int64_t first, int64_t num_rows, pf_span keys, int in_place, int *alike) {
    const pf_attention_call *call = context->call;
    const int64_t n = keys.hi - keys.lo, e = context->elem_bytes;
    /* A bias alone, as kernels want it, is read where it lies. */
    in_place = in_place && !call->mask.data && !call->tree && !call->mask_mod && call->bias.stride_dim == 1 &&
               call->bias.dtype == context->compute_dtype && (uintptr_t)call->bias.data % e == 0;
    int64_t hidden = 0, hidden_in_row = 0;
    *alike = 1;
    if (call->mask.data && !call->bias.data && !call->tree && !call->mask_mod) {
        const int summary = mask_summary(context, s, kv_head, first, num_rows, keys);
        if (summary != PF_SOMETHING_ADDED)
            return summary;
    }
    pf_row row = get_row(context, s, kv_head, first), before = row;
    for (int64_t r = 0; r < num_rows; r++, before = row, next_row(context, s, kv_head, &row)) {
        char *out = (char *)scratch->added + r * scratch->row_stride * e;
        /* Zero strides: the same addresses hold the same. */
        if (r > 0 && !call->mask_mod && row.bias == before.bias && row.mask == before.mask &&
            row.tree == before.tree) {
            scratch->added_rows[r] = scratch->added_rows[r - 1];
        } else {
            if (in_place)
                out = (char *)row.bias + keys.lo * e;
            else
                fill_row(context, s, &row, keys, out);
            hidden_in_row = context->kernels->count_hidden(out, n);
            *alike = r == 0;
            scratch->added_rows[r] = out;
        }
        hidden += hidden_in_row;
    }
    if (hidden == num_rows * n)
        return PF_ALL_HIDDEN;
    return hidden == 0 && !call->bias.data ? PF_NOTHING_ADDED : PF_SOMETHING_ADDED;
}

int pf_sees_any_of(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t row,
                   pf_span keys) {
    enum { CHUNK = 64 };
    double chunk[CHUNK];
    if (!context->hides || keys.lo == keys.hi)
        return keys.lo < keys.hi;
    const pf_row at = get_row(context, s, kv_head, row);
    for (int64_t lo = keys.lo; lo < keys.hi; lo += CHUNK) {
        const pf_span part = {lo, pf_min(lo + CHUNK, keys.hi)};
        fill_row(context, s, &at, part, (char *)chunk);
        if (context->kernels->count_hidden(chunk, part.hi - lo) < part.hi - lo)
            return 1;
    }
    return 0;
}

int pf_sees_any(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t row) {
    for (int side = 0; side < PF_NUM_SIDES; side++)
        if (pf_sees_any_of(context, s, kv_head, row, pf_row_span(s, row, side)))
            return 1;
    return 0;
}

int pf_may_touch_hidden(const pf_context *context, const pf_sequence *s, int64_t row,
                        const pf_span touched[PF_NUM_SIDES]) {
    for (int side = 0; side < PF_NUM_SIDES; side++) {
        const pf_span own = pf_row_span(s, row, side);
        if (own.lo != touched[side].lo || own.hi != touched[side].hi)
            return 1;
    }
    return context->hides;
}

int pf_is_hidden(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t row, int64_t key) {
    double added;
    if (!context->hides)
        return 0;
    const pf_row at = get_row(context, s, kv_head, row);
    fill_row(context, s, &at, (pf_span){key, key + 1}, (char *)&added);
    return context->kernels->count_hidden(&added, 1) != 0;
}

void pf_replace_hidden(const pf_context *context, const char *added, int64_t num_keys,
                       const void *replacement, const void **rows) {
    for (int64_t j = 0; j < num_keys; j++)
        if (context->kernels->count_hidden(added + j * context->elem_bytes, 1))
            rows[j] = replacement;
}
