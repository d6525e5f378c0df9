/* What needs PTX: conversions, asynchronous copies, the matrix unit. Everything else in these files is
 * plain CUDA C++ without headers, so that NVRTC needs nothing beside it. A build for the processor
 * (PF_EMULATED) brings functions of the same names. */
#ifndef PF_PTX_CUH
#define PF_PTX_CUH

#define PF_DEVICE static __device__ __forceinline__

/* Code for sm_100 and later keeps more numbers in registers: long loops without branches spill there. */
#if __CUDA_ARCH__ >= 1000
#define PF_LONG_LOOPS 0
#else
#define PF_LONG_LOOPS 1
#endif

#ifndef PF_EMULATED

#define PF_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

/* 2^x; denormal results become 0. */
PF_DEVICE float pf_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

PF_DEVICE float pf_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

PF_DEVICE float pf_from_f16(uint16_t bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

PF_DEVICE uint16_t pf_to_f16(float x) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

PF_DEVICE float pf_from_bf16(uint16_t bits) {
    return __uint_as_float((uint32_t)bits << 16);
}

/* Rounds to nearest even by integers: the instruction exists from sm_80 on only. */
PF_DEVICE uint16_t pf_to_bf16(float x) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40); /* NaN stays one */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Two numbers in one register, `low` in the lower half. */
PF_DEVICE uint32_t pf_pack_f16(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return (uint32_t)pf_to_f16(low) | (uint32_t)pf_to_f16(high) << 16;
#endif
}

PF_DEVICE uint32_t pf_pack_bf16(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return (uint32_t)pf_to_bf16(low) | (uint32_t)pf_to_bf16(high) << 16;
#endif
}

/* Two sums of float16. */
PF_DEVICE uint32_t pf_add_f16(uint32_t a, uint32_t b) {
    uint32_t pair;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

PF_DEVICE uint32_t pf_shared_address(const void *shared) {
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* Asynchronous copies of 16 and 4 bytes to shared memory; zeros where not `valid`, and then `global` is not
 * read. Before sm_80 they are ordinary copies. */
PF_DEVICE void pf_cp_async16(void *shared, const void *global, bool valid) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(pf_shared_address(shared)),
                 "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
#else
    *(uint4 *)shared = valid ? *(const uint4 *)global : make_uint4(0, 0, 0, 0);
#endif
}

PF_DEVICE void pf_cp_async4(void *shared, const void *global, bool valid) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(pf_shared_address(shared)), "l"(global),
                 "r"(valid ? 4 : 0)
                 : "memory");
#else
    *(uint32_t *)shared = valid ? *(const uint32_t *)global : 0;
#endif
}

PF_DEVICE void pf_cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits until at most N of this thread's groups are under way. */
template <int N> PF_DEVICE void pf_cp_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

/* Matrices of 8 x 8 16-bit numbers, one row address a lane. */
PF_DEVICE void pf_ldmatrix_x4(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(pf_shared_address(row))
                 : "memory");
}

PF_DEVICE void pf_ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(pf_shared_address(row))
                 : "memory");
}

PF_DEVICE void pf_ldmatrix_x2(uint32_t (&r)[2], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(pf_shared_address(row))
                 : "memory");
}

PF_DEVICE void pf_ldmatrix_x2_trans(uint32_t (&r)[2], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(pf_shared_address(row))
                 : "memory");
}

/* d += a b: 16 x 16 times 16 x 8, sums in float32. */
PF_DEVICE void pf_mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else /* two halves along k */
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[2]), "r"(a[3]), "r"(b[1]));
#endif
}

PF_DEVICE void pf_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif
#endif
