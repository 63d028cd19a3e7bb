#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/return_if_error.h"
#include "server/service/loss/micro_batch.h"

namespace headwater::service {
namespace {

class RegionRows final : public RowSource {
 public:
  RegionRows(Rows rows, transport::RegionUse region) : RowSource(std::move(rows)), region_(std::move(region)) {}

  int64_t bytes_to_reserve(bool keeps) const override { return region_->staged_bytes() + (keeps ? bytes() : 0); }

  absl::StatusOr<Transfer::Tensor> Place(transport::PinnedPool&) override {
    Transfer::Tensor tensor = Describe();
    tensor.why_not = absl::StrCat("because ", rows_.field, " says where the rows are");
    return tensor;
  }

  absl::Status Open(observability::Metrics& metrics) override {
    HEADWATER_RETURN_IF_ERROR(region_->Prepare());
    PointAt(region_->data(), region_->memory());
    metrics.Count(observability::Metric::kBytes, bytes(), observability::Direction::kIn, PathOf(&*region_));
    return absl::OkStatus();
  }

  const transport::RegionUse* region() const override { return region_.has_value() ? &*region_ : nullptr; }

  absl::Status StartCopy(ServerCore& core, const DeviceEvent* after, const std::shared_ptr<const void>& owner,
                         RowCopies* copies) override {
    constexpr int64_t kPartBytes = 4 << 20;
    HEADWATER_RETURN_IF_ERROR(Allocate(core.rows));
    // A device's rows are one copy; rows of host memory are copied by several threads.
    const int64_t rows_a_part =
        region_->memory() == MemorySpace::kDevice ? rows_.row_count : std::max<int64_t>(1, kPartBytes / rows_.row_bytes);
    for (int64_t row = 0; row < rows_.row_count; row += rows_a_part) {
      const int64_t count = std::min(rows_a_part, rows_.row_count - row);
      const int64_t offset = row * rows_.row_bytes;
      const RowsView part = {static_cast<const uint8_t*>(region_->data()) + offset, count,
                             rows_.row_bytes / int64_t{sizeof(uint16_t)}, DataType::kBFloat16, region_->memory()};
      const auto copy = std::make_shared<std::packaged_task<absl::Status()>>(
          [engine = core.engine.get(), owner, block = block_, part, after, out = block_->data() + offset] {
            return engine->CopyRows(part, after, out);
          });
      copies->push_back(copy->get_future().share());
      core.senders.Post([copy] { (*copy)(); });
    }
    return absl::OkStatus();
  }

  void UseCopy() override {
    if (block_ == nullptr) return;  // there are no rows
    region_.reset();
    PointAt(block_->data(), MemorySpace::kHost);
  }

 private:
  std::optional<transport::RegionUse> region_;  // until UseCopy()
};

class JoinedRows final : public RowSource {
 public:
  JoinedRows(Rows rows, transport::JoinedSet set, const std::vector<int32_t>& row_indices, std::string user)
      : RowSource(std::move(rows)), set_(std::move(set)), row_indices_(row_indices), user_(std::move(user)) {}

  int64_t bytes_to_reserve(bool) const override {
    return bytes() + rows_.row_count * transport::TeacherJoin::kRowOverheadBytes;  // of its claim
  }

  absl::StatusOr<std::shared_ptr<transport::RowClaim>> Claim(transport::TeacherJoin& join) override {
    HEADWATER_ASSIGN_OR_RETURN(claim_, join.Claim(set_, rows_.row_count, row_indices_, user_));
    return claim_;
  }

  absl::StatusOr<Transfer::Tensor> Place(transport::PinnedPool& pool) override {
    HEADWATER_ASSIGN_OR_RETURN(Transfer::Tensor tensor, RowSource::Place(pool));
    tensor.why_not = absl::StrCat("because ", rows_.field, " says that another process sends the rows");
    tensor.rows.by_input = false;
    return tensor;
  }

  absl::Status Pull(Transfer& transfer, size_t index) override {
    const int64_t count = claim_->ready_rows() - pulled_;
    if (count <= 0) return absl::OkStatus();
    HEADWATER_ASSIGN_OR_RETURN(uint8_t* const place,
                               transfer.exchange().Claim(index, pulled_, count, count * rows_.row_bytes, "joined_teacher"));
    HEADWATER_RETURN_IF_ERROR(claim_->Gather(pulled_, count, place));
    transfer.AddToDigest(index, pulled_, count);
    transfer.exchange().Deliver(index, pulled_, count);
    pulled_ += count;
    return absl::OkStatus();
  }

  const transport::RowClaim* awaited() const override { return pulled_ < rows_.row_count ? claim_.get() : nullptr; }

 private:
  const transport::JoinedSet set_;
  const std::vector<int32_t>& row_indices_;
  const std::string user_;
  std::shared_ptr<transport::RowClaim> claim_;
  int64_t pulled_ = 0;  // rows that are in `block_`
};

}  // namespace

std::unique_ptr<RowSource> MakeRegionRows(RowSource::Rows rows, transport::RegionUse region) {
  return std::make_unique<RegionRows>(std::move(rows), std::move(region));
}

std::unique_ptr<RowSource> MakeJoinedRows(RowSource::Rows rows, transport::JoinedSet set, const std::vector<int32_t>& row_indices,
                                          std::string user) {
  return std::make_unique<JoinedRows>(std::move(rows), std::move(set), row_indices, std::move(user));
}

observability::Transport PathOf(const transport::RegionUse* region) {
  if (region == nullptr) return observability::Transport::kGrpc;
  return region->memory() == MemorySpace::kDevice ? observability::Transport::kCudaIpc : observability::Transport::kSharedMemory;
}

absl::Status RowSource::Allocate(transport::PinnedPool& pool) {
  if (rows_.row_count == 0) return absl::OkStatus();
  HEADWATER_ASSIGN_OR_RETURN(block_, pool.Allocate(bytes()));
  return absl::OkStatus();
}

Transfer::Tensor RowSource::Describe() const {
  Transfer::Tensor tensor;
  tensor.rows = {rows_.name, rows_.row_start, rows_.row_count, rows_.row_bytes, block_ != nullptr ? block_->data() : nullptr};
  tensor.digest_stream = rows_.digest_stream;
  tensor.owner = block_;
  return tensor;
}

absl::StatusOr<Transfer::Tensor> RowSource::Place(transport::PinnedPool& pool) {
  HEADWATER_RETURN_IF_ERROR(Allocate(pool));
  Transfer::Tensor tensor = Describe();
  PointAt(tensor.rows.data, MemorySpace::kHost);
  return tensor;
}

}  // namespace headwater::service
