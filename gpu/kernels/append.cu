/* New keys and values into a cache, keys rotated on the way if there are angles. Each token is widened to the
 * compute type, rotated, divided by its scale, and rounded once to the cache's type: the arithmetic, and so
 * the bits, of c_src/driver/append.c. Nothing that an index on the device says is believed: a token that has
 * no place in the cache is skipped, and with it its whole sequence. */
#include "append.cuh"
#include "careful.cuh"
#include "codes.cuh"

/* Types of the tokens and of the caches: constants, so that what other types need costs no registers. */
#ifndef PF_FROM
#define PF_FROM PF_F32
#define PF_TO PF_F32
#endif

/* Where the tokens of sequences go: one block a sequence. Every token gets a slot, -1 where it has no place.
 */
extern "C" __global__ void __launch_bounds__(256)
    pf_append_places(const __grid_constant__ pf_append_call call) {
    int64_t *slots = (int64_t *)call.found, *positions = slots + call.num_tokens;
    for (int64_t b = blockIdx.x; b < call.batch; b += gridDim.x) {
        int64_t lo = b * (call.num_tokens / call.batch), hi = lo + call.num_tokens / call.batch;
        bool bad = false;
        if (call.cu_seqlens.data) {
            bad = !pf_part_of(call.cu_seqlens, b, call.num_tokens, &lo, &hi);
            /* What lies before the first sequence and behind the last one is nobody's. */
            for (int64_t t = threadIdx.x; b == 0 && t < lo; t += blockDim.x)
                slots[t] = -1;
            for (int64_t t = hi + threadIdx.x; b == call.batch - 1 && t < call.num_tokens; t += blockDim.x)
                slots[t] = -1;
        }
        const int64_t count = hi - lo, length = pf_index_at(call.seq_lens, b);
        const bool paged = call.block_table.data != 0; /* without a table page b is the sequence */
        const int64_t room = (paged ? call.max_pages : 1) * call.page_size;
        bad |= length < 0 || length > room - count;
        if (call.cos.data)
            bad |= length > call.rotary_rows - count;
        const int64_t *strides = call.block_table.stride;
        const auto page_at = [&](int64_t logical_page) {
            return paged ? pf_integer_at(call.block_table.data, (int32_t)call.block_table.item_bytes,
                                         b * strides[0] + logical_page * strides[1])
                         : b;
        };
        if (!bad && count > 0) {
            const int64_t last = pf_quotient(length + count - 1, call.page_size);
            for (int64_t i = pf_quotient(length, call.page_size) + threadIdx.x; i <= last; i += blockDim.x)
                bad |= page_at(i) < 0 || page_at(i) >= call.num_pages;
        }
        bad = __syncthreads_or(bad);
        for (int64_t t = lo + threadIdx.x; t < hi; t += blockDim.x) {
            const int64_t position = length + (t - lo);
            const int64_t page = bad ? 0 : pf_quotient(position, call.page_size);
            slots[t] = bad ? -1 : page_at(page) * call.page_size + (position - page * call.page_size);
            positions[t] = bad ? 0 : position;
        }
    }
}

/* Most tokens of a block, and marks by which it recognises slots that may be theirs. */
enum { PF_MOST_TOKENS = 256, PF_MARKS = 8192 };

/* The slot of a token, -1 if it has none. */
PF_DEVICE int64_t pf_slot_of(const pf_append_call &call, int64_t t) {
    const int64_t slot = pf_index_at(call.slots, t);
    return slot >= 0 && slot < call.num_pages * call.page_size ? slot : -1;
}

/* Of two tokens for one place the later one stays: takes the slots of those of a block's tokens that come too
 * early. Every block reads the slots of all later tokens, once for all of its own, and compares few of them.
 */
PF_DEVICE void pf_drop_replaced(const pf_append_call &call, int64_t first, int count, int64_t *slots) {
    __shared__ uint32_t marks[PF_MARKS / 32], dropped[PF_MOST_TOKENS / 32];
    for (int i = threadIdx.x; i < PF_MARKS / 32; i += blockDim.x)
        marks[i] = 0;
    for (int i = threadIdx.x; i < PF_MOST_TOKENS / 32; i += blockDim.x)
        dropped[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        if (slots[i] >= 0) {
            const uint32_t mark = (uint32_t)slots[i] % PF_MARKS;
            atomicOr(&marks[mark / 32], 1u << mark % 32);
        }
    __syncthreads();
    for (int64_t t = first + 1 + threadIdx.x; t < call.num_tokens; t += blockDim.x) {
        const int64_t slot = pf_slot_of(call, t);
        const uint32_t mark = (uint32_t)slot % PF_MARKS;
        if (slot < 0 || !(marks[mark / 32] >> mark % 32 & 1))
            continue;
        for (int i = 0; i < count && first + i < t; i++)
            if (slots[i] == slot)
                atomicOr(&dropped[i / 32], 1u << i % 32);
    }
    __syncthreads();
    /* Only now: a token that is dropped itself replaces those before it all the same. */
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        if (dropped[i / 32] >> i % 32 & 1)
            slots[i] = -1;
    __syncthreads();
}

/* One of the two rows of a token and head, keys (side 0) or values, on the way to its place. */
struct pf_append_row {
    const char *from;
    char *to;
    int64_t from_stride, to_stride;
    int64_t num_dims;
    int64_t num_rotated, cos, sin; /* dimensions that are rotated; offsets of their angles */
};

PF_DEVICE pf_real pf_source(const pf_append_row &row, int64_t d) {
    return pf_element(row.from, PF_FROM, row.from_stride, d);
}

/* Element d, rotated. Pair i is (x[2i], x[2i + 1]) or (x[i], x[i + num_pairs]). No product may be fused with
 * the sum: the C backend does not. */
PF_DEVICE pf_real pf_rotated(const pf_append_call &call, const pf_append_row &row, int64_t d) {
    const pf_real x = pf_source(row, d);
    if (d >= row.num_rotated)
        return x;
    const int64_t num_pairs = call.rotary_pairs;
    const bool second = call.interleaved ? d & 1 : d >= num_pairs;
    const int64_t pair = call.interleaved ? d / 2 : second ? d - num_pairs : d;
    const int64_t step = call.interleaved ? 1 : num_pairs;
    const double y = (double)pf_source(row, second ? d - step : d + step);
    const double cos = pf_number_at(call.cos, row.cos + pair * call.cos.stride_dim);
    const double sin = pf_number_at(call.sin, row.sin + pair * call.sin.stride_dim);
    return (pf_real)__dadd_rn(__dmul_rn((double)x, cos), second ? __dmul_rn(y, sin) : -__dmul_rn(y, sin));
}

/* The scale of a row that maps its largest number to the largest code. What is not finite has none: it gets
 * codes of 0 and a scale that shows. */
PF_DEVICE float pf_choose_scale(const pf_append_call &call, const pf_append_row &row) {
    float largest = 0;
    bool finite = true;
    for (int64_t d = threadIdx.x % 32; d < row.num_dims; d += 32) {
        const float x = (float)pf_rotated(call, row, d);
        largest = fmaxf(largest, fabsf(x));
        finite &= pf_is_finite(x);
    }
    for (int step = 16; step > 0; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(PF_WARP_ALL, largest, step));
    if (!__all_sync(PF_WARP_ALL, finite))
        return pf_nan();
    const float scale = largest / pf_largest_code(PF_TO);
    return scale == 0 ? 1.0f : scale;
}

/* Whether the bytes of a row are its codes, and can be copied 16 at a time. */
PF_DEVICE bool pf_is_copy(const pf_append_row &row) {
    const int64_t together = (int64_t)row.from | (int64_t)row.to | row.num_dims * pf_dtype_size(PF_TO);
    return PF_FROM == PF_TO && row.num_rotated == 0 && row.from_stride == 1 && row.to_stride == 1 &&
           together % 16 == 0;
}

/* Writes a row by one warp, in the order of its elements; two of int4 share a byte and so a lane. */
PF_DEVICE void pf_store_row(const pf_append_call &call, const pf_append_row &row, bool divides, float scale) {
    const int lane = threadIdx.x % 32;
    const bool nothing = call.writes_scales && scale != scale;
    const auto number = [&](int64_t d) {
        const pf_real x = nothing ? (pf_real)0 : pf_rotated(call, row, d);
        return divides && !nothing ? x / (pf_real)scale : x;
    };
    if (PF_TO == PF_I4) {
        for (int64_t i = lane; i < row.num_dims / 2; i += 32)
            row.to[i * row.to_stride] =
                (char)(pf_code((float)number(2 * i), PF_I4) | pf_code((float)number(2 * i + 1), PF_I4) << 4);
    } else if (pf_largest_code(PF_TO) > 0) {
        for (int64_t d = lane; d < row.num_dims; d += 32)
            row.to[d * row.to_stride] = (char)pf_code((float)number(d), PF_TO);
    } else {
        for (int64_t d = lane; d < row.num_dims; d += 32)
            pf_set_element(row.to, PF_TO, d * row.to_stride, number(d));
    }
}

PF_DEVICE void pf_append_one(const pf_append_call &call, int64_t t, int64_t slot, int64_t head, int side) {
    const pf_tensor &x = side ? call.v : call.k, &cache = side ? call.v_cache : call.k_cache;
    const pf_tensor &scales = side ? call.v_scale : call.k_scale;
    const int64_t page = pf_quotient(slot, call.page_size), place = slot - page * call.page_size;
    pf_append_row row;
    row.from = pf_place(x, t * x.stride_token + head * x.stride_head);
    row.to =
        pf_place(cache, page * cache.stride_batch + place * cache.stride_token + head * cache.stride_head);
    row.from_stride = x.stride_dim;
    row.to_stride = cache.stride_dim;
    row.num_dims = side ? call.head_dim_v : call.head_dim;
    row.num_rotated = row.cos = row.sin = 0;
    if (side == 0 && call.cos.data) {
        const int64_t angle = call.positions.data ? pf_index_at(call.positions, t) : t;
        if (angle < 0 || angle >= call.rotary_rows)
            return; /* cannot be: whoever made the positions has looked */
        row.num_rotated = 2 * call.rotary_pairs;
        row.cos = angle * call.cos.stride_token;
        row.sin = angle * call.sin.stride_token;
    }
    if (!scales.data && pf_is_copy(row)) {
        for (int64_t i = threadIdx.x % 32; i < row.num_dims * pf_dtype_size(PF_TO) / 16; i += 32)
            ((uint4 *)row.to)[i] = ((const uint4 *)row.from)[i];
        return;
    }
    float scale = 1;
    if (scales.data) {
        const int64_t at =
            page * scales.stride_batch + place * scales.stride_token + head * scales.stride_head;
        scale = call.writes_scales ? pf_choose_scale(call, row) : (float)pf_number_at(scales, at);
        if (call.writes_scales && threadIdx.x % 32 == 0)
            ((float *)scales.data)[at] = scale;
    }
    pf_store_row(call, row, scales.data != 0, scale);
}

/* Tokens to their slots: a block has a run of tokens, or some of the heads of one; a warp one row at a time.
 */
extern "C" __global__ void __launch_bounds__(256, 2) pf_append(const __grid_constant__ pf_append_call call) {
    __shared__ int64_t slots[PF_MOST_TOKENS];
    const int64_t run = pf_quotient(blockIdx.x, call.blocks_per_run);
    const int64_t part = blockIdx.x - run * call.blocks_per_run, first = run * call.tokens_per_block;
    const int count = (int)pf_min(call.tokens_per_block, call.num_tokens - first);
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        slots[i] = pf_slot_of(call, first + i);
    __syncthreads();
    if (!call.unique)
        pf_drop_replaced(call, first, count, slots);
    const int64_t warps = blockDim.x / 32, rows = 2 * call.num_kv_heads;
    for (int64_t i = part * warps + threadIdx.x / 32; i < count * rows; i += call.blocks_per_run * warps) {
        const int64_t token = pf_quotient(i, rows), row = i - token * rows;
        if (slots[token] >= 0)
            pf_append_one(call, first + token, slots[token], row / 2, (int)(row & 1));
    }
}
