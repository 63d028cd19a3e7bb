// Between the wire's messages and the client's own types.
#ifndef HEADWATER_CLIENT_SRC_CONVERT_H_
#define HEADWATER_CLIENT_SRC_CONVERT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "headwater/client/types.h"
#include "headwater/v1/head_service.pb.h"
#include "headwater/v1/loss_service.pb.h"
#include "headwater/v1/session_service.pb.h"

namespace headwater::client::internal {

// `student` -> `tenants/{tenant}/heads/student`; a name with a slash stays as it is.
std::string FullHeadName(const std::string& tenant, const std::string& name);

v1::HeadSpec ToProto(const HeadSpec& spec);
v1::ExpectedMicroBatches ToProto(const ExpectedMicroBatches& expected);
v1::CrossEntropyLoss ToProto(const CrossEntropyOptions& options);
v1::JensenShannonLoss ToProto(const JsdOptions& options);
v1::Tensor ToProto(absl::Span<const float> values);
v1::Tensor ToProto(absl::Span<const int32_t> values);
inline v1::DataType ToProto(DataType type) { return static_cast<v1::DataType>(type); }

HeadInfo FromProto(const v1::Head& head);
CheckpointInfo FromProto(const v1::Checkpoint& checkpoint);
HeadSpec FromProto(const v1::HeadSpec& spec);
StepTotals FromProto(const v1::StepTotals& totals);
StepInfo FromProto(const v1::Step& step);
ServerInfo FromProto(const v1::ServerInfo& info);
// Everything but grad_hidden, attempt and contribution. INTERNAL if it has not the terms of `header`, with an entry for each row in
// their per-token outputs.
absl::StatusOr<MultiResult> FromProto(const v1::MicroBatchSummary& summary, const v1::MicroBatchHeader& header);

}  // namespace headwater::client::internal

#endif  // HEADWATER_CLIENT_SRC_CONVERT_H_
