/* Runs the C kernels of few rows on deterministic inputs and writes their results to standard output as float32, for any processor.
 *
 * tests/kernels/cpu/test_other_processors.py compiles it, with the kernels that it includes, and compares the results with those of this
 * machine.
 */

#include "attention.c"
#include "blocks.c"
#include "linear.c"
#include "norm.c"
#include "parallel.c"
#include "rope.c"
#include "sample.c"
#include "widen.c"

#include "cases.h"

static void run_linears(void) {
    static const int kinds[][4] = { /* dtype, group, scale dtype, zero point (1), offset (2) or FP4 (3) */
        {FLOAT32, 0, FLOAT32, 0}, {BFLOAT16, 0, FLOAT32, 0}, {INT8, 0, FLOAT32, 0}, {INT8, 32, BFLOAT16, 2},
        {UINT8, 32, FLOAT16, 0}, {UINT8, 64, FLOAT16, 1}, {UINT8, 32, BFLOAT16, 2}, {UINT8, 32, BFLOAT16, 3},
        {E4M3, 0, FLOAT32, 0},
    };
    static const int64_t rows[] = {1, 2, 3, 7, 16}, ins[] = {64, 100, 288};
    for (unsigned k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int r = 0; r < 5; r++)
            for (int i = 0; i < 3; i++) {
                int dtype = r % 2 ? BFLOAT16 : FLOAT32, gated = i == 1, out = gated ? 18 : 37;
                struct linear l = weight_of(ins[i], gated ? 2 * out : out, kinds[k][0], kinds[k][1], kinds[k][2], kinds[k][3]);
                use_blocks(&l);
                l.out = out;
                l.rounding = l.weight_dtype == E4M3 ? TOKEN_SCALE : NOT_ROUNDED;
                l.rows = rows[r];
                l.dtype = dtype;
                l.gate = gated ? SILU + r % 6 : NO_ACTIVATION;
                l.input_gate = i == 2 ? GELU_TANH : NO_ACTIVATION;
                l.norm = r % 3;
                l.norm_weight = array(l.norm_weight_dtype = BFLOAT16, l.in, 1);
                l.bias = array(l.bias_dtype = FLOAT32, gated ? 2 * out : out, 1);
                l.x_stride = l.in * (l.input_gate ? 2 : 1);
                l.x = array(dtype, l.rows * l.x_stride, 1);
                l.residual = i ? array(dtype, l.rows * out, 1) : NULL;
                l.y = array(dtype, l.rows * out, 0);
                struct linears *all = calloc(1, sizeof *all + sizeof l);
                *all = (struct linears){NULL, 1, 1};
                all->first[0] = l;
                check(stoker_linears(all));
                put(dtype, l.y, l.rows * out);
                if (!l.group) continue;
                int32_t ids[] = {7, 0, 12, 7};
                struct widening w = {NULL, 1, array(FLOAT32, 19 * l.in, 0), NULL, 1, 17, l};
                check(stoker_widen(&w));
                put(FLOAT32, w.out, w.count * l.in);
                w.ids = ids, w.count = 4;
                check(stoker_widen(&w));
                put(FLOAT32, w.out, w.count * l.in);
            }
}

enum { BLOCKS = 6, PLACES = 16, KV_HEADS = 2, SIZE = 48, ROWS = 3 };

static void run_cache(int dtype, int cache_dtype, int interleaved, int64_t window) {
    int heads = KV_HEADS * 3;
    int64_t cache = (int64_t)BLOCKS * KV_HEADS * PLACES * SIZE;
    int is_int8 = cache_dtype == INT8;
    float scales[KV_HEADS] = {1.0f / 90, 1.0f / 70};
    int32_t positions[ROWS] = {0, 5, 30}, slots[ROWS] = {17, 37, -1}, tables[ROWS * BLOCKS] = {3, 1, 0, 4, 2, 5, 0, 2, 4, 5, 1, 3, 5, 4, 3};
    int32_t lengths[ROWS] = {1, 33, 75};
    char *q = array(dtype, ROWS * heads * SIZE, 1), *keys = array(cache_dtype, cache, 1), *values = array(cache_dtype, cache, 1);
    struct rope_store r = {
        .q = q, .k = array(dtype, ROWS * KV_HEADS * SIZE, 1), .v = array(dtype, ROWS * KV_HEADS * SIZE, 1),
        .positions = positions, .slots = slots, .cos_sin = array(FLOAT32, 64 * 32, 1), .keys = keys, .values = values,
        .key_scale = is_int8 ? scales : NULL, .value_scale = is_int8 ? scales : NULL,
        .key_balance = is_int8 ? array(FLOAT32, KV_HEADS * 2 * SIZE, 1) : NULL, .tokens = ROWS, .heads = heads, .kv_heads = KV_HEADS,
        .size = SIZE, .value_size = SIZE, .q_token_stride = heads * SIZE, .q_head_stride = SIZE, .k_token_stride = KV_HEADS * SIZE,
        .k_head_stride = SIZE, .v_token_stride = KV_HEADS * SIZE, .v_head_stride = SIZE, .dim = 32, .num_positions = 64,
        .interleaved = interleaved, .num_blocks = BLOCKS, .block_size = PLACES, .dtype = dtype, .cache_dtype = cache_dtype,
    };
    check(stoker_rope_store(&r));
    put(dtype, q, ROWS * heads * SIZE);
    put(cache_dtype, values, cache);
    struct attention a = {
        .threads = 1, .q = q, .keys = array(cache_dtype, cache, 1), .values = values, .key_scale = r.key_scale,
        .value_scale = r.value_scale, .block_tables = tables, .lengths = lengths, .out = array(dtype, ROWS * heads * SIZE, 0), .rows = ROWS,
        .heads = heads, .kv_heads = KV_HEADS, .size = SIZE, .value_size = SIZE, .q_token_stride = heads * SIZE, .q_head_stride = SIZE,
        .max_blocks = BLOCKS, .num_blocks = BLOCKS, .block_size = PLACES, .window = window, .dtype = dtype, .cache_dtype = cache_dtype,
        .scale = 0.144,
    };
    check(stoker_attention(&a));
    put(dtype, a.out, ROWS * heads * SIZE);
}

/* Rows of logits, many of which are equal: the index of the first one of the largest. */
static void run_greedy(int dtype) {
    enum { LOGITS = 1003 };
    int32_t ids[ROWS];
    struct greedy a = {NULL, 1, array(dtype, ROWS * LOGITS, 1), ids, ROWS, LOGITS, LOGITS, dtype};
    check(stoker_greedy(&a));
    for (int r = 0; r < ROWS; r++) {
        float index = ids[r];
        put(FLOAT32, &index, 1);
    }
}

static void run_norm(int dtype, int kind, int64_t size) {
    struct norm_rows a = {
        .threads = 1, .x = array(dtype, ROWS * 2 * KV_HEADS * size, 3), .y = array(dtype, ROWS * KV_HEADS * size, 0), .tokens = ROWS,
        .heads = KV_HEADS, .size = size, .token_stride = 2 * KV_HEADS * size, .head_stride = size, .dtype = dtype, .kind = kind, .eps = 1e-5,
        .weight = array(BFLOAT16, size, 1), .weight_dtype = BFLOAT16, .bias = kind == LAYER ? array(FLOAT32, size, 1) : NULL,
    };
    check(stoker_norm(&a));
    put(dtype, a.y, ROWS * KV_HEADS * size);
}

int main(void) {
    run_linears();
    run_greedy(FLOAT32);
    run_greedy(BFLOAT16);
    run_norm(FLOAT32, RMS, SIZE);
    run_norm(BFLOAT16, LAYER, 101);
    run_cache(FLOAT32, FLOAT32, 0, 0);
    run_cache(BFLOAT16, BFLOAT16, 1, 20);
    run_cache(FLOAT32, INT8, 0, 0);
    return 0;
}
