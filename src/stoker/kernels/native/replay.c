/* Calls of kernels one after the other, whose arguments were recorded before (recording.py). */

#include <stdint.h>

/* One call of a `stoker_` function, followed by its packed struct of arguments. `CALL` in library.py. */
struct call {
    int (*function)(const void *);
    int64_t size; /* of the arguments in bytes, a multiple of 8 */
    char arguments[];
};

/* Calls without gaps between them; the last one has no function. Returns 0, or 1 when the function of a call does: later ones do not run. */
int stoker_replay(const struct call *call) {
    while (call->function) {
        if (call->function(call->arguments)) return 1;
        call = (const struct call *)(call->arguments + call->size);
    }
    return 0;
}
