// The check of a top-k teacher's rows, for the server, which names the fields of its request, and for the engines.
#ifndef HEADWATER_KERNELS_TOP_K_H_
#define HEADWATER_KERNELS_TOP_K_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "headwater/kernels/types.h"

namespace headwater {

// Checks ids and log-probabilities of all rows, whose tensors have k entries a row. `suffix` stands behind `ids` and `log_probs` in
// the fields that errors name. kTargetOutOfVocab: an id outside [-1, valid_vocab_size). kInvalidField: an id twice in a row; a
// log-probability that is not finite or above 1e-3; probabilities that add up to more than 1 + 1e-3.
absl::Status CheckTopKRows(const std::string& field, const std::string& suffix, const TopKSpec& spec, int64_t valid_vocab_size);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_TOP_K_H_
