/* Products of a few weight rows and the rows of x of a pass, for linear.c: in float32.
 *
 * A tile decodes each vector of weights once for all rows of x, and loads each vector of x once for all its weight rows.
 */

#ifndef STOKER_TILE_H
#define STOKER_TILE_H

#include "linear.h"

/* 8 rows of int4 [3072, 576]: with AVX-512, two passes of 4 rows need 440 µs and one pass with narrower tiles 470 µs. With AVX2, one pass
 * of 4 rows needs 340 µs, and one of 8 rows 445 µs. */
#ifdef __AVX512F__
#define ROWS_PER_PASS 4
#else
#define ROWS_PER_PASS 8
#endif

/* One linear and its input. */
struct job {
    const struct linear *linear;
    float *rows;   /* [rows, pitch]: the input of the product, in float32, with zeros behind `in` features */
    float *x;      /* the same by passes: each [pitch / LANES, rows of the pass, LANES], with rows of zeros behind the last row; of blocks: digits */
    int64_t pitch;
    int64_t x_pitch; /* floats of a row of `x` */
    int64_t copy_floats; /* between the copies of `rows` and `x` that threads prepare for themselves; 0: all threads read one */
    int64_t share_blocks; /* blocks of a work item */
    int64_t groups_of_row;
    const struct linear *next; /* the linear after this one, or NULL */
};

/* Weight rows of a tile, for R rows of x: as many as there are registers for the sums. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define WIDTH(R) ((R) <= 4 ? 4 : 2)
#else
#define WIDTH(R) ((R) <= 2 ? 4 : (R) <= 4 ? 2 : 1)
#endif

/* W weight rows, `pitch` bytes apart, with their scales, `groups` apart; and the sums of their products with rows of x, lane by lane. */
struct tile {
    const char *row;
    int64_t pitch, groups;
    const float *scale, *low;
    f32v sum[4][ROWS_PER_PASS];
};

/* Prefetch `bytes` of the weight, PREFETCH_BYTES after the `done` bytes of the tile that are already multiplied. Its rows are contiguous. */
static INLINE void prefetch(const struct tile *t, int64_t done, int64_t bytes) {
    UNROLL for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(t->row + done + i + PREFETCH_BYTES);
}

/* sum[w][r] += v[w] × x[r] for W weight rows and R rows of x [R, LANES]. */
static INLINE void multiply_add(struct tile *t, int W, int R, const f32v *v, const float *x) {
    UNROLL for (int r = 0; r < R; r++) {
        f32v features = load(FLOAT32, x, r * LANES);
        UNROLL for (int w = 0; w < W; w++) t->sum[w][r] += v[w] * features;
    }
}

/* The products of weights of `dtype` without groups. */
static INLINE void multiply_plain(int dtype, int W, int R, int64_t in, const float *x, struct tile *t) {
    int64_t k = 0;
    f32v v[4];
    for (; k + LANES <= in; k += LANES, x += R * LANES) {
        prefetch(t, k * W * size_of(dtype), W * LANES * size_of(dtype));
        UNROLL for (int w = 0; w < W; w++) v[w] = load(dtype, t->row + w * t->pitch, k);
        multiply_add(t, W, R, v, x);
    }
    if (k == in) return;
    UNROLL for (int w = 0; w < W; w++) v[w] = load_first(dtype, t->row + w * t->pitch, k, in - k);
    multiply_add(t, W, R, v, x);
}

/* The products of LANES bytes of int4 per weight row, `pitch` bytes apart. Bytes contain two features, which x has as even and odd ones. */
static INLINE void multiply_int4(struct tile *t, int W, int R, const char *bytes, int64_t pitch, const codebook *books, const float *x) {
    f32v even[4], odd[4];
    UNROLL for (int w = 0; w < W; w++) {
        i32v values = widen_u8(bytes + w * pitch);
        even[w] = decode_int4(values, books[w]);
        odd[w] = decode_int4(values >> 4, books[w]);
    }
    multiply_add(t, W, R, even, x);
    multiply_add(t, W, R, odd, x + R * LANES);
}

/* The products of int4. One loop over the vectors, also of several groups, because the usual group is a single vector. */
static INLINE void multiply_int4_groups(int W, int R, const struct linear *a, const float *x, struct tile *t) {
    int64_t row = a->in / 2, whole = row - row % LANES, bytes = a->group / 2;
    codebook books[4] = {0};
    for (int64_t g = 0, k = 0; k < row; k += LANES, x += 2 * R * LANES) {
        if (k == g * bytes) {
            UNROLL for (int w = 0; w < W; w++) books[w] = codebook_of(t->scale[w * t->groups + g], t->low[w * t->groups + g], a->fp4);
            g++;
        }
        if (k < whole) {
            prefetch(t, k * W, W * LANES);
            multiply_int4(t, W, R, t->row + k, t->pitch, books, x);
            continue;
        }
        char last[4][LANES] = {0};
        UNROLL for (int w = 0; w < W; w++) memcpy(last[w], t->row + w * t->pitch + whole, row - whole);
        multiply_int4(t, W, R, last[0], LANES, books, x);
    }
}

/* The products of int8 in groups, which are multiples of LANES. */
static INLINE void multiply_int8_groups(int W, int R, const struct linear *a, const float *x, struct tile *t) {
    f32v scale[4] = {0}, low[4] = {0}, v[4];
    for (int64_t g = 0, k = 0; k < a->in; k += LANES, x += R * LANES) {
        if (k == g * a->group) {
            UNROLL for (int w = 0; w < W; w++) {
                scale[w] = broadcast(t->scale[w * t->groups + g]);
                low[w] = broadcast(t->low[w * t->groups + g]);
            }
            g++;
        }
        prefetch(t, k * W, W * LANES);
        UNROLL for (int w = 0; w < W; w++) v[w] = load_up_to(INT8, t->row + w * t->pitch, k, a->in - k) * scale[w] + low[w];
        multiply_add(t, W, R, v, x);
    }
}

#endif
