// The reference of one loss term at shapes at which loss_reference.h takes minutes. The products are in fp64 on the GPU, and the
// rows' losses by row_losses.h on all of the host's cores. It has cross entropy without options, and the divergence at
// temperature 1.
#ifndef HEADWATER_TESTS_KERNELS_CUDA_CUDA_REFERENCE_H_
#define HEADWATER_TESTS_KERNELS_CUDA_CUDA_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "tests/kernels/cuda/cuda_support.h"
#include "tests/kernels/support/blas_product.h"
#include "tests/kernels/support/error_measure.h"

namespace headwater::testing {

// [rows] each; the divergence has no more than loss and largest_logit.
struct RowResults {
  std::vector<double> loss, lse, entropy;
  std::vector<int32_t> argmax;
  // Absolute. The target's is left out for the cross entropy, the teacher's is in for the divergence.
  std::vector<double> largest_logit;
};

// One head over one set of rows, both in bf16. Throws std::runtime_error on errors of CUDA.
class DeviceReference {
 public:
  // hidden [rows, width] and weight [vocab, width] are read here only. The context must outlive the object.
  DeviceReference(BlasContext& context, int64_t rows, int64_t width, int64_t vocab, const Buffer& hidden, const Buffer& weight);

  // Loss and gradients of loss_scale * sum of the rows' cross entropies. targets [rows], all valid.
  RowResults CrossEntropy(const std::vector<int32_t>& targets, double loss_scale);
  // The results of the divergence from the teacher over as many rows and columns.
  RowResults Divergence(const DeviceReference& teacher, double beta, double loss_scale);

  // Errors of an engine's gradients, in device memory, against those of the last call.
  TensorErrors GradHiddenErrors(const uint16_t* actual) const;  // bf16 [rows, width]
  TensorErrors GradWeightErrors(const float* actual) const;     // [vocab, width]
  // The logits, [rows, vocab], of one row.
  std::vector<double> ReadLogits(int64_t row) const;

 private:
  // From the gradient of the logits, [rows, vocab].
  void ComputeGradients(const std::vector<double>& gradient);

  BlasContext& context_;
  const int64_t rows_, width_, vocab_;
  Buffer hidden_, weight_, logits_, grad_hidden_, grad_weight_;  // fp64
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_CUDA_CUDA_REFERENCE_H_
