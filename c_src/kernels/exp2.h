/* exp2 for weights and rescaling factors: 2^(t * c) for t * c <= 0, exactly 0 below 2^-RANGE.
 *
 * RANGE is far above the smallest number on purpose. Beside the largest weight of its row, which is 1,
 * a weight of 2^-100 adds nothing to any sum; but times a value, or summed up from zero, it would be
 * denormal, and each operation on such numbers costs as much as a hundred others.
 *
 * n = t * c rounded to an integer falls out of adding a magic number of which the last place is 1;
 * its low bits are n plus RANGE, the exponent field of 2^(n + RANGE - bias). f = t * c - n is exact in one
 * fused operation, and a polynomial gives 2^f on [-1/2, 1/2] (tools/exp2_polynomial.py), times 2^(bias -
 * RANGE). Its constant is exactly that, so 2^0 is 1 and 2^-inf is 0 without a test. The polynomial is
 * multiplied by the float 2^n rather than added to its exponent as an integer, which would turn a NaN into a
 * number. */
#ifndef PF_KERNELS_EXP2_H
#define PF_KERNELS_EXP2_H

#define f32_LOWEST -3.4028234663852886e38f
#define f32_RANGE 100
#define f32_LIFT 0x1p27f /* 2^(127 - RANGE) */
#define f32_MAGIC (12582912.0f + f32_RANGE)
#define f64_LOWEST -1.7976931348623157e308
#define f64_RANGE 900
#define f64_LIFT 0x1p123 /* 2^(1023 - RANGE) */
#define f64_MAGIC (6755399441055744.0 + f64_RANGE)

/* LIFT * 2^f on [-1/2, 1/2]: relative error 9.2e-8. Of n vectors side by side: the chain of each is
 * longer than a processor looks ahead. */
PF_INLINE void f32_exp2_fractions(const int n, const f32_vec *f, f32_vec *p) {
    static const float terms[6] = {0x1.5bba0ep-10f, 0x1.3cea88p-7f, 0x1.c6b752p-5f,
                                   0x1.ebf9bcp-3f,  0x1.62e42ap-1f, 1};
    PF_UNROLL
    for (int i = 0; i < n; i++)
        p[i] = f32_set1(f32_LIFT * terms[0]);
    PF_UNROLL
    for (int k = 1; k < 6; k++) {
        PF_UNROLL
        for (int i = 0; i < n; i++)
            p[i] = f32_fma(p[i], f[i], f32_set1(f32_LIFT * terms[k]));
    }
}

/* 2^f - 1 on the same interval: error 1.1e-8 relative to itself, near 0 too. */
static inline f32_vec f32_exp2m1_fraction(f32_vec f) {
    f32_vec p = f32_set1(0x1.4308f4p-13f);
    p = f32_fma(p, f, f32_set1(0x1.5f07b4p-10f));
    p = f32_fma(p, f, f32_set1(0x1.3b2bap-7f));
    p = f32_fma(p, f, f32_set1(0x1.c6af6ep-5f));
    p = f32_fma(p, f, f32_set1(0x1.ebfbdep-3f));
    p = f32_fma(p, f, f32_set1(0x1.62e43p-1f));
    return f32_mul(p, f);
}

/* (2^f - 1) / f on [-1/2, 1/2]: relative error of 2^f 3.4e-18 before rounding. */
PF_INLINE void f64_exp2_slopes(const int n, const f64_vec *f, f64_vec *p) {
    static const double terms[11] = {0x1.e79bb2e6a977cp-32, 0x1.e61b4fc999a55p-28, 0x1.b5267ce2bfd3fp-24,
                                     0x1.62bfc79d2c4a7p-20, 0x1.ffcbfba97f756p-17, 0x1.4309130ed8db8p-13,
                                     0x1.5d87fe78cd6d5p-10, 0x1.3b2ab6fba0119p-7,  0x1.c6b08d7049fe8p-5,
                                     0x1.ebfbdff82c5a4p-3,  0x1.62e42fefa39efp-1};
    PF_UNROLL
    for (int i = 0; i < n; i++)
        p[i] = f64_set1(terms[0]);
    PF_UNROLL
    for (int k = 1; k < 11; k++) {
        PF_UNROLL
        for (int i = 0; i < n; i++)
            p[i] = f64_fma(p[i], f[i], f64_set1(terms[k]));
    }
}
PF_INLINE void f64_exp2_fractions(const int n, const f64_vec *f, f64_vec *p) {
    f64_exp2_slopes(n, f, p);
    PF_UNROLL
    for (int i = 0; i < n; i++)
        p[i] = f64_fma(f64_mul(p[i], f64_set1(f64_LIFT)), f[i], f64_set1(f64_LIFT));
}
static inline f64_vec f64_exp2m1_fraction(f64_vec f) {
    f64_vec slope;
    f64_exp2_slopes(1, &f, &slope);
    return f64_mul(slope, f);
}

#endif
