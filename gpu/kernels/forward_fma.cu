/* Prefill on the ordinary arithmetic units, in float32 or float64: every type, every option, widths up to
 * 256.
 *
 * A block has PF_ROWS query rows and walks over tiles of PF_KEYS keys. Keys and values lie in shared memory
 * as they lie in their arrays, a row a key: along head_dim for scores, along head_dim_v for outputs a thread
 * reads 16 bytes at a time and needs no transposed copy. A warp has 2 * PF_THREAD_ROWS rows and all keys of a
 * tile: lane 16 g + c has rows g * PF_THREAD_ROWS + r, scores of keys c + 16 j, and outputs of c's columns.
 * So row maxima are found inside a half warp, weights go through shared memory that is the warp's own, and
 * the block waits for itself once a tile, which has come while the one before was worked on; where there is
 * room for one tile only, twice: then keys come while values are multiplied, values while scores are.
 *
 * Tiles begin at multiples of PF_KEYS from key 0, and the sums of a tile begin at zero: bits depend on
 * positions, and there is no chain of additions over all keys. */
#include "forward_fma_tile.cuh"

/* --- the state --- */

/* Of a thread's rows. m is the same in the lanes of a row, l is the sum over the lane's own keys. Where
 * PF_FOLD, m is a maximum of products, before any scale: the weight of the largest is 1 exactly. */
struct pf_rows {
    pf_real m[PF_THREAD_ROWS], l[PF_THREAD_ROWS];
    pf_real o[PF_THREAD_ROWS][PF_THREAD_DIMS];
};

PF_DEVICE pf_real pf_max_of_row(pf_real x) {
#pragma unroll
    for (int step = 16; step >= PF_GROUPS; step /= 2)
        x = pf_max_of(x, __shfl_xor_sync(PF_WARP_ALL, x, step));
    return x;
}

PF_DEVICE pf_real pf_sum_of_row(pf_real x) {
#pragma unroll
    for (int step = 16; step >= PF_GROUPS; step /= 2)
        x += __shfl_xor_sync(PF_WARP_ALL, x, step);
    return x;
}

/* The factor of scores where PF_FOLD; never 0, since 0 * -inf is NaN. */
PF_DEVICE pf_real pf_folded_scale(const pf_call &call) {
    return pf_max_of((pf_real)(call.scale * PF_LOG2_E), (pf_real)1.401298464e-45);
}

/* Scores to weights; m and l move on. `alpha` is what the old sums are multiplied by. Rows with a bit in
 * `seen` see a key of this tile; scores of hidden keys are -inf. */
PF_DEVICE void pf_weigh(const pf_call &call, unsigned seen, pf_rows &rows, pf_real (&alpha)[PF_THREAD_ROWS],
                        pf_real (&scores)[PF_THREAD_ROWS][PF_THREAD_KEYS]) {
    const pf_real factor = PF_FOLD ? pf_folded_scale(call) : (pf_real)1;
#pragma unroll
    for (int r = 0; r < PF_THREAD_ROWS; r++) {
        pf_real top = scores[r][0];
#pragma unroll
        for (int j = 1; j < PF_THREAD_KEYS; j++)
            top = pf_max_of(top, scores[r][j]);
        const pf_real floor = seen >> r & 1 ? pf_lowest<pf_real>() : -(pf_real)pf_infinity();
        top = pf_max_of(rows.m[r], pf_max_of_row(pf_max_of(top, floor)));
        const pf_real m = pf_floored(top);
        pf_real sum = 0;
        if (PF_FOLD)
            alpha[r] = pf_exp2((pf_floored(rows.m[r]) - m) * factor);
        else
            alpha[r] = pf_rescaling(rows.m[r], top);
#pragma unroll
        for (int j = 0; j < PF_THREAD_KEYS; j++) {
            scores[r][j] = PF_FOLD ? pf_exp2((scores[r][j] - m) * factor) : pf_weight(scores[r][j] - m);
            sum += scores[r][j];
        }
        rows.m[r] = top;
        rows.l[r] = fma(rows.l[r], alpha[r], sum);
    }
}

/* Products to final scores, those of hidden keys to -inf. Returns which rows see a key. */
PF_DEVICE unsigned pf_finish_scores(const pf_call &call, const pf_sequence &s, int64_t head,
                                    int64_t first_row, int last_row, int row, int first_key,
                                    const pf_span32 *spans, pf_span32 same,
                                    pf_real (&scores)[PF_THREAD_ROWS][PF_THREAD_KEYS]) {
    unsigned rows_seen = 0;
#pragma unroll
    for (int r = 0; r < PF_THREAD_ROWS; r++) {
        const pf_span32 span = PF_SPANS ? spans[row + r] : same;
        /* Rows past the last one are like the last one. */
        const pf_query q = pf_get_query(call, s, head, first_row + min(row + r, last_row));
#pragma unroll
        for (int j = 0; j < PF_THREAD_KEYS; j++) {
            const int key = first_key + j * PF_COLUMNS;
            bool seen = key >= span.lo && key < span.hi;
            if (PF_HIDES && seen)
                seen = !pf_is_hidden(call, s, q, key);
            if (!seen)
                scores[r][j] = -(pf_real)pf_infinity();
            else if (!PF_FOLD)
                scores[r][j] = pf_final_score(call, s, q, key, scores[r][j]);
            rows_seen |= (unsigned)seen << r;
        }
    }
    return rows_seen;
}

/* --- the end --- */

template <int TYPE> PF_DEVICE void pf_store_vector(char *to, const pf_vector<PF_DIM_VEC> &x) {
    if constexpr (TYPE == PF_F32 || TYPE == PF_F64) {
        if constexpr ((sizeof(pf_real) == 8) == (TYPE == PF_F64))
            *(pf_vector<PF_DIM_VEC> *)to = x;
        else
#pragma unroll
            for (int e = 0; e < PF_DIM_VEC; e++)
                pf_set_element(to, TYPE, e, x.x[e]);
    } else {
#pragma unroll
        for (int e = 0; e < PF_DIM_VEC; e += 2) {
            const float low = (float)x.x[e], high = (float)x.x[e + 1];
            ((uint32_t *)to)[e / 2] = TYPE == PF_F16
                                          ? (uint32_t)pf_to_f16(low) | (uint32_t)pf_to_f16(high) << 16
                                          : (uint32_t)pf_to_bf16(low) | (uint32_t)pf_to_bf16(high) << 16;
        }
    }
}

/* A maximum in natural units; of rows that saw no key it stays -inf, whatever the scale. */
PF_DEVICE double pf_natural(const pf_call &call, pf_real m) {
    return PF_FOLD && m >= pf_lowest<pf_real>() ? (double)m * call.scale : (double)m;
}

/* Each of the first lanes of a row group takes a row: what is done once a row is done by one lane. */
PF_DEVICE void pf_share_rows(const pf_rows &rows, int column, pf_real *m, pf_real *l) {
    *m = -(pf_real)pf_infinity();
    *l = 0;
#pragma unroll
    for (int r = 0; r < PF_THREAD_ROWS; r++) {
        const pf_real sum = pf_sum_of_row(rows.l[r]);
        if (column == r) {
            *m = rows.m[r];
            *l = sum;
        }
    }
}

/* Writes rows that came out finite; returns bits of the others. */
PF_DEVICE unsigned pf_store_rows(const pf_call &call, const pf_sequence &s, int64_t head, int64_t first_row,
                                 int num_rows, int row, int column, pf_rows &rows) {
    const int group = threadIdx.x % PF_GROUPS;
    pf_real m, l;
    pf_share_rows(rows, column, &m, &l);
    const pf_real my_factor =
        (pf_real)pf_output_factor(pf_natural(call, m), (double)l, pf_sink_of(call, head));
    unsigned broken = 0;
#pragma unroll
    for (int r = 0; r < PF_THREAD_ROWS; r++) {
        const pf_real factor = __shfl_sync(PF_WARP_ALL, my_factor, PF_GROUPS * r + threadIdx.x % PF_GROUPS);
        bool finite = true;
#pragma unroll
        for (int c = 0; c < PF_THREAD_DIMS; c++) {
            const int d = c / PF_DIM_VEC * PF_DIM_VEC * PF_COLUMNS + column * PF_DIM_VEC + c % PF_DIM_VEC;
            rows.o[r][c] = pf_finished(rows.o[r][c], factor);
            finite &= d >= call.head_dim_v || pf_is_finite(rows.o[r][c]);
        }
        const unsigned votes = __ballot_sync(PF_WARP_ALL, !finite) & 0x55555555u << group;
        if (row + r >= num_rows)
            continue;
        if (votes) {
            broken |= 1u << r;
            continue;
        }
        char *out = pf_place(call.out, pf_query_offset(call.out, s, head, first_row + row + r));
#pragma unroll
        for (int c = 0; c < PF_THREAD_DIMS; c += PF_DIM_VEC) {
            const int d = c * PF_COLUMNS + column * PF_DIM_VEC;
            pf_vector<PF_DIM_VEC> x;
#pragma unroll
            for (int e = 0; e < PF_DIM_VEC; e++)
                x.x[e] = rows.o[r][c + e];
            if constexpr (PF_VECTOR) {
                if (d < call.head_dim_v)
                    pf_store_vector<PF_OUT_TYPE>(out + d * pf_dtype_size(PF_OUT_TYPE), x);
            } else {
#pragma unroll
                for (int e = 0; e < PF_DIM_VEC; e++)
                    if (d + e < call.head_dim_v)
                        pf_set_element(out, PF_OUT_TYPE, (d + e) * call.out.stride_dim, x.x[e]);
            }
        }
    }
    if (column < PF_THREAD_ROWS && row + column < num_rows && !(broken >> column & 1))
        pf_store_lse(call, s, head, first_row + row + column, pf_natural(call, m), (double)l);
    return broken;
}

/* The states of a split, in natural units. */
PF_DEVICE void pf_store_states(const pf_call &call, const pf_sequence &s, int64_t head, int64_t split,
                               int64_t first_row, int num_rows, int row, int column, const pf_rows &rows) {
    pf_real m, l, my_factor = 1;
    pf_share_rows(rows, column, &m, &l);
    if (PF_FOLD && m > pf_lowest<pf_real>()) { /* what rounding takes from m goes to l and o */
        const double natural = pf_natural(call, m);
        m = pf_narrow(natural);
        my_factor = (pf_real)exp(natural - (double)m);
    }
#pragma unroll
    for (int r = 0; r < PF_THREAD_ROWS; r++) {
        const pf_real factor = __shfl_sync(PF_WARP_ALL, my_factor, PF_GROUPS * r + threadIdx.x % PF_GROUPS);
        if (row + r >= num_rows)
            continue;
        pf_real *o = pf_partial_o(call, split, pf_state_row(call, s, head, first_row + row + r));
#pragma unroll
        for (int c = 0; c < PF_THREAD_DIMS; c++) {
            const int d = c / PF_DIM_VEC * PF_DIM_VEC * PF_COLUMNS + column * PF_DIM_VEC + c % PF_DIM_VEC;
            if (d < call.head_dim_v)
                o[d] = rows.o[r][c] * factor;
        }
    }
    if (column < PF_THREAD_ROWS && row + column < num_rows) {
        const int64_t place = pf_state_row(call, s, head, first_row + row + column);
        *pf_partial_m(call, split, place) = m;
        *pf_partial_l(call, split, place) = l * my_factor;
    }
}

/* --- a block of rows --- */

struct pf_tile {
    int side, first;
};

/* From a tile to the next one that a row sees something of; side PF_SIDES: there is none. */
PF_DEVICE void pf_skip(pf_tile &tile, const pf_span32 (&any)[PF_SIDES]) {
#pragma unroll
    for (int side = 0; side < PF_SIDES; side++)
        if (tile.side == side && (tile.first >= any[side].hi || any[side].lo >= any[side].hi)) {
            tile.side++;
            if (tile.side < PF_SIDES)
                tile.first = any[min(side + 1, PF_SIDES - 1)].lo / PF_KEYS * PF_KEYS;
        }
}

PF_DEVICE pf_span32 pf_narrowed(pf_span span, int64_t lo, int64_t hi) {
    span = pf_clip(span, lo, hi);
    return {(int32_t)span.lo, (int32_t)span.hi};
}

PF_DEVICE void pf_forward_rows(const pf_call &call, const pf_sequence &s, int64_t head, int64_t split,
                               int64_t first_row, const pf_shared &shared) {
    const int lane = threadIdx.x % 32, column = lane / PF_GROUPS;
    const int warp_row = threadIdx.x / 32 * PF_WARP_ROWS, row = warp_row + lane % PF_GROUPS * PF_THREAD_ROWS;
    const int num_rows = (int)pf_min(PF_ROWS, s.num_queries - first_row);
    const int64_t kv_head = pf_quotient(head, s.group);
    const bool is_split = call.partial != nullptr;
    pf_span32 keys[PF_SIDES], any[PF_SIDES]; /* those of the split, and what some row sees of them */
#pragma unroll
    for (int side = 0; side < PF_SIDES; side++) {
        const pf_span every = {0, s.mask.num_keys};
        const pf_span seen =
            PF_SPANS ? pf_clip(pf_visible_to_any(&s.mask, first_row, first_row + num_rows - 1, side),
                               every.lo, every.hi)
                     : every;
        const pf_span part = is_split ? pf_split_of(call, s, split, seen, PF_KEYS) : every;
        keys[side] = {(int32_t)part.lo, (int32_t)part.hi};
        any[side] = pf_narrowed(seen, part.lo, part.hi);
    }
    const pf_span32 same = keys[0];
    pf_real *const numbers = shared.numbers;
    /* From a shuffle the compiler takes numbers as they are; it would compute this one anew in inner loops.
     */
    const int place_of_weights = __shfl_sync(PF_WARP_ALL, pf_p_row(row), lane);

    pf_tile tile = {0, any[0].lo / PF_KEYS * PF_KEYS};
    pf_skip(tile, any);
    if (PF_SPANS)
#pragma unroll
        for (int side = 0; side < PF_SIDES; side++)
            for (int i = threadIdx.x; i < PF_ROWS; i += PF_THREADS)
                shared.spans[side * PF_ROWS + i] =
                    pf_narrowed(pf_visible(&s.mask, first_row + min(i, num_rows - 1), side), keys[side].lo,
                                keys[side].hi);
    pf_load_queries(call, s, head, first_row, num_rows, numbers);
    if (PF_TABLE)
        pf_fill_table(call, s, kv_head, tile.first, 0, shared);
    __syncthreads();

    pf_rows rows;
#pragma unroll
    for (int r = 0; r < PF_THREAD_ROWS; r++) {
        rows.m[r] = -(pf_real)pf_infinity();
        rows.l[r] = 0;
#pragma unroll
        for (int c = 0; c < PF_THREAD_DIMS; c++)
            rows.o[r][c] = 0;
    }

    int parity = 0;
    if (tile.side < PF_SIDES) {
        pf_load_keys<0, PF_DIM, PF_K_PITCH>(call, call.k, s, kv_head, tile.first, 0, shared);
        if (PF_STAGES == 2)
            pf_load_keys<1, PF_DIM_V, PF_DIM_V>(call, call.v, s, kv_head, tile.first, 0, shared);
    }
    while (tile.side < PF_SIDES) {
        pf_tile next = {tile.side, tile.first + PF_KEYS};
        pf_skip(next, any);
        const pf_span32 *spans = shared.spans + tile.side * PF_ROWS;
        /* Ends never fall: the first and the last row say what any and what all rows of the warp see. */
        const pf_span32 one = PF_SPANS ? spans[warp_row] : same;
        const pf_span32 other = PF_SPANS ? spans[warp_row + PF_WARP_ROWS - 1] : same;
        const int end = tile.first + PF_KEYS;
        const bool works = one.lo < end && other.hi > tile.first && one.lo < other.hi;
        const bool tests = tile.first < other.lo || end > one.hi;

        if (PF_ASYNC)
            pf_cp_async_wait<0>();
        __syncthreads(); /* this tile has come, and nobody reads the last one any more */
        if (PF_TABLE && next.side < PF_SIDES)
            pf_fill_table(call, s, kv_head, next.first, parity ^ 1, shared);
        if (PF_STAGES == 1)
            pf_load_keys<1, PF_DIM_V, PF_DIM_V>(call, call.v, s, kv_head, tile.first, parity, shared);
        else if (next.side < PF_SIDES) {
            if (PF_TABLE)
                __syncthreads();
            pf_load_keys<0, PF_DIM, PF_K_PITCH>(call, call.k, s, kv_head, next.first, parity ^ 1, shared);
            pf_load_keys<1, PF_DIM_V, PF_DIM_V>(call, call.v, s, kv_head, next.first, parity ^ 1, shared);
        }
        const pf_real *const k = numbers + PF_K_PLACE + parity % PF_STAGES * PF_KEYS * PF_K_PITCH;
        const pf_real *const v = numbers + PF_V_PLACE + parity % PF_STAGES * PF_KEYS * PF_DIM_V;
        pf_real scores[PF_THREAD_ROWS][PF_THREAD_KEYS], alpha[PF_THREAD_ROWS];
        if (works) {
            pf_multiply_keys(numbers + pf_q_row(row), k + column * PF_K_PITCH,
                             (int)pf_round_up(call.head_dim, PF_DIM_STEP), scores);
            unsigned seen = ~0u;
            if (PF_HIDES || !PF_FOLD || tests)
                seen = pf_finish_scores(call, s, head, first_row, num_rows - 1, row, tile.first + column,
                                        spans, same, scores);
            pf_weigh(call, seen, rows, alpha, scores);
        }
        if (PF_STAGES == 1) {
            if (PF_ASYNC)
                pf_cp_async_wait<0>();
            __syncthreads(); /* the values have come, and nobody reads the keys any more */
            if (next.side < PF_SIDES)
                pf_load_keys<0, PF_DIM, PF_K_PITCH>(call, call.k, s, kv_head, next.first, parity ^ 1, shared);
        }
        parity ^= 1;
        tile = next;
        if (!works)
            continue;
        pf_real *const p = numbers + place_of_weights;
        pf_real sums[PF_THREAD_ROWS][PF_CHUNK];
#pragma unroll
        for (int chunk = 0; chunk < PF_THREAD_DIMS / PF_CHUNK; chunk++) {
#pragma unroll
            for (int r = 0; r < PF_THREAD_ROWS; r++)
#pragma unroll
                for (int c = 0; c < PF_CHUNK; c++)
                    sums[r][c] = 0;
#pragma unroll
            for (int part = 0; part < PF_PARTS; part++) {
                if (chunk == 0) {
                    __syncwarp(); /* nobody reads the weights of the part before any more */
#pragma unroll
                    for (int r = 0; r < PF_THREAD_ROWS; r++)
#pragma unroll
                        for (int j = 0; j < PF_PART / PF_COLUMNS; j++)
                            p[r * PF_PART + j * PF_COLUMNS + pf_turned(r, column)] =
                                scores[r][part * (PF_PART / PF_COLUMNS) + j];
                    __syncwarp();
                }
                pf_multiply_values(
                    p, v + column * PF_DIM_VEC + chunk * PF_CHUNK * PF_COLUMNS + part * PF_PART * PF_DIM_V,
                    sums);
            }
#pragma unroll
            for (int r = 0; r < PF_THREAD_ROWS; r++)
#pragma unroll
                for (int c = 0; c < PF_CHUNK; c++)
                    rows.o[r][chunk * PF_CHUNK + c] =
                        fma(rows.o[r][chunk * PF_CHUNK + c], alpha[r], sums[r][c]);
        }
    }

    if (is_split) {
        pf_store_states(call, s, head, split, first_row, num_rows, row, column, rows);
        return;
    }
    const unsigned broken = pf_store_rows(call, s, head, first_row, num_rows, row, column, rows);
    if (__any_sync(PF_WARP_ALL, broken))
        for (int i = 0; i < PF_WARP_ROWS; i++)
            if (__shfl_sync(PF_WARP_ALL, broken, i / PF_THREAD_ROWS) >> i % PF_THREAD_ROWS & 1)
                pf_careful_row(call, s, head, first_row + warp_row + i);
}

extern "C" __global__ void __launch_bounds__(PF_THREADS, PF_MIN_BLOCKS)
    pf_forward_fma(const __grid_constant__ pf_call call) {
    PF_DYNAMIC_SHARED(memory);
    const pf_item item =
        pf_get_item_in_sections(call, blockIdx.x, gridDim.x, call.num_heads, call.max_splits);
    __shared__ pf_sequence s; /* in registers it would take the place of sums */
    if (threadIdx.x == 0)
        s = pf_get_sequence(call, item.sequence);
    __syncthreads();
    const int64_t blocks = pf_ceil_div(s.num_queries, PF_ROWS);
    if (item.row_block >= blocks || !pf_is_mine(call, s))
        return;
    if (call.partial && item.split >= pf_num_splits(call, s))
        return;
    const bool bad = pf_find_bad(call, s);
    pf_shared shared;
    shared.numbers = (pf_real *)memory;
    shared.offsets = (int64_t *)(shared.numbers + PF_NUMBERS);
    shared.spans = (pf_span32 *)(shared.offsets + (PF_PAGED ? 4 * PF_KEYS : 0));
    if (PF_PADDED && PF_DIM > call.head_dim)
        pf_clear<PF_DIM, PF_K_PITCH>(shared.numbers + PF_K_PLACE, PF_STAGES * PF_KEYS);
    if (PF_PADDED && PF_DIM_V > call.head_dim_v)
        pf_clear<PF_DIM_V, PF_DIM_V>(shared.numbers + PF_V_PLACE, PF_STAGES * PF_KEYS);
    for (int64_t block = item.row_block; block < blocks; block += call.row_blocks) {
        const int64_t first_row = block * PF_ROWS;
        if (!bad) {
            __syncthreads();
            pf_forward_rows(call, s, item.head, item.split, first_row, shared);
        } else if (!call.partial)
            for (int i = threadIdx.x / 32; i < PF_ROWS && first_row + i < s.num_queries; i += PF_WARPS)
                pf_store_bad_row(call, s, item.head, first_row + i);
    }
}
