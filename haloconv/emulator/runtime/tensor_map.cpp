// Tensor maps (TMA): boxes of 1 to 5 dimensions between global and shared memory, tiled loads and stores, im2col loads.
//
// A map is 128 bytes that emulator/tensor_map.py encodes after its checks; the layout is EncodedMap. A box lies
// densely in shared memory, innermost dimension first, its 16-byte chunks moved by the swizzle of the final address.

#include <algorithm>
#include <memory>

#include "bulk.h"

namespace hc::emu {

namespace {

constexpr u64 MAGIC = 0x70616d2d6f6c6168;  // "halo-map"
constexpr u32 CHUNK = 16;                  // bytes that a swizzle moves together
enum Mode : u8 { TILED, IM2COL };

// Mirrors _LAYOUT in emulator/tensor_map.py; little-endian, no gaps.
struct EncodedMap {
    u64 magic, address;
    u64 strides[4];                   // bytes, of dimensions 1 to 4
    u32 last[5];                      // extent - 1, elements
    u16 box[5];                       // elements traversed
    std::int16_t lower[2], upper[2];  // im2col: corners of the pixel box, (w, h)
    u16 channels, pixels;             // im2col
    u8 rank, mode, floating, element_bytes, swizzle_bytes, nan_fill, round_tf32, reserved;
    u8 steps[5];  // element strides
};

struct Box {
    EncodedMap map;
    u32 counts[5];  // elements that reach shared memory
    u32 row_bytes, bytes;
};

using Coordinates = std::int64_t[5];

EncodedMap decode(const void* map, Mode mode, int rank, Site site) {
    if ((u64)map % 64) fatal("tensor map", site, "the map at %p is not 64-byte aligned", map);
    EncodedMap decoded;
    std::memcpy(&decoded, map, sizeof decoded);
    if (decoded.magic != MAGIC) fatal("tensor map", site, "there is no encoded tensor map at %p", map);
    if (decoded.mode != mode)
        fatal("tensor map", site, "the map is for %s copies", decoded.mode == TILED ? "tiled" : "im2col");
    if (decoded.rank != rank)
        fatal("tensor map", site, "a map of %d dimensions used by a %dd copy", decoded.rank, rank);
    return decoded;
}

Box tiled_box(const EncodedMap& map) {
    Box box{map, {1, 1, 1, 1, 1}, 0, 0};
    u32 elements = 1;
    for (u32 d = 0; d < map.rank; ++d) {
        const u32 step = d ? map.steps[d] : 1;
        box.counts[d] = (map.box[d] + step - 1) / step;
        elements *= box.counts[d];
    }
    box.row_bytes = box.counts[0] * map.element_bytes;
    box.bytes = elements * map.element_bytes;
    return box;
}

void check_shared_place(const void* smem, Site site) {
    const u32 address = shared_address(smem, site);
    if (address % 128) fatal("tensor map", site, "the box at shared 0x%x is not 128-byte aligned", address);
}

// What hardware calls an illegal instruction: a corner that is not 16-byte aligned within its row, and a store whose
// corner lies before the tensor (it may reach beyond the end).
void check_corner(const EncodedMap& map, const Coordinates& corner, bool store, Site site) {
    const long long first_byte = corner[0] * map.element_bytes;
    if (first_byte % 16)
        fatal("tensor map", site, "the innermost coordinate %lld is byte %lld of a row: not a multiple of 16",
              (long long)corner[0], first_byte);
    for (u32 d = 0; store && d < map.rank; ++d)
        if (corner[d] < 0)
            fatal("tensor map", site, "coordinate %u of a store is negative: %lld", d, (long long)corner[d]);
}

// One innermost row of `count` elements from coordinates `at`: `inside` gets the bytes of it inside the tensor.
struct Row {
    u8* global;     // of the first element inside
    u32 skip, len;  // bytes before it, and inside
};

Row row_of(const EncodedMap& map, const Coordinates& at, u32 count) {
    u8* base = reinterpret_cast<u8*>(map.address);
    for (u32 d = 1; d < map.rank; ++d) {
        if (at[d] < 0 || at[d] > map.last[d]) return {nullptr, 0, 0};
        base += at[d] * map.strides[d - 1];
    }
    const std::int64_t first = std::max<std::int64_t>(at[0], 0);
    const std::int64_t end = std::min<std::int64_t>(at[0] + count, std::int64_t(map.last[0]) + 1);
    if (end <= first) return {nullptr, 0, 0};
    return {base + first * map.element_bytes, u32(first - at[0]) * map.element_bytes,
            u32(end - first) * map.element_bytes};
}

void fill(const EncodedMap& map, u8* to, u32 bytes) {
    std::memset(to, 0, bytes);
    if (!map.nan_fill) return;
    for (u32 at = 0; at < bytes; at += map.element_bytes) {
        std::memset(to + at, 0xff, map.element_bytes);
        to[at + map.element_bytes - 1] = 0x7f;
    }
}

// To nearest even, and every NaN becomes the same one.
void round_to_tf32(u8* row, u32 bytes) {
    for (u32 at = 0; at < bytes; at += 4) {
        u32 bits;
        std::memcpy(&bits, row + at, 4);
        const u32 magnitude = bits & 0x7fffffffu;
        if (magnitude > 0x7f800000u)
            bits = 0x7fffe000u;
        else if (magnitude != 0x7f800000u)
            bits = (bits + 0xfffu + (bits >> 13 & 1u)) & 0xffffe000u;
        std::memcpy(row + at, &bits, 4);
    }
}

// Byte `offset` of a dense box at `smem`, whose shared address is `address`.
u8* chunk_place(u8* smem, u32 address, u32 offset, u32 swizzle_bytes) {
    return smem + (std::int64_t(swizzled(address + offset, swizzle_bytes)) - address);
}

void load_row(const EncodedMap& map, const Coordinates& at, u32 count, u8* smem, u32 address, u32 offset) {
    const u32 bytes = count * map.element_bytes;
    u8 row[256 * 8];
    fill(map, row, bytes);
    const Row inside = row_of(map, at, count);
    if (inside.len) {
        std::memcpy(row + inside.skip, inside.global, inside.len);
        if (map.round_tf32) round_to_tf32(row + inside.skip, inside.len);
    }
    for (u32 chunk = 0; chunk < bytes; chunk += CHUNK)
        std::memcpy(chunk_place(smem, address, offset + chunk, map.swizzle_bytes), row + chunk, CHUNK);
}

// What a store writes of a row: whole 16-byte chunks, so also up to 15 bytes behind the innermost extent (seen on an
// H200; github.com/triton-lang/triton/issues/11583 has it too).
Row stored_row_of(const EncodedMap& map, const Coordinates& at, u32 count) {
    Row row = row_of(map, at, count);
    row.len = (row.len + CHUNK - 1) / CHUNK * CHUNK;
    return row;
}

void store_row(const EncodedMap& map, const Coordinates& at, u32 count, const u8* dense) {
    const Row row = stored_row_of(map, at, count);
    if (row.len) std::memcpy(row.global, dense + row.skip, row.len);
}

// Calls visit(coordinates, offset in the dense box) for every innermost row.
template <class Visit>
void for_each_row(const Box& box, const Coordinates& origin, Visit visit) {
    u32 offset = 0;
    Coordinates at;
    at[0] = origin[0];
    for (u32 i4 = 0; i4 < box.counts[4]; ++i4)
        for (u32 i3 = 0; i3 < box.counts[3]; ++i3)
            for (u32 i2 = 0; i2 < box.counts[2]; ++i2)
                for (u32 i1 = 0; i1 < box.counts[1]; ++i1) {
                    const u32 index[5] = {0, i1, i2, i3, i4};
                    for (u32 d = 1; d < 5; ++d)
                        at[d] = d < box.map.rank ? origin[d] + std::int64_t(index[d]) * box.map.steps[d] : 0;
                    visit(at, offset);
                    offset += box.row_bytes;
                }
}

// Every byte that the rows take must belong to one registered tensor: checked at issue.
void check_row(const EncodedMap& map, const Coordinates& at, u32 count, bool write, Site site) {
    const Row row = write ? stored_row_of(map, at, count) : row_of(map, at, count);
    if (!row.len) return;
    check_global(row.global, row.len, write, map.element_bytes, "tensor map", site);
    if (write) written_by_block(row.global, row.len, site);
}

// im2col: the pixels of the box in traversal order, as coordinates (c, w, h, n) with the tap's offsets added.
struct PixelWalk {
    const EncodedMap& map;
    std::int64_t w, h, n;

    void next() {
        const std::int64_t w_end = std::int64_t(map.last[1]) + map.upper[0],
                           h_end = std::int64_t(map.last[2]) + map.upper[1];
        w += map.steps[1];
        if (w <= w_end) return;
        w = map.lower[0];
        h += map.steps[2];
        if (h <= h_end) return;
        h = map.lower[1];
        ++n;
    }
};

template <class Visit>
void for_each_pixel(const EncodedMap& map, const Coordinates& base, u32 offset_w, u32 offset_h, Visit visit) {
    PixelWalk walk{map, base[1], base[2], base[3]};
    for (u32 pixel = 0; pixel < map.pixels; ++pixel, walk.next()) {
        const Coordinates at = {base[0], walk.w + offset_w, walk.h + offset_h, walk.n, 0};
        visit(at, pixel * map.channels * map.element_bytes);
    }
}

// Issues a load whose rows `each(visit)` enumerates.
template <class ForEach>
void issue_load(void* dst, const EncodedMap& map, u32 row_elements, u32 bytes, const void* word, Site site,
                ForEach each) {
    check_shared_place(dst, site);
    Mbarrier& bar = mbarrier_of_engine(word, site);
    async_write_begin(dst, bytes, 128, site);
    each([&](const Coordinates& at, u32) { check_row(map, at, row_elements, false, site); });
    count(ASYNC_READ_BYTES, bytes);
    copy_begins();
    submit("tensor load", true, [=, &bar] {
        u8* const smem = static_cast<u8*>(dst);
        const u32 address = shared_address(dst, site);
        each([&](const Coordinates& at, u32 offset) { load_row(map, at, row_elements, smem, address, offset); });
        engine_wrote(bar, dst, bytes, site);
        copy_ends();
        complete_bytes(bar, bytes, site);
    });
    preemption_point();
}

}  // namespace

}  // namespace hc::emu

using namespace hc::emu;

extern "C" {

void hc_emu_prefetch_tensormap(const void* map) {
    const Site site = HC_EMU_SITE;
    if ((u64)map % 64) fatal("tensor map", site, "the map at %p is not 64-byte aligned", map);
}

void hc_emu_tensor_load(void* dst, const void* map, void* word, int rank, int c0, int c1, int c2, int c3, int c4) {
    const Site site = HC_EMU_SITE;
    const Box box = tiled_box(decode(map, TILED, rank, site));
    const std::int64_t c[5] = {c0, c1, c2, c3, c4};
    check_corner(box.map, c, false, site);
    issue_load(dst, box.map, box.counts[0], box.bytes, word, site, [=](auto visit) { for_each_row(box, c, visit); });
}

void hc_emu_tensor_load_im2col(void* dst, const void* encoded, void* word, int c, int w, int h, int n,
                               unsigned offset_w, unsigned offset_h) {
    const Site site = HC_EMU_SITE;
    const EncodedMap map = decode(encoded, IM2COL, 4, site);
    if (offset_w > 255 || offset_h > 255)
        fatal("tensor map", site, "im2col offsets are 0 to 255, not %u and %u", offset_w, offset_h);
    const std::int64_t base[5] = {c, w, h, n, 0};
    check_corner(map, base, false, site);
    const u32 bytes = u32(map.pixels) * map.channels * map.element_bytes;
    issue_load(dst, map, map.channels, bytes, word, site,
               [=](auto visit) { for_each_pixel(map, base, offset_w, offset_h, visit); });
}

void hc_emu_tensor_store(const void* map, const void* src, int rank, int c0, int c1, int c2, int c3, int c4) {
    const Site site = HC_EMU_SITE;
    const Box box = tiled_box(decode(map, TILED, rank, site));
    const std::int64_t c[5] = {c0, c1, c2, c3, c4};
    check_corner(box.map, c, true, site);
    check_shared_place(src, site);
    for_each_row(box, c, [&](const Coordinates& at, u32) { check_row(box.map, at, box.counts[0], true, site); });
    const auto dense = std::make_shared<std::vector<u8>>(box.bytes);
    submit_store(
        "tensor store", src, box.bytes, site,
        [=] {
            u8* const smem = static_cast<u8*>(const_cast<void*>(src));
            const u32 address = shared_address(src, site);
            for (u32 offset = 0; offset < box.bytes; offset += CHUNK)
                std::memcpy(dense->data() + offset, chunk_place(smem, address, offset, box.map.swizzle_bytes), CHUNK);
        },
        [=] {
            for_each_row(box, c, [&](const Coordinates& at, u32 offset) {
                store_row(box.map, at, box.counts[0], dense->data() + offset);
            });
        });
}

}  // extern "C"
