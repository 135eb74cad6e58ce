/* The arithmetic of layers.c for one instruction set.
 *
 * The includer defines WIDTH, the floats in a register; TARGET, a function attribute; NAME(f), what a function is called
 * here; and how many sums the loops hold in registers: SAMPLES x OUTPUTS (dots), ROWS x COLUMNS (weights), TALL x LONG
 * (slide), DEEP x kernel (slide_weights). None of these bears on the bits: every sum has an order of its own, products are
 * added without rounding them first (fma), and what is summed over lanes is summed over LANES of them. */

#define INLINE static inline __attribute__((always_inline)) TARGET
#define PARTS (LANES / WIDTH)
#define vec NAME(vec)

typedef float vec __attribute__((vector_size(4 * WIDTH)));

INLINE vec NAME(load)(const float *from)
{
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE vec NAME(load_some)(const float *from, ptrdiff_t count)
{
    vec v = {0};
    memcpy(&v, from, (size_t)count * sizeof *from);
    return v;
}

INLINE void NAME(store)(float *to, vec v) { memcpy(to, &v, sizeof v); }

/* Sum of LANES numbers: the upper half onto the lower one, again and again. */
INLINE float NAME(total)(vec *parts)
{
    EACH(i, PARTS / 2) parts[i] += parts[i + PARTS / 2];
    EACH(i, PARTS / 4) parts[i] += parts[i + PARTS / 4];
    vec v = parts[0];
    EACH(i, WIDTH / 2) v[i] += v[i + WIDTH / 2];
    EACH(i, WIDTH / 4) v[i] += v[i + WIDTH / 4];
    EACH(i, WIDTH / 8) v[i] += v[i + WIDTH / 8];
    EACH(i, WIDTH / 16) v[i] += v[i + WIDTH / 16];
    return v[0];
}

/* ---- Steps ---- */

/* Moves `count` weights by a step of SGD (momentum as in PyTorch: its first value is the gradient), or writes their
 * gradient where that is asked for; `count` is WIDTH or less. */
INLINE void NAME(use)(vec g, struct place at, ptrdiff_t j, ptrdiff_t count, const struct rates *r)
{
    const size_t bytes = (size_t)count * sizeof(float);
    if (at.grad) {
        memcpy(at.grad + j, &g, bytes);
        return;
    }
    vec w = {0}, m = {0};
    memcpy(&w, at.w + j, bytes);
    g += r->decay * w;
    if (r->remembers) {
        memcpy(&m, at.m + j, bytes);
        g = r->momentum * m + g;
    }
    w -= r->lr * g;
    memcpy(at.w + j, &w, bytes);
    if (r->keeps)
        memcpy(at.m + j, &g, bytes);
}

TARGET static void NAME(move)(const float *g, struct place at, ptrdiff_t count, const struct rates *r)
{
    ptrdiff_t j = 0;
    for (; j + WIDTH <= count; j += WIDTH)
        NAME(use)(NAME(load)(g + j), at, j, WIDTH, r);
    if (j < count)
        NAME(use)(NAME(load_some)(g + j, count - j), at, j, count - j, r);
}

/* ---- Dense layers: activations are [n, units] ---- */

/* y[s][o] = bias[o] + sum over k of x[s][k] w[o][k], lane by lane of k, then over the lanes. x: [S, in]; w: [O, in]. */
INLINE void NAME(dots_tile)(const float *x, const float *w, const float *bias, float *y, ptrdiff_t in, ptrdiff_t out,
                            const int S, const int O)
{
    vec sums[MOST][MOST][PARTS];
    EACH(s, S) EACH(o, O) EACH(p, PARTS) sums[s][o][p] = (vec){0};
    ptrdiff_t k = 0;
    for (; k + LANES <= in; k += LANES)
        EACH(p, PARTS) {
            vec weights[MOST];
            EACH(o, O) weights[o] = NAME(load)(w + o * in + k + p * WIDTH);
            EACH(s, S) {
                const vec units = NAME(load)(x + s * in + k + p * WIDTH);
                EACH(o, O) sums[s][o][p] += units * weights[o];
            }
        }
    EACH(p, PARTS) {
        const ptrdiff_t at = k + p * WIDTH, count = in - at < WIDTH ? in - at : WIDTH;
        if (count > 0) {
            vec weights[MOST];
            EACH(o, O) weights[o] = NAME(load_some)(w + o * in + at, count);
            EACH(s, S) {
                const vec units = NAME(load_some)(x + s * in + at, count);
                EACH(o, O) sums[s][o][p] += units * weights[o];
            }
        }
    }
    EACH(s, S) EACH(o, O) y[s * out + o] = NAME(total)(sums[s][o]) + bias[o];
}

INLINE void NAME(dots_rows)(const float *x, const float *w, const float *bias, float *y, ptrdiff_t n, ptrdiff_t in,
                            ptrdiff_t out, const int O)
{
    ptrdiff_t s = 0;
    for (; s + SAMPLES <= n; s += SAMPLES)
        NAME(dots_tile)(x + s * in, w, bias, y + s * out, in, out, SAMPLES, O);
    for (; s + 2 <= n; s += 2)
        NAME(dots_tile)(x + s * in, w, bias, y + s * out, in, out, 2, O);
    if (s < n)
        NAME(dots_tile)(x + s * in, w, bias, y + s * out, in, out, 1, O);
}

TARGET static void NAME(dots)(const float *x, const float *w, const float *bias, float *y, ptrdiff_t n, ptrdiff_t in,
                              ptrdiff_t out)
{
    ptrdiff_t o = 0;
    for (; o + OUTPUTS <= out; o += OUTPUTS)
        NAME(dots_rows)(x, w + o * in, bias + o, y + o, n, in, out, OUTPUTS);
    for (; o < out; o++)
        NAME(dots_rows)(x, w + o * in, bias + o, y + o, n, in, out, 1);
}

/* sums[r][v] = sum over i < n, in this order, of a[i * step + r * row] times the registers at b + i * width.
 * count: floats of the last register; fewer than WIDTH only where V is 1. */
INLINE void NAME(outer)(vec sums[MOST][MOST], const float *a, ptrdiff_t step, ptrdiff_t row, const float *b, ptrdiff_t width,
                        ptrdiff_t n, ptrdiff_t count, const int R, const int V)
{
    EACH(r, R) EACH(v, V) sums[r][v] = (vec){0};
    for (ptrdiff_t i = 0; i < n; i++) {
        vec wide[MOST];
        EACH(v, V) wide[v] = count < WIDTH ? NAME(load_some)(b + i * width, count) : NAME(load)(b + i * width + v * WIDTH);
        EACH(r, R) {
            const float factor = a[i * step + r * row];
            EACH(v, V) sums[r][v] += factor * wide[v];
        }
    }
}

INLINE void NAME(weights_rows)(const float *x, const float *g, struct place at, ptrdiff_t n, ptrdiff_t in, ptrdiff_t out,
                               const struct rates *r, const int R)
{
    vec sums[MOST][MOST];
    ptrdiff_t k = 0;
    for (; k + COLUMNS * WIDTH <= in; k += COLUMNS * WIDTH) {
        NAME(outer)(sums, g, out, 1, x + k, in, n, WIDTH, R, COLUMNS);
        EACH(o, R) EACH(v, COLUMNS) NAME(use)(sums[o][v], at, o * in + k + v * WIDTH, WIDTH, r);
    }
    for (; k < in; k += WIDTH) {
        const ptrdiff_t count = in - k < WIDTH ? in - k : WIDTH;
        NAME(outer)(sums, g, out, 1, x + k, in, n, count, R, 1);
        EACH(o, R) NAME(use)(sums[o][0], at, o * in + k, count, r);
    }
}

/* Gradient sum over s of g[s][o] x[s][k] of the weights [out, in], used at once while it is in registers. */
TARGET static void NAME(weights)(const float *x, const float *g, struct place at, ptrdiff_t n, ptrdiff_t in, ptrdiff_t out,
                                 const struct rates *r)
{
    ptrdiff_t o = 0;
    for (; o + ROWS <= out; o += ROWS)
        NAME(weights_rows)(x, g + o, shifted(at, o * in), n, in, out, r, ROWS);
    for (; o < out; o++)
        NAME(weights_rows)(x, g + o, shifted(at, o * in), n, in, out, r, 1);
}

INLINE void NAME(inputs_rows)(const float *g, const float *w, float *gx, ptrdiff_t in, ptrdiff_t out, const int R)
{
    vec sums[MOST][MOST];
    for (ptrdiff_t k = 0; k < in; k += WIDTH) {
        const ptrdiff_t count = in - k < WIDTH ? in - k : WIDTH;
        NAME(outer)(sums, g, 1, out, w + k, in, out, count, R, 1);
        EACH(s, R) memcpy(gx + s * in + k, &sums[s][0], (size_t)count * sizeof *gx);
    }
}

/* gx[s][k] = sum over o of g[s][o] w[o][k]. */
TARGET static void NAME(inputs)(const float *g, const float *w, float *gx, ptrdiff_t n, ptrdiff_t in, ptrdiff_t out)
{
    ptrdiff_t s = 0;
    for (; s + ROWS <= n; s += ROWS)
        NAME(inputs_rows)(g + s * out, w, gx + s * in, in, out, ROWS);
    for (; s < n; s++)
        NAME(inputs_rows)(g + s * out, w, gx + s * in, in, out, 1);
}

/* Gradient sum over s of g[s][o] of a bias [out]. */
TARGET static void NAME(bias)(const float *g, struct place at, ptrdiff_t n, ptrdiff_t out, const struct rates *r)
{
    for (ptrdiff_t o = 0; o < out; o += WIDTH) {
        const ptrdiff_t count = out - o < WIDTH ? out - o : WIDTH;
        vec sum = {0};
        for (ptrdiff_t s = 0; s < n; s++)
            sum += NAME(load_some)(g + s * out + o, count);
        NAME(use)(sum, at, o, count, r);
    }
}

/* ---- Convolutions: activations are [channels, height, width, LANES], a lane for each sample ---- */

INLINE void NAME(slide_tile)(const float *x, const float *w, const float *bias, float *y, const struct sides *d,
                             ptrdiff_t row, const int T, const int L)
{
    vec sums[MOST][MOST];
    EACH(t, T) EACH(l, L) sums[t][l] = (vec){0} + (bias ? bias[t] : 0);
    for (ptrdiff_t c = 0; c < d->channels; c++)
        for (ptrdiff_t i = 0; i < d->kernel; i++) {
            const ptrdiff_t from = row + i - d->above;
            if (from < 0 || from >= d->height)
                continue;
            const float *pixels = x + (c * d->height + from) * d->width * LANES;
            const float *factors = w + (c * d->kernel + i) * d->kernel * d->outputs;
            for (ptrdiff_t j = 0; j < d->kernel; j++) {
                vec line[MOST];
                EACH(l, L) line[l] = NAME(load)(pixels + (j + l) * LANES);
                EACH(t, T) {
                    const float factor = factors[j * d->outputs + t];
                    EACH(l, L) sums[t][l] += factor * line[l];
                }
            }
        }
    EACH(t, T) EACH(l, L) NAME(store)(y + t * d->out_height * d->out_width * LANES + l * LANES, sums[t][l]);
}

INLINE void NAME(slide_row)(const float *x, const float *w, const float *bias, float *y, const struct sides *d,
                            ptrdiff_t row, const int T)
{
    ptrdiff_t l = 0;
    for (; l + LONG <= d->out_width; l += LONG)
        EACH(p, PARTS) NAME(slide_tile)(x + l * LANES + p * WIDTH, w, bias, y + l * LANES + p * WIDTH, d, row, T, LONG);
    for (; l < d->out_width; l++)
        EACH(p, PARTS) NAME(slide_tile)(x + l * LANES + p * WIDTH, w, bias, y + l * LANES + p * WIDTH, d, row, T, 1);
}

/* y[o][r][l] = bias[o] + sum over c, i, j of x[c][r + i - above][l + j] w[c][i][j][o]; rows outside of x are left out.
 * bias: null for none. */
TARGET static void NAME(slide)(const float *x, const float *w, const float *bias, float *y, const struct sides *d)
{
    const ptrdiff_t plane = d->out_height * d->out_width * LANES;
    for (ptrdiff_t row = 0; row < d->out_height; row++) { /* a row's inputs stay in the cache for all outputs */
        float *line = y + row * d->out_width * LANES;
        ptrdiff_t o = 0;
        for (; o + TALL <= d->outputs; o += TALL)
            NAME(slide_row)(x, w + o, bias ? bias + o : 0, line + o * plane, d, row, TALL);
        for (; o + 2 <= d->outputs; o += 2)
            NAME(slide_row)(x, w + o, bias ? bias + o : 0, line + o * plane, d, row, 2);
        if (o < d->outputs)
            NAME(slide_row)(x, w + o, bias ? bias + o : 0, line + o * plane, d, row, 1);
    }
}

INLINE void NAME(slide_weights_tile)(const float *x, const float *g, float *sums, const struct sides *d, ptrdiff_t i,
                                     const int T, const int K)
{
    const ptrdiff_t plane = d->out_height * d->out_width * LANES, next = d->channels * d->kernel * d->kernel * LANES;
    vec held[MOST][MOST];
    EACH(t, T) EACH(j, K) held[t][j] = NAME(load)(sums + t * next + j * LANES);
    for (ptrdiff_t row = 0; row < d->out_height; row++) {
        const ptrdiff_t from = row + i - d->above;
        if (from < 0 || from >= d->height)
            continue;
        const float *pixels = x + from * d->width * LANES, *grads = g + row * d->out_width * LANES;
        for (ptrdiff_t l = 0; l < d->out_width; l++) {
            vec line[MOST];
            EACH(j, K) line[j] = NAME(load)(pixels + (l + j) * LANES);
            EACH(t, T) {
                const vec grad = NAME(load)(grads + t * plane + l * LANES);
                EACH(j, K) held[t][j] += grad * line[j];
            }
        }
    }
    EACH(t, T) EACH(j, K) NAME(store)(sums + t * next + j * LANES, held[t][j]);
}

INLINE void NAME(slide_weights_rows)(const float *x, const float *g, float *sums, const struct sides *d, const int T)
{
    for (ptrdiff_t c = 0; c < d->channels; c++)
        for (ptrdiff_t i = 0; i < d->kernel; i++)
            EACH(p, PARTS) {
                const float *pixels = x + c * d->height * d->width * LANES + p * WIDTH;
                float *to = sums + (c * d->kernel + i) * d->kernel * LANES + p * WIDTH;
                if (d->kernel == 5)
                    NAME(slide_weights_tile)(pixels, g + p * WIDTH, to, d, i, T, 5);
                else if (d->kernel == 3)
                    NAME(slide_weights_tile)(pixels, g + p * WIDTH, to, d, i, T, 3);
                else
                    for (ptrdiff_t j = 0; j < d->kernel; j++)
                        NAME(slide_weights_tile)(pixels + j * LANES, g + p * WIDTH, to + j * LANES, d, i, T, 1);
            }
}

/* Adds to sums [outputs, channels, kernel, kernel, LANES] the sums over r, l of g[o][r][l] x[c][r + i - above][l + j]. */
TARGET static void NAME(slide_weights)(const float *x, const float *g, float *sums, const struct sides *d)
{
    const ptrdiff_t plane = d->out_height * d->out_width * LANES, next = d->channels * d->kernel * d->kernel * LANES;
    ptrdiff_t o = 0;
    for (; o + DEEP <= d->outputs; o += DEEP)
        NAME(slide_weights_rows)(x, g + o * plane, sums + o * next, d, DEEP);
    for (; o < d->outputs; o++)
        NAME(slide_weights_rows)(x, g + o * plane, sums + o * next, d, 1);
}

/* Sums over the lanes [count, LANES] to [count]. */
TARGET static void NAME(totals)(const float *lanes, float *to, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        vec parts[PARTS];
        memcpy(parts, lanes + i * LANES, sizeof parts);
        to[i] = NAME(total)(parts);
    }
}

/* sums[o] += sum over all pixels of g[o], lane by lane. */
TARGET static void NAME(slide_bias)(const float *g, float *sums, ptrdiff_t outputs, ptrdiff_t pixels)
{
    for (ptrdiff_t o = 0; o < outputs; o++)
        EACH(p, PARTS) {
            vec sum = NAME(load)(sums + o * LANES + p * WIDTH);
            for (ptrdiff_t i = 0; i < pixels; i++)
                sum += NAME(load)(g + (o * pixels + i) * LANES + p * WIDTH);
            NAME(store)(sums + o * LANES + p * WIDTH, sum);
        }
}

/* ---- Everything else: pixels is what a line of windows holds, LANES for each ---- */

TARGET static void NAME(relu)(float *x, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++)
        x[i] = x[i] < 0 ? 0 : x[i];
}

TARGET static void NAME(relu_back)(const float *y, float *g, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++)
        g[i] = y[i] <= 0 ? 0 : g[i];
}

/* The larger number, or one that is not a number. */
INLINE float NAME(larger)(float a, float b) { return (a < b) | (b != b) ? b : a; }

/* Mean or largest value of each 2x2 window, a NaN where it holds one. x: [planes, height, width, LANES]; odd last lines belong to no window. */
TARGET static void NAME(pool)(const float *x, float *y, ptrdiff_t planes, ptrdiff_t height, ptrdiff_t width, int largest)
{
    for (ptrdiff_t c = 0; c < planes; c++)
        for (ptrdiff_t r = 0; r < height / 2; r++)
            for (ptrdiff_t l = 0; l < width / 2; l++, y += LANES) {
                const float *a = x + ((c * height + 2 * r) * width + 2 * l) * LANES, *b = a + LANES, *below = a + width * LANES,
                            *last = below + LANES;
                for (int i = 0; i < LANES; i++) {
                    const float top = NAME(larger)(a[i], b[i]), bottom = NAME(larger)(below[i], last[i]);
                    y[i] = largest ? NAME(larger)(top, bottom) : (((a[i] + b[i]) + below[i]) + last[i]) * 0.25f;
                }
            }
}

/* Hands g on to the first of the largest values of each window (the first one where the largest is a NaN), or a quarter of
 * it to each. */
TARGET static void NAME(pool_back)(const float *x, const float *y, const float *g, float *gx, ptrdiff_t planes,
                                   ptrdiff_t height, ptrdiff_t width, int largest)
{
    if (height % 2 || width % 2)
        memset(gx, 0, (size_t)(planes * height * width * LANES) * sizeof *gx);
    for (ptrdiff_t c = 0; c < planes; c++)
        for (ptrdiff_t r = 0; r < height / 2; r++)
            for (ptrdiff_t l = 0; l < width / 2; l++, y += LANES, g += LANES) {
                const ptrdiff_t first = ((c * height + 2 * r) * width + 2 * l) * LANES, below = first + width * LANES;
                for (int i = 0; i < LANES; i++) {
                    const float share = g[i] * 0.25f, best = y[i];
                    const int one = !(x[first + i] < best), two = !(one | (x[first + LANES + i] < best));
                    const int three = !(one | two | (x[below + i] < best));
                    const int four = !(one | two | three | (x[below + LANES + i] < best));
                    gx[first + i] = largest ? (one ? g[i] : 0) : share;
                    gx[first + LANES + i] = largest ? (two ? g[i] : 0) : share;
                    gx[below + i] = largest ? (three ? g[i] : 0) : share;
                    gx[below + LANES + i] = largest ? (four ? g[i] : 0) : share;
                }
            }
}

static const struct loops NAME(loops) = {
    NAME(move), NAME(dots), NAME(weights), NAME(inputs), NAME(bias), NAME(slide), NAME(slide_weights), NAME(slide_bias),
    NAME(totals), NAME(relu), NAME(relu_back), NAME(pool), NAME(pool_back),
};

#undef INLINE
#undef PARTS
#undef vec
#undef TARGET
#undef NAME
#undef WIDTH
#undef SAMPLES
#undef OUTPUTS
#undef ROWS
#undef COLUMNS
#undef TALL
#undef LONG
#undef DEEP
