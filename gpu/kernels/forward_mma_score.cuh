/* Prefill on the matrix unit: from products to scores, weights and sums. */
#ifndef PF_FORWARD_MMA_SCORE_CUH
#define PF_FORWARD_MMA_SCORE_CUH

#include "forward_mma_tile.cuh"

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

/* The scores of a lane whose columns, 8 (i / 2) + i % 2, are less than `end`, one bit each. */
PF_DEVICE uint32_t pf_columns_below(int end) {
    const int whole = min(max(end, 0), 8 * 16), count = whole / 8 * 2 + min(whole % 8, 2);
    return count >= 32 ? ~0u : (1u << count) - 1;
}

/* What a tile needs beside the products: final scores, -inf for what a row does not see. `bottom` becomes the
 * lowest that the maximum of a row can be: -inf if the row sees none of the tile. `first` is the first key.
 */
PF_DEVICE void pf_finish_scores(const pf_call &call, const pf_sequence &s, const int2 *spans,
                                const pf_row_terms *terms, int first, pf_scores &score,
                                float (&bottom)[PF_ROW_TILES][2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - PF_FIRST_WARP;
#pragma unroll
    for (int m = 0; m < PF_ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = warp * PF_WARP_ROWS + 16 * m + 8 * h + lane / 4;
            const int column = first + lane % 4 * 2;
            const int lo = spans[row].x - column, hi = spans[row].y - column;
            uint32_t hidden = ~(pf_columns_below(hi) & ~pf_columns_below(lo));
#if PF_FINAL
            pf_finish_row(call, s, terms[row], m, h, first, score, hidden);
#endif
#pragma unroll
            for (int i = 0; i < PF_TILE / 4; i++)
                if (hidden >> i & 1)
                    score[m][i / 2][2 * h + i % 2] = -pf_infinity();
            constexpr uint32_t all = (uint32_t)(((uint64_t)1 << PF_TILE / 4) - 1);
            bottom[m][h] = (hidden & all) == all ? -pf_infinity() : pf_lowest<float>();
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

#endif
