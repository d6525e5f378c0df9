/* Tile kernel for few query rows. The head dimension lies along the lanes; each row of K and V is
 * read once from memory, widened in registers and used for up to four query rows before the next
 * is touched. Rows are fetched a fixed distance ahead, because the hardware's prefetcher loses the
 * stream between two rows. Included once per element type; the stored type is a constant. */

PF_INLINE void V(prefetch_row)(const void *row, int64_t num_bytes) {
    for (int64_t b = 0; b < num_bytes; b += 64)
        __builtin_prefetch((const char *)row + b, 0, 3);
}

/* Scores of num_keys keys and num_rows rows, eight sums at a time. Each score is one chain of fused
 * operations per lane, then the lanes in a fixed order. */
PF_INLINE void V(dot_rows)(const int num_keys, const int num_rows, const int32_t dtype,
                           const pf_decode_block *block, int64_t key, int64_t row) {
    const V(elem) *q = (const V(elem) *)block->q + row * block->q_stride;
    const void *const *k_rows = block->k_rows + key;
    V(vec) sums[4][4];
    PF_UNROLL
    for (int k = 0; k < num_keys; k++) {
        PF_UNROLL
        for (int r = 0; r < num_rows; r++)
            sums[k][r] = V(zero)();
    }
    const int64_t whole = block->head_dim - block->head_dim % V(LANES);
    for (int64_t d = 0; d < whole; d += V(LANES)) {
        V(vec) keys[4];
        PF_UNROLL
        for (int k = 0; k < num_keys; k++)
            keys[k] = V(load_as)(k_rows[k], d, dtype);
        PF_UNROLL
        for (int r = 0; r < num_rows; r++) {
            const V(vec) x = V(load)(q + r * block->q_stride + d);
            PF_UNROLL
            for (int k = 0; k < num_keys; k++)
                sums[k][r] = V(fma)(keys[k], x, sums[k][r]);
        }
    }
    if (whole < block->head_dim) {
        PF_UNROLL
        for (int k = 0; k < num_keys; k++) {
            const V(vec) x = V(load_partial)(k_rows[k], whole, block->head_dim - whole, dtype);
            PF_UNROLL
            for (int r = 0; r < num_rows; r++)
                sums[k][r] = V(fma)(x, V(load)(q + r * block->q_stride + whole), sums[k][r]);
        }
    }
    V(elem) *scores = (V(elem) *)block->scores + row * block->scores_stride + block->key_lo + key;
    if (num_rows == 4) {
        PF_UNROLL
        for (int k = 0; k < num_keys; k++)
            V(reduce_add4)(scores + k, block->scores_stride, sums[k][0], sums[k][1], sums[k][2], sums[k][3]);
    } else if (num_keys == 4) {
        PF_UNROLL
        for (int r = 0; r < num_rows; r++)
            V(reduce_add4)(scores + r * block->scores_stride, 1, sums[0][r], sums[1][r], sums[2][r],
                           sums[3][r]);
    } else {
        PF_UNROLL
        for (int r = 0; r < num_rows; r++) {
            V(elem) one[4]; /* the same order of lanes as above, for the keys that are left */
            V(reduce_add4)(one, 1, sums[0][r], sums[0][r], sums[0][r], sums[0][r]);
            scores[r * block->scores_stride] = one[0];
        }
    }
}

PF_INLINE void V(score_block)(const int num_rows, const int32_t dtype, const pf_decode_block *block,
                              int64_t row) {
    const int num_keys = block->key_hi - block->key_lo;
    const int step = num_rows == 4 ? 2 : 4;
    const int64_t row_bytes = pf_row_bytes(dtype, block->head_dim),
                  value_bytes = pf_row_bytes(dtype, block->head_dim_v);
    int key = 0;
    for (; key + step <= num_keys; key += step) {
        if (row == 0) {
            PF_UNROLL
            for (int k = 0; k < step; k++)
                if (key + k + PF_ROWS_AHEAD < num_keys + block->num_ahead)
                    V(prefetch_row)(block->k_rows[key + k + PF_ROWS_AHEAD], row_bytes);
            PF_UNROLL
            for (int k = 0; k < step; k++)
                V(prefetch_row)(block->v_rows[key + k], value_bytes);
        }
        V(dot_rows)(step, num_rows, dtype, block, key, row);
    }
    for (; key < num_keys; key++)
        V(dot_rows)(1, num_rows, dtype, block, key, row);
}

static void V(multiply)(V(elem) * x, const V(elem) * factors, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        x[i] *= factors[i];
}

/* Weights of the block's scores, in place, and the step of the running maximum and sum. */
static void V(decode_weights)(const pf_decode_block *block) {
    const V(weights) weights = V(weights_of)(block->scale_log2);
    const int64_t end = pf_round_up(block->key_hi, V(LANES));
    for (int32_t r = 0; r < block->num_rows; r++) {
        V(elem) *s = (V(elem) *)block->scores + r * block->scores_stride;
        V(elem) *m = (V(elem) *)block->m + r, *l = (V(elem) *)block->l + r;
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
        V(vec) top = V(set1)(*m);
        for (int64_t j = 0; j < end; j += V(LANES))
            top = V(max)(top, V(load)(s + j));
        const V(elem) highest = V(reduce_max)(top);
        V(elem) alpha = 1;
        if (!(highest == *m)) /* otherwise the factor is exactly 1 */
            alpha = V(weight1)(*m - highest, weights);
        ((V(elem) *)block->alpha)[r] = alpha;
        *m = highest;
        V(vec) sum = V(zero)();
        for (int64_t j = 0; j < end; j += V(LANES)) {
            const V(vec) p = V(weight)(V(sub)(V(load)(s + j), V(set1)(highest)), weights);
            V(store)(s + j, p);
            sum = V(add)(sum, p);
        }
        *l = *l * alpha + V(reduce_add)(sum);
        if (block->v_scale)
            V(multiply)(s + block->key_lo, block->v_scale, block->key_hi - block->key_lo);
    }
}

/* Vectors of columns whose sums, for four rows, stay in registers. */
enum { V(VALUE_VECTORS) = V(MICRO_ROWS) * V(PANEL_VECTORS) > 12 ? 4 : 2 };

/* The block's weighted values in some columns, summed from zero and then joined to the outputs, so that no
 * sum is a chain over all keys. The rows of values have been fetched while the scores were computed. */
PF_INLINE void V(value_columns_of)(const int num_rows, const int num_vectors, const int32_t dtype,
                                   const pf_decode_block *block, int64_t row, int64_t column) {
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
    for (int64_t key = 0; key < num_keys; key++) {
        const void *value = block->v_rows[key];
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

PF_INLINE void V(value_block)(const int num_rows, const int32_t dtype, const pf_decode_block *block,
                              int64_t row) {
    int64_t column = 0;
    for (; column + V(VALUE_VECTORS) * V(LANES) <= block->head_dim_v; column += V(VALUE_VECTORS) * V(LANES))
        V(value_columns_of)(num_rows, V(VALUE_VECTORS), dtype, block, row, column);
    for (; column < block->head_dim_v; column += V(LANES))
        V(value_columns_of)(num_rows, 1, dtype, block, row, column);
}

PF_INLINE void V(decode_body)(const int32_t dtype, const pf_decode_block *block) {
    const int32_t n = block->num_rows;
    int32_t row = 0;
    for (; row + 4 <= n; row += 4)
        V(score_block)(4, dtype, block, row);
    if (row + 2 <= n) {
        V(score_block)(2, dtype, block, row);
        row += 2;
    }
    if (row < n)
        V(score_block)(1, dtype, block, row);
    V(decode_weights)(block);
    for (row = 0; row + 4 <= n; row += 4)
        V(value_block)(4, dtype, block, row);
    if (row + 2 <= n) {
        V(value_block)(2, dtype, block, row);
        row += 2;
    }
    if (row < n)
        V(value_block)(1, dtype, block, row);
}
