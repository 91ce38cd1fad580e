/* Deterministic inputs and the output of kernel_cases.c and panel_cases.c. Included after the kernels. */

#include <stdio.h>
#include <stdlib.h>

static uint32_t state = 1;

static uint32_t next(void) { return state = state * 1664525u + 1013904223u; }

/* A number in [-1, 1) that bfloat16 and float16 represent exactly. */
static float number(void) { return (float)(int32_t)(next() >> 24) / 128.0f - 1.0f; }

/* `count` elements of `dtype`: floats are `scale` × number(), bytes are random. */
static void *array(int dtype, int64_t count, float scale) {
    char *a = calloc(count * size_of(dtype) + 64, 1);
    for (int64_t i = 0; i < count; i++) {
        float value = number() * scale;
        if (dtype == INT8 || dtype == UINT8) a[i] = (char)(next() >> 16);
        else if (dtype == E4M3) a[i] = (char)(next() >> 16 & 0xbf); /* below 2 */
        else if (dtype == FLOAT32) ((float *)a)[i] = value;
        else { /* a power of two times eight bits of mantissa */
            uint32_t bits;
            memcpy(&bits, &value, 4);
            uint32_t magnitude = bits & 0x7fffffff;
            ((uint16_t *)a)[i] = dtype == BFLOAT16 ? bits >> 16 : bits >> 31 << 15 | (magnitude ? (magnitude - 0x38000000) >> 13 : 0);
        }
    }
    return a;
}

static void put(int dtype, const void *values, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float value = load_first(dtype, values, i, 1)[0];
        fwrite(&value, 4, 1, stdout);
    }
}

static void check(int status) {
    if (status) exit(1);
}

static struct linear weight_of(int64_t in, int64_t out, int dtype, int group, int scale_dtype, int zero_kind) {
    struct linear l = {.in = in, .out = out, .weight_dtype = dtype, .group = group, .scale_dtype = scale_dtype, .eps = 1e-5};
    int64_t groups = group ? (in + group - 1) / group : 1;
    l.weight = array(dtype, dtype == UINT8 ? in * out / 2 : in * out, 1);
    if (dtype == INT8 || dtype == UINT8 || dtype == E4M3) l.scale = array(scale_dtype, out * groups, 1.0f / 64);
    l.fp4 = zero_kind == 3;
    if (zero_kind == 1) l.zero = array(UINT8, out * groups, 1);
    if (zero_kind == 2 || (dtype == INT8 && group)) l.offset = array(scale_dtype, out * groups, 0.5f);
    return l;
}

/* Replace a weight by blocks on processors whose kernels read them. `out` is the number of its rows. */
static void use_blocks(struct linear *l) {
    struct blocking b = {NULL, 1, NULL, *l};
    int64_t size = stoker_blocks(&b);
    if (!size) return;
    b.out = aligned_alloc(64, ((l->out + BLOCK - 1) / BLOCK * size + 63) / 64 * 64);
    stoker_blocks(&b);
    l->weight = b.out;
    l->blocks = 1;
}
