// The CUDA runtime as an exported file's host code uses it: launches, fills and tensor maps go to the test's callbacks.
#pragma once

#include <cstddef>
#include <cstdint>

#define CUDART_VERSION 13000

struct Callbacks {
    int (*launch)(unsigned blocks, unsigned threads, size_t smem_bytes, unsigned cluster, int64_t stream,
                  void** arguments);
    int (*allow)(int smem_bytes);
    int (*fill)(void* first, int value, size_t size_bytes, int64_t stream);
    int (*encode)(void* map, int type, unsigned rank, void* address, const void* const* lists, const int* modes);
};
struct dim3 {
    unsigned x, y, z;
};
extern "C" {
inline Callbacks hc_callbacks;
}

enum cudaError_t { cudaSuccess = 0 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
constexpr int cudaEnableDefault = 0;
struct CUstream_st;
using cudaStream_t = CUstream_st*;

inline const char* cudaGetErrorString(cudaError_t) { return "the test's callback failed"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
    return cudaError_t(hc_callbacks.allow(value));
}
inline cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void** arguments, size_t smem_bytes,
                                    cudaStream_t stream) {
    if (grid.y * grid.z * block.y * block.z != 1) return cudaError_t(1);
    return cudaError_t(hc_callbacks.launch(grid.x, block.x, smem_bytes, 1, (int64_t)stream, arguments));
}

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4 };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        struct {
            unsigned x, y, z;
        } clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void** arguments) {
    const dim3 grid = config->gridDim, block = config->blockDim;
    const auto& cluster = config->attrs->val.clusterDim;
    const bool known = config->numAttrs == 1 && config->attrs->id == cudaLaunchAttributeClusterDimension;
    if (!known || grid.y * grid.z * block.y * block.z * cluster.y * cluster.z != 1) return cudaError_t(1);
    return cudaError_t(hc_callbacks.launch(grid.x, block.x, config->dynamicSmemBytes, cluster.x,
                                           (int64_t)config->stream, arguments));
}
inline cudaError_t cudaMemsetAsync(void* first, int value, size_t size_bytes, cudaStream_t stream) {
    return cudaError_t(hc_callbacks.fill(first, value, size_bytes, (int64_t)stream));
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, int,
                                                    cudaDriverEntryPointQueryResult*);
