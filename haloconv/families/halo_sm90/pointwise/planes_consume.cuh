// The consumers of halo_sm90_pointwise_planes: fragments of planes, products, and how sums are stored.
#pragma once

#include "families/halo_sm90/multiplied.cuh"
#include "families/halo_sm90/pointwise/planes_tile.cuh"
#include "families/halo_sm90/pointwise/stored.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace hc::planes {

using multiply_t = MultipliedAs<elem_t>::type;
using Sums = float[M_BLOCKS][COLUMNS / 2];
// A stage's pixels as the fragments of A, by steps and blocks of M.
using Fragments = unsigned[STEPS][M_BLOCKS][4];

constexpr bool W_MN = W_LOADS == W_COLUMNS;
constexpr int LANE_CHANNELS = 4 / SIZE;  // neighbouring channels of a lane in a fragment

// A row of M: an image of the tile and one of its pixels, unless it is a row of none.
struct Row {
    int image, down, across;
    bool there;

    __device__ __forceinline__ Row(const Params& p, int row) : image(p.image_rows.quotient(row)) {
        const int pixel = row - image * p.image_rows.value;
        there = image < p.images && pixel < p.pixels;
        down = p.cols.quotient(pixel), across = pixel - down * p.cols.value;
    }
    __device__ __forceinline__ int x(const Params& p, const Smem& smem) const {
        return image * smem.x_image + (down * p.x_row + across * p.x_col) * SIZE;
    }
    __device__ __forceinline__ int y(const Params& p, const Smem& smem) const {
        return image * smem.y_image + (down * p.y_row + across * p.y_col) * SIZE;
    }
};

// A consumer: its first column of the tile, where its lanes' rows of M lie, and its buffers. Which pixels are a warp's
// rows the host chooses, so that the lanes of a load meet different banks.
struct Consumer {
    int n;
    int x[M_BLOCKS][2];  // bytes in a stage's planes, of the lane's first channel
    int y[M_BLOCKS][2];  // bytes in a buffer, of the lane's first filter; -1: a row of no pixel
    char* buffers;
    int next = 0;  // buffer
    int barrier;
    bool sends;  // the thread that asks for copies

    __device__ __forceinline__ Consumer(const Params& p, const Smem& smem, int id)
        : n(SPLIT_N ? id * COLUMNS : 0),
          buffers(smem.buffers + (SPLIT_N ? id * Y_BUFFERS * smem.buffer : 0)),
          barrier(1 + (SPLIT_N ? id : 0)),
          sends((SPLIT_N || id == 0) && threadIdx.x % 128 / 32 == 0 && ptx::elect_sync()) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
        const int own = lane / 4 % 4 * p.lane_rows + lane / 16 * p.lanes_rows;
#pragma unroll
        for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int block_row = ((SPLIT_N ? 0 : id * M_BLOCKS) + block) * 64;
                const int first = block_row + warp * p.warp_rows + half * p.half_rows;  // of the warp
                const Row row(p, first + own), in_place(p, first);  // reads what another lane reads: no bank more
                const int from = row.there ? row.x(p, smem) : in_place.there ? in_place.x(p, smem) : 0;
                x[block][half] = from + lane % 4 * LANE_CHANNELS * X_PLANE;
                y[block][half] = row.there ? row.y(p, smem) + lane % 4 * 2 * Y_PLANE : -1;
            }
    }
};

template <class Word>
__device__ __forceinline__ unsigned word_at(const char* from, bool there) {
    return there ? *reinterpret_cast<const Word*>(from) : 0;
}

// What a lane holds of two rows of a block and of the channels from `channel` on: two registers of a fragment. `there`
// are channels of the stage behind the lane's own first one.
__device__ __forceinline__ void load_pair(unsigned& even, unsigned& odd, const char* x, const int (&at)[2], int channel,
                                          int there) {
    const bool first = channel < there, second = channel + 1 < there;
    if constexpr (SIZE == 4) {
        even = to_tf32(__uint_as_float(word_at<unsigned>(x + at[0] + channel * X_PLANE, first)));
        odd = to_tf32(__uint_as_float(word_at<unsigned>(x + at[1] + channel * X_PLANE, first)));
    } else if constexpr (X_PAIRS == ALL_PAIRS) {
        const unsigned low = word_at<unsigned>(x + at[0] + channel * X_PLANE, first);
        const unsigned high = word_at<unsigned>(x + at[0] + (channel + 1) * X_PLANE, second);
        even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
    } else if constexpr (X_PAIRS == EVEN_PAIRS) {
        const unsigned low = word_at<unsigned>(x + at[0] + channel * X_PLANE, first);
        even = __byte_perm(low, word_at<unsigned short>(x + at[0] + (channel + 1) * X_PLANE, second), 0x5410);
        odd = __byte_perm(low, word_at<unsigned short>(x + at[1] + (channel + 1) * X_PLANE, second), 0x5432);
    } else {
        unsigned low[2], high[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            low[i] = word_at<unsigned short>(x + at[i] + channel * X_PLANE, first);
            high[i] = word_at<unsigned short>(x + at[i] + (channel + 1) * X_PLANE, second);
        }
        even = __byte_perm(low[0], high[0], 0x5410), odd = __byte_perm(low[1], high[1], 0x5410);
    }
}

// Loads all fragments of a stage that has `channels`: with MASKED fewer than a chunk, and the others count as zeros.
template <bool MASKED>
__device__ __forceinline__ void load(Fragments& a, const Consumer& self, const char* x, int channels) {
    const int there = MASKED ? channels - int(threadIdx.x % 4) * LANE_CHANNELS : CHUNK;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int block = 0; block < M_BLOCKS; ++block)
                load_pair(a[step][block][2 * i], a[step][block][2 * i + 1], x, self.x[block],
                          step * DEPTH + i * (DEPTH / 2), there);
}

__device__ __forceinline__ void multiply(Sums& sums, const Fragments& fragments, const char* w, bool accumulate) {
    const ptx::u64 desc = W_MN ? ptx::smem_descriptor(ptx::shared_address(w), SPAN_BYTES, 8 * SPAN * SIZE, SPAN * SIZE)
                               : ptx::smem_descriptor(ptx::shared_address(w), 16, 8 * CHUNK_BYTES, CHUNK_BYTES);
    constexpr int STEP_UNITS = W_MN ? DEPTH * SPAN * SIZE / 16 : 2;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int block = 0; block < M_BLOCKS; ++block)
            ptx::wgmma_rs<multiply_t, COLUMNS, W_MN>(sums[block], fragments[step][block],
                                                     ptx::moved(desc, step * STEP_UNITS), accumulate || step > 0);
    ptx::wgmma_commit_group();
}

// Lets copies write to a stage again, once the thread, or its warp, has read it.
__device__ __forceinline__ void give_back(const Smem& smem, int stage) {
    ptx::fence_proxy_async_shared();
    if constexpr (X_BOXES)
        arrive_warp(&smem.empty[stage]);
    else
        ptx::mbarrier_arrive(&smem.empty[stage]);
}

// Multiplies the next stage. The stage before it goes back when its products are done, while those of this one run.
__device__ __forceinline__ void multiply_stage(const Params& p, const Smem& smem, const Consumer& self, Cursor& at,
                                               int chunk, Sums& sums, Fragments& fragments) {
    wait(&smem.full[at.index], at.parity);
    const char *const w = smem.stages + at.index * p.stage_bytes, *const x = w + W_BYTES;
    const int channels = p.channels - chunk * CHUNK;
    if (!X_BOXES && channels < CHUNK)  // boxes have zeros behind the last channel
        load<true>(fragments, self, x, channels);
    else
        load<false>(fragments, self, x, CHUNK);
    multiply(sums, fragments, w + (W_MN ? self.n / SPAN * SPAN_BYTES : self.n * CHUNK_BYTES), chunk > 0);
    ptx::wgmma_wait_group<1>();
    if (chunk > 0) give_back(smem, at.index > 0 ? at.index - 1 : STAGES - 1);
    at.advance(STAGES);
}

// Sends the planes of a slab's filters, of each image of the tile, or a band of them.
__device__ __forceinline__ void send(const Params& p, const Smem& smem, const Tile& tile, int filter,
                                     const char* buffer) {
    const int bytes = min(SLAB, p.filters - filter) * Y_PLANE;
    if (bytes <= 0) return;
#pragma unroll 1
    for (int i = 0; i < min(p.images, p.all_images - tile.image); ++i, buffer += smem.y_image) {
        const int image = tile.image + i;
        if constexpr (Y_BOXES) {
            ptx::cp_async_bulk_tensor_4d_global_shared(&p.y_map, buffer, tile.band * p.y_band_col,
                                                       tile.band * p.y_band_row, filter, image);
        } else {
            char* const to = reinterpret_cast<char*>(p.y + image * p.y_image);
            ptx::cp_async_bulk_global_shared(to + (i64)filter * Y_PLANE, buffer, bytes);
        }
    }
}

// Adds the residual to the sums of a slab behind bias and scale: an element for each output, wherever that goes. Its
// address may be any, so elements come one by one, all those of a block of M in flight at once.
template <class P>
__device__ __forceinline__ void add_residual(const P& p, const Consumer& self, const Tile& tile, Sums& sums, int first,
                                             int filter) {
    const int own = filter + threadIdx.x % 4 * 2;
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block) {
        float values[SLAB / 2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int place = self.y[block][half] - threadIdx.x % 4 * 2 * Y_PLANE, in_tile = place / (SLAB * Y_PLANE);
            const int pixel = tile.band * p.pixels + (place - in_tile * SLAB * Y_PLANE) / SIZE;
            const int image = tile.image + in_tile;
            const bool there = self.y[block][half] >= 0 && image < p.all_images && pixel < p.y_plane;
            const elem_t* const from = p.residual + image * p.y_image + (i64)own * p.y_plane + pixel;
#pragma unroll
            for (int i = 0; i < SLAB / 4; ++i) {
                const int further = i / 2 * 8 + i % 2;
                values[i / 2 * 4 + 2 * half + i % 2] =
                    there && own + further < p.filters ? to_acc(from[(i64)further * p.y_plane]) : 0.f;
            }
        }
#pragma unroll
        for (int i = 0; i < SLAB / 2; ++i) {
            float& sum = sums[block][4 * first + i];
            sum = finished<AFFINE, Activation::NONE>(sum, own_of(p, own + i / 4 * 8 + i % 2)) + values[i];
        }
    }
}

// Fills a buffer with the sums of a slab, whose first eight columns are `first` and whose first filter is `filter`. A
// row without a pixel is asked for once, not at each store: of many small branches the compiler takes a second.
__device__ __forceinline__ void fill(const Params& p, const Consumer& self, char* buffer, Sums& sums, int first,
                                     int filter) {
#pragma unroll
    for (int i = 0; i < SLAB / 4; ++i) {  // the lane's filters: two of each eight columns
        const BiasAndScale both = own_of(p, filter + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2);
#pragma unroll
        for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& sum = sums[block][4 * (first + i / 2) + 2 * half + i % 2];
                sum = finished<RESIDUAL ? Affine::NONE : AFFINE, ACTIVATION>(sum, both);
            }
    }
#pragma unroll
    for (int block = 0; block < M_BLOCKS; ++block)
#pragma unroll
        for (int half = 0; half < (Y_PAIRS ? 1 : 2); ++half) {
            if (self.y[block][half] < 0) continue;
#pragma unroll
            for (int i = 0; i < SLAB / 4; ++i) {
                char* const to = buffer + (i / 2 * 8 + i % 2) * Y_PLANE + self.y[block][half];
                const float* const sum = &sums[block][4 * (first + i / 2) + 2 * half + i % 2];
                if constexpr (Y_PAIRS)  // the other row's sum is two further on
                    *reinterpret_cast<unsigned*>(to) = from_acc_pair<elem_t>(sum[0], sum[2]);
                else
                    *reinterpret_cast<elem_t*>(to) = from_acc<elem_t>(sum[0]);
            }
        }
}

// Writes the sums of a tile. When a slab goes, TMA has read the slab whose buffer is the next one's.
__device__ __forceinline__ void write(const Params& p, const Smem& smem, Consumer& self, const Tile& tile, Sums& sums) {
#pragma unroll
    for (int slab = 0; slab < COLUMNS / SLAB; ++slab) {
        const int filter = tile.filter + self.n + slab * SLAB;
        char* const buffer = self.buffers + self.next * smem.buffer;
        self.next = self.next + 1 == Y_BUFFERS ? 0 : self.next + 1;
        if constexpr (RESIDUAL) add_residual(p, self, tile, sums, slab * (SLAB / 8), filter);
        fill(p, self, buffer, sums, slab * (SLAB / 8), filter);
        ptx::fence_proxy_async_shared();
        if (self.sends) ptx::cp_async_bulk_wait_group_read<Y_BUFFERS - 2>();
        ptx::bar_sync(self.barrier, GROUP_THREADS);
        if (self.sends) {
            send(p, smem, tile, filter, buffer);
            ptx::cp_async_bulk_commit_group();
        }
    }
}

__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup) {
    Consumer self(p, smem, warpgroup);
    Cursor at;
    for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        Sums sums;
        Fragments even, odd;
        for (int chunk = 0;;) {
            multiply_stage(p, smem, self, at, chunk, sums, even);
            if (++chunk == p.chunks) break;
            multiply_stage(p, smem, self, at, chunk, sums, odd);
            if (++chunk == p.chunks) break;
        }
        ptx::wgmma_wait_group<0>();
#pragma unroll
        for (int block = 0; block < M_BLOCKS; ++block) ptx::wgmma_hold(sums[block]);
        give_back(smem, at.index > 0 ? at.index - 1 : STAGES - 1);
        write(p, smem, self, Tile(p, index), sums);
    }
    settle(self);
}

}  // namespace hc::planes
