/* Rows of a weight in groups (int8 or int4) as float32: the slices of a weight that linears of many rows widen into the L2 cache and multiply
 * there with PyTorch's product, or the rows of token ids. */

#include "blocks.h"

/* `WIDENING` in library.py, then the arguments of a linear. */
struct widening {
    fork_function *fork;
    int64_t threads;
    float *out;           /* [count, in] */
    const int32_t *ids;   /* [count], the rows of the weight; NULL: the `count` rows from `first` on */
    int64_t first, count;
    struct linear linear; /* of which only the weight is used */
};

/* The features of LANES bytes: LANES of int8, or 2 × LANES of int4. */
static INLINE void widen_bytes(int is_int4, const char *bytes, codebook book, float scale, float low, float *out) {
    if (!is_int4) return store_up_to(FLOAT32, out, 0, load(INT8, bytes, 0) * scale + low, LANES);
    i32v values = widen_u8(bytes);
    f32v even = decode_int4(values, book), odd = decode_int4(values >> 4, book);
    float features[2 * LANES];
    UNROLL for (int i = 0; i < LANES; i++) features[2 * i] = even[i], features[2 * i + 1] = odd[i];
    memcpy(out, features, sizeof features);
}

/* One row; `scale` and `low` point to those of its groups. */
static INLINE void widen_row(int is_int4, const struct linear *l, const float *scale, const float *low, const char *row, float *out) {
    int64_t step = is_int4 ? 2 * LANES : LANES; /* features of LANES bytes */
    for (int64_t g = 0; g * l->group < l->in; g++) {
        codebook book = codebook_of(scale[g], low[g], l->fp4);
        int64_t k = g * l->group, end = min_i64(k + l->group, l->in);
        for (; k + step <= end; k += step) widen_bytes(is_int4, row + (is_int4 ? k / 2 : k), book, scale[g], low[g], out + k);
        if (k == end) continue;
        float last[2 * LANES];
        char bytes[LANES] = {0};
        memcpy(bytes, row + (is_int4 ? k / 2 : k), is_int4 ? (end - k) / 2 : end - k);
        widen_bytes(is_int4, bytes, book, scale[g], low[g], last);
        memcpy(out + k, last, (end - k) * sizeof *out);
    }
}

#ifdef HAS_BLOCKS

/* One row of blocks. */
static void widen_row_of_blocks(const struct linear *l, int64_t row, float *out) {
    int64_t lane = row % BLOCK, is_int4 = l->weight_dtype == UINT8, words = words_of_unit(l);
    const char *from = block_of(l, row);
    for (int64_t g = 0; g < groups_of(l); g++) {
        __m512 scales, lows;
        load_block_scales(l, from, &scales, &lows);
        from += scale_bytes(l);
        float scale = scales[lane], low = lows[lane], features[UNIT_FEATURES];
        codebook book = codebook_of(scale, low, l->fp4);
        for (int64_t k = g * l->group; k < min_i64((g + 1) * l->group, l->in); k += UNIT_FEATURES, from += words * sizeof(u32v)) {
            char bytes[UNIT_FEATURES];
            for (int64_t w = 0; w < words; w++) memcpy(bytes + 4 * w, from + (w * BLOCK + lane) * 4, 4);
            widen_bytes(is_int4, bytes, book, scale, low, features);
            if (!is_int4) widen_bytes(0, bytes + LANES, book, scale, low, features + LANES);
            memcpy(out + k, features, min_i64(UNIT_FEATURES, l->in - k) * sizeof *out);
        }
    }
}

#endif

/* Work item `index`: BLOCK rows. */
static void widen_block(void *data, int64_t index) {
    const struct widening *a = data;
    const struct linear *l = &a->linear;
    int64_t begin = index * BLOCK, rows = min_i64(BLOCK, a->count - begin), groups = (l->in + l->group - 1) / l->group;
#ifdef HAS_BLOCKS
    for (int64_t r = 0; l->blocks && r < rows; r++)
        widen_row_of_blocks(l, a->ids ? a->ids[begin + r] : a->first + begin + r, a->out + (begin + r) * l->in);
    if (l->blocks) return;
#endif
    struct group_scales scales;
    if (!a->ids) load_group_scales(l, &scales, a->first + begin, rows);
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = a->ids ? a->ids[begin + r] : a->first + begin + r, at = a->ids ? 0 : r * groups;
        if (a->ids) load_group_scales(l, &scales, row, 1);
        const float *scale = scales.scale + at, *low = scales.low + at;
        float *out = a->out + (begin + r) * l->in;
        if (l->weight_dtype == UINT8) widen_row(1, l, scale, low, (const char *)l->weight + row * (l->in / 2), out);
        else widen_row(0, l, scale, low, (const char *)l->weight + row * l->in, out);
    }
}

/* Returns 0, or 1 when a row has more groups than the buffer holds, or an id is not one of a row. */
int stoker_widen(const struct widening *a) {
    if (!a->linear.group || a->linear.in > MAX_GROUPS * a->linear.group) return 1;
    for (int64_t i = 0; a->ids && i < a->count; i++)
        if (a->ids[i] < 0 || a->ids[i] >= a->linear.out) return 1;
    struct stage blocks = {widen_block, (void *)a, (a->count + BLOCK - 1) / BLOCK, 0, 0};
    run_stages(a->fork, a->threads, &blocks, 1);
    return 0;
}
