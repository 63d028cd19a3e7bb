// Micro-batches whose rows are named, chunked, or both, by the plain stubs: what the client core does with a Placement.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_PLACED_CALL_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_PLACED_CALL_H_

#include <chrono>
#include <cstdint>
#include <vector>

#include "client/core/rows/memory/memory_paths.h"
#include "headwater/client/client.h"
#include "tests/integration/support/open_stream.h"

namespace headwater::e2e {

inline client::internal::Deadline SoonEnough() { return std::chrono::system_clock::now() + std::chrono::seconds(30); }

// FORWARD_BACKWARD cross entropy of fp32 rows: micro-batch 0 of step 0.
inline v1::MicroBatchHeader CrossEntropyHeader(const client::Head& head, const std::vector<int32_t>& targets) {
  v1::HeadStep step;
  step.set_head(head.name());
  step.set_head_epoch(head.epoch());
  step.set_step(0);
  return headwater::testing::CrossEntropyHeader(step, head.spec().hidden_size, 0, targets);
}

inline void SetPlacement(const client::internal::Placement& placement, v1::MicroBatchHeader* header) {
  header->set_session_id(placement.session_id());
  *header->mutable_hidden_rows() = placement.reads()[0].shared;
  if (placement.write().has_value()) *header->mutable_grad_hidden_rows() = placement.write()->shared;
}

// Memory of so many bytes as rows.
inline client::RowsView FloatsAt(const void* data, int64_t bytes, client::Memory memory = client::Memory::kHost) {
  return {data, client::DataType::kFloat32, bytes / 4, 1, memory};
}

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_PLACED_CALL_H_
