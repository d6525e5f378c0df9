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

static inline pf_scale pf_split_scale(double scale) {
    const double size = scale < 0 ? -scale : scale;
    if (size < 1e-30 || size > 1e30) /* 0 too: exponents of -inf * 0 would be NaN */
        return (pf_scale){scale, 1.0, PF_LOG2_E};
    return (pf_scale){scale < 0 ? -1.0 : 1.0, size, size * PF_LOG2_E};
}

#endif
