// An engine's results for one row of a term. Plain, for CUDA kernels too; the host adds the reports up in row order.
#ifndef HEADWATER_KERNELS_CORE_LOSS_ROW_REPORT_H_
#define HEADWATER_KERNELS_CORE_LOSS_ROW_REPORT_H_

#include <cstdint>

namespace headwater {

struct RowReport {
  double soft = 0;  // the divergence; not yet multiplied by its weight
  double hard = 0;  // cross entropy without z-loss; not yet multiplied by hard_weight
  double z_loss = 0;
  double lse = 0;
  double target_log_probability = 0;
  double entropy = 0;
  double mean_logits = 0;
  double log_sum_sq_probs = 0;
  double gradient_bound = 0;  // of |d(objective)/d(logit)|, with all factors
  int32_t argmax = -1;
  int32_t reserved = 0;
};

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_LOSS_ROW_REPORT_H_
