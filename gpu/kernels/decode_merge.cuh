/* The end of a block of decode: the states of its streams, merged in their order, and rows finished or, where
 * keys are split, stored as states. */
#ifndef PF_DECODE_MERGE_CUH
#define PF_DECODE_MERGE_CUH

#include "decode_stream.cuh"

/* The state of a lane's rows; 2 r and 2 r + 1 are the columns of row r in a block of outputs. */
struct pf_lane_state {
    float m[PF_LANE_ROWS], l[PF_LANE_ROWS]; /* l: of this lane's keys */
    float o[PF_V_BLOCKS][2 * PF_LANE_ROWS];
};

/* Puts the states of all streams into shared memory: o of [stream][row][dim], then m and l of [stream][row].
 */
PF_DEVICE void pf_lay_out_states(float *states, const pf_lane_state &state) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int number = warp / PF_TEAM_WARPS, part = warp % PF_TEAM_WARPS;
    float *const m = states + PF_NUM_STREAMS * PF_ROWS * PF_STATE_ROW, *const l =
                                                                           m + PF_NUM_STREAMS * PF_ROWS;
#pragma unroll
    for (int r = 0; r < PF_LANE_ROWS; r++) {
        const int row = number * PF_ROWS + g + 8 * r;
        float sum = state.l[r];
        sum += __shfl_xor_sync(PF_WARP_ALL, sum, 1);
        sum += __shfl_xor_sync(PF_WARP_ALL, sum, 2);
        if (t == 0 && part == 0) {
            m[row] = state.m[r];
            l[row] = sum;
        }
#pragma unroll
        for (int block = 0; block < PF_V_BLOCKS; block++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                states[row * PF_STATE_ROW + part * PF_V_PART + pf_value_dim(block, t, c)] =
                    state.o[block][2 * r + c];
    }
}

/* One row, merged over the streams by one warp, and finished, or its state stored as the split's. */
PF_DEVICE void pf_merge_row(const pf_call &call, const pf_sequence &s, const float *states, int r,
                            int64_t head, int64_t i, int64_t split) {
    const int lane = threadIdx.x % 32;
    const float *const m = states + PF_NUM_STREAMS * PF_ROWS * PF_STATE_ROW, *const l =
                                                                                 m + PF_NUM_STREAMS * PF_ROWS;
    float top = -pf_infinity(), sum = 0, alpha[PF_NUM_STREAMS];
#pragma unroll
    for (int stream = 0; stream < PF_NUM_STREAMS; stream++)
        top = pf_max_of(top, m[stream * PF_ROWS + r]);
#pragma unroll
    for (int stream = 0; stream < PF_NUM_STREAMS; stream++) {
        alpha[stream] = pf_rescaling(m[stream * PF_ROWS + r], top);
        sum = fmaf(l[stream * PF_ROWS + r], alpha[stream], sum);
    }
    const bool partial = pf_has_splits(call);
    const int64_t row = partial ? pf_state_row(call, s, head, i) : 0;
    const float factor = partial ? 0 : pf_finishing_factor(top, sum, pf_sink_of(call, head));
    char *out = pf_place(call.out, pf_query_offset(call.out, s, head, i));
    bool finite = true;
    for (int d = lane; d < PF_HEAD_DIM_V; d += 32) {
        float o = 0;
#pragma unroll
        for (int stream = 0; stream < PF_NUM_STREAMS; stream++)
            o = fmaf(states[(stream * PF_ROWS + r) * PF_STATE_ROW + d], alpha[stream], o);
        if (partial) {
            pf_partial_o(call, split, row)[d] = o;
        } else {
            const float x = pf_finished(o, factor);
            finite &= pf_is_finite(x);
            pf_store_out(call, out, d, x);
        }
    }
    if (partial) {
        if (lane == 0) {
            *pf_partial_m(call, split, row) = top;
            *pf_partial_l(call, split, row) = sum;
        }
        return;
    }
    if (lane == 0)
        pf_store_lse(call, s, head, i, (double)top, (double)sum);
    if (!__all_sync(PF_WARP_ALL, finite))
        pf_careful_row_of(call, s.index, head, i);
}

#endif
