// The launch of the product of sm90_product.cuh: tensor maps and the grid. Host code. Requires a device of compute capability 9.0.
#ifndef HEADWATER_KERNELS_CUDA_DEVICE_SM90_LAUNCH_CUH_
#define HEADWATER_KERNELS_CUDA_DEVICE_SM90_LAUNCH_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels/cuda/device/sm90_product.cuh"
#include "kernels/cuda/driver_entry.h"

namespace headwater::cuda::sm90 {

// Cluster rows a raster group: measured (kernels/lab/README.md).
inline constexpr int32_t kRasterGroup = 8;

inline int64_t ColumnTiles(int64_t columns) { return (columns + kTileN - 1) / kTileN; }

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                     const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder, looked up once. Any thread.
inline cudaError_t FindEncoder(EncodeTensorMap* encode) {
  static std::atomic<EncodeTensorMap> found{nullptr};
  *encode = found.load(std::memory_order_acquire);
  if (*encode != nullptr) return cudaSuccess;
  void* entry = nullptr;
  const cudaError_t error = FindDriverEntry("cuTensorMapEncodeTiled", &entry);
  if (error != cudaSuccess) return error;
  *encode = reinterpret_cast<EncodeTensorMap>(entry);
  found.store(*encode, std::memory_order_release);
  return cudaSuccess;
}

// A row-major matrix; `stride` in elements.
struct Operand {
  const void* data;
  int64_t rows;
  int64_t stride;
};

// A matrix of bf16 or bytes in swizzled boxes of kSpan bytes by `box_rows`. Elements beyond `columns` read as 0 and are not
// written.
inline cudaError_t MakeMap(EncodeTensorMap encode, const Operand& matrix, int64_t columns, int element_bytes, int box_rows,
                           CUtensorMap* map) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.stride * element_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(kSpan / element_bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUtensorMapDataType type = element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(map, type, 2, const_cast<void*>(matrix.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
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

// a [rows, k] * b [rows, k]^T, the epilogue's stores going through `c` [a.rows, b.rows] bf16, unless its data is null.
template <class Epilogue>
cudaError_t LaunchProduct(const Operand& a, const Operand& b, int64_t k, const Operand& c, const typename Epilogue::Params& params,
                          cudaStream_t stream) {
  constexpr int kBytes = Epilogue::Operands::kBytes;
  EncodeTensorMap encode = nullptr;
  int multiprocessors = 0;
  CUtensorMap map_a{}, map_b{}, map_c{};
  cudaError_t error = FindEncoder(&encode);
  if (error == cudaSuccess) error = Prepare<Epilogue>(&multiprocessors);
  if (error == cudaSuccess) error = MakeMap(encode, a, k, kBytes, kBoxRowsA, &map_a);
  if (error == cudaSuccess) error = MakeMap(encode, b, k, kBytes, kBoxRowsB, &map_b);
  map_c = map_a;
  if (error == cudaSuccess && c.data != nullptr) error = MakeMap(encode, c, b.rows, 2, kBoxRowsC, &map_c);
  if (error != cudaSuccess) return error;
  const ProductShape shape{static_cast<int32_t>(a.rows), static_cast<int32_t>(b.rows), static_cast<int32_t>(k), kRasterGroup};
  const int64_t cluster_rows = (a.rows + kTileM * kCluster - 1) / (kTileM * kCluster);
  const int64_t clusters = std::min<int64_t>(multiprocessors / kCluster, cluster_rows * ColumnTiles(b.rows));
  ProductKernel<Epilogue><<<static_cast<unsigned>(clusters * kCluster), kProductThreads, kProductSharedBytes, stream>>>(
      map_a, map_b, map_c, shape, params);
  return cudaGetLastError();
}

}  // namespace headwater::cuda::sm90

#endif  // HEADWATER_KERNELS_CUDA_DEVICE_SM90_LAUNCH_CUH_
