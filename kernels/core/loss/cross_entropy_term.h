// A term's cross entropy as row_loss.h computes it, out of the caller's options.
#ifndef HEADWATER_KERNELS_CORE_LOSS_CROSS_ENTROPY_TERM_H_
#define HEADWATER_KERNELS_CORE_LOSS_CROSS_ENTROPY_TERM_H_

#include <cstdint>

#include "headwater/kernels/types.h"
#include "kernels/core/loss/row_loss.h"

namespace headwater {

// The class weights stay the caller's host memory.
CrossEntropyTerm MakeCrossEntropyTerm(const CrossEntropySpec& spec, int64_t valid_vocab_size);

}  // namespace headwater

#endif  // HEADWATER_KERNELS_CORE_LOSS_CROSS_ENTROPY_TERM_H_
