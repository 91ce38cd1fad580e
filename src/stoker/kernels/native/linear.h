/* A linear with what is fused around it, and weights in groups.
 *
 *     y = gate(norm(input_gate(x)) × weightᵀ + bias) + residual
 *
 * Weights are [rows, in], dense, in one of these layouts:
 *
 *     FLOAT32, BFLOAT16        one element per feature
 *     INT8, E4M3, group 0      value × scale[row]                     scale float32 [rows]
 *     INT8, group g            value × scale + offset                 scale, offset [rows, ceil(in / g)]
 *     UINT8 (int4), group g    value × scale + low                    two features per byte, the even one in the low half
 *                                low = -8 × scale, or -zero × scale, or the offset
 *
 *     row of int4:  | f1 f0 | f3 f2 | f5 f4 | ...     bytes, high half first          scales of a row:  | s0 | s1 | ...
 *                   |<------- group 0 ------->|                                                          g 0  g 1
 */

#ifndef STOKER_LINEAR_H
#define STOKER_LINEAR_H

#include "parallel.h"
#include "vector.h"

#define BLOCK 16        /* output features that are finished together */
#define MAX_GROUPS 1024 /* of a row, as in linear.py */

enum norm { NO_NORM, RMS, LAYER };                   /* the numbers of `NORMS` in library.py */
enum rounding { NOT_ROUNDED, TOKEN_SCALE, STATIC_SCALE }; /* of activations to e4m3: the numbers of `ROUNDINGS` in library.py */

/* `CALL_ARGUMENTS` in library.py (x to dtype), then `LINEAR_ARGUMENTS`. Sizes in elements. NULL: absent. */
struct linear {
    const void *x, *residual;
    void *y;
    int64_t rows, x_stride, dtype; /* of x, residual and y */
    const void *weight, *scale, *zero, *offset, *bias, *norm_weight, *norm_bias, *input_scale;
    int64_t in, out; /* out: features of y, half of the weight's rows when gated */
    int64_t weight_dtype, scale_dtype, group;
    int64_t bias_dtype, norm_weight_dtype, norm_bias_dtype;
    int64_t norm, input_gate, gate, rounding; /* enum norm, enum activation (both gates), enum rounding */
    double eps;
};

/* `LINEARS` in library.py. The linears run in order, and one may read what an earlier one wrote. */
struct linears {
    fork_function *fork;
    int64_t threads, count;
    struct linear first[];
};

/* Scales and lows of up to BLOCK rows, [rows, groups] in float32. LANES more, because whole vectors are stored. */
struct group_scales {
    float scale[BLOCK * MAX_GROUPS + LANES], low[BLOCK * MAX_GROUPS + LANES];
};

/* Load those of weight rows first : first + rows. */
static INLINE void load_group_scales(const struct linear *a, struct group_scales *scales, int64_t first, int64_t rows) {
    int64_t groups = (a->in + a->group - 1) / a->group, at = first * groups, count = rows * groups;
    for (int64_t i = 0; i < count; i += LANES) {
        f32v scale = load_up_to(a->scale_dtype, a->scale, at + i, count - i), low = a->weight_dtype == UINT8 ? -8 * scale : broadcast(0);
        if (a->zero) low = -scale * load_up_to(UINT8, a->zero, at + i, count - i);
        if (a->offset) low = load_up_to(a->scale_dtype, a->offset, at + i, count - i);
        store_up_to(FLOAT32, scales->scale, i, scale, LANES);
        store_up_to(FLOAT32, scales->low, i, low, LANES);
    }
}

/* The 16 real values of a group of int4, value × scale + low: with AVX-512 a table in one register, which a permutation looks up. */
#ifdef __AVX512F__
typedef f32v codebook;
static INLINE codebook codebook_of(float scale, float low) {
    return (f32v){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * scale + low;
}
/* The real values of the low four bits of each lane. */
static INLINE f32v decode_int4(i32v values, codebook book) { return (f32v)_mm512_permutexvar_ps((__m512i)values, (__m512)book); }
#else
typedef struct {
    float scale, low;
} codebook;
static INLINE codebook codebook_of(float scale, float low) { return (codebook){scale, low}; }
static INLINE f32v decode_int4(i32v values, codebook book) { return __builtin_convertvector(values & 15, f32v) * book.scale + book.low; }
#endif

#endif
