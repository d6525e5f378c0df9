/* The only file that knows OpenMP: one parallel region and one shared counter. Without OpenMP the
 * build is serial and says so (pf_openmp_version() is 0). */
#ifndef PF_DRIVER_PARALLEL_H
#define PF_DRIVER_PARALLEL_H

#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#endif

typedef void (*pf_task)(void *context, int thread, int num_threads);

/* Run the task on up to num_threads threads. With one thread no region is entered, so that a forked
 * child, in which the pool of its parent is gone, can still compute. */
static inline void pf_parallel(int num_threads, pf_task task, void *context) {
#ifdef _OPENMP
    if (num_threads > 1) {
#pragma omp parallel num_threads(num_threads)
        task(context, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    (void)num_threads;
    task(context, 0, 1);
}

static inline int64_t pf_take_next(int64_t *counter) {
    return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

/* What OpenMP would use now, at most the processors that this process may run on. */
static inline int pf_default_threads(void) {
#ifdef _OPENMP
    const int threads = omp_get_max_threads(), processors = omp_get_num_procs();
    return threads < processors ? threads : processors;
#else
    return 1;
#endif
}

/* What a caller who asks for `threads` gets. More than there are processors is granted up to a few,
 * so that results can be compared over thread counts anywhere; thousands would end the process. */
static inline int pf_granted_threads(int threads) {
#ifdef _OPENMP
    const int processors = omp_get_num_procs(), limit = processors > 16 ? processors : 16;
    return threads < limit ? threads : limit;
#else
    (void)threads;
    return 1;
#endif
}

static inline int pf_openmp_date(void) {
#ifdef _OPENMP
    return _OPENMP;
#else
    return 0;
#endif
}

#endif
