// ldmatrix and stmatrix in every form. in[0]: 2 KiB; in[1]: the byte offset of the row of each lane; in[2]: registers.
template <int COUNT>
__device__ __forceinline__ void put(u32*& to, const u32 (&r)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i, to += 32) to[threadIdx.x] = r[i];
}

// Clears the image, stores one form into it, and copies it out.
template <class Store>
__device__ __forceinline__ void store_and_dump(u32*& to, Store store) {
    u32* words = reinterpret_cast<u32*>(dynamic_smem);
    __syncwarp();
    for (int i = threadIdx.x; i < 512; i += 32) words[i] = 0xabcdef01u;
    __syncwarp();
    store();
    __syncwarp();
    dump_shared(to, words, 512);
    to += 512;
}

extern "C" __global__ void __launch_bounds__(32) conformance(const __grid_constant__ Params p) {
    const int lane = threadIdx.x;
    fill_shared(reinterpret_cast<u32*>(dynamic_smem), p.in[0], 512);
    __syncwarp();
    void* const row = dynamic_smem + p.in[1][lane];
    u32 r1[1], r2[2], r4[4];
    u32* out = p.out[0];
    ldmatrix_x1(r1, row), put(out, r1);
    ldmatrix_x2(r2, row), put(out, r2);
    ldmatrix_x4(r4, row), put(out, r4);
    ldmatrix_x1_trans(r1, row), put(out, r1);
    ldmatrix_x2_trans(r2, row), put(out, r2);
    ldmatrix_x4_trans(r4, row), put(out, r4);
    for (int i = 0; i < 4; ++i) r4[i] = p.in[2][i * 32 + lane];
    r2[0] = r4[0], r2[1] = r4[1], r1[0] = r4[0];
    out = p.out[1];
    store_and_dump(out, [&] { stmatrix_x1(row, r1); });
    store_and_dump(out, [&] { stmatrix_x2(row, r2); });
    store_and_dump(out, [&] { stmatrix_x4(row, r4); });
    store_and_dump(out, [&] { stmatrix_x1_trans(row, r1); });
    store_and_dump(out, [&] { stmatrix_x2_trans(row, r2); });
    store_and_dump(out, [&] { stmatrix_x4_trans(row, r4); });
}
