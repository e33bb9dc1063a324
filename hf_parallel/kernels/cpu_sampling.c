// Draws tokens as `torch.multinomial` draws them with one sample per row: by an exponential race, whose noise comes from
// random words of PyTorch's generator. Noise of tokens that cannot win is not computed, which takes a third of the time.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

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

#define CHUNK 64  // numbers that are compared with another one at once
#define MAX_NOISE 23.0f  // -log of half a step of a 32-bit number, rounded up
#define NEGLIGIBLE (0x1p-33f / MAX_NOISE / 2)  // a token with this fraction of the highest probability cannot win

// The upper 32 bits of splitmix64 of a key and a token.
static uint32_t noise_bits(uint64_t key, uint64_t token) {
    uint64_t bits = key + token * 0x9E3779B97F4A7C15ull;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    return (uint32_t)((bits ^ (bits >> 31)) >> 32);
}

// The highest of `n` numbers, as bits: positive floats have the order of their bits, and a NaN is above them or negative.
static int32_t highest_bits(const int32_t *bits, int64_t n) {
    int32_t highest = INT32_MIN;
    for (int64_t i = 0; i < n; i++) highest = bits[i] > highest ? bits[i] : highest;
    return highest;
}

// The winner of the race of a row, whose noise is a function of key and token (`exponential_noise` in `rng.py`). `ids`
// are the tokens of the `count` probabilities; null: their indices.
static int64_t race_winner(const float *probs, const int64_t *ids, uint64_t key, float highest, int64_t count) {
    const float least = highest * NEGLIGIBLE;
    float best = -1;
    int64_t winner = 0;
    for (int64_t first = 0; first < count; first += CHUNK) {
        const int64_t end = first + CHUNK < count ? first + CHUNK : count;
        int some = 0;
        for (int64_t i = first; i < end; i++) some |= probs[i] > least;
        for (int64_t i = first; some && i < end; i++) {
            if (!(probs[i] > least)) continue;
            const int64_t token = ids ? ids[i] : i;
            const float uniform = ((float)noise_bits(key, token) + 0.5f) * 0x1p-32f;
            if (uniform * best > probs[i] * 1.000001f) continue;  // the noise is larger than the uniform number
            const float noise = -log1pf(-uniform);
            const float speed = probs[i] / (noise < MAX_NOISE ? noise : MAX_NOISE);
            if (speed > best) best = speed, winner = token;
        }
    }
    return winner;
}

// Draw a token from each row of `probs` [rows, count] by a race with a key. `ids` [count] are the tokens, null if they are
// 0, 1, .... Returns nonzero if the highest number of a row is zero or not finite.
int race(const float *probs, const int64_t *ids, const uint64_t *keys, int64_t rows, int64_t count, int64_t *tokens,
         int threads) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) reduction(| : failed) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *of_row = probs + row * count;
        union {
            int32_t bits;
            float number;
        } highest = {highest_bits((const int32_t *)of_row, count)};
        const int is_valid = highest.bits > 0 && highest.number < INFINITY;
        failed |= !is_valid;
        tokens[row] = is_valid ? race_winner(of_row, ids, keys[row], highest.number, count) : 0;
    }
    return failed;
}

// Sift the root of a heap of `count` numbers, whose least is the root, down to its place.
static void sift_down(float *heap, int64_t count) {
    const float number = heap[0];
    int64_t at = 0;
    for (int64_t child = 1; child < count; at = child, child = 2 * at + 1) {
        if (child + 1 < count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= number) break;
        heap[at] = heap[child];
    }
    heap[at] = number;
}

// The `count`-th highest of `n` numbers; `heap` has room for `count`.
static float nth_highest(const float *numbers, int64_t n, int64_t count, float *heap) {
    for (int64_t i = 0; i < count; i++) heap[i] = -INFINITY;
    for (int64_t first = 0; first < n; first += CHUNK) {
        const int64_t end = first + CHUNK < n ? first + CHUNK : n;
        const float least = heap[0];
        int some = 0;
        for (int64_t i = first; i < end; i++) some |= numbers[i] > least;
        for (int64_t i = first; some && i < end; i++)
            if (numbers[i] > heap[0]) {
                heap[0] = numbers[i];
                sift_down(heap, count);
            }
    }
    return heap[0];
}

// Copy scores [rows, vocabulary], with -inf for those below the `counts[row]`-th highest of their row. Returns nonzero if
// memory runs out, or a score is NaN.
int keep_top_k(const float *scores, const int64_t *counts, float *out, int64_t rows, int64_t vocabulary, int threads) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) reduction(| : failed) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *of_row = scores + row * vocabulary;
        float *to = out + row * vocabulary, *heap = malloc(sizeof(float) * counts[row]);
        if (!heap) {
            failed = 1;
            continue;
        }
        const float last = nth_highest(of_row, vocabulary, counts[row], heap);
        int some_nan = 0;
        for (int64_t i = 0; i < vocabulary; i++) {
            some_nan |= of_row[i] != of_row[i];
            to[i] = of_row[i] < last ? -INFINITY : of_row[i];
        }
        failed |= some_nan;
        free(heap);
    }
    return failed;
}
