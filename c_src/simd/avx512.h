/* Vector operations for x86-64-v4: AVX-512 F, BW, CD, DQ, VL. The list of operations and their
 * exact meaning are in simd/README.md. */
#ifndef PF_SIMD_AVX512_H
#define PF_SIMD_AVX512_H

#include <immintrin.h>
#include <stdint.h>

/* 32 registers hold 8 rows x 3 vectors of sums, 3 vectors of queries and broadcasts. */
#define f32_LANES 16
#define f32_PANEL_VECTORS 3
#define f32_MICRO_ROWS 8
#define f32_LOADED_VECTORS f32_PANEL_VECTORS
#define f32_NUMBERS 1
#define f64_LANES 8
#define f64_PANEL_VECTORS 3
#define f64_MICRO_ROWS 8
#define f64_LOADED_VECTORS f64_PANEL_VECTORS
#define f64_NUMBERS 1

typedef float f32_elem;
typedef __m512 f32_vec;

static inline f32_vec f32_zero(void) {
    return _mm512_setzero_ps();
}
static inline f32_vec f32_set1(float x) {
    return _mm512_set1_ps(x);
}
static inline f32_vec f32_load(const float *p) {
    return _mm512_loadu_ps(p);
}
static inline void f32_store(float *p, f32_vec v) {
    _mm512_storeu_ps(p, v);
}
static inline f32_vec f32_add(f32_vec a, f32_vec b) {
    return _mm512_add_ps(a, b);
}
static inline f32_vec f32_sub(f32_vec a, f32_vec b) {
    return _mm512_sub_ps(a, b);
}
static inline f32_vec f32_mul(f32_vec a, f32_vec b) {
    return _mm512_mul_ps(a, b);
}
static inline f32_vec f32_fma(f32_vec a, f32_vec b, f32_vec c) {
    return _mm512_fmadd_ps(a, b, c);
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
    return _mm512_max_ps(a, b);
}
static inline f32_vec f32_div(f32_vec a, f32_vec b) {
    return _mm512_div_ps(a, b);
}
static inline f32_vec f32_abs(f32_vec x) {
    return _mm512_abs_ps(x);
}
static inline f32_vec f32_copysign(f32_vec x, f32_vec sign) {
    return _mm512_or_ps(f32_abs(x), _mm512_and_ps(_mm512_set1_ps(-0.0f), sign));
}
static inline f32_vec f32_where_below(f32_vec x, f32_vec limit, f32_vec a, f32_vec b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), b, a);
}
static inline f32_vec f32_keep(f32_vec s, f32_vec j, f32_vec lo, f32_vec hi) {
    const __mmask16 above = _mm512_cmp_ps_mask(lo, j, _CMP_LE_OQ);
    const __mmask16 seen = _mm512_mask_cmp_ps_mask(above, j, hi, _CMP_LT_OQ);
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), seen, s);
}
static inline f32_vec f32_exponent(f32_vec z) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(z), 23));
}
static inline f32_vec f32_load_f16(const void *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline void f32_store_f16(void *p, f32_vec v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline f32_vec f32_load_bf16(const void *p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline f32_vec f32_load_f8e5m2(const void *p) { /* the upper half of a float16 */
    const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    return _mm512_cvtph_ps(_mm256_slli_epi16(codes, 8));
}
/* A float16 but for bias and Inf. The sign is extended over the two upper bits, of which the second
 * becomes the carry out of the largest code, which stands for NaN. */
static inline f32_vec f32_load_f8e4m3(const void *p) {
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    const __m256i x = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16((short)0xbf80));
    const __m256i carry =
        _mm256_and_si256(_mm256_add_epi16(x, _mm256_set1_epi16(0x0080)), _mm256_set1_epi16(0x4000));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(x, carry)), _mm512_set1_ps(256.0f));
}
static inline f32_vec f32_load_i8(const void *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* A table of the 16 values, looked up by the low four bits of each lane; what lies above them is
 * ignored, so that a byte and its upper half need no mask. */
static inline f32_vec f32_load_i4(const void *p) {
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)p));
    const __m512i codes = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return _mm512_permutexvar_ps(codes, values);
}
static inline void f32_store_bf16(void *p, f32_vec v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}

static inline __m256 pf_halves_add_ps(__m512 v) {
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}
static inline float f32_reduce_add(f32_vec v) {
    const __m256 h = pf_halves_add_ps(v);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float f32_reduce_max(f32_vec v) {
    const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static inline f32_vec f32_add_pairs(f32_vec a, f32_vec b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
static inline void f32_reduce_pairs(float *out, f32_vec ab, f32_vec cd) {
    const __m512 s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 h = pf_halves_add_ps(s);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
static inline void f32_transpose(f32_vec *r) {
    __m512 t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* u[i + c]: column c of each 4 x 4 block, rows i..i+3 */
        u[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int c = 0; c < 4; c++) { /* then the blocks, as a 4 x 4 matrix of 128-bit lanes */
        const __m512 a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x44);
        const __m512 b = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xee);
        const __m512 d = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x44);
        const __m512 e = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xee);
        r[c] = _mm512_shuffle_f32x4(a, d, 0x88);
        r[4 + c] = _mm512_shuffle_f32x4(a, d, 0xdd);
        r[8 + c] = _mm512_shuffle_f32x4(b, e, 0x88);
        r[12 + c] = _mm512_shuffle_f32x4(b, e, 0xdd);
    }
}

typedef double f64_elem;
typedef __m512d f64_vec;

static inline f64_vec f64_zero(void) {
    return _mm512_setzero_pd();
}
static inline f64_vec f64_set1(double x) {
    return _mm512_set1_pd(x);
}
static inline f64_vec f64_load(const double *p) {
    return _mm512_loadu_pd(p);
}
static inline void f64_store(double *p, f64_vec v) {
    _mm512_storeu_pd(p, v);
}
static inline f64_vec f64_add(f64_vec a, f64_vec b) {
    return _mm512_add_pd(a, b);
}
static inline f64_vec f64_sub(f64_vec a, f64_vec b) {
    return _mm512_sub_pd(a, b);
}
static inline f64_vec f64_mul(f64_vec a, f64_vec b) {
    return _mm512_mul_pd(a, b);
}
static inline f64_vec f64_fma(f64_vec a, f64_vec b, f64_vec c) {
    return _mm512_fmadd_pd(a, b, c);
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
    return _mm512_max_pd(a, b);
}
static inline f64_vec f64_div(f64_vec a, f64_vec b) {
    return _mm512_div_pd(a, b);
}
static inline f64_vec f64_abs(f64_vec x) {
    return _mm512_abs_pd(x);
}
static inline f64_vec f64_copysign(f64_vec x, f64_vec sign) {
    return _mm512_or_pd(f64_abs(x), _mm512_and_pd(_mm512_set1_pd(-0.0), sign));
}
static inline f64_vec f64_where_below(f64_vec x, f64_vec limit, f64_vec a, f64_vec b) {
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(x, limit, _CMP_LT_OQ), b, a);
}
static inline f64_vec f64_keep(f64_vec s, f64_vec j, f64_vec lo, f64_vec hi) {
    const __mmask8 above = _mm512_cmp_pd_mask(lo, j, _CMP_LE_OQ);
    const __mmask8 seen = _mm512_mask_cmp_pd_mask(above, j, hi, _CMP_LT_OQ);
    return _mm512_mask_mov_pd(_mm512_set1_pd(-__builtin_inf()), seen, s);
}
static inline f64_vec f64_exponent(f64_vec z) {
    return _mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(z), 52));
}

static inline __m256d pf_halves_add_pd(__m512d v) {
    return _mm256_add_pd(_mm512_castpd512_pd256(v), _mm512_extractf64x4_pd(v, 1));
}
static inline double f64_reduce_add(f64_vec v) {
    const __m256d h = pf_halves_add_pd(v);
    const __m128d s = _mm_add_pd(_mm256_castpd256_pd128(h), _mm256_extractf128_pd(h, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
}
static inline double f64_reduce_max(f64_vec v) {
    const __m256d h = _mm256_max_pd(_mm512_castpd512_pd256(v), _mm512_extractf64x4_pd(v, 1));
    const __m128d s = _mm_max_pd(_mm256_castpd256_pd128(h), _mm256_extractf128_pd(h, 1));
    return _mm_cvtsd_f64(_mm_max_sd(s, _mm_unpackhi_pd(s, s)));
}
static inline f64_vec f64_add_pairs(f64_vec a, f64_vec b) {
    return _mm512_add_pd(_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
}
static inline void f64_reduce_pairs(double *out, f64_vec ab, f64_vec cd) {
    const __m256d x = pf_halves_add_pd(ab), y = pf_halves_add_pd(cd);
    _mm_storeu_pd(out, _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1)));
    _mm_storeu_pd(out + 2, _mm_add_pd(_mm256_castpd256_pd128(y), _mm256_extractf128_pd(y, 1)));
}
static inline void f64_transpose(f64_vec *r) {
    __m512d t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm512_unpacklo_pd(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_pd(r[i], r[i + 1]);
    }
    for (int c = 0; c < 2; c++) { /* t[2k + c]: column c of each 2 x 2 block, rows 2k and 2k+1 */
        const __m512d a = _mm512_shuffle_f64x2(t[c], t[2 + c], 0x44);
        const __m512d b = _mm512_shuffle_f64x2(t[c], t[2 + c], 0xee);
        const __m512d d = _mm512_shuffle_f64x2(t[4 + c], t[6 + c], 0x44);
        const __m512d e = _mm512_shuffle_f64x2(t[4 + c], t[6 + c], 0xee);
        r[c] = _mm512_shuffle_f64x2(a, d, 0x88);
        r[2 + c] = _mm512_shuffle_f64x2(a, d, 0xdd);
        r[4 + c] = _mm512_shuffle_f64x2(b, e, 0x88);
        r[6 + c] = _mm512_shuffle_f64x2(b, e, 0xdd);
    }
}

#endif
