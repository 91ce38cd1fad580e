/* Weights in groups, as they are stored, to blocks (blocks.h): once, at load. */

#include "blocks.h"

/* `BLOCKING` in library.py, then the arguments of a linear. */
struct blocking {
    fork_function *fork;
    int64_t threads;
    char *out;            /* [ceil(rows / BLOCK), block_bytes]; NULL: nothing is written */
    struct linear linear; /* of which only the weight is used */
};

#ifdef HAS_BLOCKS

/* to[n] = element `at` of row `first` + n of an array [rows, pitch] of elements of `size` bytes, for BLOCK rows. */
static INLINE char *copy_column(const struct linear *a, const void *array, int64_t size, int64_t pitch, int64_t first, int64_t at, char *to) {
    for (int64_t n = 0; n < BLOCK; n++, to += size) {
        if (first + n < a->out) memcpy(to, (const char *)array + ((first + n) * pitch + at) * size, size);
        else memset(to, 0, size);
    }
    return to;
}

/* The words of a unit, which begins at byte `at` of rows of `pitch` bytes. */
static char *copy_unit(const struct linear *a, int64_t first, int64_t at, int64_t pitch, char *to) {
    int64_t words = words_of_unit(a), rows = min_i64(BLOCK, a->out - first), bytes = min_i64(4 * words, pitch - at);
    if (rows < BLOCK || bytes < 4 * words) memset(to, 0, words * 4 * BLOCK);
    for (int64_t n = 0; n < rows; n++) {
        const char *row = (const char *)a->weight + (first + n) * pitch + at;
        uint32_t word[8] = {0};
        memcpy(word, row, bytes);
        for (int64_t w = 0; w < words; w++) memcpy(to + (w * BLOCK + n) * 4, word + w, 4);
    }
    return to + words * 4 * BLOCK;
}

/* Work item `index`: a block. */
static void make_block(void *data, int64_t index) {
    const struct blocking *b = data;
    const struct linear *a = &b->linear;
    int64_t first = index * BLOCK, groups = groups_of(a), is_int4 = a->weight_dtype == UINT8, size = size_of(a->scale_dtype);
    char *to = b->out + index * block_bytes(a);
    for (int64_t g = 0; g < groups; g++) {
        to = copy_column(a, a->scale, size, groups, first, g, to);
        if (a->offset) to = copy_column(a, a->offset, size, groups, first, g, to);
        if (a->zero) to = copy_column(a, a->zero, 1, groups, first, g, to);
        for (int64_t k = g * a->group; k < min_i64((g + 1) * a->group, a->in); k += UNIT_FEATURES)
            to = copy_unit(a, first, is_int4 ? k / 2 : k, is_int4 ? a->in / 2 : a->in, to);
    }
}

/* Returns the size of a block, or 0 when the products of this processor read the weight as it is stored. */
int stoker_blocks(const struct blocking *b) {
    const struct linear *a = &b->linear;
    if (!a->group || a->group % UNIT_FEATURES || a->in > MAX_GROUPS * a->group || block_bytes(a) > INT32_MAX) return 0;
    struct stage blocks = {make_block, (void *)b, (a->out + BLOCK - 1) / BLOCK, 0, 0};
    if (b->out) run_stages(b->fork, b->threads, &blocks, 1);
    return (int)block_bytes(a);
}

#else

int stoker_blocks(const struct blocking *b) {
    (void)b;
    return 0;
}

#endif
