// The memory of a loss in each way of computing it, by the formulas of docs/study/method.md.
#ifndef HEADWATER_CLIENT_CTL_LOSS_MEMORY_H_
#define HEADWATER_CLIENT_CTL_LOSS_MEMORY_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "client/ctl/table.h"
#include "headwater/client/types.h"

namespace headwater::ctl {

// The bytes of one way at its peak. The rest of the model takes as much in every way, and is not counted.
struct LossMemory {
  std::string way;              // "eager", "fused", "headwater_same_gpu" or "headwater_second_gpu"
  int64_t rows_bytes = 0;       // hidden [num_tokens, hidden_size] in bf16, and its gradient where it is there at the peak
  int64_t logits_bytes = 0;     // arrays [num_tokens, vocab_size], or [chunk rows, vocab_size]
  int64_t weight_bytes = 0;     // the weight and the bias of the model's last layer
  int64_t gradient_bytes = 0;   // their gradients in fp32
  int64_t optimizer_bytes = 0;  // their optimizer's state and fp32 master
  int64_t trainer_bytes = 0;    // all of the above
  int64_t server_bytes = 0;     // the head's memory plan
  int64_t first_gpu_bytes = 0;  // of the trainer, and of a server on the same GPU
  int64_t second_gpu_bytes = 0;
  std::optional<bool> fits{};  // on GPUs of the given size; absent: no size is given
};
void to_json(nlohmann::json& document, const LossMemory& memory);

// The rows of a chunk in Liger's fused loss: the logits of a chunk are about as large as all hidden states.
int64_t FusedChunkRows(int64_t num_tokens, int64_t vocab_size, int64_t hidden_size);

// All ways, for a micro-batch of `num_tokens` in [1, 2^24]. `head`: as a server plans it; in process, the trainer keeps its weight,
// gradient and optimizer state. `tied`: the weight is also the input embedding, whose gradient stays in the trainer.
// `gpu_bytes`: the size of each GPU; absent: unknown.
std::vector<LossMemory> PlanLossMemory(const client::HeadInfo& head, int64_t num_tokens, bool tied,
                                       std::optional<int64_t> gpu_bytes);

// A column for each way. `gpu_bytes`: as PlanLossMemory() got it.
Table LossMemoryTable(const std::vector<LossMemory>& ways, std::optional<int64_t> gpu_bytes);

}  // namespace headwater::ctl

#endif  // HEADWATER_CLIENT_CTL_LOSS_MEMORY_H_
