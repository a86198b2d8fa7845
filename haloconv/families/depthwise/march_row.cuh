// A thread's part of one row of a tensor: WIDTH columns by DEPTH channels, kept as the words that memory holds.
//
// It moves as vectors: of VEC neighbouring columns of one channel, or (VEC is 1) of DEPTH neighbouring channels of
// one column. LEAD columns of the first vector stand before the part. Of a vector only what is needed is moved: the
// least aligned power of two of elements around that.
#pragma once

#include "kernels/numeric.cuh"

namespace hc::march {

template <int BYTES>
struct alignas(BYTES) Words {
    unsigned word[BYTES / 4];
};

template <int BYTES>
__device__ __forceinline__ void load_words(unsigned* to, const char* from) {
    const auto words = *reinterpret_cast<const Words<BYTES>*>(from);
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) to[i] = words.word[i];
}

template <int BYTES>
__device__ __forceinline__ void store_words(char* to, const unsigned* from) {
    Words<BYTES> words;
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) words.word[i] = from[i];
    *reinterpret_cast<Words<BYTES>*>(to) = words;
}

// Element `index` of words.
template <class Elem>
__device__ __forceinline__ float unpacked(const unsigned* words, int index) {
    if constexpr (sizeof(Elem) == 4) {
        return __uint_as_float(words[index]);
    } else {
        const unsigned word = words[index / 2];
        return to_acc(Elem{(unsigned short)(index % 2 ? word >> 16 : word)});
    }
}

template <class Half>
__device__ __forceinline__ unsigned packed(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    return from_acc<Half>(low).bits | unsigned(from_acc<Half>(high).bits) << 16;
#else
    return from_acc_pair<Half>(low, high);
#endif
}

template <class Elem, int WIDTH, int DEPTH, int VEC, int LEAD>
struct Row {
    static_assert(VEC == 1 || DEPTH == 1, "neighbours in memory are columns or channels");
    static_assert(LEAD < VEC, "the first vector has the first column");
    static constexpr int VECTORS = (LEAD + WIDTH + VEC - 1) / VEC;
    static constexpr int VECTOR_BYTES = VEC * DEPTH * (int)sizeof(Elem);
    static constexpr int WORDS = (VECTOR_BYTES + 3) / 4;
    static_assert(VECTOR_BYTES <= 16, "one instruction moves a vector");
    static_assert(VECTORS <= 32, "a bit for each vector");

    unsigned word[VECTORS][WORDS];

    // Bit v: vector v is inside a row of `extent` columns, if column 0 of the part is column `first` of the row.
    static __device__ __forceinline__ unsigned inside(int first, int extent) {
        unsigned mask = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const bool within = (unsigned)(first - LEAD + v * VEC) < (unsigned)extent;
            mask |= (within ? 1u : 0u) << v;
        }
        return mask;
    }

    // Loads the vectors of the mask; the others become zeros. `at` is column 0, columns are col_bytes apart.
    __device__ __forceinline__ void load(const char* at, unsigned mask, i64 col_bytes) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const char* from = at + (VEC > 1 ? (i64)((v * VEC - LEAD) * (int)sizeof(Elem)) : v * col_bytes);
            from += begin(v) * (int)sizeof(Elem);
            unsigned moved[4] = {};
            if (mask >> v & 1) {
                switch (moved_bytes(v)) {
                    case 2:
                        moved[0] = *reinterpret_cast<const unsigned short*>(from);
                        break;
                    case 4:
                        load_words<4>(moved, from);
                        break;
                    case 8:
                        load_words<8>(moved, from);
                        break;
                    default:
                        load_words<16>(moved, from);
                }
            }
            const int first_word = begin(v) * (int)sizeof(Elem) / 4;
#pragma unroll
            for (int i = 0; i < WORDS; ++i) word[v][i] = i >= first_word ? moved[i - first_word] : 0;
        }
    }

    __device__ __forceinline__ void unpack(float (&values)[WIDTH][DEPTH]) const {
#pragma unroll
        for (int i = 0; i < WIDTH * DEPTH; ++i) {
            const int col = i / DEPTH, v = (LEAD + col) / VEC, e = VEC > 1 ? (LEAD + col) % VEC : i % DEPTH;
            const bool alone = moved_bytes(v) == 2;  // a lone half stands in the low part of its word
            values[col][i % DEPTH] = unpacked<Elem>(alone ? word[v] + e / 2 : word[v], alone ? 0 : e);
        }
    }

    __device__ __forceinline__ void set(const float (&values)[WIDTH][DEPTH]) {
        static_assert(LEAD == 0 && WIDTH % VEC == 0, "a row that is stored is whole vectors");
#pragma unroll
        for (int i = 0; i < VECTORS * WORDS; ++i) {
            constexpr int ELEMS = WORDS > 1 || VECTOR_BYTES == 4 ? 4 / (int)sizeof(Elem) : 1;  // of a word
            const int e = i * ELEMS;
            unsigned& to = word[i / WORDS][i % WORDS];
            const float low = values[e / DEPTH][e % DEPTH];
            if constexpr (sizeof(Elem) == 4) {
                to = __float_as_uint(low);
            } else if constexpr (ELEMS == 1) {
                to = from_acc<Elem>(low).bits;
            } else {
                to = packed<Elem>(low, values[(e + 1) / DEPTH][(e + 1) % DEPTH]);
            }
        }
    }

    __device__ __forceinline__ void store(char* at, unsigned mask, i64 col_bytes) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (!(mask >> v & 1)) continue;
            char* to = at + (VEC > 1 ? (i64)(v * VECTOR_BYTES) : v * col_bytes);
            if constexpr (VECTOR_BYTES == 2)
                *reinterpret_cast<unsigned short*>(to) = (unsigned short)word[v][0];
            else
                store_words<VECTOR_BYTES>(to, word[v]);
        }
    }

  private:
    // Elements [first, last] of vector v are needed; moved are the least aligned power of two around them.
    static __device__ __forceinline__ constexpr int first(int v) { return v == 0 ? LEAD : 0; }
    static __device__ __forceinline__ constexpr int last(int v) {
        const int end = LEAD + WIDTH - v * VEC;
        return (end < VEC ? end : VEC) - 1;
    }
    static __device__ __forceinline__ constexpr int moved(int v) {
        return first(v) == last(v) ? 1 : first(v) / 2 == last(v) / 2 ? 2 : first(v) / 4 == last(v) / 4 ? 4 : 8;
    }
    static __device__ __forceinline__ constexpr int begin(int v) { return first(v) / moved(v) * moved(v); }
    static __device__ __forceinline__ constexpr int moved_bytes(int v) { return moved(v) * DEPTH * (int)sizeof(Elem); }
};

}  // namespace hc::march
