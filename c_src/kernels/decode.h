/* Tile kernel for few query rows. The head dimension lies along the lanes; each row of K and V is
 * widened in registers and used for up to four query rows before the next is touched. Included once per
 * element type; the stored type is a constant.
 *
 * While it works on one tile it fetches the next, since the hardware's prefetcher loses the stream between
 * two rows: keys while there are scores to compute, values later, so that memory is never idle. They go to
 * the second cache: the first one has too few places for lines on their way to keep memory busy, and no room
 * for a tile. */

/* Rows still to be fetched. */
typedef struct V(fetches) {
    const void *const *row, *const *end;
    int64_t num_bytes;
} V(fetches);

PF_INLINE void V(fetch_row)(V(fetches) * f) {
    if (f->row == f->end)
        return;
    for (int64_t b = 0; b < f->num_bytes; b += 64)
        __builtin_prefetch((const char *)*f->row + b, 0, 2);
    f->row++;
}

/* Sums that stay in registers beside what is loaded. */
enum { V(NUM_SUMS) = V(MICRO_ROWS) * V(PANEL_VECTORS) > 12 ? 16 : 8 };

/* Products of num_keys keys and num_rows rows. Each is one chain of fused operations per lane, then the
 * lanes in a fixed order. */
PF_INLINE void V(dot_rows)(const int num_keys, const int num_rows, const int32_t dtype,
                           const void *const *k_rows, const V(elem) * q, int64_t q_stride, int64_t head_dim,
                           V(vec) sums[][4]) {
    PF_UNROLL
    for (int k = 0; k < num_keys; k++) {
        PF_UNROLL
        for (int r = 0; r < num_rows; r++)
            sums[k][r] = V(zero)();
    }
    const void *rows[4];
    PF_UNROLL
    for (int k = 0; k < num_keys; k++)
        rows[k] = k_rows[k];
    const int64_t whole = head_dim - head_dim % V(LANES);
    for (int64_t d = 0; d < whole; d += V(LANES)) {
        V(vec) keys[4];
        PF_UNROLL
        for (int k = 0; k < num_keys; k++)
            keys[k] = V(load_as)(rows[k], d, dtype);
        PF_UNROLL
        for (int r = 0; r < num_rows; r++) {
            V(vec) x = V(load)(q + r * q_stride + d);
            if (num_keys == 2) /* with four, registers are few */
                PF_IN_REGISTER(x);
            PF_UNROLL
            for (int k = 0; k < num_keys; k++)
                sums[k][r] = V(fma)(keys[k], x, sums[k][r]);
        }
    }
    if (whole < head_dim) {
        PF_UNROLL
        for (int k = 0; k < num_keys; k++) {
            const V(vec) x = V(load_partial)(rows[k], whole, head_dim - whole, dtype);
            PF_UNROLL
            for (int r = 0; r < num_rows; r++)
                sums[k][r] = V(fma)(x, V(load)(q + r * q_stride + whole), sums[k][r]);
        }
    }
}

/* Scores of four keys: all sums at once, or two keys at a time where registers are few. */
PF_INLINE void V(score_four)(const int num_rows, const int32_t dtype, const void *const *k_rows,
                             const V(elem) * q, int64_t q_stride, int64_t head_dim, V(elem) * scores,
                             int64_t scores_stride) {
    V(vec) sums[4][4], pairs[4];
    const int at_once = 4 * num_rows <= V(NUM_SUMS) ? 4 : 2;
    V(dot_rows)(at_once, num_rows, dtype, k_rows, q, q_stride, head_dim, sums);
    PF_UNROLL
    for (int r = 0; r < num_rows; r++)
        pairs[r] = V(add_pairs)(sums[0][r], sums[1][r]);
    if (at_once == 2)
        V(dot_rows)(2, num_rows, dtype, k_rows + 2, q, q_stride, head_dim, &sums[2]);
    PF_UNROLL
    for (int r = 0; r < num_rows; r++)
        V(reduce_pairs)(scores + r * scores_stride, pairs[r], V(add_pairs)(sums[2][r], sums[3][r]));
}

/* Scores of all keys, in steps of four: behind the last key they become rubbish. Four keys stay in the first
 * cache for all rows. */
PF_INLINE void V(score_block)(const int32_t dtype, const pf_decode_block *block) {
    const int64_t q_stride = block->q_stride, stride = block->scores_stride, head_dim = block->head_dim;
    const int num_rows = block->num_rows, num_keys = block->key_hi - block->key_lo;
    V(fetches) fetches = {block->k_next, block->k_next + block->num_next, pf_row_bytes(dtype, head_dim)};
    const int at_a_step = (int)pf_ceil_div(block->num_next, pf_ceil_div(num_keys, 4));
    for (int key = 0; key < num_keys; key += 4) {
        const V(elem) *q = block->q;
        V(elem) *scores = (V(elem) *)block->scores + block->key_lo + key;
        const void *rows[4];
        PF_UNROLL
        for (int k = 0; k < 4; k++)
            rows[k] = block->k_rows[key + k < num_keys ? key + k : num_keys - 1];
        for (int i = 0; i < at_a_step; i++)
            V(fetch_row)(&fetches);
        int row = 0;
        for (; row + 4 <= num_rows; row += 4, q += 4 * q_stride, scores += 4 * stride)
            V(score_four)(4, dtype, rows, q, q_stride, head_dim, scores, stride);
        if (row + 2 <= num_rows) {
            V(score_four)(2, dtype, rows, q, q_stride, head_dim, scores, stride);
            row += 2, q += 2 * q_stride, scores += 2 * stride;
        }
        if (row < num_rows)
            V(score_four)(1, dtype, rows, q, q_stride, head_dim, scores, stride);
    }
}

static void V(multiply)(V(elem) * x, const V(elem) * factors, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        x[i] *= factors[i];
}

/* Some scores of one row become weights; adds them, vector by vector, to its sum. */
PF_INLINE V(vec)
    V(weigh_scores)(const int num_vectors, V(elem) * s, V(elem) highest, V(weights) weights, V(vec) sum) {
    V(vec) p[4];
    PF_UNROLL
    for (int i = 0; i < num_vectors; i++)
        p[i] = V(sub)(V(load)(s + i * V(LANES)), V(set1)(highest));
    V(weigh)(num_vectors, p, weights);
    PF_UNROLL
    for (int i = 0; i < num_vectors; i++) {
        V(store)(s + i * V(LANES), p[i]);
        sum = V(add)(sum, p[i]);
    }
    return sum;
}

/* Weights of the block's scores, in place, and the step of the running maximum and sum. */
static void V(decode_weights)(const pf_decode_block *block) {
    const V(weights) weights = V(weights_of)(block->scale_log2);
    const int64_t end = pf_round_up(block->key_hi, V(LANES));
    V(elem) *scores = block->scores, *m = block->m, *l = block->l, *alpha = block->alpha;
    for (int32_t r = 0; r < block->num_rows; r++) {
        V(elem) *s = scores + r * block->scores_stride;
        if (block->k_scale)
            V(multiply)(s + block->key_lo, block->k_scale, block->key_hi - block->key_lo);
        if (block->terms)
            V(row_terms)(block, r, s);
        /* Lanes belong to keys of the block, present or not: a sum does not depend on who asks. */
        const int64_t lo = block->lo ? pf_max(block->lo[r], block->key_lo) : block->key_lo;
        const int64_t hi = block->hi ? pf_min(block->hi[r], block->key_hi) : block->key_hi;
        for (int64_t j = 0; j < pf_min(lo, end); j++)
            s[j] = -(V(elem))__builtin_inff();
        for (int64_t j = pf_max(hi, 0); j < end; j++)
            s[j] = -(V(elem))__builtin_inff();
        V(vec) top = V(set1)(m[r]);
        for (int64_t j = 0; j < end; j += V(LANES))
            top = V(max)(top, V(load)(s + j));
        const V(elem) highest = V(reduce_max)(top);
        alpha[r] = m[r] - highest;
        m[r] = highest;
    }
    for (int32_t r = 0; r < block->num_rows; r += V(LANES)) /* exactly 1 where the maximum stays */
        V(store)(alpha + r, V(weight)(V(load)(alpha + r), weights));
    for (int32_t r = 0; r < block->num_rows; r++) {
        V(elem) *s = scores + r * block->scores_stride;
        V(vec) sum = V(zero)();
        for (int64_t j = 0; j < end; j += 4 * V(LANES)) {
            if (j + 4 * V(LANES) <= end)
                sum = V(weigh_scores)(4, s + j, m[r], weights, sum);
            else
                for (int64_t i = j; i < end; i += V(LANES))
                    sum = V(weigh_scores)(1, s + i, m[r], weights, sum);
        }
        l[r] = l[r] * alpha[r] + V(reduce_add)(sum);
        if (block->v_scale)
            V(multiply)(s + block->key_lo, block->v_scale, block->key_hi - block->key_lo);
    }
}

/* Vectors of columns whose sums, for four rows, stay in registers. */
enum { V(VALUE_VECTORS) = V(NUM_SUMS) / 4 };

/* The block's weighted values in some columns, summed from zero and then joined to the outputs, so that no
 * sum is a chain over all keys. One of the rows to fetch goes with `keys_a_fetch` keys. */
PF_INLINE void V(value_columns_of)(const int num_rows, const int num_vectors, const int32_t dtype,
                                   const pf_decode_block *block, int64_t row, int64_t column,
                                   int64_t keys_a_fetch, V(fetches) * fetches) {
    const int64_t stride = block->scores_stride, o_stride = block->o_stride;
    const V(elem) *weights = (const V(elem) *)block->scores + row * stride + block->key_lo;
    const int64_t left = block->head_dim_v - column, num_keys = block->key_hi - block->key_lo;
    V(vec) sums[4][4];
    PF_UNROLL
    for (int r = 0; r < num_rows; r++) {
        PF_UNROLL
        for (int w = 0; w < num_vectors; w++)
            sums[r][w] = V(zero)();
    }
    for (int64_t key = 0, at = 0; key < num_keys; key++) {
        const void *value = block->v_rows[key];
        if (key == at) {
            V(fetch_row)(fetches);
            at += keys_a_fetch;
        }
        V(vec) x[4];
        PF_UNROLL
        for (int w = 0; w < num_vectors; w++)
            x[w] = num_vectors == 1 && left < V(LANES) ? V(load_partial)(value, column, left, dtype)
                                                       : V(load_as)(value, column + w * V(LANES), dtype);
        PF_UNROLL
        for (int r = 0; r < num_rows; r++) {
            const V(vec) p = V(set1)(weights[r * stride + key]);
            PF_UNROLL
            for (int w = 0; w < num_vectors; w++)
                sums[r][w] = V(fma)(p, x[w], sums[r][w]);
        }
    }
    PF_UNROLL
    for (int r = 0; r < num_rows; r++) {
        const V(vec) alpha = V(set1)(((const V(elem) *)block->alpha)[row + r]);
        V(elem) *o = (V(elem) *)block->o + (row + r) * o_stride + column;
        PF_UNROLL
        for (int w = 0; w < num_vectors; w++)
            V(store)(o + w * V(LANES), V(fma)(V(load)(o + w * V(LANES)), alpha, sums[r][w]));
    }
}

/* Some columns for all rows, between which their lines stay in the first cache. */
PF_INLINE void V(value_rows)(const int num_vectors, const int32_t dtype, const pf_decode_block *block,
                             int64_t column, int64_t keys_a_fetch, V(fetches) * fetches) {
    int64_t row = 0;
    for (; row + 4 <= block->num_rows; row += 4)
        V(value_columns_of)(4, num_vectors, dtype, block, row, column, keys_a_fetch, fetches);
    if (row + 2 <= block->num_rows) {
        V(value_columns_of)(2, num_vectors, dtype, block, row, column, keys_a_fetch, fetches);
        row += 2;
    }
    if (row < block->num_rows)
        V(value_columns_of)(1, num_vectors, dtype, block, row, column, keys_a_fetch, fetches);
}

PF_INLINE void V(value_block)(const int32_t dtype, const pf_decode_block *block) {
    const int64_t width = V(VALUE_VECTORS) * V(LANES), head_dim_v = block->head_dim_v;
    V(fetches) fetches = {block->v_next, block->v_next + block->num_next, pf_row_bytes(dtype, head_dim_v)};
    const int64_t passes = pf_ceil_div(block->num_rows, 4) * pf_ceil_div(head_dim_v, width);
    const int64_t steps = passes * (block->key_hi - block->key_lo);
    const int64_t keys_a_fetch = pf_max(1, steps / pf_max(1, block->num_next));
    int64_t column = 0;
    for (; column + width <= head_dim_v; column += width)
        V(value_rows)(V(VALUE_VECTORS), dtype, block, column, keys_a_fetch, &fetches);
    for (; column < head_dim_v; column += V(LANES))
        V(value_rows)(1, dtype, block, column, keys_a_fetch, &fetches);
}

PF_INLINE void V(decode_body)(const int32_t dtype, const pf_decode_block *block) {
    V(score_block)(dtype, block);
    V(decode_weights)(block);
    V(value_block)(dtype, block);
}
