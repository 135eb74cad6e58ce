/* Layers of wide networks, called by convolutions.py inside PyTorch's loop.
 *
 * Convolutions of stride 1 with kernels of 3x3 and 5x5: Winograd's F(4x4, 3x3) and F(2x2, 5x5) after Lavin and Gray, "Fast
 * algorithms for convolutional neural networks", CVPR 2016. Both compute a tile of pixels with 36 products: sixteen pixels
 * instead of 144 products, or four pixels instead of 100. The interpolation points are 0, 3/4, -3/4, 3/2, -3/2 and infinity:
 * rounding errors are six times smaller than with the paper's points 0, 1, -1, 2, -2.
 *
 * Images are [n, height, width, channels] (channels last in PyTorch), one channel per vector lane. Tiles are transformed a
 * block at a time, so that a block stays in the cache. The arithmetic (channels_last_simd.inc) is compiled once for each
 * instruction set and returns the same bits on all of them. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "common.h"
#include "dispatch.h"

enum { STRIP = 32, BLOCK = 48, MAX_ROWS = 12, LINE = 16, POINTS = 6, POSITIONS = POINTS * POINTS, MAX_TAPS = 5 };

/* The interpolation points, their squares, and the divisors of a kernel's values: 2 a^2 (a^2 - b^2) at point a. */
#define A1 0.75f
#define B1 1.5f
#define A2 (A1 * A1)
#define B2 (B1 * B1)
#define AT_0 (1 / (A2 * B2))
#define AT_A (1 / (2 * A2 * (A2 - B2)))
#define AT_B (1 / (2 * B2 * (B2 - A2)))

/* A convolution: its input, its output, and the tiles of `side` x `side` pixels that cover the output. */
struct convolution {
    ptrdiff_t height, width, in; /* pixels and channels of the input */
    ptrdiff_t out_height, out_width, out;
    ptrdiff_t taps, margin, side; /* kernels of taps x taps, margin around the input; side = POINTS + 1 - taps */
    ptrdiff_t tiles_high, tiles_wide, tiles; /* of an image, and in all */
};

/* Where a tile of the output begins, in pixels. */
struct place {
    ptrdiff_t image, top, left;
};

static inline struct place place_of(const struct convolution *s, ptrdiff_t tile)
{
    const ptrdiff_t line = tile / s->tiles_wide;
    return (struct place){line / s->tiles_high, line % s->tiles_high * s->side, tile % s->tiles_wide * s->side};
}

/* Kernels [in or out channels ..., taps, taps]: the position of the kernel of each pair of channels. */
struct kernel_shape {
    ptrdiff_t in, out, in_step, out_step, taps;
    int flip; /* whether elements are read from the last to the first */
};

/* How a matrix product treats the numbers already in its output: it replaces them, continues their sums, or computes its
 * own sums and adds these to them. */
enum sum { REPLACED, CONTINUED, ADDED };

/* The functions of channels_last_simd.inc for one instruction set. */
struct arithmetic {
    void (*input_tile)(const float *, float *, ptrdiff_t, const struct convolution *, ptrdiff_t);
    void (*input_grad_tile)(const float *, ptrdiff_t, float *, const struct convolution *, ptrdiff_t);
    void (*output_tile)(const float *, ptrdiff_t, const float *, float *, const struct convolution *, ptrdiff_t);
    void (*output_grad_tile)(const float *, float *, ptrdiff_t, ptrdiff_t, const struct convolution *, ptrdiff_t);
    void (*kernels)(const float *, float *, const struct kernel_shape *);
    void (*kernels_grad)(const float *, float *, const struct kernel_shape *);
    void (*gemm)(const float *, ptrdiff_t, ptrdiff_t, const float *, float *, ptrdiff_t, ptrdiff_t, ptrdiff_t, enum sum);
};

#ifdef __x86_64__
#define TARGET TARGET_AVX512
#define NAME(f) f##_avx512
#define WIDTH 16
#define MR 12
#define NR 2
#include "channels_last_simd.inc"

#define TARGET TARGET_AVX2
#define NAME(f) f##_avx2
#define WIDTH 8
#define MR 6
#define NR 2
#include "channels_last_simd.inc"

static const struct arithmetic *select_arithmetic(void)
{
    const int kind = vectors();
    return kind == WIDE_VECTORS ? &arithmetic_avx512 : kind == NARROW_VECTORS ? &arithmetic_avx2 : 0;
}
#elif defined(__aarch64__)
#define TARGET
#define NAME(f) f##_neon
#define WIDTH 4
#define MR 8
#define NR 2
#include "channels_last_simd.inc"

static const struct arithmetic *select_arithmetic(void) { return &arithmetic_neon; }
#else
static const struct arithmetic *select_arithmetic(void) { return 0; }
#endif

static struct convolution convolution_of(ptrdiff_t n, ptrdiff_t height, ptrdiff_t width, ptrdiff_t in, ptrdiff_t out,
                                         ptrdiff_t taps, ptrdiff_t margin)
{
    const ptrdiff_t side = POINTS + 1 - taps, more = 2 * margin + 1 - taps;
    const ptrdiff_t high = (height + more + side - 1) / side, wide = (width + more + side - 1) / side;
    return (struct convolution){height, width, in,   height + more, width + more, out,
                                taps,   margin, side, high, wide, n * high * wide};
}

/* Returns how many floats of workspace the functions below need. */
ptrdiff_t mpifl_convolve_workspace(ptrdiff_t in, ptrdiff_t out)
{
    return POSITIONS * (in * out + BLOCK * (in + out) + 2 * LINE);
}

/* y = convolution of x [n, height, width, in] with w, [n, height + more, width + more, out], more = 2 margin + 1 - taps. With
 * flip, w is [in, out, taps, taps] and flipped, for the backward pass to the input; otherwise it is
 * [out, in, taps, taps]. bias: [out] or null; in, out: multiples of STRIP; taps: 3 or 5; margin: less than taps;
 * workspace: [mpifl_convolve_workspace]. */
void mpifl_convolve(const float *x, const float *w, const float *bias, float *y, ptrdiff_t n, ptrdiff_t height,
                    ptrdiff_t width, ptrdiff_t in, ptrdiff_t out, ptrdiff_t taps, ptrdiff_t margin, int flip,
                    float *workspace)
{
    const struct arithmetic *run = select_arithmetic();
    const struct convolution s = convolution_of(n, height, width, in, out, taps, margin);
    const ptrdiff_t area = taps * taps;
    const struct kernel_shape k = {in, out, flip ? out * area : area, flip ? area : in * area, taps, flip};
    const ptrdiff_t from = BLOCK * in + LINE, to = BLOCK * out + LINE;
    float *u = workspace, *v = u + POSITIONS * in * out, *m = v + POSITIONS * from;
    run->kernels(w, u, &k);
    for (ptrdiff_t start = 0; start < s.tiles; start += BLOCK) {
        const ptrdiff_t count = s.tiles - start < BLOCK ? s.tiles - start : BLOCK;
        for (ptrdiff_t t = 0; t < count; t++)
            run->input_tile(x, v + t * in, from, &s, start + t);
        for (ptrdiff_t p = 0; p < POSITIONS; p++)
            for (ptrdiff_t o = 0; o < out; o += STRIP)
                run->gemm(v + p * from, 1, in, u + p * in * out + o * in, m + p * to + o, out, count, in, REPLACED);
        for (ptrdiff_t t = 0; t < count; t++)
            run->output_tile(m + t * out, to, bias, y, &s, start + t);
    }
}

/* gx = gradient of the input [n, height, width, in] from the gradient g of the output and the kernels w
 * [out, in, taps, taps]. The convolution of g with flip and a margin of taps - 1 - margin computes the same; this function
 * works on the tiles of the output, which are fewer if the output is smaller. The other arguments are those of
 * mpifl_convolve. */
void mpifl_convolve_input_grad(const float *g, const float *w, float *gx, ptrdiff_t n, ptrdiff_t height, ptrdiff_t width,
                               ptrdiff_t in, ptrdiff_t out, ptrdiff_t taps, ptrdiff_t margin, float *workspace)
{
    const struct arithmetic *run = select_arithmetic();
    const struct convolution s = convolution_of(n, height, width, in, out, taps, margin);
    const struct kernel_shape k = {out, in, in * taps * taps, taps * taps, taps, 0};
    const ptrdiff_t from = BLOCK * in + LINE, to = BLOCK * out + LINE;
    float *u = workspace, *v = u + POSITIONS * in * out, *m = v + POSITIONS * from;
    run->kernels(w, u, &k);
    memset(gx, 0, (size_t)(n * height * width * in) * sizeof *gx);
    for (ptrdiff_t start = 0; start < s.tiles; start += BLOCK) {
        const ptrdiff_t count = s.tiles - start < BLOCK ? s.tiles - start : BLOCK;
        for (ptrdiff_t t = 0; t < count; t++)
            run->output_grad_tile(g, m + t * STRIP, to, BLOCK, &s, start + t);
        for (ptrdiff_t p = 0; p < POSITIONS; p++)
            for (ptrdiff_t i = 0; i < in; i += STRIP)
                for (ptrdiff_t o = 0; o < out; o += STRIP)
                    run->gemm(m + p * to + o * BLOCK, 1, STRIP, u + p * in * out + i * out + o * STRIP, v + p * from + i, in,
                              count, STRIP, o ? CONTINUED : REPLACED);
        for (ptrdiff_t t = 0; t < count; t++)
            run->input_grad_tile(v + t * in, from, gx, &s, start + t);
    }
}

/* gw = gradient of the kernels [out, in, taps, taps] from the input x and the gradient g of the output. The other arguments
 * are those of mpifl_convolve. */
void mpifl_convolve_kernels_grad(const float *x, const float *g, float *gw, ptrdiff_t n, ptrdiff_t height, ptrdiff_t width,
                                 ptrdiff_t in, ptrdiff_t out, ptrdiff_t taps, ptrdiff_t margin, float *workspace)
{
    const struct arithmetic *run = select_arithmetic();
    const struct convolution s = convolution_of(n, height, width, in, out, taps, margin);
    const struct kernel_shape k = {in, out, taps * taps, in * taps * taps, taps, 0};
    const ptrdiff_t from = BLOCK * in + LINE, to = BLOCK * out + LINE;
    const enum sum more = taps == 3 ? CONTINUED : ADDED; /* 5x5: four times as many tiles, so one long sum rounds more */
    float *u = workspace, *v = u + POSITIONS * in * out, *m = v + POSITIONS * from;
    for (ptrdiff_t start = 0; start < s.tiles; start += BLOCK) {
        const ptrdiff_t count = s.tiles - start < BLOCK ? s.tiles - start : BLOCK;
        for (ptrdiff_t t = 0; t < count; t++) {
            run->input_tile(x, v + t * in, from, &s, start + t);
            run->output_grad_tile(g, m + t * STRIP, to, BLOCK, &s, start + t);
        }
        for (ptrdiff_t p = 0; p < POSITIONS; p++)
            for (ptrdiff_t o = 0; o < out; o += STRIP)
                run->gemm(v + p * from, in, 1, m + p * to + o * BLOCK, u + p * in * out + o * in, STRIP, in, count,
                          start ? more : REPLACED);
    }
    run->kernels_grad(u, gw, &k);
}
