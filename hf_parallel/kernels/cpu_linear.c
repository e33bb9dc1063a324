/* A linear layer in float32 for a few tokens: y = x W^T + b, with weights in float32 or packed in fewer bits.
 *
 * The product is bound by reading the weights, so each weight is read once for all tokens, in memory order, and
 * prefetched. A token's sums are accumulated in the same order, with the same roundings, for any number of other tokens:
 * the results of a row do not depend on the other rows of the pass. Packed weights are unpacked, exactly, into a few rows
 * of float32 that stay in the first cache, so that the results equal those of the unpacked weights to the last bit.
 * C with GCC's vector types.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined __AVX512F__ || defined __FMA__ || defined __F16C__
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
#define GROUP (1 << 15) /* weights of a group of rows that stay in the second cache */
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

/* Formats of rows of weights, by the numbers of `native.py`. Those of GGUF hold blocks of 32 weights: a scale and, in
 * Q4_1, a minimum in float16, then 16 bytes whose low halves are the first weights and whose high halves the last, or
 * 32 signed bytes. Blocks of 256 weights have scales of their parts, too, in 6 or 8 bits. The product of the scales and an
 * integer is exact in float32. */
enum { FLOAT32, BFLOAT16, FLOAT16, Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K };
#define BLOCK 32
#define LARGE_BLOCK 256

INLINE float half(const uint8_t *bytes) {
    uint16_t bits;
    memcpy(&bits, bytes, 2);
#ifdef __F16C__
    return _cvtsh_ss(bits);
#else
    union { uint32_t bits; float value; } magnitude = {(uint32_t)(bits & 0x7fff) << 13}, scale = {239u << 23}; /* 2^112 */
    return (bits & 0x8000 ? -1.0f : 1.0f) * (magnitude.value * scale.value);
#endif
}

INLINE void unpack_block(int format, const uint8_t *packed, float *out) {
    const float scale = half(packed);
    if (format == Q8_0) {
        for (int i = 0; i < BLOCK; i++) out[i] = scale * (int8_t)packed[i + 2];
        return;
    }
    const float least = format == Q4_1 ? half(packed + 2) : -8 * scale;
    const uint8_t *pairs = packed + (format == Q4_1 ? 4 : 2);
#if defined __AVX512F__ /* a table of the 16 weights that the block can hold, indexed by the low 4 bits of integers */
    const __m512 integers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 table = _mm512_fmadd_ps(_mm512_set1_ps(scale), integers, _mm512_set1_ps(least));
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)pairs));
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(both, table));
    _mm512_storeu_ps(out + 16, _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), table));
#elif defined __AVX2__ && defined __FMA__
    const __m256 scales = _mm256_set1_ps(scale), leasts = _mm256_set1_ps(least);
    for (int i = 0; i < 16; i += 8) {
        const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(pairs + i)));
        const __m256i low = _mm256_and_si256(both, _mm256_set1_epi32(15)), high = _mm256_srli_epi32(both, 4);
        _mm256_storeu_ps(out + i, _mm256_fmadd_ps(_mm256_cvtepi32_ps(low), scales, leasts));
        _mm256_storeu_ps(out + i + 16, _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), scales, leasts));
    }
#else
    for (int i = 0; i < 16; i++) out[i] = scale * (pairs[i] & 15) + least;
    for (int i = 0; i < 16; i++) out[i + 16] = scale * (pairs[i] >> 4) + least;
#endif
}

/* Q4_K and Q5_K: a scale and a minimum, 8 scales and 8 minimums of 32
 * weights in 12 bytes, in Q5_K the fifth bits, then the low 4 bits. Weights 64 n + i and 64 n + 32 + i share a byte. */
INLINE void unpack_large_block(int format, const uint8_t *packed, float *out) {
    const float scale = half(packed), least = half(packed + 2);
    const uint8_t *parts = packed + 4, *high = packed + 16, *low = high + (format == Q5_K ? 32 : 0);
    for (int part = 0; part < 8; part++, out += 32) {
        const uint8_t *of = parts + part % 4, shift = 4 * (part % 2);
        const int scale6 = part < 4 ? of[0] & 63 : (of[8] & 15) | (of[0] >> 6 << 4);
        const int least6 = part < 4 ? of[4] & 63 : of[8] >> 4 | (of[4] >> 6 << 4);
        const float by = scale * (float)scale6, from = least * (float)least6;
        const uint8_t *bytes = low + part / 2 * 32;
        for (int i = 0; i < 32; i++) {
            const int fifth = format == Q5_K ? (high[i] >> part & 1) << 4 : 0;
            out[i] = by * (float)(((bytes[i] >> shift) & 15) | fifth) - from;
        }
    }
}

/* The low 4 bits, 2 high bits, 16 signed scales of 16 weights, and their scale. Weights 128 n + i, + 32, + 64 and + 96 share
 * a byte of high bits. */
INLINE void unpack_q6_k(const uint8_t *packed, float *out) {
    const float scale = half(packed + 208);
    for (int part = 0; part < 8; part++, out += 32) {
        const uint8_t *low = packed + part / 4 * 64 + part % 2 * 32, *high = packed + 128 + part / 4 * 32;
        const int8_t *scales = (const int8_t *)packed + 192 + 2 * part;
        const int low_shift = part % 4 / 2 * 4, high_shift = 2 * (part % 4);
        for (int i = 0; i < 32; i++) {
            const int value = ((low[i] >> low_shift) & 15) | ((high[i] >> high_shift) & 3) << 4;
            out[i] = scale * (float)scales[i / 16] * (float)(value - 32);
        }
    }
}

INLINE void unpack_large_row(int format, const uint8_t *packed, int64_t inputs, float *out) {
    const int64_t bytes = format == Q6_K ? 210 : format == Q5_K ? 176 : 144;
    for (int64_t i = 0; i < inputs / LARGE_BLOCK; i++, packed += bytes, out += LARGE_BLOCK)
        if (format == Q6_K) unpack_q6_k(packed, out);
        else unpack_large_block(format, packed, out);
}

INLINE void unpack_row(int format, const uint8_t *packed, int64_t inputs, float *out) {
    const int64_t bytes = format == Q8_0 ? 34 : format == Q4_1 ? 20 : 18;
    if (format == BFLOAT16)
        for (int64_t i = 0; i < inputs; i++) ((uint32_t *)out)[i] = (uint32_t)((const uint16_t *)packed)[i] << 16;
    else if (format == FLOAT16)
        for (int64_t i = 0; i < inputs; i++) out[i] = half(packed + 2 * i);
    else
        for (int64_t i = 0; i < inputs / BLOCK; i++) unpack_block(format, packed + i * bytes, out + i * BLOCK);
}

static void unpack_rows(int format, const uint8_t *packed, int64_t row_bytes, int64_t rows, int64_t inputs, float *out) {
    for (int64_t row = 0; row < rows; row++, packed += row_bytes, out += inputs) switch (format) {
        case BFLOAT16: unpack_row(BFLOAT16, packed, inputs, out); break;
        case FLOAT16: unpack_row(FLOAT16, packed, inputs, out); break;
        case Q4_0: unpack_row(Q4_0, packed, inputs, out); break;
        case Q4_1: unpack_row(Q4_1, packed, inputs, out); break;
        case Q8_0: unpack_row(Q8_0, packed, inputs, out); break;
        case Q4_K: unpack_large_row(Q4_K, packed, inputs, out); break;
        case Q5_K: unpack_large_row(Q5_K, packed, inputs, out); break;
        case Q6_K: unpack_large_row(Q6_K, packed, inputs, out); break;
        default: memcpy(out, packed, inputs * sizeof(float));
    }
}

/* Unpack rows of `row_bytes` bytes each into out [rows, inputs]. */
void unpack(int format, const uint8_t *packed, int64_t row_bytes, float *out, int64_t rows, int64_t inputs, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++)
        unpack_rows(format, packed + row * row_bytes, row_bytes, 1, inputs, out + row * inputs);
}

/* x [tokens, inputs], w [outputs] rows of `row_bytes` bytes, b [outputs] or NULL, y [tokens, outputs], all contiguous.
 * Returns 1 if memory for the unpacked rows cannot be allocated. */
int linear(int format, const float *x, const uint8_t *w, int64_t row_bytes, const float *b, float *y, int64_t tokens,
           int64_t inputs, int64_t outputs, int threads) {
    /* Tokens of several tiles share a group of rows in the second cache, and a tile of tokens stays in the first. */
    int64_t group = tokens > TOKENS ? min(GROUP / inputs, outputs / (4 * threads)) : 0;
    group = group < OUTPUTS ? OUTPUTS : group / OUTPUTS * OUTPUTS;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *unpacked = format == FLOAT32 ? 0 : malloc(group * inputs * sizeof(float));
        failed = format != FLOAT32 && !unpacked;
#pragma omp for schedule(static)
        for (int64_t first = 0; first < outputs; first += group) {
            if (failed) continue;
            const int64_t count = min(outputs - first, group);
            if (unpacked) unpack_rows(format, w + first * row_bytes, row_bytes, count, inputs, unpacked);
            const float *rows = unpacked ? unpacked : (const float *)w + first * inputs;
            for (int64_t t = 0; t < tokens; t += TOKENS)
                for (int64_t o = 0; o < count; o += OUTPUTS)
                    dispatch(min(count - o, OUTPUTS), min(tokens - t, TOKENS), inputs, outputs, rows + o * inputs,
                             x + t * inputs, b ? b + first + o : 0, y + t * outputs + first + o);
        }
        free(unpacked);
    }
    return failed;
}

/* The same layer with inputs rounded to 8 bits, for weights in blocks of integers. A block of 32 inputs of a token has
 * one scale, max|x| / 127. The products of a block are summed in integers, exactly, and the blocks in float32, in order. So
 * a result is the same for any number of other tokens and threads.
 *
 * A vector holds the sums of COLUMNS outputs. Their weights are unpacked, once for a chunk of tokens, into unsigned bytes:
 * 4 inputs of the first output, 4 of the next, and so on, since an instruction adds 4 products. Weights that were signed
 * have an offset, and its product with the sum of the inputs is subtracted. */
#if defined __AVX512VNNI__ && defined __AVX512BW__
#define COLUMNS 16
#define WIDTH 2 /* vectors of outputs and tokens of a tile, whose sums stay in registers */
#define ROWS 6
#define SIMD(name) _mm512_##name
#define Q8_OFFSET 128
typedef __m512i bytes;
#else
#define COLUMNS 8
#define WIDTH 1
#define ROWS 4
#ifdef __AVX2__
#define SIMD(name) _mm256_##name
#define Q8_OFFSET 0 /* Its instruction adds pairs in 16 bits: the products with the absolute values of weights fit. */
typedef __m256i bytes;
#else
#define Q8_OFFSET 128
#endif
#endif
#define QUADS (BLOCK / 4)
#define CHUNK 256 /* tokens whose inputs in 8 bits stay in the second cache */

/* A product is rounded before it is added only if the processor has no fused instruction. */
#if COLUMNS == 16
#define FUSED(a, b, sum) ((column_sums)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(sum)))
#define EACH(value) ((column_sums)_mm512_set1_ps(value))
#elif defined __FMA__
#define FUSED(a, b, sum) ((column_sums)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(sum)))
#else
#define FUSED(a, b, sum) ((sum) + (a) * (b))
#endif
#if COLUMNS == 8 && defined SIMD
#define EACH(value) ((column_sums)_mm256_set1_ps(value))
#elif COLUMNS == 8
#define EACH(value) ((column_sums){value, value, value, value, value, value, value, value})
#endif

typedef float column_sums __attribute__((vector_size(4 * COLUMNS)));
typedef int32_t column_counts __attribute__((vector_size(4 * COLUMNS)));

typedef struct {
    int8_t values[BLOCK];
    float scale;
    union { float sum; int32_t start; } of; /* Q4_1: the sum of the inputs, for the minimum; others: where integer sums start */
} Input;

typedef struct {
    uint8_t values[QUADS][WIDTH][4 * COLUMNS];
    column_sums scales[WIDTH], leasts[WIDTH];
} Columns;

static void quantize(int format, const float *x, int64_t blocks, Input *out) {
    for (; blocks--; x += BLOCK, out++) {
        union { int32_t bits; float value; } largest = {0};
        for (int i = 0; i < BLOCK; i++) { /* compared as integers, NaN is the largest */
            int32_t bits;
            memcpy(&bits, x + i, 4);
            bits &= 0x7fffffff;
            largest.bits = largest.bits > bits ? largest.bits : bits;
        }
        const float inverse = largest.value > 1e-30f ? 127.0f / largest.value : 0.0f;
        int32_t sum = 0;
        for (int i = 0; i < BLOCK; i++) {
            out->values[i] = (int8_t)__builtin_rintf(x[i] * inverse);
            sum += out->values[i];
        }
        out->scale = largest.value / 127.0f;
        if (format == Q4_1) out->of.sum = out->scale * (float)sum;
        else out->of.start = (format == Q8_0 ? -Q8_OFFSET : -8) * sum;
    }
}

#ifdef SIMD
/* 16 bytes of each row: 4 bytes of all rows per vector. */
INLINE void interleave(const uint8_t *packed, const int32_t *offsets, bytes *out) {
    bytes rows[4];
    for (int i = 0; i < 4; i++) {
#define QUARTER(n) _mm_loadu_si128((const __m128i *)(packed + offsets[4 * (n) + i]))
#if COLUMNS == 16
        rows[i] = _mm512_inserti32x4(_mm512_castsi128_si512(QUARTER(0)), QUARTER(1), 1);
        rows[i] = _mm512_inserti32x4(_mm512_inserti32x4(rows[i], QUARTER(2), 2), QUARTER(3), 3);
#else
        rows[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(QUARTER(0)), QUARTER(1), 1);
#endif
    }
    const bytes a = SIMD(unpacklo_epi32)(rows[0], rows[1]), b = SIMD(unpacklo_epi32)(rows[2], rows[3]);
    const bytes c = SIMD(unpackhi_epi32)(rows[0], rows[1]), d = SIMD(unpackhi_epi32)(rows[2], rows[3]);
    out[0] = SIMD(unpacklo_epi64)(a, b), out[1] = SIMD(unpackhi_epi64)(a, b);
    out[2] = SIMD(unpacklo_epi64)(c, d), out[3] = SIMD(unpackhi_epi64)(c, d);
}
#endif

/* Unpack a block of each row as vector `at`; `offsets` are those of the rows, in bytes. */
INLINE void unpack_columns(int format, const uint8_t *packed, const int32_t *offsets, int at, Columns *out) {
    const uint8_t *integers = packed + (format == Q4_1 ? 4 : 2);
#if COLUMNS == 16
    const __m512i heads = _mm512_i32gather_epi32(_mm512_loadu_si512(offsets), packed, 1);
    out->scales[at] = (column_sums)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(heads));
    if (format == Q4_1) out->leasts[at] = (column_sums)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(heads, 16)));
#else
    for (int c = 0; c < COLUMNS; c++) {
        out->scales[at][c] = half(packed + offsets[c]);
        if (format == Q4_1) out->leasts[at][c] = half(packed + offsets[c] + 2);
    }
#endif
#ifdef SIMD
    bytes values[QUADS];
    interleave(integers, offsets, values);
    if (format == Q8_0) interleave(integers + 16, offsets, values + 4);
    for (int q = 0; q < 4; q++) {
        const bytes first = values[q], low = SIMD(set1_epi8)(15);
        if (format == Q8_0 && Q8_OFFSET) {
            values[q] = (bytes)((column_counts)first ^ (column_counts)SIMD(set1_epi8)(-128));
            values[q + 4] = (bytes)((column_counts)values[q + 4] ^ (column_counts)SIMD(set1_epi8)(-128));
        } else if (format != Q8_0) {
            values[q] = (bytes)((column_counts)first & (column_counts)low);
            values[q + 4] = (bytes)((column_counts)SIMD(srli_epi32)(first, 4) & (column_counts)low);
        }
    }
    for (int q = 0; q < QUADS; q++) *(bytes *)out->values[q][at] = values[q];
#else
    for (int c = 0; c < COLUMNS; c++)
        for (int i = 0; i < BLOCK; i++) {
            const uint8_t *row = integers + offsets[c];
            const uint8_t value = format == Q8_0 ? row[i] ^ 128 : i < 16 ? row[i] & 15 : row[i - 16] >> 4;
            out->values[i / 4][at][4 * c + i % 4] = value;
        }
#endif
}

/* Add the dot products of a block of `tokens` x `width` vectors to their counts. */
INLINE void dots(int format, int width, int tokens, int64_t blocks, const Columns *columns, const Input *inputs,
                 column_counts counts[WIDTH][ROWS]) {
#if defined SIMD && COLUMNS == 8
    bytes pairs[ROWS];
    for (int t = 0; t < tokens; t++) pairs[t] = _mm256_setzero_si256();
#endif
    for (int q = 0; q < QUADS; q++)
        for (int t = 0; t < tokens; t++) {
            const int8_t *values = inputs[t * blocks].values + 4 * q;
#ifdef SIMD
            int32_t four_values;
            memcpy(&four_values, values, 4);
            const bytes x = SIMD(set1_epi32)(four_values);
#endif
            for (int v = 0; v < width; v++) {
#ifndef SIMD
                for (int c = 0; c < COLUMNS; c++)
                    for (int i = 0; i < 4; i++) counts[v][t][c] += columns->values[q][v][4 * c + i] * values[i];
#else
                const bytes weights = *(const bytes *)columns->values[q][v];
#if COLUMNS == 16
                counts[v][t] = (column_counts)_mm512_dpbusd_epi32((bytes)counts[v][t], weights, x);
#else
                if (format == Q8_0) {
                    const bytes products = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
                    counts[v][t] += (column_counts)_mm256_madd_epi16(products, _mm256_set1_epi16(1));
                } else /* 8 times 2 products of at most 15 * 127 fit in 16 bits */
                    pairs[t] = _mm256_add_epi16(pairs[t], _mm256_maddubs_epi16(weights, x));
#endif
#endif
            }
        }
#if defined SIMD && COLUMNS == 8
    for (int t = 0; t < tokens && format != Q8_0; t++)
        counts[0][t] += (column_counts)_mm256_madd_epi16(pairs[t], _mm256_set1_epi16(1));
#endif
    (void)format;
}

/* The sums of `tokens` x `width` vectors, of which `count` outputs exist; `inputs` and `y` have strides of `blocks` and
 * `stride`. */
INLINE void columns_tile(int format, int width, int tokens, int64_t blocks, const Columns *columns, const Input *inputs,
                         const float *b, float *y, int64_t stride, int count) {
    column_sums sums[WIDTH][ROWS];
    for (int v = 0; v < width; v++)
        for (int t = 0; t < tokens; t++) sums[v][t] = (column_sums){0};
    for (int64_t block = 0; block < blocks; block++, columns++, inputs++) {
        column_counts counts[WIDTH][ROWS];
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < width; v++)
                counts[v][t] = (column_counts)(format == Q4_1 ? (column_sums){0} : EACH(inputs[t * blocks].of.sum));
        dots(format, width, tokens, blocks, columns, inputs, counts);
        for (int t = 0; t < tokens; t++) {
            const column_sums scale = EACH(inputs[t * blocks].scale), sum = EACH(inputs[t * blocks].of.sum);
            for (int v = 0; v < width; v++) {
                const column_sums products = columns->scales[v] * __builtin_convertvector(counts[v][t], column_sums);
                sums[v][t] = FUSED(products, scale, sums[v][t]);
                if (format == Q4_1) sums[v][t] = FUSED(columns->leasts[v], sum, sums[v][t]);
            }
        }
    }
    for (int v = 0; v < width; v++) {
        const int some = min(COLUMNS, count - v * COLUMNS);
        column_sums bias = {0};
        if (b) memcpy(&bias, b + v * COLUMNS, some * sizeof(float));
        for (int t = 0; t < tokens; t++) {
            float *to = y + t * stride + v * COLUMNS;
            sums[v][t] += bias;
            if (some == COLUMNS) memcpy(to, &sums[v][t], sizeof bias);
            else memcpy(to, &sums[v][t], some * sizeof(float));
        }
    }
}

#define OF_TOKENS(n) \
    case n: columns_tile(format, width, n, blocks, columns, inputs, b, y, stride, count); break;

INLINE void columns_tokens(int format, int width, int64_t tokens, int64_t blocks, const Columns *columns, const Input *inputs,
                           const float *b, float *y, int64_t stride, int count) {
    for (; tokens > 0; tokens -= ROWS, inputs += ROWS * blocks, y += ROWS * stride) switch (min(tokens, ROWS)) {
        OF_TOKENS(1) OF_TOKENS(2) OF_TOKENS(3) OF_TOKENS(4)
#if ROWS == 6
        OF_TOKENS(5) OF_TOKENS(6)
#endif
    }
}

/* The results [tokens, count] of `count` rows of weights at w. */
INLINE void columns_group(int format, int64_t tokens, int64_t blocks, const uint8_t *w, int64_t row_bytes, int count,
                          Columns *columns, const Input *inputs, const float *b, float *y, int64_t stride) {
    const int size = format == Q8_0 ? 34 : format == Q4_1 ? 20 : 18, width = (count + COLUMNS - 1) / COLUMNS;
    int32_t offsets[WIDTH][COLUMNS];
    for (int c = 0; c < WIDTH * COLUMNS; c++) offsets[c / COLUMNS][c % COLUMNS] = (int32_t)(min(c, count - 1) * row_bytes);
    for (int64_t block = 0; block < blocks; block++)
        for (int v = 0; v < width; v++) {
            const uint8_t *next = w + WIDTH * COLUMNS * row_bytes + COLUMNS * (v * row_bytes + block * size);
            for (int i = 0; i < COLUMNS * size; i += 64) __builtin_prefetch(next + i);
            unpack_columns(format, w + block * size, offsets[v], v, columns + block);
        }
    if (width == 1) columns_tokens(format, 1, tokens, blocks, columns, inputs, b, y, stride, count);
    else columns_tokens(format, WIDTH, tokens, blocks, columns, inputs, b, y, stride, count);
}

/* `linear` with inputs in 8 bits; the format is Q4_0, Q4_1 or Q8_0. */
int linear_int8(int format, const float *x, const uint8_t *w, int64_t row_bytes, const float *b, float *y, int64_t tokens,
                int64_t inputs, int64_t outputs, int threads) {
    const int64_t blocks = inputs / BLOCK, chunk = tokens < CHUNK ? tokens : CHUNK;
    Input *quantized = malloc(chunk * blocks * sizeof(Input));
    int failed = !quantized;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        Columns *columns = aligned_alloc(64, (blocks * sizeof(Columns) + 63) / 64 * 64);
        failed |= !columns || !quantized;
        for (int64_t first = 0; first < tokens; first += CHUNK) {
            const int64_t rows = min(tokens - first, CHUNK);
#pragma omp for schedule(static)
            for (int64_t t = 0; t < rows; t++)
                if (quantized) quantize(format, x + (first + t) * inputs, blocks, quantized + t * blocks);
#pragma omp for schedule(static)
            for (int64_t o = 0; o < outputs; o += WIDTH * COLUMNS) {
                if (failed) continue;
                const int count = min(outputs - o, WIDTH * COLUMNS);
                float *out = y + first * outputs + o;
#define GROUP_OF(f) \
    case f: \
        columns_group(f, rows, blocks, w + o * row_bytes, row_bytes, count, columns, quantized, b ? b + o : 0, out, outputs); \
        break;
                switch (format) { GROUP_OF(Q4_0) GROUP_OF(Q4_1) GROUP_OF(Q8_0) }
            }
        }
        free(columns);
    }
    free(quantized);
    return failed;
}
