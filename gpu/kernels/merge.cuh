/* One merge of partial results as its kernel gets it, see call.cuh. */
#ifndef PF_MERGE_CUH
#define PF_MERGE_CUH

#include "call.cuh"

struct pf_merge_call {
    pf_tensor parts, part_lse; /* of one part; the next one is stride_part further */
    pf_tensor out, lse;
    pf_tensor sinks; /* [][][head], any float type */
    int64_t parts_stride_part, part_lse_stride_part;
    int64_t num_parts, batch, seqlen, num_heads, head_dim;
    int64_t lse_includes_sinks;
};

#endif
