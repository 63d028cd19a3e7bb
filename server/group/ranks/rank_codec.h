// Messages between a leader and its workers (proto/headwater/v1/group_service.proto), encoded and decoded.
#ifndef HEADWATER_SERVER_GROUP_RANKS_RANK_CODEC_H_
#define HEADWATER_SERVER_GROUP_RANKS_RANK_CODEC_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/planned_bytes.h"
#include "headwater/v1/group_service.pb.h"
#include "proto/headwater/v1/spec_codec.h"

namespace headwater {

HEADWATER_FIELDS(v1::RankWelcome, EngineOptions, workspace_bytes, token_chunk_rows, thread_count, deterministic, timed_search)
HEADWATER_FIELDS(v1::RankWelcome, EngineGroup, rank, world_size, device_group_id)
HEADWATER_FIELDS(v1::RankCompute, MicroBatch, backward, grad_hidden_scale, grad_weight, refuse_non_finite)

}  // namespace headwater

namespace headwater::group {

// Calls visit(pointer) for each per-token output of a term, in the order of headwater.v1.TokenOutput.
template <typename Term, typename Visit>
void EachOutput(Term& term, const Visit& visit) {
#define HEADWATER_VISIT_OUTPUT(name) visit(term.name);
  HEADWATER_EACH(HEADWATER_VISIT_OUTPUT, HEADWATER_TOKEN_OUTPUTS)
#undef HEADWATER_VISIT_OUTPUT
}

// Memory blocks of one call, sized by its rows. One thread at a time.
class CallMemory {
 public:
  // `count` values that live as long as this; null without host memory, which status() reports from then on.
  template <typename T>
  T* Take(int64_t count) {
    absl::StatusOr<PlannedBytes> block = AllocatePlanned(count * static_cast<int64_t>(sizeof(T)));
    if (block.ok()) return reinterpret_cast<T*>(blocks_.emplace_back(*std::move(block)).get());
    // The other ranks compute already, and would wait for this one.
    status_ = MakeError(ErrorReason::kEngineFailed, std::string(block.status().message()));
    return nullptr;
  }
  const absl::Status& status() const { return status_; }

 private:
  std::vector<PlannedBytes> blocks_;
  absl::Status status_;
};

// Bytes of tensors in one message.
inline constexpr int64_t kDataBytes = int64_t{1} << 19;

void EncodeStatus(const absl::Status& status, v1::RankStatus* out);
absl::Status DecodeStatus(const v1::RankStatus& status);

void EncodeLossSums(const LossSums& sums, v1::LossTermResult* out);
LossSums DecodeLossSums(const v1::LossTermResult& result);

// A tensor that a rank which computes alone fills in.
struct Output {
  char* data = nullptr;
  int64_t bytes = 0;
};
// The outputs that a call requests, grad_hidden first, in the order of sending.
std::vector<Output> OutputsOf(const MicroBatch& micro_batch);

// All of a call but its rows. `id_of`: a head's id; 0 for null.
void EncodeCompute(const MicroBatch& micro_batch, absl::FunctionRef<uint64_t(const EngineHead*)> id_of, v1::RankCompute* out);

// kEngineFailed: `what` of a message is invalid from a leader.
absl::Status Malformed(const char* what);

// A received call, with memory for all its tensors. Rows arrive later.
class ReceivedCall {
 public:
  // kEngineFailed for a message that no leader sends, or without host memory for the call. `head_of`: the head with an id, or null.
  static absl::StatusOr<std::unique_ptr<ReceivedCall>> Decode(v1::RankCompute received,
                                                              absl::FunctionRef<EngineHead*(uint64_t)> head_of);

  // Valid as long as this.
  const MicroBatch& micro_batch() const { return micro_batch_; }
  absl::Status AddRows(int32_t stream, const std::string& data);
  // Reads another call's rows instead of its own. Both calls have the same number of rows, and none may come for this one; `other`
  // must outlive the computation.
  absl::Status ShareRowsOf(const ReceivedCall& other);
  // Rows that have come in all streams.
  int64_t rows_here() const;

 private:
  struct Stream {
    char* data = nullptr;
    int64_t row_start = 0;  // in the micro-batch
    int64_t row_count = 0;
    int64_t row_bytes = 0;
    int64_t bytes_here = 0;
    int64_t bytes() const { return row_count * row_bytes; }
  };
  ReceivedCall() = default;
  const void* AddStream(int64_t row_start, int64_t row_count, int64_t row_bytes);

  v1::RankCompute message_;  // holds the terms' tensors
  MicroBatch micro_batch_;
  std::vector<LossTerm> terms_;
  std::vector<Stream> streams_;  // by number; empty where a term has no rows
  CallMemory rows_;
  CallMemory outputs_;
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_RANK_CODEC_H_
