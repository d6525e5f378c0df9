/* One query row, by one warp, with every option and any type: the kernel that is right first. It touches no
 * key that the row does not see, so that what is there can be NaN; fast kernels give it the rare rows that
 * came out as not finite. */
#ifndef PF_CAREFUL_CUH
#define PF_CAREFUL_CUH

#include "state.cuh"

#define PF_WARP_ALL 0xffffffffu

/* Types that a kernel has been compiled for; with these known, half as much code. */
#ifdef PF_Q_TYPE
#define PF_TYPE_OF_Q(call) (PF_Q_TYPE)
#else
#define PF_TYPE_OF_Q(call) ((call).q.dtype)
#endif
#ifdef PF_KV_TYPE
#define PF_TYPE_OF_KV(call) (PF_KV_TYPE)
#else
#define PF_TYPE_OF_KV(call) ((call).k.dtype)
#endif

/* Keys of a tile, some a lane: few enough to be summed up from zero in a chain. Outputs that one pass
 * computes, some a lane; wider values take several passes. */
enum {
    PF_CAREFUL_KEYS = 8,
    PF_CAREFUL_TILE = 32 * PF_CAREFUL_KEYS,
#ifdef PF_HEAD_DIM_V /* known to a kernel: no more registers and code than it takes */
    PF_CAREFUL_REGISTERS = (PF_HEAD_DIM_V + 31) / 32 < 18 ? (PF_HEAD_DIM_V + 31) / 32 : 18,
#else
    PF_CAREFUL_REGISTERS = 18,
#endif
    PF_CAREFUL_DIMS = 32 * PF_CAREFUL_REGISTERS,
};

/* Sums of values below the largest number cannot overflow before 2^40 keys if they are multiplied by this. */
#define PF_SMALLER_VALUES ((pf_real)9.094947017729282379150390625e-13)

struct pf_row_state {
    pf_real m, l;                    /* the same in all lanes */
    pf_real o[PF_CAREFUL_REGISTERS]; /* output first_dim + lane + 32 r */
};

PF_DEVICE pf_real pf_warp_max(pf_real x) {
    for (int step = 16; step > 0; step /= 2)
        x = pf_max_of(x, __shfl_xor_sync(PF_WARP_ALL, x, step));
    return x;
}

PF_DEVICE pf_real pf_warp_sum(pf_real x) {
    for (int step = 16; step > 0; step /= 2)
        x += __shfl_xor_sync(PF_WARP_ALL, x, step);
    return x;
}

PF_DEVICE pf_real pf_scale_at(const pf_call &call, const pf_tensor &scale, const pf_sequence &s,
                              int64_t kv_head, int64_t j) {
    return scale.data ? (pf_real)((const float *)scale.data)[pf_key_offset(call, scale, s, kv_head, j)]
                      : (pf_real)1;
}

PF_DEVICE const char *pf_key_row(const pf_call &call, const pf_tensor &t, const pf_sequence &s,
                                 int64_t kv_head, int64_t j) {
    return pf_place(t, pf_key_offset(call, t, s, kv_head, j));
}

/* q.k of one pair; scale of q and scale of k included. A stored element is what its scale makes of it: where
 * that is infinite, so is the element, and the sum shows it. */
PF_DEVICE pf_real pf_product(const pf_call &call, const pf_sequence &s, const pf_query &q, int64_t j) {
    const char *query = pf_place(call.q, pf_query_offset(call.q, s, q.head, q.i));
    const char *key = pf_key_row(call, call.k, s, q.kv_head, j);
    const pf_real scale = pf_scale_at(call, call.k_scale, s, q.kv_head, j);
    pf_real sums[4] = {0, 0, 0, 0}; /* shorter chains: where scores are large, what they round would show */
    for (int64_t first = 0; first < call.head_dim; first += 4)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first + i < call.head_dim)
                sums[i] += pf_element(query, PF_TYPE_OF_Q(call), call.q.stride_dim, first + i) *
                           (scale * pf_element(key, PF_TYPE_OF_KV(call), call.k.stride_dim, first + i));
    pf_real sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (call.q_scale.data)
        sum *= (pf_real)((const float *)call.q_scale.data)[pf_query_offset(call.q_scale, s, q.head, q.i)];
    return sum;
}

/* Adds keys [lo, hi) of one side to the state, tile by tile. */
static __device__ void pf_careful_side(const pf_call &call, const pf_sequence &s, const pf_query &q, int side,
                                       int64_t lo, int64_t hi, int64_t first_dim, pf_real value_factor,
                                       pf_row_state *state) {
    const int lane = threadIdx.x % 32;
    const pf_span span = pf_clip(pf_visible(&s.mask, q.i, side), lo, hi);
    const pf_real infinity = (pf_real)pf_infinity();
    /* Tiles begin at multiples of their size, wherever the span does: bits depend on positions alone. */
    for (int64_t first = span.lo / PF_CAREFUL_TILE * PF_CAREFUL_TILE; first < span.hi;
         first += PF_CAREFUL_TILE) {
        pf_real p[PF_CAREFUL_KEYS], highest = -infinity;
        unsigned visible[PF_CAREFUL_KEYS], any = 0;
#pragma unroll 1
        for (int n = 0; n < PF_CAREFUL_KEYS; n++) {
            const int64_t j = first + 32 * n + lane;
            const bool seen = j >= span.lo && j < span.hi && !pf_is_hidden(call, s, q, j);
            visible[n] = __ballot_sync(PF_WARP_ALL, seen);
            any |= visible[n];
            p[n] = seen ? pf_final_score(call, s, q, j, pf_product(call, s, q, j)) : -infinity;
            highest = pf_max_of(highest, seen ? pf_floored(p[n]) : -infinity);
        }
        if (any == 0)
            continue;
        const pf_real m = pf_max_of(state->m, pf_warp_max(highest));
        const pf_real alpha = pf_rescaling(state->m, m);
        pf_real sum = 0, sums[PF_CAREFUL_REGISTERS];
        for (int n = 0; n < PF_CAREFUL_KEYS; n++) {
            p[n] = visible[n] >> lane & 1 ? pf_weight(p[n] - m) : (pf_real)0;
            sum += p[n];
        }
        state->m = m;
        state->l = state->l * alpha + pf_warp_sum(sum);
#pragma unroll
        for (int r = 0; r < PF_CAREFUL_REGISTERS; r++)
            sums[r] = 0;
#pragma unroll 1
        for (int n = 0; n < PF_CAREFUL_KEYS; n++)
            for (unsigned rest = visible[n]; rest; rest &= rest - 1) {
                const int key = __ffs(rest) - 1;
                const pf_real weight = __shfl_sync(PF_WARP_ALL, p[n], key);
                const int64_t j = first + 32 * n + key;
                const char *value = pf_key_row(call, call.v, s, q.kv_head, j);
                const pf_real factor = value_factor * pf_scale_at(call, call.v_scale, s, q.kv_head, j);
#pragma unroll
                for (int r = 0; r < PF_CAREFUL_REGISTERS; r++) {
                    const int64_t d = first_dim + lane + 32 * r;
                    if (d < call.head_dim_v)
                        sums[r] +=
                            weight * (factor * pf_element(value, PF_TYPE_OF_KV(call), call.v.stride_dim, d));
                }
            }
#pragma unroll
        for (int r = 0; r < PF_CAREFUL_REGISTERS; r++)
            state->o[r] = state->o[r] * alpha + sums[r];
    }
}

PF_DEVICE void pf_careful_fold(const pf_call &call, const pf_sequence &s, const pf_query &q, int64_t lo,
                               int64_t hi, int64_t first_dim, pf_real value_factor, pf_row_state *state) {
    state->m = -(pf_real)pf_infinity();
    state->l = 0;
#pragma unroll
    for (int r = 0; r < PF_CAREFUL_REGISTERS; r++)
        state->o[r] = 0;
#pragma unroll 1
    for (int side = 0; side < PF_NUM_SIDES; side++)
        pf_careful_side(call, s, q, side, lo, hi, first_dim, value_factor, state);
}

/* Writes the outputs in `wanted`, a bit for each of the lane's registers, and the lse. Returns which are not
 * finite. */
PF_DEVICE unsigned pf_careful_store(const pf_call &call, const pf_sequence &s, const pf_query &q,
                                    int64_t first_dim, pf_real value_factor, const pf_row_state *state,
                                    unsigned wanted) {
    const int lane = threadIdx.x % 32;
    const double factor = pf_output_factor((double)state->m, (double)state->l, pf_sink_of(call, q.head));
    char *row = pf_place(call.out, pf_query_offset(call.out, s, q.head, q.i));
    unsigned broken = 0;
#pragma unroll
    for (int r = 0; r < PF_CAREFUL_REGISTERS; r++) {
        const int64_t d = first_dim + lane + 32 * r;
        if (d >= call.head_dim_v || !(wanted >> r & 1))
            continue;
        const pf_real x = pf_finished(state->o[r], (pf_real)(factor / (double)value_factor));
        pf_store_out(call, row, d, x);
        broken |= (unsigned)!pf_is_finite(x) << r;
    }
    if (first_dim == 0 && lane == 0)
        pf_store_lse(call, s, q.head, q.i, (double)state->m, (double)state->l);
    return broken;
}

/* All of one row. Values near the largest number may have an infinite sum, though not an infinite mean: what
 * is not finite is summed up once more, smaller. */
static __device__ __noinline__ void pf_careful_row(const pf_call &call, const pf_sequence &s, int64_t head,
                                                   int64_t i) {
    const pf_query q = pf_get_query(call, s, head, i);
    for (int64_t first_dim = 0; first_dim < call.head_dim_v; first_dim += PF_CAREFUL_DIMS) {
        unsigned wanted = ~0u;
#pragma unroll 1
        for (int attempt = 0; attempt < 2; attempt++) {
            const pf_real value_factor = attempt ? PF_SMALLER_VALUES : (pf_real)1;
            pf_row_state state;
            pf_careful_fold(call, s, q, 0, s.mask.num_keys, first_dim, value_factor, &state);
            wanted = pf_careful_store(call, s, q, first_dim, value_factor, &state, wanted);
            if (__all_sync(PF_WARP_ALL, wanted == 0))
                break;
        }
    }
}

/* The same for code that gets here rarely: what it knows of the sequence need not lie in memory for this. */
static __device__ __noinline__ void pf_careful_row_of(const pf_call &call, int64_t sequence, int64_t head,
                                                      int64_t i) {
    const pf_sequence s = pf_get_sequence(call, sequence);
    pf_careful_row(call, s, head, i);
}

/* A row of a sequence whose indices cannot be. */
PF_DEVICE void pf_store_bad_row(const pf_call &call, const pf_sequence &s, int64_t head, int64_t i) {
    const int lane = threadIdx.x % 32;
    char *row = pf_place(call.out, pf_query_offset(call.out, s, head, i));
    for (int64_t d = lane; d < call.head_dim_v; d += 32)
        pf_store_out(call, row, d, (pf_real)pf_nan());
    if (lane == 0 && call.lse.data) {
        char *place = pf_place(call.lse, pf_query_offset(call.lse, s, head, i));
        if (call.lse.dtype == PF_F64)
            *(double *)place = (double)pf_nan();
        else
            *(float *)place = pf_nan();
    }
}

#endif
