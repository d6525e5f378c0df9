/* What the driver knows of threads: a region, a shared counter, and how many threads a call gets. */
#ifndef PF_DRIVER_PARALLEL_H
#define PF_DRIVER_PARALLEL_H

#include <stdint.h>

typedef void (*pf_task)(void *context, int thread);

/* Call task(context, 0) here, and task(context, thread) on up to num_threads - 1 helpers, each with
 * a number of its own below num_threads. Helpers that have not begun when the caller is through do not
 * come any more: a task has to take its work from a shared counter, so that whoever comes does all of
 * it. Several threads may be inside at once, also a task itself; each caller makes progress alone. */
void pf_parallel(int num_threads, pf_task task, void *context);

static inline int64_t pf_take_next(int64_t *counter) {
    return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

/* What OpenMP would use now, at most the processors that this process may run on. */
int pf_default_threads(void);

/* What a caller who asks for `threads` gets. More than there are processors is granted up to a few,
 * so that results can be compared over thread counts anywhere; thousands would end the process. */
int pf_granted_threads(int threads);

/* 0: built without OpenMP, serial. */
int pf_openmp_date(void);

#endif
