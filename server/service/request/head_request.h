// HeadService's and SessionService's requests as plain structs, and their answers from plain structs; see loss_request.h for the
// rules.
#ifndef HEADWATER_SERVER_SERVICE_REQUEST_HEAD_REQUEST_H_
#define HEADWATER_SERVER_SERVICE_REQUEST_HEAD_REQUEST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/timestamp.pb.h"
#include "headwater/kernels/engine.h"
#include "headwater/kernels/types.h"
#include "headwater/v1/head_service.pb.h"
#include "headwater/v1/session_service.pb.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/heads/head.h"
#include "server/heads/head_registry.h"
#include "server/service/limits.h"
#include "server/service/request/loss_request.h"

namespace headwater::service {

struct CreateRequest {
  heads::HeadName name;
  HeadSpec spec;  // validated, defaults filled in
  heads::IfExists if_exists = heads::IfExists::kFail;
};

struct ListRequest {
  std::string tenant;
  int64_t page_size = 0;
};

// At most so many TakeHeadRequest::recovers_epochs stay with the head. Ranks of one run that see as many restarts of the server in
// turn know each other by the newest.
inline constexpr int kMaxRecoversEpochs = 16;

struct TakeRequest : HeadAtEpoch {
  std::vector<heads::Epoch> recovers_epochs;  // at most kMaxRecoversEpochs
};

struct UploadRequest {
  heads::HeadName name;
  heads::Epoch epoch{};
  std::string upload_id;
  HeadTensor tensor = HeadTensor::kWeight;
  DataType data_type = DataType::kFloat32;
  int64_t total_bytes = 0;
  std::string checksum;  // 16 bytes, or empty
  std::optional<int64_t> closes_step;
};

struct DownloadWeightsRequest : HeadAtEpoch {
  HeadTensor tensor = HeadTensor::kWeight;
  std::optional<DataType> data_type = std::nullopt;  // absent: the storage type
  int64_t offset_bytes = 0;
  std::optional<int64_t> expected_weight_version = std::nullopt;
};

struct DownloadGradientRequest : HeadAtStep {
  HeadTensor tensor = HeadTensor::kWeight;  // whose gradient
  double factor = 1;
  int64_t offset_bytes = 0;
};

struct SealRequest : HeadAtStep {
  heads::ExpectedMicroBatches expected;
};

struct ApplyRequest : HeadAtStep {
  std::optional<heads::ExpectedMicroBatches> expected;
  heads::ApplyArguments arguments;
};

struct ListCheckpointsRequest {
  heads::HeadName name;
  int64_t page_size = 0;
};

struct GradientNormRequest : HeadAtStep {
  double factor = 1;
};

// A trainer's own part of a step's gradient, without the rows.
struct GradientRequest : HeadAtStep {
  int64_t micro_batch = 0;
  int64_t attempt = 0;
  int64_t row_start = 0;
  int64_t row_count = 0;
  double factor = 1;
  std::optional<heads::SessionId> session = std::nullopt;
};

// A region; token or name of its memory are the message's.
struct RegisterRequest {
  heads::SessionId session;
  std::optional<DeviceHandle> device;  // of memory of a device
  std::optional<DeviceHandle> event;   // only with `device`
  int64_t size_bytes = 0;              // >= 1
  int64_t offset_bytes = 0;            // >= 0; 0 with `device`; the sum does not wrap
};

// The fields of requests that name a head, or one of its checkpoints, and nothing else.
absl::StatusOr<HeadAtEpoch> DecodeHeadAtEpoch(const std::string& name, const std::string& epoch, bool epoch_required = false);
absl::StatusOr<HeadAtEpoch> DecodeCheckpoint(const std::string& name, const std::string& epoch, bool epoch_required,
                                             const std::string& checkpoint);

absl::StatusOr<CreateRequest> DecodeCreate(const v1::CreateHeadRequest& request, const Limits& limits);
absl::StatusOr<ListRequest> DecodeList(const v1::ListHeadsRequest& request);
absl::StatusOr<TakeRequest> DecodeTake(const v1::TakeHeadRequest& request);
absl::StatusOr<UploadRequest> DecodeUploadHeader(const v1::UploadWeightsHeader& header);
// The head; path and tensors of the request are checked too.
absl::StatusOr<HeadAtEpoch> DecodeLoad(const v1::LoadWeightsRequest& request);
absl::StatusOr<DownloadWeightsRequest> DecodeDownloadWeights(const v1::DownloadWeightsRequest& request);
absl::StatusOr<DownloadGradientRequest> DecodeDownloadGradient(const v1::DownloadGradientRequest& request);
absl::StatusOr<HeadAtEpoch> DecodeGetStep(const v1::GetStepRequest& request);
absl::StatusOr<SealRequest> DecodeSeal(const v1::SealStepRequest& request, const Limits& limits);
absl::StatusOr<ApplyRequest> DecodeApply(const v1::ApplyOptimizerStepRequest& request, const Limits& limits);
absl::StatusOr<GradientNormRequest> DecodeGradientNorm(const v1::GetGradientNormRequest& request);
absl::StatusOr<ListCheckpointsRequest> DecodeListCheckpoints(const v1::ListCheckpointsRequest& request);

absl::StatusOr<GradientRequest> DecodeAddGradientHeader(const v1::AddGradientHeader& header);
// The lease, > 0; the client's name is checked too.
absl::StatusOr<absl::Duration> DecodeOpenSession(const v1::OpenSessionRequest& request, const Limits& limits);

absl::StatusOr<RegisterRequest> DecodeRegisterSharedMemory(const v1::RegisterSharedMemoryRequest& request);
// The session; the region's id is not empty.
absl::StatusOr<heads::SessionId> DecodeUnregisterSharedMemory(const v1::UnregisterSharedMemoryRequest& request);

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

#endif  // HEADWATER_SERVER_SERVICE_REQUEST_HEAD_REQUEST_H_
