/* The tile operations of amx.h in plain C, to test on any machine with AVX-512 what is built on them:
 * products and sums in single precision, one after the other, denormals as 0. Compiled in with
 * PF_AMX_EMULATED, which only tests define. */
#ifndef PF_SIMD_AMX_EMULATED_H
#define PF_SIMD_AMX_EMULATED_H

static _Thread_local union {
    float f[16][16];
    uint16_t h[16][32];
} amx_tiles[8];
static inline float amx_widened(uint16_t h) {
    const uint32_t bits = (h & 0x7f80) ? (uint32_t)h << 16 : (uint32_t)(h & 0x8000) << 16;
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}
static inline void amx_start(void) {}
static inline void amx_stop(void) {}
static inline void amx_zero(int t) {
    __builtin_memset(&amx_tiles[t], 0, sizeof amx_tiles[t]);
}
static inline void amx_load(int t, const void *p, int64_t stride) {
    for (int r = 0; r < 16; r++)
        __builtin_memcpy(amx_tiles[t].f[r], (const char *)p + r * stride, 64);
}
static inline void amx_store(int t, void *p, int64_t stride) {
    for (int r = 0; r < 16; r++)
        __builtin_memcpy((char *)p + r * stride, amx_tiles[t].f[r], 64);
}
static inline void amx_dot(int t, int a, int b) {
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++) {
                float sum = amx_tiles[t].f[m][n];
                sum += amx_widened(amx_tiles[a].h[m][2 * k]) * amx_widened(amx_tiles[b].h[k][2 * n]);
                sum += amx_widened(amx_tiles[a].h[m][2 * k + 1]) * amx_widened(amx_tiles[b].h[k][2 * n + 1]);
                amx_tiles[t].f[m][n] = sum;
            }
}

#endif
