/* Prefill on the ordinary arithmetic units, in float32 or float64: every type, every option, widths up to 256.
 *
 * A block has PF_ROWS query rows and walks over tiles of PF_KEYS keys. Keys and values lie in shared memory as
 * they lie in their arrays, a row a key: along head_dim for scores, along head_dim_v for outputs a thread reads
 * 16 bytes at a time and needs no transposed copy. A warp has 2 * PF_THREAD_ROWS rows and all keys of a tile:
 * lane 16 g + c has rows g * PF_THREAD_ROWS + r, scores of keys c + 16 j, and outputs of c's columns. So row
 * maxima are found inside a half warp, weights go through shared memory that is the warp's own, and the block
 * waits for itself twice a tile only: keys arrive while values are multiplied, values while scores are.
 *
 * Tiles begin at multiples of PF_KEYS from key 0, and the sums of a tile begin at zero: bits depend on
 * positions, and there is no chain of additions over all keys. */
#include "careful.cuh"

/* Constants of a variant, by gpu/_forward_fma.py. */
#ifndef PF_WARPS
#define PF_WARPS 4         /* of a block */
#define PF_MIN_BLOCKS 2    /* per multiprocessor */
#define PF_THREAD_ROWS 8   /* query rows of a thread */
#define PF_KEYS 64         /* of a tile */
#define PF_PART 32         /* keys whose weights are in shared memory at a time */
#define PF_CHUNK 8         /* outputs of a row that a thread sums up at a time */
#define PF_DIM 128         /* head_dim rounded up to a class, and head_dim_v */
#define PF_DIM_V 128
#define PF_Q_TYPE PF_F32
#define PF_KV_TYPE PF_F32
#define PF_OUT_TYPE PF_F32
#define PF_VECTOR 1        /* rows are contiguous and aligned to 16 bytes, widths are multiples of 16 bytes */
#define PF_PAGED 0
#define PF_SCALED 0
#define PF_SPANS 0         /* not every row sees every key */
#define PF_FOLD 1          /* scores are q.k times a positive factor: log2(e) goes into it */
#endif

#ifndef PF_STEP_OF_DIMS
#define PF_STEP_OF_DIMS 16
#endif
#ifndef PF_UNROLL_KEYS
#define PF_UNROLL_KEYS 2
#endif
#ifndef PF_UNROLL_LOADS
#define PF_UNROLL_LOADS 8
#endif
enum {
    PF_THREADS = 32 * PF_WARPS,
    PF_WARP_ROWS = 2 * PF_THREAD_ROWS,
    PF_ROWS = PF_WARP_ROWS * PF_WARPS,
    PF_COLUMNS = 16, /* lanes that share a row */
    PF_VEC = 16 / sizeof(pf_real),
    PF_THREAD_KEYS = PF_KEYS / PF_COLUMNS,
    PF_PARTS = PF_KEYS / PF_PART,
    PF_THREAD_DIMS = PF_DIM_V / PF_COLUMNS,
    PF_DIM_VEC = PF_THREAD_DIMS % PF_VEC == 0 ? PF_VEC : 2, /* outputs side by side */
    PF_DIM_STEP = PF_STEP_OF_DIMS, /* head_dim is multiplied in steps of */
    /* Is anything done to scores beside a factor? Are keys hidden by what is no span? */
    PF_HIDES = PF_HAS(MASK) || PF_HAS(BIAS) || PF_HAS(TREE) || PF_HAS(MASK_MOD),
    PF_TABLE = PF_PAGED || PF_SCALED,
    /* Copied as they are, without passing through registers. */
    PF_ASYNC = PF_VECTOR && !PF_SCALED &&
               (int)PF_KV_TYPE == (sizeof(pf_real) == 4 ? (int)PF_F32 : (int)PF_F64),
    PF_SIDES = PF_SPANS ? PF_NUM_SIDES : 1,
};
static_assert(PF_KEYS % PF_PART == 0 && PF_PART % PF_COLUMNS == 0, "parts are whole columns");
static_assert(PF_THREAD_DIMS % PF_CHUNK == 0 && PF_CHUNK % PF_DIM_VEC == 0, "chunks are whole vectors");
static_assert(PF_PARTS == 1 || PF_CHUNK == PF_THREAD_DIMS, "weights of one part are used once");

/* Where things lie in shared memory, counted in numbers. Pads and skews keep the addresses that the lanes of a
 * warp read at once in different banks. */
enum {
    PF_K_PITCH = PF_DIM + PF_VEC,
    PF_P_SKEW = 64 / sizeof(pf_real),
    PF_Q_PLACE = 0,
    PF_K_PLACE = PF_Q_PLACE + PF_ROWS * PF_DIM + PF_ROWS / PF_THREAD_ROWS * PF_VEC,
    PF_V_PLACE = PF_K_PLACE + PF_KEYS * PF_K_PITCH,
    PF_P_PLACE = PF_V_PLACE + PF_KEYS * PF_DIM_V,
    PF_FACTOR_PLACE = PF_P_PLACE + PF_ROWS * PF_PART + PF_ROWS / PF_THREAD_ROWS * PF_P_SKEW,
    PF_NUMBERS = PF_FACTOR_PLACE + (PF_TABLE ? 4 * PF_KEYS : 0),
};
struct pf_span32 {
    int32_t lo, hi;
};
struct pf_shared {
    pf_real *numbers;
    int64_t *offsets; /* of the rows of k and v: [tile is odd][k or v][key] */
    pf_span32 *spans; /* [side][row] */
};

PF_DEVICE int pf_q_row(int row) {
    return PF_Q_PLACE + row * PF_DIM + row / PF_THREAD_ROWS * PF_VEC;
}

PF_DEVICE int pf_p_row(int row) {
    return PF_P_PLACE + row * PF_PART + row / PF_THREAD_ROWS * PF_P_SKEW;
}

template <int N> struct alignas(N * sizeof(pf_real)) pf_vector {
    pf_real x[N];
};

template <int N> PF_DEVICE pf_vector<N> pf_read(const pf_real *from) {
    return *(const pf_vector<N> *)from;
}

PF_DEVICE pf_vector<PF_VEC> pf_zeros() {
    pf_vector<PF_VEC> zeros;
#pragma unroll
    for (int e = 0; e < PF_VEC; e++)
        zeros.x[e] = 0;
    return zeros;
}

/* --- loading --- */

/* PF_VEC elements of a row from element d on, side by side and aligned. */
template <int TYPE> PF_DEVICE pf_vector<PF_VEC> pf_load_vector(const char *row, int d) {
    const char *from = row + pf_byte_of(TYPE, d);
    pf_vector<PF_VEC> to;
    if (TYPE == PF_F32 || TYPE == PF_F64)
        return *(const pf_vector<PF_VEC> *)from;
    if (TYPE == PF_F16 || TYPE == PF_BF16) {
        const uint2 bits = *(const uint2 *)from;
#pragma unroll
        for (int e = 0; e < PF_VEC; e++) {
            const uint16_t half = (uint16_t)((e & 2 ? bits.y : bits.x) >> 16 * (e & 1));
            to.x[e] = (pf_real)(TYPE == PF_F16 ? pf_from_f16(half) : pf_from_bf16(half));
        }
        return to;
    }
    const uint32_t bits = TYPE == PF_I4 ? *(const uint16_t *)from : *(const uint32_t *)from;
#pragma unroll
    for (int e = 0; e < PF_VEC; e++) {
        if (TYPE == PF_F8E4M3)
            to.x[e] = (pf_real)pf_from_e4m3((uint8_t)(bits >> 8 * e));
        else if (TYPE == PF_F8E5M2)
            to.x[e] = (pf_real)pf_from_e5m2((uint8_t)(bits >> 8 * e));
        else if (TYPE == PF_I8)
            to.x[e] = (pf_real)(int8_t)(bits >> 8 * e);
        else
            to.x[e] = (pf_real)((int32_t)(bits << (28 - 4 * e)) >> 28);
    }
    return to;
}

template <int TYPE> PF_DEVICE pf_vector<PF_VEC> pf_load(const char *row, int d, int dims, int64_t stride) {
    if (PF_VECTOR)
        return pf_load_vector<TYPE>(row, d);
    pf_vector<PF_VEC> to = pf_zeros();
#pragma unroll
    for (int e = 0; e < PF_VEC; e++)
        if (d + e < dims)
            to.x[e] = pf_element(row, TYPE, stride, d + e);
    return to;
}

/* How the threads of a block share rows of DIMS numbers: LANES neighbours a row, `VECTORS` of 16 bytes each. */
template <int DIMS> struct pf_shares {
    static constexpr int ALL = DIMS / PF_VEC;
    static constexpr int LANES = ALL % 32 == 0 ? 32 : ALL % 16 == 0 ? 16 : 8;
    static constexpr int VECTORS = ALL / LANES;
    static constexpr int ROWS = PF_THREADS / LANES; /* at a time */
};

/* What is padding in rows of DIMS numbers is 0 once and for all. */
template <int DIMS, int PITCH> PF_DEVICE void pf_clear(pf_real *to, int rows) {
    for (int i = threadIdx.x; i < rows * (DIMS / PF_VEC); i += PF_THREADS)
        *(pf_vector<PF_VEC> *)(to + i / (DIMS / PF_VEC) * PITCH + i % (DIMS / PF_VEC) * PF_VEC) = pf_zeros();
}

PF_DEVICE void pf_load_queries(const pf_call &call, const pf_sequence &s, int64_t head, int64_t first,
                               int num_rows, pf_real *numbers) {
    typedef pf_shares<PF_DIM> shares;
    const int lane = threadIdx.x % shares::LANES, dims = (int)call.head_dim;
    pf_real factor = 1;
    if (call.q_scale.data)
        factor = (pf_real)pf_number_at(call.q_scale, s.index * call.q_scale.stride_batch +
                                                         pf_quotient(head, s.group) * call.q_scale.stride_head);
    for (int row = threadIdx.x / shares::LANES; row < PF_ROWS; row += shares::ROWS) {
        const char *from = pf_place(call.q, pf_query_offset(call.q, s, head, first + row));
#pragma unroll
        for (int i = 0; i < shares::VECTORS; i++) {
            const int d = (lane + i * shares::LANES) * PF_VEC;
            pf_vector<PF_VEC> x = pf_zeros();
            if (row < num_rows && d < dims)
                x = pf_load<PF_Q_TYPE>(from, d, dims, call.q.stride_dim);
#pragma unroll
            for (int e = 0; e < PF_VEC; e++)
                x.x[e] *= factor;
            *(pf_vector<PF_VEC> *)(numbers + pf_q_row(row) + d) = x;
        }
    }
}

/* Rows of k (WHICH 0) or v (1) from key `first` on. Keys past the length become 0. */
template <int WHICH, int DIMS, int PITCH>
PF_DEVICE void pf_load_keys(const pf_call &call, const pf_tensor &t, const pf_sequence &s, int64_t kv_head,
                            int first, int parity, const pf_shared &shared, pf_real *to) {
    typedef pf_shares<DIMS> shares;
    const int lane = threadIdx.x % shares::LANES, row = threadIdx.x / shares::LANES;
    const int dims = (int)(WHICH ? call.head_dim_v : call.head_dim), left = (int)s.mask.num_keys - first;
    const int64_t step = shares::ROWS * t.stride_token * pf_dtype_size(PF_KV_TYPE);
    const char *from = (const char *)t.data;
    if (!PF_PAGED)
        from += (kv_head * t.stride_head + s.kv_batch * t.stride_batch + (s.kv_token + first + row) * t.stride_token) *
                pf_dtype_size(PF_KV_TYPE);
    to += row * PITCH;
#pragma unroll PF_UNROLL_LOADS
    for (int pass = 0; pass < PF_KEYS / shares::ROWS; pass++) {
        const int key = row + pass * shares::ROWS;
        const bool valid = key < left;
        const char *place = from + pass * step;
        if (PF_PAGED)
            place = from + shared.offsets[(2 * parity + WHICH) * PF_KEYS + key] * pf_dtype_size(PF_KV_TYPE);
#pragma unroll
        for (int i = 0; i < shares::VECTORS; i++) {
            const int d = (lane + i * shares::LANES) * PF_VEC;
            if (d >= dims)
                continue;
            pf_real *into = to + pass * shares::ROWS * PITCH + d;
            if (PF_ASYNC) {
                pf_cp_async16(into, place + d * (int)sizeof(pf_real), valid);
                continue;
            }
            pf_vector<PF_VEC> x = pf_zeros();
            if (valid)
                x = pf_load<PF_KV_TYPE>(place, d, dims, t.stride_dim);
            if (PF_SCALED) {
                const pf_real factor =
                    shared.numbers[PF_FACTOR_PLACE + (2 * parity + WHICH) * PF_KEYS + key];
#pragma unroll
                for (int e = 0; e < PF_VEC; e++)
                    x.x[e] *= factor;
            }
            *(pf_vector<PF_VEC> *)into = x;
        }
    }
    if (PF_ASYNC)
        pf_cp_async_commit();
}

/* Where the keys of a tile lie and what they are multiplied by. */
PF_DEVICE void pf_fill_table(const pf_call &call, const pf_sequence &s, int64_t kv_head, int first, int parity,
                             const pf_shared &shared) {
    for (int key = threadIdx.x; key < PF_KEYS; key += PF_THREADS) {
        const int64_t j = first + key;
        const bool valid = j < s.mask.num_keys;
        if (PF_PAGED) {
            int64_t *offsets = shared.offsets + 2 * parity * PF_KEYS + key;
            offsets[0] = valid ? pf_key_offset(call, call.k, s, kv_head, j) : 0;
            offsets[PF_KEYS] = valid ? pf_key_offset(call, call.v, s, kv_head, j) : 0;
        }
        if (PF_SCALED) {
            pf_real *factors = shared.numbers + PF_FACTOR_PLACE + 2 * parity * PF_KEYS + key;
            factors[0] = valid ? pf_scale_at(call, call.k_scale, s, kv_head, j) : (pf_real)0;
            factors[PF_KEYS] = valid ? pf_scale_at(call, call.v_scale, s, kv_head, j) : (pf_real)0;
        }
    }
}

/* --- the two products --- */

PF_DEVICE void pf_multiply_keys(const pf_real *q, const pf_real *k, int dims,
                                pf_real (&scores)[PF_THREAD_ROWS][PF_THREAD_KEYS]) {
#pragma unroll
    for (int r = 0; r < PF_THREAD_ROWS; r++)
#pragma unroll
        for (int j = 0; j < PF_THREAD_KEYS; j++)
            scores[r][j] = 0;
#pragma unroll 1
    for (int d = 0; d < dims; d += PF_DIM_STEP) {
#pragma unroll
        for (int step = 0; step < PF_DIM_STEP; step += PF_VEC) {
            pf_vector<PF_VEC> key[PF_THREAD_KEYS];
#pragma unroll
            for (int j = 0; j < PF_THREAD_KEYS; j++)
                key[j] = pf_read<PF_VEC>(k + j * PF_COLUMNS * PF_K_PITCH + d + step);
#pragma unroll
            for (int r = 0; r < PF_THREAD_ROWS; r++) {
                const pf_vector<PF_VEC> query = pf_read<PF_VEC>(q + r * PF_DIM + d + step);
#pragma unroll
                for (int e = 0; e < PF_VEC; e++)
#pragma unroll
                    for (int j = 0; j < PF_THREAD_KEYS; j++)
                        scores[r][j] = fma(query.x[e], key[j].x[e], scores[r][j]);
            }
        }
    }
}

/* Adds the values of one part to the sums of PF_CHUNK outputs of each row. */
PF_DEVICE void pf_multiply_values(const pf_real *p, const pf_real *v,
                                  pf_real (&sums)[PF_THREAD_ROWS][PF_CHUNK]) {
#pragma unroll PF_UNROLL_KEYS
    for (int key = 0; key < PF_PART; key += PF_VEC) {
        pf_vector<PF_VEC> weight[PF_THREAD_ROWS];
#pragma unroll
        for (int r = 0; r < PF_THREAD_ROWS; r++)
            weight[r] = pf_read<PF_VEC>(p + r * PF_PART + key);
#pragma unroll
        for (int e = 0; e < PF_VEC; e++) {
#pragma unroll
            for (int c = 0; c < PF_CHUNK; c += PF_DIM_VEC) {
                const pf_vector<PF_DIM_VEC> value = pf_read<PF_DIM_VEC>(
                    v + (key + e) * PF_DIM_V + c * PF_COLUMNS);
#pragma unroll
                for (int r = 0; r < PF_THREAD_ROWS; r++)
#pragma unroll
                    for (int x = 0; x < PF_DIM_VEC; x++)
                        sums[r][c + x] = fma(weight[r].x[e], value.x[x], sums[r][c + x]);
            }
        }
    }
}

/* --- the state --- */

/* Of a thread's rows. m is the same in the lanes of a row, l is the sum over the lane's own keys. Where PF_FOLD,
 * m counts in units of log2. */
struct pf_rows {
    pf_real m[PF_THREAD_ROWS], l[PF_THREAD_ROWS];
    pf_real o[PF_THREAD_ROWS][PF_THREAD_DIMS];
};

PF_DEVICE pf_real pf_max_of_row(pf_real x) {
#pragma unroll
    for (int step = PF_COLUMNS / 2; step > 0; step /= 2)
        x = pf_max_of(x, __shfl_xor_sync(PF_WARP_ALL, x, step));
    return x;
}

PF_DEVICE pf_real pf_sum_of_row(pf_real x) {
#pragma unroll
    for (int step = PF_COLUMNS / 2; step > 0; step /= 2)
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
        top = pf_max_of(rows.m[r], pf_max_of_row(pf_max_of(PF_FOLD ? top * factor : top, floor)));
        const pf_real m = pf_floored(top);
        pf_real sum = 0;
        if (PF_FOLD)
            alpha[r] = pf_exp2(pf_floored(rows.m[r]) - m);
        else
            alpha[r] = pf_rescaling(rows.m[r], top);
#pragma unroll
        for (int j = 0; j < PF_THREAD_KEYS; j++) {
            scores[r][j] = PF_FOLD ? pf_exp2(fma(scores[r][j], factor, -m)) : pf_weight(scores[r][j] - m);
            sum += scores[r][j];
        }
        rows.m[r] = top;
        rows.l[r] = fma(rows.l[r], alpha[r], sum);
    }
}

/* Products to final scores, those of hidden keys to -inf. Returns which rows see a key. */
PF_DEVICE unsigned pf_finish_scores(const pf_call &call, const pf_sequence &s, int64_t head, int64_t first_row,
                                    int last_row, int row, int first_key, const pf_span32 *spans,
                                    pf_span32 same, pf_real (&scores)[PF_THREAD_ROWS][PF_THREAD_KEYS]) {
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
    if (TYPE == PF_F32 || TYPE == PF_F64) {
        if (sizeof(pf_real) == pf_dtype_size(TYPE))
            *(pf_vector<PF_DIM_VEC> *)to = x;
        else
#pragma unroll
            for (int e = 0; e < PF_DIM_VEC; e++)
                pf_set_element(to, TYPE, e, x.x[e]);
    } else {
#pragma unroll
        for (int e = 0; e < PF_DIM_VEC; e += 2) {
            const float low = (float)x.x[e], high = (float)x.x[e + 1];
            ((uint32_t *)to)[e / 2] = TYPE == PF_F16 ? (uint32_t)pf_to_f16(low) | (uint32_t)pf_to_f16(high) << 16
                                                     : (uint32_t)pf_to_bf16(low) | (uint32_t)pf_to_bf16(high) << 16;
        }
    }
}

PF_DEVICE double pf_natural(pf_real m) {
    return PF_FOLD ? (double)m * PF_LN_2 : (double)m;
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
    const int group = threadIdx.x % 32 / PF_COLUMNS;
    pf_real m, l;
    pf_share_rows(rows, column, &m, &l);
    const pf_real my_factor = (pf_real)pf_output_factor(pf_natural(m), (double)l, pf_sink_of(call, head));
    unsigned broken = 0;
#pragma unroll
    for (int r = 0; r < PF_THREAD_ROWS; r++) {
        const pf_real factor = __shfl_sync(PF_WARP_ALL, my_factor, r, PF_COLUMNS);
        bool finite = true;
#pragma unroll
        for (int c = 0; c < PF_THREAD_DIMS; c++) {
            const int d = c / PF_DIM_VEC * PF_DIM_VEC * PF_COLUMNS + column * PF_DIM_VEC + c % PF_DIM_VEC;
            rows.o[r][c] = pf_finished(rows.o[r][c], factor);
            finite &= d >= call.head_dim_v || pf_is_finite(rows.o[r][c]);
        }
        const unsigned votes = __ballot_sync(PF_WARP_ALL, !finite) >> group * PF_COLUMNS & 0xffffu;
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
            if (PF_VECTOR) {
                if (d < call.head_dim_v)
                    pf_store_vector<PF_OUT_TYPE>(out + d * pf_dtype_size(PF_OUT_TYPE), x);
                continue;
            }
#pragma unroll
            for (int e = 0; e < PF_DIM_VEC; e++)
                if (d + e < call.head_dim_v)
                    pf_set_element(out, PF_OUT_TYPE, (d + e) * call.out.stride_dim, x.x[e]);
        }
    }
    if (column < PF_THREAD_ROWS && row + column < num_rows && !(broken >> column & 1))
        pf_store_lse(call, s, head, first_row + row + column, pf_natural(m), (double)l);
    return broken;
}

/* The states of a split, in natural units. */
PF_DEVICE void pf_store_states(const pf_call &call, const pf_sequence &s, int64_t head, int64_t split,
                               int64_t first_row, int num_rows, int row, int column, const pf_rows &rows) {
    pf_real m, l, my_factor = 1;
    pf_share_rows(rows, column, &m, &l);
    if (PF_FOLD && m > pf_lowest<pf_real>()) { /* what rounding takes from m goes to l and o */
        const double folded = (double)m;
        m = (pf_real)pf_natural(m);
        my_factor = (pf_real)exp2(folded - (double)m * PF_LOG2_E);
    }
#pragma unroll
    for (int r = 0; r < PF_THREAD_ROWS; r++) {
        const pf_real factor = __shfl_sync(PF_WARP_ALL, my_factor, r, PF_COLUMNS);
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
    const int lane = threadIdx.x % 32, column = lane % PF_COLUMNS;
    const int warp_row = threadIdx.x / 32 * PF_WARP_ROWS, row = warp_row + lane / PF_COLUMNS * PF_THREAD_ROWS;
    const int num_rows = (int)pf_min(PF_ROWS, s.num_queries - first_row);
    const int64_t kv_head = pf_quotient(head, s.group);
    const bool is_split = call.partial != nullptr;
    const int64_t lo = is_split ? pf_split_lo(call, s, split) : 0;
    const int64_t hi = is_split ? pf_split_lo(call, s, split + 1) : s.mask.num_keys;
    const pf_span32 same = {(int32_t)lo, (int32_t)hi};
    pf_real *const numbers = shared.numbers;

    pf_span32 any[PF_SIDES];
#pragma unroll
    for (int side = 0; side < PF_SIDES; side++)
        any[side] = PF_SPANS ? pf_narrowed(pf_visible_to_any(&s.mask, first_row, first_row + num_rows - 1, side),
                                           lo, hi)
                             : same;
    pf_tile tile = {0, any[0].lo / PF_KEYS * PF_KEYS};
    pf_skip(tile, any);
    if (PF_SPANS)
        for (int i = threadIdx.x; i < PF_SIDES * PF_ROWS; i += PF_THREADS)
            shared.spans[i] = pf_narrowed(
                pf_visible(&s.mask, first_row + min(i % PF_ROWS, num_rows - 1), i / PF_ROWS), lo, hi);
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
    if (tile.side < PF_SIDES)
        pf_load_keys<0, PF_DIM, PF_K_PITCH>(call, call.k, s, kv_head, tile.first, parity, shared,
                                            numbers + PF_K_PLACE);
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
        __syncthreads(); /* the keys have come, and nobody reads the values of the last tile any more */
        pf_load_keys<1, PF_DIM_V, PF_DIM_V>(call, call.v, s, kv_head, tile.first, parity, shared,
                                            numbers + PF_V_PLACE);
        if (PF_TABLE && next.side < PF_SIDES)
            pf_fill_table(call, s, kv_head, next.first, parity ^ 1, shared);
        pf_real scores[PF_THREAD_ROWS][PF_THREAD_KEYS], alpha[PF_THREAD_ROWS];
        if (works) {
            pf_multiply_keys(numbers + pf_q_row(row), numbers + PF_K_PLACE + column * PF_K_PITCH,
                             (int)pf_round_up(call.head_dim, PF_DIM_STEP), scores);
            unsigned seen = ~0u;
            if (PF_HIDES || !PF_FOLD || tests)
                seen = pf_finish_scores(call, s, head, first_row, num_rows - 1, row, tile.first + column,
                                        spans, same, scores);
            pf_weigh(call, seen, rows, alpha, scores);
        }
        if (PF_ASYNC)
            pf_cp_async_wait<0>();
        __syncthreads(); /* the values have come, and nobody reads the keys any more */
        parity ^= 1;
        if (next.side < PF_SIDES)
            pf_load_keys<0, PF_DIM, PF_K_PITCH>(call, call.k, s, kv_head, next.first, parity, shared,
                                                numbers + PF_K_PLACE);
        tile = next;
        if (!works)
            continue;
        pf_real *const p = numbers + pf_p_row(row);
        const pf_real *const v = numbers + PF_V_PLACE + column * PF_DIM_VEC;
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
                            p[r * PF_PART + j * PF_COLUMNS + column] =
                                scores[r][part * (PF_PART / PF_COLUMNS) + j];
                    __syncwarp();
                }
                pf_multiply_values(p, v + chunk * PF_CHUNK * PF_COLUMNS + part * PF_PART * PF_DIM_V, sums);
            }
#pragma unroll
            for (int r = 0; r < PF_THREAD_ROWS; r++)
#pragma unroll
                for (int c = 0; c < PF_CHUNK; c++)
                    rows.o[r][chunk * PF_CHUNK + c] = fma(rows.o[r][chunk * PF_CHUNK + c], alpha[r], sums[r][c]);
        }
    }

    if (is_split) {
        pf_store_states(call, s, head, split, first_row, num_rows, row, column, rows);
        return;
    }
    const unsigned broken = pf_store_rows(call, s, head, first_row, num_rows, row, column, rows);
    if (__any_sync(PF_WARP_ALL, broken))
        for (int i = 0; i < PF_WARP_ROWS; i++)
            if (__shfl_sync(PF_WARP_ALL, broken, i / PF_THREAD_ROWS * PF_COLUMNS) >> i % PF_THREAD_ROWS & 1)
                pf_careful_row(call, s, head, first_row + warp_row + i);
}

extern "C" __global__ void __launch_bounds__(PF_THREADS, PF_MIN_BLOCKS)
    pf_forward_fma(const __grid_constant__ pf_call call) {
    PF_DYNAMIC_SHARED(memory);
    const pf_item item = pf_get_item(call, call.num_heads, call.max_splits);
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
    if (PF_DIM > call.head_dim)
        pf_clear<PF_DIM, PF_K_PITCH>(shared.numbers + PF_K_PLACE, PF_KEYS);
    if (PF_DIM_V > call.head_dim_v)
        pf_clear<PF_DIM_V, PF_DIM_V>(shared.numbers + PF_V_PLACE, PF_KEYS);
    for (int64_t block = item.row_block; block < blocks; block += call.row_blocks) {
        /* The blocks that see most come first. */
        const int64_t first_row = (call.causal ? blocks - 1 - block : block) * PF_ROWS;
        if (!bad) {
            __syncthreads();
            pf_forward_rows(call, s, item.head, item.split, first_row, shared);
        } else if (!call.partial)
            for (int i = threadIdx.x / 32; i < PF_ROWS && first_row + i < s.num_queries; i += PF_WARPS)
                pf_store_bad_row(call, s, item.head, first_row + i);
    }
}
