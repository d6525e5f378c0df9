/* The fixed binary tree along which states are merged: ((0, 1), (2, 3)), then pairs of pairs; an odd one
 * passes up. The twin of c_src/driver/tree.h. What merging takes is the way to memory and back, so that many
 * states are asked for at a time. */
#ifndef PF_TREE_CUH
#define PF_TREE_CUH

#include "state.cuh"

/* States that are merged in registers, a power of two, and how many such results may wait for their partners:
 * enough for 2^34 states. */
#ifndef PF_AT_ONCE
#define PF_AT_ONCE 16
#endif
enum { PF_TREE_DEPTH = 33 };

/* Some outputs of a state. */
template <int N> struct pf_part {
    pf_real m, l, o[N];
};

/* That of no keys. */
template <int N> PF_DEVICE pf_part<N> pf_no_part() {
    pf_part<N> part;
    part.m = -(pf_real)pf_infinity();
    part.l = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        part.o[i] = 0;
    return part;
}

/* a alpha + b beta: rounded alike in every kernel, however the compiler would take it. */
PF_DEVICE float pf_weighted(float a, float alpha, float b, float beta) {
    return fmaf(a, alpha, b * beta);
}

PF_DEVICE double pf_weighted(double a, double alpha, double b, double beta) {
    return fma(a, alpha, b * beta);
}

template <int N> PF_DEVICE pf_part<N> pf_merged(const pf_part<N> &a, const pf_part<N> &b) {
    pf_part<N> both;
    both.m = pf_max_of(a.m, b.m);
    const pf_real alpha = pf_rescaling(a.m, both.m), beta = pf_rescaling(b.m, both.m);
    both.l = pf_weighted(a.l, alpha, b.l, beta);
#pragma unroll
    for (int i = 0; i < N; i++)
        both.o[i] = pf_weighted(a.o[i], alpha, b.o[i], beta);
    return both;
}

/* States [first, first + PF_AT_ONCE) of `count`; load(i) is state i. */
template <int N, class Load>
PF_DEVICE pf_part<N> pf_merged_at_once(const Load &load, int64_t first, int64_t count) {
    pf_part<N> parts[PF_AT_ONCE];
#pragma unroll
    for (int i = 0; i < PF_AT_ONCE; i++)
        parts[i] = first + i < count ? load(first + i) : pf_no_part<N>();
#pragma unroll
    for (int width = 1; width < PF_AT_ONCE; width *= 2)
#pragma unroll
        for (int i = 0; i < PF_AT_ONCE; i += 2 * width)
            if (first + i + width < count)
                parts[i] = pf_merged(parts[i], parts[i + width]);
    return parts[0];
}

/* All of them, at least one. The body stands once: short calls wait for its code too. */
template <int N, class Load> PF_DEVICE pf_part<N> pf_merged_all(const Load &load, int64_t count) {
    pf_part<N> waiting[PF_TREE_DEPTH];
    int depth = 0;
    for (int64_t first = 0;; first += PF_AT_ONCE) {
        pf_part<N> part = pf_merged_at_once<N>(load, first, count);
        const bool last = first + PF_AT_ONCE >= count;
        /* Like the carries of a binary counter; at the end everything that waits is merged. */
        for (int64_t carry = first / PF_AT_ONCE; depth > 0 && ((carry & 1) || last); carry >>= 1)
            part = pf_merged(waiting[--depth], part);
        if (last)
            return part;
        waiting[depth++] = part;
    }
}

#endif
