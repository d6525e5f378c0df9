/* Twins of gpu/kernels/ptx.cuh: the same functions without PTX. Part of cuda_on_host.h. */

/* --- arithmetic --- */

static inline float pf_emu_flushed(float x) {
    return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x;
}

/* ex2.approx.ftz.f32 */
static inline float pf_exp2(float x) {
    return pf_emu_flushed(__builtin_exp2f(x));
}

/* lg2.approx.ftz.f32 */
static inline float pf_log2(float x) {
    return __builtin_log2f(pf_emu_flushed(x));
}

/* --- 16-bit floats --- */

static inline float pf_from_f16(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    /* The exponent is too small by 112: a multiplication puts subnormal ones right as well. */
    float x = pf_emu_bits<float>((uint32_t)(bits & 0x7fff) << 13) * 0x1p112f;
    uint32_t y = pf_emu_bits<uint32_t>(x);
    if ((bits & 0x7c00) == 0x7c00)
        y |= 0x7f800000;
    return pf_emu_bits<float>(y | sign);
}

static inline uint16_t pf_to_f16(float x) {
    const uint32_t bits = pf_emu_bits<uint32_t>(x), size = bits & 0x7fffffff;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (size > 0x7f800000) /* NaN: its highest bits, quiet */
        return (uint16_t)(sign | 0x7e00 | (size >> 13 & 0x3ff));
    if (size >= 0x477ff000) /* 65520 and more round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (size < 0x38800000) /* subnormal: adding 0.5 rounds at 2^-24 */
        return (uint16_t)(sign | (pf_emu_bits<uint32_t>(pf_emu_bits<float>(size) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

static inline float pf_from_bf16(uint16_t bits) {
    return pf_emu_bits<float>((uint32_t)bits << 16);
}

static inline uint16_t pf_to_bf16(float x) {
    const uint32_t bits = pf_emu_bits<uint32_t>(x);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline uint32_t pf_pack_f16(float lo, float hi) {
    return (uint32_t)pf_to_f16(hi) << 16 | pf_to_f16(lo);
}

static inline uint32_t pf_pack_bf16(float lo, float hi) {
    return (uint32_t)pf_to_bf16(hi) << 16 | pf_to_bf16(lo);
}

static inline uint32_t pf_add_f16(uint32_t a, uint32_t b) {
    return pf_pack_f16(pf_from_f16((uint16_t)a) + pf_from_f16((uint16_t)b),
                       pf_from_f16((uint16_t)(a >> 16)) + pf_from_f16((uint16_t)(b >> 16)));
}

/* --- asynchronous copies: data lands at the wait at the latest, and by default not before --- */

static inline void pf_cp_async16(void *shared, const void *global, bool valid, PF_HERE) {
    pf_emu_async(shared, global, 16, valid, file, line);
}

static inline void pf_cp_async4(void *shared, const void *global, bool valid, PF_HERE) {
    pf_emu_async(shared, global, 4, valid, file, line);
}

static inline void pf_cp_async_commit() {
    pf_emu_async_commit();
}

template <int N> static inline void pf_cp_async_wait() {
    pf_emu_async_wait(N);
}

/* --- matrices --- */

struct pf_emu_matrix_load {
    const void *row;
    uint32_t *registers;
    const char *file;
    int line;
};

/* Lane i of each eight names a row of eight 16-bit elements; lane (4 r + c) gets elements 2c and 2c + 1 of
 * row r, or of column r. */
template <int COUNT, bool TRANSPOSED> static void pf_emu_load_matrices(void *const (&lanes)[32]) {
    for (int i = 0; i < 32; i++) {
        if (!lanes[i])
            pf_emu_fail(nullptr, 0, "ldmatrix without lane %d", i);
        const auto &load = *(pf_emu_matrix_load *)lanes[i];
        if (i < 8 * COUNT && ((uintptr_t)load.row % 16 != 0 || !pf_emu_is_shared(load.row, 16)))
            pf_emu_fail(load.file, load.line,
                        "ldmatrix of lane %d: row at %p, not 16 aligned bytes of shared memory", i, load.row);
    }
    for (int matrix = 0; matrix < COUNT; matrix++) {
        uint16_t element[8][8];
        for (int row = 0; row < 8; row++)
            __builtin_memcpy(element[row], ((pf_emu_matrix_load *)lanes[8 * matrix + row])->row, 16);
        for (int i = 0; i < 32; i++) {
            const int r = i / 4, c = i % 4 * 2;
            const uint16_t lo = TRANSPOSED ? element[c][r] : element[r][c];
            const uint16_t hi = TRANSPOSED ? element[c + 1][r] : element[r][c + 1];
            ((pf_emu_matrix_load *)lanes[i])->registers[matrix] = (uint32_t)hi << 16 | lo;
        }
    }
}

#define PF_LDMATRIX(name, count, transposed)                                                                 \
    static inline void name(uint32_t (&registers)[count], const void *shared_row, PF_HERE) {                 \
        pf_emu_matrix_load load = {shared_row, registers, file, line};                                       \
        pf_emu_collective(pf_emu_load_matrices<count, transposed>, "ldmatrix", 0xffffffffu, &load, file,     \
                          line);                                                                             \
    }
PF_LDMATRIX(pf_ldmatrix_x1, 1, false)
PF_LDMATRIX(pf_ldmatrix_x2, 2, false)
PF_LDMATRIX(pf_ldmatrix_x4, 4, false)
PF_LDMATRIX(pf_ldmatrix_x1_trans, 1, true)
PF_LDMATRIX(pf_ldmatrix_x2_trans, 2, true)
PF_LDMATRIX(pf_ldmatrix_x4_trans, 4, true)
#undef PF_LDMATRIX

struct pf_emu_product {
    float *d;
    const uint32_t *a, *b;
};

/* To float32 towards zero, as the matrix units end a step. */
static inline float pf_emu_truncated(double x) {
    const float nearest = (float)x;
    if (__builtin_fabs((double)nearest) <= __builtin_fabs(x) || !(__builtin_fabs(x) < 0x1p128))
        return nearest;
    return pf_emu_bits<float>(pf_emu_bits<uint32_t>(nearest) - 1);
}

/* d (16 x 8) += a (16 x K) b (K x 8), in the layout of PTX: lane 4 g + t holds columns 2t and 2t + 1 of rows
 * g and g + 8 of a and d, rows 2t and 2t + 1 of column g of b; with K = 16 the second half of its registers
 * the same eight further on. Eight products are added at a time, and the sum cut off after 24 bits. */
template <int K, bool BF16> static void pf_emu_multiply(void *const (&lanes)[32]) {
    float a[16][K], b[8][K];
    const auto element = [](uint32_t pair, int half) {
        const uint16_t bits = (uint16_t)(pair >> 16 * half);
        return BF16 ? pf_from_bf16(bits) : pf_from_f16(bits);
    };
    for (int i = 0; i < 32; i++) {
        if (!lanes[i])
            pf_emu_fail(nullptr, 0, "mma without lane %d", i);
        const auto &mine = *(pf_emu_product *)lanes[i];
        const int g = i / 4, t = i % 4 * 2;
        for (int eight = 0; eight < K / 8; eight++)
            for (int half = 0; half < 2; half++) {
                a[g][8 * eight + t + half] = element(mine.a[2 * eight], half);
                a[g + 8][8 * eight + t + half] = element(mine.a[2 * eight + 1], half);
                b[g][8 * eight + t + half] = element(mine.b[eight], half);
            }
    }
    for (int i = 0; i < 32; i++)
        for (int j = 0; j < 4; j++) {
            const int row = i / 4 + j / 2 * 8, column = i % 4 * 2 + j % 2;
            float &d = ((pf_emu_product *)lanes[i])->d[j];
            for (int eight = 0; eight < K / 8; eight++) {
                double sum = d;
                for (int k = 8 * eight; k < 8 * eight + 8; k++)
                    sum += (double)a[row][k] * (double)b[column][k];
                d = pf_emu_truncated(sum);
            }
        }
}

#define PF_MMA(name, k, bf16)                                                                                \
    static inline void name(float (&d)[4], const uint32_t (&a)[(k) / 4], const uint32_t (&b)[(k) / 8],       \
                            PF_HERE) {                                                                       \
        pf_emu_product product = {d, a, b};                                                                  \
        pf_emu_collective(pf_emu_multiply<k, bf16>, #name, 0xffffffffu, &product, file, line);               \
    }
PF_MMA(pf_mma_f16, 16, false)
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
PF_MMA(pf_mma_bf16, 16, true)
#endif
PF_MMA(pf_mma_f16_k8, 8, false)
#undef PF_MMA
