/* Heads of queries, keys and values in a buffer of floats. */

#ifndef STOKER_HEAD_H
#define STOKER_HEAD_H

#include "vector.h"

#define MAX_HEAD_SIZE 512 /* features of a head */

/* Load `size` elements as float32. */
static void load_head(float *head, int dtype, const void *from, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        f32v v = load_up_to(dtype, from, i, size - i);
        store_up_to(FLOAT32, head, i, v, size - i);
    }
}

/* Store `size` floats from element `index` of `to` on, divided by *scale (NULL: as they are). */
static void store_head(void *to, int dtype, int64_t index, const float *head, int64_t size, const float *scale) {
    for (int64_t i = 0; i < size; i += LANES) {
        f32v v = load_up_to(FLOAT32, head, i, size - i);
        store_up_to(dtype, to, index + i, scale ? v / *scale : v, size - i);
    }
}

/* Prefetch `count` keys or values of `size` elements, which are `at` elements behind `array`. */
static INLINE void prefetch_heads(int dtype, const char *array, int64_t at, int64_t count, int64_t size) {
    const char *p = array + at * size_of(dtype), *end = p + count * size * size_of(dtype);
    for (; p < end; p += 64) __builtin_prefetch(p);
}

#endif
