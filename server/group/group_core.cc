#include <algorithm>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"
#include "server/group/group_engine.h"

namespace headwater::group {
namespace {

// The first rank's answer, or that of the shard that was not ready, which that shard's rank knows best.
absl::Status AnswerOf(const std::vector<absl::Status>& answers) {
  if (!HasReason(answers[0], ErrorReason::kShardNotReady)) return answers[0];
  for (size_t rank = 1; rank < answers.size(); ++rank) {
    if (GetErrorMetadata(answers[rank])["shard"] == absl::StrCat(rank)) return answers[rank];
  }
  return answers[0];
}

}  // namespace

GroupCore::~GroupCore() {
  {
    absl::MutexLock lock(&release_mutex_);
    stopping_ = true;
  }
  releaser_.join();
}

void GroupCore::Form(std::vector<Rank> ranks) {
  ranks_ = std::move(ranks);
  threads_ = std::make_unique<cpu::ThreadPool>(static_cast<int32_t>(ranks_.size()));
  for (size_t rank = 0; rank < ranks_.size(); ++rank) rank_mutexes_.push_back(std::make_unique<absl::Mutex>());
  {
    absl::MutexLock lock(&release_mutex_);
    releases_.resize(ranks_.size());
  }
  formed_.store(true, std::memory_order_release);
}

absl::Status GroupCore::health() {
  if (!formed()) return absl::OkStatus();
  for (size_t rank = 0; rank < ranks_.size() && !dismissed_.load() && lost().ok(); ++rank) {
    if (absl::Status status = engine(rank).health(); !status.ok()) Lose(status);
  }
  absl::MutexLock lock(&lost_mutex_);
  return dismissed_.load() ? last_health_ : lost_;
}

void GroupCore::Dismiss() {
  if (!formed()) return;
  {
    absl::MutexLock lock(&lost_mutex_);
    if (dismissed_.exchange(true)) return;
    last_health_ = lost_;
  }
  Lose(MakeError(ErrorReason::kEngineFailed, "the group was dismissed"));
}

void GroupCore::Lose(const absl::Status& reason) {
  {
    absl::MutexLock lock(&lost_mutex_);
    if (lost_.ok()) {
      lost_ = HasReason(reason, ErrorReason::kEngineFailed)
                  ? reason
                  : MakeError(ErrorReason::kEngineFailed, absl::StrCat("the group is lost: ", std::string(reason.message())));
    }
  }
  for (const Rank& rank : ranks_) rank.abort(lost());
}

GroupCore::Turn::Turn(GroupCore& core) : core_(core), lock_(&core.turn_mutex_) {
  if (!core_.formed()) {
    status_ = MakeError(ErrorReason::kStarting, "the group's ranks are not all there yet");
    return;
  }
  status_ = core_.lost();
  if (!status_.ok()) return;
  core_.FlushReleases();
}

GroupCore::RankTurn::RankTurn(GroupCore& core, size_t rank)
    : core_(core), rank_(rank), turn_lock_(&core.turn_mutex_), rank_lock_(core.rank_mutexes_[rank].get()) {
  status_ = core_.lost();
  if (status_.ok()) core_.FlushReleasesOf(rank_);
}

absl::Status GroupCore::RankTurn::Run(absl::FunctionRef<absl::Status()> call) {
  const absl::Status status = call();
  if (HasReason(status, ErrorReason::kEngineFailed)) core_.Lose(status);
  absl::Status lost = core_.lost();
  return lost.ok() ? status : lost;
}

absl::Status GroupCore::lost() const {
  absl::MutexLock lock(&lost_mutex_);
  return lost_;
}

absl::Status GroupCore::OnAll(Program program, bool first_may_refuse) {
  std::vector<absl::Status> answers(ranks_.size());
  threads_->Run(static_cast<int32_t>(ranks_.size()), [&](int32_t index) {
    const size_t rank = static_cast<size_t>(index);
    answers[rank] = program(rank);
    // At once: others may be waiting for this rank.
    if (HasReason(answers[rank], ErrorReason::kEngineFailed)) Lose(answers[rank]);
  });
  for (size_t rank = 1; rank < answers.size(); ++rank) {
    if (answers[rank].code() == answers[0].code() || (first_may_refuse && !answers[0].ok())) continue;
    Lose(MakeError(ErrorReason::kEngineFailed,
                   absl::StrCat("rank ", rank, " answered ", answers[rank].ToString(), ", and the first ", answers[0].ToString())));
  }
  absl::Status lost = this->lost();
  return lost.ok() ? AnswerOf(answers) : lost;
}

void GroupCore::ReleaseInTurn() {
  const auto next = [this]() ABSL_SHARED_LOCKS_REQUIRED(release_mutex_) {
    return std::find_if(releases_.begin(), releases_.end(), [](const auto& objects) { return !objects.empty(); });
  };
  const auto has_work = [&]() ABSL_SHARED_LOCKS_REQUIRED(release_mutex_) { return stopping_ || next() != releases_.end(); };
  while (true) {
    size_t rank = 0;
    {
      absl::MutexLock lock(&release_mutex_);
      release_mutex_.Await(absl::Condition(&has_work));
      if (stopping_) return;
      rank = static_cast<size_t>(next() - releases_.begin());
    }
    // The turn destroys them. A lost group keeps them: its devices may hang.
    if (!RankTurn(*this, rank).status().ok()) return;
  }
}

void GroupCore::FlushReleases() {
  {
    absl::MutexLock lock(&release_mutex_);
    if (std::all_of(releases_.begin(), releases_.end(), [](const auto& objects) { return objects.empty(); })) return;
  }
  OnAll([&](size_t rank) {
    FlushReleasesOf(rank);
    return absl::OkStatus();
  }).IgnoreError();
}

void GroupCore::FlushReleasesOf(size_t rank) {
  std::vector<std::shared_ptr<void>> objects;
  {
    absl::MutexLock lock(&release_mutex_);
    std::swap(objects, releases_[rank]);
  }
  for (std::shared_ptr<void>& object : objects) object.reset();
}

}  // namespace headwater::group
