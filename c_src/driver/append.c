/* Writing new keys and values into a cache, keys rotated on the way if there are angles. Each token
 * is widened to the compute type, rotated, divided by its scale, and rounded once to the cache's type. */
#include "driver.h"
#include "entry.h"
#include "quantise.h"

#include "../dispatch/dispatch.h"

#include <stdlib.h>

/* Rotary embedding of one key: pair i is (x[2i], x[2i+1]) or (x[i], x[i + num_pairs]). */
static void rotate_row(void *row_, int wide, const double *cos, const double *sin, int64_t num_pairs,
                       int interleaved) {
    for (int64_t i = 0; i < num_pairs; i++) {
        const int64_t a = interleaved ? 2 * i : i, b = interleaved ? a + 1 : i + num_pairs;
        if (wide) {
            double *row = row_, x = row[a], y = row[b];
            row[a] = x * cos[i] - y * sin[i];
            row[b] = x * sin[i] + y * cos[i];
        } else {
            float *row = row_;
            const double x = row[a], y = row[b];
            row[a] = (float)(x * cos[i] - y * sin[i]);
            row[b] = (float)(x * sin[i] + y * cos[i]);
        }
    }
}

/* The scale of a row that maps its largest number to the largest code. What is not finite has none:
 * it gets codes of 0 and a scale that shows. */
static float choose_scale(float *row, int64_t n, float largest_code) {
    float largest = 0, check = 0;
    for (int64_t i = 0; i < n; i++) {
        largest = fmaxf(largest, fabsf(row[i]));
        check += row[i] * 0; /* NaN where row[i] is not finite */
    }
    const float scale = (largest + check) / largest_code;
    if (isfinite(scale))
        return scale == 0 ? 1.0f : scale;
    for (int64_t i = 0; i < n; i++)
        row[i] = 0;
    return NAN;
}

static void divide_row(void *row_, int wide, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i++)
        if (wide)
            ((double *)row_)[i] /= scale;
        else
            ((float *)row_)[i] /= scale;
}

/* One row of one token, already rotated, to its place in a cache. */
static void store_token(const pf_append_call *call, const pf_real_kernels *kernels, void *row, int64_t n,
                        const pf_tensor *cache, void *target, void *scale_place) {
    const int wide = call->k.dtype == PF_F64;
    const float largest_code = pf_largest_code(cache->dtype);
    if (scale_place) {
        const float scale =
            call->writes_scales ? choose_scale(row, n, largest_code) : pf_float_at(scale_place);
        if (call->writes_scales)
            __builtin_memcpy(scale_place, &scale, sizeof scale);
        if (!(call->writes_scales && isnan(scale)))
            divide_row(row, wide, n, scale);
    }
    if (largest_code > 0)
        pf_store_codes(target, cache->stride_dim, row, n, cache->dtype);
    else
        kernels->store_row(target, cache->stride_dim, row, n, cache->dtype);
}

int pf_driver_append(const pf_append_call *call) {
    const int wide = call->k.dtype == PF_F64;
    const pf_real_kernels *kernels = pf_kernels(call->isa, wide);
    void *row = malloc((size_t)pf_max(call->head_dim, call->head_dim_v) * (wide ? 8 : 4));
    if (!row)
        return PF_STATUS_OUT_OF_MEMORY;
    const pf_tensor *from[2] = {&call->k, &call->v}, *to[2] = {&call->k_cache, &call->v_cache};
    const pf_tensor *scales[2] = {&call->k_scale, &call->v_scale};
    const int64_t num_dims[2] = {call->head_dim, call->head_dim_v};
    for (int64_t t = 0; t < call->num_tokens; t++) {
        if (call->slots[t] < 0)
            continue;
        const int64_t page = call->slots[t] / call->page_size, place = call->slots[t] % call->page_size;
        for (int64_t h = 0; h < call->num_kv_heads; h++)
            for (int side = 0; side < 2; side++) {
                const pf_tensor *x = from[side], *cache = to[side];
                const int64_t source = t * x->stride_token + h * x->stride_head;
                const int64_t target =
                    page * cache->stride_batch + place * cache->stride_token + h * cache->stride_head;
                kernels->load_row(row, (const char *)x->data + source * pf_dtype_size(x->dtype),
                                  x->stride_dim, num_dims[side], x->dtype);
                if (side == 0 && call->cos)
                    rotate_row(row, wide, call->cos + t * call->rotary_pairs,
                               call->sin + t * call->rotary_pairs, call->rotary_pairs, call->interleaved);
                const pf_tensor *scale = scales[side];
                const int64_t place_of_scale =
                    page * scale->stride_batch + place * scale->stride_token + h * scale->stride_head;
                store_token(call, kernels, row, num_dims[side], cache,
                            (char *)cache->data + target * pf_dtype_size(cache->dtype),
                            scale->data ? (float *)scale->data + place_of_scale : 0);
            }
    }
    free(row);
    return PF_STATUS_OK;
}
