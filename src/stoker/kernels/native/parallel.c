/* Stages of parallel work on the threads that PyTorch already has: a second thread pool would compete with them for the same cores.
 *
 * Threads take work items from a shared counter, so that a team of any size, even one thread, does all of them. Between two stages they
 * spin, because sleeping and waking up takes longer than most stages:
 *
 *     thread 0   | item 0 | item 3 |  wait until done == count  | next stage ...
 *     thread 1   | item 1 | item 2 | item 4 |      wait         | next stage ...
 */

#include <sched.h>
#include <stddef.h>

#include "parallel.h"

#define MAX_SPINS 4096 /* polls before a waiting thread yields its core */

struct team {
    struct stage *stages;
    int64_t count;
};

static inline void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The acquire load pairs with the release increments below: what other threads stored in this stage is visible afterwards. */
static void wait_until_done(const struct stage *stage) {
    for (int64_t tries = 0; __atomic_load_n(&stage->done, __ATOMIC_ACQUIRE) < stage->count; tries++) {
        if (tries < MAX_SPINS) pause_core();
        else sched_yield();
    }
}

/* What each thread of the team runs. */
static void run_team_member(void *data) {
    const struct team *team = data;
    for (int64_t s = 0; s < team->count; s++) {
        struct stage *stage = team->stages + s;
        for (int64_t i; (i = __atomic_fetch_add(&stage->next, 1, __ATOMIC_RELAXED)) < stage->count;) {
            stage->work(stage->job, i);
            __atomic_fetch_add(&stage->done, 1, __ATOMIC_RELEASE);
        }
        wait_until_done(stage);
    }
}

void run_stages(fork_function *fork, int64_t threads, struct stage *stages, int64_t count) {
    struct team team = {stages, count};
    int64_t most = 0;
    for (int64_t s = 0; s < count; s++) most = most < stages[s].count ? stages[s].count : most;
    if (threads > 1 && most > 1) fork(run_team_member, &team, threads < most ? threads : most, 0);
    else run_team_member(&team);
}
