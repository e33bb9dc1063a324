// Samples tokens from scores: the filters of Transformers' warpers, softmax, and an exponential race.
//
// The noise is a function of a row's key, or the noise of `torch.multinomial`, from PyTorch's generator. Noise of tokens
// that cannot win is not computed. A removed token has the score -inf, or is missing from a list of tokens. A row gets the
// same bits either way, because removed tokens do not change the order of its sums.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void exponentials(const float *x, float highest, float *out, int64_t n);

#define LANES 16  // sums of a row; token t belongs to number t mod LANES

// The highest of `n` numbers; NaN is ignored.
static float highest_of(const float *numbers, int64_t n) {
    float lanes[LANES];
    for (int j = 0; j < LANES; j++) lanes[j] = -INFINITY;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] = numbers[i + j] > lanes[j] ? numbers[i + j] : lanes[j];
    for (int j = 0; i < n; i++, j++) lanes[j] = numbers[i] > lanes[j] ? numbers[i] : lanes[j];
    for (int j = 1; j < LANES; j++) lanes[0] = lanes[j] > lanes[0] ? lanes[j] : lanes[0];
    return lanes[0];
}

// The sum of numbers that belong to tokens.
static double sum_of(const float *numbers, const int64_t *tokens, int64_t n) {
    double lanes[LANES] = {0};
    if (tokens)
        for (int64_t i = 0; i < n; i++) lanes[tokens[i] % LANES] += numbers[i];
    else {
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES)
            for (int j = 0; j < LANES; j++) lanes[j] += numbers[i + j];
        for (int j = 0; i < n; i++, j++) lanes[j] += numbers[i];
    }
    for (int j = 1; j < LANES; j++) lanes[0] += lanes[j];
    return lanes[0];
}

// Scores of a row. `tokens` [count] are those that they belong to, in ascending order; null: 0, 1, ....
typedef struct {
    float *scores;
    int64_t *tokens;
    int64_t count;
} Row;

// Probabilities of a row; NaN if its highest score is not finite, or one is NaN.
static void row_softmax(const Row *row, float *probs) {
    exponentials(row->scores, highest_of(row->scores, row->count), probs, row->count);
    const float sum = (float)sum_of(probs, row->tokens, row->count);
    for (int64_t i = 0; i < row->count; i++) probs[i] /= sum;
}

// Softmax of scores [rows, vocabulary].
void softmax(const float *scores, float *probs, int64_t rows, int64_t vocabulary, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const Row of_row = {(float *)scores + row * vocabulary, NULL, vocabulary};  // which are only read
        row_softmax(&of_row, probs + row * vocabulary);
    }
}

// PyTorch's Mersenne Twister.
#define STATE 624
#define SHIFT 397

typedef struct {
    uint32_t words[STATE];
    int64_t first;  // number of the first word, counted from the next that the generator would return
} Twister;

// The head of the bytes of a generator's state.
typedef struct {
    uint64_t seed;
    int32_t left, is_seeded;  // `left` is one more than the number of words that are left
    uint64_t next, words[STATE];
} GeneratorState;

static uint32_t mixed(uint32_t word, uint32_t next) {
    return (((word & 0x80000000u) | (next & 0x7fffffffu)) >> 1) ^ (next & 1 ? 0x9908b0dfu : 0);
}

static void twist(Twister *twister) {
    uint32_t *words = twister->words;
    for (int i = 0; i < STATE - SHIFT; i++) words[i] = words[i + SHIFT] ^ mixed(words[i], words[i + 1]);
    for (int i = STATE - SHIFT; i < STATE - 1; i++) words[i] = words[i - (STATE - SHIFT)] ^ mixed(words[i], words[i + 1]);
    words[STATE - 1] = words[SHIFT - 1] ^ mixed(words[STATE - 1], words[0]);
    twister->first += STATE;
}

static void start_twister(Twister *twister, const GeneratorState *state) {
    for (int i = 0; i < STATE; i++) twister->words[i] = (uint32_t)state->words[i];
    twister->first = state->left - 1 - STATE;
}

// Store the state after `taken` words.
static void stop_twister(Twister *twister, int64_t taken, GeneratorState *state) {
    if (!taken) return;
    while (taken > twister->first + STATE) twist(twister);
    for (int i = 0; i < STATE; i++) state->words[i] = twister->words[i];
    state->next = taken - twister->first;
    state->left = (int32_t)(STATE + 1 - state->next);
}

// Word number `at`, which is not less than that of an earlier call.
static uint64_t word_at(Twister *twister, int64_t at) {
    while (at >= twister->first + STATE) twist(twister);
    uint32_t word = twister->words[at - twister->first];
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680u;
    word ^= (word << 15) & 0xefc60000u;
    return word ^ (word >> 18);
}

// The token of a row that `torch.multinomial` draws. `begin` is the number of the first word of its noise: token t has two
// of them, whose low 53 bits are a uniform number.
static int64_t drawn_winner(const float *probs, const int64_t *tokens, int64_t count, Twister *twister, int64_t begin) {
    float best = -1;
    int64_t winner = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!(probs[i] > 0)) continue;
        const int64_t token = tokens ? tokens[i] : i;
        const uint64_t high = word_at(twister, begin + 2 * token), low = word_at(twister, begin + 2 * token + 1);
        const double uniform = (double)((high << 32 | low) & ((1ull << 53) - 1)) * 0x1p-53;
        if (uniform * best > probs[i] * 1.000001) continue;  // the noise is larger than the uniform number
        const float noise = (float)(-1.0 * log1p(-uniform));
        const float score = probs[i] / noise;
        if (score > best) best = score, winner = token;
    }
    return winner;
}

// Whether all numbers of `probs` [rows, vocabulary] are finite and not negative, and some of each row positive.
static int are_probabilities(const float *probs, int64_t rows, int64_t vocabulary, int threads) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) reduction(| : failed) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *p = probs + row * vocabulary;
        int invalid = 0, some = 0;
        for (int64_t i = 0; i < vocabulary; i++) {
            invalid |= !(p[i] >= 0 && p[i] < INFINITY);
            some |= p[i] > 0;
        }
        failed |= invalid || !some;
    }
    return !failed;
}

// Draw a token from each row of `probs` [rows, vocabulary], and advance the state of PyTorch's generator. Returns nonzero,
// and draws none, if they are no probabilities.
int multinomial(const float *probs, void *state, int64_t rows, int64_t vocabulary, int64_t *tokens, int threads) {
    if (!are_probabilities(probs, rows, vocabulary, threads)) return 1;
    Twister twister;
    start_twister(&twister, state);
    for (int64_t row = 0; row < rows; row++)
        tokens[row] = drawn_winner(probs + row * vocabulary, NULL, vocabulary, &twister, 2 * row * vocabulary);
    stop_twister(&twister, 2 * rows * vocabulary, state);
    return 0;
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

// A token that may be removed.
typedef struct {
    float score, prob;
    int64_t at;
} Ranked;

static int ascending(const void *left, const void *right) {
    const Ranked *a = left, *b = right;
    if (a->score != b->score) return a->score < b->score ? -1 : 1;
    return a->at < b->at ? -1 : 1;
}

// Remove the least probable tokens that have at most the probability `rest` together, but for the most probable one. Of
// equal scores, those of the first tokens are removed first. `probs` is as long as the row. Returns nonzero if memory
// runs out.
static int remove_rest(Row *row, float rest, int64_t vocabulary, float *probs) {
    row_softmax(row, probs);
    const float least = rest / (2 * (float)vocabulary);  // all below it have at most half of the rest
    int64_t count = 0;
    for (int64_t i = 0; i < row->count; i++) count += probs[i] >= least && probs[i] > 0;
    Ranked *ranked = malloc(sizeof(Ranked) * (count + 1));
    if (!ranked) return 1;
    count = 0;
    for (int64_t i = 0; i < row->count; i++) {
        if (probs[i] >= least && probs[i] > 0) {
            ranked[count++] = (Ranked){row->scores[i], probs[i], i};
            probs[i] = 0;
        } else if (probs[i] < least || probs[i] == 0) row->scores[i] = -INFINITY;  // NaN stays
    }
    qsort(ranked, count, sizeof(Ranked), ascending);
    double sum = sum_of(probs, row->tokens, row->count);
    for (int64_t i = 0; i + 1 < count; i++) {
        sum += ranked[i].prob;
        if ((float)sum > rest) break;
        row->scores[ranked[i].at] = -INFINITY;
    }
    free(ranked);
    return 0;
}

// Remove tokens of less than `min_p` times the highest probability.
static void remove_improbable(Row *row, float min_p, float *probs) {
    exponentials(row->scores, highest_of(row->scores, row->count), probs, row->count);
    for (int64_t i = 0; i < row->count; i++)
        if (probs[i] < min_p) row->scores[i] = -INFINITY;
}

// Settings of the warpers of a row, in their order; see `Warpers` in `sampling.py`.
typedef struct {
    float temperature, top_k, rest, min_p;  // `rest` is 1 - top_p
} Settings;

// Apply top-p and min-p to a row. Returns nonzero if memory runs out.
static int remove_by_probability(Row *row, const Settings *settings, int64_t vocabulary, float *probs) {
    const int failed = settings->rest > 0 && remove_rest(row, settings->rest, vocabulary, probs);
    if (settings->min_p > 0) remove_improbable(row, settings->min_p, probs);
    return failed;
}

// Copy scores [rows, vocabulary], with -inf for what top-p and min-p remove. The rows' `settings` are
// `stride` apart, 0 or 1. Returns nonzero if memory runs out.
int keep_probable(const float *scores, const Settings *settings, int64_t stride, float *out, int64_t rows, int64_t vocabulary,
                  int threads) {
    int failed = 0;
#pragma omp parallel for num_threads(threads) reduction(| : failed) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        float *probs = malloc(sizeof(float) * vocabulary);
        if (!probs) {
            failed = 1;
            continue;
        }
        Row of_row = {memcpy(out + row * vocabulary, scores + row * vocabulary, sizeof(float) * vocabulary), NULL, vocabulary};
        failed |= remove_by_probability(&of_row, settings + row * stride, vocabulary, probs);
        free(probs);
    }
    return failed;
}

enum { NO_MEMORY = 1, INVALID };  // what can be wrong with a row

// Divide scores by the temperature. Keep the `top_k` highest, and all that equal the lowest of these, in memory of `row`.
static int highest_scores(const float *scores, const Settings *settings, int64_t vocabulary, Row *row) {
    const int64_t top_k = (int64_t)settings->top_k;
    float *heap = malloc(sizeof(float) * top_k);
    if (!heap) return NO_MEMORY;
    const float nth = nth_highest(scores, vocabulary, top_k, heap), last = nth / settings->temperature;
    free(heap);
    // Lower scores are not ties of the last one when they are divided, either, unless the quotients lose digits.
    const float least = fabsf(last) < 1e-30f ? -INFINITY : nth - fabsf(nth) * 1e-6f;
    int64_t room = 0;
    for (int64_t first = 0; first < vocabulary; first += CHUNK) {
        const int64_t end = first + CHUNK < vocabulary ? first + CHUNK : vocabulary;
        int some = 0, some_nan = 0;
        for (int64_t i = first; i < end; i++) some |= scores[i] >= least, some_nan |= scores[i] != scores[i];
        if (some_nan) return INVALID;
        if (!some) continue;
        if (room < row->count + CHUNK) {
            room = 2 * room + 4 * CHUNK;
            float *more_scores = realloc(row->scores, sizeof(float) * room);
            if (more_scores) row->scores = more_scores;
            int64_t *more_tokens = realloc(row->tokens, sizeof(int64_t) * room);
            if (more_tokens) row->tokens = more_tokens;
            if (!more_scores || !more_tokens) return NO_MEMORY;
        }
        for (int64_t i = first; i < end; i++) {
            const float score = scores[i] / settings->temperature;
            if (!(score >= last) || score == -INFINITY) continue;
            row->scores[row->count] = score;
            row->tokens[row->count++] = i;
        }
    }
    return row->count ? 0 : INVALID;
}

// Store the tokens that the filters of a row keep, with probabilities instead of scores.
static int candidates(const float *scores, const Settings *settings, int64_t vocabulary, Row *row) {
    const int problem = highest_scores(scores, settings, vocabulary, row);
    if (problem) return problem;
    float *probs = malloc(sizeof(float) * row->count);
    if (!probs) return NO_MEMORY;
    const int failed = remove_by_probability(row, settings, vocabulary, probs);
    row_softmax(row, probs);
    free(row->scores);
    row->scores = probs;
    if (failed) return NO_MEMORY;
    return highest_of(probs, row->count) > 0 ? 0 : INVALID;
}

// Sample a token of each row of scores [rows, vocabulary], whose settings have a `top_k`, by the keys of rows or the state of
// PyTorch's generator, which advances. `probs` are the tokens' probabilities. A row whose probabilities are not finite has
// the mark 2, others 0. Returns the number of such rows, -1 if memory runs out; the state changes only if it is 0.
int64_t sample(const float *scores, const Settings *settings, int64_t stride, const uint64_t *keys, void *state, int64_t rows,
               int64_t vocabulary, int64_t *tokens, int64_t *marks, float *probs, int threads) {
    Row *of_rows = calloc(rows, sizeof(Row));
    if (!of_rows) return -1;
    int64_t failed = 0, invalid = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : failed, invalid) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        Row *of_row = of_rows + row;
        const int problem = candidates(scores + row * vocabulary, settings + row * stride, vocabulary, of_row);
        failed += problem == NO_MEMORY;
        invalid += problem == INVALID;
        if (problem) of_row->count = 0;
        marks[row] = problem == INVALID ? 2 : 0;
        tokens[row] = 0;
        if (keys && of_row->count)
            tokens[row] = race_winner(of_row->scores, of_row->tokens, keys[row], highest_of(of_row->scores, of_row->count),
                                      of_row->count);
    }
    Twister twister;
    if (state) start_twister(&twister, state);
    for (int64_t row = 0; row < rows; row++) {
        const Row *of_row = of_rows + row;
        if (state && of_row->count)
            tokens[row] = drawn_winner(of_row->scores, of_row->tokens, of_row->count, &twister, 2 * row * vocabulary);
        probs[row] = NAN;
        for (int64_t i = 0; i < of_row->count; i++)
            if (of_row->tokens[i] == tokens[row]) probs[row] = of_row->scores[i];
        free(of_row->scores);
        free(of_row->tokens);
    }
    if (state && !failed && !invalid) stop_twister(&twister, 2 * rows * vocabulary, state);
    free(of_rows);
    return failed ? -1 : invalid;
}
