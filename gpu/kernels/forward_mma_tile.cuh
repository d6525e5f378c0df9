/* Prefill on the matrix unit: what a block is, tiles of keys and values in shared memory, products of tiles.
 */
#ifndef PF_FORWARD_MMA_TILE_CUH
#define PF_FORWARD_MMA_TILE_CUH

#include "careful.cuh"

#if PF_BFLOAT16
#define pf_mma pf_mma_bf16
#define pf_pack pf_pack_bf16
#else
#define pf_mma pf_mma_f16
#define pf_pack pf_pack_f16
#endif

/* Whether a warpgroup copies and others multiply, by wgmma: forward_wgmma.cu. */
#ifndef PF_WGMMA
#define PF_WGMMA 0
#endif
/* Blocks whose queries have a place in shared memory: more than one, if the next one's come meanwhile. */
#ifndef PF_QUERY_STAGES
#define PF_QUERY_STAGES 1
#endif

/* Final scores need a pass of their own. */
#define PF_FINAL ((PF_TERMS) != 0 || !PF_POSITIVE_SCALE)

enum {
    /* Who looks at rows and copies tiles: all of them, or one of a warpgroup that does nothing else. */
    PF_COPY_WARPS = PF_WGMMA ? 1 : PF_WARPS,
    PF_COPY_THREADS = 32 * PF_COPY_WARPS,
    /* Warps that compute, PF_WARPS of them, come behind that warpgroup. */
    PF_FIRST_WARP = PF_WGMMA ? 4 : 0,
    PF_THREADS = 32 * (PF_WARPS + PF_FIRST_WARP),
    PF_WARP_ROWS = 16 * PF_ROW_TILES,
    PF_ROWS = PF_WARPS * PF_WARP_ROWS,
    /* Tiles in shared memory, in bytes from its begin. Finished rows take their place; where there are
     * several blocks, that of their queries alone. */
    PF_Q_BYTES = PF_ROWS * 2 * (PF_WGMMA && PF_HEAD_DIM_V > PF_HEAD_DIM ? PF_HEAD_DIM_V : PF_HEAD_DIM),
    PF_K_AT = PF_QUERY_STAGES * PF_Q_BYTES,
    PF_K_BYTES = PF_TILE * PF_HEAD_DIM * 2,
    PF_V_AT = PF_K_AT + PF_STAGES * PF_K_BYTES,
    PF_V_BYTES = PF_TILE * PF_HEAD_DIM_V * 2,
    PF_V_END = PF_V_AT + PF_STAGES * PF_V_BYTES,
    PF_OUT_BYTES = PF_ROWS * PF_HEAD_DIM_V * 2,
    /* Behind them, for each of the blocks: what it is, spans of its rows, what terms need to know of a row.
     */
    PF_BLOCK_AT = PF_V_END > PF_OUT_BYTES ? PF_V_END : PF_OUT_BYTES,
    PF_BLOCK_BYTES = 384,
    PF_SPANS_AT = PF_BLOCK_AT + PF_BLOCK_BYTES,
    PF_QUERIES_AT = PF_SPANS_AT + PF_NUM_SIDES * PF_ROWS * 8,
    PF_ASIDE_BYTES = PF_QUERIES_AT - PF_BLOCK_AT + (PF_FINAL ? 32 * PF_ROWS : 0),
    /* Then places of keys and values of two tiles where they are paged, or barriers of those that copy. */
    PF_PLACES_AT = PF_BLOCK_AT + PF_QUERY_STAGES * PF_ASIDE_BYTES,
};

/* What score terms need to know of a row. */
struct pf_row_terms {
    int64_t position, bias, mask;
    float slope;
    int32_t head;
};

/* The type of finished rows; where it is no constant of the kernel, the call's. */
#ifdef PF_OUT_TYPE
#define pf_out_type(call) PF_OUT_TYPE
#else
#define pf_out_type(call) ((int32_t)(call).out.dtype)
#endif

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
    char *out;        /* of its first row, */
    int64_t out_step; /* and bytes from row to row, unless PF_PACKED */
    int32_t plain;    /* whether finished rows are all that is written, and no sinks are among their keys */
    int32_t keys_lo[PF_NUM_SIDES], keys_hi[PF_NUM_SIDES]; /* of the split */
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

/* Byte of 16-byte piece `piece` of a row of a tile of ROWS rows in shared memory. The eight rows that the
 * matrix unit reads at a time lie in different banks. For wgmma 64 elements of all rows lie together. */
template <int WIDTH, int ROWS> PF_DEVICE uint32_t pf_swizzled(uint32_t row, uint32_t piece) {
    if (PF_WGMMA)
        return piece / 8 * (ROWS * 128) + row * 128 + ((piece % 8 ^ row % 8) * 16);
    const uint32_t turn = WIDTH % 64 == 0 ? row % 8 : row / 2 % 4;
    return row * (WIDTH * 2) + ((piece ^ turn) * 16);
}

/* The same for piece 2 step + piece, from the place of piece 0 or 1: by one exclusive or. */
template <int WIDTH> PF_DEVICE uint32_t pf_at_step(uint32_t place, int step) {
    const int span = WIDTH % 64 == 0 ? 128 : 64;
    return (place ^ (step * 32 % span)) + step * 32 / span * span;
}

/* How threads share the rows of a tile: LANES of them read a row, REPEAT pieces each. */
template <int WIDTH, int THREADS = PF_COPY_THREADS> struct pf_copy {
    enum {
        PIECES = WIDTH / 8,
        LANES = PIECES % 3 ? PIECES : PIECES / 3,
        REPEAT = PIECES / LANES,
        ROWS = THREADS / LANES, /* at a time */
    };
};

/* Starts the copy of one row's pieces, to a tile of ROWS rows; the row is zeros where not valid. */
template <int WIDTH, int ROWS>
PF_DEVICE void pf_copy_row(unsigned char *tile, uint32_t row, const char *from, bool valid, int width) {
    typedef pf_copy<WIDTH> copy;
    const uint32_t lane = threadIdx.x % copy::LANES;
#pragma unroll
    for (int r = 0; r < copy::REPEAT; r++) {
        const uint32_t piece = lane + r * copy::LANES;
        pf_cp_async16(tile + pf_swizzled<WIDTH, ROWS>(row, piece), from + piece * 16,
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
        unsigned char *to = tile + pf_swizzled<WIDTH, PF_TILE>(row, threadIdx.x % copy::LANES);
#pragma unroll
        for (int r = 0; r < PF_TILE / copy::ROWS; r++) {
#pragma unroll
            for (int i = 0; i < copy::REPEAT; i++)
                if (copy::ROWS % 8 == 0 && copy::REPEAT == 1)
                    pf_cp_async16(to + r * copy::ROWS * (WIDTH * 2), next, true);
                else
                    pf_cp_async16(
                        tile + pf_swizzled<WIDTH, PF_TILE>(row + r * copy::ROWS,
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
        pf_copy_row<WIDTH, PF_TILE>(tile, key, PF_PAGED ? from + places[key] : from,
                                    first + (int)key < num_keys, stream.width);
        from += PF_PAGED ? 0 : copy::ROWS * stream.stride;
    }
}

/* Looks up where keys and values of a tile lie in their pools: once for each, by a thread of its own. */
PF_DEVICE void pf_find_places(const pf_call &call, const pf_sequence &s, int64_t kv_head, int64_t *places,
                              int first) {
    for (int i = threadIdx.x; i < 2 * PF_TILE; i += PF_COPY_THREADS) {
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
    return {pf_swizzled<PF_HEAD_DIM, PF_ROWS>(warp * PF_WARP_ROWS + lane % 16, lane / 16),
            pf_swizzled<PF_HEAD_DIM, PF_TILE>(lane / 16 * 8 + lane % 8, lane / 8 % 2),
            pf_swizzled<PF_HEAD_DIM_V, PF_TILE>(lane % 16, lane / 16)};
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

#endif
