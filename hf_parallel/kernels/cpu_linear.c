/* A linear layer in float32: y = x W^T + b, with weights in float32 or packed in fewer bits.
 *
 * A result is the same to the last bit for any number of other tokens and threads, and on all processors with fused
 * multiply-adds. It is a chain of them over CHAIN inputs, from the first to the last; the sums of such blocks are added in
 * order, then the bias. (That is also the order of oneDNN with AVX2.) Several ways to compute it differ in what a vector
 * holds and what stays in the caches, and never in the order. Nothing depends on what the compiler fuses.
 *
 * For few tokens, the product is bound by reading the weights, so each is read once for many tokens, and prefetched. Packed
 * weights are unpacked, exactly, so that results equal those of the unpacked ones: some inputs of some outputs at a time, into
 * a panel of float32 that stays in the first cache. C with GCC's vector types.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined __AVX__
#include <immintrin.h>
#endif

#ifdef __AVX512F__ /* twice the registers, twice as wide */
#define LANES 16
#define TOKENS 8 /* tokens of a tile, whose sums of VECTORS vectors stay in registers */
#else
#define LANES 8
#define TOKENS 4
#endif
#define CHAIN 1024 /* inputs, a multiple of PART and of all blocks of weights */
#define VECTORS 3 /* of outputs in a tile */
#define WIDE (2 * VECTORS) /* of outputs in a panel; sums of all of them for half as many tokens stay in registers, too */
#define PART 64 /* inputs of a panel */
#define MANY 256 /* tokens that share a panel */
#define FEW 4 /* tokens up to which weights in float32 are transposed in registers */
#define AS_UNPACKED (LANES == 16 ? FEW : 2) /* tokens up to which packed weights need no panel: there are registers */
#define MOST 64 /* tokens up to which weights in float32 need no panel */
#define SPREAD 8 /* outputs of a tile whose vectors hold tokens */
#define GROUPS 2 /* vectors of tokens in such a tile */
#define SMALL (1 << 17) /* products below which starting threads takes longer than the work */
#define PIECE 4096 /* bytes of a row that are prefetched before the other rows' */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t float_bits __attribute__((may_alias));

/* Fused, also where the compiler would not do it. */
#if defined __AVX512F__
#define MULTIPLY_ADD(a, b, sum) ((vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(sum)))
#elif defined __FMA__
#define MULTIPLY_ADD(a, b, sum) ((vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(sum)))
#elif defined FP_FAST_FMAF
INLINE vec multiply_add(vec a, vec b, vec sum) {
    for (int i = 0; i < LANES; i++) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
    return sum;
}
#define MULTIPLY_ADD(a, b, sum) multiply_add(a, b, sum)
#else
#define MULTIPLY_ADD(a, b, sum) ((sum) + (a) * (b))
#endif

/* Without these, compilers read vectors again at each use, or keep more in registers than there are. */
#if defined __AVX512F__
#define IN_REGISTER(vector) __asm__("" : "+v"(vector))
#elif defined __AVX__
#define IN_REGISTER(vector) __asm__("" : "+x"(vector))
#else
#define IN_REGISTER(vector) (void)(vector)
#endif

INLINE int min(int64_t left, int64_t right) { return (int)(left < right ? left : right); }

INLINE vec each(float value) {
#if defined __AVX512F__
    return (vec)_mm512_set1_ps(value);
#elif defined __AVX__
    return (vec)_mm256_set1_ps(value);
#else
    vec values;
    for (int i = 0; i < LANES; i++) values[i] = value;
    return values;
#endif
}

/* Formats of rows of weights, by the numbers of `native.py`. Those of GGUF hold blocks of 32 weights: a scale and, in
 * Q4_1, a minimum in float16, then 16 bytes whose low halves are the first weights and whose high halves the last, or
 * 32 signed bytes. Blocks of 256 weights have scales of their parts, too, in 6 or 8 bits. The product of the scales and an
 * integer is exact in float32. */
enum { FLOAT32, BFLOAT16, FLOAT16, Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K };
#define BLOCK 32
#define LARGE_BLOCK 256
#define PARTS (LARGE_BLOCK / BLOCK)

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
    for (int i = 0; i < 16; i++) out[i] = scale * (float)(pairs[i] & 15) + least;
    for (int i = 0; i < 16; i++) out[i + 16] = scale * (float)(pairs[i] >> 4) + least;
}

/* Formats with blocks of 256 weights, of which a part is 32. Q4_K and Q5_K: a scale and a minimum, 8 scales and 8 minimums of
 * parts in 12 bytes, in Q5_K the fifth bits, then the low 4 bits. Parts 2 n and 2 n + 1 share the bytes of low bits.
 * Q6_K: the low 4 bits, 2 high bits, 16 signed scales of 16 weights, and their scale. */
typedef struct {
    int low, low_shift, high, high_shift; /* where the bits of a part are: a byte, and a bit of it and of the next 31 bytes */
} Bits;

INLINE Bits bits_of(int format, int part) {
    if (format == Q6_K) return (Bits){part / 4 * 64 + part % 2 * 32, part % 4 / 2 * 4, 128 + part / 4 * 32, 2 * (part % 4)};
    return (Bits){(format == Q5_K ? 48 : 16) + part / 2 * 32, 4 * (part % 2), 16, part};
}

/* A weight is `by` times its bits, minus `from`: of the first 16 and the last 16 weights of a part. */
typedef struct {
    float by[2], from;
} Scales;

INLINE Scales scales_of(int format, const uint8_t *packed, int part) {
    if (format == Q6_K) {
        const float scale = half(packed + 208);
        const int8_t *scales = (const int8_t *)packed + 192 + 2 * part;
        return (Scales){{scale * (float)scales[0], scale * (float)scales[1]}, 0};
    }
    const float scale = half(packed), least = half(packed + 2);
    const uint8_t *of = packed + 4 + part % 4;
    const int scale6 = part < 4 ? of[0] & 63 : (of[8] & 15) | (of[0] >> 6 << 4);
    const int least6 = part < 4 ? of[4] & 63 : of[8] >> 4 | (of[4] >> 6 << 4);
    const float by = scale * (float)scale6;
    return (Scales){{by, by}, least * (float)least6};
}

/* Bits of weight i of a part. */
INLINE int bits_at(int format, const uint8_t *packed, Bits bits, int i) {
    const int mask = format == Q6_K ? 3 : format == Q5_K ? 1 : 0;
    const int high = mask ? (packed[bits.high + i] >> bits.high_shift) & mask : 0;
    return ((packed[bits.low + i] >> bits.low_shift) & 15) | high << 4;
}

INLINE void unpack_large_part(int format, const uint8_t *packed, int part, float *out) {
    const Bits bits = bits_of(format, part);
    const Scales scales = scales_of(format, packed, part);
    const int offset = format == Q6_K ? 32 : 0;
    for (int i = 0; i < BLOCK; i++)
        out[i] = scales.by[i / 16] * (float)(bits_at(format, packed, bits, i) - offset) - scales.from;
}

INLINE int block_bytes(int format) {
    return format == Q8_0 ? 34 : format == Q4_1 ? 20 : format == Q4_0 ? 18 : format == Q6_K ? 210 : format == Q5_K ? 176 : 144;
}

INLINE int64_t bytes_of(int format, int64_t inputs) {
    if (format <= FLOAT16) return (format == FLOAT32 ? 4 : 2) * inputs;
    return inputs / (format >= Q4_K ? LARGE_BLOCK : BLOCK) * block_bytes(format);
}

/* Unpack weights [first, first + count) of a row, where `first` is a multiple of 32, and `count` at most 32; less only in
 * formats without blocks. */
INLINE void unpack_part(int format, const uint8_t *row, int64_t first, int count, float *out) {
    const int64_t block = first / (format >= Q4_K ? LARGE_BLOCK : BLOCK);
    const int part = (int)(first % LARGE_BLOCK / BLOCK);
    if (format == FLOAT32) memcpy(out, row + 4 * first, count * sizeof(float));
    else if (format == BFLOAT16)
        for (int i = 0; i < count; i++) ((float_bits *)out)[i] = (uint32_t)((const uint16_t *)row)[first + i] << 16;
    else if (format == FLOAT16)
        for (int i = 0; i < count; i++) out[i] = half(row + 2 * (first + i));
    else if (format >= Q4_K) unpack_large_part(format, row + block * block_bytes(format), part, out);
    else unpack_block(format, row + block * block_bytes(format), out);
}

INLINE void unpack_row(int format, const uint8_t *row, int64_t inputs, float *out) {
    for (int64_t i = 0; i < inputs; i += BLOCK) unpack_part(format, row, i, min(inputs - i, BLOCK), out + i);
}

/* `call(format)` with a constant format. */
#define FOR_FORMAT(call) \
    switch (format) { \
        case BFLOAT16: call(BFLOAT16); break; \
        case FLOAT16: call(FLOAT16); break; \
        case Q4_0: call(Q4_0); break; \
        case Q4_1: call(Q4_1); break; \
        case Q8_0: call(Q8_0); break; \
        case Q4_K: call(Q4_K); break; \
        case Q5_K: call(Q5_K); break; \
        case Q6_K: call(Q6_K); break; \
        default: call(FLOAT32); \
    }

/* Unpack rows of `row_bytes` bytes each into out [rows, inputs]. */
void unpack(int format, const uint8_t *packed, int64_t row_bytes, float *out, int64_t rows, int64_t inputs, int threads) {
#define UNPACK(of) unpack_row(of, packed + row * row_bytes, inputs, out + row * inputs)
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) FOR_FORMAT(UNPACK)
}

/* Vectors of 4-byte words, one of each row. */
#if defined __AVX512F__
typedef __m512i words;
#define WORDS(name) _mm512_##name
#define AND(a, b) _mm512_and_si512(a, b)
#elif defined __AVX2__ && defined __FMA__
typedef __m256i words;
#define WORDS(name) _mm256_##name
#define AND(a, b) _mm256_and_si256(a, b)
#endif

#ifdef WORDS
/* Transpose 4 x 4 words in each quarter (half) of four vectors. */
INLINE void transpose_quarters(const words in[4], words out[4]) {
    const words a = WORDS(unpacklo_epi32)(in[0], in[1]), b = WORDS(unpacklo_epi32)(in[2], in[3]);
    const words c = WORDS(unpackhi_epi32)(in[0], in[1]), d = WORDS(unpackhi_epi32)(in[2], in[3]);
    out[0] = WORDS(unpacklo_epi64)(a, b), out[1] = WORDS(unpackhi_epi64)(a, b);
    out[2] = WORDS(unpacklo_epi64)(c, d), out[3] = WORDS(unpackhi_epi64)(c, d);
}

/* 16 bytes of each row: word i of all rows in out[i]. */
INLINE void transpose(const uint8_t *const rows[LANES], int64_t at, words out[4]) {
    words of[4];
    for (int i = 0; i < 4; i++) {
#define QUARTER(n) _mm_loadu_si128((const __m128i *)(rows[4 * (n) + i] + at))
#if LANES == 16
        of[i] = _mm512_inserti32x4(_mm512_castsi128_si512(QUARTER(0)), QUARTER(1), 1);
        of[i] = _mm512_inserti32x4(_mm512_inserti32x4(of[i], QUARTER(2), 2), QUARTER(3), 3);
#else
        of[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(QUARTER(0)), QUARTER(1), 1);
#endif
#undef QUARTER
    }
    transpose_quarters(of, out);
}

/* Words that are read of each row at a time. With AVX-512 a whole line, as the first cache cannot hold a line of each of 16
 * rows if they are a multiple of 4096 bytes apart. */
#if LANES == 16
#define STRIP 16
INLINE void transpose_strip(const uint8_t *const rows[LANES], int64_t at, words out[STRIP]) {
    words quarters[4][4]; /* of rows 4 n to 4 n + 3, in quarter q word 4 q + i */
    for (int n = 0; n < 4; n++) {
        words of[4];
        for (int i = 0; i < 4; i++) of[i] = _mm512_loadu_si512(rows[4 * n + i] + at);
        transpose_quarters(of, quarters[n]);
    }
    for (int i = 0; i < 4; i++) {
        const words a = _mm512_shuffle_i32x4(quarters[0][i], quarters[1][i], 0x44);
        const words b = _mm512_shuffle_i32x4(quarters[2][i], quarters[3][i], 0x44);
        const words c = _mm512_shuffle_i32x4(quarters[0][i], quarters[1][i], 0xee);
        const words d = _mm512_shuffle_i32x4(quarters[2][i], quarters[3][i], 0xee);
        out[i] = _mm512_shuffle_i32x4(a, b, 0x88), out[4 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
        out[8 + i] = _mm512_shuffle_i32x4(c, d, 0x88), out[12 + i] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
}
#else
#define STRIP 4
#define transpose_strip transpose
#endif

INLINE vec floats(words integers) { return (vec)WORDS(cvtepi32_ps)(integers); }

/* The numbers in the low halves of words, in float16. */
INLINE vec halves(words of) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(of));
#elif defined __F16C__
    of = AND(of, _mm256_set1_epi32(0xffff));
    return (vec)_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(of), _mm256_extracti128_si256(of, 1)));
#else
    vec values;
    for (int lane = 0; lane < LANES; lane++) values[lane] = half((const uint8_t *)((const int32_t *)&of + lane));
    return values;
#endif
}

/* 32 weights of each row, as words of 4 bytes of all rows: their low 4 bits or all 8, in Q5_K and Q6_K also the bits above.
 * In Q4_0 and Q4_1, the first 16 weights have the low halves of bytes. A weight is `by` times its bits, plus `from`. */
typedef struct {
    words low[BLOCK / 4], high[BLOCK / 4];
    vec by[2], from; /* by: of the first and the last 16 weights */
} Weights;

INLINE void load_block(int format, const uint8_t *const rows[LANES], int64_t at, Weights *out) {
    words heads[4];
    transpose(rows, at, heads);
    out->by[0] = out->by[1] = halves(heads[0]);
    out->from = format == Q4_1 ? halves(WORDS(srli_epi32)(heads[0], 16)) : (vec)(out->by[0] * each(-8));
    at += format == Q4_1 ? 4 : 2;
    transpose(rows, at, out->low);
    if (format == Q8_0) transpose(rows, at + 16, out->low + 4);
}

/* The scales and minimums of a part; as `scales_of`. */
INLINE void load_scales(int format, const uint8_t *const rows[LANES], int64_t at, int part, Weights *out) {
    words heads[4];
    transpose(rows, at + (format == Q6_K ? 192 : 0), heads);
    if (format == Q6_K) {
        words ends[4]; /* the scale of the block is their last number */
        transpose(rows, at + 194, ends);
        const vec scale = halves(WORDS(srli_epi32)(ends[3], 16));
        for (int i = 0; i < 2; i++) {
            const __m128i up = _mm_cvtsi32_si128(24 - 8 * ((2 * part + i) % 4));
            out->by[i] = scale * floats(WORDS(srai_epi32)(WORDS(sll_epi32)(heads[part / 2], up), 24));
        }
        return;
    }
    const __m128i down = _mm_cvtsi32_si128(8 * (part % 4));
    for (int i = 0; i < 3; i++) heads[i + 1] = WORDS(srl_epi32)(heads[i + 1], down);
    const int is_first = part < PARTS / 2;
    const words two_bits = WORDS(set1_epi32)(0x30);
    const words scales = is_first ? AND(heads[1], WORDS(set1_epi32)(63))
                                  : WORDS(add_epi32)(AND(heads[3], WORDS(set1_epi32)(15)), AND(WORDS(srli_epi32)(heads[1], 2), two_bits));
    const words leasts = is_first ? AND(heads[2], WORDS(set1_epi32)(63))
                                  : WORDS(add_epi32)(AND(WORDS(srli_epi32)(heads[3], 4), WORDS(set1_epi32)(15)),
                                                     AND(WORDS(srli_epi32)(heads[2], 2), two_bits));
    out->by[0] = out->by[1] = halves(heads[0]) * floats(scales);
    out->from = -(halves(WORDS(srli_epi32)(heads[0], 16)) * floats(leasts));
}

INLINE void load_large_part(int format, const uint8_t *const rows[LANES], int64_t at, int part, Weights *out) {
    const Bits bits = bits_of(format, part);
    load_scales(format, rows, at, part, out);
    for (int i = 0; i < 2; i++) {
        transpose(rows, at + bits.low + 16 * i, out->low + 4 * i);
        if (format != Q4_K) transpose(rows, at + bits.high + 16 * i, out->high + 4 * i);
    }
    const __m128i low_shift = _mm_cvtsi32_si128(bits.low_shift), high_shift = _mm_cvtsi32_si128(bits.high_shift);
    for (int word = 0; word < BLOCK / 4; word++) {
        out->low[word] = WORDS(srl_epi32)(out->low[word], low_shift);
        if (format != Q4_K) out->high[word] = WORDS(srl_epi32)(out->high[word], high_shift);
    }
}

INLINE void load_weights(int format, const uint8_t *const rows[LANES], int64_t first, Weights *out) {
    const int64_t at = bytes_of(format, first);
    if (format < Q4_K) load_block(format, rows, at, out);
    else load_large_part(format, rows, at, (int)(first % LARGE_BLOCK / BLOCK), out);
}

/* Weight i of each row. */
INLINE vec weight_at(int format, const Weights *weights, int i) {
    const vec by = weights->by[i / 16];
    if (format == Q8_0)
        return by * floats(WORDS(srai_epi32)(WORDS(slli_epi32)(weights->low[i / 4], 24 - i % 4 * 8), 24));
    const words four_bits = WORDS(set1_epi32)(15);
    if (format < Q4_K)
        return MULTIPLY_ADD(by, floats(AND(WORDS(srli_epi32)(weights->low[i % 16 / 4], i % 4 * 8 + i / 16 * 4), four_bits)), weights->from);
    words value = AND(WORDS(srli_epi32)(weights->low[i / 4], i % 4 * 8), four_bits);
    if (format != Q4_K) {
        const words bits = AND(WORDS(srli_epi32)(weights->high[i / 4], i % 4 * 8), WORDS(set1_epi32)(format == Q6_K ? 3 : 1));
        value = WORDS(add_epi32)(value, WORDS(slli_epi32)(bits, 4));
    }
    if (format == Q6_K) return by * floats(WORDS(sub_epi32)(value, WORDS(set1_epi32)(32)));
    return MULTIPLY_ADD(by, floats(value), weights->from);
}
#endif

/* `count` weights of each row at byte `at`, in float32. */
INLINE void fill_floats(const uint8_t *const rows[LANES], int64_t at, int count, vec (*to)[VECTORS]) {
    int i = 0;
#ifdef WORDS
    for (; i + STRIP <= count; i += STRIP) {
        words strip[STRIP];
        transpose_strip(rows, at + 4 * i, strip);
        for (int j = 0; j < STRIP; j++) to[i + j][0] = (vec)strip[j];
    }
#endif
    for (; i < count; i++)
        for (int lane = 0; lane < LANES; lane++) memcpy((float *)to[i] + lane, rows[lane] + at + 4 * i, 4);
}

/* `count` weights of each row at byte `at`, in bfloat16 or float16. */
INLINE void fill_halves(int format, const uint8_t *const rows[LANES], int64_t at, int count, vec (*to)[VECTORS]) {
    int i = 0;
#ifdef WORDS
    for (; i + 2 * STRIP <= count; i += 2 * STRIP) {
        words pairs[STRIP];
        transpose_strip(rows, at + 2 * i, pairs);
        for (int j = 0; j < STRIP; j++) {
            const words low = WORDS(slli_epi32)(pairs[j], 16), high = AND(pairs[j], WORDS(set1_epi32)((int)0xffff0000));
            to[i + 2 * j][0] = format == BFLOAT16 ? (vec)low : halves(pairs[j]);
            to[i + 2 * j + 1][0] = format == BFLOAT16 ? (vec)high : halves(WORDS(srli_epi32)(pairs[j], 16));
        }
    }
#endif
    for (; i < count; i++)
        for (int lane = 0; lane < LANES; lane++) unpack_part(format, rows[lane] + at, i, 1, (float *)to[i] + lane);
}

/* Fill a vector of a panel with the weights of `count` inputs from `first` on, a multiple of 32 for formats with blocks. */
INLINE void fill(int format, const uint8_t *const of_rows[LANES], int64_t first, int count, vec (*to)[VECTORS]) {
    const uint8_t *rows[LANES]; /* a copy, which no store changes */
    for (int lane = 0; lane < LANES; lane++) rows[lane] = of_rows[lane];
    if (format == FLOAT32) {
        fill_floats(rows, 4 * first, count, to);
        return;
    }
    if (format == BFLOAT16 || format == FLOAT16) {
        fill_halves(format, rows, 2 * first, count, to);
        return;
    }
    for (int i = 0; i < count; i += BLOCK) {
        const int64_t at = first + i;
#ifdef WORDS
        Weights weights;
        load_weights(format, rows, at, &weights);
#pragma GCC unroll 32
        for (int j = 0; j < BLOCK; j++) to[i + j][0] = weight_at(format, &weights, j);
#else
        float unpacked[BLOCK];
        for (int lane = 0; lane < LANES; lane++) {
            unpack_part(format, rows[lane], at, BLOCK, unpacked);
            for (int j = 0; j < BLOCK; j++) ((float *)to[i + j])[lane] = unpacked[j];
        }
#endif
    }
}

/* Weights of WIDE vectors of outputs and PART inputs: VECTORS vectors of each input, twice. */
typedef vec Panel[2][PART][VECTORS];

/* Add `count` inputs to the sums of `vectors` x `tokens`, or start their sums. w [count, vectors] are weights of a panel or,
 * `in_memory`, of a layer, whose rows are `stride` floats apart. */
INLINE void tile(int vectors, int tokens, int in_memory, int count, const float *x, int64_t inputs, const float *w,
                 int64_t stride, vec (*sums)[WIDE], int is_first) {
    vec of[TOKENS][WIDE];
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < vectors; v++) of[t][v] = is_first ? (vec){0} : sums[t][v];
    for (int i = 0; i < count; i++, w += stride) {
        vec weights[WIDE], values[TOKENS];
        for (int t = 0; t < tokens && vectors == WIDE; t++) values[t] = each(x[t * inputs + i]);
        for (int v = 0; v < vectors; v++) {
            const int64_t at = in_memory ? v : v / VECTORS * PART * VECTORS + v % VECTORS;
            weights[v] = ((const vec *)w)[at];
            if (in_memory) __builtin_prefetch(w + 16 * stride + v * LANES, 0, 3);
            IN_REGISTER(weights[v]);
            for (int t = 0; t < tokens && vectors == WIDE; t++) of[t][v] = MULTIPLY_ADD(weights[v], values[t], of[t][v]);
        }
        for (int t = 0; t < tokens && vectors != WIDE; t++) {
            values[t] = each(x[t * inputs + i]);
            IN_REGISTER(values[t]);
            for (int v = 0; v < vectors; v++) of[t][v] = MULTIPLY_ADD(weights[v], values[t], of[t][v]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < vectors; v++) sums[t][v] = of[t][v];
}

/* `tile` with constant sizes. */
#define OF(vectors, tokens) \
    case 16 * vectors + tokens: tile(vectors, tokens, IN_MEMORY, count, x, inputs, w, stride, sums, is_first); break;
#define OF_TWO(vectors) OF(vectors, 1) OF(vectors, 2)
#define OF_FOUR(vectors) OF_TWO(vectors) OF(vectors, 3) OF(vectors, 4)
#define OF_EIGHT(vectors) OF_FOUR(vectors) OF(vectors, 5) OF(vectors, 6) OF(vectors, 7) OF(vectors, 8)

static void add_tile(int vectors, int tokens, int count, const float *x, int64_t inputs, const float *w, vec (*sums)[WIDE],
                     int is_first) {
    const int64_t stride = VECTORS * LANES;
    switch (16 * vectors + tokens) {
#define IN_MEMORY 0
#if TOKENS == 8
        OF_EIGHT(1) OF_EIGHT(2) OF_EIGHT(3) OF_FOUR(6)
#else
        OF_FOUR(1) OF_FOUR(2) OF_FOUR(3) OF_TWO(6)
#endif
#undef IN_MEMORY
    }
}

static void start_in_memory(int vectors, int tokens, int count, const float *x, int64_t inputs, const float *w,
                            int64_t stride, vec (*sums)[WIDE]) {
    const int is_first = 1;
    switch (16 * vectors + tokens) {
#define IN_MEMORY 1
        OF_FOUR(1) OF_FOUR(2) OF_FOUR(3) OF_TWO(6)
#undef IN_MEMORY
    }
}

/* Arguments of a product. x [tokens, inputs], y [tokens, outputs], and b [outputs] or NULL are contiguous. Rows of weights
 * are `row_bytes` apart; they are outputs or, `by_inputs` (without blocks of weights), inputs. */
typedef struct {
    const float *x;
    const uint8_t *w;
    int64_t row_bytes;
    const float *b;
    float *y;
    int64_t tokens, inputs, outputs, by_inputs;
} Layer;

/* The product of at most MANY tokens and the weights of at most WIDE vectors of outputs. */
typedef struct {
    const Layer *layer;
    const float *x, *turned; /* [tokens, inputs]; for FEW tokens and rows of outputs in float32, also [inputs, tokens] */
    int tokens, outputs;
    const uint8_t *w, *rows[WIDE * LANES]; /* the last row may be there several times */
    const uint8_t *ahead, *ahead_end; /* bytes to prefetch */
    int64_t ahead_row, piece, pieces;
    Panel panel __attribute__((aligned(64)));
    vec sums[MANY][WIDE] __attribute__((aligned(64)));
} Product;

/* Weights are prefetched in the order of memory: a piece of all rows ahead, or all rows if they are short. */
static void next_piece(Product *product) {
    const int is_long = product->pieces > 1;
    if (++product->ahead_row >= (is_long ? product->outputs : 1)) {
        product->ahead_row = 0;
        product->piece++;
    }
    const int64_t row_bytes = product->layer->row_bytes, all = product->outputs * row_bytes;
    const int64_t size = is_long ? row_bytes / product->pieces : all;
    const int64_t at = product->piece < product->pieces ? product->piece * size : all; /* the rows of the next product */
    product->ahead = product->w + product->ahead_row * row_bytes + at;
    product->ahead_end = product->ahead + size;
}

INLINE void prefetch(Product *product, int64_t bytes) {
    for (; bytes > 0; bytes -= 64, product->ahead += 64) {
        if (product->ahead >= product->ahead_end) next_piece(product);
        __builtin_prefetch(product->ahead, 0, 2);
    }
}

/* Fill vectors [first, last) of the panel with inputs [from, from + count). */
INLINE void fill_panel(int format, Product *product, int first, int last, int64_t from, int count) {
    if (format > FLOAT16 || !product->layer->by_inputs) {
        for (int v = first; v < last; v++) {
            prefetch(product, LANES * bytes_of(format, count));
            fill(format, product->rows + v * LANES, from, count, (vec(*)[VECTORS]) & product->panel[v / VECTORS][0][v % VECTORS]);
        }
        return;
    }
    const int64_t stride = product->layer->row_bytes;
    const uint8_t *w = product->w + from * stride;
    for (int i = 0; i < count; i++, w += stride)
        for (int v = first; v < last; v++) {
            const int lanes = min(product->outputs - v * LANES, LANES);
            const uint8_t *row = w + bytes_of(format, v * LANES);
            float *to = (float *)&product->panel[v / VECTORS][i][v % VECTORS];
            __builtin_prefetch(row + 16 * stride, 0, 3);
            if (lanes == LANES) unpack_part(format, row, 0, LANES, to);
            else unpack_part(format, row, 0, lanes, to);
        }
}

/* Add inputs [from, to) to the sums of vectors [first, last), or start their sums. */
INLINE void add_inputs(int format, Product *product, int first, int last, int64_t from, int64_t to, int is_start) {
    const int64_t inputs = product->layer->inputs;
    for (int64_t at = from; at < to; at += PART) {
        const int count = min(to - at, PART), is_first = is_start && at == from;
        const float *x = product->x + at;
        fill_panel(format, product, first, last, at, count);
        const int is_wide = last - first == WIDE && product->tokens <= TOKENS / 2;
        for (int v = first, some; v < last; v += some) {
            some = is_wide ? WIDE : min(last - v, VECTORS - v % VECTORS);
            const float *w = (const float *)&product->panel[v / VECTORS][0][v % VECTORS];
            for (int t = 0; t < product->tokens; t += TOKENS)
                add_tile(some, min(product->tokens - t, TOKENS), count, x + t * inputs, inputs, w,
                         (vec(*)[WIDE]) & product->sums[t][v], is_first);
        }
    }
}

/* Start the sums of whole vectors over inputs [from, to) without a panel, for FEW tokens and rows of inputs in float32;
 * returns the number of these vectors. */
INLINE int start_rows(Product *product, int64_t from, int64_t to) {
    const Layer *layer = product->layer;
    const int whole = product->outputs / LANES, is_wide = whole == WIDE && product->tokens <= 2;
    for (int v = 0, some; v < whole; v += some) {
        some = is_wide ? WIDE : min(whole - v, VECTORS);
        const float *w = (const float *)(product->w + from * layer->row_bytes) + v * LANES;
        start_in_memory(some, product->tokens, (int)(to - from), product->x + from, layer->inputs, w, layer->row_bytes / 4,
                        (vec(*)[WIDE]) & product->sums[0][v]);
    }
    return whole;
}

/* For FEW tokens, a panel of weights in float32 would take longer than the product: they are transposed in registers. Start
 * the sums of 1 or 2 vectors with `count` inputs, x [count, tokens]; rows are `stride` bytes apart. */
#ifdef WORDS
INLINE void few(int vectors, int tokens, int64_t count, const float *x, const uint8_t *w, int64_t stride,
                vec (*sums)[WIDE]) {
    vec of[FEW][2];
    const uint8_t *fours[2][LANES / 4]; /* every fourth row */
    const int64_t three = 3 * stride;
    for (int v = 0; v < vectors; v++) {
        for (int t = 0; t < tokens; t++) of[t][v] = (vec){0};
        for (int n = 0; n < LANES / 4; n++) fours[v][n] = w + (v * LANES + 4 * n) * stride;
    }
    for (int64_t i = 0; i < count; i += STRIP) {
        words weights[2][STRIP];
        for (int v = 0; v < vectors; v++) {
            const uint8_t *rows[LANES];
            for (int n = 0; n < LANES / 4; n++) {
                rows[4 * n] = fours[v][n], rows[4 * n + 1] = fours[v][n] + stride;
                rows[4 * n + 2] = fours[v][n] + 2 * stride, rows[4 * n + 3] = fours[v][n] + three;
                fours[v][n] += 4 * STRIP;
            }
            transpose_strip(rows, 0, weights[v]);
        }
        for (int j = 0; j < STRIP; j++)
            for (int t = 0; t < tokens; t++) {
                const vec value = each(x[j * tokens + t]);
                for (int v = 0; v < vectors; v++) of[t][v] = MULTIPLY_ADD((vec)weights[v][j], value, of[t][v]);
            }
        x += STRIP * tokens;
    }
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < vectors; v++) sums[t][v] = of[t][v];
}

/* `few` with constant sizes. */
#define FEW_OF(vectors, tokens) \
    case 8 * vectors + tokens: few(vectors, tokens, count, x, w, stride, sums); break;
#define FEW_TOKENS(vectors) FEW_OF(vectors, 1) FEW_OF(vectors, 2) FEW_OF(vectors, 3) FEW_OF(vectors, 4)

static void start_few(int vectors, int tokens, int64_t count, const float *x, const uint8_t *w, int64_t stride,
                      vec (*sums)[WIDE]) {
    switch (8 * vectors + tokens) {
        FEW_TOKENS(1)
#if STRIP == 4
        FEW_TOKENS(2) /* as many registers as there are */
#endif
    }
}
#endif

/* The same by `few`, for rows of outputs. */
INLINE int start_columns(Product *product, int64_t from, int64_t to) {
    int done = 0;
#ifdef WORDS
    const int64_t count = (to - from) / STRIP * STRIP, row_bytes = product->layer->row_bytes;
    /* The first cache has 8 places for lines 4096 bytes apart. */
    const int whole = product->outputs / LANES, together = STRIP == 4 && row_bytes % 4096 ? 2 : 1;
    for (; count && done < whole; done = min(whole, done + together))
        start_few(min(whole - done, together), product->tokens, count, product->turned + from * product->tokens,
                  product->rows[done * LANES] + 4 * from, row_bytes, (vec(*)[WIDE]) & product->sums[0][done]);
    if (done && from + count < to) add_inputs(FLOAT32, product, 0, done, from + count, to, 0);
#else
    (void)product, (void)from, (void)to;
#endif
    return done;
}

/* For AS_UNPACKED tokens, weights in blocks are multiplied as they are unpacked. Start the sums of 1 or 2 vectors with inputs
 * [from, to), x [tokens, inputs]. */
#ifdef WORDS
INLINE void few_blocks(int format, int vectors, int tokens, Product *product, int64_t from, int64_t to, int first) {
    const int64_t inputs = product->layer->inputs;
    vec of[AS_UNPACKED][2];
    const uint8_t *rows[2][LANES]; /* a copy, which no store changes */
    for (int v = 0; v < vectors; v++) {
        for (int t = 0; t < tokens; t++) of[t][v] = (vec){0};
        memcpy(rows[v], product->rows + (first + v) * LANES, sizeof rows[v]);
    }
    for (int64_t at = from; at < to; at += BLOCK) {
        Weights weights[2];
        for (int v = 0; v < vectors; v++) {
            prefetch(product, LANES * bytes_of(format, at + BLOCK) - LANES * bytes_of(format, at));
            load_weights(format, rows[v], at, weights + v);
        }
        const float *x = product->x + at;
#pragma GCC unroll 32
        for (int i = 0; i < BLOCK; i++)
            for (int v = 0; v < vectors; v++) {
                const vec weight = weight_at(format, weights + v, i);
                for (int t = 0; t < tokens; t++) of[t][v] = MULTIPLY_ADD(weight, each(x[t * inputs + i]), of[t][v]);
            }
    }
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < vectors; v++) product->sums[t][first + v] = of[t][v];
}

#define FEW_BLOCKS(vectors, tokens) \
    case 8 * vectors + tokens: few_blocks(format, vectors, tokens, product, from, to, first); break;
#if LANES == 16
#define FEW_BLOCKS_TOKENS(vectors) \
    FEW_BLOCKS(vectors, 1) FEW_BLOCKS(vectors, 2) FEW_BLOCKS(vectors, 3) FEW_BLOCKS(vectors, 4)
#else
#define FEW_BLOCKS_TOKENS(vectors) FEW_BLOCKS(vectors, 1) FEW_BLOCKS(vectors, 2)
#endif
#endif

/* The same for all vectors; returns their number. */
INLINE int start_blocks(int format, Product *product, int64_t from, int64_t to, int vectors) {
    int first = 0;
#ifdef WORDS
    for (int some; first < vectors; first += some) {
        some = min(vectors - first, 2);
        switch (8 * some + product->tokens) { FEW_BLOCKS_TOKENS(1) FEW_BLOCKS_TOKENS(2) }
    }
#else
    (void)format, (void)product, (void)from, (void)to, (void)vectors;
#endif
    return first;
}

/* Add the sums of a block of inputs to y, and the bias after those of the last block. */
INLINE void add_sums(const Product *product, const float *b, float *y, int is_first) {
    for (int t = 0; t < product->tokens; t++, y += product->layer->outputs) {
        const float *sums = (const float *)product->sums[t];
        if (is_first) memcpy(y, sums, product->outputs * sizeof(float));
        else
            for (int i = 0; i < product->outputs; i++) y[i] += sums[i];
        if (b)
            for (int i = 0; i < product->outputs; i++) y[i] += b[i];
    }
}

/* The results of tokens [t, t + tokens) and outputs [o, o + outputs). */
INLINE void compute(int format, const Layer *layer, int64_t t, int tokens, int64_t o, int outputs, const float *turned) {
    Product product;
    product.layer = layer;
    product.x = layer->x + t * layer->inputs;
    product.turned = turned;
    product.tokens = tokens;
    product.outputs = outputs;
    product.w = layer->w + (layer->by_inputs ? bytes_of(format, o) : o * layer->row_bytes);
    const int vectors = (outputs + LANES - 1) / LANES;
    for (int row = 0; row < vectors * LANES; row++) product.rows[row] = product.w + min(row, outputs - 1) * layer->row_bytes;
    product.pieces = (layer->row_bytes + PIECE - 1) / PIECE;
    product.piece = 1;
    product.ahead_row = -1;
    product.ahead = product.ahead_end = 0;
    for (int64_t from = 0; from < layer->inputs; from += CHAIN) {
        const int64_t to = min(layer->inputs - from, CHAIN) + from;
        int done = 0;
        if (format == FLOAT32 && layer->by_inputs && tokens <= FEW) done = start_rows(&product, from, to);
        else if (format == FLOAT32 && turned) done = start_columns(&product, from, to);
        else if (format > FLOAT16 && tokens <= AS_UNPACKED) done = start_blocks(format, &product, from, to, vectors);
        if (done < vectors) add_inputs(format, &product, done, vectors, from, to, 1);
        add_sums(&product, layer->b && to == layer->inputs ? layer->b + o : 0, layer->y + t * layer->outputs + o, from == 0);
    }
}

static void compute_any(int format, const Layer *layer, int64_t t, int tokens, int64_t o, int outputs, const float *turned) {
#define COMPUTE(of) compute(of, layer, t, tokens, o, outputs, turned)
    FOR_FORMAT(COMPUTE)
}

/* For more tokens, up to MOST, weights in float32 are not transposed, either: a vector holds tokens, and each weight is read
 * once for `groups` of them. Compute the sums of some outputs over `count` inputs, x [count, groups]. */
INLINE void spread(int groups, int outputs, int64_t count, const vec *x, const float *w, int64_t stride,
                   vec (*sums)[GROUPS]) {
    vec of[SPREAD][GROUPS];
    for (int o = 0; o < outputs; o++)
        for (int g = 0; g < groups; g++) of[o][g] = (vec){0};
    for (int64_t i = 0; i < count; i++, x += groups) {
        vec values[GROUPS];
        for (int g = 0; g < groups; g++) {
            values[g] = x[g];
            IN_REGISTER(values[g]);
        }
        for (int o = 0; o < outputs; o++) {
            const vec weight = each(w[o * stride + i]);
            for (int g = 0; g < groups; g++) of[o][g] = MULTIPLY_ADD(values[g], weight, of[o][g]);
        }
    }
    for (int o = 0; o < outputs; o++)
        for (int g = 0; g < groups; g++) sums[o][g] = of[o][g];
}

/* `spread` with constant sizes. */
static void spread_sums(int groups, int outputs, int64_t count, const vec *x, const float *w, int64_t stride,
                        vec (*sums)[GROUPS]) {
    switch (16 * groups + outputs) {
        case 16 + 1: spread(1, 1, count, x, w, stride, sums); break;
        case 16 + 6: spread(1, 6, count, x, w, stride, sums); break;
        case 16 + 8: spread(1, 8, count, x, w, stride, sums); break;
        case 32 + 1: spread(2, 1, count, x, w, stride, sums); break;
        case 32 + 6: spread(2, 6, count, x, w, stride, sums); break;
    }
}

/* The results of outputs [start, stop) for all tokens, which `turn` has turned. */
static void spread_outputs(const Layer *layer, int64_t start, int64_t stop, const vec *turned) {
    const int64_t inputs = layer->inputs, stride = layer->row_bytes / 4;
    const int together = layer->tokens > LANES ? 6 : 8;
    for (int64_t o = start, some; o < stop; o += some) {
        some = stop - o >= together ? together : 1;
        const float *w = (const float *)layer->w + o * stride;
        const vec *x = turned;
        for (int64_t first = 0, count, groups; first < layer->tokens; first += count, x += inputs * groups) {
            count = min(layer->tokens - first, GROUPS * LANES);
            groups = (count + LANES - 1) / LANES;
            for (int64_t from = 0; from < inputs; from += CHAIN) {
                const int64_t to = min(inputs - from, CHAIN) + from;
                vec sums[SPREAD][GROUPS];
                spread_sums((int)groups, (int)some, to - from, x + from * groups, w + from, stride, sums);
                for (int64_t t = 0; t < count; t++)
                    for (int64_t i = 0; i < some; i++) {
                        float *result = layer->y + (first + t) * layer->outputs + o + i;
                        const float sum = ((const float *)sums[i])[t];
                        *result = from ? *result + sum : sum;
                        if (layer->b && to == inputs) *result += layer->b[o + i];
                    }
            }
        }
    }
}

/* x [inputs, tokens] from x [tokens, inputs], for FEW tokens. For more: [inputs, groups] of each GROUPS vectors of tokens,
 * in which the last token fills the lanes that are left. Returns NULL if memory cannot be allocated. */
static float *turn(int64_t tokens, int64_t inputs, const float *x) {
    float *turned = malloc((tokens <= FEW ? tokens : (tokens + LANES - 1) / LANES * LANES) * inputs * sizeof(float));
    if (!turned) return 0;
    if (tokens <= FEW) {
        for (int64_t i = 0; i < inputs; i++)
            for (int64_t t = 0; t < tokens; t++) turned[i * tokens + t] = x[t * inputs + i];
        return turned;
    }
    vec *to = (vec *)turned;
    for (int64_t first = 0, groups; first < tokens; first += GROUPS * LANES, to += inputs * groups) {
        groups = (min(tokens - first, GROUPS * LANES) + LANES - 1) / LANES;
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t *rows[LANES];
            for (int lane = 0; lane < LANES; lane++)
                rows[lane] = (const uint8_t *)(x + min(first + g * LANES + lane, tokens - 1) * inputs);
            vec part[BLOCK][VECTORS];
            for (int64_t i = 0; i < inputs; i += BLOCK) {
                const int count = min(inputs - i, BLOCK);
                fill_floats(rows, 4 * i, count, part);
                for (int j = 0; j < count; j++) to[(i + j) * groups + g] = part[j][0];
            }
        }
    }
    return turned;
}

/* The layer as in `Layer`, with weights of a format. Returns 1 if memory cannot be allocated. */
int linear(int format, const float *x, const uint8_t *w, int64_t row_bytes, const float *b, float *y, int64_t tokens,
           int64_t inputs, int64_t outputs, int by_inputs, int threads) {
    const Layer layer = {x, w, row_bytes, b, y, tokens, inputs, outputs, by_inputs};
    const int is_turned = format == FLOAT32 && !by_inputs && tokens <= MOST, is_spread = is_turned && tokens > FEW;
    float *copy = is_turned && tokens > 1 ? turn(tokens, inputs, x) : 0;
    if (is_turned && tokens > 1 && !copy) return 1;
    const float *turned = is_turned && tokens == 1 ? x : copy;
    if (tokens * inputs * outputs < SMALL) threads = 1;
#pragma omp parallel num_threads(threads)
    {
        int64_t thread = 0, all = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num(), all = omp_get_num_threads();
#endif
        /* Threads divide the outputs and, if there are too few for a panel of each thread, also many tokens. */
        const int64_t vectors = (outputs + LANES - 1) / LANES, panels = (vectors + WIDE - 1) / WIDE;
        int64_t parts = tokens > MOST && panels < all ? min((all + panels - 1) / panels, tokens / MOST) : 1;
        const int64_t columns = all / parts, part = thread / columns, column = thread % columns;
        const int64_t start = vectors * column / columns * LANES, end = vectors * (column + 1) / columns * LANES;
        const int64_t stop = end < outputs ? end : outputs;
        const int64_t last = part < parts ? tokens * (part + 1) / parts : 0;
        if (is_spread) spread_outputs(&layer, start, stop, (const vec *)turned);
        for (int64_t t = tokens * part / parts; t < last && !is_spread; t += MANY)
            for (int64_t o = start; o < stop; o += WIDE * LANES)
                compute_any(format, &layer, t, min(last - t, MANY), o, min(stop - o, WIDE * LANES), turned);
    }
    free(copy);
    return 0;
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
#define ROWS 6
#define SIMD(name) _mm512_##name
#define Q8_OFFSET 128
typedef __m512i bytes;
#else
#define COLUMNS 8
#define ROWS 4
#ifdef __AVX2__
#define SIMD(name) _mm256_##name
typedef __m256i bytes;
#endif
#if defined __AVX2__ && !defined __AVXVNNI__
#define ADDS_PAIRS /* in 16 bits, which the products with the absolute values of 8-bit weights fit */
#define Q8_OFFSET 0
#else
#define Q8_OFFSET 128
#endif
#endif
#define WIDTH 2 /* vectors of outputs and, at most, ROWS tokens of a tile, whose sums stay in registers */
#define QUADS (BLOCK / 4)
#define CHUNK 256 /* tokens whose inputs in 8 bits stay in the second cache */

/* Fused on x86-64 processors with FMA; on others, a product is rounded before it is added. */
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
    union { float sums[2]; int32_t starts[2]; } of; /* with minima: the sum of the inputs; others: where integer sums start */
} Input;

typedef struct {
    uint8_t values[QUADS][WIDTH][4 * COLUMNS];
    column_sums scales[WIDTH], others[WIDTH]; /* what is added to each weight or, in Q6_K, the scales of the last 16 */
} Columns;

INLINE int has_minima(int format) { return format == Q4_1 || format == Q4_K || format == Q5_K; }

/* Scales of a block of BLOCK weights. */
INLINE int scales_per_block(int format) { return format == Q6_K ? 2 : 1; }

/* The largest magnitude of a block, whose bits are compared as integers: NaN is the largest. */
INLINE float largest_of(const float *x) {
    union { int32_t bits; float value; } largest = {0};
    for (int i = 0; i < BLOCK; i++) {
        const int32_t bits = (int32_t)(((const float_bits *)x)[i] & 0x7fffffff);
        largest.bits = largest.bits > bits ? largest.bits : bits;
    }
    return largest.value;
}

/* Numbers of at most 127 rounded to integers, half to even: the last bits of a sum with 1.5 * 2^23. */
INLINE void round_all(const float *x, float by, int8_t *out) {
    float shifted[BLOCK];
    for (int i = 0; i < BLOCK; i++) shifted[i] = x[i] * by + 12582912.0f;
    for (int i = 0; i < BLOCK; i++) out[i] = (int8_t)((const float_bits *)shifted)[i];
}

INLINE int32_t sum_of(const int8_t *values, int count) {
    int32_t sum = 0;
    for (int i = 0; i < count; i++) sum += values[i];
    return sum;
}

INLINE void quantize_blocks(int format, const float *x, int64_t blocks, Input *out) {
    for (; blocks--; x += BLOCK, out++) {
        const float largest = largest_of(x);
        round_all(x, largest > 1e-30f ? 127.0f / largest : 0.0f, out->values);
        out->scale = largest / 127.0f;
        const int offset = format == Q6_K ? 32 : format == Q8_0 ? Q8_OFFSET : 8, part = BLOCK / scales_per_block(format);
        if (has_minima(format)) out->of.sums[0] = out->scale * (float)sum_of(out->values, BLOCK);
        else
            for (int i = 0; i < 2; i++) out->of.starts[i] = i * part < BLOCK ? -offset * sum_of(out->values + i * part, part) : 0;
    }
}

static void quantize(int format, const float *x, int64_t blocks, Input *out) {
#define QUANTIZE(of) quantize_blocks(of, x, blocks, out)
    FOR_FORMAT(QUANTIZE)
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

/* The numbers in float16 at byte `at` of each row. */
INLINE column_sums column_halves(const uint8_t *packed, const int32_t *offsets, int at) {
#if COLUMNS == 16
    uint16_t bits[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) memcpy(bits + c, packed + offsets[c] + at, 2);
#define BITS(n) (short)bits[n], (short)bits[n + 1], (short)bits[n + 2], (short)bits[n + 3]
    return (column_sums)_mm512_cvtph_ps(_mm256_setr_epi16(BITS(0), BITS(4), BITS(8), BITS(12)));
#elif defined SIMD && defined __F16C__
    uint16_t bits[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) memcpy(bits + c, packed + offsets[c] + at, 2);
    const __m128i halves = _mm_setr_epi16((short)bits[0], (short)bits[1], (short)bits[2], (short)bits[3], (short)bits[4],
                                          (short)bits[5], (short)bits[6], (short)bits[7]);
    return (column_sums)_mm256_cvtph_ps(halves);
#else
    column_sums values;
    for (int c = 0; c < COLUMNS; c++) values[c] = half(packed + offsets[c] + at);
    return values;
#endif
}

/* Unpack a block of each row as vector `at`; `offsets` are those of the rows, in bytes. */
INLINE void unpack_columns(int format, const uint8_t *packed, const int32_t *offsets, int at, Columns *out) {
    const uint8_t *integers = packed + (format == Q4_1 ? 4 : 2);
    out->scales[at] = column_halves(packed, offsets, 0);
    if (format == Q4_1) out->others[at] = column_halves(packed, offsets, 2);
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

/* What the parts of a block of 256 weights share: scales of the first and the last half of each part, minimums, and
 * interleaved bytes. Two parts share low bits. All share high bits; in Q6_K, four do. */
typedef struct {
    column_sums by[PARTS][2], from[PARTS];
#ifdef SIMD
    bytes low[2][QUADS], high[QUADS];
#endif
} LargeBlock;

/* The scales and minimums of a block of each row; as `scales_of`. */
INLINE void large_scales(int format, const uint8_t *packed, const int32_t *offsets, LargeBlock *out) {
#ifdef SIMD
    bytes heads[4];
    interleave(packed + (format == Q6_K ? 192 : 0), offsets, heads);
    const column_counts *words = (const column_counts *)heads;
    const column_sums scales = column_halves(packed, offsets, format == Q6_K ? 208 : 0);
    if (format == Q6_K) {
        for (int i = 0; i < 2 * PARTS; i++)
            out->by[i / 2][i % 2] = scales * __builtin_convertvector(words[i / 4] << (24 - i % 4 * 8) >> 24, column_sums);
        return;
    }
    const column_sums minima = column_halves(packed, offsets, 2);
    /* Four scales and four minimums have 6 bits each in two words, the next four bits in a third and the high bits of these. */
    const column_counts six = (column_counts)SIMD(set1_epi8)(0x3f), four = (column_counts)SIMD(set1_epi8)(0x0f), two = six ^ four;
    const column_counts of_scales[2] = {words[1] & six, (words[3] & four) | (words[1] >> 2 & two)};
    const column_counts of_minima[2] = {words[2] & six, (words[3] >> 4 & four) | (words[2] >> 2 & two)};
    for (int i = 0; i < PARTS; i++) {
        const int shift = i % 4 * 8;
        out->by[i][0] = scales * __builtin_convertvector(of_scales[i / 4] >> shift & 63, column_sums);
        out->from[i] = -(minima * __builtin_convertvector(of_minima[i / 4] >> shift & 63, column_sums));
    }
#else
    for (int c = 0; c < COLUMNS; c++)
        for (int i = 0; i < PARTS; i++) {
            const Scales scales = scales_of(format, packed + offsets[c], i);
            out->by[i][0][c] = scales.by[0], out->by[i][1][c] = scales.by[1], out->from[i][c] = -scales.from;
        }
#endif
}

/* The same as `unpack_columns` for a part of a block of 256 weights, after the parts before it. */
INLINE void unpack_large_columns(int format, const uint8_t *packed, const int32_t *offsets, int part, int at,
                                 LargeBlock *block, Columns *out) {
    if (part == 0) large_scales(format, packed, offsets, block);
    out->scales[at] = block->by[part][0];
    out->others[at] = format == Q6_K ? block->by[part][1] : block->from[part];
    const Bits bits = bits_of(format, part);
#ifdef SIMD
    bytes *low = block->low[format == Q6_K ? part % 2 : 0];
    const int is_new = format == Q6_K ? part % 4 < 2 : part % 2 == 0;
    for (int i = 0; i < 2 && is_new; i++) interleave(packed + bits.low + 16 * i, offsets, low + 4 * i);
    for (int i = 0; i < 2 && format != Q4_K && part % (format == Q6_K ? 4 : PARTS) == 0; i++)
        interleave(packed + bits.high + 16 * i, offsets, block->high + 4 * i);
    const __m128i low_shift = _mm_cvtsi32_si128(bits.low_shift), high_shift = _mm_cvtsi32_si128(bits.high_shift);
    const column_counts low_bits = (column_counts)SIMD(set1_epi8)(15), high_bits = (column_counts)SIMD(set1_epi8)(format == Q6_K ? 3 : 1);
    for (int q = 0; q < QUADS; q++) {
        column_counts values = (column_counts)SIMD(srl_epi32)(low[q], low_shift) & low_bits;
        if (format != Q4_K) values |= ((column_counts)SIMD(srl_epi32)(block->high[q], high_shift) & high_bits) << 4;
        *(bytes *)out->values[q][at] = (bytes)values;
    }
#else
    for (int c = 0; c < COLUMNS; c++)
        for (int i = 0; i < BLOCK; i++)
            out->values[i / 4][at][4 * c + i % 4] = (uint8_t)bits_at(format, packed + offsets[c], bits, i);
#endif
}

/* Quads whose sums of pairs fit in 16 bits: 2 n * 127 * (15, 31 or 63) <= 32767. */
INLINE int pairs_in_16_bits(int format) { return format == Q6_K ? 2 : format == Q5_K ? 4 : QUADS; }

/* Add the dot products of quads [first, last) of a block of `tokens` x `width` vectors to their counts. */
INLINE void dots(int format, int width, int tokens, int first, int last, int64_t blocks, const Columns *columns,
                 const Input *inputs, column_counts counts[WIDTH][ROWS]) {
#ifdef ADDS_PAIRS
    bytes pairs[WIDTH][ROWS];
    for (int v = 0; v < width; v++)
        for (int t = 0; t < tokens; t++) pairs[v][t] = _mm256_setzero_si256();
#endif
    for (int q = first; q < last; q++)
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
#elif !defined ADDS_PAIRS
                counts[v][t] = (column_counts)_mm256_dpbusd_avx_epi32((bytes)counts[v][t], weights, x);
#else
                const bytes ones = _mm256_set1_epi16(1);
                if (format == Q8_0) {
                    const bytes products = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
                    counts[v][t] += (column_counts)_mm256_madd_epi16(products, ones);
                } else {
                    pairs[v][t] = _mm256_add_epi16(pairs[v][t], _mm256_maddubs_epi16(weights, x));
                    if ((q + 1) % pairs_in_16_bits(format) == 0) {
                        counts[v][t] += (column_counts)_mm256_madd_epi16(pairs[v][t], ones);
                        pairs[v][t] = _mm256_setzero_si256();
                    }
                }
#endif
#endif
            }
        }
    (void)format;
}

/* Rows of weights. */
typedef struct {
    const uint8_t *packed;
    int32_t offsets[WIDTH][COLUMNS]; /* of the rows, in bytes */
    int64_t row_bytes;
} Packed;

/* Unpack BLOCK weights of `width` vectors of rows, and prefetch those of the next rows. `large` is kept from block to block. */
INLINE void next_columns(int format, int width, const Packed *rows, int64_t block, LargeBlock *large, Columns *out) {
    const int parts = format >= Q4_K ? PARTS : 1, size = block_bytes(format);
    const uint8_t *packed = rows->packed + block / parts * size;
    for (int v = 0; v < width; v++) {
        const uint8_t *next = rows->packed + WIDTH * COLUMNS * rows->row_bytes;
        next += COLUMNS * (v * rows->row_bytes + block * size / parts);
        for (int i = 0; i < COLUMNS * size / parts; i += 64) __builtin_prefetch(next + i);
        if (format >= Q4_K) unpack_large_columns(format, packed, rows->offsets[v], (int)(block % parts), v, large + v, out);
        else unpack_columns(format, packed, rows->offsets[v], v, out);
    }
}

/* The sums of `tokens` x `width` vectors, of which `count` outputs exist; `inputs` and `y` have strides of `blocks` and
 * `stride`. `columns` are the unpacked weights; NULL: they are unpacked from `rows` here, for the only tile of tokens. */
INLINE void columns_tile(int format, int width, int tokens, int64_t blocks, const Packed *rows, const Columns *columns,
                         const Input *inputs, const float *b, float *y, int64_t stride, int count) {
    const int parts = scales_per_block(format);
    column_sums sums[WIDTH][ROWS];
    for (int v = 0; v < width; v++)
        for (int t = 0; t < tokens; t++) sums[v][t] = (column_sums){0};
    LargeBlock large[WIDTH];
    for (int64_t block = 0; block < blocks; block++, inputs++) {
        Columns unpacked;
        const Columns *of_block = columns ? columns + block : &unpacked;
        if (!columns) next_columns(format, width, rows, block, large, &unpacked);
        for (int part = 0; part < parts; part++) {
            column_counts counts[WIDTH][ROWS];
            for (int t = 0; t < tokens; t++)
                for (int v = 0; v < width; v++)
                    counts[v][t] = (column_counts)(has_minima(format) ? (column_sums){0} : EACH(inputs[t * blocks].of.sums[part]));
            dots(format, width, tokens, QUADS / parts * part, QUADS / parts * (part + 1), blocks, of_block, inputs, counts);
            for (int t = 0; t < tokens; t++) {
                const column_sums scale = EACH(inputs[t * blocks].scale), sum = EACH(inputs[t * blocks].of.sums[0]);
                for (int v = 0; v < width; v++) {
                    const column_sums weight_scales = part ? of_block->others[v] : of_block->scales[v];
                    const column_sums products = weight_scales * __builtin_convertvector(counts[v][t], column_sums);
                    sums[v][t] = FUSED(products, scale, sums[v][t]);
                    if (has_minima(format)) sums[v][t] = FUSED(of_block->others[v], sum, sums[v][t]);
                }
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
    case n: columns_tile(format, width, n, blocks, rows, columns, inputs, b, y, stride, count); break;

/* At most ROWS tokens. */
INLINE void columns_some(int format, int width, int tokens, int64_t blocks, const Packed *rows, const Columns *columns,
                         const Input *inputs, const float *b, float *y, int64_t stride, int count) {
    switch (tokens) {
        OF_TOKENS(1) OF_TOKENS(2) OF_TOKENS(3) OF_TOKENS(4)
#if ROWS == 6
        OF_TOKENS(5) OF_TOKENS(6)
#endif
    }
}

INLINE void columns_tokens(int format, int width, int64_t tokens, int64_t blocks, const Packed *rows, Columns *columns,
                           const Input *inputs, const float *b, float *y, int64_t stride, int count) {
    if (tokens <= ROWS) {
        columns_some(format, width, (int)tokens, blocks, rows, NULL, inputs, b, y, stride, count);
        return;
    }
    LargeBlock large[WIDTH];
    for (int64_t block = 0; block < blocks; block++) next_columns(format, width, rows, block, large, columns + block);
    for (; tokens > 0; tokens -= ROWS, inputs += ROWS * blocks, y += ROWS * stride)
        columns_some(format, width, min(tokens, ROWS), blocks, rows, columns, inputs, b, y, stride, count);
}

/* Whether WIDTH vectors are computed together. For few tokens, weights are unpacked as they are multiplied, which needs the
 * registers. So does Q6_K with its two scales, if there are only 16 registers. */
INLINE int fits_wide(int format, int64_t tokens) { return tokens > ROWS && (COLUMNS == 16 || format != Q6_K); }

/* The results [tokens, count] of `count` rows of weights at w. */
INLINE void columns_group(int format, int64_t tokens, int64_t blocks, const uint8_t *w, int64_t row_bytes, int count,
                          Columns *columns, const Input *inputs, const float *b, float *y, int64_t stride) {
    const int is_wide = count > COLUMNS && fits_wide(format, tokens);
    for (int done = 0; done < count; done += is_wide ? WIDTH * COLUMNS : COLUMNS) {
        const int left = count - done;
        const float *bias = b ? b + done : 0;
        Packed rows = {w + done * row_bytes, {{0}}, row_bytes};
        for (int c = 0; c < WIDTH * COLUMNS; c++)
            rows.offsets[c / COLUMNS][c % COLUMNS] = (int32_t)(min(c, left - 1) * row_bytes);
        if (is_wide) columns_tokens(format, WIDTH, tokens, blocks, &rows, columns, inputs, bias, y + done, stride, left);
        else columns_tokens(format, 1, tokens, blocks, &rows, columns, inputs, bias, y + done, stride, left);
    }
}

/* `linear` with inputs in 8 bits, for formats with blocks. */
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
                switch (format) { GROUP_OF(Q4_0) GROUP_OF(Q4_1) GROUP_OF(Q8_0) GROUP_OF(Q4_K) GROUP_OF(Q5_K) GROUP_OF(Q6_K) }
            }
        }
        free(columns);
    }
    free(quantized);
    return failed;
}
