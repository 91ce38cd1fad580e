/* RMS norms and layer norms over the last axis, in float32. See `ops.norm`. */

#include "around.h"

#define MAX_SIZE (1 << 14)             /* elements of a row, in a buffer on the stack */
#define SHARE_ELEMENTS (32 << 10)      /* of the rows of a work item */
#define MIN_PARALLEL_ELEMENTS (64 << 10) /* from which a second thread is worth its start */

/* `NORM` in library.py. Strides in elements. NULL: absent. */
struct norm_rows {
    fork_function *fork;
    int64_t threads;
    const char *x; /* [tokens, heads, size] */
    void *y;       /* the same without gaps */
    const void *weight, *bias; /* [size] */
    int64_t tokens, heads, size, token_stride, head_stride, dtype, weight_dtype, bias_dtype, kind;
    double eps;
};

static int64_t rows_of_share(const struct norm_rows *a) { return a->size < SHARE_ELEMENTS ? SHARE_ELEMENTS / a->size : 1; }

/* Work item `index`: its share of the rows. */
static void normalize_share(void *job, int64_t index) {
    const struct norm_rows *a = job;
    struct linear row = {
        .in = a->size, .dtype = a->dtype, .norm = a->kind, .eps = a->eps, .norm_weight = a->weight, .norm_bias = a->bias,
        .norm_weight_dtype = a->weight_dtype, .norm_bias_dtype = a->bias_dtype,
    };
    float x[MAX_SIZE + 2 * LANES];
    int64_t rows = rows_of_share(a), end = min_i64((index + 1) * rows, a->tokens * a->heads);
    for (int64_t r = index * rows; r < end; r++) {
        row.x = a->x + (r / a->heads * a->token_stride + r % a->heads * a->head_stride) * size_of(a->dtype);
        load_input(&row, 0, x, padded(a->size));
        for (int64_t k = 0; k < a->size; k += LANES) store_up_to(a->dtype, a->y, r * a->size + k, load(FLOAT32, x, k), a->size - k);
    }
}

/* Returns 0, or 1 when the reference must run instead (a size that this function does not support). */
int stoker_norm(const struct norm_rows *a) {
    if (a->size < 1 || a->size > MAX_SIZE) return 1;
    int64_t rows = a->tokens * a->heads, share = rows_of_share(a);
    struct stage stage = {normalize_share, (void *)a, (rows + share - 1) / share, 0, 0};
    run_stages(a->fork, rows * a->size < MIN_PARALLEL_ELEMENTS ? 1 : a->threads, &stage, 1);
    return 0;
}
