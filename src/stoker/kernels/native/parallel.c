/* Stages of parallel work on the threads that PyTorch already has: a second thread pool would compete with them for the same cores.
 *
 * Each thread of a team begins with its own range of the work items, so that it reads neighbouring memory, and then takes items from the
 * ranges of others. A team of any size, even one thread, does all of them. Between two stages threads spin for a while, because sleeping
 * and waking up takes longer than most stages:
 *
 *     thread 0   | item 0 | item 1 | item 2 |  wait until done == count  | next stage ...
 *     thread 1   | item 3 | item 4 | item 5 |          wait              | next stage ...
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
    int64_t lost;         /* of the current region: how long the calling thread waited for others, after its spins */
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
    int64_t *next;  /* [stages, ranges]: the items of each range that are taken */
    int64_t members;
    struct contention *caller;
};

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

/* Count an item as done. The last one wakes those that sleep. */
static void finish_item(struct stage *stage) {
    if (__atomic_add_fetch(&stage->done, 1, __ATOMIC_SEQ_CST) == stage->count && __atomic_load_n(&stage->sleepers, __ATOMIC_SEQ_CST))
        wake_all(&stage->done);
}

/* The acquire loads pair with `finish_item`: what other threads stored in this stage is visible afterwards. */
static void wait_until_done(struct stage *stage, const struct team *team) {
    for (int64_t tries = 0; tries < MAX_SPINS; tries++) {
        if (__atomic_load_n(&stage->done, __ATOMIC_ACQUIRE) == stage->count) return;
        pause_core();
    }
    int64_t started = now_ns();
    __atomic_add_fetch(&stage->sleepers, 1, __ATOMIC_SEQ_CST);
    for (int32_t done; (done = __atomic_load_n(&stage->done, __ATOMIC_SEQ_CST)) < stage->count;) sleep_while(&stage->done, done);
    if (team->caller != &contention) return;
    int64_t slept = now_ns() - started;
    contention.lost += slept;
    contention.slept += slept;
}

/* Do the items of range `range` of stage number `s` that no thread has taken. */
static void work_on_range(const struct team *team, int64_t s, int64_t range) {
    struct stage *stage = team->stages + s;
    int64_t first = stage->count * range / team->ranges, count = stage->count * (range + 1) / team->ranges - first;
    int64_t *next = team->next + s * team->ranges + range;
    if (__atomic_load_n(next, __ATOMIC_RELAXED) >= count) return;
    for (int64_t i; (i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < count;) {
        stage->work(stage->job, first + i);
        finish_item(stage);
    }
}

/* What each thread of the team runs. */
static void run_team_member(void *data) {
    struct team *team = data;
    int64_t own = __atomic_fetch_add(&team->members, 1, __ATOMIC_RELAXED) % team->ranges;
    for (int64_t s = 0; s < team->count; s++) {
        for (int64_t i = 0; i < team->ranges; i++) work_on_range(team, s, (own + i) % team->ranges);
        wait_until_done(team->stages + s, team);
    }
}

/* The same. The calling thread leaves in `lost` the time that passes in the OpenMP runtime before and after its work, which is long if the
 * other threads have not yet left the last region or not yet ended this one. */
static void run_forked_member(void *data) {
    int is_caller = ((struct team *)data)->caller == &contention;
    if (is_caller) contention.lost += now_ns();
    run_team_member(data);
    if (is_caller) contention.lost -= now_ns();
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

/* Run a team and measure it. */
static void run_team(fork_function *fork, int64_t threads, struct team *team) {
    struct contention *c = &contention;
    struct window *w = &c->window;
    int64_t started = now_ns();
    if (!w->total) *w = (struct window){.cpu = thread_cpu_ns()};
    c->lost = c->slept = 0;
    if (threads > 1) fork(run_forked_member, team, threads, 0);
    else run_team_member(team);
    int64_t taken = now_ns() - started;
    if (threads > 1) c->lost += taken;
    if (c->lost > MIN_LOST_NS) w->lost += c->lost;
    if (w->threads < threads) w->threads = threads;
    w->slept += c->slept;
    w->total += taken;
    if (w->total < WINDOW_NS) return;
    judge_window(c, started + taken);
    w->total = 0;
}

int64_t team_size(int64_t threads) {
    int64_t limit = contention.limit;
    return limit && limit < threads ? limit : threads;
}

int stoker_team_size(const int64_t *threads) { return team_size(*threads); }

void run_stages(fork_function *fork, int64_t threads, struct stage *stages, int64_t count) {
    int64_t most = 1, single[64] = {0};
    for (int64_t s = 0; s < count; s++) most = most < stages[s].count ? stages[s].count : most;
    threads = threads > 1 && most > 1 ? team_size(threads) : 1;
    if (threads > most) threads = most;
    struct team team = {stages, count, threads, single, 0, &contention};
    if (count * team.ranges > 64 && !(team.next = calloc(count * team.ranges, sizeof *team.next))) team.ranges = 1, team.next = single;
    if (threads > 1 || contention.limit) run_team(fork, threads, &team);
    else run_team_member(&team);
    if (team.next != single) free(team.next);
}
