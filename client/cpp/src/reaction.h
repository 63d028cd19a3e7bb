// React(): what gRPC calls back, or a thread of the library runs, where there may be no memory for it.
#ifndef HEADWATER_CLIENT_SRC_REACTION_H_
#define HEADWATER_CLIENT_SRC_REACTION_H_

#include <exception>

#include "absl/status/status.h"

namespace headwater::client::internal {

// RESOURCE_EXHAUSTED / MEMORY_BUDGET_EXCEEDED: this side is short of memory, or of threads; without reason and sentence if there is
// no memory even for them.
absl::Status MakeShortageError(const std::exception& error) noexcept;

// Runs `reaction`, and `end(status)`, which must not throw, if it throws: std::bad_alloc, or std::system_error where there is no
// thread. gRPC forgets what a reaction throws, and whoever waits for what it should have done would wait for ever; on a thread of
// the library it would end the process.
template <typename Reaction, typename End>
void React(Reaction&& reaction, End&& end) noexcept {
  try {
    reaction();
  } catch (const std::exception& error) {
    end(MakeShortageError(error));
  }
}

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_REACTION_H_
