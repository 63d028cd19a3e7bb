// RankLink: the leader's end of a worker's Join call.
//
// The call's handler delivers messages (Deliver) and reports the end (Close). The rank's engine (remote_engine.h) sends commands
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
  // Bounds of waiting replies: their number, and their bytes, which the last one may exceed.
  static constexpr size_t kMaxReplies = 64;
  static constexpr int64_t kMaxReplyBytes = int64_t{8} << 20;

  // `send` returns false once the call has ended; `cancel` ends it, so that a `send` in progress returns. Neither is called after
  // Close().
  RankLink(std::function<bool(const v1::JoinResponse&)> send, std::function<void()> cancel)
      : send_(std::move(send)), cancel_(std::move(cancel)) {}

  // Waits while the worker takes nothing, but not beyond Break(). kEngineFailed once the link is closed.
  absl::Status Send(const v1::JoinResponse& message);
  // Waits for the next reply, in the order of arrival. kEngineFailed once the link is closed.
  absl::StatusOr<v1::RankReply> AwaitReply();
  // Ends the call. The first reason stays. Any thread.
  void Break(const absl::Status& reason);

  // For the handler. Waits while too many replies are untaken. So a worker that sends unrequested replies is no longer read, counts
  // as silent, and costs no memory. Any message is a sign of life.
  void Deliver(v1::JoinRequest message);
  // Waits for a `send` in progress.
  void Close(const absl::Status& reason);

  // Not OK once broken or closed. Any thread, as the others below.
  absl::Status status() const;
  int64_t messages() const;     // that have come
  v1::RankAlive alive() const;  // the worker's last report

 private:
  const std::function<bool(const v1::JoinResponse&)> send_;
  absl::Mutex send_mutex_;  // held for a `send`; taken before mutex_
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
