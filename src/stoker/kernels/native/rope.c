/* Rotary position embedding and the write into the paged KV cache. See `ops.rope_store` and kernels/reference/rope.py. */

#include "head.h"

/* `ROPE_STORE` in library.py. Strides in elements. NULL: absent. */
struct rope_store {
    char *q;             /* [tokens, heads, size], rotated in place */
    const char *k, *v;   /* [tokens, kv_heads, size], [tokens, kv_heads, value_size] */
    const int32_t *positions, *slots;                         /* [tokens]; slot = block × block_size + place, or -1: not stored */
    const float *cos_sin;                                     /* [num_positions, dim]: dim / 2 cosines, then dim / 2 sines */
    const float *key_scale, *value_scale, *key_balance;       /* of an int8 cache: [kv_heads], [kv_heads], [kv_heads, 2, size] */
    void *keys, *values; /* [num_blocks, kv_heads, block_size, size] */
    int64_t tokens, heads, kv_heads, size, value_size;
    int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
    int64_t dim, num_positions, interleaved, num_blocks, block_size, dtype, cache_dtype;
};

static INLINE void rotate_pair(float *a, float *b, float cosine, float sine) {
    float first = *a, second = *b;
    *a = first * cosine - second * sine;
    *b = second * cosine + first * sine;
}

/* Rotate the first `dim` features of x; `cosines` points to dim / 2 cosines, then dim / 2 sines. */
static void rotate(float *restrict x, const float *restrict cosines, int64_t dim, int64_t interleaved) {
    int64_t half = dim / 2;
    const float *restrict sines = cosines + half;
    if (interleaved)
        for (int64_t i = 0; i < half; i++) rotate_pair(x + 2 * i, x + 2 * i + 1, cosines[i], sines[i]);
    else
        for (int64_t i = 0; i < half; i++) rotate_pair(x + i, x + half + i, cosines[i], sines[i]);
}

/* Transform `count` floats that are `stride` apart, in blocks of the largest power of two that divides `count`, by Sylvester's orthonormal
 * matrix: log2(size) passes of sums and differences. */
static void hadamard_blocks(float *x, int64_t count, int64_t stride) {
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

/* Multiply a head, whose first `dim` features rotate, by its factors and transform it (`reference.rope.hadamard_transform`). */
static void transform(float *x, const float *factors, int64_t size, int64_t dim, int64_t interleaved) {
    int64_t half = dim / 2, step = interleaved ? 2 : 1, to_partner = interleaved ? 1 : half;
    for (int64_t i = 0; i < size; i++) x[i] *= factors[i];
    for (int64_t i = 0; i < half; i++) {
        float *a = x + i * step, first = a[0], second = a[to_partner];
        a[0] = (first + second) * (float)M_SQRT1_2;
        a[to_partner] = (first - second) * (float)M_SQRT1_2;
    }
    if (half) {
        hadamard_blocks(x, half, step);
        hadamard_blocks(x + to_partner, half, step);
    }
    if (size > dim) hadamard_blocks(x + dim, size - dim, 1);
}

/* Returns 0, or 1 when the reference must run instead (a size or an index that this function does not support). */
int stoker_rope_store(const struct rope_store *a) {
    int64_t bytes = size_of(a->dtype);
    if (a->size > MAX_HEAD_SIZE || a->value_size > MAX_HEAD_SIZE || a->dim > a->size) return 1;
    for (int64_t t = 0; t < a->tokens; t++) {
        if (a->slots[t] >= a->num_blocks * a->block_size) return 1;
        if (a->cos_sin && (a->positions[t] < 0 || a->positions[t] >= a->num_positions)) return 1;
    }
    float head[MAX_HEAD_SIZE];
    for (int64_t t = 0; t < a->tokens; t++) {
        const float *angles = a->cos_sin ? a->cos_sin + a->positions[t] * a->dim : NULL;
        int64_t dim = angles ? a->dim : 0, group = a->heads / a->kv_heads;
        for (int64_t h = 0; (angles || a->key_balance) && h < a->heads; h++) {
            char *q = a->q + (t * a->q_token_stride + h * a->q_head_stride) * bytes;
            load_head(head, a->dtype, q, a->size);
            if (angles) rotate(head, angles, dim, a->interleaved);
            if (a->key_balance) transform(head, a->key_balance + (2 * (h / group) + 1) * a->size, a->size, dim, a->interleaved);
            store_head(q, a->dtype, 0, head, a->size, NULL);
        }
        if (a->slots[t] < 0) continue;
        int64_t block = a->slots[t] / a->block_size, place = a->slots[t] % a->block_size;
        for (int64_t h = 0; h < a->kv_heads; h++) {
            int64_t token = (block * a->kv_heads + h) * a->block_size + place; /* within the cache, in tokens of one head */
            load_head(head, a->dtype, a->k + (t * a->k_token_stride + h * a->k_head_stride) * bytes, a->size);
            if (angles) rotate(head, angles, dim, a->interleaved);
            if (a->key_balance) transform(head, a->key_balance + 2 * h * a->size, a->size, dim, a->interleaved);
            store_head(a->keys, a->cache_dtype, token * a->size, head, a->size, a->key_scale ? a->key_scale + h : NULL);
            load_head(head, a->dtype, a->v + (t * a->v_token_stride + h * a->v_head_stride) * bytes, a->value_size);
            store_head(a->values, a->cache_dtype, token * a->value_size, head, a->value_size, a->value_scale ? a->value_scale + h : NULL);
        }
    }
    return 0;
}
