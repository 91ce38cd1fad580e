/* Linears of up to MAX_ROWS rows of x, one or several that follow one another. Weights are read once, at the speed of memory, widened in
 * registers, and summed in float32.
 *
 * Each linear has two stages: `prepare_row` applies input gate and norm to a row of x, and `compute_share` computes output features:
 *
 *     weight [out, in]    BLOCK rows are finished together: products with all rows of x, then bias, gate and residual
 *       rows  0..15  |  block 0: tiles of WIDTH rows × all features       a work item (share) is several blocks
 *       rows 16..31  |  block 1                                           passes: ROWS_PER_PASS rows of x at a time; the block's
 *          ...                                                            weights stay in the L1 cache between passes
 */

#include <stdlib.h>

#include "around.h"

#define MAX_ROWS 16
#define MAX_LINEARS 4
#define ROWS_PER_PASS 4
#define PREFETCH_BYTES 8192 /* ahead: [3072, 576] of int8 from memory takes 195 µs; without prefetch 420 µs, 3,072 bytes ahead 240 µs */
#define MIN_PARALLEL_BYTES (128 << 10) /* of a weight, from which a second thread is worth its start */

struct job {
    const struct linear *linear;
    float *x; /* [rows, pitch]: the input of the product, in float32, with zeros behind `in` features */
    int64_t pitch;
    int64_t share_blocks; /* blocks of a work item */
};

/* Reorder each 2 × LANES features of x [pitch] to the even ones, then the odd ones: the order in which LANES bytes of int4 are decoded
 * (their low halves, then their high halves). */
static void split_even_odd(float *x, int64_t pitch) {
    for (float *end = x + pitch; x < end; x += 2 * LANES) {
        float split[2 * LANES];
        for (int i = 0; i < LANES; i++) split[i] = x[2 * i], split[LANES + i] = x[2 * i + 1];
        memcpy(x, split, sizeof split);
    }
}

/* Stage 1 of a linear, work item `row`: the input of the product. */
static void prepare_row(void *data, int64_t row) {
    const struct job *job = data;
    const struct linear *a = job->linear;
    float *x = job->x + row * job->pitch;
    load_input(a, row, x, job->pitch);
    if (a->rounding) {
        float scale = rounding_scale(a, x, job->pitch);
        for (int64_t k = 0; k < job->pitch; k += LANES) store_up_to(FLOAT32, x, k, round_to_e4m3(load(FLOAT32, x, k) / scale) * scale, LANES);
    }
    if (a->weight_dtype == UINT8) split_even_odd(x, job->pitch);
}

/* Weight rows of a tile, for R rows of x: as many as there are registers for the sums. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define WIDTH(R) 4
#else
#define WIDTH(R) ((R) <= 2 ? 4 : 2)
#endif

/* Rows of the weight, and the sums of their products with rows of x, lane by lane. */
struct tile {
    const char *row[4];
    f32v sum[4][ROWS_PER_PASS];
};

/* sum[w][r] += v × x[r] for R rows of x, `pitch` apart. */
static INLINE void multiply_add(struct tile *t, int w, int R, f32v v, const float *x, int64_t pitch) {
    UNROLL for (int r = 0; r < R; r++) t->sum[w][r] += v * load(FLOAT32, x + r * pitch, 0);
}

/* The products of W weight rows of `dtype`, without groups. */
static INLINE void multiply_plain(int dtype, int W, int R, const struct job *job, const float *x, struct tile *t) {
    int64_t in = job->linear->in, k = 0;
    for (; k + LANES <= in; k += LANES) {
        UNROLL for (int w = 0; w < W; w++) {
            __builtin_prefetch(t->row[w] + k * size_of(dtype) + PREFETCH_BYTES);
            multiply_add(t, w, R, load(dtype, t->row[w], k), x + k, job->pitch);
        }
    }
    if (k == in) return;
    UNROLL for (int w = 0; w < W; w++) multiply_add(t, w, R, load_first(dtype, t->row[w], k, in - k), x + k, job->pitch);
}

/* The products of LANES bytes of int4, two features each, whose features in x are split into even and odd ones. */
static INLINE void multiply_int4(struct tile *t, int w, int R, const void *bytes, codebook book, const float *x, int64_t pitch) {
    i32v values = widen_u8(bytes);
    multiply_add(t, w, R, decode_int4(values, book), x, pitch);
    multiply_add(t, w, R, decode_int4(values >> 4, book), x + LANES, pitch);
}

/* The products of W weight rows of int4. The scales of row w begin at at[w]. */
static INLINE void multiply_int4_groups(int W, int R, const struct job *job, const struct group_scales *scales, const int64_t *at,
                                        const float *x, struct tile *t) {
    int64_t row = job->linear->in / 2, whole = row - row % LANES, bytes = job->linear->group / 2, groups = (row + bytes - 1) / bytes;
    for (int64_t g = 0, k = 0; g < groups; g++) {
        codebook books[4];
        UNROLL for (int w = 0; w < W; w++) books[w] = codebook_of(scales->scale[at[w] + g], scales->low[at[w] + g]);
        for (int64_t end = min_i64((g + 1) * bytes, whole); k < end; k += LANES) {
            UNROLL for (int w = 0; w < W; w++) {
                __builtin_prefetch(t->row[w] + k + PREFETCH_BYTES);
                multiply_int4(t, w, R, t->row[w] + k, books[w], x + 2 * k, job->pitch);
            }
        }
    }
    if (whole == row) return;
    UNROLL for (int w = 0; w < W; w++) {
        int64_t last = at[w] + groups - 1;
        char bytes[LANES] = {0};
        memcpy(bytes, t->row[w] + whole, row - whole);
        multiply_int4(t, w, R, bytes, codebook_of(scales->scale[last], scales->low[last]), x + 2 * whole, job->pitch);
    }
}

/* The same for int8 in groups, which are multiples of LANES. */
static INLINE void multiply_int8_groups(int W, int R, const struct job *job, const struct group_scales *scales, const int64_t *at,
                                        const float *x, struct tile *t) {
    int64_t in = job->linear->in, size = job->linear->group;
    for (int64_t g = 0; g * size < in; g++) {
        f32v scale[4], low[4];
        UNROLL for (int w = 0; w < W; w++) {
            scale[w] = broadcast(scales->scale[at[w] + g]);
            low[w] = broadcast(scales->low[at[w] + g]);
        }
        int64_t k = g * size, end = min_i64(k + size, in);
        for (; k + LANES <= end; k += LANES) {
            UNROLL for (int w = 0; w < W; w++) {
                __builtin_prefetch(t->row[w] + k + PREFETCH_BYTES);
                multiply_add(t, w, R, load(INT8, t->row[w], k) * scale[w] + low[w], x + k, job->pitch);
            }
        }
        if (k == end) continue;
        UNROLL for (int w = 0; w < W; w++)
            multiply_add(t, w, R, load_first(INT8, t->row[w], k, end - k) * scale[w] + low[w], x + k, job->pitch);
    }
}

/* sums[r][n] = row r of x · weight row first + n, for R rows of x and `count` weight rows. Tiles that reach past the last weight row
 * repeat it. */
static INLINE void multiply_block(int dtype, int R, const struct job *job, const struct group_scales *scales, int64_t first, int64_t count,
                                  const float *x, float (*sums)[BLOCK]) {
    const struct linear *a = job->linear;
    int64_t pitch = dtype == UINT8 ? a->in / 2 : a->in * size_of(dtype), groups = scales ? (a->in + a->group - 1) / a->group : 0;
    for (int64_t n = 0; n < count; n += WIDTH(R)) {
        struct tile t = {0};
        int64_t at[4];
        UNROLL for (int w = 0; w < WIDTH(R); w++) {
            int64_t row = min_i64(n + w, count - 1);
            t.row[w] = (const char *)a->weight + (first + row) * pitch;
            at[w] = row * groups;
        }
        if (dtype == UINT8) multiply_int4_groups(WIDTH(R), R, job, scales, at, x, &t);
        else if (dtype == INT8 && scales) multiply_int8_groups(WIDTH(R), R, job, scales, at, x, &t);
        else multiply_plain(dtype, WIDTH(R), R, job, x, &t);
        UNROLL for (int w = 0; w < WIDTH(R); w++) UNROLL for (int r = 0; r < R; r++) sums[r][n + w] = sum_lanes(t.sum[w][r]);
    }
}

/* One function per weight dtype, so that each is compiled with its own conversion. Three rows run as four, the last of which is zeros. */
#define PRODUCTS(NAME, DTYPE)                                                                                                              \
    static void NAME(const struct job *job, const struct group_scales *scales, int64_t first, int64_t count, float (*sums)[BLOCK]) {       \
        for (int64_t r = 0; r < job->linear->rows; r += ROWS_PER_PASS) {                                                                   \
            const float *x = job->x + r * job->pitch;                                                                                      \
            switch (job->linear->rows - r) {                                                                                               \
            case 1: multiply_block(DTYPE, 1, job, scales, first, count, x, sums + r); break;                                               \
            case 2: multiply_block(DTYPE, 2, job, scales, first, count, x, sums + r); break;                                               \
            default: multiply_block(DTYPE, ROWS_PER_PASS, job, scales, first, count, x, sums + r);                                         \
            }                                                                                                                              \
        }                                                                                                                                  \
    }
PRODUCTS(float32_products, FLOAT32)
PRODUCTS(bfloat16_products, BFLOAT16)
PRODUCTS(int8_products, INT8)
PRODUCTS(int4_products, UINT8)
PRODUCTS(e4m3_products, E4M3)

static void grouped_products(const struct job *job, int64_t first, int64_t count, float (*sums)[BLOCK]) {
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
    float sums[MAX_ROWS][BLOCK], ups[MAX_ROWS][BLOCK];
    products(job, first, count, sums);
    if (a->gate) products(job, a->out + first, count, ups);
    for (int64_t r = 0; r < a->rows; r++) store_outputs(a, r, first, count, sums[r], ups[r]);
}

/* Stage 2 of a linear, work item `index`: its share of the blocks. */
static void compute_share(void *data, int64_t index) {
    const struct job *job = data;
    int64_t first = index * job->share_blocks, end = min_i64(first + job->share_blocks, (job->linear->out + BLOCK - 1) / BLOCK);
    for (int64_t b = first; b < end; b++) compute_block(job, b * BLOCK);
}

/* Rows of the buffer of x: three of the last pass are padded to four. */
static int64_t padded_rows(const struct linear *a) { return a->rows % ROWS_PER_PASS == 3 ? a->rows + 1 : a->rows; }

/* Returns 0, or 1 when the reference must run instead: no memory, or more rows, linears or groups than the buffers above hold. */
int stoker_linears(const struct linears *a) {
    if (a->count < 1 || a->count > MAX_LINEARS) return 1;
    struct job jobs[MAX_LINEARS];
    struct stage stages[2 * MAX_LINEARS];
    int64_t floats = 0, most_shares = 0;
    for (int64_t i = 0; i < a->count; i++) {
        const struct linear *l = a->first + i;
        if (l->rows > MAX_ROWS || (l->group && l->in > MAX_GROUPS * l->group) || l->in < 1) return 1;
        if (!l->rows || !l->out) return 0;
        jobs[i] = (struct job){l, NULL, padded(l->in), 0};
        int64_t blocks = (l->out + BLOCK - 1) / BLOCK, bytes = l->in * l->out * size_of(l->weight_dtype);
        int64_t shares = bytes < MIN_PARALLEL_BYTES ? 1 : min_i64(blocks, a->threads * 4);
        jobs[i].share_blocks = (blocks + shares - 1) / shares;
        stages[2 * i] = (struct stage){prepare_row, jobs + i, l->rows, 0, 0};
        stages[2 * i + 1] = (struct stage){compute_share, jobs + i, (blocks + jobs[i].share_blocks - 1) / jobs[i].share_blocks, 0, 0};
        floats += padded_rows(l) * jobs[i].pitch;
        if (most_shares < shares) most_shares = shares;
    }
    float *x = aligned_alloc(128, (floats + 31) / 32 * 32 * sizeof *x);
    if (!x) return 1;
    float *next = x;
    for (int64_t i = 0; i < a->count; i++) {
        const struct linear *l = a->first + i;
        jobs[i].x = next;
        next += padded_rows(l) * jobs[i].pitch;
        if (padded_rows(l) > l->rows) memset(next - jobs[i].pitch, 0, jobs[i].pitch * sizeof *next);
    }
    run_stages(a->fork, most_shares > 1 ? a->threads : 1, stages, 2 * a->count);
    free(x);
    return 0;
}
