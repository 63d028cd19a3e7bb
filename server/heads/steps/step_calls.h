// Arguments and results of a head's calls: decisions, the trainer's own gradient and weights, seal, apply, describe.
#ifndef HEADWATER_SERVER_HEADS_STEPS_STEP_CALLS_H_
#define HEADWATER_SERVER_HEADS_STEPS_STEP_CALLS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "server/heads/head_name.h"
#include "server/heads/steps/step_ledger.h"

namespace headwater::heads {

// The values are those of headwater.v1.HeadState.
enum class HeadState : int32_t { kLoading = 1, kReady = 2, kLost = 3, kRestored = 4 };

struct HeadInfo {
  HeadName name;
  HeadSpec spec;
  Epoch epoch;
  std::vector<Epoch> recovers_epochs;  // given to the Take() that made the epoch; empty if another call made it
  HeadState state;
  int64_t weight_version;
  std::optional<int64_t> open_step;  // trainable heads
  int64_t waiting_count = 0;         // contributions that are committed and wait for their turn (deterministic mode)
  std::vector<VocabShard> shards;
  MemoryPlan plan;
  absl::Time create_time;
  std::string weight_checksum;      // XXH3-128 (canonical) of the stored weight when it was set from outside: 16 bytes, or empty
  std::string restored_checkpoint;  // that a RESTORED head came back from
  // MonotonicNow() of the oldest change of a trainable head's weights that its newest checkpoint does not have.
  std::optional<absl::Time> unsaved_since;
  std::string restore_note;  // about the checkpoint that was restored last; empty: nothing to note
};

class Head;

struct StepKey {
  Epoch epoch;
  int64_t step = 0;
};

// One trainable head of a micro-batch that is to be decided.
struct DecisionTarget {
  std::shared_ptr<Head> head;
  StepKey key;
};

// A trainer's own part of the weight's gradient: rows [row_start, row_start + row_count) of it.
struct GradientPart {
  int64_t row_start = 0;
  int64_t row_count = 0;
  const float* data = nullptr;  // [row_count, hidden_size]; the caller's
  double factor = 1;            // finite in fp32
};

// One tensor of the trainer's new weights.
struct ShadowTensor {
  HeadTensor tensor = HeadTensor::kWeight;  // kWeight or kBias
  DataType data_type = DataType::kFloat32;  // the storage type or fp32
  std::shared_ptr<const void> data;         // the whole tensor; kept until the step closes
  int64_t byte_count = 0;
};

struct ReplaceReply {
  bool closed = false;    // the head has all of its new tensors, and the step is REPLACED
  bool replayed = false;  // by an equal call before this one
  HeadInfo head;          // as the call leaves it
};

// Arguments of ApplyOptimizerStep; compared member by member to distinguish a replay from a conflict.
struct ApplyArguments {
  double learning_rate = 0;                                             // finite, >= 0
  double gradient_factor = 1;                                           // finite
  std::optional<double> max_grad_norm;                                  // > 0; absent: no clipping
  double other_grad_norm_squared = 0;                                   // finite, >= 0
  std::optional<double> weight_decay, beta1, beta2, epsilon, momentum;  // overrides
  bool operator==(const ApplyArguments&) const = default;
};

struct ApplyReply {
  int64_t open_step = 0;
  int64_t weight_version = 0;
  double global_grad_norm = 0;
  double gradient_norm_squared = 0;
  double clip_factor = 1;
  StepTotals totals;
  bool replayed = false;
};

struct SavedCheckpoint {
  int64_t step = 0;
  int64_t total_bytes = 0;
};

struct SealReply {
  StepTotals totals;
  GradientStats stats;
  bool replayed = false;
};

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_STEPS_STEP_CALLS_H_
