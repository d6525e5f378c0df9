/* The machine's own limits, measured in the run they are compared with: fused multiply-adds per second,
 * products of AMX tiles per second, and bytes read per second. Compiled by limits.py with the flags of one
 * instruction set, once for each TYPE, float or double. */
#include <stddef.h>

typedef TYPE vec __attribute__((vector_size(WIDTH)));
typedef float vec_float __attribute__((vector_size(WIDTH)));
typedef float loaded __attribute__((vector_size(WIDTH), aligned(4)));

#if defined(__x86_64__)
#define REGISTER "+x"
#else
#define REGISTER "+w"
#endif

/* Twelve independent chains hide the latency of the unit (4-5 cycles, two units). The factors are
 * hidden from the compiler, which would otherwise multiply by 1 in no time. Returns the
 * floating-point operations done. */
double peak_fma(long rounds, TYPE *sink) {
    vec a[12], x = (vec){0} + (TYPE)1, y = (vec){0} + (TYPE)1e-9;
    __asm__ volatile("" : REGISTER(x), REGISTER(y));
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        a[i] = y;
    for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            a[i] = a[i] * x + y;
            __asm__ volatile("" : REGISTER(a[i]));
        }
    }
    vec sum = a[0];
#pragma GCC unroll 12
    for (int i = 1; i < 12; i++)
        sum += a[i];
    *sink += sum[0]; /* one lane is enough to keep all chains alive */
    return 2.0 * 12 * (WIDTH / sizeof(TYPE)) * (double)rounds;
}

/* Reads a buffer once, four streams of whole cache lines side by side, prefetched as the decode
 * kernel does. */
float read_bytes(const float *data, size_t count) {
    vec_float sum[4] = {{0}};
    const size_t quarter = count / 4;
    for (size_t i = 0; i + 16 <= quarter; i += 16)
        for (int s = 0; s < 4; s++) {
            const float *p = data + s * quarter + i;
            __builtin_prefetch(p + 1024);
            for (int k = 0; k < 64 / WIDTH; k++)
                sum[s] += *(const loaded *)(p + k * (WIDTH / 4));
        }
    vec_float all = sum[0] + sum[1] + sum[2] + sum[3];
    float result = 0;
    for (int k = 0; k < WIDTH / 4; k++)
        result += all[k];
    return result;
}

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The kernel hands out tile registers on request only. Returns 0 where it does. */
int amx_request(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

/* All eight tiles: four accumulators fed by two tiles of each operand, as a kernel that reuses what it
 * loads would. Nothing is loaded in the loop. Returns the floating-point operations done. */
double peak_amx(long rounds, float *sink) {
    struct {
        unsigned char palette, start_row, reserved[14];
        unsigned short bytes_per_row[16];
        unsigned char rows[16];
    } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
        config.bytes_per_row[t] = 64;
        config.rows[t] = 16;
    }
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (long r = 0; r < rounds; r++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float out[256];
    _tile_stored(0, out, 64);
    _tile_release();
    *sink += out[0];
    return 4.0 * 2 * 16 * 16 * 32 * (double)rounds;
}
#endif
