/* The entries of the kernel table that choose an instance, and those that show primitives to the
 * tests. Included once per element type. */

PF_INSTANCE(1)
PF_INSTANCE(2)
PF_INSTANCE(3)
PF_INSTANCE(4)
PF_INSTANCE(5)
PF_INSTANCE(6)

/* Widths above PANEL_VECTORS are never asked for; the constant condition drops their code. */
static void V(prefill_tile)(const pf_prefill_tile *tile) {
    switch (tile->num_vectors) {
    case 1:
        V(prefill_1)(tile);
        return;
    case 2:
        V(prefill_2)(tile);
        return;
    case 3:
        V(prefill_3)(tile);
        return;
    }
    if (V(PANEL_VECTORS) > 3)
        switch (tile->num_vectors) {
        case 4:
            V(prefill_4)(tile);
            return;
        case 5:
            V(prefill_5)(tile);
            return;
        case 6:
            V(prefill_6)(tile);
            return;
        }
}

static void V(exp2_array)(void *out_, const void *x_, double factor, int64_t count) {
    const V(weights) weights = V(weights_of)(factor);
    V(elem) *out = out_;
    const V(elem) *x = x_;
    for (int64_t i = 0; i < count; i++)
        out[i] = V(weight1)(x[i], weights);
}

static void V(tanh_array)(void *out_, const void *x_, int64_t count) {
    V(elem) *out = out_;
    const V(elem) *x = x_;
    for (int64_t i = 0; i < count; i++) {
        V(elem) lanes[V(LANES)];
        V(store)(lanes, V(tanh)(V(set1)(x[i])));
        out[i] = lanes[0];
    }
}

static void V(transpose_square)(void *out, const void *x) {
    V(vec) square[V(LANES)];
    for (int i = 0; i < V(LANES); i++)
        square[i] = V(load)((const V(elem) *)x + i * V(LANES));
    V(transpose)(square);
    for (int i = 0; i < V(LANES); i++)
        V(store)((V(elem) *)out + i * V(LANES), square[i]);
}

static void V(reduce)(void *sums, void *maximum, const void *x_) {
    const V(elem) *x = x_;
    V(reduce_pairs)(sums, V(add_pairs)(V(load)(x), V(load)(x + V(LANES))),
                    V(add_pairs)(V(load)(x + 2 * V(LANES)), V(load)(x + 3 * V(LANES))));
    *(V(elem) *)maximum = V(reduce_max)(V(load)(x));
}
