#include "client/ctl/loss_memory.h"

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <variant>

#include "absl/strings/string_view.h"
#include "client/ctl/output.h"

namespace headwater::ctl {
namespace {

constexpr int64_t kBFloat16Bytes = 2;
constexpr int64_t kFloat32Bytes = 4;
// Eager PyTorch's arrays of the logits' shape in backward, in fp32: the log-probabilities, their gradient and that of the logits.
constexpr int64_t kEagerBytesPerLogit = 3 * kFloat32Bytes;
// A fused loss overwrites the logits of a chunk with their gradient.
constexpr int64_t kFusedBytesPerLogit = kBFloat16Bytes;

int64_t BytesOf(const client::MemoryPlan& plan, std::initializer_list<absl::string_view> purposes) {
  int64_t bytes = 0;
  for (const auto& item : plan.items) {
    if (std::find(purposes.begin(), purposes.end(), item.purpose) != purposes.end()) bytes += item.bytes;
  }
  return bytes;
}

int64_t DivideUp(int64_t dividend, int64_t divisor) { return (dividend + divisor - 1) / divisor; }

}  // namespace

void to_json(nlohmann::json& document, const LossMemory& memory) {
  document = {{"way", memory.way},
              {"rows_bytes", memory.rows_bytes},
              {"logits_bytes", memory.logits_bytes},
              {"weight_bytes", memory.weight_bytes},
              {"gradient_bytes", memory.gradient_bytes},
              {"optimizer_bytes", memory.optimizer_bytes},
              {"trainer_bytes", memory.trainer_bytes},
              {"server_bytes", memory.server_bytes},
              {"first_gpu_bytes", memory.first_gpu_bytes},
              {"second_gpu_bytes", memory.second_gpu_bytes},
              {"fits", memory.fits}};
}

int64_t FusedChunkRows(int64_t num_tokens, int64_t vocab_size, int64_t hidden_size) {
  const int64_t needed = DivideUp(num_tokens, DivideUp(vocab_size, hidden_size));
  int64_t rows = 1;
  while (rows < needed) rows *= 2;
  return std::min(rows, num_tokens);
}

std::vector<LossMemory> PlanLossMemory(const client::HeadInfo& head, int64_t num_tokens, bool tied,
                                       std::optional<int64_t> gpu_bytes) {
  const client::HeadSpec& spec = head.spec;
  const int64_t hidden_bytes = kBFloat16Bytes * num_tokens * spec.hidden_size;
  const int64_t chunk_rows = FusedChunkRows(num_tokens, spec.vocab_size, spec.hidden_size);

  LossMemory eager{.way = "eager"};
  eager.rows_bytes = hidden_bytes;  // grad_hidden follows the peak
  eager.logits_bytes = kEagerBytesPerLogit * num_tokens * spec.vocab_size;
  eager.weight_bytes = BytesOf(head.memory_plan, {"weight", "bias"});
  eager.gradient_bytes = BytesOf(head.memory_plan, {"grad_weight", "grad_bias"});
  eager.optimizer_bytes = BytesOf(head.memory_plan, {"master_weight", "optimizer_state"});

  LossMemory fused = eager;
  fused.way = "fused";
  fused.rows_bytes = 2 * hidden_bytes;
  fused.logits_bytes = kFusedBytesPerLogit * chunk_rows * spec.vocab_size;

  LossMemory same = fused;
  same.way = "headwater_same_gpu";
  same.logits_bytes = 0;
  // The trainer's own optimizer needs the gradient, and so does the embedding of a tied weight.
  if (!tied && !std::holds_alternative<std::monostate>(spec.optimizer)) same.gradient_bytes = 0;
  same.optimizer_bytes = 0;
  same.server_bytes = head.memory_plan.total_bytes;

  LossMemory second = same;
  second.way = "headwater_second_gpu";

  std::vector<LossMemory> ways = {eager, fused, same, second};
  for (LossMemory& way : ways) {
    way.trainer_bytes = way.rows_bytes + way.logits_bytes + way.weight_bytes + way.gradient_bytes + way.optimizer_bytes;
    const bool is_second = way.way == second.way;
    way.first_gpu_bytes = way.trainer_bytes + (is_second ? 0 : way.server_bytes);
    way.second_gpu_bytes = is_second ? way.server_bytes : 0;
    if (gpu_bytes.has_value()) way.fits = std::max(way.first_gpu_bytes, way.second_gpu_bytes) <= *gpu_bytes;
  }
  return ways;
}

Table LossMemoryTable(const std::vector<LossMemory>& ways, std::optional<int64_t> gpu_bytes) {
  Table table({"", ">EAGER PYTORCH", ">FUSED, IN CHUNKS", ">HEADWATER, SAME GPU", ">HEADWATER, SECOND GPU"});
  const auto add = [&](const std::string& title, const auto& cell) {
    std::vector<std::string> cells = {title};
    for (const LossMemory& way : ways) cells.push_back(cell(way));
    table.AddRow(std::move(cells));
  };
  for (const auto& [title, bytes] :
       {std::pair("rows and their gradient", &LossMemory::rows_bytes), std::pair("logits", &LossMemory::logits_bytes),
        std::pair("weight", &LossMemory::weight_bytes), std::pair("gradient of the weight", &LossMemory::gradient_bytes),
        std::pair("optimizer's state", &LossMemory::optimizer_bytes), std::pair("trainer", &LossMemory::trainer_bytes),
        std::pair("server", &LossMemory::server_bytes), std::pair("first GPU", &LossMemory::first_gpu_bytes),
        std::pair("second GPU", &LossMemory::second_gpu_bytes)}) {
    add(title, [bytes = bytes](const LossMemory& way) { return way.*bytes == 0 ? "-" : FormatBytes(way.*bytes); });
  }
  if (gpu_bytes.has_value()) {
    add("each GPU has " + FormatBytes(*gpu_bytes), [](const LossMemory& way) { return *way.fits ? "fits" : "does not fit"; });
  }
  return table;
}

}  // namespace headwater::ctl
