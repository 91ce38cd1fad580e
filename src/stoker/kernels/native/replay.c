/* Calls of kernels one after the other, whose arguments were recorded before (recording.py). */

#include "parallel.h"

/* One call of a `stoker_` function, followed by its packed struct of arguments. `CALL` in library.py. */
struct call {
    int (*function)(const void *);
    int64_t size; /* of the arguments in bytes, a multiple of 8 */
    char arguments[];
};

/* `REPLAY` in library.py. Calls without gaps between them; the last one has no function. */
struct replay {
    fork_function *fork;
    int64_t threads;
    struct call first;
};

/* Returns 0, or 1 when the function of a call does: later ones do not run. */
static int run_calls(const void *first) {
    const struct call *call = first;
    while (call->function) {
        if (call->function(call->arguments)) return 1;
        call = (const struct call *)(call->arguments + call->size);
    }
    return 0;
}

int stoker_replay(const struct replay *a) { return run_with_crew(a->fork, a->threads, run_calls, &a->first); }
