/* Matrix operations of AMX on top of AVX-512: eight tiles of 16 rows x 64 bytes. A row is 16 floats,
 * or 16 pairs of bfloat16. The list of operations is in simd/README.md. */
#ifndef PF_SIMD_AMX_H
#define PF_SIMD_AMX_H

#include "avx512.h"

#define amx_TILE_BYTES 1024

#ifndef PF_AMX_EMULATED
static inline void amx_start(void) {
    _Alignas(64) static const struct {
        uint8_t palette, start_row, zero[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1,
                .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}
static inline void amx_stop(void) {
    _tile_release(); /* a thread without tiles is cheaper to switch */
}
/* Numbers of tiles are parts of the instructions, hence macros. */
#define amx_zero(t) _tile_zero(t)
#define amx_load(t, p, stride) _tile_loadd(t, p, stride)
#define amx_store(t, p, stride) _tile_stored(t, p, stride)
#define amx_dot(t, a, b) _tile_dpbf16ps(t, a, b)
#else
#include "amx_emulated.h"
#endif

typedef __m512i amx_halves;

/* 32 halves, those from n on 0. */
static inline amx_halves amx_load_halves(const void *p, int64_t n) {
    if (n >= 32)
        return _mm512_loadu_si512(p);
    return n <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p);
}
static inline void amx_store_halves(void *p, amx_halves x) {
    _mm512_storeu_si512(p, x);
}
static inline f32_vec amx_as_vec(amx_halves x) {
    return _mm512_castsi512_ps(x);
}
static inline f32_vec amx_turn_signs(f32_vec x) {
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0x80008000)));
}
/* Pairs of the halves [16 * part, 16 * part + 16) of two rows: dword i is (even[i], odd[i]). */
static inline f32_vec amx_zip(amx_halves even, amx_halves odd, const int part) {
    const __m256i e = part ? _mm512_extracti64x4_epi64(even, 1) : _mm512_castsi512_si256(even);
    const __m256i o = part ? _mm512_extracti64x4_epi64(odd, 1) : _mm512_castsi512_si256(odd);
    const __m512i low = _mm512_cvtepu16_epi32(e), high = _mm512_cvtepu16_epi32(o);
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
/* Two vectors of floats >= 0 rounded to bfloat16, as pairs: to nearest, ties up. */
static inline f32_vec amx_round_pairs(f32_vec even, f32_vec odd) {
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32((int)0xffff0000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(upper, high, low, 0xca)); /* upper ? high : low */
}
/* t - floor(t); 0 for infinities. */
static inline f32_vec amx_fraction(f32_vec t) {
    return _mm512_reduce_ps(t, 9);
}
/* p * 2^floor(t). */
static inline f32_vec amx_times_power(f32_vec p, f32_vec t) {
    return _mm512_scalef_ps(p, t);
}
/* Whether a > b in any lane. */
static inline int amx_any_above(f32_vec a, f32_vec b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0;
}
/* a > b ? x : y, per lane. */
static inline f32_vec amx_where_above(f32_vec a, f32_vec b, f32_vec x, f32_vec y) {
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), x);
}

#endif
