/* Blocks of query rows, cut into panels that lie in the lanes of vectors, and what a kernel needs of a
 * key tile for one panel: pointers to rows of the compute type, limits, terms. Shared by the prefill
 * family and the statistics. */
#ifndef PF_DRIVER_PANEL_H
#define PF_DRIVER_PANEL_H

#include "driver.h"

typedef struct pf_panel_scratch {
    void *queries;  /* panel after panel, [head_dim][width] */
    void *scores;   /* [tile][width] */
    void *k_copies; /* [tile][copy_stride], for keys that have to be converted or gathered */
    void *v_copies;
    const void **k_rows, **v_rows;
    const void **scale_rows;
    void *zeros;         /* a row of values, all 0 */
    const void **q_rows; /* one per lane of a panel */
    pf_terms_scratch terms;
    void *added;             /* [tile][width]: its rows, transposed */
    int32_t *lo, *hi;        /* one per lane of a panel */
    void *rows;              /* [lanes][row_stride]: a square to be transposed */
    void *wide_row;          /* one row */
    void *k_tiles, *v_tiles; /* packed for a matrix unit */
    int64_t k_stride, v_stride, row_stride;
} pf_panel_scratch;

/* The rows [first, first + num_rows) of a block and their panels, of nearly equal width. */
typedef struct pf_block {
    const pf_context *context;
    const pf_sequence *sequence;
    int64_t kv_head, first, num_rows;
    int64_t num_panels, narrow, num_wider; /* panels of `narrow` vectors, the first ones of one more */
    int alone;           /* one row, computed again: it must not touch keys that it does not see */
    double value_factor; /* values are multiplied by it, the outputs divided */
} pf_block;

typedef struct pf_panel {
    int64_t first_vector; /* counted inside the block */
    int32_t num_vectors, num_rows;
    int64_t first_row; /* of the key/value head */
} pf_panel;

/* Kernels take rows of the compute type, of unit stride, aligned to their elements, without scales.
 * Rows with those of other heads between them are copied too, unless they are so short that fetching
 * them twice costs more: rows a power of two apart share few sets of the first cache, from which each
 * of them is read again for every panel. */
static inline int pf_copies_rows(const pf_context *context, const pf_tensor *t, const pf_tensor *scale,
                                 int64_t width) {
    const int far_apart = t->stride_token >= 2 * width && width * context->elem_bytes >= 256;
    if (context->matrix) /* packs them anyway */
        return t->stride_dim != 1;
    return t->dtype != context->compute_dtype || t->stride_dim != 1 || scale->data || far_apart ||
           (uintptr_t)t->data % context->elem_bytes;
}

static inline int pf_same_memory(const pf_tensor *a, const pf_tensor *b) {
    return a->data == b->data && a->stride_batch == b->stride_batch && a->stride_token == b->stride_token &&
           a->stride_head == b->stride_head && a->stride_dim == b->stride_dim;
}

/* Whether values are the first columns of the keys (latent attention): then one copy serves both. */
static inline int pf_values_in_keys(const pf_attention_call *call) {
    return call->head_dim_v <= call->head_dim && pf_same_memory(&call->k, &call->v) &&
           pf_same_memory(&call->k_scale, &call->v_scale);
}

static inline void pf_carve_panels(const pf_context *context, char **at, int64_t rows, pf_panel_scratch *s) {
    const pf_attention_call *call = context->call;
    const int64_t e = context->elem_bytes, lanes = context->kernels->lanes, width = context->plan.panel_rows;
    const int64_t tile = context->plan.tile_prefill;
    const int copies =
        pf_copies_rows(context, &call->v, &call->v_scale, call->head_dim_v) && !pf_values_in_keys(call);
    const int64_t num_scales = call->k_scale.data || call->v_scale.data ? tile : 0;
    s->k_stride = pf_round_up(call->head_dim, lanes) + lanes;
    s->v_stride = pf_round_up(call->head_dim_v, lanes) + lanes;
    s->row_stride = pf_max(pf_round_up(call->head_dim, lanes), pf_round_up(call->head_dim_v, lanes));
    if (context->hides)
        s->row_stride = pf_max(s->row_stride, pf_round_up(tile, lanes));
    const pf_matrix_kernels *matrix = context->matrix;
    s->queries =
        pf_carve(at, matrix ? matrix->query_bytes(rows / lanes, call->head_dim) : rows * call->head_dim * e);
    s->scores = pf_carve(at, matrix ? matrix->scratch_bytes : tile * width * e);
    s->k_tiles = pf_carve(at, matrix ? matrix->key_bytes(tile, call->head_dim) : 0);
    s->v_tiles = pf_carve(at, matrix ? matrix->value_bytes(tile, call->head_dim_v) : 0);
    s->k_copies = pf_carve(
        at, pf_copies_rows(context, &call->k, &call->k_scale, call->head_dim) ? tile * s->k_stride * e : 0);
    s->v_copies = pf_carve(at, (copies ? tile : pf_min(tile, lanes)) * s->v_stride * e);
    s->scale_rows = pf_carve(at, num_scales * (int64_t)sizeof(void *));
    s->zeros = pf_carve(at, context->hides ? s->v_stride * e : 0);
    s->k_rows = pf_carve(at, tile * (int64_t)sizeof(void *));
    s->v_rows = pf_carve(at, (tile + PF_VALUES_AHEAD) * (int64_t)sizeof(void *));
    s->q_rows = pf_carve(at, width * (int64_t)sizeof(void *));
    s->lo = pf_carve(at, width * (int64_t)sizeof(int32_t));
    s->hi = pf_carve(at, width * (int64_t)sizeof(int32_t));
    s->rows = pf_carve(at, lanes * s->row_stride * e);
    s->wide_row = pf_carve(at, matrix ? s->row_stride * e : 0);
    pf_carve_terms(context, at, width, pf_round_up(tile, lanes), &s->terms);
    s->added = pf_carve(at, context->hides ? tile * width * e : 0);
}

static inline pf_block pf_make_block(const pf_context *context, const pf_sequence *sequence, int64_t kv_head,
                                     int64_t first, int64_t num_rows, double value_factor) {
    pf_block block = {.context = context,
                      .sequence = sequence,
                      .kv_head = kv_head,
                      .first = first,
                      .num_rows = num_rows,
                      .value_factor = value_factor};
    const int64_t num_vectors = pf_ceil_div(num_rows, context->kernels->lanes);
    block.num_panels = pf_ceil_div(num_vectors, pf_panel_vectors(context));
    block.narrow = num_vectors / block.num_panels;
    block.num_wider = num_vectors - block.narrow * block.num_panels;
    return block;
}

static inline pf_panel pf_get_panel(const pf_block *block, int64_t p) {
    const int64_t lanes = block->context->kernels->lanes;
    pf_panel panel = {.first_vector = p * block->narrow + pf_min(p, block->num_wider),
                      .num_vectors = (int32_t)(block->narrow + (p < block->num_wider))};
    panel.first_row = block->first + panel.first_vector * lanes;
    panel.num_rows =
        (int32_t)pf_min(panel.num_vectors * lanes, block->first + block->num_rows - panel.first_row);
    return panel;
}

static inline void *pf_panel_queries(const pf_context *context, const pf_panel_scratch *s,
                                     const pf_panel *panel) {
    const int64_t first = panel->first_vector * context->kernels->lanes;
    if (context->matrix)
        return (char *)s->queries +
               context->matrix->query_bytes(panel->first_vector, context->call->head_dim);
    return (char *)s->queries + first * context->call->head_dim * context->elem_bytes;
}

/* A row as stored to the type of a matrix unit, which holds it exactly, times a power of two. */
static inline void pf_narrow_row(const pf_panel_scratch *s, const pf_context *context, void *out,
                                 const void *row, int64_t stride, int64_t n, int32_t dtype, double factor) {
    context->kernels->load_row(s->wide_row, row, stride, n, dtype);
    if (factor != 1.0)
        context->kernels->state_scale(s->wide_row, n, factor);
    context->kernels->store_row(out, 1, s->wide_row, n, PF_BF16);
}

static inline void pf_pack_matrix_panel(const pf_panel_scratch *s, const pf_block *block,
                                        const pf_panel *panel) {
    const pf_context *context = block->context;
    const pf_attention_call *call = context->call;
    const int64_t lanes = context->kernels->lanes;
    for (int32_t vector = 0; vector < panel->num_vectors; vector++) {
        const int64_t first = vector * lanes, num_rows = pf_min(lanes, panel->num_rows - first);
        for (int64_t r = 0; r < num_rows; r++) {
            s->q_rows[r] = pf_row_of(&call->q, block->sequence, block->kv_head, panel->first_row + first + r);
            if (call->q.stride_dim == 1)
                continue;
            char *copy = (char *)s->rows + r * s->row_stride * context->elem_bytes;
            pf_narrow_row(s, context, copy, s->q_rows[r], call->q.stride_dim, call->head_dim, PF_BF16, 1.0);
            s->q_rows[r] = copy;
        }
        context->matrix->pack_queries(pf_panel_queries(context, s, panel), vector, s->q_rows,
                                      (int32_t)num_rows, call->head_dim, context->scale.query_factor < 0);
    }
}

static inline void pf_pack_block(const pf_panel_scratch *s, const pf_block *block) {
    const pf_context *context = block->context;
    const pf_attention_call *call = context->call;
    for (int64_t p = 0; p < block->num_panels; p++) {
        const pf_panel panel = pf_get_panel(block, p);
        if (context->matrix) {
            pf_pack_matrix_panel(s, block, &panel);
            continue;
        }
        pf_rows_of(&call->q, block->sequence, block->kv_head, panel.first_row, panel.num_rows, s->q_rows);
        context->kernels->pack_queries(pf_panel_queries(context, s, &panel), panel.num_vectors, s->q_rows,
                                       panel.num_rows, call->head_dim, call->q.dtype, call->q.stride_dim,
                                       context->scale.query_factor, s->rows, s->row_stride);
    }
}

/* Pointers to rows of the compute type with unit stride: where the keys lie, or in scratch. */
static inline void pf_fetch_panel_rows(const pf_panel_scratch *s, const pf_block *block, const pf_tensor *t,
                                       const pf_tensor *scale, pf_span keys, int64_t width, double factor,
                                       void *copies, int64_t copy_stride, const void **rows) {
    const pf_context *context = block->context;
    pf_key_rows(context->call, t, block->sequence, block->kv_head, keys.lo, keys.hi, rows);
    if (!pf_copies_rows(context, t, scale, width) && factor == 1.0)
        return;
    if (scale->data)
        pf_key_rows(context->call, scale, block->sequence, block->kv_head, keys.lo, keys.hi, s->scale_rows);
    for (int64_t j = 0; j < keys.hi - keys.lo; j++) {
        char *copy = (char *)copies + j * copy_stride * context->elem_bytes;
        if (context->matrix) {
            pf_narrow_row(s, context, copy, rows[j], t->stride_dim, width, t->dtype, factor);
            rows[j] = copy;
            continue;
        }
        context->kernels->load_row(copy, rows[j], t->stride_dim, width, t->dtype);
        const double whole = scale->data ? factor * pf_float_at(s->scale_rows[j]) : factor;
        if (whole != 1.0)
            context->kernels->state_scale(copy, width, whole);
        rows[j] = copy;
    }
}

static inline void pf_fetch_panel_keys(const pf_panel_scratch *s, const pf_block *block, pf_span keys) {
    const pf_context *context = block->context;
    const pf_attention_call *call = context->call;
    pf_fetch_panel_rows(s, block, &call->k, &call->k_scale, keys, call->head_dim, 1.0, s->k_copies,
                        s->k_stride, s->k_rows);
    if (pf_values_in_keys(call) && block->value_factor == 1.0)
        __builtin_memcpy(s->v_rows, s->k_rows, (size_t)(keys.hi - keys.lo) * sizeof *s->v_rows);
    else
        pf_fetch_panel_rows(s, block, &call->v, &call->v_scale, keys, call->head_dim_v, block->value_factor,
                            s->v_copies, s->v_stride, s->v_rows);
    for (int64_t ahead = 0; ahead < PF_VALUES_AHEAD; ahead++)
        s->v_rows[keys.hi - keys.lo + ahead] = s->v_rows[keys.hi - keys.lo - 1];
}

/* Keys and values that have been fetched, packed for a matrix unit. */
static inline void pf_pack_keys(const pf_panel_scratch *s, const pf_block *block, pf_span keys,
                                int64_t border) {
    const pf_context *context = block->context;
    const int64_t first = keys.lo - border, num_keys = keys.hi - keys.lo;
    context->matrix->pack_keys(s->k_tiles, s->k_rows, first, num_keys, context->call->head_dim);
    context->matrix->pack_values(s->v_tiles, s->v_rows, first, num_keys, context->call->head_dim_v);
}

/* The terms of a panel against keys of a tile; false if they hide all of them. */
static inline int pf_fetch_panel_terms(const pf_panel_scratch *s, const pf_block *block,
                                       const pf_panel *panel, pf_span keys, int64_t border, pf_terms *terms,
                                       pf_prefill_tile *tile) {
    const pf_context *context = block->context;
    const int64_t width = panel->num_vectors * context->kernels->lanes, num_keys = keys.hi - keys.lo;
    if (!context->changes && !context->hides)
        return 1;
    pf_fill_terms(context, &s->terms, block->sequence, block->kv_head, panel->first_row, width, border,
                  keys.lo, terms);
    if (context->hides) {
        int alike;
        const int added = pf_fill_added(context, &s->terms, block->sequence, block->kv_head, panel->first_row,
                                        panel->num_rows, keys, 1, &alike);
        if (added == PF_ALL_HIDDEN)
            return 0;
        if (added == PF_SOMETHING_ADDED && alike) {
            terms->added_to_all = s->terms.added_rows[0];
        } else if (added == PF_SOMETHING_ADDED) {
            context->kernels->pack_queries(s->added, panel->num_vectors, s->terms.added_rows, panel->num_rows,
                                           num_keys, context->compute_dtype, 1, 1.0, s->rows, s->row_stride);
            terms->added = s->added;
        }
    }
    if (context->changes || terms->added || terms->added_to_all)
        tile->terms = terms;
    return 1;
}

/* The keys in `any` that each lane of a panel sees, counted from `base`; lanes without a row are like the
 * last one that has one. */
static inline void pf_fill_limits(const pf_panel_scratch *s, const pf_block *block, const pf_panel *panel,
                                  pf_span any, int64_t base, int side) {
    const int64_t group = block->sequence->group, width = panel->num_vectors * block->context->kernels->lanes;
    const pf_mask mask = block->sequence->mask; /* stores to lo and hi can't change it */
    int64_t query = pf_quotient(panel->first_row, group), head = panel->first_row - query * group;
    pf_span span = {0, 0};
    for (int64_t w = 0; w < width; w++) {
        if (w == 0 || (w < panel->num_rows && head == 0)) {
            span = pf_clip(pf_visible(&mask, query, side), any.lo, any.hi);
            query++;
        }
        s->lo[w] = (int32_t)(span.lo - base);
        s->hi[w] = (int32_t)(span.hi - base);
        head = head + 1 == group ? 0 : head + 1;
    }
}

/* The part of a tile that any row of a panel sees, ready for a kernel; false where there is none. Keys
 * are fetched when the first panel of a block needs them. */
static inline int pf_prepare_tile(const pf_panel_scratch *s, const pf_block *block, const pf_panel *panel,
                                  pf_span keys, int64_t border, int side, int *fetched, pf_terms *terms,
                                  pf_prefill_tile *tile) {
    const pf_context *context = block->context;
    const pf_attention_call *call = context->call;
    const int64_t first = panel->first_row, end = first + panel->num_rows;
    const pf_span any = pf_clip(pf_rows_any(block->sequence, first, end, side), keys.lo, keys.hi);
    if (any.lo == any.hi)
        return 0;
    const pf_span all = pf_rows_all(block->sequence, first, end, side);
    /* In packed tiles keys count from the border. */
    const int64_t base = context->matrix ? border : any.lo;
    const int masked = all.lo > any.lo || all.hi < any.hi || any.lo > base;
    if (masked)
        pf_fill_limits(s, block, panel, any, base, side);
    *tile = (pf_prefill_tile){.q = pf_panel_queries(context, s, panel),
                              .k_rows = s->k_rows + (any.lo - keys.lo),
                              .v_rows = s->v_rows + (any.lo - keys.lo),
                              .lo = masked ? s->lo : 0,
                              .hi = masked ? s->hi : 0,
                              .scores = s->scores,
                              .k_tiles = s->k_tiles,
                              .v_tiles = s->v_tiles,
                              .first_key = any.lo - base,
                              .num_keys = any.hi - base,
                              .head_dim = call->head_dim,
                              .head_dim_v = call->head_dim_v,
                              .scale_log2 = context->scale.log2,
                              .num_vectors = panel->num_vectors};
    if (!pf_fetch_panel_terms(s, block, panel, (pf_span){base, any.hi}, border, terms, tile))
        return 0;
    const int fetches = !*fetched;
    if (fetches)
        pf_fetch_panel_keys(s, block, keys);
    *fetched = 1;
    if (block->alone && tile->terms && terms->added_to_all) { /* one row is like itself */
        context->kernels->state_reset(0, 0, 0, s->zeros, s->v_stride);
        pf_replace_hidden(context, (const char *)terms->added_to_all + (any.lo - base) * context->elem_bytes,
                          any.hi - any.lo, s->zeros, s->v_rows + (any.lo - keys.lo));
    }
    if (context->matrix && fetches)
        pf_pack_keys(s, block, keys, border);
    return 1;
}

#endif
