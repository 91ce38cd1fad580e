/* Verification of drafts: which nodes of each sequence the sampled tokens confirm. See `ops.verify`. */

#include <stdint.h>

#define MAX_NODES 64

/* `VERIFY` in library.py. S sequences with L rows, which are their nodes. */
struct verification {
    const int32_t *sampled, *token_ids, *logits_idx, *starts, *parents; /* [L], [T], [L], [S + 1], [L] */
    const int64_t *masks;                                               /* [T] */
    int64_t sequences, max_drafts;
    int32_t *ids, *accepted, *newest, *last; /* [S, max_drafts + 1], [S], [S], [S] */
    uint8_t *is_yielded;                     /* [L], zeros */
};

/* The confirmed nodes of `count` rows from `first` on as bits: node 0, and those whose drafts were sampled after their parents. */
static uint64_t matching_nodes(const struct verification *a, int64_t first, int64_t count) {
    uint64_t bits = count > 0;
    for (int64_t node = 1; node < count; node++) {
        int32_t before = a->sampled[first + a->parents[first + node]];
        bits |= (uint64_t)(before >= 0 && before == a->token_ids[a->logits_idx[first + node]]) << node;
    }
    return bits;
}

static void verify_sequence(const struct verification *a, int64_t s) {
    int64_t first = a->starts[s], count = a->starts[s + 1] - first, num_yielded = 0;
    int32_t *ids = a->ids + s * (a->max_drafts + 1);
    if (count > a->max_drafts + 1) count = a->max_drafts + 1;
    uint64_t bits = matching_nodes(a, first, count);
    a->last[s] = (int32_t)first;
    for (int64_t node = 0; node < count; node++) {
        if ((uint64_t)a->masks[a->logits_idx[first + node]] & ~bits) continue; /* the node or an ancestor is not confirmed */
        ids[num_yielded++] = a->sampled[first + node];
        a->is_yielded[first + node] = 1;
        a->last[s] = (int32_t)(first + node);
    }
    a->accepted[s] = (int32_t)(num_yielded > 0 ? num_yielded - 1 : 0);
    a->newest[s] = num_yielded > 0 ? ids[num_yielded - 1] : -1;
    for (int64_t i = num_yielded; i <= a->max_drafts; i++) ids[i] = -1;
}

/* Returns 0, or 1 when the reference must run instead: more nodes than bits. */
int stoker_verify(const struct verification *a) {
    if (a->max_drafts >= MAX_NODES) return 1;
    for (int64_t s = 0; s < a->sequences; s++) verify_sequence(a, s);
    return 0;
}
