/* The prefill family: a work item is a block of query rows of one key/value head. Its queries are
 * packed once; then, key tile by key tile, each panel of rows takes its step of the recurrence. */
#include "panel.h"
#include "parallel.h"

typedef struct pf_scratch {
    pf_panel_scratch panels;
    char *states; /* of the whole block, one per node of the tree */
    pf_retry_scratch retry_scratch;
    double *retry; /* one per row of the block: see pf_retry_factor */
    /* One per lane of a vector: factors on outputs, whether they are finite, where they go. */
    void *factors, *check;
    void **out_rows;
} pf_scratch;

static pf_state_shape block_shape(const pf_context *context, int64_t num_rows) {
    const int64_t lanes = context->kernels->lanes, rows = pf_round_up(num_rows, lanes);
    return (pf_state_shape){
        .num_rows = rows, .num_outputs = rows * context->call->head_dim_v, .elem_bytes = context->elem_bytes};
}

static int64_t carve(const pf_context *context, char *base, pf_scratch *s) {
    const int64_t rows = context->plan.block_rows;
    const pf_state_shape shape = block_shape(context, rows);
    char *at = base;
    pf_carve_panels(context, &at, rows, &s->panels);
    s->states =
        pf_carve(&at, (context->call->num_splits > 1 ? context->tree_nodes : 1) * pf_state_bytes(&shape));
    pf_carve_retry(context, &at, &s->retry_scratch);
    s->retry = pf_carve(&at, rows * (int64_t)sizeof(double));
    s->factors = pf_carve(&at, context->kernels->lanes * context->elem_bytes);
    s->check = pf_carve(&at, context->kernels->lanes * context->elem_bytes);
    s->out_rows = pf_carve(&at, context->kernels->lanes * (int64_t)sizeof(void *));
    return at - base;
}

int64_t pf_prefill_scratch_bytes(const pf_context *context) {
    pf_scratch scratch;
    return carve(context, 0, &scratch);
}

static pf_state panel_state(const pf_block *block, const pf_state *state, const pf_panel *panel) {
    const int64_t first = panel->first_vector * block->context->kernels->lanes * block->context->elem_bytes;
    return (pf_state){(char *)state->m + first, (char *)state->l + first,
                      (char *)state->o + first * block->context->call->head_dim_v};
}

/* The tiles of one side of the border at sink_tokens. */
static void run_side(const pf_scratch *s, const pf_block *block, pf_state state, pf_span split, int side) {
    const pf_context *context = block->context;
    /* Smaller values need room for copies, which not every call has: there is some for a few keys. */
    const int64_t tile = block->value_factor == 1.0
                             ? context->plan.tile_prefill
                             : pf_min(context->plan.tile_prefill, context->kernels->lanes);
    void (*const prefill_tile)(const pf_prefill_tile *) =
        context->matrix ? context->matrix->prefill_tile : context->kernels->prefill_tile;
    const pf_span part = pf_clip(pf_side(&block->sequence->mask, side), split.lo, split.hi);
    const pf_span any = pf_clip(
        pf_rows_any(block->sequence, block->first, block->first + block->num_rows, side), part.lo, part.hi);
    if (any.lo == any.hi)
        return;
    for (int64_t lo = split.lo + (any.lo - split.lo) / tile * tile; lo < any.hi; lo += tile) {
        const pf_span keys = pf_clip(any, lo, lo + tile);
        int fetched = 0;
        for (int64_t p = 0; p < block->num_panels; p++) {
            const pf_panel panel = pf_get_panel(block, p);
            const pf_state own = panel_state(block, &state, &panel);
            pf_terms terms;
            pf_prefill_tile tile;
            if (!pf_prepare_tile(&s->panels, block, &panel, keys, lo, side, &fetched, &terms, &tile))
                continue;
            tile.m = own.m;
            tile.l = own.l;
            tile.o = own.o;
            prefill_tile(&tile);
        }
    }
}

/* The recurrence over one split of the keys, from the empty state. */
static void run_split(const pf_scratch *s, const pf_block *block, pf_state state, pf_span split) {
    const pf_context *context = block->context;
    const pf_state_shape shape = block_shape(context, block->num_rows);
    context->kernels->state_reset(state.m, state.l, shape.num_rows, state.o, shape.num_outputs);
    for (int side = 0; side < PF_NUM_SIDES; side++)
        run_side(s, block, state, split, side);
}

/* The outputs of a panel lie [dim][width], those of a matrix unit vector by vector: so part by part of a
 * panel, each of `width` vectors. */
static int32_t part_vectors(const pf_block *block, const pf_panel *panel) {
    return block->context->matrix ? 1 : panel->num_vectors;
}

/* Merge the states of two splits, part by part. */
static void merge_block(const void *owner, pf_state into, pf_state from) {
    const pf_block *block = owner;
    pf_panel part = {.first_vector = 0};
    for (int64_t p = 0; p < block->num_panels; p++) {
        const pf_panel panel = pf_get_panel(block, p);
        const int64_t width = part_vectors(block, &panel) * block->context->kernels->lanes;
        const int64_t end = panel.first_vector + panel.num_vectors;
        for (; part.first_vector < end; part.first_vector += part_vectors(block, &panel)) {
            const pf_state a = panel_state(block, &into, &part), b = panel_state(block, &from, &part);
            block->context->kernels->state_merge(a.m, a.l, a.o, b.m, b.l, b.o, width,
                                                 block->context->call->head_dim_v, 1, width,
                                                 block->context->scale.log2);
        }
    }
}

static void run_rows(const pf_context *context, const pf_scratch *s, const pf_block *block);

/* Whether and how a row whose outputs are not finite is computed again. */
static double retry_factor(const pf_scratch *s, const pf_block *block, const void *o, int32_t num_vectors,
                           int32_t vector, int64_t lane, int64_t row, double l, pf_retry_scratch *scratch) {
    const pf_context *context = block->context;
    context->kernels->unpack_rows(o, num_vectors, vector, context->call->head_dim_v, s->panels.rows,
                                  s->panels.row_stride);
    char *outputs = (char *)s->panels.rows + lane * s->panels.row_stride * context->elem_bytes;
    context->kernels->state_scale(outputs, context->call->head_dim_v, pf_real_at(context, s->factors, lane));
    return pf_retry_factor(context, block->sequence, block->kv_head, row, outputs, l, block->value_factor,
                           scratch);
}

static void finish_block(const pf_context *context, const pf_scratch *s, const pf_block *block,
                         pf_state state) {
    const pf_attention_call *call = context->call;
    const int64_t lanes = context->kernels->lanes, end = block->first + block->num_rows;
    pf_retry_scratch scratch = s->retry_scratch;
    pf_start_retry(block->sequence, block->first, end, block->alone, &scratch);
    int all_finite = 1;
    for (int64_t p = 0; p < block->num_panels; p++) {
        const pf_panel panel = pf_get_panel(block, p);
        const pf_state part = panel_state(block, &state, &panel);
        for (int32_t vector = 0; vector < panel.num_vectors; vector++) {
            const int64_t first_lane = vector * lanes, first = panel.first_row + first_lane;
            const int64_t num_rows = pf_min(lanes, end - first);
            const int32_t together = part_vectors(block, &panel), place = vector % together;
            const char *o =
                (char *)part.o + (vector - place) * lanes * call->head_dim_v * context->elem_bytes;
            const char *l = (const char *)part.l + first_lane * context->elem_bytes;
            pf_output_scales(context, block->sequence, block->kv_head, first, num_rows,
                             (const char *)part.m + first_lane * context->elem_bytes, l, block->value_factor,
                             s->factors);
            pf_rows_of(&call->out, block->sequence, block->kv_head, first, num_rows,
                       (const void **)s->out_rows);
            if (context->kernels->finish_rows(o, together, place, call->head_dim_v, s->factors, s->out_rows,
                                              (int32_t)num_rows, call->out.stride_dim, call->out.dtype,
                                              s->check))
                continue;
            for (int64_t r = 0; all_finite && r < block->num_rows; r++)
                s->retry[r] = 0;
            all_finite = 0;
            for (int64_t w = 0; w < num_rows; w++)
                if (pf_real_at(context, s->check, w) != 0)
                    s->retry[first + w - block->first] = retry_factor(
                        s, block, o, together, place, w, first + w, pf_real_at(context, l, w), &scratch);
        }
    }
    for (int64_t r = 0; !all_finite && r < block->num_rows; r++) {
        const double factor = s->retry[r]; /* a retry of row 0 writes this place */
        pf_block alone = pf_make_block(context, block->sequence, block->kv_head, block->first + r, 1, factor);
        alone.alone = 1;
        if (factor != 0.0)
            run_rows(context, s, &alone);
    }
}

static void run_rows(const pf_context *context, const pf_scratch *s, const pf_block *block) {
    const pf_sequence *sequence = block->sequence;
    pf_pack_block(&s->panels, block);
    pf_tree tree = {.end = sequence->end_split,
                    .states = s->states,
                    .shape = block_shape(context, block->num_rows),
                    .merge = merge_block,
                    .owner = block};
    for (int64_t split = 0; split < sequence->end_split; split++) {
        const pf_span keys = {pf_split_lo(sequence, split), pf_split_lo(sequence, split + 1)};
        run_split(s, block, pf_tree_next(&tree), keys);
        pf_tree_push(&tree, (pf_node){split, 0});
    }
    finish_block(context, s, block, pf_tree_close(&tree));
}

/* Query rows that a thread takes at a time: many, so that what is fetched and converted serves long, and
 * fewer towards the end, so that all threads end together, however fast each of them is. */
typedef struct pf_share {
    pf_sequence sequence;
    int64_t kv_head, first, num_rows;
} pf_share;

enum { FEWEST_PANELS = 4 };

/* Heads one after the other, so that neighbours in time read the same keys; inside a head the last rows
 * first, which see the most keys under a causal mask. Nothing left: 0. */
static int take_share(pf_context *context, pf_share *share) {
    const pf_attention_call *call = context->call;
    const int64_t panel_rows = context->plan.panel_rows, end = context->prefill_start[call->batch];
    int64_t panel = __atomic_load_n(&context->next_prefill_panel, __ATOMIC_RELAXED), taken;
    do {
        if (panel == end)
            return 0;
        const int64_t b = pf_find_sequence(context->prefill_start, call->batch, panel);
        share->sequence = pf_get_sequence(call, b);
        const int64_t num_rows = share->sequence.num_rows, num_panels = pf_ceil_div(num_rows, panel_rows);
        const int64_t inside = panel - context->prefill_start[b], left = num_panels - inside % num_panels;
        const int64_t fair = (end - panel) / (2 * (int64_t)context->plan.num_threads);
        taken = pf_min(left, pf_min(context->plan.block_rows / panel_rows, pf_max(fair, FEWEST_PANELS)));
        share->kv_head = inside / num_panels;
        share->first = (left - taken) * panel_rows;
        share->num_rows = pf_min(left * panel_rows, num_rows) - share->first;
    } while (!__atomic_compare_exchange_n(&context->next_prefill_panel, &panel, panel + taken, 1,
                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return 1;
}

void pf_prefill_run(pf_context *context, char *base) {
    pf_scratch scratch;
    carve(context, base, &scratch);
    pf_share share;
    while (take_share(context, &share)) {
        const pf_block block =
            pf_make_block(context, &share.sequence, share.kv_head, share.first, share.num_rows, 1.0);
        run_rows(context, &scratch, &block);
    }
}
