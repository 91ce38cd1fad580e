/* Causal paged attention of the queries of one sequence, with AVX-512, AVX2 or NEON. See `ops.attention`, and panels.h for the products.
 *
 * The query heads of a group (GQA) share their KV head, so their rows are computed together:
 *
 *     row i of a KV head    query i / group, query head i % group of the group
 *     keys                  [panels, size, WIDTH]: panels of WIDTH keys, in float32
 *     values                [keys, value_pitch], in float32
 *
 * For each KV head, stage 1 packs its keys and values, and stage 2 computes tiles of TILE_ROWS rows. A tile goes through the keys up to its
 * last query, KEY_TILE at a time, with an online softmax (arXiv 1805.02867): scores = q × keysᵀ, out += exp(scores - highest) × values.
 * Key tiles begin at multiples of KEY_TILE, so that a query has the same bits however its prompt is divided into chunks.
 */

#include "head.h"
#include "panels.h"

/* `PREFILL` in library.py. Strides in elements. */
struct prefill {
    fork_function *fork;
    int64_t threads;
    const char *q, *keys, *values;        /* q [queries, heads, size]; keys, values [num_blocks, kv_heads, block_size, size] */
    const float *key_scale, *value_scale; /* [kv_heads] of an int8 cache, else NULL */
    const int32_t *blocks;                /* of the sequence: [ceil(length / block_size)] */
    const int32_t *length_address;        /* of the position of the last query + 1: replayed calls (replay.c) differ in its value */
    void *out;                            /* [queries, heads × value_size] */
    int64_t queries, heads, kv_heads, size, value_size, q_token_stride, q_head_stride, num_blocks, block_size;
    int64_t window, chunk; /* 0: none */
    int64_t dtype, cache_dtype;
    double scale;
};

#ifdef HAS_PANELS

#include <float.h>

#define KEY_TILE 128
#define PITCH (MAX_HEAD_SIZE + LANES) /* of rows in the buffers: no power of two, whose rows would evict one another from the L1 cache */
#define SCORE_PITCH (KEY_TILE + LANES)

/* What the work items of one KV head share. */
struct head_job {
    const struct prefill *a;
    int64_t length;      /* of the sequence */
    int64_t kv_head;
    int64_t begin;       /* the first place in `keys` and `values`: a multiple of KEY_TILE */
    int64_t first_key;   /* that a query sees. Blocks before it may be free; zeros stand for their keys */
    int64_t value_pitch; /* value_size, padded to whole panels */
    float *keys, *values;
};

struct tile {
    float q[TILE_ROWS][PITCH], out[TILE_ROWS][PITCH]; /* out: Σ exp(score - highest) × value */
    float scores[TILE_ROWS][SCORE_PITCH];              /* of a tile of keys, then exp(score - highest) */
    float highest[TILE_ROWS], sum[TILE_ROWS];
    int64_t first[TILE_ROWS], end[TILE_ROWS]; /* the keys that a row sees */
};

/* The first key that the query at `position` sees. */
static int64_t first_seen(const struct prefill *a, int64_t position) {
    int64_t window = a->window && position >= a->window ? position + 1 - a->window : 0, chunk = a->chunk ? position / a->chunk * a->chunk : 0;
    return window > chunk ? window : chunk;
}

static INLINE int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

/* Where a key is in the cache, in tokens of one head. */
static INLINE int64_t place_of(const struct head_job *job, int64_t key) {
    const struct prefill *a = job->a;
    return ((int64_t)a->blocks[key / a->block_size] * a->kv_heads + job->kv_head) * a->block_size + key % a->block_size;
}

/* Stage 1, work item `index`: WIDTH keys and values. Zeros stand for those before the first and behind the last one. */
static void pack_keys(void *data, int64_t index) {
    const struct head_job *job = data;
    const struct prefill *a = job->a;
    float rows[WIDTH][PITCH], *panel = job->keys + index * a->size * WIDTH;
    int64_t bytes = size_of(a->cache_dtype);
    for (int64_t i = 0; i < WIDTH; i++) {
        float *value = job->values + (index * WIDTH + i) * job->value_pitch;
        int64_t key = job->begin + index * WIDTH + i;
        memset(value, 0, job->value_pitch * sizeof *value);
        if (key < job->first_key || key >= job->length) {
            memset(rows[i], 0, sizeof rows[i]);
            continue;
        }
        if (key + WIDTH < job->length) { /* of the next work item: blocks are too short for the processor to notice a stream */
            int64_t next = place_of(job, key + WIDTH);
            prefetch_heads(a->cache_dtype, a->keys, next * a->size, 1, a->size);
            prefetch_heads(a->cache_dtype, a->values, next * a->value_size, 1, a->value_size);
        }
        int64_t place = place_of(job, key);
        load_head(rows[i], a->cache_dtype, a->keys + place * a->size * bytes, a->size);
        load_head(value, a->cache_dtype, a->values + place * a->value_size * bytes, a->value_size);
    }
    for (int64_t k = 0; k < a->size; k += LANES) {
        for (int half = 0; half < 2; half++) {
            u32v row[LANES];
            UNROLL_TILE for (int i = 0; i < LANES; i++) row[i] = (u32v)load(FLOAT32, rows[LANES * half + i], k);
            transpose(row);
            for (int64_t i = 0; i < min_i64(LANES, a->size - k); i++)
                store_up_to(FLOAT32, panel, (k + i) * WIDTH + LANES * half, (f32v)row[i], LANES);
        }
    }
}

/* Begin with rows row : row + count of the KV head, whose queries are multiplied by the scale of the scores. The last row stands for those
 * behind it. */
static void begin_tile(const struct head_job *job, int64_t row, int64_t count, struct tile *t) {
    const struct prefill *a = job->a;
    int64_t group = a->heads / a->kv_heads;
    float factor = a->scale * (a->key_scale ? a->key_scale[job->kv_head] : 1);
    for (int64_t r = 0; r < TILE_ROWS; r++) {
        int64_t i = row + min_i64(r, count - 1), query = i / group, position = job->length - a->queries + query;
        t->first[r] = first_seen(a, position);
        t->end[r] = position + 1;
        t->highest[r] = -FLT_MAX;
        t->sum[r] = 0;
        memset(t->out[r], 0, job->value_pitch * sizeof(float));
        int64_t at = query * a->q_token_stride + (job->kv_head * group + i % group) * a->q_head_stride;
        load_head(t->q[r], a->dtype, a->q + at * size_of(a->dtype), a->size);
        for (int64_t d = 0; d < a->size; d++) t->q[r][d] *= factor;
    }
}

/* scores = q × keysᵀ for `count` keys from `first` on, a multiple of WIDTH. -inf for keys that a row does not see. */
static void compute_scores(const struct head_job *job, struct tile *t, int64_t first, int64_t count) {
    const struct prefill *a = job->a;
    for (int64_t i = 0; i < count; i += WIDTH) {
        f32v sum[TILE_ROWS][2];
        UNROLL_TILE for (int r = 0; r < TILE_ROWS; r++) sum[r][0] = sum[r][1] = broadcast(0);
        const uint32_t *panel = (const uint32_t *)job->keys + (first - job->begin + i) * a->size;
        add_products(FLOAT32, a->size, (const uint32_t *)t->q, PITCH, 1, panel, WIDTH, sum);
        store_sums(t->scores[0] + i, SCORE_PITCH, sum);
    }
    if (first >= t->first[TILE_ROWS - 1] && first + count <= t->end[0]) return; /* all rows see all of these keys */
    for (int r = 0; r < TILE_ROWS; r++) {
        for (int64_t i = 0; i < count && first + i < t->first[r]; i++) t->scores[r][i] = -INFINITY;
        for (int64_t i = t->end[r] > first ? t->end[r] - first : 0; i < count; i++) t->scores[r][i] = -INFINITY;
    }
}

/* Replace `count` scores of a row by exp(score - highest), after raising `highest` and scaling `sum` and `out` down accordingly. */
static INLINE void update_softmax(struct tile *t, int r, int64_t count, int64_t value_pitch) {
    float *scores = t->scores[r];
    f32v largest = load(FLOAT32, scores, 0);
    for (int64_t i = LANES; i < count; i += LANES) largest = larger(largest, load(FLOAT32, scores, i));
    float raised = largest_lane(largest);
    if (raised > t->highest[r]) {
        float fade = expf(t->highest[r] - raised);
        t->highest[r] = raised;
        t->sum[r] *= fade;
        for (int64_t d = 0; d < value_pitch; d += LANES) store_up_to(FLOAT32, t->out[r], d, load(FLOAT32, t->out[r], d) * fade, LANES);
    }
    f32v sums = broadcast(0);
    for (int64_t i = 0; i < count; i += LANES) {
        f32v weight = exponential(load(FLOAT32, scores, i) - t->highest[r]);
        store_up_to(FLOAT32, scores, i, weight, LANES);
        sums += weight;
    }
    t->sum[r] += sum_lanes(sums);
}

/* out += scores × values for `count` keys from `first` on. */
static void add_values(const struct head_job *job, struct tile *t, int64_t first, int64_t count) {
    for (int64_t d = 0; d < job->value_pitch; d += WIDTH) {
        f32v sum[TILE_ROWS][2];
        load_sums(t->out[0] + d, PITCH, sum);
        const uint32_t *values = (const uint32_t *)job->values + (first - job->begin) * job->value_pitch + d;
        add_products(FLOAT32, count, (const uint32_t *)t->scores, SCORE_PITCH, 1, values, job->value_pitch, sum);
        store_sums(t->out[0] + d, PITCH, sum);
    }
}

/* Stage 2, work item `index`: TILE_ROWS rows of the KV head. */
static void attend_tile(void *data, int64_t index) {
    const struct head_job *job = data;
    const struct prefill *a = job->a;
    int64_t group = a->heads / a->kv_heads, row = index * TILE_ROWS, count = min_i64(TILE_ROWS, a->queries * group - row);
    struct tile t;
    begin_tile(job, row, count, &t);
    for (int64_t first = t.first[0] / KEY_TILE * KEY_TILE, end = t.end[TILE_ROWS - 1]; first < end; first += KEY_TILE) {
        int64_t keys = min_i64(KEY_TILE, round_up(end - first, WIDTH));
        compute_scores(job, &t, first, keys);
        for (int r = 0; r < TILE_ROWS; r++) update_softmax(&t, r, keys, job->value_pitch);
        add_values(job, &t, first, keys);
    }
    for (int64_t r = 0; r < count; r++) {
        float last = (a->value_scale ? a->value_scale[job->kv_head] : 1) / t.sum[r];
        for (int64_t d = 0; d < a->value_size; d++) t.out[r][d] *= last;
        int64_t head = job->kv_head * group + (row + r) % group;
        store_head(a->out, a->dtype, ((row + r) / group * a->heads + head) * a->value_size, t.out[r], a->value_size, NULL);
    }
}

/* Whether all blocks from that of key `first` to that of key `end` - 1 are in the cache. */
static int has_valid_blocks(const struct prefill *a, int64_t first, int64_t end) {
    for (int64_t b = first / a->block_size; b * a->block_size < end; b++)
        if (a->blocks[b] < 0 || a->blocks[b] >= a->num_blocks) return 0;
    return 1;
}

/* Returns 0, or 1 when the reference must run instead (sizes, indices or a processor that are not supported, or no memory). */
int stoker_prefill(const struct prefill *a) {
    int64_t value_pitch = round_up(a->value_size, WIDTH), length = *a->length_address;
    if (a->size > MAX_HEAD_SIZE || value_pitch > MAX_HEAD_SIZE || a->heads % a->kv_heads || a->queries < 1 || a->queries > length) return 1;
    int64_t first_key = first_seen(a, length - a->queries), begin = first_key / KEY_TILE * KEY_TILE;
    if (!has_valid_blocks(a, first_key, length)) return 1;
    int64_t panels = (length - begin + WIDTH - 1) / WIDTH, tiles = (a->queries * (a->heads / a->kv_heads) + TILE_ROWS - 1) / TILE_ROWS;
    float *keys = aligned_alloc(64, panels * WIDTH * a->size * sizeof *keys);
    float *values = aligned_alloc(64, panels * WIDTH * value_pitch * sizeof *values);
    struct head_job *jobs = calloc(a->kv_heads, sizeof *jobs);
    struct stage *stages = calloc(2 * a->kv_heads, sizeof *stages);
    int failed = !(keys && values && jobs && stages);
    if (!failed) {
        for (int64_t h = 0; h < a->kv_heads; h++) {
            jobs[h] = (struct head_job){a, length, h, begin, first_key, value_pitch, keys, values};
            stages[2 * h] = (struct stage){pack_keys, jobs + h, panels, 0, 0};
            stages[2 * h + 1] = (struct stage){attend_tile, jobs + h, tiles, 0, 0};
        }
        run_stages(a->fork, a->threads, stages, 2 * a->kv_heads);
    }
    free(keys);
    free(values);
    free(jobs);
    free(stages);
    return failed;
}

#else

int stoker_prefill(const struct prefill *a) {
    (void)a;
    return 1;
}

#endif
