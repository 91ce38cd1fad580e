/* Paged attention of single queries: those of decode rows, and of rows with draft trees. See `ops.attention`.
 *
 * A work item is one KV head of one query. It goes through the keys of the query in tiles of KEY_TILE, with an online softmax, and computes
 * up to GROUP_QUERIES query heads of the head's group (GQA) in one pass, so that each key and value is loaded once for all of them.
 *
 *     keys, values    [num_blocks, kv_heads, block_size, size]       block_tables [tables, max_blocks]
 *     key i of row r  block block_tables[r][i / block_size], place i % block_size
 *
 * A node of a draft tree attends to all keys before the tree, and to the keys of the tree whose bits are set in its mask.
 */

#include "head.h"
#include "parallel.h"

#define GROUP_QUERIES 4
#define KEY_TILE 128
#define MIN_PARALLEL_WORK (64 << 10) /* keys × features from which a second thread is worth its start */
#define MIN_CREW_WORK (4 << 10)      /* the same while threads are together */

/* `ATTENTION` in library.py. Strides in elements. */
struct attention {
    fork_function *fork;
    int64_t threads;
    const char *q, *keys, *values;       /* q [rows, heads, size] */
    const float *key_scale, *value_scale; /* [kv_heads] of an int8 cache, else NULL */
    const int32_t *block_tables, *lengths; /* lengths [rows]: the keys up to that of the query */
    /* For draft trees, else NULL, [rows] each: the row of the block table; the position of the query + 1; the first key of the tree; and
     * a mask of its keys. */
    const int32_t *tables, *ends, *tree_starts;
    const int64_t *masks;
    void *out; /* [rows, heads × value_size] */
    int64_t rows; /* queries */
    int64_t heads, kv_heads, size, value_size, q_token_stride, q_head_stride, max_blocks, num_blocks, block_size;
    int64_t window, chunk; /* 0: none */
    int64_t dtype, cache_dtype;
    double scale;
};

/* The first key that query `row` sees. */
static int64_t first_visible_key(const struct attention *a, int64_t row) {
    int64_t length = a->ends ? a->ends[row] : a->lengths[row];
    int64_t window = a->window && length > a->window ? length - a->window : 0, chunk = a->chunk ? (length - 1) / a->chunk * a->chunk : 0;
    return window > chunk ? window : chunk;
}

/* The blocks of the keys of query `row`. */
static INLINE const int32_t *block_table(const struct attention *a, int64_t row) {
    return a->block_tables + (a->tables ? a->tables[row] : row) * a->max_blocks;
}

/* Queries of a row that share a KV head, and their online softmax (arXiv 1805.02867) over the keys so far. */
struct queries {
    const int32_t *blocks;
    int64_t kv_head, length; /* length: of the keys */
    float q[GROUP_QUERIES][MAX_HEAD_SIZE];      /* times the scale of the scores */
    float out[GROUP_QUERIES][MAX_HEAD_SIZE];    /* Σ exp(score - highest) × value */
    float weights[GROUP_QUERIES][KEY_TILE];     /* scores of a tile, then exp(score - highest) */
    float highest[GROUP_QUERIES], sum[GROUP_QUERIES];
};

/* Where key i is in the cache, in tokens of one head. `run`: the number of consecutive keys there, including itself. */
static INLINE int64_t key_place(const struct attention *a, const struct queries *s, int64_t i, int64_t *run) {
    int64_t block = s->blocks[i / a->block_size], place = i % a->block_size;
    *run = a->block_size - place;
    return (block * a->kv_heads + s->kv_head) * a->block_size + place;
}

/* weights[g][i] = q[g] · key i for G queries and the K keys from i on, which are at `at` in the cache. */
static INLINE void score_keys(int G, int K, int dtype, const struct attention *a, struct queries *s, int64_t i, int64_t at) {
    f32v sum[2][GROUP_QUERIES] = {0};
    for (int64_t d = 0; d < a->size; d += LANES) {
        f32v key[2];
        UNROLL for (int k = 0; k < K; k++) key[k] = load(dtype, a->keys, at + k * a->size + d);
        UNROLL for (int g = 0; g < G; g++) {
            f32v q = load(FLOAT32, s->q[g], d);
            UNROLL for (int k = 0; k < K; k++) sum[k][g] += key[k] * q;
        }
    }
    UNROLL for (int k = 0; k < K; k++) {
        float scores[GROUP_QUERIES];
        if (G == 1) scores[0] = sum_lanes(sum[k][0]);
        else sum_lanes_of_4(sum[k][0], sum[k][1], sum[k][2], sum[k][3], scores);
        UNROLL for (int g = 0; g < G; g++) s->weights[g][i + k] = scores[g];
    }
}

/* weights[g][i] = q[g] · key first + i, for G queries and `count` keys. Two keys at a time, which share the loads of q.
 *
 * With each key, its value is prefetched, and the key at the same place of the next block: blocks are too short for the processor to
 * notice a stream. */
static INLINE void compute_scores(int G, int dtype, const struct attention *a, struct queries *s, int64_t first, int64_t count) {
    for (int64_t i = 0, run; i < count;) {
        int64_t place = key_place(a, s, first + i, &run), end = min_i64(i + run, count), at = place * a->size, unused;
        int64_t next = first + end < s->length ? key_place(a, s, first + end, &unused) - place : 0;
        for (int64_t keys; i < end; i += keys, at += keys * a->size, place += keys) {
            keys = min_i64(2, end - i);
            prefetch_heads(dtype, a->keys, (place + next) * a->size, keys, a->size);
            prefetch_heads(dtype, a->values, place * a->value_size, keys, a->value_size);
            if (keys == 2) score_keys(G, 2, dtype, a, s, i, at);
            else score_keys(G, 1, dtype, a, s, i, at);
        }
    }
}

/* Replace the `count` scores in `weights` by exp(score - highest), after raising `highest` to the largest score so far and scaling `sum`
 * and out [size] down accordingly. */
static void update_softmax(int64_t size, int64_t count, float *weights, float *highest, float *sum, float *out) {
    float raised = *highest, lanes[LANES], fade;
    f32v largest = broadcast(raised);
    int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) largest = blend(load(FLOAT32, weights, i) > largest, load(FLOAT32, weights, i), largest);
    memcpy(lanes, &largest, sizeof lanes);
    for (int i = 0; i < LANES; i++) raised = lanes[i] > raised ? lanes[i] : raised;
    for (int64_t i = whole; i < count; i++) raised = weights[i] > raised ? weights[i] : raised;
    fade = expf(*highest - raised);
    *highest = raised;
    f32v sums = broadcast(0);
    for (int64_t i = 0; i < count; i += LANES) {
        f32v weight = exponential(load_up_to(FLOAT32, weights, i, count - i) - raised);
        store_up_to(FLOAT32, weights, i, weight, count - i);
        sums += load_up_to(FLOAT32, weights, i, count - i); /* zeros behind the last key */
    }
    *sum = *sum * fade + sum_lanes(sums);
    for (int64_t d = 0; d < size; d++) out[d] *= fade;
}

/* out[g][d :] += Σ_i weights[g][i] × value i, for G queries, V vectors of features, and keys i : end, which are at `at` in the cache. */
static INLINE void add_features(int G, int V, int dtype, const struct attention *a, struct queries *s, int64_t i, int64_t end, int64_t at,
                                int64_t d) {
    f32v sum[GROUP_QUERIES][2];
    UNROLL for (int g = 0; g < G; g++) UNROLL for (int v = 0; v < V; v++) sum[g][v] = load(FLOAT32, s->out[g], d + v * LANES);
    for (; i < end; i++, at += a->value_size) {
        f32v value[2];
        UNROLL for (int v = 0; v < V; v++) value[v] = load(dtype, a->values, at + d + v * LANES);
        UNROLL for (int g = 0; g < G; g++) UNROLL for (int v = 0; v < V; v++) sum[g][v] += s->weights[g][i] * value[v];
    }
    UNROLL for (int g = 0; g < G; g++) UNROLL for (int v = 0; v < V; v++) store_up_to(FLOAT32, s->out[g], d + v * LANES, sum[g][v], LANES);
}

/* out[g] += Σ_i weights[g][i] × value first + i, for G queries and `count` keys. Two vectors at a time, which share the weights. */
static INLINE void add_values(int G, int dtype, const struct attention *a, struct queries *s, int64_t first, int64_t count) {
    for (int64_t i = 0, run, end; i < count; i = end) {
        int64_t at = key_place(a, s, first + i, &run) * a->value_size, d = 0;
        end = min_i64(i + run, count);
        for (; d + 2 * LANES <= a->value_size; d += 2 * LANES) add_features(G, 2, dtype, a, s, i, end, at, d);
        if (d < a->value_size) add_features(G, 1, dtype, a, s, i, end, at, d);
    }
}

/* Attention of query heads query : query + count of one row. G >= count is a constant; the last query stands in for those beyond. */
static INLINE void attend(int G, int dtype, const struct attention *a, int64_t row, int64_t kv_head, int64_t query, int64_t count) {
    int64_t length = a->lengths[row], tree = a->masks ? a->tree_starts[row] : length, bytes = size_of(a->dtype);
    float factor = a->scale * (a->key_scale ? a->key_scale[kv_head] : 1);
    struct queries s;
    s.blocks = block_table(a, row);
    s.kv_head = kv_head;
    s.length = length;
    for (int g = 0; g < G; g++) {
        int64_t from = query + min_i64(g, count - 1);
        load_head(s.q[g], a->dtype, a->q + (row * a->q_token_stride + from * a->q_head_stride) * bytes, a->size);
        for (int64_t d = 0; d < a->size; d++) s.q[g][d] *= factor;
        memset(s.out[g], 0, a->value_size * sizeof(float));
        s.highest[g] = -INFINITY;
        s.sum[g] = 0;
    }
    for (int64_t first = first_visible_key(a, row); first < length; first += KEY_TILE) {
        int64_t keys = min_i64(KEY_TILE, length - first);
        compute_scores(G, dtype, a, &s, first, keys);
        for (int64_t i = tree > first ? tree - first : 0; i < keys; i++)
            if (!(a->masks[row] >> (first + i - tree) & 1))
                for (int g = 0; g < G; g++) s.weights[g][i] = -INFINITY;
        for (int g = 0; g < G; g++) update_softmax(a->value_size, keys, s.weights[g], &s.highest[g], &s.sum[g], s.out[g]);
        add_values(G, dtype, a, &s, first, keys);
    }
    for (int g = 0; g < count; g++) {
        float last = (a->value_scale ? a->value_scale[kv_head] : 1) / s.sum[g];
        for (int64_t d = 0; d < a->value_size; d++) s.out[g][d] *= last;
        store_head(a->out, a->dtype, (row * a->heads + query + g) * a->value_size, s.out[g], a->value_size, NULL);
    }
}

/* One function per cache dtype, so that each loop is compiled with its own conversion. */
#define ATTEND(NAME, DTYPE)                                                                                                                \
    static void NAME(const struct attention *a, int64_t row, int64_t kv_head) {                                                            \
        int64_t group = a->heads / a->kv_heads, end = (kv_head + 1) * group;                                                               \
        if (group == 1) attend(1, DTYPE, a, row, kv_head, kv_head, 1);                                                                     \
        else for (int64_t query = kv_head * group; query < end; query += GROUP_QUERIES)                                                    \
            attend(GROUP_QUERIES, DTYPE, a, row, kv_head, query, min_i64(end - query, GROUP_QUERIES));                                     \
    }
ATTEND(attend_float32, FLOAT32)
ATTEND(attend_bfloat16, BFLOAT16)
ATTEND(attend_int8, INT8)

/* Work item `index`: one KV head of one row. */
static void attend_head(void *job, int64_t index) {
    const struct attention *a = job;
    int64_t row = index / a->kv_heads, kv_head = index % a->kv_heads;
    switch (a->cache_dtype) {
    case FLOAT32: attend_float32(a, row, kv_head); break;
    case BFLOAT16: attend_bfloat16(a, row, kv_head); break;
    case INT8: attend_int8(a, row, kv_head);
    }
}

/* The number of keys of all rows; 0 when a row has none, or a block id outside the cache. */
static int64_t count_keys(const struct attention *a) {
    int64_t keys = 0;
    for (int64_t r = 0; r < a->rows; r++) {
        int64_t length = a->lengths[r], first = first_visible_key(a, r);
        if (length < 1 || first < 0 || first >= length || length > a->max_blocks * a->block_size) return 0;
        if (a->masks && a->tree_starts[r] < length && (length - a->tree_starts[r] > 64 || first > a->tree_starts[r])) return 0;
        for (int64_t b = first / a->block_size; b * a->block_size < length; b++) {
            int32_t block = block_table(a, r)[b];
            if (block < 0 || block >= a->num_blocks) return 0;
        }
        keys += length;
    }
    return keys;
}

/* Returns 0, or 1 when the reference must run instead (sizes or indices that this function does not support). */
int stoker_attention(const struct attention *a) {
    if (a->size > MAX_HEAD_SIZE || a->value_size > MAX_HEAD_SIZE || a->size % LANES || a->value_size % LANES || a->heads % a->kv_heads)
        return 1;
    int64_t keys = count_keys(a);
    if (!keys) return 1;
    int64_t threads = keys * a->kv_heads * a->size < (has_crew() ? MIN_CREW_WORK : MIN_PARALLEL_WORK) ? 1 : a->threads;
    struct stage heads = {attend_head, (void *)a, a->rows * a->kv_heads, 0, 0};
    run_stages(a->fork, threads, &heads, 1);
    return 0;
}
