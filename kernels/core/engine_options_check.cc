#include "kernels/core/engine_options_check.h"

#include <string>

#include "headwater/kernels/communicator.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater {
namespace {

absl::Status OptionError(const std::string& field, const std::string& expected, int64_t actual) {
  return MakeError(ErrorReason::kInvalidField, field + " must be " + expected + ", got " + std::to_string(actual),
                   {{"field", field}, {"expected", expected}, {"actual", std::to_string(actual)}});
}

}  // namespace

absl::Status CheckEngineOptions(const EngineOptions& options) {
  if (options.shard_count < 1 || options.shard_count > kMaxShards) {
    return OptionError("shard_count", "in [1, " + std::to_string(kMaxShards) + "]", options.shard_count);
  }
  if (!options.shard_weights.empty() && options.shard_weights.size() != static_cast<size_t>(options.shard_count)) {
    return OptionError("the number of shard_weights", "shard_count, " + std::to_string(options.shard_count),
                       static_cast<int64_t>(options.shard_weights.size()));
  }
  for (const int64_t weight : options.shard_weights) {
    if (weight < 1) return OptionError("shard_weights", ">= 1 each", weight);
  }
  const EngineGroup& group = options.group;
  if (group.world_size < 1) return OptionError("group.world_size", ">= 1", group.world_size);
  if (group.rank < 0 || group.rank >= group.world_size) {
    return OptionError("group.rank", "in [0, " + std::to_string(group.world_size) + ")", group.rank);
  }
  if (group.world_size > 1) {
    if (options.shard_count != group.world_size) {
      return OptionError("shard_count", "the group's world size, " + std::to_string(group.world_size), options.shard_count);
    }
    if (group.communicator == nullptr) return OptionError("the group's communicators", "one", 0);
    if (group.communicator->rank() != group.rank || group.communicator->world_size() != group.world_size) {
      return OptionError("group.communicator", "of rank " + std::to_string(group.rank), group.communicator->rank());
    }
  }
  if (options.memory_budget_bytes < 0) return OptionError("memory_budget_bytes", ">= 0", options.memory_budget_bytes);
  if (options.workspace_bytes < 0) return OptionError("workspace_bytes", ">= 0", options.workspace_bytes);
  if (options.token_chunk_rows < 0 || options.token_chunk_rows > INT32_MAX) {
    return OptionError("token_chunk_rows", "in [0, 2147483647]", options.token_chunk_rows);
  }
  if (options.thread_count < 0 || options.thread_count > kMaxThreads) {
    return OptionError("thread_count", "in [0, " + std::to_string(kMaxThreads) + "]", options.thread_count);
  }
  return absl::OkStatus();
}

absl::Status CheckHeadSpec(const HeadSpec& spec, const EngineOptions& options, bool has_int8) {
  HEADWATER_RETURN_IF_ERROR(ValidateHeadSpec(spec));
  if (spec.int8_teacher && !has_int8) {
    return MakeError(
        ErrorReason::kFeatureNotBuilt,
        "int8_teacher must be false: int8 products are built for the CUDA engine on GPUs of compute capability 9.0 alone",
        {{"field", "int8_teacher"}, {"feature", "int8_teacher"}});
  }
  if (spec.parallelism != Parallelism::kRows || options.group.world_size == 1 || !options.deterministic) return absl::OkStatus();
  return MakeError(ErrorReason::kInvalidCombination,
                   "parallelism must be vocabulary in deterministic mode: which micro-batches a rank adds up, and so the "
                   "gradient's last bits, depends on when they come",
                   {{"field", "parallelism"}, {"expected", "vocabulary"}, {"actual", "rows"}});
}

}  // namespace headwater
