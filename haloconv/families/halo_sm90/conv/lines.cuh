// Lines as the producers of halo_sm90 stage them: in which order, and which row of which tensor each is.
#pragma once

#include "families/halo_sm90/conv/shape.cuh"
#include "kernels/ptx/tensor_map.cuh"

// What a slot is to hold: line `line` of a tile column, or (FLAT) the rows from there on that meet `tiles` tiles.
struct Line {
    WorkTile column;
    int line, tiles, chunk;
    Slot slot;
};

// Calls stage(line) for the lines of all segments, in the order in which the consumers read them. With KEEPS it calls
// begin(at, chunk) before a phase's lines of a chunk: position `at` of the chunk's ring is the first one's.
template <class Begin, class Stage>
__device__ __forceinline__ void for_each_line(const Params& p, const Begin& begin, const Stage& stage) {
    int at = 0;  // of the ring: of the segment's first line (KEEPS), or of the next one
    for (hc::Segments segment(p.schedule); segment.next(p.schedule);) {
        const int first_tile = hc::TILES * segment.first.index,
                  first_line = hc::lines_of<RUNS>(p, first_tile, 1, 0, 1).first;
        for (int work_tile = 0; work_tile <= segment.work_tiles; ++work_tile)
            for (int i = FIRST_PHASE; i < (work_tile < segment.work_tiles ? 2 : 1); ++i) {
                const hc::Phase phase(p, i, work_tile, segment.work_tiles);
                const hc::LineRange lines = staged_lines(p, phase, i, work_tile, segment.work_tiles);
                const int first_row = FLAT ? p.pitch.quotient((first_tile + phase.first_tile) * TILE_PX) : 0;
                for (int chunk = phase.chunk; chunk < phase.chunk_end; ++chunk) {
                    if (KEEPS) begin(at + lines.first, chunk);
                    for (int line = lines.first; line < lines.end; ++line) {
                        const Slot slot(p, KEEPS ? at + line : at++, chunk);
                        stage(Line{segment.first, FLAT ? first_row : first_line + line, phase.tiles, chunk, slot});
                    }
                }
            }
        if (KEEPS) at += lines_of_tiles(p, hc::TILES * segment.work_tiles, segment.work_tiles);
    }
}

// The channels of a line's chunk, of image 0 at pixel (0, 0).
__device__ __forceinline__ const elem_t* chunk_of(const Params& p, const Line& line) {
    return p.x + ((i64)(line.column.group) * p.channels + line.chunk * CHUNK_ELEMS) * p.x_c;
}

// The map of the tensor that has a row, and the row's number there.
struct MappedRow {
    const hc::TensorMap* map;
    int row;

    __device__ __forceinline__ MappedRow(const Params& p, int at) : map(&p.x_map), row(at) {
#ifdef HALO_ROWS
        if (at >= p.h) map = &p.halo_map, row -= p.h;
#endif
    }
};

#if EDGES
// A row of a line's chunk in memory: its first channel at column 0, and elements to the next channel, the next column.
struct StoredRow {
    const elem_t* first;
    i64 c, w;

    __device__ __forceinline__ StoredRow(const Params& p, const Line& line, const hc::ImageRow& row)
        : first(chunk_of(p, line) + row.n * p.x_n + row.row * p.x_h), c(p.x_c), w(p.x_w) {
#ifdef HALO_ROWS
        if (row.row < p.h) return;
        c = p.halo_c, w = p.halo_w;
        first = p.halo + ((i64)(line.column.group) * p.channels + line.chunk * CHUNK_ELEMS) * c + row.n * p.halo_n +
                (row.row - p.h) * p.halo_h;
#endif
    }
};
#endif
