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
#include "forward_mma_rows.cuh"

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

extern "C" __global__ void __launch_bounds__(PF_THREADS, PF_MIN_BLOCKS)
    pf_forward_mma(const __grid_constant__ pf_call call) {
    PF_DYNAMIC_SHARED(shared);
    pf_block &block = *(pf_block *)(shared + PF_BLOCK_AT);
    static_assert(sizeof(pf_block) <= PF_BLOCK_BYTES, "a block has its place");
    if (!pf_begin(call, block))
        return;
    pf_copy_queries(call, block, shared);
    pf_look_at_rows(call, block, shared);
    pf_warp_state state;
    pf_clear_state(state);
    const float unit = PF_FINAL ? (float)PF_LOG2_E : (float)(call.scale * PF_LOG2_E);
    const pf_lane lane = pf_get_lane();
    for (int side = pf_first_side(block); side < PF_NUM_SIDES; side++) {
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

#if PF_ONE_LOOP
#pragma unroll 1
        for (int tile = begin; tile < block.end[side]; tile++)
            pf_step(call, block, shared, side, tile, true, lane, unit, state);
#else
        /* A loop of its own, without options, for the tiles that need no test. */
        for (int tile = begin; tile < block.end[side];) {
#pragma unroll 1
            for (; tile < block.end[side] && !pf_is_full(block, side, tile); tile++)
                pf_step(call, block, shared, side, tile, true, lane, unit, state);
#pragma unroll 1
            for (; tile < block.end[side] && tile < block.full_end[side]; tile++)
                pf_step(call, block, shared, side, tile, false, lane, unit, state);
        }
#endif
    }

    pf_cp_async_commit();
    pf_cp_async_wait<0>();
    __syncthreads();
    const int64_t first = block.first + threadIdx.x / 32 * PF_WARP_ROWS;
    unsigned char *staged = shared + threadIdx.x / 32 * (PF_WARP_ROWS * PF_HEAD_DIM_V * 2);
    const uint32_t broken = pf_end_rows(call, block, first, staged, (float)call.scale, state,
                                        [&] { pf_write_rows(call, block, first, staged); });
    if (broken)
        pf_redo_rows(call, block.s.index, block.head, first, broken);
}
