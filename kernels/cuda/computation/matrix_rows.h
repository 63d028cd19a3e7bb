// Places in matrices whose element type is known only at run time.
#ifndef HEADWATER_KERNELS_CUDA_COMPUTATION_MATRIX_ROWS_H_
#define HEADWATER_KERNELS_CUDA_COMPUTATION_MATRIX_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/launch_types.h"

namespace headwater::cuda {

// `data` moved on by `elements`.
inline const void* Advance(const void* data, Element element, int64_t elements) {
  return static_cast<const char*>(data) + elements * BytesOf(element);
}
inline void* Advance(void* data, Element element, int64_t elements) {
  return static_cast<char*>(data) + elements * BytesOf(element);
}

inline ConstMatrix Rows(ConstMatrix matrix, int64_t first, int64_t count) {
  matrix.data = Advance(matrix.data, matrix.element, first * matrix.stride);
  matrix.rows = count;
  return matrix;
}

// Makes the elements between a row's columns and the next row 0.
inline cudaError_t ClearPadding(const MutableMatrix& matrix, cudaStream_t stream) {
  if (matrix.columns == matrix.stride) return cudaSuccess;
  const int64_t bytes = BytesOf(matrix.element);
  return cudaMemset2DAsync(Advance(matrix.data, matrix.element, matrix.columns), static_cast<size_t>(matrix.stride * bytes), 0,
                           static_cast<size_t>((matrix.stride - matrix.columns) * bytes), static_cast<size_t>(matrix.rows), stream);
}

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_COMPUTATION_MATRIX_ROWS_H_
