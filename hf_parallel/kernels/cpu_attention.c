/* Attention of query rows to all blocks of keys that they see, in float32, with the same bits whatever the schedule: one
 * call per layer.
 *
 * The keys that a row sees are cut into tiles of TILE keys at fixed positions of the row. The result of a tile is
 * computed from its keys alone, in one order; the results of tiles are merged in the order of their positions (Hydragen,
 * eq. 5). So a row's result does not depend on where blocks begin, which rows share them, how many queries a pass has, or
 * the number of threads. A tile that lies in one block is read once for all rows that see it (Hydragen, section 3.2).
 * The first tile of a block may begin in earlier blocks: it is computed for the rows that share all of these.
 *
 * Where many rows see a block, vectors hold rows, so that a multiply-add computes one row per lane. Tiles of rows share
 * tiles of keys, and skip those that none of their rows sees. For a block of few rows, such as a completion's own, vectors
 * hold keys, then dimensions. If there are few tiles of rows, threads compute different tiles of keys. Queries, keys and
 * values may be in half precision; tiles of keys are converted where they are used. C with GCC's vector types.
 *
 * Every multiply-add is explicit, and the compiler may fuse no others (`-ffp-contract=off`): two loops that compute the
 * same must round alike.
 */

#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined __AVX__
#include <immintrin.h>
#endif

#if defined __AVX512F__ /* vectors as wide as the machine's: the compiler keeps wider ones in memory */
#define LANES 16
#define ACCUMULATORS 24 /* vectors that stay in registers */
#elif defined __AVX__
#define LANES 8
#define ACCUMULATORS 12
#else
#define LANES 4
#define ACCUMULATORS 24
#endif
#define TILE 64  /* keys per tile: scores of a tile stay in the first-level cache */
#define SPAN 48  /* rows per tile */
#define WIDEST (SPAN / LANES) /* vectors of rows per tile */
#define SHARING 4 /* tiles of rows per task, which share tiles of keys */
#define MOST 8   /* keys or dimensions that are computed together */
#define TOGETHER(width) ((width) * MOST <= ACCUMULATORS ? MOST : (width) * 4 <= ACCUMULATORS ? 4 : 2)
#define NARROW (LANES / 2) /* rows per block up to which vectors hold keys and dimensions */
#define SHORT 8  /* lanes of keys or dimensions; the head size is a multiple */
#define ROUNDED (LANES > SHORT ? LANES : SHORT) /* keys of few rows, whose vectors have either size */
#define CHAINS 8 /* of the sum of a tile's weights: key i is added to chain i % CHAINS */
#define LEAST_PART 4 /* tiles of keys per task */
#define HIDDEN (-1e30f) /* score of a hidden key: finite, since exp(-inf + inf) is NaN */
#define LOG2E 1.44269504f
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef float shortvec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef int32_t shortivec __attribute__((vector_size(32)));
typedef uint32_t float_bits __attribute__((may_alias));

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE vec splat(float x) { return x - (vec){0}; }

/* a * b + sum, rounded once where the processor can, and everywhere alike. */
#if defined __AVX512F__
#define MULTIPLY_ADD(a, b, sum) ((vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(sum)))
#elif defined __FMA__
#define MULTIPLY_ADD(a, b, sum) ((vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(sum)))
#else
#define MULTIPLY_ADD(a, b, sum) ((a) * (b) + (sum))
#endif
#if defined __FMA__
#define SHORT_MULTIPLY_ADD(a, b, sum) ((shortvec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(sum)))
#else
#define SHORT_MULTIPLY_ADD(a, b, sum) ((a) * (b) + (sum))
#endif

INLINE shortvec short_splat(float x) { return x - (shortvec){0}; }

/* a > b ? a : b in each lane; b if one of them is NaN. */
INLINE vec larger(vec a, vec b) {
#if defined __AVX512F__
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined __AVX__
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    ivec a_wins = a > b;
    return (vec)(((ivec)a & a_wins) | ((ivec)b & ~a_wins));
#endif
}

INLINE float highest_lane(vec x) {
#if defined __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float highest = x[0];
    for (int lane = 1; lane < LANES; lane++) highest = x[lane] > highest ? x[lane] : highest;
    return highest;
#endif
}

/* 2^x for x <= 0, to about one unit in the last position; flushes to zero below -126, and keeps NaN. Scores are in
 * units of log 2, which saves a multiplication for each. */
INLINE vec exp2_nonpositive(vec x) {
    x = larger(splat(-127.0f), x); /* keeps NaN */
#if defined __AVX512F__
    const vec n = (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const vec magic = splat(12582912.0f), shifted = x + magic; /* 1.5 * 2^23: adding it rounds to an integer */
    const vec n = shifted - magic;
#endif
    const vec r = x - n;
    vec p = splat(0.0001535336196f);
    p = MULTIPLY_ADD(p, r, splat(0.001339887385f));
    p = MULTIPLY_ADD(p, r, splat(0.009618436918f));
    p = MULTIPLY_ADD(p, r, splat(0.05550332367f));
    p = MULTIPLY_ADD(p, r, splat(0.2402264774f));
    p = MULTIPLY_ADD(p, r, splat(0.6931471825f));
    p = MULTIPLY_ADD(p, r, splat(1.0f));
#if defined __AVX512F__
    return (vec)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_NLT_UQ), (__m512)p,
                                       (__m512)n);
#else
    return (vec)((((ivec)shifted << 23) + (ivec)p) & ~(x < splat(-126.0f)));
#endif
}

/* tanh(x) by Cephes' polynomial for small x, by an exponential for others. */
INLINE vec tanh_of(vec x) {
    const vec magnitude = larger(x, -x), square = x * x;
    vec p = splat(-5.70498872745e-3f);
    p = MULTIPLY_ADD(p, square, splat(2.06390887954e-2f));
    p = MULTIPLY_ADD(p, square, splat(-5.37397155531e-2f));
    p = MULTIPLY_ADD(p, square, splat(1.33314422036e-1f));
    p = MULTIPLY_ADD(p, square, splat(-3.33332819422e-1f));
    const vec near = MULTIPLY_ADD(p * square, x, x);
    const vec decay = exp2_nonpositive(magnitude * splat(-2.0f * LOG2E));
    const vec far = (splat(1.0f) - decay) / (splat(1.0f) + decay);
    const ivec is_near = magnitude < splat(0.625f), sign = (ivec)x & (ivec)splat(-0.0f);
    return (vec)(((ivec)near & is_near) | (((ivec)far | sign) & ~is_near));
}

/* cap * tanh(score / cap) for `count` vectors of scores in units of log 2. */
INLINE void cap_scores(float cap, int count, vec *scores) {
    const vec most = splat(cap * LOG2E), inverse = splat(1.0f / (cap * LOG2E));
    for (int i = 0; i < count; i++) scores[i] = most * tanh_of(scores[i] * inverse);
}

/* Formats of keys and values, by the numbers of `native.py`. */
enum { FLOAT32, BFLOAT16, FLOAT16, INT8, FLOAT8 };

/* to[dim] = a vector in 16 bits; `dim` is a multiple of SHORT. */
INLINE void widen(int64_t format, const uint16_t *from, int64_t dim, float *to) {
    if (format == BFLOAT16)
        for (int64_t d = 0; d < dim; d++) ((float_bits *)to)[d] = (uint32_t)from[d] << 16;
    else
        for (int64_t d = 0; d < dim; d += SHORT)
#if defined __F16C__
            *(shortvec *)(to + d) = (shortvec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + d)));
#else
            for (int64_t i = d; i < d + SHORT; i++) { /* moves exponent and mantissa to their places; 2^112 corrects it */
                const union { uint32_t bits; float value; } x = {(uint32_t)(from[i] & 0x7fff) << 13};
                to[i] = (from[i] & 0x8000 ? -0x1p112f : 0x1p112f) * x.value;
            }
#endif
}

/* Keys and values of a layer, [rows][..] each. With leads, each key begins with `lead` numbers of `values`, and the
 * values are the others, `keys`. */
typedef struct {
    const uint8_t *keys, *values;
    const float *scales;                             /* [rows][2]: of formats in 8 bits */
    int64_t format;
} Storage;

/* Numbers in 32 bits are read in place. */
INLINE const float *unpack(const Storage *storage, int which, int64_t row, int count, int64_t dim, float *to) {
    const int64_t format = storage->format;
    const uint8_t *from = which ? storage->values : storage->keys;
    if (format == FLOAT32) return (const float *)from + row * dim;
    if (format == BFLOAT16 || format == FLOAT16) {
        const uint16_t *halves = (const uint16_t *)from + row * dim;
        widen(format, halves, count * dim, to);
        return to;
    }
    float *out = to;
    from += row * dim;
    for (int j = 0; j < count; j++, from += dim, out += dim) {
        const float scale = storage->scales[(row + j) * 2 + which];
        if (format == FLOAT8) { /* moves exponent and mantissa to their places; 2^120 corrects the exponent */
            const float factor = scale * 0x1p60f;
            for (int64_t d = 0; d < dim; d++) {
                const union { uint32_t bits; float value; } x = {(from[d] & 0x80u) << 24 | (from[d] & 0x7fu) << 20};
                out[d] = x.value * 0x1p60f * factor;
            }
        } else
            for (int64_t d = 0; d < dim; d++) out[d] = (float)(int8_t)from[d] * scale;
    }
    return to;
}

/* Pieces of keys, one after another: their first row in the storage, of one KV head. */
typedef struct {
    const Storage *storage;
    int64_t row, count;
} Piece;

/* Keys and values of a block for one KV head, counted from the start of the tile in which it begins: `before` keys of
 * that tile, in `pieces`, belong to earlier blocks. */
typedef struct {
    const Piece *pieces;
    int64_t before, lead, dim;
    float softcap;
    Piece own;
} Block;

/* `count` keys, and their values. `ahead`: keys and values (or leads) of the next tile in the storage. */
typedef struct {
    const float *leads, *keys, *values;
    int64_t lead, dim;
    const uint8_t *ahead[2];
    int64_t bytes[2];                                /* of a key and a value */
    float softcap;                                   /* of scores, 0: none */
} Tile;

/* Prefetches every `parts`th line of `count` keys and values from `first` on of the next tile. */
INLINE void prefetch(const Tile *tile, int first, int count, int64_t part, int64_t parts) {
    for (int which = 0; which < 2; which++) {
        const uint8_t *from = tile->ahead[which] + first * tile->bytes[which];
        const int64_t bytes = count * tile->bytes[which];
        for (int64_t i = 64 * part; i < bytes; i += 64 * parts) __builtin_prefetch(from + i, 0, 2);
    }
}

/* Numbers of a tile that is not read in place. */
INLINE int64_t room_of(const Block *block) {
    const int is_in_place = block->own.storage->format == FLOAT32 && !block->before;
    return is_in_place ? 1 : TILE * (2 * block->dim + block->lead);
}

/* Copies the keys (`which` 0) or values (1) of the first tile, from the pieces before the block and its own. */
static void gather(const Block *block, int which, int count, int64_t dim, float *to) {
    int64_t copied = 0;
    for (const Piece *piece = block->pieces; copied < count; piece++) {
        const int is_own = copied == block->before;
        const Piece *from = is_own ? &block->own : piece;
        const int part = (int)(is_own ? count - copied : smaller(piece->count, count - copied));
        const float *unpacked = unpack(from->storage, which, from->row, part, dim, to + copied * dim);
        if (unpacked != to + copied * dim) memcpy(to + copied * dim, unpacked, sizeof(float) * part * dim);
        copied += part;
    }
}

/* The tile that begins with key `start`, a multiple of TILE. */
INLINE Tile tile_of(const Block *block, int64_t start, int count, float *room) {
    const Storage *storage = block->own.storage;
    const int64_t dim = block->dim, lead = block->lead, other_dim = lead ? lead : dim;
    const int64_t row = block->own.row + start - block->before;
    const float *keys = room, *others = room + TILE * dim;
    if (start < block->before) {
        gather(block, 0, count, dim, room);
        gather(block, 1, count, other_dim, room + TILE * dim);
    } else {
        keys = unpack(storage, 0, row, count, dim, room);
        others = unpack(storage, 1, row, count, other_dim, room + TILE * dim);
    }
    const int64_t size = storage->format == FLOAT32 ? 4 : storage->format < INT8 ? 2 : 1;
    const int64_t key_bytes = size * dim, other_bytes = size * other_dim;
    return (Tile){others, keys, lead ? keys : others, lead, dim,
                  {storage->keys + (row + count) * key_bytes, storage->values + (row + count) * other_bytes},
                  {key_bytes, other_bytes}, block->softcap};
}

/* The result of a row for some keys, unnormalized: sums of values weighted by 2^(score - best), and of the weights.
 * Results are merged by `new = larger(best, best2)`: each sum becomes sum2 * 2^(best2 - new) + sum * 2^(best - new).
 *
 * A tile of rows has them as vectors: sums [dim][width], then `best` [width] and totals [width]. */

/* acc[j] += sum_d keys[j][d] * qt[d] */
INLINE void add_products(int width, int count, const vec *qt, const float *keys, int64_t dim, vec (*acc)[WIDEST]) {
    for (int64_t d = 0; d < dim; d++)
        for (int j = 0; j < count; j++) {
            vec k = splat(keys[j * dim + d]);
            for (int w = 0; w < width; w++) acc[j][w] = MULTIPLY_ADD(k, qt[d * width + w], acc[j][w]);
        }
}

/* Scores of `count` (at most MOST) keys with all rows. */
INLINE void score(int width, int count, const vec *qt, const Tile *tile, int first, vec *scores) {
    vec acc[MOST][WIDEST];
    for (int j = 0; j < count; j++)
        for (int w = 0; w < width; w++) acc[j][w] = splat(0.0f);
    add_products(width, count, qt, tile->leads + first * tile->lead, tile->lead, acc);
    add_products(width, count, qt + tile->lead * width, tile->keys + first * tile->dim, tile->dim, acc);
    for (int j = 0; j < count; j++)
        for (int w = 0; w < width; w++) scores[(first + j) * width + w] = acc[j][w];
}

/* A tile of rows: queries qt [lead + dim][width], and their result. */
typedef struct {
    vec *qt, *result;
    ivec lo[WIDEST], hi[WIDEST];                     /* keys visible to each row */
    int32_t least_lo, most_lo, least_hi, most_hi;
} Rows;

/* Hides the keys of a tile outside the rows' bounds. A row that sees no key of the tile gets a result for which `best` is
 * HIDDEN, which has no weight in a merge, and which gets none as soon as the row sees a key. */
INLINE void hide(int width, int64_t start, int count, const Rows *rows, vec *scores) {
    const vec hidden = splat(HIDDEN);
    for (int i = 0; i < count; i++)
        for (int w = 0; w < width; w++) {
            const int32_t key = (int32_t)(start + i);
            ivec seen = (rows->lo[w] <= key) & (rows->hi[w] > key);
            scores[i * width + w] = (vec)(((ivec)scores[i * width + w] & seen) | ((ivec)hidden & ~seen));
        }
}

/* Sets `best` to the larger one, and the factors of both results. */
INLINE void weights_of(vec *best, vec best2, vec *factor, vec *factor2) {
    const vec peak = larger(*best, best2);
    *factor = exp2_nonpositive(*best - peak);
    *factor2 = exp2_nonpositive(best2 - peak);
    *best = peak;
}

/* Merges the result of `count` keys from `start` on into that of the rows, or replaces it. */
INLINE void attend_tile(int width, const Rows *rows, const Tile *tile, int64_t start, int count, int replaces) {
    const int together = TOGETHER(width);
    const int64_t dim = tile->dim;
    const float *v = tile->values;
    vec scores[TILE * WIDEST], peaks[WIDEST], sums[CHAINS][WIDEST], factors[WIDEST], factors2[WIDEST];
    vec *results = rows->result, *best = results + dim * width, *total = best + width;
    int j = 0;
    for (; j + together <= count; j += together) {
        prefetch(tile, j, together, 0, 1);
        score(width, together, rows->qt, tile, j, scores);
    }
    for (; j < count; j++) score(width, 1, rows->qt, tile, j, scores);
    if (tile->softcap) cap_scores(tile->softcap, count * width, scores);
    if (start < rows->most_lo || start + count > rows->least_hi) hide(width, start, count, rows, scores);

    for (int w = 0; w < width; w++) peaks[w] = splat(HIDDEN);
    for (int i = 0; i < count; i++)
        for (int w = 0; w < width; w++) peaks[w] = larger(scores[i * width + w], peaks[w]);
    for (int c = 0; c < CHAINS; c++)
        for (int w = 0; w < width; w++) sums[c][w] = splat(0.0f);
    for (int i = 0; i < count; i++)
        for (int w = 0; w < width; w++) {
            vec p = exp2_nonpositive(scores[i * width + w] - peaks[w]);
            scores[i * width + w] = p;
            sums[i % CHAINS][w] += p;
        }
    for (int pairs = CHAINS / 2; pairs; pairs /= 2)
        for (int c = 0; c < pairs; c++)
            for (int w = 0; w < width; w++) sums[c][w] = sums[2 * c][w] + sums[2 * c + 1][w];
    for (int w = 0; w < width; w++)
        if (replaces) best[w] = peaks[w], total[w] = sums[0][w];
        else {
            weights_of(best + w, peaks[w], factors + w, factors2 + w);
            total[w] = MULTIPLY_ADD(sums[0][w], factors2[w], total[w] * factors[w]);
        }

    for (int64_t d = 0; d < dim; d += together) {
        vec acc[MOST][WIDEST];
        for (int u = 0; u < together; u++)
            for (int w = 0; w < width; w++) acc[u][w] = splat(0.0f);
        for (int i = 0; i < count; i++)
            for (int u = 0; u < together; u++) {
                vec x = splat(v[i * dim + d + u]);
                for (int w = 0; w < width; w++) acc[u][w] = MULTIPLY_ADD(x, scores[i * width + w], acc[u][w]);
            }
        for (int u = 0; u < together; u++)
            for (int w = 0; w < width; w++) {
                vec *sum = results + (d + u) * width + w;
                *sum = replaces ? acc[u][w] : MULTIPLY_ADD(acc[u][w], factors2[w], *sum * factors[w]);
            }
    }
}

/* `attend_tile`, compiled for each width. */
static void attend_width(int width, const Rows *rows, const Tile *tile, int64_t start, int count, int replaces) {
#define OF(n) case n: attend_tile(n, rows, tile, start, count, replaces); break;
    switch (width) {
        OF(1) OF(2) OF(3)
#if WIDEST > 3
        OF(4) OF(5) OF(6)
#endif
#if WIDEST > 6
        OF(7) OF(8) OF(9) OF(10) OF(11) OF(12)
#endif
    }
#undef OF
}

/* The blocks and pairs of a pass, as laid out by `native.py`. Blocks are in the order in which their results are merged:
 * a row sees at most one block of each level. Keys are counted as in `Block`. */
typedef struct {
    int64_t levels;
    const int64_t *level_blocks;                     /* [levels + 1] first blocks */
    const int64_t *row, *stride, *quantized;         /* [blocks] of the first own key; from KV head to KV head; in 8 bits */
    const int64_t *before;                           /* [blocks] */
    const int64_t *first_piece, *first_pair;         /* [blocks + 1] */
    const int64_t *pieces;                           /* [pieces][4]: row, stride, quantized, number of keys */
    const int64_t *query, *lo, *hi;                  /* [pairs] a query, and the keys that it sees: lo <= key < hi */
    const float *cos, *sin;                          /* [pairs][half] rotations, NULL: none */
    int64_t half, interleaved;
} Plan;

/* Arguments of a layer. With leads, there is one KV head. */
typedef struct {
    const void *query;                               /* [T][heads][lead + dim] in the format of the keys, by strides */
    int64_t query_token, query_head;
    float *out, *best, *total;                       /* [T][heads][dim], [T][heads] twice: results, at the end normalized */
    const float *sinks;                              /* [heads] logits, NULL: none */
    Storage storage, quantized;
    int64_t tokens, heads, kv_heads, lead, dim;
    float scale, softcap;                            /* softcap 0: none */
} Layer;

/* A task: some tiles of rows of a block and KV head, over tiles of keys. */
typedef struct {
    int64_t block, head, first_row, tiles;           /* `tiles` of rows; 0: few rows, in vectors of keys */
    int64_t start, stop;                             /* keys */
    int64_t result;                                  /* where results of its tiles of keys are stored, -1: merged at once */
} Task;

INLINE Piece piece_of(const Layer *layer, const int64_t *piece, int64_t head) {
    return (Piece){piece[2] ? &layer->quantized : &layer->storage, piece[0] + head * piece[1], piece[3]};
}

/* The block of a task; `pieces`: room for TILE of them. */
INLINE Block block_of(const Layer *layer, const Plan *plan, const Task *task, Piece *pieces) {
    const int64_t block = task->block;
    const int64_t own[] = {plan->row[block], plan->stride[block], plan->quantized[block], 0};
    int count = 0;
    for (int64_t i = plan->first_piece[block]; i < plan->first_piece[block + 1]; i++)
        pieces[count++] = piece_of(layer, plan->pieces + 4 * i, task->head);
    return (Block){pieces, plan->before[block], layer->lead, layer->dim, layer->softcap, piece_of(layer, own, task->head)};
}

/* Rows of a block: its pairs, times the heads of a group. Returns where the results of one are in `out`, as a row. */
INLINE int64_t pair_of(const Layer *layer, const Plan *plan, int64_t block, int64_t row) {
    return plan->first_pair[block] + row / (layer->heads / layer->kv_heads);
}

INLINE int64_t result_row(const Layer *layer, const Plan *plan, const Task *task, int64_t row) {
    const int64_t groups = layer->heads / layer->kv_heads;
    return plan->query[pair_of(layer, plan, task->block, row)] * layer->heads + task->head * groups + row % groups;
}

/* Writes the query of a row, rotated and scaled, to to[d * stride]. */
static void load_query(const Layer *layer, const Plan *plan, const Task *task, int64_t row, float *to, int64_t stride) {
    const int64_t dim = layer->lead + layer->dim, format = layer->storage.format;
    const int64_t pair = pair_of(layer, plan, task->block, row), at = result_row(layer, plan, task, row);
    const int64_t from = at / layer->heads * layer->query_token + at % layer->heads * layer->query_head;
    float room[dim];
    const float *q = (const float *)layer->query + from, scale = layer->scale * LOG2E;
    if (format != FLOAT32) widen(format, (const uint16_t *)layer->query + from, dim, room), q = room;
    int64_t d = 0;
    if (plan->cos) {
        const float *cos = plan->cos + pair * plan->half, *sin = plan->sin + pair * plan->half;
        for (int64_t i = 0; i < plan->half; i++) {
            const int64_t one = plan->interleaved ? 2 * i : i, other = plan->interleaved ? one + 1 : i + plan->half;
            to[one * stride] = (q[one] * cos[i] - q[other] * sin[i]) * scale;
            to[other * stride] = (q[other] * cos[i] + q[one] * sin[i]) * scale;
        }
        d = 2 * plan->half;
    }
    for (; d < dim; d++) to[d * stride] = q[d] * scale;
}

/* Many rows: vectors of rows. */

static int width_of(int64_t rows) { return (int)smaller((rows + LANES - 1) / LANES, WIDEST); }

INLINE int64_t rows_of(const Layer *layer, const Plan *plan, int64_t block) {
    return (plan->first_pair[block + 1] - plan->first_pair[block]) * (layer->heads / layer->kv_heads);
}

/* Loads the queries of a tile of rows, zero-padded, and the bounds of the keys that they see. */
static void load_rows(const Layer *layer, const Plan *plan, const Task *task, int64_t first, int64_t count, int width,
                      Rows *rows) {
    const int64_t span = (int64_t)width * LANES;
    int32_t *lo = (int32_t *)rows->lo, *hi = (int32_t *)rows->hi;
    rows->least_lo = rows->least_hi = INT32_MAX, rows->most_lo = rows->most_hi = 0;
    for (int64_t r = 0; r < span; r++) {
        lo[r] = 0, hi[r] = INT32_MAX;
        if (r >= count) {
            for (int64_t d = 0; d < layer->lead + layer->dim; d++) ((float *)rows->qt)[d * span + r] = 0.0f;
            continue;
        }
        load_query(layer, plan, task, first + r, (float *)rows->qt + r, span);
        const int64_t pair = pair_of(layer, plan, task->block, first + r);
        lo[r] = (int32_t)plan->lo[pair], hi[r] = (int32_t)plan->hi[pair];
        if (lo[r] < rows->least_lo) rows->least_lo = lo[r];
        if (lo[r] > rows->most_lo) rows->most_lo = lo[r];
        if (hi[r] < rows->least_hi) rows->least_hi = hi[r];
        if (hi[r] > rows->most_hi) rows->most_hi = hi[r];
    }
}

static void clear_result(int64_t dim, int width, vec *result) {
    memset(result, 0, sizeof(vec) * (dim + 2) * width);
    for (int w = 0; w < width; w++) result[dim * width + w] = splat(HIDDEN);
}

/* Reads the results of `count` rows so far. */
static void load_results(const Layer *layer, const Plan *plan, const Task *task, int64_t first, int64_t count, int width,
                         vec *result) {
    const int64_t dim = layer->dim, span = (int64_t)width * LANES;
    clear_result(dim, width, result);
    float *sums = (float *)result;
    for (int64_t r = 0; r < count; r++) {
        const int64_t at = result_row(layer, plan, task, first + r);
        for (int64_t d = 0; d < dim; d++) sums[d * span + r] = layer->out[at * dim + d];
        sums[dim * span + r] = layer->best[at];
        sums[(dim + 1) * span + r] = layer->total[at];
    }
}

static void store_results(const Layer *layer, const Plan *plan, const Task *task, int64_t first, int64_t count, int width,
                          const vec *result) {
    const int64_t dim = layer->dim, span = (int64_t)width * LANES;
    const float *sums = (const float *)result;
    for (int64_t r = 0; r < count; r++) {
        const int64_t at = result_row(layer, plan, task, first + r);
        for (int64_t d = 0; d < dim; d++) layer->out[at * dim + d] = sums[d * span + r];
        layer->best[at] = sums[dim * span + r];
        layer->total[at] = sums[(dim + 1) * span + r];
    }
}

/* Merges the result of a tile of keys. */
static void merge_vectors(int64_t dim, int width, vec *result, const vec *result2) {
    vec *best = result + dim * width, *total = best + width;
    const vec *best2 = result2 + dim * width, *total2 = best2 + width;
    for (int w = 0; w < width; w++) {
        vec factor, factor2;
        weights_of(best + w, best2[w], &factor, &factor2);
        total[w] = MULTIPLY_ADD(total2[w], factor2, total[w] * factor);
        for (int64_t d = 0; d < dim; d++)
            result[d * width + w] = MULTIPLY_ADD(result2[d * width + w], factor2, result[d * width + w] * factor);
    }
}

/* Where the results of a task's rows are: the task before has left them in the thread's memory, or no task has computed some,
 * or they are in `out`. And where they go: to the task after it, or to `out`. */
typedef struct {
    int continues, is_first, is_continued;
} Course;

/* A task of many rows. Results of tiles of keys that are not merged at once: `results`, [tiles of keys][tiles of rows]. */
static void attend_many(const Layer *layer, const Plan *plan, const Task *task, Course course, vec *memory, vec *results) {
    const int64_t dim = layer->dim, all = rows_of(layer, plan, task->block), span = width_of(all) * LANES;
    const int width = width_of(all), tiles = (int)task->tiles;
    const int64_t size = (dim + 2) * width, query_size = (layer->lead + dim) * width;
    Piece pieces[TILE];
    const Block block = block_of(layer, plan, task, pieces);
    float room[room_of(&block)];
    Rows rows[SHARING];
    int64_t begin = task->stop, stop = task->start;
    for (int t = 0; t < tiles; t++, memory += size + query_size) {
        const int64_t first = task->first_row + t * span, count = smaller(all - first, span);
        rows[t].qt = memory, rows[t].result = memory + query_size;
        load_rows(layer, plan, task, first, count, width, rows + t);
        if (task->result >= 0 || course.is_first) clear_result(dim, width, rows[t].result);
        else if (!course.continues) load_results(layer, plan, task, first, count, width, rows[t].result);
        if (rows[t].least_lo < begin) begin = rows[t].least_lo;
        if (rows[t].most_hi > stop) stop = rows[t].most_hi;
    }
    begin = (task->result < 0 && begin > task->start ? begin : task->start) / TILE * TILE;
    if (task->result >= 0 || stop > task->stop) stop = task->stop;
    for (int64_t start = begin; start < stop; start += TILE) {
        const int count = (int)smaller(stop - start, TILE);
        const Tile tile = tile_of(&block, start, count, room);
        for (int t = 0; t < tiles; t++) {
            const int64_t seen = rows[t].most_hi - start; /* rounded up to keys that are computed together */
            const int is_seen = seen > 0 && rows[t].least_lo < start + count;
            const int computed = (int)smaller(count, (seen + MOST - 1) / MOST * MOST);
            if (task->result >= 0) {
                rows[t].result = results + (start / TILE * tiles + t) * size;
                if (is_seen) attend_width(width, rows + t, &tile, start, computed, 1);
                else clear_result(dim, width, rows[t].result);
            } else if (is_seen) attend_width(width, rows + t, &tile, start, computed, 0);
        }
    }
    for (int t = 0; t < tiles && task->result < 0 && !course.is_continued; t++) {
        const int64_t first = task->first_row + t * span;
        store_results(layer, plan, task, first, smaller(all - first, span), width, rows[t].result);
    }
}

/* Few rows: vectors of keys for the scores, and of dimensions for the values. */

#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (shortivec){__VA_ARGS__})

/* The first four numbers of two keys. */
INLINE shortvec fours(const float *a, const float *b) {
#if defined __AVX__
    return (shortvec)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
#else
    return (shortvec){a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]};
#endif
}

/* Turns SHORT keys of SHORT dimensions into SHORT dimensions of SHORT keys, `stride` apart. */
INLINE void turn(const float *const *keys, float *to, int64_t stride) {
    for (int d = 0; d < SHORT; d += 4) {
        shortvec of[4], pairs[4];
        for (int i = 0; i < 4; i++) of[i] = fours(keys[i] + d, keys[i + 4] + d);
        for (int i = 0; i < 4; i += 2) {
            pairs[i] = SHUFFLE(of[i], of[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
            pairs[i + 1] = SHUFFLE(of[i], of[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
        }
        for (int i = 0; i < 2; i++) {
            *(shortvec *)(to + (d + 2 * i) * stride) = SHUFFLE(pairs[i], pairs[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            *(shortvec *)(to + (d + 2 * i + 1) * stride) = SHUFFLE(pairs[i], pairs[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
}

/* scores[0 .. groups * SHORT] += sum over `dims` dimensions of q[d] * turned[d] */
INLINE void add_turned(int groups, const float *q, const float *turned, int64_t dims, float *scores) {
    shortvec acc[TILE / SHORT];
    for (int g = 0; g < groups; g++) acc[g] = *(shortvec *)(scores + g * SHORT);
    for (int64_t d = 0; d < dims; d++) {
        const shortvec x = short_splat(q[d]);
        for (int g = 0; g < groups; g++)
            acc[g] = SHORT_MULTIPLY_ADD(*(const shortvec *)(turned + d * TILE + g * SHORT), x, acc[g]);
    }
    for (int g = 0; g < groups; g++) *(shortvec *)(scores + g * SHORT) = acc[g];
}

static void add_groups(int groups, const float *q, const float *turned, int64_t dims, float *scores) {
#define OF(n) case n: add_turned(n, q, turned, dims, scores); break;
    switch (groups) { OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) }
#undef OF
}

/* Adds the products of `rows` queries, `query_dim` apart, with `dim` dimensions of `count` keys to their scores. Prefetches
 * the tile after `tile`, unless it is NULL. */
static void score_few(int64_t rows, const float *q, int64_t query_dim, const float *keys, int64_t dim, int count,
                      const Tile *tile, float (*scores)[TILE]) {
    float turned[TILE * TILE] __attribute__((aligned(64)));
    const int groups = (count + SHORT - 1) / SHORT;
    for (int64_t from = 0; from < dim; from += TILE) {
        const int64_t dims = smaller(dim - from, TILE);
        for (int g = 0; g < groups; g++) {
            const float *of[SHORT]; /* the last keys are repeated, and hidden later */
            for (int i = 0; i < SHORT; i++) of[i] = keys + smaller(g * SHORT + i, count - 1) * dim + from;
            if (tile && !from) prefetch(tile, g * SHORT, SHORT, 0, 1);
            for (int64_t d = 0; d < dims; d += SHORT) {
                turn(of, turned + d * TILE + g * SHORT, TILE);
                for (int i = 0; i < SHORT; i++) of[i] += SHORT;
            }
        }
        for (int64_t r = 0; r < rows; r++) add_groups(groups, q + r * query_dim + from, turned, dims, scores[r]);
    }
}

/* Turns scores of `count` keys, a multiple of ROUNDED, into weights 2^(score - best), in place. Returns their sum. */
INLINE float weigh(float *scores, int count, float *best) {
    vec highest = splat(HIDDEN);
    for (int j = 0; j < count; j += LANES) highest = larger(*(vec *)(scores + j), highest);
    *best = highest_lane(highest);
    for (int j = 0; j < count; j += LANES) *(vec *)(scores + j) = exp2_nonpositive(*(vec *)(scores + j) - splat(*best));
    shortvec sum = {0};
    for (int j = 0; j < count; j += SHORT) sum += *(shortvec *)(scores + j);
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

/* sums[0 .. width * SHORT] = sum over keys of weight * value */
INLINE void add_values(int width, const float *weights, const float *values, int count, int64_t dim, float *sums) {
    shortvec acc[8];
    for (int w = 0; w < width; w++) acc[w] = (shortvec){0};
    for (int j = 0; j < count; j++) {
        const shortvec weight = short_splat(weights[j]);
        for (int w = 0; w < width; w++)
            acc[w] = SHORT_MULTIPLY_ADD(*(const shortvec *)(values + j * dim + w * SHORT), weight, acc[w]);
    }
    for (int w = 0; w < width; w++) *(shortvec *)(sums + w * SHORT) = acc[w];
}

/* Results of few rows: [rows][dim + 2] of sums, best and total. */

static void clear_few(int64_t dim, int64_t rows, float *results) {
    memset(results, 0, sizeof(float) * (dim + 2) * rows);
    for (int64_t r = 0; r < rows; r++) results[r * (dim + 2) + dim] = HIDDEN;
}

static void load_few(const Layer *layer, const Plan *plan, const Task *task, int64_t rows, float *results) {
    const int64_t dim = layer->dim;
    for (int64_t r = 0; r < rows; r++, results += dim + 2) {
        const int64_t at = result_row(layer, plan, task, r);
        memcpy(results, layer->out + at * dim, sizeof(float) * dim);
        results[dim] = layer->best[at], results[dim + 1] = layer->total[at];
    }
}

static void store_few(const Layer *layer, const Plan *plan, const Task *task, int64_t rows, const float *results) {
    const int64_t dim = layer->dim;
    for (int64_t r = 0; r < rows; r++, results += dim + 2) {
        const int64_t at = result_row(layer, plan, task, r);
        memcpy(layer->out + at * dim, results, sizeof(float) * dim);
        layer->best[at] = results[dim], layer->total[at] = results[dim + 1];
    }
}

/* Merges the result of a tile of keys. */
static void merge_few(int64_t dim, int64_t rows, float *results, const float *results2) {
    for (int64_t r = 0; r < rows; r++, results += dim + 2, results2 += dim + 2) {
        vec best = splat(results[dim]), factor, factor2;
        weights_of(&best, splat(results2[dim]), &factor, &factor2);
        const vec total = MULTIPLY_ADD(splat(results2[dim + 1]), factor2, splat(results[dim + 1]) * factor);
        const shortvec by = short_splat(factor[0]), by2 = short_splat(factor2[0]);
        for (int64_t d = 0; d < dim; d += SHORT) {
            shortvec *sum = (shortvec *)(results + d);
            *sum = SHORT_MULTIPLY_ADD(*(const shortvec *)(results2 + d), by2, *sum * by);
        }
        results[dim] = best[0], results[dim + 1] = total[0];
    }
}

/* A task of few rows. Results of tiles of keys that are not merged at once: `stored`, [tiles of keys]; others: `results`. */
static void attend_few(const Layer *layer, const Plan *plan, const Task *task, Course course, float *results, float *stored) {
    const int64_t lead = layer->lead, dim = layer->dim, query_dim = lead + dim;
    const int64_t rows = rows_of(layer, plan, task->block), size = rows * (dim + 2);
    Piece pieces[TILE];
    const Block block = block_of(layer, plan, task, pieces);
    float q[rows * query_dim] __attribute__((aligned(64))), room[room_of(&block)], of_tile[size];
    float scores[rows][TILE] __attribute__((aligned(64)));
    int64_t lo[rows], hi[rows], begin = task->stop, stop = task->start;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t pair = pair_of(layer, plan, task->block, r);
        load_query(layer, plan, task, r, q + r * query_dim, 1);
        lo[r] = plan->lo[pair], hi[r] = plan->hi[pair];
        if (lo[r] < begin) begin = lo[r];
        if (hi[r] > stop) stop = hi[r];
    }
    if (task->result < 0 && course.is_first) clear_few(dim, rows, results);
    else if (task->result < 0 && !course.continues) load_few(layer, plan, task, rows, results);
    begin = (task->result < 0 && begin > task->start ? begin : task->start) / TILE * TILE;
    if (task->result >= 0 || stop > task->stop) stop = task->stop;
    for (int64_t start = begin; start < stop; start += TILE) {
        const int count = (int)smaller(stop - start, TILE), rounded = (count + ROUNDED - 1) / ROUNDED * ROUNDED;
        const Tile tile = tile_of(&block, start, count, room);
        float *tile_results = task->result < 0 ? of_tile : stored + start / TILE * size;
        memset(scores, 0, sizeof scores);
        score_few(rows, q, query_dim, tile.leads, lead, count, NULL, scores);
        score_few(rows, q + lead, query_dim, tile.keys, dim, count, &tile, scores);
        for (int64_t r = 0; r < rows; r++) {
            float *result = tile_results + r * (dim + 2);
            if (tile.softcap) cap_scores(tile.softcap, rounded / LANES, (vec *)scores[r]);
            for (int64_t j = 0; j < smaller(lo[r] - start, count); j++) scores[r][j] = HIDDEN;
            for (int64_t j = hi[r] > start ? smaller(hi[r] - start, count) : 0; j < rounded; j++) scores[r][j] = HIDDEN;
            result[dim + 1] = weigh(scores[r], rounded, result + dim);
            int64_t d = 0;
            for (; d + 8 * SHORT <= dim; d += 8 * SHORT) add_values(8, scores[r], tile.values + d, count, dim, result + d);
            for (; d < dim; d += SHORT) add_values(1, scores[r], tile.values + d, count, dim, result + d);
        }
        if (task->result < 0) merge_few(dim, rows, results, of_tile);
    }
    if (task->result < 0 && !course.is_continued) store_few(layer, plan, task, rows, results);
}

/* Merges the results of tiles of keys, in order, with those of earlier blocks. `task` is the first of its rows. */
static void merge_tiles(const Layer *layer, const Plan *plan, const Task *task, int64_t num_tiles, int is_first,
                        vec *memory, const vec *results) {
    const int64_t dim = layer->dim, all = rows_of(layer, plan, task->block);
    if (!task->tiles) {
        const int64_t size = all * (dim + 2);
        float *sums = (float *)memory;
        if (is_first) clear_few(dim, all, sums);
        else load_few(layer, plan, task, all, sums);
        for (int64_t i = 0; i < num_tiles; i++) merge_few(dim, all, sums, (const float *)results + i * size);
        store_few(layer, plan, task, all, sums);
        return;
    }
    const int width = width_of(all);
    const int64_t size = (dim + 2) * width, span = (int64_t)width * LANES;
    for (int64_t t = 0; t < task->tiles; t++) {
        const int64_t first = task->first_row + t * span, count = smaller(all - first, span);
        if (is_first) clear_result(dim, width, memory);
        else load_results(layer, plan, task, first, count, width, memory);
        for (int64_t i = 0; i < num_tiles; i++) merge_vectors(dim, width, memory, results + (i * task->tiles + t) * size);
        store_results(layer, plan, task, first, count, width, memory);
    }
}

static pthread_key_t scratch;
static pthread_once_t is_scratch_made = PTHREAD_ONCE_INIT;

static void make_scratch(void) { pthread_key_create(&scratch, free); }

/* Scratch memory of `size` vectors, kept between calls: page faults would cost more than the computation. It is freed when
 * its thread ends. */
static vec *workspace(int64_t size) {
    static _Thread_local vec *memory;
    static _Thread_local int64_t capacity;
    if (size > capacity) {
        pthread_once(&is_scratch_made, make_scratch);
        free(memory);
        memory = aligned_alloc(64, (sizeof(vec) * size + 63) / 64 * 64);
        capacity = memory ? size : 0;
        pthread_setspecific(scratch, memory);
    }
    return memory;
}

INLINE int64_t keys_of(const Plan *plan, int64_t block) {
    int64_t end = 0;
    for (int64_t pair = plan->first_pair[block]; pair < plan->first_pair[block + 1]; pair++)
        if (plan->hi[pair] > end) end = plan->hi[pair];
    return end;
}

/* The tasks of a pass, and vectors of results of tiles of keys, at most in a level. */
typedef struct {
    int64_t tasks, results;
} Size;

/* Most stored results of tiles of keys, in vectors: 64 MiB. Blocks that would need more are not divided. */
#define MOST_RESULTS ((64 << 20) / (int64_t)sizeof(vec))

/* Divides the blocks of a level: about four tasks for each thread. Tiles of rows share tiles of keys if there are enough;
 * otherwise the tiles of keys of a block become several tasks, whose results are stored and merged in order later. Writes the
 * tasks, unless `tasks` is NULL. */
static Size divide(const Layer *layer, const Plan *plan, int64_t level, int threads, Task *tasks) {
    Size size = {0, 0};
    int64_t units = 0, work = 0;
    for (int64_t block = plan->level_blocks[level]; block < plan->level_blocks[level + 1]; block++) {
        const int64_t rows = rows_of(layer, plan, block), tiles = (rows + SPAN - 1) / SPAN;
        units += layer->kv_heads * tiles;
        work += layer->kv_heads * tiles * ((keys_of(plan, block) + TILE - 1) / TILE);
    }
    const int64_t most = threads == 1 ? SHARING : units / (4 * threads);
    const int64_t sharing = most < 1 ? 1 : smaller(most, SHARING);
    const int64_t share = threads == 1 || units >= 4 * threads ? INT64_MAX : work / (4 * threads) + 1; /* tiles per task */
    const int64_t part = share < LEAST_PART ? LEAST_PART : share;
    for (int64_t block = plan->level_blocks[level]; block < plan->level_blocks[level + 1]; block++) {
        const int64_t rows = rows_of(layer, plan, block), tiles = (rows + SPAN - 1) / SPAN, keys = keys_of(plan, block);
        const int64_t key_tiles = (keys + TILE - 1) / TILE, is_few = rows <= NARROW;
        const int64_t of_head = is_few ? rows * (layer->dim + 2) / LANES + 1 : (layer->dim + 2) * width_of(rows) * tiles;
        const int64_t is_whole = part >= key_tiles || size.results + layer->kv_heads * key_tiles * of_head > MOST_RESULTS;
        const int64_t parts = is_whole ? 1 : (key_tiles + part - 1) / part;
        const int64_t each = (key_tiles + parts - 1) / parts * TILE;
        for (int64_t head = 0; head < layer->kv_heads; head++)
            for (int64_t tile = 0; tile < tiles; tile += sharing) {
                const int64_t shared = smaller(sharing, tiles - tile);
                const int64_t vectors = is_few ? rows * (layer->dim + 2) / LANES + 1 : (layer->dim + 2) * width_of(rows) * shared;
                for (int64_t start = 0; start < keys; start += each, size.tasks++)
                    if (tasks)
                        tasks[size.tasks] = (Task){block, head, tile * SPAN, is_few ? 0 : shared, start,
                                                   smaller(start + each, keys), parts > 1 ? size.results : -1};
                if (parts > 1) size.results += key_tiles * vectors;
            }
    }
    return size;
}

/* Whether the tasks of a level have the rows of those of another one, which a thread may therefore compute one after the
 * other: so do blocks of which the same rows see one after the other, such as those of workers who see each other. */
static int have_same_rows(const Plan *plan, const Task *tasks, const Task *others, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const Task *task = tasks + i, *other = others + i;
        if (task->result >= 0 || other->result >= 0) return 0;
        if (task->head != other->head || task->first_row != other->first_row || task->tiles != other->tiles) return 0;
        const int64_t first = plan->first_pair[task->block], pairs = plan->first_pair[task->block + 1] - first;
        const int64_t of_other = plan->first_pair[other->block];
        if (pairs != plan->first_pair[other->block + 1] - of_other) return 0;
        if (memcmp(plan->query + first, plan->query + of_other, pairs * sizeof(int64_t))) return 0;
    }
    return 1;
}

/* The first level after `level` whose tasks do not have the same rows. */
static int64_t end_of_course(const Plan *plan, const Task *tasks, const int64_t *first_tasks, int64_t level) {
    const int64_t count = first_tasks[level + 1] - first_tasks[level];
    int64_t next = level + 1;
    while (next < plan->levels && first_tasks[next + 1] - first_tasks[next] == count &&
           have_same_rows(plan, tasks + first_tasks[level], tasks + first_tasks[next], count))
        next++;
    return next;
}

/* Attention of all queries to all blocks of a plan. dim and lead are multiples of SHORT. Returns 0, or 1 if memory ran out. */
int attend(const Layer *layer, const Plan *plan, int threads) {
    const int64_t dim = layer->dim, rows = layer->tokens * layer->heads;
    const int64_t per_thread = SHARING * WIDEST * (layer->lead + 2 * dim + 2);
    int64_t num_tasks = 0, num_results = 0, first_tasks[plan->levels + 1];
    for (int64_t level = 0; level < plan->levels; level++) {
        const Size size = divide(layer, plan, level, threads, NULL);
        first_tasks[level] = num_tasks;
        num_tasks += size.tasks;
        if (size.results > num_results) num_results = size.results;
    }
    first_tasks[plan->levels] = num_tasks;
    const int64_t for_tasks = num_tasks * sizeof(Task) / sizeof(vec) + 1;
    vec *memory = workspace(for_tasks + threads * per_thread + num_results);
    if (!memory) return 1;
    Task *tasks = (Task *)memory;
    vec *of_threads = memory + for_tasks, *results = of_threads + threads * per_thread;
    for (int64_t level = 0; level < plan->levels; level++) divide(layer, plan, level, threads, tasks + first_tasks[level]);
    const int is_first = plan->levels == 1 && !layer->sinks; /* rows have no results yet */
    if (!is_first) {
        memset(layer->out, 0, sizeof(float) * rows * dim);
        for (int64_t row = 0; row < rows; row++) {
            layer->best[row] = layer->sinks ? layer->sinks[row % layer->heads] * LOG2E : HIDDEN;
            layer->total[row] = layer->sinks ? 1.0f : 0.0f;
        }
    }

#pragma omp parallel num_threads(threads)
    {
        vec *own = of_threads + omp_get_thread_num() * per_thread;
        for (int64_t level = 0, next; level < plan->levels; level = next) {
            const int64_t first = first_tasks[level], end = first_tasks[level + 1], chunk = (end - first) / (32 * threads) + 1;
            next = end_of_course(plan, tasks, first_tasks, level);
            int are_stored = 0;
            for (int64_t i = first; i < end; i++) are_stored |= tasks[i].result >= 0;
#pragma omp for schedule(dynamic, chunk)
            for (int64_t i = end - 1; i >= first; i--) /* the last rows of a causal run first: they see most */
                for (int64_t of = level; of < next; of++) {
                    const Task *task = tasks + first_tasks[of] + i - first;
                    const Course course = {of > level, is_first, of + 1 < next};
                    if (task->tiles) attend_many(layer, plan, task, course, own, results + task->result);
                    else attend_few(layer, plan, task, course, (float *)own, (float *)(results + task->result));
                }
            if (!are_stored) continue;
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = first; i < end; i++) {
                if (tasks[i].result < 0 || tasks[i].start) continue;
                const int64_t tiles = (keys_of(plan, tasks[i].block) + TILE - 1) / TILE;
                merge_tiles(layer, plan, tasks + i, tiles, is_first, own, results + tasks[i].result);
            }
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const float weight = 1.0f / layer->total[row];
            float *out = layer->out + row * dim;
            for (int64_t d = 0; d < dim; d++) out[d] *= weight;
        }
    }
    return 0;
}

/* `attend` for a layer like `template`, at other addresses, for another number of tokens. */
int attend_layer(const Layer *template, const float *query, int64_t query_token, int64_t query_head, float *out, float *best,
                 float *total, const void *keys, const void *values, int64_t tokens, const Plan *plan, int threads) {
    Layer layer = *template;
    layer.query = query;
    layer.query_token = query_token;
    layer.query_head = query_head;
    layer.out = out;
    layer.best = best;
    layer.total = total;
    layer.storage.keys = keys;
    layer.storage.values = values;
    layer.tokens = tokens;
    return attend(&layer, plan, threads);
}
