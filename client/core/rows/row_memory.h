// Memory for rows that the library hands out.
#ifndef HEADWATER_CLIENT_CORE_ROWS_ROW_MEMORY_H_
#define HEADWATER_CLIENT_CORE_ROWS_ROW_MEMORY_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "client/core/core.h"

namespace headwater::client::internal {

struct RowMemory {
  std::shared_ptr<void> owner;  // keeps the memory, and the core
  void* data = nullptr;         // aligned to 4096 bytes
  bool shared = false;          // in a region that a server of the same host can map
};

// Shared if the system and the options allow it, ordinary otherwise. RESOURCE_EXHAUSTED.
absl::StatusOr<RowMemory> AllocateRowMemory(const std::shared_ptr<Core>& core, int64_t bytes);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_CORE_ROWS_ROW_MEMORY_H_
