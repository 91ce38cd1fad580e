/* Weights in groups, int4 or int8, times rows of x with VPDPBUSD (AVX512-VNNI), which adds four products of bytes to an int32.
 *
 * UNIT_FEATURES neighbouring features of x are a unit: they share a scale, and are stored as scale × (256 × coarse + fine), two int8
 * digits: 16 bits, with an error of at most 1.5e-5 of the largest of them.
 *
 * BLOCK weight rows are multiplied together, a chunk of 64 bytes of each at a time. A chunk is transposed, so that a lane belongs to a weight
 * row, and a broadcast word of x, four digits, is multiplied by all of them:
 *
 *     weight rows              words                      int4: 8 features, even ones in the low halves; int8: 4 features
 *     row 0   | w0 | w1 | ..     word 0 | w0 of row 0 | w0 of row 1 | ..       a unit is 4 words of int4, or 8 of int8,
 *     row 1   | w0 | w1 | ..     word 1 | w1 of row 0 | w1 of row 1 | ..       which become 8 registers of unsigned bytes q
 *
 *     y = sum over units of  weight scale × unit scale × (256 × q·coarse + q·fine)  +  low × (sum of x in the unit)
 *
 * Sums of bytes are exact. The additions to y are in the order of the units, so that they do not depend on the number of rows. 512 weights
 * need 32 instructions for their order and values, and 24 (16 of them VPDPBUSD) for each row of x.
 */

#ifndef STOKER_DIGITS_H
#define STOKER_DIGITS_H

#include "linear.h"
#include "registers.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

#define HAS_DIGITS
#define UNIT_FEATURES 32
#define LARGEST_DIGITS 32512.0f /* 127 × 256 */
#define CHUNK_BYTES 64
/* Weights come into the L2 cache in the order of their addresses, AHEAD_BYTES behind the next block, because a Zen 4 core reads only 8 of
 * 26 GB/s from memory in the order of the products. From the L2 cache, chunks are prefetched in that order. */
#define AHEAD_BYTES 4096 /* [3072, 576] of int4 from memory: 72 µs; 87 with 2,048, 147 with chunks alone, 50 from the cache */
#define AHEAD_CHUNKS 4   /* 72 µs; 105 with 8 */
#define SCALES_AHEAD_BYTES 2048 /* [4096, 4096]: 0.82 ms; 1.0 with 4,096, 1.1 with the block after the next one in the L1 cache */

struct unit {
    int32_t digits[16]; /* for each register of weights: four coarse digits, four fine digits */
    float scale;
    float sum;         /* of the features */
    int32_t minus_128; /* -128 × the sum of the digits */
    int32_t unused;    /* so that a unit is a multiple of 16 bytes */
};

/* Scales and lows of BLOCK rows, by groups. */
struct block_scales {
    float scale[MAX_GROUPS + 3][BLOCK], low[MAX_GROUPS + 3][BLOCK];
};

static INLINE int64_t units_of(const struct linear *a) { return (a->in + UNIT_FEATURES - 1) / UNIT_FEATURES; }

/* Whether each unit has one scale, and a block of rows exists. */
static INLINE int has_digits(const struct linear *a) { return a->group && a->group % UNIT_FEATURES == 0 && a->out >= BLOCK; }

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

/* A pitch whose multiples are computed anew. Compilers would keep them in registers, which are too few. */
static INLINE int64_t not_constant(int64_t pitch) {
    __asm__("" : "+r"(pitch));
    return pitch;
}

/* Bytes begin : begin + 64 of BLOCK rows of `size` bytes, which follow one another, as words: a lane belongs to a row. */
static INLINE void load_words(const char *rows, int64_t size, int64_t begin, u32v words[LANES]) {
    int64_t pitch = not_constant(size);
    rows += begin;
    if (begin + CHUNK_BYTES <= size)
        UNROLL_TILE for (int n = 0; n < BLOCK; n++) words[n] = (u32v)_mm512_loadu_si512(rows + n * pitch);
    else
        UNROLL_TILE for (int n = 0; n < BLOCK; n++) {
            words[n] = (u32v)_mm512_maskz_loadu_epi8((1ull << (size - begin)) - 1, rows + n * pitch);
        }
    transpose(words);
}

/* Element `i` of words of `dtype`, as floats. */
static INLINE __m512 element_of_words(int dtype, u32v words, int i) {
    switch (dtype) {
    case UINT8: return _mm512_cvtepi32_ps((__m512i)(words >> 8 * i & 255));
    case BFLOAT16: return (__m512)(i ? words & 0xffff0000 : words << 16);
    case FLOAT16: return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)(words >> 16 * i)));
    }
    return (__m512)words;
}

/* to[g][n] = element [row + n, g] of an array [rows, groups], as float32. Up to three more groups are written. Prefetches as many bytes as
 * the block has, SCALES_AHEAD_BYTES behind the next one, into the L2 cache. */
static INLINE void load_by_groups(int dtype, const void *array, int64_t row, int64_t groups, float (*to)[BLOCK]) {
    int64_t size = groups * size_of(dtype), count = 4 / size_of(dtype);
    const char *from = (const char *)array + row * size;
    for (int64_t i = 0; i < BLOCK * size; i += 64) __builtin_prefetch(from + BLOCK * size + SCALES_AHEAD_BYTES + i, 0, 2);
    for (int64_t begin = 0; begin < size; begin += CHUNK_BYTES) {
        u32v words[LANES];
        load_words(from, size, begin, words);
        for (int64_t j = 0; j < LANES && begin + 4 * j < size; j++, to += count)
            UNROLL for (int i = 0; i < count; i++) _mm512_storeu_ps(to[i], element_of_words(dtype, words[j], i));
    }
}

static INLINE void load_floats_by_groups(int dtype, const void *array, int64_t row, int64_t groups, float (*to)[BLOCK]) {
    if (dtype == FLOAT16) load_by_groups(FLOAT16, array, row, groups, to);
    else if (dtype == BFLOAT16) load_by_groups(BFLOAT16, array, row, groups, to);
    else load_by_groups(FLOAT32, array, row, groups, to);
}

/* Load the scales and lows of weight rows row : row + BLOCK, for the bytes that `multiply_unit` multiplies. */
static void load_block_scales(const struct linear *a, int64_t row, struct block_scales *scales) {
    int64_t groups = groups_of(a);
    load_floats_by_groups(a->scale_dtype, a->scale, row, groups, scales->scale);
    if (a->offset) return load_floats_by_groups(a->scale_dtype, a->offset, row, groups, scales->low);
    if (a->zero) load_by_groups(UINT8, a->zero, row, groups, scales->low);
    for (int64_t g = 0; g < groups; g++) {
        __m512 scale = _mm512_loadu_ps(scales->scale[g]), low = _mm512_setzero_ps();
        if (a->zero) low = _mm512_mul_ps(_mm512_loadu_ps(scales->low[g]), -scale);
        else if (a->fp4) _mm512_storeu_ps(scales->scale[g], scale * 0.5f), low = scale * -6;
        else if (a->weight_dtype == UINT8) low = scale * -8;
        _mm512_storeu_ps(scales->low[g], low);
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

/* sums[r][n] = row r of x, in digits, · weight row first + n, for `rows` rows of x and BLOCK weight rows. */
static INLINE void multiply_block_of_digits(int is_int4, int fp4, int64_t rows, const struct linear *a, const struct block_scales *scales,
                                            int64_t first, const struct unit *x, float (*sums)[BLOCK]) {
    int64_t units = units_of(a), pitch = is_int4 ? a->in / 2 : a->in, words_of_unit = is_int4 ? 4 : 8, group = 0, end_of_group = a->group;
    const char *row = (const char *)a->weight + first * pitch;
    int64_t chunks = (pitch + CHUNK_BYTES - 1) / CHUNK_BYTES, left = chunks - AHEAD_CHUNKS % chunks; /* left: of the block of `ahead` */
    const char *ahead = row + AHEAD_CHUNKS / chunks * BLOCK * pitch + AHEAD_CHUNKS % chunks * CHUNK_BYTES;
    __m512 totals[MAX_ROWS];
    for (int64_t r = 0; r < rows; r++) totals[r] = _mm512_setzero_ps();
    for (int64_t k = 0, unit = 0; k < pitch; k += CHUNK_BYTES) {
        u32v words[LANES];
        int64_t step = not_constant(pitch);
        const char *next = row + BLOCK * pitch + AHEAD_BYTES + k * BLOCK;
        UNROLL_TILE for (int n = 0; n < BLOCK; n++) __builtin_prefetch(next + n * CHUNK_BYTES, 0, 2); /* into the L2 cache */
        UNROLL_TILE for (int n = 0; n < BLOCK; n++) __builtin_prefetch(ahead + n * step);
        load_words(row, pitch, k, words);
        ahead += CHUNK_BYTES;
        if (!--left) ahead += BLOCK * pitch - chunks * CHUNK_BYTES, left = chunks;
        UNROLL for (int64_t i = 0; i < LANES && unit < units; i += words_of_unit, unit++) {
            if (unit * UNIT_FEATURES == end_of_group) group++, end_of_group += a->group;
            __m512 scale = _mm512_loadu_ps(scales->scale[group]), low = _mm512_loadu_ps(scales->low[group]);
            multiply_unit(is_int4, fp4, words + i, scale, low, x + unit, units, rows, totals);
        }
    }
    for (int64_t r = 0; r < rows; r++) _mm512_storeu_ps(sums[r], totals[r]);
}

/* One function per kind of weight. A single row has its sums in a register. */
#define BLOCKS_OF_DIGITS(NAME, IS_INT4, FP4)                                                                                               \
    static void NAME(const struct linear *a, const struct block_scales *s, int64_t first, const struct unit *x, float (*sums)[BLOCK]) {    \
        if (a->rows == 1) multiply_block_of_digits(IS_INT4, FP4, 1, a, s, first, x, sums);                                                 \
        else multiply_block_of_digits(IS_INT4, FP4, a->rows, a, s, first, x, sums);                                                        \
    }
BLOCKS_OF_DIGITS(multiply_int8_block, 0, 0)
BLOCKS_OF_DIGITS(multiply_int4_block, 1, 0)
BLOCKS_OF_DIGITS(multiply_fp4_block, 1, 1)

/* The same for `count` weight rows, of which a block begins earlier if they are fewer. */
static void multiply_digits(const struct linear *a, int64_t first, int64_t count, const struct unit *x, float (*sums)[BLOCK]) {
    struct block_scales scales;
    int64_t begin = first + count - BLOCK;
    load_block_scales(a, begin, &scales);
    (a->weight_dtype == INT8 ? multiply_int8_block : a->fp4 ? multiply_fp4_block : multiply_int4_block)(a, &scales, begin, x, sums);
    for (int64_t r = 0; count < BLOCK && r < a->rows; r++) memmove(sums[r], sums[r] + BLOCK - count, count * sizeof **sums);
}

#endif

#endif
