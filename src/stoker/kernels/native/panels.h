/* Products of panels with AVX-512, AVX2 or NEON: the tile of sums that linears, scores and attention of many rows compute.
 *
 * Both operands are packed into panels of elements of 32 bits: a feature in float32, or two neighbouring ones as bfloat16. Every e4m3 value
 * is a bfloat16 value, and the product of two of them is a float, so that only the float32 sums of VDPBF16PS (AVX512-BF16) are rounded.
 *
 *     x panel       [elements, TILE_ROWS]: 12 rows of x (AVX2: 6, NEON: 8)     | element 0 of rows 0..11 | element 1 of rows 0..11 | ...
 *     weight panel  [elements, WIDTH]: 32 weight rows (AVX2: 16, NEON: 8)  | element 0 of rows 0..31 | element 1 of rows 0..31 | ...
 *     tile          [TILE_ROWS, WIDTH]: sums in two registers per row
 */

#ifndef STOKER_PANELS_H
#define STOKER_PANELS_H

#include "around.h"
#include "blocks.h"
#include "registers.h"

#ifdef HAS_PANELS

#include <stdlib.h>

#define WIDTH (2 * LANES)
#define MAX_IN (1 << 16) /* features of a row, which is prepared on the stack */

/* The rows of x of a linear as panels. */
struct panels {
    const struct linear *linear;
    int64_t elements, tiles; /* of a row, padded to whole registers; panels of x */
    uint32_t *x;             /* [tiles, elements, TILE_ROWS] */
    float *x_scale;          /* of e4m3: [tiles × TILE_ROWS] */
    int failed;              /* a work item had no memory */
};

/* LANES elements of a row x of floats from element k on. e4m3: rounded by `scale`. */
static INLINE u32v elements_of(int dtype, const float *x, float scale, int64_t k) {
#ifdef __AVX512BF16__
    if (dtype == E4M3) {
        f32v low = round_to_e4m3(load(FLOAT32, x, 2 * k) / scale), high = round_to_e4m3(load(FLOAT32, x, 2 * k + LANES) / scale);
        return (u32v)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    }
#endif
    return (u32v)load(FLOAT32, x, k);
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
        for (int64_t first = 0; first < TILE_ROWS; first += LANES) {
            u32v block[LANES];
            UNROLL_TILE for (int i = 0; i < LANES; i++) {
                int64_t r = first + i;
                block[i] = r < rows ? elements_of(a->weight_dtype, x + r * pitch, p->x_scale[row + r], k) : (u32v){0};
            }
            transpose(block);
            UNROLL_TILE for (int i = 0; i < LANES; i++) store_tile_rows(panel + i * TILE_ROWS + first, block[i]);
        }
    }
    free(x);
}

#ifdef __AVX512BF16__
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
#endif

/* LANES elements of a weight row from element k on, with zeros behind its last feature. */
static INLINE u32v load_elements(const struct linear *a, int64_t row, int64_t k) {
#ifdef __AVX512BF16__
    if (a->weight_dtype == E4M3) {
        int64_t left = a->in - 2 * k;
        __mmask32 is_present = left >= 32 ? 0xffffffff : (1u << left) - 1;
        return (u32v)bfloat16_of_e4m3(_mm256_maskz_loadu_epi8(is_present, (const uint8_t *)a->weight + row * a->in + 2 * k));
    }
#endif
    return load_left((const float *)a->weight + row * a->in + k, a->in - k);
}

/* The same of a row in groups, all of whose LANES elements have this scale and low. */
static INLINE u32v load_grouped_elements(const struct linear *a, int64_t row, int64_t k, float scale, float low) {
    int64_t left = a->in - k, is_int4 = a->weight_dtype == UINT8;
    if (left <= 0) return (u32v){0};
    const char *from = (const char *)a->weight + (is_int4 ? row * (a->in / 2) + k / 2 : row * a->in + k);
    char last[LANES] = {0};
    if (left < LANES) from = memcpy(last, from, is_int4 ? left / 2 : left);
    codebook book = codebook_of(scale, low, a->fp4);
    f32v v = is_int4 ? decode_int4(load_int4(from), book) : load(INT8, from, 0) * scale + low;
    return left < LANES ? (u32v)load_first(FLOAT32, &v, 0, left) : (u32v)v;
}

/* Convert weight rows first : first + count in groups to a panel. */
static void pack_grouped_weight(const struct panels *p, int64_t first, int64_t count, u32v (*panel)[2]) {
    const struct linear *a = p->linear;
    int64_t groups = groups_of(a);
    struct group_scales scales;
    for (int64_t begin = 0; begin < WIDTH; begin += LANES) {
        int64_t rows = min_i64(LANES, count - begin);
        if (rows > 0) load_group_scales(a, &scales, first + begin, rows); /* else the last row of the lanes before stands for all */
        int64_t from = rows > 0 ? first + begin : first + begin - LANES;
        rows = rows > 0 ? rows : min_i64(LANES, count - begin + LANES);
        for (int64_t k = 0; k < p->elements; k += LANES) {
            u32v row[LANES];
            int64_t group = min_i64(k, a->in - 1) / a->group;
            UNROLL_TILE for (int i = 0; i < LANES; i++) {
                int64_t r = min_i64(i, rows - 1), at = r * groups + group;
                row[i] = load_grouped_elements(a, from + r, k, scales.scale[at], scales.low[at]);
            }
            transpose(row);
            UNROLL_TILE for (int i = 0; i < LANES; i++) panel[k + i][begin / LANES] = row[i];
        }
    }
}

#ifdef HAS_BLOCKS

/* Lanes skipped : skipped + LANES of two vectors, one after the other. */
static INLINE __m512i lanes_from(const char *left, const char *right, __m512i skipped) {
    return _mm512_permutex2var_epi32(_mm512_loadu_si512(left), skipped, _mm512_loadu_si512(right));
}

/* Convert `count` <= LANES weight rows from `row` on, which are in one block or in two, to half of a panel. */
static INLINE void pack_block_rows(int is_int4, const struct panels *p, int64_t row, int64_t count, u32v (*panel)[2]) {
    const struct linear *a = p->linear;
    const int features = is_int4 ? 8 : 4; /* of a word */
    const char *left = block_of(a, row), *right = block_of(a, row + count - 1);
    const __m512i lanes = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(row % BLOCK));
    const __m512 book = (__m512)codebook_of(1, 0, a->fp4);
    for (int64_t k = 0; k < p->elements;) {
        __m512 scales[2], lows[2];
        load_block_scales(a, left, scales, lows);
        load_block_scales(a, right, scales + 1, lows + 1);
        __m512 scale = _mm512_permutex2var_ps(scales[0], lanes, scales[1]), low = _mm512_permutex2var_ps(lows[0], lanes, lows[1]);
        left += scale_bytes(a), right += scale_bytes(a);
        for (int64_t end = min_i64(k + a->group, p->elements); k < end; left += sizeof(u32v), right += sizeof(u32v)) {
            __m512i word = lanes_from(left, right, lanes);
            UNROLL for (int i = 0; i < features; i++, k++) {
                if (is_int4) panel[k][0] = (u32v)_mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(word, 4 * i), book), scale, low);
                else panel[k][0] = (u32v)_mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(word, 24 - 8 * i), 24)), scale, low);
            }
        }
    }
}

/* Convert weight rows first : first + count in blocks to a panel. Those of the first half stand for a second one behind the last row. */
static void pack_blocks(const struct panels *p, int64_t first, int64_t count, u32v (*panel)[2]) {
    for (int64_t half = 0; half < 2; half++) {
        int64_t begin = half * LANES < count ? half * LANES : 0, rows = min_i64(LANES, count - begin);
        if (p->linear->weight_dtype == UINT8) pack_block_rows(1, p, first + begin, rows, (u32v(*)[2])(panel[0] + half));
        else pack_block_rows(0, p, first + begin, rows, (u32v(*)[2])(panel[0] + half));
    }
}

#endif

/* Convert weight rows first : first + count to a panel. The last one stands for those behind it. */
static void pack_weight(const struct panels *p, int64_t first, int64_t count, u32v (*panel)[2]) {
#ifdef HAS_BLOCKS
    if (p->linear->blocks) return pack_blocks(p, first, count, panel);
#endif
    if (p->linear->group) return pack_grouped_weight(p, first, count, panel);
    for (int64_t k = 0; k < p->elements; k += LANES) {
        for (int half = 0; half < 2; half++) {
            u32v row[LANES];
            UNROLL_TILE for (int i = 0; i < LANES; i++) row[i] = load_elements(p->linear, first + min_i64(LANES * half + i, count - 1), k);
            transpose(row);
            UNROLL_TILE for (int i = 0; i < LANES; i++) panel[k + i][half] = row[i];
        }
    }
}

/* sum + the products of an element of one row of x (`load_element`) and of LANES weight rows. */
static INLINE f32v multiply_add(int dtype, f32v sum, u32v weight, u32v x) {
#ifdef __AVX512BF16__
    if (dtype == E4M3) return (f32v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)x);
#endif
    return multiply_add_floats(sum, weight, x);
}

/* sum += the products of `elements` elements: element k of row r of x is x[r × row_step + k × element_step], that of WIDTH weight rows
 * weights[k × weight_step]. */
static INLINE void add_products(int dtype, int64_t elements, const uint32_t *x, int64_t row_step, int64_t element_step,
                                const uint32_t *weights, int64_t weight_step, f32v sum[TILE_ROWS][2]) {
    for (int64_t k = 0; k < elements; k++, x += element_step, weights += weight_step) {
        u32v left = (u32v)load(FLOAT32, weights, 0), right = (u32v)load(FLOAT32, weights, LANES);
        UNROLL_TILE for (int r = 0; r < TILE_ROWS; r++) {
            u32v element = load_element(x + r * row_step);
            sum[r][0] = multiply_add(dtype, sum[r][0], left, element);
            sum[r][1] = multiply_add(dtype, sum[r][1], right, element);
        }
    }
}

/* Load the sums of a tile from rows that are `pitch` floats apart. */
static INLINE void load_sums(const float *from, int64_t pitch, f32v sum[TILE_ROWS][2]) {
    UNROLL_TILE for (int r = 0; r < TILE_ROWS; r++) {
        sum[r][0] = load(FLOAT32, from, r * pitch);
        sum[r][1] = load(FLOAT32, from, r * pitch + LANES);
    }
}

/* Store the sums of a tile to such rows. */
static INLINE void store_sums(float *to, int64_t pitch, f32v sum[TILE_ROWS][2]) {
    UNROLL_TILE for (int r = 0; r < TILE_ROWS; r++) {
        store_up_to(FLOAT32, to, r * pitch, sum[r][0], LANES);
        store_up_to(FLOAT32, to, r * pitch + LANES, sum[r][1], LANES);
    }
}

/* sums = x panel × weight panel. */
static INLINE void multiply_tile(int dtype, int64_t elements, const uint32_t *x, const u32v (*panel)[2], float (*sums)[WIDTH]) {
    f32v sum[TILE_ROWS][2];
    UNROLL_TILE for (int r = 0; r < TILE_ROWS; r++) sum[r][0] = sum[r][1] = broadcast(0);
    add_products(dtype, elements, x, 1, TILE_ROWS, (const uint32_t *)panel, WIDTH, sum);
    store_sums(sums[0], WIDTH, sum);
}

/* sums = x panel number `tile` × weight panel. e4m3: times the scales of the rows of x. */
static INLINE void multiply_panels(const struct panels *p, int64_t tile, const u32v (*panel)[2], float (*sums)[WIDTH]) {
    const uint32_t *x = p->x + tile * TILE_ROWS * p->elements;
    if (p->linear->weight_dtype == E4M3) {
        multiply_tile(E4M3, p->elements, x, panel, sums);
        for (int64_t r = 0; r < TILE_ROWS; r++)
            for (int64_t n = 0; n < WIDTH; n++) sums[r][n] *= p->x_scale[tile * TILE_ROWS + r];
    } else multiply_tile(FLOAT32, p->elements, x, panel, sums);
}

/* Memory for one weight panel after another, `count` at a time. */
static INLINE u32v (*allocate_panels(const struct panels *p, int64_t count))[2] {
    return aligned_alloc(64, count * p->elements * sizeof(u32v[2]));
}

/* Whether the product of a linear is supported. */
static INLINE int has_panels(const struct linear *a) {
    if (a->in < 1 || a->in > MAX_IN) return 0;
    if (a->group) return a->in <= MAX_GROUPS * a->group && a->group % LANES == 0;
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
