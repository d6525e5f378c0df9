/* Numbers to the codes of stored types that come with a scale: to nearest, ties to even, saturated.
 * Portable code, one element at a time: an append is bound by the memory that it writes. */
#ifndef PF_DRIVER_QUANTISE_H
#define PF_DRIVER_QUANTISE_H

#include "../shared/integers.h"

#include <math.h>

/* The number that a scale of its own maps the largest element of a row to; 0 for other types. */
static inline float pf_largest_code(int32_t dtype) {
    switch (dtype) {
    case PF_F8E4M3:
        return 448.0f;
    case PF_F8E5M2:
        return 57344.0f;
    case PF_I8:
        return 127.0f;
    case PF_I4:
        return 7.0f;
    default:
        return 0.0f;
    }
}

static inline int pf_code_int(float x, int lowest, int highest) {
    if (isnan(x))
        return 0;
    return (int)fminf(fmaxf(rintf(x), (float)lowest), (float)highest);
}

/* 8-bit floats: mantissa_bits of mantissa, the smallest normal number 2^first_exponent. */
static inline uint8_t pf_code_float8(float x, int mantissa_bits, int first_exponent, float largest,
                                     uint8_t largest_code) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    const float size = fabsf(x);
    if (isnan(x))
        return sign | 0x7f;
    if (size >= largest)
        return sign | largest_code;
    const float smallest_normal = ldexpf(1.0f, first_exponent);
    if (size < smallest_normal) /* multiples of the subnormals' distance; the last one is normal */
        return sign | (uint8_t)rintf(size / ldexpf(1.0f, first_exponent - mantissa_bits));
    const int lost = 23 - mantissa_bits;
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t rounded = magnitude + ((1u << (lost - 1)) - 1) + (magnitude >> lost & 1);
    const int code = (int)(rounded >> lost) - ((126 + first_exponent) << mantissa_bits);
    return sign | (uint8_t)(code < largest_code ? code : largest_code);
}

/* n numbers to items that lie `stride` apart; two of them share one in int4. */
static inline void pf_store_codes(void *out, int64_t stride, const float *x, int64_t n, int32_t dtype) {
    uint8_t *items = out;
    switch (dtype) {
    case PF_F8E4M3:
        for (int64_t i = 0; i < n; i++)
            items[i * stride] = pf_code_float8(x[i], 3, -6, 448.0f, 0x7e);
        return;
    case PF_F8E5M2:
        for (int64_t i = 0; i < n; i++)
            items[i * stride] = pf_code_float8(x[i], 2, -14, 57344.0f, 0x7b);
        return;
    case PF_I8:
        for (int64_t i = 0; i < n; i++)
            items[i * stride] = (uint8_t)pf_code_int(x[i], -128, 127);
        return;
    case PF_I4:
        for (int64_t i = 0; i < n; i += 2)
            items[i / 2 * stride] =
                (uint8_t)((pf_code_int(x[i], -8, 7) & 15) | (pf_code_int(x[i + 1], -8, 7) & 15) << 4);
        return;
    }
}

#endif
