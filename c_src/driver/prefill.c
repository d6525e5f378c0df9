/* The prefill family: a work item is a block of query rows of one key/value head. Its queries are
 * packed once; then, key tile by key tile, each panel of rows takes its step of the recurrence. */
#include "driver.h"
#include "parallel.h"

typedef struct pf_scratch {
    void *queries;  /* panel after panel, [head_dim][width] */
    char *states;   /* of the whole block, one per node of the tree */
    void *scores;   /* [tile][width] */
    void *k_copies; /* [tile][copy_stride], for keys that have to be converted or gathered */
    void *v_copies;
    const void **k_rows, **v_rows;
    const void **q_rows; /* one per lane of a panel */
    int32_t *lo, *hi;    /* one per lane of a panel */
    void *rows;          /* [lanes][row_stride]: a square to be transposed */
    pf_retry_scratch retry_scratch;
    double *retry; /* one per row of the block: see pf_retry_factor */
    int64_t k_stride, v_stride, row_stride;
} pf_scratch;

/* The rows [first, first + num_rows) of a block and their panels, of nearly equal width. */
typedef struct pf_block {
    const pf_context *context;
    const pf_sequence *sequence;
    int64_t kv_head, first, num_rows;
    int64_t num_vectors, num_panels;
    double value_factor; /* values are multiplied by it, the outputs divided */
} pf_block;

typedef struct pf_panel {
    int64_t first_vector; /* counted inside the block */
    int32_t num_vectors, num_rows;
    int64_t first_row; /* of the key/value head */
} pf_panel;

/* Kernels take rows of the compute type, of unit stride, aligned to their elements. */
static int copies_keys(const pf_context *context, const pf_tensor *t) {
    return t->dtype != context->compute_dtype || t->stride_dim != 1 ||
           (uintptr_t)t->data % context->elem_bytes;
}

static pf_state_shape block_shape(const pf_context *context, int64_t num_rows) {
    const int64_t lanes = context->kernels->lanes, rows = pf_round_up(num_rows, lanes);
    return (pf_state_shape){
        .num_rows = rows, .num_outputs = rows * context->call->head_dim_v, .elem_bytes = context->elem_bytes};
}

static int64_t carve(const pf_context *context, char *base, pf_scratch *s) {
    const pf_attention_call *call = context->call;
    const int64_t e = context->elem_bytes, lanes = context->kernels->lanes, width = context->plan.panel_rows;
    const int64_t rows = context->plan.block_rows, tile = context->plan.tile_prefill;
    const pf_state_shape shape = block_shape(context, rows);
    const int64_t num_states = pf_tree_nodes(call->num_splits > 1 ? context->plan.num_splits : 1);
    char *at = base;
    s->k_stride = pf_round_up(call->head_dim, lanes) + lanes;
    s->v_stride = pf_round_up(call->head_dim_v, lanes) + lanes;
    s->row_stride = pf_max(pf_round_up(call->head_dim, lanes), pf_round_up(call->head_dim_v, lanes));
    s->queries = pf_carve(&at, rows * call->head_dim * e);
    s->states = pf_carve(&at, num_states * pf_state_bytes(&shape));
    s->scores = pf_carve(&at, tile * width * e);
    s->k_copies = pf_carve(&at, copies_keys(context, &call->k) ? tile * s->k_stride * e : 0);
    s->v_copies =
        pf_carve(&at, (copies_keys(context, &call->v) ? tile : pf_min(tile, lanes)) * s->v_stride * e);
    s->k_rows = pf_carve(&at, tile * (int64_t)sizeof(void *));
    s->v_rows = pf_carve(&at, tile * (int64_t)sizeof(void *));
    s->q_rows = pf_carve(&at, width * (int64_t)sizeof(void *));
    s->lo = pf_carve(&at, width * (int64_t)sizeof(int32_t));
    s->hi = pf_carve(&at, width * (int64_t)sizeof(int32_t));
    s->rows = pf_carve(&at, lanes * s->row_stride * e);
    pf_carve_retry(context, &at, &s->retry_scratch);
    s->retry = pf_carve(&at, rows * (int64_t)sizeof(double));
    return at - base;
}

int64_t pf_prefill_scratch_bytes(const pf_context *context) {
    pf_scratch scratch;
    return carve(context, 0, &scratch);
}

static pf_block make_block(const pf_context *context, const pf_sequence *sequence, int64_t kv_head,
                           int64_t first, int64_t num_rows, double value_factor) {
    pf_block block = {.context = context,
                      .sequence = sequence,
                      .kv_head = kv_head,
                      .first = first,
                      .num_rows = num_rows,
                      .value_factor = value_factor};
    block.num_vectors = pf_ceil_div(num_rows, context->kernels->lanes);
    block.num_panels = pf_ceil_div(block.num_vectors, context->kernels->panel_vectors);
    return block;
}

static pf_panel get_panel(const pf_block *block, int64_t p) {
    const int64_t lanes = block->context->kernels->lanes;
    const int64_t base = block->num_vectors / block->num_panels,
                  wider = block->num_vectors % block->num_panels;
    pf_panel panel = {.first_vector = p * base + pf_min(p, wider),
                      .num_vectors = (int32_t)(base + (p < wider))};
    panel.first_row = block->first + panel.first_vector * lanes;
    panel.num_rows =
        (int32_t)pf_min(panel.num_vectors * lanes, block->first + block->num_rows - panel.first_row);
    return panel;
}

static pf_state panel_state(const pf_block *block, const pf_state *state, const pf_panel *panel) {
    const int64_t first = panel->first_vector * block->context->kernels->lanes * block->context->elem_bytes;
    return (pf_state){(char *)state->m + first, (char *)state->l + first,
                      (char *)state->o + first * block->context->call->head_dim_v};
}

static void *panel_queries(const pf_context *context, const pf_scratch *s, const pf_panel *panel) {
    const int64_t first = panel->first_vector * context->kernels->lanes;
    return (char *)s->queries + first * context->call->head_dim * context->elem_bytes;
}

static void pack_block(const pf_context *context, const pf_scratch *s, const pf_block *block) {
    const pf_attention_call *call = context->call;
    for (int64_t p = 0; p < block->num_panels; p++) {
        const pf_panel panel = get_panel(block, p);
        for (int64_t r = 0; r < panel.num_rows; r++)
            s->q_rows[r] = pf_row_of(call, &call->q, block->sequence, block->kv_head, panel.first_row + r);
        context->kernels->pack_queries(panel_queries(context, s, &panel), panel.num_vectors, s->q_rows,
                                       panel.num_rows, call->head_dim, call->q.dtype, call->q.stride_dim,
                                       context->scale.query_factor, s->rows, s->row_stride);
    }
}

/* Pointers to rows of the compute type with unit stride: where the keys lie, or in scratch. */
static void fetch_rows(const pf_context *context, const pf_tensor *t, const pf_block *block, pf_span keys,
                       int64_t width, double factor, void *copies, int64_t copy_stride, const void **rows) {
    pf_key_rows(context->call, t, block->sequence, block->kv_head, keys.lo, keys.hi, rows);
    if (!copies_keys(context, t) && factor == 1.0)
        return;
    for (int64_t j = 0; j < keys.hi - keys.lo; j++) {
        char *copy = (char *)copies + j * copy_stride * context->elem_bytes;
        context->kernels->load_row(copy, rows[j], t->stride_dim, width, t->dtype);
        if (factor != 1.0)
            context->kernels->state_scale(copy, width, factor);
        rows[j] = copy;
    }
}

/* One step of the recurrence for one panel: the keys of a tile that any of its rows sees. */
static void step_panel(const pf_context *context, const pf_scratch *s, const pf_block *block,
                       const pf_panel *panel, const pf_state *state, pf_span keys) {
    const pf_attention_call *call = context->call;
    const int64_t first = panel->first_row, end = first + panel->num_rows;
    const pf_span any = pf_clip(pf_rows_any(call, block->sequence, first, end), keys.lo, keys.hi);
    if (any.lo == any.hi)
        return;
    const pf_span all = pf_rows_all(call, block->sequence, first, end);
    const int masked = all.lo > any.lo || all.hi < any.hi;
    if (masked)
        for (int64_t w = 0; w < (int64_t)panel->num_vectors * context->kernels->lanes; w++) {
            const int64_t row = pf_min(first + w, end - 1);
            const pf_span span = pf_clip(pf_row_span(call, block->sequence, row), any.lo, any.hi);
            s->lo[w] = (int32_t)(span.lo - any.lo);
            s->hi[w] = (int32_t)(span.hi - any.lo);
        }
    const pf_prefill_tile tile = {.q = panel_queries(context, s, panel),
                                  .k_rows = s->k_rows + (any.lo - keys.lo),
                                  .v_rows = s->v_rows + (any.lo - keys.lo),
                                  .lo = masked ? s->lo : 0,
                                  .hi = masked ? s->hi : 0,
                                  .scores = s->scores,
                                  .m = state->m,
                                  .l = state->l,
                                  .o = state->o,
                                  .num_keys = any.hi - any.lo,
                                  .head_dim = call->head_dim,
                                  .head_dim_v = call->head_dim_v,
                                  .scale_log2 = context->scale.log2,
                                  .num_vectors = panel->num_vectors};
    context->kernels->prefill_tile(&tile);
}

/* The recurrence over one split of the keys, from the empty state. */
static void run_split(const pf_context *context, const pf_scratch *s, const pf_block *block, pf_state state,
                      pf_span split) {
    const pf_attention_call *call = context->call;
    /* Smaller values need room for copies, which not every call has: there is some for a few keys. */
    const int64_t tile = block->value_factor == 1.0
                             ? context->plan.tile_prefill
                             : pf_min(context->plan.tile_prefill, context->kernels->lanes);
    const pf_state_shape shape = block_shape(context, block->num_rows);
    context->kernels->state_reset(state.m, state.l, shape.num_rows, state.o, shape.num_outputs);
    const pf_span any = pf_clip(
        pf_rows_any(call, block->sequence, block->first, block->first + block->num_rows), split.lo, split.hi);
    for (int64_t lo = split.lo + (any.lo - split.lo) / tile * tile; lo < any.hi; lo += tile) {
        const pf_span keys = pf_clip(any, lo, lo + tile);
        fetch_rows(context, &call->k, block, keys, call->head_dim, 1.0, s->k_copies, s->k_stride, s->k_rows);
        fetch_rows(context, &call->v, block, keys, call->head_dim_v, block->value_factor, s->v_copies,
                   s->v_stride, s->v_rows);
        for (int64_t p = 0; p < block->num_panels; p++) {
            const pf_panel panel = get_panel(block, p);
            const pf_state part = panel_state(block, &state, &panel);
            step_panel(context, s, block, &panel, &part, keys);
        }
    }
}

/* Merge the states of two splits, panel by panel. */
static void merge_block(const void *owner, pf_state into, pf_state from) {
    const pf_block *block = owner;
    for (int64_t p = 0; p < block->num_panels; p++) {
        const pf_panel panel = get_panel(block, p);
        const pf_state a = panel_state(block, &into, &panel), b = panel_state(block, &from, &panel);
        const int64_t width = (int64_t)panel.num_vectors * block->context->kernels->lanes;
        block->context->kernels->state_merge(a.m, a.l, a.o, b.m, b.l, b.o, width,
                                             block->context->call->head_dim_v, 1, width,
                                             block->context->scale.log2);
    }
}

static void run_rows(const pf_context *context, const pf_scratch *s, const pf_block *block);

static void finish_block(const pf_context *context, const pf_scratch *s, const pf_block *block,
                         pf_state state) {
    const int64_t lanes = context->kernels->lanes, end = block->first + block->num_rows;
    pf_retry_scratch scratch = s->retry_scratch;
    scratch.touched = pf_rows_any(context->call, block->sequence, block->first, end);
    int all_finite = 1;
    for (int64_t p = 0; p < block->num_panels; p++) {
        const pf_panel panel = get_panel(block, p);
        const pf_state part = panel_state(block, &state, &panel);
        for (int32_t vector = 0; vector < panel.num_vectors; vector++) {
            context->kernels->unpack_rows(part.o, panel.num_vectors, vector, context->call->head_dim_v,
                                          s->rows, s->row_stride);
            for (int64_t w = 0; w < lanes && panel.first_row + vector * lanes + w < end; w++) {
                const int64_t lane = vector * lanes + w, row = panel.first_row + lane;
                const double m = pf_real_at(context, part.m, lane), l = pf_real_at(context, part.l, lane);
                char *o = (char *)s->rows + w * s->row_stride * context->elem_bytes;
                const int finite = pf_finish_row(context, block->sequence, block->kv_head, row, o, m, l,
                                                 block->value_factor);
                s->retry[row - block->first] =
                    finite ? 0.0
                           : pf_retry_factor(context, block->sequence, block->kv_head, row, o, l,
                                             block->value_factor, &scratch);
                all_finite &= finite;
            }
        }
    }
    for (int64_t r = 0; !all_finite && r < block->num_rows; r++) {
        const double factor = s->retry[r]; /* a retry of row 0 writes this place */
        const pf_block alone =
            make_block(context, block->sequence, block->kv_head, block->first + r, 1, factor);
        if (factor != 0.0)
            run_rows(context, s, &alone);
    }
}

static void run_rows(const pf_context *context, const pf_scratch *s, const pf_block *block) {
    const pf_sequence *sequence = block->sequence;
    pack_block(context, s, block);
    pf_tree tree = {.states = s->states,
                    .shape = block_shape(context, block->num_rows),
                    .merge = merge_block,
                    .owner = block};
    for (int64_t split = 0; split < sequence->end_split; split++) {
        const pf_span keys = {pf_split_lo(sequence, split), pf_split_lo(sequence, split + 1)};
        run_split(context, s, block, pf_tree_next(&tree), keys);
        pf_tree_push(&tree, (pf_node){split, 0});
    }
    finish_block(context, s, block, pf_tree_close(&tree));
}

void pf_prefill_run(pf_context *context, char *base) {
    const pf_attention_call *call = context->call;
    pf_scratch scratch;
    carve(context, base, &scratch);
    int64_t item;
    while ((item = pf_take_next(&context->next_prefill_item)) < context->plan.num_prefill_items) {
        const int64_t b = pf_find_sequence(context->prefill_start, call->batch, item);
        const pf_sequence sequence = pf_get_sequence(call, b);
        const int64_t num_blocks = pf_ceil_div(sequence.num_rows, context->plan.block_rows);
        item -= context->prefill_start[b];
        /* Head by head, so that neighbours in time read the same keys; inside a head the last rows
         * first, which see the most keys under a causal mask. */
        const int64_t kv_head = item / num_blocks,
                      first = (num_blocks - 1 - item % num_blocks) * context->plan.block_rows;
        const int64_t num_rows = pf_min(context->plan.block_rows, sequence.num_rows - first);
        const pf_block block = make_block(context, &sequence, kv_head, first, num_rows, 1.0);
        run_rows(context, &scratch, &block);
    }
}
