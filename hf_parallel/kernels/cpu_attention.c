/* Attention of query rows to all blocks of keys that they see, summed in float32, merged: one call per layer.
 *
 * Rows that see the same block are in adjacent vector lanes, so that each key and value is read once for all of them
 * and a multiply-add computes one row per lane (Hydragen, section 3.2). Tiles of rows share tiles of keys, and skip
 * those that none of their rows sees, such as the keys after a causal run. If there are few tiles of rows, threads
 * compute different parts of the block. For a block of few rows, such as a completion's own, the lanes hold dimensions
 * instead. Softmax is online over tiles of keys; all partial results are merged exactly (Hydragen, eq. 5). Queries, keys
 * and values may be in half precision; tiles of keys are converted where they are used. C with GCC's vector types.
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
#define NARROW (LANES / 2) /* rows per block up to which the lanes hold dimensions */
#define SHORT 8  /* lanes of dimensions; the head size is a multiple */
#define HIDDEN (-1e30f) /* score of a hidden key: finite, since exp(-inf + inf) is NaN */
#define LOG2E 1.44269504f
#define LN2 0.693147181f
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef float shortvec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef int32_t shortivec __attribute__((vector_size(32)));

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE vec splat(float x) { return x - (vec){0}; }

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

INLINE int any_larger(vec a, vec b) {
#if defined __AVX512F__
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#elif defined __AVX__
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0;
#else
    ivec is_larger = a > b;
    int any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= is_larger[lane];
    return any;
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
    p = p * r + splat(0.001339887385f);
    p = p * r + splat(0.009618436918f);
    p = p * r + splat(0.05550332367f);
    p = p * r + splat(0.2402264774f);
    p = p * r + splat(0.6931471825f);
    p = p * r + splat(1.0f);
#if defined __AVX512F__
    return (vec)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_NLT_UQ), (__m512)p,
                                       (__m512)n);
#else
    return (vec)((((ivec)shifted << 23) + (ivec)p) & ~(x < splat(-126.0f)));
#endif
}

/* Formats of keys and values, by the numbers of `native.py`. */
enum { FLOAT32, BFLOAT16, FLOAT16, INT8, FLOAT8 };

/* to[dim] = a vector in 16 bits; `dim` is a multiple of SHORT. */
INLINE void widen(int64_t format, const uint16_t *from, int64_t dim, float *to) {
    if (format == BFLOAT16)
        for (int64_t d = 0; d < dim; d++) ((uint32_t *)to)[d] = (uint32_t)from[d] << 16;
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

/* Keys and values of a block: its first row in the storage. */
typedef struct {
    const Storage *storage;
    int64_t row, lead, dim;
} Block;

/* `count` keys from `start` on, and their values. `ahead`: keys and values (or leads) of the next tile in the storage. */
typedef struct {
    const float *leads, *keys, *values;
    int64_t lead, dim;
    const uint8_t *ahead[2];
    int64_t bytes[2];                                /* of a key and a value */
} Tile;

/* Prefetches every `parts`th line of `count` keys and values from `first` on of the next tile. */
INLINE void prefetch(const Tile *tile, int first, int count, int64_t part, int64_t parts) {
    for (int which = 0; which < 2; which++) {
        const uint8_t *from = tile->ahead[which] + first * tile->bytes[which];
        const int64_t bytes = count * tile->bytes[which];
        for (int64_t i = 64 * part; i < bytes; i += 64 * parts) __builtin_prefetch(from + i, 0, 2);
    }
}

INLINE int64_t room_of(const Block *block) {
    return block->storage->format == FLOAT32 ? 1 : TILE * (2 * block->dim + block->lead);
}

INLINE Tile tile_of(const Block *block, int64_t start, int count, float *room) {
    const int64_t dim = block->dim, lead = block->lead, row = block->row + start;
    const float *keys = unpack(block->storage, 0, row, count, dim, room);
    const float *others = unpack(block->storage, 1, row, count, lead ? lead : dim, room + TILE * dim);
    const int64_t size = block->storage->format == FLOAT32 ? 4 : block->storage->format < INT8 ? 2 : 1;
    const int64_t key_bytes = size * dim, other_bytes = lead ? size * lead : key_bytes;
    return (Tile){others, keys, lead ? keys : others, lead, dim,
                  {block->storage->keys + (row + count) * key_bytes, block->storage->values + (row + count) * other_bytes},
                  {key_bytes, other_bytes}};
}

/* acc[j] += sum_d keys[j][d] * qt[d] */
INLINE void add_products(int width, int count, const vec *qt, const float *keys, int64_t dim, vec (*acc)[WIDEST]) {
    for (int64_t d = 0; d < dim; d++)
        for (int j = 0; j < count; j++) {
            vec k = splat(keys[j * dim + d]);
            for (int w = 0; w < width; w++) acc[j][w] += k * qt[d * width + w];
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

/* A tile of rows: queries qt [lead + dim][width], unnormalised sums ot [dim][width], maxima and totals of weights. */
typedef struct {
    vec *qt, *ot;                                    /* the maxima [width] and totals [width] follow the sums */
    ivec lo[WIDEST], hi[WIDEST];                     /* keys visible to each row */
    int32_t least_lo, most_lo, least_hi, most_hi;
} Rows;

/* Hides the keys of a tile outside the rows' bounds. A row that sees no key gets a log-sum-exp of about HIDDEN, which
 * has no weight in the merge. */
INLINE void hide(int width, int64_t start, int count, const Rows *rows, vec *scores) {
    const vec hidden = splat(HIDDEN);
    for (int i = 0; i < count; i++)
        for (int w = 0; w < width; w++) {
            const int32_t key = (int32_t)(start + i);
            ivec seen = (rows->lo[w] <= key) & (rows->hi[w] > key);
            scores[i * width + w] = (vec)(((ivec)scores[i * width + w] & seen) | ((ivec)hidden & ~seen));
        }
}

/* Adds `count` keys from `start` on to the results of `width` vectors of rows. */
INLINE void attend_tile(int width, const Rows *rows, const Tile *tile, int64_t start, int count) {
    const int together = TOGETHER(width);
    const int64_t dim = tile->dim;
    const float *v = tile->values;
    vec scores[TILE * WIDEST], peaks[WIDEST], sums[WIDEST];
    vec *ot = rows->ot, *best = ot + dim * width, *total = best + width;
    int j = 0;
    for (; j + together <= count; j += together) {
        prefetch(tile, j, together, 0, 1);
        score(width, together, rows->qt, tile, j, scores);
    }
    for (; j < count; j++) score(width, 1, rows->qt, tile, j, scores);
    if (start < rows->most_lo || start + count > rows->least_hi) hide(width, start, count, rows, scores);

    for (int w = 0; w < width; w++) peaks[w] = best[w], sums[w] = splat(0.0f);
    for (int i = 0; i < count; i++)
        for (int w = 0; w < width; w++) peaks[w] = larger(scores[i * width + w], peaks[w]);
    for (int w = 0; w < width; w++)
        if (any_larger(peaks[w], best[w])) { /* a new maximum: rescale the running sums */
            vec decay = exp2_nonpositive(best[w] - peaks[w]);
            total[w] *= decay;
            for (int64_t d = 0; d < dim; d++) ot[d * width + w] *= decay;
            best[w] = peaks[w];
        }
    for (int i = 0; i < count; i++)
        for (int w = 0; w < width; w++) {
            vec p = exp2_nonpositive(scores[i * width + w] - peaks[w]);
            scores[i * width + w] = p;
            sums[w] += p;
        }
    for (int w = 0; w < width; w++) total[w] += sums[w];

    for (int64_t d = 0; d < dim; d += together) {
        vec acc[MOST][WIDEST];
        for (int u = 0; u < together; u++)
            for (int w = 0; w < width; w++) acc[u][w] = ot[(d + u) * width + w];
        for (int i = 0; i < count; i++)
            for (int u = 0; u < together; u++) {
                vec x = splat(v[i * dim + d + u]);
                for (int w = 0; w < width; w++) acc[u][w] += x * scores[i * width + w];
            }
        for (int u = 0; u < together; u++)
            for (int w = 0; w < width; w++) ot[(d + u) * width + w] = acc[u][w];
    }
}

/* `attend_tile`, compiled for each width. */
static void attend_width(int width, const Rows *rows, const Tile *tile, int64_t start, int count) {
#define OF(n) case n: attend_tile(n, rows, tile, start, count); break;
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

/* One task: `tiles` tiles of rows over the keys `first .. end` of their block. */
static void attend_rows(int width, int tiles, Rows *rows, const Block *block, int64_t first, int64_t end) {
    const int64_t dim = block->dim;
    float room[room_of(block)];
    int64_t begin = end, stop = first;
    for (int t = 0; t < tiles; t++) {
        vec *best = rows[t].ot + dim * width, *total = best + width;
        memset(rows[t].ot, 0, sizeof(vec) * dim * width);
        for (int w = 0; w < width; w++) best[w] = splat(HIDDEN), total[w] = splat(0.0f);
        if (rows[t].least_lo < begin) begin = rows[t].least_lo;
        if (rows[t].most_hi > stop) stop = rows[t].most_hi;
    }
    if (begin < first) begin = first;
    if (stop > end) stop = end;
    for (int64_t start = begin; start < stop; start += TILE) {
        const int count = (int)smaller(stop - start, TILE);
        const Tile tile = tile_of(block, start, count, room);
        for (int t = 0; t < tiles; t++) {
            const int64_t seen = rows[t].most_hi - start; /* rounded up to keys that are computed together */
            if (seen > 0 && rows[t].least_lo < start + count)
                attend_width(width, rows + t, &tile, start, (int)smaller(count, (seen + MOST - 1) / MOST * MOST));
        }
    }
}

/* A call, as laid out by `native.py`: N blocks of num_keys keys, each with M queries. */
typedef struct {
    int64_t blocks, queries, num_keys;               /* N, M, L */
    int64_t key_offset, key_block, key_head;         /* of the first key, block stride, head stride, in elements */
    const int64_t *key_offsets;                      /* [N] of the first keys instead, NULL: evenly spaced */
    const int64_t *query_index;                      /* [N * M] query of each position, -1: none; NULL: in order */
    const int64_t *lo, *hi;                          /* [N * M] visible keys, NULL: all */
    const float *cos, *sin;                          /* [N * M][half] rotations, NULL: none */
    int64_t half, interleaved;
    int64_t repeats;                                 /* whether a query is at several positions */
    int64_t quantized;                               /* whether keys and values are in 8 bits */
} DenseCall;

/* Arguments shared by all calls of a layer. Initial result of a query: lse -inf, or its sink and out 0.
 * With leads, there is one KV head. */
typedef struct {
    const void *query;                               /* [T][heads][lead + dim] in the format of the keys, by strides */
    int64_t query_token, query_head;
    float *out, *lse;                                /* [T][heads][dim], [T][heads] */
    Storage storage, quantized;
    int64_t heads, kv_heads, lead, dim;
    float scale;
} Layer;

/* A KV head of a block of a call. */
INLINE Block block_of(const Layer *layer, const DenseCall *call, int64_t block, int64_t head) {
    const int64_t first = call->key_offsets ? call->key_offsets[block] : call->key_offset + block * call->key_block;
    const int64_t at = first + head * call->key_head;
    return (Block){call->quantized ? &layer->quantized : &layer->storage, at / layer->dim, layer->lead, layer->dim};
}

INLINE int64_t token_at(const DenseCall *call, int64_t position) {
    return call->query_index ? call->query_index[position] : position;
}

/* Writes the query of one position and head, rotated and scaled, to to[d * stride]; returns 0 if there is none. */
static int load_query(const Layer *layer, const DenseCall *call, int64_t position, int64_t head, float *to, int64_t stride) {
    const int64_t token = token_at(call, position), dim = layer->lead + layer->dim, format = layer->storage.format;
    if (token < 0) return 0;
    const int64_t at = token * layer->query_token + head * layer->query_head;
    float room[dim];
    const float *q = (const float *)layer->query + at, scale = layer->scale * LOG2E;
    if (format != FLOAT32) widen(format, (const uint16_t *)layer->query + at, dim, room), q = room;
    int64_t d = 0;
    if (call->cos) {
        const float *cos = call->cos + position * call->half, *sin = call->sin + position * call->half;
        for (int64_t i = 0; i < call->half; i++) {
            const int64_t one = call->interleaved ? 2 * i : i, other = call->interleaved ? one + 1 : i + call->half;
            to[one * stride] = (q[one] * cos[i] - q[other] * sin[i]) * scale;
            to[other * stride] = (q[other] * cos[i] + q[one] * sin[i]) * scale;
        }
        d = 2 * call->half;
    }
    for (; d < dim; d++) to[d * stride] = q[d] * scale;
    return 1;
}

/* Number of parts of a call's keys: one, or about four tasks per thread, equally many for each. */
static int64_t split(const DenseCall *call, int64_t units, int threads) {
    if (threads == 1) return 1;
    int64_t parts = (4 * threads + units - 1) / units;
    while (units * parts % threads) parts++;
    if (parts > call->num_keys / (4 * TILE)) parts = call->num_keys / (4 * TILE);
    return parts < 1 ? 1 : parts;
}

/* Merges sums[d * stride] of a row, weighted by 2^(score - peak), with its result for other blocks (Hydragen, eq. 5). */
INLINE void merge_row(const Layer *layer, int64_t at, const float *sums, int64_t stride, float peak, float total) {
    const float mine = (peak + log2f(total)) * LN2, seen = layer->lse[at];
    float *out = layer->out + at * layer->dim;
    if (seen == -INFINITY) {
        const float weight = 1.0f / total;
        for (int64_t d = 0; d < layer->dim; d++) out[d] = sums[d * stride] * weight;
        layer->lse[at] = mine;
        return;
    }
    const float others = 1.0f / (1.0f + expf(mine - seen)), weight = (1.0f - others) / total;
    for (int64_t d = 0; d < layer->dim; d++) out[d] = out[d] * others + sums[d * stride] * weight;
    layer->lse[at] = (mine > seen ? mine : seen) + log1pf(expf(-fabsf(mine - seen)));
}

/* How `attend_wide` divides a call: `units` of up to `sharing` tiles of rows that share a block, in `parts` of keys. */
typedef struct {
    int64_t rows, tiles, units, parts, share, per_tile, memory;
    int width, sharing, direct;                      /* direct: a task merges its own results */
} Division;

static Division divide(const Layer *layer, const DenseCall *call, int threads) {
    Division the = {.rows = call->queries * (layer->heads / layer->kv_heads)};
    const int64_t all = call->blocks * layer->kv_heads, vectors = (the.rows + LANES - 1) / LANES;
    the.tiles = (the.rows + SPAN - 1) / SPAN, the.width = (int)smaller(vectors, WIDEST);
    const int64_t most = threads == 1 ? SHARING : all * the.tiles / (4 * threads); /* each thread gets a few tasks */
    the.sharing = most < 1 ? 1 : (int)smaller(smaller(most, SHARING), the.tiles);
    the.units = all * ((the.tiles + the.sharing - 1) / the.sharing);
    the.parts = split(call, the.units, threads);
    the.share = ((call->num_keys + the.parts - 1) / the.parts + TILE - 1) / TILE * TILE;
    the.parts = (call->num_keys + the.share - 1) / the.share;
    the.direct = the.parts == 1 && !call->repeats;
    the.per_tile = (layer->dim + 2) * the.width;
    const int64_t results = the.sharing * (the.direct ? threads : the.units * the.parts);
    the.memory = results * the.per_tile + threads * the.sharing * (layer->lead + layer->dim) * the.width;
    return the;
}

/* Merges the parts of one tile, then the result with those of other blocks. */
static void merge_tile(const Layer *layer, const DenseCall *call, const Division *the, vec *ot, int64_t block,
                       int64_t head, int64_t from) {
    const int64_t dim = layer->dim, groups = layer->heads / layer->kv_heads, span = (int64_t)the->width * LANES;
    const int width = the->width;
    vec *best = ot + dim * width, *total = best + width;
    for (int64_t part = 1; part < the->parts; part++) {
        vec *ot2 = ot + part * the->sharing * the->per_tile, *best2 = ot2 + dim * width, *total2 = best2 + width;
        for (int w = 0; w < width; w++) {
            vec peak = larger(best[w], best2[w]);
            vec a = exp2_nonpositive(best[w] - peak), b = exp2_nonpositive(best2[w] - peak);
            for (int64_t d = 0; d < dim; d++) ot[d * width + w] = ot[d * width + w] * a + ot2[d * width + w] * b;
            total[w] = total[w] * a + total2[w] * b;
            best[w] = peak;
        }
    }
    const float *sums = (const float *)ot, *peaks = (const float *)best, *totals = (const float *)total;
    for (int64_t r = 0; r < span && from + r < the->rows; r++) {
        const int64_t position = block * call->queries + (from + r) / groups, token = token_at(call, position);
        if (token >= 0 && (!call->lo || call->lo[position] < call->hi[position]))
            merge_row(layer, token * layer->heads + head * groups + (from + r) % groups, sums + r, span, peaks[r], totals[r]);
    }
}

/* Loads the queries of a tile, zero-padded, and the bounds of the keys that they see. */
static void load_rows(const Layer *layer, const DenseCall *call, const Division *the, int64_t block, int64_t head,
                      int64_t from, Rows *rows) {
    const int64_t groups = layer->heads / layer->kv_heads, span = (int64_t)the->width * LANES;
    int32_t *lo = (int32_t *)rows->lo, *hi = (int32_t *)rows->hi;
    rows->least_lo = rows->least_hi = INT32_MAX, rows->most_lo = rows->most_hi = 0;
    for (int64_t r = 0; r < span; r++) {
        const int64_t position = block * call->queries + (from + r) / groups;
        lo[r] = 0, hi[r] = INT32_MAX;
        if (from + r >= the->rows || !load_query(layer, call, position, head * groups + (from + r) % groups,
                                                 (float *)rows->qt + r, span)) {
            for (int64_t d = 0; d < layer->lead + layer->dim; d++) ((float *)rows->qt)[d * span + r] = 0.0f;
            continue;
        }
        if (call->lo) lo[r] = (int32_t)call->lo[position], hi[r] = (int32_t)call->hi[position];
        if (lo[r] < rows->least_lo) rows->least_lo = lo[r];
        if (lo[r] > rows->most_lo) rows->most_lo = lo[r];
        if (hi[r] < rows->least_hi) rows->least_hi = hi[r];
        if (hi[r] > rows->most_hi) rows->most_hi = hi[r];
    }
}

/* A call with many rows per block, or with one block. Runs inside a parallel region. */
static void attend_wide(const Layer *layer, const DenseCall *call, vec *memory, int threads) {
    const Division the = divide(layer, call, threads);
    const int64_t kv_heads = layer->kv_heads, per_head = the.units / (call->blocks * kv_heads);
    const int64_t span = (int64_t)the.width * LANES, queries = (layer->lead + layer->dim) * the.width;
    vec *own = memory + omp_get_thread_num() * the.sharing * queries, *results = memory + threads * the.sharing * queries;

#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < the.units * the.parts; task++) { /* the last rows of a causal run first: they see most */
        const int64_t unit = the.units - 1 - task / the.parts, part = task % the.parts;
        const int64_t block = unit / (per_head * kv_heads), head = unit / per_head % kv_heads;
        const int64_t first = unit % per_head * the.sharing, end = smaller(call->num_keys, (part + 1) * the.share);
        const int tiles = (int)smaller(the.sharing, the.tiles - first);
        const Block keys = block_of(layer, call, block, head);
        vec *ot = results + (the.direct ? omp_get_thread_num() : unit * the.parts + part) * the.sharing * the.per_tile;
        Rows rows[SHARING];
        for (int t = 0; t < tiles; t++) {
            rows[t].qt = own + t * queries, rows[t].ot = ot + t * the.per_tile;
            load_rows(layer, call, &the, block, head, (first + t) * span, rows + t);
        }
        attend_rows(the.width, tiles, rows, &keys, part * the.share, end);
        if (the.direct)
            for (int t = 0; t < tiles; t++) merge_tile(layer, call, &the, rows[t].ot, block, head, (first + t) * span);
    }
    if (the.direct) return;

#pragma omp for schedule(static)
    for (int64_t i = 0; i < (call->repeats ? kv_heads : the.units); i++) /* rows with several blocks: one head per thread */
        for (int64_t unit = call->repeats ? 0 : i; unit < (call->repeats ? the.units : i + 1); unit++) {
            const int64_t block = unit / (per_head * kv_heads), head = unit / per_head % kv_heads;
            if (call->repeats && head != i) continue;
            const int64_t first = unit % per_head * the.sharing;
            for (int64_t t = 0; t < smaller(the.sharing, the.tiles - first); t++)
                merge_tile(layer, call, &the, results + (unit * the.parts * the.sharing + t) * the.per_tile, block, head,
                           (first + t) * span);
        }
}

/* The even or odd pairs of lanes of `a` and `b`, added: half of a step that sums the lanes of 8 vectors at once. */
#define PAIRS(a, b, ...) __builtin_shuffle(a, b, (shortivec){__VA_ARGS__})
INLINE shortvec add_pairs(shortvec a, shortvec b) {
    return PAIRS(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + PAIRS(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}
INLINE shortvec add_fours(shortvec a, shortvec b) {
    return PAIRS(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + PAIRS(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
INLINE shortvec add_eights(shortvec a, shortvec b) {
    return PAIRS(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + PAIRS(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

/* Scores of one row with SHORT keys. */
INLINE shortvec score_short(const float *q, const Tile *tile, int first) {
    shortvec s[SHORT] = {0};
    const float *leads = tile->leads + first * tile->lead, *keys = tile->keys + first * tile->dim;
    for (int64_t d = 0; d < tile->lead; d += SHORT)
        for (int j = 0; j < SHORT; j++) s[j] += *(const shortvec *)(q + d) * *(const shortvec *)(leads + j * tile->lead + d);
    q += tile->lead;
    for (int64_t d = 0; d < tile->dim; d += SHORT)
        for (int j = 0; j < SHORT; j++) s[j] += *(const shortvec *)(q + d) * *(const shortvec *)(keys + j * tile->dim + d);
    const shortvec low = add_fours(add_pairs(s[0], s[1]), add_pairs(s[2], s[3]));
    return add_eights(low, add_fours(add_pairs(s[4], s[5]), add_pairs(s[6], s[7])));
}

/* acc[0 .. width * SHORT] = acc * decay + sum over keys of weight * value. */
INLINE void add_values(int width, const float *weights, const float *values, int count, int64_t dim, float decay,
                       float *acc) {
    shortvec sum[8];
    for (int w = 0; w < width; w++) sum[w] = *(shortvec *)(acc + w * SHORT) * decay;
    for (int j = 0; j < count; j++)
        for (int w = 0; w < width; w++) sum[w] += weights[j] * *(const shortvec *)(values + j * dim + w * SHORT);
    for (int w = 0; w < width; w++) *(shortvec *)(acc + w * SHORT) = sum[w];
}

/* The weights 2^(score - best) of `count` scores, in place, with a new best. Returns the factor of earlier sums. */
INLINE float weigh(float *scores, int count, float *best, vec *total) {
    for (int j = count; j < (count + LANES - 1) / LANES * LANES; j++) scores[j] = -INFINITY;
    vec highest = splat(*best), sum = splat(0.0f);
    for (int j = 0; j < count; j += LANES) highest = larger(*(vec *)(scores + j), highest);
    const float peak = highest_lane(highest), decay = *best == peak ? 1.0f : exp2f(*best - peak);
    for (int j = 0; j < count; j += LANES) {
        vec p = exp2_nonpositive(*(vec *)(scores + j) - splat(peak));
        *(vec *)(scores + j) = p;
        sum += p;
    }
    *total = *total * decay + sum, *best = peak;
    return decay;
}

/* Some rows q [rows][lead + dim] over a tile of keys. results [rows][dim + 2]: the sum of values, weighted by
 * 2^(score - best), then best. */
static void attend_narrow(int64_t rows, const float *q, const Tile *tile, int count, float *results, vec *totals) {
    const int64_t lead = tile->lead, dim = tile->dim, query_dim = lead + dim;
    float scores[rows][TILE] __attribute__((aligned(64)));
    int j = 0;
    for (; j + SHORT <= count; j += SHORT)
        for (int64_t r = 0; r < rows; r++) {
            prefetch(tile, j, SHORT, r, rows);
            *(shortvec *)(scores[r] + j) = score_short(q + r * query_dim, tile, j);
        }
    if (j < count) { /* the last keys: of a copy that ends with zeros */
        float last[SHORT * query_dim];
        memset(last, 0, sizeof last);
        memcpy(last, tile->leads + j * lead, sizeof(float) * (count - j) * lead);
        memcpy(last + SHORT * lead, tile->keys + j * dim, sizeof(float) * (count - j) * dim);
        const Tile copy = {.leads = last, .keys = last + SHORT * lead, .lead = lead, .dim = dim};
        for (int64_t r = 0; r < rows; r++) *(shortvec *)(scores[r] + j) = score_short(q + r * query_dim, &copy, 0);
    }
    for (int64_t r = 0; r < rows; r++, results += dim + 2) {
        const float decay = weigh(scores[r], count, results + dim, totals + r), *v = tile->values;
        int64_t d = 0;
        for (; d + 8 * SHORT <= dim; d += 8 * SHORT) add_values(8, scores[r], v + d, count, dim, decay, results + d);
        for (; d < dim; d += SHORT) add_values(1, scores[r], v + d, count, dim, decay, results + d);
    }
}

/* The rows of one position and KV head over a part of their block: results [groups][dim + 2] of a sum, best and total. */
static void attend_position(const Layer *layer, const DenseCall *call, int64_t position, int64_t head, int64_t first,
                            int64_t end, float *results) {
    const int64_t dim = layer->dim, query_dim = layer->lead + dim, groups = layer->heads / layer->kv_heads;
    const Block block = block_of(layer, call, position / call->queries, head);
    float q[groups * query_dim] __attribute__((aligned(64))), room[room_of(&block)];
    vec totals[groups];
    memset(results, 0, sizeof(float) * groups * (dim + 2));
    for (int64_t group = 0; group < groups; group++) {
        results[group * (dim + 2) + dim] = -INFINITY, totals[group] = splat(0.0f);
        if (!load_query(layer, call, position, head * groups + group, q + group * query_dim, 1)) end = first;
    }
    if (call->lo && call->lo[position] > first) first = call->lo[position];
    if (call->hi && call->hi[position] < end) end = call->hi[position];
    for (int64_t start = first; start < end; start += TILE) {
        const int count = (int)smaller(end - start, TILE);
        const Tile tile = tile_of(&block, start, count, room);
        attend_narrow(groups, q, &tile, count, results, totals);
    }
    for (int64_t group = 0; group < groups; group++)
        for (int lane = 0; lane < LANES; lane++) results[group * (dim + 2) + dim + 1] += totals[group][lane];
}

static void merge_position(const Layer *layer, const DenseCall *call, int64_t position, int64_t head, const float *results) {
    const int64_t dim = layer->dim, groups = layer->heads / layer->kv_heads, token = token_at(call, position);
    for (int64_t group = 0; group < groups; group++, results += dim + 2)
        if (token >= 0 && results[dim + 1] != 0.0f) /* it sees a key of this part */
            merge_row(layer, token * layer->heads + head * groups + group, results, 1, results[dim], results[dim + 1]);
}

/* Whether the lanes hold dimensions: for a single row, or a few rows in each of many blocks. */
INLINE int is_narrow(const Layer *layer, const DenseCall *call) {
    return call->queries * (layer->heads / layer->kv_heads) <= NARROW && (call->blocks > 1 || call->queries == 1);
}

/* A narrow call. Its parts of keys, if it has several, have one position. */
static void attend_few(const Layer *layer, const DenseCall *call, float *memory, int threads) {
    const int64_t kv_heads = layer->kv_heads, positions = call->blocks * call->queries;
    const int64_t size = layer->heads / kv_heads * (layer->dim + 2), parts = positions == 1 ? split(call, kv_heads, threads) : 1;
    if (parts == 1) {
        float results[size];
#pragma omp for schedule(static)
        for (int64_t i = 0; i < (call->repeats ? 1 : positions) * kv_heads; i++)
            for (int64_t position = call->repeats ? 0 : i / kv_heads;
                 position < (call->repeats ? positions : i / kv_heads + 1); position++) {
                attend_position(layer, call, position, i % kv_heads, 0, call->num_keys, results);
                merge_position(layer, call, position, i % kv_heads, results);
            }
        return;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < kv_heads * parts; i++) {
        const int64_t part = i % parts, first = call->num_keys * part / parts, end = call->num_keys * (part + 1) / parts;
        attend_position(layer, call, 0, i / parts, first, end, memory + i * size);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < kv_heads; i++)
        for (int64_t part = 0; part < parts; part++) merge_position(layer, call, 0, i, memory + (i * parts + part) * size);
}

static pthread_key_t scratch;
static pthread_once_t is_scratch_made = PTHREAD_ONCE_INIT;

static void make_scratch(void) { pthread_key_create(&scratch, free); }

/* Scratch memory of `size` vectors, kept between calls: page faults would cost more than the computation. It is freed when
 * its thread ends. */
static vec *workspace(int64_t size) {
    static _Thread_local vec *memory;
    static _Thread_local int64_t held;
    if (size > held) {
        pthread_once(&is_scratch_made, make_scratch);
        free(memory);
        memory = aligned_alloc(64, (sizeof(vec) * size + 63) / 64 * 64);
        held = memory ? size : 0;
        pthread_setspecific(scratch, memory);
    }
    return memory;
}

/* Attention of `tokens` queries to all blocks of `calls`. sinks: [heads] or NULL.
 * dim and lead are multiples of SHORT. Returns 0, or 1 if memory ran out. */
int attend(const Layer *layer, const float *sinks, int64_t tokens, const DenseCall *calls, int64_t num_calls, int threads) {
    const int64_t size = layer->heads / layer->kv_heads * (layer->dim + 2);
    int64_t needed = 1;
    for (int64_t c = 0; c < num_calls; c++) {
        const int is_few = is_narrow(layer, calls + c);
        const int64_t parts = is_few ? split(calls + c, layer->kv_heads, threads) : 0;
        const int64_t wanted = is_few ? layer->kv_heads * parts * size / LANES + 1 : divide(layer, calls + c, threads).memory;
        if (wanted > needed) needed = wanted;
    }
    vec *memory = workspace(needed);
    if (!memory) return 1;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < layer->heads; h++) layer->lse[t * layer->heads + h] = sinks ? sinks[h] : -INFINITY;
    if (sinks) memset(layer->out, 0, sizeof(float) * tokens * layer->heads * layer->dim);

#pragma omp parallel num_threads(threads)
    for (int64_t c = 0; c < num_calls; c++)
        if (is_narrow(layer, calls + c))
            attend_few(layer, calls + c, (float *)memory, threads);
        else
            attend_wide(layer, calls + c, memory, threads);
    return 0;
}
