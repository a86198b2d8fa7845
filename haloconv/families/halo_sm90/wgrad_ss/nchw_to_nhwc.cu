// halo_sm90_nchw_to_nhwc: x and dy of halo_sm90_wgrad_ss with channels as neighbours, from dense planes of 16 bits.
//
// A block moves CHANNELS channels of an image through shared memory, 33 KB: of small planes, which follow one another
// and begin anywhere, all pixels as one run; of large ones, whose size is a multiple of eight, PIXELS pixels. A thread
// reads 16 bytes, eight elements of a run, and writes 16, eight channels of a pixel: two lanes fill a sector.
#include "families/halo_sm90/piece.cuh"
#include "kernels/ceil_div.cuh"

// Constants: ELEM is hc::fp16 or hc::bf16.
using hc::i64;
using elem_t = ELEM;

constexpr int THREADS = 256, WARPS = THREADS / 32, CHANNELS = 32, ELEMS = 8;
constexpr int SMALL_PLANE = 512, PIXELS = 128;  // pixels of a block: all of a plane that has no more, or so many
constexpr int PITCH = PIXELS + 4;               // two groups of channels meet different banks
constexpr int LANE_PIXELS = 16, GROUPS = CHANNELS / ELEMS;  // pixels that a warp writes at a time; groups of channels

static_assert(sizeof(elem_t) == 2, "a piece has eight elements");

struct Tensor {
    i64 image, to_image;  // elements from one to the next
    int channels, plane;
    int channel_blocks, pixel_blocks;  // of an image
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

// Reads `runs` runs of `elems` elements, whole pieces, `step` apart, to rows of PITCH.
__device__ __forceinline__ void load(elem_t* smem, const elem_t* from, int runs, int elems, int step) {
    const int pieces = elems / ELEMS;
#pragma unroll 4
    for (int i = threadIdx.x; i < runs * pieces; i += THREADS) {
        const int run = i / pieces, at = (i - run * pieces) * ELEMS;
        keep(smem + run * PITCH + at, *reinterpret_cast<const hc::Piece*>(from + (i64)run * step + at));
    }
}

// Writes `pixels` of which `channels` follow one another, from channels `pitch` elements apart.
__device__ __forceinline__ void store(elem_t* to, int to_pixel, const elem_t* smem, int pitch, int pixels,
                                      int channels) {
    const int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < hc::ceil_div(pixels, LANE_PIXELS) * (GROUPS / 2); i += WARPS) {
        const int channel = (i % (GROUPS / 2) * 2 + lane % 2) * ELEMS;
        const int pixel = i / (GROUPS / 2) * LANE_PIXELS + lane / 2;
        if (channel >= channels || pixel >= pixels) continue;
        elem_t eight[ELEMS];
#pragma unroll
        for (int j = 0; j < ELEMS; ++j) eight[j] = smem[(channel + j) * pitch + pixel];
        *reinterpret_cast<hc::Piece*>(to + (i64)pixel * to_pixel + channel) = hc::to_piece(eight);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) halo_sm90_nchw_to_nhwc(const __grid_constant__ Params p) {
    __shared__ __align__(16) elem_t smem[CHANNELS * SMALL_PLANE];
    const int of_dy = blockIdx.x >= p.x_blocks;
    const Tensor& one = p.tensors[of_dy];
    int block = blockIdx.x - of_dy * p.x_blocks;
    const int channel = block % one.channel_blocks * CHANNELS;
    block /= one.channel_blocks;
    const int image = block / one.pixel_blocks, pixel = (block - image * one.pixel_blocks) * PIXELS;
    const int channels = min(CHANNELS, one.channels - channel);
    const elem_t* const from = (of_dy ? p.dy : p.x) + image * one.image + (i64)channel * one.plane + pixel;
    elem_t* const to = (of_dy ? p.dy_to : p.x_to) + image * one.to_image + (i64)pixel * one.channels + channel;
    if (one.pixel_blocks == 1) {
        load(smem, from, 1, channels * one.plane, 0);
        __syncthreads();
        store(to, one.channels, smem, one.plane, one.plane, channels);
    } else {
        const int pixels = min(PIXELS, one.plane - pixel);
        load(smem, from, channels, pixels, one.plane);
        __syncthreads();
        store(to, one.channels, smem, PITCH, pixels, channels);
    }
}
