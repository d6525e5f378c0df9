/* A call of which only the places of the arrays are new: everything else was checked when it was made
 * first. What places and contents can still get wrong is looked at here, quickly; whoever is not surely
 * right is sent back to be checked in words. */
#include "entry.h"

#include "call.h"

/* Whether two arrays of which one byte range each is known lie apart; they may also if the ranges meet. */
static int lie_apart(const void *a, pf_reach a_reach, const void *b, pf_reach b_reach) {
    const intptr_t x = (intptr_t)a, y = (intptr_t)b;
    return !b || x + a_reach.hi <= y + b_reach.lo || y + b_reach.hi <= x + a_reach.lo;
}

static int out_is_apart(const pf_known_call *known, const pf_attention_call *call) {
    const void *out = call->out.data;
    const pf_reach reach = known->out;
    return lie_apart(out, reach, call->q.data, known->q) && lie_apart(out, reach, call->k.data, known->k) &&
           lie_apart(out, reach, call->v.data, known->v) &&
           lie_apart(out, reach, call->cu_seqlens_q.data, known->cu_seqlens_q) &&
           lie_apart(out, reach, call->cu_seqlens_kv.data, known->cu_seqlens_kv) &&
           lie_apart(out, reach, call->seq_lens.data, known->seq_lens) &&
           lie_apart(out, reach, call->block_table.data, known->block_table);
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
    for (int64_t b = 0; call->seq_lens.data && b < call->batch; b++) {
        const int64_t length = pf_index_at(&call->seq_lens, b);
        if (length < 0 || length > known->longest)
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
            if (page < 0 || page >= known->num_pages)
                return 0;
        }
    }
    return 1;
}

int pf_driver_attention_again(const pf_known_call *known, const pf_attention_call *call) {
    const int fine = out_is_apart(known, call) && is_aligned(&call->cu_seqlens_q) &&
                     is_aligned(&call->cu_seqlens_kv) && is_aligned(&call->seq_lens) &&
                     is_aligned(&call->block_table) &&
                     are_prefix_sums(&call->cu_seqlens_q, call->batch, known->total_q) &&
                     are_prefix_sums(&call->cu_seqlens_kv, call->batch, known->total_kv) &&
                     lengths_fit(known, call) && pages_exist(known, call);
    return fine ? pf_driver_attention(call) : PF_STATUS_TO_BE_CHECKED;
}
