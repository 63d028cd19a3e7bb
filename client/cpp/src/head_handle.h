// What copies of a Head share.
#ifndef HEADWATER_CLIENT_SRC_HEAD_HANDLE_H_
#define HEADWATER_CLIENT_SRC_HEAD_HANDLE_H_

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "client/cpp/src/connection.h"
#include "client/cpp/src/convert.h"
#include "headwater/client/types.h"
#include "headwater/v1/loss.pb.h"

namespace headwater::client::internal {

// Thread-safe.
struct HeadHandle {
  HeadHandle(std::shared_ptr<Connection> connection_of_head, const v1::Head& head)
      : connection(std::move(connection_of_head)), name(head.name()), spec(FromProto(head.spec())), epoch_(head.epoch()) {}

  std::string epoch() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return epoch_;
  }

  // Takes over the epoch of a call that this handle made.
  HeadInfo Adopt(const v1::Head& head) {
    std::lock_guard<std::mutex> lock(mutex_);
    epoch_ = head.epoch();
    return FromProto(head);
  }

  v1::HeadStep AtEpoch() const {
    v1::HeadStep head;
    head.set_head(name);
    head.set_head_epoch(epoch());
    return head;
  }

  v1::HeadStep AtStep(int64_t step) const {
    v1::HeadStep head = AtEpoch();
    head.set_step(step);
    return head;
  }

  const std::shared_ptr<Connection> connection;
  const std::string name;
  const HeadSpec spec;

 private:
  mutable std::mutex mutex_;
  std::string epoch_;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_HEAD_HANDLE_H_
