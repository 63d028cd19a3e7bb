// The matrix products of a loss head, bare, by cuBLASLt. They are the comparison for the engine's time, and the parts of the fp64
// reference on the GPU. Shares no code with the engine's own use of the library.
#ifndef HEADWATER_TESTS_KERNELS_SUPPORT_BLAS_PRODUCT_H_
#define HEADWATER_TESTS_KERNELS_SUPPORT_BLAS_PRODUCT_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "tests/kernels/cuda/cuda_support.h"

namespace headwater::testing {

// All matrices row-major without padding.
enum class BlasKind {
  kLogits,      // out [rows, vocab] = a [rows, width] . b [vocab, width]^T
  kGradHidden,  // out [rows, width] = a [rows, vocab] . b [vocab, width]
  kGradWeight,  // out [vocab, width] = a [rows, vocab]^T . b [rows, width]
};

// Types of the operands / of the result. 16-bit operands accumulate in fp32, fp64 ones in fp64.
enum class BlasTypes { kBFloat16ToBFloat16, kBFloat16ToFloat32, kFloat64 };

struct BlasShape {
  BlasKind kind = BlasKind::kLogits;
  BlasTypes types = BlasTypes::kBFloat16ToBFloat16;
  int64_t rows = 0;
  int64_t width = 0;
  int64_t vocab = 0;
  bool adds = false;  // out += instead of out =
};

// The library, its workspace, and the algorithms found so far. One thread.
class BlasContext {
 public:
  static constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;

  BlasContext();
  BlasContext(const BlasContext&) = delete;
  BlasContext& operator=(const BlasContext&) = delete;
  ~BlasContext();

  cublasLtHandle_t handle() const { return handle_; }
  void* workspace() const { return workspace_.as<void>(); }
  std::map<std::array<int64_t, 6>, cublasLtMatmulAlgo_t>& algorithms() { return algorithms_; }

 private:
  cublasLtHandle_t handle_ = nullptr;
  Buffer workspace_;
  std::map<std::array<int64_t, 6>, cublasLtMatmulAlgo_t> algorithms_;  // by shape
};

// One product on fixed operands. Throws std::runtime_error if the library refuses.
class BlasProduct {
 public:
  // Device memory of the caller's, which must outlive the object, like the context. Takes the library's first proposal.
  BlasProduct(BlasContext& context, const BlasShape& shape, const void* a, const void* b, void* out);
  BlasProduct(const BlasProduct&) = delete;
  BlasProduct& operator=(const BlasProduct&) = delete;
  ~BlasProduct();

  // Times all proposals of the library on the operands and keeps the fastest, for all products of this shape from now on. `out` is
  // overwritten. Takes about a second; nothing if the shape has been searched.
  void Search(cudaStream_t stream);
  void Enqueue(cudaStream_t stream) const;

 private:
  std::array<int64_t, 6> Key() const;
  // Mean of `repeats` calls in a row.
  double Milliseconds(cudaStream_t stream, int repeats) const;

  BlasContext& context_;
  BlasShape shape_;
  const void* left_;  // the library's operands: it is column-major
  const void* right_;
  void* out_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t left_layout_ = nullptr, right_layout_ = nullptr, out_layout_ = nullptr;
  std::array<cublasLtMatmulHeuristicResult_t, 32> proposals_{};
  int proposal_count_ = 0;
  cublasLtMatmulAlgo_t algorithm_{};
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_SUPPORT_BLAS_PRODUCT_H_
