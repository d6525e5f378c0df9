/* The contract between driver and kernels: what a tile kernel gets, and the table that holds the
 * kernels of one instruction set. Kernels do arithmetic on one tile: no allocation, no threads,
 * no errors. "real" below is float or double, whichever the table row is for.
 *
 * Scores are raw products q.k, or what the terms make of them; a weight is exp2((score - m) *
 * scale_log2). m never falls below
 * LOWEST of kernels/exp2.h, a finite number, so that a tile without visible keys leaves 0 behind, not NaN. */
#ifndef PF_KERNELS_TABLE_H
#define PF_KERNELS_TABLE_H

#include <stddef.h>
#include <stdint.h>

/* What changes the scores of a tile, in this order. "Row" is a lane of a panel or a row of a block. */
typedef struct pf_terms {
    double scale;   /* factor on q.k */
    double softcap; /* softcap * tanh(score / softcap); 0: none */
    double (*score_mod)(double score, int64_t batch, int64_t head, int64_t query, int64_t key);
    const int64_t *head, *position; /* of each row; only for score_mod */
    int64_t batch, first_key;       /* number of the tile's key 0; only for score_mod */
    int64_t tile_key;     /* keys between the border that `distance` counts from and the tile's key 0 */
    const void *slopes;   /* real, one per row, or null */
    const void *distance; /* real, one per row: its position minus that of a border, the same for all
                             rows that may meet the tile: it may have to be rounded */
    /* Added to scores, reals, -inf hides the key; null: nothing. Of a panel shaped as the scores, or,
     * where all rows have the same, one row; of a block a row for each, from key_lo on. */
    const void *added, *added_to_all;
    const void *const *added_rows;
} pf_terms;

/* A panel of query rows, one in each lane of num_vectors vectors: width = num_vectors * lanes. */
typedef struct pf_prefill_tile {
    const void *q;             /* real [head_dim][width] */
    const void *const *k_rows; /* num_keys pointers to real [head_dim] */
    const void *const *v_rows; /* num_keys pointers to real [head_dim_v], and PF_VALUES_AHEAD more */
    const int32_t *lo, *hi;    /* [width]: lane w sees keys lo[w] <= j < hi[w]; null: all keys */
    void *scores;              /* real [num_keys][width], scratch */
    void *m, *l;               /* real [width] */
    void *o;                   /* real [head_dim_v][width]; of a matrix unit [vector][head_dim_v][lanes] */
    const pf_terms *terms;     /* null: none */
    const void *k_tiles, *v_tiles; /* for a matrix unit, instead of rows: packed keys from 0 on */
    int64_t first_key;             /* those below are not there */
    int64_t num_keys, head_dim, head_dim_v;
    double scale_log2;
    int32_t num_vectors;
} pf_prefill_tile;

/* A block of keys for a few rows that read the same keys. Keys are numbered from the start of the
 * block; [key_lo, key_hi) are present, the others are seen by no row. */
typedef struct pf_decode_block {
    const void *q;             /* real [num_rows][q_stride], zero behind head_dim */
    const void *const *k_rows; /* pointers to the keys from key_lo on, as stored, unit stride */
    const void *const *v_rows;
    /* The num_next rows that follow, which the kernel fetches meanwhile. */
    const void *const *k_next, *const *v_next;
    const int32_t *lo, *hi;        /* [num_rows]: visible keys of each row; null: all that are present */
    void *scores;                  /* real [num_rows][scores_stride], scratch */
    void *m, *l;                   /* real [num_rows] */
    void *o;                       /* real [num_rows][o_stride] */
    void *alpha;                   /* as m, scratch */
    const pf_terms *terms;         /* null: none */
    const void *k_scale, *v_scale; /* real, one per key from key_lo on: stored rows times these; null: 1 */
    int64_t q_stride, scores_stride, o_stride;
    int64_t head_dim, head_dim_v;
    double scale_log2;
    int32_t key_lo, key_hi;
    int32_t num_next;
    int32_t num_rows;
    int32_t dtype;
} pf_decode_block;

typedef struct pf_real_kernels {
    int32_t lanes, panel_vectors;
    int32_t prefill_tile_keys; /* keys per tile; borders at multiples of it, from key 0 */

    void (*prefill_tile)(const pf_prefill_tile *tile);
    /* The same up to the final scores, of panels of panel_vectors vectors with terms. */
    void (*score_tile)(const pf_prefill_tile *tile);
    void (*decode_block)(const pf_decode_block *block);

    /* Probabilities in place of the panel's scores, which become natural by `factor`; per lane the
     * highest score and the sum of -p ln p. Hidden keys become -0. */
    void (*probabilities)(const pf_prefill_tile *tile, double factor, const void *lse, void *highest,
                          void *entropy);

    /* Empty states: m = LOWEST, l = 0, o = 0. */
    void (*state_reset)(void *m, void *l, int64_t num_rows, void *o, int64_t num_outputs);
    /* Add state b to state a; output (r, d) lies at o[r * row_stride + d * dim_stride], and one of
     * the two strides is 1. */
    void (*state_merge)(void *m, void *l, void *o, const void *m_b, const void *l_b, const void *o_b,
                        int64_t num_rows, int64_t num_dims, int64_t row_stride, int64_t dim_stride,
                        double scale_log2);
    /* Multiply n outputs by a factor; return 1 if all results are finite. */
    int (*state_scale)(void *o, int64_t n, double factor);

    /* Rows of a panel, one in each lane: num_rows pointers to rows of head_dim elements as stored,
     * to real [head_dim][width], times a factor; lanes without a row become 0. scratch: real
     * [lanes][scratch_stride]. */
    void (*pack_queries)(void *panel, int32_t num_vectors, const void *const *rows, int32_t num_rows,
                         int64_t head_dim, int32_t dtype, int64_t stride, double factor, void *scratch,
                         int64_t scratch_stride);
    /* And back: vector `vector` of real [num_dims][width], times a factor per lane (real [lanes]), to
     * num_rows rows as stored; `check` (real [lanes]) becomes 0 where all results are finite. Returns
     * whether it is 0 everywhere. */
    int (*finish_rows)(const void *panel, int32_t num_vectors, int32_t vector, int64_t num_dims,
                       const void *factors, void *const *rows, int32_t num_rows, int64_t stride,
                       int32_t dtype, void *check);
    /* The same as they are, to rows real [lanes][row_stride]. */
    void (*unpack_rows)(const void *panel, int32_t num_vectors, int32_t vector, int64_t num_dims, void *rows,
                        int64_t row_stride);

    /* One row of n elements `stride` apart, as stored, to contiguous reals, and back (rounding to
     * nearest even). */
    void (*load_row)(void *row, const void *x, int64_t stride, int64_t n, int32_t dtype);
    void (*store_row)(void *x, int64_t stride, const void *row, int64_t n, int32_t dtype);

    /* Bytes that are 0; rows of what is added: hide keys whose byte is 0, count the hidden ones. */
    int64_t (*count_unseen)(const uint8_t *seen, int64_t stride, int64_t n);
    void (*hide)(void *row, const uint8_t *seen, int64_t stride, int64_t n);
    int64_t (*count_hidden)(const void *row, int64_t n);

    /* For tests: 2^(x * factor), transpose of lanes x lanes, sums of 4 vectors, largest of one. */
    void (*exp2_array)(void *out, const void *x, double factor, int64_t count);
    void (*tanh_array)(void *out, const void *x, int64_t count);
    void (*transpose)(void *out, const void *x);
    void (*reduce)(void *sums, void *maximum, const void *x);
    /* For benchmarks; return the operations done and the bytes read. */
    double (*peak)(int64_t rounds, double factor, double term, double *sink);
    double (*read)(const void *data, int64_t count, double *sink);
} pf_real_kernels;

/* The prefill family on a matrix unit: bfloat16 queries, keys and values are packed into its tiles instead
 * of being read as rows of reals. Keys of a tile count from its border, so that they always meet the same
 * neighbours; those that are not there are zeros, in whole units. Scores, states and outputs
 * are those of the float kernels. */
typedef struct pf_matrix_kernels {
    int32_t panel_vectors, tile_keys;
    int64_t (*query_bytes)(int64_t num_vectors, int64_t head_dim);
    int64_t (*key_bytes)(int64_t num_keys, int64_t head_dim);
    int64_t (*value_bytes)(int64_t num_keys, int64_t head_dim_v);
    int64_t scratch_bytes; /* pf_prefill_tile.scores */
    /* Rows of bfloat16, unit stride. Queries of one vector, with their signs turned if `negative`; keys
     * and values [first, first + num_rows) of a tile. */
    void (*pack_queries)(void *panel, int32_t vector, const void *const *rows, int32_t num_rows,
                         int64_t head_dim, int negative);
    void (*pack_keys)(void *tiles, const void *const *rows, int64_t first, int64_t num_rows,
                      int64_t head_dim);
    void (*pack_values)(void *tiles, const void *const *rows, int64_t first, int64_t num_rows,
                        int64_t head_dim_v);
    void (*prefill_tile)(const pf_prefill_tile *tile);
    double (*peak)(int64_t rounds, double *sink); /* for benchmarks; returns the operations done */
} pf_matrix_kernels;

typedef struct pf_kernel_table {
    pf_real_kernels real[2];         /* float, double */
    const pf_matrix_kernels *matrix; /* null: none */
} pf_kernel_table;

/* How many rows ahead of the one in use the prefill kernel fetches values into the first cache: rows a
 * power of two apart share few sets of it, and are gone again before their next columns are needed. */
enum { PF_VALUES_AHEAD = 8 };

/* One table per row of isa.def that fits the target. */
#define PF_ISA(name, arch, flags) extern const pf_kernel_table pf_kernels_##name;
#include "../isa.def"
#undef PF_ISA

#endif
