/* Small integer facts: minimum, maximum, division rounding up, element types and their sizes.
 * Valid C11 and CUDA C++; no libc, no floating point. */
#ifndef PF_SHARED_INTEGERS_H
#define PF_SHARED_INTEGERS_H

#include <stdint.h>

#ifndef PF_SHARED_INLINE
#define PF_SHARED_INLINE static inline
#endif

enum pf_dtype {
#define PF_DTYPE(name, code, size, python) PF_##name = code,
#include "dtypes.def"
#undef PF_DTYPE
};

PF_SHARED_INLINE int64_t pf_dtype_size(int32_t dtype) {
    switch (dtype) {
#define PF_DTYPE(name, code, size, python)                                                                   \
    case code:                                                                                               \
        return size;
#include "dtypes.def"
#undef PF_DTYPE
    default:
        return 0;
    }
}

/* Byte at which element i of a row of unit stride lies; i is even for int4, where two share one. */
PF_SHARED_INLINE int64_t pf_byte_of(int32_t dtype, int64_t i) {
    return dtype == PF_I4 ? i / 2 : i * pf_dtype_size(dtype);
}

/* Bytes of n elements of unit stride. */
PF_SHARED_INLINE int64_t pf_row_bytes(int32_t dtype, int64_t n) {
    return dtype == PF_I4 ? (n + 1) / 2 : n * pf_dtype_size(dtype);
}

/* Element i of an array of 4- or 8-byte integers. */
PF_SHARED_INLINE int64_t pf_integer_at(const void *data, int32_t item_bytes, int64_t i) {
    return item_bytes == 4 ? (int64_t)((const int32_t *)data)[i] : ((const int64_t *)data)[i];
}

PF_SHARED_INLINE int64_t pf_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

PF_SHARED_INLINE int64_t pf_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* a / b. Both are short nearly always, and processors divide short numbers several times as fast. */
PF_SHARED_INLINE int64_t pf_quotient(int64_t a, int64_t b) {
#ifdef __CUDA_ARCH__ /* the compiler's own division does that */
    return a / b;
#else
    return ((a | b) >> 32) == 0 ? (int64_t)((uint32_t)a / (uint32_t)b) : a / b;
#endif
}

PF_SHARED_INLINE int64_t pf_ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

PF_SHARED_INLINE int64_t pf_round_up(int64_t a, int64_t multiple) {
    return pf_ceil_div(a, multiple) * multiple;
}

#endif
