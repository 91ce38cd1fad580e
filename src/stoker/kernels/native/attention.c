/* Rotary positions, the write into the paged cache, and attention of rows with one query each. */

#include <stdlib.h>

#include "vector.h"

#define MOST_SIZE 512 /* features of a head */
#define TOGETHER 4    /* queries that share a pass over their keys */
#define TILE 128      /* keys in a pass */
#define LEAST_PARALLEL (64 << 10) /* keys times features that are worth a second thread */

/* Strides in elements. Pages are [num_blocks, kv_heads, block_size, size]; an int8 cache has scales, float32 [kv_heads]. */
struct rope_store {
    char *q;
    const char *k, *v;
    const int32_t *positions, *slots;
    const float *cos_sin, *key_scale, *value_scale, *key_balance;
    void *keys, *values;
    int64_t tokens, heads, kv_heads, size, value_size, q_stride, q_head, k_stride, k_head, v_stride, v_head;
    int64_t dim, num_positions, interleaved, num_blocks, block_size, dtype, cache_dtype;
};

static void load_head(float *to, int dtype, const void *from, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        f32v v = load_some(dtype, from, i, size - i);
        store_some(FLOAT32, to, i, v, size - i);
    }
}

static void store_head(void *to, int dtype, int64_t at, const float *from, int64_t size, const float *scale) {
    for (int64_t i = 0; i < size; i += LANES) {
        f32v v = load_some(FLOAT32, from, i, size - i);
        store_some(dtype, to, at + i, scale ? v / *scale : v, size - i);
    }
}

static INLINE void turn(float *a, float *b, float cosine, float sine) {
    float first = *a, second = *b;
    *a = first * cosine - second * sine;
    *b = second * cosine + first * sine;
}

/* x's first `dim` features by `dim / 2` cosines and as many sines. */
static void rotate(float *restrict x, const float *restrict cosines, int64_t dim, int64_t interleaved) {
    int64_t half = dim / 2;
    const float *restrict sines = cosines + half;
    if (interleaved)
        for (int64_t i = 0; i < half; i++) turn(x + 2 * i, x + 2 * i + 1, cosines[i], sines[i]);
    else
        for (int64_t i = 0; i < half; i++) turn(x + i, x + half + i, cosines[i], sines[i]);
}

/* `count` numbers that are `stride` apart, in blocks of the largest power of two that divides it, times Sylvester's orthonormal matrix. */
static void hadamard(float *x, int64_t count, int64_t stride) {
    int64_t size = count & -count;
    float unit = 1.0f / sqrtf((float)size);
    for (int64_t step = 1; step < size; step *= 2)
        for (int64_t i = 0; i < count; i += 2 * step)
            for (int64_t j = i; j < i + step; j++) {
                float first = x[j * stride], second = x[(j + step) * stride];
                x[j * stride] = first + second;
                x[(j + step) * stride] = first - second;
            }
    for (int64_t i = 0; i < count; i++) x[i * stride] *= unit;
}

/* A head whose first `dim` features rotate, times its factors, in other coordinates: reference.rope.spread. */
static void spread(float *x, const float *factors, int64_t size, int64_t dim, int64_t interleaved) {
    int64_t half = dim / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
    for (int64_t i = 0; i < size; i++) x[i] *= factors[i];
    for (int64_t i = 0; i < half; i++) {
        float *a = x + i * step, first = a[0], second = a[apart];
        a[0] = (first + second) * (float)M_SQRT1_2;
        a[apart] = (first - second) * (float)M_SQRT1_2;
    }
    if (half) {
        hadamard(x, half, step);
        hadamard(x + apart, half, step);
    }
    if (size > dim) hadamard(x + dim, size - dim, 1);
}

int stoker_rope_store(const struct rope_store *a) {
    int64_t bytes = size_of(a->dtype);
    if (a->size > MOST_SIZE || a->value_size > MOST_SIZE || a->dim > a->size) return 1;
    for (int64_t t = 0; t < a->tokens; t++) {
        if (a->slots[t] >= a->num_blocks * a->block_size) return 1;
        if (a->cos_sin && (a->positions[t] < 0 || a->positions[t] >= a->num_positions)) return 1;
    }
    float head[MOST_SIZE];
    for (int64_t t = 0; t < a->tokens; t++) {
        const float *angles = a->cos_sin ? a->cos_sin + a->positions[t] * a->dim : NULL;
        int64_t dim = angles ? a->dim : 0, group = a->heads / a->kv_heads;
        for (int64_t h = 0; (angles || a->key_balance) && h < a->heads; h++) {
            char *q = a->q + (t * a->q_stride + h * a->q_head) * bytes;
            load_head(head, a->dtype, q, a->size);
            if (angles) rotate(head, angles, dim, a->interleaved);
            if (a->key_balance) spread(head, a->key_balance + (2 * (h / group) + 1) * a->size, a->size, dim, a->interleaved);
            store_head(q, a->dtype, 0, head, a->size, NULL);
        }
        if (a->slots[t] < 0) continue;
        int64_t block = a->slots[t] / a->block_size, offset = a->slots[t] % a->block_size;
        for (int64_t h = 0; h < a->kv_heads; h++) {
            int64_t at = (block * a->kv_heads + h) * a->block_size + offset;
            load_head(head, a->dtype, a->k + (t * a->k_stride + h * a->k_head) * bytes, a->size);
            if (angles) rotate(head, angles, dim, a->interleaved);
            if (a->key_balance) spread(head, a->key_balance + 2 * h * a->size, a->size, dim, a->interleaved);
            store_head(a->keys, a->cache_dtype, at * a->size, head, a->size, a->key_scale ? a->key_scale + h : NULL);
            load_head(head, a->dtype, a->v + (t * a->v_stride + h * a->v_head) * bytes, a->value_size);
            store_head(a->values, a->cache_dtype, at * a->value_size, head, a->value_size, a->value_scale ? a->value_scale + h : NULL);
        }
    }
    return 0;
}

struct attention {
    fork_function *fork;
    int64_t threads;
    const char *q, *keys, *values;
    const float *key_scale, *value_scale;
    const int32_t *block_tables, *seq_lens;
    void *out; /* [rows, heads × value_size] */
    int64_t rows, heads, kv_heads, size, value_size, q_stride, q_head, most_blocks, num_blocks, block_size;
    int64_t window, chunk; /* 0: none */
    int64_t dtype, cache_dtype;
    double scale;
};

static int64_t first_key(const struct attention *a, int64_t len) {
    int64_t window = a->window && len > a->window ? len - a->window : 0, chunk = a->chunk ? (len - 1) / a->chunk * a->chunk : 0;
    return window > chunk ? window : chunk;
}

/* TOGETHER queries of a row that share their keys, and what they have seen so far (arXiv 1805.02867). */
struct queries {
    int64_t row, head; /* of keys and values */
    float q[TOGETHER][MOST_SIZE], out[TOGETHER][MOST_SIZE];
    float weights[TOGETHER][TILE], most[TOGETHER], sum[TOGETHER];
};

/* Where key `i` is among the cache's, in tokens; `run`: how many keys follow it there, itself included. */
static INLINE int64_t place(const struct attention *a, const struct queries *s, int64_t i, int64_t *run) {
    int64_t block = a->block_tables[s->row * a->most_blocks + i / a->block_size], offset = i % a->block_size;
    *run = a->block_size - offset;
    return (block * a->kv_heads + s->head) * a->block_size + offset;
}

/* weights[g][i] = q[g] · key first + i */
static INLINE void score(int G, int dtype, const struct attention *a, struct queries *s, int64_t first, int64_t count) {
    for (int64_t i = 0, run; i < count;) {
        int64_t at = place(a, s, first + i, &run) * a->size;
        for (int64_t end = least(i + run, count); i < end; i++, at += a->size) {
            f32v sum[TOGETHER] = {0};
            for (int64_t d = 0; d < a->size; d += LANES) {
                f32v key = load(dtype, a->keys, at + d);
                UNROLL for (int g = 0; g < G; g++) sum[g] += key * load(FLOAT32, s->q[g], d);
            }
            UNROLL for (int g = 0; g < G; g++) s->weights[g][i] = total(sum[g]);
        }
    }
}

/* Scores become weights by the largest score so far; what was found by a smaller one shrinks. */
static void softmax(int64_t size, int64_t count, float *weights, float *most, float *sum, float *out) {
    float larger = *most, shrunk;
    for (int64_t i = 0; i < count; i++) larger = weights[i] > larger ? weights[i] : larger;
    shrunk = expf(*most - larger);
    *most = larger;
    f32v sums = all(0);
    for (int64_t i = 0; i < count; i += LANES) {
        f32v weight = exponential(load_some(FLOAT32, weights, i, count - i) - larger);
        store_some(FLOAT32, weights, i, weight, count - i);
        sums += load_some(FLOAT32, weights, i, count - i);
    }
    *sum = *sum * shrunk + total(sums);
    for (int64_t d = 0; d < size; d++) out[d] *= shrunk;
}

/* out[g] += weights[g][i] × value first + i */
static INLINE void mix(int G, int dtype, const struct attention *a, struct queries *s, int64_t first, int64_t count) {
    for (int64_t i = 0, run, end; i < count; i = end) {
        int64_t at = place(a, s, first + i, &run) * a->value_size;
        end = least(i + run, count);
        for (int64_t d = 0; d < a->value_size; d += LANES) {
            f32v sum[TOGETHER] = {0};
            for (int64_t j = i; j < end; j++) {
                f32v value = load(dtype, a->values, at + (j - i) * a->value_size + d);
                UNROLL for (int g = 0; g < G; g++) sum[g] += s->weights[g][j] * value;
            }
            UNROLL for (int g = 0; g < G; g++) store_some(FLOAT32, s->out[g], d, sum[g] + load(FLOAT32, s->out[g], d), LANES);
        }
    }
}

/* `count` queries from `query` on, computed as G. */
static INLINE void attend(int G, int dtype, const struct attention *a, int64_t row, int64_t head, int64_t query, int64_t count) {
    int64_t len = a->seq_lens[row], bytes = size_of(a->dtype);
    float factor = a->scale * (a->key_scale ? a->key_scale[head] : 1);
    struct queries s;
    s.row = row;
    s.head = head;
    for (int g = 0; g < G; g++) {
        int64_t from = query + least(g, count - 1);
        load_head(s.q[g], a->dtype, a->q + (row * a->q_stride + from * a->q_head) * bytes, a->size);
        for (int64_t d = 0; d < a->size; d++) s.q[g][d] *= factor;
        memset(s.out[g], 0, a->value_size * sizeof(float));
        s.most[g] = -INFINITY;
        s.sum[g] = 0;
    }
    for (int64_t first = first_key(a, len); first < len; first += TILE) {
        int64_t keys = least(TILE, len - first);
        score(G, dtype, a, &s, first, keys);
        for (int g = 0; g < G; g++) softmax(a->value_size, keys, s.weights[g], &s.most[g], &s.sum[g], s.out[g]);
        mix(G, dtype, a, &s, first, keys);
    }
    for (int g = 0; g < count; g++) {
        float last = (a->value_scale ? a->value_scale[head] : 1) / s.sum[g];
        for (int64_t d = 0; d < a->value_size; d++) s.out[g][d] *= last;
        store_head(a->out, a->dtype, (row * a->heads + query + g) * a->value_size, s.out[g], a->value_size, NULL);
    }
}

/* One function a dtype, so that each is compiled with its own widening. */
#define ATTEND(NAME, DTYPE)                                                                                                                \
    static void NAME(const struct attention *a, int64_t row, int64_t head) {                                                               \
        int64_t group = a->heads / a->kv_heads, end = (head + 1) * group;                                                                  \
        if (group == 1) attend(1, DTYPE, a, row, head, head, 1);                                                                           \
        else for (int64_t query = head * group; query < end; query += TOGETHER)                                                            \
            attend(TOGETHER, DTYPE, a, row, head, query, least(end - query, TOGETHER));                                                    \
    }
ATTEND(attend_float32, FLOAT32)
ATTEND(attend_bfloat16, BFLOAT16)
ATTEND(attend_int8, INT8)

static void one_head(void *job, int64_t index) {
    const struct attention *a = job;
    int64_t row = index / a->kv_heads, head = index % a->kv_heads;
    switch (a->cache_dtype) {
    case FLOAT32: attend_float32(a, row, head); break;
    case BFLOAT16: attend_bfloat16(a, row, head); break;
    case INT8: attend_int8(a, row, head);
    }
}

/* The keys of all rows; 0 when a row has none, or its blocks are not in the cache. */
static int64_t count_keys(const struct attention *a) {
    int64_t keys = 0;
    for (int64_t r = 0; r < a->rows; r++) {
        int64_t len = a->seq_lens[r];
        if (len < 1 || len > a->most_blocks * a->block_size) return 0;
        for (int64_t b = first_key(a, len) / a->block_size; b * a->block_size < len; b++) {
            int32_t block = a->block_tables[r * a->most_blocks + b];
            if (block < 0 || block >= a->num_blocks) return 0;
        }
        keys += len;
    }
    return keys;
}

/* 0, or 1 when this is not for us. */
int stoker_attention(const struct attention *a) {
    if (a->size > MOST_SIZE || a->value_size > MOST_SIZE || a->size % LANES || a->value_size % LANES || a->heads % a->kv_heads) return 1;
    int64_t keys = count_keys(a);
    if (!keys) return 1;
    int64_t threads = keys * a->kv_heads * a->size < LEAST_PARALLEL ? 1 : a->threads;
    struct stage heads = {one_head, (void *)a, a->rows * a->kv_heads, 0, 0};
    run_stages(a->fork, threads, &heads, 1);
    return 0;
}
