// What copies of a Head share.
#ifndef HEADWATER_CLIENT_SRC_HEAD_HANDLE_H_
#define HEADWATER_CLIENT_SRC_HEAD_HANDLE_H_

#include <memory>
#include <string>
#include <utility>

#include "client/cpp/src/connection.h"
#include "client/cpp/src/head_state.h"

namespace headwater::client::internal {

// Thread-safe.
struct HeadHandle {
  HeadHandle(std::shared_ptr<Connection> connection_of_head, std::shared_ptr<HeadState> state_of_head, bool was_created)
      : connection(std::move(connection_of_head)), state(std::move(state_of_head)), created(was_created) {}

  // Takes over the epoch of a call that this handle made.
  HeadInfo Adopt(const v1::Head& head, Deadline deadline) {
    connection->replay_log().Forget(*state);
    // If it cannot be told, no lost step of this epoch is recovered.
    state->Adopt(head, connection->Incarnation(deadline).value_or(""));
    return FromProto(head);
  }

  HeadUses AtStep(std::optional<int64_t> step) const { return {{.state = state, .step = step}}; }

  const std::shared_ptr<Connection> connection;
  const std::shared_ptr<HeadState> state;
  const bool created;
};

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_HEAD_HANDLE_H_
