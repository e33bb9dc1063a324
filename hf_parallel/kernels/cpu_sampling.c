// Draws tokens as `torch.multinomial` draws them with one sample per row: by an exponential race, whose noise comes from
// the generator's Mersenne Twister. Numbers of tokens that cannot win are skipped, which takes a tenth of the time.

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { N = 624, M = 397 };

// The state of PyTorch's generator on the CPU, as `torch.Generator.get_state` returns it.
typedef struct {
    uint64_t seed;
    int32_t left, seeded;
    uint64_t next, words[N];
} State;

static inline uint32_t twist(uint32_t u, uint32_t v) {
    return (((u & 0x80000000u) | (v & 0x7fffffffu)) >> 1) ^ (v & 1 ? 0x9908b0dfu : 0);
}

static void next_words(uint32_t *p) {
    for (int j = 0; j < N - M; j++) p[j] = p[j + M] ^ twist(p[j], p[j + 1]);
#pragma GCC ivdep
    for (int j = N - M; j < N - 1; j++) p[j] = p[j + M - N] ^ twist(p[j], p[j + 1]);
    p[N - 1] = p[M - 1] ^ twist(p[N - 1], p[0]);
}

static inline uint32_t temper(uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

typedef struct {
    uint32_t words[N];
    int64_t first;  // number of the first word, from the state of the start
} Stream;

static inline uint32_t word(Stream *stream, int64_t number) {
    while (number >= stream->first + N) {
        next_words(stream->words);
        stream->first += N;
    }
    return temper(stream->words[number - stream->first]);
}

// Draw a token from each row of `probs` [rows, vocabulary], and advance the state. Return 1, with nothing changed, if
// the probabilities of a row are not finite, negative or all zero.
int multinomial(void *state_bytes, const float *probs, int64_t rows, int64_t vocabulary, int64_t *tokens) {
    for (int64_t row = 0; row < rows; row++) {
        const float *p = probs + row * vocabulary;
        int invalid = 0, some = 0;
        for (int64_t i = 0; i < vocabulary; i++) {
            invalid |= !(p[i] >= 0 && p[i] < INFINITY);
            some |= p[i] > 0;
        }
        if (invalid || !some) return 1;
    }
    State state;
    memcpy(&state, state_bytes, sizeof state);
    Stream stream;
    for (int i = 0; i < N; i++) stream.words[i] = (uint32_t)state.words[i];
    // `left` numbers words until the next twist, counted before a word is taken: with 1 left, the words are used up.
    stream.first = state.left == 1 ? -N : -(int64_t)state.next;
    for (int64_t row = 0; row < rows; row++) {
        const float *p = probs + row * vocabulary;
        float best = -1;
        for (int64_t i = 0; i < vocabulary; i++) {
            if (p[i] <= 0) continue;
            const int64_t number = 2 * (row * vocabulary + i);
            const uint64_t high = word(&stream, number), low = word(&stream, number + 1);
            const double uniform = (double)(((high << 32) | low) & ((1ull << 53) - 1)) * 0x1p-53;
            if (uniform * best > p[i] * 1.000001) continue;  // the noise is larger than the uniform number
            const float noise = (float)(-1.0 * log1p(-uniform));
            const float score = p[i] / noise;
            if (score > best) best = score, tokens[row] = i;
        }
    }
    const int64_t taken = 2 * rows * vocabulary;
    word(&stream, taken - 1);
    for (int i = 0; i < N; i++) state.words[i] = stream.words[i];
    state.next = taken - stream.first;
    state.left = N + 1 - (int32_t)state.next;
    memcpy(state_bytes, &state, sizeof state);
    return 0;
}
