/* Stages of parallel work on PyTorch's threads. */

#ifndef STOKER_PARALLEL_H
#define STOKER_PARALLEL_H

#include <stdint.h>

/* One stage: work(job, i) for each i < count, in any order, on any thread. `done` and `sleepers` are counters that begin at 0. */
struct stage {
    void (*work)(void *, int64_t);
    void *job;
    int64_t count;
    int32_t done, sleepers; /* finished items; threads that sleep until all are */
    /* NULL, or prepare(job, n): what each thread does before its first item of the stage. n is the number of the thread, `team_member()`. */
    void (*prepare)(void *, int64_t);
};

/* GOMP_parallel(function, data, num_threads, flags): runs function(data) on every thread of a team. */
typedef void fork_function(void (*)(void *), void *, unsigned, unsigned);

/* How many of `threads` the calling thread should use now: fewer while other processes use the cores. */
int64_t team_size(int64_t threads);

/* The number of the calling thread in the team that runs it, from 0 on and below `threads` of `run_stages`. */
int64_t team_member(void);

/* Run `count` stages, each after all work of the one before, on up to team_size(threads) threads of PyTorch's OpenMP runtime, whose
 * GOMP_parallel is `fork`. */
void run_stages(fork_function *fork, int64_t threads, struct stage *stages, int64_t count);

/* Run calls(argument), and keep the threads together for all `run_stages` in it, which then need no fork. Returns its result. */
int run_with_crew(fork_function *fork, int64_t threads, int (*calls)(const void *), const void *argument);

/* Whether the calling thread is in `run_with_crew`, so that less work is worth a second thread. */
int has_crew(void);

#endif
