// Plain matrix products by cuBLASLt, each with the algorithm that was fastest here.
//
// All matrices row-major. fp32 accumulation for 16-bit operands; true fp32 (no TF32) for fp32; fp64 for fp64. Reduction schemes
// whose order is not fixed are excluded. One call at a time on an object.
#ifndef HEADWATER_KERNELS_CUDA_PRODUCTS_H_
#define HEADWATER_KERNELS_CUDA_PRODUCTS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/launch_types.h"

namespace headwater::cuda {

// Which operands are read along their rows.
enum class ProductKind : int32_t {
  kLogits,      // out [n, v] = a [n, h] . b [v, h]^T
  kGradHidden,  // out [n, h] = a [n, v] . b [v, h]
  kGradWeight,  // out [v, h] = a [n, v]^T . b [n, h]
};

// What an algorithm is chosen for. Two products with equal shapes run the same algorithm for the life of the object.
struct ProductShape {
  ProductKind kind = ProductKind::kLogits;
  Element element = Element::kBFloat16;     // of a and b
  Element out_element = Element::kFloat32;  // kFloat32, or kFloat64 with fp64 operands
  int64_t rows = 0;                         // n
  int64_t vocab = 0;                        // v
  int64_t width = 0;                        // h
  int64_t a_stride = 0, b_stride = 0, out_stride = 0;
  bool adds = false;                        // out += instead of out =
};

class Products {
 public:
  static constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;
  // Row counts that algorithms are searched for; a product takes the algorithm of the smallest one that is not less than its rows.
  static constexpr int64_t kRowBuckets[] = {1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192};

  // `workspace` [kWorkspaceBytes] is the caller's. `cache_path`: file that keeps searched algorithms, or empty.
  static absl::StatusOr<std::unique_ptr<Products>> Create(void* workspace, const std::string& cache_path);
  virtual ~Products() = default;

  // Enqueues alpha * product, added to `out` if shape.adds. alpha_device, if not null, points to the factor in device memory and
  // `alpha` is not looked at (fp32 accumulation only).
  virtual absl::Status Run(const ProductShape& shape, const void* a, const void* b, void* out, double alpha,
                           const float* alpha_device, cudaStream_t stream) = 0;

  // Times the algorithms for shape.rows on these operands (out is overwritten) and remembers the best for its bucket, here and in
  // the cache file. Does nothing if the bucket has one already, or if the product is too small for it to matter. Blocks.
  virtual absl::Status Search(const ProductShape& shape, const void* a, const void* b, void* out, cudaStream_t stream) = 0;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_PRODUCTS_H_
