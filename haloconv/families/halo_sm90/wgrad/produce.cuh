// The producers of halo_sm90_wgrad: lines of x and of dy, by TMA or by loads, shifted or transposed.
#pragma once

#include "families/halo_sm90/wgrad/edges.cuh"
#include "families/halo_sm90/wgrad/shift.cuh"
#include "families/halo_sm90/wgrad/transpose.cuh"
#include "kernels/ptx/register.cuh"

namespace hc::wgrad {

// Asks TMA for a box of x from a row and column on: the tile's channels. Rows outside the image are zeros.
__device__ __forceinline__ void ask_for_x(const Params& p, const Tile& tile, char* to, ptx::u64* full, int image,
                                          int row, int column) {
    const int channel = tile.group * p.channels + tile.channel;
    ptx::mbarrier_arrive_expect_tx(full, X_BOX_ROWS * X_BYTES);
    if constexpr (X_INNER) {
        for (int span = 0; span < X_SPANS; ++span)
            ptx::cp_async_bulk_tensor_4d_shared_global(to + span * X_RING, &p.x_map, full, channel + span * X_SPAN,
                                                       column, row, image);
    } else {
        ptx::cp_async_bulk_tensor_4d_shared_global(to, &p.x_map, full, column, channel, row, image);
    }
}

// Asks TMA for a box of dy from a row on, of the columns of a strip: the tile's filters.
__device__ __forceinline__ void ask_for_dy(const Params& p, const Tile& tile, char* to, ptx::u64* full,
                                           const Place& place, int row) {
    const int filter = tile.group * p.filters + tile.filter, pixels = place.pixels(p);
    const int spans = Y_INNER ? Y_SPANS : ceil_div(pixels, Y_SPAN);  // what is behind the last pixel is not read
    ptx::mbarrier_arrive_expect_tx(full, spans * BOX_ROWS * Y_LINE);
    for (int span = 0; span < spans; ++span)
        if (Y_INNER)
            ptx::cp_async_bulk_tensor_4d_shared_global(to + span * Y_RING, &p.y_map, full, filter + span * Y_SPAN,
                                                       place.column, row, place.image);
        else
            ptx::cp_async_bulk_tensor_4d_shared_global(to + span * Y_RING, &p.y_map, full, place.column + span * Y_SPAN,
                                                       filter, row, place.image);
}

// A box as loads bring it: lines of channels or filters, `limit` of which there are, from row and column on.
struct Source {
    const elem_t* from;        // the first channel of the image
    i64 channel, line, pixel;  // strides in elements
    int limit, row, rows, column, columns;
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
    // Items in flight at a time: as many as registers allow.
    static constexpr int ITEMS = REGISTERS < 16 ? (SIZE == 4 && WIDTH > 0 ? 24 : 16) / REGISTERS : SIZE == 4 ? 2 : 1;

    elem_t loaded[ITEMS][ROWS_AT_ONCE][PIECE];

    // PIECE pixels of a row from column `column` on, of ROWS_AT_ONCE channels.
    __device__ __forceinline__ void load(int item, const Source& source, int channel, int row, int column) {
        const bool inside =
            BOX_ROWS == 1 || (unsigned)row < (unsigned)source.rows;  // a single line is asked about before
        const bool there = channel < source.limit && inside;
        const elem_t* from =
            source.from + channel * source.channel + row * source.line + column * (WIDTH < 0 ? source.pixel : 1);
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

// The warpgroup brings the first `pieces` pieces of the lines of CHANNEL_ROWS channels, PIECES to a line. Neighbouring
// lanes have neighbours in memory, as far as what they store goes to different banks. All loads of a batch are in
// flight before the first is stored.
template <int WIDTH, int CHANNEL_ROWS, int PIECES, class Store>
__device__ __forceinline__ void load_box(const Source& source, int pieces, const Store& store) {
    constexpr int AT_ONCE = Batch<WIDTH>::ROWS_AT_ONCE, GROUPS = CHANNEL_ROWS / AT_ONCE, LINE_ITEMS = GROUPS * PIECES;
    constexpr int ITEMS = BOX_ROWS * LINE_ITEMS;
    constexpr int BESIDE = WIDTH < 0 && GROUPS % 2 == 0 ? 2 : 1;  // groups of channels of neighbouring lanes
    const auto line_of = [](int item) { return BOX_ROWS == 1 ? 0 : item / LINE_ITEMS; };
    const auto piece_of = [](int item) { return item / BESIDE % PIECES; };
    const auto channel_of = [&](int item) {
        return ((item - line_of(item) * LINE_ITEMS) / (BESIDE * PIECES) * BESIDE + item % BESIDE) * AT_ONCE;
    };
    int own = threadIdx.x % 128;
    ptx::renew(own);  // else places of items would be kept in registers from line to line
#pragma unroll 1
    for (int first = own; first < ITEMS; first += 128 * Batch<WIDTH>::ITEMS) {
        Batch<WIDTH> batch;
#pragma unroll
        for (int i = 0; i < Batch<WIDTH>::ITEMS; ++i) {
            const int item = first + 128 * i, piece = piece_of(item);
            const bool there = item < ITEMS && piece < pieces;
            batch.load(i, source, there ? channel_of(item) : source.limit, source.row + line_of(item),
                       source.column + piece * PIECE);
        }
#pragma unroll
        for (int i = 0; i < Batch<WIDTH>::ITEMS; ++i) {
            const int item = first + 128 * i, piece = piece_of(item);
            if (item >= ITEMS || piece >= pieces) continue;
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                store(line_of(item), channel_of(item) + j, piece, staged(batch.loaded[i][j]));
        }
    }
}

template <int WIDTH>
__device__ __forceinline__ void load_x(const Params& p, const Tile& tile, const Smem& smem, int to_line, int image,
                                       int row, int column) {
    const int channel = tile.group * p.channels + tile.channel;
    const Source source{
        p.x + image * p.x_n + channel * p.x_c, p.x_c, p.x_h, p.x_w, p.channels - tile.channel, row, p.h, column, p.w};
    load_box<WIDTH, BLOCK_CHANNELS, X_PITCH / PIECE>(source, X_PITCH / PIECE,
                                                     [&](int line, int channel, int piece, const Piece& loaded) {
                                                         const ToX to(smem.x, to_line + line, channel);
                                                         to.store(loaded, to.at(piece));
                                                     });
}

// Pieces of a line of dy that are multiplied: what is behind them is not read.
__device__ __forceinline__ int read_pieces(const Params& p, const Place& place) {
    return 2 * ceil_div(place.pixels(p), DEPTH);
}

template <int WIDTH>
__device__ __forceinline__ void load_dy(const Params& p, const Tile& tile, const Smem& smem, int to_line,
                                        const Place& place, int row) {
    const int filter = tile.group * p.filters + tile.filter;
    const Source source{p.dy + place.image * p.y_n + filter * p.y_k,
                        p.y_k,
                        p.y_p,
                        p.y_q,
                        p.filters - tile.filter,
                        row,
                        p.rows,
                        place.column,
                        p.cols};
    load_box<WIDTH, BLOCK_FILTERS, STRIP / PIECE>(source, read_pieces(p, place),
                                                  [&](int line, int filter, int piece, const Piece& loaded) {
                                                      const ToDy to(smem.y, to_line + line, filter);
                                                      to.store(loaded, to.at(piece));
                                                  });
}

// Where raw boxes begin.
__device__ __forceinline__ Begin begin_of_x(const Params& p, int row, int column) {
    return {row * p.w + column, p.w, int(p.x_c), -column, p.w - column};
}

__device__ __forceinline__ Begin begin_of_dy(const Params& p, const Place& place, int row) {
    return {row * p.cols + place.column, p.cols, int(p.y_k), 0, place.pixels(p)};
}

// Stores the lines of the next raw box, when it is there, and gives it back. `store(raw)` shifts or transposes it.
template <class Store>
__device__ __forceinline__ void store_next(RawBoxes& boxes, const char* raw, int raw_bytes, ptx::u64* full,
                                           ptx::u64* empty, const Store& store) {
    const int at = boxes.shifted.index;
    wait(&full[at], boxes.shifted.parity);
    store(raw + at * raw_bytes);
    ptx::fence_proxy_async_shared();  // before TMA writes here again, and for wgmma
    ptx::mbarrier_arrive(&empty[at]);
    boxes.shifted.advance(RAW_STAGES);
}

// Whether dy has a row of the box that begins with this one.
__device__ __forceinline__ bool has_rows(const Params& p, int row) { return row > -BOX_ROWS && row < p.rows; }

// Brings a box, as TMA, loads or shifts do, that begins with a row; of one whose rows do not exist nothing but the news
// that it is there.
__device__ __forceinline__ void bring_dy(const Params& p, const Tile& tile, const Smem& smem, const Cursor& at,
                                         const Place& place, int row, RawBoxes& raw) {
    const int to_line = at.index * BOX_ROWS;
    ptx::u64* const full = &smem.y_full[at.index];
    const bool there = has_rows(p, row);
    if constexpr (Y_LOADS != 0) {
        if (there) load_dy<Y_LOADS>(p, tile, smem, to_line, place, row);
        ptx::fence_proxy_async_shared();
        ptx::mbarrier_arrive(full);
    } else if constexpr (Y_RAW_BOXES) {
        if (there)
            store_next(raw, smem.y_raw, Y_RAW_BYTES, smem.y_raw_full, smem.y_raw_empty, [&](const char* box) {
                if constexpr (Y_TRANSPOSED)
                    transpose_box(box, read_pieces(p, place) / 2, smem.y, to_line);
                else
                    shift_box<RawY, ToDy>(box, begin_of_dy(p, place, row), read_pieces(p, place), smem.y, to_line);
            });
        ptx::mbarrier_arrive(full);
    } else if (threadIdx.x % 128 == 0) {
        if (there)
            ask_for_dy(p, tile, smem.y + to_line * Y_LINE, full, place, row);
        else
            ptx::mbarrier_arrive(full);
    }
}

__device__ __forceinline__ void bring_x(const Params& p, const Tile& tile, const Smem& smem, int at, const Place& place,
                                        int row, RawBoxes& raw) {
    const int to_line = at * BOX_ROWS;
    ptx::u64* const full = X_FILLED ? &smem.x_landed[at] : &smem.x_full[at];
    const int column = column_of_x(p, tile, place), from = source_row(p, row);
    if constexpr (X_LOADS != 0) {
        if (row < p.h) load_x<X_LOADS>(p, tile, smem, to_line, place.image, from, column);
        write_edges(p, tile, place, row, smem, to_line);
        ptx::mbarrier_arrive(full);
    } else if constexpr (X_PLANES > 0) {
        if (row < p.h)
            store_next(raw, smem.x_raw, RawX::BYTES, smem.x_raw_full, smem.x_raw_empty, [&](const char* box) {
                shift_box<RawX, ToX>(box, begin_of_x(p, from, column), X_PITCH / PIECE, smem.x, to_line);
            });
        write_edges(p, tile, place, row, smem, to_line);
        ptx::mbarrier_arrive(full);
    } else if (threadIdx.x % 128 == 0) {
        for (int line = 0; line < BOX_ROWS; line += X_BOX_ROWS)
            if (row + line < p.h)
                ask_for_x(p, tile, smem.x + (to_line + line) * X_LINE, full, place.image, source_row(p, row + line),
                          column);
            else
                ptx::mbarrier_arrive(full);
    }
}

// Asks for the raw boxes of dy and of x that are stored next; box 0 of x comes with box AHEAD of dy.
__device__ __forceinline__ void ask_ahead(const Params& p, const Tile& tile, const Smem& smem, const Place& place,
                                          int box, int bands, RawBoxes& y_raw, RawBoxes& x_raw) {
    const auto dy_row = [&](int box) { return place.dy_row + box * BOX_ROWS * p.line_step; };
    const auto x_row = [&](int box) { return place.row + box * BOX_ROWS * place.row_step; };
    if constexpr (Y_RAW_BOXES)
        y_raw.ask_ahead(
            box, bands + AHEAD, smem.y_raw_empty, [&](int one) { return has_rows(p, dy_row(one)); },
            [&](int one, int at) {
                char* const to = smem.y_raw + at * Y_RAW_BYTES;
                if constexpr (Y_TRANSPOSED)
                    ask_for_transposed(p, tile, to, &smem.y_raw_full[at], place, dy_row(one));
                else
                    ask_for_raw<RawY>(p.y_map, begin_of_dy(p, place, dy_row(one)), to, &smem.y_raw_full[at],
                                      tile.group * p.filters + tile.filter, place.image);
            });
    if constexpr (X_PLANES > 0)
        x_raw.ask_ahead(
            box - AHEAD, bands, smem.x_raw_empty, [&](int one) { return x_row(one) < p.h; },
            [&](int one, int at) {
                const Begin begin = begin_of_x(p, source_row(p, x_row(one)), column_of_x(p, tile, place));
                ask_for_raw<RawX>(p.x_map, begin, smem.x_raw + at * RawX::BYTES, &smem.x_raw_full[at],
                                  tile.group * p.channels + tile.channel, place.image);
            });
}

// All boxes, in the order in which the consumers read them: by one thread, or if there is anything to store by all.
// Where a box of dy has room, so has the box of x that comes with it. TMA is asked for x before threads store dy.
__device__ __forceinline__ void produce(const Params& p, const Smem& smem) {
#ifdef EDGE_ROWS
    if (X_FILLED && !LOADS && threadIdx.x % 128 >= 128 - EDGE_THREADS) return fill_boxes(p, smem);
    Cursor x_filled;
#endif
    if (!LOADS && threadIdx.x % 128 != 0) return;
    Walk walk(p.cut);
    const Tile tile(p.blocks, walk.slab);
    Cursor y_at;
    int x_at = 0;
    RawBoxes y_raw, x_raw;
    for (Run run; walk.next(p.cut, run);) {
        const Place place(p, tile, run);
        y_raw.next = x_raw.next = 0;
        for (int box = 0; box < run.bands + AHEAD; ++box, y_at.advance(Y_STAGES)) {
            ask_ahead(p, tile, smem, place, box, run.bands, y_raw, x_raw);
            wait(&smem.y_empty[y_at.index], y_at.parity ^ 1);
            if (box >= AHEAD) {
                bring_x(p, tile, smem, x_at, place, place.row + (box - AHEAD) * BOX_ROWS * place.row_step, x_raw);
                x_at = x_at + 1 == X_STAGES ? 0 : x_at + 1;
            }
#ifdef EDGE_ROWS
            OuterPixels outer;
            if (X_FILLED && LOADS && box >= AHEAD) outer.begin(p, tile, place, row_of_box(place, box - AHEAD));
#endif
            bring_dy(p, tile, smem, y_at, place, place.dy_row + box * BOX_ROWS * p.line_step, y_raw);
#ifdef EDGE_ROWS
            if (X_FILLED && LOADS && box >= AHEAD) fill_box(p, smem, x_filled, outer);
#endif
        }
    }
}

}  // namespace hc::wgrad
