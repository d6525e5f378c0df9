/* Elements as stored to vectors of the compute type, and back. The element type is a constant of
 * each instance. Included by instantiate.h, once. */
#ifndef PF_KERNELS_STORAGE_H
#define PF_KERNELS_STORAGE_H

#include "../shared/integers.h"

/* How elements of the compute type are called where they are stored. */
enum { f32_DTYPE = PF_F32, f64_DTYPE = PF_F64 };

PF_INLINE f32_vec f32_load_as(const void *x, int64_t i, const int32_t dtype) {
    switch (dtype) {
    case PF_F16:
        return f32_load_f16((const uint16_t *)x + i);
    case PF_BF16:
        return f32_load_bf16((const uint16_t *)x + i);
    case PF_F8E4M3:
        return f32_load_f8e4m3((const uint8_t *)x + i);
    case PF_F8E5M2:
        return f32_load_f8e5m2((const uint8_t *)x + i);
    case PF_I8:
        return f32_load_i8((const int8_t *)x + i);
    case PF_I4:
        return f32_load_i4((const uint8_t *)x + i / 2);
    case PF_F64: { /* a bias: what is finite stays so */
        float lanes[f32_LANES];
        for (int k = 0; k < f32_LANES; k++) {
            const double wide = ((const double *)x)[i + k];
            const double near = wide < -3.4028234663852886e38 ? -3.4028234663852886e38 : wide;
            const float narrow = (float)(near > 3.4028234663852886e38 ? 3.4028234663852886e38 : near);
            lanes[k] = __builtin_isinf(wide) ? (float)wide : narrow;
        }
        return f32_load(lanes);
    }
    default:
        return f32_load((const float *)x + i);
    }
}

PF_INLINE void f32_store_as(void *x, int64_t i, f32_vec v, const int32_t dtype) {
    switch (dtype) {
    case PF_F16:
        f32_store_f16((uint16_t *)x + i, v);
        return;
    case PF_BF16:
        f32_store_bf16((uint16_t *)x + i, v);
        return;
    case PF_F64: { /* a float64 output of a float32 computation */
        float lanes[f32_LANES];
        f32_store(lanes, v);
        for (int k = 0; k < f32_LANES; k++)
            ((double *)x)[i + k] = lanes[k];
        return;
    }
    default:
        f32_store((float *)x + i, v);
    }
}

/* Narrow elements meet float64 only where states of both are merged. */
PF_INLINE f64_vec f64_load_as(const void *x, int64_t i, const int32_t dtype) {
    if (dtype == PF_F64)
        return f64_load((const double *)x + i);
    char bytes[f32_LANES * 4] = {0};
    __builtin_memcpy(bytes, (const char *)x + pf_byte_of(dtype, i), (size_t)pf_row_bytes(dtype, f64_LANES));
    float narrow[f32_LANES];
    f32_store(narrow, f32_load_as(bytes, 0, dtype));
    double wide[f64_LANES];
    for (int k = 0; k < f64_LANES; k++)
        wide[k] = narrow[k];
    return f64_load(wide);
}

/* Narrow outputs of a float64 computation round once: to float32 with the last bit set wherever
 * something is lost (round to odd), then to 16 bits. */
PF_INLINE void f64_store_as(void *x, int64_t i, f64_vec v, const int32_t dtype) {
    if (dtype == PF_F64) {
        f64_store((double *)x + i, v);
        return;
    }
    double wide[f64_LANES];
    f64_store(wide, v);
    for (int k = 0; k < f64_LANES; k++) {
        float narrow = (float)wide[k];
        if (dtype == PF_F32) {
            ((float *)x)[i + k] = narrow;
            continue;
        }
        uint32_t bits;
        if ((double)narrow != wide[k] && narrow == narrow) {
            __builtin_memcpy(&bits, &narrow, sizeof bits);
            const int away = __builtin_fabs((double)narrow) > __builtin_fabs(wide[k]);
            bits = (bits - (uint32_t)away) | 1; /* truncate, then mark as inexact */
            __builtin_memcpy(&narrow, &bits, sizeof bits);
        }
        uint16_t out[f32_LANES];
        f32_store_as(out, 0, f32_set1(narrow), dtype);
        ((uint16_t *)x)[i + k] = out[0];
    }
}

#endif
