/* Prefill on the ordinary arithmetic units: constants, tiles in shared memory, products of tiles. */
#ifndef PF_FORWARD_FMA_TILE_CUH
#define PF_FORWARD_FMA_TILE_CUH

#include "careful.cuh"

/* Constants of a variant, by gpu/_forward_fma.py. */
#ifndef PF_WARPS
#define PF_WARPS 4       /* of a block */
#define PF_MIN_BLOCKS 2  /* per multiprocessor */
#define PF_THREAD_ROWS 8 /* query rows of a thread */
#define PF_KEYS 64       /* of a tile */
#define PF_PART 32       /* keys whose weights are in shared memory at a time */
#define PF_CHUNK 8       /* outputs of a row that a thread sums up at a time */
#define PF_STAGES 2      /* tiles of keys and values in shared memory */
#define PF_DIM 128       /* head_dim rounded up to a class, and head_dim_v */
#define PF_DIM_V 128
#define PF_PADDED 0 /* head_dim or head_dim_v is not its class */
#define PF_Q_TYPE PF_F32
#define PF_KV_TYPE PF_F32
#define PF_OUT_TYPE PF_F32
#define PF_VECTOR 1 /* rows are contiguous and aligned to 16 bytes, widths are multiples of 16 bytes */
#define PF_PAGED 0
#define PF_SCALED 0
#define PF_SPANS 0 /* not every row sees every key */
#define PF_FOLD 1  /* scores are q.k times a positive factor: log2(e) goes into it */
#endif

enum {
    PF_THREADS = 32 * PF_WARPS,
    PF_WARP_ROWS = 2 * PF_THREAD_ROWS,
    PF_ROWS = PF_WARP_ROWS * PF_WARPS,
    PF_COLUMNS = 16, /* lanes that share a row */
    PF_GROUPS = 32 / PF_COLUMNS,
    PF_VEC = 16 / sizeof(pf_real),
    PF_THREAD_KEYS = PF_KEYS / PF_COLUMNS,
    PF_PARTS = PF_KEYS / PF_PART,
    PF_THREAD_DIMS = PF_DIM_V / PF_COLUMNS,
    /* q.k is computed so many numbers at a time: many are faster, unless they are padding or take registers
     * that are short. */
    PF_DIM_STEP = PF_PADDED || PF_DIM < 64 || !PF_LONG_LOOPS ? 8 : 32 << (PF_DIM % 64 == 0),
    PF_DIM_VEC = PF_THREAD_DIMS % PF_VEC == 0 ? PF_VEC : 2, /* outputs side by side */
    /* Is anything done to scores beside a factor? Are keys hidden by what is no span? */
    PF_HIDES = PF_HAS(MASK) || PF_HAS(BIAS) || PF_HAS(TREE) || PF_HAS(MASK_MOD),
    PF_TABLE = PF_PAGED || PF_SCALED,
    /* Copied as they are, without passing through registers. */
    PF_ASYNC = PF_VECTOR && !PF_SCALED &&
        (int)PF_KV_TYPE == (sizeof(pf_real) == 4 ? (int)PF_F32 : (int)PF_F64),
    PF_SIDES = PF_SPANS ? PF_NUM_SIDES : 1,
};
static_assert(PF_STAGES == 1 || PF_STAGES == 2, "one tile, or one that comes while another is used");
static_assert(PF_KEYS % PF_PART == 0 && PF_PART % PF_COLUMNS == 0, "parts are whole columns");
static_assert(PF_THREAD_DIMS % PF_CHUNK == 0 && PF_CHUNK % PF_DIM_VEC == 0, "chunks are whole vectors");
static_assert(PF_PARTS == 1 || PF_CHUNK == PF_THREAD_DIMS, "weights of one part are used once");

/* Where things lie in shared memory, counted in numbers. Pads and skews keep the addresses that the lanes of
 * a warp read at once in different banks. */
enum {
    PF_K_PITCH = PF_DIM + PF_VEC,
    PF_P_SKEW = 64 / sizeof(pf_real),
    PF_Q_PLACE = 0,
    PF_K_PLACE = PF_Q_PLACE + PF_ROWS * PF_DIM + PF_ROWS / PF_THREAD_ROWS * PF_VEC,
    PF_V_PLACE = PF_K_PLACE + PF_STAGES * PF_KEYS * PF_K_PITCH,
    PF_P_PLACE = PF_V_PLACE + PF_STAGES * PF_KEYS * PF_DIM_V,
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

/* Where element e of a vector of row `row` is kept, of its queries and of its weights. Registers lie in two
 * banks, those of a vector in turn, and a bank gives out one register a cycle: the same element of
 * neighbouring rows, which is what multiplications in a row read, has to lie in both. */
PF_DEVICE int pf_turned(int row, int e) {
    return e ^ (row & 1);
}

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

/* How the threads of a block share rows of DIMS numbers: LANES neighbours a row, `VECTORS` of 16 bytes each.
 */
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
    for (int row = threadIdx.x / shares::LANES; row < PF_ROWS; row += shares::ROWS) {
        const char *from = pf_place(call.q, pf_query_offset(call.q, s, head, first + row));
        pf_real factor = 1;
        if (call.q_scale.data && row < num_rows)
            factor = (pf_real)((const float *)
                                   call.q_scale.data)[pf_query_offset(call.q_scale, s, head, first + row)];
#pragma unroll
        for (int i = 0; i < shares::VECTORS; i++) {
            const int d = (lane + i * shares::LANES) * PF_VEC;
            pf_vector<PF_VEC> x = pf_zeros();
            if (row < num_rows && !(PF_PADDED && d >= dims))
                x = pf_load<PF_Q_TYPE>(from, d, dims, call.q.stride_dim);
            pf_vector<PF_VEC> turned;
#pragma unroll
            for (int e = 0; e < PF_VEC; e++)
                turned.x[pf_turned(row, e)] = x.x[e] * factor;
            *(pf_vector<PF_VEC> *)(numbers + pf_q_row(row) + d) = turned;
        }
    }
}

/* Rows of k (WHICH 0) or v (1) from key `first` on. Keys past the length become 0. */
template <int WHICH, int DIMS, int PITCH>
PF_DEVICE void pf_load_keys(const pf_call &call, const pf_tensor &t, const pf_sequence &s, int64_t kv_head,
                            int first, int parity, const pf_shared &shared) {
    typedef pf_shares<DIMS> shares;
    pf_real *to = shared.numbers + (WHICH ? PF_V_PLACE : PF_K_PLACE) + parity % PF_STAGES * PF_KEYS * PITCH;
    const int lane = threadIdx.x % shares::LANES, row = threadIdx.x / shares::LANES;
    const int dims = (int)(WHICH ? call.head_dim_v : call.head_dim), left = (int)s.mask.num_keys - first;
    const int64_t step = shares::ROWS * t.stride_token * pf_dtype_size(PF_KV_TYPE);
    const char *from = (const char *)t.data;
    if (!PF_PAGED)
        from += (kv_head * t.stride_head + s.kv_batch * t.stride_batch +
                 (s.kv_token + first + row) * t.stride_token) *
                pf_dtype_size(PF_KV_TYPE);
    to += row * PITCH;
#pragma unroll 8
    for (int pass = 0; pass < (PF_KEYS + shares::ROWS - 1) / shares::ROWS; pass++) {
        const int key = row + pass * shares::ROWS;
        if (PF_KEYS % shares::ROWS && key >= PF_KEYS)
            continue;
        const bool valid = key < left;
        const char *place = from + pass * step;
        if (PF_PAGED)
            place = from + shared.offsets[(2 * parity + WHICH) * PF_KEYS + key] * pf_dtype_size(PF_KV_TYPE);
#pragma unroll
        for (int i = 0; i < shares::VECTORS; i++) {
            const int d = (lane + i * shares::LANES) * PF_VEC;
            if (PF_PADDED && d >= dims)
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
                const pf_real factor = shared.numbers[PF_FACTOR_PLACE + (2 * parity + WHICH) * PF_KEYS + key];
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
PF_DEVICE void pf_fill_table(const pf_call &call, const pf_sequence &s, int64_t kv_head, int first,
                             int parity, const pf_shared &shared) {
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

/* What a thread multiplies at a time: PF_VEC numbers of each of its rows and keys. */
struct pf_operands {
    pf_vector<PF_VEC> query[PF_THREAD_ROWS], key[PF_THREAD_KEYS];
};

PF_DEVICE void pf_read_operands(const pf_real *q, const pf_real *k, int d, pf_operands &x) {
#pragma unroll
    for (int j = 0; j < PF_THREAD_KEYS; j++)
        x.key[j] = pf_read<PF_VEC>(k + j * PF_COLUMNS * PF_K_PITCH + d);
#pragma unroll
    for (int r = 0; r < PF_THREAD_ROWS; r++)
        x.query[r] = pf_read<PF_VEC>(q + r * PF_DIM + d);
}

/* Operands are read one step ahead, so that nobody waits for them. Rows are gone through to and fro: a query
 * that two multiplications in a row share is read from the registers once. */
PF_DEVICE void pf_multiply_keys(const pf_real *q, const pf_real *k, int dims,
                                pf_real (&scores)[PF_THREAD_ROWS][PF_THREAD_KEYS]) {
#pragma unroll
    for (int r = 0; r < PF_THREAD_ROWS; r++)
#pragma unroll
        for (int j = 0; j < PF_THREAD_KEYS; j++)
            scores[r][j] = 0;
    pf_operands x[2];
    pf_read_operands(q, k, 0, x[0]);
#pragma unroll 1
    for (int first = 0; first < dims; first += PF_DIM_STEP) {
        const int after = first + PF_DIM_STEP < dims ? first + PF_DIM_STEP : 0;
#pragma unroll
        for (int step = 0; step < PF_DIM_STEP / PF_VEC; step++) {
            pf_read_operands(q, k, step + 1 < PF_DIM_STEP / PF_VEC ? first + (step + 1) * PF_VEC : after,
                             x[(step + 1) % 2]);
            const pf_operands &now = x[step % 2];
#pragma unroll
            for (int e = 0; e < PF_VEC; e++)
#pragma unroll
                for (int j = 0; j < PF_THREAD_KEYS; j++)
#pragma unroll
                    for (int i = 0; i < PF_THREAD_ROWS; i++) {
                        const int r = j & 1 ? PF_THREAD_ROWS - 1 - i : i;
                        scores[r][j] = fma(now.query[r].x[pf_turned(r, e)], now.key[j].x[e], scores[r][j]);
                    }
        }
    }
}

PF_DEVICE void pf_read_values(const pf_real *v, pf_real (&value)[PF_CHUNK]) {
#pragma unroll
    for (int c = 0; c < PF_CHUNK; c += PF_DIM_VEC) {
        const pf_vector<PF_DIM_VEC> some = pf_read<PF_DIM_VEC>(v + c * PF_COLUMNS);
#pragma unroll
        for (int x = 0; x < PF_DIM_VEC; x++)
            value[c + x] = some.x[x];
    }
}

/* Adds the values of one part to the sums of PF_CHUNK outputs of each row. Values are read one key ahead, the
 * weights of a row as soon as its last ones have been used. */
PF_DEVICE void pf_multiply_values(const pf_real *p, const pf_real *v,
                                  pf_real (&sums)[PF_THREAD_ROWS][PF_CHUNK]) {
    pf_vector<PF_VEC> weight[PF_THREAD_ROWS];
    pf_real value[2][PF_CHUNK];
    pf_read_values(v, value[0]);
#pragma unroll
    for (int r = 0; r < PF_THREAD_ROWS; r++)
        weight[r] = pf_read<PF_VEC>(p + r * PF_PART);
#pragma unroll 2
    for (int key = 0; key < PF_PART; key += PF_VEC) {
        const int after = key + PF_VEC < PF_PART ? key + PF_VEC : 0;
#pragma unroll
        for (int e = 0; e < PF_VEC; e++) {
            pf_read_values(v + (e + 1 < PF_VEC ? key + e + 1 : after) * PF_DIM_V, value[(e + 1) % 2]);
#pragma unroll
            for (int r = 0; r < PF_THREAD_ROWS; r++) {
#pragma unroll
                for (int i = 0; i < PF_CHUNK; i++) {
                    const int c = r & 1 ? PF_CHUNK - 1 - i : i;
                    sums[r][c] = fma(weight[r].x[pf_turned(r, e)], value[e % 2][c], sums[r][c]);
                }
                if (e == PF_VEC - 1)
                    weight[r] = pf_read<PF_VEC>(p + r * PF_PART + after);
            }
        }
    }
}

#endif
