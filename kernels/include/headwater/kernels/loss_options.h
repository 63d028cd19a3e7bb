// The checks of a loss term's options, for the server, which names the fields of its request, and for the engines.
#ifndef HEADWATER_KERNELS_LOSS_OPTIONS_H_
#define HEADWATER_KERNELS_LOSS_OPTIONS_H_

#include <string>

#include "absl/status/status.h"
#include "headwater/kernels/engine.h"

namespace headwater {

// Checks options by themselves and with each other; heads, rows and the elements of tensors are not looked at. `field` is the
// term's path, behind which options have the names of headwater.v1.LossTerm. kInvalidField, kInvalidCombination.
absl::Status CheckTermOptions(const std::string& field, const LossTerm& term, bool backward);

// kInvalidCombination for an option that the term's head rules out.
absl::Status CheckTermOptionsWithHead(const std::string& field, const LossTerm& term, const HeadSpec& head);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_LOSS_OPTIONS_H_
