/* What the driver derives from a call: the sequences, their rows and splits, and where their keys
 * lie. A "row" is one query of one head; the rows of a key/value head are numbered query by query
 * and, within a query, head by head of the group, so that spans stay monotonic in the row. */
#ifndef PF_DRIVER_CALL_H
#define PF_DRIVER_CALL_H

#include "../abi/pyflash_abi.h"
#include "../kernels/table.h"
#include "../shared/address.h"
#include "../shared/span.h"

/* Most rows per key/value head that the decode family takes. Part of the contract on bits. */
#define PF_DECODE_MAX_ROWS 16
/* Keys between two borders at which the decode family splits; a constant, so that bits don't depend
 * on lengths or threads. Threads take contiguous runs of splits, which makes short ones cheap. */
#define PF_DECODE_SPLIT_KEYS 512
#define PF_DECODE_TILE_KEYS 64

enum { PF_FAMILY_BY_SHAPE = 0, PF_FAMILY_PREFILL = 1, PF_FAMILY_DECODE = 2 };

typedef struct pf_sequence {
    int64_t index;
    int64_t q_batch, q_token;   /* place of its first query */
    int64_t kv_batch, kv_token; /* place of its first key, unless paged */
    int64_t num_queries, num_rows;
    int64_t group; /* query heads per key/value head */
    pf_mask mask;
    int decode;          /* which family */
    int64_t num_splits;  /* asked for, but no more than there are keys; 0: the family's own borders */
    int64_t sink_splits; /* splits [0, sink_splits) and [first_split, end_split) may hold visible keys */
    int64_t first_split;
    int64_t end_split;
} pf_sequence;

/* How many splits may hold visible keys, and the number of the i-th of them. */
static inline int64_t pf_num_splits(const pf_sequence *s) {
    return s->sink_splits + s->end_split - s->first_split;
}

static inline int64_t pf_split_at(const pf_sequence *s, int64_t i) {
    return i < s->sink_splits ? i : s->first_split + i - s->sink_splits;
}

static inline int64_t pf_index_at(const pf_index *index, int64_t i) {
    return pf_integer_at(index->data, index->item_bytes, i * index->stride[0]);
}

/* First key of a split; the end of the last one is the number of keys. */
static inline int64_t pf_split_lo(const pf_sequence *s, int64_t split) {
    const int64_t num_keys = s->mask.num_keys, n = s->num_splits;
    if (n > 0) /* split * num_keys / n without overflow */
        return split * (num_keys / n) + split * (num_keys % n) / n;
    return s->decode ? pf_min(split * PF_DECODE_SPLIT_KEYS, num_keys) : split * num_keys;
}

static inline pf_ends pf_ends_of(const pf_index *index, int64_t sequence, int64_t first_row) {
    if (!index->data)
        return (pf_ends){.data = 0};
    const int64_t offset = sequence * index->stride[0] + first_row * index->stride[1];
    return (pf_ends){(const char *)index->data + offset * index->item_bytes, index->stride[1],
                     index->item_bytes};
}

/* The splits of the decode family that hold keys which some row sees. */
static inline void pf_find_splits(pf_sequence *s) {
    const pf_span seen = pf_visible_to_any(&s->mask, 0, s->num_queries - 1, PF_WINDOW_KEYS);
    const pf_span sinks = pf_visible_to_any(&s->mask, 0, s->num_queries - 1, PF_SINK_KEYS);
    s->first_split = seen.lo / PF_DECODE_SPLIT_KEYS;
    s->end_split = pf_max(pf_ceil_div(seen.hi, PF_DECODE_SPLIT_KEYS), s->first_split + 1);
    if (sinks.lo == sinks.hi)
        return;
    s->sink_splits = pf_ceil_div(sinks.hi, PF_DECODE_SPLIT_KEYS);
    if (s->sink_splits >= s->first_split)
        s->first_split = s->sink_splits = 0;
}

static inline pf_sequence pf_get_sequence(const pf_attention_call *call, int64_t b) {
    pf_sequence s = {.index = b, .q_batch = b, .kv_batch = b, .num_queries = call->seqlen_q};
    int64_t num_keys = call->seqlen_kv;
    if (call->cu_seqlens_q.data) {
        s.q_batch = 0;
        s.q_token = pf_index_at(&call->cu_seqlens_q, b);
        s.num_queries = pf_index_at(&call->cu_seqlens_q, b + 1) - s.q_token;
    }
    if (call->cu_seqlens_kv.data) {
        s.kv_batch = 0;
        s.kv_token = pf_index_at(&call->cu_seqlens_kv, b);
        num_keys = pf_index_at(&call->cu_seqlens_kv, b + 1) - s.kv_token;
    }
    if (call->seq_lens.data)
        num_keys = pf_index_at(&call->seq_lens, b);
    s.mask =
        (pf_mask){.num_keys = num_keys,
                  .offset = call->q_offset.data ? pf_index_at(&call->q_offset, b) : num_keys - s.num_queries,
                  .window_left = call->window_left,
                  .window_right = call->window_right,
                  .sink_tokens = call->sink_tokens,
                  .lo = pf_ends_of(&call->span_lo, s.q_batch, s.q_token),
                  .hi = pf_ends_of(&call->span_hi, s.q_batch, s.q_token),
                  .causal = call->causal};
    s.group = call->num_kv_heads ? call->num_heads / call->num_kv_heads : 1;
    s.num_rows = call->num_kv_heads ? s.num_queries * s.group : 0;
    s.decode = call->family ? call->family == PF_FAMILY_DECODE : s.num_rows <= PF_DECODE_MAX_ROWS;
    s.num_splits = pf_min(call->num_splits, pf_max(num_keys, 1));
    s.end_split = pf_max(s.num_splits, 1);
    if (s.decode && s.num_splits == 0 && s.num_rows > 0)
        pf_find_splits(&s);
    return s;
}

/* Spans of rows instead of queries. */
static inline pf_span pf_row_span(const pf_sequence *s, int64_t row, int side) {
    return pf_visible(&s->mask, pf_quotient(row, s->group), side);
}

static inline pf_span pf_rows_any(const pf_sequence *s, int64_t first, int64_t end, int side) {
    return pf_visible_to_any(&s->mask, pf_quotient(first, s->group), pf_quotient(end - 1, s->group), side);
}

static inline pf_span pf_rows_all(const pf_sequence *s, int64_t first, int64_t end, int side) {
    return pf_visible_to_all(&s->mask, pf_quotient(first, s->group), pf_quotient(end - 1, s->group), side);
}

static inline int64_t pf_query_head(const pf_sequence *s, int64_t kv_head, int64_t row) {
    return kv_head * s->group + row - pf_quotient(row, s->group) * s->group;
}

/* The row of q, out or lse that belongs to a row of a key/value head. */
static inline void *pf_row_of(const pf_tensor *t, const pf_sequence *s, int64_t kv_head, int64_t row) {
    const int64_t query = pf_quotient(row, s->group), head = kv_head * s->group + row - query * s->group;
    const int64_t offset =
        s->q_batch * t->stride_batch + (s->q_token + query) * t->stride_token + head * t->stride_head;
    return (char *)t->data + offset * pf_dtype_size(t->dtype);
}

/* The same of rows [first, first + num_rows), without a division for each. */
static inline void pf_rows_of(const pf_tensor *t, const pf_sequence *s, int64_t kv_head, int64_t first,
                              int64_t num_rows, const void **rows) {
    const int64_t size = pf_dtype_size(t->dtype), next_head = t->stride_head * size;
    const int64_t next_query = t->stride_token * size - (s->group - 1) * next_head;
    int64_t head = first - pf_quotient(first, s->group) * s->group, offset = 0;
    const char *base = pf_row_of(t, s, kv_head, first);
    for (int64_t r = 0; r < num_rows; r++) {
        const int last = ++head == s->group;
        rows[r] = base + offset;
        head = last ? 0 : head;
        offset += last ? next_query : next_head;
    }
}

/* A float of a caller's array, which need not be aligned. */
static inline float pf_float_at(const void *place) {
    float x;
    __builtin_memcpy(&x, place, sizeof x);
    return x;
}

/* Pointers to the rows of keys [lo, hi) in a cache of any address. */
static inline void pf_key_rows(const pf_attention_call *call, const pf_tensor *t, const pf_sequence *s,
                               int64_t kv_head, int64_t lo, int64_t hi, const void **rows) {
    const int64_t size = pf_dtype_size(t->dtype), step = t->stride_token * size;
    const char *base = (const char *)t->data + kv_head * t->stride_head * size;
    if (!call->block_table.data) {
        const char *row =
            base + (s->kv_batch * t->stride_batch + (s->kv_token + lo) * t->stride_token) * size;
        for (int64_t j = lo; j < hi; j++, row += step)
            *rows++ = row;
        return;
    }
    const pf_index *table = &call->block_table;
    while (lo < hi) {
        const int64_t end = pf_min(hi, lo + pf_run_length(call->page_size, lo));
        const int64_t entry = s->index * table->stride[0] + lo / call->page_size * table->stride[1];
        const int64_t page = pf_integer_at(table->data, table->item_bytes, entry);
        const char *row =
            base + size * pf_paged_offset(page, t->stride_batch, call->page_size, lo, t->stride_token);
        for (; lo < end; lo++, row += step)
            *rows++ = row;
    }
}

#endif
