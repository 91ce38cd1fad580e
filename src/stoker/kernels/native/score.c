/* How well a linear's outputs (logits) predict tokens: log_softmax(y)[target] and argmax(y) of each row, without storing y.
 *
 *     y [rows, out]      one tile [TILE_ROWS, WIDTH] at a time, in the order of the weight panels; see panels.h
 *     row_score          of the columns so far: the largest logit and its column; per lane Σ exp(logit - largest); the target's logit
 *
 * Stage 1 packs x. In stage 2, a work item has a share of the rows, and multiplies it by one weight panel after another. On a Zen 4 core,
 * the scores of a tile take 5 % of the time of its product of 576 features.
 */

#include "panels.h"

/* `SCORING` in library.py, then the arguments of a linear, whose y is not used. */
struct scoring {
    fork_function *fork;
    int64_t threads;
    const int32_t *targets; /* [rows] */
    float *likelihoods;     /* [rows]: log_softmax(y)[target] */
    int32_t *best;          /* [rows]: argmax(y) */
    double scale, softcap;  /* logits are y × scale, then softcap × tanh(y / softcap) unless softcap is 0 */
    struct linear linear;
};

#ifdef HAS_PANELS

#include <float.h>

struct row_score {
    f32v sums;
    float largest, target;
    int32_t best;
};

struct job {
    const struct scoring *scoring;
    struct panels panels;
    int64_t share_tiles; /* panels of x of a work item */
};

/* Add the logits of columns first : first + LANES to the score of a row. */
static INLINE void add_logits(struct row_score *score, f32v logits, int64_t first, int32_t target) {
    if (is_any_above(logits, score->largest)) { /* rare after the first columns */
        float largest = largest_lane(larger(logits, broadcast(score->largest))); /* in this order, NaN is not the larger one */
        score->best = first + first_lane(logits, largest);
        score->sums *= exponential(broadcast(score->largest - largest));
        score->largest = largest;
    }
    score->sums += exponential(logits - score->largest);
    if (target >= first && target < first + LANES) score->target = logits[target - first];
}

/* Add columns first : first + count of the rows of panels begin : end of x to their scores. */
static void score_panel(const struct job *job, int64_t first, int64_t count, int64_t begin, int64_t end, const u32v (*panel)[2],
                        struct row_score *scores) {
    const struct linear *a = job->panels.linear;
    float sums[TILE_ROWS][WIDTH], scale = job->scoring->scale, softcap = job->scoring->softcap;
    for (int64_t tile = begin; tile < end; tile++) {
        int64_t row = tile * TILE_ROWS, rows = min_i64(TILE_ROWS, a->rows - row);
        multiply_panels(&job->panels, tile, panel, sums);
        for (int64_t r = 0; r < rows; r++, scores++) {
            for (int64_t n = 0; n < count; n += LANES) {
                f32v logits = scaled_and_biased(a, load(FLOAT32, sums[r], n), first + n, count - n) * scale;
                if (softcap) logits = softcap - 2 * softcap / (1.0f + exponential(logits * (2 / softcap))); /* tanh u = 1 - 2 / (1 + exp 2u) */
                for (int64_t i = count - n; i < LANES; i++) logits[i] = -INFINITY;
                add_logits(scores, logits, first + n, job->scoring->targets[row + r]);
            }
        }
    }
}

/* Stage 2, work item `index`: its share of the rows. */
static void score_share(void *data, int64_t index) {
    struct job *job = data;
    const struct scoring *scoring = job->scoring;
    const struct linear *a = job->panels.linear;
    int64_t begin = index * job->share_tiles, end = min_i64(begin + job->share_tiles, job->panels.tiles), first_row = begin * TILE_ROWS;
    int64_t rows = min_i64(end * TILE_ROWS, a->rows) - first_row;
    u32v(*panel)[2] = allocate_panels(&job->panels, 1);
    struct row_score *scores = aligned_alloc(64, rows * sizeof *scores);
    if (panel && scores) {
        for (int64_t r = 0; r < rows; r++) scores[r] = (struct row_score){.largest = -FLT_MAX};
        for (int64_t first = 0; first < a->out; first += WIDTH) {
            int64_t count = min_i64(WIDTH, a->out - first);
            pack_weight(&job->panels, first, count, panel);
            score_panel(job, first, count, begin, end, (const u32v(*)[2])panel, scores);
        }
        for (int64_t r = 0; r < rows; r++) {
            scoring->likelihoods[first_row + r] = scores[r].target - scores[r].largest - logf(sum_lanes(scores[r].sums));
            scoring->best[first_row + r] = scores[r].best;
        }
    } else __atomic_store_n(&job->panels.failed, 1, __ATOMIC_RELAXED);
    free(panel);
    free(scores);
}

/* Returns 0, or 1 when the linear is not supported, by this processor or at all, or there is no memory. */
int stoker_score(const struct scoring *a) {
    if (!has_panels(&a->linear) || a->linear.gate || a->linear.residual) return 1;
    if (!a->linear.rows) return 0;
    struct job job = {.scoring = a, .panels = make_panels(&a->linear)};
    job.share_tiles = (job.panels.tiles + a->threads - 1) / a->threads;
    if (!job.panels.failed) {
        struct stage stages[] = {
            {pack_rows, &job.panels, job.panels.tiles, 0, 0},
            {score_share, &job, (job.panels.tiles + job.share_tiles - 1) / job.share_tiles, 0, 0},
        };
        run_stages(a->fork, a->threads, stages, 2);
    }
    free_panels(&job.panels);
    return job.panels.failed;
}

#else

int stoker_score(const struct scoring *a) {
    (void)a;
    return 1;
}

#endif
