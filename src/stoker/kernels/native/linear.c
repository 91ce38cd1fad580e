/* Linears of up to MAX_ROWS rows of x, one or several that follow one another. Weights are read once, at the speed of memory, widened in
 * registers, and summed in float32.
 *
 * `prepare_row` applies input gate and norm to a row of x, and `compute_share` computes output features. Several rows are prepared in a stage
 * of their own. A single row is prepared by each thread, for itself, which takes no longer and saves a wait of all threads.
 *
 *     weight [out, in]    BLOCK rows are finished together: products with all rows of x, then bias, gate and residual
 *       rows  0..15  |  block 0: tiles of WIDTH rows × all features       a work item (share) is several blocks
 *       rows 16..31  |  block 1                                           passes: up to ROWS_PER_PASS rows of x at a time; the block's
 *          ...                                                            weights stay in the L1 cache between passes
 *
 * tile.h has the products of a tile. The order of the additions to a sum does not depend on the number of rows, so that a row of y is bitwise
 * the same in every batch.
 */

#include <stdlib.h>

#include "around.h"
#include "digits.h"
#include "tile.h"

#define MAX_LINEARS 4
#define MIN_PARALLEL_BYTES (128 << 10) /* of a weight, from which a second thread is worth its start */
#define SHARES 16                      /* of a thread, or more, so that all threads have nearly the same number of blocks */

/* Rows of x of a pass when `rows` are left. Three run as four and so on, with rows of zeros, so that fewer functions are compiled. */
static INLINE int64_t rows_of_pass(int64_t rows) { return rows <= 2 ? rows : rows <= 4 ? 4 : min_i64(rows <= 6 ? 6 : 8, ROWS_PER_PASS); }

/* Rows of x by passes. Digits need none. */
static int64_t padded_rows(const struct job *job) {
    int64_t rows = job->linear->rows, whole = rows / ROWS_PER_PASS * ROWS_PER_PASS;
    return job->linear->blocks ? rows : whole + rows_of_pass(rows - whole);
}

/* Reorder each 2 × LANES features of x [pitch] to the even ones, then the odd ones: the order in which LANES bytes of int4 are decoded
 * (their low halves, then their high halves). */
static void split_even_odd(float *x, int64_t pitch) {
    for (float *end = x + pitch; x < end; x += 2 * LANES) {
        float split[2 * LANES];
        for (int i = 0; i < LANES; i++) split[i] = x[2 * i], split[LANES + i] = x[2 * i + 1];
        memcpy(x, split, sizeof split);
    }
}

/* Prefetch the first PREFETCH_BYTES of a weight, which the products before it do not reach. */
static void prefetch_first_rows(const struct linear *a) {
    for (int64_t i = 0; i < PREFETCH_BYTES; i += 64) __builtin_prefetch((const char *)a->weight + i);
}

/* Work item `row` of the first stage: the input of the product. */
static void prepare_row(void *data, int64_t row) {
    const struct job *job = data;
    const struct linear *a = job->linear;
    float *x = job->rows + row * job->pitch;
    load_input(a, row, x, job->pitch);
    if (a->rounding) {
        float scale = rounding_scale(a, x, job->pitch);
        for (int64_t k = 0; k < job->pitch; k += LANES) store_up_to(FLOAT32, x, k, round_to_e4m3(load(FLOAT32, x, k) / scale) * scale, LANES);
    }
#ifdef HAS_BLOCKS
    if (a->blocks) return convert_to_digits(a, x, job->x + row * job->x_pitch);
#endif
    if (a->weight_dtype == UINT8) split_even_odd(x, job->pitch);
    int64_t first = row / ROWS_PER_PASS * ROWS_PER_PASS, rows = rows_of_pass(a->rows - first);
    float *to = job->x + first * job->pitch + (row - first) * LANES;
    for (int64_t k = 0; k < job->pitch; k += LANES) store_up_to(FLOAT32, to, k * rows, load(FLOAT32, x, k), LANES);
}

/* The job with the copy of x that thread `member` prepares for itself. */
static struct job own_job(const struct job *job, int64_t member) {
    struct job own = *job;
    own.rows += member * job->copy_floats, own.x += member * job->copy_floats;
    return own;
}

/* What each thread does before its first share, if x is a single row. */
static void prepare_copy(void *data, int64_t member) {
    struct job own = own_job(data, member);
    prepare_row(&own, 0);
}

/* sums[r][n] = row r of a pass of x · weight row first + n, for R rows of x and `count` weight rows. Rows that fill no tile are
 * multiplied one by one, by tiles of W times the same row. */
static INLINE void multiply_block(int dtype, int R, const struct job *job, const struct group_scales *scales, int64_t first, int64_t count,
                                  const float *x, float (*sums)[BLOCK]) {
    const struct linear *a = job->linear;
    int64_t pitch = dtype == UINT8 ? a->in / 2 : a->in * size_of(dtype), groups = scales ? job->groups_of_row : 0;
    for (int64_t n = 0, rows; n < count; n += rows) {
        struct tile t = {.row = (const char *)a->weight + (first + n) * pitch};
        rows = 1;
        if (n + WIDTH(R) <= count) rows = WIDTH(R), t.pitch = pitch, t.groups = groups;
        if (scales) t.scale = scales->scale + n * groups, t.low = scales->low + n * groups;
        if (dtype == UINT8) multiply_int4_groups(WIDTH(R), R, a, x, &t);
        else if (dtype == INT8 && scales) multiply_int8_groups(WIDTH(R), R, a, x, &t);
        else multiply_plain(dtype, WIDTH(R), R, a->in, x, &t);
        UNROLL for (int r = 0; r < R; r++) {
            float sum[4];
            if (WIDTH(R) == 4) sum_lanes_of_4(t.sum[0][r], t.sum[1][r], t.sum[2][r], t.sum[3][r], sum);
            else
                UNROLL for (int w = 0; w < WIDTH(R); w++) sum[w] = sum_lanes(t.sum[w][r]);
            memcpy(sums[r] + n, sum, (rows == 1 ? 1 : WIDTH(R)) * sizeof *sum);
        }
    }
}

/* One function per weight dtype, so that each is compiled with its own conversion. */
#define PRODUCTS(NAME, DTYPE)                                                                                                              \
    static void NAME(const struct job *job, const struct group_scales *scales, int64_t first, int64_t count, float (*sums)[BLOCK]) {       \
        for (int64_t r = 0; r < job->linear->rows; r += ROWS_PER_PASS) {                                                                   \
            const float *x = job->x + r * job->x_pitch;                                                                                     \
            switch (rows_of_pass(job->linear->rows - r)) {                                                                                 \
            case 1: multiply_block(DTYPE, 1, job, scales, first, count, x, sums + r); break;                                               \
            case 2: multiply_block(DTYPE, 2, job, scales, first, count, x, sums + r); break;                                               \
            case 4: multiply_block(DTYPE, 4, job, scales, first, count, x, sums + r); break;                                               \
            case 6: multiply_block(DTYPE, min_i64(6, ROWS_PER_PASS), job, scales, first, count, x, sums + r); break;                       \
            case 8: multiply_block(DTYPE, ROWS_PER_PASS, job, scales, first, count, x, sums + r);                                          \
            }                                                                                                                              \
        }                                                                                                                                  \
    }
PRODUCTS(float32_products, FLOAT32)
PRODUCTS(bfloat16_products, BFLOAT16)
PRODUCTS(int8_products, INT8)
PRODUCTS(int4_products, UINT8)
PRODUCTS(e4m3_products, E4M3)

static void grouped_products(const struct job *job, int64_t first, int64_t count, float (*sums)[BLOCK]) {
#ifdef HAS_BLOCKS
    if (job->linear->blocks) return multiply_digits(job->linear, first, count, (const struct unit *)job->x, sums);
#endif
    struct group_scales scales;
    load_group_scales(job->linear, &scales, first, count);
    (job->linear->weight_dtype == UINT8 ? int4_products : int8_products)(job, &scales, first, count, sums);
}

/* sums[r][n] = row r of x · weight row first + n, for all rows of x and count <= BLOCK weight rows. */
static void products(const struct job *job, int64_t first, int64_t count, float (*sums)[BLOCK]) {
    if (job->linear->group) return grouped_products(job, first, count, sums);
    switch (job->linear->weight_dtype) {
    case FLOAT32: float32_products(job, NULL, first, count, sums); break;
    case BFLOAT16: bfloat16_products(job, NULL, first, count, sums); break;
    case INT8: int8_products(job, NULL, first, count, sums); break;
    case E4M3: e4m3_products(job, NULL, first, count, sums);
    }
}

/* Output features first : first + BLOCK of all rows. With a gate, feature n is weight row n, and its factor weight row out + n. */
static void compute_block(const struct job *job, int64_t first) {
    const struct linear *a = job->linear;
    int64_t count = min_i64(BLOCK, a->out - first);
    float sums[MAX_ROWS][BLOCK] __attribute__((aligned(64))), ups[MAX_ROWS][BLOCK] __attribute__((aligned(64)));
    products(job, first, count, sums);
    if (a->gate) products(job, a->out + first, count, ups);
    for (int64_t r = 0; r < a->rows; r++) store_outputs(a, r, first, count, sums[r], ups[r]);
}

/* Work item `index` of the second stage: its share of the blocks. */
static void compute_share(void *data, int64_t index) {
    const struct job job = own_job(data, team_member());
    int64_t blocks = (job.linear->out + BLOCK - 1) / BLOCK;
    int64_t first = index * job.share_blocks, end = min_i64(first + job.share_blocks, blocks);
    if (job.next && end == blocks) prefetch_first_rows(job.next);
    for (int64_t b = first; b < end; b++) compute_block(&job, b * BLOCK);
}

/* How x is stored for a linear. */
static struct job make_job(const struct linear *a) {
    struct job job = {.linear = a, .pitch = padded(a->in), .x_pitch = padded(a->in), .groups_of_row = groups_of(a)};
#ifdef HAS_BLOCKS
    if (a->blocks) {
        job.pitch = units_of(a) * UNIT_FEATURES;
        job.x_pitch = digits_floats(a);
    }
#endif
    return job;
}

/* Returns 0, or 1 when the reference must run instead: no memory, or more rows, linears or groups than the buffers above hold. */
int stoker_linears(const struct linears *a) {
    if (a->count < 1 || a->count > MAX_LINEARS) return 1;
    struct job jobs[MAX_LINEARS];
    struct stage stages[2 * MAX_LINEARS];
    int64_t floats = 0, most_shares = 0, num_stages = 0, threads = a->threads > 1 ? a->threads : 1;
    for (int64_t i = 0; i < a->count; i++) {
        const struct linear *l = a->first + i;
        if (l->rows > MAX_ROWS || (l->group && l->in > MAX_GROUPS * l->group) || l->in < 1) return 1;
        if (!l->rows || !l->out) return 0;
        jobs[i] = make_job(l);
        jobs[i].next = i + 1 < a->count ? l + 1 : NULL;
        int64_t blocks = (l->out + BLOCK - 1) / BLOCK, bytes = l->in * l->out * size_of(l->weight_dtype);
        int64_t most = bytes < MIN_PARALLEL_BYTES ? 1 : threads * SHARES, whole = blocks / most;
        jobs[i].share_blocks = most == 1 ? blocks : whole ? whole : 1;
        int64_t shares = (blocks + jobs[i].share_blocks - 1) / jobs[i].share_blocks;
        struct stage compute = {compute_share, jobs + i, shares, 0, 0, NULL};
        jobs[i].copy_floats = 0;
        int64_t own = padded_rows(jobs + i) * jobs[i].x_pitch + l->rows * jobs[i].pitch;
        if (l->rows == 1) {
            jobs[i].copy_floats = (own + 31) / 32 * 32;
            own = threads * jobs[i].copy_floats;
            compute.prepare = prepare_copy;
        } else {
            stages[num_stages++] = (struct stage){prepare_row, jobs + i, l->rows, 0, 0, NULL};
        }
        stages[num_stages++] = compute;
        floats += own;
        if (most_shares < shares) most_shares = shares;
    }
    float *x = aligned_alloc(128, (floats + 31) / 32 * 32 * sizeof *x);
    if (!x) return 1;
    float *next = x;
    prefetch_first_rows(a->first);
    for (int64_t i = 0; i < a->count; i++) {
        const struct linear *l = a->first + i;
        int64_t rows = padded_rows(jobs + i);
        jobs[i].x = next;
        jobs[i].rows = next + rows * jobs[i].x_pitch;
        if (rows > l->rows) memset(jobs[i].x, 0, rows * jobs[i].x_pitch * sizeof *x);
        next += jobs[i].copy_floats ? threads * jobs[i].copy_floats : rows * jobs[i].x_pitch + l->rows * jobs[i].pitch;
    }
    run_stages(a->fork, most_shares > 1 ? threads : 1, stages, num_stages);
    free(x);
    return 0;
}
