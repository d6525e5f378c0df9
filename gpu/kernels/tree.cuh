/* The fixed binary tree along which states are merged: ((0, 1), (2, 3)), then pairs of pairs; an odd one
 * passes up. States arrive in the order of their indices; only those whose partners are still to come are
 * kept. The twin of c_src/driver/tree.h. */
#ifndef PF_TREE_CUH
#define PF_TREE_CUH

#include "state.cuh"

/* States that may wait at a time: enough for 2^32 of them. */
enum { PF_TREE_DEPTH = 33 };

/* Of one output of a row; after the last push its state is at place 0. */
struct pf_tree {
    int depth;
    pf_real m[PF_TREE_DEPTH], l[PF_TREE_DEPTH], o[PF_TREE_DEPTH];
};

/* Takes in state `index` of `count`, and merges what is complete: like the carries of a binary counter; at
 * the end everything that waits. */
PF_DEVICE void pf_tree_push(pf_tree *tree, int64_t index, int64_t count, pf_real m, pf_real l, pf_real o) {
    int depth = tree->depth;
    for (int64_t carry = index; depth > 0 && ((carry & 1) || index == count - 1); carry >>= 1) {
        depth--;
        const pf_real top = pf_max_of(tree->m[depth], m);
        const pf_real alpha = pf_rescaling(tree->m[depth], top), beta = pf_rescaling(m, top);
        m = top;
        l = tree->l[depth] * alpha + l * beta;
        o = tree->o[depth] * alpha + o * beta;
    }
    tree->m[depth] = m;
    tree->l[depth] = l;
    tree->o[depth] = o;
    tree->depth = depth + 1;
}

#endif
