// The floor of a micro-batch's time on a GPU: the bare matrix products of forward and backward, on the engine's own operand values.
// Each runs by the algorithm of cuBLASLt that is fastest here; grad_weight is added in fp32.
#ifndef HEADWATER_TESTS_BENCH_COMMON_CUDA_FLOOR_H_
#define HEADWATER_TESTS_BENCH_COMMON_CUDA_FLOOR_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/kernels/cuda/cuda_support.h"
#include "tests/kernels/support/blas_product.h"

namespace headwater::bench {

// bf16 in device memory; the caller's, and they must outlive the floor.
struct FloorInputs {
  int64_t rows = 0;
  int64_t width = 0;
  int64_t vocab = 0;
  const testing::Buffer* hidden = nullptr;          // [rows, width]
  const testing::Buffer* weight = nullptr;          // [vocab, width]
  const testing::Buffer* targets = nullptr;         // int32 [rows], all valid; cross entropy
  int64_t teacher_width = 0;                        // divergence; 0: cross entropy
  const testing::Buffer* teacher_hidden = nullptr;  // [rows, teacher_width]
  const testing::Buffer* teacher_weight = nullptr;  // [vocab, teacher_width]
};

class Floor {
 public:
  // Allocates the products' results, makes the operand of the gradient products, and searches the algorithms. The operand is
  // exponentials with the factors of the rows in hidden for the cross entropy, and the derivative of the logits for the divergence.
  Floor(testing::BlasContext& context, const FloorInputs& inputs);

  // Three products, or four with a teacher's.
  void Enqueue(cudaStream_t stream) const;
  double flop() const;

 private:
  testing::Buffer logits_, operand_, scaled_hidden_, grad_hidden_, grad_weight_;
  std::vector<std::unique_ptr<testing::BlasProduct>> products_;
};

}  // namespace headwater::bench

#endif  // HEADWATER_TESTS_BENCH_COMMON_CUDA_FLOOR_H_
