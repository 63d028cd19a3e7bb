#include "client/cpp/src/row_memory.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"

namespace headwater::client::internal {
namespace {

constexpr size_t kAlignment = 4096;

}  // namespace

absl::StatusOr<RowMemory> AllocateRowMemory(const std::shared_ptr<Connection>& connection, int64_t bytes) {
  if (connection->options().transport != Transport::kGrpc && bytes > 0) {
    absl::StatusOr<SharedRowsBuffer> buffer = connection->row_transport().memory().AllocateRows(bytes);
    if (buffer.ok()) {
      struct Owner {
        std::shared_ptr<Connection> connection;  // goes last
        SharedRowsBuffer buffer;
      };
      auto owner = std::make_shared<Owner>(Owner{connection, *std::move(buffer)});
      void* const data = owner->buffer.data();
      return RowMemory{std::move(owner), data, true};
    }
    // Other memory is as scarce.
    if (absl::IsResourceExhausted(buffer.status())) return buffer.status();
  }
  const size_t size = (static_cast<size_t>(bytes) + kAlignment) / kAlignment * kAlignment;
  void* const data = std::aligned_alloc(kAlignment, size);
  if (data == nullptr) {
    return MakeLocalError(v1::ERROR_REASON_MEMORY_BUDGET_EXCEEDED, absl::StatusCode::kResourceExhausted,
                          absl::StrCat("no memory for ", bytes, " bytes of rows on this side"),
                          {{"requestedBytes", absl::StrCat(bytes)}});
  }
  return RowMemory{std::shared_ptr<void>(data, [](void* memory) { std::free(memory); }), data, false};
}

}  // namespace headwater::client::internal
