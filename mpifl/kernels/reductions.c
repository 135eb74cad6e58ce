/* Exact weighted sums, largest absolute values, and 2x2 pooling. Called through ctypes by bindings.py and pooling.py.
 *
 * Every function returns the same bits on every processor: products and sums are rounded separately (-ffp-contract=off)
 * and the order of additions is fixed. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "common.h"

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define DISPATCHED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DISPATCHED
#endif

#define INLINE static inline __attribute__((always_inline))

enum {
    BLOCK = 8192,      /* columns per block: 64 kB of sums stay in the L2 cache */
    ROW_TILE = 8,      /* uploads added to one row per pass over its sums */
    PAIR_TILE = 4,     /* uploads added to two rows per pass */
    MAX_WINDOWS = 1024 /* pooling windows per output line */
};

/* ---- Exact sums ----
 *
 * Adding `magic` = 1.5 * 2^52 * spacing to a float64 rounds it to a multiple of `spacing` and leaves that multiple in the
 * low bits. The bits are added as uint64, which wraps around; the bits of `magic` are subtracted once per term. */

INLINE uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Adds `num` uploads to a row of sums. `num` is a compile-time constant, so that the inner loop is unrolled. */
INLINE void add_tile(uint64_t *restrict sums, const float *const *x, const double *weights, double magic, ptrdiff_t count,
                     const int num)
{
    for (ptrdiff_t i = 0; i < count; i++)
        for (int j = 0; j < num; j++)
            sums[i] += bits_of(x[j][i] * weights[j] + magic);
}

/* Adds `num` uploads to two rows of sums; each element is loaded and converted to float64 once for both. */
INLINE void add_pair_tile(uint64_t *restrict sums0, uint64_t *restrict sums1, const float *const *x, const double *weights0,
                          const double *weights1, const double *magic, ptrdiff_t count, const int num)
{
    const double magic0 = magic[0], magic1 = magic[1];
    for (ptrdiff_t i = 0; i < count; i++) {
        uint64_t sum0 = sums0[i], sum1 = sums1[i];
        for (int j = 0; j < num; j++) {
            const double value = x[j][i];
            sum0 += bits_of(value * weights0[j] + magic0);
            sum1 += bits_of(value * weights1[j] + magic1);
        }
        sums0[i] = sum0;
        sums1[i] = sum1;
    }
}

/* Adds the uploads with a nonzero weight to one row. */
INLINE void add_row(uint64_t *restrict sums, const float *const *uploads, const double *weights, double magic, ptrdiff_t num,
                    ptrdiff_t start, ptrdiff_t count)
{
    uint64_t terms = 0;
    for (ptrdiff_t j = 0; j < num;) {
        const float *x[ROW_TILE];
        double w[ROW_TILE];
        int found = 0;
        for (; j < num && found < ROW_TILE; j++)
            if (weights[j] != 0) {
                x[found] = uploads[j] + start;
                w[found++] = weights[j];
            }
        terms += (uint64_t)found;
        if (found == ROW_TILE)
            add_tile(sums, x, w, magic, count, ROW_TILE);
        else
            for (int t = 0; t < found; t++)
                add_tile(sums, x + t, w + t, magic, count, 1);
    }
    for (ptrdiff_t i = 0; i < count; i++)
        sums[i] -= terms * bits_of(magic);
}

/* Adds all uploads to two consecutive rows, `width` apart, whose weights are all nonzero. */
INLINE void add_row_pair(uint64_t *restrict sums, ptrdiff_t width, const float *const *uploads, const double *weights,
                         const double *magic, ptrdiff_t num, ptrdiff_t start, ptrdiff_t count)
{
    const float *x[PAIR_TILE];
    for (ptrdiff_t j = 0; j < num; j += PAIR_TILE) {
        const ptrdiff_t tile = num - j < PAIR_TILE ? num - j : PAIR_TILE;
        for (ptrdiff_t t = 0; t < tile; t++)
            x[t] = uploads[j + t] + start;
        if (tile == PAIR_TILE)
            add_pair_tile(sums, sums + width, x, weights + j, weights + num + j, magic, count, PAIR_TILE);
        else
            for (ptrdiff_t t = 0; t < tile; t++)
                add_pair_tile(sums, sums + width, x + t, weights + j + t, weights + num + j + t, magic, count, 1);
    }
    for (int k = 0; k < 2; k++)
        for (ptrdiff_t i = 0; i < count; i++)
            sums[k * width + i] -= (uint64_t)num * bits_of(magic[k]);
}

static int all_nonzero(const double *weights, ptrdiff_t count)
{
    for (ptrdiff_t j = 0; j < count; j++)
        if (weights[j] == 0)
            return 0;
    return 1;
}

/* sums[k][i] += sum over j of round(weights[k][j] * uploads[j][i] / spacing[k]); see aggregation/exact_sum.py.
 *
 * sums: [rows, width]; uploads: num pointers to [width]; weights: [rows, num]; magic: 1.5 * 2^52 * spacing, [rows]. */
DISPATCHED
void mpifl_exact_sum_add(uint64_t *restrict sums, const float *const *restrict uploads, const double *restrict weights,
                         const double *restrict magic, ptrdiff_t rows, ptrdiff_t num, ptrdiff_t width)
{
    for (ptrdiff_t start = 0; start < width; start += BLOCK) {
        const ptrdiff_t count = width - start < BLOCK ? width - start : BLOCK;
        for (ptrdiff_t k = 0; k < rows; k++) {
            uint64_t *row_sums = sums + k * width + start;
            const double *row_weights = weights + k * num;
            if (k + 1 < rows && all_nonzero(row_weights, 2 * num)) {
                add_row_pair(row_sums, width, uploads, row_weights, magic + k, num, start, count);
                k++;
            } else
                add_row(row_sums, uploads, row_weights, magic[k], num, start, count);
        }
    }
}

/* out[i] = (float)(sums[i] * spacing + kept[i]). sums: [count], |sums| < 2^53; kept: [count] or null. */
DISPATCHED
void mpifl_exact_sum_finish(const int64_t *restrict sums, double spacing, const double *restrict kept, float *restrict out,
                            ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        const double value = (double)sums[i] * spacing;
        out[i] = (float)(kept ? value + kept[i] : value);
    }
}

/* Returns the largest absolute value of x [count], or NaN if x contains one. */
DISPATCHED
float mpifl_max_abs(const float *restrict x, ptrdiff_t count) { return largest_abs(x, count); }

/* ---- Pooling of 2x2 windows with stride 2: the bits of PyTorch's layers ---- */

/* Writes the maximum of each window and its index in the window (0 to 3, row by row). On a tie the first element counts;
 * the last NaN counts before any number, as in PyTorch. Rows are compared before columns, so that both loops are long.
 *
 * x: [lines, 2, 2 * width], width <= MAX_WINDOWS; out, index: [lines, width]. */
DISPATCHED
void mpifl_max_pool2x2(const float *restrict x, float *restrict out, uint8_t *restrict index, ptrdiff_t lines,
                       ptrdiff_t width)
{
    float column_max[2 * MAX_WINDOWS];
    int32_t column_row[2 * MAX_WINDOWS]; /* row of the maximum of each column: 0 or 1 */
    const ptrdiff_t lines_per_block = MAX_WINDOWS / width;
    for (ptrdiff_t first = 0; first < lines; first += lines_per_block) {
        const ptrdiff_t count = lines - first < lines_per_block ? lines - first : lines_per_block;
        for (ptrdiff_t line = 0; line < count; line++) {
            const float *restrict top = x + (first + line) * 4 * width, *restrict bottom = top + 2 * width;
            float *restrict value = column_max + line * 2 * width;
            int32_t *restrict row = column_row + line * 2 * width;
            for (ptrdiff_t i = 0; i < 2 * width; i++) {
                const int32_t lower = (bottom[i] > top[i]) | (bottom[i] != bottom[i]);
                value[i] = lower ? bottom[i] : top[i];
                row[i] = lower;
            }
        }
        float *restrict max = out + first * width;
        uint8_t *restrict where = index + first * width;
        for (ptrdiff_t i = 0; i < count * width; i++) {
            const float left = column_max[2 * i], right = column_max[2 * i + 1];
            const int32_t left_row = column_row[2 * i], right_row = column_row[2 * i + 1];
            const int32_t earlier = left_row > right_row; /* the right element precedes the left one */
            const int32_t nan = (right != right) & ((left == left) | !earlier);
            const int32_t take_right = (right > left) | ((right == left) & earlier) | nan;
            max[i] = take_right ? right : left;
            where[i] = (uint8_t)(take_right ? 2 * right_row + 1 : 2 * left_row);
        }
    }
}

/* Writes the gradient of the input of mpifl_max_pool2x2. grad, index: [lines, width]; out: [lines, 2, 2 * width]. */
void mpifl_max_pool2x2_backward(const float *restrict grad, const uint8_t *restrict index, float *restrict out,
                                ptrdiff_t lines, ptrdiff_t width)
{
    for (ptrdiff_t line = 0; line < lines; line++) {
        const float *restrict g = grad + line * width;
        const uint8_t *restrict where = index + line * width;
        float *restrict pixels = out + line * 4 * width;
        memset(pixels, 0, (size_t)(4 * width) * sizeof *pixels);
        for (ptrdiff_t i = 0; i < width; i++)
            pixels[(where[i] >> 1) * 2 * width + 2 * i + (where[i] & 1)] = g[i];
    }
}

/* mpifl_max_pool2x2 for channels-last images. x: [lines, 2, 2 * width, channels]; out, index: [lines,
 * width, channels]. */
DISPATCHED
void mpifl_max_pool2x2_last(const float *restrict x, float *restrict out, uint8_t *restrict index, ptrdiff_t lines,
                            ptrdiff_t width, ptrdiff_t channels)
{
    for (ptrdiff_t window = 0; window < lines * width; window++, out += channels, index += channels) {
        const float *restrict top = x + (window / width * 4 * width + window % width * 2) * channels;
        const float *restrict bottom = top + 2 * width * channels;
        for (ptrdiff_t c = 0; c < channels; c++) {
            const float a = top[c], b = top[channels + c], d = bottom[c], e = bottom[channels + c];
            const int32_t right = (b > a) | (b != b);
            const float upper = right ? b : a;
            const int32_t lower = (d > upper) | (d != d);
            const float three = lower ? d : upper;
            const int32_t last = (e > three) | (e != e);
            out[c] = last ? e : three;
            index[c] = (uint8_t)(last ? 3 : lower ? 2 : right);
        }
    }
}

/* Bits of floats, and pixel indices of the same width: with single bytes, gcc needs many more instructions to compare. */
enum { LANES = 16 };
typedef int32_t lanes __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));

/* Writes the gradient of the input of mpifl_max_pool2x2_last. grad, index: [lines, width, channels]; out: [lines, 2, 2 *
 * width, channels]. */
DISPATCHED
void mpifl_max_pool2x2_last_backward(const float *restrict grad, const uint8_t *restrict index, float *restrict out,
                                     ptrdiff_t lines, ptrdiff_t width, ptrdiff_t channels)
{
    for (ptrdiff_t window = 0; window < lines * width; window++, grad += channels, index += channels) {
        float *restrict top = out + (window / width * 4 * width + window % width * 2) * channels;
        float *restrict bottom = top + 2 * width * channels;
        ptrdiff_t c = 0;
        for (; c + LANES <= channels; c += LANES) {
            lanes g;
            bytes from;
            memcpy(&g, grad + c, sizeof g);
            memcpy(&from, index + c, sizeof from);
            const lanes pixel = __builtin_convertvector(from, lanes);
            const lanes made[4] = {g & (pixel == 0), g & (pixel == 1), g & (pixel == 2), g & (pixel == 3)};
            memcpy(top + c, &made[0], sizeof g);
            memcpy(top + channels + c, &made[1], sizeof g);
            memcpy(bottom + c, &made[2], sizeof g);
            memcpy(bottom + channels + c, &made[3], sizeof g);
        }
        for (; c < channels; c++) {
            top[c] = index[c] == 0 ? grad[c] : 0;
            top[channels + c] = index[c] == 1 ? grad[c] : 0;
            bottom[c] = index[c] == 2 ? grad[c] : 0;
            bottom[channels + c] = index[c] == 3 ? grad[c] : 0;
        }
    }
}

/* Writes the mean of each window, added row by row. x: [lines, 2, 2 * width]; out: [lines, width]. */
DISPATCHED
void mpifl_avg_pool2x2(const float *restrict x, float *restrict out, ptrdiff_t lines, ptrdiff_t width)
{
    for (ptrdiff_t line = 0; line < lines; line++) {
        const float *restrict top = x + line * 4 * width, *restrict bottom = top + 2 * width;
        float *restrict mean = out + line * width;
        for (ptrdiff_t i = 0; i < width; i++)
            mean[i] = (((top[2 * i] + top[2 * i + 1]) + bottom[2 * i]) + bottom[2 * i + 1]) * 0.25f;
    }
}

/* Writes the gradient of the input of mpifl_avg_pool2x2. grad: [lines, width]; out: [lines, 2, 2 * width]. */
DISPATCHED
void mpifl_avg_pool2x2_backward(const float *restrict grad, float *restrict out, ptrdiff_t lines, ptrdiff_t width)
{
    for (ptrdiff_t line = 0; line < lines; line++) {
        const float *restrict g = grad + line * width;
        float *restrict top = out + line * 4 * width, *restrict bottom = top + 2 * width;
        for (ptrdiff_t i = 0; i < width; i++)
            top[2 * i] = top[2 * i + 1] = bottom[2 * i] = bottom[2 * i + 1] = g[i] * 0.25f;
    }
}
