/* The fixed binary tree along which the states of splits are merged: ((0,1),(2,3)), then pairs of
 * pairs; a half without keys is the neutral state, and the other half passes up. States arrive in the
 * order of their splits and are merged as soon as both halves of a pair are there, so that only about
 * log2(splits) of them are kept. A run of splits that starts in the middle leaves nodes whose left
 * halves another thread holds. */
#ifndef PF_DRIVER_TREE_H
#define PF_DRIVER_TREE_H

#include "call.h"

typedef struct pf_state {
    void *m, *l, *o;
} pf_state;

/* The shape of a state: m and l per row, then the outputs. */
typedef struct pf_state_shape {
    int64_t num_rows, num_outputs, elem_bytes;
} pf_state_shape;

typedef struct pf_node {
    int64_t index; /* covers splits [index << level, (index + 1) << level) */
    int32_t level;
} pf_node;

enum { PF_MAX_NODES = 130 };

typedef struct pf_tree {
    int64_t sink_splits, first, end; /* only splits [0, sink_splits) and [first, end) have keys */
    int32_t depth;
    pf_node node[PF_MAX_NODES];
    char *states; /* one per node */
    pf_state_shape shape;
    void (*merge)(const void *owner, pf_state into, pf_state from);
    const void *owner;
} pf_tree;

static inline int64_t pf_state_bytes(const pf_state_shape *shape) {
    return 2 * pf_round_up(shape->num_rows * shape->elem_bytes, 64) +
           pf_round_up(shape->num_outputs * shape->elem_bytes, 64);
}

/* Nodes that a run of num_splits splits ever leaves behind, the one being computed included. */
static inline int64_t pf_tree_nodes(int64_t num_splits) {
    if (num_splits == 1)
        return 1;
    int64_t levels = 0;
    while (((int64_t)1 << levels) < num_splits)
        levels++;
    return 2 * levels + 2;
}

static inline pf_state pf_tree_state(const pf_tree *tree, int32_t node) {
    char *base = tree->states + node * pf_state_bytes(&tree->shape);
    const int64_t head = pf_round_up(tree->shape.num_rows * tree->shape.elem_bytes, 64);
    return (pf_state){base, base + head, base + 2 * head};
}

/* Where the state of the next split is to be computed. */
static inline pf_state pf_tree_next(const pf_tree *tree) {
    return pf_tree_state(tree, tree->depth);
}

static inline void pf_tree_merge_top(pf_tree *tree) {
    tree->depth--;
    tree->merge(tree->owner, pf_tree_state(tree, tree->depth - 1), pf_tree_state(tree, tree->depth));
}

/* Take in the state at pf_tree_next as a node, and merge what is complete. */
static inline void pf_tree_push(pf_tree *tree, pf_node node) {
    tree->node[tree->depth++] = node;
    for (;;) {
        pf_node *top = &tree->node[tree->depth - 1];
        const int64_t other = top->index ^ 1, lo = other << top->level, hi = (other + 1) << top->level;
        if (lo < tree->sink_splits || (lo < tree->end && hi > tree->first)) {
            if (other > top->index || tree->depth < 2 || top[-1].level != top->level ||
                top[-1].index != other)
                return; /* the other half is still to come, or is not here */
            pf_tree_merge_top(tree);
        } else if (top->index == 0 && lo >= tree->end) {
            return; /* the root */
        }
        top = &tree->node[tree->depth - 1];
        top->index >>= 1;
        top->level++;
    }
}

/* After all splits one state is left. */
static inline pf_state pf_tree_close(pf_tree *tree) {
    tree->depth = 0;
    return pf_tree_state(tree, 0);
}

#endif
