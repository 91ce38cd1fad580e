/* Products of panels with AVX-512: the tile of sums that linears, scores and attention of many rows compute.
 *
 * Both operands are packed into panels of elements of 32 bits: a feature in float32, or two neighbouring ones as bfloat16. Every e4m3 value
 * is a bfloat16 value, and the product of two of them is a float, so that only the float32 sums of VDPBF16PS are rounded.
 *
 *     x panel       [elements, TILE_ROWS]: 12 rows of x     | element 0 of rows 0..11 | element 1 of rows 0..11 | ...
 *     weight panel  [elements, WIDTH]: 32 weight rows       | element 0 of rows 0..31 | element 1 of rows 0..31 | ...
 *     tile          [TILE_ROWS, WIDTH]: sums in 24 registers; an element costs 2 loads, 12 broadcasts and 24 multiplications
 */

#ifndef STOKER_PANELS_H
#define STOKER_PANELS_H

#include "around.h"

#ifdef __AVX512BW__

#include <stdlib.h>

#define TILE_ROWS 12
#define WIDTH 32         /* two registers of sums */
#define MAX_IN (1 << 16) /* features of a row, which is prepared on the stack */
#define UNROLL_TILE _Pragma("GCC unroll 16")

/* The rows of x of a linear as panels. */
struct panels {
    const struct linear *linear;
    int64_t elements, tiles; /* of a row, padded to whole registers; panels of x */
    uint32_t *x;             /* [tiles, elements, TILE_ROWS] */
    float *x_scale;          /* of e4m3: [tiles × TILE_ROWS] */
    int failed;              /* a work item had no memory */
};

/* Transpose 16 × 16 elements of 32 bits: within 128 bits, then 128 bits at a time. */
static INLINE void transpose(__m512i row[16]) {
    __m512i half[16], quarter[16];
    UNROLL for (int i = 0; i < 8; i++) {
        half[2 * i] = _mm512_unpacklo_epi32(row[2 * i], row[2 * i + 1]);
        half[2 * i + 1] = _mm512_unpackhi_epi32(row[2 * i], row[2 * i + 1]);
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
        row[c] = _mm512_shuffle_i32x4(even, even_below, 0x88);
        row[4 + c] = _mm512_shuffle_i32x4(odd, odd_below, 0x88);
        row[8 + c] = _mm512_shuffle_i32x4(even, even_below, 0xdd);
        row[12 + c] = _mm512_shuffle_i32x4(odd, odd_below, 0xdd);
    }
}

/* LANES elements of a row x of floats from element k on. e4m3: rounded by `scale`. */
static INLINE __m512i elements_of(int dtype, const float *x, float scale, int64_t k) {
#ifdef __AVX512BF16__
    if (dtype == E4M3) {
        f32v low = round_to_e4m3(load(FLOAT32, x, 2 * k) / scale), high = round_to_e4m3(load(FLOAT32, x, 2 * k + LANES) / scale);
        return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    }
#endif
    return (__m512i)load(FLOAT32, x, k);
}

/* Stage 1, work item `index`: TILE_ROWS rows of x as a panel. Rows behind the last one are zeros. */
static void pack_rows(void *data, int64_t index) {
    struct panels *p = data;
    const struct linear *a = p->linear;
    int64_t pitch = padded(a->in), row = index * TILE_ROWS, rows = min_i64(TILE_ROWS, a->rows - row);
    uint32_t *panel = p->x + row * p->elements;
    float *x = malloc(rows * pitch * sizeof *x);
    if (!x) {
        __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        load_input(a, row + r, x + r * pitch, pitch);
        p->x_scale[row + r] = a->rounding ? rounding_scale(a, x + r * pitch, pitch) : 1;
    }
    for (int64_t k = 0; k < p->elements; k += LANES, panel += LANES * TILE_ROWS) {
        __m512i block[16];
        UNROLL_TILE for (int r = 0; r < 16; r++)
            block[r] = r < rows ? elements_of(a->weight_dtype, x + r * pitch, p->x_scale[row + r], k) : _mm512_setzero_si512();
        transpose(block);
        UNROLL_TILE for (int i = 0; i < 16; i++) _mm512_mask_storeu_epi32(panel + i * TILE_ROWS, (1 << TILE_ROWS) - 1, block[i]);
    }
    free(x);
}

/* 32 bytes of e4m3 as bfloat16. */
static INLINE __m512i bfloat16_of_e4m3(__m256i bytes) {
    /* Subnormal values are multiples of 2 to the -9. */
    const __m512i subnormal = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i bits = _mm512_cvtepu8_epi16(bytes), magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7f));
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7)); /* the exponent's bias from 7 to 127 */
    __mmask32 is_small = _mm512_testn_epi16_mask(bits, _mm512_set1_epi16(0x78)), is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
    value = _mm512_mask_permutexvar_epi16(value, is_small, magnitude, subnormal);
    value = _mm512_mask_mov_epi16(value, is_nan, _mm512_set1_epi16(0x7fc0));
    return _mm512_or_si512(value, _mm512_slli_epi16(_mm512_and_si512(bits, _mm512_set1_epi16(0x80)), 8));
}

/* LANES elements of a weight row from element k on, with zeros behind its last feature. */
static INLINE __m512i load_elements(const struct linear *a, int64_t row, int64_t k) {
    if (a->weight_dtype == FLOAT32) {
        int64_t left = a->in - k;
        __mmask16 is_present = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
        return _mm512_maskz_loadu_epi32(is_present, (const float *)a->weight + row * a->in + k);
    }
    int64_t left = a->in - 2 * k;
    __mmask32 is_present = left >= 32 ? 0xffffffff : (1u << left) - 1;
    return bfloat16_of_e4m3(_mm256_maskz_loadu_epi8(is_present, (const uint8_t *)a->weight + row * a->in + 2 * k));
}

/* Convert weight rows first : first + count to a panel. The last one stands for those behind it. */
static void pack_weight(const struct panels *p, int64_t first, int64_t count, __m512i (*panel)[2]) {
    for (int64_t k = 0; k < p->elements; k += LANES) {
        for (int half = 0; half < 2; half++) {
            __m512i row[16];
            UNROLL_TILE for (int i = 0; i < 16; i++) row[i] = load_elements(p->linear, first + min_i64(16 * half + i, count - 1), k);
            transpose(row);
            UNROLL_TILE for (int i = 0; i < 16; i++) panel[k + i][half] = row[i];
        }
    }
}

/* sum + the products of an element of one row of x and of 16 weight rows. */
static INLINE __m512 multiply_add(int dtype, __m512 sum, __m512i weight, __m512i x) {
#ifdef __AVX512BF16__
    if (dtype == E4M3) return _mm512_dpbf16_ps(sum, (__m512bh)weight, (__m512bh)x);
#endif
    return _mm512_fmadd_ps((__m512)weight, (__m512)x, sum);
}

/* sum += the products of `elements` elements: element k of row r of x is x[r × row_step + k × element_step], that of WIDTH weight rows
 * weights[k × weight_step]. */
static INLINE void add_products(int dtype, int64_t elements, const uint32_t *x, int64_t row_step, int64_t element_step,
                                const uint32_t *weights, int64_t weight_step, __m512 sum[TILE_ROWS][2]) {
    for (int64_t k = 0; k < elements; k++, x += element_step, weights += weight_step) {
        __m512i left = _mm512_loadu_si512(weights), right = _mm512_loadu_si512(weights + 16);
        UNROLL_TILE for (int r = 0; r < TILE_ROWS; r++) {
            __m512i element = _mm512_set1_epi32(x[r * row_step]);
            sum[r][0] = multiply_add(dtype, sum[r][0], left, element);
            sum[r][1] = multiply_add(dtype, sum[r][1], right, element);
        }
    }
}

/* sums = x panel × weight panel. */
static INLINE void multiply_tile(int dtype, int64_t elements, const uint32_t *x, const __m512i (*panel)[2], float (*sums)[WIDTH]) {
    __m512 sum[TILE_ROWS][2];
    UNROLL_TILE for (int r = 0; r < TILE_ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    add_products(dtype, elements, x, 1, TILE_ROWS, (const uint32_t *)panel, WIDTH, sum);
    UNROLL_TILE for (int r = 0; r < TILE_ROWS; r++) {
        _mm512_storeu_ps(sums[r], sum[r][0]);
        _mm512_storeu_ps(sums[r] + 16, sum[r][1]);
    }
}

/* sums = x panel number `tile` × weight panel. e4m3: times the scales of the rows of x. */
static INLINE void multiply_panels(const struct panels *p, int64_t tile, const __m512i (*panel)[2], float (*sums)[WIDTH]) {
    const uint32_t *x = p->x + tile * TILE_ROWS * p->elements;
    if (p->linear->weight_dtype == E4M3) {
        multiply_tile(E4M3, p->elements, x, panel, sums);
        for (int64_t r = 0; r < TILE_ROWS; r++)
            for (int64_t n = 0; n < WIDTH; n++) sums[r][n] *= p->x_scale[tile * TILE_ROWS + r];
    } else multiply_tile(FLOAT32, p->elements, x, panel, sums);
}

/* Memory for one weight panel after another, `count` at a time. */
static INLINE __m512i (*allocate_panels(const struct panels *p, int64_t count))[2] {
    return aligned_alloc(64, count * p->elements * sizeof(__m512i[2]));
}

/* Whether the product of a linear is supported. */
static INLINE int has_panels(const struct linear *a) {
    if (a->group || a->in < 1 || a->in > MAX_IN) return 0;
#ifdef __AVX512BF16__
    if (a->weight_dtype == E4M3) return a->rounding != NOT_ROUNDED;
#endif
    return a->weight_dtype == FLOAT32 && a->rounding == NOT_ROUNDED;
}

/* Memory for the panels of x. `failed` if there is none. */
static INLINE struct panels make_panels(const struct linear *a) {
    struct panels p = {a, padded(a->in) / (a->weight_dtype == E4M3 ? 2 : 1), (a->rows + TILE_ROWS - 1) / TILE_ROWS, NULL, NULL, 0};
    p.x = aligned_alloc(64, p.tiles * TILE_ROWS * p.elements * sizeof *p.x);
    p.x_scale = calloc(p.tiles * TILE_ROWS, sizeof *p.x_scale);
    p.failed = !(p.x && p.x_scale);
    return p;
}

static INLINE void free_panels(struct panels *p) {
    free(p->x);
    free(p->x_scale);
}

#endif

#endif
