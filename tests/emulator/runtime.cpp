/* The runtime under cuda_on_host.h: one fiber per CUDA thread, blocks one after another, and memory that
 * shows misuse. A launch that goes wrong (a barrier or shuffle that not everybody reaches, an address
 * outside, an endless loop) ends with a message instead of a result. One launch at a time: the caller holds a
 * lock. */
#include "cuda_on_host.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <vector>
#if defined(__x86_64__) && !defined(PF_EMU_UCONTEXT)
#define PF_EMU_ASSEMBLY 1
#else
#include <ucontext.h>
#endif

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

pf_emu_thread *pf_emu_current;
uint3 pf_emu_block_idx;
dim3 pf_emu_block_dim, pf_emu_grid_dim;
unsigned char *pf_emu_shared;

namespace {

constexpr size_t PAGE = 4096, STACK = 64 << 10;
constexpr unsigned MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / 32, NUM_BARRIERS = 16;
constexpr unsigned char POISON = 0xff; /* NaN in every float type */
constexpr size_t SHARED_CAPACITY = 256 << 10;

/* --- switching stacks --- */

#ifdef PF_EMU_ASSEMBLY
typedef void *context;
extern "C" void pf_emu_switch(context *from, context to);
/* What the System V ABI lets a function keep: six registers and the stack. Kernels leave the floating-point
 * control words alone. */
asm(R"(
.text
.globl pf_emu_switch
.hidden pf_emu_switch
.type pf_emu_switch, @function
pf_emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size pf_emu_switch, .-pf_emu_switch
)");

void prepare(context *fresh, char *stack, size_t bytes, void (*enter)()) {
    void **top = (void **)(stack + bytes);
    *--top = nullptr; /* the return address of `enter`, which does not return */
    *--top = (void *)enter;
    for (int i = 0; i < 6; i++)
        *--top = nullptr;
    *fresh = top;
}

void switch_context(context *from, const context *to) {
    pf_emu_switch(from, *to);
}
#else
typedef ucontext_t context;

void prepare(context *fresh, char *stack, size_t bytes, void (*enter)()) {
    getcontext(fresh);
    fresh->uc_stack.ss_sp = stack;
    fresh->uc_stack.ss_size = bytes;
    fresh->uc_link = nullptr;
    makecontext(fresh, enter, 0);
}

void switch_context(context *from, const context *to) {
    swapcontext(from, to);
}
#endif

/* --- state of a launch --- */

struct copy {
    void *shared;
    const void *global;
    unsigned bytes, group;
    bool valid;
};

/* Where a thread waits, for messages and to see whether those that meet belong together. */
struct place {
    const char *name, *file;
    int line;
};

struct fiber : pf_emu_thread {
    context registers;
    unsigned warp, bit;
    pf_emu_complete *complete;
    unsigned mask;
    void *operands;
    place at;
    int barrier, result;
    std::vector<copy> copies;
    unsigned group;
};

/* Sets of lanes. A lane that is in none but `exists` runs, or has exited. */
struct warp {
    unsigned exists, exited, ready, yielded, collective, barrier;
};

struct barrier {
    unsigned arrived, waiting, trues;
    pf_emu_barrier_kind kind;
    place at;
};

fiber fibers[MAX_THREADS];
warp warps[MAX_WARPS];
barrier barriers[NUM_BARRIERS];
context scheduler;
char *stacks, *shared_base;
unsigned num_threads, num_warps, num_alive;
const pf_emu_kernel *kernel;
const void *argument;
unsigned dynamic_bytes;
uint64_t random_state;
bool shuffled;
unsigned long long num_switches;

pthread_t launcher;
volatile bool in_fiber, failed, expired;
char message[4096];
void *fault_address; /* of the instruction */

uint64_t random_number() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 0x2545f4914f6cdd1dull >> 16;
}

fiber &current() {
    return *(fiber *)pf_emu_current;
}

void append(const char *format, ...) __attribute__((format(printf, 1, 2)));
void append_arguments(const char *format, va_list arguments) {
    const size_t used = strlen(message);
    vsnprintf(message + used, sizeof message - used, format, arguments);
}
void append(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    append_arguments(format, arguments);
    va_end(arguments);
}
void append_block() {
    append("block (%u, %u, %u) of %s", pf_emu_block_idx.x, pf_emu_block_idx.y, pf_emu_block_idx.z,
           kernel ? kernel->name : "?");
}
void append_thread() {
    message[0] = 0;
    append("thread %u of ", pf_emu_current->index.x);
    append_block();
    append(": ");
}

void to_scheduler() {
    in_fiber = false;
    switch_context(&current().registers, &scheduler);
    in_fiber = true;
}

[[noreturn]] void abandon() {
    failed = true;
    in_fiber = false;
    switch_context(&current().registers, &scheduler);
    __builtin_unreachable();
}

void run(fiber &next) {
    num_switches++;
    pf_emu_current = &next;
    warps[next.warp].ready &= ~next.bit;
    in_fiber = true;
    switch_context(&scheduler, &next.registers);
}

/* Leave the running thread until somebody makes it ready. */
void wait() {
    fiber &mine = current();
    warp &my_warp = warps[mine.warp];
    if (shuffled || expired || my_warp.ready == 0) {
        to_scheduler();
        return;
    }
    /* Straight to the next lane: half the switches. */
    fiber &next = fibers[mine.warp * 32 + (unsigned)__builtin_ctz(my_warp.ready)];
    my_warp.ready &= ~next.bit;
    pf_emu_current = &next;
    num_switches++;
    switch_context(&mine.registers, &next.registers);
}

/* --- memory --- */

/* An allocation ends at a page that cannot be touched; the rest of its first page, and up to 15 bytes behind
 * it, hold a pattern that must stay. Shorter in the list first. */
struct allocation {
    char *mapping, *begin, *end, *guard;
};
std::vector<allocation> allocations;
pthread_mutex_t allocations_lock = PTHREAD_MUTEX_INITIALIZER;

size_t to_pages(size_t bytes) {
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

bool is_poison(const char *begin, const char *end) {
    for (; begin < end; begin++)
        if ((unsigned char)*begin != POISON)
            return false;
    return true;
}

void check_allocations() {
    pthread_mutex_lock(&allocations_lock);
    for (const allocation &one : allocations)
        if (!failed && (!is_poison(one.mapping, one.begin) || !is_poison(one.end, one.guard))) {
            failed = true;
            message[0] = 0;
            append("%s wrote %s an allocation of %zu bytes", kernel->name,
                   is_poison(one.end, one.guard) ? "before" : "behind", (size_t)(one.end - one.begin));
        }
    pthread_mutex_unlock(&allocations_lock);
}

/* Say what an address is near to. Called in a signal handler: no lock, the list is only read, and only while
 * this thread runs a kernel. */
void append_neighbourhood(const char *address) {
    if (address >= stacks && address < stacks + MAX_THREADS * (STACK + PAGE)) {
        append(", stack overflow: a thread has %zu KiB", STACK >> 10);
        return;
    }
    if (address >= shared_base + SHARED_CAPACITY && address < shared_base + SHARED_CAPACITY + PAGE) {
        append(", %zu bytes behind the %u bytes of dynamic shared memory",
               (size_t)(address - (char *)pf_emu_shared) - dynamic_bytes, dynamic_bytes);
        return;
    }
    for (const allocation &one : allocations)
        if (address >= one.guard && address < one.guard + PAGE) {
            append(", %zu bytes behind an allocation of %zu bytes", (size_t)(address - one.end),
                   (size_t)(one.end - one.begin));
            return;
        }
}

/* --- signals --- */

const int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr int ALARM = SIGVTALRM;
struct sigaction old_faults[4], old_alarm;
stack_t old_stack;
char signal_stack[64 << 10];
timer_t timer;

void on_fault(int number, siginfo_t *info, void *raw) {
    if (!in_fiber || !pthread_equal(pthread_self(), launcher)) {
        for (int i = 0; i < 4; i++) /* not ours: it happens again under the handler that was there before */
            if (FAULTS[i] == number)
                sigaction(number, &old_faults[i], nullptr);
        return;
    }
    append_thread();
#ifdef __x86_64__
    fault_address = (void *)((ucontext_t *)raw)->uc_mcontext.gregs[REG_RIP];
#endif
    if (number == SIGFPE)
        append("integer division by zero");
    else if (number == SIGILL) /* what -fsanitize=alignment ends in */
        append("misaligned access");
    else {
        const char *access = "access to";
#ifdef __x86_64__
        access = ((ucontext_t *)raw)->uc_mcontext.gregs[REG_ERR] & 2 ? "write to" : "read of";
#endif
        if (info->si_addr == nullptr && info->si_code == SI_KERNEL)
            append("access to an address that cannot be");
        else
            append("%s address %p", access, info->si_addr);
        append_neighbourhood((const char *)info->si_addr);
    }
    (void)raw;
    abandon(); /* SA_NODEFER: the signal is not blocked where we go */
}

void on_alarm(int, siginfo_t *, void *) {
    expired = true; /* the scheduler looks at it, */
    static bool again;
    again = !again;
    if (!in_fiber || !pthread_equal(pthread_self(), launcher) || again)
        return; /* and the second time it is a loop that never comes there */
    append_thread();
    append("did not end in time");
    abandon();
}

void take_signals(double seconds) {
    stack_t stack = {};
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &old_stack);
    struct sigaction action = {};
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    action.sa_sigaction = on_fault;
    for (int i = 0; i < 4; i++)
        sigaction(FAULTS[i], &action, &old_faults[i]);
    action.sa_sigaction = on_alarm;
    sigaction(ALARM, &action, &old_alarm);
    struct sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = ALARM;
    event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
    timer_create(CLOCK_MONOTONIC, &event, &timer);
    struct itimerspec when = {};
    when.it_value.tv_sec = (time_t)seconds;
    when.it_value.tv_nsec = (long)((seconds - (double)when.it_value.tv_sec) * 1e9);
    when.it_interval.tv_nsec = 200000000;
    timer_settime(timer, 0, &when, nullptr);
}

void give_signals_back() {
    timer_delete(timer);
    sigaction(ALARM, &old_alarm, nullptr);
    for (int i = 0; i < 4; i++)
        sigaction(FAULTS[i], &old_faults[i], nullptr);
    sigaltstack(&old_stack, nullptr);
}

/* --- meeting points --- */

/* Let the collective go on that `mine` waits in, if everybody is there. */
bool complete_if_all(fiber &mine) {
    warp &my_warp = warps[mine.warp];
    const unsigned need = mine.mask & my_warp.exists & ~my_warp.exited;
    if ((my_warp.collective & need) != need)
        return false;
    void *lanes[32] = {};
    fiber *first = &fibers[mine.warp * 32];
    for (unsigned left = need; left; left &= left - 1) {
        const int i = __builtin_ctz(left);
        if (first[i].complete != mine.complete || first[i].mask != mine.mask)
            return false;
        lanes[i] = first[i].operands;
    }
    my_warp.collective &= ~need;
    my_warp.ready |= need;
    mine.complete(lanes);
    return true;
}

void release(int id) {
    barrier &one = barriers[id];
    int result = 0;
    switch (one.kind) {
    case PF_EMU_SYNC:
        break;
    case PF_EMU_COUNT:
        result = (int)one.trues;
        break;
    case PF_EMU_AND:
        result = one.trues == one.arrived;
        break;
    case PF_EMU_OR:
        result = one.trues != 0;
        break;
    }
    for (unsigned w = 0; w < num_warps; w++)
        for (unsigned left = warps[w].barrier; left; left &= left - 1) {
            fiber &waiting = fibers[w * 32 + (unsigned)__builtin_ctz(left)];
            if (waiting.barrier != id)
                continue;
            waiting.result = result;
            warps[w].barrier &= ~waiting.bit;
            warps[w].ready |= waiting.bit;
        }
    one = {};
}

void enter() {
    in_fiber = true;
    kernel->enter(argument);
    fiber &mine = current();
    warp &my_warp = warps[mine.warp];
    my_warp.exited |= mine.bit;
    num_alive--;
    /* Those that wait for all need not wait for this one any more. */
    for (unsigned left = my_warp.collective; left; left &= left - 1)
        if (my_warp.collective & (left & -left))
            complete_if_all(fibers[mine.warp * 32 + (unsigned)__builtin_ctz(left)]);
    if (barriers[0].arrived && barriers[0].arrived == num_alive)
        release(0);
    wait();
    __builtin_unreachable();
}

/* --- the scheduler --- */

void describe_deadlock() {
    message[0] = 0;
    append("deadlock in ");
    append_block();
    append(":");
    bool told[MAX_THREADS] = {};
    for (unsigned t = 0; t < num_threads; t++) {
        const warp &its_warp = warps[fibers[t].warp];
        if (told[t] || its_warp.exited & fibers[t].bit)
            continue;
        unsigned same = 0, last = t;
        for (unsigned u = t; u < num_threads; u++)
            if (!(warps[fibers[u].warp].exited & fibers[u].bit) && fibers[u].at.name == fibers[t].at.name &&
                fibers[u].at.line == fibers[t].at.line && fibers[u].mask == fibers[t].mask) {
                told[u] = true;
                same++;
                last = u;
            }
        append("\n  %u thread%s (%u to %u) in %s", same, same == 1 ? "" : "s", t, last, fibers[t].at.name);
        if (fibers[t].mask)
            append(" with mask 0x%08x", fibers[t].mask);
        append(", %s:%d", fibers[t].at.file, fibers[t].at.line);
    }
    append("\n  %u threads have exited", num_threads - num_alive);
}

void start_block() {
    num_alive = num_threads;
    memset(barriers, 0, sizeof barriers);
    for (unsigned w = 0; w < num_warps; w++) {
        const unsigned lanes = num_threads - 32 * w < 32 ? num_threads - 32 * w : 32;
        const unsigned all = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
        warps[w] = {all, 0, all, 0, 0, 0};
    }
    for (unsigned t = 0; t < num_threads; t++) {
        fiber &one = fibers[t];
        one.index = {t, 0, 0};
        one.lane = t % 32;
        one.warp = t / 32;
        one.bit = 1u << t % 32;
        one.mask = 0;
        one.at = {"its code", "?", 0};
        one.copies.clear();
        one.group = 0;
        /* Tops of stacks at different places of a page, or they would all share a few lines of the cache. */
        prepare(&one.registers, stacks + t * (STACK + PAGE) + PAGE, STACK - t % 61 * 64, enter);
    }
    memset(shared_base + SHARED_CAPACITY - to_pages(dynamic_bytes), POISON, to_pages(dynamic_bytes));
    if (kernel->shared_begin)
        memset(kernel->shared_begin, POISON, (size_t)(kernel->shared_end - kernel->shared_begin));
}

/* One lane of one warp, whichever; false where none is ready. */
bool run_any() {
    unsigned w = (unsigned)(random_number() % num_warps), tried = 0;
    while (warps[w].ready == 0) {
        if (++tried > num_warps)
            return false;
        w = (w + 1) % num_warps;
    }
    /* Rotated by chance, the first of those that are ready. */
    const unsigned turn = (unsigned)(random_number() % 32), ready = warps[w].ready;
    const unsigned rotated = ready >> turn | (turn ? ready << (32 - turn) : 0);
    run(fibers[w * 32 + ((unsigned)__builtin_ctz(rotated) + turn) % 32]);
    return true;
}

bool run_all() {
    bool any = false;
    for (unsigned w = 0; w < num_warps && !failed; w++)
        while (warps[w].ready && !failed && !expired) {
            run(fibers[w * 32 + (unsigned)__builtin_ctz(warps[w].ready)]);
            any = true;
        }
    return any;
}

void run_block() {
    start_block();
    while (num_alive && !failed) {
        const bool any = shuffled ? run_any() : run_all();
        if (failed)
            return;
        if (expired) {
            message[0] = 0;
            append_block();
            append(" did not end in time");
            failed = true;
            return;
        }
        if (any)
            continue;
        bool yielded = false;
        for (unsigned w = 0; w < num_warps; w++) {
            yielded |= warps[w].yielded != 0;
            warps[w].ready |= warps[w].yielded;
            warps[w].yielded = 0;
        }
        if (!yielded) {
            describe_deadlock();
            failed = true;
        }
    }
    if (!failed && !is_poison((char *)pf_emu_shared + dynamic_bytes, shared_base + SHARED_CAPACITY)) {
        message[0] = 0;
        append_block();
        append(" wrote behind the %u bytes of dynamic shared memory", dynamic_bytes);
        failed = true;
    }
}

bool map_once() {
    if (stacks)
        return true;
    /* Below each stack a page that cannot be touched, behind the shared memory another. */
    const size_t all_stacks = MAX_THREADS * (STACK + PAGE);
    char *region = (char *)mmap(nullptr, all_stacks + SHARED_CAPACITY + PAGE, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED)
        return false;
    for (unsigned t = 0; t < MAX_THREADS; t++)
        mprotect(region + t * (STACK + PAGE), PAGE, PROT_NONE);
    shared_base = region + all_stacks;
    mprotect(shared_base + SHARED_CAPACITY, PAGE, PROT_NONE);
    stacks = region;
    return true;
}

} // namespace

/* --- what cuda_on_host.h calls --- */

void pf_emu_collective(pf_emu_complete *complete, const char *name, unsigned mask, void *operands,
                       const char *file, int line) {
    fiber &mine = current();
    if (!(mask & mine.bit))
        pf_emu_fail(file, line, "%s: lane %u is not in its own mask 0x%08x", name, mine.lane, mask);
    mine.complete = complete;
    mine.mask = mask;
    mine.operands = operands;
    mine.at = {name, file, line};
    warp &my_warp = warps[mine.warp];
    my_warp.collective |= mine.bit;
    if (complete_if_all(mine) && !shuffled)
        my_warp.ready &= ~mine.bit; /* the last one goes on at once */
    else
        wait();
    mine.mask = 0;
}

int pf_emu_barrier(int id, unsigned count, pf_emu_barrier_kind kind, bool predicate, bool waits,
                   const char *name, const char *file, int line) {
    fiber &mine = current();
    if (id < 0 || id >= (int)NUM_BARRIERS)
        pf_emu_fail(file, line, "%s: there is no barrier %d", name, id);
    barrier &one = barriers[id];
    if (one.arrived == 0) {
        one.kind = kind;
        one.at = {name, file, line};
    } else if (one.kind != kind || (count == 0 && (one.at.line != line || strcmp(one.at.file, file) != 0)))
        pf_emu_fail(file, line, "%s, while others of the block wait in %s, %s:%d", name, one.at.name,
                    one.at.file, one.at.line);
    one.arrived++;
    one.trues += predicate;
    mine.at = {name, file, line};
    mine.barrier = id;
    if (waits)
        warps[mine.warp].barrier |= mine.bit;
    const bool last = one.arrived >= (count ? count : num_alive);
    if (last)
        release(id);
    if (waits) {
        if (last && !shuffled)
            warps[mine.warp].ready &= ~mine.bit;
        else
            wait();
    }
    return mine.result;
}

unsigned pf_emu_active(void) {
    const warp &mine = warps[current().warp];
    return mine.exists & ~mine.exited & ~mine.collective & ~mine.barrier;
}

void pf_emu_yield(void) {
    warps[current().warp].yielded |= current().bit;
    current().at = {"__nanosleep", "?", 0};
    to_scheduler();
}

bool pf_emu_is_shared(const void *address, size_t bytes) {
    const char *begin = (const char *)address, *dynamic = (const char *)pf_emu_shared;
    return (begin >= dynamic && begin + bytes <= dynamic + dynamic_bytes) ||
           (begin >= kernel->shared_begin && begin + bytes <= kernel->shared_end);
}

static void land(const copy &one) {
    if (one.valid)
        memcpy(one.shared, one.global, one.bytes);
    else
        memset(one.shared, 0, one.bytes);
}

bool pf_emu_comes_at_once(void) {
    return shuffled && random_number() % 2; /* which shows what is still in use there */
}

void pf_emu_async(void *shared, const void *global, unsigned bytes, bool valid, const char *file, int line) {
    if ((uintptr_t)shared % bytes || !pf_emu_is_shared(shared, bytes))
        pf_emu_fail(file, line, "asynchronous copy to %p: not %u aligned bytes of shared memory", shared,
                    bytes);
    if (valid && (uintptr_t)global % bytes)
        pf_emu_fail(file, line, "asynchronous copy of %u bytes from %p, which is not aligned", bytes, global);
    const copy one = {shared, global, bytes, current().group, valid};
    if (pf_emu_comes_at_once())
        land(one);
    else
        current().copies.push_back(one);
}

void pf_emu_async_commit(void) {
    current().group++;
}

void pf_emu_async_wait(unsigned groups_left) {
    fiber &mine = current();
    size_t landed = 0;
    while (landed < mine.copies.size() && mine.copies[landed].group + groups_left < mine.group)
        land(mine.copies[landed++]);
    mine.copies.erase(mine.copies.begin(), mine.copies.begin() + (ptrdiff_t)landed);
}

void pf_emu_fail(const char *file, int line, const char *format, ...) {
    append_thread();
    va_list arguments;
    va_start(arguments, format);
    append_arguments(format, arguments);
    va_end(arguments);
    if (file)
        append(", %s:%d", file, line);
    abandon();
}

/* --- what Python calls --- */

extern "C" {

/* 0, or 1 with the reason in pf_emu_message. A seed other than 0 runs blocks and threads in random order. */
int pf_emu_launch(const pf_emu_kernel *which, const void *its_argument, const unsigned *grid, unsigned block,
                  unsigned shared_bytes, uint64_t seed, double seconds) {
    message[0] = 0;
    fault_address = nullptr;
    failed = expired = in_fiber = false;
    if (!map_once()) {
        append("no memory for the stacks of the emulator");
        return 1;
    }
    kernel = which;
    argument = its_argument;
    num_threads = block;
    num_warps = (block + 31) / 32;
    pf_emu_block_dim = dim3(block);
    pf_emu_grid_dim = dim3(grid[0], grid[1], grid[2]);
    dynamic_bytes = shared_bytes;
    /* At a multiple of what PF_DYNAMIC_SHARED promises. */
    pf_emu_shared = (unsigned char *)shared_base + SHARED_CAPACITY - (shared_bytes + 1023) / 1024 * 1024;
    shuffled = seed != 0;
    random_state = seed * 0x9e3779b97f4a7c15ull | 1;
    const uint64_t num_blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    std::vector<uint64_t> order(shuffled ? num_blocks : 0);
    for (uint64_t i = 0; i < order.size(); i++) {
        const uint64_t j = random_number() % (i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    launcher = pthread_self();
    take_signals(seconds);
    for (uint64_t i = 0; i < num_blocks && !failed; i++) {
        const uint64_t flat = shuffled ? order[i] : i;
        pf_emu_block_idx = {(unsigned)(flat % grid[0]), (unsigned)(flat / grid[0] % grid[1]),
                            (unsigned)(flat / grid[0] / grid[1])};
        run_block();
    }
    give_signals_back();
    if (!failed)
        check_allocations();
    return failed;
}

const char *pf_emu_message(void) {
    return message;
}

/* Where in its library the instruction lies that a launch has failed in; 0 if it was no instruction's fault.
 */
size_t pf_emu_fault_offset(void) {
    Dl_info library;
    if (!fault_address || !dladdr(fault_address, &library))
        return 0;
    return (size_t)((char *)fault_address - (char *)library.dli_fbase);
}

unsigned long long pf_emu_num_switches(void) {
    return num_switches;
}

void *pf_emu_allocate(size_t bytes) {
    const size_t whole = to_pages(bytes ? bytes : 1);
    char *mapping =
        (char *)mmap(nullptr, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED)
        return nullptr;
    memset(mapping, POISON, whole);
    mprotect(mapping + whole, PAGE, PROT_NONE);
    char *begin = mapping + (whole - bytes) / 16 * 16;
    pthread_mutex_lock(&allocations_lock);
    allocations.push_back({mapping, begin, begin + bytes, mapping + whole});
    pthread_mutex_unlock(&allocations_lock);
    return begin;
}

void pf_emu_free(void *begin) {
    pthread_mutex_lock(&allocations_lock);
    for (size_t i = allocations.size(); i-- > 0;)
        if (allocations[i].begin == begin) {
            munmap(allocations[i].mapping, (size_t)(allocations[i].guard - allocations[i].mapping) + PAGE);
            allocations.erase(allocations.begin() + (ptrdiff_t)i);
            break;
        }
    pthread_mutex_unlock(&allocations_lock);
}
}
