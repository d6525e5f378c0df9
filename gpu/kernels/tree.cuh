/* The fixed binary tree along which states are merged: ((0, 1), (2, 3)), then pairs of pairs; an odd one
 * passes up. The twin of c_src/driver/tree.h. What merging takes is the way to memory and back, so that many
 * states are asked for at a time. */
#ifndef PF_TREE_CUH
#define PF_TREE_CUH

#include "state.cuh"

/* States that are merged in registers, a power of two, and how many such results may wait for their partners:
 * enough for 2^36 states. */
enum { PF_AT_ONCE = 16, PF_TREE_DEPTH = 33 };

/* One output of a state. */
struct pf_part {
    pf_real m, l, o;
};

PF_DEVICE pf_part pf_merged(const pf_part &a, const pf_part &b) {
    const pf_real top = pf_max_of(a.m, b.m);
    const pf_real alpha = pf_rescaling(a.m, top), beta = pf_rescaling(b.m, top);
    return {top, a.l * alpha + b.l * beta, a.o * alpha + b.o * beta};
}

/* States [first, first + PF_AT_ONCE) of `count`; load(i) is state i. */
template <class Load> PF_DEVICE pf_part pf_merged_at_once(const Load &load, int64_t first, int64_t count) {
    pf_part parts[PF_AT_ONCE];
#pragma unroll
    for (int i = 0; i < PF_AT_ONCE; i++)
        parts[i] = first + i < count ? load(first + i) : pf_part{-(pf_real)pf_infinity(), 0, 0};
#pragma unroll
    for (int width = 1; width < PF_AT_ONCE; width *= 2)
#pragma unroll
        for (int i = 0; i < PF_AT_ONCE; i += 2 * width)
            if (first + i + width < count)
                parts[i] = pf_merged(parts[i], parts[i + width]);
    return parts[0];
}

/* All of them, at least one; at_once(first) is what PF_AT_ONCE from there on are together. The body stands
 * once: short calls wait for its code too. */
template <class AtOnce> PF_DEVICE pf_part pf_merged_in_order(const AtOnce &at_once, int64_t count) {
    pf_part waiting[PF_TREE_DEPTH];
    int depth = 0;
    for (int64_t first = 0;; first += PF_AT_ONCE) {
        pf_part part = at_once(first);
        const bool last = first + PF_AT_ONCE >= count;
        /* Like the carries of a binary counter; at the end everything that waits is merged. */
        for (int64_t carry = first / PF_AT_ONCE; depth > 0 && ((carry & 1) || last); carry >>= 1)
            part = pf_merged(waiting[--depth], part);
        if (last)
            return part;
        waiting[depth++] = part;
    }
}

template <class Load> PF_DEVICE pf_part pf_merged_all(const Load &load, int64_t count) {
    return pf_merged_in_order([&](int64_t first) { return pf_merged_at_once(load, first, count); }, count);
}

#endif
