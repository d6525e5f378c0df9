/* The prefill tile kernel on AMX. The same transposed products as in prefill.h, S^T = K Q^T and
 * O^T = V^T P^T, on tiles of 16 x 16 sums: two tiles of keys (or of value columns) times two of queries are
 * in registers at a time, so that each tile that is loaded serves two products. Weights are rounded to
 * bfloat16; scores, maxima and sums are float.
 *
 * The maximum is lazy: weights are taken relative to the maximum of earlier tiles, and only where a
 * score is so far above it that they would grow beyond 2^HEADROOM does a row's maximum move, and the
 * weights of the tile are taken again. So scores need no pass of their own for the maximum. */
#ifndef PF_KERNELS_AMX_H
#define PF_KERNELS_AMX_H

enum {
    amx_UNIT = 32, /* keys of two tiles of scores, and of one tile of weights */
    amx_PANEL = 4, /* most vectors of queries side by side */
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
    return pf_ceil_div(num_keys, amx_UNIT) * amx_steps(width) * 2 * amx_TILE_BYTES;
}

/* Scores, weights in pairs of keys, and two blocks of 2 x 2 tiles on their way to the outputs. */
static int64_t amx_scratch_bytes(int64_t num_vectors, int64_t num_keys) {
    return pf_round_up(num_keys, amx_UNIT) * num_vectors * (64 + 32) + 8 * amx_TILE_BYTES;
}

/* [step of 32 dims][vector] tiles of 16 pairs of dims x 16 queries. */
static void amx_pack_queries(void *panel, int32_t num_vectors, int32_t vector, const void *const *rows,
                             int32_t num_rows, int64_t head_dim, int negative) {
    for (int64_t d = 0; d < head_dim; d += 32) {
        f32_vec square[16];
        for (int w = 0; w < 16; w++) {
            const int64_t valid = w < num_rows ? head_dim - d : 0;
            square[w] = amx_as_vec(amx_load_halves(valid ? (const uint16_t *)rows[w] + d : 0, valid));
            if (negative)
                square[w] = amx_turn_signs(square[w]);
        }
        f32_transpose(square);
        float *tile = (float *)panel + (d / 32 * num_vectors + vector) * 256;
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

/* [32 columns][unit][2] tiles of 16 columns x 32 keys. */
static void amx_pack_values(void *tiles, const void *const *rows, int64_t first, int64_t num_rows,
                            int64_t head_dim_v, int64_t num_keys) {
    const int64_t units = pf_ceil_div(num_keys, amx_UNIT), end = first + num_rows;
    for (int64_t unit = first / amx_UNIT; unit * amx_UNIT < end; unit++)
        for (int64_t d = 0; d < head_dim_v; d += 32) {
            f32_vec square[2][16];
            for (int i = 0; i < 16; i++) {
                __m512i pair[2];
                for (int k = 0; k < 2; k++) {
                    const int64_t j = unit * amx_UNIT + 2 * i + k;
                    const uint16_t *value = j >= first && j < end ? rows[j - first] : 0;
                    pair[k] = amx_load_halves(value ? value + d : 0, value ? head_dim_v - d : 0);
                }
                square[0][i] = amx_zip(pair[0], pair[1], 0);
                square[1][i] = amx_zip(pair[0], pair[1], 1);
            }
            for (int part = 0; part < 2; part++) {
                float *tile = (float *)tiles + ((d / 32 * units + unit) * 2 + part) * 256;
                f32_transpose(square[part]);
                for (int i = 0; i < 16; i++)
                    f32_store(tile + i * 16, square[part][i]);
            }
        }
}

/* What the stages of a tile share. */
typedef struct amx_panel {
    const pf_prefill_tile *tile;
    int64_t steps, first_unit, end_unit;
    float *scores;  /* [key][width] */
    float *weights; /* [pair of keys][width] */
    float *sums;    /* [2][4] tiles */
} amx_panel;

/* Scores of a unit against num_vectors (1 or 2) vectors of queries from `vector` on. */
PF_INLINE void amx_score_unit(const int num_vectors, const int width, const amx_panel *p, int64_t unit,
                              int vector) {
    const pf_prefill_tile *tile = p->tile;
    const char *keys = (const char *)tile->k_tiles + unit * 2 * p->steps * amx_TILE_BYTES;
    const char *queries = (const char *)tile->q + vector * amx_TILE_BYTES;
    amx_zero(0);
    amx_zero(1);
    if (num_vectors == 2) {
        amx_zero(2);
        amx_zero(3);
    }
    for (int64_t step = 0; step < p->steps; step++) {
        amx_load(4, keys + step * amx_TILE_BYTES, 64);
        amx_load(6, queries + step * width * amx_TILE_BYTES, 64);
        amx_load(5, keys + (p->steps + step) * amx_TILE_BYTES, 64);
        amx_dot(0, 4, 6);
        amx_dot(1, 5, 6);
        if (num_vectors == 2) {
            amx_load(7, queries + (step * width + 1) * amx_TILE_BYTES, 64);
            amx_dot(2, 4, 7);
            amx_dot(3, 5, 7);
        }
    }
    float *scores = p->scores + (unit * amx_UNIT * width + vector) * 16;
    amx_store(0, scores, width * 64);
    amx_store(1, scores + 16 * width * 16, width * 64);
    if (num_vectors == 2) {
        amx_store(2, scores + 16, width * 64);
        amx_store(3, scores + 16 * width * 16 + 16, width * 64);
    }
}

/* Keys [lo, hi) of each lane of a vector, as floats; of all lanes in `every`. */
typedef struct amx_limits {
    f32_vec lo, hi;
    int64_t every_lo, every_hi;
} amx_limits;

PF_INLINE amx_limits amx_limits_of(const pf_prefill_tile *tile, int vector) {
    amx_limits limits = {f32_set1((float)tile->first_key), f32_set1((float)tile->num_keys), tile->first_key,
                         tile->num_keys};
    if (!tile->lo)
        return limits;
    float ends[2][16];
    for (int i = 0; i < 16; i++) {
        const int32_t lo = tile->lo[vector * 16 + i], hi = tile->hi[vector * 16 + i];
        ends[0][i] = (float)lo;
        ends[1][i] = (float)hi;
        limits.every_lo = pf_max(limits.every_lo, lo);
        limits.every_hi = pf_min(limits.every_hi, hi);
    }
    limits.lo = f32_load(ends[0]);
    limits.hi = f32_load(ends[1]);
    return limits;
}

/* Weights of a unit against one vector of queries, relative to `m`; their sums join `sum`, and the
 * highest score joins `top`. */
PF_INLINE void amx_weigh_unit(const int masked, const int width, const amx_panel *p, int64_t unit, int vector,
                              const amx_limits *limits, f32_weights weights, f32_vec m, f32_vec *sum,
                              f32_vec *top) {
    const float *scores = p->scores + (unit * amx_UNIT * width + vector) * 16;
    float *pairs = p->weights + (unit * 16 * width + vector) * 16;
    for (int i = 0; i < 16; i++) {
        f32_vec s[2], x[2];
        PF_UNROLL
        for (int k = 0; k < 2; k++) {
            s[k] = f32_load(scores + (2 * i + k) * width * 16);
            if (masked)
                s[k] = f32_keep(s[k], f32_set1((float)(unit * amx_UNIT + 2 * i + k)), limits->lo, limits->hi);
            *top = f32_max(*top, s[k]);
            x[k] = f32_weight(f32_sub(s[k], m), weights);
            *sum = f32_add(*sum, x[k]);
        }
        f32_store(pairs + i * width * 16, amx_round_pairs(x[0], x[1]));
    }
}

PF_INLINE void amx_weigh_vector(const int width, const amx_panel *p, int vector, f32_weights weights,
                                f32_vec m, f32_vec *sum, f32_vec *top) {
    const amx_limits limits = amx_limits_of(p->tile, vector);
    *sum = f32_zero();
    *top = m;
    for (int64_t unit = p->first_unit; unit < p->end_unit; unit++) {
        if (unit * amx_UNIT < limits.every_lo || (unit + 1) * amx_UNIT > limits.every_hi)
            amx_weigh_unit(1, width, p, unit, vector, &limits, weights, m, sum, top);
        else
            amx_weigh_unit(0, width, p, unit, vector, &limits, weights, m, sum, top);
    }
}

/* Columns [column, column + 32) of the weighted values of num_vectors vectors, from zero. */
PF_INLINE void amx_value_columns(const int num_vectors, const int width, const amx_panel *p, int64_t column,
                                 int vector, float *sums) {
    const pf_prefill_tile *tile = p->tile;
    const int64_t units = pf_ceil_div(tile->tile_keys, amx_UNIT);
    const char *values = (const char *)tile->v_tiles + column / 32 * units * 2 * amx_TILE_BYTES;
    amx_zero(0);
    amx_zero(1);
    if (num_vectors == 2) {
        amx_zero(2);
        amx_zero(3);
    }
    for (int64_t unit = p->first_unit; unit < p->end_unit; unit++) {
        const float *pairs = p->weights + (unit * 16 * width + vector) * 16;
        amx_load(4, values + unit * 2 * amx_TILE_BYTES, 64);
        amx_load(6, pairs, width * 64);
        amx_load(5, values + (unit * 2 + 1) * amx_TILE_BYTES, 64);
        amx_dot(0, 4, 6);
        amx_dot(1, 5, 6);
        if (num_vectors == 2) {
            amx_load(7, pairs + 16, width * 64);
            amx_dot(2, 4, 7);
            amx_dot(3, 5, 7);
        }
    }
    amx_store(0, sums, 64);
    amx_store(1, sums + 256, 64);
    if (num_vectors == 2) {
        amx_store(2, sums + 512, 64);
        amx_store(3, sums + 768, 64);
    }
}

/* What value_columns left behind joins the outputs. */
PF_INLINE void amx_fold_columns(const int num_vectors, const int width, const amx_panel *p, int64_t column,
                                int vector, const float *sums, const f32_vec *alpha) {
    const int64_t num_columns = pf_min(p->tile->head_dim_v - column, 32);
    float *o = (float *)p->tile->o + (column * width + vector) * 16;
    for (int64_t c = 0; c < num_columns; c++) {
        PF_UNROLL
        for (int w = 0; w < num_vectors; w++) {
            float *place = o + (c * width + w) * 16;
            f32_store(place, f32_fma(f32_load(place), alpha[vector + w], f32_load(sums + w * 512 + c * 16)));
        }
    }
}

PF_INLINE void amx_fold_block(const int width, const amx_panel *p, int64_t column, int vector,
                              const float *sums, const f32_vec *alpha) {
    if (vector + 2 <= width)
        amx_fold_columns(2, width, p, column, vector, sums, alpha);
    else
        amx_fold_columns(1, width, p, column, vector, sums, alpha);
}

PF_INLINE void amx_body(const int width, const pf_prefill_tile *tile) {
    const int64_t room = pf_round_up(tile->tile_keys, amx_UNIT);
    float *scratch = tile->scores;
    const amx_panel panel = {.tile = tile,
                             .steps = amx_steps(tile->head_dim),
                             .first_unit = tile->first_key / amx_UNIT,
                             .end_unit = pf_ceil_div(tile->num_keys, amx_UNIT),
                             .scores = scratch,
                             .weights = scratch + room * width * 16,
                             .sums = scratch + room * width * 24};
    const f32_weights weights = f32_weights_of(tile->scale_log2);
    const f32_vec headroom = f32_set1((float)(amx_HEADROOM / tile->scale_log2));
    float *m = tile->m, *l = tile->l;
    f32_vec alpha[amx_PANEL];

    for (int64_t unit = panel.first_unit; unit < panel.end_unit; unit++) {
        int w = 0;
        for (; w + 2 <= width; w += 2)
            amx_score_unit(2, width, &panel, unit, w);
        if (w < width)
            amx_score_unit(1, width, &panel, unit, w);
    }
    if (tile->terms) {
        f32_vec highest[8];
        f32_panel_terms(tile, highest);
    }
    for (int w = 0; w < width; w++) {
        f32_vec sum, top, own = f32_load(m + w * 16);
        const f32_vec before = own;
        amx_weigh_vector(width, &panel, w, weights, own, &sum, &top);
        const f32_vec limit = f32_add(own, headroom);
        if (amx_any_above(top, limit)) { /* only the rows concerned move; the others come out the same */
            own = amx_where_above(top, limit, top, own);
            amx_weigh_vector(width, &panel, w, weights, own, &sum, &top);
            f32_store(m + w * 16, own);
        }
        alpha[w] = f32_weight(f32_sub(before, own), weights);
        f32_store(l + w * 16, f32_fma(f32_load(l + w * 16), alpha[w], sum));
    }
    /* A block of sums joins the outputs one block later: what a tile has stored can be read fast only
     * after a while. */
    float *late = panel.sums + 1024, *now = panel.sums;
    int64_t late_column = -1;
    int late_vector = 0;
    for (int64_t column = 0; column < tile->head_dim_v; column += 32)
        for (int w = 0; w < width; w += 2) {
            if (w + 2 <= width)
                amx_value_columns(2, width, &panel, column, w, now);
            else
                amx_value_columns(1, width, &panel, column, w, now);
            if (late_column >= 0)
                amx_fold_block(width, &panel, late_column, late_vector, late, alpha);
            late_column = column;
            late_vector = w;
            float *other = late;
            late = now;
            now = other;
        }
    amx_fold_block(width, &panel, late_column, late_vector, late, alpha);
}

#define PF_INSTANCE_AMX(n)                                                                                   \
    static void amx_prefill_##n(const pf_prefill_tile *tile) {                                               \
        amx_body(n, tile);                                                                                   \
    }
PF_INSTANCE_AMX(1)
PF_INSTANCE_AMX(2)
PF_INSTANCE_AMX(3)
PF_INSTANCE_AMX(4)

static void amx_prefill_tile(const pf_prefill_tile *tile) {
    static void (*const instance[amx_PANEL])(const pf_prefill_tile *tile) = {amx_prefill_1, amx_prefill_2,
                                                                             amx_prefill_3, amx_prefill_4};
    amx_start();
    instance[tile->num_vectors - 1](tile);
    amx_stop();
}

static const pf_matrix_kernels amx_kernels = {
    .panel_vectors = amx_PANEL,
    .tile_keys = amx_TILE_KEYS,
    .unit_keys = amx_UNIT,
    .query_bytes = amx_query_bytes,
    .key_bytes = amx_units_bytes,
    .value_bytes = amx_units_bytes,
    .scratch_bytes = amx_scratch_bytes,
    .pack_queries = amx_pack_queries,
    .pack_keys = amx_pack_keys,
    .pack_values = amx_pack_values,
    .prefill_tile = amx_prefill_tile,
};

#endif
