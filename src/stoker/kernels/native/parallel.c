/* Stages of parallel work on the threads that PyTorch already has: a second thread pool would compete with them for the same cores.
 *
 * Each thread of a team begins with its own range of the work items, so that it reads neighbouring memory, and then takes items from the
 * ranges of others. A team of any size, even one thread, does all of them. Between two stages threads spin for a while, because sleeping
 * and waking up takes longer than most stages:
 *
 *     thread 0   | item 0 | item 1 | item 2 |  wait until done == count  | next stage ...
 *     thread 1   | item 3 | item 4 | item 5 |          wait              | next stage ...
 *
 * A region, which is one call of run_stages, forks and joins its team, or uses the threads that `run_with_crew` keeps together for many.
 *
 * A thread that the system suspends, because other processes use the cores, delays all others. `struct contention` notices that and makes
 * the team smaller. For how long a thread is suspended, and waits for suspended threads, follows from two clocks of the calling thread:
 *
 *     time of a region     | before its work |          work          | after its work |     outside of the work and in waits: lost
 *     CPU time                    |######          ####       ######        |                the rest, without sleep: suspended
 *
 * See docs/performance.md for what it saves.
 */

#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "parallel.h"

#define MAX_SPINS 4096           /* polls before a waiting thread sleeps: about 50 µs */
#define MIN_LOST_NS 100000       /* a shorter wait is no sign of a suspended thread */
#define WINDOW_NS 20000000       /* of regions, which are then judged together */
#define FIRST_PAUSE_NS 100000000 /* the time after which a larger team is tried; doubled whenever that fails */
#define LAST_PAUSE_NS 1600000000

/* Whether the teams of a calling thread have to share their cores with other work. Times are in nanoseconds. */
struct contention {
    int64_t limit;        /* threads of a team; 0: all */
    int64_t all;          /* threads of the team that was made smaller */
    int64_t until, pause; /* when a larger team may be tried; the length of that wait */
    int64_t grown;        /* when the team was made larger */
    int64_t since;        /* up to when times are in the window. From then on: */
    int64_t lost;         /* how long the calling thread waited for others, after its spins */
    int64_t slept;        /* the part of it in which the calling thread slept */
    struct window {
        int64_t threads;            /* of the largest team */
        int64_t total, lost, slept; /* sums over the regions */
        int64_t cpu;                /* CPU time of the calling thread when the window began */
    } window;
};

static _Thread_local struct contention contention;

struct team {
    struct stage *stages;
    int64_t count;
    int64_t ranges; /* of each stage */
    int64_t *next;  /* [ranges, pitch]: the items of each stage that are taken; a range has cache lines of its own */
    int64_t pitch;
    struct contention *caller;
};

/* What GOMP_parallel runs on every thread of a team: run(data, number of the thread). The calling thread has number 0. */
struct fork {
    void (*run)(void *, int64_t);
    void *data;
    int64_t members;      /* threads that have a number, without the calling one */
    int64_t began, ended; /* when the calling thread began and ended its part */
    struct contention *caller;
};

/* A thread of a crew, in a cache line of its own. */
struct seat {
    int32_t region;   /* the region in which the thread is, or 0 */
    int32_t sleepers; /* threads that sleep until the thread leaves it */
} __attribute__((aligned(64)));

/* Threads that stay together for several regions of a calling thread, which runs what is between the regions alone:
 *
 *     thread 0   | call | region 1: open, work, close | call | region 3 | ... | end      state  0  1  2  3 ...  -1
 *     thread 1     wait | enter, work, leave          | wait | ...      |     | leave            odd: a region is open
 *
 * A region costs two stores that all threads read, instead of a fork and a join. It ends without the threads that have not entered it. */
struct crew {
    int (*calls)(const void *);
    const void *argument;
    int status; /* the result of `calls` */
    int64_t threads;
    struct seat *seats;
    struct team *team; /* of the region that is open */
    int32_t state __attribute__((aligned(64)));
    int32_t sleepers; /* threads that sleep until `state` changes */
};

#define CREW_ENDED (-1) /* a state */

static _Thread_local struct crew *crew;     /* of the calling thread, while it runs the calls */
static _Thread_local int64_t member_number; /* of this thread in its team */

static int64_t read_clock(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static int64_t now_ns(void) { return read_clock(CLOCK_MONOTONIC); }

/* A system call, which takes 20 times as long as now_ns. */
static int64_t thread_cpu_ns(void) { return read_clock(CLOCK_THREAD_CPUTIME_ID); }

static inline void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleep while *value is `seen`, or not at all. */
static void sleep_while(int32_t *value, int32_t seen) {
#ifdef __linux__
    syscall(SYS_futex, value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
    (void)value, (void)seen;
    sched_yield();
#endif
}

static void wake_all(int32_t *value) {
#ifdef __linux__
    syscall(SYS_futex, value, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
    (void)value;
#endif
}

/* Count items as done. The thread that counts the last one wakes those that sleep. */
static void finish_items(struct stage *stage, int64_t count) {
    if (__atomic_add_fetch(&stage->done, (int32_t)count, __ATOMIC_SEQ_CST) == stage->count && __atomic_load_n(&stage->sleepers, __ATOMIC_SEQ_CST))
        wake_all(&stage->done);
}

static int is_done(struct stage *stage) { return __atomic_load_n(&stage->done, __ATOMIC_ACQUIRE) == stage->count; }

/* Add the time since `started`, in which this thread slept, to what its region lost. */
static void count_sleep(const struct contention *caller, int64_t started) {
    if (caller != &contention) return;
    int64_t slept = now_ns() - started;
    contention.lost += slept;
    contention.slept += slept;
}

/* The acquire loads pair with `finish_items`: what other threads stored in this stage is visible afterwards. */
static void wait_until_done(struct stage *stage, const struct team *team) {
    for (int64_t tries = 0; tries < MAX_SPINS; tries++) {
        if (is_done(stage)) return;
        pause_core();
    }
    int64_t started = now_ns();
    __atomic_add_fetch(&stage->sleepers, 1, __ATOMIC_SEQ_CST);
    for (int32_t done; (done = __atomic_load_n(&stage->done, __ATOMIC_SEQ_CST)) < stage->count;) sleep_while(&stage->done, done);
    count_sleep(team->caller, started);
}

/* Do the items of range `range` of stage number `s` that no thread has taken. Returns how many these were. `is_prepared`: whether this thread
 * has prepared the stage. */
static int64_t work_on_range(const struct team *team, int64_t s, int64_t range, int *is_prepared) {
    const struct stage *stage = team->stages + s;
    int64_t first = stage->count * range / team->ranges, count = stage->count * (range + 1) / team->ranges - first, finished = 0;
    int64_t *next = team->next + range * team->pitch + s;
    if (__atomic_load_n(next, __ATOMIC_RELAXED) >= count) return 0;
    void (*work)(void *, int64_t) = stage->work;
    void *job = stage->job;
    for (int64_t i; (i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < count; finished++) {
        if (!*is_prepared && stage->prepare) stage->prepare(job, member_number);
        *is_prepared = 1;
        work(job, first + i);
    }
    return finished;
}

/* Do a part of all stages, as thread `number` of a team. */
static void run_team_member(void *data, int64_t number) {
    struct team *team = data;
    member_number = number;
    for (int64_t s = 0; s < team->count; s++) {
        struct stage *stage = team->stages + s;
        int is_prepared = 0;
        for (int64_t i = 0; i < team->ranges && !is_done(stage); i++) {
            int64_t finished = work_on_range(team, s, (number + i) % team->ranges, &is_prepared);
            if (finished) finish_items(stage, finished);
        }
        wait_until_done(stage, team);
    }
}

/* A thread of a fork. The time that passes in the OpenMP runtime before and after the work of the calling thread is long if the other threads
 * have not yet left the last region or not yet ended this one. */
static void run_forked_member(void *data) {
    struct fork *fork = data;
    int is_caller = fork->caller == &contention;
    if (is_caller) fork->began = now_ns();
    fork->run(fork->data, is_caller ? 0 : __atomic_add_fetch(&fork->members, 1, __ATOMIC_RELAXED));
    if (is_caller) fork->ended = now_ns();
}

/* The state of a crew when it is no longer `seen`. */
static int32_t wait_for_state(struct crew *crew, int32_t seen) {
    int32_t state;
    for (int64_t tries = 0; tries < MAX_SPINS; tries++) {
        if ((state = __atomic_load_n(&crew->state, __ATOMIC_ACQUIRE)) != seen) return state;
        pause_core();
    }
    __atomic_add_fetch(&crew->sleepers, 1, __ATOMIC_SEQ_CST);
    while ((state = __atomic_load_n(&crew->state, __ATOMIC_SEQ_CST)) == seen) sleep_while(&crew->state, seen);
    __atomic_sub_fetch(&crew->sleepers, 1, __ATOMIC_SEQ_CST);
    return state;
}

static void set_state(struct crew *crew, int32_t state) {
    __atomic_store_n(&crew->state, state, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&crew->sleepers, __ATOMIC_SEQ_CST)) wake_all(&crew->state);
}

/* Take part in the regions of a crew until it ends. */
static void serve(struct crew *crew, int64_t number) {
    struct seat *seat = crew->seats + number;
    for (int32_t state = 0; (state = wait_for_state(crew, state)) != CREW_ENDED;) {
        if (state % 2 == 0) continue;
        /* Either this thread sees that the region is closed, or the calling thread sees that this one is in it. */
        __atomic_store_n(&seat->region, state, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&crew->state, __ATOMIC_SEQ_CST) == state && number < crew->team->ranges) run_team_member(crew->team, number);
        __atomic_store_n(&seat->region, 0, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&seat->sleepers, __ATOMIC_SEQ_CST)) wake_all(&seat->region);
    }
}

/* Wait until a thread has left the region that was closed. */
static void wait_for_seat(struct seat *seat) {
    for (int64_t tries = 0; tries < MAX_SPINS; tries++) {
        if (!__atomic_load_n(&seat->region, __ATOMIC_SEQ_CST)) return;
        pause_core();
    }
    int64_t started = now_ns();
    __atomic_store_n(&seat->sleepers, 1, __ATOMIC_SEQ_CST);
    for (int32_t region; (region = __atomic_load_n(&seat->region, __ATOMIC_SEQ_CST));) sleep_while(&seat->region, region);
    __atomic_store_n(&seat->sleepers, 0, __ATOMIC_SEQ_CST);
    count_sleep(&contention, started);
}

static void make_smaller(struct contention *c, int64_t threads, int64_t fewer, int64_t now) {
    int has_grown = c->grown && now - c->grown < c->pause;
    c->pause = !has_grown ? FIRST_PAUSE_NS : c->pause < LAST_PAUSE_NS ? 2 * c->pause : c->pause;
    if (!c->limit) c->all = threads;
    c->limit = fewer;
    c->until = now + c->pause;
}

static void make_larger(struct contention *c, int64_t larger, int64_t now) {
    c->grown = now;
    c->limit = larger < c->all ? larger : 0;
}

/* Teams become smaller if more of the time in which the calling thread is not suspended is lost than fewer threads would cost. After a
 * pause, they become larger, but not while the calling thread itself is suspended for so long that other threads would not help. */
static void judge_window(struct contention *c, int64_t now) {
    const struct window *w = &c->window;
    int64_t fewer = w->threads * 3 / 4, larger = c->limit + (c->limit + 3) / 4;
    int64_t suspended = w->total - w->slept - (thread_cpu_ns() - w->cpu); /* or less: CPU time between the regions counts, too */
    if (suspended < 0) suspended = 0;
    if (w->threads > 1 && w->lost * w->threads > (w->total - suspended) * (w->threads - fewer)) make_smaller(c, w->threads, fewer, now);
    else if (!c->limit) return;
    else if (suspended * larger > w->total * (larger - c->limit)) c->until = now + c->pause;
    else if (now >= c->until) make_larger(c, larger, now);
}

/* Add the time up to now to the window, which is judged when it is long enough. */
static void add_to_window(int64_t threads) {
    struct contention *c = &contention;
    struct window *w = &c->window;
    int64_t now = now_ns();
    if (c->lost > MIN_LOST_NS) w->lost += c->lost;
    if (w->threads < threads) w->threads = threads;
    w->slept += c->slept;
    w->total += now - c->since;
    c->since = now, c->lost = c->slept = 0;
    if (w->total < WINDOW_NS) return;
    judge_window(c, now);
    *w = (struct window){.cpu = thread_cpu_ns()};
}

/* Run run(data, number) on `threads` threads and measure it. */
static void run_measured(fork_function *fork, int64_t threads, void (*run)(void *, int64_t), void *data) {
    struct contention *c = &contention;
    struct fork forked = {run, data, 0, 0, 0, c};
    int64_t started = c->since = now_ns();
    if (!c->window.total) c->window = (struct window){.cpu = thread_cpu_ns()};
    if (threads == 1) run(data, 0);
    else {
        fork(run_forked_member, &forked, threads, 0);
        c->lost += now_ns() - started - (forked.ended - forked.began);
    }
    add_to_window(threads);
}

/* Run a region of the calling thread's crew. */
static void run_crew_region(struct crew *crew, struct team *team) {
    int32_t open = crew->state + 1;
    crew->team = team;
    set_state(crew, open);
    run_team_member(team, 0);
    __atomic_store_n(&crew->state, open + 1, __ATOMIC_SEQ_CST);
    for (int64_t number = 1; number < crew->threads; number++) wait_for_seat(crew->seats + number);
    add_to_window(team->ranges);
}

static void run_crew_member(void *data, int64_t number) {
    struct crew *own = data;
    if (number) return serve(own, number);
    crew = own;
    own->status = own->calls(own->argument);
    crew = NULL;
    set_state(own, CREW_ENDED);
}

int64_t team_size(int64_t threads) {
    int64_t limit = contention.limit;
    return limit && limit < threads ? limit : threads;
}

int stoker_team_size(const int64_t *threads) { return team_size(*threads); }

int64_t team_member(void) { return member_number; }

int has_crew(void) { return crew != NULL; }

void run_stages(fork_function *fork, int64_t threads, struct stage *stages, int64_t count) {
    int64_t most = 1, counters[256] __attribute__((aligned(64)));
    for (int64_t s = 0; s < count; s++) most = most < stages[s].count ? stages[s].count : most;
    threads = threads > 1 && most > 1 ? team_size(threads) : 1;
    if (threads > most) threads = most;
    if (crew && threads > crew->threads) threads = crew->threads;
    struct team team = {stages, count, threads, counters, (count + 7) / 8 * 8, &contention};
    if (team.pitch * threads > 256 && !(team.next = calloc(team.pitch * threads, sizeof *team.next))) team.ranges = 1, team.next = counters;
    if (team.next == counters) memset(counters, 0, team.pitch * team.ranges * sizeof *counters);
    if (crew && team.ranges > 1) run_crew_region(crew, &team);
    else if (!crew && (threads > 1 || contention.limit)) run_measured(fork, threads, run_team_member, &team);
    else run_team_member(&team, 0);
    if (team.next != counters) free(team.next);
}

int run_with_crew(fork_function *fork, int64_t threads, int (*calls)(const void *), const void *argument) {
    threads = threads > 1 ? team_size(threads) : 1;
    if (threads == 1 || crew) return calls(argument);
    struct seat seats[threads];
    memset(seats, 0, sizeof seats);
    struct crew own = {.calls = calls, .argument = argument, .threads = threads, .seats = seats};
    run_measured(fork, threads, run_crew_member, &own);
    return own.status;
}
