/* Vector operations for AArch64, whose baseline has NEON with fused multiply-add and half-precision
 * conversions. The list of operations and their exact meaning are in simd/README.md. */
#ifndef PF_SIMD_NEON_H
#define PF_SIMD_NEON_H

#include <arm_neon.h>
#include <stdint.h>

/* 32 registers hold 4 rows x 6 vectors of sums, 2 vectors of queries (one instruction loads both) and
 * 4 vectors of keys, which are multiplied number by number. */
#define f32_LANES 4
#define f32_PANEL_VECTORS 6
#define f32_MICRO_ROWS 4
#define f32_LOADED_VECTORS 2
#define f32_NUMBERS 4
#define f64_LANES 2
#define f64_PANEL_VECTORS 6
#define f64_MICRO_ROWS 4
#define f64_LOADED_VECTORS 2
#define f64_NUMBERS 2

typedef float f32_elem;
typedef float32x4_t f32_vec;

static inline f32_vec f32_zero(void) {
    return vdupq_n_f32(0.0f);
}
static inline f32_vec f32_set1(float x) {
    return vdupq_n_f32(x);
}
static inline f32_vec f32_load(const float *p) {
    return vld1q_f32(p);
}
static inline void f32_store(float *p, f32_vec v) {
    vst1q_f32(p, v);
}
static inline f32_vec f32_add(f32_vec a, f32_vec b) {
    return vaddq_f32(a, b);
}
static inline f32_vec f32_sub(f32_vec a, f32_vec b) {
    return vsubq_f32(a, b);
}
static inline f32_vec f32_mul(f32_vec a, f32_vec b) {
    return vmulq_f32(a, b);
}
static inline f32_vec f32_fma(f32_vec a, f32_vec b, f32_vec c) {
    return vfmaq_f32(c, a, b);
}
typedef float32x4_t f32_numbers;
static inline f32_numbers f32_load_numbers(const float *p, const int n) {
    if (n == 4)
        return vld1q_f32(p);
    return n == 2 ? vcombine_f32(vld1_f32(p), vdup_n_f32(0)) : vdupq_n_f32(*p);
}
typedef float f32_number;
static inline f32_number f32_pick(f32_numbers x, const int i) {
    return x[i];
}
static inline f32_vec f32_fma_number(f32_number a, f32_vec b, f32_vec c) {
    return vfmaq_n_f32(c, b, a); /* by element: no broadcast */
}
static inline f32_vec f32_max(f32_vec a, f32_vec b) {
    return vmaxq_f32(a, b);
}
static inline f32_vec f32_div(f32_vec a, f32_vec b) {
    return vdivq_f32(a, b);
}
static inline f32_vec f32_abs(f32_vec x) {
    return vabsq_f32(x);
}
static inline f32_vec f32_copysign(f32_vec x, f32_vec sign) {
    return vbslq_f32(vdupq_n_u32(0x80000000), sign, x);
}
static inline f32_vec f32_where_below(f32_vec x, f32_vec limit, f32_vec a, f32_vec b) {
    return vbslq_f32(vcltq_f32(x, limit), a, b);
}
static inline f32_vec f32_keep(f32_vec s, f32_vec j, f32_vec lo, f32_vec hi) {
    return vbslq_f32(vandq_u32(vcleq_f32(lo, j), vcltq_f32(j, hi)), s, vdupq_n_f32(-__builtin_inff()));
}
static inline f32_vec f32_exponent(f32_vec z) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(z), 23));
}
static inline f32_vec f32_load_f16(const void *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
}
static inline void f32_store_f16(void *p, f32_vec v) {
    vst1_u16((uint16_t *)p, vreinterpret_u16_f16(vcvt_f16_f32(v)));
}
static inline f32_vec f32_load_bf16(const void *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)p), 16));
}
static inline uint16x4_t pf_load_codes(const void *p) {
    uint32_t bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    return vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes))));
}
static inline f32_vec f32_load_f8e5m2(const void *p) { /* the upper half of a float16 */
    return vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(pf_load_codes(p), 8)));
}
static inline f32_vec f32_load_f8e4m3(const void *p) { /* a float16 but for bias and Inf */
    const uint16x4_t codes = pf_load_codes(p);
    const uint16x4_t sign = vand_u16(vshl_n_u16(codes, 8), vdup_n_u16(0x8000));
    const uint16x4_t rest = vand_u16(vshl_n_u16(codes, 7), vdup_n_u16(0x3f80));
    const f32_vec x = vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(sign, rest))), 256.0f);
    const uint32x4_t nan = vceqq_f32(vabsq_f32(x), vdupq_n_f32(480.0f));
    return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(x), nan));
}
static inline f32_vec f32_load_i8(const void *p) {
    const int16x4_t narrow = vreinterpret_s16_u16(vshl_n_u16(pf_load_codes(p), 8));
    return vcvtq_n_f32_s32(vmovl_s16(narrow), 8); /* the code in the upper byte, divided by 2^8 */
}
static inline f32_vec f32_load_i4(const void *p) {
    uint16_t bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    const int32_t left[4] = {28, 24, 20, 16};
    const int32x4_t top = vshlq_s32(vdupq_n_s32(bytes), vld1q_s32(left)); /* each nibble to the top */
    return vcvtq_f32_s32(vshrq_n_s32(top, 28));
}
static inline void f32_store_bf16(void *p, f32_vec v) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    vst1_u16((uint16_t *)p, vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16));
}
static inline float f32_reduce_add(f32_vec v) {
    return vaddvq_f32(v);
}
static inline float f32_reduce_max(f32_vec v) {
    return vmaxvq_f32(v);
}
static inline f32_vec f32_add_pairs(f32_vec a, f32_vec b) {
    return vpaddq_f32(a, b);
}
static inline void f32_reduce_pairs(float *out, f32_vec ab, f32_vec cd) {
    vst1q_f32(out, vpaddq_f32(ab, cd));
}
static inline void f32_transpose(f32_vec *r) {
    const float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

typedef double f64_elem;
typedef float64x2_t f64_vec;

static inline f64_vec f64_zero(void) {
    return vdupq_n_f64(0.0);
}
static inline f64_vec f64_set1(double x) {
    return vdupq_n_f64(x);
}
static inline f64_vec f64_load(const double *p) {
    return vld1q_f64(p);
}
static inline void f64_store(double *p, f64_vec v) {
    vst1q_f64(p, v);
}
static inline f64_vec f64_add(f64_vec a, f64_vec b) {
    return vaddq_f64(a, b);
}
static inline f64_vec f64_sub(f64_vec a, f64_vec b) {
    return vsubq_f64(a, b);
}
static inline f64_vec f64_mul(f64_vec a, f64_vec b) {
    return vmulq_f64(a, b);
}
static inline f64_vec f64_fma(f64_vec a, f64_vec b, f64_vec c) {
    return vfmaq_f64(c, a, b);
}
typedef float64x2_t f64_numbers;
static inline f64_numbers f64_load_numbers(const double *p, const int n) {
    return n == 1 ? vdupq_n_f64(*p) : vld1q_f64(p);
}
typedef double f64_number;
static inline f64_number f64_pick(f64_numbers x, const int i) {
    return x[i];
}
static inline f64_vec f64_fma_number(f64_number a, f64_vec b, f64_vec c) {
    return vfmaq_n_f64(c, b, a); /* by element: no broadcast */
}
static inline f64_vec f64_max(f64_vec a, f64_vec b) {
    return vmaxq_f64(a, b);
}
static inline f64_vec f64_div(f64_vec a, f64_vec b) {
    return vdivq_f64(a, b);
}
static inline f64_vec f64_abs(f64_vec x) {
    return vabsq_f64(x);
}
static inline f64_vec f64_copysign(f64_vec x, f64_vec sign) {
    return vbslq_f64(vdupq_n_u64(0x8000000000000000), sign, x);
}
static inline f64_vec f64_where_below(f64_vec x, f64_vec limit, f64_vec a, f64_vec b) {
    return vbslq_f64(vcltq_f64(x, limit), a, b);
}
static inline f64_vec f64_keep(f64_vec s, f64_vec j, f64_vec lo, f64_vec hi) {
    return vbslq_f64(vandq_u64(vcleq_f64(lo, j), vcltq_f64(j, hi)), s, vdupq_n_f64(-__builtin_inf()));
}
static inline f64_vec f64_exponent(f64_vec z) {
    return vreinterpretq_f64_s64(vshlq_n_s64(vreinterpretq_s64_f64(z), 52));
}
static inline double f64_reduce_add(f64_vec v) {
    return vaddvq_f64(v);
}
static inline double f64_reduce_max(f64_vec v) {
    return vmaxvq_f64(v);
}
static inline f64_vec f64_add_pairs(f64_vec a, f64_vec b) {
    return vpaddq_f64(a, b);
}
static inline void f64_reduce_pairs(double *out, f64_vec ab, f64_vec cd) {
    vst1q_f64(out, ab);
    vst1q_f64(out + 2, cd);
}
static inline void f64_transpose(f64_vec *r) {
    const f64_vec a = vzip1q_f64(r[0], r[1]), b = vzip2q_f64(r[0], r[1]);
    r[0] = a;
    r[1] = b;
}

#endif
