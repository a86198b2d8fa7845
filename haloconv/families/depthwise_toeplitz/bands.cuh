// Banded matrices of a filter: for each of its rows that of k input columns by 8 output columns whose element (k, col)
// is the tap k - col - LEAD, in groups of k of 16 bytes.
#pragma once

#include "families/depthwise_toeplitz/planes.cuh"
#include "kernels/products.cuh"

namespace hc::toeplitz {

struct alignas(8) Pair {
    float low, high;
};

// Two neighbours in memory, the first at an even place.
__device__ __forceinline__ void store_pair(float* to, float low, float high) {
    *reinterpret_cast<Pair*>(to) = {low, high};
}
__device__ __forceinline__ void store_pair(tf32x3* to, float low, float high) { store_pair(&to->value, low, high); }
template <class Half>
__device__ __forceinline__ void store_pair(Half* to, float low, float high) {
    *reinterpret_cast<unsigned*>(to) = from_acc_pair<Half>(low, high);
}

__device__ __forceinline__ unsigned table_bits(float tap) { return rounded_bits(tap, tap); }
__device__ __forceinline__ unsigned table_bits(tf32x3 tap) { return rounded_bits(tap.value, tap); }
template <class Half>
__device__ __forceinline__ unsigned short table_bits(Half tap) {
    return tap.bits;
}

template <class Elem, int ROWS, int COLS, int LEAD>
struct Bands {
    static constexpr int GROUP = GROUP_BYTES / (int)sizeof(Elem);           // columns
    static constexpr int GROUPS = (7 + COLS + LEAD + GROUP - 1) / GROUP;    // of a banded matrix
    static constexpr int COPIES = 4 / (int)sizeof(Elem);                    // of a row, for pairs at odd places
    static constexpr int BEFORE = 16, WIDTH = BEFORE + GROUPS * GROUP + 2;  // zeros before a row's first tap; elements
    // Words of a copy: lanes of both copies read from different banks.
    static constexpr int LEAST = (WIDTH + COPIES - 1) / COPIES, OVER = LEAST % 32;
    static constexpr int WORDS = OVER < 8 ? LEAST - OVER + 8 : OVER > 24 ? LEAST - OVER + 40 : LEAST;

    static_assert(LEAD >= 0 && LEAD < GROUP, "windows begin at groups");

    struct Fragments {
        unsigned of[GROUPS];
    };

    // Rows between zeros, as they are, and in 16 bits once more without the first element: then any two neighbours are
    // a word of one of both.
    struct Table {
        unsigned of[ROWS][COPIES][WORDS];

        // tap(r, s) gives an element. Returns whether those of the calling thread are finite.
        template <int COPIERS, class Tap>
        __device__ __forceinline__ bool load(Tap tap) {
            using Bits = decltype(table_bits(Elem{}));
            for (int i = threadIdx.x; i < ROWS * COPIES * WORDS; i += COPIERS) (&of[0][0][0])[i] = 0;
            __syncthreads();
            float zero = 0;
#pragma unroll 8
            for (int i = threadIdx.x; i < ROWS * COLS; i += COPIERS) {  // several loads at a time
                const int r = i / COLS, s = i % COLS;
                const Elem element = tap(r, s);
                zero += to_acc(element) * 0.f;
#pragma unroll
                for (int copy = 0; copy < COPIES; ++copy)
                    reinterpret_cast<Bits*>(of[r][copy])[BEFORE + s - copy] = table_bits(element);
            }
            return zero == 0.f;
        }
    };

    const unsigned* lane;  // the lane's first word of row 0

    __device__ __forceinline__ explicit Bands(const Table& table) {
        const int at = BEFORE - LEAD - (int)threadIdx.x % 32 / 4 + (int)threadIdx.x % 4 * COPIES, odd = at % COPIES;
        lane = table.of[0][odd] + at / COPIES;
    }

    __device__ __forceinline__ Fragments row(int r) const {
        Fragments fragments;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) fragments.of[i] = lane[r * (COPIES * WORDS) + i * 4];
        return fragments;
    }
};

}  // namespace hc::toeplitz
