/* The prefill tile kernel on AMX. The same transposed products as in prefill.h, S^T = K Q^T and
 * O^T = V^T P^T, on tiles of 16 x 16 sums. Weights are rounded to bfloat16; scores, maxima and sums are
 * float.
 *
 * A tile register that is written again waits for the products that read it, and where two threads share a
 * core there are no spare ones. So up to four tiles of the right factor are held, and the left one
 * streams through a single register into one tile of sums: one load a product, and little to wait for. What
 * waiting is left is filled with the weights. Work goes item by item, an item being one vector of queries
 * against a group of keys: while the weights of one are taken, the scores of the next and the values of
 * the one before are multiplied.
 *
 * The maximum is lazy: weights are taken relative to that of earlier items, and only where a score
 * is so far above it that they would grow beyond 2^HEADROOM does a row's maximum move, and the weights of
 * the item are taken again. So scores need no pass of their own for the maximum. */
#ifndef PF_KERNELS_AMX_H
#define PF_KERNELS_AMX_H

enum {
    amx_UNIT = 32,      /* keys of two tiles of scores, and of one tile of weights */
    amx_HELD = 4,       /* tiles of the right factor in registers */
    amx_GROUP = 4 * 32, /* keys of an item: its weights are held at once */
    amx_PANEL = 8,      /* most vectors of queries side by side */
    amx_TILE_KEYS = 256,
    amx_HEADROOM = 8
};

static int64_t amx_steps(int64_t head_dim) {
    return pf_ceil_div(head_dim, 32);
}

static int64_t amx_query_bytes(int64_t num_vectors, int64_t head_dim) {
    return num_vectors * amx_steps(head_dim) * amx_TILE_BYTES;
}

static int64_t amx_units_bytes(int64_t num_keys, int64_t width) {
    return pf_round_up(num_keys, amx_GROUP) / amx_UNIT * amx_steps(width) * 2 * amx_TILE_BYTES;
}

/* [vector][step of 32 dims] tiles of 16 pairs of dims x 16 queries. */
static void amx_pack_queries(void *panel, int32_t vector, const void *const *rows, int32_t num_rows,
                             int64_t head_dim, int negative) {
    float *tile = (float *)panel + vector * amx_steps(head_dim) * 256;
    for (int64_t d = 0; d < head_dim; d += 32, tile += 256) {
        f32_vec square[16];
        for (int w = 0; w < 16; w++) {
            const int64_t valid = w < num_rows ? head_dim - d : 0;
            square[w] = amx_as_vec(amx_load_halves(valid ? (const uint16_t *)rows[w] + d : 0, valid));
            if (negative)
                square[w] = amx_turn_signs(square[w]);
        }
        f32_transpose(square);
        for (int i = 0; i < 16; i++)
            f32_store(tile + i * 16, square[i]);
    }
}

/* [16 keys][step of 32 dims] tiles of 16 keys x 32 dims. */
static void amx_pack_keys(void *tiles, const void *const *rows, int64_t first, int64_t num_rows,
                          int64_t head_dim) {
    const int64_t steps = amx_steps(head_dim), end = first + num_rows;
    for (int64_t j = first / amx_UNIT * amx_UNIT; j < pf_round_up(end, amx_UNIT); j++) {
        char *row = (char *)tiles + j / 16 * steps * amx_TILE_BYTES + j % 16 * 64;
        const uint16_t *key = j >= first && j < end ? rows[j - first] : 0;
        for (int64_t d = 0; d < head_dim; d += 32, row += amx_TILE_BYTES)
            amx_store_halves(row, amx_load_halves(key ? key + d : 0, key ? head_dim - d : 0));
    }
}

/* Where the tile of columns [16 * part, ...) and of a unit of keys lies: [group][part][unit of the group]. */
static int64_t amx_value_tile(int64_t unit, int64_t part, int64_t head_dim_v) {
    const int64_t parts = 2 * amx_steps(head_dim_v);
    return ((unit / amx_HELD * parts + part) * amx_HELD + unit % amx_HELD) * amx_TILE_BYTES;
}

static void amx_pack_values(void *tiles, const void *const *rows, int64_t first, int64_t num_rows,
                            int64_t head_dim_v) {
    const int64_t end = first + num_rows;
    for (int64_t unit = first / amx_UNIT; unit * amx_UNIT < end; unit++)
        for (int64_t d = 0; d < head_dim_v; d += 32) {
            f32_vec square[2][16];
            for (int i = 0; i < 16; i++) {
                amx_halves pair[2];
                for (int k = 0; k < 2; k++) {
                    const int64_t j = unit * amx_UNIT + 2 * i + k;
                    const uint16_t *value = j >= first && j < end ? rows[j - first] : 0;
                    pair[k] = amx_load_halves(value ? value + d : 0, value ? head_dim_v - d : 0);
                }
                square[0][i] = amx_zip(pair[0], pair[1], 0);
                square[1][i] = amx_zip(pair[0], pair[1], 1);
            }
            for (int part = 0; part < 2; part++) {
                char *tile = (char *)tiles + amx_value_tile(unit, d / 16 + part, head_dim_v);
                f32_transpose(square[part]);
                for (int i = 0; i < 16; i++)
                    f32_store((float *)tile + i * 16, square[part][i]);
            }
        }
}

/* One vector of queries against up to amx_GROUP keys, units [first_unit, first_unit + num_units) of the tile;
 * lane i sees its keys [lo, hi). */
typedef struct amx_item {
    int64_t first_unit;
    int vector, num_units;
    int masked; /* whether any lane does not see all keys of the units */
    f32_vec lo, hi, alpha;
    float *scores; /* [key][16] */
    float *pairs;  /* a tile of weights per unit */
} amx_item;

typedef struct amx_scratch {
    float scores[2][amx_GROUP * 16];
    float pairs[2][amx_HELD * 256];
    float sums[2][256]; /* on their way to the outputs */
} amx_scratch;

/* Makes the item of a vector and a group; returns 0 where no lane sees a key. */
static int amx_make_item(const pf_prefill_tile *tile, int64_t group, int vector, amx_item *item) {
    int64_t any_lo = tile->first_key, any_hi = tile->num_keys, all_lo = any_lo, all_hi = any_hi;
    item->lo = f32_set1((float)any_lo);
    item->hi = f32_set1((float)any_hi);
    if (tile->lo) {
        float ends[2][16];
        any_lo = any_hi;
        any_hi = all_lo;
        for (int i = 0; i < 16; i++) {
            const int32_t lo = tile->lo[vector * 16 + i], hi = tile->hi[vector * 16 + i];
            ends[0][i] = (float)lo;
            ends[1][i] = (float)hi;
            all_lo = pf_max(all_lo, lo);
            all_hi = pf_min(all_hi, hi);
            if (lo < hi) {
                any_lo = pf_min(any_lo, lo);
                any_hi = pf_max(any_hi, hi);
            }
        }
        item->lo = f32_load(ends[0]);
        item->hi = f32_load(ends[1]);
    }
    any_lo = pf_max(any_lo, group * amx_GROUP);
    any_hi = pf_min(any_hi, (group + 1) * amx_GROUP);
    if (any_lo >= any_hi)
        return 0;
    item->vector = vector;
    item->first_unit = any_lo / amx_UNIT;
    item->num_units = (int)(pf_ceil_div(any_hi, amx_UNIT) - item->first_unit);
    item->masked =
        all_lo > item->first_unit * amx_UNIT || all_hi < (item->first_unit + item->num_units) * amx_UNIT;
    return 1;
}

/* 2^t for t up to some dozens; 0 for -inf. The polynomial is that of 2^f on [0, 1], of relative error 8.2e-8
 * (tools/exp2_polynomial.py 5u), 1 at 0. */
PF_INLINE f32_vec amx_exp2(f32_vec t) {
    const f32_vec f = amx_fraction(t);
    f32_vec p = f32_set1(0x1.e97502p-10f);
    p = f32_fma(p, f, f32_set1(0x1.277852p-7f));
    p = f32_fma(p, f, f32_set1(0x1.c91ce6p-5f));
    p = f32_fma(p, f, f32_set1(0x1.ebdb56p-3f));
    p = f32_fma(p, f, f32_set1(0x1.62e4bap-1f));
    p = f32_fma(p, f, f32_set1(1.0f));
    return amx_times_power(p, t);
}

PF_INLINE void amx_hold(const char *tiles, int64_t n) {
    amx_load(4, tiles, 64);
    if (n > 1)
        amx_load(5, tiles + amx_TILE_BYTES, 64);
    if (n > 2)
        amx_load(6, tiles + 2 * amx_TILE_BYTES, 64);
    if (n > 3)
        amx_load(7, tiles + 3 * amx_TILE_BYTES, 64);
}

/* Weights of an item that are being taken, pair of keys by pair of keys: [done, end), `share` at a time, for
 * a maximum m. */
typedef struct amx_weighing {
    const amx_item *item;
    int done, end, share;
    f32_vec factor, m; /* a weight is 2^((score - m) * factor) */
    f32_vec sum, top;
} amx_weighing;

/* The next of them. */
PF_INLINE void amx_weigh(const int masked, amx_weighing *w, int count) {
    const amx_item *item = w->item;
    for (int end = (int)pf_min(w->done + count, w->end); w->done < end; w->done++) {
        f32_vec x[2];
        PF_UNROLL
        for (int k = 0; k < 2; k++) {
            const int key = 2 * w->done + k;
            f32_vec s = f32_load(item->scores + key * 16);
            if (masked)
                s = f32_keep(s, f32_set1((float)(item->first_unit * amx_UNIT + key)), item->lo, item->hi);
            w->top = f32_max(w->top, s);
            x[k] = amx_exp2(f32_mul(f32_sub(s, w->m), w->factor));
            w->sum = f32_add(w->sum, x[k]);
        }
        f32_store(item->pairs + w->done * 16, amx_round_pairs(x[0], x[1]));
    }
}

/* Adds the products of n tiles with those that are held. A product waits for its tile, and the next tile for
 * the product: weights are taken meanwhile. */
PF_INLINE void amx_chain(const int masked, const char *tiles, int64_t n, amx_weighing *w) {
    amx_load(3, tiles, 64);
    amx_dot(0, 3, 4);
    amx_weigh(masked, w, w->share);
    if (n > 1) {
        amx_load(3, tiles + amx_TILE_BYTES, 64);
        amx_dot(0, 3, 5);
        amx_weigh(masked, w, w->share);
    }
    if (n > 2) {
        amx_load(3, tiles + 2 * amx_TILE_BYTES, 64);
        amx_dot(0, 3, 6);
        amx_weigh(masked, w, w->share);
    }
    if (n > 3) {
        amx_load(3, tiles + 3 * amx_TILE_BYTES, 64);
        amx_dot(0, 3, 7);
        amx_weigh(masked, w, w->share);
    }
}

/* Scores of the 16 keys of a tile, against the queries of an item. */
PF_INLINE void amx_score_keys(const int masked, const pf_prefill_tile *tile, const amx_item *item, int part,
                              int64_t steps, amx_weighing *w) {
    const char *queries = (const char *)tile->q + item->vector * steps * amx_TILE_BYTES;
    const char *keys = (const char *)tile->k_tiles + (item->first_unit * 2 + part) * steps * amx_TILE_BYTES;
    amx_zero(0);
    for (int64_t step = 0; step < steps; step += amx_HELD) {
        const int64_t n = pf_min(steps - step, amx_HELD);
        if (part == 0 || steps > amx_HELD)
            amx_hold(queries + step * amx_TILE_BYTES, n);
        amx_chain(masked, keys + step * amx_TILE_BYTES, n, w);
    }
    amx_store(0, item->scores + part * 256, 64);
}

/* The values of 16 columns, weighted with those of an item, from zero. */
PF_INLINE void amx_value_columns(const int masked, const pf_prefill_tile *tile, const amx_item *item,
                                 int64_t part, float *sums, amx_weighing *w) {
    if (part == 0)
        amx_hold((const char *)item->pairs, item->num_units);
    amx_zero(0);
    amx_chain(masked, (const char *)tile->v_tiles + amx_value_tile(item->first_unit, part, tile->head_dim_v),
              item->num_units, w);
    amx_store(0, sums, 64);
}

/* They join the outputs. */
PF_INLINE void amx_fold_columns(const pf_prefill_tile *tile, const amx_item *item, int64_t part,
                                const float *sums) {
    const int64_t first = part * 16, num_columns = pf_min(tile->head_dim_v - first, 16);
    float *o = (float *)tile->o + (item->vector * tile->head_dim_v + first) * 16;
    for (int64_t i = 0; i < num_columns * 16; i += 16)
        f32_store(o + i, f32_fma(f32_load(o + i), item->alpha, f32_load(sums + i)));
}

/* One step of the pipeline: scores of `next`, weights of `now`, outputs of `before`; any may be missing. */
PF_INLINE void amx_step(const int masked, const pf_prefill_tile *tile, amx_scratch *scratch,
                        const amx_item *next, amx_item *now, const amx_item *before) {
    const int64_t steps = amx_steps(tile->head_dim), parts = pf_ceil_div(tile->head_dim_v, 16);
    const int num_scores = next ? 2 * next->num_units : 0, num_values = before ? (int)parts : 0;
    const int64_t products = num_scores * steps + (before ? num_values * before->num_units : 0);
    const f32_vec factor = f32_set1((float)tile->scale_log2);
    amx_weighing w = {.item = now, .end = now ? 16 * now->num_units : 0, .factor = factor};
    float *m = (float *)tile->m, *l = (float *)tile->l;
    f32_vec own = f32_zero();
    if (now) {
        m += now->vector * 16;
        l += now->vector * 16;
        own = f32_load(m);
        if (tile->terms)
            f32_vector_terms(tile, now->vector, now->scores, 16, now->first_unit * amx_UNIT,
                             pf_min((now->first_unit + now->num_units) * amx_UNIT, tile->num_keys));
        w.share = products ? (int)pf_ceil_div(w.end, products) : 0;
    }
    w.m = own;
    w.sum = f32_zero();
    w.top = own;
    for (int i = 0; i < num_scores; i++)
        amx_score_keys(masked, tile, next, i, steps, &w);
    for (int i = 0; i < num_values; i++) {
        amx_value_columns(masked, tile, before, i, scratch->sums[i & 1], &w);
        if (i > 0) /* what a tile has stored can be read fast only after a while */
            amx_fold_columns(tile, before, i - 1, scratch->sums[(i - 1) & 1]);
    }
    amx_weigh(masked, &w, w.end);
    if (num_values)
        amx_fold_columns(tile, before, num_values - 1, scratch->sums[(num_values - 1) & 1]);
    if (!now)
        return;
    const f32_vec limit = f32_add(own, f32_set1((float)(amx_HEADROOM / tile->scale_log2)));
    now->alpha = f32_set1(1);
    if (amx_any_above(w.top, limit)) { /* only the rows concerned move; the others come out the same */
        const f32_vec moved = amx_where_above(w.top, limit, w.top, own);
        now->alpha = amx_exp2(f32_mul(f32_sub(own, moved), factor));
        w.m = moved;
        w.sum = f32_zero();
        w.done = 0;
        amx_weigh(masked, &w, w.end);
        f32_store(m, moved);
    }
    f32_store(l, f32_fma(f32_load(l), now->alpha, w.sum));
}

static void amx_prefill_tile(const pf_prefill_tile *tile) {
    amx_scratch *scratch = tile->scores;
    amx_item items[3], *now = 0, *before = 0;
    int64_t group = tile->first_key / amx_GROUP;
    int vector = 0;
    amx_start();
    for (int64_t i = 0;; i++) {
        amx_item *next = items + i % 3;
        int found = 0;
        while (!found && group * amx_GROUP < tile->num_keys) {
            found = amx_make_item(tile, group, vector, next);
            if (++vector == tile->num_vectors) {
                vector = 0;
                group++;
            }
        }
        next->scores = scratch->scores[i % 2];
        next->pairs = scratch->pairs[i % 2];
        if (!found)
            next = 0;
        if (!next && !now && !before)
            break;
        if (now && now->masked)
            amx_step(1, tile, scratch, next, now, before);
        else
            amx_step(0, tile, scratch, next, now, before);
        before = now;
        now = next;
    }
    amx_stop();
}

/* Products at most: four accumulators fed by two tiles of each operand, as a kernel would that reuses what
 * it loads. Nothing is loaded in the loop. Returns the operations done. */
static double amx_peak(int64_t rounds, double *sink) {
    float out[16 * 16];
    amx_start();
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    amx_zero(4);
    amx_zero(5);
    amx_zero(6);
    amx_zero(7);
    for (int64_t r = 0; r < rounds; r++) {
        amx_dot(0, 4, 6);
        amx_dot(1, 4, 7);
        amx_dot(2, 5, 6);
        amx_dot(3, 5, 7);
    }
    amx_store(0, out, 64);
    amx_stop();
    *sink = out[0];
    return 4.0 * 2 * 16 * 16 * 32 * (double)rounds;
}

static const pf_matrix_kernels amx_kernels = {
    .panel_vectors = amx_PANEL,
    .tile_keys = amx_TILE_KEYS,
    .scratch_bytes = sizeof(amx_scratch),
    .query_bytes = amx_query_bytes,
    .key_bytes = amx_units_bytes,
    .value_bytes = amx_units_bytes,
    .pack_queries = amx_pack_queries,
    .pack_keys = amx_pack_keys,
    .pack_values = amx_pack_values,
    .prefill_tile = amx_prefill_tile,
    .peak = amx_peak,
};

#endif
