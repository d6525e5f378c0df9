/* exp2 for weights and rescaling factors: 2^(t * c) for t * c <= 0.
 *
 * n = t * c rounded to an integer falls out of adding a magic number of which the last place is 1;
 * its low bits are n plus the exponent bias. f = t * c - n is exact in one fused operation, and a
 * polynomial gives 2^f on [-1/2, 1/2] (tools/exp2_polynomial.py). Its constant is exactly 1, so
 * 2^0 is 1 and 2^-inf is 0 without a test. The polynomial is multiplied by the float 2^n rather
 * than added to its exponent as an integer, which would turn a NaN into a number. */
#ifndef PF_KERNELS_EXP2_H
#define PF_KERNELS_EXP2_H

#define f32_LOWEST -3.4028234663852886e38f
#define f32_EXPONENT_RANGE 127
#define f32_MAGIC (12582912.0f + 127.0f)
#define f64_LOWEST -1.7976931348623157e308
#define f64_EXPONENT_RANGE 1023
#define f64_MAGIC (6755399441055744.0 + 1023.0)

/* 2^f on [-1/2, 1/2]: relative error 9.2e-8. */
static inline f32_vec f32_exp2_fraction(f32_vec f) {
    f32_vec p = f32_set1(0x1.5bba0ep-10f);
    p = f32_fma(p, f, f32_set1(0x1.3cea88p-7f));
    p = f32_fma(p, f, f32_set1(0x1.c6b752p-5f));
    p = f32_fma(p, f, f32_set1(0x1.ebf9bcp-3f));
    p = f32_fma(p, f, f32_set1(0x1.62e42ap-1f));
    return f32_fma(p, f, f32_set1(1.0f));
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
static inline f64_vec f64_exp2_slope(f64_vec f) {
    f64_vec p = f64_set1(0x1.e79bb2e6a977cp-32);
    p = f64_fma(p, f, f64_set1(0x1.e61b4fc999a55p-28));
    p = f64_fma(p, f, f64_set1(0x1.b5267ce2bfd3fp-24));
    p = f64_fma(p, f, f64_set1(0x1.62bfc79d2c4a7p-20));
    p = f64_fma(p, f, f64_set1(0x1.ffcbfba97f756p-17));
    p = f64_fma(p, f, f64_set1(0x1.4309130ed8db8p-13));
    p = f64_fma(p, f, f64_set1(0x1.5d87fe78cd6d5p-10));
    p = f64_fma(p, f, f64_set1(0x1.3b2ab6fba0119p-7));
    p = f64_fma(p, f, f64_set1(0x1.c6b08d7049fe8p-5));
    p = f64_fma(p, f, f64_set1(0x1.ebfbdff82c5a4p-3));
    return f64_fma(p, f, f64_set1(0x1.62e42fefa39efp-1));
}
static inline f64_vec f64_exp2_fraction(f64_vec f) {
    return f64_fma(f64_exp2_slope(f), f, f64_set1(1.0));
}
static inline f64_vec f64_exp2m1_fraction(f64_vec f) {
    return f64_mul(f64_exp2_slope(f), f);
}

#endif
