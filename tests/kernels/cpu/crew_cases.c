/* Random regions of a crew, on threads that are started for it. For test_crew.py. */

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "parallel.c"

#define MAX_STAGES 6
#define MAX_ITEMS 40

/* A region: what its stages counted, and how long items take. */
struct region_case {
    int64_t count;
    struct stage stages[MAX_STAGES];
    struct stage_case {
        struct region_case *region;
        int64_t number, items;
        int32_t done[MAX_ITEMS], prepared[64], errors;
    } cases[MAX_STAGES];
    int sleeps; /* every `sleeps`-th item takes longer than threads spin; 0: none */
};

static void prepare_case(void *data, int64_t member) {
    struct stage_case *c = data;
    if (member < 0 || member >= 64 || member != team_member() || __atomic_fetch_add(c->prepared + member, 1, __ATOMIC_RELAXED))
        __atomic_fetch_add(&c->errors, 1, __ATOMIC_RELAXED);
}

/* Item i counts itself, once, after all items of the stage before and after the preparation by its thread. */
static void work_case(void *data, int64_t i) {
    struct stage_case *c = data;
    int wrong = c->done[i] != 0;
    if (c->region->stages[c->number].prepare) wrong += __atomic_load_n(c->prepared + team_member(), __ATOMIC_RELAXED) != 1;
    for (int64_t s = 0; s < c->number; s++)
        for (int64_t j = 0; j < c->region->cases[s].items; j++) wrong += c->region->cases[s].done[j] != 1;
    if (c->region->sleeps && (c->number * 31 + i * 7) % c->region->sleeps == 0) usleep(150);
    c->done[i]++;
    if (wrong) __atomic_fetch_add(&c->errors, 1, __ATOMIC_RELAXED);
}

/* What `calls` gets: regions, and what they found. */
struct replay_case {
    fork_function *fork;
    int64_t threads, regions, sleeps;
    unsigned seed;
    int64_t errors;
    int status;
};

static int run_cases(const void *data) {
    struct replay_case *r = (struct replay_case *)data;
    for (int64_t n = 0; n < r->regions; n++) {
        struct region_case *region = calloc(1, sizeof *region);
        region->count = 1 + rand_r(&r->seed) % MAX_STAGES, region->sleeps = (int)r->sleeps;
        for (int64_t s = 0; s < region->count; s++) {
            struct stage_case *c = region->cases + s;
            c->region = region, c->number = s, c->items = rand_r(&r->seed) % MAX_ITEMS;
            region->stages[s] = (struct stage){work_case, c, c->items, 0, 0, rand_r(&r->seed) % 2 ? prepare_case : NULL};
        }
        int64_t threads = rand_r(&r->seed) % 4 ? r->threads : 1; /* some regions are too small for several threads */
        run_stages(r->fork, threads, region->stages, region->count);
        for (int64_t s = 0; s < region->count; s++) {
            r->errors += region->cases[s].errors;
            for (int64_t i = 0; i < region->cases[s].items; i++) r->errors += region->cases[s].done[i] != 1;
        }
        free(region); /* a thread that has not left the region would read it */
        if (r->sleeps && rand_r(&r->seed) % 8 == 0) usleep(200); /* the other threads sleep */
    }
    return r->status;
}

static void *run_thread(void *data) {
    void **call = data;
    ((void (*)(void *))call[0])(call[1]);
    return NULL;
}

/* Stands for GOMP_parallel. */
static void fork_threads(void (*function)(void *), void *data, unsigned threads, unsigned flags) {
    (void)flags;
    pthread_t started[64];
    void *call[2] = {(void *)function, data};
    for (unsigned i = 1; i < threads; i++)
        if (pthread_create(started + i, NULL, run_thread, call)) abort();
    function(data);
    for (unsigned i = 1; i < threads; i++) pthread_join(started[i], NULL);
}

/* Returns the number of errors, or -1 for a wrong status. Without a fork, threads are started. */
int64_t check_crew(fork_function *fork, int64_t threads, int64_t regions, int64_t sleeps, int64_t seed) {
    struct replay_case r = {fork ? fork : fork_threads, threads, regions, sleeps, (unsigned)seed, 0, (int)(seed % 2)};
    int status = run_with_crew(r.fork, threads, run_cases, &r);
    return status != r.status || has_crew() ? -1 : r.errors;
}
