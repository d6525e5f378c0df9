/* How one source serves two element types: it is included once with PF_REAL f32 and once with
 * PF_REAL f64, and V(name) is f32_name or f64_name. Also the spellings that make constant
 * arguments and full unrolling reliable, on which registers instead of memory depend. */
#ifndef PF_KERNELS_REAL_H
#define PF_KERNELS_REAL_H

#define PF_PASTE_(a, b) a##_##b
#define PF_PASTE(a, b) PF_PASTE_(a, b)
#define V(name) PF_PASTE(PF_REAL, name)

#define PF_INLINE static inline __attribute__((always_inline))

/* gcc keeps an array of vectors in registers only if every loop over it is unrolled completely. */
#ifdef __clang__
#define PF_UNROLL _Pragma("clang loop unroll(full)")
#define PF_UNROLL_4 _Pragma("clang loop unroll_count(4)")
#else
#define PF_UNROLL _Pragma("GCC unroll 32")
#define PF_UNROLL_4 _Pragma("GCC unroll 4")
#endif

/* What is used several times is read once: gcc would rather read it as an operand of each use. */
#ifndef PF_IN_REGISTER
#define PF_IN_REGISTER(x) (void)(x)
#endif

#endif
