// The small operations of a decoder layer in float32: RMSNorm, rotary embeddings, and activations.
//
// A decode step runs them about a hundred times on a few thousand numbers, where each operation of PyTorch takes longer
// to start than to compute. Each row is computed alone and in the same order, so that its result is the same to the
// last bit whatever other rows are computed with it. The compiler must not fuse multiply-adds on its own, as it might do
// so in a loop's vectors and not in its last numbers.

#include <math.h>
#include <stdint.h>

#define LANES 16
#define SMALL (1 << 16)  // numbers below which starting threads takes longer than the work

static float sum_of_squares(const float *x, int64_t n) {
    float sums[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) sums[j] += x[i + j] * x[i + j];
    for (int j = 0; i < n; i++, j++) sums[j] += x[i] * x[i];
    for (int width = LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++) sums[j] += sums[j + width];
    return sums[0];
}

// Normalize `rows` rows of `n` numbers: x / sqrt(mean(x^2) + eps) * (weight + offset); without weights: * 1.
void rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t n, double eps, double offset,
              int threads) {
    const float added = (float)offset;
#pragma omp parallel for num_threads(threads) if (rows * n > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const float *in = x + row * n;
        float *result = out + row * n;
        const float scale = 1 / sqrtf(sum_of_squares(in, n) / n + (float)eps);
        if (weight)
            for (int64_t i = 0; i < n; i++) result[i] = (weight[i] + added) * (in[i] * scale);
        else
            for (int64_t i = 0; i < n; i++) result[i] = in[i] * scale;
    }
}

// Faster where the processor has it, and the same for all numbers of a loop.
#ifdef FP_FAST_FMAF
#define MULTIPLY_ADD(a, b, sum) __builtin_fmaf(a, b, sum)
#else
#define MULTIPLY_ADD(a, b, sum) ((a) * (b) + (sum))
#endif

// e^x for x between -87 and 87; other numbers are cut off there.
static inline float exponential(float x) {
    x = x > 87.0f ? 87.0f : x < -87.0f ? -87.0f : x;  // NaN stays
    const float magic = 12582912.0f;                  // 1.5 * 2^23: the sum is rounded to an integer
    const union { float value; uint32_t bits; } shifted = {MULTIPLY_ADD(x, 1.44269504f, magic)};
    const float n = shifted.value - magic;
    const float rest = MULTIPLY_ADD(n, 2.12194440e-4f, MULTIPLY_ADD(n, -0.693359375f, x));  // x - n log 2
    float sum = 1.9875691500e-4f;
    sum = MULTIPLY_ADD(sum, rest, 1.3981999507e-3f);
    sum = MULTIPLY_ADD(sum, rest, 8.3334519073e-3f);
    sum = MULTIPLY_ADD(sum, rest, 4.1665795894e-2f);
    sum = MULTIPLY_ADD(sum, rest, 1.6666665459e-1f);
    sum = MULTIPLY_ADD(sum, rest, 5.0000001201e-1f);
    sum = MULTIPLY_ADD(sum, rest * rest, rest + 1.0f);
    const union { uint32_t bits; float value; } power = {(shifted.bits << 23) + (127u << 23)};  // 2^n
    return sum * power.value;
}

// e^(x - highest) of `n` numbers, which are at most `highest`; 0 below e^-87.
void exponentials(const float *x, float highest, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float difference = x[i] - highest;
        out[i] = difference < -87.0f ? 0.0f : exponential(difference);
    }
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Activations by the numbers of `native.py`: x sigmoid(x), its form with tanh of gelu, sigmoid(x), and log(1 + e^x).
enum { SILU, GELU_TANH, SIGMOID, SOFTPLUS };

static inline float activation(int kind, float x) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    if (kind == SIGMOID) return sigmoid(x);
    if (kind == SOFTPLUS) return x > 20.0f ? x : log1pf(expf(x));
    const float inner = x * MULTIPLY_ADD(0.044715f * x, x, 1.0f);
    return x / (1.0f + exponential(-1.5957691216f * inner));  // 0.5 (1 + tanh(u)) = sigmoid(2 u)
}

// Apply an activation to `n` numbers.
void activate(int kind, const float *x, float *out, int64_t n, int threads) {
#define ACTIVATE(of) \
    _Pragma("omp parallel for num_threads(threads) if (n > SMALL)") for (int64_t i = 0; i < n; i++) out[i] = activation(of, x[i])
    if (kind == SILU) ACTIVATE(SILU);
    else if (kind == GELU_TANH) ACTIVATE(GELU_TANH);
    else if (kind == SIGMOID) ACTIVATE(SIGMOID);
    else ACTIVATE(SOFTPLUS);
}

// Rotate one head: the first `rotated` of `dim` dimensions, in pairs (2i, 2i + 1) if interleaved, else (i, i + half).
static void rotate_head(const float *x, float *out, const float *cos, const float *sin, int64_t dim, int64_t rotated,
                        int64_t interleaved) {
    const int64_t half = rotated / 2;
    if (interleaved)
        for (int64_t i = 0; i < rotated; i += 2) {
            out[i] = x[i] * cos[i] - x[i + 1] * sin[i];
            out[i + 1] = x[i + 1] * cos[i + 1] + x[i] * sin[i + 1];
        }
    else {
        for (int64_t i = 0; i < half; i++) out[i] = x[i] * cos[i] - x[i + half] * sin[i];
        for (int64_t i = half; i < rotated; i++) out[i] = x[i] * cos[i] + x[i - half] * sin[i];
    }
    for (int64_t i = rotated; i < dim; i++) out[i] = x[i];
}

// Heads of a tensor [tokens, heads, dim], whose tokens and heads are `token` and `head` numbers apart.
typedef struct {
    const float *x;
    float *out;  // contiguous
    int64_t heads, token, head;
} Heads;

// Rotate the heads of queries and keys. `cos` and `sin` are [tokens, rotated].
void rotate_heads(const float *query, float *query_out, int64_t heads, int64_t query_token, int64_t query_head,
                  const float *key, float *key_out, int64_t kv_heads, int64_t key_token, int64_t key_head,
                  const float *cos, const float *sin, int64_t tokens, int64_t dim, int64_t rotated,
                  int64_t interleaved, int threads) {
    const Heads both[2] = {{query, query_out, heads, query_token, query_head},
                           {key, key_out, kv_heads, key_token, key_head}};
#pragma omp parallel for num_threads(threads) if (tokens * heads * dim > SMALL)
    for (int64_t t = 0; t < tokens; t++)
        for (int n = 0; n < 2; n++)
            for (int64_t h = 0; h < both[n].heads; h++)
                rotate_head(both[n].x + t * both[n].token + h * both[n].head,
                            both[n].out + (t * both[n].heads + h) * dim, cos + t * rotated, sin + t * rotated, dim,
                            rotated, interleaved);
}
