/* Rows of elements between memory and the kernels: conversion, any stride, transposition of query
 * rows into lanes and of outputs back. Included once per element type. */

/* The first n < LANES elements from i on, 0 behind them, without a read past the row's end. */
PF_INLINE V(vec) V(load_partial)(const void *x, int64_t i, int64_t n, const int32_t dtype) {
    _Alignas(64) char bytes[V(LANES) * 8] = {0}; /* all-zero bytes are 0 in every type */
    __builtin_memcpy(bytes, (const char *)x + pf_byte_of(dtype, i), (size_t)pf_row_bytes(dtype, n));
    return V(load_as)(bytes, 0, dtype);
}

PF_INLINE void V(load_row_as)(V(elem) * row, const void *x, int64_t stride, int64_t n, const int32_t dtype) {
    const int64_t size = pf_dtype_size(dtype);
    int64_t d = 0;
    if (stride == 1) {
        for (; d + V(LANES) <= n; d += V(LANES))
            V(store)(row + d, V(load_as)(x, d, dtype));
        if (d < n) {
            V(elem) rest[V(LANES)];
            V(store)(rest, V(load_partial)(x, d, n - d, dtype));
            __builtin_memcpy(row + d, rest, (size_t)(n - d) * sizeof *row);
        }
        return;
    }
    const int64_t step = dtype == PF_I4 ? 2 : 1; /* elements in an item */
    for (; d < n; d += step) {
        V(elem) lanes[V(LANES)];
        V(store)(lanes, V(load_partial)((const char *)x + d / step * stride * size, 0, step, dtype));
        row[d] = lanes[0];
        if (d + 1 < n && step == 2)
            row[d + 1] = lanes[1];
    }
}

static void V(load_row)(void *row, const void *x, int64_t stride, int64_t n, int32_t dtype) {
    switch (dtype) {
    case PF_F16:
        V(load_row_as)(row, x, stride, n, PF_F16);
        return;
    case PF_BF16:
        V(load_row_as)(row, x, stride, n, PF_BF16);
        return;
    case PF_F64:
        V(load_row_as)(row, x, stride, n, PF_F64);
        return;
    case PF_F8E4M3:
        V(load_row_as)(row, x, stride, n, PF_F8E4M3);
        return;
    case PF_F8E5M2:
        V(load_row_as)(row, x, stride, n, PF_F8E5M2);
        return;
    case PF_I8:
        V(load_row_as)(row, x, stride, n, PF_I8);
        return;
    case PF_I4:
        V(load_row_as)(row, x, stride, n, PF_I4);
        return;
    default:
        V(load_row_as)(row, x, stride, n, PF_F32);
    }
}

PF_INLINE void V(store_row_as)(void *x, int64_t stride, const V(elem) * row, int64_t n, const int32_t dtype) {
    const int64_t size = pf_dtype_size(dtype);
    int64_t d = 0;
    if (stride == 1)
        for (; d + V(LANES) <= n; d += V(LANES))
            V(store_as)(x, d, V(load)(row + d), dtype);
    for (; d < n; d++) {
        _Alignas(64) char bytes[V(LANES) * 8];
        V(store_as)(bytes, 0, V(set1)(row[d]), dtype);
        __builtin_memcpy((char *)x + d * stride * size, bytes, (size_t)size);
    }
}

static void V(store_row)(void *x, int64_t stride, const void *row, int64_t n, int32_t dtype) {
    switch (dtype) {
    case PF_F16:
        V(store_row_as)(x, stride, row, n, PF_F16);
        return;
    case PF_BF16:
        V(store_row_as)(x, stride, row, n, PF_BF16);
        return;
    case PF_F64:
        V(store_row_as)(x, stride, row, n, PF_F64);
        return;
    default:
        V(store_row_as)(x, stride, row, n, PF_F32);
    }
}

static void V(pack_queries)(void *panel, int32_t num_vectors, const void *const *rows, int32_t num_rows,
                            int64_t head_dim, int32_t dtype, int64_t stride, double factor_, void *scratch_,
                            int64_t scratch_stride) {
    const int64_t width = (int64_t)num_vectors * V(LANES);
    const V(vec) factor = V(set1)((V(elem))factor_);
    V(elem) *scratch = scratch_;
    /* Rows of the compute type, whole vectors long, are read where they lie. */
    const int direct = dtype == V(DTYPE) && stride == 1 && head_dim % V(LANES) == 0;
    for (int32_t vector = 0; vector < num_vectors; vector++) {
        V(elem) *lanes = (V(elem) *)panel + vector * V(LANES);
        const V(elem) * source[V(LANES)];
        for (int32_t w = 0; w < V(LANES); w++) {
            const int32_t r = vector * V(LANES) + w;
            V(elem) *row = scratch + w * scratch_stride;
            const int64_t valid = r < num_rows ? head_dim : 0;
            source[w] = valid && direct ? rows[r] : row;
            if (valid && direct)
                continue;
            if (valid)
                V(load_row)(row, rows[r], stride, head_dim, dtype);
            for (int64_t d = valid; d < scratch_stride; d++)
                row[d] = 0;
        }
        for (int64_t d = 0; d < head_dim; d += V(LANES)) {
            V(vec) square[V(LANES)];
            PF_UNROLL
            for (int w = 0; w < V(LANES); w++)
                square[w] = V(mul)(V(load)(source[w] + d), factor);
            V(transpose)(square);
            const int64_t valid = head_dim - d < V(LANES) ? head_dim - d : V(LANES);
            PF_UNROLL
            for (int k = 0; k < V(LANES); k++)
                if (k < valid)
                    V(store)(lanes + (d + k) * width, square[k]);
        }
    }
}

static void V(unpack_rows)(const void *panel, int32_t num_vectors, int32_t vector, int64_t num_dims,
                           void *rows_, int64_t row_stride) {
    const int64_t width = (int64_t)num_vectors * V(LANES);
    const V(elem) *lanes = (const V(elem) *)panel + vector * V(LANES);
    V(elem) *rows = rows_;
    for (int64_t d = 0; d < num_dims; d += V(LANES)) {
        V(vec) square[V(LANES)];
        for (int64_t k = 0; k < V(LANES); k++)
            square[k] = d + k < num_dims ? V(load)(lanes + (d + k) * width) : V(zero)();
        V(transpose)(square);
        PF_UNROLL
        for (int w = 0; w < V(LANES); w++)
            V(store)(rows + w * row_stride + d, square[w]);
    }
}

PF_INLINE int V(finish_rows_as)(const void *panel, int32_t num_vectors, int32_t vector, int64_t num_dims,
                                const void *factors, void *const *rows, int32_t num_rows, int64_t stride,
                                const int32_t dtype, void *check_) {
    const int64_t width = (int64_t)num_vectors * V(LANES), size = pf_dtype_size(dtype);
    const V(elem) *lanes = (const V(elem) *)panel + vector * V(LANES);
    const V(vec) factor = V(load)(factors);
    V(vec) checks[4]; /* x * 0 is NaN for NaN and Inf alone */
    PF_UNROLL
    for (int i = 0; i < 4; i++)
        checks[i] = V(zero)();
    for (int64_t d = 0; d < num_dims; d += V(LANES)) {
        const int64_t valid = num_dims - d < V(LANES) ? num_dims - d : V(LANES);
        V(vec) square[V(LANES)];
        for (int64_t k = valid; k < V(LANES); k++)
            square[k] = V(zero)();
        if (valid == V(LANES)) {
            PF_UNROLL
            for (int k = 0; k < V(LANES); k++)
                square[k] = V(load)(lanes + (d + k) * width);
        } else {
            for (int64_t k = 0; k < valid; k++)
                square[k] = V(load)(lanes + (d + k) * width);
        }
        PF_UNROLL
        for (int k = 0; k < V(LANES); k++) { /* adding 0: see state_scale */
            square[k] = V(mul)(V(add)(square[k], V(zero)()), factor);
            checks[k % 4] = V(fma)(square[k], V(zero)(), checks[k % 4]);
        }
        V(transpose)(square);
        PF_UNROLL
        for (int w = 0; w < V(LANES); w++) {
            if (w >= num_rows)
                continue;
            if (stride == 1 && valid == V(LANES)) {
                V(store_as)(rows[w], d, square[w], dtype);
                continue;
            }
            V(elem) part[V(LANES)];
            V(store)(part, square[w]);
            V(store_row)((char *)rows[w] + d * stride * size, stride, part, valid, dtype);
        }
    }
    const V(vec) check = V(add)(V(add)(checks[0], checks[1]), V(add)(checks[2], checks[3]));
    V(store)(check_, check);
    return V(reduce_add)(check) == 0;
}

static int V(finish_rows)(const void *panel, int32_t num_vectors, int32_t vector, int64_t num_dims,
                          const void *factors, void *const *rows, int32_t num_rows, int64_t stride,
                          int32_t dtype, void *check) {
    switch (dtype) {
    case PF_F16:
        return V(finish_rows_as)(panel, num_vectors, vector, num_dims, factors, rows, num_rows, stride,
                                 PF_F16, check);
    case PF_BF16:
        return V(finish_rows_as)(panel, num_vectors, vector, num_dims, factors, rows, num_rows, stride,
                                 PF_BF16, check);
    case PF_F64:
        return V(finish_rows_as)(panel, num_vectors, vector, num_dims, factors, rows, num_rows, stride,
                                 PF_F64, check);
    default:
        return V(finish_rows_as)(panel, num_vectors, vector, num_dims, factors, rows, num_rows, stride,
                                 PF_F32, check);
    }
}
