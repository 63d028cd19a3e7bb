#include "server/transport/join_handles.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::transport {

// ---- teachers --------------------------------------------------------------------------------------------------------

TeacherStream::TeacherStream(TeacherJoin& join, std::shared_ptr<TeacherJoin::Set> set,
                             std::vector<std::shared_ptr<TeacherJoin::Slab>> slabs, int64_t row_count,
                             const std::vector<int32_t>& row_indices)
    : join_(join),
      set_(std::move(set)),
      slabs_(std::move(slabs)),
      row_count_(row_count),
      row_bytes_(set_->row_bytes),
      row_indices_(row_indices) {}

TeacherStream::~TeacherStream() {
  if (finished_) return;
  absl::MutexLock lock(&join_.mutex_);
  --set_->stream_count;
  for (int64_t i = 0; i < row_count_; ++i) {
    const auto row = set_->rows.find(IndexOf(i));
    if (row != set_->rows.end() && IsMine(row->second, i)) join_.Drop(*set_, row);
  }
  join_.ForgetIfEmpty(*set_);
}

absl::Status TeacherStream::Add(int64_t row_start, int64_t count, const void* data, int64_t data_bytes, const std::string& field) {
  HEADWATER_RETURN_IF_ERROR(CheckRows(field, row_start, count, data_bytes, row_count_, row_bytes_, arrived_));
  HEADWATER_RETURN_IF_ERROR(Copy(row_start, count, static_cast<const uint8_t*>(data)));
  arrived_.Add(row_start, count);
  return absl::OkStatus();
}

absl::Status TeacherStream::Finish() {
  if (arrived_.row_count() < row_count_) {
    const int64_t missing = arrived_.prefix();
    return MakeError(ErrorReason::kProtocolViolation,
                     absl::StrCat("the stream has ended with ", arrived_.row_count(), " of its ", row_count_, " rows; row ",
                                  missing, " is the first one missing"),
                     {{"field", "chunk"},
                      {"expected", absl::StrCat(row_count_, " rows")},
                      {"actual", absl::StrCat(arrived_.row_count())},
                      {"missingRow", absl::StrCat(missing)}});
  }
  const int64_t rows_of_slab = TeacherJoin::RowsOfSlab(row_bytes_);
  absl::MutexLock lock(&join_.mutex_);
  std::vector<int64_t> idle;
  for (int64_t i = 0; i < row_count_; ++i) {
    const auto row = set_->rows.find(IndexOf(i));
    if (row == set_->rows.end() || !IsMine(row->second, i)) {
      return MakeError(ErrorReason::kSessionNotFound, "the session that the rows belong to has ended");
    }
  }
  for (int64_t i = 0; i < row_count_; ++i) {
    TeacherJoin::Row& row = set_->rows.at(IndexOf(i));
    row.state = TeacherJoin::Row::State::kThere;
    row.data = SlabOf(i)->data.get() + i % rows_of_slab * row_bytes_;
    if (row.claim_count == 0) idle.push_back(IndexOf(i));
  }
  finished_ = true;
  --set_->stream_count;
  join_.NoteIdle(set_, std::move(idle));
  join_.WakeClaims(*set_);
  slabs_.clear();
  return absl::OkStatus();
}

absl::Status TeacherStream::Copy(int64_t row_start, int64_t count, const uint8_t* data) {
  const int64_t rows_of_slab = TeacherJoin::RowsOfSlab(row_bytes_);
  for (int64_t i = row_start; i < row_start + count;) {
    TeacherJoin::Slab& slab = *SlabOf(i);
    const int64_t slab_start = i / rows_of_slab * rows_of_slab;
    const int64_t slab_rows = std::min(rows_of_slab, row_count_ - slab_start);
    if (slab.data == nullptr) {
      absl::StatusOr<PlannedBytes> allocated = AllocatePlanned(slab_rows * row_bytes_);
      if (!allocated.ok()) {
        return MakeError(ErrorReason::kInFlightBytesExceeded, "there is no memory for the rows",
                         {{"limit", "max_join_bytes"}, {"retryAfterMs", "1000"}});
      }
      slab.data = *std::move(allocated);
    }
    const int64_t piece = std::min(slab_start + slab_rows, row_start + count) - i;
    std::memcpy(slab.data.get() + (i - slab_start) * row_bytes_, data, static_cast<size_t>(piece * row_bytes_));
    data += piece * row_bytes_;
    i += piece;
  }
  return absl::OkStatus();
}

// ---- trainers --------------------------------------------------------------------------------------------------------

RowClaim::RowClaim(TeacherJoin& join, std::shared_ptr<TeacherJoin::Set> set, int64_t row_count,
                   const std::vector<int32_t>& row_indices, const std::string& user)
    : join_(join),
      set_(std::move(set)),
      row_count_(row_count),
      row_bytes_(set_->row_bytes),
      row_indices_(row_indices),
      user_(std::make_shared<const std::string>(user)),
      give_up_(join_.clock_() + join_.limits_.max_wait) {}

RowClaim::~RowClaim() {
  const bool used = used_.load();
  absl::MutexLock lock(&join_.mutex_);
  set_->claims.erase(this);
  std::vector<int64_t> idle;
  for (int64_t i = 0; i < claimed_; ++i) {
    const auto entry = set_->rows.find(IndexOf(i));
    TeacherJoin::Row& row = entry->second;
    --row.claim_count;
    if (used && row.state == TeacherJoin::Row::State::kThere) {
      // Once for each time that the row has come, though others use it after the whole set was used.
      if (row.user == nullptr) set_->used.Add(entry->first, 1);
      row.user = user_;
    }
    if (row.claim_count > 0) {
      if (row.state == TeacherJoin::Row::State::kSpent && row.wanted_anew) join_.Drop(*set_, entry);
      continue;
    }
    if (row.state == TeacherJoin::Row::State::kAbsent) {
      set_->rows.erase(entry);
      continue;
    }
    if (row.state == TeacherJoin::Row::State::kThere && row.user != nullptr) row.state = TeacherJoin::Row::State::kSpent;
    if (row.state == TeacherJoin::Row::State::kSpent && row.user->empty()) {
      join_.Drop(*set_, entry);
    } else if (row.state != TeacherJoin::Row::State::kComing) {
      idle.push_back(entry->first);
    }
  }
  if (set_->used.row_count() == set_->declared.total_row_count) set_->used = RowRanges();
  join_.NoteIdle(set_, std::move(idle));
  join_.ForgetIfEmpty(*set_);
}

void RowClaim::ClaimNext() {
  const auto entry = set_->rows.try_emplace(IndexOf(claimed_)).first;
  ++claimed_;
  TeacherJoin::Row& row = entry->second;
  ++row.claim_count;
  if (row.state != TeacherJoin::Row::State::kSpent || IsReady(row)) return;
  // The key is in use again. A repeat of the earlier micro-batch may still be reading the row.
  row.wanted_anew = true;
  if (row.claim_count == 1) join_.Drop(*set_, entry);
}

absl::Status RowClaim::Gather(int64_t row_start, int64_t count, void* out) const {
  std::vector<const uint8_t*> rows;
  std::vector<std::shared_ptr<TeacherJoin::Slab>> slabs;  // keep what is copied
  {
    absl::MutexLock lock(&join_.mutex_);
    for (int64_t i = row_start; i < row_start + count; ++i) {
      const TeacherJoin::Row& row = set_->rows.at(IndexOf(i));
      if (!IsReady(row)) return Missing(i);
      if (slabs.empty() || slabs.back() != row.slab) slabs.push_back(row.slab);
      rows.push_back(row.data);
    }
  }
  uint8_t* to = static_cast<uint8_t*>(out);
  for (const uint8_t* const row : rows) to = std::copy_n(row, row_bytes_, to);
  return absl::OkStatus();
}

int64_t RowClaim::CountReady() const {
  if (losses_ != set_->losses) {
    losses_ = set_->losses;
    ready_ = 0;
  }
  while (ready_ < row_count_ && IsReady(set_->rows.at(IndexOf(ready_)))) ++ready_;
  return ready_;
}

absl::Status RowClaim::Missing(int64_t i) const {
  return MakeError(ErrorReason::kJoinIncomplete,
                   absl::StrCat("row ", IndexOf(i), " of the joined set ", set_->declared.join_key,
                                " has not come in time; is the teacher's process alive?"),
                   {{"joinKey", set_->declared.join_key}, {"missingRow", absl::StrCat(IndexOf(i))}});
}

}  // namespace headwater::transport
