/* A linear layer in float32 for a few tokens: y = x W^T + b.
 *
 * The product is bound by reading the weights, so each weight is read once for all tokens, in memory order, and
 * prefetched. A token's sums are accumulated in the same order, with the same roundings, for any number of other tokens:
 * the results of a row do not depend on the other rows of the pass. C with GCC's vector types.
 */

#include <stdint.h>
#include <string.h>
#if defined __AVX512F__ || defined __FMA__
#include <immintrin.h>
#endif

#ifdef __AVX512F__ /* twice the registers, twice as wide */
#define LANES 16
#define TOKENS 8  /* tokens and outputs of a tile, whose sums stay in registers */
#define OUTPUTS 3
#else
#define LANES 8
#define TOKENS 4
#define OUTPUTS 2
#endif
#define AHEAD 2048 /* prefetch distance in weights: about four rows of a small model */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));

/* Explicit, since x86 compilers fuse multiply-adds or not depending on the loop. */
#if defined __AVX512F__
#define MULTIPLY_ADD(a, b, sum) ((vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(sum)))
#elif defined __FMA__
#define MULTIPLY_ADD(a, b, sum) ((vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(sum)))
#else
#define MULTIPLY_ADD(a, b, sum) ((sum) + (a) * (b))
#endif

INLINE int min(int64_t left, int64_t right) { return (int)(left < right ? left : right); }

/* A vector of the last `count` values, padded with zeros. */
INLINE vec load_some(const float *values, int64_t count) {
    vec loaded = {0};
    memcpy(&loaded, values, count * sizeof(float));
    return loaded;
}

/* The sum of a vector's lanes, by halves: vector types of half the size compile to few instructions, which matters for
 * short rows of weights. */
INLINE float total(vec sums) {
    eight of = *(eight *)&sums;
#if LANES == 16
    of += ((eight *)&sums)[1];
#endif
    four few = ((four *)&of)[0] + ((four *)&of)[1];
    return (few[0] + few[2]) + (few[1] + few[3]);
}

/* A tile of `outputs` x `tokens`; `stride` is the token stride of y. */
INLINE void tile(int outputs, int tokens, int64_t inputs, int64_t stride, const float *w, const float *x, const float *b,
                 float *y) {
    vec sums[OUTPUTS][TOKENS];
    for (int o = 0; o < outputs; o++)
        for (int t = 0; t < tokens; t++) sums[o][t] = (vec){0};
    const int64_t rest = inputs % LANES, whole = inputs - rest;
    for (int64_t i = 0; i < whole; i += LANES) {
        vec weights[OUTPUTS];
        for (int o = 0; o < outputs; o++) {
            weights[o] = *(const vec *)(w + o * inputs + i);
            __builtin_prefetch(w + o * inputs + i + AHEAD);
        }
        for (int t = 0; t < tokens; t++) {
            vec values = *(const vec *)(x + t * inputs + i);
            for (int o = 0; o < outputs; o++) sums[o][t] = MULTIPLY_ADD(weights[o], values, sums[o][t]);
        }
    }
    if (rest) {
        vec weights[OUTPUTS], values[TOKENS];
        for (int o = 0; o < outputs; o++) weights[o] = load_some(w + o * inputs + whole, rest);
        for (int t = 0; t < tokens; t++) values[t] = load_some(x + t * inputs + whole, rest);
        for (int o = 0; o < outputs; o++)
            for (int t = 0; t < tokens; t++) sums[o][t] = MULTIPLY_ADD(weights[o], values[t], sums[o][t]);
    }
    for (int o = 0; o < outputs; o++)
        for (int t = 0; t < tokens; t++) y[t * stride + o] = total(sums[o][t]) + (b ? b[o] : 0.0f);
}

/* `tile` with constant sizes. */
#define OF(outputs, tokens) \
    case 16 * outputs + tokens: tile(outputs, tokens, inputs, stride, w, x, b, y); break;
#define OF_FOUR(outputs) OF(outputs, 1) OF(outputs, 2) OF(outputs, 3) OF(outputs, 4)
#define OF_EIGHT(outputs) OF_FOUR(outputs) OF(outputs, 5) OF(outputs, 6) OF(outputs, 7) OF(outputs, 8)

static void dispatch(int outputs, int tokens, int64_t inputs, int64_t stride, const float *w, const float *x,
                     const float *b, float *y) {
    switch (16 * outputs + tokens) {
#ifdef __AVX512F__
        OF_EIGHT(1) OF_EIGHT(2) OF_EIGHT(3)
#else
        OF_FOUR(1) OF_FOUR(2)
#endif
    }
}

/* x [tokens, inputs], w [outputs, inputs], b [outputs] or NULL, y [tokens, outputs], all contiguous. */
void linear(const float *x, const float *w, const float *b, float *y, int64_t tokens, int64_t inputs, int64_t outputs,
            int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t o = 0; o < outputs; o += OUTPUTS)
        for (int64_t t = 0; t < tokens; t += TOKENS)
            dispatch(min(outputs - o, OUTPUTS), min(tokens - t, TOKENS), inputs, outputs, w + o * inputs,
                     x + t * inputs, b ? b + o : 0, y + t * outputs + o);
}
