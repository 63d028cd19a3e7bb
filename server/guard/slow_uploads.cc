#include "server/guard/slow_uploads.h"

#include <utility>

#include "headwater/kernels/error.h"

namespace headwater::guard {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(2);
constexpr absl::Duration kFirstTime = absl::Seconds(5);
constexpr double kLeastBytesPerSecond = 64 << 10;

}  // namespace

SlowUploads::Place::Place(SlowUploads& uploads, std::shared_ptr<transport::RowExchange> rows, absl::Time now) : uploads_(uploads) {
  absl::MutexLock lock(&uploads_.mutex_);
  upload_ = uploads_.uploads_.insert(uploads_.uploads_.end(), {std::move(rows), now});
}

SlowUploads::Place::~Place() {
  absl::MutexLock lock(&uploads_.mutex_);
  uploads_.uploads_.erase(upload_);
}

bool SlowUploads::GiveWay(absl::Time now) {
  std::shared_ptr<transport::RowExchange> stillest;
  std::shared_ptr<transport::RowExchange> slowest;
  absl::Duration longest = kPatience;
  double least = kLeastBytesPerSecond;
  {
    absl::MutexLock lock(&mutex_);
    for (const Upload& upload : uploads_) {
      const transport::RowProgress rows = upload.rows->Look();
      if (rows.complete || !upload.rows->status().ok()) continue;
      // The client has sent its rows, and cannot bring the joined teacher's: that wait has its own limit (max_join_wait).
      if (rows.misses_only_others_rows) continue;
      if (const absl::Duration still = now - rows.last_row_time; still > longest) {
        longest = still;
        stillest = upload.rows;
      }
      const absl::Duration age = now - upload.begin;
      if (age < kFirstTime) continue;
      if (const double rate = static_cast<double>(rows.received_bytes) / absl::ToDoubleSeconds(age); rate < least) {
        least = rate;
        slowest = upload.rows;
      }
    }
  }
  const auto& ended = stillest != nullptr ? stillest : slowest;
  if (ended == nullptr) return false;
  return ended->BreakIfIncomplete(
      MakeError(ErrorReason::kQueueFull,
                "others wait for what this upload holds, and its rows have stopped coming, or come too slowly; nothing was "
                "added; try again",
                {{"retryAfterMs", "1000"}}));
}

}  // namespace headwater::guard
