// A loss term and its sums as messages and back: for clients' calls, for ranks and for answers. Nothing is checked.
#ifndef HEADWATER_V1_TERM_CODEC_H_
#define HEADWATER_V1_TERM_CODEC_H_

#include <cstdint>

#include "headwater/kernels/engine.h"
#include "headwater/v1/loss.pb.h"
#include "proto/headwater/v1/spec_codec.h"

namespace headwater {

HEADWATER_FIELDS(v1::LossTerm, LossTerm, HEADWATER_TERM_OPTIONS)
HEADWATER_FIELDS(v1::LossSums, LossSums, loss_sum, soft_loss_sum, hard_loss_sum, z_loss_sum, token_weight_sum, target_weight_sum,
                 valid_token_count, teacher_mean_square_error)
HEADWATER_FIELDS(v1::GradientDither, GradientDither, entry_count, squared_error, squared_norm)

// All of a term but its heads, its teacher's rows, its outputs and the seed of its draws. Tensors stay in the message, which must
// outlive the term; data of a tensor that is there is not null, even if it is empty.
LossTerm ReadTerm(const v1::LossTerm& message);
void WriteTerm(const LossTerm& term, v1::LossTerm* out);

// Bytes of the tensors that ReadTerm() points to.
int64_t TensorBytes(const LossTerm& term);

}  // namespace headwater

#endif  // HEADWATER_V1_TERM_CODEC_H_
