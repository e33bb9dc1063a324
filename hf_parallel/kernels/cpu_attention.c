/* Attention of query rows to the blocks of keys that they see, in float32, with its log-sum-exp.
 *
 * All rows that see a block stand side by side in vector lanes, so that each key and value is read once for all of
 * them and every multiply-add serves sixteen rows (Hydragen, section 3.2). Softmax is online over tiles of keys; parts
 * of the block go to different threads and are merged exactly (Hydragen, eq. 5). Plain C with GCC's vector types.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define TILE 64   /* keys per tile: scores of a tile stay in the first-level cache */
#define UNROLL 8  /* keys, or dimensions, whose accumulators stay in registers */
#define WIDEST 3  /* vectors of rows per task: 48 rows */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64), aligned(64)));
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

/* One task: `width` vectors of rows over `num_keys` keys. Leaves the unscaled sums in ot [dim][width]. */
INLINE void attend_rows(int width, const vec *qt, const float *keys, const float *values, int64_t num_keys, int64_t dim,
                        vec *ot, vec *best, vec *total) {
    vec scores[TILE * WIDEST];
    memset(ot, 0, sizeof(vec) * dim * width);
    for (int w = 0; w < width; w++) best[w] = splat(-INFINITY), total[w] = splat(0.0f);
    for (int64_t start = 0; start < num_keys; start += TILE) {
        int count = num_keys - start < TILE ? (int)(num_keys - start) : TILE;
        const float *k = keys + start * dim, *v = values + start * dim;
        int j = 0;
        for (; j + UNROLL <= count; j += UNROLL) score(width, UNROLL, qt, k + j * dim, dim, scores + j * width);
        for (; j < count; j++) score(width, 1, qt, k + j * dim, dim, scores + j * width);

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

/* Rows `from` .. `from + LANES * width` of a head, as columns: qt [dim][width * LANES]; missing rows are zero. */
static void gather_rows(const float *query, int64_t heads, int64_t groups, int64_t kv_head, int64_t rows, int64_t from,
                        int width, int64_t dim, float scale, float *qt) {
    memset(qt, 0, sizeof(float) * dim * width * LANES);
    for (int64_t r = 0; r < (int64_t)width * LANES && from + r < rows; r++) {
        int64_t token = (from + r) / groups, group = (from + r) % groups;
        const float *q = query + (token * heads + kv_head * groups + group) * dim;
        for (int64_t d = 0; d < dim; d++) qt[d * width * LANES + r] = q[d] * scale;
    }
}

/* Block b is met by queries b * tokens to (b + 1) * tokens. query, out: [blocks * tokens, heads, dim]; lse: [blocks *
 * tokens, heads]; keys, values: [blocks][kv_heads][num_keys][dim], strides in floats. With `merge`, out and lse hold
 * what the queries saw in other blocks, and are merged with. dim is a multiple of 8, num_keys at least 1. Returns 0,
 * or 1 if memory ran out. */
int attend(const float *query, const float *keys, const float *values, float *out, float *lse, int64_t blocks,
           int64_t tokens, int64_t heads, int64_t kv_heads, int64_t num_keys, int64_t dim, int64_t key_block_stride,
           int64_t key_head_stride, int64_t value_block_stride, int64_t value_head_stride, float scale, int merge,
           int threads) {
    const int64_t groups = heads / kv_heads, rows = tokens * groups;
    const int64_t tiles = (rows + WIDEST * LANES - 1) / (WIDEST * LANES);
    const int64_t vectors = (rows + LANES - 1) / LANES;
    const int width = vectors < WIDEST ? (int)vectors : WIDEST;
    const int64_t units = blocks * kv_heads * tiles;
    int64_t parts = (4 * threads + units - 1) / units; /* about four tasks a thread, equally many for all */
    while (units * parts % threads) parts++;
    if (parts > num_keys / (4 * TILE)) parts = num_keys / (4 * TILE);
    if (parts < 1) parts = 1;
    const int64_t share = ((num_keys + parts - 1) / parts + TILE - 1) / TILE * TILE;
    parts = (num_keys + share - 1) / share;

    const int64_t tasks = units * parts, per_task = (dim + 2) * width;
    vec *partial = aligned_alloc(64, sizeof(vec) * per_task * tasks);
    vec *columns = aligned_alloc(64, sizeof(vec) * dim * width * units);
    if (!partial || !columns) {
        free(partial), free(columns);
        return 1;
    }
    for (int64_t i = 0; i < units; i++)
        gather_rows(query + i / (kv_heads * tiles) * tokens * heads * dim, heads, groups, i / tiles % kv_heads, rows,
                    i % tiles * width * LANES, width, dim, scale, (float *)(columns + i * dim * width));

#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t unit = task / parts, first = task % parts * share;
        const int64_t count = num_keys - first < share ? num_keys - first : share;
        const int64_t block = unit / (kv_heads * tiles), head = unit / tiles % kv_heads;
        const float *k = keys + block * key_block_stride + head * key_head_stride + first * dim;
        const float *v = values + block * value_block_stride + head * value_head_stride + first * dim;
        const vec *qt = columns + unit * dim * width;
        vec *ot = partial + task * per_task, *best = ot + dim * width, *total = best + width;
        if (width == 1) attend_rows(1, qt, k, v, count, dim, ot, best, total);
        else if (width == 2) attend_rows(2, qt, k, v, count, dim, ot, best, total);
        else attend_rows(3, qt, k, v, count, dim, ot, best, total);
    }

    for (int64_t unit = 0; unit < units; unit++) { /* merge the parts */
        vec *ot = partial + unit * parts * per_task, *best = ot + dim * width, *total = best + width;
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
        const int64_t from = unit % tiles * width * LANES, kv_head = unit / tiles % kv_heads;
        const int64_t first_token = unit / (kv_heads * tiles) * tokens;
        const float *sums = (const float *)ot, *peaks = (const float *)best, *totals = (const float *)total;
        for (int64_t r = 0; r < (int64_t)width * LANES && from + r < rows; r++) {
            int64_t at = (first_token + (from + r) / groups) * heads + kv_head * groups + (from + r) % groups;
            float mine = peaks[r] + logf(totals[r]), weight = 1.0f / totals[r], others = 0.0f;
            if (merge) { /* Hydragen, eq. 5 */
                others = 1.0f / (1.0f + expf(mine - lse[at]));
                weight *= 1.0f - others;
                float peak = mine > lse[at] ? mine : lse[at];
                mine = peak + log1pf(expf(-fabsf(mine - lse[at])));
            }
            for (int64_t d = 0; d < dim; d++) {
                float sum = sums[d * width * LANES + r] * weight;
                out[at * dim + d] = merge ? out[at * dim + d] * others + sum : sum;
            }
            lse[at] = mine;
        }
    }
    free(partial), free(columns);
    return 0;
}
