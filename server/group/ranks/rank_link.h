// RankLink: the leader's end of the call by which a worker has joined.
//
// The call's handler hands over what comes (Deliver) and tells its end (Close); the rank's engine (remote_engine.h) sends commands
// and takes replies.
#ifndef HEADWATER_SERVER_GROUP_RANKS_RANK_LINK_H_
#define HEADWATER_SERVER_GROUP_RANKS_RANK_LINK_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "headwater/v1/group_service.pb.h"

namespace headwater::group {

class RankLink {
 public:
  // Replies that may wait to be taken: so many, and one more beyond so many bytes.
  static constexpr size_t kMaxReplies = 64;
  static constexpr int64_t kMaxReplyBytes = int64_t{8} << 20;

  // `send` returns false once the call has ended; `cancel` ends it, so that a `send` in progress returns. Neither is called after
  // Close().
  RankLink(std::function<bool(const v1::JoinResponse&)> send, std::function<void()> cancel)
      : send_(std::move(send)), cancel_(std::move(cancel)) {}
  RankLink(const RankLink&) = delete;
  RankLink& operator=(const RankLink&) = delete;

  // Waits while the worker takes nothing, but not beyond Break(). kEngineFailed once the link is closed.
  absl::Status Send(const v1::JoinResponse& message);
  // The next reply, in the order in which they came; waits for it. kEngineFailed once the link is closed.
  absl::StatusOr<v1::RankReply> AwaitReply();
  // Ends the call. The first reason stays. Any thread.
  void Break(const absl::Status& reason);

  // The handler's. Waits while too many replies are here that nobody has taken: a worker that sends what it was not asked for is
  // not read any further, falls silent with that, and costs no memory. A sign of life is whatever comes.
  void Deliver(v1::JoinRequest message);
  // Waits for a `send` in progress.
  void Close(const absl::Status& reason);

  // Not OK once broken or closed. Any thread, as the others below.
  absl::Status status() const;
  int64_t messages() const;     // that have come
  v1::RankAlive alive() const;  // as the worker told last

 private:
  const std::function<bool(const v1::JoinResponse&)> send_;
  absl::Mutex send_mutex_;  // held for a `send`; is taken before mutex_
  mutable absl::Mutex mutex_;
  std::function<void()> cancel_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::RankReply> replies_ ABSL_GUARDED_BY(mutex_);
  int64_t reply_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  int64_t messages_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::RankAlive alive_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace headwater::group

#endif  // HEADWATER_SERVER_GROUP_RANKS_RANK_LINK_H_
