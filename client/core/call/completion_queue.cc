#include "client/core/call/completion_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

namespace headwater::client::internal {

CompletionQueue::CompletionQueue() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

CompletionQueue::~CompletionQueue() {
  if (fd_ >= 0) close(fd_);
}

void CompletionQueue::Push(uint64_t tag) {
  std::lock_guard<std::mutex> lock(mutex_);
  tags_.push_back(tag);
  if (tags_.size() == 1 && fd_ >= 0) eventfd_write(fd_, 1);
}

int64_t CompletionQueue::Take(uint64_t* tags, int64_t most) {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t count = 0;
  for (; count < most && !tags_.empty(); ++count) {
    tags[count] = tags_.front();
    tags_.pop_front();
  }
  eventfd_t value = 0;
  if (count > 0 && tags_.empty() && fd_ >= 0) eventfd_read(fd_, &value);
  return count;
}

}  // namespace headwater::client::internal
