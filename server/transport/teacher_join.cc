#include "server/transport/teacher_join.h"

#include <cstring>
#include <limits>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"

namespace headwater::transport {
namespace {

int64_t RowBytes(const JoinedSet& set) { return set.hidden_size * ElementBytes(set.data_type); }

absl::Status CheckDeclared(const JoinedSet& there, const JoinedSet& wanted) {
  const std::tuple<const char*, std::string, std::string> fields[] = {
      {"total_row_count", absl::StrCat(there.total_row_count), absl::StrCat(wanted.total_row_count)},
      {"hidden_size", absl::StrCat(there.hidden_size), absl::StrCat(wanted.hidden_size)},
      {"data_type", DataTypeName(there.data_type), DataTypeName(wanted.data_type)}};
  for (const auto& [field, expected, actual] : fields) {
    if (expected == actual) continue;
    return MakeError(
        ErrorReason::kJoinIncomplete,
        absl::StrCat("the joined set ", wanted.join_key, " was declared with ", field, " ", expected, ", the call has ", actual),
        {{"joinKey", wanted.join_key}, {"field", field}, {"expected", expected}, {"actual", actual}});
  }
  return absl::OkStatus();
}

// kLimitExceeded for a stream that would not fit into an empty store.
absl::Status CheckFits(int64_t row_count, int64_t bytes_of_row, int64_t max_bytes, bool has_indices) {
  if (row_count <= max_bytes / bytes_of_row) return absl::OkStatus();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const std::string field = has_indices ? "header.row_indices" : "header.total_row_count";
  const std::string expected = absl::StrCat("rows of at most ", max_bytes, " bytes (max_join_bytes)");
  const int64_t bytes = row_count > kMost / bytes_of_row ? kMost : row_count * bytes_of_row;
  return MakeError(ErrorReason::kLimitExceeded,
                   absl::StrCat(field, ": expected ", expected, ", got ", bytes, " (", row_count, " rows of ", bytes_of_row, ")"),
                   {{"field", field},
                    {"limit", "max_join_bytes"},
                    {"maximum", absl::StrCat(max_bytes)},
                    {"expected", expected},
                    {"actual", absl::StrCat(bytes)}});
}

}  // namespace

absl::StatusOr<std::shared_ptr<TeacherJoin::Set>> TeacherJoin::Declare(const JoinedSet& wanted) {
  std::shared_ptr<Set>& set = sets_[{wanted.tenant, wanted.join_key}];
  if (set != nullptr) {
    absl::Status same = CheckDeclared(set->declared, wanted);
    if (same.ok()) return set;
    // A key whose rows have all been used is free for another set.
    const bool is_spent =
        set->stream_count == 0 && set->claims.empty() && set->used.row_count() == 0 &&
        std::all_of(set->rows.begin(), set->rows.end(), [](const auto& entry) { return entry.second.state == Row::State::kSpent; });
    if (!is_spent) return same;
  }
  set = std::make_shared<Set>();
  set->declared = wanted;
  set->row_bytes = RowBytes(wanted);
  return set;
}

TeacherJoin::Rows::iterator TeacherJoin::Drop(Set& set, Rows::iterator row) {
  if (row->second.data != nullptr) {
    ++set.losses;
    WakeClaims(set);
  }
  if (row->second.claim_count == 0) return set.rows.erase(row);
  Row rest;
  rest.claim_count = row->second.claim_count;
  row->second = std::move(rest);
  return ++row;
}

bool TeacherJoin::DropIdle(const Idle& idle, bool only_spent) {
  bool any_left = false;
  for (const int64_t index : idle.rows) {
    const auto row = idle.set->rows.find(index);
    if (row == idle.set->rows.end() || row->second.idle_since != idle.serial || row->second.claim_count > 0) continue;
    if (only_spent && row->second.state != Row::State::kSpent) {
      any_left = true;
    } else {
      Drop(*idle.set, row);
    }
  }
  ForgetIfEmpty(*idle.set);
  return any_left;
}

void TeacherJoin::DropSpent(int64_t bytes) {
  for (auto idle = idle_.begin(); idle != idle_.end() && budget_.available_bytes() < bytes;) {
    idle = DropIdle(*idle, /*only_spent=*/true) ? std::next(idle) : idle_.erase(idle);
  }
}

void TeacherJoin::NoteIdle(const std::shared_ptr<Set>& set, std::vector<int64_t> rows) {
  if (rows.empty()) return;
  for (const int64_t index : rows) set->rows.at(index).idle_since = next_serial_;
  idle_.push_back({clock_(), next_serial_++, set, std::move(rows)});
}

void TeacherJoin::ForgetIfEmpty(const Set& set) {
  if (!set.rows.empty() || set.stream_count > 0 || !set.claims.empty()) return;
  const auto found = sets_.find({set.declared.tenant, set.declared.join_key});
  if (found != sets_.end() && found->second.get() == &set) sets_.erase(found);
}

void TeacherJoin::WakeClaims(const Set& set) {
  for (const RowClaim* claim : set.claims) {
    if (claim->wake_ != nullptr) claim->wake_();
  }
}

void TeacherJoin::DropOwner(const JoinOwner& owner) {
  absl::MutexLock lock(&mutex_);
  if (owners_.erase(owner) == 0) return;
  for (auto entry = sets_.begin(); entry != sets_.end();) {
    const std::shared_ptr<Set> set = (entry++)->second;  // keeps a forgotten set alive
    for (auto row = set->rows.begin(); row != set->rows.end();) {
      row = row->second.slab != nullptr && row->second.slab->owner == owner ? Drop(*set, row) : std::next(row);
    }
    ForgetIfEmpty(*set);
  }
}

void TeacherJoin::Expire() {
  absl::MutexLock lock(&mutex_);
  const absl::Time oldest = clock_() - limits_.max_wait;
  while (!idle_.empty() && idle_.front().since <= oldest) {
    DropIdle(idle_.front(), /*only_spent=*/false);
    idle_.pop_front();
  }
}

// ---- teachers --------------------------------------------------------------------------------------------------------

absl::StatusOr<std::vector<std::shared_ptr<TeacherJoin::Slab>>> TeacherJoin::Reserve(const Set& set, int64_t row_count,
                                                                                     const std::optional<JoinOwner>& owner) {
  const int64_t bytes_of_row = set.row_bytes + kRowOverheadBytes;
  const int64_t rows_of_slab = RowsOfSlab(set.row_bytes);
  for (const bool may_drop : {true, false}) {
    std::vector<std::shared_ptr<Slab>> slabs;
    bool fits = row_count <= budget_.available_bytes() / bytes_of_row;
    for (int64_t start = 0; fits && start < row_count; start += rows_of_slab) {
      std::shared_ptr<Slab>& slab = slabs.emplace_back(std::make_shared<Slab>());
      slab->owner = owner;
      fits = budget_.TryReserve(std::min(rows_of_slab, row_count - start) * bytes_of_row, &slab->reservation);
    }
    if (fits) return slabs;
    if (may_drop) DropSpent(row_count * bytes_of_row);
  }
  const int64_t available = budget_.available_bytes();
  return MakeError(ErrorReason::kInFlightBytesExceeded,
                   absl::StrCat(row_count, " rows of ", bytes_of_row, " bytes would wait to be joined, and ", available, " of ",
                                limits_.max_bytes, " bytes (max_join_bytes) are free; send fewer rows in advance, or try again"),
                   {{"limit", "max_join_bytes"},
                    {"maximum", absl::StrCat(limits_.max_bytes)},
                    {"requestedRows", absl::StrCat(row_count)},
                    {"availableBytes", absl::StrCat(available)},
                    {"retryAfterMs", "50"}});
}

absl::StatusOr<std::unique_ptr<TeacherStream>> TeacherJoin::Open(const JoinedSet& wanted, const std::vector<int32_t>& row_indices,
                                                                 const std::optional<JoinOwner>& owner) {
  const int64_t row_count = row_indices.empty() ? wanted.total_row_count : static_cast<int64_t>(row_indices.size());
  const int64_t bytes_of_row = RowBytes(wanted) + kRowOverheadBytes;
  HEADWATER_RETURN_IF_ERROR(CheckFits(row_count, bytes_of_row, limits_.max_bytes, !row_indices.empty()));
  std::unique_ptr<TeacherStream> stream;  // destroyed after the unlock: its destructor locks, and withdraws the rows announced here
  absl::MutexLock lock(&mutex_);
  HEADWATER_ASSIGN_OR_RETURN(const std::shared_ptr<Set> set, Declare(wanted));
  ++set->stream_count;
  absl::StatusOr<std::vector<std::shared_ptr<Slab>>> slabs = Reserve(*set, row_count, owner);
  if (!slabs.ok()) {
    --set->stream_count;
    ForgetIfEmpty(*set);
    return slabs.status();
  }
  stream = std::make_unique<TeacherStream>(*this, set, *std::move(slabs), row_count, row_indices);
  for (int64_t i = 0; i < row_count; ++i) {
    const int64_t index = stream->IndexOf(i);
    auto row = set->rows.try_emplace(index).first;
    const bool was_used = set->used.Overlaps(index, 1);
    if (!was_used && row->second.state == Row::State::kSpent) {
      Drop(*set, row);
      row = set->rows.try_emplace(index).first;
    }
    if (was_used || row->second.state != Row::State::kAbsent) {
      const std::string actual =
          absl::StrCat("row ", index,
                       was_used ? ", which has come and was used; the key serves again when all rows of the set were"
                       : row->second.state == Row::State::kComing ? ", which is coming already"
                                                                  : ", which is there");
      absl::Status status = MakeError(ErrorReason::kChunkOutOfRange,
                                      absl::StrCat("header.row_indices must be rows that have not come, there is ", actual),
                                      {{"field", "header.row_indices"},
                                       {"expected", "rows that have not come"},
                                       {"actual", actual},
                                       {"joinKey", wanted.join_key},
                                       {"row", absl::StrCat(index)}});
      if (row->second.state == Row::State::kAbsent) Drop(*set, row);
      return status;
    }
    row->second.state = Row::State::kComing;
    row->second.slab = stream->SlabOf(i);
  }
  if (owner.has_value()) owners_.insert(*owner);
  return stream;
}

absl::StatusOr<std::shared_ptr<RowClaim>> TeacherJoin::Claim(const JoinedSet& wanted, int64_t row_count,
                                                             const std::vector<int32_t>& row_indices, const std::string& user) {
  absl::MutexLock lock(&mutex_);
  HEADWATER_ASSIGN_OR_RETURN(const std::shared_ptr<Set> set, Declare(wanted));
  auto claim = std::make_shared<RowClaim>(*this, set, row_count, row_indices, user);
  set->claims.insert(claim.get());
  for (int64_t i = 0; i < row_count; ++i) claim->Claim(i);
  return claim;
}

// ---- a teacher's stream -------------------------------------------------------------------------------------------------

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

// ---- a trainer's claim --------------------------------------------------------------------------------------------------

RowClaim::~RowClaim() {
  const bool used = used_.load();
  absl::MutexLock lock(&join_.mutex_);
  set_->claims.erase(this);
  std::vector<int64_t> idle;
  for (int64_t i = 0; i < row_count_; ++i) {
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

void RowClaim::Claim(int64_t i) {
  const auto entry = set_->rows.try_emplace(IndexOf(i)).first;
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
