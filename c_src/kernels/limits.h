/* What the processor can do at most, in the instruction set of the file: the fractions that benchmarks
 * report are of this. Vector operations are those that the kernels use, so nothing here is faster than a
 * perfect kernel could be. Included for float and for double. */

/* Fused multiply-adds, as many side by side as hide the latency of the units (4-5 cycles, two units) and
 * still fit 16 registers. The chains begin apart: equal ones would be computed once. Where a compiler cannot
 * see factor and term it can shorten nothing. Returns the operations done. */
static double V(peak)(int64_t rounds, double factor, double term, double *sink) {
    enum { CHAINS = 12 };
    V(vec) sum[CHAINS];
    const V(vec) x = V(set1)((V(elem))factor), y = V(set1)((V(elem))term);
    PF_UNROLL
    for (int i = 0; i < CHAINS; i++)
        sum[i] = V(set1)((V(elem))i);
    for (int64_t r = 0; r < rounds; r++) {
        PF_UNROLL
        for (int i = 0; i < CHAINS; i++)
            sum[i] = V(fma)(sum[i], x, y);
    }
    PF_UNROLL
    for (int i = 1; i < CHAINS; i++)
        sum[0] = V(add)(sum[0], sum[i]);
    *sink = V(reduce_add)(sum[0]);
    return 2.0 * CHAINS * V(LANES) * (double)rounds;
}

/* Reads a buffer once, four streams of whole cache lines side by side, fetched ahead as the decode kernel
 * does. Returns the bytes read. */
static double V(read)(const void *data, int64_t count, double *sink) {
    enum { LINE = 64 / sizeof(V(elem)), VECTORS = LINE / V(LANES), STREAMS = 4, BYTES_AHEAD = 4096 };
    const int64_t part = count / STREAMS / LINE * LINE;
    V(vec) sum[STREAMS];
    PF_UNROLL
    for (int s = 0; s < STREAMS; s++)
        sum[s] = V(zero)();
    for (int64_t i = 0; i < part; i += LINE) {
        PF_UNROLL
        for (int s = 0; s < STREAMS; s++) {
            const V(elem) *p = (const V(elem) *)data + s * part + i;
            __builtin_prefetch((const char *)p + BYTES_AHEAD);
            PF_UNROLL
            for (int k = 0; k < VECTORS; k++)
                sum[s] = V(add)(sum[s], V(load)(p + k * V(LANES)));
        }
    }
    *sink = V(reduce_add)(V(add)(V(add)(sum[0], sum[1]), V(add)(sum[2], sum[3])));
    return (double)(STREAMS * part * (int64_t)sizeof(V(elem)));
}
