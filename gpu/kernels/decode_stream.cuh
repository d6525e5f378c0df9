/* How queries, keys and values come to the products of decode: queries as fragments, which keys a block has,
 * their copies into rings in shared memory, and stored codes as float16. The constants of decode_mma.cu are
 * here too. */
#ifndef PF_DECODE_STREAM_CUH
#define PF_DECODE_STREAM_CUH

#include "careful.cuh"
#include "ptx.cuh"

constexpr int PF_LANES = 32 * PF_TEAM_WARPS; /* of a stream */
constexpr int PF_NUM_STREAMS = PF_WARPS / PF_TEAM_WARPS;
constexpr bool PF_IS_WIDE = PF_KV_TYPE == PF_F16 || PF_KV_TYPE == PF_BF16;
constexpr int PF_BITS = PF_IS_WIDE ? 16 : PF_KV_TYPE == PF_I4 ? 4 : 8;
PF_DEVICE constexpr int pf_rounded(int a, int multiple) {
    return (a + multiple - 1) / multiple * multiple;
}
/* Dims, rounded up to what a fragment takes; what is past the end is 0. */
constexpr int PF_K_DIM = pf_rounded(PF_HEAD_DIM, PF_BITS == 4 ? 32 : 16);
constexpr int PF_V_DIM = pf_rounded(PF_HEAD_DIM_V, PF_TEAM_WARPS * 256 / PF_BITS);
constexpr int PF_V_PART = PF_V_DIM / PF_TEAM_WARPS; /* of one warp */
/* Pieces of 16 bytes; an odd number from row to row leaves no two rows of eight in the same banks. */
constexpr int PF_K_PIECES = PF_K_DIM * PF_BITS / 128, PF_V_PIECES = PF_V_DIM * PF_BITS / 128;
constexpr int PF_K_STORED = PF_HEAD_DIM * PF_BITS / 128, PF_V_STORED = PF_HEAD_DIM_V * PF_BITS / 128;
constexpr int PF_K_ROW = 16 * (PF_K_PIECES | 1), PF_V_ROW = 16 * (PF_V_PIECES | 1);
constexpr int PF_SCALE_BYTES = PF_SCALED ? 8 * PF_KEYS : 0;
constexpr int PF_STAGE_BYTES = PF_KEYS * (PF_K_ROW + PF_V_ROW) + PF_SCALE_BYTES;
constexpr int PF_K_STEPS = PF_K_DIM / 16, PF_V_BLOCKS = PF_V_PART / 8, PF_KEY_BLOCKS = PF_KEYS / 8;
constexpr int PF_LANE_ROWS = PF_ROWS / 8; /* rows g and g + 8 of lane 4 g + t */
constexpr int PF_QUERY_BYTES = PF_HALVES * PF_K_STEPS * 512;
constexpr int PF_FACTOR_BYTES = pf_rounded(4 * PF_ROWS, 128);
/* A team shares the dims of products as well: of its steps each warp has every PF_TEAM_WARPS-th. */
constexpr int PF_OWN_STEPS = (PF_K_STEPS + PF_TEAM_WARPS - 1) / PF_TEAM_WARPS;
constexpr int PF_EXCHANGE_BYTES = PF_TEAM_WARPS > 1 ? PF_TEAM_WARPS * PF_KEYS * 64 : 0;
constexpr int PF_STATE_ROW = PF_V_DIM + 8; /* floats; 8 more keep rows in different banks */
constexpr bool PF_HIDES = PF_HAS(BIAS) || PF_HAS(MASK) || PF_HAS(TREE) || PF_HAS(MASK_MOD);
/* A float16 whose exponent is 8 too small is what the bits of a float8_e4m3fn give. */
constexpr float PF_CODE_FACTOR = PF_KV_TYPE == PF_F8E4M3 ? 256.0f : 1.0f;
constexpr bool PF_HAS_VALUE_FACTOR = PF_SCALED || PF_KV_TYPE == PF_F8E4M3;
/* Queries of bfloat16 become float16, in which they have the same digits and fewer exponents. */
constexpr bool PF_NARROWS_QUERIES = PF_Q_TYPE == PF_BF16 && !PF_MMA_BF16;

enum { PF_NOT_PAGED = 0, PF_ANY_PAGES = 1, PF_WHOLE_CHUNKS = 2 };

/* --- order of dims ---
 * Lane 4 g + t has elements 2 t, 2 t + 1 (slots 0, 1) and 2 t + 8, 2 t + 9 (slots 2, 3) of a step of 16 dims
 * of a key. Which dims these stand for is free as long as queries agree: those that lie in one word. */
PF_DEVICE int pf_key_dim(int step, int t, int slot) {
    if (PF_BITS == 16)
        return 16 * step + 2 * t + slot % 2 + slot / 2 * 8;
    if (PF_BITS == 8)
        return 16 * step + 4 * t + slot;
    return 32 * (step / 2) + 8 * t + 2 * (step % 2) + slot / 2 + slot % 2 * 4;
}

/* Column 2 t + c of a block of 8 outputs. */
PF_DEVICE int pf_value_dim(int block, int t, int c) {
    constexpr int word = 32 / PF_BITS; /* dims */
    if (PF_BITS == 16)
        return 8 * block + 2 * t + c;
    return 8 * word * (block / word) + word * (2 * t + c) + block % word;
}

PF_DEVICE uint32_t pf_pack(float low, float high) {
    return PF_MMA_BF16 ? pf_pack_bf16(low, high) : pf_pack_f16(low, high);
}

/* Splits two numbers into HALVES pairs whose sum they are, nearly: two bfloat16 hold what a float16 does. */
PF_DEVICE void pf_split(float low, float high, uint32_t (&pairs)[PF_HALVES]) {
    pairs[0] = pf_pack(low, high);
    if constexpr (PF_HALVES == 2)
        pairs[1] =
            pf_pack(low - pf_from_bf16((uint16_t)pairs[0]), high - pf_from_bf16((uint16_t)(pairs[0] >> 16)));
}

/* --- codes --- */

/* Four codes of 8 bits to float16, (0, 1) and (2, 3). */
PF_DEVICE void pf_widen_bytes(uint32_t word, uint32_t (&pairs)[2]) {
    if constexpr (PF_KV_TYPE == PF_I8) { /* 1024 + 128 + x has x in its last bits */
        const uint32_t above = word ^ 0x80808080u;
        pairs[0] = pf_add_f16(__byte_perm(above, 0x64646464u, 0x4140), 0xe480e480u);
        pairs[1] = pf_add_f16(__byte_perm(above, 0x64646464u, 0x4342), 0xe480e480u);
    } else {
        pairs[0] = __byte_perm(word, 0, 0x1404);
        pairs[1] = __byte_perm(word, 0, 0x3424);
        if constexpr (PF_KV_TYPE == PF_F8E4M3) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t size = pairs[i] & 0x7f007f00u;
                const uint32_t nan =
                    (size + 0x01000100u) & 0x80008000u; /* all bits set: make it a float16's */
                pairs[i] = (pairs[i] & 0x80008000u) | size >> 1 | nan >> 1;
            }
        }
    }
}

/* The lowest of four codes of 4 bits in each half of a word, 1024 + 8 + x as before. */
PF_DEVICE uint32_t pf_widen_nibbles(uint32_t word) {
    return pf_add_f16(((word & 0x000f000fu) ^ 0x00080008u) | 0x64006400u, 0xe408e408u);
}

/* --- the stream --- */

/* The keys of a block. */
struct pf_stream {
    int32_t num_keys;
    int32_t lo[PF_NUM_SIDES], hi[PF_NUM_SIDES];         /* that some row sees */
    int32_t first[PF_NUM_SIDES], end[PF_NUM_SIDES];     /* chunks of these keys, none twice */
    int32_t all_lo[PF_NUM_SIDES], all_hi[PF_NUM_SIDES]; /* keys that all rows see */
    int32_t row_lo[PF_LANE_ROWS][PF_NUM_SIDES],
        row_hi[PF_LANE_ROWS][PF_NUM_SIDES]; /* that rows of the lane see */
    int64_t k, v, k_scale, v_scale;         /* offsets of key 0, or of page 0 */
};

PF_DEVICE bool pf_in(int32_t j, int32_t lo, int32_t hi) {
    return j >= lo && j < hi;
}

/* Keys between `lo` and `hi`. Each lane works out one side of one row, the rest are shuffles: code that runs
 * once comes from memory, and this is before the first copy. */
PF_DEVICE pf_stream pf_get_stream(const pf_call &call, const pf_sequence &s, int64_t kv_head, int64_t lo,
                                  int64_t hi, int64_t first_row, int64_t last_row) {
    static_assert(PF_NUM_SIDES * PF_ROWS <= 32, "a lane for each side of each row");
    pf_stream stream;
    const int lane = threadIdx.x % 32, last = (int)(last_row - first_row);
    stream.num_keys = (int32_t)s.mask.num_keys;
    if (PF_PAGED != PF_NOT_PAGED && call.num_pages == 0)
        hi = lo; /* the sequence is bad */
    const int64_t i = pf_query_of_row(s, first_row + min(lane % PF_ROWS, last));
    const pf_span span = pf_clip(pf_visible(&s.mask, i, lane / PF_ROWS % PF_NUM_SIDES), lo, hi);
    const int32_t span_lo = (int32_t)span.lo, span_hi = (int32_t)span.hi;
#pragma unroll
    for (int side = 0; side < PF_NUM_SIDES; side++) {
        const int base = side * PF_ROWS;
        stream.lo[side] = __shfl_sync(PF_WARP_ALL, span_lo, base);
        stream.hi[side] = max(__shfl_sync(PF_WARP_ALL, span_hi, base + last), stream.lo[side]);
        stream.all_lo[side] = __shfl_sync(PF_WARP_ALL, span_lo, base + last);
        stream.all_hi[side] = __shfl_sync(PF_WARP_ALL, span_hi, base);
#pragma unroll
        for (int r = 0; r < PF_LANE_ROWS; r++) {
            stream.row_lo[r][side] = __shfl_sync(PF_WARP_ALL, span_lo, base + lane / 4 + 8 * r);
            stream.row_hi[r][side] = __shfl_sync(PF_WARP_ALL, span_hi, base + lane / 4 + 8 * r);
        }
        const bool any = stream.lo[side] < stream.hi[side];
        stream.first[side] = max(stream.lo[side] / PF_KEYS, side ? stream.end[0] : 0);
        stream.end[side] = max(any ? (stream.hi[side] + PF_KEYS - 1) / PF_KEYS : 0, stream.first[side]);
    }
    const auto base = [&](const pf_tensor &t) {
        const int64_t head = kv_head * t.stride_head;
        return PF_PAGED != PF_NOT_PAGED ? head
                                        : head + s.kv_batch * t.stride_batch + s.kv_token * t.stride_token;
    };
    stream.k = base(call.k);
    stream.v = base(call.v);
    stream.k_scale = base(call.k_scale);
    stream.v_scale = base(call.v_scale);
    return stream;
}

/* The first chunk from `chunk` on that is there for stream number `mine`; chunks belong to streams by their
 * number alone, so that what other rows see changes no bits. */
PF_DEVICE int32_t pf_own_chunk(const pf_stream &stream, int32_t chunk, int32_t mine) {
    const auto up = [&](int32_t c) {
        return c + (int32_t)((uint32_t)(mine - c % PF_NUM_STREAMS + PF_NUM_STREAMS) % PF_NUM_STREAMS);
    };
    chunk = up(max(chunk, stream.first[0]));
    return chunk >= stream.end[0] ? up(max(chunk, stream.first[1])) : chunk;
}

/* The page of this lane's key of a chunk, one that exists. */
PF_DEVICE int64_t pf_page_of(const pf_call &call, const pf_sequence &s, const pf_stream &stream,
                             int32_t chunk) {
    if constexpr (PF_PAGED == PF_NOT_PAGED)
        return 0;
    const int lane = threadIdx.x % 32;
    const int32_t j = chunk * PF_KEYS + (PF_PAGED == PF_ANY_PAGES ? lane % PF_KEYS : 0);
    if (j >= stream.num_keys)
        return 0;
    const int64_t page = pf_page_at(call, s.index, (int64_t)((uint32_t)j / (uint32_t)call.page_size));
    return pf_min(pf_max(page, 0), call.num_pages - 1);
}

/* Starts the copies of the keys of a chunk that are `valid`, one bit each, the others become 0. `begin` is
 * the first byte of the first key, or where keys of a chunk lie in several pages of this lane's key. */
template <int PIECES, int STORED, int ROW_BYTES>
PF_DEVICE void pf_copy_rows(unsigned char *rows, const char *data, int64_t begin, int64_t step,
                            unsigned valid) {
    const int thread = threadIdx.x % PF_LANES;
    constexpr int num_copies = pf_rounded(PF_KEYS * PIECES, PF_LANES) / PF_LANES;
    constexpr int keys_between = PF_LANES % PIECES == 0 ? PF_LANES / PIECES : 0; /* one copy and the next */
    const int first_key = thread / PIECES, first_piece = thread % PIECES;
    const char *from = data + begin + first_key * step + 16 * first_piece;
#pragma unroll
    for (int i = 0; i < num_copies; i++) {
        const int x = thread + i * PF_LANES;
        const int key = keys_between ? first_key + i * keys_between : x / PIECES;
        const int piece = keys_between ? first_piece : x % PIECES;
        if constexpr (PF_PAGED == PF_ANY_PAGES)
            from = data + __shfl_sync(PF_WARP_ALL, (long long)begin, key % PF_KEYS) + 16 * piece;
        else if (!keys_between)
            from = data + begin + key * step + 16 * piece;
        if (PF_KEYS * PIECES % PF_LANES == 0 || x < PF_KEYS * PIECES)
            pf_cp_async16(rows + key * ROW_BYTES + 16 * piece, from, (valid >> key & 1) && piece < STORED);
        from += keys_between * step;
    }
}

/* Starts the copies of a chunk into a stage. */
PF_DEVICE void pf_fill(const pf_call &call, const pf_stream &stream, unsigned char *stage, int32_t chunk,
                       int64_t page, bool v_in_k) {
    const int lane = threadIdx.x % 32, thread = threadIdx.x % PF_LANES;
    const int32_t first = chunk * PF_KEYS, j = first + lane % PF_KEYS;
    const unsigned valid = __ballot_sync(PF_WARP_ALL, pf_in(j, stream.lo[0], stream.hi[0]) ||
                                                          pf_in(j, stream.lo[1], stream.hi[1]));
    /* The distance of this lane's key, or in whole chunks of the first key, from key 0 or from its page. */
    const int32_t own = PF_PAGED == PF_ANY_PAGES ? j : first;
    const int32_t place =
        PF_PAGED == PF_NOT_PAGED ? own : (int32_t)((uint32_t)own % (uint32_t)call.page_size);
    const int64_t pages = PF_PAGED == PF_NOT_PAGED ? 0 : page;
    constexpr int bytes = PF_BITS == 16 ? 2 : 1;
    pf_copy_rows<PF_K_PIECES, PF_K_STORED, PF_K_ROW>(
        stage, (const char *)call.k.data,
        (stream.k + pages * call.k.stride_batch + place * call.k.stride_token) * bytes,
        call.k.stride_token * bytes, valid);
    if (!v_in_k)
        pf_copy_rows<PF_V_PIECES, PF_V_STORED, PF_V_ROW>(
            stage + PF_KEYS * PF_K_ROW, (const char *)call.v.data,
            (stream.v + pages * call.v.stride_batch + place * call.v.stride_token) * bytes,
            call.v.stride_token * bytes, valid);
    if constexpr (PF_SCALED) {
        unsigned char *scales = stage + PF_KEYS * (PF_K_ROW + PF_V_ROW);
        for (int x = thread; x < 2 * PF_KEYS; x += PF_LANES) {
            const pf_tensor &t = x < PF_KEYS ? call.k_scale : call.v_scale;
            if (!t.data)
                continue; /* `pf_attend` knows */
            const int64_t base = x < PF_KEYS ? stream.k_scale : stream.v_scale;
            const int32_t key = PF_PAGED == PF_ANY_PAGES ? place : place + lane % PF_KEYS;
            const int64_t offset = base + pages * t.stride_batch + key * t.stride_token;
            pf_cp_async4(scales + 4 * x, (const float *)t.data + offset, valid >> lane % PF_KEYS & 1);
        }
    }
}

/* --- queries --- */

/* The element of a query row, 0 where there is none. */
PF_DEVICE float pf_query_element(const pf_call &call, const char *row, int d) {
    if (!row || d >= PF_HEAD_DIM)
        return 0;
    return (float)pf_element(row, PF_Q_TYPE, call.q.stride_dim, d);
}

PF_DEVICE const char *pf_query_row(const pf_call &call, const pf_sequence &s, int64_t kv_head, int64_t row,
                                   int64_t num_rows) {
    if (row >= num_rows)
        return nullptr;
    const int64_t i = pf_query_of_row(s, row);
    return pf_place(call.q, pf_query_offset(call.q, s, kv_head * s.group + row - i * s.group, i));
}

/* The bits of a power of two that brings `most`, divided by it, near the end of float16, from where that has
 * 38 powers of two below; bfloat16 has as many anyway. The power and its inverse are normal numbers. */
PF_DEVICE uint32_t pf_power_below(float most) {
    constexpr uint32_t headroom = PF_MMA_BF16 ? 0 : 14u << 23;
    const uint32_t power = max(__float_as_uint(most) & 0x7f800000u, headroom + 0x00800000u);
    return min(power - headroom, 0x7e000000u);
}

/* Queries as fragments in shared memory. Where exponents get fewer, a row is multiplied by a power of two
 * that brings its largest element near the end of float16; `factors` are their inverses. All threads of the
 * block. */
PF_DEVICE void pf_lay_out_queries(const pf_call &call, const pf_sequence &s, int64_t kv_head,
                                  int64_t first_row, int64_t num_rows, uint4 *queries, float *factors) {
    const int lane = threadIdx.x % 32;
    if constexpr (PF_NARROWS_QUERIES) {
        for (int r = threadIdx.x / 32; r < PF_ROWS; r += PF_WARPS) {
            const char *row = pf_query_row(call, s, kv_head, first_row + r, num_rows);
            float most = 0;
            for (int d = lane; d < PF_HEAD_DIM; d += 32)
                most = fmaxf(most, fabsf(pf_query_element(call, row, d)));
            most = pf_warp_max(most);
            if (lane == 0)
                factors[r] = __uint_as_float(pf_power_below(most));
        }
        __syncthreads();
    }
    for (int x = threadIdx.x; x < PF_K_STEPS * 32; x += 32 * PF_WARPS) {
        const int step = x / 32;
        uint32_t registers[PF_HALVES][4] = {};
#pragma unroll
        for (int r = 0; r < PF_LANE_ROWS; r++) {
            const int number = lane / 4 + 8 * r;
            const char *row = pf_query_row(call, s, kv_head, first_row + number, num_rows);
            const float factor =
                PF_NARROWS_QUERIES ? __uint_as_float(0x7f000000u - __float_as_uint(factors[number])) : 1.0f;
#pragma unroll
            for (int slot = 0; slot < 4; slot += 2) {
                uint32_t pairs[PF_HALVES];
                pf_split(pf_query_element(call, row, pf_key_dim(step, lane % 4, slot)) * factor,
                         pf_query_element(call, row, pf_key_dim(step, lane % 4, slot + 1)) * factor, pairs);
#pragma unroll
                for (int half = 0; half < PF_HALVES; half++)
                    registers[half][slot + r] = pairs[half];
            }
        }
#pragma unroll
        for (int half = 0; half < PF_HALVES; half++)
            queries[half * PF_K_STEPS * 32 + x] =
                make_uint4(registers[half][0], registers[half][1], registers[half][2], registers[half][3]);
    }
}

#endif
