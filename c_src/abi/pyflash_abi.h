/* The declarations that C and Python share: this file is included by C and is, without the lines
 * that start with '#', the cdef of cffi. Plain C, no macros, no includes but the first.
 * Strides count elements; a missing array is a null pointer; arguments have been checked. */
#ifndef PYFLASH_ABI_H
#define PYFLASH_ABI_H
#include <stdint.h>

/* A tensor of four axes. The first is the sequence of dense arrays, the page of page pools, and
 * has length 1 in packed arrays. */
typedef struct pf_tensor {
    void *data;
    int64_t stride_batch, stride_token, stride_head, stride_dim;
    int32_t dtype;
} pf_tensor;

/* An array of 4- or 8-byte integers with one or two axes. */
typedef struct pf_index {
    const void *data;
    int64_t stride[2];
    int32_t item_bytes;
} pf_index;

/* One attention call. */
typedef struct pf_attention_call {
    pf_tensor q, k, v, out;
    pf_tensor lse; /* one element a row: stride_dim is unused */
    pf_index cu_seqlens_q, cu_seqlens_kv, seq_lens, block_table, q_offset;
    int64_t batch, seqlen_q, seqlen_kv; /* lengths of the axes of dense arrays */
    int64_t num_heads, num_kv_heads, head_dim, head_dim_v, page_size;
    int64_t window_left, window_right; /* negative: without limit */
    int64_t sink_tokens;               /* keys below it are exempt from the window */
    pf_index span_lo, span_hi;         /* [sequence][row], of packed queries [0][row of all] */
    pf_tensor k_scale, v_scale;        /* float32; stride_dim is unused */
    pf_tensor bias;                    /* [sequence][row][head][key] in the order of the strides */
    pf_tensor mask;                    /* as bias, bytes: 0 hides */
    const uint8_t *tree;               /* (batch, num_draft, num_draft) bytes: 0 hides */
    const double *alibi_slopes;        /* (batch, num_heads) */
    const double *sinks;               /* (num_heads,) */
    double (*score_mod)(double score, int64_t batch, int64_t head, int64_t query, int64_t key);
    int32_t (*mask_mod)(int64_t batch, int64_t head, int64_t query, int64_t key);
    int64_t num_draft;
    double scale, softcap; /* softcap 0: none */
    int32_t causal, lse_includes_sinks;
    int32_t num_splits;  /* 0: the family's own borders */
    int32_t tile;        /* keys per tile; 0: the kernel's own */
    int32_t family;      /* 0: by shape, 1: prefill, 2: decode */
    int32_t isa;         /* row of the table of instruction sets */
    int32_t num_threads; /* 0: as many as OpenMP would use */
    void *workspace;     /* null: allocate */
    int64_t workspace_bytes;
} pf_attention_call;

/* A call that was checked and made, and the lengths of axes that it does not say: with them it can be made
 * again with other arrays of the same shapes, strides and types. */
typedef struct pf_known_call {
    pf_attention_call call;    /* its places of q, k, v, out, lse and index arrays mean nothing */
    int64_t batch_q, batch_kv; /* first axes of q and of k */
    int64_t max_pages;         /* second axis of the block table, 0 without one */
} pf_known_call;

/* What a call would do. */
typedef struct pf_plan {
    int32_t num_threads;
    int32_t tile_prefill, tile_decode;
    int32_t panel_rows; /* query rows side by side in the registers of the prefill kernel */
    int32_t matrix;     /* whether the prefill family works on a matrix unit */
    int64_t block_rows; /* query rows of one prefill work item */
    int64_t num_prefill_items, num_decode_items;
    int64_t num_splits; /* largest number of parts of one sequence's keys */
    int64_t max_rows;   /* largest number of query rows of a decode item */
    int64_t tiles_total, tiles_skipped;
    int64_t shared_bytes, thread_bytes, workspace_bytes;
} pf_plan;

/* Partial results (out, lse) of disjoint key sets, merged along the fixed tree of their indices. */
typedef struct pf_merge_call {
    pf_tensor parts, part_lse, out, lse; /* parts: one part; the next is stride_part further */
    int64_t parts_stride_part, part_lse_stride_part;
    const double *sinks; /* (num_heads,), or null */
    int64_t num_parts, batch, seqlen, num_heads, head_dim;
    int32_t lse_includes_sinks;
    int32_t isa;
} pf_merge_call;

/* Tokens and the places in a cache where they go. */
typedef struct pf_append_call {
    pf_tensor k, v; /* stride_batch is unused */
    pf_tensor k_cache, v_cache;
    pf_tensor k_scale, v_scale; /* float32 [page][place][head], or null: 1 */
    const int64_t *slots;       /* (num_tokens,): page * page_size + place, or -1 */
    const double *cos;          /* (num_tokens, rotary_pairs), or null */
    const double *sin;
    int64_t num_tokens, num_kv_heads, head_dim, head_dim_v, page_size, rotary_pairs;
    int32_t interleaved;
    int32_t writes_scales; /* choose a scale per token and head, and write it */
    int32_t isa;
} pf_append_call;

/* What a second pass over queries and keys finds out, with the log-sum-exp known. Null: not wanted.
 * All arrays are contiguous, of the compute type or int64; of packed queries the rows are those of all
 * sequences, and their batch is 1. Results are added to what they were filled with. */
typedef struct pf_stats_call {
    const pf_attention_call *attention; /* its v is k, its out means nothing */
    const void *lse;                    /* [batch][num_heads][rows_of_lse] */
    void *max_logit, *entropy;          /* as lse */
    void *top_k_values;                 /* as lse, with [top_k] behind */
    int64_t *top_k_indices;
    void *key_mass;                                               /* [batch][num_heads][num_keys] */
    const int64_t *rows;                                          /* [num_rows] */
    void *row_probabilities;                                      /* [batch][num_heads][num_rows][num_keys] */
    int64_t rows_of_lse, num_keys, num_rows, top_k, last_queries; /* last_queries below 0: all */
} pf_stats_call;

/* All return a status; 0 is success. pf_status_text gives the words of any status. */
int pf_attention(const pf_attention_call *call);
/* A known call with arrays in these places (lse null: none); index is null or has four places, null
 * for none, of cu_seqlens_q, cu_seqlens_kv, seq_lens and block_table. Threads may share `known`. */
int pf_attention_again(const pf_known_call *known, void *q, void *k, void *v, void *out, void *lse,
                       const void *const *index);
int pf_attention_plan(const pf_attention_call *call, pf_plan *plan);
int pf_merge_states(const pf_merge_call *call);
int pf_append_kv(const pf_append_call *call);
int pf_attention_stats(const pf_stats_call *call);
const char *pf_status_text(int status);

/* Instruction sets: the rows that were compiled in, slowest first, and whether CPU and operating
 * system allow them. */
int pf_num_isas(void);
const char *pf_isa_name(int isa);
int pf_isa_supported(int isa);

/* OpenMP: its version date, 0 for a serial build; the threads a call would use by default. */
int pf_openmp_version(void);
int pf_max_threads(void);

/* Primitives of an instruction set, for tests. `wide` chooses float64. Each works on count
 * elements; pf_primitive_exp2 computes 2^(x * factor) for x <= 0. */
int pf_primitive_exp2(int isa, int wide, const void *x, double factor, void *out, int64_t count);
int pf_primitive_tanh(int isa, int wide, const void *x, void *out, int64_t count);
int pf_primitive_load(int isa, int wide, int dtype, const void *x, int64_t stride, void *out, int64_t count);
int pf_primitive_store(int isa, int wide, int dtype, const void *x, void *out, int64_t stride, int64_t count);
int pf_primitive_lanes(int isa, int wide);
int pf_primitive_transpose(int isa, int wide, const void *x, void *out);
int pf_primitive_reduce(int isa, int wide, const void *x, void *sums, void *maximum);

/* What one thread can do at most in an instruction set, for benchmarks: so many rounds of multiply-adds on
 * float (kind 0), double (1) or the matrix unit (2), which return the operations done, 0 without such a unit;
 * and count floats read once, which return the bytes. */
double pf_limit_operations(int isa, int kind, int64_t rounds);
double pf_limit_read(int isa, const float *data, int64_t count);

#endif
