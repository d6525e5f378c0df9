/* Tile kernel for many query rows. Everything is transposed, S^T = K Q^T and O^T = V^T P^T: query
 * rows lie along the lanes of vectors, so K and V are read by broadcast from where they lie, softmax
 * has no step across lanes, and a mask is a compare with the key's number. Two micro-kernels of one
 * shape (MICRO_ROWS x num_vectors sums in registers) serve both products. Where rows do not all see the same
 * keys, the first vectors of a panel leave out the last keys, of which they see none. Included once per
 * element type. */

/* Whether vectors that see none of a tile's last keys leave them out. Not with six vectors, of which gcc has
 * no register left: where loops of several widths meet in a function it keeps sums on the stack. */
enum { V(LEAVES_OUT) = V(PANEL_VECTORS) <= 3 };

/* What the lanes of a panel see of a tile: its keys [lo, hi); all of them [all_lo, all_hi). Keys from end[i]
 * to end[i + 1] are left out by the first i + 1 vectors. Ends are whole steps of a kernel; the few keys
 * behind end[2], which fill none, are left out by nobody. */
typedef struct V(limits) {
    V(vec) lo[8], hi[8];
    int64_t all_lo, all_hi, end[3];
} V(limits);

PF_INLINE void V(find_limits)(const int num_vectors, const pf_prefill_tile *tile, V(limits) * limits) {
    PF_UNROLL
    for (int w = 0; w < num_vectors; w++) {
        V(elem) ends[2][V(LANES)];
        for (int i = 0; i < V(LANES); i++) {
            ends[0][i] = (V(elem))tile->lo[w * V(LANES) + i];
            ends[1][i] = (V(elem))tile->hi[w * V(LANES) + i];
        }
        limits->lo[w] = V(load)(ends[0]);
        limits->hi[w] = V(load)(ends[1]);
    }
    limits->all_lo = tile->lo[num_vectors * V(LANES) - 1]; /* no end falls from lane to lane */
    limits->all_hi = tile->hi[0];
    limits->end[2] = tile->num_keys / V(MICRO_ROWS) * V(MICRO_ROWS);
    PF_UNROLL
    for (int i = 0; i < 2; i++) {
        limits->end[i] = limits->end[2];
        if (V(LEAVES_OUT) && i + 1 < num_vectors)
            limits->end[i] =
                pf_min(limits->end[2], pf_round_up(tile->hi[(i + 1) * V(LANES) - 1], V(MICRO_ROWS)));
    }
}

/* A step of the chains of num_rows x the vectors [start, num_vectors): adds a row of lanes times the numbers
 * first, first + step, ... of x. What is loaded at once leaves registers for the numbers. */
PF_INLINE void V(add_products)(const int num_rows, const int start, const int num_vectors,
                               const V(numbers) * x, const int first, const int step, const V(elem) * row,
                               V(vec) (*sums)[8]) {
    PF_UNROLL
    for (int w = start; w < num_vectors; w += V(LOADED_VECTORS)) {
        const int n = num_vectors - w < V(LOADED_VECTORS) ? num_vectors - w : V(LOADED_VECTORS);
        V(vec) lanes[8];
        PF_UNROLL
        for (int i = 0; i < n; i++)
            lanes[i] = V(load)(row + (w + i) * V(LANES));
        PF_UNROLL
        for (int r = 0; r < num_rows; r++) {
            const int at = first + r * step;
            const V(number) number = V(pick)(x[at / V(NUMBERS)], at % V(NUMBERS));
            PF_UNROLL
            for (int i = 0; i < n; i++)
                sums[r][w + i] = V(fma_number)(number, lanes[i], sums[r][w + i]);
        }
    }
}

/* num_dims steps of the chains of num_rows scores. */
PF_INLINE void V(score_dims)(const int num_rows, const int start, const int num_vectors, const int num_dims,
                             const V(elem) *const *rows, const V(elem) * q, int64_t d, V(vec) (*sums)[8]) {
    V(numbers) keys[8];
    PF_UNROLL
    for (int r = 0; r < num_rows; r++)
        keys[r] = V(load_numbers)(rows[r] + d, num_dims);
    PF_UNROLL
    for (int i = 0; i < num_dims; i++)
        V(add_products)(num_rows, start, num_vectors, keys, i, V(NUMBERS),
                        q + (d + i) * num_vectors * V(LANES), sums);
}

/* Scores of num_rows keys for the vectors [start, num_vectors); returns their maximum per lane in `top`. Each
 * score is one chain of fused operations in the order of the head dimension, whatever stands beside it. */
PF_INLINE void V(score_rows)(const int num_rows, const int start, const int num_vectors, const int masked,
                             const pf_prefill_tile *tile, int64_t first, const V(vec) * lo, const V(vec) * hi,
                             V(vec) * top) {
    const int64_t width = (int64_t)num_vectors * V(LANES);
    const V(elem) *q = tile->q;
    const V(elem) * rows[8];
    V(vec) sums[8][8];
    PF_UNROLL
    for (int r = 0; r < num_rows; r++) {
        rows[r] = tile->k_rows[first + r];
        PF_UNROLL
        for (int w = start; w < num_vectors; w++)
            sums[r][w] = V(zero)();
    }
    if (V(NUMBERS) > 1 && tile->head_dim % V(NUMBERS) == 0) {
        for (int64_t d = 0; d < tile->head_dim; d += V(NUMBERS))
            V(score_dims)(num_rows, start, num_vectors, V(NUMBERS), rows, q, d, sums);
    } else {
        PF_UNROLL_4
        for (int64_t d = 0; d < tile->head_dim; d++)
            V(score_dims)(num_rows, start, num_vectors, 1, rows, q, d, sums);
    }
    V(elem) *scores = (V(elem) *)tile->scores + first * width;
    PF_UNROLL
    for (int r = 0; r < num_rows; r++) {
        PF_UNROLL
        for (int w = start; w < num_vectors; w++) {
            V(vec) s = sums[r][w];
            if (masked) /* before the maximum: a key that is not seen must not move it */
                s = V(keep)(s, V(set1)((V(elem))(first + r)), lo[w], hi[w]);
            V(store)(scores + r * width + w * V(LANES), s);
            top[w] = V(max)(top[w], s);
        }
    }
}

/* Adds num_columns columns of value j times the weights of the vectors [start, num_vectors). */
PF_INLINE void V(add_value)(const int num_columns, const int start, const int num_vectors,
                            const pf_prefill_tile *tile, int64_t j, int64_t column, V(vec) (*sums)[8]) {
    const V(elem) *weights = tile->scores, *value = (const V(elem) *)tile->v_rows[j] + column;
    V(numbers) x[8];
    PF_UNROLL
    for (int c = 0; c < num_columns; c += V(NUMBERS))
        x[c / V(NUMBERS)] = V(load_numbers)(value + c, num_columns < V(NUMBERS) ? num_columns : V(NUMBERS));
    V(add_products)(num_columns, start, num_vectors, x, 0, 1, weights + j * num_vectors * V(LANES), sums);
    /* Last: before the products it costs gcc a register too many on AVX2. */
    __builtin_prefetch((const V(elem) *)tile->v_rows[j + PF_VALUES_AHEAD] + column);
}

/* Columns [column, column + num_columns) of the output: the tile's keys are summed from zero, then
 * added to the running sums, so that no sum is a chain over all keys. */
PF_INLINE void V(value_columns)(const int num_columns, const int num_vectors, const int masked,
                                const pf_prefill_tile *tile, const V(limits) * limits, int64_t column,
                                const V(vec) * alpha) {
    const int64_t width = (int64_t)num_vectors * V(LANES);
    V(vec) sums[8][8];
    PF_UNROLL
    for (int c = 0; c < num_columns; c++) {
        PF_UNROLL
        for (int w = 0; w < num_vectors; w++)
            sums[c][w] = V(zero)();
    }
    const int64_t end = masked ? limits->end[0] : tile->num_keys;
    PF_UNROLL_4
    for (int64_t j = 0; j < end; j++)
        V(add_value)(num_columns, 0, num_vectors, tile, j, column, sums);
    if (masked) {
        if (V(LEAVES_OUT) && num_vectors > 1)
            for (int64_t j = limits->end[0]; j < limits->end[1]; j++)
                V(add_value)(num_columns, 1, num_vectors, tile, j, column, sums);
        if (V(LEAVES_OUT) && num_vectors > 2)
            for (int64_t j = limits->end[1]; j < limits->end[2]; j++)
                V(add_value)(num_columns, 2, num_vectors, tile, j, column, sums);
        for (int64_t j = limits->end[2]; j < tile->num_keys; j++)
            V(add_value)(num_columns, 0, num_vectors, tile, j, column, sums);
    }
    V(elem) *o = (V(elem) *)tile->o + column * width;
    PF_UNROLL
    for (int c = 0; c < num_columns; c++) {
        PF_UNROLL
        for (int w = 0; w < num_vectors; w++) {
            V(elem) *place = o + c * width + w * V(LANES);
            V(store)(place, V(fma)(V(load)(place), alpha[w], sums[c][w]));
        }
    }
}

/* Raw scores of all keys of a tile, and their maxima joined into `top`. */
PF_INLINE void V(score_keys)(const int num_vectors, const int masked, const pf_prefill_tile *tile,
                             const V(limits) * limits, V(vec) * top) {
    const V(vec) *lo = limits ? limits->lo : 0, *hi = limits ? limits->hi : 0;
    const int64_t end = masked ? limits->end[0] : tile->num_keys;
    int64_t j = 0;
    for (; j + V(MICRO_ROWS) <= end; j += V(MICRO_ROWS)) {
        if (masked && (!V(LEAVES_OUT) || j < limits->all_lo || j + V(MICRO_ROWS) > limits->all_hi))
            V(score_rows)(V(MICRO_ROWS), 0, num_vectors, 1, tile, j, lo, hi, top);
        else
            V(score_rows)(V(MICRO_ROWS), 0, num_vectors, 0, tile, j, lo, hi, top);
    }
    if (masked && V(LEAVES_OUT) && num_vectors > 1)
        for (; j < limits->end[1]; j += V(MICRO_ROWS))
            V(score_rows)(V(MICRO_ROWS), 1, num_vectors, 1, tile, j, lo, hi, top);
    if (masked && V(LEAVES_OUT) && num_vectors > 2 && V(MICRO_ROWS) < 8)
        for (; j + 8 <= limits->end[2]; j += 8) /* as many chains as hide their latency */
            V(score_rows)(8, 2, num_vectors, 1, tile, j, lo, hi, top);
    if (masked && V(LEAVES_OUT) && num_vectors > 2)
        for (; j < limits->end[2]; j += V(MICRO_ROWS))
            V(score_rows)(V(MICRO_ROWS), 2, num_vectors, 1, tile, j, lo, hi, top);
    if (V(MICRO_ROWS) > 4)
        for (; j + 4 <= tile->num_keys; j += 4)
            V(score_rows)(4, 0, num_vectors, masked, tile, j, lo, hi, top);
    for (; j + 2 <= tile->num_keys; j += 2)
        V(score_rows)(2, 0, num_vectors, masked, tile, j, lo, hi, top);
    if (j < tile->num_keys)
        V(score_rows)(1, 0, num_vectors, masked, tile, j, lo, hi, top);
}

/* Not inlined: beside what follows it, gcc runs out of registers for the sums. */
static __attribute__((noinline)) void V(score_all)(const pf_prefill_tile *tile, V(vec) * top) {
    V(score_keys)(V(PANEL_VECTORS), 0, tile, 0, top);
}

static void V(score_tile)(const pf_prefill_tile *tile) {
    V(vec) top[8];
    for (int w = 0; w < 8; w++)
        top[w] = V(zero)();
    V(score_all)(tile, top);
    V(panel_terms)(tile, top);
}

/* Scores of num_keys keys to weights, of the vectors [start, num_vectors); `sums` are added up key by key. */
PF_INLINE void V(weigh_keys)(const int num_keys, const int start, const int num_vectors, V(elem) * scores,
                             const V(vec) * top, V(vec) * sums, V(weights) weights) {
    const int n = num_vectors - start;
    V(vec) t[8];
    PF_UNROLL
    for (int i = 0; i < num_keys * n; i++)
        t[i] = V(sub)(V(load)(scores + (i / n * num_vectors + start + i % n) * V(LANES)), top[start + i % n]);
    V(weigh)(num_keys * n, t, weights);
    PF_UNROLL
    for (int i = 0; i < num_keys * n; i++) {
        V(store)(scores + (i / n * num_vectors + start + i % n) * V(LANES), t[i]);
        sums[start + i % n] = V(add)(sums[start + i % n], t[i]);
    }
}

/* The same for keys [key, end); returns the end. */
PF_INLINE int64_t V(weigh_some)(const int start, const int num_vectors, V(elem) * scores, int64_t key,
                                int64_t end, const V(vec) * top, V(vec) * sums, V(weights) weights) {
    const int64_t width = (int64_t)num_vectors * V(LANES);
    const int together = 6 / (num_vectors - start); /* six chains side by side hide the latency of each */
    for (; key + together <= end; key += together)
        V(weigh_keys)(together, start, num_vectors, scores + key * width, top, sums, weights);
    for (; key < end; key++)
        V(weigh_keys)(1, start, num_vectors, scores + key * width, top, sums, weights);
    return key;
}

PF_INLINE void V(prefill_body)(const int num_vectors, const int masked, const pf_prefill_tile *tile) {
    const V(weights) weights = V(weights_of)(tile->scale_log2);
    V(elem) *m = tile->m, *l = tile->l, *scores = tile->scores;
    V(limits) limits;
    V(vec) top[8], alpha[8];
    PF_UNROLL
    for (int w = 0; w < num_vectors; w++) {
        top[w] = V(load)(m + w * V(LANES));
        alpha[w] = top[w];
    }
    if (masked)
        V(find_limits)(num_vectors, tile, &limits);

    V(score_keys)(num_vectors, masked, tile, &limits, top);
    if (!masked && tile->terms) { /* the maxima so far are those of raw products */
        V(vec) highest[8];
        V(panel_terms)(tile, highest);
        PF_UNROLL
        for (int w = 0; w < num_vectors; w++)
            top[w] = V(max)(alpha[w], highest[w]);
    }

    V(vec) sums[8];
    PF_UNROLL
    for (int w = 0; w < num_vectors; w++) {
        V(store)(m + w * V(LANES), top[w]);
        alpha[w] = V(weight)(V(sub)(alpha[w], top[w]), weights);
        sums[w] = V(zero)();
    }
    int64_t key =
        V(weigh_some)(0, num_vectors, scores, 0, masked ? limits.end[0] : tile->num_keys, top, sums, weights);
    if (masked && V(LEAVES_OUT) && num_vectors > 1)
        key = V(weigh_some)(1, num_vectors, scores, key, limits.end[1], top, sums, weights);
    if (masked && V(LEAVES_OUT) && num_vectors > 2)
        key = V(weigh_some)(2, num_vectors, scores, key, limits.end[2], top, sums, weights);
    for (; masked && key < tile->num_keys; key++)
        V(weigh_keys)(1, 0, num_vectors, scores + key * num_vectors * V(LANES), top, sums, weights);
    PF_UNROLL
    for (int w = 0; w < num_vectors; w++)
        V(store)(l + w * V(LANES), V(fma)(V(load)(l + w * V(LANES)), alpha[w], sums[w]));

    int64_t column = 0;
    for (; column + V(MICRO_ROWS) <= tile->head_dim_v; column += V(MICRO_ROWS))
        V(value_columns)(V(MICRO_ROWS), num_vectors, masked, tile, &limits, column, alpha);
    if (V(MICRO_ROWS) > 4)
        for (; column + 4 <= tile->head_dim_v; column += 4)
            V(value_columns)(4, num_vectors, masked, tile, &limits, column, alpha);
    for (; column + 2 <= tile->head_dim_v; column += 2)
        V(value_columns)(2, num_vectors, masked, tile, &limits, column, alpha);
    if (column < tile->head_dim_v)
        V(value_columns)(1, num_vectors, masked, tile, &limits, column, alpha);
}

#define PF_INSTANCE(n)                                                                                       \
    static void V(prefill_##n)(const pf_prefill_tile *tile) {                                                \
        if (tile->lo && !tile->terms)                                                                        \
            V(prefill_body)(n, 1, tile);                                                                     \
        else                                                                                                 \
            V(prefill_body)(n, 0, tile);                                                                     \
    }
