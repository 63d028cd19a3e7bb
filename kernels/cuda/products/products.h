// Plain matrix products by cuBLASLt, each with the algorithm that was fastest here.
//
// All matrices row-major. fp32 accumulation for 16-bit operands; true fp32 (no TF32) for fp32; fp64 for fp64. Reduction schemes
// whose order is not fixed are excluded. One call at a time on an object, with the device current that was current in Create().
#ifndef HEADWATER_KERNELS_CUDA_PRODUCTS_PRODUCTS_H_
#define HEADWATER_KERNELS_CUDA_PRODUCTS_PRODUCTS_H_

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

// The properties by which an algorithm is chosen. Products with equal shapes run the same algorithm for the life of the object, as
// long as their operands begin at multiples of 16 bytes.
struct ProductShape {
  ProductKind kind = ProductKind::kLogits;
  Element element = Element::kBFloat16;     // of a and b
  Element out_element = Element::kFloat32;  // kFloat32, or kFloat64 with fp64 operands
  int64_t rows = 0;                         // n
  int64_t vocab = 0;                        // v
  int64_t width = 0;                        // h
  int64_t a_stride = 0, b_stride = 0, out_stride = 0;
  bool adds = false;     // out += instead of out =
  bool is_part = false;  // of a head's product: no search for a head of so many columns is meant for it

  friend bool operator==(const ProductShape&, const ProductShape&) = default;
};

class Products {
 public:
  static constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;
  // Row counts that algorithms are searched for. A product takes the algorithm of the smallest one that is not less than its rows,
  // or of the last.
  static constexpr int64_t kRowBuckets[] = {1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192};
  // Products of fewer operations (2 * rows * vocab * width) are not worth a search: about 40 us on a Hopper GPU.
  static constexpr double kMinSearchedFlops = 2e10;

  // `workspace` [kWorkspaceBytes], aligned to 256, is the caller's, and has no other user while the object lives. `cache_path`:
  // file that keeps searched algorithms, or empty. The file is an aid: if it cannot be read or written, algorithms are searched
  // again.
  static absl::StatusOr<std::unique_ptr<Products>> Create(void* workspace, const std::string& cache_path);
  virtual ~Products() = default;

  // Enqueues alpha * product, added to `out` if shape.adds. alpha_device, if not null, points to the factor in device memory and
  // `alpha` is not looked at (fp32 accumulation only). A product over no terms (a sum of length 0) is 0. kEngineFailed.
  virtual absl::Status Run(const ProductShape& shape, const void* a, const void* b, void* out, double alpha,
                           const float* alpha_device, cudaStream_t stream) = 0;

  // Times the algorithms for shape.rows on these operands (out is overwritten). It remembers the best for its bucket, here and in
  // the cache file; an algorithm that the file has already is taken untimed. Does nothing if the bucket has an algorithm already or
  // has been run (a running one is never changed). Nor does it search for a product that is too small to matter. Blocks; about half
  // a second. kEngineFailed.
  virtual absl::Status Search(const ProductShape& shape, const void* a, const void* b, void* out, cudaStream_t stream) = 0;
};

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_PRODUCTS_PRODUCTS_H_
