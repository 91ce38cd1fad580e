/* Weights in groups, int4 or int8, times rows of x with VPDPBUSD (AVX512-VNNI), which adds four products of bytes to an int32.
 *
 * UNIT_FEATURES neighbouring features of x are a unit: they share a scale, and are stored as scale × (256 × coarse + fine), two int8
 * digits: 16 bits, with an error of at most 1.5e-5 of the largest of them.
 *
 * A lane belongs to a weight row (blocks.h), and a broadcast word of x, four digits, is multiplied by all of them. The words of a unit, 4 of
 * int4 or 8 of int8, become 8 registers of unsigned bytes q.
 *
 *     y = sum over units of  weight scale × unit scale × (256 × q·coarse + q·fine)  +  low × (sum of x in the unit)
 *
 * Sums of bytes are exact. The additions to y are in the order of the units, so that they do not depend on the number of rows. 512 weights
 * need 12 instructions for their values, and 24 (16 of them VPDPBUSD) for each row of x.
 */

#ifndef STOKER_DIGITS_H
#define STOKER_DIGITS_H

#include "blocks.h"

#ifdef HAS_BLOCKS

#define LARGEST_DIGITS 32512.0f /* 127 × 256 */

struct unit {
    int32_t digits[16]; /* for each register of weights: four coarse digits, four fine digits */
    float scale;
    float sum;         /* of the features */
    int32_t minus_128; /* -128 × the sum of the digits */
    int32_t unused;    /* so that a unit is a multiple of 16 bytes */
};

/* Floats of a row of x. */
static INLINE int64_t digits_floats(const struct linear *a) { return units_of(a) * (int64_t)(sizeof(struct unit) / sizeof(float)); }

/* Round UNIT_FEATURES floats to int16 values, the digits. Returns their scale, NaN if a float is not finite. */
static INLINE float round_to_digits(const float *x, __m512i *values) {
    __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + LANES);
    uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32((__m512i)_mm512_abs_ps(low), (__m512i)_mm512_abs_ps(high)));
    float largest = ((union { uint32_t bits; float value; }){bits}).value; /* NaN and infinity have the largest bits */
    int is_finite = bits < 0x7f800000;
    __m512 inverse = _mm512_set1_ps(is_finite && largest > 1e-30f ? LARGEST_DIGITS / largest : 0);
    __m256i first = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)));
    __m256i second = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(high, inverse)));
    *values = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    return is_finite ? largest / LARGEST_DIGITS : NAN;
}

/* Store int16 values as coarse and fine digits in the order of the registers of weights: of int4, even features of a word, then odd ones. */
static INLINE void store_digits(int is_int4, __m512i values, int32_t *to) {
    const __m256i even_then_odd =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    __m512i high = _mm512_srai_epi16(_mm512_add_epi16(values, _mm512_set1_epi16(128)), 8);
    __m256i coarse = _mm512_cvtepi16_epi8(high), fine = _mm512_cvtepi16_epi8(_mm512_sub_epi16(values, _mm512_slli_epi16(high, 8)));
    if (is_int4) coarse = _mm256_shuffle_epi8(coarse, even_then_odd), fine = _mm256_shuffle_epi8(fine, even_then_odd);
    __m256i left = _mm256_unpacklo_epi32(coarse, fine), right = _mm256_unpackhi_epi32(coarse, fine);
    _mm256_storeu_si256((__m256i *)to, _mm256_permute2x128_si256(left, right, 0x20));
    _mm256_storeu_si256((__m256i *)(to + 8), _mm256_permute2x128_si256(left, right, 0x31));
}

/* Convert a row of floats, with zeros behind `in` up to a whole unit, to units. */
static void convert_to_digits(const struct linear *a, const float *x, float *to) {
    struct unit *unit = (struct unit *)to;
    for (int64_t i = 0; i < units_of(a); i++, unit++) {
        __m512i values;
        unit->scale = round_to_digits(x + i * UNIT_FEATURES, &values);
        int32_t sum = _mm512_reduce_add_epi32(_mm512_madd_epi16(values, _mm512_set1_epi16(1)));
        unit->sum = unit->scale * (float)sum;
        unit->minus_128 = -128 * sum;
        store_digits(a->weight_dtype == UINT8, values, unit->digits);
    }
}

/* The unsigned values of 64 bytes of int4, even and odd features. FP4: 12 + twice the e2m1 values, 0 to 24. */
static INLINE void split_int4(__m512i bytes, int fp4, __m512i *even, __m512i *odd) {
    const __m512i low_half = _mm512_set1_epi8(15);
    *even = _mm512_and_si512(bytes, low_half), *odd = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low_half);
    if (!fp4) return;
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    *even = _mm512_shuffle_epi8(table, *even), *odd = _mm512_shuffle_epi8(table, *odd);
}

/* sums[r] += the products of a unit of BLOCK weight rows and of `rows` rows of x, `pitch` units apart. */
static INLINE void multiply_unit(int is_int4, int fp4, const u32v *words, __m512 scale, __m512 low, const struct unit *x, int64_t pitch,
                                 int64_t rows, __m512 *sums) {
    __m512i weights[8];
    if (is_int4)
        UNROLL for (int i = 0; i < 4; i++) split_int4((__m512i)words[i], fp4, weights + 2 * i, weights + 2 * i + 1);
    else
        UNROLL for (int i = 0; i < 8; i++) weights[i] = _mm512_xor_si512((__m512i)words[i], _mm512_set1_epi8((char)0x80));
    for (int64_t r = 0; r < rows; r++, x += pitch) {
        /* Two sums of each digit, because a sum waits for the one before. */
        __m512i coarse[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()}, fine[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        if (!is_int4) fine[0] = _mm512_set1_epi32(x->minus_128);
        UNROLL for (int i = 0; i < 8; i++) {
            coarse[i % 2] = _mm512_dpbusd_epi32(coarse[i % 2], weights[i], _mm512_set1_epi32(x->digits[2 * i]));
            fine[i % 2] = _mm512_dpbusd_epi32(fine[i % 2], weights[i], _mm512_set1_epi32(x->digits[2 * i + 1]));
        }
        __m512i high = _mm512_slli_epi32(_mm512_add_epi32(coarse[0], coarse[1]), 8), low_digits = _mm512_add_epi32(fine[0], fine[1]);
        __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(high, low_digits));
        sums[r] = _mm512_fmadd_ps(low, _mm512_set1_ps(x->sum), sums[r]);
        sums[r] = _mm512_fmadd_ps(dot, _mm512_mul_ps(scale, _mm512_set1_ps(x->scale)), sums[r]);
    }
}

/* sums[r][n] = row r of x, in digits, · row n of a block, for `rows` rows of x. */
static INLINE void multiply_block_of_digits(int is_int4, int fp4, int64_t rows, const struct linear *a, const char *block, const struct unit *x,
                                            float (*sums)[BLOCK]) {
    int64_t units = units_of(a), header = scale_bytes(a), words = is_int4 ? 4 : 8, units_of_group = a->group / UNIT_FEATURES, left = 0;
    __m512 totals[MAX_ROWS], scale = _mm512_setzero_ps(), low = scale;
    for (int64_t r = 0; r < rows; r++) totals[r] = _mm512_setzero_ps();
    for (int64_t unit = 0; unit < units; unit++, left--, block += words * sizeof(u32v)) {
        if (!left) {
            load_block_scales(a, block, &scale, &low);
            if (fp4) low = scale * -6.0f, scale *= 0.5f; /* of 12 + twice the values */
            block += header, left = units_of_group;
        }
        u32v bytes[8];
        UNROLL for (int64_t i = 0; i < words; i++) bytes[i] = (u32v)_mm512_loadu_si512(block + i * sizeof(u32v));
        multiply_unit(is_int4, fp4, bytes, scale, low, x + unit, units, rows, totals);
    }
    for (int64_t r = 0; r < rows; r++) _mm512_storeu_ps(sums[r], totals[r]);
}

/* One function per kind of weight. A single row has its sums in a register. */
#define BLOCKS_OF_DIGITS(NAME, IS_INT4, FP4)                                                                                               \
    static void NAME(const struct linear *a, const char *block, const struct unit *x, float (*sums)[BLOCK]) {                              \
        if (a->rows == 1) multiply_block_of_digits(IS_INT4, FP4, 1, a, block, x, sums);                                                    \
        else multiply_block_of_digits(IS_INT4, FP4, a->rows, a, block, x, sums);                                                           \
    }
BLOCKS_OF_DIGITS(multiply_int8_block, 0, 0)
BLOCKS_OF_DIGITS(multiply_int4_block, 1, 0)
BLOCKS_OF_DIGITS(multiply_fp4_block, 1, 1)

/* sums[r][n] = row r of x, in digits, · weight row first + n, for `count` <= BLOCK weight rows. */
static void multiply_digits(const struct linear *a, int64_t first, int64_t count, const struct unit *x, float (*sums)[BLOCK]) {
    int64_t skipped = first % BLOCK;
    const char *block = block_of(a, first);
    void (*multiply)(const struct linear *, const char *, const struct unit *, float (*)[BLOCK]) =
        a->weight_dtype == INT8 ? multiply_int8_block : a->fp4 ? multiply_fp4_block : multiply_int4_block;
    multiply(a, block, x, sums);
    if (!skipped) return;
    /* Some rows of a block and some of the next one: the factors of a gate, if the rows before them fill no whole blocks. */
    for (int64_t r = 0; r < a->rows; r++) memmove(sums[r], sums[r] + skipped, (BLOCK - skipped) * sizeof **sums);
    if (skipped + count <= BLOCK) return;
    float next[MAX_ROWS][BLOCK];
    multiply(a, block + block_bytes(a), x, next);
    for (int64_t r = 0; r < a->rows; r++) memcpy(sums[r] + BLOCK - skipped, next[r], skipped * sizeof **sums);
}

#endif

#endif
