/* Vector operations for x86-64-v3: AVX2 with FMA and F16C. The list of operations and their exact
 * meaning are in simd/README.md; every instruction set has the same list. */
#ifndef PF_SIMD_AVX2_H
#define PF_SIMD_AVX2_H

#include <immintrin.h>
#include <stdint.h>

/* 16 registers hold 4 rows x 3 vectors of sums, 3 vectors of queries and a broadcast. */
#define f32_LANES 8
#define f32_PANEL_VECTORS 3
#define f32_MICRO_ROWS 4
#define f32_LOADED_VECTORS f32_PANEL_VECTORS
#define f32_NUMBERS 1
#define f64_LANES 4
#define f64_PANEL_VECTORS 3
#define f64_MICRO_ROWS 4
#define f64_LOADED_VECTORS f64_PANEL_VECTORS
#define f64_NUMBERS 1
#define PF_IN_REGISTER(x) __asm__("" : "+x"(x)) /* see kernels/real.h */

typedef float f32_elem;
typedef __m256 f32_vec;

static inline f32_vec f32_zero(void) {
    return _mm256_setzero_ps();
}
static inline f32_vec f32_set1(float x) {
    return _mm256_set1_ps(x);
}
static inline f32_vec f32_load(const float *p) {
    return _mm256_loadu_ps(p);
}
static inline void f32_store(float *p, f32_vec v) {
    _mm256_storeu_ps(p, v);
}
static inline f32_vec f32_add(f32_vec a, f32_vec b) {
    return _mm256_add_ps(a, b);
}
static inline f32_vec f32_sub(f32_vec a, f32_vec b) {
    return _mm256_sub_ps(a, b);
}
static inline f32_vec f32_mul(f32_vec a, f32_vec b) {
    return _mm256_mul_ps(a, b);
}
static inline f32_vec f32_fma(f32_vec a, f32_vec b, f32_vec c) {
    return _mm256_fmadd_ps(a, b, c);
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
    return _mm256_max_ps(a, b);
}
static inline f32_vec f32_div(f32_vec a, f32_vec b) {
    return _mm256_div_ps(a, b);
}
static inline f32_vec f32_abs(f32_vec x) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}
static inline f32_vec f32_copysign(f32_vec x, f32_vec sign) {
    return _mm256_or_ps(f32_abs(x), _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
}
static inline f32_vec f32_where_below(f32_vec x, f32_vec limit, f32_vec a, f32_vec b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, limit, _CMP_LT_OQ));
}
static inline f32_vec f32_keep(f32_vec s, f32_vec j, f32_vec lo, f32_vec hi) {
    const __m256 seen = _mm256_and_ps(_mm256_cmp_ps(lo, j, _CMP_LE_OQ), _mm256_cmp_ps(j, hi, _CMP_LT_OQ));
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), s, seen);
}
static inline f32_vec f32_exponent(f32_vec z) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(z), 23));
}
static inline f32_vec f32_load_f16(const void *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline void f32_store_f16(void *p, f32_vec v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline f32_vec f32_load_bf16(const void *p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline f32_vec f32_load_f8e5m2(const void *p) { /* the upper half of a float16 */
    return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)p)));
}
/* A float16 but for bias and Inf. The sign is extended over the two upper bits, of which the second
 * becomes the carry out of the largest code, which stands for NaN. */
static inline f32_vec f32_load_f8e4m3(const void *p) {
    const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
    const __m128i x = _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16((short)0xbf80));
    const __m128i carry = _mm_and_si128(_mm_add_epi16(x, _mm_set1_epi16(0x0080)), _mm_set1_epi16(0x4000));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(x, carry)), _mm256_set1_ps(256.0f));
}
static inline f32_vec f32_load_i8(const void *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline f32_vec f32_load_i4(const void *p) {
    int bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    const __m256i left = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0); /* each nibble to the top */
    const __m256i top = _mm256_sllv_epi32(_mm256_set1_epi32(bytes), left);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(top, 28));
}
static inline void f32_store_bf16(void *p, f32_vec v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}

/* Lanes are added as ((0+4)+(2+6)) + ((1+5)+(3+7)). */
static inline float f32_reduce_add(f32_vec v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float f32_reduce_max(f32_vec v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static inline f32_vec f32_add_pairs(f32_vec a, f32_vec b) {
    return _mm256_hadd_ps(a, b);
}
static inline void f32_reduce_pairs(float *out, f32_vec ab, f32_vec cd) {
    const __m256 s = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
static inline void f32_transpose(f32_vec *r) {
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

typedef double f64_elem;
typedef __m256d f64_vec;

static inline f64_vec f64_zero(void) {
    return _mm256_setzero_pd();
}
static inline f64_vec f64_set1(double x) {
    return _mm256_set1_pd(x);
}
static inline f64_vec f64_load(const double *p) {
    return _mm256_loadu_pd(p);
}
static inline void f64_store(double *p, f64_vec v) {
    _mm256_storeu_pd(p, v);
}
static inline f64_vec f64_add(f64_vec a, f64_vec b) {
    return _mm256_add_pd(a, b);
}
static inline f64_vec f64_sub(f64_vec a, f64_vec b) {
    return _mm256_sub_pd(a, b);
}
static inline f64_vec f64_mul(f64_vec a, f64_vec b) {
    return _mm256_mul_pd(a, b);
}
static inline f64_vec f64_fma(f64_vec a, f64_vec b, f64_vec c) {
    return _mm256_fmadd_pd(a, b, c);
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
    return _mm256_max_pd(a, b);
}
static inline f64_vec f64_div(f64_vec a, f64_vec b) {
    return _mm256_div_pd(a, b);
}
static inline f64_vec f64_abs(f64_vec x) {
    return _mm256_andnot_pd(_mm256_set1_pd(-0.0), x);
}
static inline f64_vec f64_copysign(f64_vec x, f64_vec sign) {
    return _mm256_or_pd(f64_abs(x), _mm256_and_pd(_mm256_set1_pd(-0.0), sign));
}
static inline f64_vec f64_where_below(f64_vec x, f64_vec limit, f64_vec a, f64_vec b) {
    return _mm256_blendv_pd(b, a, _mm256_cmp_pd(x, limit, _CMP_LT_OQ));
}
static inline f64_vec f64_keep(f64_vec s, f64_vec j, f64_vec lo, f64_vec hi) {
    const __m256d seen = _mm256_and_pd(_mm256_cmp_pd(lo, j, _CMP_LE_OQ), _mm256_cmp_pd(j, hi, _CMP_LT_OQ));
    return _mm256_blendv_pd(_mm256_set1_pd(-__builtin_inf()), s, seen);
}
static inline f64_vec f64_exponent(f64_vec z) {
    return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(z), 52));
}
static inline double f64_reduce_add(f64_vec v) {
    const __m128d s = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
}
static inline double f64_reduce_max(f64_vec v) {
    const __m128d s = _mm_max_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_max_sd(s, _mm_unpackhi_pd(s, s)));
}
static inline f64_vec f64_add_pairs(f64_vec a, f64_vec b) {
    return _mm256_hadd_pd(a, b);
}
static inline void f64_reduce_pairs(double *out, f64_vec ab, f64_vec cd) {
    _mm_storeu_pd(out, _mm_add_pd(_mm256_castpd256_pd128(ab), _mm256_extractf128_pd(ab, 1)));
    _mm_storeu_pd(out + 2, _mm_add_pd(_mm256_castpd256_pd128(cd), _mm256_extractf128_pd(cd, 1)));
}
static inline void f64_transpose(f64_vec *r) {
    const __m256d a = _mm256_unpacklo_pd(r[0], r[1]), b = _mm256_unpackhi_pd(r[0], r[1]);
    const __m256d c = _mm256_unpacklo_pd(r[2], r[3]), d = _mm256_unpackhi_pd(r[2], r[3]);
    r[0] = _mm256_permute2f128_pd(a, c, 0x20);
    r[1] = _mm256_permute2f128_pd(b, d, 0x20);
    r[2] = _mm256_permute2f128_pd(a, c, 0x31);
    r[3] = _mm256_permute2f128_pd(b, d, 0x31);
}

#endif
