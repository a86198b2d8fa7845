// Staging one operand of a gathered matrix product: global memory -> registers -> shared memory.
//
// The operand is a matrix of EXTENT rows by STAGE_ES reduction indices whose element (row, e) lies at the sum of two
// byte offsets and is zero unless the sums of two positions are inside the image. Each index is decoded once into an
// Entry, so that staging an element is two adds and two compares.
#pragma once

#include "kernels/numeric.cuh"

namespace hc {

constexpr int OUTSIDE = -(1 << 30);  // an Entry's h that keeps every sum outside the image

struct alignas(16) Entry {
    long long offset_bytes;
    int h, w;
};

__device__ __forceinline__ Entry outside() { return {0, OUTSIDE, 0}; }

// The least and the greatest position that one side's entries add.
struct Span {
    int h_min, h_max, w_min, w_max;
};

__device__ __forceinline__ bool inside(Entry a, int h, int w, int extent_h, int extent_w) {
    return (unsigned)(a.h + h) < (unsigned)extent_h && (unsigned)(a.w + w) < (unsigned)extent_w;
}

// E_LANES: neighbouring lanes stage neighbouring reduction indices (else rows); VEC elements along the lanes' axis are
// neighbours in memory and one load; HALO: elements may lie outside the image.
template <class Elem, int EXTENT, int STAGE_ES, int THREADS, bool E_LANES, int VEC, bool HALO>
struct Operand {
    using Acc = typename AccOf<Elem>::type;
    static constexpr int UNIT_ROWS = E_LANES ? 1 : VEC;
    static constexpr int UNIT_ES = E_LANES ? VEC : 1;
    static constexpr int LANE_UNITS = E_LANES ? STAGE_ES / UNIT_ES : EXTENT / UNIT_ROWS;
    static constexpr int UNITS = (EXTENT / UNIT_ROWS) * (STAGE_ES / UNIT_ES);
    static constexpr int STEPS = (UNITS + THREADS - 1) / THREADS;
    // A thread's units meet the same OWN places along the lanes' axis at every stage, if they divide evenly.
    static constexpr int OWN = E_LANES || LANE_UNITS <= THREADS ? 1 : LANE_UNITS / THREADS;
    static constexpr bool OWNS = THREADS % LANE_UNITS == 0 || LANE_UNITS == OWN * THREADS;
    // Neighbouring e and neighbouring rows store to different banks, and rows stay 16-byte aligned.
    static constexpr int PITCH = EXTENT + 4;

    Elem staged[STEPS][VEC];
    Entry own_rows[OWN];
    bool rows_stay;  // the warp's own rows are inside the image whatever the other side adds

    static __device__ __forceinline__ int row_of(int unit) {
        return UNIT_ROWS * (E_LANES ? unit / LANE_UNITS : unit % LANE_UNITS);
    }
    static __device__ __forceinline__ int e_of(int unit) {
        return UNIT_ES * (E_LANES ? unit % LANE_UNITS : unit / LANE_UNITS);
    }
    static __device__ __forceinline__ bool idle(int unit) { return UNITS % THREADS != 0 && unit >= UNITS; }

    // `moves` spans what the other side's entries add to a lane's position.
    __device__ __forceinline__ void begin(const Entry* rows, int h, int w, Span moves) {
        if constexpr (!E_LANES && OWNS) {
            bool stay = true;
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                own_rows[i] = rows[row_of(i * THREADS + threadIdx.x)];
                stay = stay && stays(own_rows[i], h, w, moves);
            }
            rows_stay = __all_sync(0xffffffffu, stay);
        }
    }

    // Issues the loads of one stage; their latency hides behind the multiplies of the stage before. A warp whose lanes
    // stay inside the image checks nothing, if the stage is `whole`: has no index beyond the end.
    __device__ __forceinline__ void fetch(const char* base, const Entry* rows, const Entry* es, int h, int w,
                                          Span moves, bool whole) {
        bool unchecked = false;
        if constexpr (HALO && OWNS && E_LANES)
            unchecked = __all_sync(0xffffffffu, whole && stays(es[e_of(threadIdx.x)], h, w, moves));
        else if constexpr (HALO && OWNS)
            unchecked = whole && rows_stay;
        if (HALO && OWNS && unchecked)
            load_units<false>(base, rows, es, h, w);
        else
            load_units<true>(base, rows, es, h, w);
    }

    __device__ __forceinline__ void commit(Acc (*tile)[PITCH]) const {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int unit = step * THREADS + threadIdx.x;
            if (idle(unit)) break;
            Acc* to = &tile[e_of(unit)][row_of(unit)];
            Pack4<Acc> pack;
#pragma unroll
            for (int i = 0; i < VEC; ++i) pack.lane[i] = to_acc(staged[step][i]);
            if constexpr (UNIT_ROWS == 4) {
                *reinterpret_cast<Pack4<Acc>*>(to) = pack;
            } else {
#pragma unroll
                for (int i = 0; i < VEC; ++i) to[i * PITCH] = pack.lane[i];
            }
        }
    }

  private:
    static __device__ __forceinline__ bool stays(Entry own, int h, int w, Span moves) {
        return inside(own, moves.h_min, moves.w_min, h, w) && inside(own, moves.h_max, moves.w_max, h, w);
    }

    template <bool CHECKED>
    __device__ __forceinline__ void load_units(const char* base, const Entry* rows, const Entry* es, int h, int w) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int unit = step * THREADS + threadIdx.x;
            if (idle(unit)) break;
            const Entry row = !E_LANES && OWNS ? own_rows[step % OWN] : rows[row_of(unit)];
            const Entry e = es[e_of(unit)];
            const char* from =
                E_LANES ? base + e.offset_bytes + row.offset_bytes : base + row.offset_bytes + e.offset_bytes;
            const bool wanted = !CHECKED || (HALO ? inside(row, e.h, e.w, h, w) : row.h + e.h == 0);
            load(staged[step], from, wanted);
        }
    }

    static __device__ __forceinline__ void load(Elem* to, const char* from, bool wanted) {
        if constexpr (VEC == 4) {
            Pack4<Elem> pack = {};
            if (wanted) pack = *reinterpret_cast<const Pack4<Elem>*>(from);
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = pack.lane[i];
        } else {
            Elem value = {};
            if (wanted) value = *reinterpret_cast<const Elem*>(from);
            to[0] = value;
        }
    }
};

}  // namespace hc
