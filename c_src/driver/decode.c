/* The decode family: an item is up to PF_DECODE_MAX_ROWS query rows of one key/value head, or as many in all
 * of several heads whose keys lie side by side; a unit is one split of its keys. Threads take contiguous runs
 * of units, as many as there are threads, so that each reads the cache as a few long streams; who takes what
 * does not matter to the result, which follows the tree. */
#include "driver.h"

#include <math.h>

/* An item that a run shares with its neighbours: the nodes it could not merge further. */
typedef struct pf_partial {
    int64_t item;    /* -1: none */
    int32_t is_last; /* holds the last split of the item */
    int32_t depth;
    pf_node node[PF_MAX_NODES];
} pf_partial;

typedef struct pf_scratch {
    void *queries;  /* [rows][q_stride] */
    void *scores;   /* [rows][scores_stride] */
    void *k_copies; /* [tile][q_stride], for keys without unit stride */
    void *v_copies; /* [tile][o_stride] */
    const void **k_rows, **v_rows;
    const void **k_next, **v_next; /* of the tile that follows */
    const void **scale_rows;
    void *k_scales, *v_scales; /* [tile] */
    void *zeros;               /* a row of values, all bytes 0 */
    int32_t *lo, *hi;
    pf_terms_scratch terms;
    char *states[3]; /* for whole items, the first partial item, the last partial item */
    pf_retry_scratch retry;
    void *alpha;         /* [rows] */
    pf_partial *partial; /* first and last partial item of this run */
    int64_t q_stride, o_stride, scores_stride;
} pf_scratch;

/* Rows [first, first + num_rows) of each of some key/value heads, in states head by head. */
typedef struct pf_item {
    const pf_context *context;
    const pf_sequence *sequence;
    int64_t id, kv_head, first;
    int32_t num_heads, num_rows;
    int64_t o_stride;
    int alone;           /* one row, computed again: it must not touch keys that it does not see */
    double value_factor; /* values are multiplied by it, the outputs divided */
} pf_item;

enum { RETRY_TILE_KEYS = 8 };

static int32_t all_rows(const pf_item *item) {
    return item->num_heads * item->num_rows;
}

static int64_t padded(const pf_context *context, int64_t n) {
    return pf_round_up(n, context->kernels->lanes);
}

/* Scales of types whose numbers may be so large or small that the scale has to come before the product. */
static int scales_rows(const pf_attention_call *call) {
    const int32_t dtype = call->k.dtype;
    return (call->k_scale.data || call->v_scale.data) &&
           (dtype == PF_F64 || dtype == PF_F32 || dtype == PF_BF16);
}

/* Kernels take rows of unit stride, keys and values of one type. */
static int copies_keys(const pf_attention_call *call, double value_factor) {
    return call->k.stride_dim != 1 || call->v.stride_dim != 1 || value_factor != 1.0 || scales_rows(call);
}

static int64_t carve(const pf_context *context, char *base, pf_scratch *s) {
    const pf_attention_call *call = context->call;
    const int64_t e = context->elem_bytes, rows = context->plan.max_rows, tile = context->plan.tile_decode;
    char *at = base;
    s->q_stride = padded(context, call->head_dim);
    s->o_stride = padded(context, call->head_dim_v);
    s->scores_stride = padded(context, tile + 3); /* scores come in fours */
    const pf_state_shape shape = {rows, rows * s->o_stride, e};
    const int64_t states = context->tree_nodes * pf_state_bytes(&shape);
    const int64_t num_scales = call->k_scale.data || call->v_scale.data ? tile : 0;
    s->queries = pf_carve(&at, rows * s->q_stride * e);
    s->scores = pf_carve(&at, rows * s->scores_stride * e);
    const int64_t num_copies = copies_keys(call, 1.0) ? tile : pf_min(tile, RETRY_TILE_KEYS);
    s->k_copies = pf_carve(&at, num_copies * s->q_stride * e);
    s->v_copies = pf_carve(&at, num_copies * s->o_stride * e);
    const void ***const pointers[] = {&s->k_rows, &s->v_rows, &s->k_next, &s->v_next};
    for (int i = 0; i < 4; i++)
        *pointers[i] = pf_carve(&at, tile * (int64_t)sizeof(void *));
    s->scale_rows = pf_carve(&at, num_scales * (int64_t)sizeof(void *));
    s->k_scales = pf_carve(&at, num_scales * e);
    s->v_scales = pf_carve(&at, num_scales * e);
    s->zeros = pf_carve(&at, context->hides ? s->o_stride * e : 0);
    s->lo = pf_carve(&at, rows * (int64_t)sizeof(int32_t));
    s->hi = pf_carve(&at, rows * (int64_t)sizeof(int32_t));
    for (int i = 0; i < 3; i++)
        s->states[i] = pf_carve(&at, states);
    pf_carve_terms(context, &at, rows, s->scores_stride, &s->terms);
    pf_carve_retry(context, &at, &s->retry);
    s->alpha = pf_carve(&at, padded(context, rows) * e);
    s->partial = pf_carve(&at, 2 * (int64_t)sizeof(pf_partial));
    return at - base;
}

int64_t pf_decode_scratch_bytes(const pf_context *context) {
    pf_scratch scratch;
    return carve(context, 0, &scratch);
}

static void merge_rows(const void *owner, pf_state into, pf_state from) {
    const pf_item *item = owner;
    item->context->kernels->state_merge(into.m, into.l, into.o, from.m, from.l, from.o, all_rows(item),
                                        item->context->call->head_dim_v, item->o_stride, 1,
                                        item->context->scale.log2);
}

static pf_tree make_tree(const pf_item *item, char *states) {
    pf_tree tree; /* its nodes, two kilobytes, are written before they are read */
    tree.sink_splits = item->sequence->sink_splits;
    tree.first = item->sequence->first_split;
    tree.end = item->sequence->end_split;
    tree.depth = 0;
    tree.states = states;
    tree.shape = (pf_state_shape){all_rows(item), all_rows(item) * item->o_stride, item->context->elem_bytes};
    tree.merge = merge_rows;
    tree.owner = item;
    return tree;
}

static void load_queries(const pf_scratch *s, const pf_item *item) {
    const pf_context *context = item->context;
    const pf_tensor *q = &context->call->q;
    context->kernels->state_reset(0, 0, 0, s->queries, all_rows(item) * s->q_stride);
    for (int32_t r = 0; r < all_rows(item); r++) {
        char *row = (char *)s->queries + r * s->q_stride * context->elem_bytes;
        const int64_t kv_head = item->kv_head + r / item->num_rows, own = item->first + r % item->num_rows;
        context->kernels->load_row(row, pf_row_of(q, item->sequence, kv_head, own), q->stride_dim,
                                   context->call->head_dim, q->dtype);
        context->kernels->state_scale(row, context->call->head_dim, context->scale.query_factor);
    }
}

/* Pointers to keys [lo, hi), at unit stride: where they lie, or gathered. */
static void fetch_rows(const pf_scratch *s, const pf_item *item, int64_t kv_head, const pf_tensor *t,
                       const pf_tensor *scale, int64_t lo, int64_t hi, int64_t width, double factor,
                       void *copies, int64_t copy_stride, const void **rows) {
    const pf_context *context = item->context;
    pf_key_rows(context->call, t, item->sequence, kv_head, lo, hi, rows);
    if (!copies_keys(context->call, item->value_factor))
        return;
    const int scaled = scales_rows(context->call) && scale->data;
    if (scaled)
        pf_key_rows(context->call, scale, item->sequence, kv_head, lo, hi, s->scale_rows);
    for (int64_t j = 0; j < hi - lo; j++) {
        char *copy = (char *)copies + j * copy_stride * context->elem_bytes;
        const double whole = scaled ? factor * pf_float_at(s->scale_rows[j]) : factor;
        context->kernels->load_row(copy, rows[j], t->stride_dim, width, t->dtype);
        if (whole != 1.0)
            context->kernels->state_scale(copy, width, whole);
        rows[j] = copy;
    }
}

/* Scales of keys that kernels apply, as reals in a row; null where there are none. */
static const void *fetch_scales(const pf_scratch *s, const pf_item *item, int64_t kv_head, const pf_tensor *t,
                                pf_span keys, void *scales) {
    const pf_context *context = item->context;
    if (!t->data || scales_rows(context->call))
        return 0;
    pf_key_rows(context->call, t, item->sequence, kv_head, keys.lo, keys.hi, s->scale_rows);
    for (int64_t j = 0; j < keys.hi - keys.lo; j++) {
        const float scale = pf_float_at(s->scale_rows[j]);
        /* Infinity times a product may be -inf, as if the key had no weight; it has no value. */
        pf_set_real(context, scales, j, isfinite(scale) ? scale : NAN);
    }
    return scales;
}

/* A row alone reads zeros in place of values that it does not see. */
static void hide_values(const pf_scratch *s, const pf_item *item, const pf_decode_block *block) {
    const pf_context *context = item->context;
    const int64_t num_keys = block->key_hi - block->key_lo;
    if (!item->alone || !block->terms || !block->terms->added_rows)
        return;
    context->kernels->state_reset(0, 0, 0, s->zeros, s->o_stride);
    pf_replace_hidden(context, block->terms->added_rows[0], num_keys, s->zeros, s->v_rows);
    for (int64_t j = 0; block->v_scale && j < num_keys; j++)
        if (s->v_rows[j] == s->zeros)
            pf_set_real(context, s->v_scales, j, 1.0);
}

/* The terms of a block whose key 0 is key `lo`; false if they hide all keys that are present. */
static int fetch_terms(const pf_scratch *s, const pf_item *item, int64_t kv_head, pf_span present, int64_t lo,
                       pf_terms *terms, pf_decode_block *block) {
    const pf_context *context = item->context;
    block->terms = 0;
    if (!context->changes && !context->hides)
        return 1;
    pf_fill_terms(context, &s->terms, item->sequence, kv_head, item->first, item->num_rows, lo, lo, terms);
    if (context->hides) {
        int alike;
        const int added = pf_fill_added(context, &s->terms, item->sequence, kv_head, item->first,
                                        item->num_rows, present, 0, &alike);
        if (added == PF_ALL_HIDDEN)
            return 0;
        terms->added_rows = added == PF_SOMETHING_ADDED ? s->terms.added_rows : 0;
    }
    if (context->changes || terms->added_rows)
        block->terms = terms;
    return 1;
}

/* One tile, whose key 0 is key `lo`, of one head; num_next keys will follow. */
static void run_head(const pf_scratch *s, const pf_item *item, pf_state state, pf_span present, int64_t lo,
                     int64_t num_next, int32_t head, pf_decode_block *block) {
    const pf_context *context = item->context;
    const pf_attention_call *call = context->call;
    const int64_t kv_head = item->kv_head + head, first = head * item->num_rows, e = context->elem_bytes;
    pf_terms terms;
    if (!fetch_terms(s, item, kv_head, present, lo, &terms, block))
        return;
    fetch_rows(s, item, kv_head, &call->k, &call->k_scale, present.lo, present.hi, call->head_dim, 1.0,
               s->k_copies, s->q_stride, s->k_rows);
    fetch_rows(s, item, kv_head, &call->v, &call->v_scale, present.lo, present.hi, call->head_dim_v,
               item->value_factor, s->v_copies, s->o_stride, s->v_rows);
    block->num_next = (int32_t)num_next;
    pf_key_rows(call, &call->k, item->sequence, kv_head, present.hi, present.hi + num_next, s->k_next);
    pf_key_rows(call, &call->v, item->sequence, kv_head, present.hi, present.hi + num_next, s->v_next);
    block->k_scale = fetch_scales(s, item, kv_head, &call->k_scale, present, s->k_scales);
    block->v_scale = fetch_scales(s, item, kv_head, &call->v_scale, present, s->v_scales);
    block->q = (char *)s->queries + first * s->q_stride * e;
    block->m = (char *)state.m + first * e;
    block->l = (char *)state.l + first * e;
    block->o = (char *)state.o + first * s->o_stride * e;
    hide_values(s, item, block);
    context->kernels->decode_block(block);
}

/* The tiles of one side of the border at sink_tokens. */
static void run_side(const pf_scratch *s, const pf_item *item, pf_state state, pf_span split, int side,
                     pf_decode_block *block) {
    const pf_context *context = item->context;
    const int64_t tile = item->value_factor == 1.0 ? context->plan.tile_decode
                                                   : pf_min(context->plan.tile_decode, RETRY_TILE_KEYS);
    const int64_t end_row = item->first + item->num_rows;
    const pf_span part = pf_clip(pf_side(&item->sequence->mask, side), split.lo, split.hi);
    const pf_span any = pf_clip(pf_rows_any(item->sequence, item->first, end_row, side), part.lo, part.hi);
    const pf_span all = pf_rows_all(item->sequence, item->first, end_row, side);
    /* Rows behind the split are worth fetching: they are mostly the same thread's next. */
    const int64_t end = pf_rows_any(item->sequence, item->first, end_row, side).hi;
    if (any.lo == any.hi)
        return;
    for (int64_t lo = split.lo + (any.lo - split.lo) / tile * tile; lo < any.hi; lo += tile) {
        const pf_span present = pf_clip(any, lo, lo + tile);
        block->key_lo = (int32_t)(present.lo - lo);
        block->key_hi = (int32_t)(present.hi - lo);
        block->lo = block->hi = 0;
        if (all.lo > present.lo || all.hi < present.hi) {
            for (int32_t r = 0; r < item->num_rows; r++) {
                const pf_span span =
                    pf_clip(pf_row_span(item->sequence, item->first + r, side), lo, lo + tile);
                s->lo[r] = (int32_t)(span.lo - lo);
                s->hi[r] = (int32_t)(span.hi - lo);
            }
            block->lo = s->lo;
            block->hi = s->hi;
        }
        /* What is copied is not read by the kernel where it lies. */
        const int64_t num_next =
            copies_keys(context->call, item->value_factor) ? 0 : pf_min(tile, end - present.hi);
        for (int32_t head = 0; head < item->num_heads; head++)
            run_head(s, item, state, present, lo, num_next, head, block);
    }
}

/* The recurrence over one split of the keys, from the empty state. */
static void run_split(const pf_scratch *s, const pf_item *item, int64_t split, pf_state state) {
    const pf_context *context = item->context;
    const pf_attention_call *call = context->call;
    const int copies = copies_keys(call, item->value_factor);
    const pf_span keys = {pf_split_lo(item->sequence, split), pf_split_lo(item->sequence, split + 1)};
    context->kernels->state_reset(state.m, state.l, all_rows(item), state.o, all_rows(item) * s->o_stride);
    pf_decode_block block = {.k_rows = s->k_rows,
                             .v_rows = s->v_rows,
                             .k_next = s->k_next,
                             .v_next = s->v_next,
                             .scores = s->scores,
                             .alpha = s->alpha,
                             .q_stride = s->q_stride,
                             .scores_stride = s->scores_stride,
                             .o_stride = s->o_stride,
                             .head_dim = call->head_dim,
                             .head_dim_v = call->head_dim_v,
                             .scale_log2 = context->scale.log2,
                             .num_rows = item->num_rows,
                             .dtype = copies ? context->compute_dtype : call->k.dtype};
    for (int side = 0; side < PF_NUM_SIDES; side++)
        run_side(s, item, state, keys, side, &block);
}

/* Splits [first, end) of those that may hold visible keys. */
static void run_splits(const pf_scratch *s, const pf_item *item, int64_t first, int64_t end, pf_tree *tree) {
    load_queries(s, item);
    for (int64_t split = first; split < end; split++) {
        const int64_t number = pf_split_at(item->sequence, split);
        run_split(s, item, number, pf_tree_next(tree));
        pf_tree_push(tree, (pf_node){number, 0});
    }
}

static void finish_item(const pf_scratch *s, const pf_item *item, pf_state state) {
    const pf_context *context = item->context;
    const pf_sequence *sequence = item->sequence;
    pf_retry_scratch scratch = s->retry;
    pf_start_retry(sequence, item->first, item->first + item->num_rows, item->alone, &scratch);
    double retry[PF_DECODE_MAX_ROWS];
    for (int32_t r = 0; r < all_rows(item); r++) {
        const double m = pf_real_at(context, state.m, r), l = pf_real_at(context, state.l, r);
        void *o = (char *)state.o + r * s->o_stride * context->elem_bytes;
        const int64_t kv_head = item->kv_head + r / item->num_rows, row = item->first + r % item->num_rows;
        if (r % item->num_rows == 0) /* what is known of the values is known of one head's */
            scratch.columns_known = 0;
        retry[r] = 0;
        if (!pf_finish_row(context, sequence, kv_head, row, o, m, l, item->value_factor))
            retry[r] = pf_retry_factor(context, sequence, kv_head, row, o, l, item->value_factor, &scratch);
    }
    for (int32_t r = 0; r < all_rows(item); r++) {
        if (retry[r] == 0.0)
            continue;
        pf_item alone = *item;
        alone.kv_head = item->kv_head + r / item->num_rows;
        alone.first = item->first + r % item->num_rows;
        alone.num_heads = alone.num_rows = 1;
        alone.alone = 1;
        alone.value_factor = retry[r];
        pf_tree tree = make_tree(&alone, s->states[0]);
        run_splits(s, &alone, 0, pf_num_splits(sequence), &tree);
        finish_item(s, &alone, pf_tree_close(&tree));
    }
}

/* Item `number` of a sequence; its items go by key/value heads. */
static pf_item get_item(const pf_context *context, const pf_scratch *s, const pf_sequence *sequence,
                        int64_t number) {
    const int64_t per_head = pf_ceil_div(sequence->num_rows, PF_DECODE_MAX_ROWS);
    const int64_t heads = context->decode_heads, kv_head = number / per_head * heads;
    pf_item item = {.context = context,
                    .sequence = sequence,
                    .kv_head = kv_head,
                    .num_heads = (int32_t)pf_min(heads, context->call->num_kv_heads - kv_head),
                    .o_stride = s->o_stride,
                    .value_factor = 1.0};
    const int64_t splits = pf_num_splits(sequence);
    item.id = context->decode_start[sequence->index] + number * splits; /* its first unit */
    item.first = number % per_head * PF_DECODE_MAX_ROWS;
    item.num_rows = (int32_t)pf_min(PF_DECODE_MAX_ROWS, sequence->num_rows - item.first);
    return item;
}

void pf_decode_run(pf_context *context, char *base, int64_t run, int64_t num_runs) {
    const pf_attention_call *call = context->call;
    const int64_t units = context->plan.num_decode_items;
    const int64_t share = units / num_runs, rest = units % num_runs;
    int64_t unit = run * share + pf_min(run, rest);
    const int64_t end = unit + share + (run < rest);
    pf_scratch s;
    carve(context, base, &s);
    s.partial[0].item = s.partial[1].item = -1;
    while (unit < end) {
        const int64_t b = pf_find_sequence(context->decode_start, call->batch, unit);
        const pf_sequence sequence = pf_get_sequence(call, b);
        const int64_t splits = pf_num_splits(&sequence);
        const pf_item item = get_item(context, &s, &sequence, (unit - context->decode_start[b]) / splits);
        const int64_t first = unit - item.id, last = pf_min(splits, end - item.id);
        const int whole = first == 0 && last == splits;
        const int which = whole ? 0 : first > 0 ? 1 : 2;
        pf_tree tree = make_tree(&item, s.states[which]);
        run_splits(&s, &item, first, last, &tree);
        if (whole) {
            finish_item(&s, &item, pf_tree_close(&tree));
        } else {
            pf_partial *partial = &s.partial[which - 1];
            partial->item = item.id;
            partial->is_last = last == splits;
            partial->depth = tree.depth;
            for (int32_t i = 0; i < tree.depth; i++)
                partial->node[i] = tree.node[i];
        }
        unit = item.id + last;
    }
}

void pf_decode_join(pf_context *context, char *const scratch[], int64_t num_runs) {
    pf_scratch own, other;
    carve(context, scratch[0], &own);
    pf_sequence sequence = {.index = -1};
    pf_item item = {.id = -1};
    pf_tree tree = {.depth = 0};
    for (int64_t run = 0; run < num_runs; run++) {
        carve(context, scratch[run], &other);
        for (int which = 0; which < 2; which++) {
            const pf_partial *partial = &other.partial[which];
            if (partial->item < 0)
                continue;
            if (partial->item != item.id) {
                const int64_t b =
                    pf_find_sequence(context->decode_start, context->call->batch, partial->item);
                sequence = pf_get_sequence(context->call, b);
                const int64_t splits = pf_num_splits(&sequence);
                item =
                    get_item(context, &own, &sequence, (partial->item - context->decode_start[b]) / splits);
                tree = make_tree(&item, own.states[0]);
            }
            pf_tree theirs = tree;
            theirs.states = other.states[which + 1];
            for (int32_t i = 0; i < partial->depth; i++) {
                __builtin_memcpy(pf_tree_next(&tree).m, pf_tree_state(&theirs, i).m,
                                 (size_t)pf_state_bytes(&tree.shape));
                pf_tree_push(&tree, partial->node[i]);
            }
            if (partial->is_last)
                finish_item(&own, &item, pf_tree_close(&tree));
        }
    }
}
