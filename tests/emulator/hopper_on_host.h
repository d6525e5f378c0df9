/* Twins of gpu/kernels/hopper.cuh. Part of cuda_on_host.h.
 *
 * Products of a warpgroup are worked out by each warp for its 16 of the 64 rows, and not before a wait asks
 * for them: who reads sums earlier, or writes to a factor before, gets what the hardware might give. */

/* Place in the block's dynamic shared memory. */
static inline uint32_t pf_shared_address(const void *shared) {
    return (uint32_t)((const unsigned char *)shared - pf_emu_shared);
}

/* --- barriers in shared memory: bytes to come in a phase, its parity, its threads, those to come --- */

/* A phase ends when no thread and no byte is left to come. */
static inline void pf_emu_barrier_add(uint64_t *barrier, int64_t bytes, int threads, const char *file,
                                      int line) {
    const uint64_t all = *barrier >> 16 & 0xffff, parity = *barrier >> 32 & 1;
    const int64_t left = (int64_t)(*barrier & 0xffff) - threads;
    const int64_t coming = ((int64_t)*barrier >> 33) + bytes;
    if (all == 0 || left < 0)
        pf_emu_fail(file, line,
                    "a barrier that has not been initialised, or more arrivals than it waits for");
    if (left == 0 && coming == 0)
        *barrier = (parity ^ 1) << 32 | all << 16 | all;
    else
        *barrier = (uint64_t)coming << 33 | parity << 32 | all << 16 | (uint64_t)left;
}

static inline void pf_barrier_init(uint64_t *barrier, uint32_t count) {
    *barrier = (uint64_t)count << 16 | count;
}

static inline void pf_barrier_arrive(uint64_t *barrier, PF_HERE) {
    pf_emu_barrier_add(barrier, 0, 1, file, line);
}

static inline void pf_barrier_expect(uint64_t *barrier, uint32_t bytes, PF_HERE) {
    pf_emu_barrier_add(barrier, bytes, 1, file, line);
}

/* As the emulated driver writes it: address, 4 extents, 3 strides in bytes, rows of a box; elements have two
 * bytes, and boxes 64 of them. */
struct alignas(64) pf_tensor_map {
    uint64_t words[16];
};

static inline void pf_copy_box(void *shared, const pf_tensor_map *map, int dim, int token, int head,
                               int batch, uint64_t *barrier, PF_HERE) {
    const uint64_t *w = map->words;
    unsigned char *to = (unsigned char *)shared;
    if (!pf_emu_is_shared(to, w[8] * 128))
        pf_emu_fail(file, line, "a box beyond shared memory");
    if ((to - pf_emu_shared) % 1024)
        pf_emu_fail(file, line, "a box that does not begin at a multiple of 1024 bytes");
    for (uint64_t row = 0; row < w[8]; row++)
        for (int element = 0; element < 64; element++) {
            uint16_t bits = 0;
            if ((uint64_t)(dim + element) < w[1] && (uint64_t)token + row < w[2] && (uint64_t)head < w[3] &&
                (uint64_t)batch < w[4])
                __builtin_memcpy(&bits,
                                 (const char *)w[0] + (dim + element) * 2 + ((uint64_t)token + row) * w[5] +
                                     (uint64_t)head * w[6] + (uint64_t)batch * w[7],
                                 2);
            __builtin_memcpy(to + row * 128 + ((uint64_t)(element / 8) ^ row % 8) * 16 + element % 8 * 2,
                             &bits, 2);
        }
    pf_emu_barrier_add(barrier, -(int64_t)(w[8] * 128), 0, file, line);
}

/* Stores that a thread has started. They are done when it waits for them, or in random order also at once:
 * what is written over before that, and what nobody waits for, shows in the result. */
struct pf_emu_store {
    const unsigned char *from;
    const uint64_t *words;
    int dim, token, head, batch;
    unsigned thread, block;
};

static pf_emu_store pf_emu_stores[4096];
static int pf_emu_num_stores;

static inline void pf_emu_store_now(const pf_emu_store &s) {
    const uint64_t *w = s.words;
    for (uint64_t row = 0; row < w[8]; row++)
        for (int element = 0; element < 64; element++)
            if ((uint64_t)(s.dim + element) < w[1] && (uint64_t)s.token + row < w[2] &&
                (uint64_t)s.head < w[3] && (uint64_t)s.batch < w[4])
                __builtin_memcpy(
                    (char *)w[0] + (s.dim + element) * 2 + ((uint64_t)s.token + row) * w[5] +
                        (uint64_t)s.head * w[6] + (uint64_t)s.batch * w[7],
                    s.from + row * 128 + ((uint64_t)(element / 8) ^ row % 8) * 16 + element % 8 * 2, 2);
}

/* Those of a thread are done, or those of a whole block forgotten, which is what a failed launch has left. */
static inline void pf_emu_end_stores(bool forgotten) {
    int kept = 0;
    for (int i = 0; i < pf_emu_num_stores; i++) {
        const pf_emu_store one = pf_emu_stores[i];
        if (one.block != blockIdx.x || (!forgotten && one.thread != threadIdx.x))
            pf_emu_stores[kept++] = one;
        else if (!forgotten)
            pf_emu_store_now(one);
    }
    pf_emu_num_stores = kept;
}

static inline void pf_store_box(const void *shared, const pf_tensor_map *map, int dim, int token, int head,
                                int batch, PF_HERE) {
    const unsigned char *from = (const unsigned char *)shared;
    if (!pf_emu_is_shared(from, map->words[8] * 128) || (from - pf_emu_shared) % 1024)
        pf_emu_fail(file, line, "a box that is not at a multiple of 1024 bytes of shared memory");
    if (pf_emu_num_stores == sizeof(pf_emu_stores) / sizeof(*pf_emu_stores))
        pf_emu_fail(file, line, "too many stores under way for the emulator");
    const pf_emu_store one = {from, map->words, dim, token, head, batch, threadIdx.x, blockIdx.x};
    if (pf_emu_comes_at_once())
        pf_emu_store_now(one);
    else
        pf_emu_stores[pf_emu_num_stores++] = one;
}

static inline void pf_stores_commit() {}

static inline void pf_stores_read() {
    pf_emu_end_stores(false);
}

static inline void pf_stores_done() {
    pf_emu_end_stores(false);
}

static inline void pf_fetch_map(const pf_tensor_map *) {}

static inline void pf_cp_async_arrive(uint64_t *barrier, PF_HERE) {
    pf_emu_async_commit();
    pf_emu_async_wait(0);
    pf_barrier_arrive(barrier, file, line);
}

static inline void pf_barrier_wait(uint64_t *barrier, uint32_t parity, PF_HERE) {
    for (int left = 1 << 22; (*(volatile uint64_t *)barrier >> 32 & 1) == parity; left--) {
        if (left == 0)
            pf_emu_fail(file, line, "nobody ends the phase that a barrier waits for");
        pf_emu_yield();
    }
}

static inline void pf_group_sync(int id, int num_threads, PF_HERE) {
    pf_emu_barrier(id, (unsigned)num_threads, PF_EMU_SYNC, false, true, "bar.sync", file, line);
}

static inline void pf_group_arrive(int id, int num_threads, PF_HERE) {
    pf_emu_barrier(id, (unsigned)num_threads, PF_EMU_SYNC, false, false, "bar.arrive", file, line);
}

static inline void pf_fence_async() {}
static inline void pf_fence_barriers() {}
template <int COUNT> static inline void pf_take_registers() {}
template <int COUNT> static inline void pf_give_registers() {}

/* --- products --- */

struct pf_emu_group_product {
    float *d;
    const uint32_t *weights; /* null where both factors lie in shared memory */
    uint64_t a, b;
    int columns;
    bool adds;
};

/* Those of a thread that are under way, in order, and where groups end. */
struct pf_emu_group_queue {
    pf_emu_group_product products[64];
    int num_products, ends[16], num_groups, groups_left;
};

static pf_emu_group_queue pf_emu_group_queues[1024];

static inline pf_emu_group_queue &pf_emu_group_own() {
    return pf_emu_group_queues[threadIdx.x];
}

static inline void pf_wgmma_fence() {}

static inline void pf_wgmma_commit(PF_HERE) {
    auto &queue = pf_emu_group_own();
    if (queue.num_groups == 16)
        pf_emu_fail(file, line, "too many groups of products under way for the emulator");
    queue.ends[queue.num_groups++] = queue.num_products;
}

static inline void pf_emu_group_add(const pf_emu_group_product &product, const char *file, int line) {
    auto &queue = pf_emu_group_own();
    if (queue.num_products == 64)
        pf_emu_fail(file, line, "too many products under way for the emulator");
    queue.products[queue.num_products++] = product;
}

/* A 16-bit element of a factor; places are turned by the bits of the address, as the hardware does it. */
static inline uint16_t pf_emu_factor_at(uint64_t factor, uint32_t offset) {
    const uint32_t linear = (uint32_t)(factor & 0x3fff) * 16 + offset;
    if (factor >> 62 != 1)
        pf_emu_fail(nullptr, 0, "a factor that is not turned in pieces of 128 bytes");
    const unsigned char *place = pf_emu_shared + (linear ^ (linear >> 3 & 0x70));
    if (!pf_emu_is_shared(place, 2))
        pf_emu_fail(nullptr, 0, "a factor beyond shared memory");
    uint16_t bits;
    __builtin_memcpy(&bits, place, 2);
    return bits;
}

static inline uint32_t pf_emu_factor_across(uint64_t factor) {
    return (uint32_t)(factor >> 16 & 0x3fff) * 16;
}

static inline uint32_t pf_emu_factor_step(uint64_t factor) {
    return (uint32_t)(factor >> 32 & 0x3fff) * 16;
}

static inline float pf_emu_group_number(uint16_t bits) {
#if PF_BFLOAT16
    return pf_from_bf16(bits);
#else
    return pf_from_f16(bits);
#endif
}

static inline void pf_emu_group_multiply(void *const (&lanes)[32], int number, int warp) {
    const auto &first = ((pf_emu_group_queue *)lanes[0])->products[number];
    const int columns = first.columns;
    float a[16][16], b[16][256];
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < columns; n++)
            b[k][n] = pf_emu_group_number(
                first.weights
                    ? pf_emu_factor_at(first.b, n / 64 * pf_emu_factor_across(first.b) +
                                                    k / 8 * pf_emu_factor_step(first.b) + k % 8 * 128 +
                                                    n % 64 * 2)
                    : pf_emu_factor_at(first.b, n / 8 * pf_emu_factor_step(first.b) + n % 8 * 128 + k * 2));
    if (first.weights) {
        for (int i = 0; i < 32; i++) {
            const uint32_t *w = ((pf_emu_group_queue *)lanes[i])->products[number].weights;
            for (int r = 0; r < 4; r++)
                for (int half = 0; half < 2; half++)
                    a[i / 4 + r % 2 * 8][r / 2 * 8 + i % 4 * 2 + half] =
                        pf_emu_group_number((uint16_t)(w[r] >> 16 * half));
        }
    } else {
        for (int r = 0; r < 16; r++)
            for (int k = 0; k < 16; k++) {
                const int row = warp % 4 * 16 + r;
                a[r][k] = pf_emu_group_number(
                    pf_emu_factor_at(first.a, row / 8 * pf_emu_factor_step(first.a) + row % 8 * 128 + k * 2));
            }
    }
    for (int i = 0; i < 32; i++) {
        const auto &mine = ((pf_emu_group_queue *)lanes[i])->products[number];
        if (mine.b != first.b || mine.columns != columns || mine.adds != first.adds)
            pf_emu_fail(nullptr, 0, "lanes of a warp multiply by different factors");
        for (int n = 0; n < columns / 8; n++)
            for (int e = 0; e < 4; e++) {
                const int row = i / 4 + e / 2 * 8, column = 8 * n + i % 4 * 2 + e % 2;
                double sum = mine.adds ? mine.d[4 * n + e] : 0;
                for (int k = 0; k < 16; k++)
                    sum += (double)a[row][k] * (double)b[k][column];
                mine.d[4 * n + e] = pf_emu_truncated(sum);
            }
    }
}

static inline void pf_emu_group_finish(void *const (&lanes)[32]) {
    for (int i = 0; i < 32; i++)
        if (!lanes[i])
            pf_emu_fail(nullptr, 0, "wgmma without lane %d", i);
    auto &first = *(pf_emu_group_queue *)lanes[0];
    const int warp = (int)(&first - pf_emu_group_queues) / 32;
    const int groups = first.num_groups - first.groups_left;
    const int products = groups > 0 ? first.ends[groups - 1] : 0;
    for (int number = 0; number < products; number++)
        pf_emu_group_multiply(lanes, number, warp);
    for (void *lane : lanes) {
        auto &queue = *(pf_emu_group_queue *)lane;
        if (groups <= 0)
            continue;
        for (int i = products; i < queue.num_products; i++)
            queue.products[i - products] = queue.products[i];
        queue.num_products -= products;
        for (int i = groups; i < queue.num_groups; i++)
            queue.ends[i - groups] = queue.ends[i] - products;
        queue.num_groups -= groups;
    }
}

template <int N> static inline void pf_wgmma_wait(PF_HERE) {
    auto &queue = pf_emu_group_own();
    queue.groups_left = N;
    pf_emu_collective(pf_emu_group_finish, "wgmma.wait_group", 0xffffffffu, &queue, file, line);
}

template <int COUNT> static inline void pf_wgmma_settled(float (&)[COUNT]) {
    asm volatile("" ::: "memory");
}

template <int COUNT>
static inline void pf_wgmma_shared(float (&d)[COUNT], uint64_t a, uint64_t b, bool adds, PF_HERE) {
    pf_emu_group_add({d, nullptr, a, b, 2 * COUNT, adds}, file, line);
}

template <int COUNT>
static inline void pf_wgmma_weights(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, PF_HERE) {
    pf_emu_group_add({d, a, 0, b, 2 * COUNT, true}, file, line);
}
