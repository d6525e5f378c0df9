/* Prefill on Hopper: what forward_mma.cu computes, with products of a whole warpgroup whose second factor
 * stays in shared memory (wgmma), and a warpgroup that does nothing but copy.
 *
 * Warps of the first warpgroup find blocks of rows, bring queries, and keys and values tile by tile, as far
 * ahead as there are stages. Each of the other warpgroups has 64 rows. While it turns scores into weights,
 * the products of the weights before with their values are under way, and so are the other warpgroup's.
 * Stages pass through barriers in shared memory: "full" when they have come, "empty" when all warps have used
 * them.
 *
 * Where there are more blocks of rows than multiprocessors, each of these takes several, and the next one's
 * queries, keys and values come while the one before is finished.
 *
 * Whole tiles of keys and values come by the copy unit (TMA), by maps of the tensors that the host makes
 * (PF_MAPPED). Pages, the last tile of a sequence and tensors that no map describes come by copies of 16
 * bytes a thread; those, and only those, need a fence before products read what they have brought. */
#define PF_WGMMA 1
#define PF_ROW_TILES 1
#include "forward_wgmma_copy.cuh"

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

PF_DEVICE void pf_await_values(pf_pipe &pipe, const pf_group_state &group, bool fence) {
    pf_barrier_wait(&pipe.values_full[group.values.stage], group.values.parity);
    if (fence)
        pf_fence_async();
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

/* Scores of a tile become weights; sums that they are to be added to are not touched. */
PF_DEVICE void pf_weigh_tile(const pf_call &call, const pf_block &block, unsigned char *aside, int side,
                             bool tested, int tile, float unit, pf_group_state &group, pf_scores &score,
                             pf_weights &w) {
    pf_finish(call, block, aside, side, tested, tile * PF_TILE, score, w);
    pf_find_tops(group.rows, score, unit, w);
    pf_exponentiate(score, unit, w);
    pf_add_sums(group.rows, w);
}

PF_DEVICE void pf_await_keys(pf_pipe &pipe, const pf_group_state &group, bool fence) {
    pf_barrier_wait(&pipe.keys_full[group.keys.stage], group.keys.parity);
    if (fence)
        pf_fence_async();
}

PF_DEVICE void pf_await_turn(const pf_group_state &group) {
    if (PF_TURNS)
        pf_group_sync(PF_TURN + group.number, PF_TURN_THREADS);
}

PF_DEVICE void pf_give_turn(const pf_group_state &group) {
    if (PF_TURNS)
        pf_group_arrive(PF_TURN + (group.number + 1) % PF_GROUPS, PF_TURN_THREADS);
}

PF_DEVICE float (&pf_flat(pf_scores &score))
    [PF_TILE / 2] { return *(float (*)[PF_TILE / 2]) & score[0][0][0]; }

PF_DEVICE float (&pf_sums(pf_group_state &group))
    [PF_HEAD_DIM_V / 2] { return *(float (*)[PF_HEAD_DIM_V / 2]) & group.rows.o[0][0][0]; }

PF_DEVICE void pf_begin_own_scores(pf_scores &score, uint64_t q, const pf_group_state &group) {
    pf_begin_scores(pf_flat(score), q, pf_further(group.k, group.keys.stage * PF_K_BYTES));
}

PF_DEVICE void pf_begin_own_values(pf_group_state &group) {
    pf_begin_values(pf_sums(group), group.weights, pf_further(group.v, group.values.stage * PF_V_BYTES));
}

PF_DEVICE void pf_end_keys(pf_pipe &pipe, pf_group_state &group) {
    pf_used(&pipe.keys_empty[group.keys.stage]);
    pf_next(group.keys);
}

PF_DEVICE void pf_end_values(pf_pipe &pipe, pf_group_state &group) {
    pf_wgmma_settled(pf_sums(group));
    pf_used(&pipe.values_empty[group.values.stage]);
    pf_next(group.values);
}

/* A tile that is not the first: its scores and the values of the tile before are under way together, the
 * latter still while scores become weights. No branch lies between products and their wait: ptxas would do
 * them one by one. */
PF_DEVICE void pf_tile(const pf_call &call, const pf_block &block, unsigned char *aside, pf_pipe &pipe,
                       uint64_t q, int side, bool tested, int tile, float unit, pf_group_state &group) {
    pf_scores score;
    pf_weights w;
    pf_await_keys(pipe, group, !PF_MAPPED || tested); /* a tile that needs no test is whole */
    pf_await_turn(group);
    pf_begin_own_scores(score, q, group);
    pf_await_values(pipe, group, !PF_MAPPED); /* the last tile alone may not be whole */
    pf_begin_own_values(group);
    pf_give_turn(group);
    pf_wgmma_wait<1>();
    pf_wgmma_settled(pf_flat(score));
    pf_end_keys(pipe, group);
    pf_weigh_tile(call, block, aside, side, tested, tile, unit, group, score, w);
    pf_wgmma_wait<0>();
    pf_end_values(pipe, group);
    pf_rescale(group.rows, w);
    pf_pack_weights(score, group.weights);
}

/* A block that has ended: rows of it that have to be computed once more, and its place, which is free when
 * its rows have been read. */
struct pf_redo {
    int64_t sequence, head, first;
    uint32_t rows;
    int stage;
};

/* The place of the block that has ended may be used again. */
PF_DEVICE void pf_free_block(pf_pipe &pipe, const pf_redo &redo) {
    if (PF_STORED && redo.stage >= 0) {
        if (threadIdx.x % 32 == 0)
            pf_stores_read();
        pf_barrier_arrive(&pipe.blocks_empty[redo.stage]);
    }
}

/* The tiles of a block, of whose first one the scores are under way; the values of the last one are left. */
PF_DEVICE void pf_compute_tiles(const pf_call &call, const pf_block &block, unsigned char *aside,
                                pf_pipe &pipe, uint64_t q, float unit, pf_group_state &group,
                                const pf_redo &before, pf_scores &score) {
    int side = pf_first_side(block);
    while (block.begin[side] >= block.end[side])
        side++;
    int tile = block.begin[side];
    pf_weights w;
    pf_weigh_tile(call, block, aside, side, !pf_is_full(block, side, tile), tile, unit, group, score, w);
    pf_pack_weights(score, group.weights);
    pf_free_block(pipe, before);
    tile++;
    for (;;) {
        while (tile < block.end[side]) {
#pragma unroll 1
            for (; tile < block.end[side] && !pf_is_full(block, side, tile); tile++)
                pf_tile(call, block, aside, pipe, q, side, true, tile, unit, group);
#pragma unroll 1
            for (; tile < block.end[side] && tile < block.full_end[side]; tile++)
                pf_tile(call, block, aside, pipe, q, side, false, tile, unit, group);
        }
        if (++side == PF_NUM_SIDES)
            break;
        tile = block.begin[side];
    }
}

/* Lets the copy unit write a warp's staged rows. */
PF_DEVICE void pf_write_box(const pf_tensor_map *map, const pf_block &block, int64_t first,
                            const unsigned char *staged) {
    pf_fence_async();
    __syncwarp();
    if (threadIdx.x % 32 != 0)
        return;
#pragma unroll
    for (int panel = 0; panel < PF_HEAD_DIM_V / 64; panel++)
        pf_store_box(staged + panel * (PF_ROWS * 128), map, 64 * panel, (int)(block.s.q_token + first),
                     (int)block.head, (int)block.s.q_batch);
    pf_stores_commit();
}

/* Writes the rows of a block whose sums are complete. */
PF_DEVICE void pf_end_block(const pf_call &call, const pf_tensor_map *map, const pf_block &block,
                            unsigned char *queries, pf_pipe &pipe, int stage, float scale,
                            pf_group_state &group, pf_redo &redo) {
    const int warp = threadIdx.x / 32 - PF_FIRST_WARP;
    pf_group_sync(PF_OWN + group.number, 128); /* finished rows take the place of their queries */
    redo.first = block.first + warp * PF_WARP_ROWS;
    redo.sequence = block.s.index;
    redo.head = block.head;
    redo.stage = stage;
    unsigned char *staged = queries + warp * (PF_WARP_ROWS * 128);
    redo.rows = pf_end_rows(call, block, redo.first, staged, scale, group.rows, [&] {
        if (PF_STORED && redo.first + PF_WARP_ROWS <= block.num_rows)
            pf_write_box(map, block, redo.first, staged);
        else
            pf_write_rows(call, block, redo.first, staged);
    });
    if (!PF_STORED)
        pf_barrier_arrive(&pipe.blocks_empty[stage]);
}

/* Not while products are under way: ptxas would do all of them one by one for a function that is called. */
PF_DEVICE void pf_redo_broken(const pf_call &call, const pf_redo &redo) {
    if (!redo.rows)
        return;
    if (PF_STORED && threadIdx.x % 32 == 0)
        pf_stores_done();
    __syncwarp();
    pf_redo_rows(call, redo.sequence, redo.head, redo.first, redo.rows);
}

/* Block by block. The first scores of the next block are under way while the rows of one are written. */
PF_DEVICE void pf_compute_blocks(const pf_call &call, const pf_tensor_map *map, unsigned char *shared,
                                 pf_pipe &pipe) {
    const float unit = PF_FINAL ? (float)PF_LOG2_E : (float)(call.scale * PF_LOG2_E);
    const float scale = (float)call.scale;
    pf_group_state group;
    group.number = __shfl_sync(PF_WARP_ALL, (threadIdx.x / 32 - PF_FIRST_WARP) / 4, 0); /* all lanes' */
    group.q = pf_factor(shared + group.number * (64 * 128), 16, 1024);
    group.k = pf_factor(shared + PF_K_AT, 16, 1024);
    group.v = pf_factor(shared + PF_V_AT, PF_TILE * 128, 1024);
    group.keys = group.values = {0, 0};
    if (PF_TURNS && group.number == PF_GROUPS - 1) /* the first turn is the first warpgroup's */
        pf_group_arrive(PF_TURN, PF_TURN_THREADS);
    pf_block_ring ring = {0, 0};
    pf_redo redo = {0, 0, 0, 0, -1};
    pf_scores score;
    pf_barrier_wait(&pipe.blocks_ready[0], 0);
    pf_fence_async();
    if (pf_block_at(shared, ring).num_rows == 0)
        return;
    pf_await_keys(pipe, group, true);
    pf_await_turn(group);
    pf_begin_own_scores(score, group.q, group);
    pf_give_turn(group);
#pragma unroll 1
    for (;;) {
        const pf_block &block = pf_block_at(shared, ring);
        const int stage = ring.stage;
        pf_wgmma_wait<0>();
        pf_wgmma_settled(pf_flat(score));
        pf_end_keys(pipe, group);
        pf_redo_broken(call, redo);
        pf_clear_state(group.rows);
        pf_compute_tiles(call, block, shared + PF_ASIDE_BYTES * stage, pipe,
                         pf_further(group.q, stage * PF_Q_BYTES), unit, group, redo, score);
        pf_await_values(pipe, group, true);
        if (PF_QUERY_STAGES == 1)
            break;
        pf_next(ring);
        pf_barrier_wait(&pipe.blocks_ready[ring.stage], ring.parity);
        pf_fence_async();
        if (pf_block_at(shared, ring).num_rows == 0)
            break;
        pf_await_keys(pipe, group, true);
        pf_await_turn(group);
        pf_begin_own_values(group);
        pf_begin_own_scores(score, pf_further(group.q, ring.stage * PF_Q_BYTES), group);
        pf_give_turn(group);
        pf_wgmma_wait<1>();
        pf_end_values(pipe, group);
        pf_end_block(call, map, block, shared + stage * PF_Q_BYTES, pipe, stage, scale, group, redo);
    }
    const int stage = PF_QUERY_STAGES == 1 ? 0 : (ring.stage + PF_QUERY_STAGES - 1) % PF_QUERY_STAGES;
    pf_begin_own_values(group);
    pf_wgmma_wait<0>();
    pf_end_values(pipe, group);
    pf_end_block(call, map, *(const pf_block *)(shared + PF_BLOCK_AT + stage * PF_ASIDE_BYTES),
                 shared + stage * PF_Q_BYTES, pipe, stage, scale, group, redo);
    pf_redo_broken(call, redo);
    if (PF_STORED && threadIdx.x % 32 == 0)
        pf_stores_read(); /* shared memory has to last until then */
}

extern "C" __global__ void __launch_bounds__(PF_THREADS, 1)
    pf_forward_wgmma(const __grid_constant__ pf_mapped_call mapped) {
    const pf_call &call = mapped.call;
    PF_DYNAMIC_SHARED(shared);
    pf_pipe &pipe = *(pf_pipe *)(shared + PF_PIPE_AT);
    static_assert(sizeof(pf_block) <= PF_BLOCK_BYTES, "a block has its place");
    pf_prepare(pipe);
    __syncthreads();
    if (threadIdx.x < 32 * PF_FIRST_WARP) {
        pf_give_registers<PF_COPY_REGISTERS>();
        pf_copy_blocks(call, mapped.maps, shared, pipe);
    } else {
        pf_take_registers<PF_COMPUTE_REGISTERS>();
        pf_compute_blocks(call, &mapped.maps[2], shared, pipe);
    }
}
