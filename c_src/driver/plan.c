/* The plan of a call: pure arithmetic on its shapes and lengths. Families, tiles, blocks, work
 * items, threads and workspace; what a result may depend on is fixed here, what it may not (threads,
 * block sizes) too. */
#include "driver.h"
#include "parallel.h"

/* Queries and outputs of one prefill block, which have to stay in the second-level cache. */
enum { BLOCK_BYTES = 512 * 1024, MAX_PANELS = 16, ITEMS_PER_THREAD = 4 };

/* Multiply-adds that are worth a thread: some 20 microseconds. A helper that still looks for work comes
 * within half a microsecond; one that sleeps costs its caller some 10 to be woken, and may be no help.
 * Reading a key or value from memory counts as a few multiply-adds. */
enum { WORK_PER_THREAD = 1 << 20, WORK_PER_ELEMENT = 4 };

static int64_t clamp(int64_t x, int64_t lo, int64_t hi) {
    return pf_max(lo, pf_min(x, hi));
}

/* Query rows of a prefill item: many, so that a converted tile of keys serves long, but few enough
 * that threads find work. Bits do not depend on it. */
static int64_t choose_panels(const pf_context *context, int64_t num_panels, int64_t longest) {
    const pf_attention_call *call = context->call;
    const int64_t rows = context->plan.panel_rows, e = context->elem_bytes;
    const int64_t query_bytes = context->matrix
                                    ? context->matrix->query_bytes(pf_panel_vectors(context), call->head_dim)
                                    : rows * call->head_dim * e;
    const int64_t panel_bytes = query_bytes + rows * call->head_dim_v * e;
    const int64_t fit = clamp(BLOCK_BYTES / panel_bytes, 1, MAX_PANELS);
    const int64_t fair =
        context->plan.num_threads > 1 ? num_panels / (ITEMS_PER_THREAD * context->plan.num_threads) : fit;
    return clamp(pf_min(fair, longest), 1, fit);
}

static int64_t work_of(const pf_attention_call *call, const pf_sequence *s) {
    if (s->num_rows == 0)
        return 0;
    int64_t keys = 0;
    for (int side = 0; side < PF_NUM_SIDES; side++) {
        const pf_span seen = pf_visible_to_any(&s->mask, 0, s->num_queries - 1, side);
        keys += seen.hi - seen.lo;
    }
    const int64_t elements = call->num_kv_heads * keys * (call->head_dim + call->head_dim_v);
    return elements * (s->num_rows + WORK_PER_ELEMENT);
}

/* Units of a sequence in the decode family, items in the prefill family: 0 in the other one. */
static int64_t decode_units(const pf_attention_call *call, const pf_sequence *s, int64_t heads) {
    const int64_t chunks = pf_ceil_div(s->num_rows, PF_DECODE_MAX_ROWS);
    return s->decode ? pf_ceil_div(call->num_kv_heads, heads) * chunks * pf_num_splits(s) : 0;
}

/* Whether the heads of a token lie beside each other, tokens further apart. */
static int has_heads_inside(const pf_tensor *t) {
    const int64_t head = t->stride_head < 0 ? -t->stride_head : t->stride_head;
    const int64_t token = t->stride_token < 0 ? -t->stride_token : t->stride_token;
    return head < token;
}

/* Heads of one decode item. Where they lie inside of tokens, several are taken together, tile by tile, so
 * that memory is read in its order; but the threads must find work, and scratch is for so many rows. */
static int64_t choose_heads(const pf_context *context, int64_t units_of_head) {
    const pf_attention_call *call = context->call;
    if (!has_heads_inside(&call->k) || !has_heads_inside(&call->v) || context->plan.max_rows == 0)
        return 1;
    int64_t heads = clamp(PF_DECODE_MAX_ROWS / context->plan.max_rows, 1, call->num_kv_heads);
    while (heads > 1 && pf_ceil_div(call->num_kv_heads, heads) * units_of_head <
                            ITEMS_PER_THREAD * (int64_t)context->plan.num_threads)
        heads /= 2;
    return heads;
}

static int64_t prefill_items(const pf_attention_call *call, const pf_sequence *s, int64_t block_rows) {
    return s->decode ? 0 : call->num_kv_heads * pf_ceil_div(s->num_rows, block_rows);
}

/* What has to be known of all sequences before the blocks can be chosen. */
typedef struct pf_survey {
    int64_t num_panels, longest_panels, longest_keys, work, tree_nodes, units_of_head;
} pf_survey;

static pf_survey survey(const pf_attention_call *call, pf_plan *plan) {
    pf_survey found = {.longest_keys = 1, .tree_nodes = 1};
    for (int64_t b = 0; b < call->batch; b++) {
        const pf_sequence s = pf_get_sequence(call, b);
        found.units_of_head += decode_units(call, &s, pf_max(call->num_kv_heads, 1));
        if (s.decode) {
            plan->max_rows = pf_max(plan->max_rows, pf_min(s.num_rows, PF_DECODE_MAX_ROWS));
        } else {
            found.num_panels += prefill_items(call, &s, plan->panel_rows);
            found.longest_panels = pf_max(found.longest_panels, pf_ceil_div(s.num_rows, plan->panel_rows));
        }
        if (s.num_rows > 0)
            plan->num_splits = pf_max(plan->num_splits, pf_num_splits(&s));
        const int64_t sink_nodes = s.sink_splits ? pf_tree_nodes(s.sink_splits) : 0;
        found.tree_nodes = pf_max(found.tree_nodes, pf_tree_nodes(pf_num_splits(&s)) + sink_nodes);
        found.longest_keys = pf_max(found.longest_keys, s.mask.num_keys);
        found.work += work_of(call, &s);
    }
    return found;
}

void pf_fill_starts(pf_context *context) {
    const pf_attention_call *call = context->call;
    int64_t panels = 0, units = 0;
    for (int64_t b = 0; b < call->batch; b++) {
        const pf_sequence s = pf_get_sequence(call, b);
        context->prefill_start[b] = panels;
        context->decode_start[b] = units;
        panels += prefill_items(call, &s, context->plan.panel_rows);
        units += decode_units(call, &s, context->decode_heads);
    }
    context->prefill_start[call->batch] = panels;
    context->decode_start[call->batch] = units;
}

void pf_make_context(pf_context *context, const pf_attention_call *call) {
    pf_plan *plan = &context->plan;
    const pf_real_kernels *kernels = context->kernels;
    context->call = call;
    context->next_prefill_panel = 0;
    pf_make_terms(context);
    *plan = (pf_plan){.num_splits = 1,
                      .matrix = context->matrix != 0,
                      .panel_rows = kernels->lanes * pf_panel_vectors(context)};
    const pf_survey found = survey(call, plan);
    context->tree_nodes = found.tree_nodes;
    /* A number that was asked for is kept; of the default, only what the work is worth. */
    const int64_t worth = found.work / WORK_PER_THREAD;
    if (call->num_threads > 0)
        plan->num_threads = pf_granted_threads(call->num_threads);
    else if (worth > 1)
        plan->num_threads = (int32_t)clamp(worth, 1, pf_default_threads());
    else
        plan->num_threads = 1; /* asking for the processors would be a system call */
    plan->block_rows = plan->panel_rows * choose_panels(context, found.num_panels, found.longest_panels);
    context->decode_heads = choose_heads(context, found.units_of_head);
    plan->max_rows *= context->decode_heads;
    for (int64_t b = 0; b < call->batch; b++) {
        const pf_sequence s = pf_get_sequence(call, b);
        plan->num_prefill_items += prefill_items(call, &s, plan->block_rows);
        plan->num_decode_items += decode_units(call, &s, context->decode_heads);
    }
    plan->num_threads =
        (int32_t)clamp(plan->num_prefill_items + plan->num_decode_items, 1, plan->num_threads);
    /* A tile longer than the keys needs no more scratch than they do. */
    const int64_t prefill_tile = call->tile > 0    ? call->tile
                                 : context->matrix ? context->matrix->tile_keys
                                                   : kernels->prefill_tile_keys;
    const int64_t decode_tile = call->tile > 0 ? call->tile : PF_DECODE_TILE_KEYS;
    plan->tile_prefill = (int32_t)pf_min(prefill_tile, found.longest_keys);
    plan->tile_decode = (int32_t)pf_min(decode_tile, found.longest_keys);
    /* Both scratches are alive at once: a thread that has left decode states behind goes on with
     * prefill items. */
    context->decode_scratch_bytes = plan->num_decode_items ? pf_decode_scratch_bytes(context) : 0;
    plan->thread_bytes =
        context->decode_scratch_bytes + (plan->num_prefill_items ? pf_prefill_scratch_bytes(context) : 0);
    plan->shared_bytes =
        2 * pf_starts_bytes(call) + pf_round_up(plan->num_threads * (int64_t)sizeof(char *), 64);
    plan->workspace_bytes = plan->shared_bytes + plan->num_threads * plan->thread_bytes + PF_ALIGNMENT;
}

/* Tiles with borders at multiples of `tile` from `origin` on that hold keys of a span. */
static int64_t tiles_of(pf_span keys, int64_t origin, int64_t tile) {
    return keys.lo == keys.hi ? 0 : (keys.hi - 1 - origin) / tile - (keys.lo - origin) / tile + 1;
}

/* Tiles of a span in which bias, mask and tree show at least one of the rows a key. */
static int64_t live_tiles(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t first,
                          int64_t end, pf_span any, int64_t origin, int64_t tile, int side) {
    int64_t live = 0;
    for (int64_t lo = origin + (any.lo - origin) / tile * tile; lo < any.hi; lo += tile) {
        int seen = 0;
        for (int64_t row = first; row < end && !seen; row++) {
            const pf_span own = pf_row_span(s, row, side);
            const pf_span keys = pf_clip(pf_clip(own, any.lo, any.hi), lo, lo + tile);
            seen = pf_sees_any_of(context, s, kv_head, row, keys);
        }
        live += seen;
    }
    return live;
}

/* Tiles that the rows of one item could need, and those that no row of it sees. */
static void count_item(const pf_context *context, pf_plan *plan, const pf_sequence *s, int64_t first,
                       int64_t end) {
    const int64_t tile = s->decode ? plan->tile_decode : plan->tile_prefill;
    for (int64_t split = 0; split < s->end_split; split++) {
        const int64_t lo = pf_split_lo(s, split), hi = pf_split_lo(s, split + 1);
        for (int side = 0; side < PF_NUM_SIDES; side++) {
            const pf_span keys = pf_clip(pf_side(&s->mask, side), lo, hi);
            const pf_span any = pf_clip(pf_rows_any(s, first, end, side), keys.lo, keys.hi);
            const int64_t total = tiles_of(keys, lo, tile);
            for (int64_t kv_head = 0; kv_head < context->call->num_kv_heads; kv_head++) {
                plan->tiles_total += total;
                plan->tiles_skipped +=
                    total - (context->hides ? live_tiles(context, s, kv_head, first, end, any, lo, tile, side)
                                            : tiles_of(any, lo, tile));
            }
        }
    }
}

void pf_count_tiles(pf_context *context) {
    pf_plan *plan = &context->plan;
    for (int64_t b = 0; b < context->call->batch; b++) {
        const pf_sequence s = pf_get_sequence(context->call, b);
        const int64_t rows = s.decode ? PF_DECODE_MAX_ROWS : plan->block_rows;
        for (int64_t first = 0; first < s.num_rows; first += rows)
            count_item(context, plan, &s, first, pf_min(first + rows, s.num_rows));
    }
}
