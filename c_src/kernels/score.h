/* What happens to a score between q.k and the weights: scale, softcap, the caller's function, ALiBi,
 * bias, in this order. One statement for both families: a tile's scores lie in memory, lanes are
 * query rows in a prefill panel and keys in a decode row. Included once per element type. */

/* tanh by way of 2^t - 1, t = -2 |x| log2(e), which keeps its relative accuracy where x is small. */
PF_INLINE V(vec) V(tanh)(V(vec) x) {
    const V(vec) factor = V(set1)((V(elem))2.8853900817779268147);
    /* Beyond 30 tanh is 1 in either type, and 2^n has to stay a number. */
    const V(vec) y = V(max)(V(set1)(-30), V(sub)(V(zero)(), V(abs)(x)));
    const V(vec) z = V(fma)(y, factor, V(set1)(V(MAGIC)));
    const V(vec) n = V(sub)(z, V(set1)(V(MAGIC)));
    const V(vec) f = V(fma)(y, factor, V(sub)(V(zero)(), n));
    const V(vec) power = V(mul)(V(exponent)(z), V(set1)(V(LIFT))), one = V(set1)(1);
    const V(vec) less = V(fma)(power, V(exp2m1_fraction)(f), V(sub)(power, one)); /* e^(-2|x|) - 1 */
    const V(vec) t = V(div)(V(sub)(V(zero)(), less), V(add)(less, V(set1)(2)));
    return V(copysign)(t, x);
}

/* The constants of a call, in vectors. */
typedef struct V(terms) {
    V(vec) scale, cap, inverse_cap;
} V(terms);

PF_INLINE V(terms) V(terms_of)(const pf_terms *t) {
    /* A cap and its inverse are numbers of the type; beyond these ends a cap makes no difference that
     * any weight would show. */
    const double largest = sizeof(V(elem)) == 4 ? 1e30 : 1e300, cap = t->softcap;
    const double held = cap > largest ? largest : cap < 1 / largest ? 1 / largest : cap;
    return (V(terms)){V(set1)((V(elem))t->scale), V(set1)((V(elem))held), V(set1)((V(elem))(1 / held))};
}

PF_INLINE V(vec) V(scaled_and_capped)(V(vec) s, const pf_terms *t, const V(terms) * c) {
    s = V(mul)(s, c->scale);
    return t->softcap > 0 ? V(mul)(V(tanh)(V(mul)(s, c->inverse_cap)), c->cap) : s;
}

/* What is finite stays so in a narrower type. */
PF_INLINE V(elem) V(narrow)(double x) {
    const double lowest = V(LOWEST);
    const V(elem) narrow = (V(elem))x;
    return __builtin_isinf(narrow) && !__builtin_isinf(x) ? (V(elem))(x < 0 ? lowest : -lowest) : narrow;
}

/* -inf hides, whatever the score is; anything finite stays a number, as low as it may be. */
PF_INLINE V(vec) V(biased)(V(vec) s, V(vec) bias) {
    const V(vec) lowest = V(set1)(V(LOWEST)), sum = V(add)(s, bias);
    const V(vec) kept = V(where_below)(s, lowest, sum, V(max)(lowest, sum));
    return V(where_below)(bias, lowest, V(set1)(-(V(elem))__builtin_inff()), kept);
}

/* Final scores of one vector of a panel against the tile's keys [first, end), in place: all terms, then the
 * selection by spans. `scores` are those of key `first`, keys are `stride` apart. Returns the maximum of each
 * lane. */
static __attribute__((noinline)) V(vec)
    V(vector_terms)(const pf_prefill_tile *tile, int vector, V(elem) * scores, int64_t stride, int64_t first,
                    int64_t end) {
    const pf_terms *t = tile->terms;
    const V(terms) c = V(terms_of)(t);
    const int64_t width = (int64_t)tile->num_vectors * V(LANES), lane = vector * V(LANES);
    const V(elem) *slopes = t->slopes, *distance = t->distance, *added = t->added;
    const V(elem) *added_to_all = t->added_to_all;
    V(vec) lo = V(zero)(), hi = V(zero)(), highest = V(set1)(V(LOWEST));
    if (tile->lo) {
        V(elem) ends[2][V(LANES)];
        for (int i = 0; i < V(LANES); i++) {
            ends[0][i] = (V(elem))tile->lo[lane + i];
            ends[1][i] = (V(elem))tile->hi[lane + i];
        }
        lo = V(load)(ends[0]);
        hi = V(load)(ends[1]);
    }
    for (int64_t j = first; j < end; j++) {
        V(elem) *place = scores + (j - first) * stride;
        V(vec) s = V(scaled_and_capped)(V(load)(place), t, &c);
        if (t->score_mod) {
            V(store)(place, s);
            for (int i = 0; i < V(LANES); i++)
                place[i] = V(narrow)(t->score_mod(place[i], t->batch, t->head[lane + i],
                                                  t->position[lane + i], t->first_key + j));
            s = V(load)(place);
        }
        if (slopes) {
            const V(vec) away = V(abs)(V(sub)(V(load)(distance + lane), V(set1)((V(elem))(t->tile_key + j))));
            s = V(sub)(s, V(mul)(V(load)(slopes + lane), away));
        }
        if (added)
            s = V(biased)(s, V(load)(added + j * width + lane));
        else if (added_to_all)
            s = V(biased)(s, V(set1)(added_to_all[j]));
        if (tile->lo)
            s = V(keep)(s, V(set1)((V(elem))j), lo, hi);
        V(store)(place, s);
        highest = V(max)(highest, s);
    }
    return highest;
}

/* The same of a panel, against all keys of the tile. */
PF_INLINE void V(panel_terms)(const pf_prefill_tile *tile, V(vec) * top) {
    const int64_t width = (int64_t)tile->num_vectors * V(LANES);
    for (int w = 0; w < tile->num_vectors; w++)
        top[w] = V(vector_terms)(tile, w, (V(elem) *)tile->scores + w * V(LANES), width, 0, tile->num_keys);
}

/* All terms of the scores of row r against keys [key_lo, key_hi) of a block, in place; what lies
 * around them, up to whole vectors, becomes rubbish. */
static __attribute__((noinline)) void V(row_terms)(const pf_decode_block *block, int32_t r,
                                                   V(elem) * scores) {
    const pf_terms *t = block->terms;
    const V(terms) c = V(terms_of)(t);
    V(elem) count[V(LANES)];
    for (int i = 0; i < V(LANES); i++)
        count[i] = (V(elem))i;
    const V(vec) lanes = V(load)(count);
    const V(elem) *added = t->added_rows ? (const V(elem) *)t->added_rows[r] - block->key_lo : 0;
    const int64_t end = pf_round_up(block->key_hi, V(LANES));
    for (int64_t j = block->key_lo / V(LANES) * V(LANES); j < end; j += V(LANES)) {
        V(vec) s = V(scaled_and_capped)(V(load)(scores + j), t, &c);
        if (t->score_mod) {
            V(store)(scores + j, s);
            for (int64_t i = pf_max(j, block->key_lo); i < pf_min(j + V(LANES), block->key_hi); i++)
                scores[i] = V(narrow)(
                    t->score_mod(scores[i], t->batch, t->head[r], t->position[r], t->first_key + i));
            s = V(load)(scores + j);
        }
        if (t->slopes) {
            const V(vec) distance = V(set1)(((const V(elem) *)t->distance)[r] - (V(elem))j);
            const V(vec) away = V(abs)(V(sub)(distance, lanes));
            s = V(sub)(s, V(mul)(V(set1)(((const V(elem) *)t->slopes)[r]), away));
        }
        if (added)
            s = V(biased)(s, V(load)(added + j));
        V(store)(scores + j, s);
    }
}

/* Rows of what is added to scores: hide what a mask of bytes does not show, count what is hidden. */
static void V(hide)(void *row_, const uint8_t *seen, int64_t stride, int64_t n) {
    V(elem) *row = row_;
    const V(elem) hidden = -(V(elem))__builtin_inff();
    if (stride == 1)
        for (int64_t j = 0; j < n; j++)
            row[j] = seen[j] ? row[j] : hidden;
    else
        for (int64_t j = 0; j < n; j++)
            row[j] = seen[j * stride] ? row[j] : hidden;
}

static int64_t V(count_unseen)(const uint8_t *seen, int64_t stride, int64_t n) {
    int64_t unseen = 0;
    for (int64_t j = 0; j < n && stride != 1; j++)
        unseen += !seen[j * stride];
    for (int64_t j = 0; j < n && stride == 1; j += 128) { /* bytes count bytes, up to 255 of them */
        const int64_t end = j + 128 < n ? j + 128 : n;
        uint8_t part = 0;
        for (int64_t i = j; i < end; i++)
            part += seen[i] == 0;
        unseen += part;
    }
    return unseen;
}

static int64_t V(count_hidden)(const void *row_, int64_t n) {
    const V(elem) *row = row_;
    const V(vec) lowest = V(set1)(V(LOWEST)), one = V(set1)(1), zero = V(zero)();
    V(vec) sums[2] = {zero, zero}; /* of a tile, whose keys any type counts exactly */
    int64_t j = 0;
    for (; j + 2 * V(LANES) <= n; j += 2 * V(LANES)) {
        sums[0] = V(add)(sums[0], V(where_below)(V(load)(row + j), lowest, one, zero));
        sums[1] = V(add)(sums[1], V(where_below)(V(load)(row + j + V(LANES)), lowest, one, zero));
    }
    int64_t hidden = (int64_t)V(reduce_add)(V(add)(sums[0], sums[1]));
    for (; j < n; j++)
        hidden += row[j] < V(LOWEST);
    return hidden;
}
