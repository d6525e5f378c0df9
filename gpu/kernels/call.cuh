/* One attention call as the kernels get it: a single struct by value. gpu/_launch.py packs it, and reads its
 * layout here. Strides count elements; a missing array is a null pointer. What lay in
 * host memory has been checked; what lies on the device is bounded in sequence.cuh. */
#ifndef PF_CALL_CUH
#define PF_CALL_CUH

#define PF_SHARED_INLINE static __host__ __device__ __forceinline__
#include "shared/span.h"
#include "shared/address.h"
#include "ptx.cuh"

/* What the kernels compute in: double for float64 inputs, float for all others. */
#ifndef PF_REAL
#define PF_REAL float
#endif
typedef PF_REAL pf_real;

/* A tensor of four axes: the first is the sequence of dense arrays, the page of page pools, and has length 1
 * in packed arrays. */
struct pf_tensor {
    void *data;
    int64_t stride_batch, stride_token, stride_head, stride_dim;
    int64_t dtype;
};

/* An array of 4- or 8-byte integers with up to two axes. */
struct pf_index {
    const void *data;
    int64_t stride[2];
    int64_t item_bytes;
};

/* Index arrays that lie on the device: nobody has looked into them. */
enum {
    PF_UNCHECKED_TABLE = 1,
    PF_UNCHECKED_SPANS = 2,
    PF_UNCHECKED_TREE = 4,
};

enum { PF_TREE_NONE = 0, PF_TREE_SEEN = 1, PF_TREE_PARENTS = 2 };

struct pf_call {
    pf_tensor q, k, v, out;
    pf_tensor lse;              /* one element a row: stride_dim is unused */
    pf_tensor k_scale, v_scale; /* float32; stride_dim is unused */
    pf_tensor q_scale;          /* as q, float32; stride_dim is unused */
    pf_tensor bias, mask;   /* [sequence][row][head][key] in the order of the strides; the mask's are bytes */
    pf_tensor alibi_slopes; /* [sequence][][head], any float type */
    pf_tensor sinks;        /* [][][head] */
    pf_index cu_seqlens_q, cu_seqlens_kv, seq_lens, block_table, q_offset;
    pf_index span_lo, span_hi; /* [sequence][row], of packed queries [0][row of all] */
    const void *tree;          /* bytes [sequence][draft][draft], or parents [sequence][draft] */
    int64_t tree_stride[3], tree_item_bytes, tree_kind, num_draft;
    int64_t batch, num_heads, num_kv_heads, head_dim, head_dim_v;
    int64_t seqlen_q, seqlen_kv; /* second axes of q and k: lengths, or tokens of all sequences */
    int64_t max_seqlen_q;        /* no sequence has more queries */
    int64_t num_pages, page_size, max_pages;
    int64_t bias_rows, bias_keys, mask_rows, mask_keys;
    int64_t window_left, window_right, sink_tokens;
    double scale, softcap;
    int64_t causal, lse_includes_sinks;
    int64_t unchecked;
    /* Blocks are numbered in one dimension: blocks of rows, then heads, then splits, then sequences.
     * Sequences with other numbers of rows per key/value head than these are another kernel's. */
    int64_t row_blocks, min_rows, max_rows;
    int64_t section; /* heads whose blocks are taken together, those with most to do first; 0: one by one */
    /* Splits of the keys: num_splits parts of equal length, or one every split_keys keys; 0 and 0: none.
     * Parts are of all keys or, with split_seen, of the tiles that some row of a block sees. Where there are
     * some, states go to `partial` and another kernel merges them. */
    int64_t num_splits, split_keys, split_seen, max_splits;
    void *partial;
};

/* Which score terms and masks a kernel has been compiled for; the others cost nothing. Macros, since the
 * preprocessor asks too. */
#define PF_TERM_SOFTCAP 1
#define PF_TERM_ALIBI 2
#define PF_TERM_BIAS 4
#define PF_TERM_MASK 8
#define PF_TERM_TREE 16
#define PF_TERM_SCORE_MOD 32
#define PF_TERM_MASK_MOD 64
#ifndef PF_TERMS
#define PF_TERMS (PF_TERM_SOFTCAP | PF_TERM_ALIBI | PF_TERM_BIAS | PF_TERM_MASK | PF_TERM_TREE)
#endif
#define PF_HAS(term) (((PF_TERMS) & (PF_TERM_##term)) != 0)

/* Which index arrays a call may have, where a kernel has been compiled for that. What stands beside code that
 * is never run costs time too: all of it comes from memory. */
#define PF_INDEX_CU_SEQLENS_Q 1
#define PF_INDEX_CU_SEQLENS_KV 2
#define PF_INDEX_SEQ_LENS 4
#define PF_INDEX_BLOCK_TABLE 8
#define PF_INDEX_Q_OFFSET 16
#define PF_INDEX_SPANS 32
#define PF_INDEX_TREE 64
#ifndef PF_INDICES
#define PF_INDICES 127
#endif
#define PF_MAY_HAVE(index) (((PF_INDICES) & (PF_INDEX_##index)) != 0)

/* Whether states go to the workspace; a kernel of the plan may know. */
#ifdef PF_HAS_SPLITS
#define pf_has_splits(call) (PF_HAS_SPLITS != 0)
#else
#define pf_has_splits(call) ((call).partial != nullptr)
#endif

#define PF_LOG2_E 1.4426950408889634074
#define PF_LN_2 0.69314718055994530942

#endif
