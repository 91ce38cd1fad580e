/* Greedy sampling: the index of the largest logit of each row. See `ops.sample`. */

#include "parallel.h"
#include "vector.h"

#define MIN_PARALLEL_LOGITS (128 << 10) /* of all rows, from which a second thread is worth its start */
#define CHAINS 4                        /* vectors in flight */

/* `GREEDY` in library.py. */
struct greedy {
    fork_function *fork;
    int64_t threads;
    const char *logits; /* [rows, size] */
    int32_t *out;       /* [rows] */
    int64_t rows, size, stride, dtype;
};

/* The largest logit that each lane has seen, its first vector, and whether one was NaN. */
struct lanes {
    f32v largest;
    i32v at, is_nan;
};

static INLINE void add_vector(struct lanes *lanes, f32v v, int64_t vector) {
    i32v is_larger = v > lanes->largest;
    lanes->largest = blend(is_larger, v, lanes->largest);
    lanes->at = ((i32v){0} + (int32_t)vector & is_larger) | (lanes->at & ~is_larger);
    lanes->is_nan |= v != v;
}

/* The first index of the largest of `size` logits, or -1 if it is not finite. */
static INLINE int64_t largest_index(int dtype, const char *row, int64_t size) {
    struct lanes lanes[CHAINS];
    int64_t vectors = size / LANES, v = 0, best = -1;
    float largest = -INFINITY;
    for (int c = 0; c < CHAINS; c++) lanes[c] = (struct lanes){.largest = broadcast(-INFINITY)};
    for (; v + CHAINS <= vectors; v += CHAINS)
        UNROLL for (int c = 0; c < CHAINS; c++) add_vector(lanes + c, load(dtype, row, (v + c) * LANES), v + c);
    for (; v < vectors; v++) add_vector(lanes, load(dtype, row, v * LANES), v);
    for (int c = 0; c < CHAINS; c++)
        for (int i = 0; i < LANES; i++) {
            int64_t index = (int64_t)lanes[c].at[i] * LANES + i;
            float value = lanes[c].largest[i];
            if (lanes[c].is_nan[i]) return -1;
            if (value > largest || (value == largest && index < best)) largest = value, best = index;
        }
    f32v rest = load_first(dtype, row, vectors * LANES, size - vectors * LANES);
    for (int64_t i = 0; i < size - vectors * LANES; i++) {
        if (rest[i] != rest[i]) return -1;
        if (rest[i] > largest) largest = rest[i], best = vectors * LANES + i;
    }
    return largest == INFINITY ? -1 : best;
}

/* Work item `row`. */
static void sample_row(void *job, int64_t row) {
    const struct greedy *a = job;
    const char *logits = a->logits + row * a->stride * size_of(a->dtype);
    a->out[row] = (int32_t)(a->dtype == FLOAT32 ? largest_index(FLOAT32, logits, a->size) : largest_index(BFLOAT16, logits, a->size));
}

/* Returns 0, or 1 when the reference must run instead (a type that this function does not support). */
int stoker_greedy(const struct greedy *a) {
    if (a->dtype != FLOAT32 && a->dtype != BFLOAT16) return 1;
    struct stage rows = {sample_row, (void *)a, a->rows, 0, 0};
    run_stages(a->fork, a->rows * a->size >= MIN_PARALLEL_LOGITS ? a->threads : 1, &rows, 1);
    return 0;
}
