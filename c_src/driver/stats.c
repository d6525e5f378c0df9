/* Statistics of the probabilities, in a second pass over queries and keys with the log-sum-exp known.
 * An item is one key/value head of a sequence. It goes key tile by key tile and, for each, over all
 * query rows, so that the mass of a key is summed in one order by one thread, in memory for a tile. */
#include "entry.h"
#include "panel.h"
#include "parallel.h"

#include "../dispatch/dispatch.h"

#include <math.h>
#include <stdlib.h>

typedef struct pf_stats_scratch {
    pf_panel_scratch panels;
    void *lse, *highest, *entropy; /* one per lane of a panel */
    double *mass;                  /* [group][tile] */
} pf_stats_scratch;

typedef struct pf_stats_run_of {
    pf_context context;
    const pf_stats_call *stats;
    char *memory;
    int64_t bytes_per_thread;
    int64_t next_item;
} pf_stats_run_of;

static int64_t carve(const pf_context *context, char *base, pf_stats_scratch *s) {
    const int64_t e = context->elem_bytes, width = context->plan.panel_rows;
    const int64_t group = context->call->num_heads / context->call->num_kv_heads;
    char *at = base;
    pf_carve_panels(context, &at, width, &s->panels);
    s->lse = pf_carve(&at, width * e);
    s->highest = pf_carve(&at, width * e);
    s->entropy = pf_carve(&at, width * e);
    s->mass = pf_carve(&at, group * context->plan.tile_prefill * (int64_t)sizeof(double));
    return at - base;
}

/* Place of a row in the log-sum-exp, and in everything that is shaped like it. */
static int64_t row_place(const pf_stats_call *stats, const pf_sequence *s, int64_t kv_head, int64_t row) {
    const pf_attention_call *call = stats->attention;
    const int64_t head = s->q_batch * call->num_heads + pf_query_head(s, kv_head, row);
    return head * stats->rows_of_lse + s->q_token + row / s->group;
}

static int counts_for_mass(const pf_stats_call *stats, const pf_sequence *s, int64_t query) {
    return stats->key_mass && (stats->last_queries < 0 || query >= s->num_queries - stats->last_queries);
}

/* Whether anybody wants the rows [first, end). */
static int wanted(const pf_stats_call *stats, const pf_sequence *s, int64_t first, int64_t end) {
    const int64_t group = s->group;
    if (stats->max_logit || stats->entropy || stats->top_k_values ||
        counts_for_mass(stats, s, (end - 1) / group))
        return 1;
    for (int64_t r = 0; r < stats->num_rows; r++)
        if (stats->rows[r] >= first / group && stats->rows[r] <= (end - 1) / group)
            return 1;
    return 0;
}

/* Put a probability into the falling list of the largest: of equal ones the first stays first, and
 * NaN, to be seen, counts as the largest. */
static void insert(const pf_context *context, void *values, int64_t *indices, int64_t k, double p,
                   int64_t key) {
    int64_t i = k;
    while (i > 0 && (indices[i - 1] < 0 || p > pf_real_at(context, values, i - 1) ||
                     (isnan(p) && !isnan(pf_real_at(context, values, i - 1)))))
        i--;
    if (i == k)
        return;
    for (int64_t j = k - 1; j > i; j--) {
        pf_set_real(context, values, j, pf_real_at(context, values, j - 1));
        indices[j] = indices[j - 1];
    }
    pf_set_real(context, values, i, p);
    indices[i] = key;
}

static void take_row(const pf_context *context, const pf_stats_call *stats, const pf_stats_scratch *s,
                     const pf_sequence *sequence, const pf_prefill_tile *tile, int64_t kv_head, int64_t row,
                     int64_t lane, int64_t first_key, int64_t tile_key) {
    const pf_attention_call *call = stats->attention;
    const int64_t width = context->plan.panel_rows, place = row_place(stats, sequence, kv_head, row);
    const int64_t query = row / sequence->group, head = pf_query_head(sequence, kv_head, row);
    if (stats->max_logit) {
        const double highest = pf_real_at(context, s->highest, lane);
        if (isnan(highest) || highest > pf_real_at(context, stats->max_logit, place))
            pf_set_real(context, stats->max_logit, place, highest);
    }
    if (stats->entropy)
        pf_set_real(context, stats->entropy, place,
                    pf_real_at(context, stats->entropy, place) + pf_real_at(context, s->entropy, lane));
    double *mass = counts_for_mass(stats, sequence, query)
                       ? s->mass + row % sequence->group * context->plan.tile_prefill + (first_key - tile_key)
                       : 0;
    for (int64_t j = 0; j < tile->num_keys && (mass || stats->top_k_values); j++) {
        const double p = pf_real_at(context, s->panels.scores, j * width + lane);
        if (mass)
            mass[j] += p;
        if (stats->top_k_values && !(p == 0 && signbit(p)))
            insert(context, (char *)stats->top_k_values + place * stats->top_k * context->elem_bytes,
                   stats->top_k_indices + place * stats->top_k, stats->top_k, p, first_key + j);
    }
    for (int64_t r = 0; r < stats->num_rows; r++) {
        if (stats->rows[r] != query)
            continue;
        const int64_t to =
            ((sequence->index * call->num_heads + head) * stats->num_rows + r) * stats->num_keys;
        for (int64_t j = 0; j < tile->num_keys; j++)
            pf_set_real(context, stats->row_probabilities, to + first_key + j,
                        pf_real_at(context, s->panels.scores, j * width + lane) + 0.0);
    }
}

/* The query rows of one panel against the keys of one tile. */
static void take_panel(const pf_context *context, const pf_stats_call *stats, const pf_stats_scratch *s,
                       const pf_block *block, pf_span keys, int64_t border, int side, int *fetched) {
    const pf_panel panel = pf_get_panel(block, 0);
    pf_terms terms = context->terms;
    pf_prefill_tile tile;
    pf_pack_block(&s->panels, block);
    if (!pf_prepare_tile(&s->panels, block, &panel, keys, border, side, fetched, &terms, &tile))
        return;
    tile.terms = &terms; /* the kernel for scores alone always asks */
    context->kernels->score_tile(&tile);
    const double none = INFINITY; /* lanes behind the last row */
    for (int64_t w = 0; w < context->plan.panel_rows; w++) {
        const int64_t row = panel.first_row + w;
        pf_set_real(context, s->lse, w,
                    w < panel.num_rows ? pf_real_at(context, stats->lse,
                                                    row_place(stats, block->sequence, block->kv_head, row))
                                       : none);
    }
    context->kernels->probabilities(&tile, context->scale.score_factor, s->lse, s->highest, s->entropy);
    const int64_t first_key = keys.lo + (tile.k_rows - s->panels.k_rows);
    for (int64_t w = 0; w < panel.num_rows; w++)
        take_row(context, stats, s, block->sequence, &tile, block->kv_head, panel.first_row + w, w, first_key,
                 keys.lo);
}

static void take_tile(const pf_context *context, const pf_stats_call *stats, const pf_stats_scratch *s,
                      const pf_sequence *sequence, int64_t kv_head, pf_span keys, int64_t border, int side) {
    const pf_attention_call *call = stats->attention;
    const int64_t width = context->plan.panel_rows, group = sequence->group,
                  stride = context->plan.tile_prefill;
    int fetched = 0;
    for (int64_t i = 0; i < group * stride; i++)
        s->mass[i] = 0;
    for (int64_t first = 0; first < sequence->num_rows; first += width) {
        const int64_t end = pf_min(first + width, sequence->num_rows);
        if (!wanted(stats, sequence, first, end))
            continue;
        pf_block block = pf_make_block(context, sequence, kv_head, first, end - first, 1.0);
        block.num_panels = 1;
        block.narrow = context->kernels->panel_vectors;
        block.num_wider = 0;
        take_panel(context, stats, s, &block, keys, border, side, &fetched);
    }
    for (int64_t g = 0; stats->key_mass && g < group; g++) {
        const int64_t head = kv_head * group + g;
        const int64_t to = (sequence->index * call->num_heads + head) * stats->num_keys + keys.lo;
        for (int64_t j = 0; j < keys.hi - keys.lo; j++)
            pf_set_real(context, stats->key_mass, to + j, s->mass[g * stride + j]);
    }
}

static void work(void *run_, int thread) {
    pf_stats_run_of *run = run_;
    const pf_context *context = &run->context;
    const pf_attention_call *call = context->call;
    const int64_t tile = context->plan.tile_prefill;
    pf_stats_scratch scratch;
    int64_t item;
    carve(context, run->memory + thread * run->bytes_per_thread, &scratch);
    while ((item = pf_take_next(&run->next_item)) < call->batch * call->num_kv_heads) {
        const pf_sequence sequence = pf_get_sequence(call, item / call->num_kv_heads);
        if (sequence.num_rows == 0)
            continue;
        for (int side = 0; side < PF_NUM_SIDES; side++) {
            const pf_span any = pf_rows_any(&sequence, 0, sequence.num_rows, side);
            for (int64_t lo = any.lo / tile * tile; lo < any.hi; lo += tile)
                take_tile(context, run->stats, &scratch, &sequence, item % call->num_kv_heads,
                          pf_clip(any, lo, lo + tile), lo, side);
        }
    }
}

int pf_driver_stats(const pf_stats_call *stats) {
    const pf_attention_call *call = stats->attention;
    pf_stats_run_of run = {.stats = stats};
    pf_start_context(&run.context, call);
    pf_make_context(&run.context, call);
    const int64_t items = call->batch * call->num_kv_heads;
    if (items == 0)
        return PF_STATUS_OK;
    const int num_threads = (int)pf_min(run.context.plan.num_threads, items);
    pf_stats_scratch scratch;
    run.bytes_per_thread = pf_round_up(carve(&run.context, 0, &scratch), PF_ALIGNMENT);
    char *memory = malloc((size_t)(run.bytes_per_thread * num_threads + PF_ALIGNMENT));
    if (!memory)
        return PF_STATUS_OUT_OF_MEMORY;
    run.memory = (char *)(((uintptr_t)memory + PF_ALIGNMENT - 1) / PF_ALIGNMENT * PF_ALIGNMENT);
    pf_parallel(num_threads, work, &run);
    free(memory);
    return PF_STATUS_OK;
}
