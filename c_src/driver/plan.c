/* The plan of a call: pure arithmetic on its shapes and lengths. Families, tiles, blocks, work
 * items, threads and workspace; what a result may depend on is fixed here, what it may not (threads,
 * block sizes) too. */
#include "driver.h"
#include "parallel.h"

/* Queries and outputs of one prefill block, which have to stay in the second-level cache. */
enum { BLOCK_BYTES = 512 * 1024, MAX_PANELS = 16, ITEMS_PER_THREAD = 4 };

/* Multiply-adds that are worth a thread: some 20 microseconds, ten times what a parallel region
 * costs. Reading a key or value from memory counts as a few of them. */
enum { WORK_PER_THREAD = 1 << 20, WORK_PER_ELEMENT = 4 };

static int64_t clamp(int64_t x, int64_t lo, int64_t hi) {
    return pf_max(lo, pf_min(x, hi));
}

/* Query rows of a prefill item: many, so that a converted tile of keys serves long, but few enough
 * that threads find work. Bits do not depend on it. */
static int64_t choose_panels(const pf_context *context, int64_t num_panels, int64_t longest) {
    const pf_attention_call *call = context->call;
    const int64_t panel_bytes =
        context->plan.panel_rows * (call->head_dim + call->head_dim_v) * context->elem_bytes;
    const int64_t fit = clamp(BLOCK_BYTES / panel_bytes, 1, MAX_PANELS);
    const int64_t fair =
        context->plan.num_threads > 1 ? num_panels / (ITEMS_PER_THREAD * context->plan.num_threads) : fit;
    return clamp(pf_min(fair, longest), 1, fit);
}

static int64_t work_of(const pf_attention_call *call, const pf_sequence *s) {
    if (s->num_rows == 0)
        return 0;
    const pf_span seen = pf_visible_to_any(&s->mask, 0, s->num_queries - 1);
    const int64_t elements = call->num_kv_heads * (seen.hi - seen.lo) * (call->head_dim + call->head_dim_v);
    return elements * (s->num_rows + WORK_PER_ELEMENT);
}

static void choose_families(pf_context *context, int64_t *num_panels, int64_t *longest) {
    const pf_attention_call *call = context->call;
    pf_plan *plan = &context->plan;
    int64_t work = 0;
    for (int64_t b = 0; b < call->batch; b++) {
        const pf_sequence s = pf_get_sequence(call, b);
        if (context->decode_start)
            context->decode_start[b] = plan->num_decode_items;
        if (s.decode) {
            const int64_t chunks = pf_ceil_div(s.num_rows, PF_DECODE_MAX_ROWS);
            plan->num_decode_items += call->num_kv_heads * chunks * (s.end_split - s.first_split);
            plan->max_rows = pf_max(plan->max_rows, pf_min(s.num_rows, PF_DECODE_MAX_ROWS));
        } else {
            const int64_t panels = pf_ceil_div(s.num_rows, plan->panel_rows);
            *num_panels += call->num_kv_heads * panels;
            *longest = pf_max(*longest, panels);
        }
        if (s.num_rows > 0)
            plan->num_splits = pf_max(plan->num_splits, s.end_split - s.first_split);
        work += work_of(call, &s);
    }
    if (call->num_threads == 0) /* a number that was asked for is kept */
        plan->num_threads = (int32_t)clamp(work / WORK_PER_THREAD, 1, plan->num_threads);
    if (context->decode_start)
        context->decode_start[call->batch] = plan->num_decode_items;
}

static void count_prefill_items(pf_context *context) {
    const pf_attention_call *call = context->call;
    pf_plan *plan = &context->plan;
    for (int64_t b = 0; b < call->batch; b++) {
        const pf_sequence s = pf_get_sequence(call, b);
        if (context->prefill_start)
            context->prefill_start[b] = plan->num_prefill_items;
        if (!s.decode)
            plan->num_prefill_items += call->num_kv_heads * pf_ceil_div(s.num_rows, plan->block_rows);
    }
    if (context->prefill_start)
        context->prefill_start[call->batch] = plan->num_prefill_items;
}

void pf_make_context(pf_context *context, const pf_attention_call *call, int64_t *prefill_start,
                     int64_t *decode_start) {
    pf_plan *plan = &context->plan;
    const pf_real_kernels *kernels = context->kernels;
    context->call = call;
    context->scale = pf_split_scale(call->scale, context->elem_bytes == 8);
    context->prefill_start = prefill_start;
    context->decode_start = decode_start;
    context->next_prefill_item = 0;
    *plan = (pf_plan){.num_splits = 1};
    plan->num_threads = call->num_threads > 0 ? pf_granted_threads(call->num_threads) : pf_default_threads();
    plan->tile_prefill = call->tile > 0 ? call->tile : kernels->prefill_tile_keys;
    plan->tile_decode = call->tile > 0 ? call->tile : PF_DECODE_TILE_KEYS;
    plan->panel_rows = kernels->lanes * kernels->panel_vectors;
    int64_t num_panels = 0, longest = 0;
    choose_families(context, &num_panels, &longest);
    plan->block_rows = plan->panel_rows * choose_panels(context, num_panels, longest);
    count_prefill_items(context);
    plan->num_threads =
        (int32_t)clamp(plan->num_prefill_items + plan->num_decode_items, 1, plan->num_threads);
    /* A tile longer than the keys needs no more scratch than they do. */
    int64_t longest_keys = 1;
    for (int64_t b = 0; b < call->batch; b++)
        longest_keys = pf_max(longest_keys, pf_get_sequence(call, b).mask.num_keys);
    plan->tile_prefill = (int32_t)pf_min(plan->tile_prefill, longest_keys);
    plan->tile_decode = (int32_t)pf_min(plan->tile_decode, longest_keys);
    /* Both scratches are alive at once: a thread that has left decode states behind goes on with
     * prefill items. */
    context->decode_scratch_bytes = plan->num_decode_items ? pf_decode_scratch_bytes(context) : 0;
    plan->thread_bytes =
        context->decode_scratch_bytes + (plan->num_prefill_items ? pf_prefill_scratch_bytes(context) : 0);
    plan->shared_bytes =
        2 * pf_starts_bytes(call) + pf_round_up(plan->num_threads * (int64_t)sizeof(char *), 64);
    plan->workspace_bytes = plan->shared_bytes + plan->num_threads * plan->thread_bytes + PF_ALIGNMENT;
}

/* Tiles that the rows of one item could need, and those that no row of it sees. */
static void count_item(const pf_context *context, pf_plan *plan, const pf_sequence *s, int64_t first,
                       int64_t end) {
    const int64_t tile = s->decode ? plan->tile_decode : plan->tile_prefill;
    for (int64_t split = 0; split < s->end_split; split++) {
        const int64_t lo = pf_split_lo(s, split), hi = pf_split_lo(s, split + 1);
        const pf_span any = pf_clip(pf_rows_any(context->call, s, first, end), lo, hi);
        const int64_t total = pf_ceil_div(hi - lo, tile);
        const int64_t used = any.lo == any.hi ? 0 : (any.hi - 1 - lo) / tile - (any.lo - lo) / tile + 1;
        plan->tiles_total += total * context->call->num_kv_heads;
        plan->tiles_skipped += (total - used) * context->call->num_kv_heads;
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
