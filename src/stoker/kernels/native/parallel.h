/* Stages of parallel work on PyTorch's threads. */

#ifndef STOKER_PARALLEL_H
#define STOKER_PARALLEL_H

#include <stdint.h>

/* One stage: work(job, i) for each i < count, in any order, on any thread. `next` and `done` are counters that begin at 0. */
struct stage {
    void (*work)(void *, int64_t);
    void *job;
    int64_t count, next, done;
};

/* GOMP_parallel(function, data, num_threads, flags): runs function(data) on every thread of a team. */
typedef void fork_function(void (*)(void *), void *, unsigned, unsigned);

/* Run `count` stages, each after all work of the one before, on up to `threads` threads of PyTorch's OpenMP runtime, whose GOMP_parallel
 * is `fork`. */
void run_stages(fork_function *fork, int64_t threads, struct stage *stages, int64_t count);

#endif
