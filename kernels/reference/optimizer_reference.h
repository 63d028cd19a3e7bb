// AdamW and SGD in fp64, element by element, as PyTorch documents them.
#ifndef HEADWATER_KERNELS_REFERENCE_OPTIMIZER_REFERENCE_H_
#define HEADWATER_KERNELS_REFERENCE_OPTIMIZER_REFERENCE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "headwater/kernels/types.h"

namespace headwater::reference {

// A tensor under an optimizer; moments start at 0.
struct OptimizerState {
  explicit OptimizerState(std::vector<double> initial) : value(std::move(initial)), moment1(value.size()), moment2(value.size()) {}
  std::vector<double> value;
  std::vector<double> moment1;  // AdamW's first moment, SGD's momentum buffer
  std::vector<double> moment2;  // AdamW's second moment
};

// One update; `update_count` is 1 for the first. Source of the order of operations: the algorithm boxes of torch.optim.AdamW and
// torch.optim.SGD.
void AdamWUpdate(const AdamWSpec& spec, double learning_rate, int64_t update_count, absl::Span<const double> gradient,
                 OptimizerState* state);
void SgdUpdate(const SgdSpec& spec, double learning_rate, int64_t update_count, absl::Span<const double> gradient,
               OptimizerState* state);

}  // namespace headwater::reference

#endif  // HEADWATER_KERNELS_REFERENCE_OPTIMIZER_REFERENCE_H_
