/* The same as kernel_cases.c for the C kernels of many rows, for processors that have them (panels.h). */

#include "blocks.c"
#include "gemm.c"
#include "parallel.c"
#include "prefill.c"
#include "score.c"

#include "cases.h"

enum { ROWS = 43, OUT = 75, HEADS = 6, KV_HEADS = 2, SIZE = 48, BLOCKS = 12, PLACES = 16 };

static void run_linear(int64_t in, int dtype, const int kind[4], int is_gated, int norm) {
    struct linear l = weight_of(in, is_gated ? 2 * OUT : OUT, kind[0], kind[1], kind[2], kind[3]);
    use_blocks(&l);
    l.out = OUT;
    l.rows = ROWS;
    l.dtype = dtype;
    l.gate = is_gated ? SILU : NO_ACTIVATION;
    l.norm = norm;
    l.norm_weight = array(l.norm_weight_dtype = BFLOAT16, in, 1);
    l.bias = array(l.bias_dtype = FLOAT32, is_gated ? 2 * OUT : OUT, 1);
    l.x = array(dtype, ROWS * in, 1);
    l.x_stride = in;
    l.residual = is_gated ? NULL : array(dtype, ROWS * OUT, 1);
    l.y = array(dtype, ROWS * OUT, 0);
    struct linears *all = calloc(1, sizeof *all + sizeof l);
    *all = (struct linears){NULL, 1, 1};
    all->first[0] = l;
    check(stoker_gemm(all));
    put(dtype, l.y, ROWS * OUT);
}

static void run_linears(void) {
    static const int kinds[][4] = { /* dtype, group, scale dtype, zero point (1), offset (2) or FP4 (3) */
        {FLOAT32, 0, FLOAT32, 0}, {INT8, 32, BFLOAT16, 2}, {UINT8, 32, FLOAT16, 0}, {UINT8, 64, FLOAT16, 1}, {UINT8, 32, BFLOAT16, 2},
        {UINT8, 32, BFLOAT16, 3},
    };
    static const int64_t ins[] = {64, 100, 288};
    for (unsigned k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int i = 0; i < 3; i++) run_linear(ins[i], i == 2 ? BFLOAT16 : FLOAT32, kinds[k], i == 1, i);
}

/* Many logits are equal, because the weight has few values. */
static void run_score(float softcap) {
    static const int kind[] = {FLOAT32, 0, FLOAT32, 0};
    int32_t targets[ROWS], best[ROWS];
    float likelihoods[ROWS];
    for (int r = 0; r < ROWS; r++) targets[r] = next() % OUT;
    struct scoring s = {NULL, 1, targets, likelihoods, best, 0.5, softcap, weight_of(64, OUT, kind[0], kind[1], kind[2], kind[3])};
    s.linear.rows = ROWS;
    s.linear.x = array(FLOAT32, ROWS * 64, 1);
    s.linear.x_stride = 64;
    check(stoker_score(&s));
    put(FLOAT32, likelihoods, ROWS);
    for (int r = 0; r < ROWS; r++) likelihoods[r] = best[r];
    put(FLOAT32, likelihoods, ROWS);
}

static void run_prefill(int dtype, int cache_dtype, int64_t window) {
    static const int32_t blocks[] = {3, 1, 0, 4, 2, 5, 11, 7, 9}, length = 141;
    float scales[KV_HEADS] = {1.0f / 90, 1.0f / 70};
    int64_t cache = (int64_t)BLOCKS * KV_HEADS * PLACES * SIZE;
    struct prefill a = {
        .threads = 1, .q = array(dtype, ROWS * HEADS * SIZE, 1), .keys = array(cache_dtype, cache, 1), .values = array(cache_dtype, cache, 1),
        .key_scale = cache_dtype == INT8 ? scales : NULL, .value_scale = cache_dtype == INT8 ? scales : NULL, .blocks = blocks, .length_address = &length,
        .out = array(dtype, ROWS * HEADS * SIZE, 0), .queries = ROWS, .heads = HEADS, .kv_heads = KV_HEADS, .size = SIZE,
        .value_size = SIZE, .q_token_stride = HEADS * SIZE, .q_head_stride = SIZE, .num_blocks = BLOCKS, .block_size = PLACES,
        .window = window, .dtype = dtype, .cache_dtype = cache_dtype, .scale = 0.144,
    };
    check(stoker_prefill(&a));
    put(dtype, a.out, ROWS * HEADS * SIZE);
}

int main(void) {
    run_linears();
    run_score(0);
    run_score(3);
    run_prefill(FLOAT32, FLOAT32, 0);
    run_prefill(BFLOAT16, BFLOAT16, 20);
    run_prefill(FLOAT32, INT8, 0);
    run_prefill(FLOAT32, FLOAT32, 33);
    return 0;
}
