// The fp64 reference of one loss term on the GPU, for shapes at which loss_reference.h takes minutes. It has cross entropy without
// options, and the divergence at temperature 1.
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
  std::vector<double> loss;
  std::vector<double> lse, target_log_probability, entropy;
  std::vector<int32_t> argmax;
  std::vector<double>
      largest_logit;  // absolute; the target's is left out for the cross entropy, the teacher's is in for the divergence

  double MeanLoss() const;
  double MeanLargestLogit() const;
};

// One head over one set of rows, both in bf16. Throws std::runtime_error on errors of CUDA.
class DeviceReference {
 public:
  // hidden [rows, width] and weight [vocab, width] in device memory, read here only. The context must outlive the object.
  DeviceReference(BlasContext& context, int64_t rows, int64_t width, int64_t vocab, const uint16_t* hidden, const uint16_t* weight);

  // Loss and gradients of loss_scale * sum of the rows' cross entropies. targets [rows] in device memory, all valid.
  RowResults CrossEntropy(const int32_t* targets, double loss_scale);
  // The results of the divergence from the teacher over as many rows and columns.
  RowResults Divergence(const DeviceReference& teacher, double beta, double loss_scale);

  // Errors of an engine's gradients, in device memory, against those of the last call.
  TensorErrors GradHiddenErrors(const uint16_t* actual) const;  // bf16 [rows, width]
  TensorErrors GradWeightErrors(const float* actual) const;     // [vocab, width]
  // The logits, [rows, vocab], of one row.
  std::vector<double> ReadLogits(int64_t row) const;

 private:
  void ComputeGradients();

  BlasContext& context_;
  const int64_t rows_, width_, vocab_;
  Buffer hidden_, weight_, logits_;   // fp64
  Buffer gradient_;                   // fp64 [rows, vocab], of the logits
  Buffer grad_hidden_, grad_weight_;  // fp64
  Buffer row_values_;                 // fp64 [5, rows]
  Buffer argmax_;                     // int32 [rows]
};

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_CUDA_CUDA_REFERENCE_H_
