/* Regions of parallel work on clocks that stand still, except where a region says how much time passes. For test_contention.py. */

#include <stdint.h>
#include <time.h>

static int64_t wall_ns, cpu_ns;

static int read_test_clock(clockid_t clock, struct timespec *now) {
    int64_t ns = clock == CLOCK_MONOTONIC ? wall_ns : cpu_ns;
    now->tv_sec = ns / 1000000000, now->tv_nsec = ns % 1000000000;
    return 0;
}

#define clock_gettime read_test_clock
#include "parallel.c"
#undef clock_gettime

/* What the calling thread does in a region: it spins before its work, works, is suspended, and spins after its work, in nanoseconds. */
struct region {
    int64_t before, work, suspended, after;
};

static void spin(int64_t ns) { wall_ns += ns, cpu_ns += ns; }

static void work(void *data, int64_t item) {
    const struct region *region = data;
    if (item) return;
    spin(region->work);
    wall_ns += region->suspended;
}

static const struct region *forked;
static int64_t team; /* threads of the last region */

/* Stands for GOMP_parallel. */
static void run_alone(void (*function)(void *), void *data, unsigned threads, unsigned flags) {
    (void)flags;
    team = threads;
    spin(forked->before);
    function(data);
    spin(forked->after);
}

/* Run a region that may have `threads`. Returns how many it has. */
int64_t run_region(int64_t threads, const struct region *region) {
    struct stage stage = {work, (void *)region, threads, 0, 0, NULL};
    forked = region, team = 1;
    run_stages(run_alone, threads, &stage, 1);
    return team;
}

/* Regions of a crew, and the threads that each of them may have. */
struct replay {
    int64_t threads, regions;
    const struct region *region;
    int64_t *sizes;
};

static int run_regions(const void *data) {
    const struct replay *replay = data;
    for (int64_t i = 0; i < replay->regions; i++) {
        struct stage stage = {work, (void *)replay->region, replay->threads, 0, 0, NULL};
        replay->sizes[i] = team_size(replay->threads);
        contention.lost += replay->region->after; /* as if it had waited for another thread */
        spin(replay->region->after);
        run_stages(run_alone, replay->threads, &stage, 1);
    }
    return 0;
}

/* Run `regions` regions of a crew. Writes the size of each to `sizes`. */
void run_crew(int64_t threads, int64_t regions, const struct region *region, int64_t *sizes) {
    static const struct region nothing;
    struct replay replay = {threads, regions, region, sizes};
    forked = &nothing;
    run_with_crew(run_alone, threads, run_regions, &replay);
}

/* Begin with all threads. */
void forget_contention(void) { contention = (struct contention){0}; }
