/* What panels.h needs of a processor: AVX-512 with 32 registers of 16 lanes, AVX2 with 16 registers of 8 lanes, or 64-bit ARM with 32
 * registers of 4 lanes. HAS_PANELS if it is one. */

#ifndef STOKER_REGISTERS_H
#define STOKER_REGISTERS_H

#include "vector.h"

#define UNROLL_TILE _Pragma("GCC unroll 16")

#ifdef __AVX512BW__

#define HAS_PANELS
#define TILE_ROWS 12 /* sums in 24 registers; an element costs 2 loads, 12 broadcasts and 24 multiplications */

/* Transpose 16 × 16 elements of 32 bits: within 128 bits, then 128 bits at a time. */
static INLINE void transpose(u32v rows[LANES]) {
    __m512i half[16], quarter[16];
    UNROLL for (int i = 0; i < 8; i++) {
        half[2 * i] = _mm512_unpacklo_epi32((__m512i)rows[2 * i], (__m512i)rows[2 * i + 1]);
        half[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)rows[2 * i], (__m512i)rows[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) { /* quarter[i + c], 128 bits number n: column 4 n + c of rows i to i + 3 */
        quarter[i] = _mm512_unpacklo_epi64(half[i], half[i + 2]);
        quarter[i + 1] = _mm512_unpackhi_epi64(half[i], half[i + 2]);
        quarter[i + 2] = _mm512_unpacklo_epi64(half[i + 1], half[i + 3]);
        quarter[i + 3] = _mm512_unpackhi_epi64(half[i + 1], half[i + 3]);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        __m512i even = _mm512_shuffle_i32x4(quarter[c], quarter[4 + c], 0x88), odd = _mm512_shuffle_i32x4(quarter[c], quarter[4 + c], 0xdd);
        __m512i even_below = _mm512_shuffle_i32x4(quarter[8 + c], quarter[12 + c], 0x88);
        __m512i odd_below = _mm512_shuffle_i32x4(quarter[8 + c], quarter[12 + c], 0xdd);
        rows[c] = (u32v)_mm512_shuffle_i32x4(even, even_below, 0x88);
        rows[4 + c] = (u32v)_mm512_shuffle_i32x4(odd, odd_below, 0x88);
        rows[8 + c] = (u32v)_mm512_shuffle_i32x4(even, even_below, 0xdd);
        rows[12 + c] = (u32v)_mm512_shuffle_i32x4(odd, odd_below, 0xdd);
    }
}

/* Store the first TILE_ROWS of the lanes. */
static INLINE void store_tile_rows(uint32_t *to, u32v v) { _mm512_mask_storeu_epi32(to, (1 << TILE_ROWS) - 1, (__m512i)v); }

/* LANES elements at p, of which `left` exist. Zeros stand for the others. */
static INLINE u32v load_left(const float *p, int64_t left) {
    return (u32v)_mm512_maskz_loadu_epi32(left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0, p);
}

/* LANES values of int4 at p, each in the low four bits of a lane. Reads LANES / 2 bytes. */
static INLINE i32v load_int4(const void *p) {
    __m128i bytes = _mm_loadl_epi64(p), twice = _mm_unpacklo_epi8(bytes, bytes);
    return (i32v)_mm512_srlv_epi32(_mm512_cvtepu8_epi32(twice), _mm512_set1_epi64(4ll << 32)); /* odd lanes: the high half */
}

/* An element of x for `multiply_add_floats`. */
static INLINE u32v load_element(const uint32_t *p) { return (u32v)_mm512_set1_epi32(*p); }

static INLINE f32v multiply_add_floats(f32v sum, u32v a, u32v b) { return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }

static INLINE f32v larger(f32v a, f32v b) { return (f32v)_mm512_max_ps((__m512)a, (__m512)b); }

static INLINE float largest_lane(f32v v) { return _mm512_reduce_max_ps((__m512)v); }

/* Whether a lane is larger than `bound`. */
static INLINE int is_any_above(f32v v, float bound) { return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0; }

/* The first lane with this value, which one of them has. */
static INLINE int first_lane(f32v v, float value) {
    return __builtin_ctz(_mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(value), _CMP_EQ_OQ));
}

#elif defined(__AVX2__) && defined(__FMA__)

#define HAS_PANELS
#define TILE_ROWS 6 /* sums in 12 registers; an element costs 2 loads, 6 broadcasts and 12 multiplications */

/* Transpose 8 × 8 elements of 32 bits: within 128 bits, then 128 bits at a time. */
static INLINE void transpose(u32v rows[LANES]) {
    __m256i half[8], quarter[8];
    UNROLL for (int i = 0; i < 4; i++) {
        half[2 * i] = _mm256_unpacklo_epi32((__m256i)rows[2 * i], (__m256i)rows[2 * i + 1]);
        half[2 * i + 1] = _mm256_unpackhi_epi32((__m256i)rows[2 * i], (__m256i)rows[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) { /* quarter[i + c], 128 bits number n: column 4 n + c of rows i to i + 3 */
        quarter[i] = _mm256_unpacklo_epi64(half[i], half[i + 2]);
        quarter[i + 1] = _mm256_unpackhi_epi64(half[i], half[i + 2]);
        quarter[i + 2] = _mm256_unpacklo_epi64(half[i + 1], half[i + 3]);
        quarter[i + 3] = _mm256_unpackhi_epi64(half[i + 1], half[i + 3]);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        rows[c] = (u32v)_mm256_permute2x128_si256(quarter[c], quarter[4 + c], 0x20);
        rows[4 + c] = (u32v)_mm256_permute2x128_si256(quarter[c], quarter[4 + c], 0x31);
    }
}

/* Store the first TILE_ROWS of the lanes. */
static INLINE void store_tile_rows(uint32_t *to, u32v v) { memcpy(to, &v, TILE_ROWS * sizeof *to); }

/* LANES elements at p, of which `left` exist. Zeros stand for the others. */
static INLINE u32v load_left(const float *p, int64_t left) {
    return left > 0 ? (u32v)load_up_to(FLOAT32, p, 0, left) : (u32v){0};
}

/* LANES values of int4 at p, each in the low four bits of a lane. Reads LANES / 2 bytes. */
static INLINE i32v load_int4(const void *p) {
    __m128i bytes = _mm_loadu_si32(p), twice = _mm_unpacklo_epi8(bytes, bytes);
    return (i32v)_mm256_srlv_epi32(_mm256_cvtepu8_epi32(twice), _mm256_set1_epi64x(4ll << 32)); /* odd lanes: the high half */
}

/* An element of x for `multiply_add_floats`. */
static INLINE u32v load_element(const uint32_t *p) { return (u32v)_mm256_set1_epi32(*p); }

static INLINE f32v multiply_add_floats(f32v sum, u32v a, u32v b) { return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }

static INLINE f32v larger(f32v a, f32v b) { return (f32v)_mm256_max_ps((__m256)a, (__m256)b); }

static INLINE float largest_lane(f32v v) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

/* Whether a lane is larger than `bound`. */
static INLINE int is_any_above(f32v v, float bound) { return _mm256_movemask_ps((__m256)(v > bound)) != 0; }

/* The first lane with this value, which one of them has. */
static INLINE int first_lane(f32v v, float value) { return __builtin_ctz(_mm256_movemask_ps((__m256)(v == value))); }

#elif defined(__aarch64__)

#define HAS_PANELS
#define TILE_ROWS 8 /* sums in 16 registers; an element costs 10 loads and 16 multiplications. With 12 rows, GCC 12 spills sums */

/* Transpose 4 × 4 elements of 32 bits: pairs of lanes, then pairs of 64 bits. */
static INLINE void transpose(u32v rows[LANES]) {
    uint64x2_t even[2], odd[2]; /* columns 0 and 2 of rows 2 i and 2 i + 1; columns 1 and 3 */
    UNROLL for (int i = 0; i < 2; i++) {
        even[i] = vreinterpretq_u64_u32(vtrn1q_u32((uint32x4_t)rows[2 * i], (uint32x4_t)rows[2 * i + 1]));
        odd[i] = vreinterpretq_u64_u32(vtrn2q_u32((uint32x4_t)rows[2 * i], (uint32x4_t)rows[2 * i + 1]));
    }
    rows[0] = (u32v)vtrn1q_u64(even[0], even[1]);
    rows[1] = (u32v)vtrn1q_u64(odd[0], odd[1]);
    rows[2] = (u32v)vtrn2q_u64(even[0], even[1]);
    rows[3] = (u32v)vtrn2q_u64(odd[0], odd[1]);
}

/* Store LANES of the TILE_ROWS elements. */
static INLINE void store_tile_rows(uint32_t *to, u32v v) { vst1q_u32(to, (uint32x4_t)v); }

/* LANES elements at p, of which `left` exist. Zeros stand for the others. */
static INLINE u32v load_left(const float *p, int64_t left) {
    return left > 0 ? (u32v)load_up_to(FLOAT32, p, 0, left) : (u32v){0};
}

/* LANES values of int4 at p, each in the low four bits of a lane. Reads LANES / 2 bytes. */
static INLINE i32v load_int4(const void *p) {
    uint16_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return (i32v)(u32v){bytes, bytes >> 4, bytes >> 8, bytes >> 12};
}

/* An element of x for `multiply_add_floats`, in lane 0: FMLA multiplies by one lane, so that it needs no broadcast. */
static INLINE u32v load_element(const uint32_t *p) { return (u32v){*p}; }

/* sum + a × lane 0 of x. */
static INLINE f32v multiply_add_floats(f32v sum, u32v a, u32v x) {
    return (f32v)vfmaq_laneq_f32((float32x4_t)sum, vreinterpretq_f32_u32((uint32x4_t)a), vreinterpretq_f32_u32((uint32x4_t)x), 0);
}

static INLINE f32v larger(f32v a, f32v b) { return blend(a > b, a, b); }

static INLINE float largest_lane(f32v v) { return vmaxvq_f32((float32x4_t)v); }

/* Whether a lane is larger than `bound`. */
static INLINE int is_any_above(f32v v, float bound) { return vmaxvq_u32((uint32x4_t)(v > bound)) != 0; }

/* The first lane with this value, which one of them has. */
static INLINE int first_lane(f32v v, float value) { return v[0] == value ? 0 : v[1] == value ? 1 : v[2] == value ? 2 : 3; }

#endif

#endif
