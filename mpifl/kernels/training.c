/* Training of small feed-forward networks: forward, gradient and a step of SGD for batch after batch, without a call in
 * between. Called through ctypes by bindings.py.
 *
 * Convolutions hold a lane for each sample, so that few channels and odd sizes cost nothing; dense layers hold samples row
 * by row, and their weights move while the gradient is in registers. The loops (training_simd.inc) are compiled once for each
 * instruction set and give the same bits on all of them. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __FAST_MATH__
#error "-ffast-math changes sums: build without it"
#endif
#ifndef BUILD
#define BUILD "" /* hash of the sources and flags, as setup.py gives them */
#endif

enum { LANES = 16, MOST = 12, DEEPEST = 64 };
enum { CONV, RELU, MAX_POOL, MEAN_POOL, FLATTEN, DENSE }; /* in the order of local/compiled.py */

enum { NO_CLASS = -1, NO_SAMPLE = -2, NO_ROOM = -3 }; /* what went wrong; as in bindings.py */

#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

/* One layer: what it is, the shape of its input (channels x 1 x 1 for rows), its outputs (channels or units), kernel side
 * and margin, where weights and bias begin in the flat vector, and whether these are trained. */
struct layer {
    int64_t kind, channels, height, width, outputs, kernel, padding, weight, bias, moves;
};

struct rates {
    float lr, momentum, decay;
    int remembers, keeps; /* whether the momentum is read, and whether it is written: nobody needs it after the last step */
};

static struct rates rates_of(const float *r, int first, int last)
{
    return (struct rates){r[0], r[1], r[2], r[1] != 0 && !first, r[1] != 0 && !last};
}

/* Weights and momentum that move, or where their gradient goes instead. */
struct place {
    float *w, *m, *grad;
};

static inline struct place shifted(struct place p, ptrdiff_t by)
{
    return (struct place){p.w + by, p.m ? p.m + by : 0, p.grad ? p.grad + by : 0};
}

/* A convolution of planes [channels, height, width] to [outputs, out_height, out_width]; rows begin `above` higher. */
struct sides {
    ptrdiff_t channels, height, width, outputs, kernel, above, out_height, out_width;
};

struct loops {
    void (*move)(const float *, struct place, ptrdiff_t, const struct rates *);
    void (*dots)(const float *, const float *, const float *, float *, ptrdiff_t, ptrdiff_t, ptrdiff_t);
    void (*weights)(const float *, const float *, struct place, ptrdiff_t, ptrdiff_t, ptrdiff_t, const struct rates *);
    void (*inputs)(const float *, const float *, float *, ptrdiff_t, ptrdiff_t, ptrdiff_t);
    void (*bias)(const float *, struct place, ptrdiff_t, ptrdiff_t, const struct rates *);
    void (*slide)(const float *, const float *, const float *, float *, const struct sides *);
    void (*slide_weights)(const float *, const float *, float *, const struct sides *);
    void (*slide_bias)(const float *, float *, ptrdiff_t, ptrdiff_t);
    void (*totals)(const float *, float *, ptrdiff_t);
    void (*relu)(float *, ptrdiff_t);
    void (*relu_back)(const float *, float *, ptrdiff_t);
    void (*pool)(const float *, float *, ptrdiff_t, ptrdiff_t, ptrdiff_t, int);
    void (*pool_back)(const float *, const float *, const float *, float *, ptrdiff_t, ptrdiff_t, ptrdiff_t, int);
};

static int narrow;

/* From now on, use the narrower registers of a processor that has two kinds; for tests. */
void layers_narrow(int on) { narrow = on; }

#ifdef __x86_64__
#define TARGET __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")))
#define NAME(f) f##_512
#define WIDTH 16
#define SAMPLES 5
#define OUTPUTS 4
#define ROWS 8
#define COLUMNS 2
#define TALL 6
#define LONG 4
#define DEEP 4
#include "training_simd.inc"

#define TARGET __attribute__((target("avx2,fma")))
#define NAME(f) f##_256
#define WIDTH 8
#define SAMPLES 2
#define OUTPUTS 2
#define ROWS 4
#define COLUMNS 2
#define TALL 3
#define LONG 4
#define DEEP 2
#include "training_simd.inc"

static const struct loops *loops(void)
{
    if (!narrow && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
        return &loops_512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &loops_256 : 0;
}
#elif defined(__aarch64__)
#define TARGET
#define NAME(f) f##_128
#define WIDTH 4
#define SAMPLES 2
#define OUTPUTS 2
#define ROWS 4
#define COLUMNS 4
#define TALL 3
#define LONG 4
#define DEEP 2
#include "training_simd.inc"

static const struct loops *loops(void) { return &loops_128; }
#else
static const struct loops *loops(void) { return 0; }
#endif

/* Changes with the arguments of any function: what was built from other sources is not called (bindings.VERSION). */
int version(void) { return 5; }

/* What this was built from, and by which compiler. */
const char *build(void) { return BUILD "|" __VERSION__; }

/* Whether this processor adds products without rounding them: without that, the bits would be others. */
int layers_run_here(void) { return loops() != 0; }

static ptrdiff_t inputs_of(const struct layer *l) { return l->channels * l->height * l->width; }

static struct sides forwards(const struct layer *l)
{
    const ptrdiff_t margin = 2 * l->padding - l->kernel + 1;
    return (struct sides){l->channels, l->height,  l->width + 2 * l->padding, l->outputs,
                          l->kernel,   l->padding, l->height + margin,        l->width + margin};
}

/* The convolution that carries gradients back: the other way round, with turned kernels and the other margin. */
static struct sides backwards(const struct layer *l)
{
    const struct sides d = forwards(l);
    const ptrdiff_t margin = l->kernel - 1 - l->padding;
    return (struct sides){l->outputs, d.out_height, d.out_width + 2 * margin, l->channels,
                          l->kernel,  margin,       l->height,                l->width};
}

static ptrdiff_t outputs_of(const struct layer *l)
{
    const struct sides d = forwards(l);
    switch (l->kind) {
    case CONV:
        return d.outputs * d.out_height * d.out_width;
    case MAX_POOL:
    case MEAN_POOL:
        return l->channels * (l->height / 2) * (l->width / 2);
    case DENSE:
        return l->outputs;
    default:
        return inputs_of(l);
    }
}

/* A network at work on batches of up to `most` samples. */
struct network {
    const struct layer *layers;
    ptrdiff_t num, most;
    float *x[DEEPEST + 1]; /* the input of each layer, and the output of the last */
    float *g, *h;          /* gradients by two neighbouring activations */
    float *wide;           /* planes of a group of samples between margins */
    float *turned;         /* weights of a convolution, outputs last */
    float *lanes, *flat;   /* their gradient, lane by lane and summed */
};

static ptrdiff_t most_of(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

/* Floats to work in, and how many of them are taken. start: null while they are only counted. */
struct room {
    float *start;
    ptrdiff_t taken;
};

static float *taken(struct room *room, ptrdiff_t count)
{
    float *here = room->start ? room->start + room->taken : 0;
    room->taken += (count + LANES - 1) / LANES * LANES;
    return here;
}

/* Lays a network out from `start` on; returns how many floats it takes. */
static ptrdiff_t laid_out(struct network *net, const struct layer *layers, ptrdiff_t num, ptrdiff_t most, float *start)
{
    struct room room = {start, 0};
    const ptrdiff_t padded = (most + LANES - 1) / LANES * LANES;
    ptrdiff_t widest = 0, wide = 0, weights = 0;
    int grouped = layers[0].kind != DENSE;
    net->layers = layers, net->num = num, net->most = most;
    net->x[0] = taken(&room, (grouped ? padded : most) * inputs_of(layers));
    for (ptrdiff_t i = 0; i < num; i++) {
        const struct layer *l = layers + i;
        grouped = grouped && l->kind != FLATTEN;
        const ptrdiff_t size = (grouped ? padded : most) * outputs_of(l);
        net->x[i + 1] = l->kind == RELU ? net->x[i] : taken(&room, size);
        widest = most_of(widest, most_of(size, padded * inputs_of(l)));
        if (l->kind == CONV) {
            const struct sides f = forwards(l), b = backwards(l);
            wide = most_of(wide, most_of(f.channels * f.height * f.width, b.channels * b.height * b.width));
            weights = most_of(weights, (l->channels * l->kernel * l->kernel + 1) * l->outputs);
        }
    }
    net->g = taken(&room, widest), net->h = taken(&room, widest);
    net->wide = taken(&room, wide * LANES);
    net->turned = taken(&room, weights), net->flat = taken(&room, weights);
    net->lanes = taken(&room, weights * LANES);
    return room.taken;
}

/* Floats of room that `layers_train` needs. */
ptrdiff_t layers_room(const struct layer *layers, ptrdiff_t num, ptrdiff_t most)
{
    struct network net;
    return laid_out(&net, layers, num, most, 0);
}

/* Puts `margin` columns of zeros on both sides of planes [count, width, LANES]. */
static const float *between_margins(const float *x, float *wide, ptrdiff_t count, ptrdiff_t width, ptrdiff_t margin)
{
    if (!margin)
        return x;
    const size_t side = (size_t)(margin * LANES) * sizeof *x, line = (size_t)(width * LANES) * sizeof *x;
    char *to = (char *)wide;
    for (ptrdiff_t i = 0; i < count; i++, to += line + 2 * side) {
        memset(to, 0, side);
        memcpy(to + side, x + i * width * LANES, line);
        memset(to + side + line, 0, side);
    }
    return wide;
}

/* Writes weights [o][c][i][j] as [c][i][j][o], or, to go back, as [o][i][j][c] with both kernel axes turned round. */
static void turn(const float *w, float *to, const struct layer *l, int back)
{
    const ptrdiff_t k = l->kernel, c_all = l->channels, o_all = l->outputs;
    for (ptrdiff_t o = 0; o < o_all; o++)
        for (ptrdiff_t c = 0; c < c_all; c++)
            for (ptrdiff_t i = 0; i < k; i++)
                for (ptrdiff_t j = 0; j < k; j++, w++)
                    to[back ? ((o * k + k - 1 - i) * k + k - 1 - j) * c_all + c : ((c * k + i) * k + j) * o_all + o] = *w;
}

static void convolve(const struct network *net, const struct layer *l, const float *w, const float *x, float *y,
                     ptrdiff_t groups, const struct loops *go)
{
    const struct sides d = forwards(l);
    turn(w + l->weight, net->turned, l, 0);
    for (ptrdiff_t k = 0; k < groups; k++) {
        const float *planes = x + k * inputs_of(l) * LANES;
        planes = between_margins(planes, net->wide, l->channels * l->height, l->width, l->padding);
        go->slide(planes, net->turned, w + l->bias, y + k * outputs_of(l) * LANES, &d);
    }
}

/* Moves a convolution's weights by the gradient g of its output. */
static void convolve_weights(const struct network *net, const struct layer *l, struct place at, const float *x,
                             const float *g, ptrdiff_t groups, const struct rates *r, const struct loops *go)
{
    const struct sides d = forwards(l);
    const ptrdiff_t num = l->outputs * l->channels * l->kernel * l->kernel, size = outputs_of(l) * LANES;
    float *bias = net->lanes + num * LANES;
    memset(net->lanes, 0, (size_t)((num + l->outputs) * LANES) * sizeof *bias);
    for (ptrdiff_t k = 0; k < groups; k++) {
        const float *planes = x + k * inputs_of(l) * LANES;
        planes = between_margins(planes, net->wide, l->channels * l->height, l->width, l->padding);
        go->slide_weights(planes, g + k * size, net->lanes, &d);
        go->slide_bias(g + k * size, bias, l->outputs, d.out_height * d.out_width);
    }
    go->totals(net->lanes, net->flat, num + l->outputs);
    go->move(net->flat, shifted(at, l->weight), num, r);
    go->move(net->flat + num, shifted(at, l->bias), l->outputs, r);
}

/* Writes the gradient gx of a convolution's input from that of its output. */
static void convolve_back(const struct network *net, const struct layer *l, const float *w, const float *g, float *gx,
                          ptrdiff_t groups, const struct loops *go)
{
    const struct sides d = forwards(l), b = backwards(l);
    turn(w + l->weight, net->turned, l, 1);
    for (ptrdiff_t k = 0; k < groups; k++) {
        const float *planes = g + k * outputs_of(l) * LANES;
        planes = between_margins(planes, net->wide, d.outputs * d.out_height, d.out_width, b.above);
        go->slide(planes, net->turned, 0, gx + k * inputs_of(l) * LANES, &b);
    }
}

/* Rows [n, size] to groups [groups, size, LANES], empty lanes zero; row s is where `order` says unless that is null. */
static void into_lanes(const float *rows, const int64_t *order, float *to, ptrdiff_t n, ptrdiff_t size)
{
    for (ptrdiff_t s = 0; s < (n + LANES - 1) / LANES * LANES; s++) {
        float *lane = to + s / LANES * size * LANES + s % LANES;
        const float *row = s < n ? rows + (order ? order[s] : s) * size : 0;
        for (ptrdiff_t i = 0; i < size; i++)
            lane[i * LANES] = row ? row[i] : 0;
    }
}

static void out_of_lanes(const float *x, float *rows, ptrdiff_t n, ptrdiff_t size)
{
    for (ptrdiff_t s = 0; s < n; s++) {
        const float *lane = x + s / LANES * size * LANES + s % LANES;
        for (ptrdiff_t i = 0; i < size; i++)
            rows[s * size + i] = lane[i * LANES];
    }
}

static void forward(const struct network *net, const float *w, ptrdiff_t n, const struct loops *go)
{
    const ptrdiff_t groups = (n + LANES - 1) / LANES;
    int grouped = net->layers[0].kind != DENSE;
    for (ptrdiff_t i = 0; i < net->num; i++) {
        const struct layer *l = net->layers + i;
        float *x = net->x[i], *y = net->x[i + 1];
        switch (l->kind) {
        case CONV:
            convolve(net, l, w, x, y, groups, go);
            break;
        case RELU:
            go->relu(x, (grouped ? groups * LANES : n) * inputs_of(l));
            break;
        case MAX_POOL:
        case MEAN_POOL:
            go->pool(x, y, groups * l->channels, l->height, l->width, l->kind == MAX_POOL);
            break;
        case FLATTEN:
            out_of_lanes(x, y, n, inputs_of(l));
            grouped = 0;
            break;
        case DENSE:
            go->dots(x, w + l->weight, w + l->bias, y, n, l->channels, l->outputs);
        }
    }
}

/* Carries the gradient net->g of the output back; every layer moves as soon as nothing needs its old weights. */
static void backward(struct network *net, struct place at, ptrdiff_t n, const struct rates *r, const struct loops *go)
{
    const ptrdiff_t groups = (n + LANES - 1) / LANES;
    ptrdiff_t lowest = 0; /* layer that moves */
    int grouped = 0;
    while (lowest < net->num - 1 && !net->layers[lowest].moves)
        lowest++;
    for (ptrdiff_t i = net->num; i-- > lowest;) {
        const struct layer *l = net->layers + i;
        const float *x = net->x[i], *y = net->x[i + 1];
        float *g = net->g, *gx = net->h;
        switch (l->kind) {
        case CONV:
            if (i > lowest)
                convolve_back(net, l, at.w, g, gx, groups, go);
            if (l->moves)
                convolve_weights(net, l, at, x, g, groups, r, go);
            break;
        case RELU:
            go->relu_back(y, g, (grouped ? groups * LANES : n) * inputs_of(l));
            continue;
        case MAX_POOL:
        case MEAN_POOL:
            go->pool_back(x, y, g, gx, groups * l->channels, l->height, l->width, l->kind == MAX_POOL);
            break;
        case FLATTEN:
            into_lanes(g, 0, gx, n, inputs_of(l));
            grouped = 1;
            break;
        case DENSE:
            if (i > lowest)
                go->inputs(g, at.w + l->weight, gx, n, l->channels, l->outputs);
            if (l->moves) {
                go->weights(x, g, shifted(at, l->weight), n, l->channels, l->outputs, r);
                go->bias(g, shifted(at, l->bias), n, l->outputs, r);
            }
        }
        net->g = gx, net->h = g;
    }
}

/* Returns the mean cross-entropy of logits [n, classes] and writes its gradient. */
static double cross_entropy(const float *logits, float *g, const int64_t *y, const int64_t *order, ptrdiff_t n,
                            ptrdiff_t classes)
{
    double loss = 0;
    for (ptrdiff_t s = 0; s < n; s++, logits += classes, g += classes) {
        const int64_t label = y[order[s]];
        double top = logits[0], sum = 0;
        for (ptrdiff_t c = 1; c < classes; c++)
            top = logits[c] > top ? logits[c] : top;
        for (ptrdiff_t c = 0; c < classes; c++)
            sum += exp(logits[c] - top);
        for (ptrdiff_t c = 0; c < classes; c++)
            g[c] = (float)((exp(logits[c] - top) / sum - (c == label)) / (double)n);
        loss += log(sum) + top - logits[label];
    }
    return loss / (double)n;
}

/* Puts samples where the first layer reads them; sample s is where `order` says unless that is null. */
static void enter(const struct network *net, const float *x, const int64_t *order, ptrdiff_t n)
{
    const ptrdiff_t size = inputs_of(net->layers);
    if (net->layers[0].kind != DENSE)
        into_lanes(x, order, net->x[0], n, size);
    else
        for (ptrdiff_t s = 0; s < n; s++)
            memcpy(net->x[0] + s * size, x + (order ? order[s] : s) * size, (size_t)size * sizeof *x);
}

/* Writes what the network makes of x [count, pixels] to y [count, outputs], `batch` samples at a time; returns 0, or
 * NO_ROOM where `size` floats of room are too few. */
int layers_forward(const struct layer *layers, ptrdiff_t num, const float *w, const float *x, float *y, ptrdiff_t count,
                   ptrdiff_t batch, float *room, ptrdiff_t size)
{
    const ptrdiff_t outputs = outputs_of(layers + num - 1);
    struct network net;
    if (laid_out(&net, layers, num, batch, room) > size)
        return NO_ROOM;
    for (ptrdiff_t start = 0; start < count; start += batch) {
        const ptrdiff_t n = count - start < batch ? count - start : batch;
        enter(&net, x + start * inputs_of(layers), 0, n);
        forward(&net, w, n, loops());
        memcpy(y + start * outputs, net.x[num], (size_t)(n * outputs) * sizeof *y);
    }
    return 0;
}

/* Trains on the samples order[0 .. count), `batch` at a time; returns the sum of the batches' mean losses, or, before anything
 * moves, NO_CLASS for a label, NO_SAMPLE for a number of `order`, NO_ROOM where `size` floats of room are too few.
 * x: [samples, pixels]; y: [samples]; rates: learning rate, momentum, weight decay; done: steps before these; last:
 * whether no step comes after them.
 * grad: null, or where the gradient of one batch goes while nothing moves. */
double layers_train(const struct layer *layers, ptrdiff_t num, float *w, float *m, float *grad, const float *x,
                    const int64_t *y, ptrdiff_t samples, const int64_t *order, ptrdiff_t count, ptrdiff_t batch,
                    const float *rates, ptrdiff_t done, int last, float *room, ptrdiff_t size)
{
    const struct loops *go = loops();
    const struct place at = {w, m, grad};
    const ptrdiff_t classes = outputs_of(layers + num - 1);
    struct network net;
    double total = 0;
    for (ptrdiff_t s = 0; s < count; s++) {
        if (order[s] < 0 || order[s] >= samples)
            return NO_SAMPLE;
        if (y[order[s]] < 0 || y[order[s]] >= classes)
            return NO_CLASS;
    }
    if (laid_out(&net, layers, num, batch, room) > size)
        return NO_ROOM;
    for (ptrdiff_t start = 0; start < count; start += batch) {
        const ptrdiff_t n = count - start < batch ? count - start : batch;
        const struct rates r = rates_of(rates, done + start == 0, last && start + batch >= count);
        enter(&net, x, order + start, n);
        forward(&net, w, n, go);
        const double loss = cross_entropy(net.x[num], net.g, y, order + start, n, classes);
        backward(&net, at, n, &r, go);
        total += loss;
    }
    return total;
}

/* Takes a step of SGD with a gradient [count]. */
void layers_move(float *w, float *m, const float *g, ptrdiff_t count, const float *rates, ptrdiff_t done)
{
    const struct rates r = rates_of(rates, done == 0, 0);
    loops()->move(g, (struct place){w, m, 0}, count, &r);
}
