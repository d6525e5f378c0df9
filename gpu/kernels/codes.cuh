/* Numbers to the codes of stored types that come with a scale: to nearest, ties to even, saturated. The twin
 * of c_src/driver/quantise.h. */
#ifndef PF_CODES_CUH
#define PF_CODES_CUH

#include "element.cuh"

/* The number that a scale of its own maps the largest element of a row to; 0 for other types. */
PF_DEVICE float pf_largest_code(int64_t dtype) {
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

PF_DEVICE int pf_code_int(float x, int lowest, int highest) {
    if (x != x)
        return 0;
    return (int)fminf(fmaxf(rintf(x), (float)lowest), (float)highest);
}

/* 8-bit floats: `mantissa_bits` of mantissa, the smallest normal number 2^first_exponent. */
PF_DEVICE uint8_t pf_code_float8(float x, int mantissa_bits, int first_exponent, float largest,
                                 int largest_code) {
    const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    const float size = __uint_as_float(magnitude);
    if (x != x)
        return sign | 0x7f;
    if (size >= largest)
        return (uint8_t)(sign | largest_code);
    const uint32_t smallest_normal = (uint32_t)(127 + first_exponent) << 23;
    if (magnitude < smallest_normal) { /* multiples of the subnormals' distance; the last one is normal */
        const float inverse = __uint_as_float((uint32_t)(127 - first_exponent + mantissa_bits) << 23);
        return sign | (uint8_t)rintf(size * inverse);
    }
    const int lost = 23 - mantissa_bits;
    const uint32_t rounded = magnitude + ((1u << (lost - 1)) - 1) + (magnitude >> lost & 1);
    const int code = (int)(rounded >> lost) - ((126 + first_exponent) << mantissa_bits);
    return (uint8_t)(sign | (code < largest_code ? code : largest_code));
}

/* The code of one number; of int4 in the low half of a byte. */
PF_DEVICE uint8_t pf_code(float x, int64_t dtype) {
    switch (dtype) {
    case PF_F8E4M3:
        return pf_code_float8(x, 3, -6, 448.0f, 0x7e);
    case PF_F8E5M2:
        return pf_code_float8(x, 2, -14, 57344.0f, 0x7b);
    case PF_I8:
        return (uint8_t)pf_code_int(x, -128, 127);
    default: /* PF_I4 */
        return (uint8_t)(pf_code_int(x, -8, 7) & 15);
    }
}

#endif
