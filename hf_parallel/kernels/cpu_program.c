/* A decode step as a list of instructions, run by one call: the kernels of this folder, and the copies, sums and products
 * between them.
 *
 * An instruction has up to OPERANDS operands. Each is an integer, or an address, that may depend on the number of tokens:
 *
 *     values[table] + per_token * tokens + constant
 *
 * `values` holds what changes from step to step (program.py). So a program serves every number of tokens.
 */

#include <stdint.h>
#include <string.h>

#define OPERANDS 20
#define DIMS 4
#define SMALL (1 << 15) /* numbers below which starting threads takes longer than the work */

int linear(int format, const float *x, const uint8_t *w, int64_t row_bytes, const float *b, float *y, int64_t tokens,
           int64_t inputs, int64_t outputs, int by_inputs, int threads);
int linear_int8(int format, const float *x, const uint8_t *w, int64_t row_bytes, const float *b, float *y, int64_t tokens,
                int64_t inputs, int64_t outputs, int threads);
void unpack(int format, const uint8_t *packed, int64_t row_bytes, float *out, int64_t rows, int64_t inputs, int threads);
void rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t n, double eps, double offset, int threads);
void activate(int kind, const float *x, float *out, int64_t n, int threads);
void rotate_heads(const float *query, float *query_out, int64_t heads, int64_t query_token, int64_t query_head,
                  const float *key, float *key_out, int64_t kv_heads, int64_t key_token, int64_t key_head, const float *cos,
                  const float *sin, int64_t tokens, int64_t dim, int64_t rotated, int64_t interleaved, int threads);
int attend_layer(const void *template, const float *query, int64_t query_token, int64_t query_head, float *out, float *best,
                 float *total, const void *keys, const void *values, int64_t tokens, const void *plan, int threads);

/* In the order of `program.py`. */
enum { LINEAR, LINEAR_INT8, UNPACK, RMS_NORM, ACTIVATE, ROTATE_HEADS, ATTEND, APPEND, TAKE_ROWS, COPY, ADD, SUBTRACT, MULTIPLY, DIVIDE };

/* Results of a program that failed. */
enum { NO_MEMORY = 1, NO_ROW };

typedef struct {
    int64_t table; /* index in `values`; -1: none */
    int64_t per_token, constant;
} Operand;

typedef struct {
    int64_t operation;
    Operand operands[OPERANDS];
} Instruction;

/* Where the new tokens of a step are stored, as in an AttentionPlan. */
typedef struct {
    int64_t count;
    const int64_t *query, *origin, *capacity, *index;
} Writes;

static double as_double(int64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rows of `bytes` bytes of a table of `rows`, by their indices. Returns NO_ROW if there is none. */
static int take_rows(const uint8_t *table, const int64_t *indices, uint8_t *out, int64_t count, int64_t bytes, int64_t rows) {
    for (int64_t i = 0; i < count; i++) {
        if (indices[i] < 0 || indices[i] >= rows) return NO_ROW;
        memcpy(out + i * bytes, table + indices[i] * bytes, bytes);
    }
    return 0;
}

/* Stores [heads][tokens][dim] numbers, whose heads and tokens are `head` and `token` apart. */
static void append(const float *new, int64_t head, int64_t token, int64_t heads, int64_t dim, float *storage, const Writes *writes) {
    for (int64_t i = 0; i < writes->count; i++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t row = writes->origin[i] * heads + h * writes->capacity[i] + writes->index[i];
            memcpy(storage + row * dim, new + h * head + writes->query[i] * token, sizeof(float) * dim);
        }
}

/* One row of numbers; `a_step` and `b_step`: 0 if there is one number for all. */
static inline __attribute__((always_inline)) void combine_row(int operation, const float *a, int64_t a_step, const float *b,
                                                              int64_t b_step, float *out, int64_t out_step, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float x = a[i * a_step];
        float result = x;
        if (operation == ADD) result = x + b[i * b_step];
        if (operation == SUBTRACT) result = x - b[i * b_step];
        if (operation == MULTIPLY) result = x * b[i * b_step];
        if (operation == DIVIDE) result = x / b[i * b_step];
        out[i * out_step] = result;
    }
}

/* out = a, a + b, a - b, a * b or a / b over four dimensions, each with a number of elements between neighbours. */
static inline __attribute__((always_inline)) void combine(int operation, const float *a, const float *b, float *out, const int64_t *sizes,
                                                          const int64_t *as, const int64_t *bs, const int64_t *outs, int threads) {
    const int64_t rows = sizes[0] * sizes[1] * sizes[2], n = sizes[3];
#pragma omp parallel for num_threads(threads) if (rows * n > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t i = row / (sizes[1] * sizes[2]), j = row / sizes[2] % sizes[1], k = row % sizes[2];
        const float *x = a + i * as[0] + j * as[1] + k * as[2], *y = b + i * bs[0] + j * bs[1] + k * bs[2];
        float *to = out + i * outs[0] + j * outs[1] + k * outs[2];
        if (as[3] == 1 && bs[3] == 1 && outs[3] == 1) combine_row(operation, x, 1, y, 1, to, 1, n);
        else if (as[3] == 1 && bs[3] == 0 && outs[3] == 1) combine_row(operation, x, 1, y, 0, to, 1, n);
        else combine_row(operation, x, as[3], y, bs[3], to, outs[3], n);
    }
}

/* Runs a program for `tokens` tokens. Returns 0, or why it failed. */
int run_program(const Instruction *program, int64_t length, const int64_t *values, int64_t tokens, int threads) {
    for (const Instruction *now = program; now < program + length; now++) {
        int64_t v[OPERANDS];
        for (int i = 0; i < OPERANDS; i++) {
            const Operand *operand = now->operands + i;
            v[i] = (operand->table < 0 ? 0 : values[operand->table]) + operand->per_token * tokens + operand->constant;
        }
        int result = 0;
#define AT(type, i) ((type *)(intptr_t)v[i])
        switch (now->operation) {
            case LINEAR:
                result = linear((int)v[0], AT(float, 1), AT(uint8_t, 2), v[3], AT(float, 4), AT(float, 5), v[6], v[7], v[8],
                                    (int)v[9], threads);
                break;
            case LINEAR_INT8:
                result =
                    linear_int8((int)v[0], AT(float, 1), AT(uint8_t, 2), v[3], AT(float, 4), AT(float, 5), v[6], v[7], v[8], threads);
                break;
            case UNPACK: unpack((int)v[0], AT(uint8_t, 1), v[2], AT(float, 3), v[4], v[5], threads); break;
            case RMS_NORM:
                rms_norm(AT(float, 0), AT(float, 1), AT(float, 2), v[3], v[4], as_double(v[5]), as_double(v[6]), threads);
                break;
            case ACTIVATE: activate((int)v[0], AT(float, 1), AT(float, 2), v[3], threads); break;
            case ROTATE_HEADS:
                rotate_heads(AT(float, 0), AT(float, 1), v[2], v[3], v[4], AT(float, 5), AT(float, 6), v[7], v[8], v[9],
                             AT(float, 10), AT(float, 11), v[12], v[13], v[14], v[15], threads);
                break;
            case ATTEND:
                result = attend_layer(AT(void, 0), AT(float, 1), v[2], v[3], AT(float, 4), AT(float, 5), AT(float, 6),
                                          AT(void, 7), AT(void, 8), v[9], AT(void, 10), threads);
                break;
            case APPEND: append(AT(float, 0), v[1], v[2], v[3], v[4], AT(float, 5), AT(Writes, 6)); break;
            case TAKE_ROWS: result = take_rows(AT(uint8_t, 0), AT(int64_t, 1), AT(uint8_t, 2), v[3], v[4], v[5]); break;
#define COMBINE(operation) \
    combine(operation, AT(float, 0), AT(float, 1), AT(float, 2), v + 3, v + 3 + DIMS, v + 3 + 2 * DIMS, v + 3 + 3 * DIMS, threads)
            case COPY: COMBINE(COPY); break;
            case ADD: COMBINE(ADD); break;
            case SUBTRACT: COMBINE(SUBTRACT); break;
            case MULTIPLY: COMBINE(MULTIPLY); break;
            case DIVIDE: COMBINE(DIVIDE); break;
            default: return -1;
        }
        if (result) return result;
    }
    return 0;
}
