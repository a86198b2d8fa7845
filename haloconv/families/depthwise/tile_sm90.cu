// depthwise_tile_sm90: fprop and dgrad of depthwise layers in fp32 whose rows are aligned, from planes that land whole.
//
//   y[p, q] = sum over (r, s) of w[r, s] * x[p + r - pad_top, q + s - pad_left]
//
// The trick: the rows of a strip are one bulk copy, which one thread asks for. A thread has ROWS by 4 outputs at a time
// in registers: a row of its window is three or so reads of 16 bytes for up to ROWS * S * 4 multiplies. What lies
// beside or above a plane did not land: there a thread takes zeros. dgrad flips the filter. A block does
// neighbouring strips, of one channel after the other.
//
// Budget: R * S registers for the filter, ROWS * 4 for sums, a row of the window; BUFFERS strips in shared memory.
#include "families/depthwise/landing.cuh"
#include "families/depthwise/register_tile.cuh"

// Constants, all integers.
//   DGRAD                0: in is x, out is y; 1: in is dy, out is dx, and taps count from the filter's end
//   R S                  filter taps
//   MULTIPLIER           M: filters of a channel
//   ROWS                 rows of a thread's outputs
//   LEAD                 columns of the first 16 bytes of a window that the filter does not meet
//   BUFFERS              strips under way, the one that is multiplied included
//   THREADS MIN_BLOCKS   of a block; blocks per multiprocessor that registers must allow
//   HAS_BIAS             adds bias[k]
//   AFFINE ACTIVATION    of an epilogue of fprop, or AFFINE_AND_RESIDUAL for AFFINE (finish.cuh)
using hc::i64;
using hc::ptx::u64;
using namespace hc::landing;
using namespace hc::tile;

static_assert(THREADS % 32 == 0, "a block is a whole number of warps");
static_assert(BUFFERS >= 2, "strips land while one is multiplied");

struct Params {
    const float *in, *w, *bias;
    float* out;
#ifdef AFFINE_AND_RESIDUAL
    const float* residual;  // as out
#endif
    i64 w_k, w_r, w_s;  // strides in elements
    Planes planes;
    Cut cut;
    int channels, out_rows, out_cols;
    int before;         // columns of 16 bytes that a window begins before its outputs
    int landing_bytes;  // of a strip
};

struct Smem {
    u64 full[BUFFERS];
    Ahead ahead;
};

// A thread's columns: where the vectors of its windows begin in the first landed row, and which are in the image.
struct Own {
    int row, hop, col;  // first row of its outputs, rows between those of its steps; its column of vectors
    bool here[VECTORS];

    __device__ __forceinline__ explicit Own(const Params& p) {
        const int cols = p.out_cols / COLS, groups = THREADS / cols, thread = threadIdx.x;
        hop = groups * ROWS;
        row = thread < groups * cols ? thread / cols * ROWS : 1 << 30;
        col = thread % cols - p.before;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) here[v] = (unsigned)(col + v) < (unsigned)p.planes.width;
    }
};

// `window` is the window's first vector, whose row is row `first` of the image.
__device__ __forceinline__ void multiply(Sums& sums, const Params& p, const Filter& filter, const Own& own,
                                         const char* window, int first, const Vector& zeros) {
#pragma unroll
    for (int at = 0; at < ROWS + R - 1; ++at) {
        const bool inside = (unsigned)(first + at) < (unsigned)p.planes.extent;
        Row x;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            x[v] = inside && own.here[v] ? reinterpret_cast<const Vector*>(window)[v] : zeros;
        window += p.planes.width * PIECE_BYTES;
        sums.add(filter, x, at);
    }
}

__device__ __forceinline__ void convolve(const Params& p, const Filter& filter, const Own& own, const Unit& unit,
                                         const char* landed) {
    const int first_row = unit.strip * p.cut.rows, left = p.out_rows - first_row;
    const int rows = left < p.cut.rows ? left : p.cut.rows, first = first_row - p.planes.pad_top;
    const int row_bytes = p.planes.width * PIECE_BYTES;
    float* out = p.out +
                 (((i64)unit.image * p.channels + unit.channel) * p.out_rows + first_row + own.row) * p.out_cols +
                 (own.col + p.before) * COLS;
    const char* window = landed + (own.row + (first < 0 ? first : 0)) * row_bytes + own.col * PIECE_BYTES;
#pragma unroll 1
    for (int row = own.row; row < rows; row += own.hop) {
        Sums sums(filter);
        multiply(sums, p, filter, own, window, first + row, Vector{});
        if constexpr (EPILOGUE) sums.finish(p, unit.channel, out, p.out_cols, rows - row);
        sums.store(out, p.out_cols, rows - row);
        window += own.hop * row_bytes;
        out += (i64)own.hop * p.out_cols;
    }
}

__device__ __forceinline__ void locate(const Params& p, Smem& smem, const Unit& unit) {
    smem.ahead.source.locate(p.planes, p.in, unit.channel / MULTIPLIER, unit.image, unit.strip * p.cut.rows);
}

// One thread asks for the next strip that has not been asked for.
__device__ __forceinline__ void ask(const Params& p, Smem& smem, char* landing, int buffer) {
    Ahead& ahead = smem.ahead;
    if (ahead.left == 0) return;
    u64* const full = &smem.full[buffer];
    hc::ptx::mbarrier_arrive_expect_tx(full, ahead.source.bytes);
    ahead.source.copy(landing + buffer * p.landing_bytes, full);
    ahead.advance(p.cut, p.planes, 0.f, [&](const Unit& unit) { locate(p, smem, unit); });
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_tile_sm90(const Params p) {
    extern __shared__ __align__(128) char dynamic_smem[];
    __shared__ Smem smem;
    const bool asks = threadIdx.x == 0;
    const int begin = first_unit(p.cut, blockIdx.x), end = first_unit(p.cut, blockIdx.x + 1);
    Unit unit = unit_at(p.cut, begin);
    if (asks) {
        for (int i = 0; i < BUFFERS; ++i) hc::ptx::mbarrier_init(&smem.full[i], 1);
        hc::ptx::fence_mbarrier_init();
        smem.ahead.next = unit;
        smem.ahead.left = end - begin;
        locate(p, smem, unit);
        for (int i = 0; i < BUFFERS; ++i) ask(p, smem, dynamic_smem, i);
    }
    const Own own(p);
    Filter filter;
    filter.load(p, unit.channel);
    __syncthreads();
    hc::Cursor in;
    for (int index = begin; index < end; ++index, in.advance(BUFFERS)) {
        hc::wait(&smem.full[in.index], in.parity);
        convolve(p, filter, own, unit, dynamic_smem + in.index * p.landing_bytes);
        __syncthreads();
        if (asks) ask(p, smem, dynamic_smem, in.index);
        const int channel = unit.channel;
        unit.advance(p.cut);
        if (unit.channel != channel && index + 1 < end) filter.load(p, unit.channel);
    }
}
