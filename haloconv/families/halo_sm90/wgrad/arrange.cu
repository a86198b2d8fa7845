// halo_sm90_arrange: x and dy of halo_sm90_wgrad in a memory order that TMA takes, with images side by side.
//
//   to[group of images][row][image][pixel of its cell][channel]   channels are neighbours
//   to[group of images][channel][row][image][pixel of its cell]   pixels are
//
// A cell has a row of an image from pixel `shift` on, and zeros elsewhere: the padding of both neighbours. Images
// behind the last one are zeros, too. Both tensors are moved by one launch. A block moves PIXELS pixels of CHANNELS
// channels through shared memory, 8.3 KB: neighbouring lanes read neighbours, and write neighbours, in whichever order
// either memory has them. All loads of a thread are in flight before the first is stored.
#include "kernels/numeric.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16.
using hc::i64;
using elem_t = ELEM;

constexpr int SIZE = sizeof(elem_t), THREADS = 256;
constexpr int PIXELS = 64, CHANNELS = 128 / SIZE, ITEMS = PIXELS * CHANNELS / THREADS;
constexpr int PITCH = PIXELS + 4 / SIZE;  // lanes of neighbouring channels meet different banks

static_assert(THREADS % PIXELS == 0 && THREADS % CHANNELS == 0, "a thread's elements are of one pixel or one channel");
static_assert(PIXELS * CHANNELS % THREADS == 0, "all threads move as many elements");

struct Tensor {
    i64 n, c, h, w;                    // strides in elements
    i64 to_group, to_c, to_pixel;      // the same of what is written
    int channels, rows, cols, shift;   // of an image
    int channel_blocks, pixel_blocks;  // of a group of images
};

struct Params {
    const elem_t *x, *dy;
    elem_t *x_to, *dy_to;
    Tensor tensors[2];  // x and dy
    int images, side_by_side, cell;
    int x_blocks;  // that move x
};

// Where a pixel of a group of images comes from; -1 where it is zero.
__device__ __forceinline__ i64 place_of(const Params& p, const Tensor& one, int group, int pixel) {
    const int row_pixels = p.side_by_side * p.cell, row = pixel / row_pixels, in_row = pixel - row * row_pixels;
    const int in_group = in_row / p.cell, column = in_row - in_group * p.cell - one.shift;
    const int image = group * p.side_by_side + in_group;
    const bool there = image < p.images && row < one.rows && (unsigned)column < (unsigned)one.cols;
    return there ? image * one.n + row * one.h + column * one.w : -1;
}

// What a thread moves of a block: of one pixel every STEP-th channel, or of one channel every STEP-th pixel, so that
// neighbouring lanes have neighbours in memory and a thread's addresses are one step apart.
template <bool BY_CHANNELS>
struct Items {
    static constexpr int LANES = BY_CHANNELS ? CHANNELS : PIXELS, STEP = THREADS / LANES;

    static __device__ __forceinline__ int lane() { return threadIdx.x % LANES; }
    static __device__ __forceinline__ int other(int item) { return threadIdx.x / LANES + item * STEP; }
    static __device__ __forceinline__ int pixel(int item) { return BY_CHANNELS ? other(item) : lane(); }
    static __device__ __forceinline__ int channel(int item) { return BY_CHANNELS ? lane() : other(item); }
};

template <bool BY_CHANNELS>
__device__ __forceinline__ void load(const elem_t* from, i64 channel_stride, int channels, const i64* places,
                                     elem_t* block_smem) {
    using Mine = Items<BY_CHANNELS>;
    elem_t loaded[ITEMS];
    from += Mine::channel(0) * channel_stride;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const i64 place = places[Mine::pixel(i)];
        const i64 step = BY_CHANNELS ? 0 : i * (Mine::STEP * channel_stride);
        loaded[i] = place >= 0 && Mine::channel(i) < channels ? from[place + step] : elem_t{};
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) block_smem[Mine::channel(i) * PITCH + Mine::pixel(i)] = loaded[i];
}

template <bool BY_CHANNELS>
__device__ __forceinline__ void store(elem_t* to, i64 pixel_stride, i64 channel_stride, int pixels, int channels,
                                      const elem_t* block_smem) {
    using Mine = Items<BY_CHANNELS>;
    to += Mine::pixel(0) * pixel_stride + Mine::channel(0) * channel_stride;
    const i64 step = Mine::STEP * (BY_CHANNELS ? pixel_stride : channel_stride);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (Mine::pixel(i) >= pixels || Mine::channel(i) >= channels) continue;
        to[i * step] = block_smem[Mine::channel(i) * PITCH + Mine::pixel(i)];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) halo_sm90_arrange(const __grid_constant__ Params p) {
    __shared__ elem_t block_smem[CHANNELS * PITCH];
    __shared__ i64 places[PIXELS];
    const int of_dy = blockIdx.x >= p.x_blocks;
    const Tensor& one = p.tensors[of_dy];
    const elem_t* const from = of_dy ? p.dy : p.x;
    elem_t* const to = of_dy ? p.dy_to : p.x_to;
    int block = blockIdx.x - of_dy * p.x_blocks;
    const int first_channel = block % one.channel_blocks * CHANNELS;
    block /= one.channel_blocks;
    const int group = block / one.pixel_blocks, first_pixel = (block - group * one.pixel_blocks) * PIXELS;
    const int pixels = one.rows * p.side_by_side * p.cell - first_pixel, channels = one.channels - first_channel;
    if (threadIdx.x < PIXELS) places[threadIdx.x] = place_of(p, one, group, first_pixel + threadIdx.x);
    __syncthreads();
    const elem_t* const block_from = from + first_channel * one.c;
    if (one.c == 1) {
        load<true>(block_from, 1, channels, places, block_smem);
    } else {
        load<false>(block_from, one.c, channels, places, block_smem);
    }
    __syncthreads();
    elem_t* const block_to = to + group * one.to_group + first_pixel * one.to_pixel + first_channel * one.to_c;
    if (one.to_c == 1) {
        store<true>(block_to, one.to_pixel, 1, pixels, channels, block_smem);
    } else {
        store<false>(block_to, one.to_pixel, one.to_c, pixels, channels, block_smem);
    }
}
