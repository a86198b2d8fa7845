// halo_sm90_arrange: x and dy of halo_sm90_wgrad in a memory order that TMA takes, with images side by side.
//
//   to[group of images][row][image][pixel of its cell][channel]   channels are neighbours
//   to[group of images][channel][row][image][pixel of its cell]   pixels are
//
// A cell has a row of an image from pixel `shift` on, and zeros elsewhere: the padding, which neighbours share. Images
// behind the last one are zeros, too. Both tensors are moved by one launch. A block moves PIXELS pixels of CHANNELS
// channels through shared memory, 8.3 KB: neighbouring lanes read neighbours, and write neighbours, in whichever order
// either memory has them. All loads of a thread are on their way before the first is stored.
#include "kernels/numeric.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16.
using hc::i64;
using elem_t = ELEM;

constexpr int SIZE = sizeof(elem_t), THREADS = 256;
constexpr int PIXELS = 64, CHANNELS = 128 / SIZE, ITEMS = PIXELS * CHANNELS / THREADS;
constexpr int PITCH = PIXELS + 4 / SIZE;  // lanes of neighbouring channels meet different banks

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

// An item's pixel and channel of the block: whichever are neighbours in memory follow one another.
struct Item {
    int pixel, channel;

    __device__ __forceinline__ Item(int index, bool by_channels)
        : pixel(by_channels ? index / CHANNELS : index % PIXELS),
          channel(by_channels ? index % CHANNELS : index / PIXELS) {}
};

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
    elem_t loaded[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const Item item(threadIdx.x + i * THREADS, one.c == 1);
        const i64 place = places[item.pixel];
        const bool there = place >= 0 && item.channel < channels;
        loaded[i] = there ? from[place + (first_channel + item.channel) * one.c] : elem_t{};
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const Item item(threadIdx.x + i * THREADS, one.c == 1);
        block_smem[item.channel * PITCH + item.pixel] = loaded[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const Item item(threadIdx.x + i * THREADS, one.to_c == 1);
        if (item.pixel >= pixels || item.channel >= channels) continue;
        to[group * one.to_group + (first_pixel + item.pixel) * one.to_pixel +
           (first_channel + item.channel) * one.to_c] = block_smem[item.channel * PITCH + item.pixel];
    }
}
