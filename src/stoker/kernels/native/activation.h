/* Activation functions of vectors. */

#ifndef STOKER_ACTIVATION_H
#define STOKER_ACTIVATION_H

#include "vector.h"

/* The numbers of `ACTIVATIONS` in library.py. */
enum activation { NO_ACTIVATION, SILU, GELU, GELU_TANH, GELU_QUICK, RELU, RELU2 };

/* Every activation but relu and gelu has the form x × sigmoid(slope). */
static INLINE f32v activated(int activation, f32v x) {
    f32v slope = x;
    switch (activation) {
    case RELU:
    case RELU2:
        slope = blend(x < 0.0f, broadcast(0), x);
        return activation == RELU ? slope : slope * slope;
    case GELU:
        for (int i = 0; i < LANES; i++) slope[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0x1.6a09e6p-1f));
        return slope;
    case GELU_TANH: /* (1 + tanh u) / 2 = sigmoid(2 u) */
        slope = 1.595769122f * (x + 0.044715f * x * x * x);
        break;
    case GELU_QUICK:
        slope = 1.702f * x;
    }
    return x / (1.0f + exponential(-slope));
}

#endif
