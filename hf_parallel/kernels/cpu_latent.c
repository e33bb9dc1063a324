/* Products of latent attention (MLA, DeepSeek-V2, section 2.1): each head of a token times the weights of that head, with the
 * same bits for any number of tokens. Every output is one chain of multiply-adds, or one for each lane, whose results are
 * added in a fixed order. C with GCC's vector types.
 */

#include <stdint.h>
#if defined __FMA__
#include <immintrin.h>
#endif

#define LANES 8
#define TOKENS 4  /* that share what is read of the weights */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#if defined __FMA__
#define MULTIPLY_ADD(a, b, sum) ((vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(sum)))
#else
#define MULTIPLY_ADD(a, b, sum) ((a) * (b) + (sum))
#endif

INLINE int smaller(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

/* y[t][..outputs] = sum over inputs i of x[t][i] * w[i][..]: vectors hold outputs. */
INLINE void absorb(int tokens, const float *const *x, const float *w, float *const *y, int64_t inputs, int64_t outputs) {
    for (int64_t o = 0; o < outputs; o += LANES) {
        vec sums[TOKENS];
        for (int t = 0; t < tokens; t++) sums[t] = (vec){0};
        for (int64_t i = 0; i < inputs; i++) {
            const vec weights = *(const vec *)(w + i * outputs + o);
            for (int t = 0; t < tokens; t++) sums[t] = MULTIPLY_ADD(weights, x[t][i] - (vec){0}, sums[t]);
        }
        for (int t = 0; t < tokens; t++) *(vec *)(y[t] + o) = sums[t];
    }
}

/* y[t][o] = sum over inputs i of x[t][i] * w[o][i]: vectors hold inputs. */
INLINE void project(int tokens, const float *const *x, const float *w, float *const *y, int64_t inputs, int64_t outputs) {
    for (int64_t o = 0; o < outputs; o++) {
        vec sums[TOKENS];
        for (int t = 0; t < tokens; t++) sums[t] = (vec){0};
        for (int64_t i = 0; i < inputs; i += LANES) {
            const vec weights = *(const vec *)(w + o * inputs + i);
            for (int t = 0; t < tokens; t++) sums[t] = MULTIPLY_ADD(weights, *(const vec *)(x[t] + i), sums[t]);
        }
        for (int t = 0; t < tokens; t++)
            y[t][o] = ((sums[t][0] + sums[t][1]) + (sums[t][2] + sums[t][3])) +
                      ((sums[t][4] + sums[t][5]) + (sums[t][6] + sums[t][7]));
    }
}

/* y [tokens][heads][outputs] of x [tokens][heads], whose tokens and heads are `x_token` and `x_head` numbers apart. The weights
 * of heads are `w_head` numbers apart: [inputs][outputs] if `absorbs`, where the outputs are a multiple of LANES, else
 * [outputs][inputs], where the inputs are. */
void latent_products(const float *x, const float *w, float *y, int64_t tokens, int64_t heads, int64_t x_token, int64_t x_head,
                     int64_t w_head, int64_t y_token, int64_t y_head, int64_t inputs, int64_t outputs, int absorbs,
                     int threads) {
    const int64_t groups = (tokens + TOKENS - 1) / TOKENS;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t head = 0; head < heads; head++)
        for (int64_t group = 0; group < groups; group++) {
            const int count = smaller(tokens - group * TOKENS, TOKENS);
            const float *from[TOKENS];
            float *to[TOKENS];
            for (int t = 0; t < count; t++) {
                from[t] = x + (group * TOKENS + t) * x_token + head * x_head;
                to[t] = y + (group * TOKENS + t) * y_token + head * y_head;
            }
            const float *weights = w + head * w_head;
#define OF(n) \
    case n: \
        if (absorbs) absorb(n, from, weights, to, inputs, outputs); \
        else project(n, from, weights, to, inputs, outputs); \
        break;
            switch (count) { OF(1) OF(2) OF(3) OF(4) }
        }
}
