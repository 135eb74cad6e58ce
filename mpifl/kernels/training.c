/* Training of small feed-forward networks: forward pass, gradient and SGD step for one batch after the other, without a
 * call into Python in between. Called through ctypes by training_calls.py.
 *
 * Convolutions keep one sample per vector lane, so that few channels and odd sizes cost nothing. Dense layers keep samples
 * as rows and update their weights while the gradient is in registers. The arithmetic (training_simd.inc) is compiled once
 * for each instruction set and returns the same bits on all of them. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "common.h"
#include "dispatch.h"

enum { LANES = 16, MAX_TILE = 12, MAX_LAYERS = 64 };
enum { CONV, RELU, MAX_POOL, AVG_POOL, RELU_AVG_POOL, FLATTEN, DENSE, DROPOUT }; /* layer.kind; as in training_calls.py */
enum { BAD_LABEL = -1, BAD_INDEX = -2, SMALL_WORKSPACE = -3 }; /* errors; as in training_calls.py */

/* One layer; bindings.LAYER has the same fields. For a dense layer, in_height and in_width are 1. */
struct layer {
    int64_t kind;
    int64_t in_channels, in_height, in_width;
    int64_t out_channels;  /* of a convolution; units of a dense layer; factors of dropout for a sample */
    int64_t kernel;        /* side of the kernel of a convolution */
    int64_t padding;       /* on all four sides of the input of a convolution */
    int64_t weight_offset; /* in the flat vector of all weights */
    int64_t bias_offset;
    int64_t trainable; /* 0 or 1 */
};

/* Options of one SGD step. The first step does not read the momentum, the last one does not write it. */
struct sgd {
    float lr, momentum, weight_decay;
    float mu; /* weight of the proximal term, if there is an anchor */
    int read_momentum, write_momentum;
};

static struct sgd sgd_options(float lr, float momentum, float weight_decay, int first, int last)
{
    return (struct sgd){lr, momentum, weight_decay, 0, momentum != 0 && !first, momentum != 0 && !last};
}

/* The flat vectors of a network. old: the weights before a step; weights: receives the weights after it, often the same
 * vector; grad: null, or receives gradients, which are then not applied; anchor: null, or the anchor of the proximal term
 * mu/2 ||w - anchor||^2 of the loss. */
struct params {
    const float *old;
    float *weights, *momentum, *grad;
    const float *anchor;
};

static inline struct params params_at(struct params p, ptrdiff_t offset)
{
    return (struct params){p.old + offset, p.weights + offset, p.momentum ? p.momentum + offset : 0,
                           p.grad ? p.grad + offset : 0, p.anchor ? p.anchor + offset : 0};
}

/* Shape of a convolution as the kernels see it. */
struct conv {
    ptrdiff_t in_channels, in_height, in_width, out_channels, kernel, padding, out_height, out_width;
};

/* The functions of training_simd.inc for one instruction set. */
struct kernels {
    void (*sgd_step)(const float *, struct params, ptrdiff_t, const struct sgd *);
    float (*change_and_largest)(float *, const float *, ptrdiff_t);
    void (*gemm_nt)(const float *, const float *, const float *, float *, ptrdiff_t, ptrdiff_t, ptrdiff_t);
    void (*gemm_tn)(const float *, const float *, struct params, ptrdiff_t, ptrdiff_t, ptrdiff_t, const struct sgd *);
    void (*gemm_nn)(const float *, const float *, float *, ptrdiff_t, ptrdiff_t, ptrdiff_t);
    void (*dense_grad_bias)(const float *, struct params, ptrdiff_t, ptrdiff_t, const struct sgd *);
    void (*conv2d)(const float *, const float *, const float *, float *, const struct conv *);
    void (*conv2d_grad_weight)(const float *, const float *, float *, const struct conv *, int);
    void (*conv2d_grad_bias)(const float *, float *, ptrdiff_t, ptrdiff_t);
    void (*sum_lanes)(const float *, float *, ptrdiff_t);
    void (*relu)(float *, ptrdiff_t);
    void (*relu_backward)(const float *, float *, ptrdiff_t);
    void (*pool2x2)(const float *, float *, ptrdiff_t, ptrdiff_t, ptrdiff_t, int);
    void (*pool2x2_backward)(const float *, const float *, const float *, float *, ptrdiff_t, ptrdiff_t, ptrdiff_t, int);
};

static inline ptrdiff_t max_of(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

static inline ptrdiff_t min_of(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

typedef float quad __attribute__((vector_size(16)));
#ifdef __clang__ /* PICK(a, b, ...): the given elements of a and b; those of b are numbered after those of a */
#define PICK __builtin_shufflevector
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

#ifdef __x86_64__
#define TARGET TARGET_AVX512
#define NAME(f) f##_avx512
#define WIDTH 16
#define NT_MR 5
#define NT_NR 4
#define TN_MR 5
#define TN_NR 4
#define NN_MR 8
#define NN_NR 2
#define CONV_MR 6
#define CONV_NR 4
#define CONV_KR 4
#define POOLED_KR 2
#include "training_simd.inc"

#define TARGET TARGET_AVX2
#define NAME(f) f##_avx2
#define WIDTH 8
#define NT_MR 1
#define NT_NR 4
#define TN_MR 4
#define TN_NR 2
#define NN_MR 4
#define NN_NR 2
#define CONV_MR 3
#define CONV_NR 4
#define CONV_KR 2
#define POOLED_KR 3
#include "training_simd.inc"

static const struct kernels *select_kernels(void)
{
    const int kind = vectors();
    return kind == WIDE_VECTORS ? &kernels_avx512 : kind == NARROW_VECTORS ? &kernels_avx2 : 0;
}
#elif defined(__aarch64__)
#define TARGET
#define NAME(f) f##_neon
#define WIDTH 4
#define NT_MR 2
#define NT_NR 2
#define TN_MR 4
#define TN_NR 4
#define NN_MR 4
#define NN_NR 4
#define CONV_MR 3
#define CONV_NR 4
#define CONV_KR 2
#define POOLED_KR 3
#include "training_simd.inc"

static const struct kernels *select_kernels(void) { return &kernels_neon; }
#else
static const struct kernels *select_kernels(void) { return 0; }
#endif

/* Returns the size of struct layer in bytes. */
ptrdiff_t mpifl_layer_size(void) { return sizeof(struct layer); }

/* ---- Shapes ---- */

static ptrdiff_t groups_of(ptrdiff_t n) { return (n + LANES - 1) / LANES; } /* groups of LANES samples */

static ptrdiff_t input_size(const struct layer *l) { return l->in_channels * l->in_height * l->in_width; }

static struct conv conv_forward_shape(const struct layer *l)
{
    const ptrdiff_t growth = 2 * l->padding - l->kernel + 1;
    return (struct conv){.in_channels = l->in_channels,
                         .in_height = l->in_height,
                         .in_width = l->in_width,
                         .out_channels = l->out_channels,
                         .kernel = l->kernel,
                         .padding = l->padding,
                         .out_height = l->in_height + growth,
                         .out_width = l->in_width + growth};
}

/* The convolution that computes the gradient of the input from that of the output, with flipped kernels. */
static struct conv conv_backward_shape(const struct layer *l)
{
    const struct conv f = conv_forward_shape(l);
    const ptrdiff_t padding = l->kernel - 1 - l->padding;
    return (struct conv){.in_channels = l->out_channels,
                         .in_height = f.out_height,
                         .in_width = f.out_width,
                         .out_channels = l->in_channels,
                         .kernel = l->kernel,
                         .padding = padding,
                         .out_height = l->in_height,
                         .out_width = l->in_width};
}

static ptrdiff_t output_size(const struct layer *l)
{
    const struct conv f = conv_forward_shape(l);
    switch (l->kind) {
    case CONV:
        return f.out_channels * f.out_height * f.out_width;
    case MAX_POOL:
    case AVG_POOL:
    case RELU_AVG_POOL:
        return l->in_channels * (l->in_height / 2) * (l->in_width / 2);
    case DENSE:
        return l->out_channels;
    default:
        return input_size(l);
    }
}

/* ---- Workspace ---- */

/* A network and its buffers for batches of up to max_batch samples. */
struct network {
    const struct layer *layers;
    ptrdiff_t num_layers;
    float *activation[MAX_LAYERS + 1]; /* input of each layer, and output of the last one; see network_init for which share memory */
    float *grad, *grad_next;           /* gradient of the current activation and of the one below, swapped by each layer */
    float *padded;                     /* input of a convolution for one group, padded left and right; for its gradient */
    float *reordered;                  /* weights of a convolution, output channels last */
    const float *factors;              /* of dropout in this step, [layers, n, out_channels]; null: nothing is dropped */
    float *grad_lanes, *grad_flat;     /* gradient of weights and bias of a convolution: lane by lane, and summed */
    double *powers;                    /* of e, one for each class */
};

/* A block of floats and how many of them are used. start: null while sizes are only added up. */
struct arena {
    float *start;
    ptrdiff_t used;
};

static float *arena_alloc(struct arena *arena, ptrdiff_t count)
{
    float *block = arena->start ? arena->start + arena->used : 0;
    arena->used += (count + LANES - 1) / LANES * LANES;
    return block;
}

/* Places the buffers of a network from `start` on; returns how many floats they take. */
static ptrdiff_t network_init(struct network *net, const struct layer *layers, ptrdiff_t num_layers, ptrdiff_t max_batch,
                              float *start)
{
    struct arena arena = {start, 0};
    const ptrdiff_t lanes = groups_of(max_batch) * LANES;
    ptrdiff_t grad_size = 0, padded_size = 0, weights_size = 0, widest = 0;
    int in_lanes = layers[0].kind != DENSE; /* otherwise activations are rows */
    int of_max_pool = 0;                    /* whether the last activations are those of max pooling */
    net->layers = layers, net->num_layers = num_layers, net->factors = 0;
    net->activation[0] = arena_alloc(&arena, (in_lanes ? lanes : max_batch) * input_size(layers));
    for (ptrdiff_t i = 0; i < num_layers; i++) {
        const struct layer *l = layers + i;
        in_lanes = in_lanes && l->kind != FLATTEN;
        const ptrdiff_t size = (in_lanes ? lanes : max_batch) * output_size(l);
        /* backward of max pooling reads its output: ReLU may change it (gradients are zero there), dropout may not */
        const int in_place = l->kind == RELU || (l->kind == DROPOUT && !of_max_pool);
        of_max_pool = l->kind == MAX_POOL || (in_place && of_max_pool);
        net->activation[i + 1] = in_place ? net->activation[i] : arena_alloc(&arena, size);
        grad_size = max_of(grad_size, max_of(size, lanes * input_size(l)));
        widest = max_of(widest, l->kind == DENSE ? l->out_channels : 0); /* classes, or more: layers may be left out */
        if (l->kind == CONV) {
            padded_size = max_of(padded_size, l->in_channels * l->in_height * (l->in_width + 2 * l->padding));
            weights_size = max_of(weights_size, (l->in_channels * l->kernel * l->kernel + 1) * l->out_channels);
        }
    }
    net->grad = arena_alloc(&arena, grad_size), net->grad_next = arena_alloc(&arena, grad_size);
    net->padded = arena_alloc(&arena, padded_size * LANES);
    net->reordered = arena_alloc(&arena, weights_size), net->grad_flat = arena_alloc(&arena, weights_size);
    net->grad_lanes = arena_alloc(&arena, weights_size * LANES);
    net->powers = (double *)arena_alloc(&arena, 2 * widest);
    return arena.used;
}

/* Returns how many floats of workspace the functions below need for batches of up to max_batch samples. */
ptrdiff_t mpifl_workspace_size(const struct layer *layers, ptrdiff_t num_layers, ptrdiff_t max_batch)
{
    struct network net;
    return network_init(&net, layers, num_layers, max_batch, 0);
}

/* ---- Layouts ---- */

/* Converts rows [n, size] to lanes [groups, size, LANES]; lanes without a sample are zero. Sample s is rows[order[s]],
 * or rows[s] if order is null. */
static void pack_lanes(const float *rows, const int64_t *order, float *lanes, ptrdiff_t n, ptrdiff_t size)
{
    for (ptrdiff_t s = 0; s < groups_of(n) * LANES; s++) {
        float *lane = lanes + s / LANES * size * LANES + s % LANES;
        const float *row = s < n ? rows + (order ? order[s] : s) * size : 0;
        for (ptrdiff_t i = 0; i < size; i++)
            lane[i * LANES] = row ? row[i] : 0;
    }
}

/* Converts lanes [groups, size, LANES] to rows [n, size]. */
static void unpack_lanes(const float *lanes, float *rows, ptrdiff_t n, ptrdiff_t size)
{
    for (ptrdiff_t s = 0; s < n; s++) {
        const float *lane = lanes + s / LANES * size * LANES + s % LANES;
        for (ptrdiff_t i = 0; i < size; i++)
            rows[s * size + i] = lane[i * LANES];
    }
}

/* Adds `padding` columns of zeros on both sides of x [rows, width, LANES]; returns the padded planes. */
static const float *pad_columns(const float *x, float *padded, ptrdiff_t rows, ptrdiff_t width, ptrdiff_t padding)
{
    if (!padding)
        return x;
    const size_t side = (size_t)(padding * LANES) * sizeof *x, line = (size_t)(width * LANES) * sizeof *x;
    char *to = (char *)padded;
    for (ptrdiff_t i = 0; i < rows; i++, to += line + 2 * side) {
        memset(to, 0, side);
        memcpy(to + side, x + i * width * LANES, line);
        memset(to + side + line, 0, side);
    }
    return padded;
}

/* Writes weights [out, in, i, j] as [in, i, j, out]. */
static void transpose(const float *w, float *to, const struct layer *l)
{
    const ptrdiff_t k = l->kernel, in = l->in_channels, out = l->out_channels;
    for (ptrdiff_t o = 0; o < out; o++)
        for (ptrdiff_t c = 0; c < in; c++)
            for (ptrdiff_t i = 0; i < k; i++)
                for (ptrdiff_t j = 0; j < k; j++, w++)
                    to[((c * k + i) * k + j) * out + o] = *w;
}

/* Writes weights [out, in, i, j] as [out, k - 1 - i, k - 1 - j, in], for the gradient of the input. */
static void flip_transpose(const float *w, float *to, const struct layer *l)
{
    const ptrdiff_t k = l->kernel, in = l->in_channels, out = l->out_channels;
    for (ptrdiff_t o = 0; o < out; o++)
        for (ptrdiff_t c = 0; c < in; c++)
            for (ptrdiff_t i = 0; i < k; i++)
                for (ptrdiff_t j = 0; j < k; j++, w++)
                    to[((o * k + k - 1 - i) * k + k - 1 - j) * in + c] = *w;
}

/* ---- Convolutions on groups of LANES samples ---- */

static void conv_forward(const struct network *net, const struct layer *l, const float *w, const float *x, float *y,
                         ptrdiff_t groups, const struct kernels *run)
{
    const struct conv f = conv_forward_shape(l);
    transpose(w + l->weight_offset, net->reordered, l);
    for (ptrdiff_t k = 0; k < groups; k++) {
        const ptrdiff_t from = k * input_size(l) * LANES, to = k * output_size(l) * LANES;
        run->conv2d(x + from, net->reordered, w + l->bias_offset, y + to, &f);
    }
}

/* Writes the gradient gx of the input from the gradient g of the output. */
static void conv_grad_input(const struct network *net, const struct layer *l, const float *w, const float *g, float *gx,
                            ptrdiff_t groups, const struct kernels *run)
{
    const struct conv b = conv_backward_shape(l);
    flip_transpose(w + l->weight_offset, net->reordered, l);
    for (ptrdiff_t k = 0; k < groups; k++)
        run->conv2d(g + k * output_size(l) * LANES, net->reordered, 0, gx + k * input_size(l) * LANES, &b);
}

/* Applies the gradient of weights and bias, from the input x and the gradient g of the output. pooled: whether g comes
 * from max pooling. */
static void conv_grad_params(const struct network *net, const struct layer *l, struct params p, const float *x,
                             const float *g, ptrdiff_t groups, int pooled, const struct sgd *sgd, const struct kernels *run)
{
    const struct conv f = conv_forward_shape(l);
    const ptrdiff_t num = l->out_channels * l->in_channels * l->kernel * l->kernel, size = output_size(l) * LANES;
    float *bias_lanes = net->grad_lanes + num * LANES;
    memset(net->grad_lanes, 0, (size_t)((num + l->out_channels) * LANES) * sizeof *bias_lanes);
    for (ptrdiff_t k = 0; k < groups; k++) {
        const float *planes = x + k * input_size(l) * LANES;
        planes = pad_columns(planes, net->padded, l->in_channels * l->in_height, l->in_width, l->padding);
        run->conv2d_grad_weight(planes, g + k * size, net->grad_lanes, &f, pooled);
        run->conv2d_grad_bias(g + k * size, bias_lanes, l->out_channels, f.out_height * f.out_width);
    }
    run->sum_lanes(net->grad_lanes, net->grad_flat, num + l->out_channels);
    run->sgd_step(net->grad_flat, params_at(p, l->weight_offset), num, sgd);
    run->sgd_step(net->grad_flat + num, params_at(p, l->bias_offset), l->out_channels, sgd);
}

/* ---- Networks ---- */

/* Where samples come from: floats, or bytes with a table of the float for each byte of a channel. */
struct samples {
    const float *x;       /* [samples, size] */
    const uint8_t *bytes; /* [samples, channels, size / channels] where x is null */
    const float *table;   /* [channels, 256] */
    ptrdiff_t channels;
};

/* Writes the floats for the bytes of `n` samples: all samples of one pixel side by side, `step` floats between pixels.
 * Sample s is number order[s]. */
static inline void look_up(const struct samples *from, const int64_t *order, float *to, ptrdiff_t n, ptrdiff_t size,
                           const ptrdiff_t step)
{
    const ptrdiff_t plane = size / from->channels;
    const uint8_t *bytes[LANES];
    for (ptrdiff_t s = 0; s < n; s++)
        bytes[s] = from->bytes + order[s] * size;
    for (ptrdiff_t c = 0; c < from->channels; c++)
        for (ptrdiff_t i = c * plane; i < (c + 1) * plane; i++)
            for (ptrdiff_t s = 0; s < n; s++)
                to[i * step + s] = from->table[c * 256 + bytes[s][i]];
}

/* Copies n samples to the input of the first layer: those of `order`, or the first ones if it is null. */
static void load_batch(const struct network *net, const struct samples *from, const int64_t *order, ptrdiff_t n)
{
    const ptrdiff_t size = input_size(net->layers);
    const float *x = from->x;
    float *to = net->activation[0];
    if (!x && net->layers[0].kind != DENSE) {
        if (n % LANES)
            memset(to + n / LANES * size * LANES, 0, (size_t)(size * LANES) * sizeof *to);
        for (ptrdiff_t s = 0; s + LANES <= n; s += LANES)
            look_up(from, order + s, to + s * size, LANES, size, LANES);
        if (n % LANES)
            look_up(from, order + n / LANES * LANES, to + n / LANES * LANES * size, n % LANES, size, LANES);
    } else if (!x)
        for (ptrdiff_t s = 0; s < n; s++)
            look_up(from, order + s, to + s * size, 1, size, 1);
    else if (net->layers[0].kind != DENSE)
        pack_lanes(x, order, to, n, size);
    else
        for (ptrdiff_t s = 0; s < n; s++)
            memcpy(to + s * size, x + (order ? order[s] : s) * size, (size_t)size * sizeof *x);
}

/* Prefetches the n samples of the next step, which are read in random order from a table of all samples. */
static void prefetch_batch(const struct network *net, const struct samples *from, const int64_t *order, ptrdiff_t n)
{
    const ptrdiff_t line = 64, bytes = input_size(net->layers) * (from->x ? (ptrdiff_t)sizeof *from->x : 1);
    const char *const start = from->x ? (const char *)from->x : (const char *)from->bytes;
    for (ptrdiff_t s = 0; s < n; s++)
        for (ptrdiff_t i = 0; i < bytes; i += line)
            __builtin_prefetch(start + order[s] * bytes + i);
}

/* Multiplies x by the factors of a dropout layer: one for each number of rows, one for each channel of images in lanes. */
static void drop(const struct layer *l, const float *factors, float *x, ptrdiff_t n, int in_lanes)
{
    const ptrdiff_t width = l->out_channels, pixels = l->in_height * l->in_width;
    if (!in_lanes)
        for (ptrdiff_t i = 0; i < n * width; i++)
            x[i] *= factors[i];
    else
        for (ptrdiff_t k = 0; k < groups_of(n); k++)
            for (ptrdiff_t c = 0; c < width; c++) {
                float lanes[LANES] = {0};
                for (ptrdiff_t s = 0; s < LANES && k * LANES + s < n; s++)
                    lanes[s] = factors[(k * LANES + s) * width + c];
                for (ptrdiff_t i = 0; i < pixels; i++, x += LANES)
                    for (ptrdiff_t s = 0; s < LANES; s++)
                        x[s] *= lanes[s];
            }
}

/* Returns how many factors of dropout the layers before `end` take for a sample. */
static ptrdiff_t factors_before(const struct network *net, ptrdiff_t end)
{
    ptrdiff_t count = 0;
    for (ptrdiff_t i = 0; i < end; i++)
        count += net->layers[i].kind == DROPOUT ? net->layers[i].out_channels : 0;
    return count;
}

static void forward(const struct network *net, const float *w, ptrdiff_t n, const struct kernels *run)
{
    const ptrdiff_t groups = groups_of(n);
    int in_lanes = net->layers[0].kind != DENSE;
    for (ptrdiff_t i = 0; i < net->num_layers; i++) {
        const struct layer *l = net->layers + i;
        float *x = net->activation[i], *y = net->activation[i + 1];
        switch (l->kind) {
        case CONV:
            conv_forward(net, l, w, x, y, groups, run);
            break;
        case RELU:
            run->relu(x, (in_lanes ? groups * LANES : n) * input_size(l));
            break;
        case DROPOUT:
            if (y != x)
                memcpy(y, x, (size_t)((in_lanes ? groups * LANES : n) * input_size(l)) * sizeof *y);
            if (net->factors)
                drop(l, net->factors + n * factors_before(net, i), y, n, in_lanes);
            break;
        case MAX_POOL:
        case AVG_POOL:
        case RELU_AVG_POOL:
            run->pool2x2(x, y, groups * l->in_channels, l->in_height, l->in_width, (int)l->kind);
            break;
        case FLATTEN:
            unpack_lanes(x, y, n, input_size(l));
            in_lanes = 0;
            break;
        case DENSE:
            run->gemm_nt(x, w + l->weight_offset, w + l->bias_offset, y, n, l->in_channels, l->out_channels);
        }
    }
}

/* Propagates the gradient of the output, net->grad, down to the lowest trainable layer. Each layer is updated as soon as
 * its old weights are no longer needed. */
static void backward(struct network *net, struct params p, ptrdiff_t n, const struct sgd *sgd, const struct kernels *run)
{
    const ptrdiff_t groups = groups_of(n);
    ptrdiff_t lowest = 0; /* trainable layer */
    int in_lanes = 0;
    while (lowest < net->num_layers - 1 && !net->layers[lowest].trainable)
        lowest++;
    for (ptrdiff_t i = net->num_layers; i-- > lowest;) {
        const struct layer *l = net->layers + i;
        const float *x = net->activation[i], *y = net->activation[i + 1];
        float *g = net->grad, *gx = net->grad_next;
        switch (l->kind) {
        case CONV:
            if (i > lowest)
                conv_grad_input(net, l, p.old, g, gx, groups, run);
            if (l->trainable)
                conv_grad_params(net, l, p, x, g, groups, l[1].kind == MAX_POOL, sgd, run);
            break;
        case RELU:
            run->relu_backward(y, g, (in_lanes ? groups * LANES : n) * input_size(l));
            continue;
        case DROPOUT:
            if (net->factors)
                drop(l, net->factors + n * factors_before(net, i), g, n, in_lanes);
            continue;
        case MAX_POOL:
        case AVG_POOL:
        case RELU_AVG_POOL:
            run->pool2x2_backward(x, y, g, gx, groups * l->in_channels, l->in_height, l->in_width, (int)l->kind);
            break;
        case FLATTEN:
            pack_lanes(g, 0, gx, n, input_size(l));
            in_lanes = 1;
            break;
        case DENSE:
            if (i > lowest)
                run->gemm_nn(g, p.old + l->weight_offset, gx, n, l->in_channels, l->out_channels);
            if (l->trainable) {
                run->gemm_tn(g, x, params_at(p, l->weight_offset), n, l->in_channels, l->out_channels, sgd);
                run->dense_grad_bias(g, params_at(p, l->bias_offset), n, l->out_channels, sgd);
            }
        }
        net->grad = gx, net->grad_next = g;
    }
}

/* Returns the mean cross-entropy of the outputs [n, classes] and writes its gradient to net->grad. weights: null, or the
 * factor of each sample's loss. Sample s is number order[s] of labels and weights. */
static double cross_entropy(const struct network *net, const int64_t *labels, const float *weights, const int64_t *order,
                            ptrdiff_t n, ptrdiff_t classes)
{
    const float *logits = net->activation[net->num_layers];
    float *g = net->grad;
    double loss = 0, *const powers = net->powers;
    for (ptrdiff_t s = 0; s < n; s++, logits += classes, g += classes) {
        const int64_t label = labels[order[s]];
        double max = logits[0], sum = 0;
        for (ptrdiff_t c = 1; c < classes; c++)
            max = logits[c] > max ? logits[c] : max;
        for (ptrdiff_t c = 0; c < classes; c++)
            sum += powers[c] = exp(logits[c] - max);
        for (ptrdiff_t c = 0; c < classes; c++)
            g[c] = (float)((powers[c] / sum - (c == label)) / (double)n);
        const double value = log(sum) + max - logits[label];
        if (weights)
            for (ptrdiff_t c = 0; c < classes; c++)
                g[c] *= weights[order[s]];
        loss += weights ? weights[order[s]] * value : value;
    }
    return loss / (double)n;
}

/* Writes the outputs of a network for x [count, inputs] to y [count, outputs], `batch` samples at a time.
 * workspace: [size]. Returns 0 or SMALL_WORKSPACE. */
int mpifl_forward(const struct layer *layers, ptrdiff_t num_layers, const float *weights, const float *x, float *y,
                  ptrdiff_t count, ptrdiff_t batch, float *workspace, ptrdiff_t size)
{
    const ptrdiff_t outputs = output_size(layers + num_layers - 1);
    struct network net;
    if (network_init(&net, layers, num_layers, batch, workspace) > size)
        return SMALL_WORKSPACE;
    for (ptrdiff_t start = 0; start < count; start += batch) {
        const ptrdiff_t n = count - start < batch ? count - start : batch;
        load_batch(&net, &(struct samples){.x = x + start * input_size(layers)}, 0, n);
        forward(&net, weights, n, select_kernels());
        memcpy(y + start * outputs, net.activation[num_layers], (size_t)(n * outputs) * sizeof *y);
    }
    return 0;
}

/* The settings that all steps of one visit share. */
struct training {
    const struct kernels *run;
    struct samples samples;
    const int64_t *labels;
    const float *sample_weights; /* null, or the factor of each sample's loss */
    const float *factors;        /* of dropout, step after step; null: nothing is dropped */
    ptrdiff_t batch;
    float lr, momentum_factor, weight_decay;
    float mu; /* weight of the proximal term, if there is an anchor */
};

/* Returns 0 if order[0 .. count) are samples whose labels are classes. */
static int check_order(const int64_t *order, ptrdiff_t count, ptrdiff_t samples, const int64_t *labels, ptrdiff_t classes)
{
    for (ptrdiff_t s = 0; s < count; s++) {
        if (order[s] < 0 || order[s] >= samples)
            return BAD_INDEX;
        if (labels[order[s]] < 0 || labels[order[s]] >= classes)
            return BAD_LABEL;
    }
    return 0;
}

/* Takes a step on each batch of order[0 .. count); returns `total` plus their mean losses, added one by one. The loss of a
 * batch counts by its samples, in units of the first batch. */
static double train_epoch(struct network *net, const struct training *t, struct params params, const int64_t *order,
                          ptrdiff_t count, ptrdiff_t steps_done, int last, double total)
{
    const ptrdiff_t batch = t->batch, classes = output_size(net->layers + net->num_layers - 1);
    const ptrdiff_t unit = min_of(batch, count);
    for (ptrdiff_t start = 0; start < count; start += batch) {
        const ptrdiff_t n = count - start < batch ? count - start : batch;
        const int first_step = steps_done + start == 0, last_step = last && start + batch >= count;
        struct sgd sgd = sgd_options(t->lr, t->momentum_factor, t->weight_decay, first_step, last_step);
        sgd.mu = t->mu;
        net->factors = t->factors ? t->factors + start * factors_before(net, net->num_layers) : 0;
        load_batch(net, &t->samples, order + start, n);
        prefetch_batch(net, &t->samples, order + start + n, min_of(batch, count - start - n));
        forward(net, params.old, n, t->run);
        /* volatile: product and sum are rounded separately, as in network.py */
        volatile double value = cross_entropy(net, t->labels, t->sample_weights, order + start, n, classes);
        value *= (double)n / (double)unit;
        total += value;
        backward(net, params, n, &sgd, t->run);
        params.old = params.weights;
    }
    return total;
}

/* Takes SGD steps on the samples order[0 .. count), `batch` at a time, and writes the sum of the mean losses of the batches,
 * each times its samples in units of the first batch, to *loss. Returns 0, or, before any weight changes, BAD_LABEL, BAD_INDEX (in order) or SMALL_WORKSPACE.
 *
 * weights, momentum: [parameters]; grad: null, or receives the gradient of one batch while nothing else changes;
 * x: [samples, inputs]; labels: [samples]; sample_weights: null, or the factor of each sample's loss [samples];
 * factors: null, or those of dropout, batch after batch [layers, n, out_channels]; steps_done: steps taken before; last:
 * whether no step follows these; workspace: [size]. */
int mpifl_train(const struct layer *layers, ptrdiff_t num_layers, float *weights, float *momentum, float *grad,
                const float *x, const int64_t *labels, const float *sample_weights, ptrdiff_t samples, const int64_t *order,
                const float *factors, ptrdiff_t count, ptrdiff_t batch, float lr, float momentum_factor,
                float weight_decay, ptrdiff_t steps_done, int last, float *workspace, ptrdiff_t size, double *loss)
{
    const struct training t = {select_kernels(), {.x = x}, labels, sample_weights, factors, batch,
                               lr, momentum_factor, weight_decay, 0};
    const int status = check_order(order, count, samples, labels, output_size(layers + num_layers - 1));
    struct network net;
    if (status)
        return status;
    if (network_init(&net, layers, num_layers, batch, workspace) > size)
        return SMALL_WORKSPACE;
    *loss = train_epoch(&net, &t, (struct params){weights, weights, momentum, grad, 0}, order, count, steps_done, last, 0);
    return 0;
}

/* ---- Visits, one after the other ---- */

/* One visit; bindings.VISIT has the same fields. */
struct visit {
    const float *start;    /* [parameters], the initial weights */
    float *weights;        /* [parameters], written: the trained weights, or their difference from the start */
    const void *x;         /* its samples: bytes if there is a table, otherwise floats */
    const int64_t *labels; /* [samples] */
    int64_t samples;
    int64_t first;  /* first position of its samples in the order of all visits */
    int64_t count;  /* samples of all its epochs, repeated ones too */
    int64_t epoch;  /* samples of an epoch; the last one may be shorter */
    double loss;    /* written: mean loss of the samples of its steps, NaN if there is none */
    double max_abs; /* written: largest absolute value of what was written to weights, NaN if one is NaN */
};

/* Returns the size of struct visit in bytes. */
ptrdiff_t mpifl_visit_size(void) { return sizeof(struct visit); }

/* Returns whether a step writes all weights. */
static int moves_all(const struct network *net)
{
    for (ptrdiff_t i = 0; i < net->num_layers; i++)
        if ((net->layers[i].kind == CONV || net->layers[i].kind == DENSE) && !net->layers[i].trainable)
            return 0;
    return 1;
}

/* Trains `num_visits` visits by SGD, each from its own weights and with a new momentum. Returns 0, or BAD_LABEL, BAD_INDEX or
 * SMALL_WORKSPACE; the weights of the visits are then invalid.
 *
 * parameters: number of weights; table: null, or the float for each byte of each channel [channels, 256];
 * order: samples of all visits; proximal: whether mu/2 ||w - start||^2 is added to the loss; change: whether w - start is
 * written instead of w; momentum: [parameters], scratch; workspace: [size]. */
int mpifl_train_visits(const struct layer *layers, ptrdiff_t num_layers, ptrdiff_t parameters, struct visit *visits,
                       ptrdiff_t num_visits, const float *table, ptrdiff_t channels, const int64_t *order, ptrdiff_t batch,
                       float lr, float momentum_factor, float weight_decay, int proximal, float mu, int change,
                       float *momentum, float *workspace, ptrdiff_t size)
{
    const ptrdiff_t classes = output_size(layers + num_layers - 1);
    struct network net;
    if (network_init(&net, layers, num_layers, batch, workspace) > size)
        return SMALL_WORKSPACE;
    for (struct visit *v = visits; v < visits + num_visits; v++) {
        const struct samples samples = {table ? 0 : v->x, table ? v->x : 0, table, channels};
        const struct training t = {select_kernels(), samples, v->labels, 0, 0, batch, lr, momentum_factor, weight_decay, mu};
        struct params params = {v->start, v->weights, momentum, 0, proximal ? v->start : 0};
        const int64_t *of_visit = order + v->first;
        const int status = check_order(of_visit, v->count, v->samples, v->labels, classes);
        ptrdiff_t steps = 0;
        double total = 0;
        if (status)
            return status;
        if (!v->count || !moves_all(&net)) { /* otherwise the first step writes all weights */
            memcpy(v->weights, v->start, (size_t)parameters * sizeof *v->weights);
            params.old = v->weights;
        }
        for (ptrdiff_t done = 0; done < v->count; done += v->epoch) {
            const ptrdiff_t count = v->count - done < v->epoch ? v->count - done : v->epoch;
            const int last = done + count == v->count;
            const double sum = train_epoch(&net, &t, params, of_visit + done, count, steps, last, proximal ? total : 0);
            params.old = v->weights;
            total = proximal ? sum : total + sum; /* same order of additions as with one call per step, or per epoch */
            steps += (count + batch - 1) / batch;
        }
        v->loss = total / ((double)v->count / (double)min_of(batch, min_of(v->count, v->epoch))); /* NaN without samples */
        v->max_abs = select_kernels()->change_and_largest(v->weights, change ? v->start : 0, parameters);
    }
    return 0;
}

/* Writes the outputs of several models for the samples of each visit, [models, all samples, outputs]; of a visit, x, labels,
 * samples, first and count are read. Returns 0, or BAD_LABEL, BAD_INDEX or SMALL_WORKSPACE.
 *
 * weights: of the models of each visit [num_visits, num_models]; table, channels, order: as above; workspace: [size]. */
int mpifl_visit_outputs(const struct layer *layers, ptrdiff_t num_layers, const struct visit *visits, ptrdiff_t num_visits,
                        const float *const *weights, ptrdiff_t num_models, const float *table, ptrdiff_t channels,
                        const int64_t *order, ptrdiff_t batch, float *outputs, float *workspace, ptrdiff_t size)
{
    const ptrdiff_t classes = output_size(layers + num_layers - 1);
    struct network net;
    ptrdiff_t total = 0;
    if (network_init(&net, layers, num_layers, batch, workspace) > size)
        return SMALL_WORKSPACE;
    for (ptrdiff_t i = 0; i < num_visits; i++)
        total += visits[i].count;
    for (const struct visit *v = visits; v < visits + num_visits; v++, weights += num_models) {
        const struct samples samples = {table ? 0 : v->x, table ? v->x : 0, table, channels};
        const int64_t *of_visit = order + v->first;
        const int status = check_order(of_visit, v->count, v->samples, v->labels, classes);
        if (status)
            return status;
        for (ptrdiff_t start = 0; start < v->count; start += batch) {
            const ptrdiff_t n = v->count - start < batch ? v->count - start : batch;
            load_batch(&net, &samples, of_visit + start, n); /* only ReLU changes its input, and no network begins with it */
            for (ptrdiff_t k = 0; k < num_models; k++) {
                forward(&net, weights[k], n, select_kernels());
                memcpy(outputs + (k * total + start) * classes, net.activation[num_layers],
                       (size_t)(n * classes) * sizeof *outputs);
            }
        }
        outputs += v->count * classes;
    }
    return 0;
}

/* ---- The order of samples: NumPy's Generator(Philox(SeedSequence(entropy))).permutation(n) ---- */

static uint32_t hashed(uint32_t value, uint32_t *factor, uint32_t multiplier)
{
    value ^= *factor;
    *factor *= multiplier;
    value *= *factor;
    return value ^ value >> 16;
}

/* SeedSequence: mixes 128 bits of entropy into the key of Philox. */
static void seed_sequence(const uint32_t entropy[4], uint64_t key[2])
{
    uint32_t pool[4], factor = 0x43b0d7e5, words[4];
    for (int i = 0; i < 4; i++)
        pool[i] = hashed(entropy[i], &factor, 0x931e8875);
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++)
            if (from != to) {
                const uint32_t mixed = 0xca01f9dd * pool[to] - 0x4973f715 * hashed(pool[from], &factor, 0x931e8875);
                pool[to] = mixed ^ mixed >> 16;
            }
    factor = 0x8b51f9dd;
    for (int i = 0; i < 4; i++)
        words[i] = hashed(pool[i], &factor, 0x58f38ded);
    for (int i = 0; i < 2; i++)
        key[i] = words[2 * i] | (uint64_t)words[2 * i + 1] << 32;
}

/* Philox 4x64 with 10 rounds: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. */
struct philox {
    uint64_t key[2], counter, buffer[4];
    int used; /* 32-bit halves of the buffer that were returned */
};

static uint32_t philox_next(struct philox *p)
{
    if (p->used == 8) {
        uint64_t c[4] = {++p->counter, 0, 0, 0}, k0 = p->key[0], k1 = p->key[1];
        for (int round = 0; round < 10; round++, k0 += 0x9e3779b97f4a7c15, k1 += 0xbb67ae8584caa73b) {
            const unsigned __int128 a = (unsigned __int128)0xd2e7470ee14c6c93 * c[0];
            const unsigned __int128 b = (unsigned __int128)0xca5a826395121157 * c[2];
            const uint64_t next[4] = {(uint64_t)(b >> 64) ^ c[1] ^ k0, (uint64_t)b, (uint64_t)(a >> 64) ^ c[3] ^ k1, (uint64_t)a};
            memcpy(c, next, sizeof c);
        }
        memcpy(p->buffer, c, sizeof c);
        p->used = 0;
    }
    const uint64_t word = p->buffer[p->used / 2];
    return (uint32_t)(p->used++ % 2 ? word >> 32 : word);
}

/* Returns a uniform number from 0 to max: draws until the bits of `mask` are at most max. */
static uint32_t philox_up_to(struct philox *p, uint32_t max, uint32_t mask)
{
    uint32_t value = philox_next(p) & mask;
    while (value > max)
        value = philox_next(p) & mask;
    return value;
}

/* Writes one permutation of 0 .. sizes[i] - 1 after the other. entropy: 4 words for each; sizes: below 2^32. */
void mpifl_permutations(const uint32_t *entropy, const int64_t *sizes, ptrdiff_t count, int64_t *out)
{
    for (ptrdiff_t i = 0; i < count; out += sizes[i], i++) {
        struct philox p = {.counter = 0, .used = 8};
        uint32_t mask = 0xffffffff;
        seed_sequence(entropy + 4 * i, p.key);
        for (int64_t s = 0; s < sizes[i]; s++)
            out[s] = s;
        for (int64_t s = sizes[i] - 1; s > 0; s--) {
            while (mask >> 1 >= s)
                mask >>= 1;
            const uint32_t other = philox_up_to(&p, (uint32_t)s, mask);
            const int64_t kept = out[s];
            out[s] = out[other];
            out[other] = kept;
        }
    }
}

/* Takes one SGD step with the gradient grad [count]. */
void mpifl_sgd_step(float *weights, float *momentum, const float *grad, ptrdiff_t count, float lr, float momentum_factor,
                    float weight_decay, ptrdiff_t steps_done)
{
    const struct sgd sgd = sgd_options(lr, momentum_factor, weight_decay, steps_done == 0, 0);
    select_kernels()->sgd_step(grad, (struct params){weights, weights, momentum, 0, 0}, count, &sgd);
}
