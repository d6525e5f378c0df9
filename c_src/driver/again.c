/* A call of which only the places of the arrays are new: everything else was checked when it was made
 * first. What places and contents can still get wrong is looked at here, quickly; whoever is not surely
 * right is sent back to be checked in words. */
#include "entry.h"

#include "call.h"

/* The bytes of an array, [lo, hi). */
typedef struct pf_bytes {
    intptr_t lo, hi;
} pf_bytes;

static pf_bytes bytes_of(const void *data, int64_t item_bytes, const int64_t *lengths, const int64_t *strides,
                         int num_axes) {
    pf_bytes bytes = {(intptr_t)data, (intptr_t)data + item_bytes};
    for (int axis = 0; axis < num_axes; axis++) {
        const int64_t last = (lengths[axis] - 1) * strides[axis] * item_bytes;
        bytes.lo += pf_min(last, 0);
        bytes.hi += pf_max(last, 0);
    }
    return bytes;
}

static pf_bytes bytes_of_tensor(const pf_tensor *t, int64_t batch, int64_t tokens, int64_t heads,
                                int64_t width) {
    const int64_t item_bytes = pf_dtype_size(t->dtype);
    const int64_t lengths[] = {batch, tokens, heads, pf_row_bytes(t->dtype, width) / item_bytes};
    const int64_t strides[] = {t->stride_batch, t->stride_token, t->stride_head, t->stride_dim};
    return bytes_of(t->data, item_bytes, lengths, strides, 4);
}

/* Ranges of bytes that meet do not say that elements do; then the full check has to find out. */
static int lie_apart(pf_bytes a, pf_bytes b) {
    return a.hi <= b.lo || b.hi <= a.lo;
}

static int index_lies_apart(pf_bytes out, const pf_index *index, int64_t length, int64_t second) {
    const int64_t lengths[] = {length, second};
    return !index->data ||
           lie_apart(out, bytes_of(index->data, index->item_bytes, lengths, index->stride, 2));
}

static int out_lies_apart(const pf_known_call *known, const pf_attention_call *call) {
    const int64_t tokens = call->seqlen_kv, heads = call->num_kv_heads, batch = known->batch_kv;
    const pf_bytes out =
        bytes_of_tensor(&call->out, known->batch_q, call->seqlen_q, call->num_heads, call->head_dim_v);
    return lie_apart(out, bytes_of_tensor(&call->q, known->batch_q, call->seqlen_q, call->num_heads,
                                          call->head_dim)) &&
           lie_apart(out, bytes_of_tensor(&call->k, batch, tokens, heads, call->head_dim)) &&
           lie_apart(out, bytes_of_tensor(&call->v, batch, tokens, heads, call->head_dim_v)) &&
           index_lies_apart(out, &call->cu_seqlens_q, call->batch + 1, 1) &&
           index_lies_apart(out, &call->cu_seqlens_kv, call->batch + 1, 1) &&
           index_lies_apart(out, &call->seq_lens, call->batch, 1) &&
           index_lies_apart(out, &call->block_table, call->batch, known->max_pages);
}

static int is_aligned(const pf_index *index) {
    return !index->data || (uintptr_t)index->data % (uintptr_t)index->item_bytes == 0;
}

/* From 0 to the total without falling. */
static int are_prefix_sums(const pf_index *sums, int64_t batch, int64_t total) {
    if (!sums->data)
        return 1;
    int64_t before = pf_index_at(sums, 0);
    if (before != 0)
        return 0;
    for (int64_t b = 1; b <= batch; b++) {
        const int64_t sum = pf_index_at(sums, b);
        if (sum < before)
            return 0;
        before = sum;
    }
    return before == total;
}

static int lengths_fit(const pf_known_call *known, const pf_attention_call *call) {
    const int64_t longest = call->seqlen_kv * (call->block_table.data ? known->max_pages : 1);
    for (int64_t b = 0; call->seq_lens.data && b < call->batch; b++) {
        const int64_t length = pf_index_at(&call->seq_lens, b);
        if (length < 0 || length > longest)
            return 0;
    }
    return 1;
}

/* The pages of all keys lie in the pool; the lengths have been checked. */
static int pages_exist(const pf_known_call *known, const pf_attention_call *call) {
    const pf_index *table = &call->block_table;
    for (int64_t b = 0; table->data && b < call->batch; b++) {
        const int64_t pages = pf_ceil_div(pf_index_at(&call->seq_lens, b), call->page_size);
        for (int64_t i = 0; i < pages; i++) {
            const int64_t page =
                pf_integer_at(table->data, table->item_bytes, b * table->stride[0] + i * table->stride[1]);
            if (page < 0 || page >= known->batch_kv)
                return 0;
        }
    }
    return 1;
}

int pf_driver_attention_again(const pf_known_call *known, const pf_attention_call *call) {
    const int fine = out_lies_apart(known, call) && is_aligned(&call->cu_seqlens_q) &&
                     is_aligned(&call->cu_seqlens_kv) && is_aligned(&call->seq_lens) &&
                     is_aligned(&call->block_table) &&
                     are_prefix_sums(&call->cu_seqlens_q, call->batch, call->seqlen_q) &&
                     are_prefix_sums(&call->cu_seqlens_kv, call->batch, call->seqlen_kv) &&
                     lengths_fit(known, call) && pages_exist(known, call);
    return fine ? pf_driver_attention(call) : PF_STATUS_TO_BE_CHECKED;
}
