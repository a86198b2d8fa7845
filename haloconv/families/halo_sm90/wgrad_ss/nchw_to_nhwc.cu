// halo_sm90_nchw_to_nhwc: x and dy of halo_sm90_wgrad_ss with channels as neighbours, from dense planes of 16 bits.
//
// A block moves some channels of an image through shared memory, 33 KB: of small planes, which follow one another and
// begin anywhere, all pixels as one run; of large ones runs of 16-byte pieces: PIXELS pixels, or rows. A thread reads
// 16 bytes, eight elements of a run, and writes 16, eight channels of a pixel: two lanes fill a sector. With a stride
// the pixels that it leaves out are not written, nor the rows of large planes read.
#include "families/halo_sm90/piece.cuh"
#include "kernels/ceil_div.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16.
using hc::i64;
using elem_t = ELEM;

constexpr int THREADS = 256, WARPS = THREADS / 32, ELEMS = 8;
constexpr int SMALL_ELEMS = 16384;                          // of the planes that a block moves as one run
constexpr int PIXELS = 128;                                 // of a channel that a block of a large plane reads, at most
constexpr int PITCH = PIXELS + 4;                           // two groups of channels meet different banks
constexpr int MOST_CHANNELS = 32;                           // of a block
constexpr int LANE_PIXELS = 16, LANE_CHANNELS = 2 * ELEMS;  // that a warp writes at a time

static_assert(sizeof(elem_t) == 2, "a piece has eight elements");
static_assert(MOST_CHANNELS * PITCH <= SMALL_ELEMS, "runs of a large plane fit");

struct Tensor {
    i64 image, to_image;               // elements from one to the next
    int channels, plane;               // elements of a plane
    int pixels, cols, down, across;    // that are copied: all, of a row; elements from row to row, from pixel to pixel
    int block_channels, block_pixels;  // of a block
    int channel_blocks, pixel_blocks;  // of an image
    int runs, run;                     // of a channel that a block of a large plane reads, and elements of each; 0: all
};

struct Params {
    const elem_t *x, *dy;
    elem_t *x_to, *dy_to;
    Tensor tensors[2];  // x and dy
    int x_blocks;       // that move x
};

// Four elements; a row of PITCH begins with a whole one.
struct alignas(8) Half {
    unsigned word[2];
};

__device__ __forceinline__ void keep(elem_t* to, const hc::Piece& piece) {
    *reinterpret_cast<Half*>(to) = {piece.word[0], piece.word[1]};
    *reinterpret_cast<Half*>(to + ELEMS / 2) = {piece.word[2], piece.word[3]};
}

// Reads `runs` runs of `elems` elements, whole pieces, of each channel, whose rows are of PITCH.
__device__ __forceinline__ void load(elem_t* smem, const elem_t* from, const Tensor& one, int channels, int runs,
                                     int elems) {
    const int pieces = elems / ELEMS;
#pragma unroll 1  // ptxas spills the quotients of several
    for (int i = threadIdx.x; i < channels * runs * pieces; i += THREADS) {
        const int run = i / pieces, at = (i - run * pieces) * ELEMS, channel = run / runs, row = run - channel * runs;
        const elem_t* const place = from + (i64)channel * one.plane + row * one.down + at;
        keep(smem + channel * PITCH + row * elems + at, *reinterpret_cast<const hc::Piece*>(place));
    }
}

// Writes `pixels` of which `channels` follow one another, from channels `pitch` and rows `down` elements apart.
__device__ __forceinline__ void store(elem_t* to, const elem_t* smem, const Tensor& one, int pitch, int down,
                                      int pixels, int channels) {
    const int lane = threadIdx.x % 32, groups = hc::ceil_div(channels, LANE_CHANNELS);
    for (int i = threadIdx.x / 32; i < hc::ceil_div(pixels, LANE_PIXELS) * groups; i += WARPS) {
        const int group = i % groups, channel = group * LANE_CHANNELS + lane % 2 * ELEMS;
        const int pixel = i / groups * LANE_PIXELS + lane / 2;
        if (channel >= channels || pixel >= pixels) continue;
        const int row = pixel / one.cols;
        const elem_t* const from = smem + channel * pitch + row * down + (pixel - row * one.cols) * one.across;
        elem_t eight[ELEMS];
#pragma unroll
        for (int j = 0; j < ELEMS; ++j) eight[j] = from[j * pitch];
        *reinterpret_cast<hc::Piece*>(to + (i64)pixel * one.channels + channel) = hc::to_piece(eight);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) halo_sm90_nchw_to_nhwc(const __grid_constant__ Params p) {
    __shared__ __align__(16) elem_t smem[SMALL_ELEMS];
    const int of_dy = blockIdx.x >= p.x_blocks;
    const Tensor& one = p.tensors[of_dy];
    int block = blockIdx.x - of_dy * p.x_blocks;
    const int channel = block % one.channel_blocks * one.block_channels;
    block /= one.channel_blocks;
    const int image = block / one.pixel_blocks, pixel = (block - image * one.pixel_blocks) * one.block_pixels;
    const int channels = min(one.block_channels, one.channels - channel);
    const int pixels = min(one.block_pixels, one.pixels - pixel), row = pixel / one.cols;
    const int place = row * one.down + (pixel - row * one.cols) * one.across;  // of the first pixel in its plane
    const elem_t* const from = (of_dy ? p.dy : p.x) + image * one.image + (i64)channel * one.plane + place;
    elem_t* const to = (of_dy ? p.dy_to : p.x_to) + image * one.to_image + (i64)pixel * one.channels + channel;
    if (one.runs == 0) {
        for (int i = threadIdx.x * ELEMS; i < channels * one.plane; i += THREADS * ELEMS)
            *reinterpret_cast<hc::Piece*>(smem + i) = *reinterpret_cast<const hc::Piece*>(from + i);
        __syncthreads();
        store(to, smem, one, one.plane, one.down, pixels, channels);
    } else {
        const int runs = one.runs == 1 ? 1 : pixels / one.cols, elems = one.runs == 1 ? pixels : one.run;
        load(smem, from, one, channels, runs, elems);
        __syncthreads();
        store(to, smem, one, PITCH, elems, pixels, channels);
    }
}
