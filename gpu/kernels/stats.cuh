/* What a second pass over queries and keys is to find out, as its kernels get it, see call.cuh. */
#ifndef PF_STATS_CUH
#define PF_STATS_CUH

#include "call.cuh"

/* Results are of the compute type, unless that is double for the sake of a scale alone. */
#ifndef PF_RESULT
#define PF_RESULT PF_REAL
#endif
typedef PF_RESULT pf_result;

/* Null pointers: not wanted. */
struct pf_stats_call {
    pf_call attention;                 /* its v is k; out and lse mean nothing */
    pf_tensor lse, max_logit, entropy; /* placed as the log-sum-exp of a call; stride_dim is unused */
    pf_tensor top_k_values;            /* as lse, stride_dim from one to the next */
    pf_tensor top_k_indices;           /* the same, int64 */
    pf_tensor key_mass;                /* [sequence][key][head] in the order of the strides */
    pf_tensor row_probabilities;       /* [sequence][chosen row][head][key] */
    pf_index rows;                     /* chosen rows; numbers that no row has choose nothing */
    int64_t num_rows, num_keys;        /* lengths of axes */
    int64_t top_k, last_queries;       /* last_queries below 0: all */
};

#endif
