/* One attention call: plan, workspace, the parallel region, the join. */
#include "driver.h"
#include "entry.h"
#include "parallel.h"

#include "../dispatch/dispatch.h"

#include <stdlib.h>

/* Workspaces up to this size lie on the caller's stack, which costs a small call no allocation. */
enum { STACK_BYTES = 16 * 1024 };

typedef struct pf_run {
    pf_context context;
    char **scratch;   /* one per thread */
    int64_t next_run; /* of decode units */
} pf_run;

void pf_start_context(pf_context *context, const pf_attention_call *call) {
    context->compute_dtype = call->q.dtype == PF_F64 ? PF_F64 : PF_F32;
    context->elem_bytes = pf_dtype_size(context->compute_dtype);
    context->kernels = pf_kernels(call->isa, context->compute_dtype == PF_F64);
    context->matrix = 0;
}

/* Matrix units multiply bfloat16 numbers: all three arrays have to hold such, and the factor on queries
 * has to keep them exact. */
static void choose_matrix(pf_context *context, const pf_attention_call *call) {
    const double factor = pf_split_scale(call->scale, 0).query_factor;
    if (call->q.dtype == PF_BF16 && call->k.dtype == PF_BF16 && (factor == 1.0 || factor == -1.0) &&
        !call->k_scale.data && !call->v_scale.data)
        context->matrix = pf_matrix(call->isa);
}

int pf_driver_plan(const pf_attention_call *call, pf_plan *plan) {
    pf_context context;
    pf_start_context(&context, call);
    choose_matrix(&context, call);
    pf_make_context(&context, call);
    pf_count_tiles(&context);
    *plan = context.plan;
    return PF_STATUS_OK;
}

/* A run of decode units belongs to no thread, but to a scratch, where it leaves states behind: one
 * thread may do several if others have not come yet. */
static void work(void *run_, int thread) {
    pf_run *run = run_;
    pf_context *context = &run->context;
    const int64_t num_runs = context->plan.num_decode_items ? context->plan.num_threads : 0;
    int64_t number;
    while ((number = pf_take_next(&run->next_run)) < num_runs)
        pf_decode_run(context, run->scratch[number], number, num_runs);
    if (context->plan.num_prefill_items)
        pf_prefill_run(context, run->scratch[thread] + context->decode_scratch_bytes);
}

static void run_in(pf_run *run, char *workspace) {
    const pf_attention_call *call = run->context.call;
    const int32_t num_threads = run->context.plan.num_threads;
    char *at = (char *)(((uintptr_t)workspace + PF_ALIGNMENT - 1) / PF_ALIGNMENT * PF_ALIGNMENT);
    run->context.prefill_start = pf_carve(&at, pf_starts_bytes(call));
    run->context.decode_start = pf_carve(&at, pf_starts_bytes(call));
    run->scratch = pf_carve(&at, num_threads * (int64_t)sizeof(char *));
    for (int32_t t = 0; t < num_threads; t++)
        run->scratch[t] = pf_carve(&at, run->context.plan.thread_bytes);
    run->next_run = 0;
    pf_fill_starts(&run->context);
    pf_parallel(num_threads, work, run);
    if (run->context.plan.num_decode_items && num_threads > 1) /* one run leaves nothing to join */
        pf_decode_join(&run->context, run->scratch, num_threads);
}

int pf_driver_attention(const pf_attention_call *call) {
    pf_run run;
    pf_start_context(&run.context, call);
    choose_matrix(&run.context, call);
    pf_make_context(&run.context, call);
    const pf_plan *plan = &run.context.plan;
    if (plan->num_prefill_items + plan->num_decode_items == 0)
        return PF_STATUS_OK;
    if (call->workspace) {
        if (call->workspace_bytes < plan->workspace_bytes)
            return PF_STATUS_WORKSPACE_TOO_SMALL;
        run_in(&run, call->workspace);
        return PF_STATUS_OK;
    }
    if (plan->workspace_bytes <= STACK_BYTES) {
        char stack[STACK_BYTES];
        run_in(&run, stack);
        return PF_STATUS_OK;
    }
    char *workspace = malloc((size_t)plan->workspace_bytes);
    if (!workspace)
        return PF_STATUS_OUT_OF_MEMORY;
    run_in(&run, workspace);
    free(workspace);
    return PF_STATUS_OK;
}
