// The producers of halo_sm90_wgrad: lines of x and of dy, by TMA or by loads.
#pragma once

#include "families/halo_sm90/piece.cuh"
#include "families/halo_sm90/wgrad_shift.cuh"
#include "kernels/ptx/register.cuh"

namespace hc::wgrad {

// Asks TMA for a row of x from column `column` on: the tile's channels.
__device__ __forceinline__ void ask_for_x(const Params& p, const Tile& tile, char* to, ptx::u64* full, int image,
                                          int row, int column) {
    const int channel = tile.group * p.channels + tile.channel;
    ptx::mbarrier_arrive_expect_tx(full, X_BYTES);
    if constexpr (X_INNER) {
        for (int span = 0; span < BLOCK_CHANNELS / X_SPAN; ++span)
            ptx::cp_async_bulk_tensor_4d_shared_global(to + span * X_PITCH * X_ROW_BYTES, &p.x_map, full,
                                                       channel + span * X_SPAN, column, row, image);
    } else {
        ptx::cp_async_bulk_tensor_4d_shared_global(to, &p.x_map, full, column, row, channel, image);
    }
}

// The same for `pixels` columns of a row of dy: the tile's filters.
__device__ __forceinline__ void ask_for_dy(const Params& p, const Tile& tile, char* to, ptx::u64* full,
                                           const Place& place, int row) {
    const int filter = tile.group * p.filters + tile.filter, pixels = place.pixels(p);
    const int boxes = Y_INNER ? Y_BOXES : (pixels + Y_SPAN - 1) / Y_SPAN;  // what is behind the last pixel is not read
    ptx::mbarrier_arrive_expect_tx(full, boxes * Y_SPAN_BYTES);
    for (int box = 0; box < boxes; ++box)
        if (Y_INNER)
            ptx::cp_async_bulk_tensor_4d_shared_global(to + box * Y_SPAN_BYTES, &p.y_map, full, filter + box * Y_SPAN,
                                                       place.column, row, place.image);
        else
            ptx::cp_async_bulk_tensor_4d_shared_global(to + box * Y_SPAN_BYTES, &p.y_map, full,
                                                       place.column + box * Y_SPAN, row, filter, place.image);
}

// A line as loads bring it: rows of channels or filters, `limit` of which there are, from column `column` on.
struct Source {
    const elem_t* from;  // the first channel's row at column 0
    i64 channel, pixel;  // strides in elements
    int limit, column, columns;
};

// Loads N neighbours, `inside` or zeros.
template <int N>
__device__ __forceinline__ void load_neighbours(elem_t (&to)[N], const elem_t* from, bool inside) {
    struct alignas(N * SIZE) Vector {
        elem_t lane[N];
    };
    const Vector loaded = inside ? *reinterpret_cast<const Vector*>(from) : Vector{};
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = loaded.lane[i];
}

// Loads of V neighbouring pixels (WIDTH = V) or of V channels (-V): together a piece of each of ROWS_AT_ONCE channels.
template <int WIDTH>
struct Batch {
    static constexpr int ROWS_AT_ONCE = WIDTH < 0 ? -WIDTH : 1, EACH = WIDTH < 0 ? 1 : WIDTH;
    static constexpr int REGISTERS = EACH * ROWS_AT_ONCE * SIZE < 4 ? PIECE : 4 * ROWS_AT_ONCE;  // of an item
    // Items on their way at a time: as many as registers allow.
    static constexpr int ITEMS = REGISTERS < 16 ? (SIZE == 4 && WIDTH > 0 ? 24 : 16) / REGISTERS : SIZE == 4 ? 2 : 1;

    elem_t loaded[ITEMS][ROWS_AT_ONCE][PIECE];

    // PIECE pixels from column `column` on, of ROWS_AT_ONCE channels.
    __device__ __forceinline__ void load(int item, const Source& source, int channel, int column) {
        const bool there = channel < source.limit;
        const elem_t* from = source.from + channel * source.channel + column * (WIDTH < 0 ? source.pixel : 1);
#pragma unroll
        for (int i = 0; i < PIECE; i += EACH, from += WIDTH < 0 ? source.pixel : EACH) {
            elem_t part[EACH * ROWS_AT_ONCE];
            load_neighbours(part, from, there && (unsigned)(column + i) < (unsigned)source.columns);
#pragma unroll
            for (int j = 0; j < EACH * ROWS_AT_ONCE; ++j)
                loaded[item][WIDTH < 0 ? j : 0][WIDTH < 0 ? i : i + j] = part[j];
        }
    }
};

// The warpgroup brings the first `pieces` pieces of CHANNEL_ROWS channels, PIECES to a channel. Neighbouring lanes have
// neighbours in memory, as far as what they store goes to different banks. All loads of a batch are on their way before
// the first is stored.
template <int WIDTH, int CHANNEL_ROWS, int PIECES, class Store>
__device__ __forceinline__ void load_line(const Source& source, int pieces, const Store& store) {
    constexpr int AT_ONCE = Batch<WIDTH>::ROWS_AT_ONCE, GROUPS = CHANNEL_ROWS / AT_ONCE, ITEMS = GROUPS * PIECES;
    constexpr int BESIDE = WIDTH < 0 && GROUPS % 2 == 0 ? 2 : 1;  // groups of channels of neighbouring lanes
    const auto piece_of = [](int item) { return item / BESIDE % PIECES; };
    const auto channel_of = [](int item) { return (item / (BESIDE * PIECES) * BESIDE + item % BESIDE) * AT_ONCE; };
    int own = threadIdx.x % 128;
    ptx::renew(own);  // else places of items would be kept in registers from line to line
#pragma unroll 1
    for (int first = own; first < ITEMS; first += 128 * Batch<WIDTH>::ITEMS) {
        Batch<WIDTH> batch;
#pragma unroll
        for (int i = 0; i < Batch<WIDTH>::ITEMS; ++i) {
            const int item = first + 128 * i, piece = piece_of(item);
            const bool there = item < ITEMS && piece < pieces;
            batch.load(i, source, there ? channel_of(item) : source.limit, source.column + piece * PIECE);
        }
#pragma unroll
        for (int i = 0; i < Batch<WIDTH>::ITEMS; ++i) {
            const int item = first + 128 * i, piece = piece_of(item);
            if (item >= ITEMS || piece >= pieces) continue;
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) store(channel_of(item) + j, piece, to_piece(batch.loaded[i][j]));
        }
    }
}

template <int WIDTH>
__device__ __forceinline__ void load_x(const Params& p, const Tile& tile, char* to, int image, int row, int column) {
    const int channel = tile.group * p.channels + tile.channel;
    const Source source{
        p.x + image * p.x_n + channel * p.x_c + row * p.x_h, p.x_c, p.x_w, p.channels - tile.channel, column, p.w};
    load_line<WIDTH, BLOCK_CHANNELS, X_PITCH / PIECE>(
        source, X_PITCH / PIECE, [&](int channel, int piece, const Piece& loaded) {
            *reinterpret_cast<Piece*>(ToX(to, channel).at(piece)) = loaded;
        });
}

// Pieces of a line of dy that are multiplied: what is behind them is not read.
__device__ __forceinline__ int read_pieces(const Params& p, const Place& place) {
    return 2 * ((place.pixels(p) + DEPTH - 1) / DEPTH);
}

template <int WIDTH>
__device__ __forceinline__ void load_dy(const Params& p, const Tile& tile, char* to, const Place& place, int row) {
    const int filter = tile.group * p.filters + tile.filter;
    const Source source{p.dy + place.image * p.y_n + filter * p.y_k + row * p.y_p,
                        p.y_k,
                        p.y_q,
                        p.filters - tile.filter,
                        place.column,
                        p.cols};
    load_line<WIDTH, BLOCK_FILTERS, STRIP / PIECE>(source, read_pieces(p, place),
                                                   [&](int filter, int piece, const Piece& loaded) {
                                                       *reinterpret_cast<Piece*>(ToDy(to, filter).at(piece)) = loaded;
                                                   });
}

// Where raw lines begin.
__device__ __forceinline__ Begin begin_of_x(const Params& p, int row, int column) {
    return {row * p.w + column, int(p.x_c), -column, p.w - column};
}

__device__ __forceinline__ Begin begin_of_dy(const Params& p, const Place& place, int row) {
    return {row * p.cols + place.column, int(p.y_k), 0, place.pixels(p)};
}

// Shifts the next raw line, when it is there, and gives it back.
template <class Raw, class To>
__device__ __forceinline__ void shift_next(RawLines& lines, const char* raw, ptx::u64* full, ptx::u64* empty,
                                           const Begin& begin, int pieces, char* line) {
    const int at = lines.shifted.index;
    wait(&full[at], lines.shifted.parity);
    shift_line<Raw, To>(raw + at * Raw::BYTES, begin, pieces, line);
    ptx::fence_proxy_async_shared();  // before TMA writes here again, and for wgmma
    ptx::mbarrier_arrive(&empty[at]);
    lines.shifted.advance(RAW_STAGES);
}

// Brings a line, as TMA, loads or shifts do; of a line that does not exist nothing but the news that it is there. A
// line of x comes after the youngest line of dy that it meets: where that has room, so has it.
__device__ __forceinline__ void bring_dy(const Params& p, const Tile& tile, const Smem& smem, const Cursor& at,
                                         const Place& place, int row, RawLines& raw) {
    char* const to = smem.y + at.index * Y_BYTES;
    ptx::u64* const full = &smem.y_full[at.index];
    const bool there = (unsigned)row < (unsigned)p.rows;
    wait(&smem.y_empty[at.index], at.parity ^ 1);
    if constexpr (Y_LOADS != 0) {
        if (there) load_dy<Y_LOADS>(p, tile, to, place, row);
        ptx::fence_proxy_async_shared();
        ptx::mbarrier_arrive(full);
    } else if constexpr (Y_PLANES != 0) {
        if (there)
            shift_next<RawY, ToDy>(raw, smem.y_raw, smem.y_raw_full, smem.y_raw_empty, begin_of_dy(p, place, row),
                                   read_pieces(p, place), to);
        ptx::mbarrier_arrive(full);
    } else if (threadIdx.x % 128 == 0) {
        if (there)
            ask_for_dy(p, tile, to, full, place, row);
        else
            ptx::mbarrier_arrive(full);
    }
}

__device__ __forceinline__ void bring_x(const Params& p, const Tile& tile, const Smem& smem, int at, const Place& place,
                                        int row, RawLines& raw) {
    char* const to = smem.x + at * X_BYTES;
    ptx::u64* const full = &smem.x_full[at];
    const int column = column_of_x(p, tile, place);
    if constexpr (X_LOADS != 0) {
        if (row < p.h) load_x<X_LOADS>(p, tile, to, place.image, row, column);
        ptx::mbarrier_arrive(full);
    } else if constexpr (X_PLANES != 0) {
        if (row < p.h)
            shift_next<RawX, ToX>(raw, smem.x_raw, smem.x_raw_full, smem.x_raw_empty, begin_of_x(p, row, column),
                                  X_PITCH / PIECE, to);
        ptx::mbarrier_arrive(full);
    } else if (threadIdx.x % 128 == 0) {
        if (row < p.h)
            ask_for_x(p, tile, to, full, place.image, row, column);
        else
            ptx::mbarrier_arrive(full);
    }
}

// Asks for the raw lines of dy and of x that are shifted next; line 0 of x comes with line ROWS - 1 of dy.
__device__ __forceinline__ void ask_ahead(const Params& p, const Tile& tile, const Smem& smem, const Place& place,
                                          int line, int bands, RawLines& y_raw, RawLines& x_raw) {
    const auto dy_row = [&](int line) { return place.dy_row + line * p.line_step; };
    const auto x_row = [&](int line) { return place.row + line * place.row_step; };
    if constexpr (Y_PLANES != 0)
        y_raw.ask_ahead(
            line, bands + ROWS - 1, smem.y_raw_empty, [&](int one) { return (unsigned)dy_row(one) < (unsigned)p.rows; },
            [&](int one, int at) {
                ask_for_raw<RawY>(p.y_map, begin_of_dy(p, place, dy_row(one)), smem.y_raw + at * RawY::BYTES,
                                  &smem.y_raw_full[at], tile.group * p.filters + tile.filter, place.image);
            });
    if constexpr (X_PLANES != 0)
        x_raw.ask_ahead(
            line - (ROWS - 1), bands, smem.x_raw_empty, [&](int one) { return x_row(one) < p.h; },
            [&](int one, int at) {
                const Begin begin = begin_of_x(p, x_row(one), column_of_x(p, tile, place));
                ask_for_raw<RawX>(p.x_map, begin, smem.x_raw + at * RawX::BYTES, &smem.x_raw_full[at],
                                  tile.group * p.channels + tile.channel, place.image);
            });
}

// All lines, in the order in which the consumers read them: by one thread, or if there is anything to store by all.
__device__ __forceinline__ void produce(const Params& p, const Smem& smem) {
    if (!LOADS && threadIdx.x % 128 != 0) return;
    Walk walk(p.cut);
    const Tile tile(p.blocks, walk.slab);
    Cursor y_at;
    int x_at = 0;
    RawLines y_raw, x_raw;
    for (Run run; walk.next(p.cut, run);) {
        const Place place(p, tile, run);
        y_raw.next = x_raw.next = 0;
        for (int line = 0; line < run.bands + ROWS - 1; ++line, y_at.advance(Y_STAGES)) {
            ask_ahead(p, tile, smem, place, line, run.bands, y_raw, x_raw);
            bring_dy(p, tile, smem, y_at, place, place.dy_row + line * p.line_step, y_raw);
            if (line < ROWS - 1) continue;
            bring_x(p, tile, smem, x_at, place, place.row + (line - (ROWS - 1)) * place.row_step, x_raw);
            x_at = x_at + 1 == X_STAGES ? 0 : x_at + 1;
        }
    }
}

}  // namespace hc::wgrad
