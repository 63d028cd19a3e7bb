#include "client/core/rows/row_memory.h"

#include <cstdlib>
#include <utility>

#include "client/core/rows/bytes.h"

namespace headwater::client::internal {
namespace {

constexpr size_t kAlignment = 4096;

}  // namespace

absl::StatusOr<RowMemory> AllocateRowMemory(const std::shared_ptr<Core>& core, int64_t bytes) {
  if (core->options().transport != Transport::kGrpc && bytes > 0) {
    absl::StatusOr<SharedRowsBuffer> buffer = core->row_transport().memory().AllocateRows(bytes);
    if (buffer.ok()) {
      struct Owner {
        std::shared_ptr<Core> core;  // goes last
        SharedRowsBuffer buffer;
      };
      auto owner = std::make_shared<Owner>(Owner{core, *std::move(buffer)});
      void* const data = owner->buffer.data();
      return RowMemory{std::move(owner), data, true};
    }
    // Other memory is as scarce.
    if (absl::IsResourceExhausted(buffer.status())) return buffer.status();
  }
  const size_t size = (static_cast<size_t>(bytes) + kAlignment) / kAlignment * kAlignment;
  void* const data = std::aligned_alloc(kAlignment, size);
  if (data == nullptr) return NoMemoryFor(bytes, "rows");
  return RowMemory{std::shared_ptr<void>(data, [](void* memory) { std::free(memory); }), data, false};
}

}  // namespace headwater::client::internal
