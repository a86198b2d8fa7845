// sum_partials: out[place] = the sum over parts, in a fixed order, of partials[part][i], plus a bias and a residual,
// activated.
//
// Elements are numbered as they lie in a part. Axes map a number to a place of the output, of whatever strides: the
// last axis runs fastest. Parts follow each other, or the parts of a run of elements do, before those of the next run.
//
// part_lanes threads of a block add the parts of an element: thread j adds parts j, j + part_lanes, ..., and the first
// adds what the others have, in order. part_lanes is a run-time number, so that a new image size compiles nothing. With
// one thread parts are added one after the other. Neighbouring threads read neighbouring elements, with AT_ONCE loads
// in flight, or all of them where there are fewer parts.
//
// Budget: AT_ONCE registers for loads; a sum for each thread in shared memory.
#include "kernels/divisor.cuh"
#include "kernels/numeric.cuh"
#include "kernels/relu.cuh"

// Constants: ELEM is float, double, hc::fp16 or hc::bf16; the others are integers.
//   THREADS       threads of a block
//   AXES          axes of the elements, at most MOST_AXES
//   INT64_INDEX   1: elements are numbered by 64 bits, as there may be 2^31 of them or more
//   HAS_BIAS      adds bias[count]
//   HAS_RELU      max(0, sum) instead of the sum
//   HAS_RESIDUAL  adds residual[place]; defined only where it does
using hc::i64;
using elem_t = ELEM;
using acc_t = hc::AccOf<elem_t>::type;

constexpr int MOST_AXES = 7, AT_ONCE = 8;
static_assert(1 <= AXES && AXES <= MOST_AXES, "the launch has room for so many axes");

template <int IS_INT64>
struct IndexOf {
    using type = unsigned;
};
template <>
struct IndexOf<1> {
    using type = i64;
};
using index_t = IndexOf<INT64_INDEX>::type;

struct Axis {
    hc::Divisor extent;
    int count;   // what a step adds to an element's count
    i64 stride;  // of the output, in elements
};

struct Params {
    elem_t* out;
    const acc_t* partials;
    const elem_t* bias;
#ifdef HAS_RESIDUAL
    const elem_t* residual;  // as out
#endif
    i64 elems;        // of a part
    i64 part_stride;  // from part to part, in elements
    i64 run_gap;      // between an element and the next one, where a run ends, in elements
    hc::Divisor run;  // elements of a run
    int parts;
    int part_lanes;   // threads of an element
    int block_elems;  // of a block: THREADS / part_lanes
    int limit;        // elements whose count reaches it are padding, and not written
    Axis axes[7];     // MOST_AXES
};

struct Smem {
    acc_t sums[THREADS];
};

__device__ __forceinline__ unsigned quotient(unsigned i, const hc::Divisor& by) { return by.quotient(i); }
__device__ __forceinline__ i64 quotient(i64 i, const hc::Divisor& by) { return i / by.value; }

// Where an element belongs. The count of a filter's outputs is the filter's number.
struct Place {
    i64 offset;
    int count;
};

__device__ __forceinline__ Place place_of(const Params& p, index_t i) {
    Place place = {0, 0};
#pragma unroll
    for (int a = AXES - 1; a >= 0; --a) {
        const Axis& axis = p.axes[a];
        const index_t rest = a > 0 ? quotient(i, axis.extent) : 0;
        const int at = int(i - rest * index_t(axis.extent.value));
        place.offset += at * axis.stride, place.count += at * axis.count;
        i = rest;
    }
    return place;
}

// The sum of every part_lanes-th part from `part` on.
__device__ __forceinline__ acc_t sum_parts(const Params& p, index_t i, int part) {
    const acc_t* const from = p.partials + i64(i) + i64(quotient(i, p.run)) * p.run_gap;
    acc_t sum = 0;
    for (; part < p.parts; part += AT_ONCE * p.part_lanes) {
        acc_t terms[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int at = part + j * p.part_lanes;
            terms[j] = at < p.parts ? from[at * p.part_stride] : acc_t(0);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) sum += terms[j];
    }
    return sum;
}

__device__ __forceinline__ void write(const Params& p, index_t i, acc_t sum) {
    const Place place = place_of(p, i);
    if (place.count >= p.limit) return;
    if (HAS_BIAS) sum += hc::to_acc(p.bias[place.count]);
#ifdef HAS_RESIDUAL
    sum += hc::to_acc(p.residual[place.offset]);
#endif
    p.out[place.offset] = hc::from_acc<elem_t>(HAS_RELU ? hc::relu(sum) : sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_partials(const __grid_constant__ Params p) {
    __shared__ Smem smem;
    const int lane = threadIdx.x % p.block_elems, part = threadIdx.x / p.block_elems;
    const index_t i = index_t(blockIdx.x) * p.block_elems + lane;
    const bool inside = i64(i) < p.elems;
    acc_t sum = inside ? sum_parts(p, i, part) : acc_t(0);
    if (p.part_lanes > 1) {
        smem.sums[threadIdx.x] = sum;
        __syncthreads();
        if (part > 0) return;
        for (int other = lane + p.block_elems; other < THREADS; other += p.block_elems) sum += smem.sums[other];
    }
    if (inside) write(p, i, sum);
}
