/* Vectors of floats as wide as a register, in GCC's and clang's vector extensions, and what these leave to be said by hand. */

#ifndef STOKER_VECTOR_H
#define STOKER_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

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

/* As `DTYPES` in library.py numbers them. UINT8 as a weight's dtype: int4 codes, two a byte. */
enum dtype { FLOAT32, BFLOAT16, FLOAT16, INT8, UINT8, INT32 };

static INLINE int64_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : dtype <= FLOAT16 ? 2 : 1; }

static INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static INLINE f32v all(float value) { return value - (f32v){0}; }

static INLINE f32v bits(u32v value) { return (f32v)value; }

/* a where the mask's lane is all ones, b where it is zero. */
static INLINE f32v choose(i32v mask, f32v a, f32v b) { return (f32v)(((i32v)a & mask) | ((i32v)b & ~mask)); }

static INLINE f32v larger(f32v a, f32v b) { return choose(b > a, b, a); }

/* LANES neighbours as int32. Compilers make four times the instructions of a conversion that there need be, and a weight costs
 * little else. */
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
static INLINE uint32_t four(const void *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
static INLINE i32v widen_i8(const void *p) { return (i32v)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four(p)))))); }
static INLINE i32v widen_u8(const void *p) { return (i32v)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four(p)))))); }
#else
WIDEN(widen_i8, int8_t)
WIDEN(widen_u8, uint8_t)
#endif
WIDEN(widen_u16, uint16_t)
#endif

/* The values of a group's 16 codes, code × scale + low; `decoded` takes the low four bits of each lane. */
#ifdef __AVX512F__
typedef f32v codebook;
static INLINE codebook codebook_of(float scale, float low) {
    return (f32v){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * scale + low;
}
static INLINE f32v decoded(i32v codes, codebook book) { return (f32v)_mm512_permutexvar_ps((__m512i)codes, (__m512)book); }
#else
typedef struct {
    float scale, low;
} codebook;
static INLINE codebook codebook_of(float scale, float low) { return (codebook){scale, low}; }
static INLINE f32v decoded(i32v codes, codebook book) { return __builtin_convertvector(codes & 15, f32v) * book.scale + book.low; }
#endif

static INLINE f32v from_float16(u32v wide) {
    u32v rest = (wide & 0x7fff) << 13;
    f32v value = bits(rest) * 0x1p112f; /* the exponent's new bias; subnormals come out right */
    f32v special = bits(rest | 0x7f800000);
    value = choose((i32v)((wide & 0x7c00) == 0x7c00), special, value);
    return bits((u32v)value | (wide & 0x8000) << 16);
}

/* LANES neighbours of a dtype, as floats. */
static INLINE f32v load(int dtype, const void *from, int64_t at) {
    const char *p = (const char *)from + at * size_of(dtype);
    f32v v;
    switch (dtype) {
    case INT8: return __builtin_convertvector(widen_i8(p), f32v);
    case UINT8: return __builtin_convertvector(widen_u8(p), f32v);
    case BFLOAT16: return bits((u32v)widen_u16(p) << 16);
    case FLOAT16: return from_float16((u32v)widen_u16(p));
    }
    memcpy(&v, p, sizeof v);
    return v;
}

/* The first `count` < LANES of them, zeros behind: nothing past them is read. */
static INLINE f32v load_part(int dtype, const void *from, int64_t at, int64_t count) {
    char part[LANES * 4] = {0};
    memcpy(part, (const char *)from + at * size_of(dtype), count * size_of(dtype));
    return load(dtype, part, 0);
}

static INLINE f32v load_some(int dtype, const void *from, int64_t at, int64_t count) {
    return count >= LANES ? load(dtype, from, at) : load_part(dtype, from, at, count);
}

/* Write the first `count` lanes as float32, as bfloat16 to the nearest, or as int8 to the nearest within ± 127. */
static INLINE void store_some(int dtype, void *to, int64_t at, f32v v, int64_t count) {
    char *p = (char *)to + at * size_of(dtype);
    count = least(count, LANES);
    if (dtype == FLOAT32) {
        if (count == LANES) memcpy(p, &v, sizeof v);
        else memcpy(p, &v, count * 4);
    } else if (dtype == BFLOAT16) {
        u32v raw = (u32v)v, nearest = (raw + 0x7fff + (raw >> 16 & 1)) >> 16;
        uint16_t half[LANES];
        for (int i = 0; i < LANES; i++) half[i] = v[i] == v[i] ? nearest[i] : 0x7fc0;
        memcpy(p, half, count * 2);
    } else {
        int8_t code[LANES];
        v = choose(v != v, all(0), v);
        v = choose(v > 127.0f, all(127), choose(v < -127.0f, all(-127), v));
        v = (v + 0x1.8p23f) - 0x1.8p23f; /* to the nearest, ties to even */
        for (int i = 0; i < LANES; i++) code[i] = v[i];
        memcpy(p, code, count);
    }
}

static INLINE float total(f32v v) {
    float parts[LANES];
    memcpy(parts, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2) UNROLL for (int i = 0; i < half; i++) parts[i] += parts[half + i];
    return parts[0];
}

/* e to the power of x within 2 units in the last place; 0 and infinity past float's range. */
static INLINE f32v exponential(f32v x) {
    x = choose(x > 89.0f, all(89), choose(x < -104.0f, all(-104), x));
    f32v shifted = x * 0x1.715476p+0f + 0x1.8p23f, n = shifted - 0x1.8p23f;
    f32v r = x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f, square = r * r; /* log 2, in two parts */
    f32v p = (0x1.0e4020p-7f * r + 0x1.573e2ep-5f) * square + (0x1.555e66p-3f * r + 0x1.fffdb6p-2f);
    p = 1.0f + (p * square + 0x1.ffffecp-1f * r);
    i32v power = (i32v)shifted - 0x4b400000, half = power >> 1; /* twice, since 2 to the 128 is no float */
    return p * (f32v)((half + 127) << 23) * (f32v)((power - half + 127) << 23);
}

enum activation { NO_ACTIVATION, SILU, GELU, GELU_TANH, GELU_QUICK, RELU, RELU2 };

static INLINE f32v activated(int activation, f32v x) {
    f32v slope = x;
    switch (activation) {
    case RELU:
    case RELU2:
        slope = choose(x < 0.0f, all(0), x);
        return activation == RELU ? slope : slope * slope;
    case GELU:
        for (int i = 0; i < LANES; i++) slope[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0x1.6a09e6p-1f));
        return slope;
    case GELU_TANH: /* (1 + tanh u) / 2 is the sigmoid of 2 u */
        slope = 1.595769122f * (x + 0.044715f * x * x * x);
        break;
    case GELU_QUICK:
        slope = 1.702f * x;
    }
    return x / (1.0f + exponential(-slope));
}

/* work(job, part) for each of `count` parts; `next` and `done` begin at 0. */
struct stage {
    void (*work)(void *, int64_t);
    void *job;
    int64_t count, next, done;
};

/* Does stage after stage, each once the one before is done, on the threads of PyTorch's OpenMP runtime: `fork` is its GOMP_parallel. */
typedef void fork_function(void (*)(void *), void *, unsigned, unsigned);
void run_stages(fork_function *fork, int64_t threads, struct stage *first, int64_t count);

#endif
