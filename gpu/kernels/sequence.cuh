/* What a kernel derives from a call: its sequences, and where their queries and keys lie. The twin of
 * c_src/driver/call.h. Nothing that an index array on the device says is believed: lengths are cut to what
 * the arrays hold, and a sequence with an index that cannot be is `bad`: its rows become NaN. */
#ifndef PF_SEQUENCE_CUH
#define PF_SEQUENCE_CUH

#include "element.cuh"

#define PF_MAX_POSITION ((int64_t)1 << 48)

struct pf_sequence {
    int64_t index;
    int64_t q_batch, q_token;   /* place of its first query */
    int64_t kv_batch, kv_token; /* place of its first key, unless paged */
    int64_t num_queries;
    int64_t group; /* query heads per key/value head */
    pf_mask mask;
    bool bad;
};

PF_DEVICE int64_t pf_index_at(const pf_index &index, int64_t i) {
    return pf_integer_at(index.data, (int32_t)index.item_bytes, i * index.stride[0]);
}

/* What a block works on. */
struct pf_item {
    int64_t row_block, head, split, sequence;
};

/* `heads` and `splits` are how many blocks there are along them. */
PF_DEVICE pf_item pf_item_at(const pf_call &call, uint32_t rest, int64_t heads, int64_t splits) {
    /* A grid has fewer than 2^31 blocks, and short numbers are divided several times as fast. */
    const uint32_t num_rows = (uint32_t)call.row_blocks, num_heads = (uint32_t)heads;
    const uint32_t num_splits = (uint32_t)splits;
    /* Nothing begins before this is done, and a division takes longer than a jump. */
    const auto take = [&rest](uint32_t count) -> uint32_t {
        if (count == 1)
            return 0;
        const uint32_t all = rest;
        rest /= count;
        return all - rest * count;
    };
    pf_item item;
    item.row_block = take(num_rows);
    item.head = take(num_heads);
    item.split = take(num_splits);
    item.sequence = rest;
    return item;
}

PF_DEVICE pf_item pf_get_item(const pf_call &call, int64_t heads, int64_t splits) {
    return pf_item_at(call, blockIdx.x, heads, splits);
}

/* The same of item `index` of `num_items`, in sections of some heads whose keys fit into the cache together:
 * in each, the last rows of all its heads come first, since rows that see what is before them have the more
 * to do the later they are. Items that begin last are short then, and all multiprocessors end together. */
PF_DEVICE pf_item pf_get_item_in_sections(const pf_call &call, uint32_t index, uint32_t num_items,
                                          int64_t heads, int64_t splits) {
    const uint32_t num_rows = (uint32_t)call.row_blocks, num_heads = (uint32_t)heads;
    const uint32_t num_splits = (uint32_t)splits, most = (uint32_t)pf_max(call.section, 1);
    const uint32_t all = num_items / num_rows, section = index / (most * num_rows);
    const uint32_t size = min(most, all - section * most), rest = index - section * most * num_rows;
    uint32_t unit = section * most + rest % size;
    pf_item item;
    item.row_block = num_rows - 1 - rest / size;
    item.head = unit % num_heads;
    unit /= num_heads;
    item.split = unit % num_splits;
    item.sequence = unit / num_splits;
    return item;
}

/* Whether a sequence is this kernel's by its number of rows. */
PF_DEVICE bool pf_is_mine(const pf_call &call, const pf_sequence &s) {
    const int64_t rows = s.num_queries * s.group;
    return rows >= call.min_rows && rows <= call.max_rows;
}

/* The part [lo, hi) of `total` tokens that prefix sums give to a sequence. */
PF_DEVICE bool pf_part_of(const pf_index &prefix_sums, int64_t sequence, int64_t total, int64_t *lo,
                          int64_t *hi) {
    const int64_t first = pf_index_at(prefix_sums, sequence), end = pf_index_at(prefix_sums, sequence + 1);
    *lo = pf_min(pf_max(first, 0), total);
    *hi = pf_min(pf_max(end, *lo), total);
    return *lo == first && *hi == end;
}

PF_DEVICE pf_ends pf_ends_of(const pf_index &index, int64_t sequence, int64_t first_row) {
    pf_ends ends = {0, 0, 0};
    if (index.data) {
        const int64_t offset = sequence * index.stride[0] + first_row * index.stride[1];
        ends.data = (const char *)index.data + offset * index.item_bytes;
        ends.stride = index.stride[1];
        ends.item_bytes = (int32_t)index.item_bytes;
    }
    return ends;
}

PF_DEVICE pf_sequence pf_get_sequence(const pf_call &call, int64_t b) {
    pf_sequence s;
    s.index = s.q_batch = s.kv_batch = b;
    s.q_token = s.kv_token = 0;
    s.num_queries = call.seqlen_q;
    s.bad = false;
    s.group = call.num_kv_heads ? (uint32_t)call.num_heads / (uint32_t)call.num_kv_heads : 1;
    int64_t num_keys = call.seqlen_kv, end;
    if (PF_MAY_HAVE(CU_SEQLENS_Q) && call.cu_seqlens_q.data) {
        s.q_batch = 0;
        s.bad |= !pf_part_of(call.cu_seqlens_q, b, call.seqlen_q, &s.q_token, &end);
        s.num_queries = end - s.q_token;
    }
    if (PF_MAY_HAVE(CU_SEQLENS_KV) && call.cu_seqlens_kv.data) {
        s.kv_batch = 0;
        s.bad |= !pf_part_of(call.cu_seqlens_kv, b, call.seqlen_kv, &s.kv_token, &end);
        num_keys = end - s.kv_token;
    }
    if (PF_MAY_HAVE(SEQ_LENS) && call.seq_lens.data) {
        const int64_t capacity = PF_MAY_HAVE(BLOCK_TABLE) && call.block_table.data
                                     ? call.max_pages * call.page_size
                                     : call.seqlen_kv;
        const int64_t said = pf_index_at(call.seq_lens, b);
        num_keys = pf_min(pf_max(said, 0), capacity);
        s.bad |= num_keys != said;
    }
    s.bad |= s.num_queries > call.max_seqlen_q;
    int64_t offset = num_keys - s.num_queries;
    if (PF_MAY_HAVE(Q_OFFSET) && call.q_offset.data) {
        const int64_t said = pf_index_at(call.q_offset, b);
        offset = pf_min(pf_max(said, -PF_MAX_POSITION), PF_MAX_POSITION);
        s.bad |= offset != said;
    }
    if (call.bias.data)
        s.bad |= s.num_queries > call.bias_rows || num_keys > call.bias_keys;
    if (call.mask.data)
        s.bad |= s.num_queries > call.mask_rows || num_keys > call.mask_keys;
    s.bad |= call.num_draft > num_keys;
    s.mask.num_keys = num_keys;
    s.mask.offset = offset;
    s.mask.window_left = call.window_left;
    s.mask.window_right = call.window_right;
    s.mask.sink_tokens = call.sink_tokens;
    s.mask.lo = s.mask.hi = {};
    if (PF_MAY_HAVE(SPANS)) {
        s.mask.lo = pf_ends_of(call.span_lo, s.q_batch, s.q_token);
        s.mask.hi = pf_ends_of(call.span_hi, s.q_batch, s.q_token);
    }
    s.mask.causal = (int32_t)call.causal;
    return s;
}

/* A mask of a block, as the compiler may know it. */
PF_DEVICE pf_mask pf_known_mask(pf_mask mask) {
    if (!PF_MAY_HAVE(SPANS))
        mask.lo.data = mask.hi.data = nullptr;
    return mask;
}

PF_DEVICE int64_t pf_page_at(const pf_call &call, int64_t sequence, int64_t logical_page) {
    return pf_integer_at(call.block_table.data, (int32_t)call.block_table.item_bytes,
                         sequence * call.block_table.stride[0] + logical_page * call.block_table.stride[1]);
}

PF_DEVICE int64_t pf_parent_of(const pf_call &call, int64_t sequence, int64_t draft) {
    return pf_integer_at(call.tree, (int32_t)call.tree_item_bytes,
                         sequence * call.tree_stride[0] + draft * call.tree_stride[1]);
}

PF_DEVICE bool pf_falls(const pf_ends &ends, int64_t i) {
    return ends.data && pf_integer_at(ends.data, ends.item_bytes, i * ends.stride) <
                            pf_integer_at(ends.data, ends.item_bytes, (i - 1) * ends.stride);
}

/* Whether one of `num_threads` threads finds something in an index array on the device that cannot be for
 * this sequence; it costs nothing where the host has looked. */
PF_DEVICE bool pf_finds_bad(const pf_call &call, const pf_sequence &s, int64_t thread, int64_t num_threads) {
    if (PF_INDICES == 0) /* the host has seen all of it */
        return false;
    bool bad = s.bad;
    if (call.unchecked == 0 || bad)
        return bad;
    if (PF_MAY_HAVE(BLOCK_TABLE) && (call.unchecked & PF_UNCHECKED_TABLE)) {
        const int64_t used = pf_ceil_div(s.mask.num_keys, call.page_size);
        for (int64_t i = thread; i < used; i += num_threads) {
            const int64_t page = pf_page_at(call, s.index, i);
            bad |= page < 0 || page >= call.num_pages;
        }
    }
    if (PF_MAY_HAVE(SPANS) && (call.unchecked & PF_UNCHECKED_SPANS))
        for (int64_t i = 1 + thread; i < s.num_queries; i += num_threads)
            bad |= pf_falls(s.mask.lo, i) || pf_falls(s.mask.hi, i);
    if (PF_MAY_HAVE(TREE) && (call.unchecked & PF_UNCHECKED_TREE) &&
        call.tree_kind == PF_TREE_PARENTS) /* bytes cannot be bad */
        for (int64_t i = thread; i < call.num_draft; i += num_threads) {
            const int64_t parent = pf_parent_of(call, s.index, i);
            bad |= parent < -1 || parent >= i;
        }
    return bad;
}

/* The same by all threads of the block, which call it together and get the same answer. */
PF_DEVICE bool pf_find_bad(const pf_call &call, const pf_sequence &s) {
    if (PF_INDICES == 0 || call.unchecked == 0 || s.bad)
        return PF_INDICES && s.bad;
    return __syncthreads_or(pf_finds_bad(call, s, threadIdx.x, blockDim.x));
}

/* Offset of key j in k, v or their scales; the page has been checked. */
PF_DEVICE int64_t pf_key_offset(const pf_call &call, const pf_tensor &t, const pf_sequence &s,
                                int64_t kv_head, int64_t j) {
    const int64_t head = kv_head * t.stride_head;
    if (PF_MAY_HAVE(BLOCK_TABLE) && call.block_table.data) {
        const int64_t page = pf_page_at(call, s.index, pf_quotient(j, call.page_size));
        return head + pf_paged_offset(page, t.stride_batch, call.page_size, j, t.stride_token);
    }
    return head + s.kv_batch * t.stride_batch + (s.kv_token + j) * t.stride_token;
}

/* Offset of query i in q, out or lse. */
PF_DEVICE int64_t pf_query_offset(const pf_tensor &t, const pf_sequence &s, int64_t head, int64_t i) {
    return s.q_batch * t.stride_batch + (s.q_token + i) * t.stride_token + head * t.stride_head;
}

/* How many parts the keys of a sequence are cut into, and the first key of a part; the end of the last part
 * is the number of keys. */
PF_DEVICE int64_t pf_num_splits(const pf_call &call, const pf_sequence &s) {
    if (call.split_keys)
        return pf_max(pf_quotient(s.mask.num_keys + call.split_keys - 1, call.split_keys), 1);
    return pf_max(pf_min(call.num_splits, s.mask.num_keys), 1);
}

PF_DEVICE int64_t pf_split_lo(const pf_call &call, const pf_sequence &s, int64_t split) {
    const int64_t num_keys = s.mask.num_keys;
    if (call.split_keys)
        return pf_min(split * call.split_keys, num_keys);
    const int64_t n = pf_num_splits(call, s), keys = pf_quotient(num_keys, n);
    return split * keys + pf_quotient(split * (num_keys - n * keys), n);
}

/* Both ends of a part of `num_splits`, with fewer divisions. */
PF_DEVICE pf_span pf_split_keys_of(const pf_call &call, const pf_sequence &s, int64_t num_splits,
                                   int64_t split) {
    const int64_t num_keys = s.mask.num_keys;
    if (num_splits == 1)
        return {0, num_keys};
    if (call.split_keys)
        return {pf_min(split * call.split_keys, num_keys), pf_min((split + 1) * call.split_keys, num_keys)};
    const int64_t keys = pf_quotient(num_keys, num_splits), rest = num_keys - num_splits * keys;
    const int64_t before = rest ? pf_quotient(split * rest, num_splits) : 0; /* longer parts */
    const int64_t lo = split * keys + before, left = split * rest - before * num_splits;
    return {lo, lo + keys + (left + rest >= num_splits)};
}

/* The keys of a part, for a block of rows that see nothing outside of `seen`, in tiles of `tile` keys. */
PF_DEVICE pf_span pf_split_of(const pf_call &call, const pf_sequence &s, int64_t split, const pf_span &seen,
                              int tile) {
    const int64_t num_splits = pf_num_splits(call, s);
    if (!call.split_seen)
        return pf_split_keys_of(call, s, num_splits, split);
    const uint32_t number = (uint32_t)split, n = (uint32_t)num_splits;
    const uint32_t begin = (uint32_t)seen.lo / (uint32_t)tile;
    const uint32_t end = seen.lo < seen.hi ? ((uint32_t)seen.hi + tile - 1) / (uint32_t)tile : begin;
    const uint32_t each = (end - begin) / n, more = (end - begin) % n; /* the first ones have one more */
    const uint32_t first = begin + number * each + min(number, more), last = first + each + (number < more);
    return {(int64_t)first * tile, pf_min((int64_t)last * tile, s.mask.num_keys)};
}

/* The query of a row, where the heads of a group are rows of a block too. */
PF_DEVICE int64_t pf_query_of_row(const pf_sequence &s, int64_t row) {
    return s.num_queries == 1 ? 0 : pf_quotient(row, s.group);
}

/* Partial states in the workspace: o of all splits and rows, then m, then l. Rows are numbered query by query
 * over all of q, head by head. */
PF_DEVICE int64_t pf_num_state_rows(const pf_call &call) {
    return (PF_MAY_HAVE(CU_SEQLENS_Q) && call.cu_seqlens_q.data ? 1 : call.batch) * call.seqlen_q *
           call.num_heads;
}

PF_DEVICE int64_t pf_state_row(const pf_call &call, const pf_sequence &s, int64_t head, int64_t i) {
    return (s.q_batch * call.seqlen_q + s.q_token + i) * call.num_heads + head;
}

PF_DEVICE pf_real *pf_partial_o(const pf_call &call, int64_t split, int64_t row) {
    return (pf_real *)call.partial + (split * pf_num_state_rows(call) + row) * call.head_dim_v;
}

PF_DEVICE pf_real *pf_partial_m(const pf_call &call, int64_t split, int64_t row) {
    const int64_t rows = pf_num_state_rows(call);
    return (pf_real *)call.partial + call.max_splits * rows * call.head_dim_v + split * rows + row;
}

PF_DEVICE pf_real *pf_partial_l(const pf_call &call, int64_t split, int64_t row) {
    return pf_partial_m(call, split, row) + call.max_splits * pf_num_state_rows(call);
}

#endif
