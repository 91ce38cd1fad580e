/* Linears of many rows of x with AVX-512, AVX2 or NEON, with weight and activations in float32, or in e4m3 (AVX512-BF16). See panels.h for the
 * product.
 *
 * Stage 1 packs x. In stage 2, a work item converts one weight panel after another, and multiplies it by its panels of x while it is in the
 * L2 cache. On a Zen 4 core, products of e4m3 [1024, 576] and [3072, 576] reach 82 % of what the loop alone reaches (231 GFLOP/s).
 */

#include "panels.h"

#ifdef HAS_PANELS

struct gemm {
    struct panels panels;              /* of x, and the linear */
    int64_t share_panels, share_tiles; /* weight panels and panels of x of a work item */
    int64_t row_shares;                /* work items that have the same weight panels */
};

/* Prefetch what `store_outputs` reads and writes for features from `first` on: without it, stores take 10 % of the time. */
static INLINE void prefetch_outputs(const struct linear *a, int64_t row, int64_t rows, int64_t first) {
    int64_t size = size_of(a->dtype);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t byte = 0; byte < WIDTH * size; byte += 64) {
            int64_t at = ((row + r) * a->out + first) * size + byte;
            __builtin_prefetch((char *)a->y + at, 1);
            if (a->residual) __builtin_prefetch((const char *)a->residual + at);
        }
    }
}

/* Output features first : first + count of the rows of panels begin : end of x. `memory`: for one weight panel, two with a gate. */
static void compute_panel(const struct panels *p, int64_t first, int64_t count, int64_t begin, int64_t end, u32v (*memory)[2]) {
    const struct linear *a = p->linear;
    float sums[2][TILE_ROWS][WIDTH];
    int operands = a->gate ? 2 : 1;
    for (int i = 0; i < operands; i++) pack_weight(p, first + i * a->out, count, memory + i * p->elements);
    for (int64_t tile = begin; tile < end; tile++) {
        int64_t row = tile * TILE_ROWS, rows = min_i64(TILE_ROWS, a->rows - row);
        prefetch_outputs(a, row, rows, first);
        for (int i = 0; i < operands; i++) multiply_panels(p, tile, (const u32v(*)[2])memory + i * p->elements, sums[i]);
        for (int64_t r = 0; r < rows; r++) store_outputs(a, row + r, first, count, sums[0][r], sums[1][r]);
    }
}

/* Stage 2, work item `index`: its share of the weight panels, for its share of the panels of x. */
static void compute_share(void *data, int64_t index) {
    struct gemm *g = data;
    struct panels *p = &g->panels;
    int64_t out = p->linear->out, begin = index / g->row_shares * g->share_panels * WIDTH, end = min_i64(begin + g->share_panels * WIDTH, out);
    int64_t tile = index % g->row_shares * g->share_tiles, last_tile = min_i64(tile + g->share_tiles, p->tiles);
    u32v(*memory)[2] = allocate_panels(p, p->linear->gate ? 2 : 1);
    if (!memory) {
        __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t first = begin; first < end; first += WIDTH) compute_panel(p, first, min_i64(WIDTH, out - first), tile, last_tile, memory);
    free(memory);
}

/* Computes one linear. Returns 0, or 1 when it is not supported, by this processor or at all, or there is no memory. */
int stoker_gemm(const struct linears *all) {
    const struct linear *a = all->first;
    if (all->count != 1 || !has_panels(a)) return 1;
    if (!a->rows || !a->out) return 0;
    struct gemm g = {.panels = make_panels(a)};
    int64_t panels = (a->out + WIDTH - 1) / WIDTH, shares = min_i64(panels, all->threads * 4), tiles = g.panels.tiles;
    g.share_panels = (panels + shares - 1) / shares;
    shares = (panels + g.share_panels - 1) / g.share_panels;
    g.share_tiles = (tiles * shares + 2 * all->threads - 1) / (2 * all->threads); /* fewer than all where panels are too few for the threads */
    g.share_tiles = min_i64(g.share_tiles, tiles);
    g.row_shares = (tiles + g.share_tiles - 1) / g.share_tiles;
    if (!g.panels.failed) {
        struct stage stages[] = {{pack_rows, &g.panels, tiles, 0, 0}, {compute_share, &g, shares * g.row_shares, 0, 0}};
        run_stages(all->fork, all->threads, stages, 2);
    }
    free_panels(&g.panels);
    return g.panels.failed;
}

#else

int stoker_gemm(const struct linears *all) {
    (void)all;
    return 1;
}

#endif
