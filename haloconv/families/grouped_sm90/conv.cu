// grouped_sm90_conv: fprop and dgrad of grouped layers in channels_last on tensor cores, stride 1, from Hopper on.
//
//   y[pixel, filter] = sum over (tap, channel of the group) of x[pixel at tap, channel] * w[filter, channel, tap]
//
// TMA brings rows of 128 bytes of channels, whole groups, and stores rows of outputs likewise: no thread
// copies. A warp has 16 * M_TILES columns of one group and marches down: ldmatrix gives the fragments of a row, one for
// each horizontal tap, and a fragment is multiplied by all R vertical taps at once, into the sums of the R rows of
// outputs that it belongs to. So shared memory is read S times an element, and not R * S times. The filter of a group
// stays in registers. dgrad is fprop with the filter flipped.
//
// Budget: R * S * ATOMS * N_TILES registers for the filter, 4 * R * M_TILES * N_TILES for sums, 2 * ROWS * S * ATOMS *
// M_TILES for fragments; a ring of stages of ROWS rows of x, and two of outputs, in shared memory.
#include "families/grouped_sm90/slab.cuh"
#include "families/halo_sm90/piece.cuh"

// Constants: ELEM is float, hc::fp16 or hc::bf16; all others integers.
//   R S                  filter taps
//   ATOMS                16 bytes of channels in a group
//   ROWS                 rows of a stage
//   M_TILES N_TILES      fragments of a warp: 16 columns, 8 filters each
//   WARPS_M              warps beside each other in a strip
//   MIN_BLOCKS           blocks per multiprocessor that registers must allow
//   HAS_BIAS             adds bias[k]
namespace hc::grouped {

constexpr bool SINGLE = sizeof(elem_t) == 4;
constexpr int GROUP_TILES = ATOMS * ATOM_ELEMS / 8;  // eights of filters in a group
constexpr int WARPS_N = GROUP_TILES / N_TILES;
constexpr int CONSUMERS = SLAB_GROUPS * WARPS_N * WARPS_M;  // warps
constexpr int THREADS = 32 * (CONSUMERS + 2);
constexpr int STRIP_COLS = 16 * M_TILES * WARPS_M;
constexpr int ROW_ATOMS = S * ATOMS;           // that a fragment of a row meets
constexpr int PAIRS = ceil_div(ROW_ATOMS, 2);  // of them, each one product
constexpr int Y_BUFFERS = 2;
constexpr int Y_ROW_BYTES = STRIP_COLS * SLAB_BYTES, Y_BYTES = ROWS * Y_ROW_BYTES;

static_assert(GROUP_TILES % N_TILES == 0 && GROUP_TILES > 0, "warps share the filters of a group evenly");
static_assert(!SINGLE || ATOMS % 2 == 0, "products of TF32 take two atoms of a tap");

struct Params {
    TensorMap x_map, y_map;
    const elem_t *x, *w, *bias;
    elem_t* y;
    i64 w_first, w_group, w_filter, w_channel, w_r, w_s;  // the first tap's place; strides; in elements
    Cut cut;
};

struct Smem {
    char *x, *y;
    ptx::u64 *full, *empty, *y_full, *y_empty;
    int x_row_bytes, x_bytes;

    __device__ __forceinline__ Smem(const Cut& cut, char* smem)
        : x_row_bytes(cut.x_cols * SLAB_BYTES), x_bytes(ROWS * x_row_bytes) {
        x = smem, y = x + cut.stages * x_bytes;
        full = reinterpret_cast<ptx::u64*>(y + Y_BUFFERS * Y_BYTES), empty = full + cut.stages;
        y_full = empty + cut.stages, y_empty = y_full + Y_BUFFERS;
    }
};

__device__ __forceinline__ void begin(const Params& p, const Smem& smem) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.cut.stages; ++i) {
            ptx::mbarrier_init(&smem.full[i], 1);
            ptx::mbarrier_init(&smem.empty[i], CONSUMERS);
        }
        for (int i = 0; i < Y_BUFFERS; ++i) {
            ptx::mbarrier_init(&smem.y_full[i], CONSUMERS);
            ptx::mbarrier_init(&smem.y_empty[i], 1);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
}

// ---- one thread that asks for rows of x, one that sends rows of y ----

__device__ __forceinline__ void produce(const Params& p, const Smem& smem) {
    const Cut& cut = p.cut;
    Walk walk(cut);
    Cursor at;
    Run run;
    while (walk.next(cut, run))
        for (int band = 0; band < run.bands + WARMUP; ++band, at.advance(cut.stages)) {
            wait(&smem.empty[at.index], at.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(&smem.full[at.index], smem.x_bytes);
            ptx::cp_async_bulk_tensor_4d_shared_global(smem.x + at.index * smem.x_bytes, &p.x_map, &smem.full[at.index],
                                                       walk.slab * SLAB_ELEMS, run.strip * STRIP_COLS - cut.left,
                                                       (run.first + band) * ROWS - cut.top, run.image);
        }
}

__device__ __forceinline__ void send(const Params& p, const Smem& smem) {
    Walk walk(p.cut);
    Cursor at;
    Run run;
    while (walk.next(p.cut, run))
        for (int band = 0; band < run.bands; ++band, at.advance(Y_BUFFERS)) {
            wait(&smem.y_full[at.index], at.parity);
            ptx::cp_async_bulk_tensor_4d_global_shared(&p.y_map, smem.y + at.index * Y_BYTES, walk.slab * SLAB_ELEMS,
                                                       run.strip * STRIP_COLS, (run.first + band) * ROWS, run.image);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read<0>();
            ptx::mbarrier_arrive(&smem.y_empty[at.index]);
        }
    ptx::cp_async_bulk_wait_group<0>();
}

// ---- warps that multiply ----

// A warp's place in a slab: its group, its first eight of the group's filters, its first column.
struct Place {
    int group, eight, col;

    __device__ __forceinline__ Place() {
        const int warp = threadIdx.x / 32, rest = warp / WARPS_M;
        col = warp % WARPS_M * (16 * M_TILES);
        eight = rest % WARPS_N * N_TILES, group = rest / WARPS_N;
    }
};

// Filter of an eight that stands in column `col` of a product. fp32: so that a lane's two sums of a row lie in two
// atoms, as stmatrix wants them.
__device__ __forceinline__ int filter_of(int col) { return SINGLE ? col % 2 * 4 + col / 2 : col; }

__device__ __forceinline__ unsigned word_of(const float* from, i64) { return to_tf32(from[0]); }
template <class Half>
__device__ __forceinline__ unsigned word_of(const Half* from, i64 next) {
    return from[0].bits | unsigned(from[next].bits) << 16;
}

struct Filter {
    unsigned b[R][ROW_ATOMS][N_TILES];
    float bias[N_TILES][2];

    __device__ __forceinline__ Filter(const Params& p, int slab, const Place& place) {
        const int lane = threadIdx.x % 32, group = slab * SLAB_GROUPS + place.group;
        const bool there = group < p.cut.groups;
        const elem_t* const from = p.w + p.w_first + group * p.w_group +
                                   (place.eight * 8 + filter_of(lane / 4)) * p.w_filter +
                                   lane % 4 * (ATOM_ELEMS / 4) * p.w_channel;
#pragma unroll
        for (int i = 0; i < R * ROW_ATOMS * N_TILES; ++i) {
            const int n = i % N_TILES, atom = i / N_TILES % ROW_ATOMS, r = i / N_TILES / ROW_ATOMS;
            const i64 offset =
                n * 8 * p.w_filter + atom % ATOMS * ATOM_ELEMS * p.w_channel + r * p.w_r + atom / ATOMS * p.w_s;
            b[r][atom][n] = there ? word_of(from + offset, p.w_channel) : 0;
        }
#pragma unroll
        for (int i = 0; i < 2 * N_TILES; ++i) {
            const int filter = (place.eight + i / 2) * 8 + filter_of(lane % 4 * 2 + i % 2);
            bias[i / 2][i % 2] = HAS_BIAS && there ? to_acc(p.bias[group * (GROUP_TILES * 8) + filter]) : 0.f;
        }
    }
};

// Bytes from the start of a row to what a lane asks of ldmatrix: matrices are atoms of eight columns.
struct Lanes {
    int x[M_TILES][PAIRS];
    int y[M_TILES];

    __device__ __forceinline__ Lanes(const Place& place, int x_cols) {
        const int lane = threadIdx.x % 32, matrix = lane / 8;
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                int atom = 2 * pair + matrix / 2;
                atom = atom < ROW_ATOMS ? atom : ROW_ATOMS - 1;
                const int col = place.col + i * 16 + matrix % 2 * 8 + lane % 8 + atom / ATOMS;
                x[i][pair] = place_in_row(col < x_cols ? col : x_cols - 1, place.group * ATOMS + atom % ATOMS);
            }
            const int col = place.col + i * 16 + (SINGLE ? matrix / 2 : matrix % 2) * 8 + lane % 8;
            const int atom = place.group * ATOMS + place.eight * (SINGLE ? 2 : 1) + (SINGLE ? matrix % 2 : 0);
            y[i] = place_in_row(col, atom);
        }
    }
};

// The fragments of one row: the first and the second eight columns of two atoms, and of an atom that is left over.
struct Fragments {
    unsigned whole[M_TILES][ROW_ATOMS / 2 + 1][4];
    unsigned half[M_TILES][2];
};

using Sums = float[R][M_TILES][N_TILES][4];

__device__ __forceinline__ void load_row(Fragments& a, const char* row, const Lanes& lanes) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int pair = 0; pair < ROW_ATOMS / 2; ++pair) ptx::ldmatrix_x4(a.whole[i][pair], row + lanes.x[i][pair]);
    if constexpr (ROW_ATOMS % 2)
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) ptx::ldmatrix_x2(a.half[i], row + lanes.x[i][PAIRS - 1]);
}

// The sums of row r of the filter become those of the row after it, as the window moves down by a row.
template <class Elem>
__device__ __forceinline__ void multiply_row(Sums& sums, const Fragments& a, const Filter& filter) {
#pragma unroll
    for (int r = R - 1; r >= 0; --r)
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int j = 0; j < N_TILES; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[r][i][j][e] = r ? sums[r ? r - 1 : 0][i][j][e] : filter.bias[j][e % 2];
#pragma unroll
                for (int pair = 0; pair < ROW_ATOMS / 2; ++pair)
                    mma(sums[r][i][j], a.whole[i][pair], {filter.b[r][2 * pair][j], filter.b[r][2 * pair + 1][j]},
                        Elem{});
                if constexpr (ROW_ATOMS % 2) mma_half(sums[r][i][j], a.half[i], filter.b[r][ROW_ATOMS - 1][j], Elem{});
            }
}

__device__ __forceinline__ void write_row(const Sums& sums, char* row, const Lanes& lanes) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int j = 0; j < N_TILES; ++j) {
            const float (&sum)[4] = sums[R - 1][i][j];
            const int swizzled = lanes.y[i] ^ (j * (SINGLE ? 2 : 1) * ATOM_BYTES);
            if constexpr (SINGLE)
                ptx::stmatrix_x4(row + swizzled, {__float_as_uint(sum[0]), __float_as_uint(sum[1]),
                                                  __float_as_uint(sum[2]), __float_as_uint(sum[3])});
            else
                ptx::stmatrix_x2(row + swizzled,
                                 {from_acc_pair<elem_t>(sum[0], sum[1]), from_acc_pair<elem_t>(sum[2], sum[3])});
        }
}

__device__ __forceinline__ void consume(const Params& p, const Smem& smem) {
    const Place place;
    const Lanes lanes(place, p.cut.x_cols);
    Walk walk(p.cut);
    const Filter filter(p, walk.slab, place);
    Sums sums = {};
    Cursor at, out;
    Run run;
    while (walk.next(p.cut, run)) {
        for (int band = 0; band < run.bands + WARMUP; ++band, at.advance(p.cut.stages)) {
            wait(&smem.full[at.index], at.parity);
            const char* const x = smem.x + at.index * smem.x_bytes;
            Fragments a[ROWS];
#pragma unroll
            for (int row = 0; row < ROWS; ++row) load_row(a[row], x + row * smem.x_row_bytes, lanes);
            const bool writes = band >= WARMUP;
            if (writes) wait(&smem.y_empty[out.index], out.parity ^ 1);
            char* const y = smem.y + out.index * Y_BYTES;
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                multiply_row<elem_t>(sums, a[row], filter);
                if (writes) write_row(sums, y + row * Y_ROW_BYTES, lanes);
            }
            ptx::fence_proxy_async_shared();  // before TMA writes x, and before it reads y
            arrive_warp(&smem.empty[at.index]);
            if (!writes) continue;
            arrive_warp(&smem.y_full[out.index]);
            out.advance(Y_BUFFERS);
        }
    }
}

}  // namespace hc::grouped

extern "C" __global__ void __launch_bounds__(hc::grouped::THREADS, MIN_BLOCKS)
    grouped_sm90_conv(const __grid_constant__ hc::grouped::Params p) {
    using namespace hc::grouped;
    extern __shared__ __align__(1024) char dynamic_smem[];
    const Smem smem(p.cut, dynamic_smem);
    begin(p, smem);
    const int warp = threadIdx.x / 32;
    if (warp < CONSUMERS) consume(p, smem);
    if (warp == CONSUMERS && hc::ptx::elect_sync()) produce(p, smem);
    if (warp == CONSUMERS + 1 && hc::ptx::elect_sync()) send(p, smem);
}
