/* What is computed around the product of a linear: rows of its input before it; scale, bias, gate and residual after it. */

#ifndef STOKER_AROUND_H
#define STOKER_AROUND_H

#include "activation.h"
#include "linear.h"

#define E4M3_MAX 448.0f

/* Elements of a row of the input in a buffer: `in`, padded to whole pairs of vectors. */
static INLINE int64_t padded(int64_t in) { return (in + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

/* Apply the norm to one row x [pitch] of the input. */
static void apply_norm(const struct linear *a, float *x, int64_t pitch) {
    f32v sum = broadcast(0), squares = broadcast(0);
    float mean = 0;
    if (a->norm == LAYER) {
        for (int64_t k = 0; k < pitch; k += LANES) sum += load(FLOAT32, x, k);
        mean = sum_lanes(sum) / a->in;
        for (int64_t k = 0; k < a->in; k++) x[k] -= mean;
    }
    for (int64_t k = 0; k < pitch; k += LANES) {
        f32v v = load(FLOAT32, x, k);
        squares += v * v;
    }
    float factor = 1 / sqrtf(sum_lanes(squares) / a->in + (float)a->eps);
    for (int64_t k = 0; k < a->in; k += LANES) {
        f32v v = load(FLOAT32, x, k) * factor;
        if (a->norm_weight) v *= load_up_to(a->norm_weight_dtype, a->norm_weight, k, a->in - k);
        if (a->norm_bias) v += load_up_to(a->norm_bias_dtype, a->norm_bias, k, a->in - k);
        store_up_to(FLOAT32, x, k, v, LANES);
    }
}

/* Load a row of x to `x` [pitch]: in float32, gated, normalized, and padded with zeros. */
static void load_input(const struct linear *a, int64_t row, float *x, int64_t pitch) {
    const char *from = (const char *)a->x + row * a->x_stride * size_of(a->dtype);
    memset(x + a->in, 0, (pitch - a->in) * sizeof *x);
    for (int64_t k = 0; k < a->in; k += LANES) {
        f32v v = load_up_to(a->dtype, from, k, a->in - k);
        if (a->input_gate) v = activated(a->input_gate, v) * load_up_to(a->dtype, from, a->in + k, a->in - k);
        store_up_to(FLOAT32, x, k, v, a->in - k);
    }
    if (a->norm) apply_norm(a, x, pitch);
}

/* The scale by which a row x [pitch] is rounded to e4m3: the static one, or that of its largest magnitude. NaN if x contains NaN. */
static float rounding_scale(const struct linear *a, const float *x, int64_t pitch) {
    float scale = a->input_scale ? *(const float *)a->input_scale : 0;
    if (a->rounding == TOKEN_SCALE) {
        i32v largest = {0}; /* bits of magnitudes are in the order of the floats, and those of NaN are the largest */
        for (int64_t k = 0; k < pitch; k += LANES) {
            i32v magnitude = (i32v)load(FLOAT32, x, k) & 0x7fffffff;
            largest = (i32v)blend(magnitude > largest, (f32v)magnitude, (f32v)largest);
        }
        int32_t lane[LANES], most = 0;
        memcpy(lane, &largest, sizeof lane);
        for (int i = 0; i < LANES; i++) most = lane[i] > most ? lane[i] : most;
        memcpy(&scale, &most, sizeof scale);
        scale /= E4M3_MAX;
    }
    return scale < 1e-12f ? 1e-12f : scale;
}

/* The nearest e4m3 value, ties to even, within ± E4M3_MAX. NaN stays NaN. */
static INLINE f32v round_to_e4m3(f32v v) {
    v = blend(v > E4M3_MAX, broadcast(E4M3_MAX), blend(v < -E4M3_MAX, broadcast(-E4M3_MAX), v));
    u32v raw = (u32v)v;
    f32v normal = as_float((raw + 0x7ffff + (raw >> 20 & 1)) & 0xfff00000); /* three bits of mantissa */
    f32v subnormal = (v + 0x1.8p14f) - 0x1.8p14f;                            /* multiples of 2 to the -9 */
    i32v is_small = (i32v)((raw & 0x7fffffff) < 0x3c800000);                 /* below 2 to the -6 */
    return blend(v != v, v, blend(is_small, subnormal, normal));
}

/* Up to LANES sums of weight rows from `row` on, times their scales, plus their biases. */
static INLINE f32v scaled_and_biased(const struct linear *a, f32v sum, int64_t row, int64_t count) {
    if (a->scale && !a->group) sum *= load_up_to(FLOAT32, a->scale, row, count);
    return a->bias ? sum + load_up_to(a->bias_dtype, a->bias, row, count) : sum;
}

/* Store output features first : first + count of a row, whose products with the weight are `sums` [count]. With a gate, feature n is
 * weight row n, and its factor `ups` weight row out + n. Both arrays are readable up to a multiple of LANES. */
static INLINE void store_outputs(const struct linear *a, int64_t row, int64_t first, int64_t count, const float *sums, const float *ups) {
    for (int64_t n = 0; n < count; n += LANES) {
        int64_t left = count - n, at = row * a->out + first + n;
        f32v y = scaled_and_biased(a, load(FLOAT32, sums, n), first + n, left);
        if (a->gate) y = activated(a->gate, y) * scaled_and_biased(a, load(FLOAT32, ups, n), a->out + first + n, left);
        if (a->residual) y += load_up_to(a->dtype, a->residual, at, left);
        store_up_to(a->dtype, a->y, at, y, left);
    }
}

#endif
