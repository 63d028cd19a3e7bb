// The canonical bytes of a micro-batch's header: what the digest covers beside the rows (headwater/kernels/digest.h).
//
// Two calls that mean the same give the same bytes, whatever they left to defaults. Defaults are filled in, `outputs` is a set, and
// a row range is always explicit. Fields that do not change the meaning are left out: session, attempt, on_mismatch, and how the
// bytes travel, or may be held. Layout, all integers 64-bit little-endian:
//
//   "headwater.header.1"
//   micro_batch?, backward, row_count, hidden_size, data_type, explicit_commit, refuse_non_finite, outputs, return_grad_hidden,
//   grad_hidden_data_type, grad_hidden_scale, number of terms, then for each term:
//     head name, epoch?, step?, row_start, row_count, targets?, ignore_index, token_weights?, loss_scale, expected_weight_version?,
//     0 and the cross entropy, or 1 and beta, student_temperature, teacher_temperature, hard_loss_weight, truncate_to_common, the
//     cross entropy, teacher head name, epoch?, data_type, expected_weight_version?, or 2 and a top-k teacher's k, ids, log_probs
//     and student_temperature
//   cross entropy: label_smoothing, z_loss, class_weights?
//   and behind the term, each only where it is used, so that a call of 0.1 keeps its bytes, the options that came later by name: a
//   number with its value, a boolean without, a tensor as x?. Those of the loss come first, then entropy_factors and lse_factors,
//   then those of the term; each group in the order of its list in headwater/kernels/types.h or engine.h. No head's name begins
//   like one of these.
//
// A trainer's own gradient (AddGradient) has a header of its own; its rows are stream 0:
//
//   "headwater.gradient.1"
//   head name, epoch, step, micro_batch, row_start, row_count, factor
//
// `x?` is 0, or 1 and x. Numbers and booleans are integers; real numbers are the bits of a binary64; names, epochs and tensors are
// their length in bytes and the bytes. `outputs` has bit 1 << value for each value of headwater.v1.TokenOutput.
#ifndef HEADWATER_SERVER_SERVICE_REQUEST_CANONICAL_HEADER_H_
#define HEADWATER_SERVER_SERVICE_REQUEST_CANONICAL_HEADER_H_

#include <string>
#include <vector>

#include "server/service/request/head_request.h"
#include "server/service/request/loss_request.h"

namespace headwater::service {

std::string CanonicalHeader(const MicroBatchRequest& request);
// Names of the numbers and booleans among a loss's options that 0.1 did not have: each is one of ServerInfo.features.
std::vector<std::string> LaterOptions();
std::string CanonicalHeader(const GradientRequest& request);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_REQUEST_CANONICAL_HEADER_H_
