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
 * the team smaller. See docs/performance.md for what it saves.
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
#define WINDOW_NS 20000000       /* of work, after which the part that was lost is judged */
#define FIRST_PAUSE_NS 100000000 /* the time after which a larger team is tried; doubled whenever that fails */
#define LAST_PAUSE_NS 1600000000

/* Whether the teams of a calling thread have to share their cores with other work. */
struct contention {
    int64_t limit;        /* threads of a team; 0: all */
    int64_t until, pause; /* when a larger team is tried; the length of that wait */
    int64_t grown;        /* when the team was made larger */
    int64_t lost;         /* nanoseconds of the current region in which the calling thread waited, after its spins */
    int64_t sum, total;   /* of the regions of a window: nanoseconds lost, and in all */
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

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

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
    if (team->caller == &contention) contention.lost += now_ns() - started;
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

/* The same with the wait for the end of the others, which begins here and ends in run_team. */
static void run_forked_member(void *data) {
    run_team_member(data);
    if (((struct team *)data)->caller == &contention) contention.lost -= now_ns();
}

/* Run a team of `threads` > 1. Make the next ones smaller if more time is lost in waits for suspended threads than by having fewer. */
static void run_team(fork_function *fork, int64_t threads, struct team *team) {
    struct contention *c = &contention;
    int64_t started = now_ns();
    c->lost = 0;
    fork(run_forked_member, team, threads, 0);
    int64_t ended = now_ns(), fewer = threads * 3 / 4;
    c->lost += ended;
    c->total += ended - started;
    if (c->lost > MIN_LOST_NS) c->sum += c->lost;
    int has_grown = c->grown && ended - c->grown < c->pause;
    if (c->total < WINDOW_NS) return;
    if (c->sum * threads > c->total * (threads - fewer)) {
        c->pause = !has_grown ? FIRST_PAUSE_NS : c->pause < LAST_PAUSE_NS ? 2 * c->pause : c->pause;
        c->limit = fewer;
        c->until = ended + c->pause;
    }
    c->sum = c->total = 0;
}

int64_t team_size(int64_t threads) {
    struct contention *c = &contention;
    if (!c->limit || threads <= c->limit) return threads;
    int64_t now = now_ns();
    if (now < c->until) return c->limit;
    c->grown = now;
    c->sum = c->total = 0;
    c->until = now + c->pause;
    c->limit += (c->limit + 3) / 4;
    if (c->limit >= threads) c->limit = 0;
    return c->limit ? c->limit : threads;
}

int stoker_team_size(const int64_t *threads) { return team_size(*threads); }

void run_stages(fork_function *fork, int64_t threads, struct stage *stages, int64_t count) {
    int64_t most = 1, single[64] = {0};
    for (int64_t s = 0; s < count; s++) most = most < stages[s].count ? stages[s].count : most;
    threads = threads > 1 && most > 1 ? team_size(threads) : 1;
    if (threads > most) threads = most;
    struct team team = {stages, count, threads, single, 0, &contention};
    if (count * team.ranges > 64 && !(team.next = calloc(count * team.ranges, sizeof *team.next))) team.ranges = 1, team.next = single;
    if (threads > 1) run_team(fork, threads, &team);
    else run_team_member(&team);
    if (team.next != single) free(team.next);
}
