/* Attention of query rows to all blocks of keys that they see, in float32, merged: one call per layer.
 *
 * Rows that see one block together stand side by side in vector lanes, so that each key and value is read once for all
 * of them and every multiply-add serves sixteen rows (Hydragen, section 3.2); parts of the block go to different
 * threads. A block of few rows, such as a completion's own, has its dimensions in the lanes instead. Softmax is online
 * over tiles of keys; all partial results are merged exactly (Hydragen, eq. 5). Plain C with GCC's vector types.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define TILE 64   /* keys per tile: scores of a tile stay in the first-level cache */
#define UNROLL 8  /* keys, or dimensions, whose accumulators stay in registers */
#define WIDEST 3  /* vectors of rows per task: 48 rows */
#define NARROW 8  /* rows per block up to which dimensions go into the lanes */
#define SHORT 8   /* lanes there: a head's size is a multiple of it */
#define HIDDEN (-1e30f) /* score of a key that a row does not see: finite, as exp(-inf + inf) is not a number */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64), aligned(64)));
typedef float shortvec __attribute__((vector_size(32), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(64), aligned(64)));

INLINE vec splat(float x) { return (vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE vec larger(vec a, vec b) {
    ivec a_wins = a > b;
    return (vec)(((ivec)a & a_wins) | ((ivec)b & ~a_wins));
}

/* exp for x <= 0, to about one unit in the last place; flushes to zero below -87. */
INLINE vec exp_nonpositive(vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    ivec alive = x > splat(-87.0f);
    x = larger(x, splat(-87.0f));
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

/* Hides from rows the keys of a tile that lie outside their bounds [2][width], both counted from the task's first key.
 * A row that sees none is left with a log-sum-exp of about HIDDEN, which weighs nothing when it is merged. */
INLINE void hide(int width, int64_t start, int count, const ivec *bounds, vec *scores) {
    const vec hidden = splat(HIDDEN);
    for (int i = 0; i < count; i++)
        for (int w = 0; w < width; w++) {
            const int32_t key = (int32_t)(start + i);
            ivec seen = (bounds[w] <= key) & (bounds[width + w] > key);
            scores[i * width + w] = (vec)(((ivec)scores[i * width + w] & seen) | ((ivec)hidden & ~seen));
        }
}

/* Scores of `count` (at most UNROLL) keys with all rows: acc[j] = sum_d keys[j][d] * qt[d]. */
INLINE void score(int width, int count, const vec *qt, const float *keys, int64_t dim, vec *scores) {
    vec acc[UNROLL][WIDEST];
    for (int j = 0; j < count; j++)
        for (int w = 0; w < width; w++) acc[j][w] = splat(0.0f);
    for (int64_t d = 0; d < dim; d++)
        for (int j = 0; j < count; j++) {
            vec k = splat(keys[j * dim + d]);
            for (int w = 0; w < width; w++) acc[j][w] += k * qt[d * width + w];
        }
    for (int j = 0; j < count; j++)
        for (int w = 0; w < width; w++) scores[j * width + w] = acc[j][w];
}

/* One task: `width` vectors of rows over `num_keys` keys, or those between their bounds. Leaves the unscaled sums in
 * ot [dim][width]; what a row leaves that sees none of the keys weighs nothing beside anything seen. */
INLINE void attend_rows(int width, const vec *qt, const float *keys, const float *values, int64_t num_keys, int64_t dim,
                        const ivec *bounds, vec *ot, vec *best, vec *total) {
    vec scores[TILE * WIDEST];
    memset(ot, 0, sizeof(vec) * dim * width);
    for (int w = 0; w < width; w++) best[w] = splat(-INFINITY), total[w] = splat(0.0f);
    for (int64_t start = 0; start < num_keys; start += TILE) {
        int count = num_keys - start < TILE ? (int)(num_keys - start) : TILE;
        const float *k = keys + start * dim, *v = values + start * dim;
        int j = 0;
        for (; j + UNROLL <= count; j += UNROLL) {
            for (int64_t i = 0; i < UNROLL * dim; i += LANES) { /* what comes next: the values, the next tile's keys */
                __builtin_prefetch(v + j * dim + i);
                __builtin_prefetch(k + (j + TILE) * dim + i, 0, 2);
            }
            score(width, UNROLL, qt, k + j * dim, dim, scores + j * width);
        }
        for (; j < count; j++) score(width, 1, qt, k + j * dim, dim, scores + j * width);
        if (bounds) hide(width, start, count, bounds, scores);

        for (int w = 0; w < width; w++) {
            vec peak = best[w];
            for (int i = 0; i < count; i++) peak = larger(scores[i * width + w], peak);
            ivec rises = peak > best[w];
            int any = 0;
            for (int lane = 0; lane < LANES; lane++) any |= rises[lane];
            if (any) { /* a new maximum: what was summed so far shrinks */
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

        for (int64_t d = 0; d < dim; d += UNROLL) {
            vec acc[UNROLL][WIDEST];
            for (int u = 0; u < UNROLL; u++)
                for (int w = 0; w < width; w++) acc[u][w] = ot[(d + u) * width + w];
            for (int i = 0; i < count; i++)
                for (int u = 0; u < UNROLL; u++) {
                    vec x = splat(v[i * dim + d + u]);
                    for (int w = 0; w < width; w++) acc[u][w] += x * scores[i * width + w];
                }
            for (int u = 0; u < UNROLL; u++)
                for (int w = 0; w < width; w++) ot[(d + u) * width + w] = acc[u][w];
        }
    }
}

/* Calls of one pass, as `native.py` lays them out: N blocks of num_keys keys, each met by M queries. */
typedef struct {
    int64_t blocks, queries, num_keys;               /* N, M, L */
    int64_t key_offset, key_block, key_head;         /* in floats: of the first key, from block to block, head to head */
    int64_t value_offset, value_block, value_head;
    const int64_t *query_index;                            /* [N * M] query of each place, -1: none; NULL: in order */
    const int64_t *lo, *hi;                          /* [N * M] visible keys, NULL: all */
    const float *cos, *sin;                          /* [N * M][half] turns, NULL: none */
    int64_t half, interleaved;
    int64_t repeats;                                 /* whether a query stands at several of the places */
} Call;

/* What all calls of a layer share. Results of a query that has seen nothing yet: lse -inf, or its sink; out 0. */
typedef struct {
    const float *query, *keys, *values;              /* query [T][heads][dim] */
    float *out, *lse;                                /* [T][heads][dim], [T][heads] */
    int64_t heads, kv_heads, dim;
    float scale;
} Layer;

/* The query of one place and head, turned and scaled, to to[d * stride]; returns whether there is one. */
static int load_query(const Layer *layer, const Call *call, int64_t place, int64_t head, float *to, int64_t stride) {
    const int64_t token = call->query_index ? call->query_index[place] : place;
    if (token < 0) return 0;
    const float *q = layer->query + (token * layer->heads + head) * layer->dim, scale = layer->scale;
    int64_t d = 0;
    if (call->cos) {
        const float *cos = call->cos + place * call->half, *sin = call->sin + place * call->half;
        for (int64_t i = 0; i < call->half; i++) {
            const int64_t one = call->interleaved ? 2 * i : i, other = call->interleaved ? one + 1 : i + call->half;
            to[one * stride] = (q[one] * cos[i] - q[other] * sin[i]) * scale;
            to[other * stride] = (q[other] * cos[i] + q[one] * sin[i]) * scale;
        }
        d = 2 * call->half;
    }
    for (; d < layer->dim; d++) to[d * stride] = q[d] * scale;
    return 1;
}

/* Cuts a call's keys so that there are about four tasks a thread, equally many for all. */
static int64_t split(const Call *call, int64_t units, int threads) {
    int64_t parts = (4 * threads + units - 1) / units;
    while (units * parts % threads) parts++;
    if (parts > call->num_keys / (4 * TILE)) parts = call->num_keys / (4 * TILE);
    return parts < 1 ? 1 : parts;
}

/* Merge the parts of one unit of a call, then the result with what its rows saw in other blocks (Hydragen, eq. 5). */
static void merge_unit(const Layer *layer, const Call *call, vec *ot, int64_t unit, int64_t tiles, int64_t parts,
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
        const int64_t place = block * call->queries + (from + r) / groups;
        const int64_t token = call->query_index ? call->query_index[place] : place;
        if (token < 0) continue;
        const int64_t at = token * layer->heads + head * groups + (from + r) % groups;
        const float mine = peaks[r] + logf(totals[r]), seen = layer->lse[at];
        const float others = 1.0f / (1.0f + expf(mine - seen)), weight = (1.0f - others) / totals[r];
        float *out = layer->out + at * dim;
        for (int64_t d = 0; d < dim; d++) out[d] = out[d] * others + sums[d * span + r] * weight;
        layer->lse[at] = (mine > seen ? mine : seen) + log1pf(expf(-fabsf(mine - seen)));
    }
}

/* Which keys the rows of one task see, counted from its first one; NULL where all see all. */
static const ivec *bounds_of(const Call *call, int64_t place, int64_t groups, int64_t from, int64_t first, int width,
                             ivec *bounds) {
    if (!call->lo) return NULL;
    int32_t *lo = (int32_t *)bounds, *hi = lo + (int64_t)width * LANES;
    for (int64_t r = 0; r < (int64_t)width * LANES; r++) {
        const int64_t query = (from + r) / groups;
        lo[r] = query < call->queries ? (int32_t)(call->lo[place + query] - first) : 0;
        hi[r] = query < call->queries ? (int32_t)(call->hi[place + query] - first) : INT32_MAX;
    }
    return bounds;
}

/* A call whose blocks are met by many rows each, or of which there is one. Runs inside a parallel region. */
static void attend_wide(const Layer *layer, const Call *call, vec *columns, int threads) {
    const int64_t dim = layer->dim, kv_heads = layer->kv_heads, groups = layer->heads / kv_heads;
    const int64_t rows = call->queries * groups, tiles = (rows + WIDEST * LANES - 1) / (WIDEST * LANES);
    const int64_t vectors = (rows + LANES - 1) / LANES;
    const int width = vectors < WIDEST ? (int)vectors : WIDEST;
    const int64_t units = call->blocks * kv_heads * tiles, span = (int64_t)width * LANES;
    int64_t parts = split(call, units, threads);
    const int64_t share = ((call->num_keys + parts - 1) / parts + TILE - 1) / TILE * TILE;
    parts = (call->num_keys + share - 1) / share;
    const int64_t per_task = (dim + 2) * width;
    vec *partial = columns + units * dim * width;

#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < units; unit++) { /* rows side by side: [dim][width * LANES], zero where none is */
        const int64_t place = unit / (kv_heads * tiles) * call->queries, head = unit / tiles % kv_heads * groups;
        const int64_t from = unit % tiles * span;
        vec *qt = columns + unit * dim * width;
        memset(qt, 0, sizeof(vec) * dim * width);
        for (int64_t r = 0; r < span && from + r < rows; r++)
            load_query(layer, call, place + (from + r) / groups, head + (from + r) % groups, (float *)qt + r, span);
    }

#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < units * parts; task++) {
        const int64_t unit = task / parts, first = task % parts * share;
        const int64_t count = call->num_keys - first < share ? call->num_keys - first : share;
        const int64_t block = unit / (kv_heads * tiles), head = unit / tiles % kv_heads;
        const float *k = layer->keys + call->key_offset + block * call->key_block + head * call->key_head + first * dim;
        const float *v =
            layer->values + call->value_offset + block * call->value_block + head * call->value_head + first * dim;
        const vec *qt = columns + unit * dim * width;
        vec *ot = partial + task * per_task, *best = ot + dim * width, *total = best + width;
        ivec room[2 * WIDEST];
        const ivec *bounds = bounds_of(call, block * call->queries, groups, unit % tiles * span, first, width, room);
        if (width == 1) attend_rows(1, qt, k, v, count, dim, bounds, ot, best, total);
        else if (width == 2) attend_rows(2, qt, k, v, count, dim, bounds, ot, best, total);
        else attend_rows(3, qt, k, v, count, dim, bounds, ot, best, total);
    }

#pragma omp for schedule(static)
    for (int64_t i = 0; i < (call->repeats ? kv_heads : units); i++) /* rows that meet several blocks: a head a thread */
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

/* One row over the keys lo .. hi of a block of its own; acc [dim] is the sum of values so far, weighted by exp(s - best). */
static void attend_narrow(const float *q, const float *keys, const float *values, int64_t lo, int64_t hi, int64_t dim,
                          float *acc, float *best, float *total) {
    float scores[TILE] __attribute__((aligned(64)));
    for (int64_t start = lo; start < hi; start += TILE) {
        const int count = hi - start < TILE ? (int)(hi - start) : TILE;
        const float *k = keys + start * dim, *v = values + start * dim;
        float peak = *best;
        for (int j = 0; j < count; j++) {
            shortvec sum = *(const shortvec *)q * *(const shortvec *)(k + j * dim);
            for (int64_t d = SHORT; d < dim; d += SHORT)
                sum += *(const shortvec *)(q + d) * *(const shortvec *)(k + j * dim + d);
            scores[j] = sum_lanes(sum);
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

/* The rows of one place and KV head over their block, going on from what they saw in others. */
static void attend_place(const Layer *layer, const Call *call, int64_t place, int64_t head, float *q) {
    const int64_t dim = layer->dim, groups = layer->heads / layer->kv_heads, block = place / call->queries;
    const float *k = layer->keys + call->key_offset + block * call->key_block + head * call->key_head;
    const float *v = layer->values + call->value_offset + block * call->value_block + head * call->value_head;
    const int64_t lo = call->lo ? call->lo[place] : 0, hi = call->hi ? call->hi[place] : call->num_keys;
    if (lo >= hi) return;
    for (int64_t group = 0; group < groups; group++) {
        if (!load_query(layer, call, place, head * groups + group, q, 1)) return;
        const int64_t token = call->query_index ? call->query_index[place] : place;
        const int64_t at = token * layer->heads + head * groups + group;
        float best = layer->lse[at], total = best == -INFINITY ? 0.0f : 1.0f, *out = layer->out + at * dim;
        attend_narrow(q, k, v, lo, hi, dim, out, &best, &total);
        for (int64_t d = 0; d < dim; d++) out[d] /= total;
        layer->lse[at] = best + logf(total);
    }
}

/* Room for `size` vectors, kept from call to call: fresh pages would cost more than what is done in them. */
static vec *workspace(int64_t size) {
    static _Thread_local vec *room;
    static _Thread_local int64_t held;
    if (size > held) {
        free(room);
        room = aligned_alloc(64, sizeof(vec) * size);
        held = room ? size : 0;
    }
    return room;
}

/* Attention of `tokens` queries to all blocks of `calls`. sinks: [heads] or NULL.
 * dim is a multiple of SHORT. Returns 0, or 1 if memory ran out. */
int attend(const Layer *layer, const float *sinks, int64_t tokens, const Call *calls, int64_t num_calls, int threads) {
    const int64_t dim = layer->dim, kv_heads = layer->kv_heads, groups = layer->heads / kv_heads;
    int64_t needed = 0;
    for (int64_t c = 0; c < num_calls; c++) {
        const int64_t rows = calls[c].queries * groups, tiles = (rows + WIDEST * LANES - 1) / (WIDEST * LANES);
        const int64_t units = calls[c].blocks * kv_heads * tiles, vectors = (rows + LANES - 1) / LANES;
        const int64_t width = vectors < WIDEST ? vectors : WIDEST, tasks = units * split(&calls[c], units, threads);
        const int64_t wanted = (units * dim + tasks * (dim + 2)) * width;
        if (wanted > needed) needed = wanted;
    }
    vec *room = workspace(needed);
    if (!room) return 1;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < layer->heads; h++) layer->lse[t * layer->heads + h] = sinks ? sinks[h] : -INFINITY;
    memset(layer->out, 0, sizeof(float) * tokens * layer->heads * dim);

#pragma omp parallel num_threads(threads)
    for (int64_t c = 0; c < num_calls; c++) {
        const Call *call = calls + c;
        if (call->blocks == 1 || call->queries * groups > NARROW) {
            attend_wide(layer, call, room, threads);
            continue;
        }
        float q[dim] __attribute__((aligned(64)));
        const int64_t places = call->blocks * call->queries;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < (call->repeats ? 1 : places) * kv_heads; i++)
            for (int64_t place = call->repeats ? 0 : i / kv_heads; place < (call->repeats ? places : i / kv_heads + 1);
                 place++)
                attend_place(layer, call, place, i % kv_heads, q);
    }
    return 0;
}
