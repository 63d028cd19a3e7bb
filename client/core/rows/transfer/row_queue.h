// The two ends of a transfer's rows: those that wait to be sent, and those that have come. Both thread-safe.
#ifndef HEADWATER_CLIENT_CORE_ROWS_TRANSFER_ROW_QUEUE_H_
#define HEADWATER_CLIENT_CORE_ROWS_TRANSFER_ROW_QUEUE_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "client/core/rows/memory/device_memory.h"
#include "headwater/v1/loss_service.pb.h"
#include "proto/headwater/v1/row_chunk_wire.h"

namespace headwater::client::internal {

// Rows of one tensor in the caller's host memory.
struct OutgoingRows {
  v1::ChunkRole role = v1::CHUNK_ROLE_UNSPECIFIED;
  int32_t term_index = 0;
  const unsigned char* data = nullptr;
  int64_t row_count = 0;  // >= 1
  int64_t row_bytes = 0;  // >= 1
  int64_t first_row = 0;  // of the micro-batch
  // The copy that brings them to `data`; null: they are there.
  const DeviceRead* arrival = nullptr;
};

// Hands out chunks to any stream that can send next. The first rows of the micro-batch come first, of every tensor: the server
// starts to compute when it has them.
class RowQueue {
 public:
  explicit RowQueue(std::vector<OutgoingRows> sources) : sources_(std::move(sources)), next_(sources_.size(), 0) {}

  struct Chunk {
    v1::ChunkView header;  // without its data, which lies here
    const unsigned char* data = nullptr;
    bool last = false;  // nothing is left behind it
    const DeviceRead* arrival = nullptr;
    int64_t arrival_bytes = 0;  // that must have arrived before `data` is read

    // Blocks until the rows are there, if they are on their way.
    absl::Status Await() const { return arrival == nullptr ? absl::OkStatus() : arrival->Await(arrival_bytes); }
  };
  // At most `max_bytes`, but a row at least; nothing if all rows have been handed out.
  std::optional<Chunk> Next(int64_t max_bytes);

 private:
  const std::vector<OutgoingRows> sources_;
  std::mutex mutex_;
  std::vector<int64_t> next_;  // row of each source
};

// Which rows of a tensor have come.
class RowCoverage {
 public:
  explicit RowCoverage(int64_t row_count) : row_count_(row_count) {}

  // Takes the rows [start, start + count); false, changing nothing, unless they lie within the tensor and none was taken before.
  bool Take(int64_t start, int64_t count);
  // Rows taken.
  int64_t taken() const;
  bool complete() const { return taken() == row_count_; }

 private:
  const int64_t row_count_;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> ranges_;  // start -> end; neighbours are joined
  int64_t taken_ = 0;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_TRANSFER_ROW_QUEUE_H_
