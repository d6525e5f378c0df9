/* One append to a cache as its kernels get it, see call.cuh. */
#ifndef PF_APPEND_CUH
#define PF_APPEND_CUH

#include "call.cuh"

struct pf_append_call {
    pf_tensor k, v; /* [][token][head][dim] */
    pf_tensor k_cache, v_cache;
    pf_tensor k_scale, v_scale; /* [page][place][head], or null: 1; float32 if they are to be written */
    pf_tensor cos, sin;         /* [][row][][pair], float32 or float64, or null */
    pf_index slots;             /* page * page_size + place; what is no place in the pool is skipped */
    pf_index positions;         /* rows of cos and sin, or null: row t is token t's */
    pf_index block_table, seq_lens, cu_seqlens;
    void *found; /* int64 [2][num_tokens]: slots and positions, made from the three above */
    int64_t batch, num_tokens, num_kv_heads, head_dim, head_dim_v;
    int64_t num_pages, page_size, max_pages;
    int64_t rotary_pairs, rotary_rows;
    int64_t interleaved;
    int64_t writes_scales;    /* choose a scale per token and head, and write it */
    int64_t unique;           /* no slot occurs twice */
    int64_t tokens_per_block; /* one run of tokens, up to PF_MOST_TOKENS */
    int64_t blocks_per_run;   /* that share the heads of its tokens */
};

#endif
