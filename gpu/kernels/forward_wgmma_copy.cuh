/* Prefill on Hopper: the warpgroup that copies, and the barriers between it and those that compute.
 *
 * Its warps go through the same blocks of rows, each at its own pace: one finds them and brings queries, one
 * looks at what each row sees, one brings keys and one values. */
#ifndef PF_FORWARD_WGMMA_COPY_CUH
#define PF_FORWARD_WGMMA_COPY_CUH

#include "forward_mma_rows.cuh"
#include "hopper.cuh"

enum {
    PF_GROUPS = PF_WARPS / 4, /* warpgroups that compute */
    PF_TURN_THREADS = 256,    /* one warpgroup arrives, one waits */
    PF_PIPE_AT = PF_PLACES_AT,
    /* Barriers by number; 0 is that of the whole block. */
    PF_TURN = 1,                  /* and the next, a turn of each warpgroup */
    PF_OWN = PF_TURN + PF_GROUPS, /* and the next, of each warpgroup alone */
    /* What the warps that copy are for. */
    PF_FINDER = 0,
    PF_ROW_LOOKER,
    PF_KEY_COPIER,
    PF_VALUE_COPIER,
};

/* A call, and keys, values and the result as the copy unit knows them: boxes of PF_TILE rows of 64 elements,
 * of the result PF_WARP_ROWS. */
struct pf_mapped_call {
    pf_call call;
    pf_tensor_map maps[3];
};

/* Blocks are found, then ready for those that compute. */
struct pf_pipe {
    uint64_t blocks_found[PF_QUERY_STAGES], blocks_ready[PF_QUERY_STAGES], blocks_empty[PF_QUERY_STAGES];
    uint64_t keys_full[PF_STAGES], keys_empty[PF_STAGES], values_full[PF_STAGES], values_empty[PF_STAGES];
    unsigned char next[PF_BLOCK_BYTES]; /* the block that comes next, until it has a place */
};

PF_DEVICE void pf_prepare(pf_pipe &pipe) {
    if (threadIdx.x != 0)
        return;
    for (int i = 0; i < PF_QUERY_STAGES; i++) {
        pf_barrier_init(&pipe.blocks_found[i], 32);
        pf_barrier_init(&pipe.blocks_ready[i], 2 * 32); /* queries have come, rows have been looked at */
        pf_barrier_init(&pipe.blocks_empty[i], (PF_WARPS + 3) * 32);
    }
    for (int i = 0; i < PF_STAGES; i++) {
        pf_barrier_init(&pipe.keys_full[i], 32);
        pf_barrier_init(&pipe.values_full[i], 32);
        pf_barrier_init(&pipe.keys_empty[i], PF_WARPS);
        pf_barrier_init(&pipe.values_empty[i], PF_WARPS);
    }
    pf_fence_barriers();
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

/* A warp has used a stage. */
PF_DEVICE void pf_used(uint64_t *empty) {
    if (threadIdx.x % 32 == 0)
        pf_barrier_arrive(empty);
}

/* --- copies of a warp --- */

/* Byte of a lane's first piece of the first rows in a tile; rows further down are one exclusive or away. */
template <int WIDTH, int ROWS> PF_DEVICE uint32_t pf_first_piece() {
    typedef pf_copy<WIDTH> copy;
    return pf_swizzled<WIDTH, ROWS>(threadIdx.x % 32 / copy::LANES, threadIdx.x % copy::LANES);
}

/* Starts the copy of a lane's pieces of row `row` and the next, which is where the first lanes are. */
template <int WIDTH, int ROWS>
PF_DEVICE void pf_copy_pieces(unsigned char *tile, uint32_t first_piece, int row, const char *from,
                              bool valid, int width) {
    typedef pf_copy<WIDTH> copy;
    unsigned char *to = tile + (first_piece ^ row % 8 * 16) + row * 128;
#pragma unroll
    for (int i = 0; i < copy::REPEAT; i++)
        pf_cp_async16(to + i * copy::LANES / 8 * (ROWS * 128), from + i * copy::LANES * 16,
                      valid &&
                          (WIDTH == width || (int)(threadIdx.x % copy::LANES + i * copy::LANES) * 8 < width));
}

/* Starts the copies of rows that lie `stride` bytes apart; those from `num_valid` on become zeros. */
template <int WIDTH, int ROWS>
PF_DEVICE void pf_copy_even(unsigned char *tile, const char *from, int64_t stride, int64_t num_valid,
                            int width) {
    typedef pf_copy<WIDTH> copy;
    const uint32_t first_piece = pf_first_piece<WIDTH, ROWS>();
    const int64_t first = threadIdx.x % 32 / copy::LANES, step = copy::ROWS * stride;
    from += first * stride + threadIdx.x % copy::LANES * 16;
    if (num_valid >= ROWS && width == WIDTH) { /* no test in a full tile */
#pragma unroll
        for (int row = 0; row < ROWS; row += copy::ROWS, from += step)
            pf_copy_pieces<WIDTH, ROWS>(tile, first_piece, row, from, true, WIDTH);
        return;
    }
#pragma unroll 8
    for (int row = 0; row < ROWS; row += copy::ROWS, from += step)
        pf_copy_pieces<WIDTH, ROWS>(tile, first_piece, row, from, row + first < num_valid, width);
}

/* Starts the copies of rows whose places, in bytes from `from`, the lanes hold: lane i of rows i, i + 32 ...
 */
template <int WIDTH, int ROWS>
PF_DEVICE void pf_copy_places(unsigned char *tile, const char *from,
                              const int64_t (&places)[(ROWS + 31) / 32], int64_t num_valid, int width) {
    typedef pf_copy<WIDTH> copy;
    const uint32_t first_piece = pf_first_piece<WIDTH, ROWS>();
    const int first = threadIdx.x % 32 / copy::LANES;
    from += threadIdx.x % copy::LANES * 16;
#pragma unroll
    for (int row = 0; row < ROWS; row += copy::ROWS)
        pf_copy_pieces<WIDTH, ROWS>(tile, first_piece, row,
                                    from + __shfl_sync(PF_WARP_ALL, places[row / 32], row % 32 + first),
                                    row + first < num_valid, width);
}

/* Starts the copies of the block's rows; there are zeros past the last. */
PF_DEVICE void pf_copy_query_rows(const pf_call &call, const pf_block &block, unsigned char *shared) {
    const char *from = (const char *)call.q.data;
    const int64_t num_rows = block.num_rows - block.first;
    if constexpr (PF_PACKED) {
        int64_t places[(PF_ROWS + 31) / 32];
#pragma unroll
        for (int i = 0; i < (PF_ROWS + 31) / 32; i++) {
            const int64_t row = pf_row_of(block, 32 * i + threadIdx.x % 32);
            places[i] = 2 * pf_query_offset(call.q, block.s, pf_head_of(block, row), pf_query_of(block, row));
        }
        pf_copy_places<PF_HEAD_DIM, PF_ROWS>(shared, from, places, num_rows, (int)call.head_dim);
    } else {
        from += 2 * pf_query_offset(call.q, block.s, block.head, block.first);
        pf_copy_even<PF_HEAD_DIM, PF_ROWS>(shared, from, 2 * call.q.stride_token, num_rows,
                                           (int)call.head_dim);
    }
}

/* --- blocks --- */

/* The next item of this block of threads that has something to compute, from a round on.
 *
 * Where rows see what is before them, items come in pairs: one, and the one that is as far from the other end
 * of the rows, so that all pairs are alike. */
PF_DEVICE bool pf_next_work(const pf_call &call, uint32_t &round, pf_work &work) {
    const int64_t heads = PF_PACKED ? call.num_kv_heads : call.num_heads;
    const uint32_t num_rows = (uint32_t)call.row_blocks;
    const uint32_t num_units = (uint32_t)(heads * call.max_splits * call.batch),
                   num_items = num_units * num_rows;
    const bool pairs = PF_SPANS && gridDim.x < num_items;
    for (;; round++) {
        pf_item item;
        if (pairs) {
            const uint32_t half = (num_rows + 1) / 2, pair = round / 2 * gridDim.x + blockIdx.x;
            if (pair >= num_units * half)
                return false;
            const uint32_t near = pair % half, far = num_rows - 1 - near;
            if (round % 2 && near == far)
                continue;
            item =
                pf_item_at(call, pair / half * num_rows + (round % 2 ? near : far), heads, call.max_splits);
        } else {
            const uint32_t index = round * gridDim.x + blockIdx.x;
            if (index >= num_items)
                return false;
            item = pf_get_item_in_sections(call, index, num_items, heads, call.max_splits);
        }
        if (pf_get_work(call, item, work))
            break;
    }
    round++;
    return true;
}

/* A block has at least one tile, be it one that no row sees: those that compute then begin all blocks alike.
 */
PF_DEVICE void pf_give_a_tile(pf_block &block) {
    for (int side = pf_first_side(block); side < PF_NUM_SIDES; side++)
        if (block.begin[side] < block.end[side])
            return;
    block.begin[PF_WINDOW_KEYS] = block.full_begin[PF_WINDOW_KEYS] = block.full_end[PF_WINDOW_KEYS] = 0;
    block.end[PF_WINDOW_KEYS] = 1;
}

/* Looks for the next block, by one warp; without rows it is none. Blocks whose indices cannot be are done
 * with here. */
PF_DEVICE void pf_find_block(const pf_call &call, uint32_t &round, pf_block &block) {
    for (;;) {
        pf_work work;
        const bool found = pf_next_work(call, round, work);
        if (threadIdx.x % 32 == 0) {
            if (found)
                block = pf_get_block(call, work);
            else
                block.num_rows = 0;
        }
        __syncwarp();
        if (!found)
            return;
        pf_find_tiles(call, block);
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            pf_give_a_tile(block);
        __syncwarp();
        if (!__any_sync(PF_WARP_ALL, pf_finds_bad(call, block.s, threadIdx.x % 32, 32)))
            return;
        pf_store_bad_rows(call, block);
        __syncwarp();
    }
}

/* Puts the next block into its place. */
PF_DEVICE void pf_place_block(const pf_pipe &pipe, pf_block &block) {
    const uint64_t *from = (const uint64_t *)pipe.next;
    uint64_t *to = (uint64_t *)&block;
    for (uint32_t i = threadIdx.x % 32; i < sizeof(pf_block) / 8; i += 32)
        to[i] = from[i];
    __syncwarp();
}

/* One warp finds blocks and brings their queries; a block without rows is the end. Without a second place
 * for queries there is one block. What takes long does not wait until there is a place. */
PF_DEVICE void pf_find_blocks(const pf_call &call, unsigned char *shared, pf_pipe &pipe) {
    pf_block_ring ring = {0, 1}; /* the phase before the first: stages begin empty */
    uint32_t round = 0;
    bool found = true;
#pragma unroll 1
    while (found) {
        pf_find_block(call, round, *(pf_block *)pipe.next);
        pf_block &block = pf_block_at(shared, ring);
        pf_barrier_wait(&pipe.blocks_empty[ring.stage], ring.parity);
        pf_place_block(pipe, block);
        found = block.num_rows > 0;
        pf_barrier_arrive(&pipe.blocks_found[ring.stage]);
        if (found)
            pf_copy_query_rows(call, block, shared + ring.stage * PF_Q_BYTES);
        pf_cp_async_arrive(&pipe.blocks_ready[ring.stage]);
        pf_next(ring);
        if (PF_QUERY_STAGES == 1)
            break;
    }
}

/* One warp writes down what rows see. */
PF_DEVICE void pf_look_at_blocks(const pf_call &call, unsigned char *shared, pf_pipe &pipe) {
    bool any = true;
#pragma unroll 1
    for (pf_block_ring ring = {0, 0}; any; pf_next(ring)) {
        const pf_block &block = pf_block_at(shared, ring);
        pf_barrier_wait(&pipe.blocks_found[ring.stage], ring.parity);
        any = block.num_rows > 0 && PF_QUERY_STAGES > 1;
        if (block.num_rows > 0)
            pf_look_at_rows(call, block, shared + ring.stage * PF_ASIDE_BYTES);
        pf_barrier_arrive(&pipe.blocks_ready[ring.stage]);
        pf_barrier_arrive(&pipe.blocks_empty[ring.stage]);
    }
}

/* Where a lane's keys of a tile lie in their pool. */
PF_DEVICE void pf_find_own_places(const pf_call &call, const pf_tensor &t, const pf_block &block, int first,
                                  int64_t (&places)[(PF_TILE + 31) / 32]) {
    const uint32_t page_size = (uint32_t)call.page_size;
#pragma unroll
    for (int i = 0; i < (PF_TILE + 31) / 32; i++) {
        const uint32_t key = (uint32_t)first + 32 * i + threadIdx.x % 32;
        places[i] = 0;
        if (32 * i + threadIdx.x % 32 < PF_TILE && key < block.s.mask.num_keys) {
            const int64_t page = pf_page_at(call, block.s.index, key / page_size);
            places[i] = 2 * (page * t.stride_batch + key % page_size * t.stride_token +
                             block.kv_head * t.stride_head);
        }
    }
}

/* A tile by the copy unit; one lane tells it what to do. */
template <int WIDTH>
PF_DEVICE void pf_copy_mapped(unsigned char *to, const pf_tensor_map *map, const pf_block &block,
                              int64_t first, uint64_t *full) {
    if (threadIdx.x % 32 != 0) {
        pf_barrier_arrive(full);
        return;
    }
    pf_barrier_expect(full, PF_TILE * WIDTH * 2);
#pragma unroll
    for (int panel = 0; panel < WIDTH / 64; panel++)
        pf_copy_box(to + panel * (PF_TILE * 128), map, 64 * panel, (int)(block.s.kv_token + first),
                    (int)block.kv_head, (int)block.s.kv_batch, full);
}

/* One warp brings the keys of all tiles of all blocks, or the values. */
template <int WIDTH>
PF_DEVICE void pf_copy_stream(const pf_call &call, const pf_tensor &t, const pf_tensor_map *map,
                              pf_stream pf_block::*which, unsigned char *shared, unsigned char *stages,
                              pf_pipe &pipe, uint64_t *full, uint64_t *empty) {
    if (PF_MAPPED && threadIdx.x % 32 == 0)
        pf_fetch_map(map);
    pf_tile_ring ring = {0, 1};
#pragma unroll 1
    for (pf_block_ring blocks = {0, 0};; pf_next(blocks)) {
        const pf_block &block = pf_block_at(shared, blocks);
        pf_barrier_wait(&pipe.blocks_found[blocks.stage], blocks.parity);
        if (block.num_rows == 0)
            break;
        const pf_stream stream = block.*which;
        const int64_t num_keys = block.s.mask.num_keys;
        for (int side = pf_first_side(block); side < PF_NUM_SIDES; side++) {
            const int end = block.end[side];
#pragma unroll 1
            for (int tile = block.begin[side]; tile < end; tile++) {
                const int64_t first = (int64_t)tile * PF_TILE;
                unsigned char *to = stages + ring.stage * (PF_TILE * WIDTH * 2);
                if (PF_MAPPED && first + PF_TILE <= num_keys) { /* beyond there may be others' rows */
                    pf_barrier_wait(&empty[ring.stage], ring.parity);
                    pf_copy_mapped<WIDTH>(to, map, block, first, &full[ring.stage]);
                    pf_next(ring);
                    continue;
                }
                if constexpr (PF_PAGED != 0) {
                    int64_t places[(PF_TILE + 31) / 32];
                    pf_find_own_places(call, t, block, (int)first, places);
                    pf_barrier_wait(&empty[ring.stage], ring.parity);
                    pf_copy_places<WIDTH, PF_TILE>(to, stream.data, places, num_keys - first, stream.width);
                } else {
                    pf_barrier_wait(&empty[ring.stage], ring.parity);
                    pf_copy_even<WIDTH, PF_TILE>(to, stream.data + first * stream.stride, stream.stride,
                                                 num_keys - first, stream.width);
                }
                pf_cp_async_arrive(&full[ring.stage]);
                pf_next(ring);
            }
        }
        if (PF_QUERY_STAGES == 1)
            break;
        pf_barrier_arrive(&pipe.blocks_empty[blocks.stage]);
    }
}

PF_DEVICE void pf_copy_blocks(const pf_call &call, const pf_tensor_map *maps, unsigned char *shared,
                              pf_pipe &pipe) {
    switch (threadIdx.x / 32) {
    case PF_FINDER:
        pf_find_blocks(call, shared, pipe);
        break;
    case PF_ROW_LOOKER:
        pf_look_at_blocks(call, shared, pipe);
        break;
    case PF_KEY_COPIER:
        pf_copy_stream<PF_HEAD_DIM>(call, call.k, &maps[0], &pf_block::keys, shared, shared + PF_K_AT, pipe,
                                    pipe.keys_full, pipe.keys_empty);
        break;
    default:
        pf_copy_stream<PF_HEAD_DIM_V>(call, call.v, &maps[1], &pf_block::values, shared, shared + PF_V_AT,
                                      pipe, pipe.values_full, pipe.values_empty);
    }
    pf_cp_async_wait<0>(); /* nobody leaves while copies are under way that are his */
}

#endif
