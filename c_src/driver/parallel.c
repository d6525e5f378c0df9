/* The only file that knows threads. The pool is our own and not OpenMP's because the end of an OpenMP
 * region waits for threads that have not even begun: a helper that sleeps is often woken on the
 * processor of its caller, which then spins until the scheduler's next ticks, for milliseconds. Here
 * the end waits for helpers at work only, and not by spinning for long. OpenMP is asked how many
 * threads there should be and where, since that is what people set; without it the build is serial. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* sched_setaffinity */
#endif

#include "parallel.h"

#ifndef _OPENMP

void pf_parallel(int num_threads, pf_task task, void *context) {
    (void)num_threads;
    task(context, 0);
}

int pf_default_threads(void) {
    return 1;
}

int pf_granted_threads(int threads) {
    (void)threads;
    return 1;
}

int pf_openmp_date(void) {
    return 0;
}

#else

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

/* Regions that are open at once; one more runs on its caller alone. */
enum { NUM_REGIONS = 16 };

/* How long to look for work, or for the end of it, before going to sleep: longer than a caller needs
 * from one call to the next, a few times what going to sleep and being woken costs. */
enum { SPIN_NANOSECONDS = 50000, SPINS_PER_LOOK = 16 };

/* A region's state: helpers that may still come in the upper half, helpers at work in the lower one. */
enum { PLACE = 1 << 16, AT_WORK = PLACE - 1 };

typedef struct pf_region {
    uint32_t taken; /* by a caller */
    uint32_t state;
    pf_task task;
    void *context;
    char rest_of_the_cache_line[64 - 2 * sizeof(uint32_t) - 2 * sizeof(void *)];
} pf_region;

typedef struct pf_pool {
    pf_region region[NUM_REGIONS]; /* never freed: a helper may look at one after its end */
    pthread_mutex_t lock;          /* for what follows, and around sleeping */
    pthread_cond_t work, done;
    int num_helpers;
    int helpers_asleep, callers_asleep;
    int knows_forks;
} pf_pool;

static _Alignas(64) pf_pool pool = {
    .lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Look until there is something to see; false when it has taken too long. Who is waited for may have
 * been put on this processor: yielding lets it run, and costs little where nobody else wants to. */
static int spin_until(int (*ready)(const pf_region *), const pf_region *region) {
    const int64_t end = nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (ready(region))
                return 1;
            relax();
        }
        sched_yield();
    } while (nanoseconds() < end);
    return 0;
}

static int is_idle(const pf_region *region) {
    return __atomic_load_n(&region->state, __ATOMIC_SEQ_CST) == 0;
}

static int has_work(const pf_region *regions) {
    for (int i = 0; i < NUM_REGIONS; i++)
        if (__atomic_load_n(&regions[i].state, __ATOMIC_SEQ_CST) >= PLACE)
            return 1;
    return 0;
}

/* Who goes to sleep first says so and then looks once more, who wakes first changes what is looked at
 * and then asks whether anybody sleeps: in the one order of these four that all threads see, one of
 * them notices the other. */
static void sleep_until(int (*ready)(const pf_region *), const pf_region *region, int *asleep,
                        pthread_cond_t *woken) {
    pthread_mutex_lock(&pool.lock);
    __atomic_add_fetch(asleep, 1, __ATOMIC_SEQ_CST);
    while (!ready(region))
        pthread_cond_wait(woken, &pool.lock);
    __atomic_sub_fetch(asleep, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool.lock);
}

static void wake(const int *asleep, pthread_cond_t *woken, int num_threads) {
    if (__atomic_load_n(asleep, __ATOMIC_SEQ_CST) == 0)
        return;
    pthread_mutex_lock(&pool.lock);
    if (num_threads >= *asleep)
        pthread_cond_broadcast(woken);
    else
        for (int i = 0; i < num_threads; i++)
            pthread_cond_signal(woken);
    pthread_mutex_unlock(&pool.lock);
}

/* Take a place in some region and work there; false if there is none. */
static int help_once(void) {
    for (int i = 0; i < NUM_REGIONS; i++) {
        pf_region *region = &pool.region[i];
        uint32_t state = __atomic_load_n(&region->state, __ATOMIC_RELAXED);
        while (state >= PLACE) {
            if (!__atomic_compare_exchange_n(&region->state, &state, state - PLACE + 1, 1, __ATOMIC_ACQUIRE,
                                             __ATOMIC_RELAXED))
                continue;
            region->task(region->context, (int)(state / PLACE));
            if (__atomic_sub_fetch(&region->state, 1, __ATOMIC_SEQ_CST) == 0)
                wake(&pool.callers_asleep, &pool.done, NUM_REGIONS);
            return 1;
        }
    }
    return 0;
}

/* OMP_PROC_BIND binds the first thread to its place before we are asked, and threads inherit that. */
static void bind_to_place(int helper) {
#if defined(__linux__) && _OPENMP >= 201511
    const int num_places = omp_get_num_places();
    if (omp_get_proc_bind() == omp_proc_bind_false || num_places == 0)
        return;
    const int place = helper % num_places;
    int processors[CPU_SETSIZE];
    if (omp_get_place_num_procs(place) > CPU_SETSIZE)
        return;
    omp_get_place_proc_ids(place, processors);
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < omp_get_place_num_procs(place); i++)
        CPU_SET(processors[i], &set);
    sched_setaffinity(0, sizeof set, &set);
#else
    (void)helper;
#endif
}

static void *help(void *number) {
    bind_to_place((int)(intptr_t)number);
    for (;;) {
        while (help_once()) {
        }
        if (!spin_until(has_work, pool.region))
            sleep_until(has_work, pool.region, &pool.helpers_asleep, &pool.work);
    }
    return 0;
}

static void before_fork(void) {
    pthread_mutex_lock(&pool.lock);
}

static void after_fork_in_parent(void) {
    pthread_mutex_unlock(&pool.lock);
}

/* The helpers and the other callers are gone. */
static void after_fork_in_child(void) {
    pool = (pf_pool){.lock = PTHREAD_MUTEX_INITIALIZER,
                     .work = PTHREAD_COND_INITIALIZER,
                     .done = PTHREAD_COND_INITIALIZER,
                     .knows_forks = 1};
}

/* Signals are for the threads of the program. If a helper can't be made, others do its work. */
static void make_helpers(int num_helpers) {
    sigset_t all, before;
    pthread_t helper;
    sigfillset(&all);
    pthread_mutex_lock(&pool.lock);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (!pool.knows_forks)
        pool.knows_forks = !pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    while (pool.num_helpers < num_helpers &&
           !pthread_create(&helper, 0, help, (void *)(intptr_t)(pool.num_helpers + 1))) {
        pthread_detach(helper);
        __atomic_add_fetch(&pool.num_helpers, 1, __ATOMIC_RELAXED);
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
    pthread_mutex_unlock(&pool.lock);
}

static pf_region *open_region(int num_helpers, pf_task task, void *context) {
    pf_region *region = 0;
    for (int i = 0; i < NUM_REGIONS && !region; i++)
        if (!__atomic_exchange_n(&pool.region[i].taken, 1, __ATOMIC_ACQUIRE))
            region = &pool.region[i];
    if (!region)
        return 0;
    if (__atomic_load_n(&pool.num_helpers, __ATOMIC_RELAXED) < num_helpers)
        make_helpers(num_helpers);
    region->task = task;
    region->context = context;
    __atomic_store_n(&region->state, (uint32_t)num_helpers * PLACE, __ATOMIC_SEQ_CST);
    wake(&pool.helpers_asleep, &pool.work, num_helpers);
    return region;
}

static void close_region(pf_region *region) {
    __atomic_fetch_and(&region->state, AT_WORK, __ATOMIC_SEQ_CST);
    if (!spin_until(is_idle, region))
        sleep_until(is_idle, region, &pool.callers_asleep, &pool.done);
    __atomic_store_n(&region->taken, 0, __ATOMIC_RELEASE);
}

void pf_parallel(int num_threads, pf_task task, void *context) {
    pf_region *region = num_threads > 1 ? open_region(num_threads - 1, task, context) : 0;
    task(context, 0);
    if (region)
        close_region(region);
}

int pf_default_threads(void) {
    const int threads = omp_get_max_threads(), processors = omp_get_num_procs();
    return pf_granted_threads(threads < processors ? threads : processors);
}

int pf_granted_threads(int threads) {
    const int processors = omp_get_num_procs(), limit = processors > 16 ? processors : 16;
    const int of_process = omp_get_thread_limit();
    threads = threads < limit ? threads : limit;
    return threads < of_process ? threads : of_process;
}

int pf_openmp_date(void) {
    return _OPENMP;
}

#endif
