/* CUDA C++ for the host compiler: what a kernel source may use without a header of its own, so that the same
 * text runs on the CPU. Included before the source; runtime.cpp schedules the threads, this file says what
 * they can do. Only what NVRTC offers without headers is here, so that a source that leans on more shows.
 *
 * Warp-wide functions: every lane lays its operands on its own stack and waits; the lane that comes last
 * works out the results of all (`complete` of pf_emu_collective) and they go on. */
#ifndef PF_CUDA_ON_HOST_H
#define PF_CUDA_ON_HOST_H

#include <stddef.h>
#include <stdint.h>

#ifndef PF_EMULATED
#define PF_EMULATED 1
#endif

/* --- vector types --- */

#define PF_VECTOR2(name, type, bytes)                                                                        \
    struct alignas(bytes) name##2 {                                                                          \
        type x, y;                                                                                           \
    };                                                                                                       \
    static inline name##2 make_##name##2(type x, type y) {                                                   \
        return {x, y};                                                                                       \
    }
#define PF_VECTOR3(name, type)                                                                               \
    struct name##3 {                                                                                         \
        type x, y, z;                                                                                        \
    };                                                                                                       \
    static inline name##3 make_##name##3(type x, type y, type z) {                                           \
        return {x, y, z};                                                                                    \
    }
#define PF_VECTOR4(name, type, bytes)                                                                        \
    struct alignas(bytes) name##4 {                                                                          \
        type x, y, z, w;                                                                                     \
    };                                                                                                       \
    static inline name##4 make_##name##4(type x, type y, type z, type w) {                                   \
        return {x, y, z, w};                                                                                 \
    }
PF_VECTOR2(char, signed char, 2)
PF_VECTOR2(uchar, unsigned char, 2)
PF_VECTOR2(short, short, 4)
PF_VECTOR2(ushort, unsigned short, 4)
PF_VECTOR2(int, int, 8)
PF_VECTOR2(uint, unsigned, 8)
PF_VECTOR2(float, float, 8)
PF_VECTOR2(double, double, 16)
PF_VECTOR2(longlong, long long, 16)
PF_VECTOR2(ulonglong, unsigned long long, 16)
PF_VECTOR3(int, int)
PF_VECTOR3(uint, unsigned)
PF_VECTOR3(float, float)
PF_VECTOR4(char, signed char, 4)
PF_VECTOR4(uchar, unsigned char, 4)
PF_VECTOR4(short, short, 8)
PF_VECTOR4(ushort, unsigned short, 8)
PF_VECTOR4(int, int, 16)
PF_VECTOR4(uint, unsigned, 16)
PF_VECTOR4(float, float, 16)
PF_VECTOR4(double, double, 16)
#undef PF_VECTOR2
#undef PF_VECTOR3
#undef PF_VECTOR4

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

/* --- the runtime --- */

/* What a source sees of its own thread; the runtime knows more. */
struct pf_emu_thread {
    uint3 index;
    unsigned lane;
};

enum pf_emu_barrier_kind { PF_EMU_SYNC, PF_EMU_COUNT, PF_EMU_AND, PF_EMU_OR };

/* A kernel as its library hands it to the runtime. */
struct pf_emu_kernel {
    const char *name;
    void (*enter)(const void *argument);
    size_t argument_bytes;
    unsigned max_threads;
    char *shared_begin, *shared_end; /* static shared memory */
};

/* Operands of the lanes of a warp; null for a lane that has exited or is not in the mask. */
typedef void pf_emu_complete(void *const (&lanes)[32]);

extern "C" {
extern pf_emu_thread *pf_emu_current;
extern uint3 pf_emu_block_idx;
extern dim3 pf_emu_block_dim, pf_emu_grid_dim;
extern unsigned char *pf_emu_shared;

void pf_emu_collective(pf_emu_complete *complete, const char *name, unsigned mask, void *operands,
                       const char *file, int line);
/* Barrier `id` of `count` threads, 0 = of all that have not exited. Without `wait` only the arrival counts.
 */
int pf_emu_barrier(int id, unsigned count, pf_emu_barrier_kind kind, bool predicate, bool wait,
                   const char *name, const char *file, int line);
unsigned pf_emu_active(void);
void pf_emu_yield(void);
void pf_emu_async(void *shared, const void *global, unsigned bytes, bool valid, const char *file, int line);
void pf_emu_async_commit(void);
void pf_emu_async_wait(unsigned groups_left);
bool pf_emu_comes_at_once(void); /* what has been started, by chance */
[[noreturn]] void pf_emu_fail(const char *file, int line, const char *format, ...);
bool pf_emu_is_shared(const void *address, size_t bytes);

int printf(const char *, ...);
}

#define threadIdx (pf_emu_current->index)
#define blockIdx pf_emu_block_idx
#define blockDim pf_emu_block_dim
#define gridDim pf_emu_grid_dim
#define warpSize 32

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
/* In a section of its own, which the runtime fills before each block. */
#define __shared__ static __attribute__((section("pf_shared")))
#define PF_DYNAMIC_SHARED(name) unsigned char *const name = pf_emu_shared

#define PF_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

#define assert(condition)                                                                                    \
    ((condition) ? (void)0 : pf_emu_fail(__FILE__, __LINE__, "assertion failed: %s", #condition))
static inline void __trap(PF_HERE) {
    pf_emu_fail(file, line, "__trap()");
}

/* --- barriers, fences --- */

static inline void __syncthreads(PF_HERE) {
    pf_emu_barrier(0, 0, PF_EMU_SYNC, false, true, "__syncthreads", file, line);
}
static inline int __syncthreads_count(int predicate, PF_HERE) {
    return pf_emu_barrier(0, 0, PF_EMU_COUNT, predicate != 0, true, "__syncthreads_count", file, line);
}
static inline int __syncthreads_and(int predicate, PF_HERE) {
    return pf_emu_barrier(0, 0, PF_EMU_AND, predicate != 0, true, "__syncthreads_and", file, line);
}
static inline int __syncthreads_or(int predicate, PF_HERE) {
    return pf_emu_barrier(0, 0, PF_EMU_OR, predicate != 0, true, "__syncthreads_or", file, line);
}
static inline void pf_emu_nothing(void *const (&)[32]) {}
static inline void __syncwarp(unsigned mask = 0xffffffffu, PF_HERE) {
    pf_emu_collective(pf_emu_nothing, "__syncwarp", mask, nullptr, file, line);
}
static inline unsigned __activemask() {
    return pf_emu_active();
}
static inline void __nanosleep(unsigned) {
    pf_emu_yield();
}
/* Threads run one at a time, so a fence has only the compiler to hold back. */
static inline void __threadfence() {
    asm volatile("" ::: "memory");
}
static inline void __threadfence_block() {
    asm volatile("" ::: "memory");
}
static inline void __threadfence_system() {
    asm volatile("" ::: "memory");
}

/* --- votes and shuffles --- */

struct pf_emu_vote {
    bool predicate;
    unsigned ballot;
};
static inline void pf_emu_count_votes(void *const (&lanes)[32]) {
    unsigned ballot = 0;
    for (int i = 0; i < 32; i++)
        if (lanes[i] && ((pf_emu_vote *)lanes[i])->predicate)
            ballot |= 1u << i;
    for (void *lane : lanes)
        if (lane)
            ((pf_emu_vote *)lane)->ballot = ballot;
}
static inline unsigned __ballot_sync(unsigned mask, int predicate, PF_HERE) {
    pf_emu_vote vote = {predicate != 0, 0};
    pf_emu_collective(pf_emu_count_votes, "__ballot_sync", mask, &vote, file, line);
    return vote.ballot;
}
static inline int __any_sync(unsigned mask, int predicate, PF_HERE) {
    pf_emu_vote vote = {predicate != 0, 0};
    pf_emu_collective(pf_emu_count_votes, "__any_sync", mask, &vote, file, line);
    return vote.ballot != 0;
}
static inline int __all_sync(unsigned mask, int predicate, PF_HERE) {
    pf_emu_vote vote = {predicate == 0, 0};
    pf_emu_collective(pf_emu_count_votes, "__all_sync", mask, &vote, file, line);
    return vote.ballot == 0;
}

template <class T> struct pf_emu_shuffle {
    T value, result;
    int source; /* below 0: the lane keeps its own */
    const char *file;
    int line;
};
template <class T> static void pf_emu_exchange(void *const (&lanes)[32]) {
    for (void *lane : lanes) {
        if (!lane)
            continue;
        auto &mine = *(pf_emu_shuffle<T> *)lane;
        if (mine.source < 0) {
            mine.result = mine.value;
            continue;
        }
        if (!lanes[mine.source])
            pf_emu_fail(mine.file, mine.line, "a shuffle reads lane %d, which does not take part",
                        mine.source);
        mine.result = ((pf_emu_shuffle<T> *)lanes[mine.source])->value;
    }
}
template <class T>
static inline T pf_emu_shuffled(const char *name, unsigned mask, T value, int source, const char *file,
                                int line) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "only values of 4 or 8 bytes can be shuffled");
    pf_emu_shuffle<T> shuffle = {value, value, source, file, line};
    pf_emu_collective(pf_emu_exchange<T>, name, mask, &shuffle, file, line);
    return shuffle.result;
}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, PF_HERE) {
    const int first = (int)pf_emu_current->lane & -width;
    return pf_emu_shuffled("__shfl_sync", mask, value, first + (source & (width - 1)), file, line);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, PF_HERE) {
    const int lane = (int)pf_emu_current->lane;
    const int source = lane ^ lanes; /* may lie in an earlier group, not in a later one */
    return pf_emu_shuffled("__shfl_xor_sync", mask, value, source < (lane & -width) + width ? source : -1,
                           file, line);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, PF_HERE) {
    const int lane = (int)pf_emu_current->lane, source = lane - (int)delta;
    return pf_emu_shuffled("__shfl_up_sync", mask, value, source >= (lane & -width) ? source : -1, file,
                           line);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, PF_HERE) {
    const int lane = (int)pf_emu_current->lane, source = lane + (int)delta;
    return pf_emu_shuffled("__shfl_down_sync", mask, value, source < (lane & -width) + width ? source : -1,
                           file, line);
}

/* --- atomics: threads run one at a time --- */

template <class T> struct pf_emu_same {
    typedef T type;
};
#define PF_ATOMIC(name, expression)                                                                          \
    template <class T> static inline T name(T *address, typename pf_emu_same<T>::type value) {               \
        const T old = *address;                                                                              \
        *address = expression;                                                                               \
        return old;                                                                                          \
    }
PF_ATOMIC(atomicAdd, old + value)
PF_ATOMIC(atomicSub, old - value)
PF_ATOMIC(atomicExch, value)
PF_ATOMIC(atomicMin, value < old ? value : old)
PF_ATOMIC(atomicMax, value > old ? value : old)
PF_ATOMIC(atomicAnd, old &value)
PF_ATOMIC(atomicOr, old | value)
PF_ATOMIC(atomicXor, old ^ value)
PF_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
PF_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef PF_ATOMIC
template <class T>
static inline T atomicCAS(T *address, typename pf_emu_same<T>::type compare,
                          typename pf_emu_same<T>::type value) {
    const T old = *address;
    if (old == compare)
        *address = value;
    return old;
}

/* --- bits --- */

template <class To, class From> static inline To pf_emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits of another size");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
static inline unsigned __float_as_uint(float x) {
    return pf_emu_bits<unsigned>(x);
}
static inline int __float_as_int(float x) {
    return pf_emu_bits<int>(x);
}
static inline float __uint_as_float(unsigned x) {
    return pf_emu_bits<float>(x);
}
static inline float __int_as_float(int x) {
    return pf_emu_bits<float>(x);
}
static inline long long __double_as_longlong(double x) {
    return pf_emu_bits<long long>(x);
}
static inline double __longlong_as_double(long long x) {
    return pf_emu_bits<double>(x);
}
static inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
static inline int __popcll(unsigned long long x) {
    return __builtin_popcountll(x);
}
static inline int __clz(int x) {
    return x ? __builtin_clz((unsigned)x) : 32;
}
static inline int __clzll(long long x) {
    return x ? __builtin_clzll((unsigned long long)x) : 64;
}
static inline int __ffs(int x) {
    return __builtin_ffs(x);
}
static inline int __ffsll(long long x) {
    return __builtin_ffsll(x);
}
static inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++)
        reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned pick = selector >> 4 * i;
        unsigned byte = (unsigned)(bytes >> 8 * (pick & 7)) & 0xff;
        if (pick & 8) /* its sign, eight times */
            byte = byte & 0x80 ? 0xff : 0;
        result |= byte << 8 * i;
    }
    return result;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((unsigned long long)a * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
#define PF_LOAD(name)                                                                                        \
    template <class T> static inline T name(const T *address) {                                              \
        return *address;                                                                                     \
    }
PF_LOAD(__ldg)
PF_LOAD(__ldcg)
PF_LOAD(__ldca)
PF_LOAD(__ldcs)
PF_LOAD(__ldcv)
PF_LOAD(__ldlu)
#undef PF_LOAD
#define PF_STORE(name)                                                                                       \
    template <class T> static inline void name(T *address, typename pf_emu_same<T>::type value) {            \
        *address = value;                                                                                    \
    }
PF_STORE(__stcg)
PF_STORE(__stcs)
PF_STORE(__stwb)
PF_STORE(__stwt)
#undef PF_STORE

/* --- mathematics: the names that NVRTC knows without a header --- */

#define PF_MATH1(name)                                                                                       \
    extern "C" double name(double);                                                                          \
    extern "C" float name##f(float);                                                                         \
    static inline float name(float x) {                                                                      \
        return __builtin_##name##f(x);                                                                       \
    }
#define PF_MATH2(name)                                                                                       \
    extern "C" double name(double, double);                                                                  \
    extern "C" float name##f(float, float);                                                                  \
    static inline float name(float x, float y) {                                                             \
        return __builtin_##name##f(x, y);                                                                    \
    }
PF_MATH1(acos)
PF_MATH1(asin)
PF_MATH1(atan)
PF_MATH1(cbrt)
PF_MATH1(ceil)
PF_MATH1(cos)
PF_MATH1(cosh)
PF_MATH1(erf)
PF_MATH1(erfc)
PF_MATH1(exp)
PF_MATH1(exp2)
PF_MATH1(expm1)
PF_MATH1(fabs)
PF_MATH1(floor)
PF_MATH1(log)
PF_MATH1(log10)
PF_MATH1(log1p)
PF_MATH1(log2)
PF_MATH1(nearbyint)
PF_MATH1(rint)
PF_MATH1(round)
PF_MATH1(sin)
PF_MATH1(sinh)
PF_MATH1(sqrt)
PF_MATH1(tan)
PF_MATH1(tanh)
PF_MATH1(trunc)
PF_MATH2(atan2)
PF_MATH2(copysign)
PF_MATH2(fdim)
PF_MATH2(fmax)
PF_MATH2(fmin)
PF_MATH2(fmod)
PF_MATH2(hypot)
PF_MATH2(nextafter)
PF_MATH2(pow)
PF_MATH2(remainder)
#undef PF_MATH1
#undef PF_MATH2
extern "C" double fma(double, double, double);
extern "C" float fmaf(float, float, float);
static inline float fma(float x, float y, float z) {
    return __builtin_fmaf(x, y, z);
}
extern "C" double ldexp(double, int);
extern "C" float ldexpf(float, int);
extern "C" void sincosf(float, float *, float *);
extern "C" void sincos(double, double *, double *);
extern "C" int abs(int);
static inline long abs(long x) {
    return x < 0 ? -x : x;
}
static inline long long abs(long long x) {
    return x < 0 ? -x : x;
}
static inline float abs(float x) {
    return __builtin_fabsf(x);
}
static inline double abs(double x) {
    return __builtin_fabs(x);
}
static inline float rsqrtf(float x) {
    return 1.0f / __builtin_sqrtf(x);
}
static inline double rsqrt(double x) {
    return 1.0 / __builtin_sqrt(x);
}
static inline bool isnan(float x) {
    return __builtin_isnan(x);
}
static inline bool isnan(double x) {
    return __builtin_isnan(x);
}
static inline bool isinf(float x) {
    return __builtin_isinf(x);
}
static inline bool isinf(double x) {
    return __builtin_isinf(x);
}
static inline bool isfinite(float x) {
    return __builtin_isfinite(x);
}
static inline bool isfinite(double x) {
    return __builtin_isfinite(x);
}
static inline bool signbit(float x) {
    return __builtin_signbit(x);
}
static inline bool signbit(double x) {
    return __builtin_signbit(x);
}
#define PF_RENAMED(name, arguments, expression)                                                              \
    static inline float name arguments {                                                                     \
        return expression;                                                                                   \
    }
PF_RENAMED(__fmaf_rn, (float x, float y, float z), __builtin_fmaf(x, y, z))
PF_RENAMED(__fadd_rn, (float x, float y), x + y)
PF_RENAMED(__fsub_rn, (float x, float y), x - y)
PF_RENAMED(__fmul_rn, (float x, float y), (x * y))
PF_RENAMED(__fdiv_rn, (float x, float y), x / y)
PF_RENAMED(__fsqrt_rn, (float x), __builtin_sqrtf(x))
PF_RENAMED(__frcp_rn, (float x), 1.0f / x)
PF_RENAMED(__fdividef, (float x, float y), x / y)
PF_RENAMED(__expf, (float x), __builtin_expf(x))
PF_RENAMED(__exp10f, (float x), __builtin_exp10f(x))
PF_RENAMED(__logf, (float x), __builtin_logf(x))
PF_RENAMED(__log2f, (float x), __builtin_log2f(x))
PF_RENAMED(__powf, (float x, float y), __builtin_powf(x, y))
PF_RENAMED(__sinf, (float x), __builtin_sinf(x))
PF_RENAMED(__cosf, (float x), __builtin_cosf(x))
PF_RENAMED(__saturatef, (float x), x >= 0 ? (x < 1 ? x : 1.0f) : 0.0f)
PF_RENAMED(__int2float_rn, (int x), (float)x)
PF_RENAMED(__uint2float_rn, (unsigned x), (float)x)
PF_RENAMED(__double2float_rn, (double x), (float)x)
#undef PF_RENAMED
static inline double __fma_rn(double x, double y, double z) {
    return __builtin_fma(x, y, z);
}
static inline double __dadd_rn(double x, double y) {
    return x + y;
}
static inline double __dmul_rn(double x, double y) {
    return x * y;
}
/* To the nearest, ties to even, as the hardware does it: NaN is 0, what is out of range the nearest end. */
static inline int __float2int_rn(float x) {
    return x != x ? 0 : x >= 0x1p31f ? 0x7fffffff : x < -0x1p31f ? -0x7fffffff - 1 : (int)__builtin_rintf(x);
}
static inline int __float2int_rz(float x) {
    return __float2int_rn(__builtin_truncf(x));
}
static inline int __float2int_rd(float x) {
    return __float2int_rn(__builtin_floorf(x));
}
static inline int __float2int_ru(float x) {
    return __float2int_rn(__builtin_ceilf(x));
}

/* The mixed ones are CUDA's too: signed meets unsigned of the same width as unsigned. */
#define PF_MIN_MAX(result, left, right)                                                                      \
    static inline constexpr result min(left a, right b) {                                                    \
        return (result)a < (result)b ? (result)a : (result)b;                                                \
    }                                                                                                        \
    static inline constexpr result max(left a, right b) {                                                    \
        return (result)a > (result)b ? (result)a : (result)b;                                                \
    }
#define PF_MIN_MAX_OF(type)                                                                                  \
    PF_MIN_MAX(type, type, type)                                                                             \
    PF_MIN_MAX(unsigned type, unsigned type, unsigned type)                                                  \
    PF_MIN_MAX(unsigned type, type, unsigned type)                                                           \
    PF_MIN_MAX(unsigned type, unsigned type, type)
PF_MIN_MAX_OF(int)
PF_MIN_MAX_OF(long)
PF_MIN_MAX_OF(long long)
#undef PF_MIN_MAX_OF
#undef PF_MIN_MAX
#define PF_MIN_MAX(result, left, right, suffix)                                                              \
    static inline result min(left a, right b) {                                                              \
        return __builtin_fmin##suffix(a, b);                                                                 \
    }                                                                                                        \
    static inline result max(left a, right b) {                                                              \
        return __builtin_fmax##suffix(a, b);                                                                 \
    }
PF_MIN_MAX(float, float, float, f)
PF_MIN_MAX(double, double, double, )
PF_MIN_MAX(double, float, double, )
PF_MIN_MAX(double, double, float, )
#undef PF_MIN_MAX

#include "ptx_on_host.h"
#include "hopper_on_host.h"

/* --- what the library of a kernel offers to the runtime --- */

extern "C" {
extern char __start_pf_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_pf_shared[] __attribute__((weak, visibility("hidden")));
}

template <auto kernel> struct pf_emu_entry;
template <class Argument, void (*kernel)(Argument)> struct pf_emu_entry<kernel> {
    static constexpr size_t bytes = sizeof(Argument);
    static void enter(const void *argument) { kernel(*(const Argument *)argument); }
};

template <class... Others> constexpr unsigned pf_emu_first(unsigned first, Others...) {
    return first;
}

/* With what stands in its __launch_bounds__. */
#define PF_EMULATED_KERNEL(kernel, ...)                                                                      \
    extern "C" pf_emu_kernel pf_emulated_kernel(void) {                                                      \
        typedef pf_emu_entry<kernel> entry;                                                                  \
        return {#kernel,           entry::enter,    entry::bytes, pf_emu_first(__VA_ARGS__),                 \
                __start_pf_shared, __stop_pf_shared};                                                        \
    }

#endif
