/* Attention of few rows (at most 16 per key/value head at a time) on the matrix unit, keys split over blocks.
 *
 * A block has one head of keys of one sequence, between two borders. Its warps are independent streams: warp
 * w takes the chunks of keys whose number is w modulo the number of streams, brings them through a ring of
 * its own in shared memory, and keeps the state of all rows in registers; no barrier stands in the stream,
 * since the speed is that of memory and what counts is how many bytes are under way. The states are merged at
 * the end in the order of the warps. Where values are too wide for the registers of a warp, the warps are one
 * team: all of them work on the same chunk and compute the same scores, and each has its part of the outputs.
 *
 * Rows of the A operand are queries times heads of the group. Stored codes become float16 on the way from
 * shared memory to registers, which is exact for all of them; the order of the dims inside a product is
 * chosen such that a lane converts whole words. */
#include "decode_merge.cuh"

PF_DEVICE void pf_multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if PF_MMA_BF16 /* no name of an instruction that an architecture lacks */
    pf_mma_bf16(d, a, b);
#else
    pf_mma_f16(d, a, b);
#endif
}

/* The rows of a lane. */
struct pf_rows {
    pf_query query[PF_LANE_ROWS];
    float factor[PF_LANE_ROWS]; /* of products */
};

/* Keys of a chunk as fragments of one or two steps of 16 dims. */
PF_DEVICE void pf_load_keys(const unsigned char *rows, int step, uint32_t (&b)[PF_KEY_BLOCKS][2][2]) {
    const int lane = threadIdx.x % 32;
    if constexpr (PF_BITS == 16) {
#pragma unroll
        for (int pair = 0; pair < PF_KEY_BLOCKS / 2; pair++) {
            uint32_t r[4];
            const int key = 16 * pair + lane / 16 * 8 + lane % 8;
            pf_ldmatrix_x4(r, rows + key * PF_K_ROW + 32 * step + lane / 8 % 2 * 16);
#pragma unroll
            for (int i = 0; i < 4; i++)
                b[2 * pair + i / 2][0][i % 2] = r[i];
        }
    } else {
#pragma unroll
        for (int block = 0; block < PF_KEY_BLOCKS; block++) {
            const unsigned char *row = rows + (8 * block + lane / 4) * PF_K_ROW + lane % 4 * 4;
            if constexpr (PF_BITS == 8) {
                pf_widen_bytes(*(const uint32_t *)(row + 16 * step), b[block][0]);
            } else {
                const uint32_t word = *(const uint32_t *)(row + 8 * step);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    b[block][i / 2][i % 2] = pf_widen_nibbles(word >> 4 * i);
            }
        }
    }
}

/* Values of 16 keys as fragments of BLOCKS blocks of outputs, those whose values lie in the same words. */
constexpr int PF_VALUE_BLOCKS = PF_BITS == 16 ? 2 : 32 / PF_BITS;

PF_DEVICE void pf_load_values(const unsigned char *rows, int row_bytes, int group,
                              uint32_t (&b)[PF_VALUE_BLOCKS][2]) {
    const int lane = threadIdx.x % 32;
    if constexpr (PF_BITS == 16) {
        uint32_t r[4];
        const int key = lane / 8 % 2 * 8 + lane % 8;
        pf_ldmatrix_x4_trans(r, rows + key * row_bytes + 32 * group + lane / 16 * 16);
#pragma unroll
        for (int i = 0; i < 4; i++)
            b[i / 2][i % 2] = r[i];
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) { /* keys 2 t and 2 t + 1, and eight further */
            const unsigned char *row =
                rows + (8 * half + lane % 4 * 2) * row_bytes + 32 * group + lane / 4 * 4;
            const uint32_t even = *(const uint32_t *)row, odd = *(const uint32_t *)(row + row_bytes);
            if constexpr (PF_BITS == 8) {
                uint32_t low[2], high[2];
                pf_widen_bytes(__byte_perm(even, odd, 0x5140), low);
                pf_widen_bytes(__byte_perm(even, odd, 0x7362), high);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    b[i][half] = low[i];
                    b[2 + i][half] = high[i];
                }
            } else {
                const uint32_t low = __byte_perm(even, odd, 0x5410), high = __byte_perm(even, odd, 0x7632);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    b[i][half] = pf_widen_nibbles(low >> 4 * i);
                    b[4 + i][half] = pf_widen_nibbles(high >> 4 * i);
                }
            }
        }
    }
}

/* Queries of one step of dims: registers 0 and 2 have row g, 1 and 3 row g + 8. */
struct pf_fragment {
    uint32_t r[4];
};

/* A scale that makes elements infinite shows, whatever else is in the products. */
PF_DEVICE float pf_checked_scale(float scale) {
    constexpr float largest = PF_BITS == 4              ? 8.0f
                              : PF_KV_TYPE == PF_I8     ? 128.0f
                              : PF_KV_TYPE == PF_F8E4M3 ? 448.0f
                                                        : 57344.0f;
    return fabsf(scale) * largest > -pf_lowest<float>() ? pf_nan() : scale;
}

template <bool ALL_SEEN>
PF_DEVICE void pf_weigh(const pf_call &call, const pf_sequence &s, const pf_stream &stream,
                        const pf_rows &rows, int32_t first, const float *k_scale,
                        float (&score)[PF_KEY_BLOCKS][4], pf_lane_state &state,
                        float (&alpha)[PF_LANE_ROWS]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < PF_LANE_ROWS; r++) {
        float m = -pf_infinity();
#pragma unroll
        for (int block = 0; block < PF_KEY_BLOCKS; block++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int key = 8 * block + 2 * t + c;
                const int32_t j = first + key;
                float product = score[block][2 * r + c] * rows.factor[r];
                if (PF_SCALED && k_scale)
                    product *= pf_checked_scale(k_scale[key]);
                bool seen = true;
                if constexpr (!ALL_SEEN) {
                    seen = pf_in(j, stream.row_lo[r][0], stream.row_hi[r][0]) ||
                           pf_in(j, stream.row_lo[r][1], stream.row_hi[r][1]);
                    if (PF_HIDES && seen)
                        seen = !pf_is_hidden(call, s, rows.query[r], j);
                }
                float x = -pf_infinity();
                if (seen) {
                    x = pf_final_score(call, s, rows.query[r], j, product);
                    m = pf_max_of(m, pf_floored(x));
                }
                score[block][2 * r + c] = x;
            }
        m = pf_max_of(m, __shfl_xor_sync(PF_WARP_ALL, m, 1));
        m = pf_max_of(m, __shfl_xor_sync(PF_WARP_ALL, m, 2));
        m = pf_max_of(m, state.m[r]);
        alpha[r] = pf_rescaling(state.m[r], m);
        state.m[r] = m;
        const float top = pf_floored(m);
        float sum = 0;
#pragma unroll
        for (int block = 0; block < PF_KEY_BLOCKS; block++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                score[block][2 * r + c] = pf_weight(score[block][2 * r + c] - top);
                sum += score[block][2 * r + c];
            }
        state.l[r] = state.l[r] * alpha[r] + sum;
    }
}

/* Scales of values go into the weights, but for the largest, which is left for the sums, in float32: so
 * weights stay within float16, and one scale for all keys does not touch them. Scales of keys that a row does
 * not see have no part in it. `factor` is what sums are to be multiplied by. */
PF_DEVICE void pf_scale_weights(const float *v_scale, float (&weight)[PF_KEY_BLOCKS][4],
                                float (&factor)[PF_LANE_ROWS]) {
    const int t = threadIdx.x % 4;
    float scale[PF_KEY_BLOCKS][2];
#pragma unroll
    for (int block = 0; block < PF_KEY_BLOCKS; block++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            scale[block][c] = pf_checked_scale(v_scale[8 * block + 2 * t + c]);
#pragma unroll
    for (int r = 0; r < PF_LANE_ROWS; r++) {
        float most = 0;
#pragma unroll
        for (int block = 0; block < PF_KEY_BLOCKS; block++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (weight[block][2 * r + c] != 0)
                    most = fmaxf(most, fabsf(scale[block][c]));
        most = fmaxf(most, __shfl_xor_sync(PF_WARP_ALL, most, 1));
        most = fmaxf(most, __shfl_xor_sync(PF_WARP_ALL, most, 2));
        /* As far from the least numbers of float16 as can be. Where an inverse would not have all its digits
         * a power of two does. */
        constexpr float headroom = PF_MMA_BF16 ? 1.0f : 1.0f / (1 << 14);
        const bool usual = most >= 1e-30f && most <= 1e36f;
        const float largest = usual ? most * headroom : __uint_as_float(pf_power_below(most));
        const float inverse = __frcp_rn(largest);
#pragma unroll
        for (int block = 0; block < PF_KEY_BLOCKS; block++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                /* In this order a weight of 0 stays 0 beside any scale that is a number. */
                weight[block][2 * r + c] = weight[block][2 * r + c] * inverse * scale[block][c];
        factor[r] = largest;
    }
}

/* The sums of what the warps of a team have, in their order; the exchange is free again after the next
 * barrier. */
PF_DEVICE void pf_add_up(float *exchange, float (&score)[PF_KEY_BLOCKS][4]) {
    constexpr int numbers = 32 * 4 * PF_KEY_BLOCKS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 4 * PF_KEY_BLOCKS; i++)
        exchange[warp * numbers + 32 * i + lane] = score[i / 4][i % 4];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4 * PF_KEY_BLOCKS; i++) {
        float sum = 0;
#pragma unroll
        for (int other = 0; other < PF_TEAM_WARPS; other++)
            sum += exchange[other * numbers + 32 * i + lane];
        score[i / 4][i % 4] = sum;
    }
}

/* One chunk of keys, all of it in its stage. */
PF_DEVICE void pf_attend(const pf_call &call, const pf_sequence &s, const pf_stream &stream,
                         const pf_rows &rows, const uint4 *queries, const pf_fragment *kept, float *exchange,
                         const unsigned char *stage, int32_t chunk, int64_t v_in_k, pf_lane_state &state) {
    const int lane = threadIdx.x % 32;
    const float *scales = (const float *)(stage + PF_KEYS * (PF_K_ROW + PF_V_ROW));
    float score[PF_KEY_BLOCKS][4];
#pragma unroll
    for (int block = 0; block < PF_KEY_BLOCKS; block++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            score[block][i] = 0;
    constexpr int at_once = PF_BITS == 4 ? 2 : 1;
    static_assert(PF_TEAM_WARPS == 1 || at_once == 1, "teams have values of 16 bits");
#pragma unroll
    for (int own = 0; own < PF_OWN_STEPS; own += at_once) {
        const int step = PF_TEAM_WARPS == 1 ? own : own * PF_TEAM_WARPS + (int)threadIdx.x / 32;
        if (PF_K_STEPS % PF_TEAM_WARPS && step >= PF_K_STEPS)
            break;
        uint32_t b[PF_KEY_BLOCKS][2][2];
        pf_load_keys(stage, step, b);
#pragma unroll
        for (int next = 0; next < at_once; next++)
#pragma unroll
            for (int half = 0; half < PF_HALVES; half++) {
                uint32_t a[4];
                if constexpr (PF_KEEPS_QUERIES) {
#pragma unroll
                    for (int r = 0; r < 4; r++)
                        a[r] = PF_LANE_ROWS == 1 && r % 2 ? 0 : kept[half * PF_OWN_STEPS + own + next].r[r];
                } else {
                    const uint4 q = queries[32 * (half * PF_K_STEPS + step + next) + lane];
                    a[0] = q.x;
                    a[1] = q.y;
                    a[2] = q.z;
                    a[3] = q.w;
                }
#pragma unroll
                for (int block = 0; block < PF_KEY_BLOCKS; block++)
                    pf_multiply(score[block], a, b[block][next]);
            }
    }
    if constexpr (PF_TEAM_WARPS > 1)
        pf_add_up(exchange, score);
    const int32_t first = chunk * PF_KEYS, last = first + PF_KEYS;
    const bool all_seen = !PF_HIDES && ((first >= stream.all_lo[0] && last <= stream.all_hi[0]) ||
                                        (first >= stream.all_lo[1] && last <= stream.all_hi[1]));
    float alpha[PF_LANE_ROWS];
    const float *k_scale = call.k_scale.data ? scales : nullptr;
    if (all_seen)
        pf_weigh<true>(call, s, stream, rows, first, k_scale, score, state, alpha);
    else
        pf_weigh<false>(call, s, stream, rows, first, k_scale, score, state, alpha);
    float value_factor[PF_LANE_ROWS];
#pragma unroll
    for (int r = 0; r < PF_LANE_ROWS; r++)
        value_factor[r] = 1;
    if (PF_SCALED && call.v_scale.data)
        pf_scale_weights(scales + PF_KEYS, score, value_factor);
    uint32_t p[PF_KEYS / 16][PF_HALVES][4];
#pragma unroll
    for (int i = 0; i < PF_KEYS / 16; i++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            uint32_t pairs[PF_HALVES] = {};
            if (r % 2 < PF_LANE_ROWS)
                pf_split(score[2 * i + r / 2][r % 2 * 2], score[2 * i + r / 2][r % 2 * 2 + 1], pairs);
#pragma unroll
            for (int half = 0; half < PF_HALVES; half++)
                p[i][half][r] = pairs[half];
        }
    const int part = PF_TEAM_WARPS == 1 ? 0 : threadIdx.x / 32 * (PF_V_PART * PF_BITS / 8);
    const unsigned char *values = v_in_k >= 0 ? stage + v_in_k : stage + PF_KEYS * PF_K_ROW;
    const int row_bytes = v_in_k >= 0 ? PF_K_ROW : PF_V_ROW;
#pragma unroll
    for (int group = 0; group < PF_V_BLOCKS / PF_VALUE_BLOCKS; group++) {
        float sums[PF_VALUE_BLOCKS][4];
#pragma unroll
        for (int block = 0; block < PF_VALUE_BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[block][i] = 0;
#pragma unroll
        for (int i = 0; i < PF_KEYS / 16; i++) {
            uint32_t b[PF_VALUE_BLOCKS][2];
            pf_load_values(values + part + 16 * i * row_bytes, row_bytes, group, b);
#pragma unroll
            for (int half = 0; half < PF_HALVES; half++)
#pragma unroll
                for (int block = 0; block < PF_VALUE_BLOCKS; block++)
                    pf_multiply(sums[block], p[i][half], b[block]);
        }
#pragma unroll
        for (int block = 0; block < PF_VALUE_BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < 2 * PF_LANE_ROWS; i++) {
                float &o = state.o[PF_VALUE_BLOCKS * group + block][i];
                if constexpr (PF_HAS_VALUE_FACTOR)
                    o = fmaf(sums[block][i], PF_CODE_FACTOR * value_factor[i / 2], o * alpha[i / 2]);
                else
                    o = fmaf(o, alpha[i / 2], sums[block][i]);
            }
    }
}

PF_DEVICE pf_rows pf_get_rows(const pf_call &call, const pf_sequence &s, int64_t kv_head, int64_t first_row,
                              int64_t num_rows, const float *factors) {
    pf_rows rows;
#pragma unroll
    for (int r = 0; r < PF_LANE_ROWS; r++) {
        const int number = threadIdx.x % 32 / 4 + 8 * r;
        const int64_t row = pf_min(first_row + number, num_rows - 1), i = pf_query_of_row(s, row);
        rows.query[r] = pf_get_query(call, s, kv_head * s.group + row - i * s.group, i);
        rows.factor[r] = PF_CODE_FACTOR * (PF_NARROWS_QUERIES ? factors[number] : 1.0f);
        if (call.q_scale.data)
            rows.factor[r] *=
                ((const float *)call.q_scale.data)[pf_query_offset(call.q_scale, s, rows.query[r].head, i)];
    }
    return rows;
}

PF_DEVICE void pf_stream_sync() {
    if constexpr (PF_TEAM_WARPS == 1)
        __syncwarp();
    else
        __syncthreads();
}

/* Where a value lies in its key's row, in bytes, if values are a view into the keys; else -1. */
PF_DEVICE int64_t pf_place_in_keys(const pf_call &call) {
    if (PF_HEAD_DIM_V >= PF_HEAD_DIM || PF_SCALED || PF_BITS != 16)
        return -1;
    const int64_t distance = (const char *)call.v.data - (const char *)call.k.data;
    const bool same = call.k.stride_batch == call.v.stride_batch &&
                      call.k.stride_token == call.v.stride_token && call.k.stride_head == call.v.stride_head;
    /* Past the last dim of a key its place in shared memory is zeros. */
    const bool inside = distance >= 0 && distance + 2 * PF_HEAD_DIM_V <= 2 * PF_HEAD_DIM &&
                        distance + 2 * PF_V_DIM <= 2 * PF_K_DIM;
    return same && inside && distance % 16 == 0 ? distance : -1;
}

constexpr int PF_STATE_BYTES = 4 * PF_NUM_STREAMS * PF_ROWS * (PF_STATE_ROW + 2);
constexpr int PF_RING_BYTES = PF_NUM_STREAMS * PF_STAGES * PF_STAGE_BYTES;
constexpr int PF_RINGS_AT = PF_QUERY_BYTES + PF_FACTOR_BYTES + PF_EXCHANGE_BYTES;
static_assert(PF_RINGS_AT + (PF_RING_BYTES > PF_STATE_BYTES ? PF_RING_BYTES : PF_STATE_BYTES) <=
                  PF_SHARED_BYTES,
              "the plan gives less shared memory than this takes");

/* Rows of a sequence whose indices cannot be: every row_blocks-th block from this one, since there may be
 * more rows than the call has blocks for. Kept out of the kernel's registers. */
static __device__ __noinline__ void pf_store_bad_rows(const pf_call &call, int64_t sequence, int64_t kv_head,
                                                      int64_t first_row) {
    const pf_sequence s = pf_get_sequence(call, sequence);
    const int64_t num_rows = s.num_queries * s.group, step = call.row_blocks * PF_ROWS;
    for (int64_t first = first_row; first < num_rows; first += step)
        for (int64_t row = first + threadIdx.x / 32; row < pf_min(first + PF_ROWS, num_rows);
             row += PF_WARPS) {
            const int64_t i = pf_query_of_row(s, row);
            pf_store_bad_row(call, s, kv_head * s.group + row - i * s.group, i);
        }
}

extern "C" __global__ void __launch_bounds__(32 * PF_WARPS, PF_BLOCKS_PER_SM)
    pf_decode_mma(const __grid_constant__ pf_call call) {
    PF_DYNAMIC_SHARED(shared);
    unsigned char *const rings = shared + PF_RINGS_AT;
    const int mine = threadIdx.x / PF_LANES;
    unsigned char *const ring = rings + mine * PF_STAGES * PF_STAGE_BYTES;
    const pf_item item = pf_get_item(call, call.num_kv_heads, call.max_splits);
    const pf_sequence s = pf_get_sequence(call, item.sequence);
    const int64_t first_row = item.row_block * PF_ROWS, num_rows = s.num_queries * s.group;
    const int64_t num_splits = pf_has_splits(call) ? pf_num_splits(call, s) : 1;
    if (!pf_is_mine(call, s) || first_row >= num_rows || item.split >= num_splits)
        return;
    const int64_t last_row = pf_min(first_row + PF_ROWS, num_rows) - 1;
    const pf_span keys = pf_split_keys_of(call, s, num_splits, item.split);
    const pf_stream stream = pf_get_stream(call, s, item.head, keys.lo, keys.hi, first_row, last_row);
    const int64_t v_in_k = pf_place_in_keys(call);

    uint4 *const queries = (uint4 *)shared;
    float *const factors = (float *)(shared + PF_QUERY_BYTES);
    float *const exchange = (float *)(shared + PF_QUERY_BYTES + PF_FACTOR_BYTES);
    int32_t chunk = pf_own_chunk(stream, 0, mine), coming = chunk;
    int64_t page = pf_page_of(call, s, stream, coming);
    const auto fetch = [&](int stage) {
        if (coming < stream.end[1]) {
            const int64_t here = page;
            const int32_t next = pf_own_chunk(stream, coming + 1, mine);
            page = pf_page_of(call, s, stream, next); /* one chunk ahead of its use */
            pf_fill(call, stream, ring + stage * PF_STAGE_BYTES, coming, here, v_in_k >= 0);
            coming = next;
        }
        pf_cp_async_commit();
    };
#pragma unroll 1
    for (int stage = 0; stage < PF_STAGES - 1; stage++)
        fetch(stage);

    pf_lay_out_queries(call, s, item.head, first_row, num_rows, queries, factors);
    __syncthreads();
    const pf_rows rows = pf_get_rows(call, s, item.head, first_row, num_rows, factors);
    pf_fragment kept[PF_KEEPS_QUERIES ? PF_HALVES * PF_OWN_STEPS : 1];
    if constexpr (PF_KEEPS_QUERIES)
#pragma unroll
        for (int i = 0; i < PF_HALVES * PF_OWN_STEPS; i++) {
            const int own = i % PF_OWN_STEPS;
            const int step = PF_TEAM_WARPS == 1 ? own : own * PF_TEAM_WARPS + (int)threadIdx.x / 32;
            const uint4 q =
                queries[32 * (i / PF_OWN_STEPS * PF_K_STEPS + min(step, PF_K_STEPS - 1)) + threadIdx.x % 32];
            kept[i] = {{q.x, q.y, q.z, q.w}};
        }
    pf_lane_state state;
#pragma unroll
    for (int r = 0; r < PF_LANE_ROWS; r++) {
        state.m[r] = -pf_infinity();
        state.l[r] = 0;
    }
#pragma unroll
    for (int block = 0; block < PF_V_BLOCKS; block++)
#pragma unroll
        for (int i = 0; i < 2 * PF_LANE_ROWS; i++)
            state.o[block][i] = 0;

    for (int stage = 0; chunk < stream.end[1]; chunk = pf_own_chunk(stream, chunk + 1, mine)) {
        const int free = stage == 0 ? PF_STAGES - 1 : stage - 1; /* read from in the last round */
        if constexpr (PF_STAGES == 1) {
            pf_stream_sync();
            fetch(0);
            pf_cp_async_wait<0>();
            pf_stream_sync();
        } else {
            pf_cp_async_wait<PF_STAGES - 2>();
            pf_stream_sync();
            fetch(free);
        }
        pf_attend(call, s, stream, rows, queries, kept, exchange, ring + stage * PF_STAGE_BYTES, chunk,
                  v_in_k, state);
        stage = stage + 1 == PF_STAGES ? 0 : stage + 1;
    }
    pf_cp_async_wait<0>();
    __syncthreads(); /* states take the place of the rings */
    float *const states = (float *)rings;
    pf_lay_out_states(states, state);
    const bool bad = !pf_has_splits(call) && pf_find_bad(call, s);
    __syncthreads();
    if (bad) {
        pf_store_bad_rows(call, item.sequence, item.head, first_row);
        return;
    }
    for (int r = threadIdx.x / 32; r < PF_ROWS && first_row + r < num_rows; r += PF_WARPS) {
        const int64_t i = pf_query_of_row(s, first_row + r);
        const int64_t head = item.head * s.group + first_row + r - i * s.group;
        pf_merge_row(call, s, states, r, head, i, item.split);
    }
}
