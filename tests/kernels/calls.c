/* Calls the kernels of a folder on made-up numbers and prints a hash of what each writes: calls FOLDER. emulated.py compiles this
 * for processors that it compares. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint32_t state = 1;

/* Fills x with multiples of 2^-24 from -0.5 on, below 0.5. */
static float *numbers(ptrdiff_t count)
{
    float *x = malloc((size_t)count * sizeof *x);
    for (ptrdiff_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) / 16777216.0f - 0.5f;
    }
    return x;
}

static void say(const char *name, const void *x, size_t size)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const unsigned char *)x)[i]) * 1099511628211u;
    printf("%s %016llx\n", name, (unsigned long long)hash);
}

static void *open_library(const char *folder, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.so", folder, name);
    void *library = dlopen(path, RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return library;
}

enum { ROWS = 2, UPLOADS = 3, WIDTH = 1003, LINES = 6, WINDOWS = 9 };

static void reductions(void *library)
{
    void (*add)(uint64_t *, const float *const *, const double *, const double *, ptrdiff_t, ptrdiff_t, ptrdiff_t) =
        dlsym(library, "mpifl_exact_sum_add");
    void (*finish)(const int64_t *, double, const double *, float *, ptrdiff_t) = dlsym(library, "mpifl_exact_sum_finish");
    float (*max_abs)(const float *, ptrdiff_t) = dlsym(library, "mpifl_max_abs");
    const double weights[ROWS * UPLOADS] = {0.1, 0.2, 0.7, 1.0 / 3, 1.0 / 3, 1.0 / 3};
    const double spacing = 1.0 / (1ll << 40), magic[ROWS] = {1.5 * (1ll << 52) * spacing, 1.5 * (1ll << 52) * spacing};
    const float *uploads[UPLOADS] = {numbers(WIDTH), numbers(WIDTH), numbers(WIDTH)};
    uint64_t *sums = calloc(ROWS * WIDTH, sizeof *sums);
    float out[ROWS * WIDTH];
    add(sums, uploads, weights, magic, ROWS, UPLOADS, WIDTH);
    say("exact_sum_add", sums, ROWS * WIDTH * sizeof *sums);
    for (ptrdiff_t row = 0; row < ROWS; row++)
        finish((int64_t *)sums + row * WIDTH, spacing, 0, out + row * WIDTH, WIDTH);
    say("exact_sum_finish", out, sizeof out);
    const float largest = max_abs(uploads[0], WIDTH);
    say("max_abs", &largest, sizeof largest);

    void (*max_pool)(const float *, float *, uint8_t *, ptrdiff_t, ptrdiff_t) = dlsym(library, "mpifl_max_pool2x2");
    void (*max_pool_back)(const float *, const uint8_t *, float *, ptrdiff_t, ptrdiff_t) =
        dlsym(library, "mpifl_max_pool2x2_backward");
    void (*mean_pool)(const float *, float *, ptrdiff_t, ptrdiff_t) = dlsym(library, "mpifl_avg_pool2x2");
    float *image = numbers(LINES * 4 * WINDOWS), pooled[LINES * WINDOWS], *grad = calloc(LINES * 4 * WINDOWS, sizeof *grad);
    uint8_t index[LINES * WINDOWS];
    max_pool(image, pooled, index, LINES, WINDOWS);
    say("max_pool2x2", pooled, sizeof pooled);
    max_pool_back(pooled, index, grad, LINES, WINDOWS);
    say("max_pool2x2_backward", grad, LINES * 4 * WINDOWS * sizeof *grad);
    mean_pool(image, pooled, LINES, WINDOWS);
    say("avg_pool2x2", pooled, sizeof pooled);
}

enum { SAMPLES = 37, SIDE = 8, PARAMETERS = 690, CLASSES = 10, BATCH = 16 };

static void training(void *library)
{
    /* kind, channels, height, width, out, kernel, padding, weight offset, bias offset, trainable */
    const int64_t layers[][10] = {{0, 1, 8, 8, 4, 3, 1, 0, 36, 1}, /* convolution */
                                  {1, 4, 8, 8, 0, 1, 0, 0, 0, 0},  /* ReLU */
                                  {2, 4, 8, 8, 0, 1, 0, 0, 0, 0},  /* max pooling */
                                  {5, 4, 4, 4, 0, 1, 0, 0, 0, 0},  /* flatten */
                                  {6, 64, 1, 1, 10, 1, 0, 40, 680, 1}};
    ptrdiff_t (*workspace_size)(const void *, ptrdiff_t, ptrdiff_t) = dlsym(library, "mpifl_workspace_size");
    int (*train)(const void *, ptrdiff_t, float *, float *, float *, const float *, const int64_t *, const float *, ptrdiff_t,
                 const int64_t *, const float *, ptrdiff_t, ptrdiff_t, float, float, float, ptrdiff_t, int, float *, ptrdiff_t,
                 double *) = dlsym(library, "mpifl_train");
    int (*forward)(const void *, ptrdiff_t, const float *, const float *, float *, ptrdiff_t, ptrdiff_t, float *, ptrdiff_t) =
        dlsym(library, "mpifl_forward");
    void (*permutations)(const uint32_t *, const int64_t *, ptrdiff_t, int64_t *) = dlsym(library, "mpifl_permutations");
    const uint32_t entropy[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    const int64_t sizes[2] = {SAMPLES, SAMPLES};
    int64_t order[2 * SAMPLES], labels[SAMPLES];
    permutations(entropy, sizes, 2, order);
    say("permutations", order, sizeof order);
    for (int i = 0; i < SAMPLES; i++)
        labels[i] = (i * 7) % CLASSES;
    float *weights = numbers(PARAMETERS), *momentum = calloc(PARAMETERS, sizeof *momentum), *x = numbers(SAMPLES * SIDE * SIDE);
    const ptrdiff_t size = workspace_size(layers, 5, BATCH);
    float *workspace = aligned_alloc(64, ((size_t)size * sizeof *workspace + 63) / 64 * 64), y[SAMPLES * CLASSES];
    double loss = 0;
    const int status = train(layers, 5, weights, momentum, 0, x, labels, 0, SAMPLES, order, 0, 2 * SAMPLES, BATCH, 0.1f, 0.9f, 1e-3f, 0,
                             1, workspace, size, &loss);
    printf("train status %d, loss %a\n", status, loss);
    say("train", weights, PARAMETERS * sizeof *weights);
    forward(layers, 5, weights, x, y, SAMPLES, BATCH, workspace, size);
    say("forward", y, sizeof y);
}

enum { IMAGES = 2, CHANNELS = 32, TAPS = 3, MARGIN = 1 };

static void channels_last(void *library)
{
    ptrdiff_t (*workspace_size)(ptrdiff_t, ptrdiff_t) = dlsym(library, "mpifl_convolve_workspace");
    void (*convolve)(const float *, const float *, const float *, float *, ptrdiff_t, ptrdiff_t, ptrdiff_t, ptrdiff_t, ptrdiff_t,
                     ptrdiff_t, ptrdiff_t, int, float *) = dlsym(library, "mpifl_convolve");
    void (*kernels_grad)(const float *, const float *, float *, ptrdiff_t, ptrdiff_t, ptrdiff_t, ptrdiff_t, ptrdiff_t, ptrdiff_t,
                         ptrdiff_t, float *) = dlsym(library, "mpifl_convolve_kernels_grad");
    const ptrdiff_t pixels = IMAGES * SIDE * SIDE * CHANNELS, kernels = CHANNELS * CHANNELS * TAPS * TAPS;
    float *x = numbers(pixels), *w = numbers(kernels), *bias = numbers(CHANNELS), *y = numbers(pixels), *gw = numbers(kernels);
    float *workspace = aligned_alloc(64, (size_t)workspace_size(CHANNELS, CHANNELS) * sizeof *workspace);
    convolve(x, w, bias, y, IMAGES, SIDE, SIDE, CHANNELS, CHANNELS, TAPS, MARGIN, 0, workspace);
    say("convolve", y, (size_t)pixels * sizeof *y);
    kernels_grad(x, y, gw, IMAGES, SIDE, SIDE, CHANNELS, CHANNELS, TAPS, MARGIN, workspace);
    say("convolve_kernels_grad", gw, (size_t)kernels * sizeof *gw);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    reductions(open_library(argv[1], "reductions"));
    void *library = open_library(argv[1], "training");
    if (!((int (*)(void))dlsym(library, "mpifl_supported"))()) {
        puts("no fused multiply-add");
        return 0;
    }
    training(library);
    channels_last(open_library(argv[1], "channels_last"));
    return 0;
}
