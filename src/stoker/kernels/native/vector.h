/* SIMD vectors of floats, one register wide, in the vector extensions of GCC and clang; intrinsics where these generate slow code. */

#ifndef STOKER_VECTOR_H
#define STOKER_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Floats of a register. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef float f32v __attribute__((vector_size(4 * LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * LANES)));

/* The numbers of `DTYPES` in library.py. UINT8 as the dtype of a weight means int4, two values per byte. E4M3: torch.float8_e4m3fn. */
enum dtype { FLOAT32, BFLOAT16, FLOAT16, INT8, UINT8, INT32, E4M3 };

/* Bytes of an element; of the dtypes above all but INT32 are elements. */
static INLINE int64_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : dtype <= FLOAT16 ? 2 : 1; }

static INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

static INLINE f32v broadcast(float value) { return value - (f32v){0}; }

static INLINE f32v as_float(u32v bits) { return (f32v)bits; }

/* a where the mask's lane is all ones, b where it is zero. */
static INLINE f32v blend(i32v mask, f32v a, f32v b) { return (f32v)(((i32v)a & mask) | ((i32v)b & ~mask)); }

/* LANES neighbouring elements at p, widened to int32. Compilers emit four times the necessary instructions for
 * __builtin_convertvector of narrow integers, and a weight costs little else than its conversion. */
#if defined(__AVX512F__)
static INLINE i32v widen_i8(const void *p) { return (i32v)_mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }
static INLINE i32v widen_u8(const void *p) { return (i32v)_mm512_cvtepu8_epi32(_mm_loadu_si128(p)); }
static INLINE i32v widen_u16(const void *p) { return (i32v)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)); }
#elif defined(__AVX2__)
static INLINE i32v widen_i8(const void *p) { return (i32v)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)); }
static INLINE i32v widen_u8(const void *p) { return (i32v)_mm256_cvtepu8_epi32(_mm_loadl_epi64(p)); }
static INLINE i32v widen_u16(const void *p) { return (i32v)_mm256_cvtepu16_epi32(_mm_loadu_si128(p)); }
#else
#define WIDEN(NAME, TYPE)                                                                                                                  \
    static INLINE i32v NAME(const void *p) {                                                                                               \
        TYPE v[LANES];                                                                                                                     \
        memcpy(v, p, sizeof v);                                                                                                            \
        return (i32v){v[0], v[1], v[2], v[3]};                                                                                             \
    }
#ifdef __ARM_NEON
static INLINE uint32_t load_4_bytes(const void *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
static INLINE i32v widen_i8(const void *p) {
    return (i32v)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(load_4_bytes(p))))));
}
static INLINE i32v widen_u8(const void *p) {
    return (i32v)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(load_4_bytes(p))))));
}
#else
WIDEN(widen_i8, int8_t)
WIDEN(widen_u8, uint8_t)
#endif
WIDEN(widen_u16, uint16_t)
#endif

/* IEEE half precision bits (in the low 16 bits of each lane) as float32. */
static INLINE f32v from_float16(u32v half) {
    u32v magnitude = (half & 0x7fff) << 13;
    f32v value = as_float(magnitude) * 0x1p112f; /* moves the exponent's bias from 15 to 127; exact for subnormals */
    f32v special = as_float(magnitude | 0x7f800000);
    value = blend((i32v)((half & 0x7c00) == 0x7c00), special, value); /* infinity and NaN */
    return as_float((u32v)value | (half & 0x8000) << 16);
}

/* e4m3 bits (in the low 8 bits of each lane) as float32. */
static INLINE f32v from_e4m3(u32v bits) {
    u32v magnitude = bits & 0x7f;
    f32v value = as_float(magnitude << 20) * 0x1p120f; /* moves the exponent's bias from 7 to 127; exact for subnormals */
    value = blend((i32v)(magnitude == 0x7f), broadcast(NAN), value);
    return as_float((u32v)value | (bits & 0x80) << 24);
}

/* Elements index : index + LANES of an array of `dtype`, as float32. With a constant dtype one branch is compiled. */
static INLINE f32v load(int dtype, const void *array, int64_t index) {
    const char *p = (const char *)array + index * size_of(dtype);
    f32v v;
    switch (dtype) {
    case INT8: return __builtin_convertvector(widen_i8(p), f32v);
    case UINT8: return __builtin_convertvector(widen_u8(p), f32v);
    case BFLOAT16: return as_float((u32v)widen_u16(p) << 16);
#if defined(__AVX512F__)
    case FLOAT16: return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__) && defined(__AVX2__)
    case FLOAT16: return (f32v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    case FLOAT16: return from_float16((u32v)widen_u16(p));
#endif
    case E4M3: return from_e4m3((u32v)widen_u8(p));
    }
    memcpy(&v, p, sizeof v);
    return v;
}

/* The first `count` < LANES of these elements, then zeros. Nothing behind them is read. */
static INLINE f32v load_first(int dtype, const void *array, int64_t index, int64_t count) {
    char part[LANES * 4] = {0};
    memcpy(part, (const char *)array + index * size_of(dtype), count * size_of(dtype));
    return load(dtype, part, 0);
}

/* `load` where at least LANES elements are left, else `load_first`. */
static INLINE f32v load_up_to(int dtype, const void *array, int64_t index, int64_t count) {
    return count >= LANES ? load(dtype, array, index) : load_first(dtype, array, index, count);
}

/* Store the first `count` lanes (at most LANES): as float32; as bfloat16, rounded to nearest even; or as int8, rounded to nearest even
 * within ± 127, with NaN as 0. */
static INLINE void store_up_to(int dtype, void *array, int64_t index, f32v v, int64_t count) {
    char *p = (char *)array + index * size_of(dtype);
    count = min_i64(count, LANES);
    if (dtype == FLOAT32) {
        if (count == LANES) memcpy(p, &v, sizeof v);
        else memcpy(p, &v, count * 4);
    } else if (dtype == BFLOAT16) {
        u32v raw = (u32v)v, nearest = (raw + 0x7fff + (raw >> 16 & 1)) >> 16;
        uint16_t half[LANES];
        for (int i = 0; i < LANES; i++) half[i] = v[i] == v[i] ? nearest[i] : 0x7fc0;
        memcpy(p, half, count * 2);
    } else {
        int8_t value[LANES];
        v = blend(v != v, broadcast(0), v);
        v = blend(v > 127.0f, broadcast(127), blend(v < -127.0f, broadcast(-127), v));
        v = (v + 0x1.8p23f) - 0x1.8p23f; /* leaves no fraction bits: rounded to nearest even */
        for (int i = 0; i < LANES; i++) value[i] = v[i];
        memcpy(p, value, count);
    }
}

/* The sum of all lanes. */
static INLINE float sum_lanes(f32v v) {
    float parts[LANES];
    memcpy(parts, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2) UNROLL for (int i = 0; i < half; i++) parts[i] += parts[half + i];
    return parts[0];
}

/* to[i] = sum_lanes of vector i, bitwise. With AVX, all four are halved at once, in a third of the instructions. */
static INLINE void sum_lanes_of_4(f32v a, f32v b, f32v c, f32v d, float *to) {
#ifdef __AVX512F__
    __m512 left = _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x44) + _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xee);
    __m512 right = _mm512_shuffle_f32x4((__m512)c, (__m512)d, 0x44) + _mm512_shuffle_f32x4((__m512)c, (__m512)d, 0xee);
    __m512 sum = _mm512_shuffle_f32x4(left, right, 0x88) + _mm512_shuffle_f32x4(left, right, 0xdd); /* vector i in 128 bits number i */
    sum += _mm512_permute_ps(sum, 0x4e);
    sum += _mm512_permute_ps(sum, 0xb1);
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sum))); /* a compressing store takes 100 cycles on Zen 4 */
#elif defined(__AVX2__)
    __m256 left = _mm256_permute2f128_ps((__m256)a, (__m256)c, 0x20) + _mm256_permute2f128_ps((__m256)a, (__m256)c, 0x31);
    __m256 right = _mm256_permute2f128_ps((__m256)b, (__m256)d, 0x20) + _mm256_permute2f128_ps((__m256)b, (__m256)d, 0x31);
    __m256 sum = _mm256_shuffle_ps(left, right, 0x44) + _mm256_shuffle_ps(left, right, 0xee); /* a, a, b, b, c, c, d, d */
    sum = _mm256_shuffle_ps(sum, sum, 0x88) + _mm256_shuffle_ps(sum, sum, 0xdd);              /* a, b, a, b, c, d, c, d */
    _mm_storeu_ps(to, _mm_shuffle_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1), 0x44));
#else
    to[0] = sum_lanes(a), to[1] = sum_lanes(b), to[2] = sum_lanes(c), to[3] = sum_lanes(d);
#endif
}

/* exp(x) within 2 units in the last place; 0 and infinity beyond the range of float.
 * x = n log 2 + r with |r| <= log 2 / 2; exp(r) by a polynomial of degree 5. */
static INLINE f32v exponential(f32v x) {
    x = blend(x > 89.0f, broadcast(89), blend(x < -104.0f, broadcast(-104), x));
    f32v shifted = x * 0x1.715476p+0f + 0x1.8p23f, n = shifted - 0x1.8p23f; /* 1 / log 2, rounded to an integer */
    f32v r = x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f, square = r * r;    /* log 2 in two parts, so that r is exact */
    f32v p = (0x1.0e4020p-7f * r + 0x1.573e2ep-5f) * square + (0x1.555e66p-3f * r + 0x1.fffdb6p-2f);
    p = 1.0f + (p * square + 0x1.ffffecp-1f * r);
    i32v power = (i32v)shifted - 0x4b400000, half = power >> 1; /* two factors, since 2 to the 128 is not a float */
    return p * (f32v)((half + 127) << 23) * (f32v)((power - half + 127) << 23);
}

#endif
