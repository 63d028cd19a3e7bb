// Plain structs as messages: the counterpart of loss_request.h and head_request.h.
#ifndef HEADWATER_SERVER_SERVICE_REQUEST_PROTO_ENCODING_H_
#define HEADWATER_SERVER_SERVICE_REQUEST_PROTO_ENCODING_H_

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/timestamp.pb.h"
#include "headwater/kernels/engine.h"
#include "headwater/v1/head_service.pb.h"
#include "headwater/v1/loss.pb.h"
#include "headwater/v1/session_service.pb.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/head.h"
#include "server/service/limits.h"

namespace headwater::service {

void EncodeDuration(absl::Duration duration, google::protobuf::Duration* out);
void EncodeTime(absl::Time time, google::protobuf::Timestamp* out);
// `available_bytes`: the bytes left in the memory budget beside this plan.
void EncodePlan(const MemoryPlan& plan, int64_t available_bytes, v1::MemoryPlan* out);
void EncodeShards(const std::vector<VocabShard>& shards, v1::Head* out);
void EncodeHead(const heads::HeadInfo& info, int64_t available_bytes, v1::Head* out);
std::vector<v1::Checkpoint> EncodeCheckpoints(const checkpoint::CheckpointStore::Catalogue& catalogue);
void EncodeTotals(const heads::StepTotals& totals, v1::StepTotals* out);
void EncodeStep(const heads::StepRecord& record, v1::Step* out);
void EncodeLimits(const Limits& limits, v1::Limits* out);

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_REQUEST_PROTO_ENCODING_H_
