// The header that most tests of the wire send.
#ifndef HEADWATER_TESTS_E2E_CPP_SUPPORT_LOSS_HEADER_H_
#define HEADWATER_TESTS_E2E_CPP_SUPPORT_LOSS_HEADER_H_

#include <cstdint>
#include <vector>

#include "headwater/client/client.h"
#include "headwater/v1/loss_service.pb.h"

namespace headwater::e2e {

// FORWARD_BACKWARD cross entropy of fp32 rows.
inline v1::MicroBatchHeader CrossEntropyHeader(const client::Head& head, int64_t step, int64_t micro_batch,
                                               const std::vector<int32_t>& targets) {
  v1::MicroBatchHeader header;
  header.set_micro_batch(micro_batch);
  header.set_compute_mode(v1::COMPUTE_MODE_FORWARD_BACKWARD);
  header.set_row_count(static_cast<int64_t>(targets.size()));
  header.set_hidden_size(head.spec().hidden_size);
  header.set_data_type(v1::DATA_TYPE_FLOAT32);
  v1::LossTerm* const term = header.add_terms();
  term->mutable_head()->set_head(head.name());
  term->mutable_head()->set_head_epoch(head.epoch());
  term->mutable_head()->set_step(step);
  term->mutable_cross_entropy();
  term->mutable_targets()->set_data_type(v1::DATA_TYPE_INT32);
  term->mutable_targets()->add_shape(static_cast<int64_t>(targets.size()));
  term->mutable_targets()->set_data(targets.data(), targets.size() * sizeof(int32_t));
  return header;
}

}  // namespace headwater::e2e

#endif  // HEADWATER_TESTS_E2E_CPP_SUPPORT_LOSS_HEADER_H_
