/* What needs PTX and only Hopper has (sm_90a): products of a warpgroup, whose second factor lies in shared
 * memory, and barriers there that count arrivals. Beside ptx.cuh; the emulator has its twin too. */
#ifndef PF_HOPPER_CUH
#define PF_HOPPER_CUH

#include "ptx.cuh"

#ifndef PF_EMULATED

/* What the copy unit knows of a tensor, as the driver has written it down. */
struct alignas(64) pf_tensor_map {
    uint64_t words[16];
};

#if PF_BFLOAT16
#define PF_WGMMA_TYPES ".f32.bf16.bf16 "
#else
#define PF_WGMMA_TYPES ".f32.f16.f16 "
#endif

/* --- barriers in shared memory: a phase ends when `count` threads have arrived --- */

PF_DEVICE void pf_barrier_init(uint64_t *barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(pf_shared_address(barrier)), "r"(count)
                 : "memory");
}

/* What has been initialised is a barrier for the copy unit too; before others hear of it. */
PF_DEVICE void pf_fence_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

PF_DEVICE void pf_barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(pf_shared_address(barrier)) : "memory");
}

/* Arrives at a barrier whose phase is to end only when this many bytes have come as well. */
PF_DEVICE void pf_barrier_expect(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(pf_shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

/* Arrives as soon as all copies that this thread has begun have come. */
PF_DEVICE void pf_cp_async_arrive(uint64_t *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(pf_shared_address(barrier))
                 : "memory");
}

/* Starts the copy of a box of a tensor; its bytes are those that `barrier` waits for. Coordinates are those
 * of the first element, innermost first; elements outside of the tensor are zeros. */
PF_DEVICE void pf_copy_box(void *shared, const pf_tensor_map *map, int dim, int token, int head, int batch,
                           uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(pf_shared_address(shared)),
                 "l"(map), "r"(dim), "r"(token), "r"(head), "r"(batch), "r"(pf_shared_address(barrier))
                 : "memory");
}

/* The other way: starts the copy of a box to a tensor; elements outside of it are left out. The thread that
 * began it can wait until what it has begun has been read, or is there. */
PF_DEVICE void pf_store_box(const void *shared, const pf_tensor_map *map, int dim, int token, int head,
                            int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%1, {%2, %3, %4, %5}], [%0];" ::"r"(
            pf_shared_address(shared)),
        "l"(map), "r"(dim), "r"(token), "r"(head), "r"(batch)
        : "memory");
}

PF_DEVICE void pf_stores_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

PF_DEVICE void pf_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

PF_DEVICE void pf_stores_done() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

PF_DEVICE void pf_fetch_map(const pf_tensor_map *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Waits for the end of the phase with this parity: 0 for the first one, 1 for the one before it, which has
 * ended. A build with PF_BOUNDED_WAITS stops with an error where another one would hang. */
PF_DEVICE void pf_barrier_wait(uint64_t *barrier, uint32_t parity) {
    const uint32_t address = pf_shared_address(barrier);
    uint32_t done;
#ifdef PF_BOUNDED_WAITS
    int left = PF_BOUNDED_WAITS;
#endif
    do {
        asm volatile("{\n.reg .pred done;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, done;\n}"
                     : "=r"(done)
                     : "r"(address), "r"(parity)
                     : "memory");
#ifdef PF_BOUNDED_WAITS
        if (!done && --left == 0)
            __trap();
#endif
    } while (!done);
}

/* Barriers by number, of some of a block's warps: those that wait, and those that only arrive. */
PF_DEVICE void pf_group_sync(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

PF_DEVICE void pf_group_arrive(int id, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

/* What has been written to shared memory, as far as this thread knows, is there for products of a warpgroup.
 */
PF_DEVICE void pf_fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Registers of each thread of this warpgroup from here on. */
template <int COUNT> PF_DEVICE void pf_take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> PF_DEVICE void pf_give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* --- products of a warpgroup --- */

/* Before the first product, and after registers of one have been written. */
PF_DEVICE void pf_wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

PF_DEVICE void pf_wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most N groups of products are under way. */
template <int N> PF_DEVICE void pf_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* After a wait: keeps what reads these sums behind it. */
template <int COUNT> PF_DEVICE void pf_wgmma_settled(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

/* Numbers of operands, eight at a time. */
#define PF_REGISTERS_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PF_REGISTERS_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define PF_REGISTERS_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define PF_REGISTERS_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define PF_REGISTERS_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define PF_REGISTERS_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define PF_REGISTERS_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define PF_REGISTERS_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define PF_REGISTERS_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define PF_REGISTERS_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define PF_REGISTERS_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define PF_REGISTERS_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define PF_REGISTERS_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define PF_REGISTERS_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define PF_REGISTERS_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define PF_REGISTERS_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define PF_REGISTERS_32 PF_REGISTERS_0 ", " PF_REGISTERS_1 ", " PF_REGISTERS_2 ", " PF_REGISTERS_3
#define PF_REGISTERS_40 PF_REGISTERS_32 ", " PF_REGISTERS_4
#define PF_REGISTERS_48 PF_REGISTERS_40 ", " PF_REGISTERS_5
#define PF_REGISTERS_64                                                                                      \
    PF_REGISTERS_32 ", " PF_REGISTERS_4 ", " PF_REGISTERS_5 ", " PF_REGISTERS_6 ", " PF_REGISTERS_7
#define PF_REGISTERS_96                                                                                      \
    PF_REGISTERS_64 ", " PF_REGISTERS_8 ", " PF_REGISTERS_9 ", " PF_REGISTERS_10 ", " PF_REGISTERS_11
#define PF_REGISTERS_128                                                                                     \
    PF_REGISTERS_96 ", " PF_REGISTERS_12 ", " PF_REGISTERS_13 ", " PF_REGISTERS_14 ", " PF_REGISTERS_15
#define PF_SUMS_8(i)                                                                                         \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),              \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define PF_SUMS_32(i) PF_SUMS_8(i), PF_SUMS_8(i + 8), PF_SUMS_8(i + 16), PF_SUMS_8(i + 24)
#define PF_SUMS_40(i) PF_SUMS_32(i), PF_SUMS_8(i + 32)
#define PF_SUMS_48(i) PF_SUMS_40(i), PF_SUMS_8(i + 40)
#define PF_SUMS_64(i) PF_SUMS_32(i), PF_SUMS_32(i + 32)
#define PF_SUMS_96(i) PF_SUMS_64(i), PF_SUMS_32(i + 64)
#define PF_SUMS_128(i) PF_SUMS_64(i), PF_SUMS_64(i + 64)

/* d = a b, or d += a b where `adds`: 64 x 16 times 16 x COLUMNS; both factors in shared memory, each row
 * along the 16. Then the same for a in registers, and b with its rows along the columns. REGISTERS is half of
 * COLUMNS, and the texts behind are the operands after those. */
#define PF_WGMMA_OF(COLUMNS, REGISTERS, N0, N1, N2, N3, N4)                                                  \
    PF_DEVICE void pf_wgmma_shared(float (&d)[REGISTERS], uint64_t a, uint64_t b, bool adds) {               \
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " N2 ", 0;\n"                                   \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16" PF_WGMMA_TYPES                       \
                     "{" PF_REGISTERS_##REGISTERS "}, " N0 ", " N1 ", adds, 1, 1, 0, 0;\n}"                  \
                     : PF_SUMS_##REGISTERS(0)                                                                \
                     : "l"(a), "l"(b), "r"((int)adds));                                                      \
    }                                                                                                        \
    PF_DEVICE void pf_wgmma_weights(float (&d)[REGISTERS], const uint32_t (&a)[4], uint64_t b) {             \
        asm volatile("{\n.reg .pred adds;\nsetp.eq.b32 adds, 0, 0;\n"                                        \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16" PF_WGMMA_TYPES                       \
                     "{" PF_REGISTERS_##REGISTERS "}, {" N0 ", " N1 ", " N2 ", " N3 "}, " N4                 \
                                                  ", adds, 1, 1, 1;\n}"                                      \
                     : PF_SUMS_##REGISTERS(0)                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                  \
    }
PF_WGMMA_OF(64, 32, "%32", "%33", "%34", "%35", "%36")
PF_WGMMA_OF(80, 40, "%40", "%41", "%42", "%43", "%44")
PF_WGMMA_OF(96, 48, "%48", "%49", "%50", "%51", "%52")
PF_WGMMA_OF(128, 64, "%64", "%65", "%66", "%67", "%68")
PF_WGMMA_OF(192, 96, "%96", "%97", "%98", "%99", "%100")
PF_WGMMA_OF(256, 128, "%128", "%129", "%130", "%131", "%132")
#undef PF_WGMMA_OF

#endif

/* Where a factor lies in shared memory: in pieces of 8 rows of 128 bytes, turned as `pf_swizzled` does.
 * Pieces along the sum are `step` bytes apart, and those along the columns of a b whose rows lie along them
 * `across`. */
PF_DEVICE uint64_t pf_factor(const void *shared, uint32_t across, uint32_t step) {
    return (uint64_t)1 << 62 | (uint64_t)(step / 16) << 32 |
           (across / 16 << 16 | pf_shared_address(shared) / 16);
}

/* The same some bytes further on. */
PF_DEVICE uint64_t pf_further(uint64_t factor, uint32_t bytes) {
    return factor + bytes / 16;
}

#endif
