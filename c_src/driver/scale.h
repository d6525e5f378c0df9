/* How a scale reaches the kernels: as a factor on queries and a positive factor on differences of
 * scores. The scale itself stays out of the products, so that scores are exact wherever q.k is; it
 * moves into the queries only where the second factor could not represent it. */
#ifndef PF_DRIVER_SCALE_H
#define PF_DRIVER_SCALE_H

#define PF_LOG2_E 1.4426950408889634074

typedef struct pf_scale {
    double query_factor; /* -1 turns a negative scale round; exact, like 1 */
    double score_factor; /* natural units per unit of a raw score */
    double log2;         /* score_factor * log2(e) */
} pf_scale;

static inline pf_scale pf_split_scale(double scale, int wide) {
    const double size = scale < 0 ? -scale : scale, sign = scale < 0 ? -1.0 : 1.0;
    const double smallest = wide ? 1e-300 : 1e-36, largest = wide ? 1e308 : 2e38;
    if (size < smallest) /* 0 too: exponents of -inf * 0 would be NaN */
        return (pf_scale){scale, 1.0, PF_LOG2_E};
    if (size <= largest)
        return (pf_scale){sign, size, size * PF_LOG2_E};
    /* With such a scale any two scores that differ at all are worlds apart. Only a part of it, which
     * cannot make queries infinite that matter, is needed to keep them so. */
    const double rest = size / largest;
    return (pf_scale){sign * (rest < 1e10 ? rest : 1e10), largest, largest * PF_LOG2_E};
}

#endif
