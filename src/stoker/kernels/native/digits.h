/* Weights in groups, int4 or int8, times rows of x with VPDPBUSD (AVX512-VNNI), which adds four products of bytes to an int32.
 *
 * UNIT_FEATURES neighbouring features of x share a unit, and are stored as unit × (256 × coarse + fine), two int8 digits: 16 bits, with
 * an error of at most 1.5e-5 of the largest of them. One register of a weight row is a chunk, whose bytes q are unsigned:
 *
 *     int4, 128 features   even features | odd features     lane j: features 8 j to 8 j + 7, of one group
 *     int8, 64 features    value + 128                      lane j: features 4 j to 4 j + 3
 *
 *     y = sum over chunks and lanes of scale × unit × (256 × q·coarse + q·fine)  +  sum over groups of low × (sum of x)
 *
 * Sums of bytes are exact. 128 weights and one row of x need 16 instructions, and 40 when weights are widened to floats.
 */

#ifndef STOKER_DIGITS_H
#define STOKER_DIGITS_H

#include "linear.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

#define HAS_DIGITS
#define UNIT_FEATURES 32
#define LARGEST_DIGITS 32512.0f /* 127 × 256 */

/* One row of x for a chunk. */
struct int4_digits {
    int8_t coarse[2][64], fine[2][64]; /* of even and of odd features */
    float unit[LANES];
};
struct int8_digits {
    int8_t coarse[64], fine[64];
    int32_t minus_128[LANES]; /* -128 × the sum of the features of each lane, in units */
    float unit[LANES];
};

static INLINE int64_t chunk_features(const struct linear *a) { return a->weight_dtype == UINT8 ? 128 : 64; }

static INLINE int64_t chunks_of(const struct linear *a) { return (a->in + chunk_features(a) - 1) / chunk_features(a); }

#define INT4_FLOATS (int64_t)(sizeof(struct int4_digits) / sizeof(float))
#define INT8_FLOATS (int64_t)(sizeof(struct int8_digits) / sizeof(float))

static INLINE int64_t chunk_floats(const struct linear *a) { return a->weight_dtype == UINT8 ? INT4_FLOATS : INT8_FLOATS; }

/* Whether each lane of a chunk has one scale, and all chunks are divided into groups at the same lanes. */
static INLINE int has_digits(const struct linear *a) {
    if (!a->group || a->group % UNIT_FEATURES) return 0;
    return chunk_features(a) % a->group == 0 || a->group % chunk_features(a) == 0;
}

/* Groups of a row, padded to whole registers. */
static INLINE int64_t padded_groups(const struct linear *a) { return (groups_of(a) + LANES - 1) / LANES * LANES; }

/* Floats of a row of x: the sums of its groups, then its chunks. */
static INLINE int64_t digits_floats(const struct linear *a) { return padded_groups(a) + chunks_of(a) * chunk_floats(a); }

/* Round UNIT_FEATURES floats to int16 values in units. Returns the unit, NaN if a float is not finite. */
static INLINE float round_to_units(const float *x, __m512i *values) {
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

/* Store 32 int16 values as digits. */
static INLINE void split_digits(__m512i values, __m256i *coarse, __m256i *fine) {
    __m512i high = _mm512_srai_epi16(_mm512_add_epi16(values, _mm512_set1_epi16(128)), 8);
    *coarse = _mm512_cvtepi16_epi8(high);
    *fine = _mm512_cvtepi16_epi8(_mm512_sub_epi16(values, _mm512_slli_epi16(high, 8)));
}

/* Store the digits of 32 features from feature `at` of a chunk on. */
static INLINE void store_int4_digits(struct int4_digits *to, int64_t at, __m512i values, float unit) {
    __m256i coarse, fine, even = _mm512_cvtepi32_epi16(values), odd = _mm512_cvtepi32_epi16(_mm512_srli_epi32(values, 16));
    split_digits(_mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1), &coarse, &fine);
    for (int half = 0; half < 2; half++) {
        memcpy(to->coarse[half] + at / 2, (char *)&coarse + 16 * half, 16);
        memcpy(to->fine[half] + at / 2, (char *)&fine + 16 * half, 16);
    }
    for (int i = 0; i < UNIT_FEATURES / 8; i++) to->unit[at / 8 + i] = unit;
}

static INLINE void store_int8_digits(struct int8_digits *to, int64_t at, __m512i values, float unit) {
    __m256i coarse, fine;
    split_digits(values, &coarse, &fine);
    memcpy(to->coarse + at, &coarse, sizeof coarse);
    memcpy(to->fine + at, &fine, sizeof fine);
    __m512i pairs = _mm512_madd_epi16(values, _mm512_set1_epi16(-128)), fours = _mm512_add_epi32(pairs, _mm512_srli_epi64(pairs, 32));
    _mm256_storeu_si256((__m256i *)(to->minus_128 + at / 4), _mm512_cvtepi64_epi32(fours));
    for (int i = 0; i < UNIT_FEATURES / 4; i++) to->unit[at / 4 + i] = unit;
}

/* Convert a row of floats, with zeros behind `in` up to a whole chunk, to `to` [digits_floats]. */
static void convert_to_digits(const struct linear *a, const float *x, float *to) {
    int64_t size = chunk_features(a);
    float *chunk = to + padded_groups(a);
    memset(to, 0, padded_groups(a) * sizeof *to);
    for (int64_t k = 0; k < chunks_of(a) * size; k += UNIT_FEATURES) {
        __m512i values;
        float unit = round_to_units(x + k, &values);
        if (k < a->in) to[k / a->group] += unit * (float)_mm512_reduce_add_epi32(_mm512_madd_epi16(values, _mm512_set1_epi16(1)));
        float *at = chunk + k / size * chunk_floats(a);
        if (a->weight_dtype == UINT8) store_int4_digits((struct int4_digits *)at, k % size, values, unit);
        else store_int8_digits((struct int8_digits *)at, k % size, values, unit);
    }
}

/* Where groups are in chunks: after every `chunks` chunks, `step` groups have passed. */
struct chunk_groups {
    int32_t of_lane[LANES]; /* the group of each lane, from the first one of its chunk on: 0 to 3 */
    int64_t chunks, step;
    int64_t count, padded; /* groups of a row; padded to whole registers */
};

static INLINE struct chunk_groups groups_of_chunks(const struct linear *a) {
    int64_t size = chunk_features(a);
    struct chunk_groups found = {.chunks = size < a->group ? a->group / size : 1, .step = size < a->group ? 1 : size / a->group,
                                 .count = groups_of(a), .padded = padded_groups(a)};
    for (int i = 0; i < LANES; i++) found.of_lane[i] = i * (size / LANES) / a->group;
    return found;
}

/* The unsigned values of 64 bytes of int4, even and odd features. FP4: 12 + twice the e2m1 values, 0 to 24. */
static INLINE void split_int4(__m512i bytes, int fp4, __m512i *even, __m512i *odd) {
    const __m512i low_half = _mm512_set1_epi8(15);
    *even = _mm512_and_si512(bytes, low_half), *odd = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low_half);
    if (!fp4) return;
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    *even = _mm512_shuffle_epi8(table, *even), *odd = _mm512_shuffle_epi8(table, *odd);
}

/* A value that stays in its register: compilers would load it again for each weight row, and loads are what limits the loop. */
static INLINE __m512i in_register(const void *p) {
    __m512i value = _mm512_load_si512(p);
    __asm__("" : "+v"(value));
    return value;
}

/* The sums of products of a chunk in each lane, as floats in units. */
static INLINE f32v multiply_int4_digits(__m512i even, __m512i odd, const __m512i x[4]) {
    __m512i dot = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), even, x[0]), odd, x[1]);
    __m512i fine = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), even, x[2]), odd, x[3]);
    return (f32v)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(dot, 8), fine));
}

static INLINE f32v multiply_int8_digits(__m512i values, const struct int8_digits *x) {
    __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), values, _mm512_load_si512(x->coarse));
    __m512i fine = _mm512_dpbusd_epi32(_mm512_load_si512(x->minus_128), values, _mm512_load_si512(x->fine));
    return (f32v)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(dot, 8), fine));
}

#endif

#endif
