/* Parts of jobs on the threads that PyTorch has, since two pools of them would take each other's cores. */

#include <sched.h>
#include <stddef.h>

#include "vector.h"

#define SPINS 4096 /* looks at what others are at before a thread lets another have its core */

struct stages {
    struct stage *first;
    int64_t count;
};

static inline void rest(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wait_for(const struct stage *stage) {
    for (int64_t tries = 0; __atomic_load_n(&stage->done, __ATOMIC_ACQUIRE) < stage->count; tries++) {
        if (tries < SPINS) rest();
        else sched_yield();
    }
}

/* What each thread does: the next part until none is left, so that a team of any size does all of them; then the next stage, once others
 * have done theirs. */
static void take(void *data) {
    const struct stages *stages = data;
    for (int64_t s = 0; s < stages->count; s++) {
        struct stage *stage = stages->first + s;
        for (int64_t i; (i = __atomic_fetch_add(&stage->next, 1, __ATOMIC_RELAXED)) < stage->count;) {
            stage->work(stage->job, i);
            __atomic_fetch_add(&stage->done, 1, __ATOMIC_RELEASE);
        }
        wait_for(stage);
    }
}

void run_stages(fork_function *fork, int64_t threads, struct stage *first, int64_t count) {
    struct stages stages = {first, count};
    int64_t most = 0;
    for (int64_t s = 0; s < count; s++) most = most < first[s].count ? first[s].count : most;
    if (threads > 1 && most > 1) fork(take, &stages, least(threads, most), 0);
    else take(&stages);
}
