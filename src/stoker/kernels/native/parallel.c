/* Parts of a job on the threads that PyTorch has, since two pools of them would take each other's cores. */

#include <stddef.h>

#include "vector.h"

struct parts {
    void (*work)(void *, int64_t);
    void *job;
    int64_t count, next;
};

/* What each thread does: the next part until none is left, so that a team of any size does all of them. */
static void take(void *data) {
    struct parts *parts = data;
    for (int64_t i; (i = __atomic_fetch_add(&parts->next, 1, __ATOMIC_RELAXED)) < parts->count;) parts->work(parts->job, i);
}

void run_parts(fork_function *fork, int64_t threads, int64_t count, void (*work)(void *, int64_t), void *job) {
    struct parts parts = {work, job, count, 0};
    if (threads > 1 && count > 1) fork(take, &parts, least(threads, count), 0);
    else take(&parts);
}
