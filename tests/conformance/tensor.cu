// Tensor maps: one box. scalars: operation (0 load, 1 store, 2 im2col load), rank, bytes of the box, its byte offset in
// shared memory, coordinates (5), offsets (2). A load copies the box out raw; a store begins with in[1] as the box.
__device__ __forceinline__ void load(const Params& p, void* box, u64* bar) {
    const int* c = p.scalars + 4;
    const hc::TensorMap* map = &p.maps[0];
    const int rank = p.scalars[1];
    if (p.scalars[0] == 2)
        cp_async_bulk_tensor_4d_im2col_shared_global(box, map, bar, c[0], c[1], c[2], c[3], (unsigned short)c[5],
                                                     (unsigned short)c[6]);
    else if (rank == 2)
        cp_async_bulk_tensor_2d_shared_global(box, map, bar, c[0], c[1]);
    else if (rank == 3)
        cp_async_bulk_tensor_3d_shared_global(box, map, bar, c[0], c[1], c[2]);
    else if (rank == 4)
        cp_async_bulk_tensor_4d_shared_global(box, map, bar, c[0], c[1], c[2], c[3]);
    else
        cp_async_bulk_tensor_5d_shared_global(box, map, bar, c[0], c[1], c[2], c[3], c[4]);
}

__device__ __forceinline__ void store(const Params& p, const void* box) {
    const int* c = p.scalars + 4;
    const hc::TensorMap* map = &p.maps[0];
    const int rank = p.scalars[1];
    if (rank == 2)
        cp_async_bulk_tensor_2d_global_shared(map, box, c[0], c[1]);
    else if (rank == 3)
        cp_async_bulk_tensor_3d_global_shared(map, box, c[0], c[1], c[2]);
    else if (rank == 4)
        cp_async_bulk_tensor_4d_global_shared(map, box, c[0], c[1], c[2], c[3]);
    else
        cp_async_bulk_tensor_5d_global_shared(map, box, c[0], c[1], c[2], c[3], c[4]);
}

extern "C" __global__ void __launch_bounds__(64) conformance(const __grid_constant__ Params p) {
    const int bytes = p.scalars[2];
    u64* const bar = reinterpret_cast<u64*>(dynamic_smem);
    u32* const box = reinterpret_cast<u32*>(dynamic_smem + 1024 + p.scalars[3]);
    if (threadIdx.x == 0) {
        prefetch_tensormap(&p.maps[0]);
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
    }
    if (p.scalars[0] == 1)
        fill_shared(box, p.in[1], bytes / 4);
    else
        for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) box[i] = 0xa5a5a5a5;  // a fill with 0 is a write too
    fence_proxy_async_shared();
    __syncthreads();
    if (p.scalars[0] == 1) {
        if (threadIdx.x == 0) {
            store(p, box);
            cp_async_bulk_commit_group();
            cp_async_bulk_wait_group<0>();
        }
        return;
    }
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(bar, bytes);
        load(p, box, bar);
    }
    if (wait(p, bar, 0)) dump_shared(p.out[0], box, bytes / 4);
}
