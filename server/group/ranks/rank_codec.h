// Messages between a leader and its workers (proto/headwater/v1/group_service.proto), encoded and decoded.
#ifndef HEADWATER_SERVER_GROUP_RANKS_RANK_CODEC_H_
#define HEADWATER_SERVER_GROUP_RANKS_RANK_CODEC_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/planned_bytes.h"
#include "headwater/v1/group_service.pb.h"
#include "server/group/call_memory.h"

namespace headwater::group {

// The heads of a term by id; 0: none.
struct TermHeads {
  uint64_t head = 0;
  uint64_t teacher = 0;
};

// A micro-batch in the form in which it is sent.
struct RankCall {
  MicroBatch micro_batch;             // heads of its terms are ignored
  absl::Span<const TermHeads> heads;  // one for each term
  uint64_t contribution = 0;          // the id of the staged contribution
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

// All of a call but its rows.
void EncodeCompute(const RankCall& call, v1::RankCompute* out);

// kEngineFailed: `what` of a message is invalid from a leader.
absl::Status Malformed(const char* what);

// A received call, with memory for all its tensors. Rows arrive later.
class ReceivedCall {
 public:
  // kEngineFailed for a message that no leader sends, or without host memory for the call.
  static absl::StatusOr<std::unique_ptr<ReceivedCall>> Decode(v1::RankCompute received);

  // `flow` provides the rows; null: all rows must have come.
  RankCall ToCall(RowFlow* flow);
  absl::Status AddRows(int32_t stream, const std::string& data);
  // Reads another call's rows instead of its own. Both calls have the same number of rows, and none may come for this one; `other`
  // must outlive the computation.
  absl::Status ShareRowsOf(const ReceivedCall& other);
  // Rows that have come in all streams.
  int64_t rows_here() const;
  int64_t row_count() const { return micro_batch_.hidden.row_count; }
  // RankCompute.whole.
  bool is_whole() const { return is_whole_; }
  bool has_flow() const { return has_flow_; }
  uint64_t contribution() const { return contribution_; }

 private:
  struct Stream {
    PlannedBytes memory;
    int64_t row_start = 0;  // in the micro-batch
    int64_t row_count = 0;
    int64_t row_bytes = 0;
    int64_t bytes_here = 0;
  };
  ReceivedCall() = default;
  const void* AddStream(int64_t row_start, int64_t row_count, int64_t row_bytes);

  v1::RankCompute message_;  // holds the terms' tensors
  MicroBatch micro_batch_;
  std::vector<LossTerm> terms_;
  std::vector<TermHeads> heads_;
  std::vector<Stream> streams_;  // by number; empty where a term has no rows
  // Memory for a requested output.
  template <typename T>
  T* AddOutput(int64_t count);

  CallMemory outputs_;
  absl::Status streams_status_;
  uint64_t contribution_ = 0;
  bool is_whole_ = false;
  bool has_flow_ = false;
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_RANK_CODEC_H_
