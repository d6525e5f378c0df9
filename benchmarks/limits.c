/* The machine's own limits, measured in the run they are compared with: fused multiply-adds per
 * second and bytes read per second. Compiled by limits.py with the flags of one instruction set. */
#include <stddef.h>

typedef float vec __attribute__((vector_size(WIDTH)));
typedef float loaded __attribute__((vector_size(WIDTH), aligned(4)));

/* Twelve independent chains hide the latency of the unit (4-5 cycles, two units). The factors are
 * hidden from the compiler, which would otherwise multiply by 1 in no time. Returns the
 * floating-point operations done. */
double peak_flops(long rounds, float *sink) {
    vec a[12], x, y;
    const int lanes = WIDTH / 4;
    for (int k = 0; k < lanes; k++) {
        x[k] = 1.0f;
        y[k] = 1e-9f;
    }
    __asm__ volatile("" : "+x"(x), "+x"(y));
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        a[i] = y;
    for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            a[i] = a[i] * x + y;
            __asm__ volatile("" : "+x"(a[i]));
        }
    }
    vec sum = a[0];
#pragma GCC unroll 12
    for (int i = 1; i < 12; i++)
        sum += a[i];
    for (int k = 0; k < lanes; k++)
        *sink += sum[k];
    return 2.0 * 12 * lanes * (double)rounds;
}

/* Reads a buffer once, four streams of whole cache lines side by side, prefetched as the decode
 * kernel does. */
float read_bytes(const float *data, size_t count) {
    vec sum[4] = {{0}};
    const size_t quarter = count / 4;
    for (size_t i = 0; i + 16 <= quarter; i += 16)
        for (int s = 0; s < 4; s++) {
            const float *p = data + s * quarter + i;
            __builtin_prefetch(p + 1024);
            for (int k = 0; k < 64 / WIDTH; k++)
                sum[s] += *(const loaded *)(p + k * (WIDTH / 4));
        }
    vec all = sum[0] + sum[1] + sum[2] + sum[3];
    float result = 0;
    for (int k = 0; k < WIDTH / 4; k++)
        result += all[k];
    return result;
}
