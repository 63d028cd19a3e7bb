// Logits of a frozen teacher from int8 operands, on Hopper.
//
// A row of hidden states or weights is padded with zeros to k = Int8Width(width) elements and rotated, x' = H D x. D has signs by
// a hash of the column. H is Sylvester's Hadamard matrix over the square root of its size, in blocks of the largest power of two
// that divides k. The rotation is orthogonal, so x' . w' = x . w, and it spreads a few large columns over their block ("QuaRot",
// arXiv:2404.00456). Then q = round(x' / s), s = max |x'| / 127 of the row, and the logit is s_x s_w (q_x . q_w): the sum is exact
// in int32, so it is the same however rows and columns are cut.
//
// The error of a logit is that of rounding: with errors uniform in a step, its expected square is (s_x^2 |w|^2 + s_w^2 |x|^2) / 12.
// A row with a NaN or an infinity has the scale NaN, and so have all its logits.
#ifndef HEADWATER_KERNELS_CUDA_PRODUCTS_INT8_PRODUCT_H_
#define HEADWATER_KERNELS_CUDA_PRODUCTS_INT8_PRODUCT_H_

#include "kernels/cuda/launch_types.h"

namespace headwater::cuda {

constexpr int64_t Int8Width(int64_t width) { return RoundUp(width, 128); }

// Rows in int8, with what their scales and squared norms are. All device memory; `data` aligned to 16 bytes, `scales` to 8.
struct Int8Rows {
  int8_t* data = nullptr;   // [rows, Int8Width(width)]
  float* scales = nullptr;  // [rows], one more if their number is odd
  float* norms = nullptr;   // [rows], squared
  int64_t rows = 0;
  int64_t width = 0;
};

// Bytes of that many rows, and their layout in such memory, which begins at a multiple of 256 bytes.
int64_t Int8Bytes(int64_t rows, int64_t width);
Int8Rows LayOutInt8(void* memory, int64_t rows, int64_t width);

// `rows` [out.rows, out.width <= kMaxInt8HiddenSize] of any type but fp64.
cudaError_t LaunchQuantizeRows(const ConstMatrix& rows, const Int8Rows& out, cudaStream_t stream);

// out [hidden.rows, stride] fp32, stride even; columns from weight.rows on are left as they are.
cudaError_t LaunchInt8Product(const Int8Rows& hidden, const Int8Rows& weight, float* out, int64_t stride, cudaStream_t stream);

// means[0] = mean squared norm of the rows, means[1] = mean squared scale; fp64.
cudaError_t LaunchInt8Means(const Int8Rows& weight, double* means, cudaStream_t stream);
// errors[i] = factor * the expected squared error of a logit of row i, the mean over the columns of those means.
cudaError_t LaunchInt8Errors(const Int8Rows& hidden, const double* means, double factor, float* errors, cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_PRODUCTS_INT8_PRODUCT_H_
