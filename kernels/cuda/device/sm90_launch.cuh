// The host's part of a product on Hopper (sm90_product.cuh): tensor maps, and the launch.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_SM90_LAUNCH_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_SM90_LAUNCH_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels/cuda/device/sm90_product.cuh"
#include "kernels/cuda/launch_types.h"

namespace headwater::cuda::sm90 {

// Cluster rows a raster group: measured (kernels/lab/README.md).
inline constexpr int32_t kRasterGroup = 8;

inline int64_t ColumnTiles(int64_t columns) { return (columns + kTileN - 1) / kTileN; }

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                     const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder, looked up once, so that nothing links libcuda. Any thread.
inline cudaError_t FindEncoder(EncodeTensorMap* encode) {
  static std::atomic<EncodeTensorMap> found{nullptr};
  *encode = found.load(std::memory_order_acquire);
  if (*encode != nullptr) return cudaSuccess;
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) return error;
  if (result != cudaDriverEntryPointSuccess) return cudaErrorCallRequiresNewerDriver;
  *encode = reinterpret_cast<EncodeTensorMap>(entry);
  found.store(*encode, std::memory_order_release);
  return cudaSuccess;
}

// A row-major bf16 or fp32 matrix in swizzled boxes of 128 bytes by `box_rows`. What lies beyond its columns reads as 0 and is not
// written.
inline cudaError_t MakeMap(EncodeTensorMap encode, const ConstMatrix& matrix, int box_rows, CUtensorMap* map) {
  const bool is_float = matrix.element == Element::kFloat32;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.columns), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.stride * BytesOf(matrix.element))};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / BytesOf(matrix.element)), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result = encode(map, is_float ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                                 const_cast<void*>(matrix.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Multiprocessors of the current device, or an error if the product does not run there. The kernel's shared memory is allowed for
// once a device; that two threads may do it at the same time does no harm.
template <class Epilogue>
cudaError_t Prepare(int* multiprocessors) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // multiprocessors, or 0
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  *multiprocessors = device < kDevices ? known[device].load(std::memory_order_acquire) : 0;
  if (*multiprocessors > 0) return cudaSuccess;
  int major = 0, count = 0;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  if (major != 9) return cudaErrorNotSupported;
  error = cudaFuncSetAttribute(ProductKernel<Epilogue>, cudaFuncAttributeMaxDynamicSharedMemorySize, kProductSharedBytes);
  if (error != cudaSuccess) return error;
  *multiprocessors = count;
  if (device < kDevices) known[device].store(count, std::memory_order_release);
  return cudaSuccess;
}

// Whether the copy engine and the kernel's 32-bit indices can take it.
inline bool IsOperand(const ConstMatrix& matrix) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  return reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0 && matrix.stride * BytesOf(matrix.element) % 16 == 0 &&
         matrix.stride >= matrix.columns && matrix.rows <= kLargest && matrix.columns >= 1 && matrix.columns <= kLargest;
}

// hidden . weight^T of a shard, bf16, whose epilogue stores results in `out` [hidden.rows, shard.columns], by StoreBf16Block() or
// StoreFloatBlock() as its element is; data null: it stores none.
template <class Epilogue>
cudaError_t LaunchProduct(const ConstMatrix& hidden, const ShardWeights& shard, const ConstMatrix& out,
                          const typename Epilogue::Params& epilogue, cudaStream_t stream) {
  const ConstMatrix weight = {shard.weight, shard.columns, shard.width, shard.stride, shard.element};
  if (hidden.element != Element::kBFloat16 || weight.element != Element::kBFloat16 || !IsOperand(hidden) || !IsOperand(weight) ||
      (out.data != nullptr && !IsOperand(out)) || reinterpret_cast<uintptr_t>(shard.bias) % 4 != 0) {
    return cudaErrorInvalidValue;
  }
  EncodeTensorMap encode = nullptr;
  int multiprocessors = 0;
  CUtensorMap map_hidden{}, map_weight{}, map_out{};
  cudaError_t error = FindEncoder(&encode);
  if (error == cudaSuccess) error = Prepare<Epilogue>(&multiprocessors);
  if (error == cudaSuccess) error = MakeMap(encode, hidden, kBoxRowsA, &map_hidden);
  if (error == cudaSuccess) error = MakeMap(encode, weight, kBoxRowsB, &map_weight);
  // Of no results the kernel looks at the map all the same.
  map_out = map_hidden;
  if (error == cudaSuccess && out.data != nullptr) error = MakeMap(encode, out, kBoxRowsC, &map_out);
  if (error != cudaSuccess) return error;
  const ProductShape shape{static_cast<int32_t>(hidden.rows), static_cast<int32_t>(shard.columns),
                           static_cast<int32_t>(shard.width), kRasterGroup};
  const int64_t cluster_rows = (hidden.rows + kTileM * kCluster - 1) / (kTileM * kCluster);
  const int64_t clusters = std::min<int64_t>(multiprocessors / kCluster, cluster_rows * ColumnTiles(shard.columns));
  ProductKernel<Epilogue><<<static_cast<unsigned>(clusters * kCluster), kProductThreads, kProductSharedBytes, stream>>>(
      map_hidden, map_weight, map_out, shape, epilogue);
  return cudaGetLastError();
}

}  // namespace headwater::cuda::sm90

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_SM90_LAUNCH_CUH_
