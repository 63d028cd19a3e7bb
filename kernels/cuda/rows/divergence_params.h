// The constants of a term for the divergence's row kernels of sm_90a, out of the views of both sides' logits.
#ifndef HEADWATER_KERNELS_CUDA_ROWS_DIVERGENCE_PARAMS_H_
#define HEADWATER_KERNELS_CUDA_ROWS_DIVERGENCE_PARAMS_H_

#include "kernels/cuda/device/divergence_terms.cuh"
#include "kernels/cuda/rows/row_passes.h"

namespace headwater::cuda::divergence_row {

Form FormOf(const DivergenceTerm& term);
// Whether products are more than multiplied with a scale.
bool IsTransformed(const LogitsView& logits);
// All but where results go (matrix, reports, row_factor, target_factor, token_weights), the rows' and columns' numbers and the
// kernel's layout.
KernelParams MakeKernelParams(const LogitsView& student, const LogitsView& teacher, const DivergenceTerm& term, double loss_scale);

}  // namespace headwater::cuda::divergence_row

#endif  // HEADWATER_KERNELS_CUDA_ROWS_DIVERGENCE_PARAMS_H_
