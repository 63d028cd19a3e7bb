#include "server/transport/teacher_join.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "headwater/kernels/error.h"
#include "headwater/kernels/planned_bytes.h"
#include "server/transport/answer_time.h"
#include "server/transport/byte_budget.h"
#include "server/transport/row_ranges.h"

namespace headwater::transport {
namespace {

// How often a waiting claim's cancellation is asked for.
constexpr absl::Duration kPollInterval = absl::Milliseconds(5);
// Rows are allocated in pieces of about this size, so that memory follows the rows that come and that go.
constexpr int64_t kSlabBytes = 1 << 20;

}  // namespace

// ---- what is kept ----------------------------------------------------------------------------------------------------

// All that a join knows. Streams and claims keep it.
class TeacherJoin::State : public std::enable_shared_from_this<TeacherJoin::State> {
 public:
  State(const JoinLimits& limits, std::function<absl::Time()> clock)
      : limits_(limits), clock_(std::move(clock)), budget_(limits.max_bytes) {}

  // Neighbouring rows of one stream. Its place in the budget goes with it, when the last of its rows has gone and nobody reads it.
  struct Slab {
    ByteBudget::Reservation reservation;
    std::optional<JoinOwner> owner;
    PlannedBytes data;  // the stream's alone to set, before the first row is published
  };
  struct Row {
    // kAbsent: only claimed. kComing: of a stream that has not ended. kSpent: there, for a repeat of `user` alone.
    enum class State { kAbsent, kComing, kThere, kSpent };
    State state = State::kAbsent;
    int64_t claim_count = 0;
    std::shared_ptr<Slab> slab;               // unless absent
    const uint8_t* data = nullptr;            // in the slab; kThere and kSpent
    std::shared_ptr<const std::string> user;  // that has used it, if any has
    bool wanted_anew = false;                 // kSpent: another micro-batch waits for the row
    uint64_t idle_since = 0;                  // serial of the last Idle that names it
  };
  struct Set {
    JoinedSet declared;
    int64_t row_bytes = 0;
    std::unordered_map<int64_t, Row> rows;  // by index in the set; absent ones only while they are claimed
    RowRanges used;                         // rows that some decided micro-batch had; empty again when that is all of them
    int64_t stream_count = 0;               // in progress
    int64_t claim_count = 0;
    uint64_t losses = 0;  // counts when rows go that were there
    absl::CondVar changed;
  };
  // Rows that nobody has claimed any more since a time.
  struct Idle {
    absl::Time since;
    uint64_t serial = 0;
    std::shared_ptr<Set> set;
    std::vector<std::pair<int64_t, int64_t>> runs;  // of rows: [first, second)
  };
  class Stream;
  class RowClaim;

  absl::StatusOr<std::unique_ptr<TeacherStream>> Open(const JoinedSet& wanted, const std::vector<int32_t>& row_indices,
                                                      const std::optional<JoinOwner>& owner);
  absl::StatusOr<std::shared_ptr<JoinedRows>> Claim(const JoinedSet& wanted, int64_t row_count,
                                                    const std::vector<int32_t>& row_indices, const std::string& user);
  void DropOwner(const JoinOwner& owner);
  void Expire();
  int64_t reserved_bytes() const { return budget_.reserved_bytes(); }
  int64_t set_count() const {
    absl::MutexLock lock(&mutex_);
    return static_cast<int64_t>(sets_.size());
  }

 private:
  using Rows = std::unordered_map<int64_t, Row>;

  // The set of that name, as declared; made if there is none. kJoinIncomplete if it was declared otherwise and is in use.
  absl::StatusOr<std::shared_ptr<Set>> Declare(const JoinedSet& wanted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Slabs for `row_count` rows; spent rows of others go if they must.
  absl::StatusOr<std::vector<std::shared_ptr<Slab>>> Reserve(const Set& set, int64_t row_count,
                                                             const std::optional<JoinOwner>& owner)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes a row's data away. Returns the next one.
  Rows::iterator Drop(Set& set, Rows::iterator row) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Spent rows that nobody reads, the oldest first, until `bytes` are free.
  void DropSpent(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops those rows of `idle` that are idle since then, or only those of them that are spent. True if some are left.
  bool DropIdle(const Idle& idle, bool only_spent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteIdle(const std::shared_ptr<Set>& set, const std::vector<int64_t>& rows) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetIfEmpty(const Set& set) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  static int64_t RowsOfSlab(int64_t row_bytes) { return std::max<int64_t>(1, kSlabBytes / row_bytes); }

  const JoinLimits limits_;
  const std::function<absl::Time()> clock_;
  ByteBudget budget_;  // before what holds its reservations
  mutable absl::Mutex mutex_;
  std::map<std::pair<std::string, std::string>, std::shared_ptr<Set>> sets_ ABSL_GUARDED_BY(mutex_);  // by tenant and key
  std::deque<Idle> idle_ ABSL_GUARDED_BY(mutex_);                                                     // oldest first
  std::set<JoinOwner> owners_ ABSL_GUARDED_BY(mutex_);  // of rows that came, until they end
  uint64_t next_serial_ ABSL_GUARDED_BY(mutex_) = 1;
};

namespace {

int64_t RowBytes(const JoinedSet& set) { return set.hidden_size * ElementBytes(set.data_type); }

absl::Status DifferentlyDeclared(const JoinedSet& wanted, const char* field, const std::string& expected,
                                 const std::string& actual) {
  return MakeError(
      ErrorReason::kJoinIncomplete,
      absl::StrCat("the joined set ", wanted.join_key, " was declared with ", field, " ", expected, ", the call has ", actual),
      {{"joinKey", wanted.join_key}, {"field", field}, {"expected", expected}, {"actual", actual}});
}

absl::Status CheckDeclared(const JoinedSet& there, const JoinedSet& wanted) {
  if (there.total_row_count != wanted.total_row_count) {
    return DifferentlyDeclared(wanted, "total_row_count", absl::StrCat(there.total_row_count),
                               absl::StrCat(wanted.total_row_count));
  }
  if (there.hidden_size != wanted.hidden_size) {
    return DifferentlyDeclared(wanted, "hidden_size", absl::StrCat(there.hidden_size), absl::StrCat(wanted.hidden_size));
  }
  if (there.data_type != wanted.data_type) {
    return DifferentlyDeclared(wanted, "data_type", DataTypeName(there.data_type), DataTypeName(wanted.data_type));
  }
  return absl::OkStatus();
}

// kLimitExceeded for a stream that no room would do for, however much goes.
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

absl::StatusOr<std::shared_ptr<TeacherJoin::State::Set>> TeacherJoin::State::Declare(const JoinedSet& wanted) {
  std::shared_ptr<Set>& set = sets_[{wanted.tenant, wanted.join_key}];
  if (set != nullptr) {
    absl::Status same = CheckDeclared(set->declared, wanted);
    if (same.ok()) return set;
    // A key whose rows have all been used is free for another set.
    const bool is_spent =
        set->stream_count == 0 && set->claim_count == 0 && set->used.row_count() == 0 &&
        std::all_of(set->rows.begin(), set->rows.end(), [](const auto& entry) { return entry.second.state == Row::State::kSpent; });
    if (!is_spent) return same;
  }
  set = std::make_shared<Set>();
  set->declared = wanted;
  set->row_bytes = RowBytes(wanted);
  return set;
}

TeacherJoin::State::Rows::iterator TeacherJoin::State::Drop(Set& set, Rows::iterator row) {
  if (row->second.data != nullptr) {
    ++set.losses;
    set.changed.SignalAll();
  }
  if (row->second.claim_count == 0) return set.rows.erase(row);
  Row rest;
  rest.claim_count = row->second.claim_count;
  row->second = std::move(rest);
  return ++row;
}

bool TeacherJoin::State::DropIdle(const Idle& idle, bool only_spent) {
  bool any_left = false;
  for (const auto& [start, end] : idle.runs) {
    for (int64_t index = start; index < end; ++index) {
      const auto row = idle.set->rows.find(index);
      if (row == idle.set->rows.end() || row->second.idle_since != idle.serial || row->second.claim_count > 0) continue;
      if (only_spent && row->second.state != Row::State::kSpent) {
        any_left = true;
      } else {
        Drop(*idle.set, row);
      }
    }
  }
  ForgetIfEmpty(*idle.set);
  return any_left;
}

void TeacherJoin::State::DropSpent(int64_t bytes) {
  for (auto idle = idle_.begin(); idle != idle_.end() && budget_.available_bytes() < bytes;) {
    idle = DropIdle(*idle, /*only_spent=*/true) ? std::next(idle) : idle_.erase(idle);
  }
}

void TeacherJoin::State::NoteIdle(const std::shared_ptr<Set>& set, const std::vector<int64_t>& rows) {
  if (rows.empty()) return;
  Idle& idle = idle_.emplace_back();
  idle.since = clock_();
  idle.serial = next_serial_++;
  idle.set = set;
  for (const int64_t index : rows) {
    set->rows.at(index).idle_since = idle.serial;
    if (idle.runs.empty() || idle.runs.back().second != index) idle.runs.emplace_back(index, index);
    ++idle.runs.back().second;
  }
}

void TeacherJoin::State::ForgetIfEmpty(const Set& set) {
  if (!set.rows.empty() || set.stream_count > 0 || set.claim_count > 0) return;
  const auto found = sets_.find({set.declared.tenant, set.declared.join_key});
  if (found != sets_.end() && found->second.get() == &set) sets_.erase(found);
}

void TeacherJoin::State::DropOwner(const JoinOwner& owner) {
  absl::MutexLock lock(&mutex_);
  if (owners_.erase(owner) == 0) return;
  for (auto entry = sets_.begin(); entry != sets_.end();) {
    const std::shared_ptr<Set> set = (entry++)->second;  // which may be forgotten
    for (auto row = set->rows.begin(); row != set->rows.end();) {
      row = row->second.slab != nullptr && row->second.slab->owner == owner ? Drop(*set, row) : std::next(row);
    }
    ForgetIfEmpty(*set);
  }
}

void TeacherJoin::State::Expire() {
  absl::MutexLock lock(&mutex_);
  const absl::Time oldest = clock_() - limits_.max_wait;
  while (!idle_.empty() && idle_.front().since <= oldest) {
    DropIdle(idle_.front(), /*only_spent=*/false);
    idle_.pop_front();
  }
}

// ---- teachers --------------------------------------------------------------------------------------------------------

absl::StatusOr<std::vector<std::shared_ptr<TeacherJoin::State::Slab>>> TeacherJoin::State::Reserve(
    const Set& set, int64_t row_count, const std::optional<JoinOwner>& owner) {
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

class TeacherJoin::State::Stream : public TeacherStream {
 public:
  Stream(std::shared_ptr<State> state, std::shared_ptr<Set> set, std::vector<std::shared_ptr<Slab>> slabs, int64_t rows,
         const std::vector<int32_t>& row_indices)
      : state_(std::move(state)),
        set_(std::move(set)),
        slabs_(std::move(slabs)),
        row_count_(rows),
        row_bytes_(set_->row_bytes),
        row_indices_(row_indices),
        arrived_(static_cast<size_t>(rows)) {}

  ~Stream() override {
    if (finished_) return;
    absl::MutexLock lock(&state_->mutex_);
    --set_->stream_count;
    for (int64_t i = 0; i < row_count_; ++i) {
      const auto row = set_->rows.find(IndexOf(i));
      if (row != set_->rows.end() && IsMine(row->second, i)) state_->Drop(*set_, row);
    }
    state_->ForgetIfEmpty(*set_);
  }

  int64_t row_count() const override { return row_count_; }
  int64_t row_bytes() const override { return row_bytes_; }

  absl::Status Add(int64_t row_start, int64_t count, const void* data, int64_t data_bytes, const std::string& field) override {
    if (row_start < 0 || count < 1 || count > row_count_ || row_start > row_count_ - count) {
      return RowsOutOfRange(field, absl::StrCat("at least one of the stream's ", row_count_, " rows"), row_start, count);
    }
    if (data_bytes != count * row_bytes_) {
      const std::string expected = absl::StrCat(count * row_bytes_), actual = absl::StrCat(data_bytes);
      return MakeError(ErrorReason::kDataLengthMismatch,
                       absl::StrCat(field, ".data must have ", expected, " bytes, it has ", actual),
                       {{"field", field + ".data"}, {"expected", expected}, {"actual", actual}});
    }
    const auto first = arrived_.begin() + row_start;
    if (const auto twice = std::find(first, first + count, true); twice != first + count) {
      return RowsOutOfRange(field, absl::StrCat("rows of which none has come yet (row ", twice - arrived_.begin(), " has)"),
                            row_start, count);
    }
    if (absl::Status status = Copy(row_start, count, static_cast<const uint8_t*>(data)); !status.ok()) return status;
    std::fill(first, first + count, true);
    arrived_count_ += count;
    return absl::OkStatus();
  }

  absl::Status Finish() override {
    if (arrived_count_ < row_count_) {
      const int64_t missing = std::find(arrived_.begin(), arrived_.end(), false) - arrived_.begin();
      return MakeError(ErrorReason::kProtocolViolation,
                       absl::StrCat("the stream has ended with ", arrived_count_, " of its ", row_count_, " rows; row ", missing,
                                    " is the first one missing"),
                       {{"field", "chunk"},
                        {"expected", absl::StrCat(row_count_, " rows")},
                        {"actual", absl::StrCat(arrived_count_)},
                        {"missingRow", absl::StrCat(missing)}});
    }
    const int64_t rows_of_slab = RowsOfSlab(row_bytes_);
    absl::MutexLock lock(&state_->mutex_);
    std::vector<int64_t> idle;
    for (int64_t i = 0; i < row_count_; ++i) {
      const auto row = set_->rows.find(IndexOf(i));
      if (row == set_->rows.end() || !IsMine(row->second, i)) {
        return MakeError(ErrorReason::kSessionNotFound, "the session that the rows belong to has ended");
      }
    }
    for (int64_t i = 0; i < row_count_; ++i) {
      Row& row = set_->rows.at(IndexOf(i));
      row.state = Row::State::kThere;
      row.data = SlabOf(i)->data.get() + i % rows_of_slab * row_bytes_;
      if (row.claim_count == 0) idle.push_back(IndexOf(i));
    }
    finished_ = true;
    --set_->stream_count;
    state_->NoteIdle(set_, idle);
    set_->changed.SignalAll();
    slabs_.clear();
    return absl::OkStatus();
  }

 private:
  int64_t IndexOf(int64_t i) const { return row_indices_.empty() ? i : row_indices_[static_cast<size_t>(i)]; }
  const std::shared_ptr<Slab>& SlabOf(int64_t i) const { return slabs_[static_cast<size_t>(i / RowsOfSlab(row_bytes_))]; }
  bool IsMine(const Row& row, int64_t i) const { return row.slab != nullptr && row.slab == SlabOf(i); }

  // Into the slabs, which are allocated here. Nobody else looks at these rows yet.
  absl::Status Copy(int64_t row_start, int64_t count, const uint8_t* data) {
    const int64_t rows_of_slab = RowsOfSlab(row_bytes_);
    for (int64_t i = row_start; i < row_start + count;) {
      Slab& slab = *SlabOf(i);
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

  const std::shared_ptr<State> state_;
  const std::shared_ptr<Set> set_;
  std::vector<std::shared_ptr<Slab>> slabs_;
  const int64_t row_count_;
  const int64_t row_bytes_;
  const std::vector<int32_t> row_indices_;
  std::vector<bool> arrived_;
  int64_t arrived_count_ = 0;
  bool finished_ = false;
};

absl::StatusOr<std::unique_ptr<TeacherStream>> TeacherJoin::State::Open(const JoinedSet& wanted,
                                                                        const std::vector<int32_t>& row_indices,
                                                                        const std::optional<JoinOwner>& owner) {
  const int64_t row_count = row_indices.empty() ? wanted.total_row_count : static_cast<int64_t>(row_indices.size());
  const int64_t bytes_of_row = RowBytes(wanted) + kRowOverheadBytes;
  if (absl::Status fits = CheckFits(row_count, bytes_of_row, limits_.max_bytes, !row_indices.empty()); !fits.ok()) return fits;
  std::unique_ptr<Stream> stream;  // whose end takes the lock, and takes back what is announced here
  absl::MutexLock lock(&mutex_);
  absl::StatusOr<std::shared_ptr<Set>> declared = Declare(wanted);
  if (!declared.ok()) return declared.status();
  const std::shared_ptr<Set> set = *std::move(declared);
  ++set->stream_count;
  absl::StatusOr<std::vector<std::shared_ptr<Slab>>> slabs = Reserve(*set, row_count, owner);
  if (!slabs.ok()) {
    --set->stream_count;
    ForgetIfEmpty(*set);
    return slabs.status();
  }
  const int64_t rows_of_slab = RowsOfSlab(set->row_bytes);
  stream = std::make_unique<Stream>(shared_from_this(), set, *slabs, row_count, row_indices);
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
    row->second.slab = (*slabs)[static_cast<size_t>(i / rows_of_slab)];
  }
  if (owner.has_value()) owners_.insert(*owner);
  return stream;
}

// ---- trainers --------------------------------------------------------------------------------------------------------

class TeacherJoin::State::RowClaim : public JoinedRows {
 public:
  RowClaim(std::shared_ptr<State> state, std::shared_ptr<Set> set, int64_t rows, const std::vector<int32_t>& row_indices,
           const std::string& user)
      : state_(std::move(state)),
        set_(std::move(set)),
        row_count_(rows),
        row_bytes_(set_->row_bytes),
        row_indices_(row_indices),
        user_(std::make_shared<const std::string>(user)),
        give_up_(state_->clock_() + state_->limits_.max_wait) {}

  ~RowClaim() override {
    const bool used = used_.load();
    absl::MutexLock lock(&state_->mutex_);
    --set_->claim_count;
    std::vector<int64_t> idle;
    for (int64_t i = 0; i < claimed_; ++i) {
      const auto entry = set_->rows.find(IndexOf(i));
      Row& row = entry->second;
      --row.claim_count;
      if (used && row.state == Row::State::kThere) {
        // Once for each time that the row has come, though others use it after the whole set was used.
        if (row.user == nullptr) set_->used.Add(entry->first, 1);
        row.user = user_;
      }
      if (row.claim_count > 0) {
        if (row.state == Row::State::kSpent && row.wanted_anew) state_->Drop(*set_, entry);
        continue;
      }
      if (row.state == Row::State::kAbsent) {
        set_->rows.erase(entry);
        continue;
      }
      if (row.state == Row::State::kThere && row.user != nullptr) row.state = Row::State::kSpent;
      if (row.state == Row::State::kSpent && row.user->empty()) {
        state_->Drop(*set_, entry);
      } else if (row.state != Row::State::kComing) {
        idle.push_back(entry->first);
      }
    }
    if (set_->used.row_count() == set_->declared.total_row_count) set_->used = RowRanges();
    state_->NoteIdle(set_, idle);
    state_->ForgetIfEmpty(*set_);
  }

  // The next of its rows, in their order, for a trainer that is waiting. With the lock.
  void ClaimNext() {
    const auto entry = set_->rows.try_emplace(IndexOf(claimed_)).first;
    ++claimed_;
    Row& row = entry->second;
    ++row.claim_count;
    if (row.state != Row::State::kSpent || IsReady(row)) return;
    // The key is used again. Whoever repeats the micro-batch before, just now, still reads it.
    row.wanted_anew = true;
    if (row.claim_count == 1) state_->Drop(*set_, entry);
  }

  int64_t row_count() const override { return row_count_; }
  int64_t row_bytes() const override { return row_bytes_; }

  int64_t ready_rows() const override {
    absl::MutexLock lock(&state_->mutex_);
    return Advance(row_count_);
  }

  absl::Status Await(int64_t row_end, absl::Time deadline, const std::function<bool()>& cancelled) override {
    const absl::Time end = std::min(WaitEnd(state_->clock_(), deadline), give_up_);
    absl::MutexLock lock(&state_->mutex_);
    while (Advance(row_end) < row_end) {
      // `cancelled` is the caller's code: not under our lock.
      state_->mutex_.Unlock();
      const bool is_cancelled = cancelled != nullptr && cancelled();
      state_->mutex_.Lock();
      if (is_cancelled) return MakeError(ErrorReason::kCancelled, "the call was cancelled while it waited for a teacher's rows");
      if (Advance(row_end) >= row_end) break;
      const absl::Duration left = end - state_->clock_();
      if (left <= absl::ZeroDuration()) return MissingRow(ready_);
      set_->changed.WaitWithTimeout(&state_->mutex_, std::min(left, kPollInterval));
    }
    return absl::OkStatus();
  }

  absl::Status Gather(int64_t row_start, int64_t count, void* out) const override {
    struct Run {
      const uint8_t* data;
      int64_t bytes;
    };
    std::vector<Run> runs;
    std::vector<std::shared_ptr<Slab>> slabs;  // keep what is copied
    {
      absl::MutexLock lock(&state_->mutex_);
      for (int64_t i = row_start; i < row_start + count; ++i) {
        const Row& row = set_->rows.at(IndexOf(i));
        if (!IsReady(row)) return MissingRow(i);
        if (slabs.empty() || slabs.back() != row.slab) slabs.push_back(row.slab);
        if (!runs.empty() && runs.back().data + runs.back().bytes == row.data) {
          runs.back().bytes += row_bytes_;
        } else {
          runs.push_back({row.data, row_bytes_});
        }
      }
    }
    uint8_t* to = static_cast<uint8_t*>(out);
    for (const Run& run : runs) {
      std::memcpy(to, run.data, static_cast<size_t>(run.bytes));
      to += run.bytes;
    }
    return absl::OkStatus();
  }

  void MarkUsed() override { used_.store(true); }

 private:
  friend class State;

  int64_t IndexOf(int64_t i) const { return row_indices_.empty() ? i : row_indices_[static_cast<size_t>(i)]; }
  bool IsReady(const Row& row) const {
    if (row.state == Row::State::kThere) return true;
    return row.state == Row::State::kSpent && !user_->empty() && *row.user == *user_;
  }
  // So many of the first rows are there, as far as `row_end`. With the lock.
  int64_t Advance(int64_t row_end) const {
    if (losses_ != set_->losses) {
      losses_ = set_->losses;
      ready_ = 0;
    }
    while (ready_ < row_end && IsReady(set_->rows.at(IndexOf(ready_)))) ++ready_;
    return ready_;
  }
  absl::Status MissingRow(int64_t i) const {
    return MakeError(ErrorReason::kJoinIncomplete,
                     absl::StrCat("row ", IndexOf(i), " of the joined set ", set_->declared.join_key,
                                  " has not come in time; is the teacher's process alive?"),
                     {{"joinKey", set_->declared.join_key}, {"missingRow", absl::StrCat(IndexOf(i))}});
  }

  const std::shared_ptr<State> state_;
  const std::shared_ptr<Set> set_;
  const int64_t row_count_;
  const int64_t row_bytes_;
  const std::vector<int32_t> row_indices_;
  const std::shared_ptr<const std::string> user_;
  const absl::Time give_up_;
  int64_t claimed_ = 0;  // with the state's lock
  std::atomic<bool> used_ = false;
  mutable int64_t ready_ = 0;    // with the state's lock
  mutable uint64_t losses_ = 0;  // of the set, when `ready_` was counted
};

absl::StatusOr<std::shared_ptr<JoinedRows>> TeacherJoin::State::Claim(const JoinedSet& wanted, int64_t row_count,
                                                                      const std::vector<int32_t>& row_indices,
                                                                      const std::string& user) {
  absl::MutexLock lock(&mutex_);
  absl::StatusOr<std::shared_ptr<Set>> declared = Declare(wanted);
  if (!declared.ok()) return declared.status();
  const std::shared_ptr<Set> set = *std::move(declared);
  auto claim = std::make_shared<RowClaim>(shared_from_this(), set, row_count, row_indices, user);
  ++set->claim_count;
  for (int64_t i = 0; i < row_count; ++i) claim->ClaimNext();
  return claim;
}

// ---- the join --------------------------------------------------------------------------------------------------------

TeacherJoin::TeacherJoin(const JoinLimits& limits, std::function<absl::Time()> clock)
    : state_(std::make_shared<State>(limits, std::move(clock))) {}

TeacherJoin::~TeacherJoin() = default;

absl::StatusOr<std::unique_ptr<TeacherStream>> TeacherJoin::Open(const JoinedSet& set, const std::vector<int32_t>& row_indices,
                                                                 const std::optional<JoinOwner>& owner) {
  return state_->Open(set, row_indices, owner);
}

absl::StatusOr<std::shared_ptr<JoinedRows>> TeacherJoin::Claim(const JoinedSet& set, int64_t row_count,
                                                               const std::vector<int32_t>& row_indices, const std::string& user) {
  return state_->Claim(set, row_count, row_indices, user);
}

void TeacherJoin::DropOwner(const JoinOwner& owner) { state_->DropOwner(owner); }
void TeacherJoin::Expire() { state_->Expire(); }
int64_t TeacherJoin::reserved_bytes() const { return state_->reserved_bytes(); }
int64_t TeacherJoin::set_count() const { return state_->set_count(); }

}  // namespace headwater::transport
