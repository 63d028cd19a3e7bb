// Abandoned: micro-batches that no call can decide any more.
#ifndef HEADWATER_CLIENT_CORE_REPLAY_ABANDONED_H_
#define HEADWATER_CLIENT_CORE_REPLAY_ABANDONED_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "google/protobuf/message.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::client::internal {

class Call;
class Core;

// Discards them one after the other, in passes. A pass ends when nothing is left, or when a discard fails because the server is
// away; the next waiter then starts the next pass. Thread-safe.
class Abandoned {
 public:
  explicit Abandoned(Core& core) : core_(core) {}

  // Returns at once; makes no call on this thread.
  void Add(v1::DiscardMicroBatchRequest request);
  // The pass that a call of `message` has to wait for; -1: nothing was abandoned on its heads.
  int64_t Mark(const google::protobuf::Message& message);
  bool IsSettled(int64_t pass);
  // Waits for the call that is under way, which has been cancelled. Nothing is discarded any more.
  void Stop();

 private:
  // With the lock.
  void BeginPass();
  void DiscardNext();
  void Discarded(const absl::Status& status);

  Core& core_;
  std::mutex mutex_;
  std::deque<v1::DiscardMicroBatchRequest> left_;
  int64_t passes_ = 0;  // that have ended
  bool in_pass_ = false;
  bool stopping_ = false;
  bool is_calling_ = false;
  std::condition_variable changed_;
  std::shared_ptr<Call> call_;  // of the pass that is under way
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_REPLAY_ABANDONED_H_
