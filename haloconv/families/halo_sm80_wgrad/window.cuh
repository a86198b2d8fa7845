// Tiles of dy, and of x with its halo, from global memory into planes of words.
#pragma once

#include "families/halo_sm80_wgrad/source.cuh"

#if !PIXEL_PAIRS && !PIECES
namespace hc::wgrad {

// Neighbours in memory, moved by one instruction.
template <int COUNT>
struct alignas(COUNT * sizeof(elem_t)) Load {
    elem_t lane[COUNT];
};

template <int COUNT>
struct alignas(COUNT * 4) Words {
    unsigned lane[COUNT];
};

// A tensor-core word: one fp32 pixel in TF32, or a pixel of the lower tile with the same one of the upper tile.
__device__ __forceinline__ unsigned word(const float (&pixel)[1]) {
    return pixel[0] == pixel[0] ? ptx::cvt_rna_tf32(pixel[0]) : 0x7fffffffu;  // rounding makes some NaN infinite
}
template <class Half>
__device__ __forceinline__ unsigned word(const Half (&pixel)[2]) {
    return pixel[0].bits | unsigned(pixel[1].bits) << 16;
}

// CHANNELS x LINES x COLS elements as words at channel * CHANNEL_PITCH + line * LINE_STEP + place of the column, where
// columns of one residue modulo PLANES are neighbours. What lies outside the image is zero.
template <int CHANNELS, int LINES, int COLS, int PLANES, int PLANE_STEP, int LINE_STEP, int CHANNEL_PITCH, bool INNER,
          int VEC>
struct Window {
    static constexpr int ACROSS = INNER ? CHANNELS / VEC : COLS / VEC;  // loads along the lanes
    static constexpr int BEYOND = INNER ? COLS : LINES;
    static constexpr int UNITS = CHANNELS * LINES * COLS / VEC;
    static constexpr int STEPS = (UNITS + THREADS - 1) / THREADS;
    static constexpr int MOST = LOADED_WORDS / VEC < 8 ? LOADED_WORDS / VEC : 8;
    static constexpr int BATCHES = (STEPS + MOST - 1) / MOST;
    static constexpr int BATCH = (STEPS + BATCHES - 1) / BATCHES;         // loads in flight of a thread
    static constexpr int RUN = INNER || PLANES > VEC ? 1 : VEC / PLANES;  // words of a load that stay neighbours
    static_assert((INNER ? CHANNELS : COLS) % VEC == 0, "lanes have whole loads");
    static_assert(INNER || VEC % PLANES == 0 || PLANES % VEC == 0, "every load meets the planes in the same way");

    // A thread's units stay at their place along the first two axes, or along the first and advance evenly along the
    // second: then all but the first of them cost next to nothing to find.
    static constexpr bool KEEPS = THREADS % (ACROSS * BEYOND) == 0;
    static constexpr bool EVEN = !KEEPS && THREADS % ACROSS == 0 && BEYOND % (THREADS / ACROSS) == 0;

    struct Unit {
        int channel, line, col;
    };

    static __device__ __forceinline__ Unit unit_at(int across, int beyond, int last) {
        if (INNER) return {across * VEC, last, beyond};
        return {last, beyond, across * VEC};
    }
    // The thread's unit of a step. Steps are the same for all threads, and known to the compiler but for a multiple.
    static __device__ __forceinline__ Unit unit_at(int step) {
        const int own = threadIdx.x;
        if constexpr (KEEPS) {
            constexpr int LASTS = THREADS / (ACROSS * BEYOND);
            return unit_at(own % ACROSS, own / ACROSS % BEYOND, own / ACROSS / BEYOND + step * LASTS);
        } else if constexpr (EVEN) {
            constexpr int ROW = THREADS / ACROSS, ROWS_BEYOND = BEYOND / ROW;
            return unit_at(own % ACROSS, own / ACROSS + step % ROWS_BEYOND * ROW, step / ROWS_BEYOND);
        } else {
            const int index = step * THREADS + own;
            return unit_at(index % ACROSS, index / ACROSS % BEYOND, index / ACROSS / BEYOND);
        }
    }
    static __device__ __forceinline__ bool idle(int step) {
        return (UNITS % THREADS != 0 || STEPS % BATCH != 0) && step * THREADS + (int)threadIdx.x >= UNITS;
    }
    static __device__ __forceinline__ int place(Unit at) {
        return at.channel * CHANNEL_PITCH + at.line * LINE_STEP + at.col % PLANES * PLANE_STEP + at.col / PLANES;
    }

    static __device__ __forceinline__ void load(Load<VEC> (&to)[HALVES], const Source& from, Unit at) {
        const bool wanted = at.channel < from.channels && (unsigned)(from.col + at.col) < (unsigned)from.width;
        const offset_t offset =
            at.channel * from.channel_stride + at.line * from.line_stride + at.col * from.col_stride;
#pragma unroll
        for (int i = 0; i < HALVES; ++i) {
            to[i] = {};
            if (wanted && (unsigned)(from.line[i] + at.line) < (unsigned)from.height)
                to[i] = *reinterpret_cast<const Load<VEC>*>(from.from[i] + offset);
        }
    }

    // `to` is the place of the first word.
    static __device__ __forceinline__ void store(unsigned* to, const Load<VEC> (&loaded)[HALVES]) {
#pragma unroll
        for (int first = 0; first < VEC / RUN; ++first) {
            Words<RUN> words;
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                elem_t pixel[HALVES];
#pragma unroll
                for (int half = 0; half < HALVES; ++half) pixel[half] = loaded[half].lane[first + i * PLANES];
                words.lane[i] = word(pixel);
            }
            *reinterpret_cast<Words<RUN>*>(to + first * (INNER ? CHANNEL_PITCH : PLANE_STEP)) = words;
        }
    }

    static __device__ __forceinline__ void stage(unsigned* to, const Source& from) {
#pragma unroll 1
        for (int first = 0; first < STEPS; first += BATCH) {
            Load<VEC> loaded[BATCH][HALVES];
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (!idle(first + i)) load(loaded[i], from, unit_at(first + i));
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (!idle(first + i)) store(to + place(unit_at(first + i)), loaded[i]);
        }
    }
};

using XWindow = Window<TILE_G * TILE_C, X_LINES, X_COLS, STRIDE_W, PLANE_PITCH, LINE_PITCH, X_PITCH, X_INNER, X_VEC>;
using YWindow = Window<TILE_G * TILE_K, TILE_P, TILE_Q, 1, 0, TILE_Q, Y_PITCH, Y_INNER, Y_VEC>;

}  // namespace hc::wgrad
#endif
