// Test data of real size, made on the GPU, and the errors of gradients there, in fp64.
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
