/* Linears of few rows, one or several that follow each other: weights are read once, at the speed of memory, widened in registers and summed
 * in float32. */

#include <stdlib.h>

#include "vector.h"

#define BLOCK 16    /* output features that are finished together */
#define TOGETHER 4  /* rows of x in one pass over a block's weights, which stay in the first cache for the next pass */
#define AHEAD 8192  /* bytes of prefetch: [3072, 576] of int8 out of memory takes 195 µs; without it 420, 3072 ahead 240 */
#define MOST_ROWS 16
#define MOST_GROUPS 1024 /* of a row, as in linear.py */
#define MOST_LINEARS 4
#define LEAST_PARALLEL (128 << 10)  /* bytes of a weight that are worth a second thread */

enum norm { NO_NORM, RMS, LAYER };

/* gate(norm(input_gate(x)) Wᵀ + bias) + residual, as `GIVEN` and `STAYING` in library.py pack it: what each call brings, and the rest.
 * Sizes in elements; `out` is y's, half of the weight's rows when gated. */
struct linear {
    const void *x, *residual;
    void *y;
    int64_t rows, x_stride, dtype;
    const void *weight, *scale, *zero, *offset, *bias, *norm_weight, *norm_bias;
    int64_t in, out, weight_dtype, scale_dtype, group; /* UINT8: int4's codes, two a byte; group: features that share a scale, 0: all */
    int64_t bias_dtype, norm_weight_dtype, norm_bias_dtype;
    int64_t norm, input_gate, gate;
    double eps;
};

/* One after another: what one stores another may take. */
struct linears {
    fork_function *fork;
    int64_t threads, count;
    struct linear first[];
};

struct job {
    const struct linear *of;
    float *x;      /* [rows, pitch]: what the product takes, zeros behind `in` features */
    int64_t pitch;
    int64_t share; /* blocks a part */
};

static void normed(const struct linear *a, float *x, int64_t pitch) {
    f32v sum = all(0), squares = all(0);
    float mean = 0;
    if (a->norm == LAYER) {
        for (int64_t k = 0; k < pitch; k += LANES) sum += load(FLOAT32, x, k);
        mean = total(sum) / a->in;
        for (int64_t k = 0; k < a->in; k++) x[k] -= mean;
    }
    for (int64_t k = 0; k < pitch; k += LANES) {
        f32v v = load(FLOAT32, x, k);
        squares += v * v;
    }
    float factor = 1 / sqrtf(total(squares) / a->in + (float)a->eps);
    for (int64_t k = 0; k < a->in; k += LANES) {
        f32v v = load(FLOAT32, x, k) * factor;
        if (a->norm_weight) v *= load_some(a->norm_weight_dtype, a->norm_weight, k, a->in - k);
        if (a->norm_bias) v += load_some(a->norm_bias_dtype, a->norm_bias, k, a->in - k);
        store_some(FLOAT32, x, k, v, LANES);
    }
}

/* Each 2 × LANES features as the even ones, then the odd ones: the order of the nibbles in LANES bytes. */
static void by_nibbles(float *x, int64_t pitch) {
    for (float *end = x + pitch; x < end; x += 2 * LANES) {
        float apart[2 * LANES];
        for (int i = 0; i < LANES; i++) apart[i] = x[2 * i], apart[LANES + i] = x[2 * i + 1];
        memcpy(x, apart, sizeof apart);
    }
}

static void prepare(void *data, int64_t row) {
    const struct job *job = data;
    const struct linear *a = job->of;
    int64_t pitch = job->pitch;
    float *x = job->x + row * pitch;
    const char *from = (const char *)a->x + row * a->x_stride * size_of(a->dtype);
    memset(x + pitch - 2 * LANES, 0, 2 * LANES * sizeof *x);
    for (int64_t k = 0; k < a->in; k += LANES) {
        f32v v = load_some(a->dtype, from, k, a->in - k);
        if (a->input_gate) v = activated(a->input_gate, v) * load_some(a->dtype, from, a->in + k, a->in - k);
        store_some(FLOAT32, x, k, v, a->in - k);
    }
    if (a->norm) normed(a, x, pitch);
    if (a->weight_dtype == UINT8) by_nibbles(x, pitch);
}

/* Rows of the weight in one pass, for R rows of x: as many as their sums find registers. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define WIDTH(R) 4
#else
#define WIDTH(R) ((R) <= 2 ? 4 : 2)
#endif

/* Rows of the weight, and their sums with rows of x, lane by lane. */
struct tile {
    const char *row[4];
    f32v sum[4][TOGETHER];
};

static INLINE void add(struct tile *t, int w, int R, f32v v, const float *x, int64_t pitch) {
    UNROLL for (int r = 0; r < R; r++) t->sum[w][r] += v * load(FLOAT32, x + r * pitch, 0);
}

static INLINE void plain_tile(int dtype, int W, int R, const struct job *job, const float *x, struct tile *t) {
    int64_t in = job->of->in, k = 0;
    for (; k + LANES <= in; k += LANES) {
        UNROLL for (int w = 0; w < W; w++) {
            __builtin_prefetch(t->row[w] + k * size_of(dtype) + AHEAD);
            add(t, w, R, load(dtype, t->row[w], k), x + k, job->pitch);
        }
    }
    if (k == in) return;
    UNROLL for (int w = 0; w < W; w++) add(t, w, R, load_part(dtype, t->row[w], k, in - k), x + k, job->pitch);
}

/* A block's groups. A value is code × scale + low, as in `reference/quant_int4.py` and `quant_int8.py`. */
struct grid {
    float scale[BLOCK * MOST_GROUPS + LANES], low[BLOCK * MOST_GROUPS + LANES];
};

static void load_grid(const struct linear *a, struct grid *grid, int64_t first, int64_t rows) {
    int64_t groups = (a->in + a->group - 1) / a->group, at = first * groups, count = rows * groups;
    for (int64_t i = 0; i < count; i += LANES) {
        f32v scale = load_some(a->scale_dtype, a->scale, at + i, count - i), low = a->weight_dtype == UINT8 ? -8 * scale : all(0);
        if (a->zero) low = -scale * load_some(UINT8, a->zero, at + i, count - i);
        if (a->offset) low = load_some(a->scale_dtype, a->offset, at + i, count - i);
        store_some(FLOAT32, grid->scale, i, scale, LANES);
        store_some(FLOAT32, grid->low, i, low, LANES);
    }
}

/* LANES bytes of codes, two features each, for R rows of x. */
static INLINE void add_codes(struct tile *t, int w, int R, const void *codes, codebook book, const float *x, int64_t pitch) {
    i32v wide = widen_u8(codes);
    add(t, w, R, decoded(wide, book), x, pitch);
    add(t, w, R, decoded(wide >> 4, book), x + LANES, pitch);
}

/* As plain_tile, for int4; row w's groups begin at at[w] of the grid. */
static INLINE void
int4_tile(int W, int R, const struct job *job, const struct grid *grid, const int64_t *at, const float *x, struct tile *t) {
    int64_t row = job->of->in / 2, whole = row - row % LANES, bytes = job->of->group / 2, groups = (row + bytes - 1) / bytes;
    for (int64_t g = 0, k = 0; g < groups; g++) {
        codebook books[4];
        UNROLL for (int w = 0; w < W; w++) books[w] = codebook_of(grid->scale[at[w] + g], grid->low[at[w] + g]);
        for (int64_t end = least((g + 1) * bytes, whole); k < end; k += LANES) {
            UNROLL for (int w = 0; w < W; w++) {
                __builtin_prefetch(t->row[w] + k + AHEAD);
                add_codes(t, w, R, t->row[w] + k, books[w], x + 2 * k, job->pitch);
            }
        }
    }
    if (whole == row) return;
    UNROLL for (int w = 0; w < W; w++) {
        int64_t last = at[w] + groups - 1;
        char codes[LANES] = {0};
        memcpy(codes, t->row[w] + whole, row - whole);
        add_codes(t, w, R, codes, codebook_of(grid->scale[last], grid->low[last]), x + 2 * whole, job->pitch);
    }
}

/* The same for int8 in groups, which are multiples of LANES. */
static INLINE void
groups_tile(int W, int R, const struct job *job, const struct grid *grid, const int64_t *at, const float *x, struct tile *t) {
    int64_t in = job->of->in, size = job->of->group;
    for (int64_t g = 0; g * size < in; g++) {
        f32v scale[4], low[4];
        UNROLL for (int w = 0; w < W; w++) scale[w] = all(grid->scale[at[w] + g]), low[w] = all(grid->low[at[w] + g]);
        int64_t k = g * size, end = least(k + size, in);
        for (; k + LANES <= end; k += LANES) {
            UNROLL for (int w = 0; w < W; w++) {
                __builtin_prefetch(t->row[w] + k + AHEAD);
                add(t, w, R, load(INT8, t->row[w], k) * scale[w] + low[w], x + k, job->pitch);
            }
        }
        if (k == end) continue;
        UNROLL for (int w = 0; w < W; w++) add(t, w, R, load_part(INT8, t->row[w], k, end - k) * scale[w] + low[w], x + k, job->pitch);
    }
}

/* sums[r][n] = x's row r · the weight's row first + n, for R rows. Past the block's end tiles repeat its last row. */
static INLINE void tiles(int dtype, int R, const struct job *job, const struct grid *grid, int64_t first, int64_t count, const float *x,
                         float (*sums)[BLOCK]) {
    const struct linear *a = job->of;
    int64_t pitch = dtype == UINT8 ? a->in / 2 : a->in * size_of(dtype), groups = grid ? (a->in + a->group - 1) / a->group : 0;
    for (int64_t n = 0; n < count; n += WIDTH(R)) {
        struct tile t = {0};
        int64_t at[4];
        UNROLL for (int w = 0; w < WIDTH(R); w++) {
            int64_t row = least(n + w, count - 1);
            t.row[w] = (const char *)a->weight + (first + row) * pitch;
            at[w] = row * groups;
        }
        if (dtype == UINT8) int4_tile(WIDTH(R), R, job, grid, at, x, &t);
        else if (dtype == INT8 && grid) groups_tile(WIDTH(R), R, job, grid, at, x, &t);
        else plain_tile(dtype, WIDTH(R), R, job, x, &t);
        UNROLL for (int w = 0; w < WIDTH(R); w++) UNROLL for (int r = 0; r < R; r++) sums[r][n + w] = total(t.sum[w][r]);
    }
}

/* One function a dtype, so that each is compiled with its own widening. Three rows are four, of which the last is zeros. */
#define PRODUCTS(NAME, DTYPE)                                                                                                              \
    static void NAME(const struct job *job, const struct grid *grid, int64_t first, int64_t count, float (*sums)[BLOCK]) {                 \
        for (int64_t r = 0; r < job->of->rows; r += TOGETHER) {                                                                            \
            const float *x = job->x + r * job->pitch;                                                                                      \
            switch (job->of->rows - r) {                                                                                                   \
            case 1: tiles(DTYPE, 1, job, grid, first, count, x, sums + r); break;                                                          \
            case 2: tiles(DTYPE, 2, job, grid, first, count, x, sums + r); break;                                                          \
            default: tiles(DTYPE, TOGETHER, job, grid, first, count, x, sums + r);                                                         \
            }                                                                                                                              \
        }                                                                                                                                  \
    }
PRODUCTS(float32_products, FLOAT32)
PRODUCTS(bfloat16_products, BFLOAT16)
PRODUCTS(int8_products, INT8)
PRODUCTS(codes_products, UINT8)

static void grouped_products(const struct job *job, int64_t first, int64_t count, float (*sums)[BLOCK]) {
    struct grid grid;
    load_grid(job->of, &grid, first, count);
    (job->of->weight_dtype == UINT8 ? codes_products : int8_products)(job, &grid, first, count, sums);
}

/* sums[r][n] = x's row r · the weight's row first + n, for all rows and count <= BLOCK features. */
static void products(const struct job *job, int64_t first, int64_t count, float (*sums)[BLOCK]) {
    if (job->of->group) return grouped_products(job, first, count, sums);
    switch (job->of->weight_dtype) {
    case FLOAT32: float32_products(job, NULL, first, count, sums); break;
    case BFLOAT16: bfloat16_products(job, NULL, first, count, sums); break;
    case INT8: int8_products(job, NULL, first, count, sums);
    }
}

/* LANES sums of the weight's rows from `at` on, scaled and with their bias. */
static INLINE f32v finished(const struct linear *a, f32v sum, int64_t at, int64_t count) {
    if (a->weight_dtype == INT8 && !a->group) sum *= load_some(FLOAT32, a->scale, at, count);
    return a->bias ? sum + load_some(a->bias_dtype, a->bias, at, count) : sum;
}

static void block(const struct job *job, int64_t first) {
    const struct linear *a = job->of;
    int64_t count = least(BLOCK, a->out - first);
    float sums[MOST_ROWS][BLOCK], ups[MOST_ROWS][BLOCK];
    products(job, first, count, sums);
    if (a->gate) products(job, a->out + first, count, ups);
    for (int64_t r = 0; r < a->rows; r++) {
        for (int64_t n = 0; n < count; n += LANES) {
            int64_t left = count - n, at = r * a->out + first + n;
            f32v y = finished(a, load(FLOAT32, sums[r], n), first + n, left);
            if (a->gate) y = activated(a->gate, y) * finished(a, load(FLOAT32, ups[r], n), a->out + first + n, left);
            if (a->residual) y += load_some(a->dtype, a->residual, at, left);
            store_some(a->dtype, a->y, at, y, left);
        }
    }
}

static void part(void *data, int64_t index) {
    const struct job *job = data;
    int64_t first = index * job->share, end = least(first + job->share, (job->of->out + BLOCK - 1) / BLOCK);
    for (int64_t b = first; b < end; b++) block(job, b * BLOCK);
}

/* Rows of x, with those of zeros that make the last pass whole. */
static int64_t padded(const struct linear *a) { return a->rows % TOGETHER == 3 ? a->rows + 1 : a->rows; }

/* 0, or 1 when these are not for us: no memory, or larger than the buffers above. */
int stoker_linears(const struct linears *a) {
    if (a->count < 1 || a->count > MOST_LINEARS) return 1;
    struct job jobs[MOST_LINEARS];
    struct stage stages[2 * MOST_LINEARS];
    int64_t floats = 0, most = 0;
    for (int64_t i = 0; i < a->count; i++) {
        const struct linear *l = a->first + i;
        if (l->rows > MOST_ROWS || (l->group && l->in > MOST_GROUPS * l->group) || l->in < 1) return 1;
        if (!l->rows || !l->out) return 0;
        jobs[i] = (struct job){l, NULL, (l->in + 2 * LANES - 1) / (2 * LANES) * (2 * LANES), 0};
        int64_t blocks = (l->out + BLOCK - 1) / BLOCK, bytes = l->in * l->out * size_of(l->weight_dtype);
        int64_t parts = bytes < LEAST_PARALLEL ? 1 : least(blocks, a->threads * 4);
        jobs[i].share = (blocks + parts - 1) / parts;
        stages[2 * i] = (struct stage){prepare, jobs + i, l->rows, 0, 0};
        stages[2 * i + 1] = (struct stage){part, jobs + i, (blocks + jobs[i].share - 1) / jobs[i].share, 0, 0};
        floats += padded(l) * jobs[i].pitch;
        if (most < parts) most = parts;
    }
    float *x = aligned_alloc(128, (floats + 31) / 32 * 32 * sizeof *x);
    if (!x) return 1;
    float *at = x;
    for (int64_t i = 0; i < a->count; i++) {
        const struct linear *l = a->first + i;
        jobs[i].x = at;
        at += padded(l) * jobs[i].pitch;
        if (padded(l) > l->rows) memset(at - jobs[i].pitch, 0, jobs[i].pitch * sizeof *at);
    }
    run_stages(a->fork, most > 1 ? a->threads : 1, stages, 2 * a->count);
    free(x);
    return 0;
}

/* `count` rows of a weight in groups, from row `first` on, as float32 [count, in]: `WIDENING` and two parts of a linear. */
struct widening {
    fork_function *fork;
    int64_t threads;
    float *out;
    int64_t first, count;
    struct linear of;
};

/* The features of LANES bytes: of int4 two a byte, the first in the low half. */
static INLINE void widen_some(int codes, const char *bytes, codebook book, float scale, float low, float *out) {
    if (!codes) return store_some(FLOAT32, out, 0, load(INT8, bytes, 0) * scale + low, LANES);
    i32v wide = widen_u8(bytes);
    f32v even = decoded(wide, book), odd = decoded(wide >> 4, book);
    float found[2 * LANES];
    UNROLL for (int i = 0; i < LANES; i++) found[2 * i] = even[i], found[2 * i + 1] = odd[i];
    memcpy(out, found, sizeof found);
}

static INLINE void widen_row(int codes, const struct linear *l, const float *scale, const float *low, const char *row, float *out) {
    int64_t together = codes ? 2 * LANES : LANES;
    for (int64_t g = 0; g * l->group < l->in; g++) {
        codebook book = codebook_of(scale[g], low[g]);
        int64_t k = g * l->group, end = least(k + l->group, l->in);
        for (; k + together <= end; k += together) widen_some(codes, row + (codes ? k / 2 : k), book, scale[g], low[g], out + k);
        if (k == end) continue;
        float last[2 * LANES];
        char bytes[LANES] = {0};
        memcpy(bytes, row + (codes ? k / 2 : k), codes ? (end - k) / 2 : end - k);
        widen_some(codes, bytes, book, scale[g], low[g], last);
        memcpy(out + k, last, (end - k) * sizeof *out);
    }
}

static void widen_block(void *data, int64_t index) {
    const struct widening *a = data;
    const struct linear *l = &a->of;
    int64_t begin = index * BLOCK, rows = least(BLOCK, a->count - begin), groups = (l->in + l->group - 1) / l->group;
    struct grid grid;
    load_grid(l, &grid, a->first + begin, rows);
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = a->first + begin + r;
        const float *scale = grid.scale + r * groups, *low = grid.low + r * groups;
        float *out = a->out + (begin + r) * l->in;
        if (l->weight_dtype == UINT8) widen_row(1, l, scale, low, (const char *)l->weight + row * (l->in / 2), out);
        else widen_row(0, l, scale, low, (const char *)l->weight + row * l->in, out);
    }
}

/* 0, or 1 when this is not for us. */
int stoker_widen(const struct widening *a) {
    if (!a->of.group || a->of.in > MOST_GROUPS * a->of.group) return 1;
    struct stage blocks = {widen_block, (void *)a, (a->count + BLOCK - 1) / BLOCK, 0, 0};
    run_stages(a->fork, a->threads, &blocks, 1);
    return 0;
}
