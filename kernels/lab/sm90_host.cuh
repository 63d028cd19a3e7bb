// Host side of the Hopper kernels: tensor maps and launches.

#ifndef HEADWATER_KERNELS_LAB_SM90_HOST_CUH_
#define HEADWATER_KERNELS_LAB_SM90_HOST_CUH_

#include <cuda.h>

#include "bench.cuh"
#include "sm90_product.cuh"

namespace headwater::sm90 {

// Rank-2 tensor map: `inner` contiguous elements a row, `outer` rows `stride_bytes` apart, boxes of `box_bytes` (128 or 64, and the
// swizzle of that width) by `box_rows`. The driver's encoder is looked up at run time, so that nothing links libcuda.
inline CUtensorMap MakeTensorMap(const void* base, CUtensorMapDataType type, uint64_t inner, uint64_t outer, uint64_t stride_bytes,
                                 uint32_t box_bytes, uint32_t box_rows,
                                 CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                   const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    LAB_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess) {
      std::fprintf(stderr, "the driver has no cuTensorMapEncodeTiled\n");
      std::exit(1);
    }
    return reinterpret_cast<Encode>(entry);
  }();
  const uint32_t element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  const cuuint64_t sizes[2] = {inner, outer};
  const cuuint64_t strides[1] = {stride_bytes};
  const cuuint32_t box[2] = {box_bytes / element_bytes, box_rows};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap map{};
  const CUresult result = encode(&map, type, 2, const_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 box_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::fprintf(stderr, "cuTensorMapEncodeTiled: %d (inner %llu, outer %llu, stride %llu)\n", static_cast<int>(result),
                 static_cast<unsigned long long>(inner), static_cast<unsigned long long>(outer),
                 static_cast<unsigned long long>(stride_bytes));
    std::exit(1);
  }
  return map;
}

// Map of an operand. kK: memory is [size, k] row-major, boxes of kBoxRows rows. kMn: memory is [k, size] row-major.
template <Major kMajor, int kDepth, int kBoxRows>
CUtensorMap OperandMap(const __nv_bfloat16* base, int64_t size, int64_t k) {
  const uint64_t inner = static_cast<uint64_t>(kMajor == Major::kK ? k : size),
                 outer = static_cast<uint64_t>(kMajor == Major::kK ? size : k);
  return MakeTensorMap(base, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, inner, outer, inner * 2, kMajor == Major::kK ? 2 * kDepth : 128,
                       kMajor == Major::kK ? kBoxRows : kDepth);
}
// Maps of a row-major [m, n] result, stored by warps in boxes of 16 rows by 128 bytes.
inline CUtensorMap ResultMap(__nv_bfloat16* base, int64_t m, int64_t n) {
  return MakeTensorMap(base, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, static_cast<uint64_t>(n), static_cast<uint64_t>(m),
                       static_cast<uint64_t>(n) * 2, 128, 16);
}
inline CUtensorMap ResultMap(float* base, int64_t m, int64_t n) {
  return MakeTensorMap(base, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, static_cast<uint64_t>(n), static_cast<uint64_t>(m),
                       static_cast<uint64_t>(n) * 4, 128, 16);
}

struct ProductTuning {
  int32_t group = 8;
  int32_t pace_slack = 0;   // steps; 0: not paced
  int32_t pace_blocks = 8;  // k-blocks a step
  uint64_t policy_a = kEvictNormal;
  uint64_t policy_b = kEvictNormal;
  uint64_t policy_c = kEvictNormal;
};

// A product ready to be enqueued any number of times on the same memory.
template <Major kMajorA, Major kMajorB, class Epilogue, class Config = Tile256>
class Product {
 public:
  template <class Result>
  Product(const __nv_bfloat16* a, const __nv_bfloat16* b, Result* c, int64_t m, int64_t n, int64_t k,
          const typename Epilogue::Params& params, const ProductTuning& tuning)
      : map_a_(OperandMap<kMajorA, Config::kDepth, kTileM>(a, m, k)),
        map_b_(OperandMap<kMajorB, Config::kDepth, Config::kTileN / 2>(b, n, k)),
        map_c_(ResultMap(c, m, n)),
        params_(params) {
    shape_ = ProductShape{static_cast<int32_t>(m), static_cast<int32_t>(n), static_cast<int32_t>(k), tuning.group,
                          tuning.policy_a,         tuning.policy_b,         tuning.policy_c,         nullptr,
                          tuning.pace_blocks,      tuning.pace_slack};
    int device = 0, multiprocessors = 0;
    LAB_CUDA(cudaGetDevice(&device));
    LAB_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    const int64_t tiles =
        (m + kTileM * Config::kCluster - 1) / (kTileM * Config::kCluster) * ((n + Config::kTileN - 1) / Config::kTileN);
    grid_ = static_cast<int>(std::min<int64_t>(multiprocessors / Config::kCluster, tiles)) * Config::kCluster;
    if (tuning.pace_slack > 0) {
      const int64_t clusters = grid_ / Config::kCluster, blocks = (k + Config::kDepth - 1) / Config::kDepth;
      pace_ =
          lab::DeviceArray<uint32_t>((tiles + clusters - 1) / clusters * ((blocks + tuning.pace_blocks - 1) / tuning.pace_blocks));
      shape_.pace = pace_.get();
    }
    LAB_CUDA(cudaFuncSetAttribute(ProductKernel<kMajorA, kMajorB, Epilogue, Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Config::kSharedBytes));
  }
  void Enqueue(cudaStream_t stream) const {
    if (pace_.count() > 0) LAB_CUDA(cudaMemsetAsync(pace_.get(), 0, pace_.bytes(), stream));
    ProductKernel<kMajorA, kMajorB, Epilogue, Config>
        <<<grid_, kProductThreads, Config::kSharedBytes, stream>>>(map_a_, map_b_, map_c_, shape_, params_);
    LAB_CUDA(cudaGetLastError());
  }
  double flops() const { return 2.0 * shape_.m * static_cast<double>(shape_.n) * shape_.k; }
  lab::Candidate AsCandidate(const std::string& name) const {
    return lab::Candidate{name, [this](cudaStream_t stream) { Enqueue(stream); }, flops(), 0.0};
  }

 private:
  CUtensorMap map_a_, map_b_, map_c_;
  typename Epilogue::Params params_;
  ProductShape shape_{};
  lab::DeviceArray<uint32_t> pace_;
  int grid_ = 0;
};

}  // namespace headwater::sm90

#endif  // HEADWATER_KERNELS_LAB_SM90_HOST_CUH_
