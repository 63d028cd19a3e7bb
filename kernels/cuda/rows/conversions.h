// Moving rows between types, strides and orders.
#ifndef HEADWATER_KERNELS_CUDA_ROWS_CONVERSIONS_H_
#define HEADWATER_KERNELS_CUDA_ROWS_CONVERSIONS_H_

#include "kernels/cuda/launch_types.h"

namespace headwater::cuda {

// out[i, :] = in[index[i], :] (index null: in[i, :]), converted to out's element (nearest even), columns from in.columns to
// out.stride filled with 0. in.columns <= out.stride; rows = out.rows. `non_finite` [out.rows], or null: set to 1 where a row of
// `in` has a NaN or an infinity, left alone elsewhere. Any element types but kFloat64 as input; `in` may be any alignment of its
// element.
cudaError_t LaunchGatherRows(const ConstMatrix& in, const int32_t* index, const MutableMatrix& out, uint8_t* non_finite,
                             cudaStream_t stream);

// Only the check of LaunchGatherRows: non_finite[i] = 1 where row i of `in` is not finite.
cudaError_t LaunchCheckRows(const ConstMatrix& in, uint8_t* non_finite, cudaStream_t stream);

// out = in, `count` elements, converted; from kFloat32, kBFloat16, kFloat16 to any type, and kFloat32 to any. Nearest even.
cudaError_t LaunchConvert(const void* in, Element in_element, int64_t count, void* out, Element out_element, cudaStream_t stream);

// Fills `count` elements with reproducible values, about normal of standard deviation `scale`: operands for timing products.
cudaError_t LaunchFillNormal(void* out, Element element, int64_t count, uint64_t seed, float scale, cudaStream_t stream);

}  // namespace headwater::cuda

#endif  // HEADWATER_KERNELS_CUDA_ROWS_CONVERSIONS_H_
