/* Prefill on Hopper: what forward_mma.cu computes, with products of a whole warpgroup whose second factor
 * stays in shared memory (wgmma), and a warpgroup that does nothing but copy.
 *
 * The first warpgroup brings queries, then keys and values tile by tile, as far ahead as there are stages.
 * Each of the others has 64 rows. While it turns scores into weights, the products of the weights before with
 * their values are under way, and so are the other warpgroup's. Stages pass through barriers in shared
 * memory: "full" when they have come, "empty" when all warps have used them.
 *
 * Copies are those of forward_mma.cu, so pages, packed sequences and strides of any size cost nothing extra,
 * and a call needs no description of its tensors. */
#define PF_WGMMA 1
#define PF_ROW_TILES 1
#include "forward_mma_rows.cuh"
#include "hopper.cuh"

enum {
    PF_GROUPS = PF_WARPS / 4, /* warpgroups that compute */
    PF_COMPUTE_THREADS = 32 * PF_WARPS,
    PF_PIPE_BYTES = 128,
    PF_PIPE_AT = PF_BLOCK_AT + PF_BLOCK_BYTES - PF_PIPE_BYTES,
    /* Barriers by number; 0 is that of the whole block. */
    PF_TURN = 1, /* and the next, a turn of each warpgroup */
    PF_COPIERS = PF_TURN + PF_GROUPS,
    PF_COMPUTERS,
};

struct pf_pipe {
    uint64_t queries;
    uint64_t keys_full[PF_STAGES], keys_empty[PF_STAGES], values_full[PF_STAGES], values_empty[PF_STAGES];
};

PF_DEVICE void pf_prepare(pf_pipe &pipe) {
    if (threadIdx.x != 0)
        return;
    pf_barrier_init(&pipe.queries, PF_COPY_THREADS);
    for (int i = 0; i < PF_STAGES; i++) {
        pf_barrier_init(&pipe.keys_full[i], PF_COPY_THREADS);
        pf_barrier_init(&pipe.values_full[i], PF_COPY_THREADS);
        pf_barrier_init(&pipe.keys_empty[i], PF_WARPS);
        pf_barrier_init(&pipe.values_empty[i], PF_WARPS);
    }
}

/* --- the warpgroup that copies --- */

/* Ends a group of copies, and says that those of the group before have come. */
PF_DEVICE void pf_copied(uint64_t *&waiting, uint64_t *full) {
    pf_cp_async_commit();
    if (waiting) {
        pf_cp_async_wait<1>();
        pf_fence_async();
        pf_barrier_arrive(waiting);
    }
    waiting = full;
}

PF_DEVICE void pf_copy_tiles(const pf_call &call, const pf_block &block, unsigned char *shared,
                             pf_pipe &pipe) {
    const int num_keys = (int)block.s.mask.num_keys;
    uint64_t *waiting = 0;
    pf_copy_queries(call, block, shared);
    pf_copied(waiting, &pipe.queries);
    int stage = 0;
    uint32_t parity = 1; /* the phase before the first: stages begin empty */
    for (int side = pf_first_side(block); side < PF_NUM_SIDES; side++) {
        const int end = block.end[side];
        if (block.begin[side] < end)
            pf_look_up(call, block, shared, block.begin[side]);
#pragma unroll 1
        for (int tile = block.begin[side]; tile < end; tile++) {
            if (PF_PAGED) /* places have been written, those before have been used */
                pf_group_sync(PF_COPIERS, PF_COPY_THREADS);
            const int64_t *places = (const int64_t *)(shared + PF_PLACES_AT) + tile % 2 * (2 * PF_TILE);
            pf_barrier_wait(&pipe.keys_empty[stage], parity);
            pf_copy_tile<PF_HEAD_DIM>(shared + PF_K_AT + stage * PF_K_BYTES, block.keys, places,
                                      tile * PF_TILE, num_keys);
            pf_copied(waiting, &pipe.keys_full[stage]);
            pf_barrier_wait(&pipe.values_empty[stage], parity);
            pf_copy_tile<PF_HEAD_DIM_V>(shared + PF_V_AT + stage * PF_V_BYTES, block.values, places + PF_TILE,
                                        tile * PF_TILE, num_keys);
            pf_copied(waiting, &pipe.values_full[stage]);
            pf_look_up(call, block, shared, tile + 1);
            if (++stage == PF_STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        if (PF_PAGED) /* the next side begins with places of its own */
            pf_group_sync(PF_COPIERS, PF_COPY_THREADS);
    }
    pf_cp_async_wait<0>();
    pf_fence_async();
    pf_barrier_arrive(waiting);
}

/* --- those that compute --- */

/* A warpgroup between two tiles. */
struct pf_group_state {
    pf_warp_state rows;
    uint32_t weights[PF_TILE / 16][4]; /* of the tile before, whose values are still to be added */
    uint64_t q, k, v;                  /* its rows, and the first stages */
    int number;
    int stage, before;              /* of the next tile, and of the one before */
    uint32_t parity, before_parity; /* of the phases in which these are full */
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
                       int side, bool tested, int tile, float unit, pf_group_state &group) {
    pf_scores score;
    float (&flat)[PF_TILE / 2] = *(float (*)[PF_TILE / 2]) & score[0][0][0];
    float (&o)[PF_HEAD_DIM_V / 2] = *(float (*)[PF_HEAD_DIM_V / 2]) & group.rows.o[0][0][0];
    pf_barrier_wait(&pipe.keys_full[group.stage], group.parity);
    if (PF_TURNS)
        pf_group_sync(PF_TURN + group.number, PF_COMPUTE_THREADS);
    pf_begin_scores(flat, group.q, pf_further(group.k, group.stage * PF_K_BYTES));
    if (!FIRST) {
        pf_barrier_wait(&pipe.values_full[group.before], group.before_parity);
        pf_begin_values(o, group.weights, pf_further(group.v, group.before * PF_V_BYTES));
    }
    if (PF_TURNS)
        pf_group_arrive(PF_TURN + (group.number + 1) % PF_GROUPS, PF_COMPUTE_THREADS);
    pf_wgmma_wait<FIRST ? 0 : 1>();
    pf_wgmma_settled(flat);
    pf_used(&pipe.keys_empty[group.stage]);
    pf_weights w;
    pf_finish(call, block, shared, side, tested, tile * PF_TILE, score, w);
    pf_find_tops(group.rows, score, unit, w);
    pf_exponentiate(score, unit, w);
    pf_add_sums(group.rows, w);
    if (!FIRST) {
        pf_wgmma_wait<0>();
        pf_wgmma_settled(o);
        pf_used(&pipe.values_empty[group.before]);
        pf_rescale(group.rows, w);
    }
    pf_pack_weights(score, group.weights);
    group.before = group.stage;
    group.before_parity = group.parity;
    if (++group.stage == PF_STAGES) {
        group.stage = 0;
        group.parity ^= 1;
    }
}

PF_DEVICE void pf_compute_rows(const pf_call &call, const pf_block &block, unsigned char *shared,
                               pf_pipe &pipe) {
    const int warp = threadIdx.x / 32 - PF_FIRST_WARP;
    const float unit = PF_FINAL ? (float)PF_LOG2_E : (float)(call.scale * PF_LOG2_E);
    pf_group_state group;
    pf_clear_state(group.rows);
    group.number = __shfl_sync(PF_WARP_ALL, warp / 4, 0); /* known to be the same for a warp */
    group.q = pf_factor(shared + group.number * (64 * 128), 16, 1024);
    group.k = pf_factor(shared + PF_K_AT, 16, 1024);
    group.v = pf_factor(shared + PF_V_AT, PF_TILE * 128, 1024);
    group.stage = group.before = 0;
    group.parity = group.before_parity = 0;
    bool begun = false;
    pf_barrier_wait(&pipe.queries, 0);
    if (PF_TURNS && group.number == PF_GROUPS - 1) /* the first turn is the first warpgroup's */
        pf_group_arrive(PF_TURN, PF_COMPUTE_THREADS);
    for (int side = pf_first_side(block); side < PF_NUM_SIDES; side++) {
        int tile = block.begin[side];
        if (tile < block.end[side] && !begun) {
            pf_tile<true>(call, block, shared, pipe, side, true, tile++, unit, group);
            begun = true;
        }
        while (tile < block.end[side]) {
#pragma unroll 1
            for (; tile < block.end[side] && !pf_is_full(block, side, tile); tile++)
                pf_tile<false>(call, block, shared, pipe, side, true, tile, unit, group);
#pragma unroll 1
            for (; tile < block.end[side] && tile < block.full_end[side]; tile++)
                pf_tile<false>(call, block, shared, pipe, side, false, tile, unit, group);
        }
    }
    if (begun) {
        float (&o)[PF_HEAD_DIM_V / 2] = *(float (*)[PF_HEAD_DIM_V / 2]) & group.rows.o[0][0][0];
        pf_barrier_wait(&pipe.values_full[group.before], group.before_parity);
        pf_begin_values(o, group.weights, pf_further(group.v, group.before * PF_V_BYTES));
        pf_wgmma_wait<0>();
        pf_wgmma_settled(o);
    }
    pf_group_sync(PF_COMPUTERS, PF_COMPUTE_THREADS); /* rows take the place of queries */
    pf_end_rows(call, block, block.first + warp * PF_WARP_ROWS,
                shared + warp * (PF_WARP_ROWS * PF_HEAD_DIM_V * 2), group.rows);
}

extern "C" __global__ void __launch_bounds__(PF_THREADS, 1)
    pf_forward_wgmma(const __grid_constant__ pf_call call) {
    PF_DYNAMIC_SHARED(shared);
    pf_block &block = *(pf_block *)(shared + PF_BLOCK_AT);
    pf_pipe &pipe = *(pf_pipe *)(shared + PF_PIPE_AT);
    static_assert(sizeof(pf_block) <= PF_BLOCK_BYTES - PF_PIPE_BYTES, "a block has its place");
    static_assert(sizeof(pf_pipe) <= PF_PIPE_BYTES, "so have its barriers");
    if (!pf_begin(call, block))
        return;
    pf_look_at_rows(call, block, shared);
    pf_prepare(pipe);
    __syncthreads();
    if (threadIdx.x < PF_COPY_THREADS) {
        pf_give_registers<PF_COPY_REGISTERS>();
        pf_copy_tiles(call, block, shared, pipe);
    } else {
        pf_take_registers<PF_COMPUTE_REGISTERS>();
        pf_compute_rows(call, block, shared, pipe);
    }
}
