/* The state (m, l, o) of the recurrence: maximum score, sum of weights, weighted sum of values, all
 * relative to m. Everything that combines states is here: the rescaling factor between two maxima,
 * the empty state, the merge of two, the last scaling. Included once per element type. */

/* What exp2 needs to know of a call: the factor on scores, and the lowest difference of scores
 * whose weight is not 0, beyond which exponents would wrap around. */
typedef struct V(weights) {
    V(vec) factor, floor;
} V(weights);

PF_INLINE V(weights) V(weights_of)(double scale_log2) {
    return (V(weights)){V(set1)((V(elem))scale_log2), V(set1)((V(elem))(-V(RANGE) / scale_log2))};
}

/* exp2(t * factor) for t <= 0, in place; -inf gives exactly 0, NaN stays NaN. Step by step for all of
 * a few vectors. */
PF_INLINE void V(weigh)(const int n, V(vec) * t, V(weights) w) {
    V(vec) z[8], p[8];
    PF_UNROLL
    for (int i = 0; i < n; i++)
        t[i] = V(max)(w.floor, t[i]);
    PF_UNROLL
    for (int i = 0; i < n; i++)
        z[i] = V(fma)(t[i], w.factor, V(set1)(V(MAGIC)));
    PF_UNROLL
    for (int i = 0; i < n; i++)
        t[i] = V(fma)(t[i], w.factor, V(sub)(V(set1)(V(MAGIC)), z[i])); /* minus its integer */
    V(exp2_fractions)(n, t, p);
    PF_UNROLL
    for (int i = 0; i < n; i++)
        t[i] = V(mul)(p[i], V(exponent)(z[i]));
}

PF_INLINE V(vec) V(weight)(V(vec) t, V(weights) w) {
    V(weigh)(1, &t, w);
    return t;
}

PF_INLINE V(elem) V(weight1)(V(elem) t, V(weights) w) {
    V(elem) lanes[V(LANES)];
    V(store)(lanes, V(weight)(V(set1)(t), w));
    return lanes[0];
}

static void V(state_reset)(void *m_, void *l_, int64_t num_rows, void *o_, int64_t num_outputs) {
    V(elem) *m = m_, *l = l_, *o = o_;
    for (int64_t r = 0; r < num_rows; r++) {
        m[r] = V(LOWEST);
        l[r] = 0;
    }
    for (int64_t i = 0; i < num_outputs; i++)
        o[i] = 0;
}

static void V(state_merge)(void *m_, void *l_, void *o_, const void *m_b, const void *l_b, const void *o_b_,
                           int64_t num_rows, int64_t num_dims, int64_t row_stride, int64_t dim_stride,
                           double scale_log2) {
    V(elem) *m = m_, *l = l_, *o = o_;
    const V(elem) *mb = m_b, *lb = l_b, *ob = o_b_;
    const V(weights) w = V(weights_of)(scale_log2);
    for (int64_t r = 0; r < num_rows; r++) {
        /* NaN in either maximum has to reach the factors, so the comparison keeps a NaN of mb. */
        const V(elem) top = m[r] > mb[r] ? m[r] : mb[r];
        const V(elem) alpha = V(weight1)(m[r] - top, w), beta = V(weight1)(mb[r] - top, w);
        m[r] = top;
        l[r] = l[r] * alpha + lb[r] * beta;
        V(elem) *a = o + r * row_stride;
        const V(elem) *b = ob + r * row_stride;
        if (dim_stride == 1)
            for (int64_t d = 0; d < num_dims; d++)
                a[d] = a[d] * alpha + b[d] * beta;
        else
            for (int64_t d = 0; d < num_dims; d++)
                a[d * dim_stride] = a[d * dim_stride] * alpha + b[d * dim_stride] * beta;
    }
}

static int V(state_scale)(void *o_, int64_t n, double factor) {
    V(elem) *o = o_;
    const V(vec) f = V(set1)((V(elem))factor);
    V(vec) check = V(zero)(); /* x * 0 is NaN for NaN and Inf alone */
    /* Adding 0 makes -0 to 0: a sum that underflowed to -0 becomes 0 as soon as a key that the row
     * does not see adds 0 * v, and bits must not depend on who shares a tile. */
    int64_t d = 0;
    for (; d + V(LANES) <= n; d += V(LANES)) {
        const V(vec) x = V(mul)(V(add)(V(load)(o + d), V(zero)()), f);
        V(store)(o + d, x);
        check = V(fma)(x, V(zero)(), check);
    }
    V(elem) rest = V(reduce_add)(check);
    for (; d < n; d++) {
        o[d] = (o[d] + 0) * (V(elem))factor;
        rest += o[d] * 0;
    }
    return rest == 0;
}
