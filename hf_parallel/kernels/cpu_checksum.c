/* Checksums of rows of 32-bit words; see checksum.py. */

#include <stdint.h>

enum { WIDTH = 1024, COLUMNS = 2 };

/* out[rows][2] = sums of words[rows][1024], as signed integers, times multipliers[2][1024], modulo 2^64. */
void row_sums(const uint32_t *words, const uint64_t *multipliers, uint64_t *out, int64_t rows, int threads) {
    uint64_t bias[COLUMNS] = {0}; /* unsigned products are cheaper: word = (word ^ 2^31) - 2^31 */
    for (int column = 0; column < COLUMNS; column++)
        for (int i = 0; i < WIDTH; i++) bias[column] += multipliers[column * WIDTH + i] << 31;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 64)
    for (int64_t row = 0; row < rows; row++) {
        const uint32_t *word = words + row * WIDTH;
        uint64_t first = 0, second = 0;
        for (int i = 0; i < WIDTH; i++) {
            uint64_t value = word[i] ^ 0x80000000u;
            first += value * multipliers[i];
            second += value * multipliers[WIDTH + i];
        }
        out[row * COLUMNS] = first - bias[0];
        out[row * COLUMNS + 1] = second - bias[1];
    }
}
