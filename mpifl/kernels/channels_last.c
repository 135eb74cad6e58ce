/* Layers of wide networks, called by bindings.py inside PyTorch's loop.
 *
 * 3x3 convolutions of stride 1 that keep the size of images: Winograd's F(4x4, 3x3) after Lavin and Gray, "Fast algorithms
 * for convolutional neural networks", CVPR 2016. Sixteen pixels take 36 products instead of 144. The polynomials are taken
 * at 0, 3/4, -3/4, 3/2, -3/2 and infinity, which rounds six times less than 0, 1, -1, 2, -2 (the paper's).
 *
 * Images are [n, height, width, channels] (channels last in PyTorch), one channel per vector lane. Tiles are transformed a
 * block at a time, so that a block stays in the cache. The arithmetic (channels_last_simd.inc) is compiled once for each
 * instruction set and returns the same bits on all of them. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "common.h"
#include "dispatch.h"

enum { STRIP = 32, BLOCK = 48, MAX_ROWS = 12, LINE = 16, POSITIONS = 36 };

/* Where the polynomials are taken, their squares, and what the values of a kernel are divided by: 2 a^2 (a^2 - b^2) at a. */
#define A1 0.75f
#define B1 1.5f
#define A2 (A1 * A1)
#define B2 (B1 * B1)
#define AT_0 (1 / (A2 * B2))
#define AT_A (1 / (2 * A2 * (A2 - B2)))
#define AT_B (1 / (2 * B2 * (B2 - A2)))

/* Images and the tiles of 4 x 4 pixels that cover them. */
struct image {
    ptrdiff_t height, width, tiles_high, tiles_wide;
};

/* Kernels [in or out channels ..., 3, 3]: where that of one pair of channels lies. */
struct kernel_shape {
    ptrdiff_t in, out, in_step, out_step;
    int flip; /* from the last element to the first */
};

/* The functions of channels_last_simd.inc for one instruction set. */
struct arithmetic {
    void (*input_tile)(const float *, float *, ptrdiff_t, const struct image *, ptrdiff_t, ptrdiff_t);
    void (*output_tile)(const float *, ptrdiff_t, const float *, float *, const struct image *, ptrdiff_t, ptrdiff_t);
    void (*output_grad_tile)(const float *, float *, ptrdiff_t, ptrdiff_t, const struct image *, ptrdiff_t, ptrdiff_t);
    void (*kernels)(const float *, float *, const struct kernel_shape *);
    void (*kernels_grad)(const float *, float *, const struct kernel_shape *);
    void (*gemm)(const float *, ptrdiff_t, ptrdiff_t, const float *, float *, ptrdiff_t, ptrdiff_t, ptrdiff_t, int);
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

static struct image image_of(ptrdiff_t height, ptrdiff_t width)
{
    return (struct image){height, width, (height + 3) / 4, (width + 3) / 4};
}

/* Returns how many floats of workspace the functions below need. */
ptrdiff_t mpifl_convolve3x3_workspace(ptrdiff_t in, ptrdiff_t out)
{
    return POSITIONS * (in * out + BLOCK * (in + out) + 2 * LINE);
}

/* y = convolution of x [n, height, width, in] with w, [n, height, width, out]. With flip, w is [in, out, 3, 3], and turned
 * around: the convolution that carries gradients back; otherwise [out, in, 3, 3]. bias: [out] or null; in, out: multiples
 * of STRIP; workspace: [mpifl_convolve3x3_workspace]. */
void mpifl_convolve3x3(const float *x, const float *w, const float *bias, float *y, ptrdiff_t n, ptrdiff_t height,
                       ptrdiff_t width, ptrdiff_t in, ptrdiff_t out, int flip, float *workspace)
{
    const struct arithmetic *run = select_arithmetic();
    const struct image s = image_of(height, width);
    const struct kernel_shape k = {in, out, flip ? out * 9 : 9, flip ? 9 : in * 9, flip};
    const ptrdiff_t tiles = n * s.tiles_high * s.tiles_wide, from = BLOCK * in + LINE, to = BLOCK * out + LINE;
    float *u = workspace, *v = u + POSITIONS * in * out, *m = v + POSITIONS * from;
    run->kernels(w, u, &k);
    for (ptrdiff_t start = 0; start < tiles; start += BLOCK) {
        const ptrdiff_t count = tiles - start < BLOCK ? tiles - start : BLOCK;
        for (ptrdiff_t t = 0; t < count; t++)
            run->input_tile(x, v + t * in, from, &s, in, start + t);
        for (ptrdiff_t p = 0; p < POSITIONS; p++)
            for (ptrdiff_t o = 0; o < out; o += STRIP)
                run->gemm(v + p * from, 1, in, u + p * in * out + o * in, m + p * to + o, out, count, in, 0);
        for (ptrdiff_t t = 0; t < count; t++)
            run->output_tile(m + t * out, to, bias, y, &s, out, start + t);
    }
}

/* gw = gradient of the kernels [out, in, 3, 3] from the input x [n, height, width, in] and the gradient g of the output
 * [n, height, width, out]. in, out: multiples of STRIP; workspace: [mpifl_convolve3x3_workspace]. */
void mpifl_convolve3x3_backward(const float *x, const float *g, float *gw, ptrdiff_t n, ptrdiff_t height,
                                ptrdiff_t width, ptrdiff_t in, ptrdiff_t out, float *workspace)
{
    const struct arithmetic *run = select_arithmetic();
    const struct image s = image_of(height, width);
    const struct kernel_shape k = {in, out, 9, in * 9, 0};
    const ptrdiff_t tiles = n * s.tiles_high * s.tiles_wide, from = BLOCK * in + LINE, to = BLOCK * out + LINE;
    float *u = workspace, *v = u + POSITIONS * in * out, *m = v + POSITIONS * from;
    for (ptrdiff_t start = 0; start < tiles; start += BLOCK) {
        const ptrdiff_t count = tiles - start < BLOCK ? tiles - start : BLOCK;
        for (ptrdiff_t t = 0; t < count; t++) {
            run->input_tile(x, v + t * in, from, &s, in, start + t);
            run->output_grad_tile(g, m + t * STRIP, to, BLOCK, &s, out, start + t);
        }
        for (ptrdiff_t p = 0; p < POSITIONS; p++)
            for (ptrdiff_t o = 0; o < out; o += STRIP)
                run->gemm(v + p * from, in, 1, m + p * to + o * BLOCK, u + p * in * out + o * in, STRIP, in, count, start > 0);
    }
    run->kernels_grad(u, gw, &k);
}
