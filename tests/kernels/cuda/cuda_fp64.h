// The mathematics once more in fp64 on the GPU, as plainly as possible: for shapes whose reference takes a CPU minutes. And the
// making of test data where it is needed.
//
// All matrices row-major without padding, in device memory; bf16 elements as uint16_t. Work goes to the default stream; each
// function returns the cudaError_t of its launch. C++17, for nvcc.
#ifndef HEADWATER_TESTS_KERNELS_CUDA_CUDA_FP64_H_
#define HEADWATER_TESTS_KERNELS_CUDA_CUDA_FP64_H_

#include <cstdint>

namespace headwater::testing {

// out[i] = bf16(in[i] + deviation * normal value number i of stream `seed`); `in` may be null: zeros.
int FillNormal(uint16_t* out, int64_t count, uint64_t seed, double deviation, const uint16_t* in = nullptr);
// weight[columns[i]] = bf16(logits[i] * hidden[i] / |hidden[i]|^2): row i's logit of column columns[i] becomes logits[i], up to
// rounding. `columns` must differ from each other.
int SetLogits(const uint16_t* hidden, const int32_t* columns, const double* logits, int64_t rows, int64_t width, uint16_t* weight);
// out[i] = in[i].
int Widen(const uint16_t* in, double* out, int64_t count);

// Per row, [rows] each.
struct RowValues {
  double* loss = nullptr;  // nats
  double* lse = nullptr;   // cross entropy only, like the next three
  double* target_log_probability = nullptr;
  double* entropy = nullptr;
  int32_t* argmax = nullptr;        // the smallest column among equals
  double* largest_other = nullptr;  // largest |logit|; of the columns but the target's for the cross entropy
};

// Cross entropy of each row, and in place of the logits z [rows, vocab] the derivative of loss_scale * sum of losses by z. The
// logits stay if loss_scale is 0. targets [rows], all valid.
int CrossEntropyRows(double* logits, int64_t rows, int64_t vocab, const int32_t* targets, double loss_scale, const RowValues& out);

// The generalized Jensen-Shannon divergence of each row (docs/math.md), beta in [0, 1], temperature 1. The derivative by the
// student's logits goes to `gradient` [rows, vocab], which may be `student`.
int DivergenceRows(const double* student, const double* teacher, double* gradient, int64_t rows, int64_t vocab, double beta,
                   double loss_scale, const RowValues& out);

// Adds the squares of actual - expected, and of expected, by row and by column. The sums must begin at 0.
struct DifferenceSums {
  double* row_difference = nullptr;  // [rows]
  double* row_reference = nullptr;
  double* column_difference = nullptr;  // [columns]
  double* column_reference = nullptr;
};
int AddDifference(const uint16_t* actual, const double* expected, int64_t rows, int64_t columns, const DifferenceSums& sums);
int AddDifference(const float* actual, const double* expected, int64_t rows, int64_t columns, const DifferenceSums& sums);

// The operands of the engine's gradient products, for the floor of its time. Cross entropy: out = bf16(exp(z - z_y)), 0 at the
// target y, and scaled_hidden = bf16(scale * hidden / (1 + sum of the row)).
int ExponentialOperand(const uint16_t* logits, int64_t rows, int64_t vocab, const int32_t* targets, uint16_t* out,
                       const uint16_t* hidden, int64_t width, double scale, uint16_t* scaled_hidden);
// Divergence, beta 1/2: out = bf16(q (r - D) / 2), the derivative by the student's logits.
int DivergenceOperand(const uint16_t* student, const uint16_t* teacher, int64_t rows, int64_t vocab, uint16_t* out);

}  // namespace headwater::testing

#endif  // HEADWATER_TESTS_KERNELS_CUDA_CUDA_FP64_H_
