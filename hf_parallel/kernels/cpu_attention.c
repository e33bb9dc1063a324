/* Attention of query rows to all blocks of keys that they see, in float32, merged: one call per layer.
 *
 * Rows that see the same block are in adjacent vector lanes, so that each key and value is read once for all of them
 * and a multiply-add computes one row per lane (Hydragen, section 3.2); threads compute different parts of the block.
 * For a block of few rows, such as a completion's own, the lanes hold dimensions instead. Softmax is online over tiles
 * of keys; all partial results are merged exactly (Hydragen, eq. 5). Plain C with GCC's vector types.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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
#define SPAN 48  /* rows per task */
#define WIDEST (SPAN / LANES) /* vectors of rows per task */
#define MOST 8   /* keys or dimensions that are computed together */
#define TOGETHER(width) ((width) * MOST <= ACCUMULATORS ? MOST : (width) * 4 <= ACCUMULATORS ? 4 : 2)
#define NARROW (LANES / 2) /* rows per block up to which the lanes hold dimensions */
#define SHORT 8  /* lanes of dimensions; the head size is a multiple */
#define HIDDEN (-1e30f) /* score of a hidden key: finite, since exp(-inf + inf) is NaN */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef float shortvec __attribute__((vector_size(32), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec larger(vec a, vec b) {
    ivec a_wins = a > b;
    return (vec)(((ivec)a & a_wins) | ((ivec)b & ~a_wins));
}

/* exp for x <= 0, to about one unit in the last position; flushes to zero below -87, and keeps NaN. */
INLINE vec exp_nonpositive(vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    ivec alive = ~(x <= splat(-87.0f)); /* comparisons with NaN are false */
    x = larger(splat(-87.0f), x);
    vec n = (x * splat(1.44269504f) + magic) - magic;
    vec r = x - n * splat(0.693359375f);
    r = r + n * splat(2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return (vec)((ivec)(p * (vec)power) & alive);
}

/* Hides the keys of a tile outside the rows' bounds [2][width], relative to the task's first key. A row that sees no
 * key gets a log-sum-exp of about HIDDEN, which has no weight in the merge. */
INLINE void hide(int width, int64_t start, int count, const ivec *bounds, vec *scores) {
    const vec hidden = splat(HIDDEN);
    for (int i = 0; i < count; i++)
        for (int w = 0; w < width; w++) {
            const int32_t key = (int32_t)(start + i);
            ivec seen = (bounds[w] <= key) & (bounds[width + w] > key);
            scores[i * width + w] = (vec)(((ivec)scores[i * width + w] & seen) | ((ivec)hidden & ~seen));
        }
}

/* Keys of a block: `lead` floats of each in `leads`, the other `dim` in `keys`. */
typedef struct {
    const float *leads, *keys;
    int64_t lead, dim;
} Keys;

INLINE Keys from_key(Keys keys, int64_t first) {
    return (Keys){keys.leads + first * keys.lead, keys.keys + first * keys.dim, keys.lead, keys.dim};
}

/* Keys and values in 8 bits, [rows][..] each, with their scales. With leads, the leads are in place of the values. */
typedef struct {
    const uint8_t *keys, *values;
    const float *scales;                             /* [rows][2] */
    int64_t is_float;                                /* float8_e4m3fn instead of int8 */
} Packed;

/* to[count][dim] = vectors from `row` on times their scales (0: of keys, 1: of values). */
static void unpack(const Packed *packed, int which, int64_t row, int count, int64_t dim, float *to) {
    const uint8_t *from = (which ? packed->values : packed->keys) + row * dim;
    for (int j = 0; j < count; j++, from += dim, to += dim) {
        const float scale = packed->scales[(row + j) * 2 + which];
        if (packed->is_float) { /* moves exponent and mantissa to their places; 2^120 corrects the exponent */
            const float factor = scale * 0x1p60f;
            for (int64_t d = 0; d < dim; d++) {
                const union { uint32_t bits; float value; } x = {(from[d] & 0x80u) << 24 | (from[d] & 0x7fu) << 20};
                to[d] = x.value * 0x1p60f * factor;
            }
        } else
            for (int64_t d = 0; d < dim; d++) to[d] = (float)(int8_t)from[d] * scale;
    }
}

/* Keys and values of a block. If packed, `row` is that of its first key, and tiles are unpacked into `room`. */
typedef struct {
    Keys keys;
    const float *values;
    const Packed *packed;                            /* NULL: not packed */
    int64_t row;
} Block;

INLINE int64_t room_of(const Block *block) {
    return block->packed ? TILE * (2 * block->keys.dim + block->keys.lead) : 1;
}

/* `count` keys from `start` on, and their values. */
INLINE Block tile_of(const Block *block, int64_t start, int count, float *room) {
    const int64_t dim = block->keys.dim, lead = block->keys.lead, row = block->row + start;
    if (!block->packed) return (Block){from_key(block->keys, start), block->values + start * dim, NULL, row};
    float *leads = room + TILE * dim;
    unpack(block->packed, 0, row, count, dim, room);
    unpack(block->packed, 1, row, count, lead ? lead : dim, leads);
    return (Block){{leads, room, lead, dim}, lead ? room : leads, NULL, row};
}

/* acc[j] += sum_d keys[j][d] * qt[d] */
INLINE void add_products(int width, int count, const vec *qt, const float *keys, int64_t dim, vec (*acc)[WIDEST]) {
    for (int64_t d = 0; d < dim; d++)
        for (int j = 0; j < count; j++) {
            vec k = splat(keys[j * dim + d]);
            for (int w = 0; w < width; w++) acc[j][w] += k * qt[d * width + w];
        }
}

/* Scores of the first `count` (at most MOST) keys with all rows. */
INLINE void score(int width, int count, const vec *qt, Keys keys, vec *scores) {
    vec acc[MOST][WIDEST];
    for (int j = 0; j < count; j++)
        for (int w = 0; w < width; w++) acc[j][w] = splat(0.0f);
    add_products(width, count, qt, keys.leads, keys.lead, acc);
    add_products(width, count, qt + keys.lead * width, keys.keys, keys.dim, acc);
    for (int j = 0; j < count; j++)
        for (int w = 0; w < width; w++) scores[j * width + w] = acc[j][w];
}

/* One task: `width` vectors of rows over `num_keys` keys, or those within their bounds. Writes the unnormalised sums to
 * ot [dim][width]; the result of a row that sees no key has no weight in the merge. */
INLINE void attend_rows(int width, const vec *qt, const Block *block, int64_t num_keys, const ivec *bounds, vec *ot,
                        vec *best, vec *total) {
    const int together = TOGETHER(width);
    const int64_t dim = block->keys.dim;
    vec scores[TILE * WIDEST];
    float room[room_of(block)];
    memset(ot, 0, sizeof(vec) * dim * width);
    for (int w = 0; w < width; w++) best[w] = splat(-INFINITY), total[w] = splat(0.0f);
    for (int64_t start = 0; start < num_keys; start += TILE) {
        int count = num_keys - start < TILE ? (int)(num_keys - start) : TILE;
        const Block tile = tile_of(block, start, count, room);
        const float *k = tile.keys.keys, *v = tile.values;
        int j = 0;
        for (; j + together <= count; j += together) {
            for (int64_t i = 0; i < together * dim; i += LANES) { /* prefetch the values and the next tile's keys */
                __builtin_prefetch(v + j * dim + i);
                __builtin_prefetch(k + (j + TILE) * dim + i, 0, 2);
            }
            score(width, together, qt, from_key(tile.keys, j), scores + j * width);
        }
        for (; j < count; j++) score(width, 1, qt, from_key(tile.keys, j), scores + j * width);
        if (bounds) hide(width, start, count, bounds, scores);

        for (int w = 0; w < width; w++) {
            vec peak = best[w];
            for (int i = 0; i < count; i++) peak = larger(scores[i * width + w], peak);
            ivec rises = peak > best[w];
            int any = 0;
            for (int lane = 0; lane < LANES; lane++) any |= rises[lane];
            if (any) { /* a new maximum: rescale the running sums */
                vec decay = exp_nonpositive(best[w] - peak);
                total[w] *= decay;
                for (int64_t d = 0; d < dim; d++) ot[d * width + w] *= decay;
                best[w] = peak;
            }
            vec sum = splat(0.0f);
            for (int i = 0; i < count; i++) {
                vec p = exp_nonpositive(scores[i * width + w] - peak);
                scores[i * width + w] = p;
                sum += p;
            }
            total[w] += sum;
        }

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
}

/* `attend_rows`, compiled for each width. */
static void attend_task(int width, const vec *qt, const Block *block, int64_t num_keys, const ivec *bounds, vec *ot,
                        vec *best, vec *total) {
#define OF(n) case n: attend_rows(n, qt, block, num_keys, bounds, ot, best, total); break;
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

/* A call, as laid out by `native.py`: N blocks of num_keys keys, each with M queries. */
typedef struct {
    int64_t blocks, queries, num_keys;               /* N, M, L */
    int64_t key_offset, key_block, key_head;         /* of the first key, block stride, head stride, in elements */
    const int64_t *query_index;                      /* [N * M] query of each position, -1: none; NULL: in order */
    const int64_t *lo, *hi;                          /* [N * M] visible keys, NULL: all */
    const float *cos, *sin;                          /* [N * M][half] rotations, NULL: none */
    int64_t half, interleaved;
    int64_t repeats;                                 /* whether a query is at several positions */
    int64_t compact;                                 /* whether keys and values are packed */
} DenseCall;

/* Arguments shared by all calls of a layer. Initial result of a query: lse -inf, or its sink; out 0.
 * With leads, there is one KV head. */
typedef struct {
    const float *query, *leads, *keys, *values;      /* query [T][heads][lead + dim] */
    float *out, *lse;                                /* [T][heads][dim], [T][heads] */
    Packed packed;
    int64_t heads, kv_heads, lead, dim;
    float scale;
} Layer;

/* Keys from `first` on, and their values, of a KV head of a block of a call. */
INLINE Block block_of(const Layer *layer, const DenseCall *call, int64_t block, int64_t head, int64_t first) {
    const int64_t at = call->key_offset + block * call->key_block + head * call->key_head, row = at / layer->dim + first;
    const Keys keys = {layer->leads + row * layer->lead, layer->keys + row * layer->dim, layer->lead, layer->dim};
    return (Block){keys, layer->values + row * layer->dim, call->compact ? &layer->packed : NULL, row};
}

/* Writes the query of one position and head, rotated and scaled, to to[d * stride]; returns 0 if there is none. */
static int load_query(const Layer *layer, const DenseCall *call, int64_t position, int64_t head, float *to, int64_t stride) {
    const int64_t token = call->query_index ? call->query_index[position] : position;
    if (token < 0) return 0;
    const int64_t dim = layer->lead + layer->dim;
    const float *q = layer->query + (token * layer->heads + head) * dim, scale = layer->scale;
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

/* Number of parts of a call's keys: about four tasks per thread, equally many for each. */
static int64_t split(const DenseCall *call, int64_t units, int threads) {
    int64_t parts = (4 * threads + units - 1) / units;
    while (units * parts % threads) parts++;
    if (parts > call->num_keys / (4 * TILE)) parts = call->num_keys / (4 * TILE);
    return parts < 1 ? 1 : parts;
}

/* Merges the parts of one unit of a call, then the result with those of other blocks (Hydragen, eq. 5). */
static void merge_unit(const Layer *layer, const DenseCall *call, vec *ot, int64_t unit, int64_t tiles, int64_t parts,
                       int width) {
    const int64_t dim = layer->dim, groups = layer->heads / layer->kv_heads, rows = call->queries * groups;
    const int64_t span = (int64_t)width * LANES, per_task = (dim + 2) * width;
    vec *best = ot + dim * width, *total = best + width;
    for (int64_t part = 1; part < parts; part++) {
        vec *ot2 = ot + part * per_task, *best2 = ot2 + dim * width, *total2 = best2 + width;
        for (int w = 0; w < width; w++) {
            vec peak = larger(best[w], best2[w]);
            vec a = exp_nonpositive(best[w] - peak), b = exp_nonpositive(best2[w] - peak);
            for (int64_t d = 0; d < dim; d++) ot[d * width + w] = ot[d * width + w] * a + ot2[d * width + w] * b;
            total[w] = total[w] * a + total2[w] * b;
            best[w] = peak;
        }
    }
    const int64_t block = unit / (layer->kv_heads * tiles), head = unit / tiles % layer->kv_heads;
    const int64_t from = unit % tiles * span;
    const float *sums = (const float *)ot, *peaks = (const float *)best, *totals = (const float *)total;
    for (int64_t r = 0; r < span && from + r < rows; r++) {
        const int64_t position = block * call->queries + (from + r) / groups;
        const int64_t token = call->query_index ? call->query_index[position] : position;
        if (token < 0) continue;
        const int64_t at = token * layer->heads + head * groups + (from + r) % groups;
        const float mine = peaks[r] + logf(totals[r]), seen = layer->lse[at];
        const float others = 1.0f / (1.0f + expf(mine - seen)), weight = (1.0f - others) / totals[r];
        float *out = layer->out + at * dim;
        for (int64_t d = 0; d < dim; d++) out[d] = out[d] * others + sums[d * span + r] * weight;
        layer->lse[at] = (mine > seen ? mine : seen) + log1pf(expf(-fabsf(mine - seen)));
    }
}

/* Bounds of the keys visible to the rows of one task, relative to its first key; NULL if all are visible. */
static const ivec *bounds_of(const DenseCall *call, int64_t position, int64_t groups, int64_t from, int64_t first, int width,
                             ivec *bounds) {
    if (!call->lo) return NULL;
    int32_t *lo = (int32_t *)bounds, *hi = lo + (int64_t)width * LANES;
    for (int64_t r = 0; r < (int64_t)width * LANES; r++) {
        const int64_t query = (from + r) / groups;
        lo[r] = query < call->queries ? (int32_t)(call->lo[position + query] - first) : 0;
        hi[r] = query < call->queries ? (int32_t)(call->hi[position + query] - first) : INT32_MAX;
    }
    return bounds;
}

/* A call with many rows per block, or with one block. Runs inside a parallel region. */
static void attend_wide(const Layer *layer, const DenseCall *call, vec *columns, int threads) {
    const int64_t dim = layer->dim, query_dim = layer->lead + dim, kv_heads = layer->kv_heads;
    const int64_t groups = layer->heads / kv_heads, rows = call->queries * groups, tiles = (rows + SPAN - 1) / SPAN;
    const int64_t vectors = (rows + LANES - 1) / LANES;
    const int width = vectors < WIDEST ? (int)vectors : WIDEST;
    const int64_t units = call->blocks * kv_heads * tiles, span = (int64_t)width * LANES;
    int64_t parts = split(call, units, threads);
    const int64_t share = ((call->num_keys + parts - 1) / parts + TILE - 1) / TILE * TILE;
    parts = (call->num_keys + share - 1) / share;
    const int64_t per_task = (dim + 2) * width;
    vec *partial = columns + units * query_dim * width;

#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < units; unit++) { /* rows in adjacent lanes: [query_dim][width * LANES], zero-padded */
        const int64_t position = unit / (kv_heads * tiles) * call->queries, head = unit / tiles % kv_heads * groups;
        const int64_t from = unit % tiles * span;
        vec *qt = columns + unit * query_dim * width;
        memset(qt, 0, sizeof(vec) * query_dim * width);
        for (int64_t r = 0; r < span && from + r < rows; r++)
            load_query(layer, call, position + (from + r) / groups, head + (from + r) % groups, (float *)qt + r, span);
    }

#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < units * parts; task++) {
        const int64_t unit = task / parts, first = task % parts * share;
        const int64_t count = call->num_keys - first < share ? call->num_keys - first : share;
        const int64_t block = unit / (kv_heads * tiles), head = unit / tiles % kv_heads;
        const Block keys = block_of(layer, call, block, head, first);
        const vec *qt = columns + unit * query_dim * width;
        vec *ot = partial + task * per_task, *best = ot + dim * width, *total = best + width;
        ivec storage[2 * WIDEST];
        const ivec *bounds = bounds_of(call, block * call->queries, groups, unit % tiles * span, first, width, storage);
        attend_task(width, qt, &keys, count, bounds, ot, best, total);
    }

#pragma omp for schedule(static)
    for (int64_t i = 0; i < (call->repeats ? kv_heads : units); i++) /* rows with several blocks: one head per thread */
        for (int64_t unit = call->repeats ? 0 : i; unit < (call->repeats ? units : i + 1); unit++)
            if (!call->repeats || unit / tiles % kv_heads == i)
                merge_unit(layer, call, partial + unit * parts * per_task, unit, tiles, parts, width);
}

INLINE float sum_lanes(shortvec x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }

/* acc[0 .. width * SHORT] = acc * decay + sum over keys of weight * value. */
INLINE void add_values(int width, const float *weights, const float *values, int count, int64_t dim, float decay,
                       float *acc) {
    shortvec sum[4];
    for (int w = 0; w < width; w++) sum[w] = *(shortvec *)(acc + w * SHORT) * decay;
    for (int j = 0; j < count; j++)
        for (int w = 0; w < width; w++) sum[w] += weights[j] * *(const shortvec *)(values + j * dim + w * SHORT);
    for (int w = 0; w < width; w++) *(shortvec *)(acc + w * SHORT) = sum[w];
}

INLINE shortvec products(const float *q, const float *k, int64_t dim) {
    shortvec sum = {0};
    for (int64_t d = 0; d < dim; d += SHORT) sum += *(const shortvec *)(q + d) * *(const shortvec *)(k + d);
    return sum;
}

/* One row over the keys lo .. hi of its own block; acc [dim] is the sum of values, weighted by exp(s - best). */
static void attend_narrow(const float *q, const Block *block, int64_t lo, int64_t hi, float *acc, float *best,
                          float *total) {
    const int64_t dim = block->keys.dim, lead = block->keys.lead;
    float scores[TILE] __attribute__((aligned(64))), room[room_of(block)];
    for (int64_t start = lo; start < hi; start += TILE) {
        const int count = hi - start < TILE ? (int)(hi - start) : TILE;
        const Block tile = tile_of(block, start, count, room);
        const Keys k = tile.keys;
        const float *v = tile.values;
        float peak = *best;
        for (int j = 0; j < count; j++) {
            const shortvec sum = products(q + lead, k.keys + j * dim, dim);
            scores[j] = sum_lanes(lead ? sum + products(q, k.leads + j * lead, lead) : sum);
            if (scores[j] > peak) peak = scores[j];
        }
        for (int j = count; j < (count + LANES - 1) / LANES * LANES; j++) scores[j] = -INFINITY;
        const float decay = *best == peak ? 1.0f : expf(*best - peak);
        vec sum = splat(0.0f);
        for (int j = 0; j < count; j += LANES) {
            vec p = exp_nonpositive(*(vec *)(scores + j) - splat(peak));
            *(vec *)(scores + j) = p;
            sum += p;
        }
        *total *= decay, *best = peak;
        for (int lane = 0; lane < LANES; lane++) *total += sum[lane];
        int64_t d = 0;
        for (; d + 4 * SHORT <= dim; d += 4 * SHORT) add_values(4, scores, v + d, count, dim, decay, acc + d);
        for (; d < dim; d += SHORT) add_values(1, scores, v + d, count, dim, decay, acc + d);
    }
}

/* The rows of one position and KV head over their block, starting from their results for other blocks. */
static void attend_position(const Layer *layer, const DenseCall *call, int64_t position, int64_t head, float *q) {
    const int64_t dim = layer->dim, groups = layer->heads / layer->kv_heads, block = position / call->queries;
    const Block keys = block_of(layer, call, block, head, 0);
    const int64_t lo = call->lo ? call->lo[position] : 0, hi = call->hi ? call->hi[position] : call->num_keys;
    if (lo >= hi) return;
    for (int64_t group = 0; group < groups; group++) {
        if (!load_query(layer, call, position, head * groups + group, q, 1)) return;
        const int64_t token = call->query_index ? call->query_index[position] : position;
        const int64_t at = token * layer->heads + head * groups + group;
        float best = layer->lse[at], total = best == -INFINITY ? 0.0f : 1.0f, *out = layer->out + at * dim;
        attend_narrow(q, &keys, lo, hi, out, &best, &total);
        for (int64_t d = 0; d < dim; d++) out[d] /= total;
        layer->lse[at] = best + logf(total);
    }
}

/* Scratch memory of `size` vectors, kept between calls: page faults would cost more than the computation. */
static vec *workspace(int64_t size) {
    static _Thread_local vec *memory;
    static _Thread_local int64_t held;
    if (size > held) {
        free(memory);
        memory = aligned_alloc(64, sizeof(vec) * size);
        held = memory ? size : 0;
    }
    return memory;
}

/* Attention of `tokens` queries to all blocks of `calls`. sinks: [heads] or NULL.
 * dim and lead are multiples of SHORT. Returns 0, or 1 if memory ran out. */
int attend(const Layer *layer, const float *sinks, int64_t tokens, const DenseCall *calls, int64_t num_calls, int threads) {
    const int64_t dim = layer->dim, query_dim = layer->lead + dim, kv_heads = layer->kv_heads;
    const int64_t groups = layer->heads / kv_heads;
    int64_t needed = 0;
    for (int64_t c = 0; c < num_calls; c++) {
        const int64_t rows = calls[c].queries * groups, tiles = (rows + SPAN - 1) / SPAN;
        const int64_t units = calls[c].blocks * kv_heads * tiles, vectors = (rows + LANES - 1) / LANES;
        const int64_t width = vectors < WIDEST ? vectors : WIDEST, tasks = units * split(&calls[c], units, threads);
        const int64_t wanted = (units * query_dim + tasks * (dim + 2)) * width;
        if (wanted > needed) needed = wanted;
    }
    vec *memory = workspace(needed);
    if (!memory) return 1;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < layer->heads; h++) layer->lse[t * layer->heads + h] = sinks ? sinks[h] : -INFINITY;
    memset(layer->out, 0, sizeof(float) * tokens * layer->heads * dim);

#pragma omp parallel num_threads(threads)
    for (int64_t c = 0; c < num_calls; c++) {
        const DenseCall *call = calls + c;
        if (call->blocks == 1 || call->queries * groups > NARROW) {
            attend_wide(layer, call, memory, threads);
            continue;
        }
        float q[query_dim] __attribute__((aligned(64)));
        const int64_t positions = call->blocks * call->queries;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < (call->repeats ? 1 : positions) * kv_heads; i++)
            for (int64_t position = call->repeats ? 0 : i / kv_heads;
                 position < (call->repeats ? positions : i / kv_heads + 1); position++)
                attend_position(layer, call, position, i % kv_heads, q);
    }
    return 0;
}
