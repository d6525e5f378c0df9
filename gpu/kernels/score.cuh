/* What happens to a score between q.k and its weight: scale, softcap, the caller's function, ALiBi, bias, in
 * this order; and which keys are hidden by what is no span. The twin of c_src/kernels/score.h. */
#ifndef PF_SCORE_CUH
#define PF_SCORE_CUH

#include "sequence.cuh"

/* Expressions of the caller, put here by gpu/_compile.py. */
#if PF_HAS(SCORE_MOD)
PF_DEVICE pf_real pf_score_mod(pf_real score, int64_t batch, int64_t head, int64_t query, int64_t key) {
    return (pf_real)(PF_SCORE_MOD_EXPRESSION);
}
#endif
#if PF_HAS(MASK_MOD)
PF_DEVICE bool pf_mask_mod(int64_t batch, int64_t head, int64_t query, int64_t key) {
    return (bool)(PF_MASK_MOD_EXPRESSION);
}
#endif

/* What is finite stays so in a narrower type. */
PF_DEVICE pf_real pf_narrow(double x) {
    const pf_real narrow = (pf_real)x;
    return pf_is_finite(x) && !pf_is_finite(narrow) ? (x < 0 ? pf_lowest<pf_real>() : -pf_lowest<pf_real>())
                                                    : narrow;
}

/* One query of one head, and what its terms need that does not depend on the key. */
struct pf_query {
    int64_t head, kv_head, i;
    int64_t position;   /* i + offset */
    int64_t bias, mask; /* offsets of key 0 */
    pf_real slope;
};

PF_DEVICE pf_query pf_get_query(const pf_call &call, const pf_sequence &s, int64_t head, int64_t i) {
    pf_query q;
    q.head = head;
    q.kv_head = pf_quotient(head, s.group);
    q.i = i;
    q.position = i + s.mask.offset;
    q.bias = q.mask = 0;
    q.slope = 0;
    if (PF_HAS(BIAS) && call.bias.data)
        q.bias = s.index * call.bias.stride_batch + i * call.bias.stride_token + head * call.bias.stride_head;
    if (PF_HAS(MASK) && call.mask.data)
        q.mask = s.index * call.mask.stride_batch + i * call.mask.stride_token + head * call.mask.stride_head;
    if (PF_HAS(ALIBI) && call.alibi_slopes.data)
        q.slope = pf_narrow(pf_number_at(call.alibi_slopes, s.index * call.alibi_slopes.stride_batch +
                                                                head * call.alibi_slopes.stride_head));
    return q;
}

PF_DEVICE pf_real pf_bias_at(const pf_call &call, const pf_query &q, int64_t j) {
    return pf_narrow(pf_number_at(call.bias, q.bias + j * call.bias.stride_dim));
}

/* Draft token `row` sees itself and what is above it in its branch. */
PF_DEVICE bool pf_sees_draft(const pf_call &call, int64_t sequence, int64_t row, int64_t key) {
    if (call.tree_kind == PF_TREE_SEEN)
        return ((const uint8_t *)call.tree)[sequence * call.tree_stride[0] + row * call.tree_stride[1] +
                                            key * call.tree_stride[2]] != 0;
    while (row > key) {
        const int64_t parent = pf_parent_of(call, sequence, row);
        if (parent >= row) /* no tree; `pf_find_bad` has said so */
            return false;
        row = parent;
    }
    return row == key;
}

/* Whether a query may not see key j of its span. */
PF_DEVICE bool pf_is_hidden(const pf_call &call, const pf_sequence &s, const pf_query &q, int64_t j) {
    bool hidden = false;
    if (PF_HAS(MASK) && call.mask.data)
        hidden |= ((const uint8_t *)call.mask.data)[q.mask + j * call.mask.stride_dim] == 0;
    if (PF_HAS(BIAS) && call.bias.data)
        hidden |= pf_bias_at(call, q, j) == -(pf_real)pf_infinity();
    if (PF_HAS(TREE) && call.num_draft) {
        const int64_t first = s.mask.num_keys - call.num_draft, row = q.position - first;
        if (row >= 0 && row < call.num_draft && j >= first)
            hidden |= !pf_sees_draft(call, s.index, row, j - first);
    }
#if PF_HAS(MASK_MOD)
    hidden |= !pf_mask_mod(s.index, q.head, q.position, j);
#endif
    return hidden;
}

PF_DEVICE float pf_tanh(float x) {
    return tanhf(x);
}

PF_DEVICE double pf_tanh(double x) {
    return tanh(x);
}

/* The final score of a visible pair from its product q.k: natural units, scale applied here. */
PF_DEVICE pf_real pf_final_score(const pf_call &call, const pf_sequence &s, const pf_query &q, int64_t j,
                                 pf_real product) {
    pf_real score = product * (pf_real)call.scale;
    if (PF_HAS(SOFTCAP) && call.softcap > 0) {
        /* A cap and its inverse are numbers of the type; beyond these ends no weight would show it. */
        const double largest = sizeof(pf_real) == 4 ? 1e30 : 1e300;
        const pf_real cap = (pf_real)(call.softcap > largest       ? largest
                                      : call.softcap < 1 / largest ? 1 / largest
                                                                   : call.softcap);
        score = cap * pf_tanh(score / cap);
    }
#if PF_HAS(SCORE_MOD)
    score = pf_score_mod(score, s.index, q.head, q.position, j);
#endif
    if (PF_HAS(ALIBI) && call.alibi_slopes.data) {
        const int64_t distance = q.position < j ? j - q.position : q.position - j;
        score -= q.slope * (pf_real)distance;
    }
    if (PF_HAS(BIAS) && call.bias.data) {
        /* Anything finite stays a number, as low as it may be; only -inf hides. */
        const pf_real lowest = pf_lowest<pf_real>(), sum = score + pf_bias_at(call, q, j);
        score = score >= lowest && sum < lowest ? lowest : sum;
    }
    return score;
}

#endif
