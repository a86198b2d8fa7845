// What a tile is staged from: windows of x and of dy.
#pragma once

#include "families/halo_sm80_wgrad/work.cuh"

namespace hc::wgrad {

// A window of a tensor: channels from the first one on, lines and columns from an origin that may lie outside.
struct Source {
    const elem_t* from[HALVES];  // the window's origin
    int line[HALVES], col;       // the same, in the image
    int height, width, channels;
    offset_t channel_stride, line_stride, col_stride;
};

// Channels of a block from the first one on: of one group those that are left, of several the groups that are left.
__device__ __forceinline__ int channels_left(int first, int of_group, int groups_left) {
    return TILE_G == 1 ? of_group - first : groups_left * of_group;
}

__device__ __forceinline__ Source x_source(const Params& p, const Work& work, const Tile& tile) {
    Source source;
    source.col = tile.q0 * STRIDE_W - p.pad_left - p.lead;
    const elem_t* channel = p.x + (work.group * C_PER_GROUP + work.c) * p.x_c + source.col * p.x_w;
#pragma unroll
    for (int i = 0; i < HALVES; ++i) {
        source.line[i] = tile.p0[i] * STRIDE_H - p.pad_top;
        source.from[i] = channel + tile.image[i] * p.x_n + source.line[i] * p.x_h;
        if (tile.rows[i] == 0) source.line[i] = -(1 << 30);
    }
    source.height = p.h, source.width = p.w;
    source.channels = channels_left(work.c, C_PER_GROUP, p.groups - work.group);
    source.channel_stride = p.x_c, source.line_stride = p.x_h, source.col_stride = p.x_w;
    return source;
}

__device__ __forceinline__ Source y_source(const Params& p, const Work& work, const Tile& tile) {
    Source source;
    source.col = tile.q0;
    const elem_t* channel = p.dy + (work.group * K_PER_GROUP + work.k) * p.y_k + source.col * p.y_q;
#pragma unroll
    for (int i = 0; i < HALVES; ++i) {
        source.line[i] = tile.p0[i];
        source.from[i] = channel + tile.image[i] * p.y_n + source.line[i] * p.y_p;
        if (tile.rows[i] == 0) source.line[i] = -(1 << 30);
    }
    source.height = p.p, source.width = p.q;
    source.channels = channels_left(work.k, K_PER_GROUP, p.groups - work.group);
    source.channel_stride = p.y_k, source.line_stride = p.y_p, source.col_stride = p.y_q;
    return source;
}

}  // namespace hc::wgrad
