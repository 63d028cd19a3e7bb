// RowSource: one tensor of rows of a micro-batch, by where its rows come from.
//
// Admission calls bytes_to_reserve(), Claim() and Place(), in this order. The run then calls Open(), Pull() while rows come, and,
// if the micro-batch is held, StartCopy() and UseCopy(). One thread.
#ifndef HEADWATER_SERVER_SERVICE_LOSS_ROW_SOURCE_H_
#define HEADWATER_SERVER_SERVICE_LOSS_ROW_SOURCE_H_

#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/observability/metrics.h"
#include "server/service/loss/transfer.h"
#include "server/service/server_core.h"
#include "server/transport/pinned_pool.h"
#include "server/transport/region_registry.h"
#include "server/transport/teacher_join.h"

namespace headwater::service {

// Copies of rows that the senders' threads make.
using RowCopies = std::vector<std::shared_future<absl::Status>>;

// How rows of a region travel, for metrics; kGrpc without one.
observability::Transport PathOf(const transport::RegionUse* region);

class RowSource {
 public:
  // The place of the rows in the micro-batch, and their names.
  struct Rows {
    int32_t digest_stream = 0;  // 0: hidden states; 1 + term: its teacher's
    std::string name;           // in messages
    int64_t row_start = 0;      // in the micro-batch
    int64_t row_count = 0;
    int64_t row_bytes = 0;
    RowsView* view = nullptr;  // the submission's: where the head finds the rows
    std::string field;         // of the header, that says where they are; empty: they come as chunks
  };
  // The call's own streams bring the rows; derived classes bring them otherwise.
  explicit RowSource(Rows rows) : rows_(std::move(rows)) {}
  virtual ~RowSource() = default;
  RowSource(const RowSource&) = delete;
  RowSource& operator=(const RowSource&) = delete;

  const Rows& rows() const { return rows_; }
  int64_t bytes() const { return rows_.row_count * rows_.row_bytes; }

  // ---- admission
  // Memory of the server that the rows take. `keeps`: with a copy of what lies in the client's memory.
  virtual int64_t bytes_to_reserve([[maybe_unused]] bool keeps) const { return bytes(); }
  // Claims rows that others send. Null: no others send them. kJoinIncomplete.
  virtual absl::StatusOr<std::shared_ptr<transport::RowClaim>> Claim(transport::TeacherJoin&) { return nullptr; }
  // Gets memory for rows that come, and returns how they do.
  virtual absl::StatusOr<Transfer::Tensor> Place(transport::PinnedPool& pool);

  // ---- run
  // Lets rows that are there from the start be read.
  virtual absl::Status Open(observability::Metrics&) { return absl::OkStatus(); }
  // Delivers what others have brought since the last time, as tensor `index` of the transfer.
  virtual absl::Status Pull(Transfer&, size_t) { return absl::OkStatus(); }
  // The claim on rows that are missing and that only others can bring; else null.
  virtual const transport::RowClaim* awaited() const { return nullptr; }

  // The region of rows in the client's memory, which are digested only when they are computed; else null.
  virtual const transport::RegionUse* region() const { return nullptr; }
  // Begins to copy rows whose memory is the client's again after the call, and adds to `copies`. `owner` keeps the region mapped
  // meanwhile.
  virtual absl::Status StartCopy(ServerCore&, const DeviceEvent*, const std::shared_ptr<const void>&, RowCopies*) {
    return absl::OkStatus();
  }
  // The copies are complete: the rows are read there from now on.
  virtual void UseCopy() {}

 protected:
  absl::Status Allocate(transport::PinnedPool& pool);
  // Place() without its allocation.
  Transfer::Tensor Describe() const;
  void PointAt(const void* data, MemorySpace memory) {
    rows_.view->data = data;
    rows_.view->memory = memory;
  }

  const Rows rows_;
  std::shared_ptr<transport::PinnedBlock> block_;  // null: not allocated, or there are no rows
};

// The rows lie in memory of the client: shared, in a named file, or a device's.
std::unique_ptr<RowSource> MakeRegionRows(RowSource::Rows rows, transport::RegionUse region);
// Another process sends them, by way of TeacherJoin. `row_indices` and `user` are Claim()'s; the indices outlive the source.
std::unique_ptr<RowSource> MakeJoinedRows(RowSource::Rows rows, transport::JoinedSet set, const std::vector<int32_t>& row_indices,
                                          std::string user);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_LOSS_ROW_SOURCE_H_
