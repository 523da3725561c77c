/* Gradients and outputs of a stack of networks, one network and LANES samples at a time; T is float or double.

   A value [channels][height][width] holds a vector of LANES samples at each place. Positions and strides count vectors.
   A linear layer is a convolution of an image with one pixel. Padding is a border of zeros, which is never written. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES (BYTES / (int)sizeof(T))
#define ROWS 8   /* filters, or channels, at a time */
#define PIXELS 2 /* at a time */
#define INLINE static inline __attribute__((always_inline))

typedef int64_t i64;
typedef T vec __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
typedef INTEGER bits __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));

enum { CONVOLUTION, LINEAR, POOL, COPY };
enum { CLASS, LOGIT, SQUARE };

typedef struct {
    i64 at, channel, row, column;
} View;

typedef struct {
    i64 kind, channels, height, width, filters, rows, columns; /* input and output; `filters` are output channels */
    i64 kh, kw, sh, sw;                                        /* kernel and stride */
    i64 weight, bias;                                          /* positions in the parameters; bias < 0: none */
    i64 relu, masked;                                          /* whether a ReLU is part of it; of the layer before */
    i64 need;                                                  /* whether the gradient of the input is needed */
    View in, out, in_gradient, out_gradient;
    i64 spread, samples; /* the gradient of the output with its border; the input of a linear layer by sample */
    i64 loaded;          /* whether its input are the samples themselves */
    i64 forward, backward, weights; /* positions in `offsets` */
} Layer;

/* Zero where `like` is negative or zero; NaN counts as positive. */
INLINE vec positive(vec v, vec like) { return (vec)((bits)v & ~(like <= 0)); }

INLINE T total(vec v) {
    T sum = 0;
    for (int k = 0; k < LANES; k++) sum += v[k];
    return sum;
}

/* Run code for `rows` = 8, 2 or 1 of n at a time, beginning at r; for `pixels` = 2 or 1 of n, beginning at q. Constants
   let the compiler keep all sums in registers. */
#define EACH_ROWS(n, ...)                                       \
    do {                                                        \
        i64 r = 0;                                              \
        for (; r + ROWS <= (n); r += ROWS) {                    \
            enum { rows = ROWS };                               \
            __VA_ARGS__;                                        \
        }                                                       \
        for (; r + 2 <= (n); r += 2) {                          \
            enum { rows = 2 };                                  \
            __VA_ARGS__;                                        \
        }                                                       \
        for (; r < (n); r++) {                                  \
            enum { rows = 1 };                                  \
            __VA_ARGS__;                                        \
        }                                                       \
    } while (0)

#define EACH_PIXELS(n, ...)                                     \
    do {                                                        \
        i64 q = 0;                                              \
        for (; q + PIXELS <= (n); q += PIXELS) {                \
            enum { pixels = PIXELS };                           \
            __VA_ARGS__;                                        \
        }                                                       \
        for (; q < (n); q++) {                                  \
            enum { pixels = 1 };                                \
            __VA_ARGS__;                                        \
        }                                                       \
    } while (0)

/* sum[row][pixel] += w[row][a][k] h[a][k][pixel], over all a and k */
INLINE void products(int rows, int pixels, i64 planes, i64 kernel, const vec *h, i64 plane, const i64 *offsets, i64 step,
                     const T *w, i64 wplane, i64 wrow, vec sum[][PIXELS]) {
    for (i64 a = 0; a < planes; a++)
        for (i64 k = 0; k < kernel; k++) {
            const vec *from = h + a * plane + offsets[k];
            const T *weight = w + a * wplane + k;
            vec v[PIXELS];
            for (int p = 0; p < pixels; p++) v[p] = from[p * step];
            for (int r = 0; r < rows; r++)
                for (int p = 0; p < pixels; p++) sum[r][p] += weight[r * wrow] * v[p];
        }
}

INLINE void forward_block(int rows, int pixels, i64 kernel, const Layer *layer, const T *x, vec *memory,
                          const i64 *offsets, i64 r, i64 p, i64 q) {
    vec sum[ROWS][PIXELS];
    i64 size = layer->channels * kernel;
    for (int k = 0; k < rows; k++)
        for (int j = 0; j < pixels; j++) sum[k][j] = (vec){0} + (layer->bias < 0 ? 0 : x[layer->bias + r + k]);
    products(rows, pixels, layer->channels, kernel,
             memory + layer->in.at + p * layer->sh * layer->in.row + q * layer->sw, layer->in.channel, offsets,
             layer->sw, x + layer->weight + r * size, kernel, size, sum);
    for (int k = 0; k < rows; k++)
        for (int j = 0; j < pixels; j++) {
            vec v = sum[k][j];
            vec *to = memory + layer->out.at + (r + k) * layer->out.channel + p * layer->out.row + q + j;
            *to = layer->relu ? positive(v, v) : v;
        }
}

INLINE void backward_block(int rows, int pixels, i64 kernel, const Layer *layer, const T *x, vec *memory,
                           const i64 *offsets, i64 spread_row, i64 r, i64 p, i64 q) {
    vec sum[ROWS][PIXELS];
    for (int k = 0; k < rows; k++)
        for (int j = 0; j < pixels; j++) sum[k][j] = (vec){0};
    products(rows, pixels, layer->filters, kernel, memory + layer->spread + p * spread_row + q,
             layer->out_gradient.channel, offsets, 1, x + layer->weight + r * kernel, layer->channels * kernel, kernel,
             sum);
    for (int k = 0; k < rows; k++)
        for (int j = 0; j < pixels; j++) {
            vec value = memory[layer->in.at + (r + k) * layer->in.channel + p * layer->in.row + q + j];
            const View *to = &layer->in_gradient;
            memory[to->at + (r + k) * to->channel + p * to->row + (q + j) * to->column] =
                layer->masked ? positive(sum[k][j], value) : sum[k][j];
        }
}

/* The gradients of `rows` filters at `places` positions (channel, row and column) of the kernel. */
INLINE void weight_block(int rows, int places, const Layer *layer, const vec *memory, const i64 *offsets, i64 r, i64 q,
                         T *gradient) {
    vec sum[ROWS][PIXELS];
    i64 size = layer->channels * layer->kh * layer->kw;
    const View *of = &layer->out_gradient;
    for (int k = 0; k < rows; k++)
        for (int j = 0; j < places; j++) sum[k][j] = (vec){0};
    for (i64 y = 0; y < layer->rows; y++) {
        const vec *g = memory + of->at + r * of->channel + y * of->row;
        const vec *h = memory + layer->in.at + y * layer->sh * layer->in.row;
        for (i64 z = 0; z < layer->columns; z++, g += of->column, h += layer->sw) {
            vec v[PIXELS];
            for (int j = 0; j < places; j++) v[j] = h[offsets[q + j]];
            for (int k = 0; k < rows; k++)
                for (int j = 0; j < places; j++) sum[k][j] += g[k * of->channel] * v[j];
        }
    }
    for (int k = 0; k < rows; k++)
        for (int j = 0; j < places; j++) gradient[layer->weight + (r + k) * size + q + j] += total(sum[k][j]);
}

static void convolution(const Layer *layer, const T *x, vec *memory, const i64 *offsets) {
    i64 kernel = layer->kh * layer->kw;
    for (i64 p = 0; p < layer->rows; p++)
        EACH_ROWS(layer->filters, EACH_PIXELS(layer->columns, forward_block(rows, pixels, kernel, layer, x, memory,
                                                                            offsets + layer->forward, r, p, q)));
}

static void convolution_gradients(const Layer *layer, const T *x, vec *memory, const i64 *offsets, T *gradient) {
    i64 kernel = layer->kh * layer->kw, spread_row = layer->width + layer->kw - 1;
    const View *of = &layer->out_gradient;
    EACH_ROWS(layer->filters, EACH_PIXELS(layer->channels * kernel, weight_block(rows, pixels, layer, memory,
                                                                                 offsets + layer->weights, r, q, gradient)));
    if (layer->bias >= 0)
        for (i64 o = 0; o < layer->filters; o++) {
            vec sum = {0};
            for (i64 y = 0; y < layer->rows; y++)
                for (i64 z = 0; z < layer->columns; z++)
                    sum += memory[of->at + o * of->channel + y * of->row + z * of->column];
            gradient[layer->bias + o] += total(sum);
        }
    if (layer->need)
        for (i64 p = 0; p < layer->height; p++)
            EACH_ROWS(layer->channels,
                      EACH_PIXELS(layer->width, backward_block(rows, pixels, kernel, layer, x, memory,
                                                               offsets + layer->backward, spread_row, r, p, q)));
}

static const i64 ONE_PIXEL[1] = {0};

static void linear(const Layer *layer, const T *x, vec *memory) {
    EACH_ROWS(layer->filters, forward_block(rows, 1, 1, layer, x, memory, ONE_PIXEL, r, 0, 0));
}

/* The gradients of `rows` filters with respect to the weights of LANES inputs. */
INLINE void linear_block(int rows, const Layer *layer, const vec *memory, i64 wide, i64 samples, i64 r, i64 i,
                         T *gradient) {
    vec sum[ROWS];
    i64 left = layer->channels - i * LANES, step = layer->out_gradient.channel;
    const T *g = (const T *)(memory + layer->out_gradient.at + r * step);
    for (int k = 0; k < rows; k++) sum[k] = (vec){0};
    for (i64 b = 0; b < samples; b++) {
        vec v = memory[layer->samples + b * wide + i];
        for (int k = 0; k < rows; k++) sum[k] += g[k * step * LANES + b] * v;
    }
    for (int k = 0; k < rows; k++) {
        T *to = gradient + layer->weight + (r + k) * layer->channels + i * LANES;
        if (left >= LANES)
            *(vec *)to += sum[k];
        else
            for (i64 j = 0; j < left; j++) to[j] += sum[k][j];
    }
}

static void linear_gradients(const Layer *layer, const T *x, vec *memory, i64 samples, T *gradient) {
    i64 wide = (layer->channels + LANES - 1) / LANES, step = layer->in.channel * LANES;
    const T *from = (const T *)(memory + layer->in.at);
    T *by_sample = (T *)(memory + layer->samples);
    if (!layer->loaded)
        for (i64 i = 0; i < layer->channels; i++)
            for (i64 b = 0; b < samples; b++) by_sample[b * wide * LANES + i] = from[i * step + b];
    for (i64 i = 0; i < wide; i++)
        EACH_ROWS(layer->filters, linear_block(rows, layer, memory, wide, samples, r, i, gradient));
    if (layer->bias >= 0)
        for (i64 o = 0; o < layer->filters; o++)
            gradient[layer->bias + o] += total(memory[layer->out_gradient.at + o * layer->out_gradient.channel]);
    if (layer->need)
        EACH_ROWS(layer->channels, backward_block(rows, 1, 1, layer, x, memory, ONE_PIXEL, 1, r, 0, 0));
}

static void pool(const Layer *layer, vec *memory) {
    for (i64 c = 0; c < layer->channels; c++)
        for (i64 p = 0; p < layer->rows; p++)
            for (i64 q = 0; q < layer->columns; q++) {
                const vec *h = memory + layer->in.at + c * layer->in.channel + p * layer->kh * layer->in.row + q * layer->kw;
                vec top = h[0];
                for (i64 i = 0; i < layer->kh; i++)
                    for (i64 j = 0; j < layer->kw; j++) {
                        vec v = h[i * layer->in.row + j];
                        bits keep = (v <= top) | (top != top); /* NaN is larger than all numbers */
                        top = (vec)((keep & (bits)top) | (~keep & (bits)v));
                    }
                memory[layer->out.at + c * layer->out.channel + p * layer->out.row + q] = top;
            }
}

static void pool_gradients(const Layer *layer, vec *memory) {
    const View *of = &layer->out_gradient, *to = &layer->in_gradient;
    for (i64 c = 0; c < layer->channels; c++)
        for (i64 p = 0; p < layer->rows; p++)
            for (i64 q = 0; q < layer->columns; q++) {
                const vec *h = memory + layer->in.at + c * layer->in.channel + p * layer->kh * layer->in.row + q * layer->kw;
                vec *into = memory + to->at + c * to->channel + p * layer->kh * to->row + q * layer->kw * to->column;
                vec top = memory[layer->out.at + c * layer->out.channel + p * layer->out.row + q];
                vec g = memory[of->at + c * of->channel + p * of->row + q * of->column];
                bits open = (bits){0} == 0; /* the first of equal values gets the gradient */
                for (i64 i = 0; i < layer->kh; i++)
                    for (i64 j = 0; j < layer->kw; j++) {
                        vec v = h[i * layer->in.row + j];
                        bits here = ((v == top) | (v != v)) & open;
                        open &= ~here;
                        if (layer->masked) here &= ~(v <= 0);
                        into[i * to->row + j * to->column] = (vec)(here & (bits)g);
                    }
            }
}

/* A ReLU that follows no layer with weights, or the features of an image for a linear layer. */
static void copy(const Layer *layer, vec *memory) {
    for (i64 c = 0; c < layer->channels; c++)
        for (i64 p = 0; p < layer->height; p++)
            for (i64 q = 0; q < layer->width; q++) {
                vec v = memory[layer->in.at + c * layer->in.channel + p * layer->in.row + q];
                memory[layer->out.at + c * layer->out.channel + p * layer->out.row + q] = layer->relu ? positive(v, v) : v;
            }
}

static void copy_gradients(const Layer *layer, vec *memory) {
    const View *of = &layer->out_gradient, *to = &layer->in_gradient;
    for (i64 c = 0; c < layer->channels; c++)
        for (i64 p = 0; p < layer->height; p++)
            for (i64 q = 0; q < layer->width; q++) {
                vec v = memory[layer->in.at + c * layer->in.channel + p * layer->in.row + q];
                vec g = memory[of->at + c * of->channel + p * of->row + q * of->column];
                memory[to->at + c * to->channel + p * to->row + q * to->column] = layer->masked ? positive(g, v) : g;
            }
}

/* The gradient of the mean cross-entropy with respect to the outputs: (softmax - one-hot) / batch. */
static void class_loss(const Layer *last, vec *memory, i64 samples, i64 batch, const i64 *target) {
    const T *y = (const T *)(memory + last->out.at);
    T *g = (T *)(memory + last->out_gradient.at), share = 1 / (T)batch;
    i64 step = last->out.channel * LANES, gstep = last->out_gradient.channel * LANES;
    for (i64 b = 0; b < LANES; b++) {
        T top = y[b], sum = 0;
        for (i64 k = 1; k < last->filters; k++)
            if (y[k * step + b] > top) top = y[k * step + b];
        for (i64 k = 0; k < last->filters; k++) sum += g[k * gstep + b] = EXP(y[k * step + b] - top);
        for (i64 k = 0; k < last->filters; k++) g[k * gstep + b] = b < samples ? g[k * gstep + b] * (share / sum) : 0;
        if (b < samples && target[b] >= 0 && target[b] < last->filters) g[target[b] * gstep + b] -= share;
        for (i64 k = 0; last->relu && k < last->filters; k++)
            if (y[k * step + b] <= 0) g[k * gstep + b] = 0;
    }
}

/* The same for one output: (sigmoid - target) / batch for targets 0 or 1, and 2 (output - target) / batch for numbers. */
static void number_loss(const Layer *last, vec *memory, i64 samples, i64 batch, const T *target, int logit) {
    const T *y = (const T *)(memory + last->out.at);
    T *g = (T *)(memory + last->out_gradient.at);
    for (i64 b = 0; b < LANES; b++) {
        T slope = 0;
        if (b < samples && !(last->relu && y[b] <= 0))
            slope = logit ? 1 / (1 + EXP(-y[b])) - target[b] : 2 * (y[b] - target[b]);
        g[b] = slope / (T)batch;
    }
}

/* Up to LANES samples [samples][features], as vectors. */
static void load(const Layer *first, vec *memory, const T *inputs, i64 samples, i64 features) {
    T *h = (T *)(memory + first->in.at);
    for (i64 c = 0, i = 0; c < first->channels; c++)
        for (i64 p = 0; p < first->height; p++)
            for (i64 q = 0; q < first->width; q++, i++) {
                T *to = h + (c * first->in.channel + p * first->in.row + q) * LANES;
                for (i64 b = 0; b < LANES; b++) to[b] = b < samples ? inputs[b * features + i] : 0;
            }
    i64 wide = (features + LANES - 1) / LANES;
    for (i64 b = 0; first->kind == LINEAR && b < samples; b++)
        memcpy(memory + first->samples + b * wide, inputs + b * features, features * sizeof(T));
}

static void forward(const Layer *layers, i64 depth, const i64 *offsets, const T *x, vec *memory) {
    for (const Layer *layer = layers; layer < layers + depth; layer++)
        switch (layer->kind) {
        case CONVOLUTION: convolution(layer, x, memory, offsets); break;
        case LINEAR: linear(layer, x, memory); break;
        case POOL: pool(layer, memory); break;
        default: copy(layer, memory);
        }
}

int lanes(void) { return LANES; }

/* The gradients [members][d] at x [members][stride]; member i uses batch i % batches of inputs [batches][batch][features].
   Only the batches from `first` up to `end` are done: the rest is another thread's. */
void gradients(const Layer *layers, i64 depth, const i64 *offsets, i64 loss, i64 features, i64 d, vec *memory,
               i64 first, i64 end, i64 batches, i64 batch, i64 members, const T *x, i64 stride, const T *inputs,
               const void *targets, T *out) {
    const Layer *last = layers + depth - 1;
    for (i64 n = first; n < end; n++) {
        for (i64 m = n; m < members; m += batches) memset(out + m * d, 0, d * sizeof(T));
        for (i64 b = 0; b < batch; b += LANES) {
            i64 samples = batch - b < LANES ? batch - b : LANES, at = n * batch + b;
            load(layers, memory, inputs + at * features, samples, features);
            for (i64 m = n; m < members; m += batches) {
                forward(layers, depth, offsets, x + m * stride, memory);
                if (loss == CLASS)
                    class_loss(last, memory, samples, batch, (const i64 *)targets + at);
                else
                    number_loss(last, memory, samples, batch, (const T *)targets + at, loss == LOGIT);
                for (const Layer *layer = last; layer >= layers; layer--)
                    switch (layer->kind) {
                    case CONVOLUTION: convolution_gradients(layer, x + m * stride, memory, offsets, out + m * d); break;
                    case LINEAR: linear_gradients(layer, x + m * stride, memory, samples, out + m * d); break;
                    case POOL: if (layer->need) pool_gradients(layer, memory); break;
                    default: if (layer->need) copy_gradients(layer, memory);
                    }
            }
        }
    }
}

/* The outputs [members][samples][filters] at x [members][stride] for inputs [samples][features] that all members share;
   the samples from `first` up to `end`. */
void outputs(const Layer *layers, i64 depth, const i64 *offsets, i64 features, vec *memory, i64 first, i64 end,
             i64 samples, i64 members, const T *x, i64 stride, const T *inputs, T *out) {
    const Layer *last = layers + depth - 1;
    const T *y = (const T *)(memory + last->out.at);
    for (i64 at = first; at < end; at += LANES) {
        i64 count = end - at < LANES ? end - at : LANES;
        load(layers, memory, inputs + at * features, count, features);
        for (i64 m = 0; m < members; m++) {
            forward(layers, depth, offsets, x + m * stride, memory);
            for (i64 b = 0; b < count; b++)
                for (i64 k = 0; k < last->filters; k++)
                    out[(m * samples + at + b) * last->filters + k] = y[k * last->out.channel * LANES + b];
        }
    }
}
