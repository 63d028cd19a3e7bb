#include "client/cpp/src/reaction.h"

#include "absl/strings/str_cat.h"
#include "client/cpp/src/error.h"
#include "headwater/v1/error.pb.h"

namespace headwater::client::internal {

absl::Status MakeShortageError(const std::exception& error) noexcept {
  try {
    return MakeLocalError(v1::ERROR_REASON_MEMORY_BUDGET_EXCEEDED, absl::StatusCode::kResourceExhausted,
                          absl::StrCat("no memory, or no thread, on this side: ", error.what()));
  } catch (const std::exception&) {
    return absl::Status(absl::StatusCode::kResourceExhausted, "");
  }
}

}  // namespace headwater::client::internal
