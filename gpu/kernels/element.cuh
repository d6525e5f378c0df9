/* Elements of any type in memory, and what they mean as numbers. */
#ifndef PF_ELEMENT_CUH
#define PF_ELEMENT_CUH

#include "call.cuh"

PF_DEVICE float pf_infinity() {
    return __uint_as_float(0x7f800000u);
}

PF_DEVICE float pf_nan() {
    return __uint_as_float(0x7fffffffu);
}

PF_DEVICE bool pf_is_finite(float x) {
    return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

PF_DEVICE bool pf_is_finite(double x) {
    return ((uint64_t)__double_as_longlong(x) >> 52 & 0x7ff) != 0x7ff;
}

/* The lowest finite number: the floor under a maximum (state.cuh). */
template <typename real> PF_DEVICE real pf_lowest();
template <> __device__ __forceinline__ float pf_lowest<float>() {
    return __uint_as_float(0xff7fffffu);
}
template <> __device__ __forceinline__ double pf_lowest<double>() {
    return __longlong_as_double((long long)0xffefffffffffffffull);
}

/* 1 sign, 4 exponent and 3 fraction bits, bias 7: a float16 whose exponent is 8 too small. */
PF_DEVICE float pf_from_e4m3(uint8_t bits) {
    if ((bits & 0x7f) == 0x7f)
        return pf_nan();
    return pf_from_f16((uint16_t)((bits & 0x80) << 8 | (bits & 0x7f) << 7)) * 256.0f;
}

/* The upper half of a float16. */
PF_DEVICE float pf_from_e5m2(uint8_t bits) {
    return pf_from_f16((uint16_t)(bits << 8));
}

/* Element i of a row that begins at `row`, i * stride items further; of int4 two share an item. */
PF_DEVICE pf_real pf_element(const void *row, int64_t dtype, int64_t stride, int64_t i) {
    switch (dtype) {
    case PF_F64:
        return (pf_real)((const double *)row)[i * stride];
    case PF_F32:
        return (pf_real)((const float *)row)[i * stride];
    case PF_F16:
        return (pf_real)pf_from_f16(((const uint16_t *)row)[i * stride]);
    case PF_BF16:
        return (pf_real)pf_from_bf16(((const uint16_t *)row)[i * stride]);
    case PF_F8E4M3:
        return (pf_real)pf_from_e4m3(((const uint8_t *)row)[i * stride]);
    case PF_F8E5M2:
        return (pf_real)pf_from_e5m2(((const uint8_t *)row)[i * stride]);
    case PF_I8:
        return (pf_real)((const int8_t *)row)[i * stride];
    default: { /* PF_I4: two's complement, the even element in the low half */
        const uint8_t pair = ((const uint8_t *)row)[i / 2 * stride];
        return (pf_real)((int8_t)(i & 1 ? pair & 0xf0 : pair << 4) >> 4);
    }
    }
}

/* A wide number of a small array: slopes, sinks, scales. */
PF_DEVICE double pf_number_at(const pf_tensor &t, int64_t offset) {
    switch (t.dtype) {
    case PF_F64:
        return ((const double *)t.data)[offset];
    case PF_F32:
        return (double)((const float *)t.data)[offset];
    case PF_F16:
        return (double)pf_from_f16(((const uint16_t *)t.data)[offset]);
    default:
        return (double)pf_from_bf16(((const uint16_t *)t.data)[offset]);
    }
}

PF_DEVICE void pf_set_element(void *row, int64_t dtype, int64_t i, pf_real x) {
    switch (dtype) {
    case PF_F64:
        ((double *)row)[i] = (double)x;
        return;
    case PF_F32:
        ((float *)row)[i] = (float)x;
        return;
    case PF_F16:
        ((uint16_t *)row)[i] = pf_to_f16((float)x);
        return;
    default:
        ((uint16_t *)row)[i] = pf_to_bf16((float)x);
    }
}

PF_DEVICE char *pf_place(const pf_tensor &t, int64_t offset) {
    return (char *)t.data + offset * pf_dtype_size((int32_t)t.dtype);
}

#endif
