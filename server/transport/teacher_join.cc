#include "server/transport/teacher_join.h"

#include <limits>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/return_if_error.h"
#include "server/transport/join_handles.h"

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
    const int64_t index = row_indices.empty() ? i : row_indices[static_cast<size_t>(i)];
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
  for (int64_t i = 0; i < row_count; ++i) claim->ClaimNext();
  return claim;
}

}  // namespace headwater::transport
