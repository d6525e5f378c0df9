/* What the parts of the driver share: the plan of a call, the context of a run, and carving of one
 * allocation into pieces. */
#ifndef PF_DRIVER_DRIVER_H
#define PF_DRIVER_DRIVER_H

#include "call.h"
#include "scale.h"
#include "tree.h"

typedef struct pf_context {
    const pf_attention_call *call;
    const pf_real_kernels *kernels;
    const pf_matrix_kernels *matrix; /* of the prefill family; null: the real ones */
    pf_plan plan;
    pf_scale scale;
    pf_terms terms;       /* what all tiles share; to be filled in for the rows of one */
    int changes;          /* whether scores change: softcap, score_mod, ALiBi, bias */
    int hides;            /* whether keys inside the spans may be hidden: bias, mask, tree, mask_mod */
    int64_t decode_heads; /* key/value heads that a decode item takes together */
    int64_t tree_nodes;
    int64_t elem_bytes;
    int32_t compute_dtype;
    int64_t decode_scratch_bytes; /* the rest of a thread's scratch is for prefill */
    int64_t *prefill_start;       /* (batch + 1,): first panel of each sequence, head by head */
    int64_t *decode_start;        /* (batch + 1,): first unit (one split of one item) of each sequence */
    int64_t next_prefill_panel;
} pf_context;

enum { PF_ALIGNMENT = 64 };

static inline int32_t pf_panel_vectors(const pf_context *context) {
    return context->matrix ? context->matrix->panel_vectors : context->kernels->panel_vectors;
}

static inline int64_t pf_starts_bytes(const pf_attention_call *call) {
    return pf_round_up((call->batch + 1) * (int64_t)sizeof(int64_t), PF_ALIGNMENT);
}

/* A piece of the next `bytes`, aligned to cache lines. Starting from null it adds up sizes. */
static inline void *pf_carve(char **at, int64_t bytes) {
    char *piece = *at;
    *at += pf_round_up(bytes, PF_ALIGNMENT);
    return piece;
}

/* The sequence that holds item i of a prefix sum over sequences. */
static inline int64_t pf_find_sequence(const int64_t *start, int64_t batch, int64_t i) {
    int64_t lo = 0, hi = batch;
    while (hi - lo > 1) {
        const int64_t middle = lo + (hi - lo) / 2;
        if (start[middle] <= i)
            lo = middle;
        else
            hi = middle;
    }
    return lo;
}

/* attention.c: types and kernels of a call. */
void pf_start_context(pf_context *context, const pf_attention_call *call);

/* plan.c: everything of the context that follows from the call and context->kernels; then, once
 * there is memory for them, the starts; and the tiles, for who asks. */
void pf_make_context(pf_context *context, const pf_attention_call *call);
void pf_fill_starts(pf_context *context);
void pf_count_tiles(pf_context *context);

/* terms.c: which terms the call has, and with them the scale. */
void pf_make_terms(pf_context *context);

/* Scratch for the terms of up to num_rows rows. */
typedef struct pf_terms_scratch {
    int64_t *head, *position;
    void *slopes, *distance;
    void *added;             /* [num_rows][row_stride] */
    const void **added_rows; /* where the row of each is */
    int64_t row_stride;
} pf_terms_scratch;

void pf_carve_terms(const pf_context *context, char **at, int64_t num_rows, int64_t row_stride,
                    pf_terms_scratch *scratch);

/* terms.c: everything of pf_terms but what is added, for rows [first, first + num_rows) of a key/value
 * head and a tile that begins with key `first_key`; `border` is where tiles begin for all rows. */
void pf_fill_terms(const pf_context *context, const pf_terms_scratch *scratch, const pf_sequence *s,
                   int64_t kv_head, int64_t first, int64_t num_rows, int64_t border, int64_t first_key,
                   pf_terms *terms);

/* terms.c: what is added to the scores of these rows against `keys`, to scratch->added_rows; `alike` is
 * whether it is the same for all, `in_place` whether they may lie in the caller's arrays, which end
 * where the keys end. Returns whether anything is. */
enum { PF_NOTHING_ADDED, PF_SOMETHING_ADDED, PF_ALL_HIDDEN };
int pf_fill_added(const pf_context *context, const pf_terms_scratch *scratch, const pf_sequence *s,
                  int64_t kv_head, int64_t first, int64_t num_rows, pf_span keys, int in_place, int *alike);

/* terms.c: whether a row sees a key at all, or one of some that lie within its span; whether it does
 * not see one of those; and whether a tile that reads the keys `touched` may read one that the row
 * does not see. */
int pf_sees_any_of(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t row,
                   pf_span keys);
int pf_sees_any(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t row);
int pf_is_hidden(const pf_context *context, const pf_sequence *s, int64_t kv_head, int64_t row, int64_t key);
int pf_may_touch_hidden(const pf_context *context, const pf_sequence *s, int64_t row,
                        const pf_span touched[PF_NUM_SIDES]);

/* terms.c: for a row that is computed alone, pointers to a row of zeros in place of the values that
 * its row of `added` hides. */
void pf_replace_hidden(const pf_context *context, const char *added, int64_t num_keys,
                       const void *replacement, const void **rows);

/* finish.c: the factor that turns the sums of a row into its outputs; writes its lse, if that is asked
 * for. */
double pf_output_scale(const pf_context *context, const pf_sequence *sequence, int64_t kv_head, int64_t row,
                       double m, double l, double value_factor);

/* finish.c: the same for rows [first, first + num_rows), whose m, l and factors are of the compute type. */
void pf_output_scales(const pf_context *context, const pf_sequence *sequence, int64_t kv_head, int64_t first,
                      int64_t num_rows, const void *m, const void *l, double value_factor, void *factors);

/* finish.c: one finished row to out and lse; its values were multiplied by value_factor. Returns
 * whether the outputs are finite. */
int pf_finish_row(const pf_context *context, const pf_sequence *sequence, int64_t kv_head, int64_t row,
                  void *o, double m, double l, double value_factor);

/* What pf_retry_factor needs: the keys that the tiles of a group of rows read, whether the group is
 * one row that has been computed alone, and, from the first time that it is asked for, which columns
 * of the values are finite. */
typedef struct pf_retry_scratch {
    pf_span touched[PF_NUM_SIDES];
    int alone;
    int columns_known;
    char *column_finite; /* [head_dim_v] */
    void *value;         /* one row of values */
} pf_retry_scratch;

void pf_carve_retry(const pf_context *context, char **at, pf_retry_scratch *scratch);
void pf_start_retry(const pf_sequence *sequence, int64_t first, int64_t end, int alone,
                    pf_retry_scratch *scratch);

/* finish.c: how a row whose outputs o are not finite is to be computed again, alone: with which
 * value_factor, or 0 for not at all. */
double pf_retry_factor(const pf_context *context, const pf_sequence *sequence, int64_t kv_head, int64_t row,
                       const void *o, double l, double value_factor, pf_retry_scratch *scratch);

/* prefill.c and decode.c: scratch memory of one thread or run of units, and the work. */
int64_t pf_prefill_scratch_bytes(const pf_context *context);
void pf_prefill_run(pf_context *context, char *scratch);
int64_t pf_decode_scratch_bytes(const pf_context *context);
void pf_decode_run(pf_context *context, char *scratch, int64_t run, int64_t num_runs);
/* After all runs: items whose splits were shared between runs. */
void pf_decode_join(pf_context *context, char *const scratch[], int64_t num_runs);

/* Element r of an array of the compute type. */
static inline double pf_real_at(const pf_context *context, const void *array, int64_t r) {
    return context->elem_bytes == 8 ? ((const double *)array)[r] : (double)((const float *)array)[r];
}

static inline void pf_set_real(const pf_context *context, void *array, int64_t r, double value) {
    if (context->elem_bytes == 8)
        ((double *)array)[r] = value;
    else
        ((float *)array)[r] = (float)value;
}

#endif
