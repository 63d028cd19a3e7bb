// CompletionQueue: which calls have ended, for a loop that waits on a file descriptor.
#ifndef HEADWATER_CLIENT_CORE_CALL_COMPLETION_QUEUE_H_
#define HEADWATER_CLIENT_CORE_CALL_COMPLETION_QUEUE_H_

#include <cstdint>
#include <deque>
#include <mutex>

namespace headwater::client::internal {

// Thread-safe.
class CompletionQueue {
 public:
  CompletionQueue();
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  // An eventfd that is readable while the queue is not empty; -1 if the system has none.
  int fd() const { return fd_; }
  void Push(uint64_t tag);
  // Takes up to `most`, oldest first, and says how many. Never blocks.
  int64_t Take(uint64_t* tags, int64_t most);

 private:
  const int fd_;
  std::mutex mutex_;
  std::deque<uint64_t> tags_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_CALL_COMPLETION_QUEUE_H_
