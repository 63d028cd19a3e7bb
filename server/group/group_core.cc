#include "server/group/group_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "headwater/kernels/error.h"

namespace headwater::group {

GroupCore::~GroupCore() {
  {
    absl::MutexLock lock(&release_mutex_);
    stopping_ = true;
  }
  releaser_.join();
}

void GroupCore::Form(std::vector<std::unique_ptr<Rank>> ranks) {
  ranks_ = std::move(ranks);
  threads_ = std::make_unique<RankThreads>(ranks_.size());
  formed_.store(true, std::memory_order_release);
}

absl::Status GroupCore::health() {
  if (!formed()) return absl::OkStatus();
  {
    absl::MutexLock lock(&lost_mutex_);
    if (dismissed_.load()) return last_health_;
    if (!lost_.ok()) return lost_;
  }
  for (const auto& rank : ranks_) {
    if (absl::Status status = rank->health(); !status.ok()) {
      Lose(status);
      absl::MutexLock lock(&lost_mutex_);
      return dismissed_.load() ? last_health_ : lost_;
    }
  }
  return absl::OkStatus();
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
  absl::Status lost;
  {
    absl::MutexLock lock(&lost_mutex_);
    if (lost_.ok()) {
      lost_ = HasReason(reason, ErrorReason::kEngineFailed)
                  ? reason
                  : MakeError(ErrorReason::kEngineFailed, absl::StrCat("the group is lost: ", std::string(reason.message())));
    }
    lost = lost_;
  }
  for (const auto& rank : ranks_) rank->Abort(lost);
}

GroupCore::Turn::Turn(GroupCore& core) : core_(core) {
  core_.turn_mutex_.Lock();
  if (!core_.formed()) {
    status_ = MakeError(ErrorReason::kStarting, "the group's ranks are not all there yet");
    return;
  }
  {
    absl::MutexLock lock(&core_.lost_mutex_);
    status_ = core_.lost_;
  }
  if (status_.ok()) core_.FlushReleases();
}

GroupCore::Turn::~Turn() { core_.turn_mutex_.Unlock(); }

std::vector<absl::Status> GroupCore::RunAll(RankThreads::Program program) {
  return threads_->Run([&](size_t rank) {
    absl::Status status = program(rank);
    // At once: others may be waiting for this rank.
    if (HasReason(status, ErrorReason::kEngineFailed)) Lose(status);
    return status;
  });
}

absl::Status GroupCore::OnAll(RankThreads::Program program) {
  const std::vector<absl::Status> answers = RunAll(program);
  {
    absl::MutexLock lock(&lost_mutex_);
    if (!lost_.ok()) return lost_;
  }
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    if (answers[rank].code() == answers[0].code()) continue;
    Lose(MakeError(ErrorReason::kEngineFailed,
                   absl::StrCat("rank ", rank, " answered ", answers[rank].ToString(), ", and the first ", answers[0].ToString())));
    absl::MutexLock lock(&lost_mutex_);
    return lost_;
  }
  if (HasReason(answers[0], ErrorReason::kShardNotReady)) {
    for (size_t rank = 1; rank < answers.size(); ++rank) {
      if (GetErrorMetadata(answers[rank])["shard"] == absl::StrCat(rank)) return answers[rank];
    }
  }
  return answers[0];
}

absl::Status GroupCore::OnAllAsFirst(RankThreads::Program program) {
  const std::vector<absl::Status> answers = RunAll(program);
  {
    absl::MutexLock lock(&lost_mutex_);
    if (!lost_.ok()) return lost_;
  }
  if (!answers[0].ok()) {
    if (!HasReason(answers[0], ErrorReason::kShardNotReady)) return answers[0];
    for (size_t rank = 1; rank < answers.size(); ++rank) {
      if (GetErrorMetadata(answers[rank])["shard"] == absl::StrCat(rank)) return answers[rank];
    }
    return answers[0];
  }
  for (size_t rank = 1; rank < answers.size(); ++rank) {
    if (answers[rank].ok()) continue;
    Lose(MakeError(ErrorReason::kEngineFailed,
                   absl::StrCat("rank ", rank, " refused what the first did: ", std::string(answers[rank].message()))));
    absl::MutexLock lock(&lost_mutex_);
    return lost_;
  }
  return absl::OkStatus();
}

void GroupCore::Release(absl::Span<const uint64_t> contributions, absl::Span<const uint64_t> heads) {
  absl::MutexLock lock(&release_mutex_);
  released_contributions_.insert(released_contributions_.end(), contributions.begin(), contributions.end());
  released_heads_.insert(released_heads_.end(), heads.begin(), heads.end());
}

void GroupCore::ReleaseInTurn() {
  const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(release_mutex_) {
    return stopping_ || !released_contributions_.empty() || !released_heads_.empty();
  };
  while (true) {
    {
      absl::MutexLock lock(&release_mutex_);
      release_mutex_.Await(absl::Condition(&has_work));
      if (stopping_) return;
    }
    const Turn turn(*this);  // in which they are told
    if (turn.status().ok()) continue;
    absl::MutexLock lock(&release_mutex_);  // a group that is lost has nothing left
    released_contributions_.clear();
    released_heads_.clear();
  }
}

void GroupCore::FlushReleases() {
  std::vector<uint64_t> contributions;
  std::vector<uint64_t> heads;
  {
    absl::MutexLock lock(&release_mutex_);
    contributions.swap(released_contributions_);
    heads.swap(released_heads_);
  }
  if (contributions.empty() && heads.empty()) return;
  OnAll([&](size_t rank) { return ranks_[rank]->Release(contributions, heads); }).IgnoreError();
}

}  // namespace headwater::group
