// LossService's requests as plain structs: decoded, every field validated as far as that needs no server state.
//
// Errors carry `field` (the path in the request message), `expected` and `actual`. No function here changes anything.
#ifndef HEADWATER_SERVER_SERVICE_REQUEST_LOSS_REQUEST_H_
#define HEADWATER_SERVER_SERVICE_REQUEST_LOSS_REQUEST_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/types.h"
#include "headwater/v1/loss.pb.h"
#include "headwater/v1/loss_service.pb.h"
#include "server/heads/head.h"
#include "server/heads/head_name.h"
#include "server/service/limits.h"
#include "server/service/loss/transfer_registry.h"
#include "server/transport/teacher_join.h"

namespace headwater::service {

// Bits of MicroBatchRequest::outputs, by value of headwater.v1.TokenOutput.
constexpr uint32_t TokenOutputBit(v1::TokenOutput output) { return uint32_t{1} << output; }

// A head, and the epoch that it must have, if one came.
struct HeadAtEpoch {
  heads::HeadName name;
  std::optional<heads::Epoch> epoch;
};

// A head at a step, if one came.
struct HeadStepRequest : HeadAtEpoch {
  std::optional<int64_t> step = std::nullopt;
};

// Teacher rows that another process sends.
struct JoinedTeacherRequest {
  std::string join_key;
  int64_t total_row_count = 0;
  std::vector<int32_t> row_indices;  // of the term's rows; empty: row i of the term is row i of the set
};

struct TeacherRequest : HeadAtEpoch {
  DataType data_type = DataType::kFloat32;
  std::optional<int64_t> expected_weight_version;
  // Where the rows come from; at most one of them, else they come as chunks. `rows` lie in MicroBatchRequest::message.
  const v1::SharedRows* rows = nullptr;
  std::optional<JoinedTeacherRequest> joined;
};

struct LossTermRequest {
  HeadStepRequest head;
  LossTerm
      term;  // with every default filled in; without heads, a teacher's rows and outputs. Tensors lie in MicroBatchRequest::message
  std::optional<TeacherRequest> teacher;  // there if and only if the loss is JsdSpec
  std::optional<int64_t> expected_weight_version;
};

// A micro-batch's header with every default filled in.
struct MicroBatchRequest {
  std::shared_ptr<const v1::MicroBatchHeader> message;
  std::optional<heads::SessionId> session;
  std::optional<int64_t> micro_batch;
  int64_t attempt = 0;
  bool backward = false;
  int64_t row_count = 0;
  int64_t hidden_size = 0;
  DataType data_type = DataType::kFloat32;
  std::vector<LossTermRequest> terms;  // at least one; those of one head name the same epoch and step
  bool explicit_commit = false;
  bool first_wins = false;
  bool refuse_non_finite = false;
  uint32_t outputs = 0;  // TokenOutputBit()s
  bool return_grad_hidden = false;
  DataType grad_hidden_data_type = DataType::kFloat32;
  double grad_hidden_scale = 1;
  bool allow_held = false;
  bool late_token_factors = false;     // only with explicit_commit
  std::optional<TransferId> transfer;  // there if and only if stripe_count > 1
  int32_t stripe_count = 1;
  // Rows in regions of the session, of `message`; null: chunks bring or take them.
  const v1::SharedRows* hidden_rows = nullptr;
  const v1::SharedRows* grad_hidden_rows = nullptr;  // only with return_grad_hidden
};

// A stripe of a transfer.
struct TransferRowsRequest {
  TransferId transfer{};
  int32_t stripe_index = 0;  // >= 1
};

// A step of a head.
struct HeadAtStep {
  heads::HeadName name;
  heads::StepKey key;
};

// The micro-batch that a commit or a discard decides.
struct DecisionRequest {
  std::vector<HeadAtStep> heads;  // at least one; distinct
  int64_t micro_batch = 0;
  int64_t attempt = 0;
  std::optional<heads::SessionId> session;
  heads::CommitArguments arguments;  // commit only
};

absl::StatusOr<MicroBatchRequest> DecodeMicroBatchHeader(v1::MicroBatchHeader header, const Limits& limits);
absl::StatusOr<DecisionRequest> DecodeCommit(const v1::CommitMicroBatchRequest& request, const Limits& limits);
absl::StatusOr<DecisionRequest> DecodeDiscard(const v1::DiscardMicroBatchRequest& request, const Limits& limits);

absl::StatusOr<TransferRowsRequest> DecodeTransferRowsHeader(const v1::TransferRowsHeader& header);

// A teacher's stream of rows.
struct StreamTeacherRequest {
  std::optional<heads::SessionId> session;
  transport::JoinedSet set;
  std::vector<int32_t> row_indices;  // of the stream's rows, in [0, set.total_row_count); empty: all rows in order
};
absl::StatusOr<StreamTeacherRequest> DecodeStreamTeacherHeader(const v1::StreamTeacherHeader& header, const Limits& limits);

// ---- pieces that other requests share -----------------------------------------------------------------------------------

// "header.terms[index]".
std::string TermField(size_t index);
// kMissingField if empty, kInvalidName.
absl::StatusOr<heads::HeadName> DecodeHeadName(const std::string& name, const std::string& field);
// 16 bytes; kMissingField if empty.
absl::StatusOr<heads::Epoch> DecodeEpoch(const std::string& bytes, const std::string& field);
// The head is required, the epoch is not; the two fields' paths.
absl::StatusOr<HeadAtEpoch> DecodeHead(const std::string& name, const std::string& name_field, const std::string& epoch,
                                       const std::string& epoch_field);
// FLOAT32, BFLOAT16 or FLOAT16; kMissingField if unset, kDataTypeMismatch for other types.
absl::StatusOr<DataType> DecodeFloatType(v1::DataType type, const std::string& field);
// The head is required, epoch and step are not.
absl::StatusOr<HeadStepRequest> DecodeHeadStep(bool present, const v1::HeadStep& head_step, const std::string& field);
// Head, epoch and step, all required.
absl::StatusOr<HeadAtStep> DecodeHeadAtStep(bool present, const v1::HeadStep& head_step, const std::string& field);
// A micro-batch's id: kMissingField, kInvalidField below 0.
absl::StatusOr<int64_t> DecodeMicroBatchId(bool present, int64_t micro_batch, const std::string& field);
// 32 bytes; kMissingField if empty.
absl::StatusOr<heads::SessionId> DecodeSession(const std::string& bytes, const std::string& field);
// Empty: absent.
absl::StatusOr<std::optional<heads::SessionId>> DecodeOptionalSession(const std::string& bytes, const std::string& field);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_REQUEST_LOSS_REQUEST_H_
