#include "client/core/rows/memory/copy_threads.h"

#include <algorithm>
#include <cstring>
#include <system_error>

namespace headwater::client::internal {
namespace {

constexpr int64_t kPieceBytes = int64_t{2} << 20;  // below that a thread is woken for nothing

}  // namespace

CopyThreads::~CopyThreads() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void CopyThreads::Do(const Piece& piece) {
  std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
  std::lock_guard<std::mutex> lock(piece.job->mutex);
  if (--piece.job->left == 0) piece.job->done.notify_all();
}

void CopyThreads::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !pieces_.empty(); });
    if (pieces_.empty()) return;
    const Piece piece = pieces_.front();
    pieces_.pop_front();
    lock.unlock();
    Do(piece);
    lock.lock();
  }
}

void CopyThreads::Copy(void* to, const void* from, int64_t bytes) {
  if (thread_count_ < 2 || bytes < 2 * kPieceBytes) {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  Job job;
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    while (static_cast<int>(threads_.size()) < thread_count_ - 1) threads_.emplace_back([this] { Run(); });
  } catch (const std::system_error&) {
    // The system gives no more: those that there are, if any, help the caller, which needs none.
  }
  for (int64_t start = 0; start < bytes; start += kPieceBytes) {
    const int64_t piece_bytes = std::min(kPieceBytes, bytes - start);
    pieces_.push_back({static_cast<char*>(to) + start, static_cast<const char*>(from) + start, piece_bytes, &job});
    ++job.left;
  }
  changed_.notify_all();
  // Helps until nothing waits: also with pieces of others, which are short.
  while (!pieces_.empty()) {
    const Piece piece = pieces_.front();
    pieces_.pop_front();
    lock.unlock();
    Do(piece);
    lock.lock();
  }
  lock.unlock();
  std::unique_lock<std::mutex> job_lock(job.mutex);
  job.done.wait(job_lock, [&] { return job.left == 0; });
}

}  // namespace headwater::client::internal
