/* Inner loops that neither NumPy nor PyTorch has, or has slower: exact sums, largest values, pooling of 2x2 windows.
 * Called through ctypes by bindings.py. Every function gives the same bits as what it replaces, whatever the processor:
 * products and sums are rounded one by one (-ffp-contract=off), and nothing is added in another order. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __FAST_MATH__
#error "-ffast-math changes sums: build without it"
#endif
#ifndef BUILD
#define BUILD "" /* hash of the sources and flags, as setup.py gives them */
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

enum {
    BLOCK = 8192, /* columns at a time: their sums (64 kB) stay in a core's second cache */
    TOGETHER = 8, /* uploads added in one pass over these sums */
    PAIRED = 4,   /* uploads added to two rows at once */
    WIDEST = 1024 /* windows in a line */
};

/* Changes with the arguments of any function: what was built from other sources is not called (bindings.VERSION). */
int version(void) { return 5; }

/* What this was built from, and by which compiler. */
const char *build(void) { return BUILD "|" __VERSION__; }

static inline uint64_t bits_of(double number)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

/* Adds the terms of `num` uploads to a row of sums; `num` is a constant where this is called, and unrolled. */
static inline __attribute__((always_inline)) void add_tile(uint64_t *restrict sum, const float *const *x,
                                                           const double *weights, double magic, ptrdiff_t count,
                                                           const int num)
{
    for (ptrdiff_t i = 0; i < count; i++)
        for (int j = 0; j < num; j++) /* wraps around; so does what is taken off */
            sum[i] += bits_of(x[j][i] * weights[j] + magic);
}

/* The same for two rows: each number is read and widened once for both. */
static inline __attribute__((always_inline)) void add_tiles(uint64_t *restrict one, uint64_t *restrict two,
                                                            const float *const *x, const double *first,
                                                            const double *second, const double *magic, ptrdiff_t count,
                                                            const int num)
{
    const double a = magic[0], b = magic[1];
    for (ptrdiff_t i = 0; i < count; i++) {
        uint64_t p = one[i], q = two[i];
        for (int j = 0; j < num; j++) {
            const double number = x[j][i];
            p += bits_of(number * first[j] + a);
            q += bits_of(number * second[j] + b);
        }
        one[i] = p;
        two[i] = q;
    }
}

/* Adds all uploads that weigh anything to one row. */
static inline __attribute__((always_inline)) void add_row(uint64_t *restrict sum, const float *const *uploads,
                                                          const double *weights, double magic, ptrdiff_t num,
                                                          ptrdiff_t start, ptrdiff_t count)
{
    uint64_t terms = 0;
    for (ptrdiff_t j = 0; j < num;) {
        const float *x[TOGETHER];
        double by[TOGETHER];
        int found = 0;
        for (; j < num && found < TOGETHER; j++)
            if (weights[j] != 0) {
                x[found] = uploads[j] + start;
                by[found++] = weights[j];
            }
        terms += (uint64_t)found;
        if (found == TOGETHER)
            add_tile(sum, x, by, magic, count, TOGETHER);
        else
            for (int t = 0; t < found; t++)
                add_tile(sum, x + t, by + t, magic, count, 1);
    }
    for (ptrdiff_t i = 0; i < count; i++)
        sum[i] -= terms * bits_of(magic);
}

/* Adds uploads that all weigh something to two rows: each number is read and widened once for both. */
static inline __attribute__((always_inline)) void add_pair(uint64_t *restrict sums, ptrdiff_t next,
                                                           const float *const *uploads, const double *weights,
                                                           const double *magic, ptrdiff_t num, ptrdiff_t start,
                                                           ptrdiff_t count)
{
    const float *x[PAIRED];
    for (ptrdiff_t j = 0; j < num; j += PAIRED) {
        const ptrdiff_t here = num - j < PAIRED ? num - j : PAIRED;
        for (ptrdiff_t t = 0; t < here; t++)
            x[t] = uploads[j + t] + start;
        if (here == PAIRED)
            add_tiles(sums, sums + next, x, weights + j, weights + num + j, magic, count, PAIRED);
        else
            for (ptrdiff_t t = 0; t < here; t++)
                add_tiles(sums, sums + next, x + t, weights + j + t, weights + num + j + t, magic, count, 1);
    }
    for (int k = 0; k < 2; k++)
        for (ptrdiff_t i = 0; i < count; i++)
            sums[k * next + i] -= (uint64_t)num * bits_of(magic[k]);
}

static int all_weigh(const double *weights, ptrdiff_t count)
{
    for (ptrdiff_t j = 0; j < count; j++)
        if (weights[j] == 0)
            return 0;
    return 1;
}

/* sums[k][i] += sum over j of the multiple of the grid that weights[k][j] * uploads[j][i] is rounded to; see comm/exact.py.
 * sums: [rows, width]; uploads: num pointers to [width]; weights: [rows, num]; magic: 1.5 * 2^52 * grid spacing, [rows]. */
FOR_EACH_PROCESSOR
void add_exactly(uint64_t *restrict sums, const float *const *restrict uploads, const double *restrict weights,
                 const double *restrict magic, ptrdiff_t rows, ptrdiff_t num, ptrdiff_t width)
{
    for (ptrdiff_t start = 0; start < width; start += BLOCK) {
        const ptrdiff_t count = width - start < BLOCK ? width - start : BLOCK;
        for (ptrdiff_t k = 0; k < rows; k++) {
            uint64_t *sum = sums + k * width + start;
            const double *mine = weights + k * num;
            if (k + 1 < rows && all_weigh(mine, 2 * num)) {
                add_pair(sum, width, uploads, mine, magic + k, num, start, count);
                k++;
            } else
                add_row(sum, uploads, mine, magic[k], num, start, count);
        }
    }
}

/* new[i] = (float)(sums[i] * grid + kept[i]); kept: null for nothing. sums: [count], below 2^53. */
FOR_EACH_PROCESSOR
void finish(const int64_t *restrict sums, double grid, const double *restrict kept, float *restrict out, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        const double value = (double)sums[i] * grid;
        out[i] = (float)(kept ? value + kept[i] : value);
    }
}

/* Largest absolute value of x [count]; a NaN where there is one. Without the sign, order of bits is order of numbers. */
FOR_EACH_PROCESSOR
float peak(const float *restrict x, ptrdiff_t count)
{
    int32_t most = 0;
    float found;
    for (ptrdiff_t i = 0; i < count; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    memcpy(&found, &most, sizeof found);
    return found;
}

/* Largest value of each 2x2 window, and where in its window it lies (0 to 3, row by row): the first one on a tie, the
 * last NaN before anything, as in PyTorch. Pixels are compared with those below them first, so that both loops are long.
 * x: [lines, 2, 2 * width], width <= WIDEST; out, where: [lines, width]. */
FOR_EACH_PROCESSOR
void max_pool(const float *restrict x, float *restrict out, uint8_t *restrict where, ptrdiff_t lines, ptrdiff_t width)
{
    float larger[2 * WIDEST];
    int32_t lower[2 * WIDEST]; /* whether that is the pixel below */
    const ptrdiff_t most = WIDEST / width;
    for (ptrdiff_t first = 0; first < lines; first += most) {
        const ptrdiff_t count = lines - first < most ? lines - first : most;
        for (ptrdiff_t line = 0; line < count; line++) {
            const float *restrict top = x + (first + line) * 4 * width, *restrict bottom = top + 2 * width;
            float *restrict value = larger + line * 2 * width;
            int32_t *restrict row = lower + line * 2 * width;
            for (ptrdiff_t i = 0; i < 2 * width; i++) {
                const int32_t over = (bottom[i] > top[i]) | (bottom[i] != bottom[i]);
                value[i] = over ? bottom[i] : top[i];
                row[i] = over;
            }
        }
        float *restrict best = out + first * width;
        uint8_t *restrict place = where + first * width;
        for (ptrdiff_t i = 0; i < count * width; i++) {
            const float left = larger[2 * i], right = larger[2 * i + 1];
            const int32_t row = lower[2 * i], other = lower[2 * i + 1];
            const int32_t earlier = row > other; /* the right one comes before the left one */
            const int32_t nan = (right != right) & ((left == left) | !earlier);
            const int32_t over = (right > left) | ((right == left) & earlier) | nan;
            best[i] = over ? right : left;
            place[i] = (uint8_t)(over ? 2 * other + 1 : 2 * row);
        }
    }
}

/* Hands each window's gradient to where its largest value lay. grad, where: [lines, width]; out: [lines, 2, 2 * width]. */
void max_pool_backward(const float *restrict grad, const uint8_t *restrict where, float *restrict out, ptrdiff_t lines,
                       ptrdiff_t width)
{
    for (ptrdiff_t line = 0; line < lines; line++) {
        const float *restrict g = grad + line * width;
        const uint8_t *restrict place = where + line * width;
        float *restrict pixels = out + line * 4 * width;
        memset(pixels, 0, 4 * width * sizeof *pixels);
        for (ptrdiff_t i = 0; i < width; i++)
            pixels[(place[i] >> 1) * 2 * width + 2 * i + (place[i] & 1)] = g[i];
    }
}

/* Mean of each 2x2 window, added row by row. x: [lines, 2, 2 * width]; out: [lines, width]. */
FOR_EACH_PROCESSOR
void mean_pool(const float *restrict x, float *restrict out, ptrdiff_t lines, ptrdiff_t width)
{
    for (ptrdiff_t line = 0; line < lines; line++) {
        const float *restrict top = x + line * 4 * width, *restrict bottom = top + 2 * width;
        float *restrict mean = out + line * width;
        for (ptrdiff_t i = 0; i < width; i++)
            mean[i] = (((top[2 * i] + top[2 * i + 1]) + bottom[2 * i]) + bottom[2 * i + 1]) * 0.25f;
    }
}

/* Hands a quarter of each window's gradient to its four pixels. grad: [lines, width]; out: [lines, 2, 2 * width]. */
FOR_EACH_PROCESSOR
void mean_pool_backward(const float *restrict grad, float *restrict out, ptrdiff_t lines, ptrdiff_t width)
{
    for (ptrdiff_t line = 0; line < lines; line++) {
        const float *restrict g = grad + line * width;
        float *restrict top = out + line * 4 * width, *restrict bottom = top + 2 * width;
        for (ptrdiff_t i = 0; i < width; i++)
            top[2 * i] = top[2 * i + 1] = bottom[2 * i] = bottom[2 * i + 1] = g[i] * 0.25f;
    }
}
