/* Keys have an address: (sequence, position) -> element offset, for dense, packed and paged keys.
 * Only the loaders ask; kernels see pointers to rows. Valid C11 and CUDA C++. */
#ifndef PF_SHARED_ADDRESS_H
#define PF_SHARED_ADDRESS_H

#include "integers.h"

/* How many keys from `position` on lie at equal distances: to the end of its page. */
PF_SHARED_INLINE int64_t pf_run_length(int64_t page_size, int64_t position) {
    return page_size - position % page_size;
}

/* Offset of a key in a page pool. */
PF_SHARED_INLINE int64_t pf_paged_offset(int64_t page, int64_t stride_page, int64_t page_size,
                                         int64_t position, int64_t stride_token) {
    return page * stride_page + position % page_size * stride_token;
}

#endif
