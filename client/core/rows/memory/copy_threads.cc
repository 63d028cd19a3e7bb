#include "client/core/rows/memory/copy_threads.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <system_error>

namespace headwater::client::internal {
namespace {

constexpr int64_t kPieceBytes = int64_t{2} << 20;  // below that a thread is woken for nothing

// A copy that several threads share: each takes the next piece until none is left.
struct Job {
  void Help() {
    for (int64_t start = 0; (start = next.fetch_add(kPieceBytes)) < bytes;) {
      const int64_t piece_bytes = std::min(kPieceBytes, bytes - start);
      std::memcpy(to + start, from + start, static_cast<size_t>(piece_bytes));
      if ((left -= piece_bytes) == 0) left.notify_all();
    }
  }

  char* const to;
  const char* const from;
  const int64_t bytes;
  std::atomic<int64_t> next = 0;
  std::atomic<int64_t> left = bytes;
};

}  // namespace

void CopyThreads::Copy(void* to, const void* from, int64_t bytes) {
  if (helper_count_ < 1 || bytes < 2 * kPieceBytes) {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  // A helper that comes when all is taken finds the job, and nothing to do.
  const std::shared_ptr<Job> job(new Job{static_cast<char*>(to), static_cast<const char*>(from), bytes});
  try {
    for (int i = 0; i < helper_count_; ++i) helpers_.Run(this, [job] { job->Help(); });
  } catch (const std::system_error&) {
    // The system gives no thread: the caller copies alone.
  }
  job->Help();
  for (int64_t left = job->left; left > 0; left = job->left) job->left.wait(left);
}

}  // namespace headwater::client::internal
