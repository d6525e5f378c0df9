/* Statistics of the probabilities of an attention whose log-sum-exp is known, tile by tile: nothing depends
 * on another tile, so memory does not grow with the square of the keys. Sums that go along a row belong to a
 * block that has the row, the mass of a key to one that has the key, in the order of the others: no atomics,
 * the same bits from run to run. The twin of c_src/driver/stats.c. */
#include "stats.cuh"
#include "careful.cuh"

/* The tile of scores of a block; each thread has 4 x 4 of them. */
#ifndef PF_TILE_ROWS
#define PF_TILE_ROWS 64
#endif
enum {
    PF_THREADS = 256,
    PF_TILE_KEYS = 16 * PF_THREADS / PF_TILE_ROWS,
    PF_ROW_THREADS = PF_TILE_ROWS / 4, /* threads along the rows, and along the keys */
    PF_KEY_THREADS = PF_TILE_KEYS / 4,
    PF_DIMS = 16, /* of head_dim, at a time */
};

/* What a block works on. */
struct pf_stats_item {
    pf_sequence s;
    int64_t head, kv_head;
    int64_t border; /* first key on the other side of the sink tokens */
};

/* Where a block keeps its tile, and what is the same for all of its threads: registers are scarce. */
struct pf_tile {
    union {
        struct {
            /* One column more than there are: rows begin in different banks. */
            pf_real q[PF_DIMS][PF_TILE_ROWS + 1], k[PF_DIMS][PF_TILE_KEYS + 1];
        };
        pf_real p[PF_TILE_ROWS][PF_TILE_KEYS + 1]; /* probabilities, below 0 where there is none */
        pf_real row_sums[2][PF_TILE_ROWS][PF_KEY_THREADS];
        double key_sums[PF_ROW_THREADS][PF_TILE_KEYS];
    };
    pf_stats_item item;
    pf_real lse[PF_TILE_ROWS];
    pf_span spans[PF_NUM_SIDES][PF_TILE_ROWS]; /* empty for rows that do not exist */
    pf_query query[PF_TILE_ROWS];
    const char *q_row[PF_TILE_ROWS], *k_row[PF_TILE_KEYS]; /* null where there is none */
    pf_real k_scale[PF_TILE_KEYS];
};
#ifndef PF_SHARED_BYTES
#define PF_SHARED_BYTES 48000
#endif
static_assert(sizeof(pf_tile) <= PF_SHARED_BYTES, "gpu/_operations.py says how much shared memory there is");

PF_DEVICE int pf_row_of_mine(int r) {
    return (int)threadIdx.x / PF_KEY_THREADS * 4 + r;
}

PF_DEVICE int pf_key_of_mine(int c) {
    return (int)threadIdx.x % PF_KEY_THREADS + c * PF_KEY_THREADS;
}

PF_DEVICE void pf_set_item(const pf_stats_call &call, const pf_item &place, pf_stats_item *item) {
    if (threadIdx.x == 0) {
        item->s = pf_get_sequence(call.attention, place.sequence);
        item->head = place.head;
        item->kv_head = pf_quotient(place.head, item->s.group);
        item->border = pf_min(call.attention.sink_tokens, item->s.mask.num_keys);
    }
    __syncthreads();
}

/* Rows from `first` on, of which those before `from` do not count. */
PF_DEVICE void pf_set_rows(const pf_stats_call &call, const pf_stats_item &item, int64_t first, int64_t from,
                           pf_tile *tile) {
    __syncthreads();
    for (int r = threadIdx.x; r < PF_TILE_ROWS; r += PF_THREADS) {
        const int64_t i = first + r;
        const bool exists = i >= from && i < item.s.num_queries;
        tile->q_row[r] = 0;
        for (int side = 0; side < PF_NUM_SIDES; side++)
            tile->spans[side][r] = exists ? pf_visible(&item.s.mask, i, side) : pf_span{0, 0};
        if (!exists)
            continue;
        const pf_call &attention = call.attention;
        tile->q_row[r] = pf_place(attention.q, pf_query_offset(attention.q, item.s, item.head, i));
        tile->query[r] = pf_get_query(attention, item.s, item.head, i);
        tile->lse[r] = pf_narrow(pf_number_at(call.lse, pf_query_offset(call.lse, item.s, item.head, i)));
    }
}

PF_DEVICE void pf_set_keys(const pf_stats_call &call, const pf_stats_item &item, int64_t first,
                           pf_tile *tile) {
    __syncthreads();
    for (int c = threadIdx.x; c < PF_TILE_KEYS; c += PF_THREADS) {
        const bool exists = first + c < item.s.mask.num_keys;
        const pf_call &attention = call.attention;
        tile->k_row[c] =
            exists ? pf_key_row(attention, attention.k, item.s, item.kv_head, first + c) : (const char *)0;
        tile->k_scale[c] =
            exists ? pf_scale_at(attention, attention.k_scale, item.s, item.kv_head, first + c) : (pf_real)0;
    }
}

PF_DEVICE bool pf_overlap(pf_span span, int64_t lo, int64_t hi) {
    return pf_max(span.lo, lo) < pf_min(span.hi, hi);
}

/* Whether one of the rows [first, last] may see one of the keys [lo, hi). */
PF_DEVICE bool pf_may_see(const pf_stats_item &item, int64_t first, int64_t last, int64_t lo, int64_t hi) {
    return pf_overlap(pf_visible_to_any(&item.s.mask, first, last, PF_SINK_KEYS), lo, hi) ||
           pf_overlap(pf_visible_to_any(&item.s.mask, first, last, PF_WINDOW_KEYS), lo, hi);
}

/* Products of the rows and keys that have been set, each from 0 and in the order of its elements. */
PF_DEVICE void pf_multiply(const pf_stats_call &call, pf_tile *tile, pf_real (&product)[4][4]) {
    const pf_tensor &q = call.attention.q, &k = call.attention.k;
    const int64_t head_dim = call.attention.head_dim;
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            product[r][c] = 0;
    for (int64_t first = 0; first < head_dim; first += PF_DIMS) {
        __syncthreads();
        for (int e = threadIdx.x; e < PF_DIMS * PF_TILE_ROWS; e += PF_THREADS) {
            const int d = e % PF_DIMS, r = e / PF_DIMS;
            const bool exists = tile->q_row[r] && first + d < head_dim;
            tile->q[d][r] =
                exists ? pf_element(tile->q_row[r], q.dtype, q.stride_dim, first + d) : (pf_real)0;
        }
        for (int e = threadIdx.x; e < PF_DIMS * PF_TILE_KEYS; e += PF_THREADS) {
            const int d = e % PF_DIMS, c = e / PF_DIMS;
            const bool exists = tile->k_row[c] && first + d < head_dim;
            tile->k[d][c] =
                exists ? pf_element(tile->k_row[c], k.dtype, k.stride_dim, first + d) : (pf_real)0;
        }
        __syncthreads();
#pragma unroll
        for (int d = 0; d < PF_DIMS; d++) {
            pf_real rows[4], keys[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                rows[r] = tile->q[d][pf_row_of_mine(r)];
                keys[r] = tile->k[d][pf_key_of_mine(r)];
            }
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    product[r][c] += rows[r] * keys[c];
        }
    }
    __syncthreads();
}

/* One pair of a row and a key. */
struct pf_pair {
    bool seen;
    pf_real score; /* natural; -inf is a number here */
    pf_real p;     /* 0 where the score is -inf */
    pf_real log;   /* of p; 0 where p is 0 */
};

/* Not inlined: that would be sixteen times, and take the compiler half a minute. */
static __device__ __noinline__ pf_pair pf_get_pair(const pf_stats_call &call, const pf_stats_item &item,
                                                   const pf_tile *tile, int row, int key, int64_t first_key,
                                                   pf_real product) {
    const pf_call &attention = call.attention;
    const int64_t j = first_key + key;
    const pf_span span = tile->spans[j < item.border ? PF_SINK_KEYS : PF_WINDOW_KEYS][row];
    pf_pair pair = {false, 0, 0, 0};
    if (j < span.lo || j >= span.hi || pf_is_hidden(attention, item.s, tile->query[row], j))
        return pair;
    pair.seen = true;
    pair.score = pf_final_score(attention, item.s, tile->query[row], j, product * tile->k_scale[key]);
    if (pair.score == -(pf_real)pf_infinity())
        return pair;
    pair.log = pair.score - tile->lse[row];
    pair.p = pf_weight(pair.log);
    if (pair.p == 0)
        pair.log = 0;
    return pair;
}

/* Whether an entry of a falling list comes before a probability: of equal ones the first stays first, and
 * NaN, to be seen, counts as the largest. */
PF_DEVICE bool pf_comes_first(pf_result entry, int64_t key, pf_result p) {
    return key >= 0 && !(p > entry) && !(p != p && entry == entry);
}

/* The falling list of the largest probabilities of a row, in the memory of the results; a warp works on it.
 */
struct pf_top {
    pf_result *values;
    int64_t *keys;
    int64_t value_stride, key_stride, length;
};

PF_DEVICE pf_top pf_top_of(const pf_stats_call &call, const pf_stats_item &item, int64_t i) {
    const pf_tensor &values = call.top_k_values, &keys = call.top_k_indices;
    pf_top top;
    top.values = (pf_result *)values.data + pf_query_offset(values, item.s, item.head, i);
    top.keys = (int64_t *)keys.data + pf_query_offset(keys, item.s, item.head, i);
    top.value_stride = values.stride_dim;
    top.key_stride = keys.stride_dim;
    top.length = call.top_k;
    return top;
}

PF_DEVICE void pf_clear_top(const pf_top &top, pf_result value) {
    for (int64_t n = threadIdx.x % 32; n < top.length; n += 32) {
        top.values[n * top.value_stride] = value;
        top.keys[n * top.key_stride] = -1;
    }
    __syncwarp();
}

PF_DEVICE bool pf_enters(const pf_top &top, pf_result p) {
    const int64_t last = top.length - 1;
    return !pf_comes_first(top.values[last * top.value_stride], top.keys[last * top.key_stride], p);
}

static __device__ __noinline__ void pf_insert(const pf_top &top, pf_result p, int64_t key) {
    const int lane = threadIdx.x % 32;
    int64_t place = 0;
    for (int64_t n = lane;; n += 32) {
        const bool before = n < top.length &&
                            pf_comes_first(top.values[n * top.value_stride], top.keys[n * top.key_stride], p);
        const unsigned all = __ballot_sync(PF_WARP_ALL, before);
        place += __popc(all);
        if (all != PF_WARP_ALL)
            break;
    }
    if (place >= top.length)
        return;
    for (int64_t end = top.length - 1; end > place; end -= 32) {
        const int64_t n = end - lane;
        const bool moves = n > place;
        const pf_result value = moves ? top.values[(n - 1) * top.value_stride] : (pf_result)0;
        const int64_t moved = moves ? top.keys[(n - 1) * top.key_stride] : 0;
        __syncwarp();
        if (moves) {
            top.values[n * top.value_stride] = value;
            top.keys[n * top.key_stride] = moved;
        }
        __syncwarp();
    }
    if (lane == 0) {
        top.values[place * top.value_stride] = p;
        top.keys[place * top.key_stride] = key;
    }
    __syncwarp();
}

/* Largest probabilities and chosen rows, from the tile in shared memory; a warp has every eighth row. */
PF_DEVICE void pf_take_rows(const pf_stats_call &call, const pf_stats_item &item, const pf_tile *tile,
                            int64_t first_row, int64_t first_key) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = PF_THREADS / 32;
    for (int r = warp; call.top_k && r < PF_TILE_ROWS && tile->q_row[r]; r += warps) {
        const pf_top top = pf_top_of(call, item, first_row + r);
        for (int c = 0; c < PF_TILE_KEYS; c += 32) {
            const pf_result p = (pf_result)tile->p[r][c + lane];
            for (unsigned left = __ballot_sync(PF_WARP_ALL, !(p < 0) && pf_enters(top, p)); left;
                 left &= left - 1) {
                const int source = __ffs((int)left) - 1;
                pf_insert(top, __shfl_sync(PF_WARP_ALL, p, source), first_key + c + source);
            }
        }
    }
    const pf_tensor &out = call.row_probabilities;
    for (int64_t first = warp * 32; first < call.num_rows; first += PF_THREADS) {
        const int64_t mine = first + lane < call.num_rows ? pf_index_at(call.rows, first + lane) : -1;
        const bool here =
            mine >= first_row && mine < first_row + PF_TILE_ROWS && tile->q_row[mine - first_row];
        for (unsigned left = __ballot_sync(PF_WARP_ALL, here); left; left &= left - 1) {
            const int source = __ffs((int)left) - 1;
            const int r = (int)(__shfl_sync(PF_WARP_ALL, mine, source) - first_row);
            pf_result *place = (pf_result *)out.data + item.s.index * out.stride_batch +
                               (first + source) * out.stride_token + item.head * out.stride_head;
            for (int c = lane; c < PF_TILE_KEYS; c += 32) {
                const pf_result p = (pf_result)tile->p[r][c];
                if (first_key + c < pf_min(item.s.mask.num_keys, call.num_keys))
                    place[(first_key + c) * out.stride_dim] = p < 0 ? (pf_result)0 : p;
            }
        }
    }
}

/* Whether one of the rows of a tile has been chosen. */
PF_DEVICE bool pf_has_chosen(const pf_stats_call &call, int64_t first_row) {
    bool here = false;
    for (int64_t n = threadIdx.x; n < call.num_rows; n += PF_THREADS) {
        const int64_t row = pf_index_at(call.rows, n);
        here |= row >= first_row && row < first_row + PF_TILE_ROWS;
    }
    return __syncthreads_or(here);
}

/* Largest score, NaN if there is one, and entropy of each row. */
PF_DEVICE void pf_store_row_sums(const pf_stats_call &call, const pf_stats_item &item, int64_t first_row,
                                 const pf_real (&highest)[4], const pf_real (&entropy)[4], pf_tile *tile) {
    __syncthreads();
    for (int r = 0; r < 4; r++) {
        tile->row_sums[0][pf_row_of_mine(r)][threadIdx.x % PF_KEY_THREADS] = highest[r];
        tile->row_sums[1][pf_row_of_mine(r)][threadIdx.x % PF_KEY_THREADS] = entropy[r];
    }
    __syncthreads();
    for (int r = threadIdx.x; r < PF_TILE_ROWS; r += PF_THREADS) {
        if (!tile->q_row[r])
            continue;
        pf_real top = -(pf_real)pf_infinity(), sum = 0;
        for (int n = 0; n < PF_KEY_THREADS; n++) {
            const pf_real one = tile->row_sums[0][r][n];
            top = one > top || one != one ? one : top;
            sum += tile->row_sums[1][r][n];
        }
        const int64_t i = first_row + r;
        if (call.max_logit.data)
            ((pf_result *)call.max_logit.data)[pf_query_offset(call.max_logit, item.s, item.head, i)] =
                (pf_result)top;
        if (call.entropy.data)
            ((pf_result *)call.entropy.data)[pf_query_offset(call.entropy, item.s, item.head, i)] =
                (pf_result)sum;
    }
}

/* The results of rows [first_row, first_row + PF_TILE_ROWS) of a sequence whose indices cannot be: NaN. */
PF_DEVICE void pf_store_bad_rows(const pf_stats_call &call, const pf_stats_item &item, int64_t first_row,
                                 pf_tile *tile) {
    const pf_result nan = (pf_result)pf_nan();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int r = warp; r < PF_TILE_ROWS && first_row + r < item.s.num_queries; r += PF_THREADS / 32) {
        const int64_t i = first_row + r;
        if (lane == 0 && call.max_logit.data)
            ((pf_result *)call.max_logit.data)[pf_query_offset(call.max_logit, item.s, item.head, i)] = nan;
        if (lane == 0 && call.entropy.data)
            ((pf_result *)call.entropy.data)[pf_query_offset(call.entropy, item.s, item.head, i)] = nan;
        if (call.top_k)
            pf_clear_top(pf_top_of(call, item, i), nan);
    }
    const pf_tensor &out = call.row_probabilities;
    for (int64_t n = 0; n < call.num_rows; n++) {
        const int64_t row = pf_index_at(call.rows, n);
        if (row < first_row || row >= pf_min(first_row + PF_TILE_ROWS, item.s.num_queries))
            continue;
        pf_result *place = (pf_result *)out.data + item.s.index * out.stride_batch + n * out.stride_token +
                           item.head * out.stride_head;
        for (int64_t j = threadIdx.x; j < call.num_keys; j += PF_THREADS)
            place[j * out.stride_dim] = nan;
    }
}

/* What is asked about rows; a block has PF_TILE_ROWS of them of one head at a time. */
extern "C" __global__ void __launch_bounds__(256, 1)
    pf_stats_rows(const __grid_constant__ pf_stats_call call) {
    PF_DYNAMIC_SHARED(memory);
    pf_tile *tile = (pf_tile *)memory;
    const pf_item place = pf_get_item(call.attention, call.attention.num_heads, 1);
    const pf_stats_item &item = tile->item;
    pf_set_item(call, place, &tile->item);
    const bool bad = pf_find_bad(call.attention, item.s);
    const bool all_rows = call.top_k || call.max_logit.data || call.entropy.data;
    const bool shares_tile = call.top_k || call.num_rows;
    const int64_t num_keys = item.s.mask.num_keys, step = call.attention.row_blocks * PF_TILE_ROWS;
    for (int64_t i = place.row_block * PF_TILE_ROWS; i < item.s.num_queries; i += step) {
        if (bad) {
            pf_store_bad_rows(call, item, i, tile);
            continue;
        }
        if (!all_rows && !pf_has_chosen(call, i))
            continue;
        const int64_t last = pf_min(i + PF_TILE_ROWS, item.s.num_queries) - 1;
        pf_set_rows(call, item, i, i, tile);
        for (int r = threadIdx.x / 32; call.top_k && i + r <= last && r < PF_TILE_ROWS; r += PF_THREADS / 32)
            pf_clear_top(pf_top_of(call, item, i + r), 0);
        const pf_real none = -(pf_real)pf_infinity();
        pf_real highest[4] = {none, none, none, none}, entropy[4] = {0, 0, 0, 0};
        for (int64_t j = 0; j < num_keys; j += PF_TILE_KEYS) {
            if (!pf_may_see(item, i, last, j, pf_min(j + PF_TILE_KEYS, num_keys)))
                continue;
            pf_real product[4][4];
            pf_set_keys(call, item, j, tile);
            pf_multiply(call, tile, product);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                pf_real sum = 0;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int row = pf_row_of_mine(r), key = pf_key_of_mine(c);
                    const pf_pair pair = pf_get_pair(call, item, tile, row, key, j, product[r][c]);
                    if (pair.seen && (pair.score > highest[r] || pair.score != pair.score))
                        highest[r] = pair.score;
                    sum -= pair.p * pair.log;
                    if (shares_tile) /* a key with a score of -inf is not one of the largest */
                        tile->p[row][key] = pair.seen && pair.score != none ? pair.p : (pf_real)-1;
                }
                entropy[r] += sum;
            }
            if (shares_tile) {
                __syncthreads();
                pf_take_rows(call, item, tile, i, j);
            }
        }
        pf_store_row_sums(call, item, i, highest, entropy, tile);
    }
}

/* The mass of keys; a block has PF_TILE_KEYS of them of one head at a time. */
extern "C" __global__ void __launch_bounds__(256, 1)
    pf_stats_keys(const __grid_constant__ pf_stats_call call) {
    PF_DYNAMIC_SHARED(memory);
    pf_tile *tile = (pf_tile *)memory;
    const pf_item place = pf_get_item(call.attention, call.attention.num_heads, 1);
    const pf_stats_item &item = tile->item;
    pf_set_item(call, place, &tile->item);
    const bool bad = pf_find_bad(call.attention, item.s);
    const int64_t num_queries = item.s.num_queries;
    const int64_t from = call.last_queries < 0 ? 0 : pf_max(num_queries - call.last_queries, 0);
    const int64_t num_keys = pf_min(bad ? call.num_keys : item.s.mask.num_keys, call.num_keys);
    const pf_tensor &out = call.key_mass;
    pf_result *mass = (pf_result *)out.data + item.s.index * out.stride_batch + item.head * out.stride_head;
    const int64_t step = call.attention.row_blocks * PF_TILE_KEYS;
    for (int64_t j = place.row_block * PF_TILE_KEYS; j < num_keys; j += step) {
        const int64_t end = pf_min(j + PF_TILE_KEYS, num_keys);
        double sums[4] = {0, 0, 0, 0};
        if (!bad)
            pf_set_keys(call, item, j, tile);
        for (int64_t i = from / PF_TILE_ROWS * PF_TILE_ROWS; i < num_queries && !bad; i += PF_TILE_ROWS) {
            const int64_t last = pf_min(i + PF_TILE_ROWS, num_queries) - 1;
            if (!pf_may_see(item, pf_max(i, from), last, j, end))
                continue;
            pf_real product[4][4];
            pf_set_rows(call, item, i, from, tile);
            pf_multiply(call, tile, product);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                pf_real sum = 0;
#pragma unroll
                for (int r = 0; r < 4; r++)
                    sum +=
                        pf_get_pair(call, item, tile, pf_row_of_mine(r), pf_key_of_mine(c), j, product[r][c])
                            .p;
                sums[c] += (double)sum;
            }
        }
        __syncthreads();
        for (int c = 0; c < 4; c++)
            tile->key_sums[threadIdx.x / PF_KEY_THREADS][pf_key_of_mine(c)] = sums[c];
        __syncthreads();
        for (int c = threadIdx.x; c < end - j; c += PF_THREADS) {
            double sum = bad ? (double)pf_nan() : 0;
            for (int n = 0; n < PF_ROW_THREADS; n++)
                sum += tile->key_sums[n][c];
            mass[(j + c) * out.stride_token] = (pf_result)sum;
        }
        __syncthreads();
    }
}
