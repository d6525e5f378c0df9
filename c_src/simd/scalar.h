/* The vector operations in portable C, on vectors of 16 bytes that the compiler maps to whatever
 * the baseline of the target has. Not fused: fma() without an instruction is a slow call. The list
 * of operations and their exact meaning are in simd/README.md. */
#ifndef PF_SIMD_SCALAR_H
#define PF_SIMD_SCALAR_H

#include <stdint.h>

#define f32_LANES 4
#define f32_PANEL_VECTORS 3
#define f32_MICRO_ROWS 4
#define f32_LOADED_VECTORS f32_PANEL_VECTORS
#define f32_NUMBERS 1
#define f64_LANES 2
#define f64_PANEL_VECTORS 3
#define f64_MICRO_ROWS 4
#define f64_LOADED_VECTORS f64_PANEL_VECTORS
#define f64_NUMBERS 1

typedef float f32_elem;
typedef float f32_vec __attribute__((vector_size(16)));
typedef int32_t pf_mask32 __attribute__((vector_size(16)));

static inline f32_vec f32_set1(float x) {
    return (f32_vec){x, x, x, x};
}
static inline f32_vec f32_zero(void) {
    return f32_set1(0.0f);
}
static inline f32_vec f32_load(const float *p) {
    f32_vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
static inline void f32_store(float *p, f32_vec v) {
    __builtin_memcpy(p, &v, sizeof v);
}
static inline f32_vec f32_add(f32_vec a, f32_vec b) {
    return a + b;
}
static inline f32_vec f32_sub(f32_vec a, f32_vec b) {
    return a - b;
}
static inline f32_vec f32_mul(f32_vec a, f32_vec b) {
    return a * b;
}
static inline f32_vec f32_fma(f32_vec a, f32_vec b, f32_vec c) {
    return a * b + c;
}
static inline f32_vec f32_select(pf_mask32 mask, f32_vec a, f32_vec b) {
    return (f32_vec)(((pf_mask32)a & mask) | ((pf_mask32)b & ~mask));
}
typedef const float *f32_numbers;
typedef f32_vec f32_number;
static inline f32_numbers f32_load_numbers(const float *p, const int n) {
    (void)n;
    return p;
}
static inline f32_number f32_pick(f32_numbers x, const int i) {
    return f32_set1(x[i]);
}
static inline f32_vec f32_fma_number(f32_number a, f32_vec b, f32_vec c) {
    return f32_fma(a, b, c);
}
static inline f32_vec f32_max(f32_vec a, f32_vec b) {
    return f32_select(a > b, a, b);
}
static inline f32_vec f32_div(f32_vec a, f32_vec b) {
    return a / b;
}
static inline f32_vec f32_copysign(f32_vec x, f32_vec sign) {
    const pf_mask32 rest = {0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff};
    return f32_select(rest, x, sign);
}
static inline f32_vec f32_abs(f32_vec x) {
    return f32_copysign(x, f32_zero());
}
static inline f32_vec f32_where_below(f32_vec x, f32_vec limit, f32_vec a, f32_vec b) {
    return f32_select(x < limit, a, b);
}
static inline f32_vec f32_keep(f32_vec s, f32_vec j, f32_vec lo, f32_vec hi) {
    return f32_select((lo <= j) & (j < hi), s, f32_set1(-__builtin_inff()));
}
static inline f32_vec f32_exponent(f32_vec z) {
    typedef uint32_t bits32 __attribute__((vector_size(16)));
    return (f32_vec)((bits32)z << 23);
}
static inline float f32_reduce_add(f32_vec v) {
    return (v[0] + v[2]) + (v[1] + v[3]);
}
static inline float f32_reduce_max(f32_vec v) {
    const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}
static inline f32_vec f32_add_pairs(f32_vec a, f32_vec b) {
    return (f32_vec){a[0] + a[2], a[1] + a[3], b[0] + b[2], b[1] + b[3]};
}
static inline void f32_reduce_pairs(float *out, f32_vec ab, f32_vec cd) {
    f32_store(out, (f32_vec){ab[0] + ab[1], ab[2] + ab[3], cd[0] + cd[1], cd[2] + cd[3]});
}
static inline void f32_transpose(f32_vec *r) {
    for (int i = 0; i < f32_LANES; i++)
        for (int j = 0; j < i; j++) {
            const float swap = r[i][j];
            r[i][j] = r[j][i];
            r[j][i] = swap;
        }
}

static inline float pf_f32_of_bits(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}
static inline uint32_t pf_bits_of_f32(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float pf_widen_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) /* Inf and NaN; a signalling NaN becomes a quiet one */
        return pf_f32_of_bits(sign | 0x7f800000 | (rest << 13) | (rest > 0x7c00 ? 0x400000 : 0));
    if (rest >= 0x0400)
        return pf_f32_of_bits(sign | ((rest << 13) + 0x38000000)); /* exponent bias 15 -> 127 */
    return pf_f32_of_bits(sign | pf_bits_of_f32((float)rest * 0x1p-24f));
}
static inline uint16_t pf_narrow_f16(float x) {
    const uint32_t bits = pf_bits_of_f32(x), rest = bits & 0x7fffffff;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) /* 65520, the first that rounds to Inf */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) /* below 2^-14: the sum with 0.5 has the subnormal's last place */
        return (uint16_t)(sign | (pf_bits_of_f32(pf_f32_of_bits(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}
static inline uint16_t pf_narrow_bf16(float x) {
    const uint32_t bits = pf_bits_of_f32(x);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)((bits | 0x400000) >> 16);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline f32_vec f32_load_f16(const void *p) {
    uint16_t h[4];
    __builtin_memcpy(h, p, sizeof h);
    return (f32_vec){pf_widen_f16(h[0]), pf_widen_f16(h[1]), pf_widen_f16(h[2]), pf_widen_f16(h[3])};
}
static inline void f32_store_f16(void *p, f32_vec v) {
    const uint16_t h[4] = {pf_narrow_f16(v[0]), pf_narrow_f16(v[1]), pf_narrow_f16(v[2]),
                           pf_narrow_f16(v[3])};
    __builtin_memcpy(p, h, sizeof h);
}
static inline f32_vec f32_load_bf16(const void *p) {
    uint16_t h[4];
    __builtin_memcpy(h, p, sizeof h);
    return (f32_vec){pf_f32_of_bits((uint32_t)h[0] << 16), pf_f32_of_bits((uint32_t)h[1] << 16),
                     pf_f32_of_bits((uint32_t)h[2] << 16), pf_f32_of_bits((uint32_t)h[3] << 16)};
}
static inline float pf_widen_f8e4m3(uint8_t code) { /* a float16 but for bias and Inf */
    if ((code & 0x7f) == 0x7f)
        return pf_f32_of_bits(0x7fc00000 | (uint32_t)(code & 0x80) << 24);
    return 256.0f * pf_widen_f16((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7));
}
static inline f32_vec f32_load_f8e4m3(const void *p) {
    const uint8_t *c = (const uint8_t *)p;
    return (f32_vec){pf_widen_f8e4m3(c[0]), pf_widen_f8e4m3(c[1]), pf_widen_f8e4m3(c[2]),
                     pf_widen_f8e4m3(c[3])};
}
static inline f32_vec f32_load_f8e5m2(const void *p) { /* the upper half of a float16 */
    const uint8_t *c = (const uint8_t *)p;
    return (f32_vec){pf_widen_f16((uint16_t)(c[0] << 8)), pf_widen_f16((uint16_t)(c[1] << 8)),
                     pf_widen_f16((uint16_t)(c[2] << 8)), pf_widen_f16((uint16_t)(c[3] << 8))};
}
static inline f32_vec f32_load_i8(const void *p) {
    const int8_t *c = (const int8_t *)p;
    return (f32_vec){(float)c[0], (float)c[1], (float)c[2], (float)c[3]};
}
static inline f32_vec f32_load_i4(const void *p) {
    const uint8_t *c = (const uint8_t *)p;
    const int x[4] = {c[0] & 15, c[0] >> 4, c[1] & 15, c[1] >> 4}; /* 8 to 15 stand for -8 to -1 */
    return (f32_vec){(float)((x[0] ^ 8) - 8), (float)((x[1] ^ 8) - 8), (float)((x[2] ^ 8) - 8),
                     (float)((x[3] ^ 8) - 8)};
}
static inline void f32_store_bf16(void *p, f32_vec v) {
    const uint16_t h[4] = {pf_narrow_bf16(v[0]), pf_narrow_bf16(v[1]), pf_narrow_bf16(v[2]),
                           pf_narrow_bf16(v[3])};
    __builtin_memcpy(p, h, sizeof h);
}

typedef double f64_elem;
typedef double f64_vec __attribute__((vector_size(16)));
typedef int64_t pf_mask64 __attribute__((vector_size(16)));

static inline f64_vec f64_set1(double x) {
    return (f64_vec){x, x};
}
static inline f64_vec f64_zero(void) {
    return f64_set1(0.0);
}
static inline f64_vec f64_load(const double *p) {
    f64_vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
static inline void f64_store(double *p, f64_vec v) {
    __builtin_memcpy(p, &v, sizeof v);
}
static inline f64_vec f64_add(f64_vec a, f64_vec b) {
    return a + b;
}
static inline f64_vec f64_sub(f64_vec a, f64_vec b) {
    return a - b;
}
static inline f64_vec f64_mul(f64_vec a, f64_vec b) {
    return a * b;
}
static inline f64_vec f64_fma(f64_vec a, f64_vec b, f64_vec c) {
    return a * b + c;
}
static inline f64_vec f64_select(pf_mask64 mask, f64_vec a, f64_vec b) {
    return (f64_vec)(((pf_mask64)a & mask) | ((pf_mask64)b & ~mask));
}
typedef const double *f64_numbers;
typedef f64_vec f64_number;
static inline f64_numbers f64_load_numbers(const double *p, const int n) {
    (void)n;
    return p;
}
static inline f64_number f64_pick(f64_numbers x, const int i) {
    return f64_set1(x[i]);
}
static inline f64_vec f64_fma_number(f64_number a, f64_vec b, f64_vec c) {
    return f64_fma(a, b, c);
}
static inline f64_vec f64_max(f64_vec a, f64_vec b) {
    return f64_select(a > b, a, b);
}
static inline f64_vec f64_div(f64_vec a, f64_vec b) {
    return a / b;
}
static inline f64_vec f64_copysign(f64_vec x, f64_vec sign) {
    const pf_mask64 rest = {0x7fffffffffffffff, 0x7fffffffffffffff};
    return f64_select(rest, x, sign);
}
static inline f64_vec f64_abs(f64_vec x) {
    return f64_copysign(x, f64_zero());
}
static inline f64_vec f64_where_below(f64_vec x, f64_vec limit, f64_vec a, f64_vec b) {
    return f64_select(x < limit, a, b);
}
static inline f64_vec f64_keep(f64_vec s, f64_vec j, f64_vec lo, f64_vec hi) {
    return f64_select((lo <= j) & (j < hi), s, f64_set1(-__builtin_inf()));
}
static inline f64_vec f64_exponent(f64_vec z) {
    typedef uint64_t bits64 __attribute__((vector_size(16)));
    return (f64_vec)((bits64)z << 52);
}
static inline double f64_reduce_add(f64_vec v) {
    return v[0] + v[1];
}
static inline double f64_reduce_max(f64_vec v) {
    return v[0] > v[1] ? v[0] : v[1];
}
static inline f64_vec f64_add_pairs(f64_vec a, f64_vec b) {
    return (f64_vec){a[0] + a[1], b[0] + b[1]};
}
static inline void f64_reduce_pairs(double *out, f64_vec ab, f64_vec cd) {
    f64_store(out, ab);
    f64_store(out + 2, cd);
}
static inline void f64_transpose(f64_vec *r) {
    const double swap = r[0][1];
    r[0][1] = r[1][0];
    r[1][0] = swap;
}

#endif
