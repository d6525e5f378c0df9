/* Prefill on the matrix unit: many queries, keys and values of one 16-bit type, softmax in float32.
 *
 * A block has PF_ROWS query rows of one head (or, where PF_PACKED, of the heads that share their keys: rows
 * go query by query, then head of the group) and goes through the keys in tiles of PF_TILE, in ascending
 * order and from borders that are multiples of the tile. Each warp has 16 PF_ROW_TILES rows to itself: their
 * scores, sums and outputs stay in its registers, and nothing but K and V is shared.
 *
 * Where there are score terms or the scale is not positive (PF_FINAL), scores are finished in natural units.
 * Otherwise the maximum is that of the bare products, and scale and log2(e) go into the exponent.
 *
 * A weight of 0 times a value that is no number is no number: rows that come out so are computed again by
 * pf_careful_row, which touches nothing that they may not see. */
#include "careful.cuh"

#if PF_BFLOAT16
#define pf_mma pf_mma_bf16
#define pf_pack pf_pack_bf16
#else
#define pf_mma pf_mma_f16
#define pf_pack pf_pack_f16
#endif

enum {
    PF_THREADS = 32 * PF_WARPS,
    PF_WARP_ROWS = 16 * PF_ROW_TILES,
    PF_ROWS = PF_WARPS * PF_WARP_ROWS,
    /* Tiles in shared memory, in bytes from its begin; finished rows take their place. */
    PF_K_AT = PF_ROWS * PF_HEAD_DIM * 2,
    PF_K_BYTES = PF_TILE * PF_HEAD_DIM * 2,
    PF_V_AT = PF_K_AT + PF_STAGES * PF_K_BYTES,
    PF_V_BYTES = PF_TILE * PF_HEAD_DIM_V * 2,
    PF_V_END = PF_V_AT + PF_STAGES * PF_V_BYTES,
    PF_OUT_BYTES = PF_ROWS * PF_HEAD_DIM_V * 2,
    /* Behind them: the block, spans of its rows, places of keys and values, what terms need to know of a row.
     */
    PF_BLOCK_AT = PF_V_END > PF_OUT_BYTES ? PF_V_END : PF_OUT_BYTES,
    PF_BLOCK_BYTES = 384,
    PF_SPANS_AT = PF_BLOCK_AT + PF_BLOCK_BYTES,
    PF_PLACES_AT = PF_SPANS_AT + PF_NUM_SIDES * PF_ROWS * 8,
    PF_QUERIES_AT = PF_PLACES_AT + (PF_PAGED ? 2 * 2 * PF_TILE * 8 : 0),
};

/* Final scores need a pass of their own. */
#define PF_FINAL ((PF_TERMS) != 0 || !PF_POSITIVE_SCALE)

/* What score terms need to know of a row. */
struct pf_row_terms {
    int64_t position, bias, mask;
    float slope;
    int32_t head;
};

/* Keys or values of one head. */
struct pf_stream {
    const char *data; /* of key 0, unless paged */
    int64_t stride;   /* bytes between keys, unless paged */
    int width;
};

/* What a block works on; in shared memory, since between begin and end registers are needed for sums. */
struct pf_block {
    pf_sequence s;
    int64_t first, num_rows; /* of the rows; those of the sequence */
    int64_t head;            /* of the keys where PF_PACKED */
    int64_t split, kv_head;
    pf_stream keys, values;
    /* Tiles [begin, end) of each side; those in [full_begin, full_end) need no test. */
    int32_t begin[PF_NUM_SIDES], end[PF_NUM_SIDES], full_begin[PF_NUM_SIDES], full_end[PF_NUM_SIDES];
};

PF_DEVICE int64_t pf_query_of(const pf_block &block, int64_t row) {
    return PF_PACKED ? pf_quotient(row, block.s.group) : row;
}

/* The last row stands for those past it. */
PF_DEVICE int64_t pf_row_of(const pf_block &block, int row) {
    return pf_min(block.first + row, block.num_rows - 1);
}

PF_DEVICE int64_t pf_head_of(const pf_block &block, int64_t row) {
    return PF_PACKED ? block.head * block.s.group + (row - pf_quotient(row, block.s.group) * block.s.group)
                     : block.head;
}

/* Byte of 16-byte piece `piece` of a row of a tile in shared memory. The eight rows that the matrix unit
 * reads at a time lie in different banks. */
template <int WIDTH> PF_DEVICE uint32_t pf_swizzled(uint32_t row, uint32_t piece) {
    const uint32_t turn = WIDTH % 64 == 0 ? row % 8 : row / 2 % 4;
    return row * (WIDTH * 2) + ((piece ^ turn) * 16);
}

/* The same for piece 2 step + piece, from the place of piece 0 or 1: by one exclusive or. */
template <int WIDTH> PF_DEVICE uint32_t pf_at_step(uint32_t place, int step) {
    const int span = WIDTH % 64 == 0 ? 128 : 64;
    return (place ^ (step * 32 % span)) + step * 32 / span * span;
}

/* How threads share the rows of a tile: LANES of them read a row, REPEAT pieces each. */
template <int WIDTH> struct pf_copy {
    enum {
        PIECES = WIDTH / 8,
        LANES = PIECES % 3 ? PIECES : PIECES / 3,
        REPEAT = PIECES / LANES,
        ROWS = PF_THREADS / LANES, /* at a time */
    };
};

/* Starts the copy of one row's pieces; the row is zeros where not valid. */
template <int WIDTH>
PF_DEVICE void pf_copy_row(unsigned char *tile, uint32_t row, const char *from, bool valid, int width) {
    typedef pf_copy<WIDTH> copy;
    const uint32_t lane = threadIdx.x % copy::LANES;
#pragma unroll
    for (int r = 0; r < copy::REPEAT; r++) {
        const uint32_t piece = lane + r * copy::LANES;
        pf_cp_async16(tile + pf_swizzled<WIDTH>(row, piece), from + piece * 16,
                      valid && (int)piece * 8 < width);
    }
}

PF_DEVICE pf_stream pf_get_stream(const pf_call &call, const pf_tensor &t, const pf_sequence &s,
                                  int64_t kv_head, int64_t width) {
    pf_stream stream;
    stream.data = PF_PAGED ? (const char *)t.data
                           : pf_place(t, kv_head * t.stride_head + s.kv_batch * t.stride_batch +
                                             s.kv_token * t.stride_token);
    stream.stride = t.stride_token * 2;
    stream.width = (int)width;
    return stream;
}

/* Starts the copy of keys [first, first + PF_TILE); those from num_keys on are zeros. */
template <int WIDTH>
PF_DEVICE void pf_copy_tile(unsigned char *tile, const pf_stream &stream, const int64_t *places, int first,
                            int num_keys) {
    typedef pf_copy<WIDTH> copy;
    const uint32_t row = threadIdx.x / copy::LANES;
    if (!PF_PAGED && WIDTH == stream.width && first + PF_TILE <= num_keys && PF_TILE % copy::ROWS == 0) {
        /* No test in a full tile; a piece stays in its column if rows are eights apart. */
        const char *next =
            stream.data + (first + (int64_t)row) * stream.stride + threadIdx.x % copy::LANES * 16;
        const int64_t step = copy::ROWS * stream.stride;
        unsigned char *to = tile + pf_swizzled<WIDTH>(row, threadIdx.x % copy::LANES);
#pragma unroll
        for (int r = 0; r < PF_TILE / copy::ROWS; r++) {
#pragma unroll
            for (int i = 0; i < copy::REPEAT; i++)
                if (copy::ROWS % 8 == 0 && copy::REPEAT == 1)
                    pf_cp_async16(to + r * copy::ROWS * WIDTH * 2, next, true);
                else
                    pf_cp_async16(tile + pf_swizzled<WIDTH>(row + r * copy::ROWS,
                                                            threadIdx.x % copy::LANES + i * copy::LANES),
                                  next + i * copy::LANES * 16, true);
            next += step;
        }
        return;
    }
    const char *from = PF_PAGED ? stream.data : stream.data + (first + (int64_t)row) * stream.stride;
#pragma unroll
    for (int r = 0; r < (PF_TILE + copy::ROWS - 1) / copy::ROWS; r++) {
        const uint32_t key = row + r * copy::ROWS;
        if (PF_TILE % copy::ROWS && key >= PF_TILE)
            break;
        pf_copy_row<WIDTH>(tile, key, PF_PAGED ? from + places[key] : from, first + (int)key < num_keys,
                           stream.width);
        from += PF_PAGED ? 0 : copy::ROWS * stream.stride;
    }
}

/* Looks up where keys and values of a tile lie in their pools: once for each, by a thread of its own. */
PF_DEVICE void pf_find_places(const pf_call &call, const pf_sequence &s, int64_t kv_head, int64_t *places,
                              int first) {
    for (int i = threadIdx.x; i < 2 * PF_TILE; i += PF_THREADS) {
        const uint32_t key = (uint32_t)(first + i % PF_TILE), page_size = (uint32_t)call.page_size;
        int64_t place = 0;
        if (key < s.mask.num_keys) {
            const int64_t page = pf_page_at(call, s.index, key / page_size);
            const pf_tensor &t = i < PF_TILE ? call.k : call.v;
            place = 2 * (page * t.stride_batch + key % page_size * t.stride_token + kv_head * t.stride_head);
        }
        places[i] = place;
    }
}

/* Places of a tile are looked up a step before its copy begins, with a barrier between. */
PF_DEVICE void pf_look_up(const pf_call &call, const pf_block &block, unsigned char *shared, int tile) {
    if (PF_PAGED)
        pf_find_places(call, block.s, block.kv_head,
                       (int64_t *)(shared + PF_PLACES_AT) + tile % 2 * (2 * PF_TILE), tile * PF_TILE);
}

/* Copies begin for tiles up to the end of a side only. */
PF_DEVICE void pf_start_keys(const pf_block &block, unsigned char *shared, int tile, int end) {
    const int64_t *places = (const int64_t *)(shared + PF_PLACES_AT) + tile % 2 * (2 * PF_TILE);
    if (tile < end)
        pf_copy_tile<PF_HEAD_DIM>(shared + PF_K_AT + tile % PF_STAGES * PF_K_BYTES, block.keys, places,
                                  tile * PF_TILE, (int)block.s.mask.num_keys);
}

PF_DEVICE void pf_start_values(const pf_block &block, unsigned char *shared, int tile, int end) {
    const int64_t *places = (const int64_t *)(shared + PF_PLACES_AT) + tile % 2 * (2 * PF_TILE);
    if (tile < end)
        pf_copy_tile<PF_HEAD_DIM_V>(shared + PF_V_AT + tile % PF_STAGES * PF_V_BYTES, block.values,
                                    places + PF_TILE, tile * PF_TILE, (int)block.s.mask.num_keys);
}

/* With one stage, the next keys come as soon as all warps have used those that are there; then the values are
 * there, too. */
PF_DEVICE void pf_start_next_keys(const pf_block &block, unsigned char *shared, int tile, int end) {
    pf_cp_async_wait<0>();
    __syncthreads();
    pf_start_keys(block, shared, tile + 1, end);
    pf_cp_async_commit();
}

/* Scores of a warp: row g + 8 h of a row tile, columns 8 n + 2 t and the next in [n][2 h] and [n][2 h + 1],
 * for lane 4 g + t. */
typedef float pf_scores[PF_ROW_TILES][PF_TILE / 8][4];

/* Places of a lane's parts of q, k and v in the matrices of a tile. */
struct pf_lane {
    uint32_t q, k, v;
};

PF_DEVICE pf_lane pf_get_lane() {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return {pf_swizzled<PF_HEAD_DIM>(warp * PF_WARP_ROWS + lane % 16, lane / 16),
            pf_swizzled<PF_HEAD_DIM>(lane / 16 * 8 + lane % 8, lane / 8 % 2),
            pf_swizzled<PF_HEAD_DIM_V>(lane % 16, lane / 16)};
}

PF_DEVICE void pf_clear(pf_scores &score) {
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++)
#pragma unroll
        for (int n = 0; n < PF_TILE / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                score[m][n][e] = 0;
}

PF_DEVICE void pf_load_queries(uint32_t (&a)[PF_ROW_TILES][4], const unsigned char *shared,
                               const pf_lane &lane, int step) {
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++)
        pf_ldmatrix_x4(a[m], shared + pf_at_step<PF_HEAD_DIM>(lane.q, step) + 16 * m * (PF_HEAD_DIM * 2));
}

PF_DEVICE void pf_load_keys(uint32_t (&r)[4], const unsigned char *k, const pf_lane &lane, int step, int n) {
    pf_ldmatrix_x4(r, k + pf_at_step<PF_HEAD_DIM>(lane.k, step) + 16 * n * (PF_HEAD_DIM * 2));
}

PF_DEVICE void pf_load_values(uint32_t (&r)[4], const unsigned char *v, const pf_lane &lane, int step,
                              int n) {
    pf_ldmatrix_x4_trans(r, v + pf_at_step<PF_HEAD_DIM_V>(lane.v, n) + 16 * step * (PF_HEAD_DIM_V * 2));
}

/* d += a b for two neighbouring 8 columns. */
template <int COUNT>
PF_DEVICE void pf_multiply(float (&d)[PF_ROW_TILES][COUNT][4], const uint32_t (&a)[PF_ROW_TILES][4],
                           const uint32_t (&r)[4], int n) {
    const uint32_t b[2][2] = {{r[0], r[1]}, {r[2], r[3]}};
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++) {
        pf_mma(d[m][2 * n], a[m], b[0]);
        pf_mma(d[m][2 * n + 1], a[m], b[1]);
    }
}

PF_DEVICE void pf_multiply_keys(pf_scores &score, const unsigned char *shared, const unsigned char *k,
                                const pf_lane &lane) {
    pf_clear(score);
#pragma unroll
    for (int step = 0; step < PF_HEAD_DIM / 16; step++) {
        uint32_t a[PF_ROW_TILES][4];
        pf_load_queries(a, shared, lane, step);
#pragma unroll
        for (int n = 0; n < PF_TILE / 16; n++) {
            uint32_t r[4];
            pf_load_keys(r, k, lane, step, n);
            pf_multiply(score, a, r, n);
        }
    }
}

#if PF_HAS(SOFTCAP)
/* Right to some units of the last place, near 0 as well. */
PF_DEVICE float pf_fast_tanh(float x) {
    const float square = x * x;
    const float low = x + x * square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315)));
    const float high = 1 - 2 / (1 + pf_exp2(x * (float)(2 * PF_LOG2_E)));
    return square < 0.0625f ? low : high;
}
#endif

#if PF_HAS(BIAS)
template <int DTYPE> PF_DEVICE float pf_bias_as(const pf_call &call, int64_t offset) {
    if (DTYPE == PF_F64)
        return pf_narrow(((const double *)call.bias.data)[offset]);
    if (DTYPE == PF_F32)
        return ((const float *)call.bias.data)[offset];
    const uint16_t bits = ((const uint16_t *)call.bias.data)[offset];
    return DTYPE == PF_F16 ? pf_from_f16(bits) : pf_from_bf16(bits);
}

/* Adds the biases of one row to its visible scores; -inf hides. */
template <int DTYPE>
PF_DEVICE void pf_add_bias(const pf_call &call, int64_t offset, int m, int h, pf_scores &score,
                           uint32_t &hidden) {
#pragma unroll
    for (int i = 0; i < PF_TILE / 4; i++) {
        float &x = score[m][i / 2][2 * h + i % 2];
        if (hidden >> i & 1)
            continue;
        const float bias = pf_bias_as<DTYPE>(call, offset + (8 * (i / 2) + i % 2) * call.bias.stride_dim);
        const float lowest = pf_lowest<float>(), sum = x + bias;
        hidden |= (uint32_t)(bias == -pf_infinity()) << i;
        x = x >= lowest && sum < lowest ? lowest : sum; /* anything finite stays a number */
    }
}
#endif

/* Finishes the scores of one row of a lane, all but those that are hidden: bit i stands for score i. */
PF_DEVICE void pf_finish_row(const pf_call &call, const pf_sequence &s, const pf_row_terms &row, int m, int h,
                             int first, pf_scores &score, uint32_t &hidden) {
    const int64_t column = first + threadIdx.x % 4 * 2;
#if PF_HAS(ALIBI)
    const float distance = (float)(row.position - column);
#endif
#if PF_HAS(SOFTCAP)
    const double largest = 1e30;
    const float cap = (float)(call.softcap > largest       ? largest
                              : call.softcap < 1 / largest ? 1 / largest
                                                           : call.softcap);
    const float inverse_cap = 1 / cap;
#endif
#pragma unroll
    for (int i = 0; i < PF_TILE / 4; i++) {
        float &x = score[m][i / 2][2 * h + i % 2];
        x *= (float)call.scale;
#if PF_HAS(SOFTCAP)
        x = cap * pf_fast_tanh(x * inverse_cap);
#endif
#if PF_HAS(SCORE_MOD)
        if (!(hidden >> i & 1))
            x = pf_score_mod(x, s.index, row.head, row.position, column + 8 * (i / 2) + i % 2);
#endif
#if PF_HAS(ALIBI)
        x -= row.slope * fabsf(distance - (float)(8 * (i / 2) + i % 2));
#endif
    }
#if PF_HAS(MASK)
    const uint8_t *mask = (const uint8_t *)call.mask.data + row.mask + column * call.mask.stride_dim;
#pragma unroll
    for (int i = 0; i < PF_TILE / 4; i++)
        if (!(hidden >> i & 1))
            hidden |= (uint32_t)(mask[(8 * (i / 2) + i % 2) * call.mask.stride_dim] == 0) << i;
#endif
#if PF_HAS(TREE) || PF_HAS(MASK_MOD)
    const pf_query q = {row.head, 0, 0, row.position, row.bias, row.mask, row.slope};
#pragma unroll
    for (int i = 0; i < PF_TILE / 4; i++)
        if (!(hidden >> i & 1))
            hidden |= (uint32_t)pf_is_hidden(call, s, q, column + 8 * (i / 2) + i % 2) << i;
#endif
#if PF_HAS(BIAS)
    const int64_t bias = row.bias + column * call.bias.stride_dim;
    switch (call.bias.dtype) {
    case PF_F64:
        pf_add_bias<PF_F64>(call, bias, m, h, score, hidden);
        break;
    case PF_F32:
        pf_add_bias<PF_F32>(call, bias, m, h, score, hidden);
        break;
    case PF_F16:
        pf_add_bias<PF_F16>(call, bias, m, h, score, hidden);
        break;
    default:
        pf_add_bias<PF_BF16>(call, bias, m, h, score, hidden);
    }
#endif
}

/* What a tile needs beside the products: final scores, -inf for what a row does not see. `bottom` becomes the
 * lowest that the maximum of a row can be: -inf if the row sees none of the tile. `first` is the first key.
 */
PF_DEVICE void pf_finish_scores(const pf_call &call, const pf_sequence &s, const int2 *spans,
                                const pf_row_terms *terms, int first, pf_scores &score,
                                float (&bottom)[PF_ROW_TILES][2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = warp * PF_WARP_ROWS + 16 * m + 8 * h + lane / 4;
            const int column = first + lane % 4 * 2;
            const int lo = spans[row].x - column, hi = spans[row].y - column;
            uint32_t hidden = 0;
#pragma unroll
            for (int i = 0; i < PF_TILE / 4; i++)
                hidden |= (uint32_t)(8 * (i / 2) + i % 2 < lo || 8 * (i / 2) + i % 2 >= hi) << i;
#if PF_FINAL
            pf_finish_row(call, s, terms[row], m, h, first, score, hidden);
#endif
#pragma unroll
            for (int i = 0; i < PF_TILE / 4; i++)
                if (hidden >> i & 1)
                    score[m][i / 2][2 * h + i % 2] = -pf_infinity();
            bottom[m][h] =
                hidden == (uint32_t)(((uint64_t)1 << PF_TILE / 4) - 1) ? -pf_infinity() : pf_lowest<float>();
        }
}

/* Maximum, or sum, over the four lanes that share a row. */
PF_DEVICE float pf_quad_max(float x) {
    x = pf_max_of(x, __shfl_xor_sync(PF_WARP_ALL, x, 1));
    return pf_max_of(x, __shfl_xor_sync(PF_WARP_ALL, x, 2));
}

PF_DEVICE float pf_quad_sum(float x) {
    x += __shfl_xor_sync(PF_WARP_ALL, x, 1);
    return x + __shfl_xor_sync(PF_WARP_ALL, x, 2);
}

/* The states of a warp's rows. */
struct pf_warp_state {
    float o[PF_ROW_TILES][PF_HEAD_DIM_V / 8][4];
    float m[PF_ROW_TILES][2]; /* of bare products unless PF_FINAL */
    float l[PF_ROW_TILES][2]; /* this lane's part */
};

/* Weights, as the matrix unit takes them, and what they are relative to. */
struct pf_weights {
    uint32_t a[PF_ROW_TILES][4]; /* of 16 keys */
    float top[PF_ROW_TILES][2], base[PF_ROW_TILES][2], alpha[PF_ROW_TILES][2], sum[PF_ROW_TILES][2];
    bool moved;
};

/* Maxima of the rows; `top` holds the lowest that they can be. `unit` is what turns differences of scores
 * into exponents of 2. */
PF_DEVICE void pf_find_tops(pf_warp_state &state, const pf_scores &score, float unit, pf_weights &w) {
    w.moved = false;
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = w.top[m][h];
#pragma unroll
            for (int n = 0; n < PF_TILE / 8; n++)
                top = pf_max_of(top, pf_max_of(score[m][n][2 * h], score[m][n][2 * h + 1]));
            const float before = state.m[m][h];
            top = pf_max_of(before, pf_quad_max(top));
            state.m[m][h] = top;
            w.alpha[m][h] = pf_exp2((pf_floored(before) - pf_floored(top)) * unit);
            w.moved |= before != top;
            /* Before a row has seen a key its weights are e^-inf, whatever the base. */
            w.base[m][h] = PF_FINAL ? pf_floored(top) : top == -pf_infinity() ? 0 : top * unit;
            w.sum[m][h] = 0;
            state.l[m][h] *= w.alpha[m][h];
        }
}

/* Weights of 16 keys and 16 rows. */
PF_DEVICE void pf_find_weights(const pf_scores &score, float unit, int step, int m, pf_weights &w) {
    float p[2][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float x = score[m][2 * step + half][e], base = w.base[m][e / 2];
            p[half][e] = pf_exp2(PF_FINAL ? (x - base) * unit : fmaf(x, unit, -base));
        }
        w.a[m][2 * half] = pf_pack(p[half][0], p[half][1]);
        w.a[m][2 * half + 1] = pf_pack(p[half][2], p[half][3]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
        w.sum[m][h] += (p[0][2 * h] + p[0][2 * h + 1]) + (p[1][2 * h] + p[1][2 * h + 1]);
}

/* Makes sums relative to the new maxima, unless all factors are 1. */
PF_DEVICE void pf_rescale(pf_warp_state &state, const pf_weights &w) {
    if (__any_sync(PF_WARP_ALL, w.moved)) {
#pragma unroll
        for (int m = 0; m < PF_ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < PF_HEAD_DIM_V / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    state.o[m][n][e] *= w.alpha[m][e / 2];
    }
}

PF_DEVICE void pf_add_sums(pf_warp_state &state, const pf_weights &w) {
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            state.l[m][h] += w.sum[m][h];
}

/* Adds a tile whose scores are there; weights are found as the products come to them. */
PF_DEVICE void pf_add_values(pf_warp_state &state, const pf_scores &score, float unit, pf_weights &w,
                             const unsigned char *v, const pf_lane &lane) {
#pragma unroll
    for (int step = 0; step < PF_TILE / 16; step++) {
#pragma unroll
        for (int m = 0; m < PF_ROW_TILES; m++)
            pf_find_weights(score, unit, step, m, w);
#pragma unroll
        for (int n = 0; n < PF_HEAD_DIM_V / 16; n++) {
            uint32_t r[4];
            pf_load_values(r, v, lane, step, n);
            pf_multiply(state.o, w.a, r, n);
        }
    }
    pf_add_sums(state, w);
}

/* What a tile needs beside the products. */
PF_DEVICE void pf_finish(const pf_call &call, const pf_block &block, const unsigned char *shared, int side,
                         bool tested, int first, pf_scores &score, pf_weights &w) {
    if (PF_FINAL || tested) {
        pf_finish_scores(call, block.s, (const int2 *)(shared + PF_SPANS_AT) + side * PF_ROWS,
                         (const pf_row_terms *)(shared + PF_QUERIES_AT), first, score, w.top);
    } else {
#pragma unroll
        for (int m = 0; m < PF_ROW_TILES; m++)
            w.top[m][0] = w.top[m][1] = pf_lowest<float>();
    }
}

/* Whether every row sees all of a tile. */
PF_DEVICE bool pf_is_full(const pf_block &block, int side, int tile) {
    return tile >= block.full_begin[side] && tile < block.full_end[side];
}

/* One tile: begins the copies of a later one, and adds what is there. */
PF_DEVICE void pf_step(const pf_call &call, const pf_block &block, unsigned char *shared, int side, int tile,
                       bool tested, const pf_lane &lane, float unit, pf_warp_state &state) {
    const int end = block.end[side];
    pf_cp_async_wait<(PF_STAGES > 2 ? PF_STAGES - 2 : 0)>();
    __syncthreads();
    if (PF_STAGES == 1) {
        pf_start_values(block, shared, tile, end);
        pf_cp_async_commit();
        pf_look_up(call, block, shared, tile + 1);
    } else {
        pf_start_keys(block, shared, tile + PF_STAGES - 1, end);
        pf_start_values(block, shared, tile + PF_STAGES - 1, end);
        pf_cp_async_commit();
        pf_look_up(call, block, shared, tile + PF_STAGES);
    }
    const int warp = threadIdx.x / 32, first = tile * PF_TILE;
    bool idle = false;
    if (tested) { /* near a diagonal some warps see nothing of a tile, and others all of it */
        const int2 *spans = (const int2 *)(shared + PF_SPANS_AT) + side * PF_ROWS;
        const int2 above = spans[warp * PF_WARP_ROWS], below = spans[(warp + 1) * PF_WARP_ROWS - 1];
        idle = above.x >= first + PF_TILE || below.y <= first;
        tested = below.x > first || above.y < first + PF_TILE;
    }
    if (idle) {
        if (PF_STAGES == 1)
            pf_start_next_keys(block, shared, tile, end);
        return;
    }
    const unsigned char *k = shared + PF_K_AT + tile % PF_STAGES * PF_K_BYTES;
    const unsigned char *v = shared + PF_V_AT + tile % PF_STAGES * PF_V_BYTES;
    pf_scores score;
    pf_multiply_keys(score, shared, k, lane);
    if (PF_STAGES == 1)
        pf_start_next_keys(block, shared, tile, end);
    pf_weights w;
    pf_finish(call, block, shared, side, tested, first, score, w);
    pf_find_tops(state, score, unit, w);
    pf_rescale(state, w);
    pf_add_values(state, score, unit, w, v, lane);
}

/* Rows of a warp once more, with care; the rare case, kept out of the kernel's registers. */
static __device__ __noinline__ void pf_redo_rows(const pf_call &call, int64_t sequence, int64_t head,
                                                 int64_t first, uint32_t rows) {
    const pf_block block = {pf_get_sequence(call, sequence), first, 0, head, 0, 0, {}, {}, {}, {}, {}, {}};
    for (int r = 0; r < PF_WARP_ROWS; r++)
        if (rows >> r & 1)
            pf_careful_row(call, block.s, pf_head_of(block, first + r), pf_query_of(block, first + r));
}

/* Puts the states of splits into the workspace. */
PF_DEVICE void pf_store_states(const pf_call &call, const pf_block &block, int64_t first,
                               const pf_warp_state &state) {
    const pf_sequence &s = block.s;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int64_t i = first + 16 * m + 8 * h + lane / 4;
            if (i >= block.num_rows)
                continue;
            const int64_t row = pf_state_row(call, s, pf_head_of(block, i), pf_query_of(block, i));
            float *o = pf_partial_o(call, block.split, row);
#pragma unroll
            for (int n = 0; n < PF_HEAD_DIM_V / 8; n++)
                if (8 * n < call.head_dim_v) {
                    o[8 * n + lane % 4 * 2] = state.o[m][n][2 * h];
                    o[8 * n + lane % 4 * 2 + 1] = state.o[m][n][2 * h + 1];
                }
            if (lane % 4 == 0) {
                *pf_partial_m(call, block.split, row) = state.m[m][h];
                *pf_partial_l(call, block.split, row) = state.l[m][h];
            }
        }
}

/* Finishes the rows of a warp and writes them. Shared memory is the warp's own from `staged` on. */
PF_DEVICE void pf_store_rows(const pf_call &call, const pf_block &block, int64_t first, unsigned char *staged,
                             pf_warp_state &state) {
    const pf_sequence &s = block.s;
    const int lane = threadIdx.x % 32;
    /* Lane r finishes row r: log-sum-exp and the factor of its output. */
    float own_m = 0, own_l = 0;
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float top = __shfl_sync(PF_WARP_ALL, state.m[m][h], lane % 8 * 4);
            const float sum = __shfl_sync(PF_WARP_ALL, state.l[m][h], lane % 8 * 4);
            if (lane / 8 == 2 * m + h) {
                own_m = top;
                own_l = sum;
            }
        }
    float own_factor = 0;
    bool again = false;
    if (lane < PF_WARP_ROWS && first + lane < block.num_rows) {
        const int64_t i = pf_query_of(block, first + lane), head = pf_head_of(block, first + lane);
        own_factor = (float)pf_output_factor((double)own_m, (double)own_l, pf_sink_of(call, head));
        pf_store_lse(call, s, head, i, (double)own_m, (double)own_l);
        /* Exponents so large that rounding them would show. */
        again = !PF_FINAL && own_m != -pf_infinity() && fabsf(own_m) > 1e6f;
    }
    uint32_t broken = __ballot_sync(PF_WARP_ALL, again);
    const bool wide = pf_dtype_size((int32_t)call.out.dtype) > 2;
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = 16 * m + 8 * h + lane / 4;
            const float factor = __shfl_sync(PF_WARP_ALL, own_factor, row);
            const bool saw = state.m[m][h] != -pf_infinity();
            float worst = 0;
#pragma unroll
            for (int n = 0; n < PF_HEAD_DIM_V / 8; n++)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    const float x = saw ? pf_finished(state.o[m][n][e], factor) : 0;
                    worst += x * 0; /* stays 0 unless one is no number */
                    state.o[m][n][e] = x;
                }
            const uint32_t lanes = __ballot_sync(PF_WARP_ALL, worst != 0);
#pragma unroll
            for (int g = 0; g < 8; g++)
                broken |= (uint32_t)((lanes >> 4 * g & 15) != 0) << (16 * m + 8 * h + g);
            if (!wide) {
#pragma unroll
                for (int n = 0; n < PF_HEAD_DIM_V / 8; n++) {
                    const float low = state.o[m][n][2 * h], high = state.o[m][n][2 * h + 1];
                    *(uint32_t *)(staged + pf_swizzled<PF_HEAD_DIM_V>(row, n) + lane % 4 * 4) =
                        call.out.dtype == PF_BF16 ? pf_pack_bf16(low, high) : pf_pack_f16(low, high);
                }
            } else if (first + row < block.num_rows) {
                char *out = pf_place(call.out, pf_query_offset(call.out, s, pf_head_of(block, first + row),
                                                               pf_query_of(block, first + row)));
#pragma unroll
                for (int n = 0; n < PF_HEAD_DIM_V / 8; n++)
                    if (8 * n < call.head_dim_v) {
                        const int d = 8 * n + lane % 4 * 2;
                        const float low = state.o[m][n][2 * h], high = state.o[m][n][2 * h + 1];
                        if (call.out.dtype == PF_F64)
                            *(double2 *)(out + d * 8) = make_double2((double)low, (double)high);
                        else
                            *(float2 *)(out + d * 4) = make_float2(low, high);
                    }
            }
        }
    __syncwarp();
    if (!wide) {
        const int pieces = PF_HEAD_DIM_V / 8;
        for (int i = lane; i < PF_WARP_ROWS * pieces; i += 32) {
            const int row = i / pieces, piece = i % pieces;
            if (first + row < block.num_rows && piece * 8 < call.head_dim_v) {
                char *out = pf_place(call.out, pf_query_offset(call.out, s, pf_head_of(block, first + row),
                                                               pf_query_of(block, first + row)));
                *(uint4 *)(out + piece * 16) =
                    *(const uint4 *)(staged + pf_swizzled<PF_HEAD_DIM_V>(row, piece));
            }
        }
        __syncwarp();
    }
    const int64_t left = block.num_rows - first;
    if (left < PF_WARP_ROWS)
        broken &= left <= 0 ? 0 : (1u << left) - 1;
    if (broken)
        pf_redo_rows(call, s.index, block.head, first, broken);
}

/* What rows see of one side. */
PF_DEVICE void pf_find_spans(const pf_call &call, pf_block &block, int side, int2 *spans) {
    const pf_sequence &s = block.s;
    const pf_span keys = {pf_split_lo(call, s, block.split), pf_split_lo(call, s, block.split + 1)};
    pf_span any = keys, all = keys, own;
    for (int row = threadIdx.x; row < PF_ROWS; row += PF_THREADS) {
        own = keys;
        if (PF_SPANS)
            own = pf_clip(pf_visible(&s.mask, pf_query_of(block, pf_row_of(block, row)), side), keys.lo,
                          keys.hi);
        spans[row] = make_int2((int)own.lo, (int)own.hi);
    }
    if (threadIdx.x != 0)
        return;
    if (PF_SPANS) {
        const int64_t first = pf_query_of(block, block.first);
        const int64_t last = pf_query_of(block, pf_row_of(block, PF_ROWS - 1));
        any = pf_clip(pf_visible_to_any(&s.mask, first, last, side), keys.lo, keys.hi);
        all = pf_clip(pf_visible_to_all(&s.mask, first, last, side), keys.lo, keys.hi);
    }
    block.begin[side] = (int)any.lo / PF_TILE;
    block.end[side] = any.lo < any.hi ? ((int)any.hi + PF_TILE - 1) / PF_TILE : block.begin[side];
    block.full_begin[side] = ((int)all.lo + PF_TILE - 1) / PF_TILE;
    block.full_end[side] = (int)all.hi / PF_TILE;
}

extern "C" __global__ void __launch_bounds__(PF_THREADS, PF_MIN_BLOCKS)
    pf_forward_mma(const __grid_constant__ pf_call call) {
    PF_DYNAMIC_SHARED(shared);
    pf_block &block = *(pf_block *)(shared + PF_BLOCK_AT);
    static_assert(sizeof(pf_block) <= PF_BLOCK_BYTES, "a block has its place");
    {
        const pf_item item =
            pf_get_item(call, PF_PACKED ? call.num_kv_heads : call.num_heads, call.max_splits);
        const pf_sequence s = pf_get_sequence(call, item.sequence);
        /* Where rows see what is before them, the last ones have most to do: they come first. */
        const int64_t first = (call.row_blocks - 1 - item.row_block) * PF_ROWS;
        const int64_t num_rows = PF_PACKED ? s.num_queries * s.group : s.num_queries;
        if (!pf_is_mine(call, s) || first >= num_rows || item.split >= pf_num_splits(call, s))
            return;
        if (threadIdx.x == 0) {
            const int64_t kv_head = PF_PACKED ? item.head : pf_quotient(item.head, s.group);
            block = {s, first, num_rows, item.head, item.split, kv_head, {}, {}, {}, {}, {}, {}};
            block.keys = pf_get_stream(call, call.k, s, kv_head, call.head_dim);
            block.values = pf_get_stream(call, call.v, s, kv_head, call.head_dim_v);
        }
        __syncthreads();
    }
    const pf_sequence &s = block.s;
    const int warp = threadIdx.x / 32;
    if (pf_find_bad(call, s)) {
        const int64_t warp_first = block.first + warp * PF_WARP_ROWS;
        for (int64_t row = warp_first; row < pf_min(warp_first + PF_WARP_ROWS, block.num_rows); row++)
            if (!call.partial)
                pf_store_bad_row(call, s, pf_head_of(block, row), pf_query_of(block, row));
        return;
    }

    {
        typedef pf_copy<PF_HEAD_DIM> copy;
        for (int row = threadIdx.x / copy::LANES; row < PF_ROWS; row += copy::ROWS) {
            const int64_t i = pf_row_of(block, row);
            const char *q =
                pf_place(call.q, pf_query_offset(call.q, s, pf_head_of(block, i), pf_query_of(block, i)));
            pf_copy_row<PF_HEAD_DIM>(shared, row, q, true, (int)call.head_dim);
        }
    }
    for (int side = 0; side < PF_NUM_SIDES; side++)
        pf_find_spans(call, block, side, (int2 *)(shared + PF_SPANS_AT) + side * PF_ROWS);
#if PF_FINAL
    for (int row = threadIdx.x; row < PF_ROWS; row += PF_THREADS) {
        const int64_t i = pf_row_of(block, row);
        const pf_query q = pf_get_query(call, s, pf_head_of(block, i), pf_query_of(block, i));
        ((pf_row_terms *)(shared + PF_QUERIES_AT))[row] = {q.position, q.bias, q.mask, q.slope,
                                                           (int32_t)q.head};
    }
#endif

    pf_warp_state state;
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            state.m[m][h] = -pf_infinity();
            state.l[m][h] = 0;
#pragma unroll
            for (int n = 0; n < PF_HEAD_DIM_V / 8; n++)
                state.o[m][n][2 * h] = state.o[m][n][2 * h + 1] = 0;
        }

    const float unit = PF_FINAL ? (float)PF_LOG2_E : (float)(call.scale * PF_LOG2_E);
    const pf_lane lane = pf_get_lane();
    for (int side = PF_SPANS && s.mask.sink_tokens > 0 ? PF_SINK_KEYS : PF_WINDOW_KEYS; side < PF_NUM_SIDES;
         side++) {
        __syncthreads(); /* what the block holds is there; tiles of the other side have been read */
        const int begin = block.begin[side];
        const int end = block.end[side];
        if (begin >= end)
            continue;
        if (PF_STAGES == 1) {
            pf_look_up(call, block, shared, begin);
            if (PF_PAGED)
                __syncthreads();
            pf_start_keys(block, shared, begin, end);
            pf_cp_async_commit();
        } else {
#pragma unroll 1
            for (int tile = begin; tile < begin + PF_STAGES - 1; tile++) {
                pf_look_up(call, block, shared, tile);
                if (PF_PAGED)
                    __syncthreads();
                pf_start_keys(block, shared, tile, end);
                pf_start_values(block, shared, tile, end);
                pf_cp_async_commit();
            }
            pf_look_up(call, block, shared, begin + PF_STAGES - 1);
        }

        /* A loop of its own, without options, for the tiles that need no test. */
        for (int tile = begin; tile < block.end[side];) {
#pragma unroll 1
            for (; tile < block.end[side] && !pf_is_full(block, side, tile); tile++)
                pf_step(call, block, shared, side, tile, true, lane, unit, state);
#pragma unroll 1
            for (; tile < block.end[side] && tile < block.full_end[side]; tile++)
                pf_step(call, block, shared, side, tile, false, lane, unit, state);
        }
    }

    pf_cp_async_commit();
    pf_cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float &top = state.m[m][h];
            if (!PF_FINAL && top != -pf_infinity())
                top = pf_floored(top * (float)call.scale);
            state.l[m][h] = pf_quad_sum(state.l[m][h]);
        }
    const int64_t warp_first = block.first + warp * PF_WARP_ROWS;
    if (call.partial)
        pf_store_states(call, block, warp_first, state);
    else
        pf_store_rows(call, block, warp_first, shared + warp * (PF_WARP_ROWS * PF_HEAD_DIM_V * 2), state);
}
