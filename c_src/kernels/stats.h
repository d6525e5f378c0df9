/* From final scores to probabilities, for statistics of an attention whose log-sum-exp is known.
 * Included once per element type. */

/* Probabilities e^(s - lse) of a panel, in place of its scores, which become natural times `factor`;
 * also the highest score of each lane and the sum of -p ln p. A hidden key becomes -0, to be told from
 * one whose probability is too small for a number. */
static void V(probabilities)(const pf_prefill_tile *tile, double factor, const void *lse, void *highest,
                             void *entropy) {
    const int num_vectors = tile->num_vectors;
    const V(weights) natural = V(weights_of)(1.4426950408889634074);
    const V(vec) scale = V(set1)((V(elem))factor), lowest = V(set1)(V(LOWEST)), zero = V(zero)();
    const V(vec) hidden = V(set1)(-(V(elem))__builtin_inff()), nothing = V(set1)(-(V(elem))0.0);
    /* What is far above its log-sum-exp belongs to another call: infinite, not wrapped around. */
    const V(vec) infinite = V(set1)((V(elem))__builtin_inff());
    const V(vec) limit = V(set1)((V(elem))(V(RANGE) * 0.69));
    for (int w = 0; w < num_vectors; w++) {
        const V(vec) sum = V(load)((const V(elem) *)lse + w * V(LANES));
        V(vec) top = hidden, spread = zero;
        for (int64_t j = 0; j < tile->num_keys; j++) {
            V(elem) *place = (V(elem) *)tile->scores + (j * num_vectors + w) * V(LANES);
            const V(vec) s = V(mul)(V(load)(place), scale);
            const V(vec) t = V(where_below)(s, lowest, hidden, V(sub)(s, sum));
            const V(vec) p = V(where_below)(limit, t, infinite, V(weight)(t, natural));
            top = V(where_below)(top, infinite, V(max)(top, s), top); /* NaN stays */
            spread = V(sub)(spread, V(where_below)(s, lowest, zero, V(mul)(p, t)));
            V(store)(place, V(where_below)(s, lowest, nothing, p));
        }
        V(store)((V(elem) *)highest + w * V(LANES), top);
        V(store)((V(elem) *)entropy + w * V(LANES), spread);
    }
}
