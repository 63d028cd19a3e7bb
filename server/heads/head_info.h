// HeadInfo: a snapshot of a head.
#ifndef HEADWATER_SERVER_HEADS_HEAD_INFO_H_
#define HEADWATER_SERVER_HEADS_HEAD_INFO_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "headwater/kernels/engine.h"
#include "server/heads/epoch.h"
#include "server/heads/head_name.h"

namespace headwater::heads {

// The values are those of headwater.v1.HeadState.
enum class HeadState : int32_t { kLoading = 1, kReady = 2, kLost = 3, kRestored = 4 };

// A snapshot for GetHead.
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

}  // namespace headwater::heads

#endif  // HEADWATER_SERVER_HEADS_HEAD_INFO_H_
