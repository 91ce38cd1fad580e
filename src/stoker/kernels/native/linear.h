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
 *     the same with `fp4`      e2m1 value × scale
 *
 * With AVX512-VNNI, those whose groups are multiples of 32 features are in blocks instead (blocks.h).
 *
 *     row of int4:  | f1 f0 | f3 f2 | f5 f4 | ...     bytes, high half first          scales of a row:  | s0 | s1 | ...
 *                   |<------- group 0 ------->|                                                          g 0  g 1
 */

#ifndef STOKER_LINEAR_H
#define STOKER_LINEAR_H

#include "parallel.h"
#include "vector.h"

#define MAX_ROWS 16     /* of x in linear.c */
#define BLOCK 16        /* output features that are finished together */
#define PREFETCH_BYTES 8192 /* ahead: [3072, 576] of int8 from memory takes 195 µs; without prefetch 420 µs, 3,072 bytes ahead 240 µs */
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
    int64_t weight_dtype, scale_dtype, group, fp4; /* fp4: whether the four bits of UINT8 are e2m1 values */
    int64_t blocks; /* whether `weight` points to blocks (blocks.h), of which `scale`, `zero` and `offset` are parts */
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

/* Groups of a weight row; 0 without groups. */
static INLINE int64_t groups_of(const struct linear *a) { return a->group ? (a->in + a->group - 1) / a->group : 0; }

/* Scales and lows of up to BLOCK rows, [rows, groups] in float32. LANES more, because whole vectors are stored. */
struct group_scales {
    float scale[BLOCK * MAX_GROUPS + LANES], low[BLOCK * MAX_GROUPS + LANES];
};

/* to[i] = element at + i of `from` as float32, for i < count; whole registers are stored. Prefetches what is `ahead` elements later. */
static INLINE void widen_array(int dtype, const void *from, int64_t at, int64_t count, int64_t ahead, float *to) {
    for (int64_t i = 0; i < count; i += LANES) {
        __builtin_prefetch((const char *)from + (at + i + ahead) * size_of(dtype));
        store_up_to(FLOAT32, to, i, load_up_to(dtype, from, at + i, count - i), LANES);
    }
}

/* The same for float32, bfloat16 and float16, with a loop for each. */
static INLINE void widen_floats(int dtype, const void *from, int64_t at, int64_t count, int64_t ahead, float *to) {
    if (dtype == FLOAT16) widen_array(FLOAT16, from, at, count, ahead, to);
    else if (dtype == BFLOAT16) widen_array(BFLOAT16, from, at, count, ahead, to);
    else widen_array(FLOAT32, from, at, count, ahead, to);
}

/* Load those of weight rows first : first + rows. Prefetches those of the block after the next one. */
static INLINE void load_group_scales(const struct linear *a, struct group_scales *scales, int64_t first, int64_t rows) {
    int64_t groups = groups_of(a), at = first * groups, count = rows * groups, ahead = 2 * BLOCK * groups;
    widen_floats(a->scale_dtype, a->scale, at, count, ahead, scales->scale);
    if (a->offset) return widen_floats(a->scale_dtype, a->offset, at, count, ahead, scales->low);
    if (a->zero) widen_array(UINT8, a->zero, at, count, ahead, scales->low);
    if (a->weight_dtype == INT8) return (void)memset(scales->low, 0, count * sizeof *scales->low);
    f32v factor = broadcast(a->fp4 ? 0 : -8);
    for (int64_t i = 0; i < count; i += LANES) {
        f32v scale = load(FLOAT32, scales->scale, i);
        store_up_to(FLOAT32, scales->low, i, a->zero ? -scale * load(FLOAT32, scales->low, i) : factor * scale, LANES);
    }
}

/* The 16 real values of a group of int4 or FP4, value × scale + low: with AVX-512 a table in one register, which a permutation looks up. */
#ifdef __AVX512F__
typedef f32v codebook;
static INLINE codebook codebook_of(float scale, float low, int64_t fp4) {
    static const float values[2][LANES] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
        {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6},
    };
    return load(FLOAT32, values[fp4], 0) * scale + low;
}
/* The real values of the low four bits of each lane. */
static INLINE f32v decode_int4(i32v values, codebook book) { return (f32v)_mm512_permutexvar_ps((__m512i)values, (__m512)book); }
#else
typedef struct {
    float scale, low;
    int64_t fp4;
} codebook;
static INLINE codebook codebook_of(float scale, float low, int64_t fp4) {
    return fp4 ? (codebook){scale / 2, -6 * scale, 1} : (codebook){scale, low, 0};
}
/* 12 + twice the e2m1 values of the low four bits of each lane: 0 to 24. */
static INLINE i32v doubled_e2m1(i32v values) {
#ifdef __AVX2__
    __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return (i32v)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)((values & 15) | (int32_t)0x80808000));
#else
    i32v exponent = values >> 1 & 3, is_normal = exponent > 0, sign = -(values >> 3 & 1);
    i32v magnitude = ((values & 1) + (is_normal & 2)) << (is_normal & (exponent - 1)); /* (2 + fraction) << (exponent - 1), or fraction */
    return (magnitude ^ sign) - sign + 12;
#endif
}
static INLINE f32v decode_int4(i32v values, codebook book) {
    return __builtin_convertvector(book.fp4 ? doubled_e2m1(values) : values & 15, f32v) * book.scale + book.low;
}
#endif

#endif
