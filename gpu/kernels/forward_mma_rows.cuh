/* Prefill on the matrix unit: what rows see, and what becomes of finished ones. */
#ifndef PF_FORWARD_MMA_ROWS_CUH
#define PF_FORWARD_MMA_ROWS_CUH

#include "forward_mma_score.cuh"

/* Rows of a warp once more, with care; the rare case, kept out of the kernel's registers. */
static __device__ __noinline__ void pf_redo_rows(const pf_call &call, int64_t sequence, int64_t head,
                                                 int64_t first, uint32_t rows) {
    const pf_block block = {
        pf_get_sequence(call, sequence), first, 0, head, 0, 0, {}, {}, nullptr, 0, 0, {}, {}, {}, {}};
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

/* Rows between 64 elements of a finished row and the next 64, where these do not follow one another. */
enum { PF_STAGED_ROWS = PF_WGMMA ? PF_ROWS : PF_WARP_ROWS };

PF_DEVICE char *pf_out_of(const pf_call &call, const pf_sequence &s, int64_t head, int64_t i) {
    return (char *)call.out.data + pf_query_offset(call.out, s, head, i) * pf_dtype_size(pf_out_type(call));
}

/* Where a row's outputs are; each lane knows its own row's. What is in shared memory is nearer than what is
 * in the call. */
PF_DEVICE char *pf_out_of_row(const pf_block &block, int64_t first, int row, char *own) {
    if (PF_PACKED)
        return (char *)__shfl_sync(PF_WARP_ALL, (long long)own, row);
    return block.out + (first - block.first + row) * block.out_step;
}

/* Whether finished rows go to shared memory before they are written. */
PF_DEVICE bool pf_are_staged(const pf_call &call) {
    return pf_dtype_size(pf_out_type(call)) <= 2;
}

/* Writes a warp's rows, which have been staged. */
PF_DEVICE void pf_write_rows(const pf_call &call, const pf_block &block, int64_t first,
                             const unsigned char *staged) {
    typedef pf_copy<PF_HEAD_DIM_V, 32> pieces;
    const int lane = threadIdx.x % 32, piece = lane % pieces::LANES, at = lane / pieces::LANES;
    const int width = block.values.width;
    char *own_out = nullptr;
    if (PF_PACKED && lane < PF_WARP_ROWS && first + lane < block.num_rows)
        own_out = pf_out_of(call, block.s, pf_head_of(block, first + lane), pf_query_of(block, first + lane));
#pragma unroll
    for (int next = 0; next < PF_WARP_ROWS; next += pieces::ROWS) {
        const int row = next + at;
        char *out = pf_out_of_row(block, first, row, own_out);
#pragma unroll
        for (int i = 0; i < pieces::REPEAT; i++) {
            const int p = piece + i * pieces::LANES;
            if (first + row < block.num_rows && p * 8 < width)
                *(uint4 *)(out + p * 16) =
                    *(const uint4 *)(staged + pf_swizzled<PF_HEAD_DIM_V, PF_STAGED_ROWS>(row, p));
        }
    }
    __syncwarp();
}

/* Finishes the rows of a warp, and writes them or stages them. From `staged` on their places in shared memory
 * are the warp's own. Returns a bit for each row that has to be computed once more, with care. */
PF_DEVICE uint32_t pf_finish_rows(const pf_call &call, const pf_block &block, int64_t first,
                                  unsigned char *staged, pf_warp_state &state) {
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
    char *own_out = nullptr;
    bool again = false;
    if (lane < PF_WARP_ROWS && first + lane < block.num_rows) {
        const int64_t i = pf_query_of(block, first + lane), head = pf_head_of(block, first + lane);
        if (PF_PACKED)
            own_out = pf_out_of(call, s, head, i);
        own_factor = own_m == -pf_infinity() ? 0 : __frcp_rn(own_l);
        if (!block.plain) {
            if (call.sinks.data)
                own_factor = (float)pf_output_factor((double)own_m, (double)own_l, pf_sink_of(call, head));
            pf_store_lse(call, s, head, i, (double)own_m, (double)own_l);
        }
        /* Exponents so large that rounding them would show. */
        again = !PF_FINAL && own_m != -pf_infinity() && fabsf(own_m) > 1e6f;
    }
    uint32_t broken = __ballot_sync(PF_WARP_ALL, again);
    const bool wide = !pf_are_staged(call);
    const int width = block.values.width;
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = 16 * m + 8 * h + lane / 4;
            const float factor = __shfl_sync(PF_WARP_ALL, own_factor, row);
            float worst = 0;
#pragma unroll
            for (int n = 0; n < PF_HEAD_DIM_V / 8; n++)
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    const float x = pf_finished(state.o[m][n][e], factor);
                    worst = fmaf(x, 0.0f, worst); /* stays 0 unless one is no number */
                    state.o[m][n][e] = x;
                }
            const uint32_t lanes = __ballot_sync(PF_WARP_ALL, worst != 0);
            if (lanes)
                for (int g = 0; g < 8; g++)
                    broken |= (uint32_t)((lanes >> 4 * g & 15) != 0) << (16 * m + 8 * h + g);
            if (!wide) {
#pragma unroll
                for (int n = 0; n < PF_HEAD_DIM_V / 8; n++) {
                    const float low = state.o[m][n][2 * h], high = state.o[m][n][2 * h + 1];
                    *(uint32_t *)(staged + pf_swizzled<PF_HEAD_DIM_V, PF_STAGED_ROWS>(row, n) +
                                  lane % 4 * 4) =
                        pf_out_type(call) == PF_BF16 ? pf_pack_bf16(low, high) : pf_pack_f16(low, high);
                }
            } else {
                char *out = pf_out_of_row(block, first, row, own_out);
                if (first + row >= block.num_rows)
                    continue;
#pragma unroll
                for (int n = 0; n < PF_HEAD_DIM_V / 8; n++)
                    if (8 * n < width) {
                        const int d = 8 * n + lane % 4 * 2;
                        const float low = state.o[m][n][2 * h], high = state.o[m][n][2 * h + 1];
                        if (pf_out_type(call) == PF_F64)
                            *(double2 *)(out + d * 8) = make_double2((double)low, (double)high);
                        else
                            *(float2 *)(out + d * 4) = make_float2(low, high);
                    }
            }
        }
    __syncwarp();
    const int64_t left = block.num_rows - first;
    return left >= PF_WARP_ROWS ? broken : left <= 0 ? 0 : broken & ((1u << left) - 1);
}

/* Kept first tokens are a side of their own, where there are any. */
PF_DEVICE int pf_first_side(const pf_block &block) {
    return PF_SPANS && block.s.mask.sink_tokens > 0 ? PF_SINK_KEYS : PF_WINDOW_KEYS;
}

/* The tiles of each side, and the keys of the block's split; by one warp. */
PF_DEVICE void pf_find_tiles(const pf_call &call, pf_block &block) {
    const int lane = threadIdx.x % 32, side = lane / 2 % PF_NUM_SIDES;
    const int64_t num_keys = block.s.mask.num_keys;
    pf_span own = {0, num_keys};
    if (PF_SPANS) { /* even lanes take the first row, odd ones the last */
        const int64_t row = lane % 2 ? pf_row_of(block, PF_ROWS - 1) : block.first;
        const pf_mask mask = pf_known_mask(block.s.mask);
        own = pf_clip(pf_visible(&mask, pf_query_of(block, row), side), 0, num_keys);
    }
    const int lo = (int)own.lo, hi = (int)own.hi;
    const int last_lo = __shfl_xor_sync(PF_WARP_ALL, lo, 1), last_hi = __shfl_xor_sync(PF_WARP_ALL, hi, 1);
    const pf_span seen = {lo, max(lo, last_hi)};
    const pf_span keys =
        pf_has_splits(call) ? pf_split_of(call, block.s, block.split, seen, PF_TILE) : pf_span{0, num_keys};
    const pf_span any = pf_clip(seen, keys.lo, keys.hi);
    const pf_span all = pf_clip({last_lo, max(last_lo, hi)}, keys.lo, keys.hi);
    if (lane % 2 == 0 && lane < 2 * PF_NUM_SIDES) {
        block.keys_lo[side] = (int)keys.lo;
        block.keys_hi[side] = (int)keys.hi;
        block.begin[side] = (int)any.lo / PF_TILE;
        block.end[side] = any.lo < any.hi ? ((int)any.hi + PF_TILE - 1) / PF_TILE : block.begin[side];
        block.full_begin[side] = ((int)all.lo + PF_TILE - 1) / PF_TILE;
        block.full_end[side] = (int)all.hi / PF_TILE;
    }
}

/* What an item is, unless there is nothing to compute. */
struct pf_work {
    pf_item item;
    pf_sequence s;
    int64_t first, num_rows;
};

PF_DEVICE bool pf_get_work(const pf_call &call, const pf_item &item, pf_work &work) {
    work.item = item;
    work.s = pf_get_sequence(call, item.sequence);
    work.first = item.row_block * PF_ROWS;
    work.num_rows = PF_PACKED ? work.s.num_queries * work.s.group : work.s.num_queries;
    return pf_is_mine(call, work.s) && work.first < work.num_rows &&
           (!pf_has_splits(call) || item.split < pf_num_splits(call, work.s));
}

PF_DEVICE pf_block pf_get_block(const pf_call &call, const pf_work &work) {
    const pf_item &item = work.item;
    const int64_t kv_head = PF_PACKED ? item.head : pf_quotient(item.head, work.s.group);
    return {work.s,
            work.first,
            work.num_rows,
            item.head,
            item.split,
            kv_head,
            pf_get_stream(call, call.k, work.s, kv_head, call.head_dim),
            pf_get_stream(call, call.v, work.s, kv_head, call.head_dim_v),
            PF_PACKED ? nullptr : pf_out_of(call, work.s, item.head, work.first),
            call.out.stride_token * pf_dtype_size(pf_out_type(call)),
            !pf_has_splits(call) && !call.lse.data && !call.sinks.data,
            {},
            {},
            {},
            {},
            {},
            {}};
}

/* The rows of a sequence whose indices cannot be: every row_blocks-th block from this one, since there may be
 * more rows than the call has blocks for. */
PF_DEVICE void pf_store_bad_rows(const pf_call &call, const pf_block &block) {
    const int64_t step = call.row_blocks * PF_ROWS;
    for (int64_t at = block.first; !pf_has_splits(call) && at < block.num_rows; at += step)
        for (int64_t row = at + threadIdx.x / 32 % PF_COPY_WARPS; row < pf_min(at + PF_ROWS, block.num_rows);
             row += PF_COPY_WARPS)
            pf_store_bad_row(call, block.s, pf_head_of(block, row), pf_query_of(block, row));
}

/* What this block works on, told to all of its threads; false if there is nothing to compute. */
PF_DEVICE bool pf_begin(const pf_call &call, pf_block &block) {
    pf_work work;
    const int64_t heads = PF_PACKED ? call.num_kv_heads : call.num_heads;
    if (!pf_get_work(call, pf_get_item_in_sections(call, blockIdx.x, gridDim.x, heads, call.max_splits),
                     work))
        return false;
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0)
            block = pf_get_block(call, work);
        __syncwarp();
        pf_find_tiles(call, block);
    }
    __syncthreads();
    if (!pf_find_bad(call, block.s))
        return true;
    pf_store_bad_rows(call, block);
    return false;
}

/* Starts the copies of the block's rows; those past the last are the last one. */
PF_DEVICE void pf_copy_queries(const pf_call &call, const pf_block &block, unsigned char *shared) {
    typedef pf_copy<PF_HEAD_DIM> copy;
    for (int row = threadIdx.x / copy::LANES; row < PF_ROWS; row += copy::ROWS) {
        const int64_t i = pf_row_of(block, row);
        const char *q =
            pf_place(call.q, pf_query_offset(call.q, block.s, pf_head_of(block, i), pf_query_of(block, i)));
        pf_copy_row<PF_HEAD_DIM, PF_ROWS>(shared, row, q, true, (int)call.head_dim);
    }
}

/* What tells rows from one another: the keys that each sees, and what terms need to know. */
PF_DEVICE void pf_look_at_rows(const pf_call &call, const pf_block &block, unsigned char *shared) {
    const pf_mask mask = pf_known_mask(block.s.mask);
    for (int row = threadIdx.x % PF_COPY_THREADS; row < PF_ROWS; row += PF_COPY_THREADS) {
        const int64_t i = pf_row_of(block, row), query = pf_query_of(block, i);
        for (int side = pf_first_side(block); side < PF_NUM_SIDES; side++) {
            pf_span own = {block.keys_lo[side], block.keys_hi[side]};
            if (PF_SPANS)
                own = pf_clip(pf_visible(&mask, query, side), own.lo, own.hi);
            if (PF_SPANS && block.first + row / PF_WARP_ROWS * PF_WARP_ROWS >= block.num_rows)
                own = {0, 0}; /* a warp without rows has nothing to do */
            ((int2 *)(shared + PF_SPANS_AT))[side * PF_ROWS + row] = make_int2((int)own.lo, (int)own.hi);
        }
#if PF_FINAL
        const pf_query q = pf_get_query(call, block.s, pf_head_of(block, i), query);
        ((pf_row_terms *)(shared + PF_QUERIES_AT))[row] = {q.position, q.bias, q.mask, q.slope,
                                                           (int32_t)q.head};
#endif
    }
}

/* Whether every row sees all of a tile. */
PF_DEVICE bool pf_is_full(const pf_block &block, int side, int tile) {
    return tile >= block.full_begin[side] && tile < block.full_end[side];
}

PF_DEVICE void pf_clear_state(pf_warp_state &state) {
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
}

/* Ends the sums of a warp's rows, the first of which is `first`: writes them, or their states where keys are
 * split. `scale` is what products are multiplied by. From `staged` on places of finished rows are the warp's
 * own; `write` writes what has been staged. Returns a bit for each row that has to be computed once more. */
template <class Write>
PF_DEVICE uint32_t pf_end_rows(const pf_call &call, const pf_block &block, int64_t first,
                               unsigned char *staged, float scale, pf_warp_state &state, const Write &write) {
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float &top = state.m[m][h];
            if (!PF_FINAL && top != -pf_infinity())
                top = pf_floored(top * scale);
            state.l[m][h] = pf_quad_sum(state.l[m][h]);
        }
    if (pf_has_splits(call)) {
        pf_store_states(call, block, first, state);
        return 0;
    }
    const uint32_t broken = pf_finish_rows(call, block, first, staged, state);
    if (pf_are_staged(call))
        write();
    return broken;
}

#endif
