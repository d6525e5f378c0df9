/* Prefill on Hopper: what forward_mma.cu computes, with products of a whole warpgroup whose second factor
 * stays in shared memory (wgmma), and a warpgroup that does nothing but copy.
 *
 * The first warpgroup brings queries, then keys and values tile by tile, as far ahead as there are stages.
 * Each of the others has 64 rows. While it turns scores into weights, the products of the weights before with
 * their values are under way, and so are the other warpgroup's. Stages pass through barriers in shared
 * memory: "full" when they have come, "empty" when all warps have used them.
 *
 * Where there are more blocks of rows than multiprocessors, each of these takes several, and the next one's
 * queries, keys and values come while the one before is finished. Every other round goes backwards, so that
 * who had a long block has a short one next.
 *
 * Copies are those of forward_mma.cu, so pages, packed sequences and strides of any size cost nothing extra,
 * and a call needs no description of its tensors. */
#define PF_WGMMA 1
#define PF_ROW_TILES 1
#include "forward_mma_rows.cuh"
#include "hopper.cuh"

enum {
    PF_GROUPS = PF_WARPS / 4, /* warpgroups that compute */
    PF_TURN_THREADS = 256, /* one warpgroup arrives, one waits */
    PF_PIPE_AT = PF_SHARED_END,
    /* Barriers by number; 0 is that of the whole block. */
    PF_COPIERS = 1,
    PF_TURN, /* and the next, a turn of each warpgroup */
    PF_OWN = PF_TURN + PF_GROUPS, /* and the next, of each warpgroup alone */
};

struct pf_pipe {
    uint64_t queries_full[PF_QUERY_STAGES], queries_empty[PF_QUERY_STAGES];
    uint64_t keys_full[PF_STAGES], keys_empty[PF_STAGES], values_full[PF_STAGES], values_empty[PF_STAGES];
};

PF_DEVICE void pf_prepare(pf_pipe &pipe) {
    if (threadIdx.x != 0)
        return;
    for (int i = 0; i < PF_QUERY_STAGES; i++) {
        pf_barrier_init(&pipe.queries_full[i], 2 * PF_COPY_THREADS); /* copies, and what is written beside them */
        pf_barrier_init(&pipe.queries_empty[i], PF_WARPS);
    }
    for (int i = 0; i < PF_STAGES; i++) {
        pf_barrier_init(&pipe.keys_full[i], PF_COPY_THREADS);
        pf_barrier_init(&pipe.values_full[i], PF_COPY_THREADS);
        pf_barrier_init(&pipe.keys_empty[i], PF_WARPS);
        pf_barrier_init(&pipe.values_empty[i], PF_WARPS);
    }
}

/* A place in a ring of COUNT stages, and the parity of the phase that is waited for there. */
template <int COUNT> struct pf_ring {
    int stage;
    uint32_t parity;
};

template <int COUNT> PF_DEVICE void pf_next(pf_ring<COUNT> &ring) {
    if (++ring.stage == COUNT) {
        ring.stage = 0;
        ring.parity ^= 1;
    }
}

typedef pf_ring<PF_STAGES> pf_tile_ring;
typedef pf_ring<PF_QUERY_STAGES> pf_block_ring;

PF_DEVICE pf_block &pf_block_at(unsigned char *shared, const pf_block_ring &ring) {
    return *(pf_block *)(shared + PF_BLOCK_AT + ring.stage * PF_ASIDE_BYTES);
}

/* --- the warpgroup that copies --- */

/* Where the copies of a warpgroup are. */
struct pf_copier {
    pf_tile_ring keys, values;
    int slot; /* of the places of a tile, of PF_PLACES */
};

PF_DEVICE int64_t *pf_places(unsigned char *shared, int slot) {
    return (int64_t *)(shared + PF_PLACES_AT) + slot * (2 * PF_TILE);
}

PF_DEVICE void pf_copy_keys(const pf_block &block, unsigned char *shared, pf_pipe &pipe, pf_copier &copier,
                            int tile) {
    const int stage = copier.keys.stage;
    pf_barrier_wait(&pipe.keys_empty[stage], copier.keys.parity);
    pf_copy_tile<PF_HEAD_DIM>(shared + PF_K_AT + stage * PF_K_BYTES, block.keys,
                              pf_places(shared, copier.slot), tile * PF_TILE, (int)block.s.mask.num_keys);
    pf_cp_async_arrive(&pipe.keys_full[stage]);
    pf_next(copier.keys);
}

PF_DEVICE void pf_copy_values(const pf_block &block, unsigned char *shared, pf_pipe &pipe, pf_copier &copier,
                              int tile, int slot) {
    const int stage = copier.values.stage;
    pf_barrier_wait(&pipe.values_empty[stage], copier.values.parity);
    pf_copy_tile<PF_HEAD_DIM_V>(shared + PF_V_AT + stage * PF_V_BYTES, block.values,
                                pf_places(shared, slot) + PF_TILE, tile * PF_TILE,
                                (int)block.s.mask.num_keys);
    pf_cp_async_arrive(&pipe.values_full[stage]);
    pf_next(copier.values);
}

/* Goes on to the next side if the tiles of this one are done. */
PF_DEVICE void pf_settle(const pf_block &block, int &side, int &tile) {
    while (side < PF_NUM_SIDES && tile >= block.end[side])
        if (++side < PF_NUM_SIDES)
            tile = block.begin[side];
}

/* Keys of a tile come before the values of the one before, which are needed later. */
PF_DEVICE void pf_copy_tiles(const pf_call &call, const pf_block &block, unsigned char *shared,
                             pf_pipe &pipe, pf_copier &copier) {
    int side = pf_first_side(block), tile = block.begin[side], before = -1, before_slot = 0;
    pf_settle(block, side, tile);
    if (PF_PAGED && side < PF_NUM_SIDES)
        pf_find_places(call, block.s, block.kv_head, pf_places(shared, copier.slot), tile * PF_TILE);
#pragma unroll 1
    while (side < PF_NUM_SIDES) {
        if (PF_PAGED) /* places are there, and those of two tiles before have been used */
            pf_group_sync(PF_COPIERS, PF_COPY_THREADS);
        pf_copy_keys(block, shared, pipe, copier, tile);
        if (before >= 0)
            pf_copy_values(block, shared, pipe, copier, before, before_slot);
        before = tile++;
        before_slot = copier.slot;
        copier.slot = copier.slot + 1 == PF_PLACES ? 0 : copier.slot + 1;
        pf_settle(block, side, tile);
        if (PF_PAGED && side < PF_NUM_SIDES)
            pf_find_places(call, block.s, block.kv_head, pf_places(shared, copier.slot), tile * PF_TILE);
    }
    if (before >= 0)
        pf_copy_values(block, shared, pipe, copier, before, before_slot);
}

/* The next block of rows from a round on that has something to compute; one without rows if there is none. */
PF_DEVICE void pf_find_block(const pf_call &call, uint32_t num_items, pf_block &block, uint32_t &round) {
    for (; round * gridDim.x < num_items; round++) {
        const uint32_t index = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        pf_work work;
        if (index < num_items && pf_get_work(call, index, num_items, work)) {
            block = pf_get_block(call, work);
            round++;
            return;
        }
    }
    block.num_rows = 0;
}

PF_DEVICE void pf_copy_blocks(const pf_call &call, unsigned char *shared, pf_pipe &pipe) {
    const uint32_t num_items = (uint32_t)(call.row_blocks * (PF_PACKED ? call.num_kv_heads : call.num_heads) *
                                          call.max_splits * call.batch);
    pf_block_ring ring = {0, 1}; /* the phase before the first: stages begin empty */
    pf_copier copier = {{0, 1}, {0, 1}, 0};
    uint32_t round = 0; /* of thread 0 */
#pragma unroll 1
    for (;;) {
        pf_block &block = pf_block_at(shared, ring);
        pf_barrier_wait(&pipe.queries_empty[ring.stage], ring.parity);
        if (threadIdx.x == 0)
            pf_find_block(call, num_items, block, round);
        pf_group_sync(PF_COPIERS, PF_COPY_THREADS);
        if (block.num_rows == 0)
            break;
        if (__any_sync(PF_WARP_ALL, pf_finds_bad(call, block.s, threadIdx.x % 32, 32))) {
            pf_store_bad_rows(call, block);
        } else {
            pf_copy_queries(call, block, shared + ring.stage * PF_Q_BYTES);
            pf_cp_async_arrive(&pipe.queries_full[ring.stage]);
            pf_look_at_rows(call, block, shared + ring.stage * PF_ASIDE_BYTES);
            pf_barrier_arrive(&pipe.queries_full[ring.stage]);
            pf_group_sync(PF_COPIERS, PF_COPY_THREADS);
            pf_copy_tiles(call, block, shared, pipe, copier);
            pf_next(ring);
        }
        pf_group_sync(PF_COPIERS, PF_COPY_THREADS); /* all have read the block and the places of its tiles */
    }
    pf_cp_async_arrive(&pipe.queries_full[ring.stage]);
    pf_barrier_arrive(&pipe.queries_full[ring.stage]);
}

/* --- those that compute --- */

/* A warpgroup between two tiles. */
struct pf_group_state {
    pf_warp_state rows;
    uint32_t weights[PF_TILE / 16][4]; /* of the tile before, whose values are still to be added */
    uint64_t q, k, v;                  /* its rows in the first stage, and the first stages */
    int number;
    pf_tile_ring keys, values; /* of the next tile, and of the one before */
};

/* Begins the products of queries and keys. */
PF_DEVICE void pf_begin_scores(float (&score)[PF_TILE / 2], uint64_t q, uint64_t k) {
    pf_wgmma_fence();
#pragma unroll
    for (int step = 0; step < PF_HEAD_DIM / 16; step++) {
        const int panel = step / 4, at = step % 4 * 32;
        pf_wgmma_shared(score, pf_further(q, panel * (PF_ROWS * 128) + at),
                        pf_further(k, panel * (PF_TILE * 128) + at), step > 0);
    }
    pf_wgmma_commit();
}

/* Begins the products of weights and values. */
PF_DEVICE void pf_begin_values(float (&o)[PF_HEAD_DIM_V / 2], const uint32_t (&weights)[PF_TILE / 16][4],
                               uint64_t v) {
    pf_wgmma_fence();
#pragma unroll
    for (int step = 0; step < PF_TILE / 16; step++)
        pf_wgmma_weights(o, weights[step], pf_further(v, step * 2048));
    pf_wgmma_commit();
}

PF_DEVICE void pf_await_values(pf_pipe &pipe, const pf_group_state &group) {
    pf_barrier_wait(&pipe.values_full[group.values.stage], group.values.parity);
    pf_fence_async();
}

/* A warp has used a stage. */
PF_DEVICE void pf_used(uint64_t *empty) {
    if (threadIdx.x % 32 == 0)
        pf_barrier_arrive(empty);
}

/* Turns scores into weights, in their place. */
PF_DEVICE void pf_exponentiate(pf_scores &score, float unit, pf_weights &w) {
#pragma unroll
    for (int n = 0; n < PF_TILE / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float base = w.base[0][e / 2];
            float &x = score[0][n][e];
            x = pf_exp2(PF_FINAL ? (x - base) * unit : fmaf(x, unit, -base));
            w.sum[0][e / 2] += x;
        }
}

/* Weights as the matrix unit takes them. */
PF_DEVICE void pf_pack_weights(const pf_scores &score, uint32_t (&weights)[PF_TILE / 16][4]) {
#pragma unroll
    for (int n = 0; n < PF_TILE / 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            weights[n / 2][n % 2 * 2 + h] = pf_pack(score[0][n][2 * h], score[0][n][2 * h + 1]);
}

/* Begins a tile: its scores, and unless it is the first of all the values of the tile before, while the
 * scores become weights. No branch lies between products and their wait: ptxas would do them one by one. */
template <bool FIRST>
PF_DEVICE void pf_tile(const pf_call &call, const pf_block &block, unsigned char *shared, pf_pipe &pipe,
                       uint64_t q, int side, bool tested, int tile, float unit, pf_group_state &group) {
    pf_scores score;
    float (&flat)[PF_TILE / 2] = *(float (*)[PF_TILE / 2]) & score[0][0][0];
    float (&o)[PF_HEAD_DIM_V / 2] = *(float (*)[PF_HEAD_DIM_V / 2]) & group.rows.o[0][0][0];
    pf_barrier_wait(&pipe.keys_full[group.keys.stage], group.keys.parity);
    pf_fence_async();
    if (PF_TURNS)
        pf_group_sync(PF_TURN + group.number, PF_TURN_THREADS);
    pf_begin_scores(flat, q, pf_further(group.k, group.keys.stage * PF_K_BYTES));
    if (!FIRST) {
        pf_await_values(pipe, group);
        pf_begin_values(o, group.weights, pf_further(group.v, group.values.stage * PF_V_BYTES));
    }
    if (PF_TURNS)
        pf_group_arrive(PF_TURN + (group.number + 1) % PF_GROUPS, PF_TURN_THREADS);
    pf_wgmma_wait<FIRST ? 0 : 1>();
    pf_wgmma_settled(flat);
    pf_used(&pipe.keys_empty[group.keys.stage]);
    pf_next(group.keys);
    pf_weights w;
    pf_finish(call, block, shared, side, tested, tile * PF_TILE, score, w);
    pf_find_tops(group.rows, score, unit, w);
    pf_exponentiate(score, unit, w);
    pf_add_sums(group.rows, w);
    if (!FIRST) {
        pf_wgmma_wait<0>();
        pf_wgmma_settled(o);
        pf_used(&pipe.values_empty[group.values.stage]);
        pf_next(group.values);
        pf_rescale(group.rows, w);
    }
    pf_pack_weights(score, group.weights);
}

/* All tiles of a block. `aside` is what lies beside the block. */
PF_DEVICE void pf_compute_tiles(const pf_call &call, const pf_block &block, unsigned char *aside,
                                pf_pipe &pipe, uint64_t q, float unit, pf_group_state &group) {
    bool begun = false;
    for (int side = pf_first_side(block); side < PF_NUM_SIDES; side++) {
        int tile = block.begin[side];
        if (tile < block.end[side] && !begun) {
            const bool tested = !pf_is_full(block, side, tile);
            pf_tile<true>(call, block, aside, pipe, q, side, tested, tile++, unit, group);
            begun = true;
        }
        while (tile < block.end[side]) {
#pragma unroll 1
            for (; tile < block.end[side] && !pf_is_full(block, side, tile); tile++)
                pf_tile<false>(call, block, aside, pipe, q, side, true, tile, unit, group);
#pragma unroll 1
            for (; tile < block.end[side] && tile < block.full_end[side]; tile++)
                pf_tile<false>(call, block, aside, pipe, q, side, false, tile, unit, group);
        }
    }
    if (!begun)
        return;
    float (&o)[PF_HEAD_DIM_V / 2] = *(float (*)[PF_HEAD_DIM_V / 2]) & group.rows.o[0][0][0];
    pf_await_values(pipe, group);
    pf_begin_values(o, group.weights, pf_further(group.v, group.values.stage * PF_V_BYTES));
    pf_wgmma_wait<0>();
    pf_wgmma_settled(o);
    pf_used(&pipe.values_empty[group.values.stage]);
    pf_next(group.values);
}

PF_DEVICE void pf_compute_blocks(const pf_call &call, unsigned char *shared, pf_pipe &pipe) {
    const int warp = threadIdx.x / 32 - PF_FIRST_WARP;
    const float unit = PF_FINAL ? (float)PF_LOG2_E : (float)(call.scale * PF_LOG2_E);
    pf_group_state group;
    group.number = __shfl_sync(PF_WARP_ALL, warp / 4, 0); /* known to be the same for a warp */
    group.q = pf_factor(shared + group.number * (64 * 128), 16, 1024);
    group.k = pf_factor(shared + PF_K_AT, 16, 1024);
    group.v = pf_factor(shared + PF_V_AT, PF_TILE * 128, 1024);
    group.keys = group.values = {0, 0};
    if (PF_TURNS && group.number == PF_GROUPS - 1) /* the first turn is the first warpgroup's */
        pf_group_arrive(PF_TURN, PF_TURN_THREADS);
    pf_block_ring ring = {0, 0};
#pragma unroll 1
    for (;; pf_next(ring)) {
        pf_barrier_wait(&pipe.queries_full[ring.stage], ring.parity);
        pf_fence_async();
        const pf_block &block = pf_block_at(shared, ring);
        if (block.num_rows == 0)
            break;
        pf_clear_state(group.rows);
        pf_compute_tiles(call, block, shared + ring.stage * PF_ASIDE_BYTES, pipe,
                         pf_further(group.q, ring.stage * PF_Q_BYTES), unit, group);
        pf_group_sync(PF_OWN + group.number, 128); /* finished rows take the place of their queries */
        pf_end_rows(call, block, block.first + warp * PF_WARP_ROWS,
                    shared + ring.stage * PF_Q_BYTES + warp * (PF_WARP_ROWS * 128), group.rows);
        __syncwarp();
        pf_used(&pipe.queries_empty[ring.stage]);
    }
}

extern "C" __global__ void __launch_bounds__(PF_THREADS, 1)
    pf_forward_wgmma(const __grid_constant__ pf_call call) {
    PF_DYNAMIC_SHARED(shared);
    pf_pipe &pipe = *(pf_pipe *)(shared + PF_PIPE_AT);
    static_assert(sizeof(pf_block) <= PF_BLOCK_BYTES, "a block has its place");
    pf_prepare(pipe);
    __syncthreads();
    if (threadIdx.x < PF_COPY_THREADS) {
        pf_give_registers<PF_COPY_REGISTERS>();
        pf_copy_blocks(call, shared, pipe);
    } else {
        pf_take_registers<PF_COMPUTE_REGISTERS>();
        pf_compute_blocks(call, shared, pipe);
    }
}
