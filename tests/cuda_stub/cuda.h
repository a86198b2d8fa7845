// The driver's encoders of tensor maps, as an exported file uses them.
#pragma once

#include <cstring>

#include "cuda_runtime.h"

using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
struct alignas(64) CUtensorMap {
    cuuint64_t opaque[16];
};
enum CUresult { CUDA_SUCCESS = 0 };
enum CUtensorMapDataType {
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
    CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 = 11,
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle {
    CU_TENSOR_MAP_SWIZZLE_NONE = 0,
    CU_TENSOR_MAP_SWIZZLE_32B = 1,
    CU_TENSOR_MAP_SWIZZLE_64B = 2,
    CU_TENSOR_MAP_SWIZZLE_128B = 3,
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                       const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                       CUtensorMapFloatOOBfill fill) {
    const void* lists[] = {extents, strides, box, steps, nullptr, nullptr};
    const int modes[] = {interleave, swizzle, promotion, fill};
    return CUresult(hc_callbacks.encode(map, type, rank, address, lists, modes));
}

inline CUresult cuTensorMapEncodeIm2col(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                        const cuuint64_t* extents, const cuuint64_t* strides, const int* lower,
                                        const int* upper, cuuint32_t channels, cuuint32_t pixels,
                                        const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                        CUtensorMapFloatOOBfill fill) {
    const cuuint32_t box[] = {channels, pixels};
    const void* lists[] = {extents, strides, box, steps, lower, upper};
    const int modes[] = {interleave, swizzle, promotion, fill};
    return CUresult(hc_callbacks.encode(map, type, rank, address, lists, modes));
}

inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, int,
                                                    cudaDriverEntryPointQueryResult*) {
    const bool tiled = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
    const bool im2col = std::strcmp(name, "cuTensorMapEncodeIm2col") == 0;
    *function = tiled ? (void*)&cuTensorMapEncodeTiled : im2col ? (void*)&cuTensorMapEncodeIm2col : nullptr;
    return cudaSuccess;
}
