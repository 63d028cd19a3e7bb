// Rows summed up for a micro-batch's digest (digest.h) where they lie on the device.
#ifndef HEADWATER_KERNELS_CUDA_ROWS_ROW_DIGEST_H_
#define HEADWATER_KERNELS_CUDA_ROWS_ROW_DIGEST_H_

#include "kernels/cuda/launch_types.h"

namespace headwater::cuda {

// (sum[1], sum[0]) += the sum mod 2^128 over `row_count` rows of `row_bytes` bytes (any alignment) of stream `stream_index`. Row i
// is number numbers[i] of the stream; without `numbers` (null), number first_number + i. `sum` [2], aligned to 8. Exact in any
// order.
cudaError_t LaunchDigestRows(const void* rows, int64_t row_count, int64_t row_bytes, int32_t stream_index, const int32_t* numbers,
                             int64_t first_number, uint64_t* sum, cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_ROWS_ROW_DIGEST_H_
